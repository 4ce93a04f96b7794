"""tar.in and tar.out of the worker."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator

from ringfence.guest.archives import ArchiveLimits, extract_tar
from ringfence.model.errors import HostLimit, InvalidRequest, ProtocolViolation

_PIECE = 65_536
_BLOCK = 512
# The disk of the sandbox is what bounds an archive.
_LIMITS = ArchiveLimits(bytes=2**62, entries=1_000_000, depth=256)


async def _pieces(descriptor: int) -> AsyncIterator[bytes]:
    while data := os.read(descriptor, _PIECE):
        yield data


def unpack(descriptor: int, folder: bytes) -> int:
    """Unpack the archive in an open file; the number of entries.

    Raises:
        OSError: EINVAL, it is none or a hostile one; ENOSPC and others of the file system.
    """
    work = extract_tar(_pieces(descriptor), os.fsdecode(folder), _LIMITS, replace=True)
    try:
        # Nothing in it ever waits: the source is a file.
        work.send(None)
    except StopIteration as end:
        result = end.value
    except ProtocolViolation as error:
        raise OSError(errno.EINVAL, error.message) from error
    except (HostLimit, InvalidRequest) as error:
        cause = error.__cause__
        raise OSError(getattr(cause, "errno", None) or errno.EINVAL, error.message) from error
    else:
        raise OSError(errno.EINVAL, "the archive can't be read")
    if result.skipped_count:
        name, reason = result.skipped[0]
        raise OSError(errno.EINVAL, f"{name}: {reason}")
    return int(result.files + result.folders + result.links)


def pack(path: bytes, leave_out: frozenset[bytes]) -> Iterator[bytes]:
    """A pax archive of a file or folder, piece by piece. Links are not followed."""
    base = os.path.basename(path.rstrip(b"/")) or b"root"
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        yield from _member(path, base)
    else:
        waiting = [b""]
        while waiting:
            below = waiting.pop()
            for name in sorted(os.listdir(os.path.join(path, below))):
                if not below and name in leave_out:
                    continue
                shown = os.path.join(below, name)
                try:
                    info = os.lstat(os.path.join(path, shown))
                    yield from _member(os.path.join(path, shown), shown)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    waiting.append(shown)
    yield bytes(2 * _BLOCK)


def _member(path: bytes, shown: bytes) -> Iterator[bytes]:
    import tarfile

    info = os.lstat(path)
    member = tarfile.TarInfo(os.fsdecode(shown))
    member.mode, member.mtime = stat.S_IMODE(info.st_mode), info.st_mtime
    member.uid, member.gid = info.st_uid, info.st_gid
    descriptor = -1
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(path))
    elif stat.S_ISREG(info.st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        member.size = os.fstat(descriptor).st_size
    else:
        return
    try:
        yield member.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
        left = member.size if descriptor >= 0 else 0
        while left:
            # A file that shrinks meanwhile is filled up: its size has been said.
            data = os.read(descriptor, min(left, _PIECE)) or bytes(min(left, _PIECE))
            left -= len(data)
            yield data
        if member.size % _BLOCK:
            yield bytes(-member.size % _BLOCK)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
