"""Control groups: limits that the kernel enforces, and what it counted. Version 1, version 2, both, none.

A sandbox ``<id>`` gets ``<root>/ringfence/<id>`` in each hierarchy it needs: the whole sandbox, with a
little room for the guest agent, and below it ``work`` for everything the workload starts (in version 2
also ``agent``, as processes may live in leaves only). The workload hits its limits first, so the agent goes
on answering.

* **v1**: memory (swap off through memory.memsw), pids, cpu, and cpuacct for the processor time.
* **v2**: memory.max with memory.swap.max=0, pids.max, cpu.max, io.weight, memory.events, cpu.stat.
* **hybrid** (v1 controllers, and a v2 tree without any): limits as v1; processor time, freezing and killing
  at once from the v2 tree, which has them without controllers.
* **none** (nobody delegated a cgroup to this user): the supervisor polls, and says so.

Where: as root at the top of each hierarchy. As a normal user version 2 wants an ancestor of our own cgroup
that we may write to (systemd makes one: ``systemd-run --user --scope``); version 1 a folder
``ringfence-<uid>`` that the administrator made and gave us, in each hierarchy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from dataclasses import dataclass, field

from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import CgroupPlace

NAME = "ringfence"
AGENT_MEMORY = 32 << 20  # bytes on top of the sandbox's memory, for the agent and its rings
AGENT_PIDS = 64  # on top of max_processes: the agent, and the helpers it forks for files
AGENT_CPU = 0.1  # of a CPU on top of the quota, so that the agent answers while the workload spins
PERIOD = 100_000  # microseconds; the kernel's own default
IO_WEIGHT = 50  # of 100: a sandbox's disk work gives way to the host's
DELEGATE = "run it under: systemd-run --user --scope -p Delegate=yes ringfence …, or as root"


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What a group enforces. Bytes, CPUs, processes."""

    memory: int
    cpus: float
    pids: int


