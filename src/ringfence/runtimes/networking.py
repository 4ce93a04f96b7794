"""What a wall's own network namespace does with what would leave it, set up before anything runs in it.

For every driver whose walls have a network namespace of the host's kernel: one process of the launcher joins
it (through the user namespace that owns it, so a normal user's walls are no different), adds a route through
loopback and a few rules, and ends. Nothing inside has a right over that namespace. Where the kernel lacks
what the rules need the wall stays as it was: programs that don't know the proxy reach nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Protocol

from ringfence.guest.doors import CAUGHT_PORT, DNS_PORT
from ringfence.model.errors import HostLimit, RuntimeUnavailable, StartFailed
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import Handle
from ringfence.runtimes.launching.plan import Plan

TRANSPARENT = "transparent"  # in a handle's data: connections that ignore proxies are caught


class _HasContext(Protocol):
    context: RuntimeContext


def transparent(handle: Handle) -> bool:
    """Whether connections of this wall that ignore proxies reach the door."""
    return bool(handle.data.get(TRANSPARENT))


async def catch(driver: _HasContext, handle: Handle) -> Handle:
    """Send what leaves the wall's namespace to the guest agent; the handle says whether that is so.

    Raises:
        HostLimit: the host ran out of something.
    """
    try:
        await _guard(driver.context, handle, CAUGHT_PORT, DNS_PORT, b"")
    except (StartFailed, RuntimeUnavailable):
        return handle
    return replace(handle, data={**handle.data, TRANSPARENT: True})


async def _guard(context: RuntimeContext, handle: Handle, port: int, dns: int, rules: bytes) -> None:
    try:
        namespace = os.open(f"/proc/{handle.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartFailed(
            f"the network namespace of {handle.id} can't be opened: {error.strerror}", step="netns"
        ) from error
    try:
        if os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
            raise HostLimit(
                f"{handle.id} has no network namespace of its own", hint="report this as a defect"
            )
        plan = Plan()
        plan.add("NETNS", plan.fd(namespace))
        plan.add("GUARD", port, dns, rules)
        plan.add("DONE")
        child = await context.launcher.spawn(plan)
        try:
            await child.exited
        finally:
            child.close()
    finally:
        os.close(namespace)
