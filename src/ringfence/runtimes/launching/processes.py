"""Naming a process for ever: its number, its birth and the boot it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from functools import cache
from typing import NamedTuple


@cache
def boot_id() -> str:
    """The kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def birth_of(pid: int, *, corpse: bool = False) -> int | None:
    """Start time in clock ticks since boot; ``None`` if there is no such process.

    A process that has ended and was not reaped yet counts only if ``corpse`` is true.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") and not corpse else int(fields[19])


class ProcessRef(NamedTuple):
    """One process for ever: a number that is used again later is another process."""

    pid: int
    birth: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRef:
        """The living process ``pid``. A dead one gets birth 0, which nothing alive has."""
        return cls(pid, birth_of(pid) or 0, boot_id())

    def alive(self) -> bool:
        """It runs (or is stopped); a zombie does not."""
        return self.boot_id == boot_id() and self.birth != 0 and birth_of(self.pid) == self.birth

    def pidfd(self) -> int | None:
        """A descriptor of exactly this process, or ``None`` if it has ended. The caller closes it."""
        if not self.alive():
            return None
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return None
        # Between the check and the open the number may have changed hands.
        if self.alive():
            return descriptor
        os.close(descriptor)
        return None

    async def wait(self) -> None:
        """Return when it has ended (at once if it already has)."""
        descriptor = self.pidfd()
        if descriptor is None:
            return
        try:
            await readable(descriptor)
        finally:
            os.close(descriptor)


async def readable(descriptor: int) -> None:
    """Return when the descriptor is readable: for a pidfd, when its process has ended."""
    if select.select([descriptor], [], [], 0)[0]:
        return
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def ready() -> None:
        if not done.done():
            done.set_result(None)

    # A copy, since the loop allows one reader a descriptor number and several callers may wait.
    copy = os.dup(descriptor)
    loop.add_reader(copy, ready)
    try:
        await done
    finally:
        loop.remove_reader(copy)
        with contextlib.suppress(OSError):
            os.close(copy)
