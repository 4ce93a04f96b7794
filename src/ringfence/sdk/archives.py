"""Folders of this machine as tar streams, and tar streams that hostile code wrote as folders.

The parser of the second kind is the guest package's (``ringfence.guest.archives``): there is one, and small.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator

from ringfence.model.errors import InvalidRequest
from ringfence.sdk.transport import CHUNK

_BLOCK = 512
_MOST = 64 * 1024**3  # bytes of what comes out


async def pack(top: str | os.PathLike[str]) -> AsyncIterator[bytes]:
    """A folder's contents as a pax tar; symlinks stay symlinks, and what is no file is left out.

    Raises:
        InvalidRequest: it is no folder, or a file can't be read.
    """
    root = os.fspath(top)
    if not os.path.isdir(root):
        raise InvalidRequest(f"{root} is no folder", hint="files.upload takes files")
    held = bytearray()
    for base, folders, names in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = os.path.join(base, name)
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue  # gone meanwhile
            info = _entry(path, os.path.relpath(path, root), found)
            if info is None:
                continue
            held += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isreg():
                async for data in _exactly(path, info.size):
                    held += data
                    if len(held) >= CHUNK:
                        yield bytes(held)
                        held.clear()
    yield bytes(held) + bytes(2 * _BLOCK)


def _entry(path: str, name: str, found: os.stat_result) -> tarfile.TarInfo | None:
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = int(found.st_mtime), stat.S_IMODE(found.st_mode) & 0o777 | 0o200
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISREG(found.st_mode):
        info.size = found.st_size
    else:
        return None
    return info


async def _exactly(path: str, size: int) -> AsyncIterator[bytes]:
    """``size`` bytes and padding to whole blocks, whatever happens to the file meanwhile."""
    left = size
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    with file:
        while left and (data := await asyncio.to_thread(file.read, min(CHUNK, left))):
            left -= len(data)
            yield data
    while left:
        yield bytes(min(CHUNK, left))
        left -= min(CHUNK, left)
    if size % _BLOCK:
        yield bytes(_BLOCK - size % _BLOCK)


async def unpack(tar: AsyncIterable[bytes], local: str | os.PathLike[str]) -> int:
    """Unpack into a folder that does not exist yet or is empty; the number of files.

    Raises:
        InvalidRequest: there is something in it. ProtocolViolation: what came is no tar that can be trusted.
    """
    from ringfence.guest.archives import ArchiveLimits, extract_tar

    place = os.fspath(local)
    if os.path.lexists(place) and (os.path.islink(place) or not os.path.isdir(place) or os.listdir(place)):
        raise InvalidRequest(f"{place} is there already", hint="name a folder that is new or empty")
    try:
        return (await extract_tar(tar, place, ArchiveLimits(bytes=_MOST))).files
    finally:
        if isinstance(tar, AsyncGenerator):
            await tar.aclose()
