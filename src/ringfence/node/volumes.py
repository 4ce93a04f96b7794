"""Volumes: named ext4 images whose size is their quota, shown to sandboxes as binds.

``<folder>/<id>/disk.img`` is mounted at ``<folder>/<id>/fs`` on the host while somebody uses it: one mount
whoever looks, so that what one writes the next one reads, and the kernel keeps the quota. Owners in the image
are those inside; each sandbox sees them through a bind that is idmapped into its own range. The image has
a journal, for it outlives walls and machines' crashes, and its blocks are reserved.

The launcher and the walls it has ready have mount namespaces of their own. So the folder is a *shared* mount
before the launcher starts: what is mounted below it later appears there too.

Only root can do any of that. A normal user has no file system whose size the kernel would keep, and is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, Unsupported, WrongState
from ringfence.model.quantities import format_size
from ringfence.node import disks
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import RootFs

ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,63}", re.ASCII)
LEAST = 16 << 20  # bytes: a smaller one would be all journal and tables
MOST = 1 << 44
IMAGE, MOUNT, PART = "disk.img", "fs", ".part"
USER = 1000  # inside: whose the files are that are imported
RUNTIMES = frozenset({"jail", "nsjail", "runc", "gvisor"})  # that show owners as inside: tests prove it
_MS_BIND, _MS_SHARED, _MNT_DETACH = 4096, 1 << 20, 2
_TIMEOUT = 120.0
_BUSY = 2.0  # seconds that a volume to remove may be busy before we say that it is in use
DEEPEST = 200  # folders below each other in an export


class Volumes:
    """The volumes in one folder, which one node has for itself."""

    def __init__(self, folder: Path, *, root: bool) -> None:
        self.folder = folder
        self._root = root

    def prepare(self) -> None:
        """Make the folder; share it if there are volumes. Before the launcher starts. Idempotent.

        Raises:
            HostLimit: it can't be made.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            for left in self.folder.glob(f"*{PART}"):
                _discard(left)
        except OSError as error:
            raise host_limit(error, f"make {self.folder}") from error
        if self.names():
            self.share()

    def share(self) -> bool:
        """Make the folder a shared mount. True: it was none, so a launcher that runs already sees none of it.

        Raises:
            HostLimit: it can't be done.
        """
        if not self._root or str(self.folder) in _mounts():
            return False
        try:
            _mount(str(self.folder), str(self.folder), _MS_BIND)
            _mount("none", str(self.folder), _MS_SHARED)
        except OSError as error:
            raise host_limit(error, f"make a shared mount of {self.folder}") from error
        return True

    def close(self) -> None:
        """Unmount what nobody uses."""
        for name in self.names():
            self.release(name)
        if not any(path.startswith(f"{self.folder}/") for path in _mounts()):
            _umount(str(self.folder), _MNT_DETACH)  # whoever still looks at it keeps no mount

    def names(self) -> list[str]:
        """All of them."""
        try:
            return sorted(name for name in os.listdir(self.folder) if ID.fullmatch(name))
        except OSError:
            return []

    # -- one of them

    def _place(self, name: str) -> Path:
        if not ID.fullmatch(name) or name.endswith(PART):
            raise InvalidRequest(f"{name!r} is no volume id", hint="letters, digits, . _ and -, up to 64")
        return self.folder / name

    def get(self, name: str) -> Path:
        """Its folder.

        Raises:
            NotFound: there is none of that name.
        """
        place = self._place(name)
        if not (place / IMAGE).is_file():
            raise NotFound(f"no volume {name} here", hint="make it first")
        return place

    def make(self, name: str, quota: int) -> None:
        """Make one; the same again is what there is. Blocks: call it in a thread.

        Raises:
            Unsupported: only root can. InvalidRequest: an impossible quota. HostLimit: no room, no mkfs.ext4.
        """
        place = self._place(name)
        if not self._root:
            raise Unsupported(
                "volumes need root: their quota is the size of a file system of their own, which only root "
                "can mount",
                hint="run the node as root",
                capability="volumes",
            )
        if not LEAST <= quota <= MOST:
            raise InvalidRequest(
                f"a volume of {format_size(max(0, quota))} is impossible",
                hint=f"{format_size(LEAST)} to {format_size(MOST)}",
            )
        if (place / IMAGE).exists():
            return
        program = shutil.which("mkfs.ext4") or shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
        if program is None:
            raise HostLimit("volumes need mkfs.ext4, which is not on this host", hint="install e2fsprogs")
        work = self.folder / (name + PART)
        try:
            _discard(work)
            work.mkdir(0o700)
            (work / MOUNT).mkdir(0o700)
            image = work / IMAGE
            with open(image, "xb") as file:
                os.fchmod(file.fileno(), 0o600)
                disks._reserve(file.fileno(), quota & ~4095)
            options = ["-J", "size=4"] if quota < 1 << 30 else []
            _call([program, "-q", "-F", "-m", "0", "-b", "4096", *options, "-E",
                   "lazy_itable_init=1,nodiscard,root_owner=0:0", str(image)])  # fmt: skip
            self._mounted(work)
            try:
                with contextlib.suppress(OSError):
                    os.rmdir(work / MOUNT / "lost+found")
                os.chmod(work / MOUNT, 0o777)  # noqa: S103 - of all users of the sandboxes that have it
            finally:
                _umount(str(work / MOUNT))
            os.rename(work, place)
        except OSError as error:
            _discard(work)
            raise host_limit(
                error,
                f"make a volume of {format_size(quota)} in {self.folder}",
                hint="free some space there, or ask for less",
            ) from error
        except BaseException:
            _discard(work)
            raise

    def mounted(self, name: str) -> Path:
        """Where its files are on the host; mounted if it was not. Blocks.

        Raises:
            NotFound: there is none. HostLimit: it can't be mounted.
        """
        return self._mounted(self.get(name))

    def _mounted(self, place: Path) -> Path:
        target = place / MOUNT
        if str(target) not in _mounts():
            program = shutil.which("mount") or "/bin/mount"
            _call([program, "-n", "-t", "ext4", "-o", "loop,nosuid,nodev", str(place / IMAGE), str(target)])
        return target

    def release(self, name: str) -> bool:
        """Unmount it, if nobody of this host uses it any more. False: somebody does."""
        return _umount(str(self.folder / name / MOUNT))

    def remove(self, name: str) -> None:
        """Remove it, if there is one. Blocks.

        Raises:
            WrongState: it is in use.
        """
        place = self._place(name)
        if not place.exists():
            return
        end = time.monotonic() + _BUSY
        while not self.release(name):
            if time.monotonic() > end:
                raise WrongState(f"volume {name} is in use", hint="end the sandboxes that have it first")
            time.sleep(0.02)  # whoever looks at it for a moment (df, a backup) holds it for that moment
        try:
            gone = self.folder / (name + PART)
            _discard(gone)
            os.rename(place, gone)
            _discard(gone)
        except OSError as error:
            raise host_limit(error, f"remove volume {name}") from error

    def size(self, name: str) -> int:
        """Bytes that its files take. Blocks."""
        space = os.statvfs(self.mounted(name))
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    def export(self, name: str) -> Iterator[bytes]:
        """Its files as a tar, piece by piece. Blocks. What is neither file, folder nor link is left out."""
        top = os.open(self.mounted(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            largest = os.path.getsize(self.get(name) / IMAGE)
            yield from _tar(top, largest)
        finally:
            os.close(top)

    def idmapped(self, root: RootFs) -> RootFs:
        """The root file system, in which binds of volumes show the owners inside."""
        mine = f"{self.folder}/"
        if not any(bind.source.startswith(mine) for bind in root.binds):
            return root
        return replace(
            root,
            binds=tuple(
                replace(bind, idmapped=True) if bind.source.startswith(mine) else bind for bind in root.binds
            ),
        )


class _Gathered(io.RawIOBase):
    """What a tar writer writes, to be taken."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self.data)
        self.data.clear()
        return data


_PIECE = 128 << 10


def _tar(top: int, largest: int) -> Iterator[bytes]:
    out = _Gathered()
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_PIECE) as tar:
        for base, folders, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False, onerror=_raise):
            if base.count("/") > DEEPEST:
                raise InvalidRequest(
                    f"more than {DEEPEST} folders below each other at {base[:100]}", hint="remove them first"
                )
            folders.sort()
            for name in sorted([*folders, *files]):
                info = os.stat(name, dir_fd=at, follow_symlinks=False)
                entry = _entry(os.path.join(base, name).removeprefix("./"), info)
                if entry is None:
                    continue
                if stat.S_ISLNK(info.st_mode):
                    entry.linkname = os.readlink(name, dir_fd=at)
                elif stat.S_ISREG(info.st_mode):
                    key = (info.st_dev, info.st_ino)
                    if info.st_nlink > 1 and key in links:
                        entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, links[key], 0
                    else:
                        links[key] = entry.name
                        if info.st_size > largest:
                            raise InvalidRequest(
                                f"{entry.name} says it has {format_size(info.st_size)}, more than the whole "
                                "volume: mostly holes",
                                hint="remove it, or copy it without holes",
                            )
                tar.addfile(entry)
                yield out.take()
                if entry.type == tarfile.REGTYPE:
                    yield from _content(tar, out, at, name, entry.size)
    yield out.take()


def _raise(error: OSError) -> None:
    raise error


def _content(tar: Any, out: _Gathered, at: int, name: str, size: int) -> Iterator[bytes]:
    """As many bytes as the header promised, whatever somebody does to the file meanwhile."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=at)
    left = size
    try:
        while left:
            data = os.read(file, min(left, _PIECE)) or bytes(min(left, _PIECE))
            left -= len(data)
            tar.fileobj.write(data)
            tar.offset += len(data)
            yield out.take()
    finally:
        os.close(file)
    padding = -size % tarfile.BLOCKSIZE
    tar.fileobj.write(bytes(padding))
    tar.offset += padding


def _entry(path: str, info: os.stat_result) -> tarfile.TarInfo | None:
    for test, kind in (
        (stat.S_ISREG, tarfile.REGTYPE), (stat.S_ISDIR, tarfile.DIRTYPE), (stat.S_ISLNK, tarfile.SYMTYPE),
    ):  # fmt: skip
        if test(info.st_mode):
            entry = tarfile.TarInfo(path)
            entry.type = kind
            entry.size = info.st_size if kind == tarfile.REGTYPE else 0
            entry.mode = stat.S_IMODE(info.st_mode) & 0o1777
            entry.uid, entry.gid, entry.mtime = info.st_uid, info.st_gid, info.st_mtime
            return entry
    return None


def _mounts() -> set[str]:
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return {line.split()[4].encode().decode("unicode_escape") for line in file}


def _mount(source: str, target: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(os.fsencode(source), os.fsencode(target), b"none", ctypes.c_ulong(flags), None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _umount(target: str, flags: int = 0) -> bool:
    """True if nothing is mounted there any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.umount2(os.fsencode(target), flags | 8) == 0:  # UMOUNT_NOFOLLOW; again: it may be there twice
        pass
    return ctypes.get_errno() in (22, 2)  # EINVAL: no mount point; ENOENT


def _discard(place: Path) -> None:
    """Remove a half-made or half-removed volume; never the files of one that is mounted."""
    if _umount(str(place / MOUNT)):
        shutil.rmtree(place, ignore_errors=True)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostLimit(f"{command[0]}: {error}", hint="try again") from error
    if done.returncode:
        words = done.stderr.strip()[-300:]
        raise HostLimit(
            f"{os.path.basename(command[0])} failed: {words}", hint="are there loop devices, and ext4?"
        )
