"""Graphics processors for a sandbox: which there are, and what a runtime is told to hand one over.

Belongs here: reading what the host says of its GPUs (CDI specifications, the PCI tree), judging it, and pure
functions from it to what a runtime's configuration needs. Does not belong here: starting anything.

A GPU is a hole in every wall: its driver is kernel code that the workload talks to directly. So only what is
needed is shown (nodes of the devices chosen, driver files read-only), and no program of a vendor runs.
"""

from __future__ import annotations

CHOICES = "runc, crun, docker, podman, gvisor or qemu"
_SHARED = (
    "its wall shows fixed device nodes only, and is meant for walls without a driver of the host behind them"
)
_REASONS = {
    "jail": _SHARED,
    "bubblewrap": _SHARED,
    "nsjail": _SHARED,
    "wasm": "WebAssembly has no devices, and no interface to a GPU is granted to modules",
    "firecracker": "Firecracker has no PCI passthrough, by design",
    "qemu-microvm": "the microvm machine has no PCI bus to put it on",
    "fake": "it is a scripted stand-in without devices",
}


def why_not(runtime: str) -> str:
    """Why a runtime can't give a sandbox a GPU, as half a sentence that names those which can."""
    reason = _REASONS.get(runtime, "its driver has no way to pass one on here")
    return f"it can't give a sandbox a GPU: {reason}; {CHOICES} can, where the host has one and as root"
