"""A made-up host with GPUs: ``/dev``, ``/etc/cdi``, driver files, ``/sys``."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LIBRARY = "/opt/gpu/lib/libcuda.so.550.54.15"


def cdi_document(gpus: int = 2) -> dict[str, Any]:
    """What a vendor's tool writes, shortened: one device for each GPU, and ``all``."""

    def nodes(*numbers: int) -> dict[str, Any]:
        return {"deviceNodes": [{"path": f"/dev/nvidia{number}"} for number in numbers]}

    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            *({"name": str(number), "containerEdits": nodes(number)} for number in range(gpus)),
            {"name": "GPU-8a1b", "containerEdits": nodes(0)},
            {"name": "all", "containerEdits": nodes(*range(gpus))},
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "permissions": "rwm"}, {"path": "/dev/nvidia-uvm"}],
            "mounts": [
                {
                    "hostPath": LIBRARY,
                    "containerPath": LIBRARY,
                    "options": ["ro", "nosuid", "nodev", "bind"],
                },
                {
                    "hostPath": "/run/nvidia-persistenced/socket",
                    "containerPath": "/run/nvidia-persistenced/socket",
                    "options": ["rw", "bind"],
                },
            ],
            "hooks": [
                {
                    "hookName": "createContainer",
                    "path": "/usr/bin/nvidia-cdi-hook",
                    "args": [
                        "nvidia-cdi-hook",
                        "create-symlinks",
                        "--link",
                        "libcuda.so.1::/opt/gpu/lib/libcuda.so",
                    ],
                },
                {
                    "hookName": "createContainer",
                    "path": "/usr/bin/nvidia-cdi-hook",
                    "args": ["nvidia-cdi-hook", "update-ldcache", "--folder", "/opt/gpu/lib"],
                },
            ],
        },
    }


def make_nodes(root: Path, gpus: int = 2) -> None:
    """Device nodes (root only). What answers behind them is ``/dev/zero``, which harms nobody."""
    (root / "dev").mkdir(exist_ok=True)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def make_host(root: Path, document: dict[str, Any] | None = None, gpus: int = 2) -> Path:
    """The whole tree below ``root``; returns it."""
    make_nodes(root, gpus)
    library = root / LIBRARY[1:]
    library.parent.mkdir(parents=True)
    library.write_text("a driver's library\n")
    socket = root / "run/nvidia-persistenced"
    socket.mkdir(parents=True)
    os.mkfifo(socket / "socket")
    write_cdi(root, document or cdi_document(gpus))
    return root


def write_cdi(root: Path, document: Any, name: str = "nvidia.json", folder: str = "etc/cdi") -> Path:
    """One specification."""
    place = root / folder
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    path = place / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(0o644)
    return path


def add_pci(
    root: Path, address: str, kind: str, group: str, driver: str | None, *, display: bool = False
) -> None:
    """One PCI device in ``/sys``, with its group and driver as links, as the kernel shows them."""
    place = root / "sys/bus/pci/devices" / address
    place.mkdir(parents=True)
    (place / "class").write_text(kind + "\n")
    if display:
        (place / "boot_vga").write_text("1\n")
    members = root / "sys/kernel/iommu_groups" / group / "devices"
    members.mkdir(parents=True, exist_ok=True)
    (members / address).symlink_to(place)
    (place / "iommu_group").symlink_to(members.parent)
    if driver:
        (place / "driver").symlink_to(root / "sys/bus/pci/drivers" / driver)
    node = root / "dev/vfio"
    node.mkdir(parents=True, exist_ok=True)
    (node / group).touch()
