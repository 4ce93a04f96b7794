"""Virtual machines: what the drivers of QEMU and Firecracker share.

Belongs here: the guest's kernel (``kernel``), its first file system (``initramfs``), disks (``disks``), the
calls to the guest's first process (``control``), QEMU itself and its wall. Does not belong here: anything
that a runtime without a kernel of its own needs.
"""
