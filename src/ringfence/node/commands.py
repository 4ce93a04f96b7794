"""One command in a sandbox, counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.guest.processes import GuestProcess, Output, ProcessExit
    from ringfence.node.supervising import Supervisor


class NodeProcess:
    """A command whose output counts towards the sandbox's output limit. Otherwise a :class:`GuestProcess`."""

    def __init__(self, process: GuestProcess, supervisor: Supervisor) -> None:
        self.guest = process
        self.signals: set[int] = set()  # sent to it through us
        self._supervisor = supervisor

    @property
    def id(self) -> str:
        """Its id: attach to it later by this."""
        return self.guest.id

    @property
    def pid(self) -> int:
        """Its process id inside (reported)."""
        return self.guest.pid

    @property
    def exit(self) -> ProcessExit | None:
        """How it ended, or None (reported)."""
        return self.guest.exit

    @property
    def offsets(self) -> tuple[int, int]:
        """Positions in stdout and stderr after what was delivered."""
        return self.guest.offsets

    async def __aiter__(self) -> AsyncIterator[Output]:
        async for output in self.guest:
            size = len(output.data)
            kept = self._supervisor.count_output(size)
            if kept == size:
                yield output
            elif kept:
                yield output._replace(data=output.data[:kept])

    async def wait(self) -> ProcessExit:
        """See :meth:`GuestProcess.wait`."""
        return await self.guest.wait()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See :meth:`GuestProcess.write`."""
        await self.guest.write(data)

    async def close_stdin(self) -> None:
        """See :meth:`GuestProcess.close_stdin`."""
        await self.guest.close_stdin()

    async def resize(self, rows: int, columns: int) -> None:
        """See :meth:`GuestProcess.resize`."""
        await self.guest.resize(rows, columns)

    async def signal(self, number: int, scope: str = "group") -> None:
        """See :meth:`GuestProcess.signal`. An end by this signal has the cause ``killed``."""
        self.signals.add(int(number))
        await self.guest.signal(number, scope)

    async def close(self) -> None:
        """See :meth:`GuestProcess.close`."""
        await self.guest.close()
