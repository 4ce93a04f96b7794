"""What could not be had for a sandbox on this host, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.model.sandbox import SandboxRequest
    from ringfence.node.selecting import Rejected
    from ringfence.node.service import Node
    from ringfence.runtimes.contract import Capabilities


def notes(
    node: Node, request: SandboxRequest, rejected: list[Rejected], has: Capabilities
) -> tuple[str, ...]:
    """One sentence each: why it is not a faster runtime, and which limit is weaker than it should be."""
    found = [f"not {r.name}: {r.reason}" for r in rejected]
    if node.cgroups.reason:
        remedy = f" ({node.cgroups.remedy})" if node.cgroups.remedy else ""
        found.append(f"cgroups: {node.cgroups.reason}{remedy}")
    limits = node.cgroups.enforced()
    if limits["memory"] == "polled":
        found.append(
            "memory is looked at ten times a second: a fast eater may go over its limit for that long"
        )
    if limits["cpu"] == "none":
        found.append("no CPU share: the sandbox may use every processor")
    if limits["pids"] == "rlimit":
        found.append("processes are limited by RLIMIT_NPROC, which counts by user, not by sandbox")
    if not node.root:
        found.append("rootless: no disk images; files on mounts belong to you")
    if request.policy.door.limits.idle is not None:
        found.append("the idle limit is not enforced yet")
    if request.policy.wall.filesystem.root == "overlay" and not has.overlay:
        found.append("no overlay: only the writable folders can be written")
    return tuple(found)
