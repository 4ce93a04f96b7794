"""Steps that several drivers put into their plans."""

from __future__ import annotations

import os

from ringfence.model.errors import StartFailed
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.launching.plan import Plan

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


def add_cgroups(plan: Plan, spec: StartSpec, opened: list[int]) -> list[int]:
    """The steps that put the child into its cgroups; returns the workload's opened ``cgroup.procs``."""
    into = spec.cgroup.v2_fd_path
    try:
        if into is not None:
            opened.append(os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            plan.add("INTO_CGROUP", plan.fd(opened[-1]))
        for path in spec.cgroup.agent:
            if into is None or os.path.dirname(path) != into:
                opened.append(_open_tasks(path))
                plan.add("CGROUP_JOIN", plan.fd(opened[-1]))
        work = [_open_tasks(path) for path in spec.cgroup.work]
    except OSError as error:
        raise StartFailed(
            f"a cgroup can't be opened: {error.filename}: {error.strerror}",
            step="cgroup_join",
            errno=str(error.errno),
        ) from error
    opened.extend(work)
    return work


def _open_tasks(path: str) -> int:
    # Version 1 moves a single thread that names itself in `tasks` without the lock over all threads.
    with_tasks = path.removesuffix("cgroup.procs") + "tasks"
    try:
        return os.open(with_tasks, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def add_limits(plan: Plan, spec: StartSpec) -> None:
    """The resource limits of every process of the wall."""
    for number, value in _FIXED:
        plan.add("RLIMIT", number, value, value)
    plan.add("RLIMIT", _NOFILE, spec.max_open_files, spec.max_open_files)
    if not spec.cgroup.agent:
        # Counted in the sandbox's own user namespace, the agent and its file helpers among them; the agent
        # gives the workload its own, lower limit (``processes=``).
        plan.add("RLIMIT", _NPROC, spec.max_processes + 64, spec.max_processes + 64)
