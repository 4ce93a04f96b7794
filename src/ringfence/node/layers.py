"""Layers: the files that a sandbox wrote, copied out of its wall by the host, and put under others' walls.

A layer is an overlay's upper layer as a folder of the store. What a sandbox wrote is hostile, so nothing of
it is followed, opened for what it is not, or believed: every name is used relative to a descriptor of its
folder, only regular files are opened, symlinks are copied as text, and what is no file, folder, symlink,
pipe, socket or whiteout is left out. Owners are stored as ids *inside*, so that a layer fits under a wall
with any range of host ids (it is mounted idmapped). Set-user-ID bits, capabilities, ACLs and every attribute
but ``user.*`` are dropped: no wall honours them, and the files now lie on the host under numbers of its own
users.

Whiteouts (character device 0/0) and opaque folders are what the overlay itself made: they are made anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringfence.model.errors import HostLimit, InvalidRequest, WrongState
from ringfence.model.quantities import format_size

DEEPEST = 200  # folders; each level holds two descriptors while it is copied
MOST_ENTRIES = 1 << 20
MOST_ATTRIBUTES = 64 << 10  # bytes of the user.* attributes of one file, as the kernel's own limit
SLACK = 16 << 20  # bytes that a layer may be larger than the sandbox's disk: blocks of another size
NOBODY = 65534
COARSE = 20_000_000  # ns: more than two ticks of the slowest kernel clock
_CHUNK = 1 << 20
_LONGEST = 3900  # bytes of a path that link(2) certainly takes
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Owners(NamedTuple):
    """From the host's numbers of a sandbox's users to those inside: ``size`` ids from ``first`` on."""

    first: int
    size: int

    def inside(self, number: int) -> int:
        """The id inside; nobody's for what is not the sandbox's."""
        return number - self.first if self.first <= number < self.first + self.size else NOBODY


class Seen(NamedTuple):
    """One entry as it was when the copy came by."""

    path: str
    inode: int
    changed: int  # ctime, ns
    modified: int
    size: int


class Copied(NamedTuple):
    """What a copy came to. ``left_out`` says what was not copied, in words."""

    began: int  # ns since the epoch
    entries: int
    size: int  # bytes of data
    left_out: tuple[str, ...]
    seen: tuple[Seen, ...]


def opaque_mark(*, root: bool) -> str:
    """The attribute by which this host's overlays know an opaque folder."""
    return "trusted.overlay.opaque" if root else "user.overlay.opaque"


def copy(
    source: int,
    target: str,
    own: Owners,
    *,
    limit: int,
    stop: threading.Event | None = None,
    most: int = MOST_ENTRIES,
) -> Copied:
    """Copy an upper layer (a descriptor, left open) to the new folder ``target``.

    Args:
        source: the upper layer's folder.
        target: made here; on an error what is in it is the caller's to remove.
        own: whose files they are.
        limit: bytes of the sandbox's disk: more than that (and some slack) is never copied.
        stop: set by another thread to give up.
        most: entries.

    Raises:
        Moved: a file went or became something else meanwhile, which it can only if the wall was not frozen.
        WrongState: the copy was given up, or the layer vanished.
        InvalidRequest: too many entries, too deep or too large.
        OSError: the disk is full, or the like.
    """
    began = time.time_ns()
    work = _Copy(own, limit + SLACK, most, stop)
    os.mkdir(target, 0o700)
    new = os.open(target, FOLDER)
    try:
        work.tree(source, new)
    finally:
        os.close(new)
    return Copied(began, work.entries, work.size, tuple(sorted(work.left_out)), tuple(work.seen))


def changed(source: int, copied: Copied) -> str:
    """The first path that is not as the copy saw it, for walls that can't be frozen; empty if all are.

    Everything was looked at before the copy's end and again after it: if nothing has changed, the copy is
    how all of it was at one moment. (But not for what was written through a mapping of a file in memory.)
    The kernel's times are coarse: what changed just before the copy may have changed in it, too.
    """
    expected = {seen.path: seen for seen in copied.seen}
    for path, info in _walk(source):
        seen = expected.pop(path, None)
        if seen != _seen(path, info) or info.st_ctime_ns > copied.began - COARSE:
            return path or "/"
    return next(iter(expected), "")


