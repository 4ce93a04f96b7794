"""The blocking SDK behind the face of the asynchronous one, so that one table of cases tests both halves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

from ringfence.sdk.blocking.base import Facade

_END = object()


def adapted(value: Any) -> Any:
    """Results as the asynchronous half would give them."""
    if isinstance(value, Facade):
        return Adapted(value)
    if isinstance(value, list):
        return [adapted(each) for each in value]
    return value


def plain(value: Any) -> Any:
    """Arguments as the blocking half takes them."""
    if isinstance(value, Adapted):
        return value._target
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


class Adapted:
    """An object or class of the blocking half: calls are awaited, and run in a thread."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._target, type) or not isinstance(
            getattr(type(self._target), name, None), property
        ):
            found = getattr(self._target, name)
            return Called.of(found) if callable(found) else adapted(found)
        return adapted(getattr(self._target, name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return adapted(self._target(*arguments, **options))

    def __aiter__(self) -> AsyncIterator[Any]:
        return _each(iter(self._target))

    async def __aenter__(self) -> Any:
        return adapted(await asyncio.to_thread(self._target.__enter__))

    async def __aexit__(self, *reason: object) -> None:
        await asyncio.to_thread(self._target.__exit__, *reason)

    def __repr__(self) -> str:
        return repr(self._target)


class Called:
    """A call that is under way: awaited, entered, or iterated over."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._entered: Any = None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Callable[..., Called]:
        def call(*arguments: Any, **options: Any) -> Called:
            return cls(lambda: function(*map(plain, arguments), **{k: plain(v) for k, v in options.items()}))

        return call

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        return adapted(await asyncio.to_thread(self._work))

    async def __aenter__(self) -> Any:
        self._entered = await self
        return await self._entered.__aenter__()

    async def __aexit__(self, *reason: object) -> None:
        await self._entered.__aexit__(*reason)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _each(self._work)

    async def aclose(self) -> None:
        return


async def _each(source: Callable[[], Iterator[Any]] | Iterator[Any]) -> AsyncIterator[Any]:
    found = source() if callable(source) else source
    try:
        while (item := await asyncio.to_thread(next, found, _END)) is not _END:
            yield adapted(item)
    finally:
        if (close := getattr(found, "close", None)) is not None:
            await asyncio.to_thread(close)
