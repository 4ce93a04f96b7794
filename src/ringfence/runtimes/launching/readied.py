"""A root file system made ready for a foreign program that builds the wall itself (runc, crun, nsjail).

The program runs in a mount, pid and time namespace that our launcher makes, and in a cgroup namespace: what
is mounted for it never appears on the host, it sees no process of the host, and when it ends (however) the
kernel ends everything it started. As a normal user it also runs in a user namespace, as its root: the caller
is user 0 there, and the caller's subordinate ids follow from 1 on.

Inside that namespace ``ROOT`` is the sandbox's overlay with the binds of the specification over it, ``STATE``
an empty folder for the program's own files, and ``/sys/fs/cgroup`` a read-only cgroup2 tree whatever the host
has: the program joins no cgroup and removes none.
"""

from __future__ import annotations

import os
from functools import lru_cache

from ringfence.model.errors import HostLimit
from ringfence.runtimes.context import DEVICE_LINKS, DEVICES, DEVPTS, STAGE
from ringfence.runtimes.contract import Bind, Identity, IdMap, StartSpec
from ringfence.runtimes.launching.plan import (
    ATTR_RDONLY,
    BIND_DEVICES,
    BIND_FLAT,
    BIND_IDMAP,
    BIND_INSIDE,
    BIND_MAKE,
    BIND_MOVE,
    BIND_NOEXEC,
    BIND_READONLY,
    CLONE_NEWCGROUP,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUSER,
    MAPS_DENY_SETGROUPS,
    MAPS_HELPER,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    NOBODY,
    Plan,
    id_maps,
)
from ringfence.runtimes.launching.steps import (
    MASKED,
    MOST_SECRETS,
    READ_ONLY,
    SECRETS_SIZE,
    add_cgroups,
    add_overlay,
    shm_limits,
)

_BASE = f"{STAGE}/stage"
DISK, ROOT, STATE = f"{_BASE}/disk", f"{_BASE}/root", f"{_BASE}/state"
_QUIET = MS_NOSUID | MS_NODEV | MS_NOEXEC
_DISK_INSIDE = ((DISK, "/.ringfence", BIND_READONLY | BIND_FLAT | BIND_NOEXEC | BIND_MAKE),)
Maps = tuple[tuple[IdMap, ...], tuple[IdMap, ...]]  # of users, of groups


def begin(
    plan: Plan,
    spec: StartSpec,
    opened: list[int],
    *,
    exit_file: str,
    root: bool,
    whole: bool = False,
    maps: Maps | None = None,
) -> list[int]:
    """Namespaces and cgroups; returns the workload's opened ``cgroup.procs``.

    ``whole``, as root: begin with what the launcher makes ahead for every wall (``context.prelude_plan``), a
    network namespace with its loopback among it. ``maps`` of the user namespace that a normal user's program
    runs in, if not :func:`outer_maps`.
    """
    identity = spec.identity
    if root:
        plan.add("USERNS", _bytes(identity.maps, identity.gid_maps or identity.maps))
        if whole:
            plan.add("PRELUDE")
        else:
            plan.add("CLONE", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWTIME)
    else:
        users, groups = maps or outer_maps(identity)
        plan.add("CLONE", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWTIME | CLONE_NEWUSER)
        plan.add("MAPS", MAPS_HELPER if identity.helper else MAPS_DENY_SETGROUPS, _bytes(users, groups))
    if not spec.ephemeral:
        plan.add("KEEP")
    plan.add("EXIT_FILE", exit_file)
    work = add_cgroups(plan, spec, opened)
    plan.add("UNSHARE", CLONE_NEWCGROUP)
    return work


