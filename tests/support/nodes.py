"""Asking a node for sandboxes in few words; shared by the node's tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ringfence.guest.processes import Output, ProcessSpec
from ringfence.model.policy import MIB, Filesystem, Isolation, Limits, Policy, Process, Resources
from ringfence.model.sandbox import SandboxRequest
from ringfence.node import cgroups
from ringfence.node.sandboxes import NodeSandbox, RunResult
from ringfence.node.service import Node

Ran = tuple[RunResult, str]
Run = Callable[..., Awaitable[Ran]]


def ask(
    *,
    runtime: str | None = "jail",
    memory: int = 256 * MIB,
    disk: int = 32 * MIB,
    timeout: float = 60,
    output: int = 10 * MIB,
    cpu_time: float | None = None,
    processes: int = 64,
    user: int = 1000,
    keep: bool = False,
    files: Filesystem | None = None,
    **rest: Any,
) -> SandboxRequest:
    """A request by what differs from the usual."""
    policy = Policy().with_wall(
        isolation=Isolation(runtime=runtime),
        filesystem=files or Filesystem(),
        process=Process(user=user, max_processes=processes, cpu_time=cpu_time),
        resources=Resources(cpus=1, memory=memory, disk=disk),
    )
    return SandboxRequest(
        policy=policy.with_door(limits=Limits(timeout=timeout, output=output)), keep=keep, **rest
    )


async def run(sandbox: NodeSandbox, *argv: str, **options: Any) -> Ran:
    """A command to its end: how, and what it printed on both streams."""
    seen: list[bytes] = []

    def take(piece: Output) -> None:
        seen.append(piece.data)

    spec = ProcessSpec(argv)
    for name in ("pty", "cwd", "env"):
        if name in options:
            spec = replace(spec, **{name: options.pop(name)})
    result = await sandbox.run(spec, on_output=take, **options)
    return result, b"".join(seen).decode(errors="replace")


def groups_of(node: Node) -> set[str]:
    """Cgroups that belong to a node's own pool."""
    return {name for name in cgroups.detect().names() if name.startswith(node.state.owner + ".")}
