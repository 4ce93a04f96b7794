"""What is asked of a node, what it answers, and what a sandbox turned out to be."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any

from ringfence.model.levels import Boundary, Cause, Level
from ringfence.model.policy import Policy
from ringfence.model.values import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """Who asks, and for whom. Present on every sandbox and every event from the first day."""

    organisation: str = "local"
    project: str = "default"
    user: str = ""
    agent: str | None = None
    parent_agent: str | None = None
    agent_class: str | None = None  # conversational, tool-calling, code-executing, planning, multi-agent
    task: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """One sandbox, please. ``env`` is the default environment of its commands.

    ``keep``: the sandbox outlives the process that asked (else it dies with it). ``secrets``: it is going to
    hold secrets, so what is saved of it stays in its owner's project.
    """

    policy: Policy = field(default_factory=Policy)
    template: str = "host"
    owner: Owner = field(default_factory=Owner)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    keep: bool = False
    id: str | None = None
    secrets: bool = False


@dataclass(frozen=True, slots=True)
class EffectiveBoundary:
    """The wall as it was *measured* on the living sandbox from the host, never as configured.

    ``limits`` says for each of memory, cpu, pids, disk, cpu_time, output, deadline how it is enforced:
    ``cgroup-v1``, ``cgroup-v2``, ``rlimit``, ``tmpfs``, ``image``, ``host``, ``polled`` or ``none``.
    """

    runtime: str
    level: Level
    boundary: Boundary
    kernel: str  # release of the kernel that the workload's system calls reach
    namespaces: tuple[str, ...]  # those that differ from the host's: user mnt pid net ipc uts cgroup time
    user_namespace: bool
    host_uid: int  # the workload's user id as the host sees it
    seccomp: str  # disabled, strict or filter: /proc/PID/status; unknown (and a note) if that can't be read
    no_new_privs: bool
    capabilities: tuple[str, ...]  # effective ones of the workload, e.g. () or ("CAP_CHOWN",)
    landlock: str  # "abi N", "absent" or "not-applied"
    lsm: str  # AppArmor or SELinux label, or "absent"
    network: str  # none, egress, open
    limits: dict[str, str]
    notes: tuple[str, ...] = ()  # what could not be had here, in words

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FileChange:
    """One path that a run added, modified or deleted. ``path`` is surrogate-escaped if not UTF-8."""

    path: str
    kind: str  # added, modified, deleted
    type: str  # file, directory, symlink, other
    size: int  # bytes, 0 unless a file
    digest: str | None  # "sha256:…" of a regular file


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox took, measured on the host. Seconds and bytes; ``None`` where not measurable."""

    cpu_seconds: float | None
    memory_peak: int | None
    output_bytes: int
    wall_seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """How a sandbox, or the one command it was made for, ended.

    ``exit_code`` is what a shell would show (128+signal if killed); ``None`` if nothing ran.
    ``reported`` is True for an exit code, which only the guest can know.
    """

    cause: Cause
    exit_code: int | None
    detail: str = ""
    reported: bool = True
