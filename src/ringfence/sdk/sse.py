"""Server-sent events, followed over lost connections: from the last event's id on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ringfence.model.errors import RingfenceError
from ringfence.sdk import failures
from ringfence.sdk.failures import PASSING, ServiceUnreachable
from ringfence.sdk.transport import Retry, Transport

_MOST = 4 * 1024 * 1024  # characters of one event


async def events(
    transport: Transport,
    path: str,
    params: Mapping[str, Any] | None = None,
    *,
    post: Mapping[str, Any] | None = None,
    again: Callable[[Any], str] | None = None,
) -> AsyncIterator[tuple[str, Any]]:
    """Name and data of each event until the service ends the stream in an orderly way.

    Args:
        transport, path, params: where.
        post: what begins is not a GET but a POST with this body, which is sent once.
        again: the path to go on at, made from the data of the first event (``started``) of such a POST.

    Raises:
        RingfenceError: the stream told one. ServiceUnreachable: it was lost and can't be had again.
    """
    last, method = "", "GET" if post is None else "POST"
    retry = Retry(transport.settings.retry_for)
    while True:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
        try:
            body = post if method == "POST" else None
            async with transport.stream(method, path, json=body, params=params, headers=headers) as response:
                reload = False
                async for name, data, number in _parsed(response.aiter_lines()):
                    last = number or last
                    retry = Retry(transport.settings.retry_for)
                    if name == "started" and again is not None:
                        method, path = "GET", again(data)
                    if name == "reload":
                        reload = True
                        break
                    if name == "failed" or (name == "error" and post is None):
                        raise failures.from_object(data)
                    yield name, data
                if not reload:
                    return
        except ServiceUnreachable:
            if method == "POST" or not retry.allows():
                raise
        except RingfenceError as error:
            if method == "POST" or error.code not in PASSING or not retry.allows():
                raise
        await retry.pause()


async def _parsed(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Any, str]]:
    data: list[str] = []
    name, number, size = "message", "", 0
    async for line in lines:
        if not line:
            if data:
                yield name, json.loads("\n".join(data)), number
            name, data, size = "message", [], 0
            continue
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        size += len(line)
        if size > _MOST:
            raise ServiceUnreachable("the service sent an event longer than any")
        if key == "event":
            name = value
        elif key == "data":
            data.append(value)
        elif key == "id":
            number = value
