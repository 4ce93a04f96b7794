"""The list of everything in a folder of the store, with digests: written once, compared before it is used.

A list is text: one JSON object a line, sorted by path, in which nothing depends on the file system it lies
on. Files are digested by their blocks of 4,096 bytes that are not all zeros, each with its offset, and their
size: so a sparse file takes the time of its data, and a hole that a copy filled with zeros changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from ringfence.model.errors import InvalidRequest
from ringfence.node.layers import DEEPEST, FILE, FOLDER, attribute, extents, opaque_mark

LARGEST = 512 << 20  # bytes of a list: a million entries
_BLOCK, _CHUNK = 4096, 1 << 20
_ZEROS = bytes(_BLOCK)
_AGAIN = "remove it (`ringfence snapshot rm`) and make it again"


def listing(folder: str, *, root: bool, skip: tuple[str, ...] = ()) -> bytes:
    """The list of a folder. ``skip``: names in it that somebody else digests.

    Raises:
        OSError: something can't be read.
        InvalidRequest: there is something in it that no folder of the store has.
    """
    top = os.open(folder, FOLDER)
    try:
        return b"".join(_lines(top, "", opaque_mark(root=root), skip, 0))
    finally:
        os.close(top)


def check(folder: str, saved: bytes, *, root: bool, skip: tuple[str, ...] = ()) -> None:
    """Compare a folder with its list.

    Raises:
        InvalidRequest: it is not what was saved; the message names the first difference.
    """
    try:
        found = listing(folder, root=root, skip=skip)
    except OSError as error:
        name = os.path.basename(error.filename) if isinstance(error.filename, str) else "a file of it"
        raise InvalidRequest(f"the snapshot is damaged: {name}: {error.strerror}", hint=_AGAIN) from error
    if found == saved:
        return
    old, new = _by_path(saved), _by_path(found)
    for path in sorted(old.keys() | new.keys()):
        if path not in new:
            what = "is missing"
        elif path not in old:
            what = "was not there when it was made"
        elif old[path] != new[path]:
            what = "is not what was saved"
        else:
            continue
        raise InvalidRequest(f"the snapshot is damaged: {path!r} {what}", hint=_AGAIN)
    raise InvalidRequest("the snapshot is damaged: its list of files is", hint=_AGAIN)


def digest(file: int, size: int) -> str:
    """The digest of an open file; see the module."""
    total = hashlib.sha256()
    at = 0
    for start, end in extents(file, size):
        # Holes end at blocks of the file system's own size, which may be smaller than ours.
        at = max(at, start - start % _BLOCK)
        while at < end:
            data = os.pread(file, _CHUNK, at)
            if not data:
                break
            for offset in range(0, len(data), _BLOCK):
                block = data[offset : offset + _BLOCK]
                if block != _ZEROS[: len(block)]:
                    total.update((at + offset).to_bytes(8, "big"))
                    total.update(block)
            at += len(data)
    total.update(size.to_bytes(8, "big"))
    return "blocks-sha256:" + total.hexdigest()


def _lines(here: int, path: str, mark: str, skip: tuple[str, ...], depth: int) -> Iterator[bytes]:
    info = os.fstat(here)
    # The top is named by the store, and its time changes when it is moved about.
    yield _line(path, info, "folder", x=_attributes(here), o=attribute(here, mark) == b"y")
    if depth > DEEPEST + 8:
        raise InvalidRequest("the snapshot is damaged: folders too deep", hint=_AGAIN)
    for name in sorted(os.listdir(here)):
        if not depth and name in skip:
            continue
        below = f"{path}/{name}"
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            inside = os.open(name, FOLDER, dir_fd=here)
            try:
                yield from _lines(inside, below, mark, (), depth + 1)
            finally:
                os.close(inside)
        elif kind == stat.S_IFREG:
            file = os.open(name, FILE, dir_fd=here)
            try:
                opened = os.fstat(file)
                yield _line(below, opened, "file", d=digest(file, opened.st_size), x=_attributes(file))
            finally:
                os.close(file)
        elif kind == stat.S_IFLNK:
            yield _line(below, info, "symlink", l=os.readlink(name, dir_fd=here))
        elif kind == stat.S_IFCHR and info.st_rdev == 0:
            yield _line(below, info, "whiteout")
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK):
            yield _line(below, info, "pipe" if kind == stat.S_IFIFO else "socket")
        else:
            raise InvalidRequest(f"the snapshot is damaged: {below!r} is a device", hint=_AGAIN)


def _line(path: str, info: os.stat_result, kind: str, **more: Any) -> bytes:
    entry: dict[str, Any] = {"p": path, "t": kind}
    if kind != "whiteout":
        entry |= {"m": stat.S_IMODE(info.st_mode), "u": info.st_uid, "g": info.st_gid}
    if kind == "file":
        entry |= {"s": info.st_size}
    entry |= {key: value for key, value in more.items() if value}
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _attributes(file: int) -> dict[str, str]:
    path = f"/proc/self/fd/{file}"
    try:
        names = sorted(name for name in os.listxattr(path) if name.startswith("user."))
    except OSError:
        return {}
    return {
        name: hashlib.sha256(os.getxattr(path, name)).hexdigest()
        for name in names
        if name != "user.overlay.opaque"
    }


def _by_path(text: bytes) -> dict[str, str]:
    found = {}
    for line in text.decode("utf-8", "replace").splitlines():
        try:
            found[str(json.loads(line)["p"])] = line
        except (ValueError, KeyError, TypeError):
            continue
    return found
