"""Rows that every request asks for, kept for seconds and forgotten as soon as anybody changes them."""

from __future__ import annotations

import asyncio
import contextlib
import time

from ringfence.model.errors import NotFound
from ringfence.store.contract import Row, Store

LIFE = 5.0  # seconds: what a change that nobody told us of (a lost connection) can be late
_MOST = 10_000


class RowCache:
    """Rows of one kind by id, absent ones too. Changed by whom ever, in whichever process: forgotten.

    Begins to watch the store with the first question; :meth:`close` ends it.
    """

    def __init__(self, store: Store, kind: str, *, life: float = LIFE, absent: bool = True) -> None:
        self._store = store
        self._kind = kind
        self._life = life
        self._absent = absent
        self._known: dict[str, tuple[float, Row | None]] = {}
        self._changes = 0
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    async def get(self, id: str) -> Row:
        """One row; NotFound if there is none."""
        found = self._known.get(id)
        if found is None or found[0] < time.monotonic():
            found = await self._load(id)
        if found[1] is None:
            raise NotFound(f"there is no {self._kind} {id}", kind=self._kind, id=id)
        return found[1]

    def forget(self, id: str) -> None:
        """It was changed by ourselves."""
        self._changes += 1
        self._known.pop(id, None)

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed = True
        self._known.clear()
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            self._watching = None

    async def _load(self, id: str) -> tuple[float, Row | None]:
        if (self._watching is None or self._watching.done()) and not self._closed:
            # Begun before the row is read: no change can fall in between.
            changes = self._store.watch()
            self._known.clear()
            self._watching = asyncio.create_task(self._watch(changes), name=f"ringfence-cache-{self._kind}")
        before = self._changes
        until = time.monotonic() + self._life
        row: Row | None
        try:
            row = await self._store.get(self._kind, id)
        except NotFound:
            row = None
        found = (until, row)
        # If anything changed while we read, what we read may be of before.
        if before == self._changes and (row is not None or self._absent) and not self._closed:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[id] = found
        return found

    async def _watch(self, changes: object) -> None:
        async for kind, id in changes:  # type: ignore[attr-defined]
            if kind == self._kind:
                self.forget(id)
            elif not kind:
                self._changes += 1
                self._known.clear()
