"""Measuring a living wall from the host: what /proc says about its processes, whatever was configured."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple, Protocol

from ringfence.model.errors import LinkLost
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle, WallStats

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")
ESSENTIAL = ("user", "mnt", "pid", "net", "ipc")  # without one of these there is no wall to speak of
_SECCOMP = {"0": "disabled", "1": "strict", "2": "filter"}
_LONGEST_TREE = 100_000  # processes: a workload can't make the host walk for ever
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip


class Driver(Protocol):
    """What a driver says about itself."""

    name: str
    level: Level
    boundary: Boundary


class Credentials(NamedTuple):
    """Of one process, from /proc/PID/status. Ids as the host sees them."""

    uid: int
    groups: tuple[int, ...]
    effective: int
    inheritable: int
    ambient: int
    bounding: int
    no_new_privs: bool
    seccomp: str


def capability_names(mask: int) -> tuple[str, ...]:
    """Names of the set bits, ``CAP_n`` for those newer than this list."""
    return tuple(
        f"CAP_{_CAPABILITIES[bit]}" if bit < len(_CAPABILITIES) else f"CAP_{bit}"
        for bit in range(64)
        if mask >> bit & 1
    )


def credentials(pid: int) -> Credentials | None:
    """``None`` if there is no such process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            found = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return None
    return Credentials(
        uid=int(found["Uid"].split()[1]),
        groups=tuple(int(group) for group in found.get("Groups", "").split()),
        effective=int(found["CapEff"], 16),
        inheritable=int(found["CapInh"], 16),
        ambient=int(found.get("CapAmb", "0"), 16),
        bounding=int(found["CapBnd"], 16),
        no_new_privs=found.get("NoNewPrivs") == "1",
        seccomp=_SECCOMP.get(found.get("Seccomp", "0"), "disabled"),
    )


def children(pid: int) -> list[int]:
    """Children of all threads of a process; empty if it has ended."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found += [int(word) for word in file.read().split()]
    return found


def tree(pid: int) -> list[int]:
    """A process and all its descendants; orphans inside a pid namespace hang below its first process."""
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) < _LONGEST_TREE:
        each = waiting.pop()
        found.append(each)
        waiting += children(each)
    return found


def stats(pid: int) -> WallStats:
    """Processes below (and with) ``pid`` and their resident memory; shared pages count each time."""
    page, processes, resident = os.sysconf("SC_PAGE_SIZE"), 0, 0
    for each in tree(pid):
        try:
            with open(f"/proc/{each}/statm") as file:
                resident += int(file.read().split()[1]) * page
        except (OSError, IndexError):
            continue
        processes += 1
    return WallStats(processes, resident)


def _namespace(pid: int | str, name: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{name}")
    except OSError:
        return None


def _interfaces(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/net/dev") as file:
            return [line.split(":")[0].strip() for line in file.readlines()[2:]]
    except OSError:
        return ["?"]


def _label(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/attr/current") as file:
            return file.read().rstrip("\0\n") or "absent"
    except OSError:
        return "absent"


def _workload(agent: int, user: int) -> Credentials | None:
    """Credentials of a running command: one that is the workload's user, with as many rights as any."""
    found = None
    for pid in tree(agent)[1:]:
        each = credentials(pid)
        if each is not None and each.uid == user and (found is None or each.effective > found.effective):
            found = each
    return found


