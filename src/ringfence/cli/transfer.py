"""``--file`` and ``--out``: copies into the sandbox before the command, and out of it afterwards.

What comes out was written by hostile code. Its place is opened before the command runs and everything is
written below that descriptor, under a temporary name that is renamed at the end: nothing that the workload
does to a folder it shares with us can lead the copy elsewhere, and nobody sees half of it.
"""

# ruff: noqa: ASYNC230, ASYNC240 - local files, read and written while nothing else waits for the loop

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import AsyncIterator
from typing import Any

from ringfence.cli.output import safe
from ringfence.cli.requesting import Transfer
from ringfence.model.errors import (
    GuestError,
    GuestRefused,
    HostLimit,
    InvalidRequest,
    ProtocolViolation,
    RingfenceError,
)
from ringfence.model.ids import new_id
from ringfence.model.policy import MIB
from ringfence.model.quantities import format_size

CHUNK = 65536
BLOCK = 512  # of a tar archive
SLACK = 64 * MIB  # headers of an archive, and what a mounted folder holds beyond the disk limit


async def copy_in(link: Any, transfers: list[Transfer]) -> None:
    """Copy files and folders in, as the workload's user.

    Raises:
        InvalidRequest: the local file went away meanwhile.
        GuestRefused: the place inside can't be written.
    """
    for transfer in transfers:
        try:
            if os.path.isdir(transfer.local):
                await link.files.tar_in(transfer.inside, _archive(transfer.local))
            else:
                mode = stat.S_IMODE(os.stat(transfer.local).st_mode) & 0o755 | 0o200
                data = _contents(transfer.local)
                await link.files.write(transfer.inside, data, mode, parents=True)
        except OSError as error:
            raise InvalidRequest(f"--file {transfer.local}: {error.strerror}") from error
        except GuestError as error:
            error.hint = error.hint or f"copying {transfer.local} in; the place must be one it may write to"
            raise


