"""What the blocking classes have in common: each holds its asynchronous twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

_Made = TypeVar("_Made")
_END = object()


class Facade:
    """A blocking class over an asynchronous one."""

    _async: Any

    @classmethod
    def _of(cls, found: Any) -> Self:
        made = cls.__new__(cls)
        made._async = found
        return made

    @classmethod
    def _of_optional(cls, found: Any) -> Self | None:
        return None if found is None else cls._of(found)

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")


async def _opened(opening: Awaitable[_Made]) -> _Made:
    return await opening


def _plain(value: Any) -> Any:
    """Arguments as the asynchronous half takes them."""
    if isinstance(value, Facade):
        return value._async
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


def _flowing(data: Any) -> Any:
    """Bytes as they are; what yields bytes, read in a thread so that the loop does not wait for it."""
    if data is None or isinstance(data, bytes | bytearray | memoryview | str | AsyncIterable):
        return data
    if isinstance(data, Iterable) and not hasattr(data, "read"):
        return _threaded(data)
    return data


async def _threaded(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    found = iter(source)
    while (piece := await asyncio.to_thread(next, found, _END)) is not _END:
        assert isinstance(piece, bytes | bytearray | memoryview)
        yield bytes(piece)
