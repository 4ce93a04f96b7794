"""``ringfence top``: what lives at a service, again and again."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.output import coloured, print_json, safe, table
from ringfence.cli.parsing import add_json

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService

_AT_ONCE = 16  # requests for figures of sandboxes
_MOST = 200  # sandboxes whose figures are asked for


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Sandboxes, pools and quota of your project: a live table on a terminal (Ctrl-C ends it), plain\n"
        "text once elsewhere. The figures are measured on the host."
    )
    parser.epilog = (
        "examples:\n  ringfence top\n  ringfence top --interval 5s --label team=blue\n"
        "  ringfence top --once\n  ringfence top --json | jq '.sandboxes | length'"
    )
    parser.add_argument("--interval", default="2s", metavar="TIME", help="look again after this time (2s)")
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="only those with this label"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Show it."""
    import sys

    from ringfence.model.quantities import parse_duration

    remote.need("`ringfence top`")
    interval = max(0.2, parse_duration(options.interval))
    labels = remote.pairs(options.label, "--label")
    if options.json or options.once or not coloured(sys.stdout):
        found = remote.with_service(lambda service: look(service, labels))
        if options.json:
            print_json(found)
        else:
            _plain(found)
        return 0
    remote.with_service(lambda service: _live(service, labels, interval))
    return 0


async def look(service: AsyncService, labels: dict[str, str]) -> dict[str, Any]:
    """Everything that is shown, as JSON."""
    import asyncio

    from ringfence.cli.pool import all_pools
    from ringfence.model.errors import RingfenceError
    from ringfence.sdk.sandbox import AsyncSandbox

    found = [info async for info in AsyncSandbox.list(labels=labels, service=service) if not info.final]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def figures(id: str) -> dict[str, Any]:
        async with gate:
            try:
                return dict((await service.call("GET", f"/v1/sandboxes/{id}/metrics"))["usage"])
            except RingfenceError:
                return {}  # it has just ended

    running = [info.id for info in found if info.state in ("running", "paused")][:_MOST]
    usage = dict(zip(running, await asyncio.gather(*map(figures, running)), strict=True))
    shown = [
        {
            "id": info.id, "name": info.labels.get("name", ""), "state": info.state, "runtime": info.runtime,
            "pool": info.pool, "age": time.time() - info.created_at, "deadline": info.deadline,
            "usage": usage.get(info.id, {}),
        }
        for info in found
    ]  # fmt: skip
    return {
        "at": time.time(),
        "sandboxes": shown,
        "pools": await all_pools(service),
        "quota": await service.quota(),
    }


_HEADERS = ("id", "name", "state", "runtime", "age", "left", "cpu s", "memory", "processes")


def _rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    from ringfence.model.quantities import format_duration, format_size

    rows: list[tuple[object, ...]] = []
    for each in sorted(found["sandboxes"], key=lambda one: -(one["usage"].get("cpu_seconds") or 0)):
        usage, left = each["usage"], (each["deadline"] or 0) - found["at"]
        memory = int(usage.get("memory") or 0)
        unit = 20 if memory >= 1 << 20 else 10  # whole MiB, or KiB where there is not one
        rows.append(
            (
                each["id"], safe(each["name"]), each["state"], each["runtime"],
                format_duration(int(each["age"])),
                format_duration(max(0, int(left))) if each["deadline"] else "",
                f"{usage['cpu_seconds']:.1f}" if usage.get("cpu_seconds") is not None else "",
                format_size(memory >> unit << unit) if memory else "",
                usage.get("processes", "") if usage.get("processes") is not None else "",
            )
        )  # fmt: skip
    return rows


def _summary(found: dict[str, Any]) -> str:
    project, most = found["quota"]["project"], found["quota"]["limits"].get("alive")
    alive = f"{found['quota']['usage'].get('alive', 0)} alive"
    bound = f", of {most:g} at most" if most is not None else ""
    return f"{len(found['sandboxes'])} sandboxes here; project {project}: {alive}{bound}"


def _plain(found: dict[str, Any]) -> None:
    from ringfence.cli import pool

    print(_summary(found) + "\n")
    if found["sandboxes"]:
        table(_HEADERS, _rows(found))
    if found["pools"]:
        table(pool.HEADERS, pool.rows(found["pools"]))


async def _live(service: AsyncService, labels: dict[str, str], interval: float) -> None:
    import asyncio

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from ringfence.model.errors import RingfenceError

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                live.update(_screen(await look(service, labels), live.console.height), refresh=True)
            except RingfenceError as error:  # told, and looked again: services are restarted
                live.update(Group(Text(error.message, style="red"), Text(error.hint)), refresh=True)
            await asyncio.sleep(interval)


def _screen(found: dict[str, Any], height: int) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ringfence.cli import pool

    def drawn(headers: tuple[str, ...], rows: list[tuple[object, ...]]) -> Table:
        shown = Table(box=box.SIMPLE_HEAD, expand=True)
        for header in headers:
            shown.add_column(header)
        for row in rows:
            shown.add_row(*(Text(str(cell)) for cell in row))
        return shown

    rows = _rows(found)[: max(3, height - 8 - len(found["pools"]))]
    parts: list[Any] = [Text(_summary(found), style="bold"), drawn(_HEADERS, rows)]
    if found["pools"]:
        parts.append(drawn(pool.HEADERS, pool.rows(found["pools"])))
    return Group(*parts)
