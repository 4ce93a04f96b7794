"""``ringfence sandbox ls``, also known as ``ringfence list``: sandboxes that ``run --keep`` left."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ringfence.cli.output import print_json, safe, table
from ringfence.cli.parsing import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "List sandboxes that were kept (`ringfence run --keep`).\n"
        "One that has passed its deadline, or died, is removed by looking."
    )
    parser.epilog = (
        "examples:\n  ringfence sandbox ls\n  ringfence sandbox ls --json | jq -r '.sandboxes[].id'"
    )
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
                s["state"],
                safe(s["labels"].get("name", "")),
                clock(s["started_at"]),
                clock(s["deadline"]),
            )
            for s in found
        ]
        table(("id", "runtime", "state", "name", "started", "deadline"), rows)
    return 0


async def _kept() -> list[dict[str, Any]]:
    from ringfence.node import kept
    from ringfence.node.service import Node

    async with await Node.open(adopt=False) as node:
        return [found for name in kept.names(node) if (found := kept.look(node, name)) is not None]


def clock(seconds: float) -> str:
    """Local time, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