class Moved(Exception):
    """The wall runs on, and took away what was being copied. ``path`` is what."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _Level(NamedTuple):
    source: int
    target: int
    names: Iterator[str]
    path: str
    info: os.stat_result
    opaque: bool


class _Copy:
    def __init__(self, own: Owners, limit: int, most: int, stop: threading.Event | None) -> None:
        self.own = own
        self.root = os.geteuid() == 0
        self.mark = opaque_mark(root=self.root)
        self.limit = limit
        self.most = most
        self.stop = stop
        self.entries = 0
        self.size = 0
        self.left_out: set[str] = set()
        self.seen: list[Seen] = []
        self.links: dict[tuple[int, int], str] = {}
        self.top = -1

    def tree(self, source: int, target: int) -> None:
        self.top = target
        levels = [self._level(os.dup(source), os.dup(target), "")]
        try:
            while levels:
                here = levels[-1]
                name = next(here.names, None)
                if name is None:
                    levels.pop()
                    self._finish(here)
                    continue
                below = self._entry(here, name)
                if below is not None:
                    if len(levels) > DEEPEST:
                        _close(below)
                        raise InvalidRequest(
                            f"the sandbox has folders deeper than {DEEPEST}",
                            hint="a snapshot can't hold them: remove them first",
                        )
                    levels.append(below)
        finally:
            for level in levels:
                _close(level)

    def _level(self, source: int, target: int, path: str) -> _Level:
        info = os.fstat(source)
        opaque = bool(path) and attribute(source, self.mark) == b"y"
        self.seen.append(_seen(path, info))
        return _Level(source, target, iter(os.listdir(source)), path, info, opaque)

    def _finish(self, level: _Level) -> None:
        """A folder's own attributes last: what is made in it changes its time."""
        try:
            self._attributes(level.source, level.target)
            if level.opaque:
                os.setxattr(_path(level.target), self.mark, b"y")
            # Set-group-ID of a folder only says whose group new files get.
            os.fchmod(level.target, stat.S_IMODE(level.info.st_mode) & 0o3777)
            if self.root:
                os.chown(level.target, *self._owner(level.info))
                os.fchmod(level.target, stat.S_IMODE(level.info.st_mode) & 0o3777)
            os.utime(level.target, ns=(level.info.st_mtime_ns, level.info.st_mtime_ns))
        finally:
            _close(level)

    def _entry(self, here: _Level, name: str) -> _Level | None:
        if self.stop is not None and self.stop.is_set():
            raise WrongState("the snapshot was given up")
        self.entries += 1
        if self.entries > self.most:
            raise InvalidRequest(
                f"the sandbox has more than {self.most} files", hint="remove some before the snapshot"
            )
        path = f"{here.path}/{name}"
        try:
            info = os.stat(name, dir_fd=here.source, follow_symlinks=False)
        except FileNotFoundError:
            return None  # gone meanwhile: only where the wall runs on, and then it is found out
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            return self._folder(here, name, path)
        self.seen.append(_seen(path, info))
        if kind == stat.S_IFCHR and info.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=here.target)
            return None
        first = self.links.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
        if first is not None:
            os.link(first, name, src_dir_fd=self.top, dst_dir_fd=here.target, follow_symlinks=False)
            return None
        if kind == stat.S_IFREG:
            self._file(here, name, path)
        elif kind == stat.S_IFLNK:
            with _still_there(path):
                leads_to = os.readlink(name, dir_fd=here.source)
            os.symlink(leads_to, name, dir_fd=here.target)
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK):
            os.mknod(name, kind | 0o600, dir_fd=here.target)
        else:
            self.left_out.add("devices")
            return None
        self._metadata(here, name, info)
        relative = path[1:]
        if info.st_nlink > 1 and len(os.fsencode(relative)) < _LONGEST:
            self.links[info.st_dev, info.st_ino] = relative
        return None

    def _folder(self, here: _Level, name: str, path: str) -> _Level:
        with _still_there(path):
            source = os.open(name, FOLDER, dir_fd=here.source)
        try:
            os.mkdir(name, 0o700, dir_fd=here.target)
            target = os.open(name, FOLDER, dir_fd=here.target)
        except BaseException:
            os.close(source)
            raise
        return self._level(source, target, path)

    def _file(self, here: _Level, name: str, path: str) -> None:
        with _still_there(path):
            source = os.open(name, FILE, dir_fd=here.source)
        try:
            info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):
                raise Moved(path)
            target = os.open(name, _NEW, 0o600, dir_fd=here.target)
            try:
                for start, end in extents(source, info.st_size):
                    self._data(source, target, start, end)
                os.truncate(target, info.st_size)
                self._attributes(source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _data(self, source: int, target: int, start: int, end: int) -> None:
        self.size += end - start
        if self.size > self.limit:
            raise InvalidRequest(
                f"the sandbox's files are more than its disk ({format_size(self.limit - SLACK)}) could hold",
                hint="this should not happen: report it",
            )
        while start < end:
            data = os.pread(source, min(_CHUNK, end - start), start)
            if not data:
                return
            written = 0
            while written < len(data):
                written += os.pwrite(target, data[written:], start + written)
            start += len(data)
            if self.stop is not None and self.stop.is_set():
                raise WrongState("the snapshot was given up")

    def _attributes(self, source: int, target: int) -> None:
        total = 0
        try:
            names = os.listxattr(_path(source))
        except OSError:
            return
        for name in names:
            if not name.startswith("user.") or name.startswith("user.overlay."):
                if not name.startswith(("trusted.overlay.", "user.overlay.")):
                    self.left_out.add("attributes other than user.*")
                continue
            value = os.getxattr(_path(source), name)
            total += len(name) + len(value)
            if total > MOST_ATTRIBUTES:
                self.left_out.add("attributes beyond 64 KiB a file")
                return
            try:
                os.setxattr(_path(target), name, value)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.E2BIG, errno.EOPNOTSUPP):
                    raise
                # Their room in a file of the host is smaller: a block, with ext4.
                self.left_out.add("attributes for which the host's file system has no room")

    def _metadata(self, here: _Level, name: str, info: os.stat_result) -> None:
        if self.root:
            os.chown(name, *self._owner(info), dir_fd=here.target, follow_symlinks=False)
        if not stat.S_ISLNK(info.st_mode):
            os.chmod(name, stat.S_IMODE(info.st_mode) & 0o1777, dir_fd=here.target)
        times = (info.st_mtime_ns, info.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=here.target, follow_symlinks=False)

    def _owner(self, info: os.stat_result) -> tuple[int, int]:
        return self.own.inside(info.st_uid), self.own.inside(info.st_gid)


