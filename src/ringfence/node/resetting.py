"""A sandbox begins anew: another wall under the same id, over its template as on the first day.

The new wall is built beside the old one, in cgroups and a folder of its own; then the old one is told to die,
and nobody waits for that. What stays is the id, the owner, the deadline and the account of what was taken;
what goes is every process, file and link.

Whoever resets once does so again: after a reset the wall of the next one is made ready in the background and
*stands by*, an idle agent in a wall that nothing of the workload has seen. Then a reset is an exchange. Walls
that are whole machines don't stand by: they hold their memory. Of those the first reset saves the new wall
before anything runs in it, its *base*, and later ones restore that instead of starting a machine again.

The journal's ``walls`` names every wall but the present one, so that nothing is left by whoever is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringfence.model.errors import InvalidRequest, NotFound, RingfenceError, StartFailed
from ringfence.model.levels import Boundary
from ringfence.node import disks, saving, specs, starting, supervising
from ringfence.node.journal import handle_as_json, handle_from_json, root_as_json
from ringfence.node.saving import to_the_end
from ringfence.node.sweeping import alive
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import Handle, RootFs, StartSpec

if TYPE_CHECKING:
    from ringfence.node.cgroups import Group
    from ringfence.node.sandboxes import NodeSandbox
    from ringfence.node.service import Node

AFTERWARDS = 0.05  # seconds that what the new wall is wanted for goes before the cleaning
_WALL = re.compile(r"w\d+", re.ASCII)


class Wall(NamedTuple):
    """A wall that is not the sandbox's present one: it stands by, or it is being taken down."""

    number: int
    handle: Handle
    group: Group
    root: RootFs
    snapshot: str = ""  # that it was restored from


async def reset(node: Node, sandbox: NodeSandbox, *, standby: bool = True, hold: bool = False) -> None:
    """Give a sandbox a new wall. Links end; whoever holds the sandbox dials anew.

    Args:
        node: the sandbox's.
        sandbox: alive, paused or not.
        standby: make the next reset's wall ready afterwards.
        hold: what the template starts waits for ``starting.release``.

    Raises:
        WrongState: it has ended.
        StartFailed, HostLimit: the new wall could not be built. The sandbox is as it was. Or StartFailed with
        step ``start`` or ``ready``: it has begun anew, and what its template starts does not come up.
    """
    async with sandbox.changing():
        wall = await _ready(node, sandbox)
        try:
            await _exchange(node, sandbox, wall)
        except BaseException:
            await to_the_end(_bury(node, sandbox, wall))
            raise
        if standby and not _is_machine(sandbox):
            sandbox.standby = asyncio.ensure_future(_stand_by(node, sandbox))
        elif standby and sandbox.runtime.capabilities().memory_snapshot and not wall.snapshot:
            with contextlib.suppress(RingfenceError):  # without it the next reset starts a machine again
                base = await saving.save(node, sandbox, None, "memory", temporary=True)
                sandbox.mark("base", base.name)
        if hold:
            await starting.hold(sandbox)
        else:
            await starting.bring_up(node, sandbox)


def _is_machine(sandbox: NodeSandbox) -> bool:
    return sandbox.runtime.boundary in (Boundary.HARDWARE, Boundary.EMULATED)


async def _ready(node: Node, sandbox: NodeSandbox) -> Wall:
    if sandbox.standby is not None:
        task, sandbox.standby = sandbox.standby, None
        with contextlib.suppress(RingfenceError, OSError):
            try:
                wall = await asyncio.shield(task)
            except asyncio.CancelledError:
                sandbox.standby = task  # for the next reset, or for the end
                raise
            if alive(wall.handle):
                return wall
            await to_the_end(_bury(node, sandbox, wall))
    return await _build(node, sandbox)


async def _stand_by(node: Node, sandbox: NodeSandbox) -> Wall:
    if sandbox.burying is not None:
        await asyncio.wait({sandbox.burying})
    return await _build(node, sandbox)


async def _build(node: Node, sandbox: NodeSandbox) -> Wall:
    """A new wall of the sandbox, which nobody uses yet."""
    request, record = sandbox.request, sandbox.journal.record
    number = int(record.get("numbered", 0)) + 1  # never used again, whatever becomes of it
    name = f"{sandbox.id}-{number}"
    folder = sandbox.journal.folder / f"w{number}"
    group: Group | None = None
    handle: Handle | None = None
    try:
        sandbox.mark("numbered", number)
        folder.mkdir(0o711)
        folder.chmod(0o711)
        group = node.groups.take(name, specs.group_limits(sandbox.runtime, request), keep=request.keep)
        # The launcher: where no cgroup tells what is inside, a half-made wall is found below it.
        launcher = await node.launcher()
        _note(sandbox, number, {"handle": None, "group": group.name, "launcher": launcher})
        disk = disks.prepare(node.state, folder, request.policy.wall.resources, root=node.root)
        root = node.root_fs(request, disk, folder)
        identity = specs.identity(node, record.get("range"), request.policy.wall.process.user)
        spec = specs.start_spec(sandbox.id, folder, request, root, identity, group, wall=name)
        handle, snapshot = await _start(node, sandbox, spec)
        _note(sandbox, number, {"handle": handle_as_json(handle), "group": group.name})
        return Wall(number, handle, group, root, snapshot)
    except BaseException as error:
        await to_the_end(_undo(node, sandbox, number, handle, group))
        if isinstance(error, OSError):
            raise host_limit(error, f"make {folder}") from error
        raise


