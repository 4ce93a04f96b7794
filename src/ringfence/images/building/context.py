"""The context folder: what COPY may take, found and read without leaving it.

Every folder is opened by itself, below the one above it and through no link; a link that somebody named in a
COPY is followed inside of the context only. What changes between the look and the copy is found out.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ringfence.images.building.ignoring import LARGEST, NAME, Ignored, translate
from ringfence.model.errors import HostLimit, InvalidRequest, NotFound

MOST_FILES = 500_000
DEEPEST = 180
_MOST_LINKS = 40
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CHUNK = 1 << 20


class Found(NamedTuple):
    """One thing to copy. ``name``: its path below the destination, empty for the destination itself.

    ``kind``: file, folder or symlink. ``path``: in the context. ``digest``: of a file's bytes, or of a link's
    text. ``mode``: permission bits, set-user-ID and the like taken off.
    """

    name: str
    kind: str
    path: str
    mode: int
    size: int
    digest: str
    link: str = ""


class Context:
    """A folder that COPY takes from. Close it."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = os.path.realpath(folder)
        try:
            self._root = os.open(self.folder, _FOLDER)
        except OSError as error:
            raise InvalidRequest(
                f"the context {folder} can't be read: {os.strerror(error.errno or 0)}", hint="name a folder"
            ) from None
        try:
            self._ignored = Ignored(self._ignore_file())
        except BaseException:
            self.close()
            raise
        self._count = 0

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _ignore_file(self) -> str:
        try:
            file = os.open(NAME, _FILE, dir_fd=self._root)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return ""
            raise InvalidRequest(f"{NAME} can't be read: {os.strerror(error.errno or 0)}") from None
        with os.fdopen(file, "rb") as stream:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InvalidRequest(f"{NAME} is no file")
            data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise InvalidRequest(f"{NAME} is larger than 1 MiB")
        return data.decode("utf-8", "surrogateescape")

    # -- finding

    def find(self, sources: tuple[str, ...], *, into_folder: bool) -> list[Found]:
        """What the sources of one COPY come to, sorted by the name it gets.

        ``into_folder``: the destination is a folder, files keep their names in it.

        Raises:
            NotFound: nothing is there; the hint has what is close.
            InvalidRequest: a link that leads out, something that is no file, or too much.
        """
        found: dict[str, Found] = {}
        for source in sources:
            for path in self._expand(source):
                for each in self._take(path, into_folder):
                    self._count += 1
                    if self._count > MOST_FILES:
                        raise HostLimit(
                            f"the context has more than {MOST_FILES} files",
                            hint=f"leave some out with {NAME}",
                        )
                    found[each.name] = each
        return [found[name] for name in sorted(found)]

    def _expand(self, source: str) -> list[str]:
        """Paths in the context that fit a source, sorted."""
        parts = [part for part in source.split("/") if part not in ("", ".")]
        if not parts:
            return [""]
        if not re.search(r"[*?\[]", source):
            path = "/".join(parts)
            if path in self._ignored and not self._ignored.exceptions:
                raise NotFound(
                    f"{source} is left out by {NAME}", hint=f"add !{path} to {NAME}, or leave it out"
                )
            return [path]
        fitting = [""]
        for part in parts:
            try:
                pattern = re.compile(translate(part), re.DOTALL)
            except (re.error, ValueError):
                raise InvalidRequest(f"{source!r} is no pattern", hint="as in *.py") from None
            further = []
            for above in fitting:
                try:
                    folder = self._open(above, _FOLDER)
                except (NotFound, InvalidRequest):
                    continue
                try:
                    names = [name for name in os.listdir(folder) if pattern.fullmatch(name)]
                finally:
                    os.close(folder)
                further += [f"{above}/{name}" if above else name for name in names]
            fitting = further
        fitting = sorted(path for path in fitting if path not in self._ignored)
        if not fitting:
            raise NotFound(f"nothing in the context fits {source}", hint=f"the context is {self.folder}")
        return fitting

    def _take(self, path: str, into_folder: bool) -> Iterator[Found]:
        resolved = self._resolve(path)
        above, name = posixpath.split(resolved)
        if not resolved:
            yield from self._folder(os.dup(self._root), "", "", 0)
            return
        folder = self._open(above, _FOLDER)
        try:
            info = self._stat(folder, name, path)
            if stat.S_ISDIR(info.st_mode):
                yield from self._folder(os.open(name, _FOLDER, dir_fd=folder), "", resolved, 0)
                return
            base = posixpath.basename(path)
            yield self._one(folder, name, base if into_folder else "", resolved, info)
        except OSError as error:
            raise _unreadable(path, error) from None
        finally:
            os.close(folder)

    def _folder(self, folder: int, name: str, path: str, depth: int) -> Iterator[Found]:
        try:
            if depth > DEEPEST:
                raise InvalidRequest(
                    f"{path}: folders deeper than {DEEPEST}", hint=f"leave it out with {NAME}"
                )
            mode = stat.S_IMODE(os.fstat(folder).st_mode) & 0o1777
            yield Found(name, "folder", path, mode, 0, "")
            for each in sorted(os.listdir(folder)):
                below = f"{path}/{each}" if path else each
                inside = f"{name}/{each}" if name else each
                left_out = below in self._ignored
                info = os.stat(each, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    if left_out and not self._ignored.exceptions:
                        continue
                    found = list(
                        self._folder(os.open(each, _FOLDER, dir_fd=folder), inside, below, depth + 1)
                    )
                    # A folder that is left out is there all the same if something in it is.
                    yield from found if not left_out or len(found) > 1 else ()
                elif not left_out:
                    yield self._one(folder, each, inside, below, info)
        except OSError as error:
            raise _unreadable(path or ".", error) from None
        finally:
            os.close(folder)

    def _one(self, folder: int, name: str, inside: str, path: str, info: os.stat_result) -> Found:
        mode = stat.S_IMODE(info.st_mode) & 0o1777
        if stat.S_ISLNK(info.st_mode):
            link = os.readlink(name, dir_fd=folder)
            digest = hashlib.sha256(os.fsencode(link)).hexdigest()
            return Found(inside, "symlink", path, 0o777, 0, digest, link)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest(
                f"{path} is no file, folder or link: it can't be copied", hint=f"leave it out with {NAME}"
            )
        file = os.open(name, _FILE, dir_fd=folder)
        size = 0
        total = hashlib.sha256()
        try:
            while data := os.read(file, _CHUNK):
                total.update(data)
                size += len(data)
        finally:
            os.close(file)
        return Found(inside, "file", path, mode, size, total.hexdigest())

    # -- reading

    def open(self, found: Found) -> int:
        """A descriptor of a file that was found.

        Raises:
            InvalidRequest: it is not there any more, or is no file any more.
        """
        file = self._open(found.path, _FILE)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise changed(found.path)
        return file

    def _open(self, path: str, flags: int) -> int:
        """Open below the context, through no link."""
        here = os.dup(self._root)
        parts = [part for part in path.split("/") if part]
        try:
            for at, part in enumerate(parts):
                last = at == len(parts) - 1
                following = os.open(part, flags if last else _FOLDER, dir_fd=here)
                os.close(here)
                here = following
        except OSError as error:
            os.close(here)
            if error.errno == errno.ENOENT:
                raise self._missing(path) from None
            raise _unreadable(path, error) from None
        return here

    def _resolve(self, path: str) -> str:
        """The same path through no link; those on the way are followed inside of the context.

        Raises:
            InvalidRequest: one leads out of it.
            NotFound: nothing is there.
        """
        done: list[str] = []
        todo = [part for part in reversed(path.split("/")) if part not in ("", ".")]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                if not done:
                    raise _leads_out(path)
                done.pop()
                continue
            folder = self._open("/".join(done), _FOLDER)
            try:
                info = self._stat(folder, part, path)
                if not stat.S_ISLNK(info.st_mode):
                    done.append(part)
                    continue
                target = os.readlink(part, dir_fd=folder)
            finally:
                os.close(folder)
            links += 1
            if target.startswith("/"):
                raise _leads_out(path)
            if links > _MOST_LINKS:
                raise InvalidRequest(f"{path}: links lead in a circle")
            todo += [each for each in reversed(target.split("/")) if each not in ("", ".")]
        resolved = "/".join(done)
        if resolved != path and resolved in self._ignored and not self._ignored.exceptions:
            raise NotFound(f"{path} leads to {resolved}, which is left out by {NAME}", hint=f"change {NAME}")
        return resolved

    def _stat(self, folder: int, name: str, path: str) -> os.stat_result:
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise self._missing(path) from None
            raise _unreadable(path, error) from None

    def _missing(self, path: str) -> NotFound:
        from difflib import get_close_matches

        above, name = posixpath.split(path)
        try:
            folder = self._open(above, _FOLDER)
        except (NotFound, InvalidRequest):
            return NotFound(f"there is no {path} in the context", hint=f"the context is {self.folder}")
        try:
            names = os.listdir(folder)
        finally:
            os.close(folder)
        close = get_close_matches(name, names, n=1, cutoff=0.6)
        where = f"{above}/" if above else ""
        hint = f"did you mean {where}{close[0]}?" if close else f"the context is {self.folder}"
        return NotFound(f"there is no {path} in the context", hint=hint)


def changed(path: str) -> InvalidRequest:
    """A file is not what it was a moment before."""
    return InvalidRequest(f"{path} was changed while the context was read", hint="build again")


def _leads_out(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is a link that leads out of the context", hint="copy the file itself into the context folder"
    )


def _unreadable(path: str, error: OSError) -> InvalidRequest:
    reason = os.strerror(error.errno or 0)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return InvalidRequest(f"{path}: a part of it is a link or no folder", hint="name the file itself")
    return InvalidRequest(f"{path} in the context can't be read: {reason}")
