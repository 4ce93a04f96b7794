"""The guest agent's arguments and environment: the same for every driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ringfence.runtimes.contract import StartSpec

# What the agent needs in the sandbox's own user namespace: become the workload, signal it, own its files'
# helpers, hand over secrets. CHOWN DAC_OVERRIDE FOWNER KILL SETGID SETUID.
AGENT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/agent",
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",  # noqa: S108
}


def agent_arguments(
    spec: StartSpec,
    listen: int | str,
    cgroups: Iterable[int],
    filter_fd: int | None = None,
    ready_fd: int | None = None,
) -> Iterator[str]:
    """argv of the agent; ``listen`` is a descriptor or a path, ``cgroups`` descriptors of the workload's.

    ``filter_fd``: of a system call filter that the agent installs before anything else. ``ready_fd``: where
    it writes one byte once it has taken its place.
    """
    identity = spec.identity
    yield "ringfence-agent"
    yield f"listen={listen}"
    yield f"uid={identity.uid}"
    yield f"gid={identity.gid}"
    if identity.uid == 0:
        yield "root=1"
        yield f"caps={identity.capabilities:x}"
    yield f"workdir={spec.workdir}"
    yield f"home={environment_of(spec)['HOME']}"
    if filter_fd is not None:
        yield f"filter={filter_fd}"
    if ready_fd is not None:
        yield f"ready={ready_fd}"
    numbers = ",".join(map(str, cgroups))
    if numbers:
        yield f"cgroup={numbers}"
    else:
        yield f"processes={spec.max_processes}"


def environment_of(spec: StartSpec) -> dict[str, str]:
    """The base environment of the sandbox's commands."""
    base = ENVIRONMENT | {"HOME": "/root", "USER": "root"} if spec.identity.uid == 0 else ENVIRONMENT
    return base | spec.env


def environment(spec: StartSpec) -> list[str]:
    """The same as ``NAME=value``."""
    return [f"{name}={value}" for name, value in environment_of(spec).items()]
