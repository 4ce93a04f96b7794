"""Proving that Firecracker boots a guest here, and measuring a machine: the monitor as the host sees it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ringfence.model.errors import LinkLost, RingfenceError
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle, Probe
from ringfence.runtimes.launching import probing
from ringfence.runtimes.launching.foreign import version_of
from ringfence.runtimes.measuring import (
    NAMESPACES,
    _interfaces,
    _label,
    _namespace,
    capability_names,
    credentials,
)
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

    ``host_uid``, ``namespaces`` and ``seccomp``: the monitor's; ``capabilities``: the workload's own.

    Raises:
        LinkLost: the machine has ended.
    """
    found = credentials(handle.pid)
    if found is None:
        raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id)
    differing = tuple(
        name
        for name in NAMESPACES
        if (inside := _namespace(handle.pid, name)) is not None and inside != _namespace("self", name)
    )
    weak = [f"shares the host's {name} namespace" for name in _WALL if name not in differing]
    if found.seccomp != "filter":
        weak.append("no system call filter around Firecracker")
    if found.uid == 0:
        weak.append("its user is the host's root")
    if found.effective:
        weak.append("Firecracker holds capabilities: " + " ".join(capability_names(found.effective)))
    notes = ["the workload runs on a kernel of its own; host_uid is of Firecracker's process"]
    level, boundary = driver.level, driver.boundary
    if weak:
        level, boundary = Level.L1, Boundary.NONE
        notes.append("no wall: " + ", ".join(weak))
    only_loopback = "net" in differing and _interfaces(handle.pid) in (["lo"], [])
    return EffectiveBoundary(
        runtime=driver.name,
        level=level,
        boundary=boundary,
        kernel=str(handle.data.get("kernel", "?")),
        namespaces=differing,
        user_namespace="user" in differing,
        host_uid=found.uid,
        seccomp=found.seccomp,
        no_new_privs=found.no_new_privs,
        capabilities=capability_names(int(handle.data.get("capabilities", 0))),
        landlock="not-applied",
        lsm=_label(handle.pid),
        network=str(handle.data.get("network", "none")) if only_loopback else "open",
        limits={},
        notes=tuple(notes),
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
