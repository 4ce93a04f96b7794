"""``jail``: namespaces, made by our own launcher. Shared kernel, level 2.

As root the mount, pid, net, ipc and uts namespaces belong to the host's user namespace and the sandbox is
put into a user namespace of its own afterwards: nothing inside has a capability over any of them. As a
normal user all of them belong to one user namespace, and what keeps the workload from using that is that
it has no capability, an empty bounding set and no_new_privs.
"""

from __future__ import annotations

import errno as _errno
import os
from functools import lru_cache
from typing import Any

from ringfence.model.errors import HostLimit, StartFailed
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes.context import DEVICE_LINKS, DEVICES, DEVPTS, STAGE
from ringfence.runtimes.contract import Bind, Capabilities, Handle, Identity, Probe, RootFs, StartSpec
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.driver import EXIT_FILE, LaunchedRuntime
from ringfence.runtimes.launching.freezing import FrozenByCgroup
from ringfence.runtimes.launching.guestargs import AGENT_CAPABILITIES, agent_arguments, environment
from ringfence.runtimes.launching.landlock import add_landlock
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
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MAPS_DENY_SETGROUPS,
    MAPS_HELPER,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
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
    add_limits,
    add_overlay,
    common,
    shm_limits,
)

_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWTIME | CLONE_NEWNET
)
_QUIET = MS_NOSUID | MS_NODEV | MS_NOEXEC

_LISTEN_FD = 3


@lru_cache(maxsize=2)
def _capabilities(root: bool) -> Capabilities:
    return Capabilities(
        rootless=True,
        overlay=True,
        user_zero=True,
        mounts=True,
        recover=True,
        disk_limit=True,
        pause=root,  # by the freezer of a cgroup, which a normal user has seldom
        disk_snapshot=True,
        network=("none", "egress", "open"),
        transparent=True,
    )


