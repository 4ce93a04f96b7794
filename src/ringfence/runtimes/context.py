"""What every driver is given: the launcher, the guest agent's binary, and whether the node is root."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ringfence import _native
from ringfence.model.errors import HostLimit
from ringfence.runtimes.launching.launcher import Launcher
from ringfence.runtimes.launching.plan import (
    BIND_DEVICES,
    BIND_NOEXEC,
    BIND_OPTIONAL,
    BIND_READONLY,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUTS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_REC,
    MS_SLAVE,
    NOBODY,
    Plan,
)
from ringfence.runtimes.launching.steps import MASKED, READ_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.runtimes.contract import StartSpec
    from ringfence.runtimes.lsm.applying import Confining

STAGE = "/sys"  # exists everywhere, and nothing of it is ever shown inside: a place to mount on
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_SYS_ADMIN, _SETGID, _SETUID = 21, 6, 7
_SECURITY_MODULES = ("/sys/kernel/security/apparmor", "/sys/fs/selinux")
CHILDREN_READY = 4  # made ahead, each for one wall
TERMINALS = 256  # of one sandbox; the kernel has 4,096 for everybody
DEVPTS = f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}"
_MFD_EXEC = 0x10
_SEALS = 0xF  # F_SEAL_SEAL, SHRINK, GROW, WRITE
_ADD_SEALS = 1033
# File systems that no sandbox is ever shown: every one less makes each new mount namespace cheaper.
_NEEDLESS = {
    "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "pstore", "rpc_pipefs", "securityfs",
    "selinuxfs", "sysfs", "tracefs",
}  # fmt: skip


def privileged() -> bool:
    """Root with the rights that walls as root need (root in an ordinary container has not)."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                mask = int(line.split()[1], 16)
                return all(mask >> bit & 1 for bit in (_SYS_ADMIN, _SETGID, _SETUID))
    return False


def _needless_mounts() -> list[str]:
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            path = head.split()[4]
            kind = tail.split()[0]
            if "\\" in path or path.startswith("/sys/") or path in ("/", "/proc", "/dev", "/sys"):
                continue
            layered = kind == "overlay" and path.startswith(("/var/lib/docker/", "/var/lib/containers/"))
            snap = kind == "squashfs" and path.startswith("/snap/")
            if kind in _NEEDLESS or layered or snap or path == "/dev/shm":  # noqa: S108
                found.append(path)
    return found


