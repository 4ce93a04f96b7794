"""Events are not kept for ever: some days, and of each project so many. One process at a time sees to it."""

from __future__ import annotations

import asyncio
import time

from ringfence.control.core import Core
from ringfence.control.tenancy import PROJECT
from ringfence.model.values import dataclass

LEASE = "forgetting"
_BATCH = 1000  # events in one transaction: others wait for no longer than that takes
_ROUNDS = 200  # transactions of one sweep at most


@dataclass(frozen=True, slots=True)
class Keeping:
    """``days``: how long events are kept; 0: for ever. ``most``: of one project, the newest; 0: any number.
    ``every``: seconds between two sweeps.
    """

    days: float = 7.0
    most: int = 1_000_000
    every: float = 60.0


class Forgetting:
    """Background work of one process: :meth:`sweep` is called often, and does something now and then."""

    def __init__(self, core: Core, keeping: Keeping | None = None) -> None:
        self.core = core
        self.keeping = keeping or Keeping()
        self._swept = 0.0

    async def sweep(self) -> None:
        """Remove what is too old or too much, if it is time to and no other process is at it."""
        now = time.monotonic()
        if self._swept and now < self._swept + self.keeping.every:
            return
        self._swept = now
        if await self.core.store.lease(LEASE, self.core.owner, self.keeping.every):
            await self.forget()

    async def forget(self) -> int:
        """Remove what is too old or too much; how many events went."""
        store, keeping, gone = self.core.store, self.keeping, 0
        rounds = iter(range(_ROUNDS))  # the rest is the next sweep's
        if keeping.days:
            before = self.core.now() - keeping.days * 24 * 3600.0
            for _ in rounds:
                gone += (went := await store.forget_before(before, limit=_BATCH))
                if went < _BATCH:
                    break
                await asyncio.sleep(0)
        after = ""
        while keeping.most and (projects := await store.find(PROJECT, after=after, limit=100)):
            after = projects[-1].id
            for project in projects:
                for _ in rounds:
                    gone += (went := await store.forget_beyond(project.id, keeping.most, limit=_BATCH))
                    if went < _BATCH:
                        break
                    await asyncio.sleep(0)
        return gone
