"""What Firecracker is told: its jailer's arguments, the requests of a start, what the guest's init gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ringfence.model.values import dataclass
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.firecracker import links
from ringfence.runtimes.vm import machines
from ringfence.runtimes.vm.initramfs import Config
from ringfence.runtimes.vm.kernel import Kernel

FOLDER = "jail"  # of a sandbox's folder: the jailer's base
API = "api.sock"
KERNEL, INITRD, TEMPLATE, DISK = "kernel", "initrd", "template", "disk"  # names in the jail
STATE, MEMORY = "snapshot.state", "snapshot.memory"
MOST_PROCESSORS = 32
VMM_MEMORY = 64 << 20  # of Firecracker beyond the guest's memory: 5 MiB by its promise, and the page cache
_NO_FILE = 256
# `reboot=k`: Firecracker has no power button; the keyboard's reset is how a guest ends.
_COMMAND_LINE = (
    "console=ttyS0 quiet reboot=k panic=-1 oops=panic 8250.nr_uarts=1 i8042.noaux i8042.nomux "
    "i8042.dumbkbd random.trust_cpu=on cgroup_no_v1=all"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the API, in order."""

    method: str
    path: str
    body: dict[str, Any]


def place(folder: str, program: str, name: str) -> str:
    """The root of a machine's jail, as the jailer makes it: BASE/PROGRAM/ID/root."""
    return os.path.join(folder, FOLDER, os.path.basename(program), name, "root")


def jailer(jailer: str, program: str, spec: StartSpec) -> list[str]:
    """The command that starts Firecracker. Control groups, process ids and the network are our launcher's:
    the jailer adds its chroot, its device nodes and the change of user."""
    owner = str(spec.identity.host_uid(spec.identity.agent_uid))
    return [
        jailer, "--id", spec.id, "--exec-file", program, "--uid", owner, "--gid", owner,
        "--chroot-base-dir", os.path.join(spec.folder, FOLDER),
        "--resource-limit", f"no-file={_NO_FILE}",
        "--", "--api-sock", f"/{API}",
    ]  # fmt: skip


def boot(spec: StartSpec) -> Iterator[Request]:
    """The requests that configure and start a machine; the driver has put its files into the jail."""
    yield Request("PUT", "/logger", {"level": "Warning", "show_level": True, "show_log_origin": False})
    yield Request(
        "PUT",
        "/machine-config",
        {
            "vcpu_count": processors(spec),
            "mem_size_mib": memory(spec),
            "smt": False,
            "track_dirty_pages": False,
        },
    )
    yield Request(
        "PUT",
        "/boot-source",
        {"kernel_image_path": f"/{KERNEL}", "initrd_path": f"/{INITRD}", "boot_args": _COMMAND_LINE},
    )
    for name in (TEMPLATE, DISK):  # in this order: the guest sees them as vda and vdb
        yield Request(
            "PUT",
            f"/drives/{name}",
            {
                "drive_id": name,
                "path_on_host": f"/{name}",
                "is_root_device": False,  # its init mounts them: nothing is added to the kernel's arguments
                "is_read_only": name == TEMPLATE,
                # What a guest has flushed is on the host's disk: a crash of the host tears no file system.
                "cache_type": "Unsafe" if name == TEMPLATE else "Writeback",
                "io_engine": "Sync",
            },
        )
    yield Request("PUT", "/vsock", {"guest_cid": links.CID, "uds_path": f"/{links.NAME}"})
    yield Request("PUT", "/entropy", {})
    yield Request("PUT", "/actions", {"action_type": "InstanceStart"})


def save() -> Request:
    """The request that writes a paused machine into its jail."""
    return Request(
        "PUT",
        "/snapshot/create",
        {"snapshot_type": "Full", "snapshot_path": f"/{STATE}", "mem_file_path": f"/{MEMORY}"},
    )


def load() -> Iterator[Request]:
    """The requests that make a fresh Firecracker the saved machine, running. Paths of its disks and its vsock
    are those in its jail, so they need no override."""
    yield Request("PUT", "/logger", {"level": "Warning", "show_level": True, "show_log_origin": False})
    yield Request(
        "PUT",
        "/snapshot/load",
        {
            "snapshot_path": f"/{STATE}",
            "mem_backend": {"backend_type": "File", "backend_path": f"/{MEMORY}"},
            "resume_vm": True,
        },
    )


def state(running: bool) -> Request:
    """The request that pauses a machine or lets it go on."""
    return Request("PATCH", "/vm", {"state": "Resumed" if running else "Paused"})


def processors(spec: StartSpec) -> int:
    """Virtual processors: whole ones, at most what Firecracker takes."""
    return min(machines.processors(spec), MOST_PROCESSORS)


def memory(spec: StartSpec) -> int:
    """MiB of the guest."""
    return machines.guest_memory(spec.memory) >> 20


def overhead(memory: int) -> int:
    """Bytes that a machine takes of the host beyond ``memory``, at most."""
    return machines.guest_memory(memory) - memory + VMM_MEMORY


def config(spec: StartSpec, kernel: Kernel, rules: bytes, template: str) -> Config:
    """What the guest's init is told: as with QEMU, but for the ports, on which the agent itself listens.

    Raises:
        StartFailed: more than the guest's init takes.
    """
    machine = machines.Machine("microvm", True, stream=-1, control=-1, qmp=-1, template=template)
    made = machines.config(machine, spec, kernel, rules)
    ports = {"link": f"vsock:{links.AGENT}", "control": f"vsock:{links.CONTROL}"}
    lines = [("module", path) for path in kernel.needed("virtio_mmio", "vsock", template)]
    for key, value in made.lines:
        if key == "module":
            continue
        if key == "arg" and value.startswith(("mux=", "listen=")):
            value = "listen=" + value.partition("=")[2]
        lines.append((key, ports.get(key, value)))
    return replace(made, lines=tuple(lines))
