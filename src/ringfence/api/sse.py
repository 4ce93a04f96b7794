"""Server-sent events: for clients that only read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ringfence.api.calls import Answer, Call, as_json

MEDIA = "text/event-stream; charset=utf-8"


def event(name: str, data: Any, *, id: str = "") -> bytes:
    """One event. JSON has no line breaks, so the data is one line."""
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {name}\ndata: ".encode() + as_json(data) + b"\n\n"


def events(call: Call, source: AsyncIterator[bytes]) -> Answer:
    """A stream of events; it ends when the source does, the client goes or the service drains."""
    return Answer(200, stream=_paced(call, source), media=MEDIA, headers={"x-accel-buffering": "no"})


async def _paced(call: Call, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    gone = loop.create_task(call.gone())
    draining = loop.create_task(call.service.draining.wait())
    following: asyncio.Task[bytes] | None = None
    yield b": ringfence\n\n"
    try:
        while True:
            following = following or loop.create_task(_next(source))
            await asyncio.wait(
                {following, gone, draining},
                timeout=call.service.settings.sse_interval,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if following.done():
                piece = following.result()
                following = None
                if not piece:
                    return
                yield piece
            elif gone.done():
                return
            elif draining.done():
                yield event("reload", {"hint": "reconnect and go on from the last event's id"})
                return
            else:
                yield b": still here\n\n"
    finally:
        for task in (following, gone, draining):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        if (close := getattr(source, "aclose", None)) is not None:
            await close()


async def _next(source: AsyncIterator[bytes]) -> bytes:
    return await anext(source, b"")
