"""Bandwidth: a bucket of bytes that fills at a rate."""

from __future__ import annotations

import asyncio
import time


class Bucket:
    """Lets ``rate`` bytes a second through on average, and a twentieth of a second's worth at once."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._burst = max(rate / 20, 1500.0)
        self._level = self._burst
        self._at = time.monotonic()

    async def take(self, count: int) -> None:
        """Return when ``count`` bytes may pass. More than the bucket holds is a debt that is waited for."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self.rate) - count
        self._at = now
        if self._level < 0:
            await asyncio.sleep(-self._level / self.rate)