class JailRuntime(FrozenByCgroup, LaunchedRuntime):
    """See the module."""

    name = "jail"
    level = Level.L2
    boundary = Boundary.NAMESPACES

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return _capabilities(self.context.root)

    async def probe(self) -> Probe:
        """See the contract: starts a wall and talks to the agent in it."""
        from ringfence.runtimes.launching.probing import probe

        return await probe(self)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        if spec.root.disk.kind == "image" and not self.context.root:
            raise HostLimit(
                "only root can mount a disk image",
                hint="ask for a disk of at most half of the memory, or run the node as root",
            )
        opened: list[int] = []
        listener = sockets.unbound()
        gate, lift = os.pipe2(os.O_CLOEXEC)
        opened += (gate, lift)

        def listen() -> None:
            # The child builds the wall while this process makes the socket; it waits for the byte.
            sockets.listen(listener, spec.folder)
            os.write(lift, b"x")

        try:
            plan = self._plan(spec, listener.fileno(), gate, opened)
            child = await self.context.launcher.spawn(plan, keep=not spec.ephemeral, meanwhile=listen)
        except BaseException as error:
            _forget(spec.folder)
            if isinstance(error, OSError):
                raise StartFailed(
                    f"no socket in {spec.folder}: {error.strerror}",
                    step="listen",
                    errno=_errno.errorcode.get(error.errno or 0, ""),
                ) from error
            raise
        finally:
            listener.close()
            for descriptor in opened:
                os.close(descriptor)
        return self.handle(
            spec,
            child,
            child.pid,
            {
                "landlock": child.landlock,
                "uid": spec.identity.host_uid(spec.identity.uid),
                "capabilities": spec.identity.capabilities,
                "network": spec.network,
                "cgroups": list(spec.cgroup.agent),
            },
        )

    def open_upper(self, handle: Handle) -> int:
        """See the contract."""
        return os.open(
            f"/proc/{handle.pid}/root/.ringfence/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )

    # -- the plan

    def _plan(self, spec: StartSpec, listener: int, gate: int, opened: list[int]) -> Plan:
        security = tuple(self.context.security_steps(spec)) if self.context.root else ()
        head, wall, program = _settled(self.context.root, spec, security)
        plan = Plan()
        plan.extend(head)
        if not spec.ephemeral:
            plan.add("KEEP")
            # Of an ephemeral wall nobody asks after its node's end.
            plan.add("EXIT_FILE", os.path.join(spec.folder, EXIT_FILE))
        work = add_cgroups(plan, spec, opened)
        plan.add("FD", plan.fd(listener), _LISTEN_FD)
        for index, descriptor in enumerate(work):
            plan.add("FD", plan.fd(descriptor), _LISTEN_FD + 1 + index)
        plan.add("UNSHARE", CLONE_NEWCGROUP)
        plan.add("HOSTNAME", spec.hostname)
        plan.extend(wall)
        plan.extend(program)
        plan.add("AWAIT", plan.fd(gate))
        plan.add("SECCOMP", plan.fd(self.context.filter_fd(spec.seccomp)))
        plan.add("EXEC_FD", plan.fd(self.context.agent_fd()))
        return plan


_Steps = tuple[tuple[Any, ...], ...]
_settled_plans: dict[tuple[Any, ...], tuple[Plan, Plan, Plan]] = {}
_MOST_SETTLED = 512


def _settled(root: bool, spec: StartSpec, security: _Steps) -> tuple[Plan, Plan, Plan]:
    """What of a plan is the same for every sandbox of that kind, kept: its head, the wall, the program.

    The key has every wish but those that name one sandbox or its descriptors. Whatever is looked at here
    must be in it.
    """
    cgroups = len(spec.cgroup.agent), len(spec.cgroup.work)
    key = (root, security, cgroups, tuple(spec.env.items()), common(spec))
    found = _settled_plans.get(key)
    if found is None:
        if len(_settled_plans) >= _MOST_SETTLED:
            _settled_plans.clear()
        found = _settled_plans[key] = (
            _head(root, spec.identity),
            _wall(root, spec, security),
            _program(spec, cgroups[1]),
        )
    return found


def _head(root: bool, identity: Identity) -> Plan:
    plan = Plan()
    if root:
        plan.add("USERNS", _maps(identity))
        plan.add("PRELUDE")
    else:
        # All of them belong to the new user namespace, so nothing of it can be made ahead.
        plan.add("CLONE", _NAMESPACES)
        plan.add("MAPS", MAPS_HELPER if identity.helper else MAPS_DENY_SETGROUPS, _maps(identity))
    return plan


def _wall(root: bool, spec: StartSpec, security: _Steps) -> Plan:
    """From the root file system to the last right that is given up."""
    identity = spec.identity
    plan = Plan()
    if not root:
        plan.add("LOOPBACK")
    plan.extend(_root(root, spec.root, identity, spec.memory))
    add_limits(plan, spec)
    if root:
        for step in security:
            plan.add(*step)
        plan.add("USERNS_ENTER")
    plan.add("NO_NEW_PRIVS")
    add_landlock(plan, spec)
    separate = identity.agent_uid != identity.uid
    kept = (AGENT_CAPABILITIES if separate else 0) | identity.capabilities
    plan.add(
        "BECOME",
        identity.agent_uid,
        identity.agent_uid if separate else identity.gid,
        int(root or identity.helper),
        kept,
    )
    if spec.ephemeral:
        plan.add("DEATH_SIGNAL", 9)
    plan.add("UMASK", 0o022)
    return plan


def _program(spec: StartSpec, work: int) -> Plan:
    """The agent's arguments and environment; ``work`` descriptors of the workload's cgroups."""
    plan = Plan()
    for text in agent_arguments(spec, _LISTEN_FD, range(_LISTEN_FD + 1, _LISTEN_FD + 1 + work)):
        plan.add("ARG", text)
    for text in environment(spec):
        plan.add("ENV", text)
    return plan


def _root(root: bool, files: RootFs, identity: Identity, memory: int) -> Plan:
    """Everything about the file system."""
    plan = Plan()
    stage = f"{STAGE}/stage" if root else STAGE
    first = (identity.host_uid(0), identity.host_uid(0)) if root else (NOBODY, NOBODY)
    add_overlay(plan, files, identity, stage, f"{stage}/root", root=root)
    plan.add("PIVOT", f"{stage}/root")
    if root:
        plan.add("OWNER", *first)
    for bind in files.binds:
        plan.add("BIND", bind.source, bind.target, _bind_flags(bind))
    if root:
        plan.add("BIND", f"{STAGE}/proc", "/proc", BIND_MOVE)
        plan.add("BIND", f"{STAGE}/devices", "/dev", BIND_MOVE)
    else:
        plan.add("MOUNT", "proc", "/proc", "proc", _QUIET, "")
        plan.extend(_devices())
    plan.add("BIND", stage, "/.ringfence", BIND_READONLY | BIND_FLAT | BIND_NOEXEC | BIND_MAKE)
    if root:
        plan.add("DETACH_BEGIN")
    owner = (
        f",uid={identity.host_uid(identity.agent_uid)},gid={identity.host_uid(identity.agent_uid)}"
        if root
        else f",uid={identity.agent_uid}"
    )
    plan.add("MOUNT", "shm", "/dev/shm", "tmpfs", _QUIET, ",".join((*shm_limits(memory), "mode=1777")))  # noqa: S108
    options = f"size={SECRETS_SIZE},nr_inodes={MOST_SECRETS},mode=0755{owner}"
    plan.add("MOUNT", "secrets", "/run/secrets", "tmpfs", _QUIET, options)
    if not root:
        plan.extend(_proc_covers())
    if files.readonly:
        for path in files.read_write:
            plan.add("BIND", path, path, BIND_INSIDE)
        plan.add("REMOUNT", "/", ATTR_RDONLY)
    for path in files.read_only:
        plan.add("READONLY", path)
    plan.add("DETACH")
    return plan


@lru_cache(maxsize=1)
def _devices() -> Plan:
    plan = Plan()
    plan.add("MOUNT", "dev", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=0755")
    for name in DEVICES:
        plan.add("BIND", f"/dev/{name}", f"/dev/{name}", BIND_DEVICES | BIND_NOEXEC | BIND_MAKE)
    for name, target in DEVICE_LINKS.items():
        plan.add("SYMLINK", target, f"/dev/{name}")
    for name in ("pts", "shm"):
        plan.add("MKDIR", f"/dev/{name}", 0o755, NOBODY, NOBODY)
    plan.add("REMOUNT", "/dev", ATTR_RDONLY)
    plan.add("MOUNT", "devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, DEVPTS)
    return plan


@lru_cache(maxsize=1)
def _proc_covers() -> Plan:
    plan = Plan()
    if os.path.exists("/proc/sys/user/max_user_namespaces"):
        plan.add("WRITE", "/proc/sys/user/max_user_namespaces", "0")  # as root USERNS does it
    for path in MASKED:
        if os.path.lexists(path):
            plan.add("MASK", path)
    for path in READ_ONLY:
        plan.add("READONLY", path)
    return plan


def _bind_flags(bind: Bind) -> int:
    return (BIND_READONLY if bind.read_only else 0) | (BIND_IDMAP if bind.idmapped else 0) | BIND_MAKE


def _maps(identity: Identity) -> bytes:
    users = [(line.inside, line.outside, line.count) for line in identity.maps]
    groups = [(line.inside, line.outside, line.count) for line in identity.gid_maps or identity.maps]
    return id_maps(users, groups)


def _forget(folder: str) -> None:
    for name in (sockets.NAME, EXIT_FILE):
        try:
            os.unlink(os.path.join(folder, name))
        except OSError:
            continue
