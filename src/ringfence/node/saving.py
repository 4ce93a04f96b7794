"""What a node does with a living sandbox as a whole: save it, make several of it, begin it anew.

A *disk* snapshot is a copy of the overlay's upper layer that the host takes while nothing of the wall runs
(or, where a wall can't be frozen, one during which nothing changed); a runtime whose disk the host can't read
saves it itself. A *memory* snapshot is always the runtime's own: it begins with the guest's quiesce, and ends
every link. See ``node.snapshots`` for where they go, ``node.restoring`` for the way back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.model.errors import RingfenceError, Unsupported, WrongState
from ringfence.model.ids import new_id
from ringfence.node import disks, layers, restoring, snapshots, specs, trees
from ringfence.node.journal import request_as_json
from ringfence.node.snapshots import LAYER, WALL, Snapshot
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import Layered, Pausable, Snapshotting

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.node.service import Node

KINDS = ("disk", "memory")
ATTEMPTS = 3  # at a copy during which nothing changes
PAUSE = 0.1  # seconds between them: what was just written counts as changing
_MOST_FORKS = 256
_Result = TypeVar("_Result")


async def snapshot(
    node: Node,
    sandbox: NodeSandbox,
    name: str | None = None,
    *,
    kind: str | None = None,
    temporary: bool = False,
) -> Snapshot:
    """Save a sandbox. It goes on afterwards; after a memory snapshot every link to it has to be opened anew.

    Args:
        node: the sandbox's.
        sandbox: alive.
        name: made up when ``None``.
        kind: ``disk`` or ``memory``; by default with memory where the runtime can.
        temporary: it goes with its last user.

    Raises:
        Unsupported: the runtime can't; the message names those that can.
        WrongState: it has ended, or something else is being done to it; or its files change all the time
            and it can't be frozen.
        InvalidRequest: the name is taken, or there are more files than a snapshot holds.
        HostLimit: the disk is full; nothing is left.
    """
    sandbox.check_alive()
    chosen = choose(sandbox, kind)
    if chosen == "memory" and sandbox.paused:
        raise WrongState(
            f"sandbox {sandbox.id} is paused: its agent can't prepare its memory",
            hint="resume it first, or take a disk snapshot",
        )
    async with sandbox.changing():
        return await save(node, sandbox, name, chosen, temporary=temporary)


async def save(node: Node, sandbox: NodeSandbox, name: str | None, kind: str, *, temporary: bool) -> Snapshot:
    """The same, by who is changing the sandbox already, of a kind that its runtime has."""
    number = new_id("sn")
    name = number if name is None else name
    node.snapshots.free(name)
    await asyncio.to_thread(_check_room, node, sandbox)
    by_driver = kind == "memory" or not _layered(sandbox)
    work = node.snapshots.work(number, passable=by_driver)
    try:
        if by_driver:
            data, consistency, left_out = await _by_driver(sandbox, work, memory=kind == "memory")
        else:
            data, (consistency, left_out) = {}, await _layer(node, sandbox, work)
        version = await restoring.runtime_version(sandbox.runtime)
        return await _in_thread(
            lambda _: _finish(
                node,
                sandbox,
                work,
                id=number,
                name=name,
                kind=kind,
                runtime_version=version,
                temporary=temporary,
                consistency=consistency,
                left_out=left_out,
                data=data,
            )
        )
    except BaseException:
        await to_the_end(asyncio.to_thread(snapshots.delete, work))
        raise


def choose(sandbox: NodeSandbox, kind: str | None) -> str:
    """The kind of snapshot that is taken.

    Raises:
        Unsupported: the runtime can't.
    """
    able = sandbox.runtime.capabilities()
    if kind is None:
        kind = "memory" if able.memory_snapshot else "disk"
    if kind not in KINDS:
        raise Unsupported(
            f"there is no snapshot of kind {kind!r}", hint="disk or memory", capability="snapshot"
        )
    if getattr(able, f"{kind}_snapshot"):
        return kind
    others = {"disk": "jail, nsjail, runc, crun, gvisor and qemu", "memory": "gvisor and qemu"}
    why = "" if kind == "memory" else ": what it writes lies where the host can't take it as a whole"
    raise Unsupported(
        f"runtime {sandbox.runtime.name} has no {kind} snapshots{why}",
        hint=f"runtimes that have: {others[kind]}",
        capability=f"{kind}_snapshot",
    )


async def fork(
    node: Node, sandbox: NodeSandbox, count: int = 1, *, kind: str | None = None, **changes: Any
) -> list[NodeSandbox]:
    """As many copies of a sandbox, each with an identity of its own: id, host name, machine id, token.

    Args:
        node: the sandbox's.
        sandbox: alive; it goes on.
        count: of copies, up to 256.
        kind: as for :func:`snapshot`.
        changes: as for ``Node.restore``; by default they are kept if the sandbox is.

    Raises:
        What snapshot and restore raise; then no copy is left.
    """
    from ringfence.model.errors import InvalidRequest

    if not 1 <= count <= _MOST_FORKS:
        raise InvalidRequest(f"{count} copies at once are impossible", hint=f"1 to {_MOST_FORKS}")
    changes = {"keep": sandbox.request.keep, "owner": sandbox.request.owner} | changes
    made = await snapshot(node, sandbox, kind=kind, temporary=True)
    try:
        saved, request = await restoring.prepare(node, made.name, None, changes, known=True)
        started = await asyncio.gather(
            *(node.create_from(saved, request) for _ in range(count)), return_exceptions=True
        )
    except BaseException:
        await to_the_end(asyncio.to_thread(node.snapshots.drop, made.name))
        raise
    failed = [each for each in started if isinstance(each, BaseException)]
    copies = [each for each in started if not isinstance(each, BaseException)]
    if failed:
        await to_the_end(_destroy_all(copies))
        await to_the_end(asyncio.to_thread(node.snapshots.drop, made.name))
        raise failed[0]
    return copies


async def _destroy_all(sandboxes: list[NodeSandbox]) -> None:
    await asyncio.gather(*(each.destroy() for each in sandboxes), return_exceptions=True)


# -- the parts of a snapshot


def _layered(sandbox: NodeSandbox) -> bool:
    return isinstance(sandbox.runtime, Layered) and sandbox.runtime.capabilities().overlay


def _check_room(node: Node, sandbox: NodeSandbox) -> None:
    """Look before anything is frozen whether there is room for what the sandbox wrote."""
    used = 0
    if _layered(sandbox):
        assert isinstance(sandbox.runtime, Layered)
        with _opened(sandbox.runtime.open_upper(sandbox.handle)) as upper:
            space = os.fstatvfs(upper)
            used = (space.f_blocks - space.f_bfree) * space.f_frsize
    layers.room(str(node.snapshots.folder), used, disks.HOST_RESERVE)


async def _layer(node: Node, sandbox: NodeSandbox, work: Path) -> tuple[str, tuple[str, ...]]:
    """Copy the upper layer; how consistent it is, and what was left out."""
    assert isinstance(sandbox.runtime, Layered)
    limit = sandbox.request.policy.wall.resources.disk
    number = sandbox.journal.record.get("range")
    first, count = 0, 1 << 32
    if isinstance(number, int):
        line = specs.identity(node, number, sandbox.request.policy.wall.process.user).maps[0]
        first, count = line.outside, line.count
    own, target = layers.Owners(first, count), work / LAYER
    try:
        with _opened(sandbox.runtime.open_upper(sandbox.handle)) as upper:
            for _ in range(ATTEMPTS):
                async with standing_still(sandbox) as how:
                    try:
                        copied = await _in_thread(
                            lambda stop: layers.copy(upper, str(target), own, limit=limit, stop=stop)
                        )
                        if how == "frozen":
                            break
                        different = await asyncio.to_thread(layers.changed, upper, copied)
                    except layers.Moved as moved:
                        different = moved.path
                if not different:
                    break
                await asyncio.to_thread(shutil.rmtree, target)
                await asyncio.sleep(PAUSE)
            else:
                raise WrongState(
                    f"the files of {sandbox.id} change while they are copied ({different!r}), "
                    + ("although it is frozen" if how == "frozen" else "and this sandbox can't be frozen"),
                    hint="stop what writes there, or run as root, where it can be",
                )
    except PermissionError as error:
        raise WrongState(
            f"some files of {sandbox.id} can't be read by you: they belong to other users of the sandbox",
            hint="run as root",
        ) from error
    except OSError as error:
        raise host_limit(error, f"copy the files of {sandbox.id}") from error
    sandbox.check_alive()  # else the copy may be of a wall that was being taken down
    return how, copied.left_out


async def _by_driver(
    sandbox: NodeSandbox, work: Path, *, memory: bool
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    runtime = sandbox.runtime
    assert isinstance(runtime, Snapshotting)  # as its capabilities say
    sandbox.mark("saving", True)  # should we die: the next node wakes it
    try:
        data = await runtime.snapshot(sandbox.handle, str(work / WALL), memory=memory)
    finally:
        sandbox.mark("saving", None)
    return data, "driver", ()


def _finish(node: Node, sandbox: NodeSandbox, work: Path, **known: Any) -> Snapshot:
    """Make it stand alone, list it, and let it appear."""
    data = known["data"]
    request = sandbox.request
    try:
        part = work / (WALL if (work / WALL).is_dir() else LAYER)
        base = sandbox.journal.record.get("snapshot")
        mine = next((path for path in (work / LAYER, work / WALL / "upper") if path.is_dir()), None)
        below = node.snapshots.get(str(base)).layer if base else None
        if below is not None and mine is not None:
            own = os.path.join(sandbox.handle.folder, restoring.IDENTITY)
            others = [lower for lower in sandbox.root.lowers if lower not in (own, str(below))]
            layers.underlay(str(below), str(mine), others, root=node.root)
        listing = trees.listing(str(part), root=node.root, skip=tuple(data.get("checked", ())))
        size = _size(part)
    except OSError as error:
        raise host_limit(error, f"write the snapshot of {sandbox.id}") from error
    template = sandbox.root.template
    if template == "host" and sandbox.root.lowers:
        template = os.path.basename(sandbox.root.lowers[-1])
    import hashlib

    from ringfence.node import templating

    made = Snapshot(
        **known,
        runtime=sandbox.runtime.name,
        machine=os.uname().machine,
        template=template,
        host=restoring.programs() if known["kind"] == "memory" and template.startswith("host") else "",
        wall_digest=request.policy.wall.digest(),
        request=request_as_json(request),
        owner=asdict(request.owner),
        secrets=sandbox.held_secrets,
        made_by=node.state.owner,
        made_at=time.time(),
        source=sandbox.id,
        size=size,
        entries=listing.count(b"\n"),
        tree="sha256:" + hashlib.sha256(listing).hexdigest(),
    )
    templating.hold(node, made)
    try:
        return node.snapshots.commit(work, made, listing)
    except BaseException:
        templating.release(node, made)
        raise


def _size(folder: Path) -> int:
    """Bytes on the disk."""
    return sum(
        os.lstat(os.path.join(place, name)).st_blocks * 512
        for place, folders, files in os.walk(folder)
        for name in (*folders, *files)
    )


@contextlib.asynccontextmanager
async def standing_still(sandbox: NodeSandbox) -> AsyncIterator[str]:
    """While nothing of the wall runs: ``frozen``; or, where that can't be had, ``unchanged``: look for
    changes.
    """
    runtime = sandbox.runtime
    if sandbox.paused:
        yield "frozen"
        return
    if not (isinstance(runtime, Pausable) and runtime.capabilities().pause):
        yield "unchanged"
        return
    sandbox.mark("saving", True)  # should we die: the next node lets it go on
    try:
        how = "frozen"
        try:
            await runtime.pause(sandbox.handle)
        except Unsupported:  # no cgroup of its own
            how = "unchanged"
        yield how
    finally:
        with contextlib.suppress(RingfenceError):  # it may have ended
            await to_the_end(runtime.resume(sandbox.handle))
        sandbox.mark("saving", None)


@contextlib.contextmanager
def _opened(descriptor: int) -> Any:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _in_thread(work: Callable[[threading.Event], _Result]) -> _Result:
    """Run it in a thread to its end, also when cancelled: then it is told to stop first."""
    stop = threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(Exception):
            await to_the_end(task)
        raise


async def to_the_end(work: Awaitable[_Result]) -> _Result:
    """Run it to its end even if the caller is cancelled (again) meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()
