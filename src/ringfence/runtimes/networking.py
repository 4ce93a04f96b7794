"""What a wall's own network namespace does with what would leave it, set up before anything runs in it.

For every driver whose walls have a network namespace of the host's kernel: one process of the launcher joins
it (through the user namespace that owns it, so a normal user's walls are no different), adds a route through
loopback and a few rules, and ends. Nothing inside has a right over that namespace. Where the kernel lacks
what the rules need the wall stays as it was: programs that don't know the proxy reach nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import shutil
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ringfence.guest.doors import CAUGHT_PORT, DNS_PORT
from ringfence.model.errors import HostLimit, RuntimeUnavailable, StartFailed
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import Handle
from ringfence.runtimes.launching import landlock
from ringfence.runtimes.launching.launcher import Child
from ringfence.runtimes.launching.plan import Plan
from ringfence.runtimes.launching.processes import ProcessRef, boot_id, readable

_NS_GET_USERNS = 0xB701
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


# -- network mode open

# What a sandbox with an open network does not reach, unless it is named: this host, private networks, the
# metadata service, what is no host at all.
CLOSED = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
)
NAMES = "10.0.2.3"  # where the user-mode network answers for names
RESOLV = f"nameserver {NAMES}\n"
_NAT = "nat"  # in a handle's data: the process that is the network
_PROGRAM = "slirp4netns"
_DEVICE = "/dev/net/tun"
_READY_TIME = 15.0  # seconds
_NAMESPACE, _READY = 5, 6  # its descriptors
_RULE = struct.Struct("!IIHH")


async def open_up(
    driver: _HasContext, handle: Handle, named: Sequence[tuple[str, int]], keep: bool
) -> Handle:
    """Give the wall a network in user mode that reaches what is public, and of the rest what is ``named``.

    The rules are in force before the network is there, and nothing inside has a right over them. IPv6 there
    is none. ``named``: ranges (IPv4) and a port each; 0: all ports.

    Raises:
        RuntimeUnavailable: slirp4netns is not installed.
        StartFailed: rules or network could not be made.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        raise RuntimeUnavailable(
            f"network mode open needs {_PROGRAM}, which is not installed",
            hint=f"apt-get install {_PROGRAM}, or use network mode egress",
        )
    try:
        await _guard(driver.context, handle, 0, 0, _rules(named))
        child = await _slirp(driver.context, handle, program, keep)
    except OSError as error:
        raise StartFailed(f"no open network: {error.strerror}", step="network") from error
    try:
        return replace(handle, data={**handle.data, _NAT: [child.pid, child.birth, boot_id()]})
    finally:
        child.close()


def close_down(handle: Handle) -> None:
    """End the process that was the wall's network. Idempotent."""
    if _NAT in handle.data:
        pid, birth, boot = handle.data[_NAT]
        descriptor = ProcessRef(int(pid), int(birth), str(boot)).pidfd()
        if descriptor is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def _rules(named: Sequence[tuple[str, int]]) -> bytes:
    lines = [(f"{NAMES}/32", 53, 1)]
    lines += [(text, port, 1) for text, port in named]
    lines += [(text, 0, 0) for text in CLOSED]
    found = b""
    for text, port, passes in lines:
        network = ipaddress.IPv4Network(text, strict=False)
        # The last number is the launcher's own, in this machine's order.
        found += _RULE.pack(int(network.network_address), int(network.netmask), port, 0)[:-2]
        found += passes.to_bytes(2, sys.byteorder)
    return found


async def _slirp(context: RuntimeContext, handle: Handle, program: str, keep: bool) -> Child:
    opened: list[int] = []
    try:
        namespace = os.open(f"/proc/{handle.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        opened.append(namespace)
        ready, told = os.pipe2(os.O_CLOEXEC)
        opened += (ready, told)
        owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
        opened.append(owner)
        arguments = ["--configure", "--mtu=65520", "--disable-host-loopback", "--enable-seccomp"]
        arguments += [f"--ready-fd={_READY}", "--netns-type=path"]
        plan = Plan()
        if keep:
            plan.add("KEEP")
        plan.add("FD", plan.fd(namespace), _NAMESPACE)
        plan.add("FD", plan.fd(told), _READY)
        if not os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user")):
            plan.add("FD", plan.fd(owner), _READY + 1)
            arguments.append(f"--userns-path=/proc/self/fd/{_READY + 1}")
        plan.add("NO_NEW_PRIVS")
        if os.geteuid() == 0:
            arguments.append("--enable-sandbox")
        else:
            _confine(plan)
        if not keep:
            plan.add("DEATH_SIGNAL", 9)
        for word in (_PROGRAM, *arguments, f"/proc/self/fd/{_NAMESPACE}", "tap0"):
            plan.add("ARG", word)
        plan.add("ENV", "PATH=/usr/bin:/bin")
        plan.add("EXEC", program)
        child = await context.launcher.spawn(plan, keep=keep)
        os.close(told)
        opened.remove(told)
        if os.geteuid() != 0 and not child.landlock:
            _give_up(child)
            raise StartFailed(
                f"without Landlock nothing would keep {_PROGRAM} from this user's files",
                hint="boot with lsm=landlock,…, run the node as root, or use network mode egress",
                step=_PROGRAM,
            )
        try:
            async with asyncio.timeout(_READY_TIME):
                await readable(ready)
            said = os.read(ready, 1)
        except BaseException as error:
            _give_up(child)
            if isinstance(error, TimeoutError):
                raise StartFailed(f"{_PROGRAM} was not ready in time", step=_PROGRAM) from None
            raise
        if not said:
            _give_up(child)
            why, hint = _why_not()
            raise StartFailed(
                f"{_PROGRAM} could not make a network for {handle.id}{why}", hint=hint, step=_PROGRAM
            )
        return child
    finally:
        for descriptor in opened:
            os.close(descriptor)


# Its own sandbox becomes user 0 of the wall's namespace, where a normal user's walls have none.
_NEEDED = (
    "/usr",
    "/bin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/resolv.conf",
    "/run/systemd/resolve",
    "/proc",
)


def _confine(plan: Plan) -> None:
    """What it may open: programs and libraries, names' servers, the device; of the user's own files none."""
    plan.add("LANDLOCK", landlock.EVERYTHING, landlock.SCOPE_ABSTRACT_UNIX_SOCKET | landlock.SCOPE_SIGNAL)
    for path in _NEEDED:
        if os.path.exists(path):
            plan.add("LANDLOCK_PATH", path, landlock.READ if os.path.isdir(path) else landlock.READ_FILE)
    if os.path.exists(_DEVICE):
        device = landlock.READ_FILE | landlock.WRITE_FILE | landlock.IOCTL_DEV
        plan.add("LANDLOCK_PATH", _DEVICE, device)
    plan.add("LANDLOCK_APPLY")


def _why_not() -> tuple[str, str]:
    """Why there is no network, and the remedy, as far as one can see from outside."""
    if not os.path.exists(_DEVICE):
        return f": there is no {_DEVICE}", "modprobe tun; network mode egress needs no device"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return (
            f": {_DEVICE} may not be used by user {os.geteuid()}",
            f"chmod 666 {_DEVICE} (as distributions have it); network mode egress needs no device",
        )
    return "", f"try {_PROGRAM} by hand, or use network mode egress"


def _give_up(child: Child) -> None:
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    child.close()
