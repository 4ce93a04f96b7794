"""Which files a run added, modified and deleted, read from outside.

From an overlay's upper layer: what is there was made or copied up; a whiteout (character device 0/0) says
that something below was deleted; an opaque folder hides all of what is below. Drivers without overlay: what
lies in the writable folders, seen through the wall's own root.

The names and the contents are hostile. Everything is opened relative to a descriptor of its folder and
without following symlinks, nothing but regular files is opened at all, and depth, entries and bytes are
bounded: what was cut off is said.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from ringfence.model.sandbox import FileChange

MOST_ENTRIES = 200_000
MOST_BYTES = 4 << 30  # hashed; beyond it digests are None
DEEPEST = 200  # folders; each level holds descriptors while it is read
_CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Changes(tuple[FileChange, ...]):
    """The changes, sorted by path. ``cut`` says what is missing from them; empty: nothing is."""

    cut: tuple[str, ...]

    def __new__(  # noqa: D102
        cls, entries: Iterable[FileChange] = (), cut: Iterable[str] = ()
    ) -> Changes:
        made = super().__new__(cls, sorted(entries, key=lambda change: change.path))
        made.cut = tuple(cut)
        return made


@dataclass(slots=True)
class Bounds:
    """How much is read at most."""

    entries: int = MOST_ENTRIES
    size: int = MOST_BYTES
    depth: int = DEEPEST


def of_upper(upper: int, lowers: tuple[str, ...], bounds: Bounds | None = None) -> Changes:
    """Changes in an overlay's upper layer (a descriptor, left open) over its lower layers, topmost first.

    Raises:
        OSError: the upper layer can't be read at all.
    """
    walk = _Walk(bounds or Bounds(), overlay=True)
    below = [_open(path) for path in lowers]
    try:
        walk.folder(upper, [f for f in below if f is not None], "", 0)
    finally:
        _close(below)
    return Changes(walk.found, walk.cut)


def of_folders(
    root: int, folders: tuple[str, ...], lowers: tuple[str, ...], bounds: Bounds | None = None
) -> Changes:
    """Changes in writable folders below ``root`` (a descriptor), compared with the same in ``lowers``."""
    walk = _Walk(bounds or Bounds(), overlay=False)
    for folder in sorted(set(folders)):
        inside = _descend(root, folder)
        if inside is None:
            continue
        if _is_hosts(inside, folder):
            walk.cut.append(f"{folder} is the host's own: what changed there is not told")
            os.close(inside)
            continue
        below = [_open(lower + folder) for lower in lowers]
        try:
            walk.folder(inside, [f for f in below if f is not None], folder, 0)
        finally:
            _close([inside, *below])
    return Changes({change.path: change for change in walk.found}.values(), walk.cut)


class _Walk:
    def __init__(self, bounds: Bounds, *, overlay: bool) -> None:
        self.found: list[FileChange] = []
        self.cut: list[str] = []
        self._left = bounds
        self._overlay = overlay
        self._entries = bounds.entries
        self._bytes = bounds.size
        self._depth = bounds.depth

    def folder(self, here: int, below: list[int], path: str, depth: int) -> None:
        """One folder and what is in it. ``below``: the same folder in each lower layer that has it."""
        if depth >= self._depth:
            self._cut(f"folders deeper than {self._depth} are left out")
            return
        if self._overlay and depth and _is_opaque(here):
            hidden, below = below, []
        else:
            hidden = []
        seen: set[str] = set()
        with os.scandir(here) as entries:
            for entry in entries:
                seen.add(entry.name)
                if not self._room():
                    return
                self._entry(here, below or hidden, entry.name, f"{path}/{entry.name}", depth)
        for name in _names(hidden) - seen if hidden else ():
            self._deleted(hidden, name, f"{path}/{name}", depth)
        if not self._overlay:
            for name in _names(below) - seen:
                self._deleted(below, name, f"{path}/{name}", depth)

    def _entry(self, here: int, below: list[int], name: str, path: str, depth: int) -> None:
        try:
            info = os.stat(name, dir_fd=here, follow_symlinks=False)
        except OSError:
            return  # gone meanwhile
        old = _lookup(below, name)
        if self._overlay and stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            if old is not None:
                self._deleted(below, name, path, depth)
            return
        if stat.S_ISDIR(info.st_mode):
            self._folder_entry(here, below, name, path, depth, info, old)
            return
        kind = "file" if stat.S_ISREG(info.st_mode) else "symlink" if stat.S_ISLNK(info.st_mode) else "other"
        size, digest = (info.st_size, self._digest(here, name)) if kind == "file" else (0, None)
        if old is not None and not stat.S_ISDIR(old.st_mode):
            if self._same(info, old, here, below, name, digest):
                return
            change = "modified"
        else:
            if old is not None:
                self._deleted(below, name, path, depth)
            change = "added"
        self.found.append(FileChange(path, change, kind, size, digest))

    def _folder_entry(
        self, here: int, below: list[int], name: str, path: str, depth: int,
        info: os.stat_result, old: os.stat_result | None,
    ) -> None:  # fmt: skip
        if old is None or not stat.S_ISDIR(old.st_mode):
            self.found.append(FileChange(path, "added" if old is None else "modified", "directory", 0, None))
        elif stat.S_IMODE(old.st_mode) != stat.S_IMODE(info.st_mode):
            self.found.append(FileChange(path, "modified", "directory", 0, None))
        try:
            inside = os.open(name, _FOLDER, dir_fd=here)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                self._cut(f"some folders can't be read ({errno.errorcode.get(error.errno or 0)})")
            return
        deeper = [f for f in (_open(name, parent) for parent in below) if f is not None]
        try:
            self.folder(inside, deeper, path, depth + 1)
        finally:
            _close([inside, *deeper])

    def _deleted(self, below: list[int], name: str, path: str, depth: int) -> None:
        """Something of the lower layers is not there any more, with all that was in it."""
        if not self._room():
            return
        old = _lookup(below, name)
        if old is None:
            return
        kind = (
            "directory" if stat.S_ISDIR(old.st_mode)
            else "file" if stat.S_ISREG(old.st_mode)
            else "symlink" if stat.S_ISLNK(old.st_mode)
            else "other"
        )  # fmt: skip
        self.found.append(FileChange(path, "deleted", kind, 0, None))
        if kind != "directory" or depth >= self._depth:
            return
        deeper = [f for f in (_open(name, parent) for parent in below) if f is not None]
        try:
            for inside in sorted(_names(deeper)):
                self._deleted(deeper, inside, f"{path}/{inside}", depth + 1)
        finally:
            _close(deeper)

    def _same(
        self, info: os.stat_result, old: os.stat_result, here: int, below: list[int], name: str,
        digest: str | None,
    ) -> bool:  # fmt: skip
        """Copied up but not changed (opened for writing, touched)."""
        if stat.S_IFMT(info.st_mode) != stat.S_IFMT(old.st_mode):
            return False
        if stat.S_ISLNK(info.st_mode):
            return _link(here, name) == next(
                (t for t in (_link(f, name) for f in below) if t is not None), None
            )
        if stat.S_IMODE(info.st_mode) != stat.S_IMODE(old.st_mode) or info.st_size != old.st_size:
            return False
        if not stat.S_ISREG(info.st_mode):
            return True
        for parent in below:
            with contextlib.suppress(OSError):
                os.stat(name, dir_fd=parent, follow_symlinks=False)
                return digest is not None and digest == self._digest(parent, name)
        return False

    def _digest(self, parent: int, name: str) -> str | None:
        try:
            file = os.open(name, _FILE, dir_fd=parent)
        except OSError:
            return None
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                return None
            # A sparse file of a terabyte takes no disk, but it would take hours to hash.
            if info.st_size > self._bytes:
                self._cut("digests of large files are left out")
                return None
            total = hashlib.sha256()
            left = info.st_size
            while left > 0:
                data = os.read(file, min(left, _CHUNK))
                if not data:
                    break
                total.update(data)
                left -= len(data)
            self._bytes -= info.st_size
        except OSError:
            return None
        finally:
            os.close(file)
        return "sha256:" + total.hexdigest()

    def _room(self) -> bool:
        if self._entries <= 0:
            self._cut(f"more than {self._left.entries} entries: the rest is left out")
            return False
        self._entries -= 1
        return True

    def _cut(self, what: str) -> None:
        if what not in self.cut:
            self.cut.append(what)


def _is_opaque(folder: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(f"/proc/self/fd/{folder}", _opaque_mark()) == b"y"
    return False


def _opaque_mark() -> str:
    """The one attribute that the overlay itself reads.

    Root's overlay reads trusted.*: what a workload writes under user.* are its own bytes. A normal user's
    (userxattr) reads user.*, and the kernel keeps the workload from writing it.
    """
    return "trusted.overlay.opaque" if os.geteuid() == 0 else "user.overlay.opaque"


def _lookup(below: list[int], name: str) -> os.stat_result | None:
    for parent in below:
        with contextlib.suppress(OSError):
            return os.stat(name, dir_fd=parent, follow_symlinks=False)
    return None


def _names(below: list[int]) -> set[str]:
    found: set[str] = set()
    for folder in below:
        with contextlib.suppress(OSError):
            found.update(os.listdir(folder))
    return found


def _link(parent: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None


def _open(path: str, parent: int | None = None) -> int | None:
    try:
        return os.open(path, _FOLDER, dir_fd=parent)
    except OSError:
        return None


def _is_hosts(inside: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(inside), os.stat(path))
    return False


def _descend(root: int, path: str) -> int | None:
    """A folder below ``root``, no part of its path a symlink."""
    here = os.dup(root)
    for part in path.strip("/").split("/"):
        below = _open(part, here)
        os.close(here)
        if below is None:
            return None
        here = below
    return here


def _close(files: Iterable[int | None]) -> None:
    for file in files:
        if file is not None:
            os.close(file)
