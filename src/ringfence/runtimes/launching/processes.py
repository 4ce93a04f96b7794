"""Naming a process for ever: its number, its birth and the boot it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from functools import cache
from typing import NamedTuple

_LONGEST_STOP = 1.0  # seconds that a process may take to stop: it has to leave the kernel


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


def kill_tree(pid: int, pidfd: int) -> None:
    """SIGKILL a process and everything below it, though it may be forking just now.

    For programs whose children do not die with them: it is stopped first, so that the list of its children is
    whole when they are killed.
    """
    from ringfence.runtimes.measuring import tree

    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        end = time.monotonic() + _LONGEST_STOP
        while _state(pid) not in ("T", "Z", "X", "") and time.monotonic() < end:
            time.sleep(0.0002)
        for each in tree(pid)[1:]:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _state(pid: int) -> str:
    """The letter of /proc/PID/stat; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


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