def measure(driver: Driver, handle: Handle) -> EffectiveBoundary:
    """The effective boundary of a living wall; ``limits`` is left empty for the node.

    ``handle.data`` may have ``agent`` (the agent's pid if it isn't the wall's first), ``uid``,
    ``capabilities``, ``network`` and ``landlock`` (ABI that the launcher put in force).

    Raises:
        LinkLost: the wall has ended.
    """
    data = handle.data
    agent = int(data.get("agent", handle.pid))
    of_agent = credentials(agent)
    if of_agent is None:
        raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id)
    notes: list[str] = []
    differing = []
    for name in NAMESPACES:
        inside, outside = _namespace(agent, name), _namespace("self", name)
        if inside is not None and inside != outside:
            differing.append(name)
    workload = _workload(agent, int(data.get("uid", of_agent.uid)))
    if workload is None:
        notes.append("no command was running: its user and capabilities are those that the agent can give it")
        uid = int(data.get("uid", of_agent.uid))
        # With no_new_privs and an empty bounding set an exec can't gain what is not inheritable.
        gainable = of_agent.inheritable | (0 if of_agent.no_new_privs else of_agent.bounding)
        effective = gainable & int(data.get("capabilities", 0))
        groups: tuple[int, ...] = ()
    else:
        uid, effective, groups = workload.uid, workload.effective, workload.groups
    level, boundary = driver.level, driver.boundary
    lacking = [name for name in ESSENTIAL if name not in differing]
    weak = [f"shares the host's {name} namespace" for name in lacking]
    if of_agent.seccomp != "filter":
        weak.append("no system call filter")
    if not of_agent.no_new_privs:
        weak.append("can gain privileges (no_new_privs is off)")
    if uid == 0:
        weak.append("its user is the host's root")
    if weak and boundary is not Boundary.NONE:
        level, boundary = Level.L1, Boundary.NONE
        notes.append("no wall: " + ", ".join(weak))
    interfaces = _interfaces(agent)
    network = str(data.get("network", "none"))
    if "net" not in differing or interfaces != ["lo"]:
        network = "open"
    landlock = data.get("landlock")
    if groups and not set(groups) <= {uid}:
        notes.append("keeps the caller's supplementary groups: " + " ".join(map(str, groups)))
    return EffectiveBoundary(
        runtime=driver.name,
        level=level,
        boundary=boundary,
        kernel=os.uname().release,
        namespaces=tuple(differing),
        user_namespace="user" in differing,
        host_uid=uid,
        seccomp=of_agent.seccomp,
        no_new_privs=of_agent.no_new_privs,
        capabilities=capability_names(effective),
        landlock="not-applied" if landlock is None else f"abi {landlock}" if landlock else "absent",
        lsm=_label(agent),
        network=network,
        limits={},
        notes=tuple(notes),
    )


def measure_monitor(
    driver: Driver,
    handle: Handle,
    monitor: str,
    kernel: str,
    *,
    boundary: Boundary | None = None,
    essential: tuple[str, ...] = ESSENTIAL,
    unprivileged: bool = True,
    notes: tuple[str, ...] = (),
) -> EffectiveBoundary:
    """The effective boundary of a wall with a ``kernel`` of its own: what its monitor is to the host.

    ``host_uid``, ``namespaces`` and ``seccomp`` are the monitor's (``handle.pid``), ``capabilities`` the
    workload's in its own kernel.

    Args:
        monitor: the program's name, for words.
        boundary: the mechanism, if it is not always the driver's.
        essential: namespaces without which there is no wall.
        unprivileged: the monitor has set ``no_new_privs``, or nothing holds.
        notes: what else is to be said.

    Raises:
        LinkLost: the wall has ended.
    """
    found = credentials(handle.pid)
    if found is None:
        raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id)
    differing = tuple(
        name
        for name in NAMESPACES
        if (inside := _namespace(handle.pid, name)) is not None and inside != _namespace("self", name)
    )
    weak = [f"shares the host's {name} namespace" for name in essential if name not in differing]
    if found.seccomp != "filter":
        weak.append(f"no system call filter around {monitor}")
    if unprivileged and not found.no_new_privs:
        weak.append("can gain privileges (no_new_privs is off)")
    if found.uid == 0:
        weak.append("its user is the host's root")
    if found.effective and "user" not in differing:  # else they are rights in its own namespace only
        weak.append(f"{monitor} holds capabilities: " + " ".join(capability_names(found.effective)))
    level, mechanism = driver.level, boundary or driver.boundary
    if weak:
        level, mechanism = Level.L1, Boundary.NONE
        notes = (*notes, "no wall: " + ", ".join(weak))
    only_loopback = "net" in differing and _interfaces(handle.pid) in (["lo"], [])
    return EffectiveBoundary(
        runtime=driver.name,
        level=level,
        boundary=mechanism,
        kernel=kernel,
        namespaces=differing,
        user_namespace="user" in differing,
        host_uid=found.uid,
        seccomp=found.seccomp,
        no_new_privs=found.no_new_privs,
        capabilities=capability_names(int(handle.data.get("capabilities", 0))),
        landlock="not-applied",
        lsm=_label(handle.pid),
        network=str(handle.data.get("network", "none")) if only_loopback else "open",
        limits={},
        notes=notes,
    )
