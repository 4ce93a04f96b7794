"""GPUs for a virtual machine by VFIO: which PCI devices may be handed over, and what QEMU is told.

The unit of isolation of an IOMMU is the *group*: whoever has one device of it can reach the others by DMA. So
a GPU is handed over only if every device of its group is in the hands of ``vfio-pci`` (or is a bridge), and
the IOMMU may not be bypassed (``vfio_iommu_type1.allow_unsafe_interrupts`` and no-IOMMU groups are refused).
"""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from ringfence.model.errors import HostLimit
from ringfence.model.quantities import format_size
from ringfence.model.values import dataclass
from ringfence.runtimes.measuring import credentials

DRIVER = "vfio-pci"
_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SYS_RESOURCE = 24
_DISPLAY, _BRIDGE = 0x03, 0x06  # PCI base classes
REMEDY = "boot with intel_iommu=on or amd_iommu=on, and switch VT-d or AMD-Vi on in the firmware"


@dataclass(frozen=True, slots=True)
class Passthrough:
    """PCI addresses that the guest gets, the nodes that QEMU must be able to open, and its arguments."""

    addresses: tuple[str, ...]
    nodes: tuple[str, ...]
    arguments: tuple[str, ...]


def choose(
    count: int, *, root: str = "/", lease: Callable[[Mapping[str, str], int], list[str]] | None = None
) -> Passthrough:
    """``count`` GPUs that may be handed to a guest, lowest address first, of those that ``lease`` gives away
    (see ``leases.take``; only one guest can have devices of a group). Another program may hold one: then
    QEMU says so at its start. All of the guest's memory is locked while it lives.

    Raises:
        HostLimit: there are not so many; the message says what each is lacking.
    """
    base = Path(root)
    if not _listed(base / "sys/kernel/iommu_groups"):
        raise HostLimit("the IOMMU is off, so no device can be handed to a guest", hint=REMEDY)
    unsafe = base / "sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
    if _text(unsafe) in ("Y", "1"):
        raise HostLimit(
            "vfio_iommu_type1.allow_unsafe_interrupts is on: a guest could raise any interrupt of the host",
            hint="remove the option and load the module again",
        )
    gpus = [address for address in _listed(base / "sys/bus/pci/devices") if _class(base, address) == _DISPLAY]
    if not gpus:
        raise HostLimit("there is no GPU on this host's PCI bus", hint="choose a host that has one")
    problems, good = [], []
    for address in gpus:
        problem = _problem(base, address)
        if problem:
            problems.append(f"{address} {problem}")
        else:
            good.append(address)
    if len(good) < count:
        raise HostLimit(
            f"{count} GPUs are asked for and {len(good)} can be handed over: " + "; ".join(problems),
            hint=f"give them to {DRIVER}: driverctl set-override ADDRESS {DRIVER} (for the whole group)",
        )
    if lease is not None:
        good = lease({address: f"vfio-group-{_group(base, address)}" for address in good}, count)
    addresses: list[str] = []
    nodes = ["/dev/vfio/vfio"]
    for address in good[:count]:
        nodes.append(f"/dev/vfio/{_group(base, address)}")
        slot = address.rpartition(".")[0]
        addresses += [each for each in _members(base, address) if each.startswith(slot + ".")]
    arguments: list[str] = []
    for address in dict.fromkeys(addresses):
        arguments += ["-device", f"vfio-pci,host={address}"]
    return Passthrough(tuple(dict.fromkeys(addresses)), tuple(dict.fromkeys(nodes)), tuple(arguments))


def numbers(nodes: tuple[str, ...], *, root: str = "/") -> tuple[tuple[str, int, int], ...]:
    """(path, major, minor) of each node, so that QEMU's wall can have its own.

    Raises:
        HostLimit: one of them is not there, or is no character device.
    """
    found = []
    for path in nodes:
        try:
            seen = os.lstat(os.path.join(root, path[1:]))
        except OSError as error:
            raise HostLimit(f"{path}: {error.strerror}", hint="modprobe vfio-pci") from error
        if not stat.S_ISCHR(seen.st_mode):
            raise HostLimit(f"{path} is no character device", hint="see /dev/vfio")
        found.append((path, os.major(seen.st_rdev), os.minor(seen.st_rdev)))
    return tuple(found)


def check_lock(size: int) -> None:
    """All memory that a device can reach is locked: refuse where this process may not lock so much.

    Raises:
        HostLimit: its hard limit is lower, and it has no right to raise it.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if limit == resource.RLIM_INFINITY or limit >= size:
        return
    mine = credentials(os.getpid())
    if mine is None or not mine.effective >> _SYS_RESOURCE & 1:
        raise HostLimit(
            f"a guest with a GPU locks {format_size(size)} of memory, and this process may lock "
            f"{format_size(limit)}",
            hint="raise its limit: ulimit -l unlimited, or LimitMEMLOCK=infinity for a service",
        )


def _problem(base: Path, address: str) -> str:
    group = _group(base, address)
    if not group:
        return "is in no IOMMU group"
    if _text(base / f"sys/kernel/iommu_groups/{group}/name") == "vfio-noiommu":
        return "is in a group without an IOMMU behind it"
    if (base / f"sys/bus/pci/devices/{address}/boot_vga").exists() and _text(
        base / f"sys/bus/pci/devices/{address}/boot_vga"
    ) == "1":
        return "is the host's own display"
    for each in _members(base, address):
        if _class(base, each) == _BRIDGE:
            continue
        driver = _driver(base, each)
        if driver != DRIVER:
            what = f"is in the hands of {driver}" if driver else f"has no driver, not even {DRIVER}"
            return what if each == address else f"shares group {group} with {each}, which {what}"
    if not os.path.exists(base / f"dev/vfio/{group}"):
        return f"has no node /dev/vfio/{group}"
    return ""


def _members(base: Path, address: str) -> list[str]:
    return _listed(base / f"sys/kernel/iommu_groups/{_group(base, address)}/devices")


def _group(base: Path, address: str) -> str:
    return _link(base / f"sys/bus/pci/devices/{address}/iommu_group")


def _driver(base: Path, address: str) -> str:
    return _link(base / f"sys/bus/pci/devices/{address}/driver")


def _link(path: Path) -> str:
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _class(base: Path, address: str) -> int:
    """The base class of a PCI device; -1 if it says none."""
    try:
        return int(_text(base / f"sys/bus/pci/devices/{address}/class"), 16) >> 16
    except ValueError:
        return -1


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _listed(path: Path) -> list[str]:
    """The PCI addresses (or group numbers) that a folder lists, in order."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    return [name for name in names if _ADDRESS.fullmatch(name) or name.isdigit()]
