"""All files of a template as overlay would show them, folder by folder, bounded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from ringfence.images.merged import is_opaque
from ringfence.model.values import dataclass

DEEPEST = 200
MOST_ENTRIES = 4_000_000
SKIPPED = frozenset(("proc", "sys", "dev"))  # at the root: nothing of them is the template's


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a scan looks at: what is beyond is left out, and said."""

    entries: int = MOST_ENTRIES
    depth: int = DEEPEST


class Folder(NamedTuple):
    """One folder: its path inside (``/`` the root), and what is in it by name: (path on the host, lstat)."""

    path: str
    entries: dict[str, tuple[str, os.stat_result]]


def walk(lowers: tuple[str, ...], notes: list[str], bounds: Bounds | None = None) -> Iterator[Folder]:
    """Every folder of the layers (topmost first), sorted; no link is followed.

    Takes names off the ``entries`` of a folder that it yields to keep them from being entered.
    """
    bounds = bounds or Bounds()
    left = bounds.entries
    todo: list[tuple[str, list[str], int]] = [("/", list(lowers), 0)]
    while todo:
        path, folders, depth = todo.pop()
        found: dict[str, tuple[str, os.stat_result]] = {}
        inside: dict[str, list[str]] = {}
        for name, info, host in _entries(folders):
            if name in inside and stat.S_ISDIR(info.st_mode):
                inside[name].append(host)
            elif name not in found:
                found[name] = (host, info)
                if stat.S_ISDIR(info.st_mode):
                    inside[name] = [host]
        left -= len(found)
        if left < 0:
            notes.append(
                f"more than {bounds.entries} files: what is in {path!r} and after it was not looked at"
            )
            return
        folder = Folder(path, found)
        yield folder
        if depth >= bounds.depth:
            if inside:
                notes.append(f"folders deeper than {bounds.depth}: what is below {path!r} was not looked at")
            continue
        for name in sorted(inside, reverse=True):
            if name in found and not (path == "/" and name in SKIPPED):
                todo.append((f"{path.rstrip('/')}/{name}", inside[name], depth + 1))


def _entries(folders: list[str]) -> Iterator[tuple[str, os.stat_result, str]]:
    """What several layers have in one folder: what a layer hides is not there in those below it."""
    closed: set[str] = set()  # hidden, or a file: nothing of that name below counts
    for folder in folders:
        here: set[str] = set()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue  # as a normal user: a folder without rights of its owner
        for entry in entries:
            name = entry.name
            if name in closed:
                continue
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                here.add(name)
                continue
            yield name, info, entry.path
            if not stat.S_ISDIR(info.st_mode) or is_opaque(entry.path):
                here.add(name)
        closed |= here
