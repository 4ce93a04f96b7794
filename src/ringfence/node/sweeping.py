"""What dead nodes left: kept sandboxes that live are adopted, everything else is taken down.

Only sandboxes whose owner is dead are looked at. Every step may be repeated, for the sweeper may be killed
too: the folder goes last, and the dead node's name after all of its folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import HostLimit, RingfenceError
from ringfence.model.ids import SANDBOX_ID
from ringfence.node import cgroups, disks, supervising
from ringfence.node.cgroups import Group
from ringfence.node.groups import KEPT, is_of
from ringfence.node.journal import (
    HANDLE,
    Journal,
    handle_from_json,
    read,
    request_from_json,
    root_from_json,
)
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.state import unlock
from ringfence.runtimes.contract import Handle, KnownByName, Pausable
from ringfence.runtimes.launching.processes import ProcessRef

if TYPE_CHECKING:
    from ringfence.node.service import Node

DEATH_TIME = 10.0  # seconds for killed processes to be gone


async def sweep(node: Node, dead: dict[str, int], *, adopt: bool) -> list[NodeSandbox]:
    """Go through everything that the dead nodes (name → lock, held by us) left. Returns what was adopted.

    Raises:
        HostLimit: something can't be removed. The rest was, and the next sweep tries again.
    """
    adopted: list[NodeSandbox] = []
    failures: list[RingfenceError] = []
    left: set[str] = set()
    for group in _groups_of(node, dead):
        group.kill()
    for name in sorted(os.listdir(node.state.sandboxes)):
        folder = node.state.sandboxes / name
        journal = Journal.load(folder)
        owner = str(journal.record.get("owner", "")) if journal else ""
        if owner not in dead and node.state.knows(owner):
            continue
        if journal is None and _busy(node, dead) and _young(folder):
            left.update(dead)  # perhaps somebody is just about to write its intent: look again next time
            continue
        try:
            if journal is not None and _is_anothers(node, journal.record):
                left.add(owner)  # that service wants to adopt it, or to know how it ended
                continue
            if journal is not None and _is_kept(node, journal):
                if adopt and str(journal.record.get("service", "")) == node.service:
                    found = await _adopt(node, journal)
                    if found is not None:
                        adopted.append(found)
                        continue
                elif _lives_on(node, journal):
                    left.add(owner)
                    continue
            if journal is not None and adopt and node.lost is not None and journal.record.get("keep"):
                node.lost(journal.record)
            await _remove(node, name, folder, journal.record if journal else {})
        except RingfenceError as error:
            failures.append(error)
            left.add(owner)
    _sweep_groups(node)
    for group in _groups_of(node, dead):
        with contextlib.suppress(RingfenceError):
            await _wait_removed(group)
    for owner, lock in dead.items():
        if owner in left:
            unlock(lock)
            continue
        node.ranges.sweep(owner)
        _sweep_files(node, owner)
        node.state.bury(owner, lock)
    node.snapshots.collect()
    from ringfence.node import templating

    templating.release_lost(node)
    if failures:
        raise failures[0]
    return adopted


def _busy(node: Node, dead: dict[str, int]) -> bool:
    """Whether anybody else, or this node itself, may be making a sandbox at this moment.

    Asked when a folder has been seen, not before: its maker may have opened the state root just now.
    """
    return node.creating or bool(set(os.listdir(node.state.nodes)) - set(dead) - {node.state.owner})


def _is_anothers(node: Node, record: dict[str, Any]) -> bool:
    """A sandbox of another service, that was started and that nobody wanted to end."""
    others = str(record.get("service", "")) not in ("", node.service)
    return others and bool(record.get("keep")) and record.get("state") == HANDLE


def _is_kept(node: Node, journal: Journal) -> bool:
    record = journal.record
    return bool(record.get("keep")) and record.get("state") == HANDLE and record.get("boot") == node.boot


def _lives_on(node: Node, journal: Journal) -> bool:
    """A kept sandbox that nobody has to touch: alive, and before its deadline."""
    try:
        handle = handle_from_json(journal.record["handle"])
        return alive(handle) and supervising.now() < float(journal.record["deadline"])
    except (KeyError, TypeError, ValueError):
        return False


async def _adopt(node: Node, journal: Journal) -> NodeSandbox | None:
    """The sandbox, ours from now on; None if it does not live, or its journal makes no sense."""
    record = journal.record
    try:
        handle = handle_from_json(record["handle"])
        request = request_from_json(record["request"])
        root_fs = root_from_json(record["root"], request)
        if not alive(handle):
            return None
        runtime = await node.runtime(handle.runtime)
        if not await runtime.recover(handle):
            return None
    except (KeyError, TypeError, ValueError, RingfenceError):
        return None
    journal.append({"owner": node.state.owner})
    sandbox = node.adoption(runtime, request, handle, root_fs, journal)
    try:
        await rouse(node, sandbox)
    except RingfenceError:
        return None
    node.adopted(sandbox)
    return sandbox


async def rouse(node: Node, sandbox: NodeSandbox) -> None:
    """Wake a sandbox whose node died while it was saved; bury walls that a reset of it left."""
    record = sandbox.journal.record
    if record.get("walls"):
        from ringfence.node import resetting

        await resetting.bury_left(node, sandbox)
    if not record.get("saving"):
        return
    driver = getattr(sandbox.runtime, "driver", sandbox.runtime)
    if hasattr(driver, "rouse"):
        await driver.rouse(sandbox.handle)
    elif isinstance(sandbox.runtime, Pausable) and not sandbox.paused:
        await sandbox.runtime.resume(sandbox.handle)
    sandbox.mark("saving", None)


def alive(handle: Handle) -> bool:
    """Whether the wall's first process lives."""
    return ProcessRef(handle.pid, handle.birth, handle.boot_id).alive()


