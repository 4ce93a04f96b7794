"""``ringfence list``: sandboxes that ``run --keep`` left."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ringfence.cli.output import print_json, safe, table
from ringfence.cli.parsing import Parser, add_json


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = (
        "List sandboxes that were kept (`ringfence run --keep`) and whose starter has gone.\n"
        "One that has passed its deadline, or died, is removed by looking."
    )
    parser.epilog = "examples:\n  ringfence list\n  ringfence list --json | jq -r '.sandboxes[].id'"
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print them."""
    import asyncio

    found = asyncio.run(_kept())
    if options.json:
        print_json({"sandboxes": found})
    elif not found:
        print("no sandboxes are kept here")
    else:
        rows = [
            (
                s["id"],
                s["runtime"],
                safe(s["labels"].get("name", "")),
                _clock(s["started_at"]),
                _clock(s["deadline"]),
            )
            for s in found
        ]
        table(("id", "runtime", "name", "started", "deadline"), rows)
    return 0


async def _kept() -> list[dict[str, Any]]:
    from dataclasses import asdict

    from ringfence.node.service import Node

    async with await Node.open() as node:
        return [
            {
                "id": sandbox.id,
                "runtime": sandbox.handle.runtime,
                "labels": sandbox.request.labels,
                "owner": asdict(sandbox.request.owner),
                "started_at": sandbox.started_at,
                "deadline": sandbox.deadline,
                "usage": asdict(await sandbox.usage()),
            }
            for sandbox in node.sandboxes()
            if not sandbox.ended.done()
        ]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
