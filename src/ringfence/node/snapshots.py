"""The store of snapshots: ``<state>/snapshots``, a folder each, whole or not there at all.

::

    snapshots/             0711
      .lock                      held shared while a sandbox is noted as a user, exclusively to remove
      .<id>.<node>               one that is being made, or removed; a dead node's is swept
      <name, or id>/       0700  files inside carry numbers of sandboxes' users: nobody may come near
        manifest.json            what it is, from what, whose; with a digest of itself
        tree                     the list of all files with their digests (``node.trees``)
        layer/                   disk: the files that were written, over the template
        wall/                    saved by the runtime's own means (memory, or a machine's disk)

A snapshot appears by one rename and goes by one rename. Whoever uses one (its layer lies under a wall) is
found in the journals of ``sandboxes/``: what is used is not removed. *Temporary* ones (of a fork) go with
their last user, or with the sweep after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, WrongState
from ringfence.model.sandbox import Owner, SandboxRequest
from ringfence.model.values import dataclass
from ringfence.node import journal, trees
from ringfence.node.state import StateRoot, unlock
from ringfence.node.troubles import host_limit

FORMAT = 1
MANIFEST, TREE, LAYER, WALL = "manifest.json", "tree", "layer", "wall"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_ID = re.compile(r"sn-[0-9a-hjkmnp-tv-z]{20}", re.ASCII)
_LARGEST = 4 << 20  # bytes of a manifest
_AGAIN = "remove it (`ringfence snapshot rm`) and make it again"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved sandbox, as its manifest says. ``folder`` is where it lies; ``made_at`` seconds since the
    epoch.

    ``kind``: ``disk`` or ``memory`` (with its processes). ``consistency``: ``frozen`` (nothing ran while it
    was copied), ``unchanged`` (it could not be frozen, but nothing changed meanwhile) or ``driver``.
    ``template`` is the content that it lies over, ``host-…`` or ``sha256:…``; ``host`` names the host's
    programs where memory holds on to them. ``data`` is the runtime's own.
    """

    id: str
    name: str
    kind: str
    runtime: str
    runtime_version: str
    machine: str
    template: str
    host: str
    wall_digest: str
    request: dict[str, Any]
    owner: dict[str, Any]
    secrets: bool
    temporary: bool
    made_by: str
    made_at: float
    source: str
    size: int
    entries: int
    consistency: str
    left_out: tuple[str, ...]
    tree: str
    data: dict[str, Any]
    folder: Path = Path()

    @property
    def layer(self) -> Path | None:
        """The files that were written, as a layer; None if only the runtime knows where they are."""
        for path in (self.folder / LAYER, self.folder / WALL / "upper"):
            if path.is_dir():
                return path
        return None

    def wanted(self) -> SandboxRequest:
        """The request of the sandbox that was saved.

        Raises:
            InvalidRequest: the manifest makes no sense.
        """
        try:
            return journal.request_from_json(self.request)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"snapshot {self.name} has no request that makes sense", hint=_AGAIN
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """What people and programs are shown."""
        hidden = ("request", "data", "tree", "folder", "made_by")
        shown = {key: value for key, value in asdict(self).items() if key not in hidden}
        return shown | {"owner": self.owner, "labels": self.request.get("labels", {})}


