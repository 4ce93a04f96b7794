"""What the drivers are told so that a wall has the GPUs that :mod:`cdi` chose. Pure, but for the links."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace
from typing import Any

from ringfence.model.errors import HostLimit, StartFailed, Unsupported
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.gpu import cdi, leases
from ringfence.runtimes.launching.plan import MS_NOEXEC, MS_NOSUID, NOBODY, Plan

FOLDER = leases.FOLDER
LINKS = f"{FOLDER}/lib"  # of a sandbox's folder: links to driver libraries
MOST_NODES = 4 * 64 + 16


def prepare(spec: StartSpec, *, root: str = "/") -> tuple[StartSpec, cdi.Edits | None]:
    """The spec with driver files and variables for its GPUs, and what must be done about device nodes.

    They are the sandbox's until :func:`forget`, or until its folder is gone.

    What the caller's own ``env`` sets stays. Nothing is changed where no GPU is asked for.

    Raises:
        HostLimit: they can't be had here, or others have them.
        StartFailed: the sandbox's folder can't be written.
    """
    if not spec.gpus:
        return spec, None
    try:
        found = cdi.edits(spec.gpus, root=root, lease=functools.partial(leases.take, spec.folder, root=root))
        shown = cdi.write_links(found, os.path.join(spec.folder, LINKS))
    except HostLimit:
        forget(spec.folder)
        raise
    except OSError as error:
        forget(spec.folder)
        raise StartFailed(
            f"links to the GPU's libraries can't be made: {error.strerror}", step="gpu"
        ) from error
    binds = (*spec.root.binds, *found.mounts, *((shown,) if shown else ()))
    return replace(spec, root=replace(spec.root, binds=binds), env=dict(found.env) | spec.env), found


def forget(folder: str) -> None:
    """Remove what :func:`prepare` made in a sandbox's folder, its lease included; it may not be there."""
    shutil.rmtree(os.path.join(folder, FOLDER), ignore_errors=True)


def add_nodes(plan: Plan, found: cdi.Edits, at: str) -> None:
    """Steps of a root's plan: a file system of its own at ``at`` with the nodes, named by :func:`node_names`.

    Made by number, not by path: nothing of the host's ``/dev`` is reachable, and no name can be swapped.
    """
    plan.add("MKDIR", at, 0o711, NOBODY, NOBODY)
    plan.add("MOUNT", "gpu", at, "tmpfs", MS_NOSUID | MS_NOEXEC, f"mode=0755,size=64k,nr_inodes={MOST_NODES}")
    for name, node in node_names(found).items():
        plan.add("MKNOD", f"{at}/{name}", 0o20666, node.major, node.minor)


def node_names(found: cdi.Edits) -> dict[str, cdi.Node]:
    """A plain file name for each node: its path below ``/dev`` without slashes."""
    return {node.path.removeprefix("/dev/").replace("/", "-"): node for node in found.nodes}


def only_nvidia(found: cdi.Edits) -> None:
    """gVisor's proxy knows one vendor's driver.

    Raises:
        Unsupported: another vendor's GPU was chosen.
    """
    for name in found.devices:
        if not name.startswith("nvidia.com/"):
            raise Unsupported(
                f"gVisor passes on GPUs of NVIDIA only, and this host has {name}",
                hint="choose runc or crun for it",
                capability="gpu",
            )


def oci_mounts(found: cdi.Edits, at: str) -> list[dict[str, Any]]:
    """The nodes that :func:`add_nodes` made, as mounts of an OCI bundle."""
    return [
        {
            "destination": node.path,
            "type": "bind",
            "source": f"{at}/{name}",
            "options": ["bind", "rw", "nosuid", "noexec"],
        }
        for name, node in node_names(found).items()
    ]


def oci_devices(found: cdi.Edits) -> list[dict[str, Any]]:
    """The nodes as ``linux.devices`` of an OCI bundle (gVisor makes them in its own kernel)."""
    return [
        {"path": node.path, "type": "c", "major": node.major, "minor": node.minor, "fileMode": 0o666}
        for node in found.nodes
    ]


def engine_host_config(found: cdi.Edits) -> dict[str, Any]:
    """For the HTTP API of a *local* Docker or podman: lists to be appended to those of ``HostConfig``.

    Driver files and variables are in the spec that :func:`prepare` gives back."""
    return {
        "Devices": [
            {"PathOnHost": node.source, "PathInContainer": node.path, "CgroupPermissions": "rw"}
            for node in found.nodes
        ],
        "GroupAdd": [str(number) for number in found.groups],
    }
