"""Server-sent events, followed over lost connections: from the last event's id on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ringfence.model.errors import RingfenceError
from ringfence.sdk import failures
from ringfence.sdk.failures import PASSING, ServiceUnreachable
from ringfence.sdk.transport import Retry, Transport

_MOST = 4 * 1024 * 1024  # characters of one event


async def events(
    transport: Transport, path: str, params: Mapping[str, Any] | None = None
) -> AsyncIterator[tuple[str, Any]]:
    """Name and data of each event until the service ends the stream in an orderly way.

    Raises:
        RingfenceError: the stream told one. ServiceUnreachable: it was lost and can't be had again.
    """
    last = ""
    retry = Retry(transport.settings.retry_for)
    while True:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": last} if last else {})
        try:
            async with transport.stream("GET", path, params=params, headers=headers) as response:
                again = False
                async for name, data, number in _parsed(response.aiter_lines()):
                    last = number or last
                    retry = Retry(transport.settings.retry_for)
                    if name == "reload":
                        again = True
                        break
                    if name == "error":
                        raise failures.from_object(data)
                    yield name, data
                if not again:
                    return
        except ServiceUnreachable:
            if not retry.allows():
                raise
            await retry.pause()
        except RingfenceError as error:
            if error.code not in PASSING or not retry.allows():
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