def underlay(base: str, layer: str, below: Sequence[str], *, root: bool) -> None:
    """Put what is only in ``base`` into ``layer``, which was written over it: then ``layer`` stands alone.

    Files are hard links: those of a layer never change. All folders are ours. ``below``: the layers under
    ``base``, topmost first: a whiteout that hides nothing of theirs goes, since in a folder that no layer
    below has the overlay would show it as a file.

    Raises:
        OSError: the disk is full, or the like.
    """
    mark = opaque_mark(root=root)
    opened: list[int] = []
    try:
        for path in (base, layer, *below):
            opened.append(os.open(path, FOLDER))
        old, new, *under = opened
        _underlay(old, new, mark)
        _prune(new, under, mark)
    finally:
        for each in opened:
            os.close(each)


def _prune(here: int, below: list[int], mark: str) -> None:
    """Remove whiteouts that hide nothing. ``below``: the same folder of the layers that show through."""
    times = os.fstat(here)
    for name in os.listdir(here):
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISCHR(info.st_mode):
            if not _shown(name, below):
                os.unlink(name, dir_fd=here)
        elif stat.S_ISDIR(info.st_mode):
            inside = os.open(name, FOLDER, dir_fd=here)
            under: list[int] = []
            try:
                if attribute(inside, mark) != b"y":
                    _under(name, below, mark, under)
                _prune(inside, under, mark)
            finally:
                for each in (inside, *under):
                    os.close(each)
    os.utime(here, ns=(times.st_mtime_ns, times.st_mtime_ns))


def _shown(name: str, below: list[int]) -> bool:
    for folder in below:
        with contextlib.suppress(OSError):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            return not (stat.S_ISCHR(info.st_mode) and info.st_rdev == 0)
    return False


def _under(name: str, below: list[int], mark: str, found: list[int]) -> None:
    """Open the folders of that name that show through, down to what hides the rest."""
    for folder in below:
        try:
            found.append(os.open(name, FOLDER, dir_fd=folder))
        except FileNotFoundError:
            continue
        except OSError:  # no folder: a file or a whiteout
            return
        if attribute(found[-1], mark) == b"y":
            return


