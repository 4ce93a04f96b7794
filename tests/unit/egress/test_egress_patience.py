"""One timer for many waits: it ends those that take too long, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.egress.patience import Patience

LONG = 600.0


async def test_a_wait_that_is_too_long_ends() -> None:
    patience = Patience()
    for _ in range(3):  # and the next one has a time of its own
        with pytest.raises(TimeoutError), patience(0.01):
            await asyncio.Event().wait()
        with patience(LONG):
            await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    patience.close()


async def test_a_short_wait_after_a_long_one_is_short() -> None:
    patience = Patience()
    with patience(LONG):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError), patience(0.01):  # the timer stood at the long one
        await asyncio.Event().wait()
    patience.close()


async def test_what_moves_has_its_time_anew() -> None:
    patience = Patience()
    with patience(30.0) as limit:
        for _ in range(20):
            before = limit._due
            await asyncio.sleep(0.001)
            limit.extend()
            assert limit._due > before
    patience.close()


async def test_somebody_elses_cancellation_stays_one() -> None:
    patience = Patience()
    reached = asyncio.Event()

    async def wait() -> None:
        with patience(LONG):
            reached.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with patience(LONG):  # of use to the next task
        await asyncio.sleep(0)
    patience.close()


async def test_errors_pass_and_waits_do_not_nest() -> None:
    patience = Patience()
    with pytest.raises(KeyError), patience(LONG):
        raise KeyError("x")
    with patience(LONG), pytest.raises(RuntimeError, match="one wait"), patience(LONG):
        raise AssertionError
    patience.close()
    patience.close()


async def test_a_timer_that_fires_between_waits_ends_nothing() -> None:
    patience = Patience()
    with patience(0.001):
        pass
    await asyncio.sleep(0.02)
    with patience(LONG):
        await asyncio.sleep(0)
    patience.close()
