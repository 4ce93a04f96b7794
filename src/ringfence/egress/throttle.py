"""Bandwidth: a bucket of bytes that fills at a rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol


class Takes(Protocol):
    """Bandwidth that bytes are taken from."""

    async def take(self, count: int) -> None:
        """Return when ``count`` bytes may pass."""


class Bucket:
    """Lets ``rate`` bytes a second through on average, and a twentieth of a second's worth at once."""

    def __init__(self, rate: float) -> None:
        self.change(rate)
        self._level = self._burst
        self._at = time.monotonic()

    def change(self, rate: float) -> None:
        """Another rate from now on. What was taken stays taken."""
        self.rate = rate
        self._burst = max(rate / 20, 1500.0)

    async def take(self, count: int) -> None:
        """Return when ``count`` bytes may pass. More than the bucket holds is a debt that is waited for."""
        wait = self.debt(count)
        if wait > 0:
            await asyncio.sleep(wait)

    def debt(self, count: int) -> float:
        """Take ``count`` bytes; returns how many seconds have to be waited for them."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self.rate) - count
        self._at = now
        return -self._level / self.rate if self._level < 0 else 0.0


class Buckets:
    """Several buckets that the same bytes are taken from: the slowest decides."""

    def __init__(self, buckets: Sequence[Takes]) -> None:
        self._buckets = buckets

    async def take(self, count: int) -> None:
        """Return when ``count`` bytes may pass all of them."""
        # All at the same time: one after the other would fill none beyond its burst meanwhile.
        await asyncio.gather(*(bucket.take(count) for bucket in self._buckets))
