"""A store with faults: it answers late, refuses, or does what it was told and the answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ringfence.model.errors import StoreUnavailable

WRITES = ("commit", "take", "lease", "release")
READS = ("get", "find", "due", "count", "events", "counter")


class FaultyStore:
    """Over a real one. ``delay``: seconds before each call and after it. ``away``: every call is refused.
    ``lose``: called with each write's name and arguments, says what befalls it: ``""`` nothing,
    ``"refused"`` it is not done, ``"lost"`` it is done, and the caller is told that nobody knows.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.delay = 0.0
        self.away = False
        self.lose: Callable[[str, tuple[Any, ...]], str] = lambda name, arguments: ""
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in WRITES + READS:
            return found

        async def call(*arguments: Any, **parts: Any) -> Any:
            if self.away:
                raise StoreUnavailable("the store is away", hint="try again")
            await asyncio.sleep(self.delay)
            befalls = ""
            if name in ("commit", "take"):
                self.writes += 1
                befalls = self.lose(name, arguments)
            if befalls == "refused":
                raise StoreUnavailable("the store refused it", hint="try again")
            result = await found(*arguments, **parts)
            await asyncio.sleep(self.delay)
            if befalls == "lost":
                raise StoreUnavailable("the answer was lost", hint="try again")
            return result

        return call
