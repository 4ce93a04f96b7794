"""Who waits for changed rows: a bounded queue a watcher, which loses details rather than grows."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Iterable

MISSED = ("", "")
_MOST = 4096  # changes that a watcher may lie behind; more become one MISSED


class Watcher:
    """Kinds and ids of changed rows, each once however often it changed since it was last asked for.

    Registered from its making on; ends when the store closes. Dropping it is enough to end it.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._wake = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> tuple[str, str]:
        while not self._pending:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._pending.popitem(last=False)[0]

    async def aclose(self) -> None:
        """Hear no more. Idempotent."""
        self.close()

    def close(self) -> None:
        """End the iteration once what is pending was taken."""
        self._closed = True
        self._wake.set()

    def tell(self, changed: Iterable[tuple[str, str]]) -> None:
        """These rows changed."""
        if self._closed:
            return
        for one in changed:
            self._pending[one] = None
        if len(self._pending) > _MOST:
            self._pending.clear()
            self._pending[MISSED] = None
        self._wake.set()


class Watchers:
    """All watchers of one opened store. On the loop's thread only."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self._closed = False

    def add(self) -> Watcher:
        """A new one."""
        watcher = Watcher()
        if self._closed:
            watcher.close()
        else:
            self._all.add(watcher)
        return watcher

    def tell(self, changed: Iterable[tuple[str, str]]) -> None:
        """Tell everyone."""
        changed = tuple(changed)
        if changed:
            for watcher in tuple(self._all):
                watcher.tell(changed)

    def close(self) -> None:
        """End all of them."""
        self._closed = True
        for watcher in tuple(self._all):
            watcher.close()
        self._all.clear()
