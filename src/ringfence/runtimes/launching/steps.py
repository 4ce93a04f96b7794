"""Steps that several drivers put into their plans."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from operator import attrgetter

from ringfence.model.errors import InvalidRequest, StartFailed
from ringfence.runtimes.contract import Identity, RootFs, StartSpec
from ringfence.runtimes.launching.guestargs import AGENT_CAPABILITIES
from ringfence.runtimes.launching.plan import (
    BIND_IDMAP,
    BIND_READONLY,
    MS_NODEV,
    MS_NOSUID,
    NOBODY,
    Plan,
)

# RLIMIT_* of Linux: no core files, almost no locked memory.
_FIXED = ((4, 0), (8, 64 << 10))
_NOFILE, _NPROC = 7, 6

# Hidden: what tells about the host or its kernel, or could drive hardware. As in the OCI runtimes' list,
# and kallsyms, key-users and kmsg besides.
MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys",
    "/proc/kmsg", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/sysrq-trigger",
    "/proc/timer_list", "/proc/timer_stats",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys")

SHM_SMALLEST = 16 << 20  # bytes of /dev/shm where the sandbox's memory is not given
BYTES_PER_INODE = 8192  # of /dev/shm, as of a sandbox's disk
SECRETS_SIZE = 1 << 20
MOST_SECRETS = 1024
_SMALLEST = 64 << 10  # bytes of a writable folder
_MOST_PATHS = 6  # layers whose paths are given to overlay as they are

# What of a specification is of one sandbox only, or can't be a key.
_OWN = ("id", "folder", "hostname", "cgroup", "env")
# All other wishes, to keep by them what is the same for every sandbox that has them.
common = attrgetter(*(field.name for field in dataclasses.fields(StartSpec) if field.name not in _OWN))


def add_cgroups(plan: Plan, spec: StartSpec, opened: list[int]) -> list[int]:
    """The steps that put the child into its cgroups; returns the workload's opened ``cgroup.procs``."""
    into = spec.cgroup.v2_fd_path
    try:
        if into is not None:
            opened.append(os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            plan.add("INTO_CGROUP", plan.fd(opened[-1]))
        for path in spec.cgroup.agent:
            if into is None or os.path.dirname(path) != into:
                plan.add("CGROUP_JOIN", plan.fd(_tasks(spec, path, opened)))
        return [_tasks(spec, path, opened) for path in spec.cgroup.work]
    except OSError as error:
        raise StartFailed(
            f"a cgroup can't be opened: {error.filename}: {error.strerror}",
            step="cgroup_join",
            errno=str(error.errno),
        ) from error


def _tasks(spec: StartSpec, path: str, opened: list[int]) -> int:
    held = spec.cgroup.opened.get(path)
    if held is not None:
        return held
    opened.append(_open_tasks(path))
    return opened[-1]


def _open_tasks(path: str) -> int:
    # Version 1 moves a single thread that names itself in `tasks` without the lock over all threads.
    with_tasks = path.removesuffix("cgroup.procs") + "tasks"
    try:
        return os.open(with_tasks, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def per_process_limits(spec: StartSpec) -> Iterator[tuple[int, int]]:
    """(RLIMIT_* number, value) of every process of the wall."""
    yield from _FIXED
    yield _NOFILE, spec.max_open_files
    if not spec.cgroup.agent:
        # Counted in the sandbox's own user namespace, the agent and its file helpers among them; the agent
        # gives the workload its own, lower limit (``processes=``).
        yield _NPROC, spec.max_processes + 64


def add_limits(plan: Plan, spec: StartSpec) -> None:
    """The resource limits of every process of the wall."""
    for number, value in per_process_limits(spec):
        plan.add("RLIMIT", number, value, value)


def shm_limits(memory: int) -> tuple[str, str]:
    """Options of ``/dev/shm`` that bound its bytes and its files, for a sandbox of so much memory."""
    size = max(SHM_SMALLEST, memory // 2)
    return f"size={size}", f"nr_inodes={size // BYTES_PER_INODE}"


def agent_gid(identity: Identity) -> int:
    """The agent's group: of its own, as its user is, or the workload's."""
    return identity.agent_uid if identity.agent_uid != identity.uid else identity.gid


def agent_capabilities(identity: Identity) -> int:
    """What the agent holds in the sandbox's own user namespace; nothing on the host."""
    separate = identity.agent_uid != identity.uid
    return (AGENT_CAPABILITIES if separate else 0) | identity.capabilities


def add_overlay(plan: Plan, files: RootFs, identity: Identity, disk: str, at: str, *, root: bool) -> None:
    """The steps that mount the sandbox's disk at ``disk`` and its overlay root at ``at``.

    ``disk`` is a folder to mount on; ``at`` is made, in ``disk`` or elsewhere. As ``root`` the lower layers
    are idmapped into the plan's USERNS, and the upper layer belongs to the first id of the sandbox's range.
    """
    first = (identity.host_uid(0), identity.host_uid(0)) if root else (NOBODY, NOBODY)
    if files.disk.kind == "tmpfs":
        options = f"size={files.disk.size},nr_inodes={files.disk.inodes},mode=0700"
        plan.add("MOUNT", "disk", disk, "tmpfs", MS_NOSUID | MS_NODEV, options)
    else:
        assert files.disk.image is not None
        plan.add("LOOP", files.disk.image, disk, "ext4", MS_NOSUID | MS_NODEV)
    plan.add("MKDIR", f"{disk}/upper", 0o755, *first)
    plan.add("MKDIR", f"{disk}/work", 0o700, NOBODY, NOBODY)
    plan.add("MKDIR", at, 0o700, NOBODY, NOBODY)
    lowers = []
    # All options of a mount have to fit into one page.
    few = not root and len(files.lowers) <= _MOST_PATHS
    for index, lower in enumerate(files.lowers):
        if few:
            lowers.append(escaped(lower))
            continue
        plan.add("MKDIR", f"{disk}/l{index}", 0o700, NOBODY, NOBODY)
        # Real paths only: the launcher follows no links. Layers are the node's own, so nobody swaps them.
        flags = BIND_READONLY | (BIND_IDMAP if root else 0)
        plan.add("BIND", os.path.realpath(lower), f"{disk}/l{index}", flags)
        lowers.append(f"{disk}/l{index}")
    options = f"lowerdir={':'.join(lowers)},upperdir={disk}/upper,workdir={disk}/work"
    # Whatever the host's kernel has as its defaults: the upper layer is complete in itself, as those who read
    # and save it expect, and no layer's attribute points elsewhere. (`userxattr` implies both.)
    options += ",redirect_dir=nofollow,metacopy=off" if root else ",userxattr"
    plan.add("MOUNT", "root", at, "overlay", MS_NOSUID | MS_NODEV, options)


def escaped(path: str) -> str:
    """A layer's path as overlay's options want it.

    Raises:
        InvalidRequest: it can't be said.
    """
    if "\n" in path:
        raise InvalidRequest(f"a layer's path has a line break: {path!r}")
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def writable_folders(files: RootFs) -> list[tuple[str, int, str]]:
    """(path, bytes, mode) of each writable folder: the first gets half of the disk, the others the rest."""
    paths = list(files.read_write if files.readonly else dict.fromkeys((*files.writable, *files.read_write)))
    bound = {bind.target for bind in files.binds}
    paths = sorted(
        (path for path in paths if path not in bound), key=lambda path: (path != "/workspace", path)
    )
    # A folder inside another has its room already.
    paths = [path for path in paths if not any(path.startswith(other + "/") for other in paths)]
    if not paths:
        return []
    first = files.disk.size if len(paths) == 1 else files.disk.size // 2
    rest = (files.disk.size - first) // max(1, len(paths) - 1)
    return [
        (path, max(_SMALLEST, first if index == 0 else rest), "1777" if path.endswith("tmp") else "0755")
        for index, path in enumerate(paths)
    ]
