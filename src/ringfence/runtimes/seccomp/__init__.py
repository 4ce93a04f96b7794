"""The system call filter of every wall that shares the host's kernel.

Belongs here: the table of calls with the reason for each group, the compiler to BPF, and the same table
in the forms that other programs take (OCI, Kafel). Does not belong here: installing a filter; the
launcher and the foreign runtimes do that with the bytes made here.
"""

from __future__ import annotations

import os
from functools import lru_cache

from ringfence.model.errors import HostLimit, InvalidRequest


@lru_cache(maxsize=8)
def load(name: str = "default", arch: str | None = None) -> bytes:
    """The named filter as an array of ``struct sock_filter`` for this machine (or ``arch``).

    Compiled on first use, which takes a millisecond or two, and kept for the life of the process.

    Raises:
        InvalidRequest: no filter of this name.
        HostLimit: no table for this machine's architecture.
    """
    if name != "default":
        raise InvalidRequest(f"there is no seccomp profile {name!r}", hint="the only profile is 'default'")
    from ringfence.runtimes.seccomp import bpf, table

    machine = arch or os.uname().machine
    try:
        rules = table.rules(machine)
    except KeyError:
        raise HostLimit(
            f"there is no system call table for {machine} machines, and nothing starts without a filter",
            hint="use an x86_64 or aarch64 machine",
        ) from None
    return bpf.compile(rules, machine, table.DEFAULT)
