"""A project's share of its limits in this proxy. Without one, or when its time is up, nothing passes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ringfence.egress.policy import Decision
from ringfence.egress.shares import CONNECTIONS, IN, OUT, RATE, Amounts, burst, units

if TYPE_CHECKING:
    from ringfence.egress.door import Flow

PATIENCE = 4.0  # seconds that a connection waits for others to give up a part of theirs
_HEADROOM = 1.25  # of what was used: the next second may need a little more


class Shared:
    """One project's. ``limits`` are the whole project's: bandwidth in bits a second, requests a second.

    ``clock`` is the machine's monotonic one: whoever gives shares uses the same.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.limits: dict[str, float] = {}
        self.have: Amounts = {}
        self.until = 0.0
        self.flows: set[Flow] = set()
        self._waiting = 0
        self._turned_away = 0
        self._asked = 0  # requests since the last look
        self._most = 0  # connections at once since then
        self._looked = clock()
        self._level, self._level_at = 0.0, clock()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.ways = {name: SharedBucket(self, name, clock) for name in (OUT, IN)}

    @property
    def valid(self) -> bool:
        """Whether its time is not up."""
        return self._clock() < self.until

    def amount(self, name: str) -> int:
        """What there is of one limit now."""
        return self.have.get(name, 0) if self.valid else 0

    # -- given and taken by whoever talks with the others

    def wants(self) -> Amounts:
        """What was needed since the last look."""
        now = self._clock()
        seconds = max(now - self._looked, 0.05)
        self._looked = now
        found = {CONNECTIONS: max(self._most, len(self.flows) + self._waiting) + self._turned_away}
        for name, way in self.ways.items():
            found[name] = way.want(seconds, int(self.limits.get(name, 0)))
        rate = self.limits.get(RATE)
        if rate:
            found[RATE] = min(
                round(self._asked / seconds * _HEADROOM / rate * units(rate) + 0.49), units(rate)
            )
        self._most, self._turned_away, self._asked = len(self.flows), 0, 0
        return {name: amount for name, amount in found.items() if name in self.limits}

    def shrink(self, amounts: Mapping[str, int]) -> dict[str, Any]:
        """Have no more than this from now on; open connections stay.

        Returns how many those are (``open``), whether a share was ever ``given``, requests that may be made
        at once (``level``) and those that went with the part that was given up (``back``).
        """
        self._fill()
        for name in {*self.have, *amounts}:
            self.have[name] = min(self.have.get(name, 0), amounts.get(name, 0))
        most = self._burst()
        back, self._level = max(0.0, self._level - most), min(self._level, most)
        for way in self.ways.values():
            way.changed()
        return {"open": len(self.flows), "given": bool(self.limits), "level": self._level, "back": back}

    def grant(
        self, limits: Mapping[str, float], amounts: Mapping[str, int], until: float, gain: float = 0.0
    ) -> None:
        """Have this until then. ``gain``: requests that may be made at once, besides those there are."""
        self._fill()
        self.limits, self.have, self.until = dict(limits), dict(amounts), until
        self._level = min(self._level + gain, self._burst())
        for way in self.ways.values():
            way.changed()
        self._wake()
        if self._timer is None:
            with contextlib.suppress(RuntimeError):  # without a loop somebody calls lapse()
                self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(max(self.until - self._clock(), 0.01), self._due, loop)

    def _due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._clock() < self.until:
            self._watch(loop)
        else:
            self.lapse()

    def lapse(self) -> None:
        """Its time is up: others may have it now. What is open ends."""
        self.have, self._level = {}, 0.0
        if CONNECTIONS in self.limits:
            self.cut()

    def cut(self) -> None:
        """End all connections that count."""
        reason = "this process has no share of its project's connections any more"
        for flow in list(self.flows):
            flow.cut = Decision(False, "connections", None, reason, "connect again")
            if flow.task is not None:
                flow.task.cancel()

    def close(self) -> None:
        """No more of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.limits, self.have, self.until = {}, {}, 0.0
        self._wake()

    async def emptied(self, seconds: float) -> None:
        """Return when none of its connections is left, at the latest after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.flows:
                    await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float | None = None) -> None:
        """Return when there may be more, at the latest after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # -- connections

    async def enter(self, flow: Flow) -> bool:
        """Count a connection; whether it may be. If others have a part of the limit, it waits for that."""
        end = self._clock() + PATIENCE
        self._waiting += 1
        try:
            while True:
                if len(self.flows) < self.amount(CONNECTIONS):
                    self.flows.add(flow)
                    self._most = max(self._most, len(self.flows))
                    return True
                waits = end - self._clock()
                if waits <= 0 or self.amount(CONNECTIONS) >= self.limits.get(CONNECTIONS, 1):
                    self._turned_away += 1
                    return False
                await self.changed(waits)
        finally:
            self._waiting -= 1

    def leave(self, flow: Flow) -> None:
        """It is over. Idempotent."""
        if flow in self.flows:
            self.flows.discard(flow)
            if self._waiting or not self.flows:
                self._wake()

    # -- requests

    def _burst(self) -> float:
        rate = self.limits.get(RATE)
        return self.amount(RATE) * burst(rate) / units(rate) if rate else 0.0

    def _fill(self) -> None:
        now = self._clock()
        rate = self.limits.get(RATE)
        if rate:
            gained = max(now - self._level_at, 0.0) * rate * self.amount(RATE) / units(rate)
            self._level = min(self._level + gained, self._burst()) if self._burst() else 0.0
        self._level_at = now

    def request(self) -> float | None:
        """Count a request; seconds until it may be made if it is one too many now."""
        self._asked += 1
        self._fill()
        if self._level >= 1 - 1e-9:
            self._level -= 1
            return None
        rate, have = self.limits.get(RATE), self.amount(RATE)
        return (1 - self._level) * units(rate) / (rate * have) if rate and have else 1.0


class SharedBucket:
    """Bandwidth one way. What is taken is paid for first, at the share that there is meanwhile."""

    def __init__(self, shared: Shared, name: str, clock: Callable[[], float]) -> None:
        self._shared = shared
        self._name = name
        self._lock = asyncio.Lock()
        self._passed = 0
        self._held = False
        self._clock = clock
        self._level, self._at = 0.0, clock()
        self._rate = 0.0

    def want(self, seconds: float, limit: int) -> int:
        """Bits a second that were needed; all of the limit if somebody had to wait."""
        needed = limit if self._held else min(limit, int(self._passed * 8 / seconds * _HEADROOM))
        self._passed, self._held = 0, self._lock.locked()
        return needed

    def changed(self) -> None:
        """The share is another: what was gained so far was at the old one."""
        self._fill()
        self._rate = self._shared.amount(self._name) / 8

    def _fill(self) -> None:
        now = self._clock()
        if self._shared.amount(self._name) == 0:
            self._rate = 0.0
        self._level = min(self._level + (now - self._at) * self._rate, self._rate / 20)
        self._at = now

    async def take(self, count: int) -> None:
        """Return when ``count`` bytes may pass."""
        async with self._lock:
            self._fill()
            self._level -= count
            self._passed += count
            while self._rate <= 0 or self._level < 0:
                self._held = True
                wait = -self._level / self._rate if self._rate > 0 else None
                await self._shared.changed(wait)
                self._fill()
