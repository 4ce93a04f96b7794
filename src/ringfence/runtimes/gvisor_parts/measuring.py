"""Measuring a wall of gVisor: the sentry's process as the host sees it."""

from __future__ import annotations

from ringfence.model.errors import LinkLost
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle
from ringfence.runtimes.measuring import (
    ESSENTIAL,
    NAMESPACES,
    Driver,
    _interfaces,
    _label,
    _namespace,
    capability_names,
    credentials,
)

KERNEL = "4.4.0 (gVisor)"  # what every gVisor since 2018 says it is


def measure(driver: Driver, handle: Handle) -> EffectiveBoundary:
    """The effective boundary of a living wall: what stands between the sentry and the host.

    ``host_uid`` and ``namespaces`` are the sentry's, ``capabilities`` the workload's own in gVisor's kernel.

    Raises:
        LinkLost: the wall has ended.
    """
    found = credentials(handle.pid)
    if found is None:
        raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id)
    differing = tuple(
        name
        for name in NAMESPACES
        if (inside := _namespace(handle.pid, name)) is not None and inside != _namespace("self", name)
    )
    weak = [f"shares the host's {name} namespace" for name in ESSENTIAL if name not in differing]
    if found.seccomp != "filter":
        weak.append("no system call filter around gVisor's kernel")
    if not found.no_new_privs:
        weak.append("can gain privileges (no_new_privs is off)")
    if found.uid == 0:
        weak.append("its user is the host's root")
    notes = ["the workload's system calls are answered by gVisor; host_uid is of gVisor's process"]
    level, boundary = driver.level, driver.boundary
    if weak:
        level, boundary = Level.L1, Boundary.NONE
        notes.append("no wall: " + ", ".join(weak))
    only_loopback = "net" in differing and _interfaces(handle.pid) in (["lo"], [])
    return EffectiveBoundary(
        runtime=driver.name,
        level=level,
        boundary=boundary,
        kernel=KERNEL,
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
