"""What Firecracker boots, booted by QEMU: our ELF kernel, and a guest whose agent listens on vsock.

QEMU stands in for the machine, not for Firecracker's devices: nobody can dial the guest's vsock here. That
the init answers on its other port proves that it has opened it and started the agent: else the machine ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence import _native
from ringfence.model.errors import LinkLost
from ringfence.runtimes import seccomp
from ringfence.runtimes.firecracker import images, machine
from ringfence.runtimes.vm import control, disks, initramfs, kernel, machines
from support.firecracker_bench import Bench

MACHINE = machines.Machine("microvm", kvm=False, stream=-1, control=-1, qmp=-1, template="erofs")


async def guest(bench: Bench, folder: Path) -> list[str]:
    """QEMU's command line for the guest that Firecracker would be given; files are made in ``folder``."""
    spec = replace(bench.spec(), folder=str(folder), seccomp="default")
    store = str(bench.base / "vm")
    os.makedirs(store, exist_ok=True)
    found = kernel.find()
    template, kind = await disks.template(spec.root, store)
    disks.writable(store, str(folder / "disk"), 16 << 20, 1024, 0)
    made = machine.config(spec, found, seccomp.load("default"), kind)
    # Of Firecracker's guest but for the second port, which is one that QEMU has.
    lines = [(key, f"serial:{machines.CONTROL}" if key == "control" else value) for key, value in made.lines]
    last = max(at for at, (key, _) in enumerate(lines) if key == "module")
    lines[last + 1 : last + 1] = [("module", "/modules/virtio_console.ko")]
    made = replace(made, lines=tuple(lines))
    first = initramfs.base(found, _native.path("vminit"), _native.agent(), store)
    initramfs.compose(first, made, str(folder / "initrd"), 0)
    return [
        "qemu-system-x86_64", "-M", "microvm,acpi=on,rtc=on,isa-serial=on,x-option-roms=off",
        "-accel", "tcg", "-cpu", "max", "-m", f"{machine.memory(spec)}M", "-nodefaults", "-no-user-config",
        "-display", "none", "-no-reboot", "-global", "virtio-mmio.force-legacy=false",
        "-serial", f"file:{folder}/console",
        "-kernel", images.vmlinux(found, store), "-initrd", str(folder / "initrd"),
        "-append", machines.command_line(MACHINE),
        "-device", "virtio-serial-device,max_ports=3",
        "-chardev", f"socket,id=control,path={folder}/{control.NAME},server=on,wait=off",
        "-device", f"virtserialport,chardev=control,name={machines.CONTROL},nr=2",
        "-drive", f"if=none,id=template,format=raw,file={template},readonly=on",
        "-device", "virtio-blk-device,drive=template",
        "-drive", f"if=none,id=disk,format=raw,file={folder}/disk",
        "-device", "virtio-blk-device,drive=disk",
    ]  # fmt: skip


async def test_the_guest_comes_up_and_its_agent_listens(bench: Bench, tmp_path: Path) -> None:
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86_64 is not installed")
    process = await asyncio.create_subprocess_exec(*await guest(bench, tmp_path))
    try:
        async with asyncio.timeout(100):
            while True:
                console = tmp_path / "console"
                text = console.read_text(errors="replace") if console.exists() else ""
                assert process.returncode is None, f"the guest ended: {text[-2000:]}"
                try:
                    assert await control.call(str(tmp_path), "kills", within=5) == "0"
                    break
                except LinkLost:
                    await asyncio.sleep(0.1)
            # Twice: an agent that can't listen ends, and the machine with it.
            await control.call(str(tmp_path), "hostname other")
            await control.call(str(tmp_path), "sync")
            assert process.returncode is None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