class SnapshotStore:
    """The snapshots of one state root, seen by one node."""

    def __init__(
        self, state: StateRoot, *, root: bool, released: Callable[[Snapshot], None] | None = None
    ) -> None:
        """``released`` is called with each snapshot that went."""
        self._state = state
        self._root = root
        self._released = released
        self.folder = state.snapshots

    # -- looking

    def all(self, *, temporary: bool = False) -> tuple[Snapshot, ...]:
        """All whole snapshots, the oldest first; damaged ones are left out (see :meth:`damaged`)."""
        found = []
        for name in self._names():
            with contextlib.suppress(InvalidRequest, NotFound):
                snapshot = self._read(name)
                if temporary or not snapshot.temporary:
                    found.append(snapshot)
        return tuple(sorted(found, key=lambda snapshot: (snapshot.made_at, snapshot.id)))

    def damaged(self) -> dict[str, str]:
        """Folders without a manifest that makes sense, by name, and why."""
        found = {}
        for name in self._names():
            try:
                self._read(name)
            except InvalidRequest as error:
                found[name] = error.message
            except NotFound:
                continue
        return found

    def get(self, name: str) -> Snapshot:
        """A snapshot by name or id.

        Raises:
            NotFound: there is none; the hint names those that are close.
            InvalidRequest: it is damaged.
        """
        if name in self._names():
            return self._read(name)
        known = self.all()
        for snapshot in known:
            if snapshot.id == name:
                return snapshot
        raise NotFound(f"no snapshot {name!r}", hint=_close(name, [s.name for s in known]))

    def verify(self, snapshot: Snapshot) -> None:
        """Read all of it and compare it with its list.

        Raises:
            InvalidRequest: it is damaged; the message names the first difference.
        """
        saved = self._list_of(snapshot)
        skip = tuple(str(name) for name in snapshot.data.get("checked", ()))
        part = LAYER if (snapshot.folder / LAYER).is_dir() else WALL
        trees.check(str(snapshot.folder / part), saved, root=self._root, skip=skip)

    def _list_of(self, snapshot: Snapshot) -> bytes:
        saved = _read_file(snapshot.folder / TREE, trees.LARGEST, snapshot.name)
        if "sha256:" + hashlib.sha256(saved).hexdigest() != snapshot.tree:
            raise InvalidRequest(f"snapshot {snapshot.name} is damaged: its list of files is", hint=_AGAIN)
        return saved

    def _names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))

    def _read(self, name: str) -> Snapshot:
        folder = self.folder / name
        if not os.path.lexists(folder):
            raise NotFound(f"no snapshot {name!r}", hint="see `ringfence snapshot ls`")
        if folder.is_symlink() or not folder.is_dir():
            raise InvalidRequest(f"snapshot {name} is damaged: it is no folder", hint=_AGAIN)
        try:
            value = json.loads(_read_file(folder / MANIFEST, _LARGEST, name))
            stated = value.pop("digest")
            if value.pop("format") != FORMAT:
                raise InvalidRequest(
                    f"snapshot {name} was made by another version of Ringfence",
                    hint="restore it with that one, or make it again",
                )
            if stated != _digest(value):
                raise InvalidRequest(f"snapshot {name} is damaged: its manifest is", hint=_AGAIN)
            made = Snapshot(**value | {"left_out": tuple(value["left_out"]), "folder": folder})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"snapshot {name} is damaged: its manifest makes no sense", hint=_AGAIN
            ) from error
        if name != made.name:
            raise InvalidRequest(f"snapshot {name} is damaged: its manifest is of {made.name!r}", hint=_AGAIN)
        return made

    # -- making

    def work(self, name: str, *, passable: bool = False) -> Path:
        """The new folder of one that is being made; it is nobody's business until :meth:`commit`.

        ``passable``: the runtime writes into it as the sandbox's user. Its name is a secret of 52 bits.

        Raises:
            HostLimit: it can't be made.
        """
        folder = self.folder / f".{name}.{self._state.owner}"
        try:
            folder.mkdir(0o700)
            if passable:
                folder.chmod(0o711)
        except OSError as error:
            raise host_limit(error, f"make {folder}") from error
        return folder

    def free(self, name: str) -> None:
        """Check that a name can be given.

        Raises:
            InvalidRequest: it is no name, or there is a snapshot of that name.
        """
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name!r} is no name of a snapshot",
                hint="1 to 63 of a-z, 0-9, dot, dash and underscore, beginning with a letter or digit",
            )
        if os.path.lexists(self.folder / name):
            raise _taken(name)

    def commit(self, work: Path, snapshot: Snapshot, listing: bytes) -> Snapshot:
        """Write list and manifest, and make it appear under its name.

        Raises:
            InvalidRequest: there is one of that name.
            HostLimit: the disk is full.
        """
        value = asdict(snapshot)
        del value["folder"]
        value["left_out"] = list(value["left_out"])
        text = json.dumps({"format": FORMAT, "digest": _digest(value), **value}, indent=1).encode()
        target = self.folder / snapshot.name
        try:
            work.chmod(0o700)
            _write(work / TREE, listing)
            _write(work / MANIFEST, text)
            os.rename(work, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _taken(snapshot.name) from None
            raise host_limit(error, f"write the snapshot {snapshot.name}") from error
        return self._read(snapshot.name)

    # -- using and removing

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """While a journal that names the snapshot as used is written: it is there, and stays.

        Raises:
            NotFound: it was removed meanwhile.
        """
        with self._locked(fcntl.LOCK_SH):
            if not os.path.lexists(self.folder / name / MANIFEST):
                raise NotFound(f"snapshot {name} was removed meanwhile", hint="see `ringfence snapshot ls`")
            yield

    def in_work(self, number: str) -> bool:
        """Whether somebody is just making it."""
        return any(name.startswith(f".{number}.") for name in os.listdir(self.folder))

    def users(self, name: str) -> list[str]:
        """Ids of the sandboxes whose files lie over this snapshot."""
        found = []
        for each in os.listdir(self._state.sandboxes):
            record = journal.read(self._state.sandboxes / each) or {}
            if name in (record.get("snapshot"), record.get("base")):
                found.append(each)
        return sorted(found)

    def remove(self, name: str) -> None:
        """Remove a snapshot, whole or damaged.

        Raises:
            NotFound: there is none.
            WrongState: sandboxes use it; the details name them.
            HostLimit: it can't be removed.
        """
        if name not in self._names():
            name = self.get(name).name
        with self._locked(fcntl.LOCK_EX):
            users = self.users(name)
            if users:
                raise WrongState(
                    f"snapshot {name} is in use by {', '.join(users[:5])}"
                    + (f" and {len(users) - 5} more" if len(users) > 5 else ""),
                    hint="remove them first (`ringfence sandbox rm`), or let them end",
                    sandboxes=users,
                )
            known: Snapshot | None = None
            with contextlib.suppress(InvalidRequest):
                known = self._read(name)
            gone = self._take_away(name)
        if known is not None and self._released is not None:
            self._released(known)
        self._delete(gone)

    def drop(self, name: str) -> bool:
        """Remove a temporary snapshot that nobody uses any more; True if it went."""
        try:
            if not self._read(name).temporary:
                return False
            self.remove(name)
        except (NotFound, WrongState, InvalidRequest, HostLimit):
            return False
        return True

    def collect(self) -> list[str]:
        """Remove temporary snapshots without a user whose maker is dead. Returns their names."""
        return [
            snapshot.name
            for snapshot in self.all(temporary=True)
            if snapshot.temporary and not self._alive(snapshot.made_by) and self.drop(snapshot.name)
        ]

    def _alive(self, node: str) -> bool:
        if node == self._state.owner:
            return True
        try:
            lock = os.open(self._state.nodes / node, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            unlock(lock)
        return False

    def _take_away(self, name: str) -> Path:
        target = self.folder / f".{name}.removed-{time.monotonic_ns()}.{self._state.owner}"
        try:
            os.rename(self.folder / name, target)
        except FileNotFoundError:
            raise NotFound(f"no snapshot {name!r}", hint="see `ringfence snapshot ls`") from None
        except OSError as error:
            raise host_limit(error, f"remove the snapshot {name}") from error
        return target

    def _delete(self, folder: Path) -> None:
        delete(folder)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        try:
            lock = os.open(
                self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise host_limit(error, f"lock {self.folder}") from error
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)


def delete(folder: Path) -> None:
    """Remove a folder that is no snapshot any more, or not yet.

    Raises:
        HostLimit: something in it can't be removed.
    """
    try:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise host_limit(error, f"remove {folder}") from error


def may_use(snapshot: Snapshot, owner: Owner) -> None:
    """A sandbox that held secrets stays in its project, whatever it is made into.

    Raises:
        InvalidRequest: it would leave it.
    """
    theirs = (snapshot.owner.get("organisation"), snapshot.owner.get("project"))
    if snapshot.secrets and theirs != (owner.organisation, owner.project):
        raise InvalidRequest(
            f"snapshot {snapshot.name} is of a sandbox that held secrets of project {theirs[1]!r}: "
            f"it can't be used in project {owner.project!r}",
            hint="make one of a sandbox that never held a secret",
        )


def may_be_template(snapshot: Snapshot) -> None:
    """Whether a template may be made from it.

    Raises:
        InvalidRequest: it held secrets, or is no snapshot of files alone.
    """
    if snapshot.secrets:
        raise InvalidRequest(
            f"snapshot {snapshot.name} is of a sandbox that held secrets: a template is for everybody",
            hint="make the template from a sandbox that never held a secret",
        )
    if snapshot.kind != "disk" or not (snapshot.folder / LAYER).is_dir():
        raise InvalidRequest(
            f"snapshot {snapshot.name} is not one of files alone, so no template can be made from it",
            hint="make a disk snapshot: ringfence sandbox snapshot --disk",
        )


def is_id(name: str) -> bool:
    """Whether it is the id of a snapshot."""
    return _ID.fullmatch(name) is not None


def _taken(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is a snapshot {name} already", hint="choose another name, or `ringfence snapshot rm` it first"
    )


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


def _read_file(path: Path, most: int, name: str) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        what = "missing" if error.errno == errno.ENOENT else f"unreadable ({os.strerror(error.errno or 0)})"
        raise InvalidRequest(f"snapshot {name} is damaged: its {path.name} is {what}", hint=_AGAIN) from error
    if len(data) > most:
        raise InvalidRequest(f"snapshot {name} is damaged: its {path.name} is too large", hint=_AGAIN)
    return data


def _close(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "see `ringfence snapshot ls`"
