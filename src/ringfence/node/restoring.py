"""From a snapshot to a sandbox: what is looked at before, what lies under the wall, what is new in a copy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import InvalidRequest, RuntimeUnavailable, Unsupported
from ringfence.model.sandbox import Owner, SandboxRequest
from ringfence.node.layers import opaque_mark
from ringfence.node.selecting import lacks
from ringfence.node.snapshots import WALL, Snapshot, may_use
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import Handle, RootFs, Runtime, Snapshotting, StartSpec

if TYPE_CHECKING:
    from ringfence.node.service import Node

IDENTITY = "identity"  # the layer with what no two sandboxes share, in a sandbox's own folder
_MACHINE_ID = "etc/machine-id"
_PROGRAMS = ("/usr", "/usr/bin", "/usr/lib", "/var/lib/dpkg/status", "/var/lib/rpm", "/etc/ld.so.cache")


class Saved:
    """A snapshot on its way under a wall."""

    def __init__(self, node: Node, snapshot: Snapshot, runtime: Runtime) -> None:
        self.node = node
        self.snapshot = snapshot
        self.runtime = runtime

    def record(self) -> dict[str, Any]:
        """What the journal says, so that the snapshot stays."""
        return {"snapshot": self.snapshot.name, "secrets": self.snapshot.secrets}

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """While that is written."""
        return self.node.snapshots.noting(self.snapshot.name)

    def root(self, root: RootFs, folder: Path) -> RootFs:
        """The root file system with the snapshot's files in it, and an identity of its own over them.

        Raises:
            InvalidRequest: the template is not the one that it was saved over.
        """
        snapshot, lowers = self.snapshot, root.lowers
        if snapshot.template.startswith("host-"):
            skeleton = self.node.state.templates / snapshot.template
            if not skeleton.is_dir():
                raise InvalidRequest(
                    f"snapshot {snapshot.name} lies over a state of this host's template that is gone "
                    f"({snapshot.template})",
                    hint="make it again, of a new sandbox",
                )
            lowers = (*lowers[:-1], str(skeleton))
        elif root.template != snapshot.template:
            raise InvalidRequest(
                f"snapshot {snapshot.name} lies over template {snapshot.template}, not {root.template}",
                hint="restore it over the template that it was made with",
            )
        if not lowers or not self.runtime.capabilities().overlay:
            return replace(root, lowers=lowers)
        layer = snapshot.layer
        over = (str(layer),) if layer is not None else ()
        own = identity_layer(folder, (*over, *lowers))
        if snapshot.kind == "memory":
            over = ()  # the driver lays what it saved over these itself
        return replace(root, lowers=(*own, *over, *lowers))

    async def start(self, runtime: Runtime, spec: StartSpec) -> Handle:
        """Start the wall."""
        place = self.snapshot.folder / WALL
        if not place.is_dir():
            return await runtime.start(spec)
        assert isinstance(runtime, Snapshotting)  # it is what made it
        return await runtime.restore(spec, str(place), self.snapshot.data)


async def prepare(
    node: Node, name: str, request: SandboxRequest | None, changes: dict[str, Any], *, known: bool = False
) -> tuple[Saved, SandboxRequest]:
    """Look at a snapshot and at who wants it. ``known``: we have made it ourselves a moment ago.

    Raises:
        NotFound: there is none of that name.
        InvalidRequest: it is damaged or foreign; the message says what.
        RuntimeUnavailable, Unsupported: its runtime can't be had here.
    """
    snapshot = node.snapshots.get(name)
    saved = snapshot.wanted()
    if request is None:
        owner = Owner(**snapshot.owner) if "owner" not in changes else changes["owner"]
        request = replace(saved, **{"id": None, "keep": False} | changes | {"owner": owner})
        if snapshot.template.startswith("sha256:"):  # a name may point at another one by now
            request = replace(request, template=snapshot.template)
    may_use(snapshot, request.owner)
    _check_machine(snapshot)
    _check_wall(snapshot, saved, request)
    if request.template not in (saved.template, snapshot.template):
        raise InvalidRequest(
            f"snapshot {snapshot.name} lies over template {saved.template!r}, not {request.template!r}",
            hint="restore it over the template that it was made with",
        )
    if snapshot.secrets and not request.secrets:
        request = replace(request, secrets=True)
    runtime = await node.runtime(snapshot.runtime)
    wanted = request.policy.wall.isolation.minimum
    if runtime.level.rank < wanted.rank:
        raise RuntimeUnavailable(f"runtime {runtime.name} is {runtime.level.value}, not {wanted.value}")
    lack = lacks(request, runtime.capabilities(), root=node.root)
    if lack:
        raise Unsupported(
            f"runtime {runtime.name} can't restore this here: {lack[1]}",
            hint="a snapshot is restored by the runtime that made it",
            capability=lack[0],
        )
    await _check_memory(snapshot, runtime)
    if not known:
        await asyncio.to_thread(node.snapshots.verify, snapshot)
    return Saved(node, snapshot, runtime), request


def _check_machine(snapshot: Snapshot) -> None:
    machine = os.uname().machine
    if snapshot.machine != machine:
        raise InvalidRequest(
            f"snapshot {snapshot.name} was made on a machine of another kind: "
            f"{snapshot.machine}, not {machine}",
            hint="restore it where it was made",
        )


def _check_wall(snapshot: Snapshot, saved: SandboxRequest, request: SandboxRequest) -> None:
    asked = request.policy.wall.isolation.runtime
    if asked is not None and asked != snapshot.runtime:
        raise InvalidRequest(
            f"snapshot {snapshot.name} was made by runtime {snapshot.runtime}, not {asked}",
            hint=f"restore it with {snapshot.runtime}, or make a template from it",
        )
    if saved.policy.wall.digest() != snapshot.wall_digest:
        raise InvalidRequest(
            f"snapshot {snapshot.name} was made under another wall than it says",
            hint="it was changed, or made by another version of Ringfence: make it again",
        )
    if request.policy.wall.digest() != snapshot.wall_digest:
        raise InvalidRequest(
            f"snapshot {snapshot.name} was made under another wall "
            f"({snapshot.wall_digest[:19]}, not {request.policy.wall.digest()[:19]})",
            hint="restore it with the policy that it was made with, or make a template from it",
        )


async def _check_memory(snapshot: Snapshot, runtime: Runtime) -> None:
    if snapshot.kind != "memory":
        return
    version = await runtime_version(runtime)
    if version != snapshot.runtime_version:
        raise InvalidRequest(
            f"snapshot {snapshot.name} was made by {runtime.name} {snapshot.runtime_version}, "
            f"here is {version}",
            hint="memory fits the version that saved it only: make the snapshot again",
        )
    if snapshot.host and snapshot.host != programs():
        raise InvalidRequest(
            f"snapshot {snapshot.name} is of programs of this host that have changed since",
            hint="memory holds on to the files it was made with: make the snapshot again",
        )


async def runtime_version(runtime: Runtime) -> str:
    """The version of a runtime's program; Ringfence's own where it has none."""
    import re

    from ringfence import __version__

    driver = getattr(runtime, "driver", runtime)
    program = getattr(driver, "program", None)
    if not isinstance(program, str):
        return __version__
    from ringfence.runtimes.launching.foreign import version_of

    text = await version_of(program)
    found = re.search(r"(?:version |release-|nsjail )?v?(\d[\w.~+-]*)", text)
    return found.group(1) if found else __version__


def programs() -> str:
    """A name for the state of the host's programs: another one after anything was installed or removed."""
    found = hashlib.sha256()
    for path in _PROGRAMS:
        try:
            info = os.lstat(path)
        except OSError:
            continue
        found.update(f"{path}\0{info.st_ino}\0{info.st_mtime_ns}\0{info.st_size}\n".encode())
    return "sha256:" + found.hexdigest()


