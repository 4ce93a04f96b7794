"""What all drivers have in common whose wall is a process that our launcher started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import GuestError, HostLimit, LinkLost
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Exit, Handle, StartSpec, WallStats
from ringfence.runtimes.launching import sockets
from ringfence.runtimes.launching.launcher import Child
from ringfence.runtimes.launching.processes import ProcessRef, birth_of, boot_id, readable

if TYPE_CHECKING:
    from ringfence.model.levels import Boundary, Level
    from ringfence.runtimes.context import RuntimeContext

EXIT_FILE = "exit"
DESTROY_TIMEOUT = 30.0  # seconds from SIGKILL until the kernel must have taken the wall down
_QUICK = 1.0  # of these: whoever still stands then may be frozen, though not by us
BACKLOG_TIMEOUT = 20.0  # seconds that a full backlog of the agent is waited for
_REAP_TIMEOUT = 10.0  # seconds from a process's death until its launcher has recorded it


class LaunchedRuntime:
    """Base of jail, bubblewrap and fake: everything after the start."""

    name: str
    level: Level
    boundary: Boundary
    version = 1  # of the handle

    def __init__(self, context: RuntimeContext) -> None:
        self.context = context
        self._children: dict[tuple[int, int], Child] = {}

    # -- for the subclasses

    def handle(self, spec: StartSpec, child: Child, pid: int, data: dict[str, Any]) -> Handle:
        """The handle of a wall whose first process is ``pid``; ``child`` is what the launcher started."""
        birth = child.birth if pid == child.pid else 0
        ref = ProcessRef(pid, birth, boot_id()) if birth else ProcessRef.of(pid)
        self._children[pid, ref.birth] = child
        return Handle(self.name, self.version, spec.id, spec.folder, pid, ref.birth, ref.boot_id, data)

    @staticmethod
    def ref(handle: Handle) -> ProcessRef:
        """The wall's first process."""
        return ProcessRef(handle.pid, handle.birth, handle.boot_id)

    # -- the contract

    async def recover(self, handle: Handle) -> bool:
        """True if the wall's first process still lives."""
        return handle.version == self.version and self.ref(handle).alive()

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract; waits a while if the agent is behind with accepting."""
        pause, deadline = 0.001, 0.0
        while True:
            try:
                return sockets.dial(handle.folder)
            except BlockingIOError:
                now = time.monotonic()
                deadline = deadline or now + BACKLOG_TIMEOUT
                if now > deadline or not self.ref(handle).alive():
                    raise LinkLost(
                        "the guest agent accepts no connections", hint="destroy the sandbox"
                    ) from None
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)
            except OSError as error:
                raise LinkLost(f"the guest agent can't be reached: {error.strerror}", id=handle.id) from error

    async def wait(self, handle: Handle) -> Exit:
        """See the contract."""
        child = self._children.get((handle.pid, handle.birth))
        if child is not None:
            status = await asyncio.shield(child.exited)
            if status is not None:
                if child.pid != handle.pid:  # a monitor may die a moment before what it watches
                    await self.ref(handle).wait()
                return _exit_of(handle, status)
        await self.ref(handle).wait()
        return await self._recorded(handle)

    async def _recorded(self, handle: Handle) -> Exit:
        """The exit that a launcher wrote down; unknown if none outlived the wall."""
        path, deadline = os.path.join(handle.folder, EXIT_FILE), time.monotonic() + _REAP_TIMEOUT
        while True:
            # The launcher writes the record while the process is a zombie, then reaps it.
            reaped = birth_of(int(handle.data.get("monitor", handle.pid)), corpse=True) is None
            if (status := _read_status(path)) is not None:
                return _exit_of(handle, status)
            if reaped or time.monotonic() > deadline:
                return Exit()
            await asyncio.sleep(0.002)

    async def stop(self, handle: Handle, grace: float) -> None:
        """See the contract: asks the agent, then kills."""
        if self.ref(handle).alive() and grace > 0:
            from ringfence.guest.link import GuestLink

            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    # The link may end before the answer comes: the agent is what ends.
                    with contextlib.suppress(GuestError):
                        async with await GuestLink.open(await self.connect(handle), timeout=grace) as link:
                            await link.shutdown(grace)
                    await self.wait(handle)
                    return
        await self.kill(handle)

    async def destroy(self, handle: Handle) -> None:
        """See the contract."""
        await self.kill(handle)
        child = self._children.pop((handle.pid, handle.birth), None)
        if child is not None:
            child.close()
        with contextlib.suppress(OSError):
            os.unlink(f"{handle.folder}/{sockets.NAME}")

    async def kill(self, handle: Handle) -> None:
        """SIGKILL, and wait until the kernel has taken the whole wall down.

        Raises:
            HostLimit: it has not, in time.
        """
        child = self._children.get((handle.pid, handle.birth))
        ours = child is not None and child.pid == handle.pid and child.pidfd >= 0
        descriptor = os.dup(child.pidfd) if child is not None and ours else self.ref(handle).pidfd()
        await self._end(handle, handle.pid, descriptor)

    async def _end(self, handle: Handle, pid: int, descriptor: int | None) -> None:
        """Kill the process on which the wall hangs by its pidfd (closed here), and wait for it."""
        child = self._children.get((handle.pid, handle.birth))
        try:
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                if self.frozen(handle):
                    await self.thaw(handle)
            try:
                async with asyncio.timeout(_QUICK):
                    await _gone(child, descriptor)
            except TimeoutError:
                await self.thaw(handle)
                async with asyncio.timeout(DESTROY_TIMEOUT - _QUICK):
                    await _gone(child, descriptor)
        except TimeoutError:
            raise HostLimit(
                f"process {pid} of sandbox {handle.id} does not die",
                hint=f"see /proc/{pid}/stack: it probably waits for a disk or a network file system",
                pid=pid,
            ) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def frozen(self, handle: Handle) -> bool:
        """Whether it may be frozen for all that this driver knows. Drivers that can pause override it."""
        return False

    async def thaw(self, handle: Handle) -> None:
        """Let a frozen wall run, so that it can die. Drivers that can pause override it."""

    async def stats(self, handle: Handle) -> WallStats:
        """See the contract."""
        from ringfence.runtimes import measuring

        return measuring.stats(handle.pid)

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract."""
        from ringfence.runtimes import measuring

        return measuring.measure(self, handle)


async def _gone(child: Child | None, descriptor: int | None) -> None:
    """Return when the process has ended."""
    if (child is None or await asyncio.shield(child.exited) is None) and descriptor is not None:
        await readable(descriptor)


def _read_status(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return int(file.read())
    return None


def _exit_of(handle: Handle, status: int) -> Exit:
    if os.WIFSIGNALED(status):
        return Exit(signal=os.WTERMSIG(status))
    code = os.WEXITSTATUS(status)
    if "monitor" in handle.data and code > 128:  # a monitor tells of the agent's end as a shell does
        return Exit(signal=code - 128)
    return Exit(code=code)
