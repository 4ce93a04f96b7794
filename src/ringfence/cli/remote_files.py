"""``ringfence sandbox cp``, ``ls-files`` and ``port``: files and ports of a sandbox of a service."""

# ruff: noqa: ASYNC240 - names of the user's own files are looked up; nobody else waits for the loop

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.output import note, print_json, safe

if TYPE_CHECKING:
    from ringfence.sdk.sandbox import AsyncSandbox
    from ringfence.sdk.service import AsyncService


def cp(options: argparse.Namespace) -> int:
    """``ringfence sandbox cp``: one side is ``ID:PATH``, the other a file or folder here, or ``-``."""
    from ringfence.model.errors import InvalidRequest

    source, target = _place(options.source), _place(options.target)
    if (source[0] is None) == (target[0] is None):
        raise InvalidRequest(
            "one of the two is in a sandbox: ID:PATH",
            hint="ringfence sandbox cp data.csv ID:/workspace/data.csv; ./a:b for a local name with a colon",
        )

    async def do(service: AsyncService) -> dict[str, Any]:
        sandbox = await remote.find(service, str(source[0] or target[0]))
        if source[0] is None:
            return await _in(sandbox, source[1], target[1])
        return await _out(sandbox, source[1], target[1])

    done = remote.with_service(do)
    return remote.say(options, done, "")


def _place(text: str) -> tuple[str | None, str]:
    """A sandbox and a path inside; or ``None`` and a path here."""
    name, colon, path = text.partition(":")
    if not colon or "/" in name or not name:
        return None, text
    return name, path or "."


async def _in(sandbox: AsyncSandbox, local: str, inside: str) -> dict[str, Any]:
    from ringfence.model.errors import InvalidRequest

    files = sandbox.files
    name = os.path.basename(os.path.normpath(local))
    if local != "-" and not os.path.exists(local):
        raise InvalidRequest(f"{local}: no such file or folder")
    if os.path.isdir(local):
        # As cp does: into a folder that is there, by its name; else it becomes that folder.
        into = inside if not await files.exists(inside) else f"{inside.rstrip('/')}/{name}"
        return {"path": into, "entries": await files.upload_folder(local, into)}
    if local != "-" and (inside.endswith("/") or inside == "." or await _is_folder(sandbox, inside)):
        inside = f"{inside.rstrip('/')}/{name}"
    if local == "-":
        written = await files.write(inside, _input())
    else:
        written = await files.upload(local, inside)
    return {"path": written.path, "bytes": written.size}


async def _out(sandbox: AsyncSandbox, inside: str, local: str) -> dict[str, Any]:
    files = sandbox.files
    if local == "-":
        size = 0
        async for piece in files.stream(inside):
            sys.stdout.buffer.write(piece)
            size += len(piece)
        sys.stdout.buffer.flush()
        return {"path": inside, "bytes": size}
    name = os.path.basename(os.path.normpath(inside))
    if os.path.isdir(local):
        local = os.path.join(local, name)
    if await _is_folder(sandbox, inside):
        return {"path": inside, "local": local, "files": await files.download_folder(inside, local)}
    return {"path": inside, "local": local, "bytes": await files.download(inside, local)}


async def _is_folder(sandbox: AsyncSandbox, path: str) -> bool:
    return await sandbox.files.exists(path) and (await sandbox.files.stat(path)).is_dir


async def _input() -> AsyncIterator[bytes]:
    from ringfence.cli.streams import Source

    source = Source(0)
    try:
        async for data in source:
            yield data
    finally:
        source.close()


def ls_files(options: argparse.Namespace) -> int:
    """``ringfence sandbox ls-files``."""
    import stat

    from ringfence.cli.listing import clock

    kinds = {"directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "file": stat.S_IFREG}

    async def do(sandbox: AsyncSandbox) -> list[Any]:
        return await sandbox.files.list(options.path, depth=64 if options.recursive else options.depth)

    found = sorted(remote.with_sandbox(options.id, do), key=lambda info: info.path)
    if options.json:
        print_json({"files": found})
        return 0
    for info in found:
        target = f" -> {safe(info.target)}" if info.target is not None else ""
        if options.long:
            mode = stat.filemode(kinds.get(info.type, 0) | info.mode)
            print(f"{mode} {info.uid:>6} {info.size:>10} {clock(info.mtime)} {safe(info.path)}{target}")
        else:
            print(safe(info.path) + ("/" if info.is_dir else ""))
    return 0


def port(options: argparse.Namespace) -> int:
    """``ringfence sandbox port``."""
    import asyncio

    from ringfence.model.quantities import parse_duration

    seconds = parse_duration(options.seconds) if options.seconds else None

    async def forward(sandbox: AsyncSandbox) -> None:
        async with await sandbox.tunnel(options.port, local_port=options.forward) as tunnel:
            if options.json:
                print_json(
                    {"id": sandbox.id, "port": options.port, "host": tunnel.host, "local": tunnel.port}
                )
            else:
                note(f"{tunnel.host}:{tunnel.port} leads to port {options.port} of {sandbox.id}")
            await asyncio.Event().wait()

    async def show(sandbox: AsyncSandbox) -> Any:
        return await sandbox.port(options.port, seconds=seconds)

    if options.forward is not None:
        remote.with_sandbox(options.id, forward)
        return 0
    found = remote.with_sandbox(options.id, show)
    header = "; ".join(f"{name}: {value}" for name, value in found.headers.items())
    text = f"{found.url}\n  programs  {found.direct}\n  header    {header}\n  browsers  {found.browser}"
    shown = {
        "port": found.port, "url": found.url, "direct": found.direct, "browser": found.browser,
        "headers": found.headers, "expires_at": found.expires_at,
    }  # fmt: skip
    return remote.say(options, shown, text)