async def _start(node: Node, sandbox: NodeSandbox, spec: StartSpec) -> tuple[Handle, str]:
    """The new wall, and the base that it was restored from if there is one."""
    base = sandbox.journal.record.get("base")
    if base:
        from ringfence.node.restoring import Saved

        with contextlib.suppress(NotFound, InvalidRequest, StartFailed):
            saved = Saved(node, node.snapshots.get(str(base)), sandbox.runtime)
            return await saved.start(sandbox.runtime, spec), str(base)
    return await sandbox.runtime.start(spec), ""


async def _undo(
    node: Node, sandbox: NodeSandbox, number: int, handle: Handle | None, group: Group | None
) -> None:
    if handle is not None:
        with contextlib.suppress(RingfenceError):
            await sandbox.runtime.destroy(handle)
    if group is not None:
        group.kill()
        await node.until_removed(group)
    shutil.rmtree(sandbox.journal.folder / f"w{number}", ignore_errors=True)
    _note(sandbox, number, None)


async def _exchange(node: Node, sandbox: NodeSandbox, wall: Wall) -> None:
    record = sandbox.journal.record
    old = Wall(int(record.get("generation", 0)), sandbox.handle, sandbox.group, sandbox.root)
    snapshot, paused = record.get("snapshot"), sandbox.paused
    walls = dict(record.get("walls") or {})
    walls.pop(str(wall.number), None)
    walls[str(old.number)] = {"handle": handle_as_json(old.handle), "group": old.group.name}
    # From this line on the new wall is the sandbox's, for whoever comes after a crash too.
    sandbox.journal.append(
        {
            "handle": handle_as_json(wall.handle),
            "group": wall.group.name,
            "root": root_as_json(wall.root),
            "generation": wall.number,
            "walls": walls,
            "snapshot": wall.snapshot or None,
            "paused": None,
        }
    )
    await to_the_end(sandbox.leave_wall())
    if paused:
        old.group.kill()  # what is frozen is let go to die
    supervising.kill_process(old.handle)  # with it goes all of the wall
    sandbox.enter_wall(wall.handle, wall.root, wall.group)
    sandbox.burying = node.later(_bury_after(node, sandbox, old, str(snapshot or ""), sandbox.burying))


async def _bury_after(
    node: Node, sandbox: NodeSandbox, old: Wall, snapshot: str, others: asyncio.Task[None] | None
) -> None:
    if others is not None:
        await asyncio.wait({others})
    await asyncio.sleep(AFTERWARDS)
    await _bury(node, sandbox, old)
    if snapshot:
        await asyncio.to_thread(node.snapshots.drop, snapshot)


async def end_standby(node: Node, sandbox: NodeSandbox) -> None:
    """Take down the wall that stands by, made or half made."""
    task, sandbox.standby = sandbox.standby, None
    if task is None:
        return
    task.cancel()
    (made,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(made, Wall):
        await _bury(node, sandbox, made)


async def bury_left(node: Node, sandbox: NodeSandbox) -> None:
    """Take down walls that a node left, which died before it had done so."""
    from ringfence.node import sweeping

    for number, left in dict(sandbox.journal.record.get("walls") or {}).items():
        handle: Handle | None = None
        with contextlib.suppress(KeyError, TypeError):
            handle = handle_from_json(left["handle"])
            await sandbox.runtime.recover(handle)
        group = node.cgroups.group(str(left["group"]))
        if handle is not None:
            await _bury(node, sandbox, Wall(int(number), handle, group, sandbox.root))
        else:
            sweeping.kill_strays(node, left)
            await _undo(node, sandbox, int(number), None, group)


async def _bury(node: Node, sandbox: NodeSandbox, wall: Wall) -> None:
    """Release what a wall had. Its files go last, and then the journal forgets it."""
    await sandbox.runtime.destroy(wall.handle)
    if not node.groups.give_back(wall.group):
        wall.group.kill()
        await node.until_removed(wall.group)
    await asyncio.to_thread(_clear, sandbox.journal.folder, Path(wall.handle.folder))
    _note(sandbox, wall.number, None)


def _note(sandbox: NodeSandbox, number: int, value: dict[str, object] | None) -> None:
    walls = dict(sandbox.journal.record.get("walls") or {})
    walls.pop(str(number), None)
    if value is not None:
        walls[str(number)] = value
    sandbox.mark("walls", walls)


def _clear(sandbox: Path, wall: Path) -> None:
    """Remove a wall's files: its folder, or, of the first wall, all that is no wall's and not the journal."""
    for name in os.listdir(sandbox):
        path = sandbox / name
        if wall == sandbox:
            if name == "journal" or _WALL.fullmatch(name):
                continue
        elif path != wall:
            continue
        for device in disks.loop_devices(path):
            disks.detach(device)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
