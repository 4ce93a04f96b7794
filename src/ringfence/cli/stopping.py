"""``ringfence sandbox rm``, also known as ``ringfence stop``: the end of kept sandboxes."""

from __future__ import annotations

import argparse

from ringfence.cli.output import print_json
from ringfence.cli.parsing import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "End kept sandboxes: SIGTERM to everything inside, SIGKILL after --grace, then clean up."
    )
    parser.epilog = (
        "examples:\n  ringfence sandbox rm sb-01h9z3k8w6q4n2v7c5x0\n  ringfence sandbox rm --all --grace 0s"
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="sandboxes, as `ringfence list` shows them")
    parser.add_argument("--all", action="store_true", help="every kept sandbox")
    parser.add_argument("--grace", default="5s", metavar="TIME", help="time they get to end themselves (5s)")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Stop them."""
    import asyncio

    from ringfence.model.errors import InvalidRequest
    from ringfence.model.quantities import parse_duration

    if bool(options.ids) == options.all:
        raise InvalidRequest("name sandboxes, or --all", hint="see `ringfence list`")
    stopped = asyncio.run(_stop(options.ids, parse_duration(options.grace)))
    if options.json:
        print_json({"stopped": stopped})
    else:
        for name in stopped:
            print(f"stopped {name}")
    return 0


async def _stop(ids: list[str], grace: float) -> list[str]:
    import asyncio

    from ringfence.node import kept
    from ringfence.node.service import Node

    async with await Node.open(adopt=not ids) as node:
        # All are looked up before the first is touched: a wrong id stops nothing.
        sandboxes = [await kept.take(node, name) for name in dict.fromkeys(ids)] or node.sandboxes()

        async def end(sandbox: object) -> None:
            await sandbox.stop(grace)  # type: ignore[attr-defined]
            await sandbox.destroy()  # type: ignore[attr-defined]

        await asyncio.gather(*map(end, sandboxes))
        return [sandbox.id for sandbox in sandboxes]
