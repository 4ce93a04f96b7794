"""The effective boundary of a container: from /proc where that is ours to read, else the engine's word."""

from __future__ import annotations

from typing import Any

from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes import measuring
from ringfence.runtimes.contract import Handle


def from_proc(driver: measuring.Driver, handle: Handle) -> EffectiveBoundary:
    """Read from the living agent, like any wall of this kernel."""
    return measuring.measure(driver, handle)


def from_engine(
    driver: measuring.Driver, handle: Handle, container: dict[str, Any], info: dict[str, Any]
) -> EffectiveBoundary:
    """What the engine says that it did, marked so. The agent's filter can't be seen from here."""
    host = container.get("HostConfig") or {}
    words = " ".join(map(str, host.get("SecurityOpt") or []))
    remapped = "name=userns" in str(info.get("SecurityOptions") or "")
    nested = bool(handle.data.get("nested"))
    added = tuple(f"CAP_{name.removeprefix('CAP_')}" for name in host.get("CapAdd") or ())
    workload = measuring.capability_names(int(handle.data.get("capabilities", 0)))
    networks = ((container.get("NetworkSettings") or {}).get("Networks") or {}).keys()
    network = "none" if host.get("NetworkMode") == "none" and set(networks) <= {"none"} else "open"
    notes = [
        "the engine's own word (inspect), not read from the kernel",
        f"the agent begins with {', '.join(added) or 'no capability'} in the container",
        "limits of memory and processes are the engine's",
    ]
    process = measuring.credentials(handle.pid) if handle.data.get("local") else None
    return EffectiveBoundary(
        runtime=driver.name,
        level=driver.level,
        boundary=driver.boundary,
        kernel=str(info.get("KernelVersion", "")),
        namespaces=("mnt", "pid", "net", "ipc", "uts", *(("user",) if nested or remapped else ())),
        user_namespace=nested or remapped,
        host_uid=process.uid if process is not None else int(handle.data.get("uid", 0)),
        seccomp="filter",
        no_new_privs="no-new-privileges" in words,
        capabilities=workload,
        landlock="not-applied",
        lsm=str(container.get("AppArmorProfile") or "absent"),
        network=network,
        limits={},
        notes=tuple(notes),
    )
