"""Proving that machines boot here, and measuring one: QEMU's process as the host sees it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ringfence import _native
from ringfence.model.errors import GuestError, RingfenceError
from ringfence.model.levels import Boundary
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle, Health, Probe, Runtime, WallStats
from ringfence.runtimes.launching.foreign import version_of
from ringfence.runtimes.launching.processes import boot_id
from ringfence.runtimes.measuring import measure_monitor
from ringfence.runtimes.vm import kernel, vmm

_PROVED = "/run/ringfence-machine"  # what booted last, and how fast
_VALID = 24 * 3600.0  # seconds that this counts
_MOST = 4096  # bytes of that file
KVM_TIMEOUT = 8.0  # seconds: with KVM a guest boots in less than one
BOOT_TIMEOUT = 200.0  # emulated, on a very busy host

if TYPE_CHECKING:
    from ringfence.runtimes.vm.driver import QemuRuntime


def measure(driver: QemuRuntime, handle: Handle) -> EffectiveBoundary:
    """The effective boundary of a living machine: what stands between QEMU and the host.

    Raises:
        LinkLost: the machine has ended.
    """
    kvm = bool(handle.data.get("kvm"))
    notes = ["the workload runs on a kernel of its own; host_uid is of QEMU's process"]
    if not kvm:
        notes.append("the processor is emulated: slow, and only as strong as QEMU's emulation")
    return measure_monitor(
        driver,
        handle,
        "QEMU",
        str(handle.data.get("kernel", "?")),
        boundary=Boundary.HARDWARE if kvm else Boundary.EMULATED,
        notes=tuple(notes),
    )


async def stats(driver: Runtime, handle: Handle) -> WallStats:
    """Memory of the monitor, and its processes with those that the guest counts, if it answers."""
    from ringfence.guest.link import GuestLink
    from ringfence.runtimes import measuring

    found = measuring.stats(handle.pid)
    try:
        async with await GuestLink.open(await driver.connect(handle)) as link:
            inside = (await link.stats()).processes
    except GuestError:
        inside = 0
    return WallStats(found.processes + inside, found.resident_bytes)


async def probe(driver: QemuRuntime) -> Probe:
    """Boot a guest with an empty root and talk to the agent in it; never raises."""
    from ringfence.runtimes.launching import probing
    from ringfence.runtimes.vm.driver import OLDEST, PROGRAM, REMEDY

    if driver.program is None:
        return probing.unavailable(driver, f"{PROGRAM} is not installed", REMEDY)
    if not driver.context.root:
        return probing.unavailable(driver, "virtual machines need root so far", "run as root")
    found = re.search(r"version (\d+(?:\.\d+)+)", await version_of(driver.program))
    version = found.group(1) if found else ""
    if tuple(map(int, version.split("."))) < OLDEST if version else True:
        wanted = ".".join(map(str, OLDEST))
        return probing.unavailable(
            driver, f"QEMU {version or '?'} is too old, {wanted} is needed", REMEDY, version
        )
    try:
        found_kernel = kernel.find()
    except RingfenceError as error:
        return probing.unavailable(driver, error.message, error.hint, version)
    if vmm.kvm_verdict() is None and vmm.kvm_opens():
        vmm.remember_kvm(await _boots_with_kvm(driver, version))
        driver.boundary = Boundary.HARDWARE if vmm.kvm_verdict() else Boundary.EMULATED
    answer, note = await _boots(driver, version, found_kernel.digest)
    if answer.health == Health.HEALTHY and not driver.kvm:
        reason = f"the processor is emulated: {vmm.why_no_kvm()}"
        remedy = "run on a host with KVM, or set isolation.allowEmulated"
        answer = replace(answer, health=Health.DEGRADED, reason=reason, remedy=remedy)
    return replace(answer, reason="; ".join(filter(None, (answer.reason, note))))


async def _boots(driver: QemuRuntime, version: str, digest: str) -> tuple[Probe, str]:
    """The answer of a guest that boots, and a note if it did before: all drivers boot the same one."""
    from ringfence.runtimes.launching import probing

    key = _key(driver, version, digest)
    known = _remembered(key)
    if known is not None:
        taken, age = known
        answer = Probe(
            driver.name, Health.HEALTHY, driver.level, driver.boundary, version=version, cold_start_ms=taken
        )
        return answer, f"remembered: a guest booted {max(1, math.ceil(age / 60))} min ago"
    answer = await probing.probe(driver, version, within=BOOT_TIMEOUT)
    if answer.health == Health.HEALTHY and answer.cold_start_ms is not None:
        _remember(key, answer.cold_start_ms)
    return answer, ""


def _key(driver: QemuRuntime, version: str, kernel_digest: str) -> str:
    """What a verdict holds for: this start of the host, and every program that took part."""
    words = [boot_id(), version, kernel_digest, driver.machine, str(driver.kvm)]
    for path in (
        str(driver.program),
        driver.context.agent,
        *map(_native.path, ("vminit", "launcher", "link")),
    ):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            words.append(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}")
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _remembered(key: str) -> tuple[float, float] | None:
    """(milliseconds of the start, seconds since) of a guest that booted with all of ``key``."""
    try:
        with open(os.open(_PROVED, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            status = os.fstat(file.fileno())
            record = json.loads(file.read(_MOST))
        age = time.time() - float(record["when"])
        if status.st_uid == os.geteuid() and record["key"] == key and 0 <= age < _VALID:
            return float(record["milliseconds"]), age
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _remember(key: str, milliseconds: float) -> None:
    work = f"{_PROVED}.{os.getpid()}"
    with contextlib.suppress(OSError):
        try:
            with open(work, "x") as file:
                json.dump({"key": key, "when": time.time(), "milliseconds": milliseconds}, file)
            os.rename(work, _PROVED)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(work)


async def _boots_with_kvm(driver: QemuRuntime, version: str) -> bool:
    """Boot a guest with KVM: there are hosts where it opens, makes a machine, and the guest hangs."""
    from ringfence.runtimes.launching import probing

    patience, driver.start_timeout = driver.start_timeout, KVM_TIMEOUT
    driver.boundary = Boundary.HARDWARE
    try:
        answer = await probing.probe(driver, version, within=KVM_TIMEOUT * 2)
        return answer.health != Health.UNAVAILABLE
    finally:
        driver.start_timeout = patience
        driver.boundary = Boundary.EMULATED
