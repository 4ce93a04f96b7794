"""Looking into stacked layers as overlay would show them, without mounting anything.

Links are followed inside the root only, and never by the kernel: each part of a path is looked at by itself.
"""

from __future__ import annotations

import errno
import os
import stat

from ringfence.model.errors import InvalidRequest

MOST_LINKS = 40  # as the kernel follows at most
LARGEST = 4 << 20  # bytes that are read of one file


class Merged:
    """The layers in ``lowers`` (folders, topmost first) as one tree. Paths begin with a slash."""

    def __init__(self, lowers: tuple[str, ...]) -> None:
        self._lowers = lowers

    def find(self, path: str) -> tuple[str, os.stat_result] | None:
        """(path on the host, lstat) of what is at ``path``; no part of it may be a link, but the last.

        None: nothing there, or a part on the way is no folder.
        """
        folders: list[str] | None = list(self._lowers)
        found: tuple[str, os.stat_result] | None = (self._lowers[0], os.lstat(self._lowers[0]))
        for part in _parts(path):
            if folders is None:
                return None
            found, folders = _child(folders, part)
            if found is None:
                return None
        return found

    def resolve(self, path: str, *, last: bool = True) -> str:
        """The same path through no link: each is followed inside the root. Missing parts stay as they are.

        ``last``: a link at the end is followed too.

        Raises:
            InvalidRequest: links lead in a circle.
        """
        done: list[str] = []
        todo = list(reversed(_parts(path)))
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            here = "/" + "/".join([*done, part])
            found = self.find(here) if (todo or last) else None
            if found is None or not stat.S_ISLNK(found[1].st_mode):
                done.append(part)
                continue
            links += 1
            if links > MOST_LINKS:
                raise InvalidRequest(f"{path}: the template's links lead in a circle")
            target = os.readlink(found[0])
            if target.startswith("/"):
                done = []
            todo += reversed([each for each in target.split("/") if each not in ("", ".")])
        return "/" + "/".join(done)

    def read(self, path: str, most: int = LARGEST) -> bytes | None:
        """The first bytes of a regular file, links followed inside; None if there is none."""
        try:
            found = self.find(self.resolve(path))
        except InvalidRequest:
            return None
        if found is None or not stat.S_ISREG(found[1].st_mode):
            return None
        try:
            file = os.open(found[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ENOENT, errno.ELOOP):
                return None
            raise
        with os.fdopen(file, "rb") as stream:
            return stream.read(most)

    def list(self, path: str) -> list[str]:
        """Names in a folder (through no link), sorted; empty if it is none."""
        folders: list[str] | None = list(self._lowers)
        for part in _parts(path):
            if folders is None:
                return []
            _, folders = _child(folders, part)
        names: set[str] = set()
        hidden: set[str] = set()
        for folder in folders or ():
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in names or entry.name in hidden:
                        continue
                    gone = _is_whiteout(entry.stat(follow_symlinks=False))
                    (hidden if gone else names).add(entry.name)
        return sorted(names)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _child(folders: list[str], name: str) -> tuple[tuple[str, os.stat_result] | None, list[str] | None]:
    """What ``name`` is in a folder that several layers have: (what is on top, its folders if it is one)."""
    top: tuple[str, os.stat_result] | None = None
    below: list[str] = []
    for folder in folders:
        path = f"{folder}/{name}"
        try:
            info = os.lstat(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                continue
            raise
        if _is_whiteout(info):
            break
        if not stat.S_ISDIR(info.st_mode):
            if top is None:
                return (path, info), None
            break
        top = top or (path, info)
        below.append(path)
        if is_opaque(path):
            break
    return top, below or None


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(folder: str | int) -> bool:
    """Whether overlay shows nothing of the same folder in lower layers."""
    for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
        try:
            if os.getxattr(folder, name) == b"y":
                return True
        except OSError:
            continue
    return False
