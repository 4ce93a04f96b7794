"""The event loop on which the blocking half of the SDK runs: one thread in the process, started when needed.

The SDK is written once, as coroutines. ``Sandbox`` hands the coroutines of ``AsyncSandbox`` to this loop and
waits. (The other way, a core of generators that ask for bytes and are driven by a blocking or an async
transport, would need a second WebSocket client and could not watch two streams at once without threads
anyway.) The hop costs some 50 µs a call. Ctrl-C interrupts the wait and cancels the coroutine.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_ENDING = 5.0  # seconds that what is open may take to close at the end of the process


class Background:
    """A thread with a loop in it. After ``fork`` the child gets one of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, running."""
        with self._lock:
            if self._loop is None or self._process != os.getpid():
                if self._process != os.getpid():
                    self._at_end = []
                self._process = os.getpid()
                loop = self._loop = asyncio.new_event_loop()
                started = threading.Event()
                threading.Thread(
                    target=self._serve, args=(loop, started), name="ringfence-sdk", daemon=True
                ).start()
                started.wait()
                atexit.register(self.end)
            return self._loop

    def owns(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it is this thread's loop."""
        return loop is self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(started.set)
        loop.run_forever()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of a coroutine; what interrupts us cancels it."""
        loop = self.loop()
        if threading.current_thread().name == "ringfence-sdk":
            work.close()
            raise RuntimeError(
                "the blocking SDK was called from one of its own callbacks; use AsyncSandbox there"
            )
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                with suppress(BaseException):
                    future.result(_ENDING)  # its clean-up (a reset of a stream, a kill) is part of the call
            raise

    def run_calling(self, work: Callable[[Callable[[Any], Any]], Coroutine[Any, Any, _Result]]) -> _Result:
        """As :meth:`run` for work that calls back: the callbacks run here, in the caller's thread, and may
        use the SDK themselves. ``work`` is given what makes a callback of ours one for the loop.
        """
        loop = self.loop()
        calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None]
        calls = queue.SimpleQueue()

        def here(callback: Any) -> Any:
            if callback is None:
                return None

            async def call(*arguments: Any) -> Any:
                answer: asyncio.Future[Any] = loop.create_future()
                calls.put((callback, arguments, answer))
                return await answer

            return call

        future = asyncio.run_coroutine_threadsafe(work(here), loop)
        future.add_done_callback(lambda _: calls.put(None))
        try:
            while (asked := calls.get()) is not None:
                callback, arguments, answer = asked
                try:
                    value = callback(*arguments)
                except Exception as error:
                    loop.call_soon_threadsafe(_fail, answer, error)
                else:
                    loop.call_soon_threadsafe(_answer, answer, value)
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                with suppress(BaseException):
                    future.result(_ENDING)
            raise

    def iterate(self, source: AsyncIterator[_Result]) -> Iterator[_Result]:
        """What an asynchronous iterator yields; leaving early closes it."""
        try:
            while True:
                try:
                    yield self.run(_next(source))
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                with suppress(RuntimeError):
                    self.run(close())

    def at_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run this when the process ends in an orderly way."""
        self._at_end.append(work)

    def end(self) -> None:
        """Close what is open and stop the thread. Idempotent; a later call starts anew."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._process != os.getpid():
            return
        works, self._at_end = self._at_end, []
        for work in works:
            with suppress(BaseException):
                asyncio.run_coroutine_threadsafe(work(), loop).result(_ENDING)
        with suppress(BaseException):
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_ENDING)
        thread = next((t for t in threading.enumerate() if t.name == "ringfence-sdk"), None)
        loop.call_soon_threadsafe(loop.stop)
        if thread is not None:
            thread.join(_ENDING)
        if not loop.is_running():
            loop.close()


def _answer(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def _next(source: AsyncIterator[_Result]) -> _Result:
    return await source.__anext__()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    for _ in range(5):
        await asyncio.sleep(0)  # transports that were closed close their sockets in the next turns


BACKGROUND = Background()