@dataclass(slots=True)
class Cgroups:
    """What this host has, found once by :func:`detect`.

    ``roots``: controller name → folder in which ``ringfence/<id>`` is made; ``unified`` is a version 2 tree.
    ``reason`` and ``remedy`` say why something is missing.
    """

    mode: str  # v1, v2, hybrid, none
    roots: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""
    _ready: bool = False

    def enforced(self) -> dict[str, str]:
        """How memory, cpu, pids and cpu_time are enforced: ``cgroup-v1``, ``cgroup-v2`` or ``polled``."""
        if self.mode == "v2":
            has = dict.fromkeys(self.roots, "cgroup-v2")
            return {
                "memory": has.get("memory", "polled"),
                "cpu": has.get("cpu", "none"),
                "pids": has.get("pids", "rlimit"),
                "cpu_time": "cgroup-v2",
            }
        has = dict.fromkeys(self.roots, "cgroup-v1")
        return {
            "memory": has.get("memory", "polled"),
            "cpu": has.get("cpu", "none"),
            "pids": has.get("pids", "rlimit"),
            "cpu_time": "cgroup-v2" if "unified" in has else has.get("cpuacct", "polled"),
        }

    def create(self, name: str, limits: GroupLimits) -> Group:
        """Make a sandbox's groups with their limits; nothing is left if a step fails.

        Raises:
            HostLimit: the kernel refused; the message says which folder and why.
        """
        if self.mode == "none":
            return Group(self, name, ())
        if not self._ready:
            self._prepare()
        group = Group(self, name, tuple(self.roots), limits)
        try:
            if self.mode == "v2":
                self._create_v2(name, limits)
            else:
                self._create_v1(name, limits)
        except OSError as error:
            group.remove()
            raise host_limit(
                error,
                f"make cgroup {NAME}/{name} ({error.filename or 'write a limit'})",
                hint="see `ringfence doctor` for what this host delegates",
            ) from error
        return group

    def _prepare(self) -> None:
        for controller, root in self.roots.items():
            folder = f"{root}/{NAME}"
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder)
                if controller == "unified" and self.mode == "v2":
                    _enable(root, self._controllers_v2())
                    _enable(folder, self._controllers_v2())
                elif controller == "memory" and self.mode != "v2":
                    # On old hosts a v1 group does not count its children unless told so.
                    with contextlib.suppress(OSError):
                        _write(f"{folder}/memory.use_hierarchy", "1")
            except OSError as error:
                raise host_limit(error, f"make cgroup {folder}", hint=self.remedy or DELEGATE) from error
        self._ready = True

    def _controllers_v2(self) -> list[str]:
        return [name for name in self.roots if name != "unified"]

    def _create_v1(self, name: str, limits: GroupLimits) -> None:
        quota = limits.cpus * PERIOD
        made = set()
        for controller, root in self.roots.items():
            outer = f"{root}/{NAME}/{name}"
            inner = outer + "/work"
            if outer in made:
                continue
            os.mkdir(outer)
            made.add(outer)
            if controller in ("unified", "cpuacct", "freezer"):
                continue  # they count and act on the whole sandbox
            os.mkdir(inner)
            if controller == "memory":
                for folder, size in ((outer, limits.memory + AGENT_MEMORY), (inner, limits.memory)):
                    _write(f"{folder}/memory.limit_in_bytes", str(size))
                    try:
                        # Memory and swap together: with both equal there is no swap.
                        _write(f"{folder}/memory.memsw.limit_in_bytes", str(size))
                    except FileNotFoundError:
                        _write(f"{folder}/memory.swappiness", "0")
            elif controller == "pids":
                _write(f"{outer}/pids.max", str(limits.pids + AGENT_PIDS))
                _write(f"{inner}/pids.max", str(limits.pids))
            elif controller == "cpu":
                _write(f"{outer}/cpu.cfs_quota_us", str(int(quota + AGENT_CPU * PERIOD)))
                _write(f"{inner}/cpu.cfs_quota_us", str(max(1000, int(quota))))
            elif controller == "blkio":
                for file in ("blkio.bfq.weight", "blkio.weight"):
                    with contextlib.suppress(OSError):
                        _write(f"{outer}/{file}", str(IO_WEIGHT))

    def _create_v2(self, name: str, limits: GroupLimits) -> None:
        outer = f"{self.roots['unified']}/{NAME}/{name}"
        os.mkdir(outer)
        _enable(outer, self._controllers_v2())
        os.mkdir(outer + "/agent")
        os.mkdir(outer + "/work")
        work = outer + "/work"
        if "memory" in self.roots:
            for folder, size in ((outer, limits.memory + AGENT_MEMORY), (work, limits.memory)):
                _write(f"{folder}/memory.max", str(size))
                with contextlib.suppress(FileNotFoundError):  # absent: the kernel has no swap accounting
                    _write(f"{folder}/memory.swap.max", "0")
        if "pids" in self.roots:
            _write(f"{outer}/pids.max", str(limits.pids + AGENT_PIDS))
            _write(f"{work}/pids.max", str(limits.pids))
        if "cpu" in self.roots:
            quota = limits.cpus * PERIOD
            _write(f"{outer}/cpu.max", f"{int(quota + AGENT_CPU * PERIOD)} {PERIOD}")
            _write(f"{work}/cpu.max", f"{max(1000, int(quota))} {PERIOD}")
        if "io" in self.roots:
            with contextlib.suppress(OSError):
                _write(f"{outer}/io.weight", f"default {IO_WEIGHT}")

    def names(self) -> set[str]:
        """Names of all groups below ``ringfence``, in any hierarchy."""
        found: set[str] = set()
        for root in set(self.roots.values()):
            with contextlib.suppress(OSError):
                found.update(
                    entry.name
                    for entry in os.scandir(f"{root}/{NAME}")
                    if entry.is_dir(follow_symlinks=False)
                )
        return found

    def group(self, name: str) -> Group:
        """The groups of a sandbox that another process made."""
        return Group(self, name, tuple(self.roots))


