"""The effective boundary of a container: from /proc where that is ours to read, else the engine's word."""

from __future__ import annotations

from typing import Any

from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes import measuring
from ringfence.runtimes.contract import Handle


def from_proc(driver: measuring.Driver, handle: Handle) -> EffectiveBoundary:
    """Read from the living agent, like any wall of this kernel."""
    return measuring.measure(driver, handle)


def from_engine(
    driver: measuring.Driver, handle: Handle, container: dict[str, Any], info: dict[str, Any], pid: int = 0
) -> EffectiveBoundary:
    """What the engine says that it did, marked so.

    Args:
        driver: whose wall it is.
        handle: of the sandbox.
        container: the engine's answer to an inspection.
        info: the engine's answer about itself.
        pid: of the container's first process where that is this machine's and certainly the container's;
            then the system call filter, which no engine tells, is read from it. 0: it is unknown.
    """
    host = container.get("HostConfig") or {}
    words = " ".join(map(str, host.get("SecurityOpt") or []))
    remapped = "name=userns" in str(info.get("SecurityOptions") or "") or bool(info.get("Rootless"))
    remapped = remapped or "name=rootless" in str(info.get("SecurityOptions") or "")
    nested = bool(handle.data.get("nested"))
    added = tuple(f"CAP_{name.removeprefix('CAP_')}" for name in host.get("CapAdd") or ())
    workload = measuring.capability_names(int(handle.data.get("capabilities", 0)))
    networks = ((container.get("NetworkSettings") or {}).get("Networks") or {}).keys()
    network = "none" if host.get("NetworkMode") == "none" and set(networks) <= {"none"} else "open"
    shared = driver.boundary is Boundary.NAMESPACES  # this kernel answers the workload's calls
    # A virtual machine's first process is no more than the engine's errand boy: it says nothing of the wall.
    process = measuring.credentials(pid) if pid and driver.boundary is not Boundary.HARDWARE else None
    seccomp = process.seccomp if process is not None else "unknown"
    uid = int(handle.data.get("uid", 0))
    if process is not None and not shared:
        uid = process.uid
    notes = [
        "the engine's own word (inspect), not read from the kernel",
        f"the agent begins with {', '.join(added) or 'no capability'} in the container",
        "limits of memory and processes are the engine's",
    ]
    if process is None:
        notes.append("whether a system call filter is in force can't be seen from here: seccomp is unknown")
    elif shared:
        notes.append("the system call filter is the agent's, read from the kernel")
    else:
        notes.append("the system call filter is that of the container's own kernel, read from this one")
    gains = "no-new-privileges" not in words or (process is not None and shared and not process.no_new_privs)
    level, boundary = driver.level, driver.boundary
    weak = _weak(host, gains=gains, filtered=seccomp != "disabled", mapped=nested or remapped or not shared)
    if weak:
        level, boundary = Level.L1, Boundary.NONE
        notes.append("no wall: " + ", ".join(weak))
    return EffectiveBoundary(
        runtime=driver.name,
        level=level,
        boundary=boundary,
        kernel=_kernel(driver.boundary, info),
        namespaces=("mnt", "pid", "net", "ipc", "uts", *(("user",) if nested or remapped else ())),
        user_namespace=nested or remapped,
        host_uid=uid,
        seccomp=seccomp,
        no_new_privs=not gains,
        capabilities=workload,
        landlock="not-applied",
        lsm=str(container.get("AppArmorProfile") or "absent"),
        network=str(handle.data.get("network", "none")) if network == "none" else network,
        limits={},
        notes=tuple(notes),
    )


def _kernel(boundary: Boundary, info: dict[str, Any]) -> str:
    """The kernel that answers the workload's calls; of a machine of its own nobody tells us the release."""
    if boundary is Boundary.USERSPACE_KERNEL:
        from ringfence.runtimes.gvisor_parts.measuring import KERNEL

        return KERNEL
    return str(info.get("KernelVersion", "")) if boundary is Boundary.NAMESPACES else "unknown"


def _weak(host: dict[str, Any], *, gains: bool, filtered: bool, mapped: bool) -> list[str]:
    """Why this is no wall to speak of, whatever was asked for."""
    found = []
    if host.get("Privileged"):
        found.append("the container is privileged")
    if not mapped:
        found.append("shares the host's user namespace")
    if not filtered:
        found.append("no system call filter")
    if gains:
        found.append("can gain privileges (no_new_privs is off)")
    return found
