"""``ringfence snapshot`` with a service: the project's snapshots there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.listing import clock
from ringfence.cli.output import print_json, safe, table
from ringfence.model.quantities import format_size

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService


def ls(options: argparse.Namespace) -> int:
    """List them."""

    async def do(service: AsyncService) -> list[dict[str, Any]]:
        return [dict(each) async for each in (await service.transport()).pages("/v1/snapshots")]

    found = remote.with_service(do)
    if options.json:
        print_json({"snapshots": found})
    elif not found:
        print("the service has no snapshots of yours")
    else:
        rows = [
            (
                each["id"], safe(each.get("name") or ""), each.get("kind"), each.get("runtime"),
                _size(each), clock(each.get("created_at") or 0), safe(each.get("sandbox") or ""),
            )
            for each in found
        ]  # fmt: skip
        table(("id", "name", "kind", "runtime", "size", "made", "of"), rows)
    return 0


def show(options: argparse.Namespace) -> int:
    """Show one."""

    async def do(service: AsyncService) -> dict[str, Any]:
        return dict(await service.call("GET", _path(options.name)))

    found = remote.with_service(do)
    if options.json:
        print_json(found)
        return 0
    for key, value in found.items():
        if value is None:
            continue
        text = clock(value) if key.endswith("_at") else _size(found) if key == "size" else str(value)
        print(f"{key:<16} {safe(text)}")
    return 0


def rm(options: argparse.Namespace) -> int:
    """Remove some; one that is misspelt: none is removed."""

    async def do(service: AsyncService) -> None:
        found = [str((await service.call("GET", _path(name)))["id"]) for name in options.names]
        for id in dict.fromkeys(found):
            await service.call("DELETE", _path(id))

    remote.with_service(do)
    text = "\n".join(f"removed {safe(name)}" for name in options.names)
    return remote.say(options, {"removed": options.names}, text)


def _path(name: str) -> str:
    from ringfence.sdk import wire

    return f"/v1/snapshots/{wire.segment(name, 'snapshot')}"


def _size(value: dict[str, Any]) -> str:
    return "" if value.get("size") is None else format_size(int(value["size"]))