def _underlay(old: int, new: int, mark: str) -> None:
    times = os.fstat(new)
    present = set(os.listdir(new))
    for name in os.listdir(old):
        info = os.stat(name, dir_fd=old, follow_symlinks=False)
        folder = stat.S_ISDIR(info.st_mode)
        if name not in present:
            if folder:
                os.mkdir(name, 0o700, dir_fd=new)
                _into(old, new, name, mark, made=info)
            else:
                os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            continue
        if not stat.S_ISDIR(os.stat(name, dir_fd=new, follow_symlinks=False).st_mode):
            continue  # a file, or a whiteout, in place of what was there
        if folder:
            _into(old, new, name, mark, made=None)
        else:
            # Below was a whiteout or a file: what lies further below must stay hidden.
            inside = os.open(name, FOLDER, dir_fd=new)
            try:
                os.setxattr(_path(inside), mark, b"y")
            finally:
                os.close(inside)
    os.utime(new, ns=(times.st_mtime_ns, times.st_mtime_ns))


def _into(old: int, new: int, name: str, mark: str, *, made: os.stat_result | None) -> None:
    """The folder ``name`` of both; ``made``: it is new in the layer, and gets all that the old one has."""
    source = os.open(name, FOLDER, dir_fd=old)
    try:
        target = os.open(name, FOLDER, dir_fd=new)
        try:
            if made is None and attribute(target, mark) == b"y":
                return
            was_opaque = attribute(source, mark) == b"y"
            if made is not None:
                for each in os.listxattr(_path(source)):
                    if each.startswith("user.") and not each.startswith("user.overlay."):
                        os.setxattr(_path(target), each, os.getxattr(_path(source), each))
            _underlay(source, target, mark)
            if was_opaque:
                os.setxattr(_path(target), mark, b"y")
            if made is not None:
                if os.geteuid() == 0:
                    os.chown(target, made.st_uid, made.st_gid)
                os.fchmod(target, stat.S_IMODE(made.st_mode))
                os.utime(target, ns=(made.st_mtime_ns, made.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)


def extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what is no hole in a file of that size."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
            at = min(os.lseek(file, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        if start < at:
            yield start, at


def attribute(file: int, name: str) -> bytes | None:
    """An extended attribute of an open file; None if it has none of that name."""
    with contextlib.suppress(OSError):
        return os.getxattr(_path(file), name)
    return None


def room(folder: str, size: int, reserve: int) -> None:
    """Look whether a folder's disk has room for so many bytes and a reserve.

    Raises:
        HostLimit: it has not.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < size + reserve:
        raise HostLimit(
            f"a snapshot of {format_size(size)} does not fit: {folder} has {format_size(free)} free, and "
            f"{format_size(reserve)} are never used up",
            hint="remove snapshots (`ringfence snapshot rm`), or free some space there",
            errno="ENOSPC",
        )


def _walk(top: int) -> Iterator[tuple[str, os.stat_result]]:
    """(path, stat) of everything below, the top first. What can't be read is left out."""
    yield "", os.fstat(top)
    levels = [(os.dup(top), "", iter(os.listdir(top)))]
    try:
        while levels:
            here, path, names = levels[-1]
            name = next(names, None)
            if name is None:
                os.close(here)
                levels.pop()
                continue
            below = f"{path}/{name}"
            try:
                info = os.stat(name, dir_fd=here, follow_symlinks=False)
                inside = os.open(name, FOLDER, dir_fd=here) if stat.S_ISDIR(info.st_mode) else -1
            except OSError:
                continue
            yield below, info
            if inside >= 0 and len(levels) > DEEPEST:
                os.close(inside)
            elif inside >= 0:
                levels.append((inside, below, iter(os.listdir(inside))))
    finally:
        for here, _, _ in levels:
            os.close(here)


@contextlib.contextmanager
def _still_there(path: str) -> Iterator[None]:
    """What was looked at a moment ago is opened: by now it may be gone, or something else."""
    try:
        yield
    except OSError as error:
        # EINVAL: readlink of what is no link any more.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL):
            raise Moved(path) from error
        raise


def _seen(path: str, info: os.stat_result) -> Seen:
    return Seen(path, info.st_ino, info.st_ctime_ns, info.st_mtime_ns, info.st_size)


def _path(file: int) -> str:
    return f"/proc/self/fd/{file}"


def _close(level: _Level) -> None:
    os.close(level.source)
    os.close(level.target)