async def _remove(node: Node, name: str, folder: Path, record: dict[str, Any]) -> None:
    """Take down whatever a dead node's sandbox still has: processes, mounts, devices, cgroups, folder."""
    walls = record.get("walls")
    for other in walls.values() if isinstance(walls, dict) else ():  # of a reset: of before, or standing by
        if isinstance(other, dict):
            await _remove_wall(node, name, {**record, **other})
    await _remove_wall(node, name, record)
    _unmount(folder)
    for device in disks.loop_devices(folder):
        disks.detach(device)
    number = record.get("range")
    if isinstance(number, int):
        node.ranges.release(number, name)
    node.state.give_folder(folder)


async def _remove_wall(node: Node, name: str, record: dict[str, Any]) -> None:
    handle: Handle | None = None
    same_boot = record.get("boot") == node.boot
    with contextlib.suppress(KeyError, TypeError):
        handle = handle_from_json(record["handle"])
    if SANDBOX_ID.fullmatch(name):
        group = node.cgroups.group(str(record.get("group") or name))
        if same_boot:
            group.kill()
            if handle is not None and handle.boot_id == node.boot:
                supervising.kill_process(handle)
            if handle is None:
                kill_strays(node, record)
                await _forget(node, name, record)
            if handle is not None:
                with contextlib.suppress(RingfenceError, ImportError):
                    runtime = await node.runtime(handle.runtime)
                    await runtime.recover(handle)
                    await runtime.destroy(handle)
        await _wait_removed(group)
        if handle is not None and alive(handle):
            raise HostLimit(f"sandbox {name} of a dead node does not die", hint=f"see process {handle.pid}")


def _groups_of(node: Node, dead: dict[str, int]) -> list[Group]:
    """Groups that the dead nodes made for their ephemeral sandboxes."""
    return [node.cgroups.group(n) for n in node.cgroups.names() if any(is_of(n, owner) for owner in dead)]


async def _wait_removed(group: Group) -> None:
    deadline = time.monotonic() + DEATH_TIME
    while not group.remove():
        if time.monotonic() > deadline:
            raise HostLimit(
                f"cgroup {group.name} of a dead node stays busy",
                hint=f"its processes: {group.processes()[:10]}",
            )
        group.kill()
        await asyncio.sleep(0.002)


