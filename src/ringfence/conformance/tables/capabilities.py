"""What each runtime must be able to do, as root and as a normal user.

The suite compares ``Runtime.capabilities()`` with these rows field by field: a capability that is dropped (or
appears) without a change of this table fails. Only differences from a row's base are written down.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from ringfence.runtimes.contract import Capabilities

_JAIL = Capabilities(
    rootless=True,
    overlay=True,
    user_zero=True,
    mounts=True,
    pty=True,
    ports=True,
    watch=True,
    recover=True,
    disk_limit=True,
    pause=True,
    disk_snapshot=True,
    network=("none", "egress", "open"),
    transparent=True,
)
_BUBBLEWRAP = replace(_JAIL, overlay=False, user_zero=False, disk_snapshot=False)
# runsc makes its own user namespaces only where more than one id can be mapped: left to root.
# Its network is its own kernel's: what ignores proxies can't be caught there, and reaches nothing.
_GVISOR = replace(
    _JAIL,
    rootless=False,
    disk_snapshot=True,
    memory_snapshot=True,
    gpu=True,
    network=("none", "egress"),
    transparent=False,
)
_WASM = replace(
    _JAIL, user_zero=False, pty=False, ports=False, watch=False, programs=False, network=("none",),
    transparent=False,
)  # fmt: skip
# A disk and a kernel of its own: no file of the host inside, and none of its own seen from the host.
_MACHINE = Capabilities(
    user_zero=True,
    recover=True,
    disk_limit=True,
    pause=True,
    disk_snapshot=True,
    memory_snapshot=True,
    host_template=False,
    network=("none", "egress"),
)
_ENGINE = replace(_BUBBLEWRAP, user_zero=True, network=("none", "egress"))
_FAKE = Capabilities(rootless=True, recover=True)

_FIRECRACKER = Capabilities(
    user_zero=True,
    recover=True,
    disk_limit=True,
    pause=True,
    disk_snapshot=True,
    memory_snapshot=True,
    host_template=False,
    network=("none", "egress"),
)

# Built against their published interfaces and not run by this project: what they claim. The suites run on
# them only where the component is there.
UNVERIFIED = {"firecracker": "needs firecracker and KVM"}

RUNTIMES: dict[str, dict[str, Capabilities]] = {
    # Pausing needs a cgroup's freezer.
    "jail": {"root": _JAIL, "user": replace(_JAIL, pause=False)},
    "bubblewrap": {"root": _BUBBLEWRAP, "user": replace(_BUBBLEWRAP, pause=False)},
    # The same file system and cgroups as the jail's, made ready by the same launcher.
    "nsjail": {"root": _JAIL, "user": replace(_JAIL, pause=False)},
    "runc": {"root": replace(_JAIL, gpu=True), "user": replace(_JAIL, pause=False)},
    "crun": {"root": replace(_JAIL, gpu=True), "user": replace(_JAIL, pause=False)},
    "gvisor": {"root": _GVISOR, "user": _GVISOR},
    "qemu-microvm": {"root": _MACHINE, "user": _MACHINE},
    "qemu": {"root": replace(_MACHINE, gpu=True), "user": replace(_MACHINE, gpu=True)},
    # Functions, not programs: what WebAssembly has no notion of is refused by capability.
    "wasm": {"root": _WASM, "user": replace(_WASM, pause=False)},
    "firecracker": {"root": _FIRECRACKER, "user": _FIRECRACKER},
    # An image of the engine's, read-only, and sized tmpfs where the workload writes.
    "docker": {"root": replace(_ENGINE, gpu=True), "user": _ENGINE},
    "podman": {"root": replace(_ENGINE, gpu=True), "user": _ENGINE},
    "fake": {"root": _FAKE, "user": _FAKE},
}


def expected(runtime: str, who: str) -> dict[str, object] | None:
    """The committed row as a dictionary; None for a runtime that is not ours (its own word counts then)."""
    rows = RUNTIMES.get(runtime)
    return None if rows is None else asdict(rows[who])
