"""Landlock: a second lock on what the mounts already forbid, held by another part of the kernel."""

from __future__ import annotations

from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.launching.plan import Plan

# linux/landlock.h. What the kernel at hand does not know is left out by the launcher.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
EVERYTHING = (1 << 16) - 1
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2

READ = EXECUTE | READ_FILE | READ_DIR
# Never the making of device nodes, whatever a capability would allow.
WRITE = EVERYTHING & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV)
_DEVICES = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV


def add_landlock(plan: Plan, spec: StartSpec) -> None:
    """The steps for one wall. They come after the file system is complete and after NO_NEW_PRIVS."""
    plan.add("LANDLOCK", EVERYTHING, SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
    if spec.root.readonly:
        plan.add("LANDLOCK_PATH", "/", READ)
        for path in (*spec.root.read_write, "/dev/shm", "/run/secrets"):  # noqa: S108
            plan.add("LANDLOCK_PATH", path, WRITE)
        for bind in spec.root.binds:
            if not bind.read_only:
                plan.add("LANDLOCK_PATH", bind.target, WRITE)
        plan.add("LANDLOCK_PATH", "/proc", READ | WRITE_FILE | TRUNCATE)
    else:
        plan.add("LANDLOCK_PATH", "/", WRITE)
    plan.add("LANDLOCK_PATH", "/dev", _DEVICES)
    plan.add("LANDLOCK_APPLY")
