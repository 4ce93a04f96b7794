"""``qemu-microvm`` (level 3) and ``qemu`` (level 4): a kernel of its own, in a virtual machine.

``qemu-microvm`` boots our init and the guest agent over the template: with KVM in a machine without a PC's
devices, emulated in a PC (see ``QemuRuntime.machine``).
``qemu`` is a PC that boots the template's own system: its init starts first, our agent when that is up.

Nothing is shared with the host but three byte streams (agent, control, console) and two disks; there is no
network card. QEMU runs unprivileged in a wall of its own: see ``vm.vmm``. Without working KVM the processor
is emulated, which a policy has to allow.
"""

from __future__ import annotations

import os

from ringfence.model.errors import StartFailed
from ringfence.model.levels import Level
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.vm.driver import QemuRuntime

INITS = ("/sbin/init", "/usr/sbin/init", "/lib/systemd/systemd", "/usr/lib/systemd/systemd")


class MicrovmRuntime(QemuRuntime):
    """See the module."""

    name = "qemu-microvm"
    level = Level.L3
    kind = "microvm"


class FullRuntime(QemuRuntime):
    """See the module."""

    name = "qemu"
    level = Level.L4
    kind = "q35"
    start_deadline = 600.0  # seconds: a whole system's own start, emulated
    start_timeout = 570.0

    def init(self, spec: StartSpec) -> str:
        """See the base."""
        if spec.id == "probe":
            return ""  # of an empty root: it proves that the machine boots
        for path in INITS:
            if any(os.path.lexists(lower + path) for lower in spec.root.lowers):
                return path
        raise StartFailed(
            "the template has no init of its own, which level 4 boots",
            hint="use a template with systemd-sysv or sysvinit-core, or runtime qemu-microvm",
            step="template",
        )
