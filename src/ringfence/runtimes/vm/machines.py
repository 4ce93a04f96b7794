"""QEMU's command line: two kinds of machine, and nothing in them that a guest does not need.

``microvm`` has no PCI, no BIOS tables but ACPI and virtio over memory; ``q35`` is a PC. Neither has a network
card, USB, a display or a default device.
"""

from __future__ import annotations

import math
import os
import secrets
import subprocess
from functools import cache

from ringfence import _native
from ringfence.model.errors import StartFailed
from ringfence.model.values import dataclass
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.launching.guestargs import agent_arguments, environment
from ringfence.runtimes.launching.steps import (
    MASKED,
    READ_ONLY,
    agent_capabilities,
    agent_gid,
    shm_limits,
)
from ringfence.runtimes.vm.initramfs import Config
from ringfence.runtimes.vm.kernel import Kernel
from ringfence.runtimes.vm.vmm import FILES

MIB = 1 << 20
GUEST_MEMORY = 112 * MIB  # of a guest beyond the sandbox's own: its kernel, its init, the agent
VMM_MEMORY = 224 * MIB  # of QEMU beyond the guest's memory, translated code among it
_TRANSLATED = 64  # MiB of translated code that are kept
_LINK, _FILTER, _CGROUP = 3, 4, 5  # descriptors of the agent: see native/vminit
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
STREAM, CONTROL = "agent", "control"  # the ports' names inside


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine is made of. ``kind``: ``microvm`` or ``q35``. Numbers are QEMU's descriptors."""

    kind: str
    kvm: bool
    stream: int
    control: int
    qmp: int
    template: str  # the file system of the template's disk
    incoming: int = -1  # of the memory that the machine is restored from
    firmware: str = ""  # in place of QEMU's own choice


