"""A project's limits at all doors of a store: each API process has a share, divided anew every second.

The store has one row for a project, and each process writes its own entry of it: see ``egress.shares``. No
request and no connection waits for the store; what is over a process's share waits for the next division, or
is refused. Who can't write keeps what it has for some seconds, and nothing after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import Conflict, NotFound, RingfenceError
from ringfence.store.contract import Put, Row, Store

if TYPE_CHECKING:
    from ringfence.control.quotas import Quota
    from ringfence.egress.client import Doors

KIND = "egress_shares"
_TRIES = 8  # of others who write the same row
_CLOSING = 8.0  # seconds
_AT_ONCE = 8  # projects that are looked after
_log = logging.getLogger("ringfence.serving")
Amounts = dict[str, int]


class Shares:
    """Those of one process. ``clock`` is the machine's monotonic one, which the proxy goes by, too."""

    def __init__(
        self, doors: Doors, store: Store, owner: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._doors = doors
        self._store = store
        self._clock = clock
        # One that is started anew is another: what the former one had may still be in use for a moment.
        self._me = f"{owner}/{secrets.token_hex(4)}"
        self._limits: dict[str, dict[str, float]] = {}
        self._seen: dict[str, dict[str, tuple[int, float]]] = {}  # beats of others, and since when
        self._beat = 0
        # The last write that was begun: its beat, and what the proxy had counted then; and what the row has.
        self._tried: dict[str, tuple[int, list[float]]] = {}
        self._counted: dict[str, list[float]] = {}
        self._written: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._turning: dict[str, asyncio.Task[None]] = {}

    async def cover(self, project: str, quota: Quota) -> None:
        """A door of this project is opened, or its quota has changed.

        Raises:
            StoreUnavailable, NodeUnavailable: nobody knows what may pass, and so nothing does.
        """
        limits = limits_of(quota)
        had = self._limits.get(project)
        if limits == (had or {}):
            return
        if not limits:
            await self.leave(project, cut=False)
            return
        self._limits[project] = limits
        await self.turn(project, {})

    async def look(self, used: Callable[[], set[str]]) -> None:
        """Divide anew. ``used``: the projects that have a door here, or get one. A project whose row stands
        still (somebody else's transaction holds it) keeps no other from its share.
        """
        if not self._limits:
            return
        wants = await self._doors.share_wants()
        idle = [project for project in self._limits if project not in self._turning]
        await asyncio.gather(*(self._tend(project, wants.get(project, {}), used) for project in idle))

    async def _tend(self, project: str, wants: Mapping[str, int], used: Callable[[], set[str]]) -> None:
        from ringfence.egress.shares import EVERY

        async with self._slots:
            task = asyncio.get_running_loop().create_task(self._looked(project, wants, used))
            self._turning[project] = task
            task.add_done_callback(lambda _: self._turning.pop(project, None))
            await asyncio.wait({task}, timeout=EVERY)

    async def _looked(self, project: str, wants: Mapping[str, int], used: Callable[[], set[str]]) -> None:
        try:
            if project in used():
                await self.turn(project, wants)
            else:
                await self.leave(project, unless=used)
        except RingfenceError as error:
            _log.warning("shares of project %s: %s", project, error.message)

    async def turn(self, project: str, wants: Mapping[str, int]) -> None:
        """Take and give so that everybody has a fair part."""
        async with self._locks.setdefault(project, asyncio.Lock()):
            limits = self._limits.get(project)
            if limits is not None:
                await self._turn(project, limits, wants)

    async def _turn(self, project: str, limits: Mapping[str, float], wants: Mapping[str, int]) -> None:
        from ringfence.egress import shares

        whole = {
            name: shares.units(limit) if name == shares.RATE else int(limit)
            for name, limit in limits.items()
            if name != shares.BUDGET
        }
        back = 0.0
        for _ in range(_TRIES):
            row, dead = await self._read(project)
            document = row.document
            holders = document.get("holders", {})
            mine = holders.get(self._me, {})
            had = mine.get("have", {})
            goal = shares.target(document, self._me, whole, wants, dead)
            # What is given up is given up before anybody may know of it.
            given = {name: min(int(had.get(name, 0)), amount) for name, amount in goal.items()}
            kept = await self._doors.share_shrink(project, given)
            back += kept["back"]
            have = dict(goal)
            if shares.CONNECTIONS in have:
                have[shares.CONNECTIONS] = max(have[shares.CONNECTIONS], int(kept["open"]))
            now = self._clock()
            alone = holders.keys() == {self._me}
            used = self._used(project, mine, kept["used"]) if shares.BUDGET in limits else None
            same = have == had and (alone or (dict(wants), used) == (mine.get("want"), mine.get("used")))
            # Not written by us since it was covered: others may be about to take for dead what stands there.
            written = self._written.get(project)
            fresh = written is not None and now < written + shares.BEAT
            if written is not None and fresh and same and kept["given"] and not dead and back < 1e-6:
                if not alone:  # what others have used is news all the same
                    told, until = self._elsewhere(document, used, kept["used"]), written + shares.VALID
                    await self._doors.share_grant(project, limits, goal, until, 0.0, told)
                return
            beat = self._beat = self._beat + 1
            self._tried[project] = beat, kept["used"]
            document, gain = shares.entered(document, self._me, beat, have, wants, dead, used), 0.0
            if shares.RATE in limits:
                rate, level = limits[shares.RATE], kept["level"]
                document, gain = shares.passed_on(document, rate, have[shares.RATE], level, back)
            try:
                await self._store.commit(Put(replace(row, document=document)))
            except Conflict:
                continue
            self._written[project], self._counted[project] = now, kept["used"]
            told = self._elsewhere(document, used, kept["used"])
            await self._doors.share_grant(project, limits, goal, now + shares.VALID, gain, told)
            return
        raise Conflict("the shares are changed all the time")

    def _used(self, project: str, mine: Mapping[str, Any], own: list[float]) -> list[float]:
        """What stands in our entry, and what was used since it was written. ``own``: what the proxy has
        counted since it began, of which the row may know a part.
        """
        from ringfence.egress import shares

        beat, counted = self._tried.get(project, (0, []))
        if mine.get("beat") == beat:  # that came through, whatever was said about it
            self._counted[project] = counted
        known = self._counted.get(project, [0.0] * 4)
        if any(now < then for now, then in zip(own, known, strict=True)):
            known = self._counted[project] = [0.0] * 4  # another proxy
        since = [now - then for now, then in zip(own, known, strict=True)]
        return shares.added(mine.get("used", []), since)

    @staticmethod
    def _elsewhere(
        document: Mapping[str, Any], used: list[float] | None, own: list[float]
    ) -> list[float] | None:
        from ringfence.egress import shares

        if used is None:
            return None
        return [max(0.0, all_ - mine) for all_, mine in zip(shares.used_by_all(document), own, strict=True)]

    async def _read(self, project: str) -> tuple[Row, set[str]]:
        """The row, and the processes in it that have not been heard of for too long."""
        from ringfence.egress import shares

        before = self._clock()
        try:
            row = await self._store.get(KIND, project)
        except NotFound:
            row = Row(KIND, project, project)
        after = self._clock()
        seen, dead = self._seen.get(project, {}), set()
        fresh: dict[str, tuple[int, float]] = {}
        for owner, entry in row.document.get("holders", {}).items():
            if owner == self._me:
                continue
            beat, since = int(entry["beat"]), after
            if owner in seen and seen[owner][0] == beat:
                since = seen[owner][1]
                if before - since >= shares.RECLAIM:
                    dead.add(owner)
            fresh[owner] = beat, since
        self._seen[project] = fresh
        return row, dead

    async def leave(
        self, project: str, *, cut: bool = True, unless: Callable[[], set[str]] | None = None
    ) -> None:
        """Nothing of this project is here any more, ``unless`` there is by now. What counts ends with it, but
        for ``cut``: there is no limit any more.
        """
        from ringfence.egress import shares

        async with self._locks.setdefault(project, asyncio.Lock()):
            if unless is not None and project in unless():
                return
            limits = self._limits.pop(project, None)
            if limits is not None and cut:
                with contextlib.suppress(RingfenceError):
                    await self._turn(project, limits, {})  # what was used until now
            self._seen.pop(project, None)
            self._written.pop(project, None)
            told: dict[str, Any] = await self._doors.share_drop(project, cut=cut)
            if told["open"]:
                return  # others take it back when nobody has heard of it for a while
            for _ in range(_TRIES):
                try:
                    row = await self._store.get(KIND, project)
                except NotFound:
                    return
                if self._me not in row.document.get("holders", {}):
                    return
                document = shares.left(row.document, self._me)
                if "spare" in document:
                    document["spare"] = float(document["spare"]) + told["level"]
                with contextlib.suppress(Conflict):
                    await self._store.commit(Put(replace(row, document=document)))
                    return

    async def run(self, used: Callable[[], set[str]]) -> None:
        """Look, for ever."""
        from ringfence.egress.shares import EVERY

        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.look(used)
            except RingfenceError as error:
                _log.warning("shares of limits: %s", error.message)

    async def close(self) -> None:
        """Give everything back, if that goes quickly: else it comes back by itself."""
        turning = list(self._turning.values())
        for task in turning:
            task.cancel()
        await asyncio.gather(*turning, return_exceptions=True)
        with contextlib.suppress(TimeoutError, RingfenceError):
            async with asyncio.timeout(_CLOSING):
                for project in list(self._limits):
                    await self.leave(project)


def limits_of(quota: Quota) -> dict[str, float]:
    """A quota's limits that are divided among processes."""
    from ringfence.egress.shares import BUDGET, CONNECTIONS, IN, OUT, RATE

    found = {
        CONNECTIONS: quota.connections,
        OUT: quota.bandwidth,
        IN: quota.bandwidth,
        RATE: quota.egress_rate,
    }
    budgets = (quota.egress_requests, quota.egress_bytes, quota.egress_spend)
    found[BUDGET] = 1 if any(budget is not None for budget in budgets) else None
    return {name: limit for name, limit in found.items() if limit is not None}