def kill_strays(node: Node, record: dict[str, Any]) -> None:
    """Kill a wall that was started, but whose node died before it could write down the handle.

    It lives below the dead node's launcher (which waits for walls that shall outlive their node), and is
    none of those that a journal knows.
    """
    try:
        pid, birth = record["launcher"]
        launcher = ProcessRef(pid, birth, node.boot)
    except (KeyError, TypeError, ValueError):
        return
    if not launcher.alive():
        return
    known = set()
    for name in os.listdir(node.state.sandboxes):
        other = read(node.state.sandboxes / name) or {}
        walls = other.get("walls")
        for wall in (other, *(walls.values() if isinstance(walls, dict) else ())):  # of a reset: standing by
            with contextlib.suppress(KeyError, TypeError):
                known.add(wall["handle"]["pid"])
    for pid in supervising.tree(launcher.pid)[1:]:
        if _parent(pid) != launcher.pid:
            continue
        everybody = [ProcessRef.of(each) for each in supervising.tree(pid)]
        if known.isdisjoint(each.pid for each in everybody):
            for each in everybody:
                supervising.kill_process(Handle("", 0, "", "", *each))


async def _forget(node: Node, name: str, record: dict[str, Any]) -> None:
    """The same where walls are made elsewhere: a container engine knows them by the sandbox's name."""
    with contextlib.suppress(RingfenceError, ImportError):
        runtime = await node.runtime(str(record.get("runtime", "")))
        driver = getattr(runtime, "driver", runtime)
        if isinstance(driver, KnownByName):
            await driver.remove_named(name)


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _unmount(folder: Path) -> None:
    """Detach mounts of this namespace below a folder (drivers leave none; crashes might), deepest first."""
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            points = [line.split()[4] for line in file if str(folder) in line]
    except OSError:
        return
    inside = [p for p in points if p == str(folder) or p.startswith(str(folder) + "/")]
    if not inside:
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for point in sorted(inside, key=len, reverse=True):
        libc.umount2(os.fsencode(point), 2)  # MNT_DETACH


def _young(folder: Path) -> bool:
    """Made within the last seconds: a folder is made a moment before its journal."""
    try:
        return time.time() - os.lstat(folder).st_ctime < 5.0
    except OSError:
        return True


def _sweep_groups(node: Node) -> None:
    """Empty cgroups that no process of this host can still want.

    Other state roots have groups in the same place, so only those go whose node is dead, by the pid and the
    birth in its name, or whose sandbox has no folder here and is older than a minute. An rmdir fails, and
    harms nothing, if anything lives there after all.
    """
    for name in node.cgroups.names():
        group = node.cgroups.group(name)
        if found := SANDBOX_ID.match(name):  # a number follows where it was reset
            if (node.state.sandboxes / found[0]).exists() or not _old_group(name) or _just_made(node, name):
                continue
        elif not _dead_owner(name.removeprefix(KEPT), node.boot):
            continue
        # Also none of another PID namespace (a container that has this tree): its numbers are not shown here.
        if not group.processes() and group.is_empty():
            with contextlib.suppress(RingfenceError):
                group.remove()


def _dead_owner(name: str, boot: str) -> bool:
    parts = name.split(".")
    if len(parts) != 5 or not all(part.isdigit() for part in parts[1:]):
        return False
    return not ProcessRef(int(parts[1]), int(parts[2]), boot if boot.startswith(parts[0]) else "").alive()


def _old_group(name: str) -> bool:
    """Made more than a minute ago, by the time in its id: not one that another node is just filling."""
    number = 0
    for letter in name[3:13]:
        number = number << 5 | "0123456789abcdefghjkmnpqrstvwxyz".index(letter)
    born = number >> 2  # 48 bits of milliseconds in the first fifty
    return time.time() * 1000 - born > 60_000


def _just_made(node: Node, name: str) -> bool:
    """Made within the last minute: a sandbox that is reset or woken may be older than its groups."""
    for root in set(node.cgroups.roots.values()):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(f"{root}/{cgroups.NAME}/{name}").st_ctime < 60.0:
                return True
    return False


def _sweep_files(node: Node, dead: str) -> None:
    """Half-made templates, images and snapshots of a dead node."""
    import shutil

    for parent in (node.state.templates, node.state.disks, node.state.snapshots):
        for name in os.listdir(parent):
            if not name.startswith(".") or not name.endswith(dead):
                continue
            path = parent / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
