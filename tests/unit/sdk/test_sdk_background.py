"""The thread behind the blocking SDK."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from ringfence.sdk.background import Background


@pytest.fixture
def background() -> Iterator[Background]:
    found = Background()
    yield found
    found.end()


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_a_coroutine_gives_its_result(background: Background) -> None:
    assert background.run(answer()) == 42


def test_an_error_comes_out_as_it_is(background: Background) -> None:
    async def fail() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        background.run(fail())


def test_many_threads_may_wait_at_once(background: Background) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(background.run(answer()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [42] * 8


def test_an_iterator_that_is_left_early_is_closed(background: Background) -> None:
    closed = threading.Event()

    async def count() -> AsyncIterator[int]:
        try:
            for number in range(1000):
                yield number
        finally:
            closed.set()

    found = background.iterate(count())
    assert [next(found), next(found)] == [0, 1]
    found.close()  # type: ignore[attr-defined]
    assert closed.wait(30)


def test_an_iterator_ends(background: Background) -> None:
    async def count() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert list(background.iterate(count())) == [1, 2]


def test_a_callback_that_blocks_on_its_own_loop_is_told(background: Background) -> None:
    async def inside() -> None:
        background.run(answer())

    with pytest.raises(RuntimeError, match="AsyncSandbox"):
        background.run(inside())


def test_what_was_asked_for_is_closed_at_the_end(background: Background) -> None:
    seen: list[str] = []

    async def close() -> None:
        seen.append("closed")

    background.loop()
    background.at_end(close)
    background.end()
    assert seen == ["closed"]
    assert background.run(answer()) == 42  # and it can begin anew


def test_a_forked_child_gets_a_thread_of_its_own(background: Background) -> None:
    assert background.run(answer()) == 42
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if background.run(answer()) == 42 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
