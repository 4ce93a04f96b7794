"""Isolation levels, boundaries and causes of end (DESIGN words; strings on the wire)."""

from __future__ import annotations

from enum import Enum


class Level(str, Enum):
    """How strong a wall is, weakest first."""

    L1 = "L1"  # in-process
    L2 = "L2"  # shared kernel
    L3 = "L3"  # own kernel: user-space kernel or micro VM
    L4 = "L4"  # full VM

    @property
    def rank(self) -> int:
        """1 to 4; a higher rank satisfies a request for a lower one."""
        return int(self.value[1])


class Boundary(str, Enum):
    """The mechanism that the wall is made of."""

    NONE = "none"
    INSTRUCTION = "instruction"
    NAMESPACES = "namespaces"
    USERSPACE_KERNEL = "userspace-kernel"
    HARDWARE = "hardware"
    EMULATED = "emulated"


class Cause(str, Enum):
    """Why a sandbox or the command it was made for came to its end. Measured on the host."""

    EXITED = "exited"  # the command returned
    SIGNALED = "signaled"  # the command died of a signal nobody here sent
    KILLED = "killed"  # somebody asked for it: stop, destroy, Ctrl-C
    OUT_OF_MEMORY = "out_of_memory"
    DEADLINE = "deadline"
    CPU_TIME = "cpu_time"
    OUTPUT_LIMIT = "output_limit"
    IDLE = "idle"
    NODE_LOST = "node_lost"  # the node service died, and an ephemeral sandbox with it
    RUNTIME_CRASH = "runtime_crash"  # the wall's first process ended without being asked to
    START_FAILED = "start_failed"  # it never ran: the error says why