class Destination:
    """Where one ``--out`` goes: an open folder and a name in it.

    Raises:
        InvalidRequest: the folder isn't there, or the name is taken by something we won't replace.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.inside = transfer.inside
        self.local = transfer.local
        folder, self.name = os.path.split(os.path.abspath(transfer.local))
        try:
            self.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(
                f"--out: {safe(folder)}: {error.strerror}", hint="make the folder first, or name another"
            ) from None
        try:
            if not os.access(folder, os.W_OK | os.X_OK):
                raise InvalidRequest(f"--out: {safe(folder)} can't be written by this user")
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Refuse what we won't replace: only an ordinary file is, and an empty folder is filled."""
        try:
            found = os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidRequest(f"--out {safe(self.local)}: {error.strerror}") from None
        if stat.S_ISREG(found.st_mode):
            return
        kind = "a symlink, which is not followed" if stat.S_ISLNK(found.st_mode) else "no ordinary file"
        if stat.S_ISDIR(found.st_mode):
            if not os.listdir(self._path()):
                return
            kind = "a folder with something in it"
        raise InvalidRequest(
            f"--out: {safe(self.local)} is there already and is {kind}",
            hint="remove it, or write --out PATH:LOCAL with another name",
        )

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self.folder)

    def temporary(self) -> str:
        """A name beside the final one that nobody can guess."""
        return f".{self.name[:100]}.{new_id('part')}"

    def place(self, temporary: str) -> None:
        """Rename to the final name."""
        self.check()
        os.rename(temporary, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def remove(self, temporary: str) -> None:
        """Undo a copy that failed half-way."""
        path = f"/proc/self/fd/{self.folder}/{temporary}"
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(temporary, dir_fd=self.folder)

    def _path(self) -> str:
        return f"/proc/self/fd/{self.folder}/{self.name}"


async def copy_out(sandbox: Any, destination: Destination, disk: int) -> dict[str, Any]:
    """Copy one file or folder out. A failure is part of the answer: the others are still copied.

    Returns what ``--json`` shows: path, local, bytes and files; or error.
    """
    shown: dict[str, Any] = {"path": destination.inside, "local": destination.local}
    try:
        shown |= await _copy_out(sandbox, destination, disk + SLACK)
    except (RingfenceError, OSError) as error:
        shown["error"] = _as_error(error, destination, sandbox)
    return shown


async def _copy_out(sandbox: Any, destination: Destination, most: int) -> dict[str, Any]:
    files = (await sandbox.link()).files
    info = await files.stat(destination.inside, follow=False)
    temporary = destination.temporary()
    try:
        if info.type == "directory":
            found = await _folder_out(files, destination, temporary, most)
        elif info.type == "file":
            found = await _file_out(files, destination, temporary, most, info.mode)
        else:
            raise InvalidRequest(
                f"{safe(destination.inside)} is a {info.type}, neither a file nor a folder",
                hint="symlinks are not followed: name what they point to",
            )
        destination.place(temporary)
    except BaseException:
        destination.remove(temporary)
        raise
    return found


async def _file_out(
    files: Any, destination: Destination, temporary: str, most: int, mode: int
) -> dict[str, Any]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    size = 0
    reading = files.read(destination.inside)
    target = os.open(temporary, flags, 0o600, dir_fd=destination.folder)
    try:
        async for data in reading:
            size += len(data)
            if size > most:  # the sandbox's disk can't hold so much: the guest makes it up as it goes
                raise HostLimit(f"more than {format_size(most)}", hint="raise --disk if it is wanted")
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
        # Executable or not is all that its mode may say here.
        os.fchmod(target, (0o777 if mode & 0o100 else 0o666) & ~_umask())
    finally:
        os.close(target)
        await reading.aclose()
    return {"bytes": size, "files": 1}


async def _folder_out(files: Any, destination: Destination, temporary: str, most: int) -> dict[str, Any]:
    from ringfence.guest.archives import ArchiveLimits, extract_tar

    os.mkdir(temporary, 0o700, dir_fd=destination.folder)
    path = f"/proc/self/fd/{destination.folder}/{temporary}"
    reading = files.tar_out(destination.inside)
    try:
        done = await extract_tar(reading, path, ArchiveLimits(bytes=most))
    finally:
        await reading.aclose()
    os.chmod(temporary, 0o777 & ~_umask(), dir_fd=destination.folder)
    found: dict[str, Any] = {"bytes": done.bytes, "files": done.files}
    if done.skipped_count:
        found["skipped"] = [{"path": name, "reason": reason} for name, reason in done.skipped]
        found["skipped_count"] = done.skipped_count
    return found


def _as_error(error: Exception, destination: Destination, sandbox: Any) -> dict[str, Any]:
    if isinstance(error, RingfenceError):
        value = error.as_dict()
        if isinstance(error, GuestRefused) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            value["message"] = os.strerror(error.errno)
            value["hint"] = "the command has not made it; a relative path begins in its folder, --workdir"
        if isinstance(error, ProtocolViolation):
            value["hint"] = "the sandbox sent what it must not; nothing was written"
        if sandbox.ended.done():
            value["message"] = f"the sandbox has ended ({sandbox.ended.result().cause.value})"
            value["hint"] = "files can be copied out while it lives: raise the limit that ended it"
    else:
        reason = getattr(error, "strerror", None) or str(error)
        value = {"code": "os_error", "message": reason, "hint": "", "details": {}}
    value["message"] = f"--out {safe(destination.inside)}:{safe(destination.local)}: {value['message']}"
    return value


async def _contents(path: str) -> AsyncIterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHUNK):
            yield data


async def _archive(top: str) -> AsyncIterator[bytes]:
    """A pax tar of a folder's contents; symlinks stay symlinks, and what is no file is left out."""
    import tarfile

    for base, folders, names in os.walk(top):
        folders.sort()
        for name in sorted([*folders, *names]):
            path = os.path.join(base, name)
            info = tarfile.TarInfo(os.path.relpath(path, top))
            found = os.lstat(path)
            info.mtime, info.mode = int(found.st_mtime), stat.S_IMODE(found.st_mode) & 0o777 | 0o200
            if stat.S_ISDIR(found.st_mode):
                info.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(found.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            elif stat.S_ISREG(found.st_mode):
                info.size = found.st_size
            else:
                continue
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isreg():
                async for data in _exactly(path, info.size):
                    yield data
    yield bytes(2 * BLOCK)


async def _exactly(path: str, size: int) -> AsyncIterator[bytes]:
    """``size`` bytes and padding to whole blocks, whatever happens to the file meanwhile."""
    left = size
    with open(path, "rb", buffering=0) as file:
        while left and (data := file.read(min(CHUNK, left))):
            left -= len(data)
            yield data
    while left:
        yield bytes(min(CHUNK, left))
        left -= min(CHUNK, left)
    if size % BLOCK:
        yield bytes(BLOCK - size % BLOCK)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