def add_root(
    plan: Plan,
    spec: StartSpec,
    *,
    root: bool,
    whole: bool = False,
    own: tuple[tuple[str, str, int], ...] = _DISK_INSIDE,
) -> None:
    """The file system: see the module.

    ``whole``: with ``/proc`` (of the pid namespace that the plan makes), ``/dev`` and the rest, so that the
    program has nothing to mount. ``own``: what is shown at ``/.ringfence``, as the arguments of BIND steps.
    """
    files = spec.root
    if not root:
        plan.add("MOUNT", "ringfence", STAGE, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0711,size=1m")
        for path in (_BASE, f"{STAGE}/fs", f"{STAGE}/fs/cgroup"):
            plan.add("MKDIR", path, 0o711, NOBODY, NOBODY)
    # The sandbox's root passes through these, and sees nothing but its own root file system there.
    plan.add("MOUNT", "ringfence", _BASE, "tmpfs", _QUIET, "mode=0711,size=16m")
    plan.add("MKDIR", DISK, 0o700, NOBODY, NOBODY)
    plan.add("MKDIR", STATE, 0o711, NOBODY, NOBODY)
    add_overlay(plan, spec.root, spec.identity, DISK, ROOT, root=root)
    plan.add("ENTER", ROOT)
    if root:
        first = spec.identity.host_uid(0)
        plan.add("OWNER", first, first)
    for bind in files.binds:
        plan.add("BIND", bind.source, bind.target, _bind_flags(bind))
    if whole:
        _add_pseudo(plan, spec, root)
    for source, target, flags in own:
        plan.add("BIND", source, target, flags)
    if files.readonly:
        for path in files.read_write:
            plan.add("BIND", path, path, BIND_INSIDE)
        plan.add("REMOUNT", "/", ATTR_RDONLY)
    for path in files.read_only:
        plan.add("READONLY", path)
    plan.add("LEAVE")
    if not (root and whole):  # else what builds the wall only moves into it, and becomes the guest agent
        plan.extend(_surroundings(root, 0 if whole else 1))


def _add_pseudo(plan: Plan, spec: StartSpec, root: bool) -> None:
    """``/proc`` with its covers, ``/dev``, ``/dev/shm`` and ``/run/secrets``; inside ENTER."""
    identity = spec.identity
    if root:  # made ahead: see ``begin``
        plan.add("BIND", f"{STAGE}/proc", "/proc", BIND_MOVE)
        plan.add("BIND", f"{STAGE}/devices", "/dev", BIND_MOVE)
    else:
        plan.add("MOUNT", "proc", "/proc", "proc", _QUIET, "")
        plan.add("MOUNT", "dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=0755")
        for name in DEVICES:
            plan.add("BIND", f"/dev/{name}", f"/dev/{name}", BIND_DEVICES | BIND_NOEXEC | BIND_MAKE)
        for name, target in DEVICE_LINKS.items():
            plan.add("SYMLINK", target, f"/dev/{name}")
        for name in ("pts", "shm"):
            plan.add("MKDIR", f"/dev/{name}", 0o755, NOBODY, NOBODY)
        plan.add("REMOUNT", "/dev", ATTR_RDONLY)
        plan.add("MOUNT", "devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, DEVPTS)
        for path in MASKED:  # a file is covered by the new /dev/null
            plan.add("MASK", path)
        for path in READ_ONLY:
            plan.add("READONLY", path)
    options = ",".join(("mode=1777", *shm_limits(spec.memory)))
    plan.add("MOUNT", "shm", "/dev/shm", "tmpfs", _QUIET, options)  # noqa: S108
    owner = identity.host_uid(identity.agent_uid) if root else identity.agent_uid
    group = f",gid={owner}" if root else ""
    options = f"size={SECRETS_SIZE},nr_inodes={MOST_SECRETS},mode=0755,uid={owner}{group}"
    plan.add("MOUNT", "secrets", "/run/secrets", "tmpfs", _QUIET, options)


@lru_cache(maxsize=4)
def _surroundings(root: bool, user_namespaces: int) -> Plan:
    """What the program itself sees: its own processes, devices of our own, a cgroup tree without rights."""
    plan = Plan()
    if root:
        # Programs give devices to the sandbox's user, even /dev/null: never the host's own.
        plan.add("BIND", f"{STAGE}/dev", "/dev", BIND_READONLY | BIND_DEVICES | BIND_NOEXEC)
    plan.add("MOUNT", "proc", "/proc", "proc", _QUIET, "")
    if not root and os.path.exists("/proc/sys/user/max_user_namespaces"):
        # The wall's own, if the program makes one. None within it.
        plan.add("WRITE", "/proc/sys/user/max_user_namespaces", str(user_namespaces))
    plan.add("MOUNT", "cgroup", f"{STAGE}/fs/cgroup", "cgroup2", _QUIET | MS_RDONLY, "")
    return plan


def outer_maps(identity: Identity) -> Maps:
    """The maps of the program's own user namespace: its user 0 is the workload's user on the host."""
    found = []
    for lines, first in (
        (identity.maps, identity.uid),
        (identity.gid_maps or identity.maps, identity.gid),
    ):
        mapped: list[IdMap] = []
        number = 1
        for line in _workload_first(lines, first):
            at = 0 if not mapped else number
            mapped.append(IdMap(at, line.outside, line.count))
            number = at + line.count
        found.append(tuple(mapped))
    return found[0], found[1]


def inner_maps(identity: Identity, *, root: bool) -> Maps:
    """The maps of the sandbox's user namespace, in the ids that the program sees."""
    if root:
        return identity.maps, identity.gid_maps or identity.maps
    found = []
    for lines, first in (
        (identity.maps, identity.uid),
        (identity.gid_maps or identity.maps, identity.gid),
    ):
        mapped: list[IdMap] = []
        number = 0
        for line in _workload_first(lines, first):
            mapped.append(IdMap(line.inside, number, line.count))
            number += line.count
        found.append(tuple(sorted(mapped, key=lambda line: line.inside)))
    return found[0], found[1]


def _workload_first(lines: tuple[IdMap, ...], first: int) -> list[IdMap]:
    chosen = [line for line in lines if line.inside <= first < line.inside + line.count]
    # A normal user's workload has a line of its own: the caller.
    if len(chosen) != 1 or chosen[0].count != 1:
        raise HostLimit("the workload's user has no map line of its own", hint="report this as a defect")
    return [*chosen, *(line for line in lines if line is not chosen[0])]


def _bytes(users: tuple[IdMap, ...], groups: tuple[IdMap, ...]) -> bytes:
    return id_maps(
        [(line.inside, line.outside, line.count) for line in users],
        [(line.inside, line.outside, line.count) for line in groups],
    )


def _bind_flags(bind: Bind) -> int:
    return (BIND_READONLY if bind.read_only else 0) | (BIND_IDMAP if bind.idmapped else 0) | BIND_MAKE
