"""One call in a context: its events as they come, its time limit, and where to go on after a lost link."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from ringfence.guest.contexts.reading import Place, Reader
from ringfence.guest.contexts.results import (
    ContextEvent,
    Failure,
    Finished,
    Ran,
    Result,
    Text,
)
from ringfence.guest.processes import GuestProcess
from ringfence.model.errors import GuestRefused

PATIENCE: Final = (
    5.0  # seconds between the interrupt of a call that is over its time and the end of its context
)
MOST_RESULTS: Final = 1000  # that :meth:`Call.collect` keeps


class Call:
    """A call under way; iterate for its events, the last of which is :class:`Finished`::

        async for event in call: ...

    Leaving the iteration (:meth:`close`) leaves the call running. Where the link is lost, ``LinkLost`` is
    raised: dial again and :meth:`Contexts.resume` with ``id`` and ``place``. If nobody iterates, the code
    waits as soon as what it printed fills the context's ring.
    """

    def __init__(
        self,
        id: str,
        context: str,
        process: GuestProcess,
        reader: Reader,
        place: Place,
        seconds: float | None,
    ) -> None:
        self.id = id
        self.context = context
        self.place = place  # after the last event that was yielded
        self.admit: Callable[[int], Awaitable[int]] | None = None  # how many of so many bytes may go out
        self._process = process
        self._reader = reader
        self._ready: deque[tuple[Place, ContextEvent]] = deque()
        self._seconds = seconds
        self._deadline: float | None = None  # on the loop's clock, from the call's beginning on
        self._timed = self._late = False
        self._failed = False
        self._over = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> ContextEvent:
        """The next event.

        Raises:
            LinkLost, ProtocolViolation: the link ended; go on with :meth:`Contexts.resume`.
        """
        if self._over:
            raise StopAsyncIteration
        while not self._ready:
            await self._more()
        place, event = self._ready.popleft()
        self.place = place
        if isinstance(event, Failure):
            self._failed = True
        if isinstance(event, Finished):
            self._over = True
            await self.close()
        return event

    async def _more(self) -> None:
        if self._seconds is not None and self._reader.begun and not self._timed:
            self._timed = True
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                piece = await self._process.__anext__()
        except TimeoutError:
            await self._overdue()
            return
        except StopAsyncIteration:
            self._gone()
            return
        if self.admit is not None and await self.admit(len(piece.data)) < len(piece.data):
            self._gone("was ended: its sandbox has put out as much as it may")
            return
        for place, event in self._reader.feed(*piece):
            self._ready.append((place, self._finished(event) if isinstance(event, Finished) else event))

    def _finished(self, event: Finished) -> Finished:
        failed = self._failed or any(isinstance(waiting, Failure) for _, waiting in self._ready)
        status = "timeout" if self._late else "error" if failed else event.status
        return Finished(status, event.count, event.exit_code)

    async def _overdue(self) -> None:
        """The time is over: first an interrupt, then the context's end."""
        with contextlib.suppress(GuestRefused):
            await self._process.signal(signal.SIGKILL if self._late else signal.SIGINT)
        if not self._late:
            self._late = True
            self._deadline = asyncio.get_running_loop().time() + PATIENCE
        else:
            self._deadline = None

    def _gone(self, how: str = "") -> None:
        """The context's process has ended in the middle of the call."""
        end = self._process.exit
        how = how or ("ended" if end is None else f"ended with status {end.status}")
        if self._late:
            self._ready.append(
                (self.place, Failure("TimeoutError", f"the context {how} after the time limit"))
            )
        else:
            self._ready.append((self.place, Failure("ContextEnded", f"the context {how}; restart it")))
        self._ready.append((self.place, Finished("timeout" if self._late else "ended")))

    async def collect(self, limit: int = 10 * 1024 * 1024) -> Ran:
        """All of it: at most ``limit`` characters a stream, and of results as many as fit into as much again.

        Raises:
            LinkLost, ProtocolViolation: see the iteration.
        """
        streams: dict[str, list[str]] = {"stdout": [], "stderr": []}
        sizes = {"stdout": 0, "stderr": 0}
        results: list[Result] = []
        held = 0
        error: Failure | None = None
        truncated = False
        end = Finished("ended")
        async for event in self:
            if isinstance(event, Text):
                room = limit - sizes[event.stream]
                truncated = truncated or len(event.text) > room
                if room > 0:
                    streams[event.stream].append(event.text[:room])
                    sizes[event.stream] += len(event.text)
            elif isinstance(event, Result):
                held += len(json.dumps(event.as_dict()))
                if held <= 2 * limit and len(results) < MOST_RESULTS:
                    results.append(event)
                else:
                    truncated = True
            elif isinstance(event, Failure):
                error = event
            else:
                end = event
        return Ran(
            "".join(streams["stdout"]),
            "".join(streams["stderr"]),
            tuple(results),
            error,
            end.status,
            end.count,
            end.exit_code,
            truncated,
        )

    async def interrupt(self) -> None:
        """Interrupt the code as Ctrl-C does; the context lives on. Harmless when it is over."""
        if not self._over:
            with contextlib.suppress(GuestRefused):
                await self._process.signal(signal.SIGINT)

    async def close(self) -> None:
        """Let go of it; the code runs on. Idempotent."""
        self._over = True
        await self._process.close()

    async def __aenter__(self) -> Call:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