def init_plan() -> Plan:
    """What the launcher of a root node does first: a nearly empty mount namespace of its own, and a folder
    of device nodes that every sandbox is shown read-only (one mount instead of seven)."""
    plan = Plan()
    plan.add("UNSHARE", CLONE_NEWNS)
    # Slave: what the host mounts later appears here too, and nothing from here appears there.
    plan.add("MOUNT", "none", "/", "none", MS_REC | MS_SLAVE, "")
    for path in reversed(_needless_mounts()):
        plan.add("UMOUNT", path)
    plan.add("UMOUNT", STAGE)
    # 0711: the sandbox's users pass through on the way to their own root while it is being built.
    plan.add("MOUNT", "ringfence", STAGE, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0711,size=1m")
    plan.add("MKDIR", f"{STAGE}/stage", 0o700, NOBODY, NOBODY)
    for path in (f"{STAGE}/fs", f"{STAGE}/fs/cgroup"):
        plan.add("MKDIR", path, 0o711, NOBODY, NOBODY)
    plan.add("MKDIR", f"{STAGE}/empty", 0o555, NOBODY, NOBODY)
    plan.add("MKDIR", f"{STAGE}/dev", 0o755, NOBODY, NOBODY)
    for name, (major, minor) in DEVICES.items():
        plan.add("MKNOD", f"{STAGE}/dev/{name}", 0o20666, major, minor)
    for name, target in DEVICE_LINKS.items():
        plan.add("SYMLINK", target, f"{STAGE}/dev/{name}")
    for name in ("pts", "shm"):
        plan.add("MKDIR", f"{STAGE}/dev/{name}", 0o755, NOBODY, NOBODY)
    for name in ("proc", "devices"):
        plan.add("MKDIR", f"{STAGE}/{name}", 0o700, NOBODY, NOBODY)
    return plan


def prelude_plan() -> Plan:
    """What every wall of a root node begins with, whatever it is for: the launcher does it ahead.

    Namespaces (the network's takes most of a millisecond), a masked /proc of the new pid namespace and
    a /dev with terminals of its own; the wall's plan moves both into its root.
    """
    plan = Plan()
    plan.add("READY", CHILDREN_READY)
    plan.add("CLONE", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWTIME)
    plan.add("UNSHARE", CLONE_NEWNET)
    plan.add("LOOPBACK")
    plan.add("MOUNT", "proc", f"{STAGE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "")
    for path in MASKED:
        if os.path.isdir(path):  # one empty folder for all of them, rather than a file system for each
            plan.add("BIND", f"{STAGE}/empty", STAGE + path, BIND_READONLY | BIND_NOEXEC | BIND_OPTIONAL)
        else:
            plan.add("MASK", STAGE + path)
    for path in READ_ONLY:
        plan.add("READONLY", STAGE + path)
    plan.add("BIND", f"{STAGE}/dev", f"{STAGE}/devices", BIND_READONLY | BIND_DEVICES | BIND_NOEXEC)
    plan.add("MOUNT", "devpts", f"{STAGE}/devices/pts", "devpts", MS_NOSUID | MS_NOEXEC, DEVPTS)
    return plan


def sealed_copy(path: str) -> int:
    """A sealed memory file with the program at ``path``: what runs can't be changed by anybody any more.

    Raises:
        HostLimit: it can't be read, or memory is short.
    """
    try:
        with open(path, "rb") as file:
            program = file.read()
        name = os.path.basename(path)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            descriptor = os.memfd_create(name, flags | _MFD_EXEC)
        except OSError:  # before Linux 6.3 there is no such flag, and every memory file may be executed
            descriptor = os.memfd_create(name, flags)
        try:
            import fcntl

            os.write(descriptor, program)
            os.fchmod(descriptor, 0o555)
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise HostLimit(
            f"the program {path} can't be loaded: {error.strerror}", hint="build it again"
        ) from error
    return descriptor


class RuntimeContext:
    """Shared by the drivers of one node process. ``root``: walls are made with the host root's rights."""

    def __init__(self, launcher: Launcher, agent: str, root: bool) -> None:
        self.launcher = launcher
        self.agent = agent
        self.root = root
        self._files: dict[str, int] = {}
        self._confining: Confining | None = None

    @classmethod
    async def open(cls, *, root: bool | None = None) -> RuntimeContext:
        """Start the launcher. ``root=False`` makes rootless walls even where the caller could do more.

        Raises:
            HostLimit: the native programs are not built.
            StartFailed: the launcher could not prepare itself.
        """
        as_root = privileged() if root is None else root
        agent = _native.agent()
        launcher = await (Launcher.start(init_plan(), prelude_plan()) if as_root else Launcher.start())
        return cls(launcher, agent, as_root)

    def security_steps(self, spec: StartSpec) -> list[tuple[str, str, str]]:
        """Steps that put a wall into the host's AppArmor, before it gives up being root; none where there is
        no AppArmor, or its profile can't be had (``doctor`` says why)."""
        confining = self._security_module() if os.path.isdir("/sys/kernel/security/apparmor") else None
        return confining.steps(spec) if confining is not None else []

    def engine_security(self, spec: StartSpec) -> list[str]:
        """Security options for a container engine on this machine: a profile or label; none without them."""
        confining = self._security_module() if any(map(os.path.isdir, _SECURITY_MODULES)) else None
        return confining.engine(spec.identity.host_uid(0) >> 16, spec) if confining is not None else []

    def _security_module(self) -> Confining | None:
        if self._confining is None and self.root:
            from ringfence.runtimes.lsm.applying import Confining

            self._confining = Confining()
        return self._confining

    def agent_fd(self) -> int:
        """The guest agent as a sealed memory file, made once. Stays open; owned by the context."""
        if "agent" not in self._files:
            self._files["agent"] = sealed_copy(self.agent)
        return self._files["agent"]

    def filter_fd(self, name: str) -> int:
        """The named seccomp filter as a memory file of ``struct sock_filter``; owned by the context.

        Raises:
            InvalidRequest: no such filter.
            HostLimit: none for this machine.
        """
        from ringfence.runtimes import seccomp

        return self.memory_file(f"seccomp-{name}", lambda: seccomp.load(name))

    def memory_file(self, key: str, content: Callable[[], bytes]) -> int:
        """A memory file that is made once, at its begin; owned by the context."""
        if key not in self._files:
            data = content()
            descriptor = os.memfd_create(key, os.MFD_CLOEXEC)
            os.write(descriptor, data)
            os.lseek(descriptor, 0, os.SEEK_SET)
            self._files[key] = descriptor
        return self._files[key]

    async def close(self) -> None:
        """End the launcher: ephemeral walls die, kept ones live on. Idempotent."""
        await self.launcher.close()
        for descriptor in self._files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files.clear()
