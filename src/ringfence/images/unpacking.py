"""Unpacking one hostile layer into a folder of its own, in overlay's form.

What holds whatever the archive says: nothing outside the folder is made, changed, followed or read. Every
folder on the way is opened by itself, relative to the one above it and through no link; files are made with
``O_EXCL`` and never written through an older entry. Links are kept as they are, since only a sandbox ever
follows them, inside its own root; hard links reach only what this archive made.

Refused: names that climb, pass through a link, or are longer than the kernel takes; whiteouts of ``.``,
``..`` and of the root; an entry in place of a folder with things in it. Neutralised, and counted: device
nodes and pipes (left out), setuid and setgid bits of files, attributes but ``user.*``, users beyond 65,535.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.images.contract import Imported, ImportLimits
from ringfence.images.tarstream import Entry, Readable, TarReader, _shown
from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.model.quantities import format_size

__all__ = ["DEEPEST", "Readable", "unpack"]

DEEPEST = 200  # folders below each other
_LONGEST = 255  # NAME_MAX
_LONGEST_LINK = 4095
_LAST_USER = 65535  # ids that a sandbox's map has
_NOBODY = 65534
_MOST_NOTES = 100
_CHUNK = 1 << 18
_HOLE = bytes(1 << 16)
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(reader: TarReader, root: int, limits: ImportLimits | None = None, *, privileged: bool) -> Imported:
    """Unpack every entry below ``root`` (a descriptor of an empty folder, left open).

    ``privileged``: owners are kept and overlay's own attributes are ``trusted.``; else everything is ours.

    Raises:
        InvalidRequest: see the module; the message names the entry.
        HostLimit: over a limit.
        OSError: the disk is full, or can't do what a layer needs.
    """
    work = _Unpacking(reader, root, limits or ImportLimits(), privileged)
    try:
        for entry in reader:
            work.entry(entry)
        work.finish()
    finally:
        work.close()
    return work.report()


class _Unpacking:
    def __init__(self, reader: TarReader, root: int, limits: ImportLimits, privileged: bool) -> None:
        self._reader = reader
        self._root = root
        self._limits = limits
        self._privileged = privileged
        self._opaque = "trusted.overlay.opaque" if privileged else "user.overlay.opaque"
        self._path: list[bytes] = []  # the folder that is open at present
        self._open: list[int] = [root]
        self._times: dict[tuple[bytes, ...], int] = {}  # of folders; set last, when nothing moves any more
        self._opaques: set[tuple[bytes, ...]] = set()
        self._notes: list[str] = []
        self._entries = 0
        self._size = 0
        self._counts = dict.fromkeys(("file", "folder", "link", "whiteout", "skipped", "stripped"), 0)

    def report(self) -> Imported:
        counts = self._counts
        if counts["skipped"]:
            self._notes.insert(0, f"{counts['skipped']} device nodes or pipes were left out")
        if counts["stripped"]:
            self._notes.insert(0, f"{counts['stripped']} files lost their setuid or setgid bit")
        return Imported(
            files=counts["file"],
            folders=counts["folder"],
            links=counts["link"],
            whiteouts=counts["whiteout"],
            size=self._size,
            skipped=counts["skipped"],
            stripped=counts["stripped"],
            notes=tuple(self._notes),
        )

    def close(self) -> None:
        self._climb(0)

    def finish(self) -> None:
        for path, when in sorted(self._times.items()):
            os.utime(self._enter(list(path)), ns=(when, when))

    # -- entries

    def entry(self, entry: Entry) -> None:
        self._entries += 1
        if self._entries > self._limits.entries:
            raise HostLimit(
                f"the layer has more than {self._limits.entries} entries", hint="it is no honest one"
            )
        parts = _parts(entry.name)
        if not parts:
            if entry.kind != "folder":
                raise InvalidRequest(f"{_shown(entry.name)} is the root, but no folder")
            self._dress_folder(self._root, (), entry)
            return
        for part in parts[:-1]:
            if part.startswith(_WHITEOUT):
                raise InvalidRequest(f"{_shown(entry.name)}: something inside of a whiteout")
        name = parts[-1]
        parent = self._enter(parts[:-1])
        if name.startswith(_WHITEOUT):
            self._whiteout(entry, parent, parts)
        elif entry.kind in ("device", "pipe"):
            self._counts["skipped"] += 1
        elif entry.kind == "folder":
            self._folder(entry, parent, parts)
        elif entry.kind == "file":
            self._file(entry, parent, name)
        elif entry.kind == "symlink":
            self._symlink(entry, parent, name)
        else:
            self._hard_link(entry, parts)

    def _folder(self, entry: Entry, parent: int, parts: list[bytes]) -> None:
        name, hides = parts[-1], False
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            self._counts["folder"] += 1
        except FileExistsError:
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                hides = _is_whiteout(info)
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o700, dir_fd=parent)
                self._counts["folder"] += 1
        folder = os.open(name, _FOLDER, dir_fd=parent)
        try:
            self._dress_folder(folder, tuple(parts), entry)
            if hides:
                self._make_opaque(folder, tuple(parts))
        finally:
            os.close(folder)

    def _file(self, entry: Entry, parent: int, name: bytes) -> None:
        self._size += entry.size
        if self._size > self._limits.size:
            raise HostLimit(
                f"with {_shown(entry.name)} ({format_size(entry.size)}) the layer is larger than "
                f"{format_size(self._limits.size)}, the limit of an import",
                hint="raise the limit with --max-size if you trust it",
            )
        self._make_room(entry, parent, name)
        file = os.open(name, _CREATE, 0o600, dir_fd=parent)
        try:
            self._fill(file, entry.size)
            self._dress_file(file, entry)
        finally:
            os.close(file)
        self._counts["file"] += 1

    def _fill(self, file: int, size: int) -> None:
        at, hole = 0, False
        while data := self._reader.read(_CHUNK):
            # Zeros are left as a hole: what claims to be huge takes no room.
            if len(data) <= len(_HOLE) * 4 and not data.strip(b"\0"):
                at += len(data)
                hole = True
                continue
            view = memoryview(data)
            while view:
                written = os.pwrite(file, view, at)
                at += written
                view = view[written:]
            hole = False
        if hole:
            os.ftruncate(file, size)

    def _symlink(self, entry: Entry, parent: int, name: bytes) -> None:
        if not 0 < len(entry.link) <= _LONGEST_LINK:
            raise InvalidRequest(f"{_shown(entry.name)}: a link to a name of {len(entry.link)} bytes")
        self._make_room(entry, parent, name)
        os.symlink(entry.link, name, dir_fd=parent)
        if self._privileged:
            os.chown(name, self._id(entry.uid), self._id(entry.gid), dir_fd=parent, follow_symlinks=False)
        when = int(entry.mtime * 1e9)
        os.utime(name, ns=(when, when), dir_fd=parent, follow_symlinks=False)
        self._counts["link"] += 1

    def _hard_link(self, entry: Entry, parts: list[bytes]) -> None:
        target = _parts(entry.link)
        if not target or any(part.startswith(_WHITEOUT) for part in target):
            raise InvalidRequest(f"{_shown(entry.name)}: a hard link to {_shown(entry.link) or 'nothing'}")
        if target == parts:
            return
        where = os.dup(self._enter(target[:-1]))
        try:
            try:
                info = os.stat(target[-1], dir_fd=where, follow_symlinks=False)
            except FileNotFoundError:
                info = None
            if info is None or not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
                raise InvalidRequest(
                    f"{_shown(entry.name)}: a hard link to {_shown(entry.link)}, which this layer has not"
                )
            parent = self._enter(parts[:-1])
            self._make_room(entry, parent, parts[-1])
            try:
                os.link(target[-1], parts[-1], src_dir_fd=where, dst_dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
                raise InvalidRequest(f"{_shown(entry.name)}: too many hard links to one file") from error
        finally:
            os.close(where)
        self._counts["link"] += 1

    def _whiteout(self, entry: Entry, parent: int, parts: list[bytes]) -> None:
        if entry.kind not in ("file", "hardlink"):
            raise InvalidRequest(f"{_shown(entry.name)}: a whiteout that is a {entry.kind}")
        name = parts[-1]
        if name == _OPAQUE:
            if len(parts) == 1:
                raise InvalidRequest(
                    "the layer hides the root of all layers below",
                    hint="make the image anew",
                )
            self._make_opaque(parent, tuple(parts[:-1]))
            return
        hidden = name[len(_WHITEOUT) :]
        if hidden.startswith(_WHITEOUT):
            self._note(f"{_shown(entry.name)}: left out, a note of another storage driver")
            return
        if hidden in (b"", b".", b".."):
            raise InvalidRequest(f"{_shown(entry.name)}: a whiteout of {_shown(hidden) or 'nothing'}")
        self._counts["whiteout"] += 1
        try:
            os.mknod(hidden, stat.S_IFCHR, 0, dir_fd=parent)
        except FileExistsError:
            # It hides what is below; what this layer has itself stays.
            if stat.S_ISDIR(os.stat(hidden, dir_fd=parent, follow_symlinks=False).st_mode):
                folder = os.open(hidden, _FOLDER, dir_fd=parent)
                try:
                    self._make_opaque(folder, (*parts[:-1], hidden))
                finally:
                    os.close(folder)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            raise _no_whiteouts("make the device 0:0 that hides a file") from error

    def _make_opaque(self, folder: int, path: tuple[bytes, ...]) -> None:
        if path in self._opaques:
            return
        self._opaques.add(path)
        self._counts["whiteout"] += 1
        try:
            os.setxattr(folder, self._opaque, b"y")
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EPERM):
                raise
            raise _no_whiteouts(f"set {self._opaque}") from error

    # -- what entries wear

    def _dress_folder(self, folder: int, path: tuple[bytes, ...], entry: Entry) -> None:
        mode = entry.mode & 0o3777
        if self._privileged:
            os.chown(folder, self._id(entry.uid), self._id(entry.gid))
        else:
            mode |= 0o700  # we are the owner, and have to look after it
        os.chmod(folder, mode)
        self._dress(folder, entry)
        self._times[path] = int(entry.mtime * 1e9)

    def _dress_file(self, file: int, entry: Entry) -> None:
        mode = entry.mode & 0o1777
        if entry.mode & 0o6000:
            self._counts["stripped"] += 1
        if self._privileged:
            os.chown(file, self._id(entry.uid), self._id(entry.gid))
        else:
            mode |= 0o400
        os.chmod(file, mode)
        self._dress(file, entry)
        when = int(entry.mtime * 1e9)
        os.utime(file, ns=(when, when))

    def _dress(self, target: int, entry: Entry) -> None:
        for name, value in entry.attributes:
            foreign = not name.startswith(b"user.") or name.startswith(b"user.overlay.")
            if foreign or not len(b"user.") < len(name) <= _LONGEST:
                self._note(f"{_shown(entry.name)}: attribute {_shown(name)} is left out")
                continue
            try:
                os.setxattr(target, name, value)
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.E2BIG, errno.ERANGE, errno.ENOSPC):
                    raise
                self._note(f"{_shown(entry.name)}: attribute {_shown(name)} can't be kept here")

    def _id(self, number: int) -> int:
        if number <= _LAST_USER:
            return number
        self._note(f"user or group {number} became nobody: a sandbox has ids up to {_LAST_USER}")
        return _NOBODY

    def _note(self, text: str) -> None:
        if len(self._notes) < _MOST_NOTES and text not in self._notes:
            self._notes.append(text)

    # -- the way there

    def _make_room(self, entry: Entry, parent: int, name: bytes) -> None:
        """The last of several entries of one name counts, as for tar; but no folder is thrown away for it."""
        try:
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=parent)
            return
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise InvalidRequest(
                f"{_shown(entry.name)} comes twice: as a folder with things in it, then as a {entry.kind}"
            ) from error
        self._forget(_parts(entry.name))

    def _forget(self, parts: list[bytes]) -> None:
        gone = tuple(parts)
        self._times.pop(gone, None)
        self._opaques.discard(gone)
        if self._path[: len(gone)] == parts:
            self._climb(len(gone) - 1)

    def _enter(self, parts: list[bytes]) -> int:
        """A descriptor of the folder, which is made if it is missing; good until the next call."""
        common = 0
        for ours, wanted in zip(self._path, parts, strict=False):
            if ours != wanted:
                break
            common += 1
        self._climb(common)
        for at in range(common, len(parts)):
            self._descend(parts, at)
        return self._open[-1]

    def _descend(self, parts: list[bytes], at: int) -> None:
        name, here, hides = parts[at], self._open[-1], False
        try:
            below = os.open(name, _FOLDER, dir_fd=here)
        except FileNotFoundError:
            below = self._missing(name, here)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            info = os.stat(name, dir_fd=here, follow_symlinks=False)
            hides = _is_whiteout(info)
            if not hides:
                kind = "link" if stat.S_ISLNK(info.st_mode) else "file"
                whole, through = _shown(b"/".join(parts)), _shown(b"/".join(parts[: at + 1]))
                raise InvalidRequest(
                    f"{whole} goes through the {kind} {through}",
                    hint="no honest archive has that",
                ) from error
            os.unlink(name, dir_fd=here)
            below = self._missing(name, here)
        self._open.append(below)
        self._path.append(name)
        if hides:
            self._make_opaque(below, tuple(self._path))

    def _missing(self, name: bytes, here: int) -> int:
        self._entries += 1  # a path may name many folders that no entry does
        if self._entries > self._limits.entries:
            raise HostLimit(
                f"the layer has more than {self._limits.entries} entries", hint="it is no honest one"
            )
        os.mkdir(name, 0o755, dir_fd=here)
        folder = os.open(name, _FOLDER, dir_fd=here)
        os.chmod(folder, 0o755)  # noqa: S103 - as tar makes them
        self._counts["folder"] += 1
        return folder

    def _climb(self, depth: int) -> None:
        while len(self._path) > depth:
            os.close(self._open.pop())
            self._path.pop()


def _parts(name: bytes) -> list[bytes]:
    """The parts of a name below the root. A leading slash means the root, as for every tar."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise InvalidRequest(f"{_shown(name)} climbs out of its folder", hint="no honest archive has that")
    if len(parts) > DEEPEST:
        raise InvalidRequest(f"{_shown(name)}: more than {DEEPEST} folders below each other")
    if any(len(part) > _LONGEST for part in parts):
        raise InvalidRequest(f"{_shown(name)}: a name of more than {_LONGEST} bytes")
    return parts


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _no_whiteouts(doing: str) -> HostLimit:
    return HostLimit(
        f"the layer hides files of the layers below, and the state folder's file system can't {doing}",
        hint="point RINGFENCE_HOME at an ext4, xfs or btrfs file system, or run as root",
    )
