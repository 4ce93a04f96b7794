"""Inline code: refused unless asked for and trusted, ended at its deadline, cancelled with its caller."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from typing import Any

import pytest

from ringfence.model.errors import DeadlineExceeded, RuntimeUnavailable, Unsupported
from ringfence.model.levels import Cause
from ringfence.model.policy import Door, Isolation, Limits, Policy, Wall
from ringfence.runtimes import inline, registry


def policy(timeout: float = 30.0, **changes: object) -> Policy:
    values: dict[str, object] = {
        "trust": "trusted",
        "wall": Wall(isolation=Isolation(runtime="inline")),
        "door": Door(limits=Limits(timeout=timeout)),
        **changes,
    }
    return Policy(**values)  # type: ignore[arg-type]


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def test_a_coroutine_and_a_callable() -> None:
    outcome = await inline.run(double, 21, policy=policy())
    assert (outcome.value, outcome.end.cause) == (42, Cause.EXITED)
    seen = await inline.run(lambda: threading.current_thread().name, policy=policy())
    assert seen.value == "ringfence-inline"


@pytest.mark.parametrize(
    "bad",
    [
        Policy(),
        policy(trust=None),
        policy(trust="controlled"),
        policy(trust="untrusted"),
        policy(wall=Wall()),
        policy(wall=Wall(isolation=Isolation(prefer=("inline",)))),
    ],
)
async def test_refused_unless_asked_for_by_name_and_trusted(bad: Policy) -> None:
    ran: list[int] = []
    with pytest.raises(RuntimeUnavailable):
        await inline.run(ran.append, 1, policy=bad)
    assert ran == []


async def test_what_it_raises_comes_through() -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await inline.run(fails, policy=policy())


async def test_the_deadline_of_a_coroutine() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded) as caught:
        await inline.run(forever, policy=policy(0.05))
    assert ended.is_set()
    assert "still runs" not in caught.value.message


async def test_the_deadline_of_a_callable_that_computes() -> None:
    began, ended = threading.Event(), threading.Event()

    def forever() -> None:
        try:
            began.set()
            while True:
                pass
        finally:
            ended.set()

    for seconds in (0.05, 30.0):  # a thread may be slow to begin, and is told to end before it has
        with pytest.raises(DeadlineExceeded):
            await inline.run(forever, policy=policy(seconds), grace=60)
        if began.is_set():
            break
    assert ended.is_set()


async def test_one_that_asks_whether_to_end() -> None:
    def polite() -> None:
        while not inline.cancelled():
            time.sleep(0.001)

    with pytest.raises(DeadlineExceeded):
        await inline.run(polite, policy=policy(0.05), grace=60)
    assert not inline.cancelled()


async def test_one_that_heeds_nothing_is_reported() -> None:
    began, go_on = threading.Event(), threading.Event()

    def deaf() -> None:
        began.set()
        go_on.wait()

    for seconds in (0.05, 30.0):  # a thread may be slow to begin
        with pytest.raises(DeadlineExceeded) as caught:
            await inline.run(deaf, policy=policy(seconds), grace=0.05)
        if began.is_set():
            break
    assert "still runs" in caught.value.message
    go_on.set()


async def test_one_that_is_to_end_before_it_began_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, go_on = threading.Event(), threading.Event()
    real = contextvars.copy_context

    class Slow:
        def run(self, body: Any) -> None:
            go_on.wait(60)
            real().run(body)

    monkeypatch.setattr(contextvars, "copy_context", Slow)
    work = inline._Work(ran.set, (), {})
    monkeypatch.undo()
    stopping = asyncio.ensure_future(work.stop(60.0))
    await asyncio.sleep(0)
    go_on.set()
    assert await stopping
    assert not ran.is_set()


async def test_cancelling_the_caller_cancels_the_work() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(inline.run(forever, policy=policy()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_its_name_is_known_and_no_wall() -> None:
    assert "inline" not in registry.names()
    with pytest.raises(Unsupported, match="no wall"):
        registry.load("inline", None)  # type: ignore[arg-type]


async def test_one_that_ends_at_that_very_moment_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    at_the_end, go_on = threading.Event(), threading.Event()
    tell = loop.call_soon_threadsafe

    def slowly(*arguments: Any) -> None:
        at_the_end.set()
        go_on.wait(30)
        tell(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", slowly)
        work = inline._Work(lambda: 7, (), {})
        at_the_end.wait(30)
        stopping = asyncio.ensure_future(work.stop(2.0))
        await asyncio.sleep(0)
        go_on.set()
        assert await stopping
    assert work.future.result() == 7