def identity_layer(folder: Path, lowers: tuple[str, ...]) -> tuple[str, ...]:
    """A layer with a machine id of its own, if the layers below (topmost first) have one; else none.

    Raises:
        HostLimit: the disk is full, or the like.
    """
    place = _find(lowers, "etc")
    if place is None or not stat.S_ISDIR(place.st_mode) or _find(lowers, _MACHINE_ID) is None:
        return ()
    layer = folder / IDENTITY
    try:
        (layer / "etc").mkdir(parents=True)
        file = layer / _MACHINE_ID
        with open(file, "x") as text:
            text.write(os.urandom(16).hex() + "\n")
        file.chmod(0o444)
        top = os.lstat(lowers[0])
        for path, info in ((layer, top), (layer / "etc", place)):
            # The topmost layer decides a folder's mode and owner.
            path.chmod(stat.S_IMODE(info.st_mode))
            if os.geteuid() == 0:
                os.chown(path, info.st_uid, info.st_gid)
    except OSError as error:
        raise host_limit(error, f"make a layer in {folder}") from error
    return (str(layer),)


def _find(lowers: tuple[str, ...], path: str) -> os.stat_result | None:
    """What an overlay of these layers shows at a path; None for nothing, or if it leads through a symlink."""
    mark = opaque_mark(root=os.geteuid() == 0)
    parts = path.split("/")
    for lower in lowers:
        here = lower
        for number, part in enumerate(parts, start=1):
            above, here = here, f"{here}/{part}"
            try:
                info = os.lstat(here)
            except OSError:
                if above != lower and _has(above, mark):
                    return None
                break  # further down, perhaps
            if number == len(parts):
                return None if stat.S_ISCHR(info.st_mode) else info
            if not stat.S_ISDIR(info.st_mode):
                return None
    return None


def _has(path: str, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(path, mark, follow_symlinks=False) == b"y"
    return False
