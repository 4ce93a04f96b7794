"""Firecracker: a micro virtual machine by KVM. Level 3.

Belongs here: its API, its jailer, its sockets, and the kernel in the form that it boots. The guest (kernel,
init, disks, agent) is that of QEMU's machines and comes from ``ringfence.runtimes.vm``.

**Not verified on the real component**: no host of this project's tests can run it. Requests are checked
against the project's published API description, the rest against a scripted server.
"""
