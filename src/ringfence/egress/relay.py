"""Bytes between two streams, both ways, counted, throttled, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ringfence.egress.door import Flow
from ringfence.egress.streams import BROKEN, Stream
from ringfence.egress.throttle import Takes


async def relay(flow: Flow, inner: Stream, outer: Stream, idle: float) -> str:
    """Copy until both sides have ended, one breaks, or nothing moves for ``idle`` seconds; says which."""
    engine = flow.door.engine
    out = asyncio.ensure_future(_pump(inner, outer, flow.out, lambda: engine.bucket_out(flow.door)))
    back = asyncio.ensure_future(_pump(outer, inner, flow.back, lambda: engine.bucket_in(flow.door)))
    try:
        while True:
            left = flow.active + idle - time.monotonic()
            done, waiting = await asyncio.wait(
                (out, back), timeout=max(left, 0.05), return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                if (error := task.exception()) is not None:
                    if not isinstance(error, BROKEN):
                        raise error
                    return "broken"
            if not waiting:
                return "ended"
            if time.monotonic() >= flow.active + idle:
                return "idle"
    finally:
        for task in (out, back):
            task.cancel()
        await asyncio.gather(out, back, return_exceptions=True)


async def _pump(
    source: Stream, target: Stream, count: Callable[[int], None], held: Callable[[], Takes | None]
) -> None:
    while data := await source.read():
        if (bucket := held()) is not None:  # asked anew: limits change while connections are open
            await bucket.take(len(data))
        count(len(data))  # before it is sent: what is counted is never too little
        await target.write(data)
    try:
        await target.eof()
    except BROKEN:
        return