def guest_memory(memory: int) -> int:
    """Bytes of memory that a guest gets so that its workload has ``memory``."""
    return (memory + memory // 32 + GUEST_MEMORY + MIB - 1) // MIB * MIB


def overhead(memory: int) -> int:
    """Bytes that a machine takes of the host beyond ``memory``, at most."""
    return guest_memory(memory) - memory + VMM_MEMORY


@cache
def counter() -> int:
    """kHz of this host's time stamp counter; 0 where it can't be told.

    Under emulation the guest sees the host's counter, and on a busy host it can't measure it well.
    """
    try:
        done = subprocess.run(
            [_native.path("vminit"), "counter"], capture_output=True, text=True, timeout=10, check=True
        )
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def command_line(machine: Machine) -> str:
    """The kernel's own arguments."""
    words = [
        "console=ttyS0",
        "quiet",
        "reboot=t",
        "panic=-1",
        "8250.nr_uarts=1",
        "i8042.noaux",
        "i8042.nokbd",
    ]
    words += ["no_timer_check", "random.trust_cpu=on", "cgroup_no_v1=all", "oops=panic"]
    words.append("cryptomgr.notests")  # of algorithms: nobody changes the kernel between two starts
    if not machine.kvm:
        words.append(
            "mitigations=off"
        )  # between programs of one guest; an emulated processor guesses nothing
        if frequency := counter():
            words += [f"tsc_early_khz={frequency}", "tsc=reliable", "clocksource=tsc"]
        # A tick that comes by itself: one that is lost is followed by the next.
        words += ["nohz=off", "highres=off"]
    return " ".join(words)


def arguments(machine: Machine, spec: StartSpec) -> list[str]:
    """QEMU's arguments; files are where ``vmm.plan`` binds them."""
    microvm = machine.kind == "microvm"
    bus = "device" if microvm else "pci"
    modern = "" if microvm else ",disable-legacy=on"
    kind = (
        "microvm,acpi=on,rtc=on,isa-serial=on,x-option-roms=off"
        if microvm
        else "q35,usb=off,vmport=off,smbus=off,sata=off,graphics=off"
    )
    memory = guest_memory(spec.memory) // MIB
    found = [
        "-name", f"guest={spec.id}",
        "-M", kind,
        "-accel", "kvm" if machine.kvm else f"tcg,tb-size={_TRANSLATED}",
        "-cpu", "host" if machine.kvm else "max",
        "-smp", str(processors(spec)),
        "-m", f"{memory}M",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-L", "/firmware",
        "-sandbox", _SANDBOX,
        "-object", "main-loop,id=main-loop,thread-pool-max=8",
        "-chardev", "stdio,id=console,signal=off",
        "-serial", "chardev:console",
        "-chardev", f"socket,id=qmp,fd={machine.qmp},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        "-kernel", f"{FILES}/kernel", "-initrd", f"{FILES}/initrd", "-append", command_line(machine),
        "-object", "rng-random,id=random,filename=/dev/urandom",
        "-device", f"virtio-rng-{bus},rng=random{modern}",
        "-device", f"virtio-serial-{bus},max_ports=3{modern}",
    ]  # fmt: skip
    if microvm:
        found += ["-global", "virtio-mmio.force-legacy=false"]
    for number, (name, descriptor) in enumerate(((STREAM, machine.stream), (CONTROL, machine.control)), 1):
        found += ["-chardev", f"socket,id={name},fd={descriptor},server=on,wait=off"]
        found += ["-device", f"virtserialport,chardev={name},name={name},nr={number}"]
    for name, extra in (("template", ",readonly=on"), ("disk", "")):
        found += ["-drive", f"if=none,id={name},format=raw,file={FILES}/{name}{extra},discard=unmap"]
        found += ["-device", f"virtio-blk-{bus},drive={name}{modern}"]
    if machine.firmware:
        found += ["-bios", machine.firmware]
    if machine.incoming >= 0:
        found += ["-incoming", f"fd:{machine.incoming}"]
    return found


def processors(spec: StartSpec) -> int:
    """Processors of the guest: whole ones; the share is the control group's."""
    return max(1, min(math.ceil(spec.cpus or 1), os.cpu_count() or 1))


def config(machine: Machine, spec: StartSpec, kernel: Kernel, rules: bytes, init: str = "") -> Config:
    """What the guest's init is told. ``init``: of a whole system that it starts.

    Raises:
        StartFailed: more than the guest's init takes.
    """
    identity, root = spec.identity, spec.root
    bus = "virtio_pci" if machine.kind == "q35" else "virtio_mmio"
    lines = [("module", path) for path in kernel.needed(bus, "virtio_console", machine.template)]
    lines += [
        ("root", f"/dev/vda:{machine.template}"),
        ("disk", "/dev/vdb:ext4"),
        ("hostname", spec.hostname),
        ("machine_id", secrets.token_hex(16)),
        ("link", f"serial:{STREAM}"),
        ("control", f"serial:{CONTROL}"),
        ("agent_uid", str(identity.agent_uid)),
        ("agent_gid", str(agent_gid(identity))),
        ("capabilities", f"{agent_capabilities(identity):x}"),
        ("memory", str(spec.memory)),
        ("processes", str(spec.max_processes)),
        ("shm", shm_limits(spec.memory)[0].partition("=")[2]),
        ("limit", "4:0"),
        ("limit", f"7:{spec.max_open_files}"),
        ("limit", f"8:{64 << 10}"),
        ("readonly_root", str(int(root.readonly))),
    ]
    lines += [("mask", path) for path in MASKED]
    lines += [("point", f"{identity.uid}:{path}") for path in root.read_write]
    lines += [("point", f"0:{path}") for path in root.read_only]
    lines += [("read_write", path) for path in root.read_write]
    lines += [("read_only", path) for path in (*READ_ONLY, *root.read_only)]
    if init:
        lines += [("init", init), ("up", UP)]
    words = list(agent_arguments(spec, _LINK, (_CGROUP,), _FILTER if rules else None))
    words = [f"mux={_LINK}" if word == f"listen={_LINK}" else word for word in words]
    lines += [("arg", word) for word in words]
    lines += [("env", word) for word in environment(spec)]
    if sum(len(value) + 20 for _, value in lines) > 200_000:
        raise StartFailed("the environment is too large for a virtual machine", step="config", errno="E2BIG")
    return Config(tuple(lines), rules)


UP = "/run/ringfence-up"  # made by a system's own init when it is up
