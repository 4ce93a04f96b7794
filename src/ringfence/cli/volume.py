"""``ringfence volume``: named storage at a service."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from ringfence.cli import remote
from ringfence.cli.output import print_json, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.model.quantities import format_size

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService

_CHUNK = 256 * 1024


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description = (
        "Volumes: named storage that outlives sandboxes. One sandbox may write, or many may read."
    )
    parser.epilog = (
        "examples:\n  ringfence volume create data --quota 2GiB    # verbs have --help and --json\n"
        "  ringfence job run --volume data:/data:rw -- sh fill.sh\n  ringfence volume export data -o data.tar"
    )
    add_verbs(parser, "volume", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    remote.need("`ringfence volume`")
    code: int = options.work(options)
    return code


def _path(name: str) -> str:
    return "/v1/volumes/" + quote(name, safe="")


def _call(method: str, path: str, **more: Any) -> Any:
    async def do(service: AsyncService) -> Any:
        return await service.call(method, path, **more)

    return remote.with_service(do)


def _create_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="how sandboxes and jobs name it")
    parser.add_argument("--quota", metavar="SIZE", help="what it may hold (default: 1GiB)")
    brief = "remove it when the last sandbox that had it has ended"
    parser.add_argument("--brief", action="store_true", help=brief)
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="label")
    add_json(parser)


def _create(options: argparse.Namespace) -> int:
    import uuid

    body: dict[str, Any] = {"name": options.name, "keep": not options.brief}
    if options.quota is not None:
        body["quota"] = options.quota
    if options.label:
        body["labels"] = remote.pairs(options.label, "--label")
    made = _call("POST", "/v1/volumes", json=body, key=str(uuid.uuid4()))
    return remote.say(options, made, made["id"])


def _ls(options: argparse.Namespace) -> int:
    async def do(service: AsyncService) -> Any:
        return [each async for each in (await service.transport()).pages("/v1/volumes")]

    found = remote.with_service(do)
    if options.json:
        print_json({"volumes": found})
    elif not found:
        print("there are no volumes")
    else:
        table(
            ("volume", "id", "state", "quota"),
            [(safe(each["name"]), each["id"], each["state"], format_size(each["quota"])) for each in found],
        )
    return 0


def _one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name or id")
    add_json(parser)


def _show(options: argparse.Namespace) -> int:
    told = _call("GET", _path(options.name))
    used = "written by a sandbox" if told["writer"] else f"read by {told['readers']} sandboxes"
    size = format_size(told["size"]) if "size" in told else "?"
    text = (
        f"{safe(told['name'])}  {told['id']}  {told['state']}  {size} of {format_size(told['quota'])}  {used}"
    )
    return remote.say(options, told, text)


def _rm(options: argparse.Namespace) -> int:
    _call("DELETE", _path(options.name))
    return remote.say(options, {"removed": options.name}, f"removed {safe(options.name)}")


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name or id")
    parser.add_argument(
        "--out", "-o", default="-", metavar="FILE", help="where to (default: standard output)"
    )
    parser.set_defaults(json=False)


def _export(options: argparse.Namespace) -> int:
    async def do(service: AsyncService, file: IO[bytes]) -> None:
        transport = await service.transport()
        async with transport.stream("GET", f"{_path(options.name)}/export") as answer:
            async for piece in answer.aiter_raw():
                file.write(piece)
        file.flush()

    if options.out == "-":
        remote.with_service(lambda service: do(service, sys.stdout.buffer))
        return 0
    with _opened(options.out, "xb") as file:
        try:
            remote.with_service(lambda service: do(service, file))
        except BaseException:
            Path(options.out).unlink(missing_ok=True)
            raise
    return 0


def _import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name or id")
    parser.add_argument("tar", metavar="FILE", nargs="?", default="-", help="a tar (default: standard input)")
    add_json(parser)


def _import(options: argparse.Namespace) -> int:
    async def pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(file.read, _CHUNK):
            yield piece

    async def do(service: AsyncService, file: IO[bytes]) -> None:
        transport = await service.transport()
        await transport.call(
            "PUT", f"{_path(options.name)}/import", content=pieces(file), timeout=3600,
            headers={"content-type": "application/x-tar"},
        )  # fmt: skip

    if options.tar == "-":
        remote.with_service(lambda service: do(service, sys.stdin.buffer))
    else:
        with _opened(options.tar, "rb") as file:
            remote.with_service(lambda service: do(service, file))
    return remote.say(options, {"imported": options.name}, f"unpacked into {safe(options.name)}")


def _opened(name: str, mode: str) -> IO[bytes]:
    from ringfence.model.errors import InvalidRequest

    try:
        return open(name, mode)
    except OSError as error:
        raise InvalidRequest(f"{name}: {error.strerror}") from None


VERBS: dict[str, tuple[Any, ...]] = {
    "create": (
        "make a volume", _create_options, _create,
        ("create data --quota 2GiB", "create scratch --quota 512MiB --brief"),
    ),
    "ls": ("list volumes", add_json, _ls, ("ls",)),
    "show": ("show a volume, its size and who has it", _one, _show, ("show data",)),
    "rm": ("remove a volume and its files", _one, _rm, ("rm data",)),
    "export": ("its files as a tar", _export_options, _export, ("export data -o data.tar",)),
    "import": ("unpack a tar into it", _import_options, _import, ("import data data.tar",)),
}  # fmt: skip
