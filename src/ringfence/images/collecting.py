"""Garbage collection: what nobody needs any more goes, and caches shrink to a budget.

Needed are: templates with a name or a pin, those of sandboxes that exist, those that a build under way holds,
and the layers that an import under way has asked for. Everything else is moved aside under the store's
exclusive lock, which takes moments, and removed afterwards, which may take minutes. Whoever is killed
meanwhile leaves it to the next collection. What Debian's tools left of imports that were killed goes, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ringfence.images import debian
from ringfence.images.removing import remove_tree
from ringfence.images.store import HOLDS, TemplateStore
from ringfence.model.errors import NotFound, WrongState
from ringfence.model.values import dataclass

YOUNG = 600.0  # seconds that a cache's entry is left alone after it was used last


@dataclass(frozen=True, slots=True)
class Cache:
    """Files and folders that can be made again: what lies in ``folder``, but for hidden names.

    ``kept`` says by its name whether one is of use at all; others go without any budget.
    """

    kind: str
    folder: Path
    kept: Callable[[str], bool] = lambda name: True


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed (or would have): ``(kind, name, bytes)``, and what the rest takes."""

    removed: tuple[tuple[str, str, int], ...]
    left: int  # bytes of layers and caches
    failures: tuple[str, ...] = ()

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(size for _, _, size in self.removed)


def collect(
    store: TemplateStore,
    in_use: Callable[[], Iterable[str]],
    *,
    caches: Callable[[], Sequence[Cache]] = tuple,
    budget: int | None = None,
    dry_run: bool = False,
) -> Collected:
    """Remove what is not needed.

    Args:
        store: of templates.
        in_use: digests of templates that sandboxes use; asked while nobody can begin to use another.
        caches: asked after that: what else lies on the disk and may be made again.
        budget: bytes that layers and caches may take together; entries that were not used for the longest
            time go first. Templates with a name never go for it.
        dry_run: only say what would go.
    """
    work = _Collection(store, dry_run)
    work.sessions()
    work.unfinished()
    with store.exclusive():
        work.templates(set(in_use()))
        work.layers()
        work.fittings()
    work.empty_trash()
    work.caches(caches(), budget)
    return Collected(tuple(work.removed), work.left, tuple(work.failures))


class _Collection:
    def __init__(self, store: TemplateStore, dry_run: bool) -> None:
        self.removed: list[tuple[str, str, int]] = []
        self.failures: list[str] = []
        self.left = 0
        self._store = store
        self._dry = dry_run
        self._needed: set[str] = set()  # layers
        self._templates: set[str] = set()

    def sessions(self) -> None:
        """What dead imports left, and what living ones have asked for."""
        tmp = self._store.folder / "tmp"
        for name in sorted({name.removesuffix(".lock") for name in os.listdir(tmp)}):
            # A living session has its lock before its folder, and after it.
            lock = _try_lock(tmp / f"{name}.lock")
            if lock is None:
                continue
            try:
                self._remove("leftover", name, tmp / name)
                if not self._dry:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(tmp / f"{name}.lock")
            finally:
                if lock >= 0:
                    os.close(lock)

    def unfinished(self) -> None:
        """Root file systems that mmdebstrap was making for somebody who is dead."""
        for place, lock in debian.abandoned():
            try:
                self.removed.append(("leftover", place.name, _weigh(place)[1]))
                if not self._dry:
                    debian.remove(place)
            except OSError as error:
                self.failures.append(f"{place} can't be removed: {error.strerror}")
            finally:
                os.close(lock)

    def templates(self, in_use: set[str]) -> None:
        """Those without name, pin and sandbox go; the layers of the others are needed."""
        in_use |= self._held()
        named = {self._store.points_at(name) for name in self._store.names()}
        for digest in self._store.digests():
            if digest in named or digest in in_use or self._store.pinned(digest):
                try:
                    self._needed.update(self._store.layers_of(digest))
                    self._templates.add(digest)
                    continue
                except (NotFound, WrongState) as error:
                    self.failures.append(error.message)
            self.removed.append(("template", digest, 0))
            if not self._dry:
                self._store.drop(digest)
        for session in (self._store.folder / "tmp").glob("*/needs"):
            with contextlib.suppress(FileNotFoundError):
                self._needed.update("sha256:" + name for name in os.listdir(session))

    def _held(self) -> set[str]:
        """Templates between a build's steps, which have no sandbox at this moment."""
        found: set[str] = set()
        for session in (self._store.folder / "tmp").glob(f"*/{HOLDS}"):
            with contextlib.suppress(FileNotFoundError):
                found.update("sha256:" + name for name in os.listdir(session))
        return found

    def layers(self) -> None:
        for digest in self._store.layer_digests():
            folder = self._store.layers / digest.removeprefix("sha256:")
            if digest in self._needed and (folder / "layer.json").is_file():
                self.left += _size_told(folder)
                continue
            self._aside("layer", digest, folder, _size_told(folder))

    def fittings(self) -> None:
        place = self._store.private / "fittings"
        for name in sorted(os.listdir(place)):
            if "sha256:" + name.partition("-")[0] not in self._templates:
                self._aside("fittings", name, place / name, 0)

    def _aside(self, kind: str, name: str, path: Path, size: int) -> None:
        self.removed.append((kind, name, size))
        if not self._dry:
            os.rename(path, self._store.folder / "trash" / f"{path.name}.{time.time_ns():x}")

    def empty_trash(self) -> None:
        """Without the lock: it may take a while, and nobody looks there."""
        trash = self._store.folder / "trash"
        for name in os.listdir(trash):
            if self._dry:
                self.removed.append(("leftover", name, 0))
                continue
            try:
                remove_tree(trash / name)
            except OSError as error:
                self.failures.append(f"{trash / name} can't be removed: {error.strerror}")

    def caches(self, caches: Sequence[Cache], budget: int | None) -> None:
        now = time.time()
        entries: list[tuple[float, int, str, Path]] = []  # used last, bytes, kind, path
        for cache in caches:
            for path in _entries(cache.folder):
                with contextlib.suppress(OSError):
                    used, size = _weigh(path)
                    if now - used > YOUNG and not cache.kept(path.name):
                        self._remove(cache.kind, path.name, path, size)
                        continue
                    entries.append((used, size, cache.kind, path))
        self.left += sum(size for _, size, _, _ in entries)
        if budget is None:
            return
        for _, size, kind, path in sorted(entries, key=lambda entry: entry[:2]):
            if self.left <= budget:
                return
            self._remove(kind, path.name, path, size)
            self.left -= size

    def _remove(self, kind: str, name: str, path: Path, size: int | None = None) -> None:
        if not os.path.lexists(path):
            return
        if size is None:
            size = _weigh(path)[1]
        self.removed.append((kind, name, size))
        if self._dry:
            return
        try:
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self.failures.append(f"{path} can't be removed: {error.strerror}")


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _weigh(path: Path) -> tuple[float, int]:
    """(when it was used last, bytes on the disk) of a file or a folder with all that is in it."""
    info = os.lstat(path)
    used, size = max(info.st_mtime, info.st_atime), info.st_blocks * 512
    if path.is_dir() and not path.is_symlink():
        for here, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(here, name)).st_blocks * 512
    return used, size


def _size_told(folder: Path) -> int:
    from ringfence.images import records

    try:
        return int(records.read(folder / "layer.json").get("size", 0))
    except (OSError, WrongState, ValueError, TypeError):
        return 0


def _try_lock(path: Path) -> int | None:
    """The lock of a dead session, held by us; None if it lives. -1: there is none any more."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
