"""Preparing templates ahead of use: whatever a runtime makes of one at its first start, it has afterwards.

Each runtime may have a warmer of its own in ``WARMERS``; every other one is warmed by starting a sandbox and
taking it down again, which leaves what it makes: an engine's image, compiled modules, fittings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.images.contract import Template
from ringfence.model.levels import Level
from ringfence.model.policy import Policy
from ringfence.model.sandbox import SandboxRequest
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.node.service import Node

Warmer = Callable[["Node", Template, Policy], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Warmed:
    """What was prepared, in words."""

    template: str
    runtime: str
    what: str


async def warm(node: Node, template: Template, runtime: str, policy: Policy) -> Warmed:
    """Prepare a template for a runtime; empty: the one that ``create`` would choose.

    Raises:
        What ``Node.create`` raises: then it would fail when it is used, too.
    """
    policy = _policy(policy, runtime)
    chosen = runtime or await node.select(policy)
    what = await WARMERS.get(chosen.partition(":")[0], by_starting)(node, template, policy)
    return Warmed(template.name or template.digest, chosen, what)


def _policy(policy: Policy, runtime: str) -> Policy:
    if not runtime:
        return policy
    isolation = replace(policy.wall.isolation, runtime=runtime, minimum=Level.L1, allow_emulated=True)
    return policy.with_wall(isolation=isolation)


async def by_starting(node: Node, template: Template, policy: Policy) -> str:
    """Start a sandbox and take it down."""
    sandbox = await node.create(SandboxRequest(policy=policy, template=template.digest))
    await sandbox.destroy()
    return f"started once on {sandbox.runtime.name}"


async def fittings(node: Node, template: Template, policy: Policy) -> str:
    """What a sandbox of this user needs on top; for walls that share the host's kernel that is all."""
    import asyncio

    root = node.images.prepare(template.digest)
    await asyncio.to_thread(root.skeleton, policy.wall.process.user)
    return "fittings"


async def vm_disk(node: Node, template: Template, policy: Policy) -> str:
    """The template's read-only disk, without starting a machine."""
    import asyncio

    from ringfence.runtimes.contract import Disk, RootFs
    from ringfence.runtimes.vm import disks

    root = node.images.prepare(template.digest)
    lower = await asyncio.to_thread(root.skeleton, policy.wall.process.user)
    whole = RootFs(
        lowers=(lower, *template.lowers), binds=(), disk=Disk("tmpfs", 0, 0), template=template.digest
    )
    path, kind = await disks.template(whole, disks.store(str(node.state.sandboxes / "warming")))
    return f"disk {path} ({kind})"


async def engine_image(node: Node, template: Template, policy: Policy) -> str:
    """The image that a container engine makes its containers from, without starting one."""
    import asyncio

    runtime = await node.runtime(policy.wall.isolation.runtime or await node.select(policy))
    root = node.images.prepare(template.digest)
    lower = await asyncio.to_thread(root.skeleton, policy.wall.process.user)
    driver: Any = getattr(runtime, "driver", runtime)  # of an engine
    layers = (lower, *template.lowers)
    return f"image {await driver.stock.own(template.digest, layers, str(node.state.sandboxes / 'warming'))}"


WARMERS: dict[str, Warmer] = {
    "jail": fittings,
    "bubblewrap": fittings,
    "nsjail": fittings,
    "runc": fittings,
    "crun": fittings,
    "gvisor": fittings,
    "qemu": vm_disk,
    "qemu-microvm": vm_disk,
    "firecracker": vm_disk,
    "docker": engine_image,
    "podman": engine_image,
}
