"""Proving that Firecracker boots a guest here, and measuring a machine: the monitor as the host sees it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ringfence.model.errors import RingfenceError
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle, Probe
from ringfence.runtimes.launching import probing
from ringfence.runtimes.launching.foreign import version_of
from ringfence.runtimes.measuring import measure_monitor
from ringfence.runtimes.vm import kernel
from ringfence.runtimes.vulnerabilities import numbers_of, vulnerabilities

if TYPE_CHECKING:
    from ringfence.runtimes.firecracker.driver import FirecrackerRuntime

KVM = "/dev/kvm"
_WALL = (
    "mnt",
    "pid",
    "net",
    "ipc",
)  # the jailer makes no user namespace: the monitor's user is one of a range


async def version(program: str) -> str:
    """What ``--version`` says, as ``1.14.4``; empty if it says none."""
    found = re.search(r"v?(\d+\.\d+\.\d+(?:-\w+)?)", await version_of(program))
    return found.group(1) if found else ""


async def probe(driver: FirecrackerRuntime) -> Probe:
    """Boot a guest with an empty root and talk to the agent in it; never raises."""
    from ringfence.runtimes.firecracker.driver import JAILER, OLDEST, PROGRAM, REMEDY

    missing = [name for name, path in ((PROGRAM, driver.program), (JAILER, driver.jailer)) if path is None]
    if missing:
        return probing.unavailable(driver, f"{' and '.join(missing)} not installed", REMEDY)
    own, jailers = await version(str(driver.program)), await version(str(driver.jailer))
    known = (*vulnerabilities(PROGRAM, own), *vulnerabilities(JAILER, jailers))
    if numbers_of(own) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        reason = f"Firecracker {own or '?'} is too old, {wanted} is needed"
        return probing.unavailable(driver, reason, REMEDY, own, known)
    if own != jailers:
        reason = f"firecracker is {own} and jailer is {jailers or '?'}: they belong to one release"
        return probing.unavailable(driver, reason, REMEDY, own, known)
    if not driver.context.root:
        return probing.unavailable(driver, "the jailer needs root", "run the node as root", own, known)
    if not os.path.exists(KVM):  # noqa: ASYNC240 - a stat
        remedy = (
            "use a host with KVM (bare metal, or nested virtualisation), or qemu-microvm with allowEmulated"
        )
        return probing.unavailable(driver, "there is no /dev/kvm", remedy, own, known)
    try:
        kernel.find()
    except RingfenceError as error:
        return probing.unavailable(driver, error.message, error.hint, own, known)
    # A /dev/kvm that opens may still run no guest: only one that boots counts.
    return await probing.probe(driver, own, known)


def measure(driver: FirecrackerRuntime, handle: Handle) -> EffectiveBoundary:
    """The effective boundary of a living machine: what stands between the monitor and the host.

    Raises:
        LinkLost: the machine has ended.
    """
    return measure_monitor(
        driver,
        handle,
        "Firecracker",
        str(handle.data.get("kernel", "?")),
        essential=_WALL,
        unprivileged=False,  # the jailer leaves that to Firecracker's own filters, which need it
        notes=("the workload runs on a kernel of its own; host_uid is of Firecracker's process",),
    )


def last_words(text: str) -> str:
    """The telling line of what a machine wrote: our init's, the monitor's own, or the guest kernel's last."""
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^ -~]", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    for mark in ("ringfence-vminit:", "Kernel panic", "RunWithApiError", "ERROR", "Error", "panicked"):
        for line in reversed(lines):
            if mark in line:
                return line[:300]
    return lines[-1][:300] if lines else ""