class Group:
    """One sandbox's groups in every hierarchy. Without hierarchies every number is ``None``."""

    def __init__(
        self,
        owner: Cgroups,
        name: str,
        controllers: tuple[str, ...],
        limits: GroupLimits | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.oom_before = 0  # kills counted before the present sandbox
        self.cpu_before = 0.0
        self._owner = owner
        self._controllers = controllers
        self._place: CgroupPlace | None = None
        self.held: dict[str, int] = {}  # path → descriptor: files that are kept open, until it is removed
        self._base = {c: f"{owner.roots[c]}/{NAME}/{name}" for c in controllers}

    def __bool__(self) -> bool:
        return bool(self._controllers)

    def place(self) -> CgroupPlace:
        """Where the driver puts the agent, and where the agent puts the workload."""
        if self._place is None:
            self._place = self._find_place()
        return self._place

    def _find_place(self) -> CgroupPlace:
        if not self._controllers:
            return CgroupPlace()
        if self._owner.mode == "v2":
            base = self._base["unified"]
            return CgroupPlace(
                agent=(f"{base}/agent/cgroup.procs",),
                work=(f"{base}/work/cgroup.procs",),
                v2_fd_path=f"{base}/agent",
            )
        inner = ("memory", "pids", "cpu")
        return CgroupPlace(
            agent=tuple(f"{base}/cgroup.procs" for base in dict.fromkeys(self._base.values())),
            work=tuple(f"{self._base[c]}/work/cgroup.procs" for c in inner if c in self._base),
            v2_fd_path=self._base.get("unified"),
            opened=self.held,
        )

    def let_go(self) -> None:
        """Close the files that are kept open."""
        for descriptor in self.held.values():
            os.close(descriptor)
        self.held.clear()

    def base(self, controller: str) -> str | None:
        """Its folder in a hierarchy."""
        return self._base.get(controller)

    def _number(self, path: str) -> int | None:
        descriptor = self.held.get(path)
        if descriptor is None:
            return _number(path)
        try:
            return int(os.pread(descriptor, 64, 0))
        except (OSError, ValueError):
            return None

    def oom_kills(self) -> int | None:
        """Processes of the present sandbox that the kernel killed for memory, so far."""
        base = self._base.get("memory")
        if base is None:
            return None
        if self._owner.mode == "v2":
            count = _counter(f"{self._base['unified']}/memory.events", "oom_kill")
            return None if count is None else count - self.oom_before
        # Version 1 counts in the victim's own group only.
        outer = _counter(f"{base}/memory.oom_control", "oom_kill")
        inner = _counter(f"{base}/work/memory.oom_control", "oom_kill")
        return None if outer is None or inner is None else outer + inner - self.oom_before

    def memory_peak(self) -> int | None:
        """Most bytes ever charged to the whole sandbox."""
        base = self._base.get("memory")
        if base is None:
            return None
        if self._owner.mode == "v2":
            return _number(f"{self._base['unified']}/memory.peak")  # Linux 5.19
        return self._number(f"{base}/memory.max_usage_in_bytes")

    def memory_now(self) -> int | None:
        """Bytes charged to the whole sandbox."""
        base = self._base.get("memory")
        if base is None:
            return None
        if self._owner.mode == "v2":
            return _number(f"{self._base['unified']}/memory.current")
        return _number(f"{base}/memory.usage_in_bytes")

    def cpu_seconds(self) -> float | None:
        """Processor time of the whole sandbox, ended processes included."""
        total = self._cpu_total()
        return None if total is None else total - self.cpu_before

    def _cpu_total(self) -> float | None:
        base = self._base.get("unified")
        if base is not None:
            micro = _counter(f"{base}/cpu.stat", "usage_usec")
            return None if micro is None else micro / 1e6
        base = self._base.get("cpuacct")
        nano = self._number(f"{base}/cpuacct.usage") if base else None
        return None if nano is None else nano / 1e9

    def renew(self, most: int) -> bool:
        """Make an empty group of version 1 as good as new; False if more than ``most`` bytes stick to it."""
        base, limits = self._base.get("memory"), self.limits
        peak = self.memory_peak()
        if base is None or limits is None or peak is None:
            return False
        if peak > most and (self.memory_now() or 0) > most:
            return False
        if peak >= limits.memory // 2:
            # Only who came near the limit can have lost a process to it: else that counter stands still.
            self.oom_before += self.oom_kills() or 0
        path = f"{base}/memory.max_usage_in_bytes"
        try:
            _write(path, "0", self.held.get(path))
        except OSError:
            return False
        self.cpu_before = self._cpu_total() or 0.0
        return True

    def is_empty(self) -> bool:
        """No process, not even a dying one, is in any of them."""
        unified = self._base.get("unified")
        if unified is not None:
            return _counter(f"{unified}/cgroup.events", "populated") == 0
        if (pids := self._base.get("pids")) is not None:
            count = self._number(f"{pids}/pids.current")  # of the groups below, too; the dying count
            if count is not None:
                return count == 0
        return not self.processes()

    def outside(self, pid: int) -> list[str]:
        """Limits (memory, pids, cpu) whose group the process is *not* in: read, not assumed."""
        try:
            with open(f"/proc/{pid}/cgroup") as file:
                lines = [line.rstrip("\n").split(":", 2) for line in file]
        except OSError:
            return []
        inside = {
            name
            for _, names, path in lines
            for name in (names.split(",") if names else ["unified"])
            if f"/{NAME}/{self.name}" in path
        }
        if self._owner.mode == "v2":
            inside = set(self._controllers) if "unified" in inside else set()
        return [name for name in ("memory", "pids", "cpu") if name in self._base and name not in inside]

    def processes(self) -> list[int]:
        """Host pids of every member."""
        for controller in ("unified", "pids", "memory", *self._controllers):
            base = self._base.get(controller)
            if base is None:
                continue
            found: list[int] = []
            for folder in (base, f"{base}/work", f"{base}/agent"):
                with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs") as file:
                    found += [int(line) for line in file.read().split()]
            return found
        return []

    def kill(self) -> None:
        """SIGKILL every member, and what they fork meanwhile."""
        base = self._base.get("unified")
        if base is not None:
            try:
                _write(f"{base}/cgroup.kill", "1")  # Linux 5.14
                return
            except OSError:
                pass
        if (freezer := self._base.get("freezer")) is not None:
            with contextlib.suppress(OSError):
                _write(f"{freezer}/freezer.state", "THAWED")  # frozen tasks of version 1 don't even die
        for _ in range(100):
            pids = self.processes()
            if not pids:
                return
            for pid in filter(None, pids):  # 0: of a pid namespace that we don't see
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the empty groups. False: something still lives there (or dies); call again later."""
        self.let_go()
        gone = True
        for base in dict.fromkeys(self._base.values()):
            for folder in (f"{base}/work", f"{base}/agent", base):
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                        raise host_limit(error, f"remove cgroup {folder}") from error
                    gone = False
                    break
        return gone


def detect(
    mountinfo: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup", user: int | None = None
) -> Cgroups:
    """What this host has for us. Reads two files and tries nothing (0.1 ms)."""
    user = os.geteuid() if user is None else user
    mounts = _mounts(mountinfo)
    v1: dict[str, tuple[str, str]] = {}  # the first; others mount them elsewhere, read-only, for containers
    for names, place in mounts:
        for name in names.split(",") if names is not None else ():
            if name not in v1 or (_usable(place[0]) and not _usable(v1[name][0])):
                v1[name] = place
    v2 = next((place for names, place in mounts if names is None), None)
    if "memory" in v1 or "pids" in v1:
        return _detect_v1(v1, v2, own, user)
    if v2 is None:
        return Cgroups(
            "none", reason="no cgroup hierarchy is mounted", remedy="mount -t cgroup2 none /sys/fs/cgroup"
        )
    return _detect_v2(v2, own, user)


def _mounts(mountinfo: str) -> list[tuple[str | None, tuple[str, str]]]:
    """(controllers, or None for version 2; (mount point, root of the mount))."""
    found: list[tuple[str | None, tuple[str, str]]] = []
    with open(mountinfo, errors="surrogateescape") as file:
        for line in file:
            if " - cgroup" not in line:
                continue
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(maxsplit=2)
            fields = left.split()
            place = (fields[4].replace("\\040", " "), fields[3])
            if kind == "cgroup2":
                found.append((None, place))
            elif kind == "cgroup":
                names = [o for o in options.strip().split(",") if o not in ("rw", "ro") and "=" not in o]
                found.append((",".join(names), place))
    return found


def _detect_v1(v1: dict[str, tuple[str, str]], v2: tuple[str, str] | None, own: str, user: int) -> Cgroups:
    roots = {}
    refused = []
    wanted = ["memory", "pids", "cpu"]
    for name in wanted:
        if name not in v1:
            continue
        root = v1[name][0] if user == 0 else f"{v1[name][0]}/{NAME}-{user}"
        if _usable(root):
            roots[name] = root
        else:
            refused.append(root)
    # Counting and freezing the whole sandbox. Version 2 could do both with one group, but moving into it
    # locks out every fork and exit of the machine (or needs CLONE_INTO_CGROUP, and with it a child that was
    # not made ahead: 1.7 ms a start); a thread that moves itself by version 1's `tasks` locks nothing.
    if user == 0 and {"cpuacct", "freezer"} <= set(v1):
        for name in ("cpuacct", "freezer"):
            if _usable(v1[name][0]):
                roots[name] = v1[name][0]  # cpuacct is often the same folder as cpu's: then it is made once
    # Version 2 lets only root move a process from anywhere: a normal user's would need a common ancestor.
    # cpu.stat and cgroup.kill without controllers: since Linux 4.18 and 5.14.
    elif v2 is not None and user == 0 and _usable(v2[0]) and os.path.exists(f"{v2[0]}/cpu.stat"):
        roots["unified"] = v2[0]
    if "unified" not in roots and "cpuacct" not in roots and "cpuacct" in v1:
        root = v1["cpuacct"][0] if user == 0 else f"{v1['cpuacct'][0]}/{NAME}-{user}"
        if _usable(root):
            roots["cpuacct"] = root
    if user == 0 and "blkio" in v1 and _has_weight(v1["blkio"][0]):
        roots["blkio"] = v1["blkio"][0]
    if "memory" not in roots:
        remedy = (
            "as root: for h in memory pids cpu cpuacct; do mkdir -p "
            f"/sys/fs/cgroup/$h/{NAME}-{user} && chown -R {user} /sys/fs/cgroup/$h/{NAME}-{user}; done"
            if user
            else "mount the cgroup hierarchies writable"
        )
        return Cgroups(
            "none", reason=f"not writable: {', '.join(refused) or 'no memory hierarchy'}", remedy=remedy
        )
    missing = [name for name in wanted if name not in roots]
    return Cgroups(
        "hybrid" if v2 is not None else "v1",
        roots,
        reason=f"no usable hierarchy for {', '.join(missing)}" if missing else "",
    )


def _detect_v2(v2: tuple[str, str], own: str, user: int) -> Cgroups:
    point, top = v2
    path = "/"
    with open(own) as file:
        for line in file:
            if line.startswith("0::"):
                path = line[3:].strip()
    if top != "/" and (path + "/").startswith(top.rstrip("/") + "/"):
        path = path[len(top.rstrip("/")) :] or "/"
    if user == 0:
        candidates = [point]
    else:
        # From the top down: the first ancestor of ours that we may write to. Both ends of a move must
        # lie below it, so our own cgroup has to be.
        parts = [part for part in path.split("/") if part and part != ".."]
        candidates = [point + "".join("/" + p for p in parts[:n]) for n in range(len(parts) + 1)]
    for root in candidates:
        if not (_usable(root) and os.access(f"{root}/cgroup.procs", os.W_OK)):
            continue
        have = _words(f"{root}/cgroup.controllers")
        enabled = _words(f"{root}/cgroup.subtree_control")
        wanted = [name for name in ("memory", "pids", "cpu", "io") if name in have]
        inner = not (root == point and top == "/") and bool(_words(f"{root}/cgroup.procs"))
        if inner:
            # Processes live here, so nothing more can be switched on below: what is on, is.
            wanted = [name for name in wanted if name in enabled]
        if "memory" not in wanted:
            continue
        missing = [name for name in ("memory", "pids", "cpu") if name not in wanted]
        return Cgroups(
            "v2",
            {"unified": root, **dict.fromkeys(wanted, root)},
            reason=f"not delegated: {', '.join(missing)}" if missing else "",
            remedy=DELEGATE if missing else "",
        )
    return Cgroups(
        "none", reason="no cgroup with a memory controller is delegated to this user", remedy=DELEGATE
    )


def _usable(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and not _read_only(folder)


def _read_only(folder: str) -> bool:
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return True


def _has_weight(root: str) -> bool:
    # Weights work with the bfq scheduler only, and the root group has no weight file to tell by.
    try:
        disks = [name for name in os.listdir("/sys/block") if not name.startswith(("loop", "ram"))]
    except OSError:
        return False
    return any("[bfq]" in _words(f"/sys/block/{disk}/queue/scheduler") for disk in disks) and _usable(root)


def _enable(folder: str, controllers: list[str]) -> None:
    enabled = _words(f"{folder}/cgroup.subtree_control")
    missing = [name for name in controllers if name not in enabled]
    if missing:
        _write(f"{folder}/cgroup.subtree_control", " ".join("+" + name for name in missing))


def _write(path: str, text: str, held: int | None = None) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if held is None else held
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        if held is None:
            os.close(file)


def _words(path: str) -> list[str]:
    return _read(path).decode(errors="replace").split()


def _read(path: str) -> bytes:
    """The first page of a kernel file, empty if it can't be read: without the layers of ``open``."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    except OSError:
        return b""
    finally:
        os.close(file)


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _counter(path: str, name: str) -> int | None:
    wanted = name.encode()
    for line in _read(path).splitlines():
        key, _, value = line.partition(b" ")
        if key == wanted:
            return int(value)
    return None
