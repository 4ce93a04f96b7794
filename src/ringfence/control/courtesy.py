"""Who waits for a sandbox goes first: ends give way to claims, for a moment.

Taking a wall down costs about what starting one does. With many of both at once every claim would wait for
its share of the processors behind ends that nobody is in a hurry for. So while claims are under way, or were
a moment ago, only a few ends are at work at a time and the others stand in line. None waits long: an end that
hangs must not hold up the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

AT_WORK = 2  # ends at once while there are claims
AFTERWARDS = 0.1  # seconds that the last claim counts for
PATIENCE = 0.5  # seconds that an end gives way


class Courtesy:
    """The line of one process. Nothing in it is needed after a crash."""

    def __init__(self) -> None:
        self._claims = 0
        self._last = -AFTERWARDS  # when the last claim was over
        self._at_work = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """While one is served."""
        self._claims += 1
        try:
            yield
        finally:
            self._claims -= 1
            self._last = time.monotonic()

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """While one is taken down, when it is its turn."""
        if self._at_work >= AT_WORK and self._hurried():
            await self._turn()
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            self._next()

    def _hurried(self) -> bool:
        return self._claims > 0 or time.monotonic() - self._last < AFTERWARDS

    async def _turn(self) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            await asyncio.wait({place}, timeout=PATIENCE)
        except BaseException:
            if place.done():
                self._next()  # it was our turn, and is somebody else's now
            raise
        finally:
            if not place.done():
                self._line.remove(place)
                place.cancel()

    def _next(self) -> None:
        free = AT_WORK - self._at_work if self._hurried() else len(self._line)
        while self._line and free > 0:
            self._line.popleft().set_result(None)
            free -= 1
