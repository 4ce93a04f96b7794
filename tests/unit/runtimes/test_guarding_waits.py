"""What the guard spares itself where nothing has to be waited for, and that nobody loses by it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from ringfence.model.errors import DeadlineExceeded, HostLimit
from ringfence.runtimes import guarding
from ringfence.runtimes.contract import Exit, Handle
from ringfence.runtimes.guarding import Guarded

HANDLE = Handle("toy", 1, "sb-1", "/nowhere", 4711, 1, "boot")


class Toy:
    name = "toy"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.fault: BaseException | None = None
        self.calls = 0
        self.told: list[str] = []
        self.pair = socket.socketpair()

    async def connect(self, handle: Handle) -> socket.socket:
        try:
            if not self.gate.is_set():
                await self.gate.wait()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.told.append("cancelled")
            raise
        if self.fault is not None:
            raise self.fault
        return self.pair[0]

    async def destroy(self, handle: Handle) -> None:
        self.calls += 1
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault

    async def wait(self, handle: Handle) -> Exit:
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return Exit(signal=9)


@pytest.fixture
async def toy() -> Any:
    toy = Toy()
    yield toy
    for end in toy.pair:
        end.close()


@pytest.fixture
def guarded(toy: Toy) -> Guarded:
    return Guarded(toy)  # type: ignore[arg-type]


async def test_what_need_not_wait_sets_no_timer(
    toy: Toy, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "timeout", None)  # would fail if it were asked for
    toy.gate.set()
    assert (await guarded.connect(HANDLE)).gettimeout() == 0.0
    toy.gate.clear()
    with pytest.raises(TypeError):
        await guarded.connect(HANDLE)


async def test_what_waits_goes_on_where_it_was(toy: Toy, guarded: Guarded) -> None:
    task = asyncio.ensure_future(guarded.connect(HANDLE))
    await asyncio.sleep(0)
    toy.gate.set()
    assert await task is toy.pair[0]


async def test_what_waits_too_long_is_stopped(
    toy: Toy, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "CONNECT_DEADLINE", 0.01)
    with pytest.raises(DeadlineExceeded, match="connect"):
        await guarded.connect(HANDLE)
    assert toy.told == ["cancelled"]


async def test_faults_and_cancellations_arrive_on_both_ways(toy: Toy, guarded: Guarded) -> None:
    toy.fault = HostLimit("full")
    task = asyncio.ensure_future(guarded.connect(HANDLE))
    await asyncio.sleep(0)
    toy.gate.set()
    with pytest.raises(HostLimit, match="full"):
        await task
    with pytest.raises(HostLimit, match="full"):
        await guarded.connect(HANDLE)
    toy.gate.clear()
    task = asyncio.ensure_future(guarded.connect(HANDLE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert toy.told == ["cancelled"]


async def test_a_destroy_without_a_task_is_shared_all_the_same(toy: Toy, guarded: Guarded) -> None:
    first = asyncio.ensure_future(guarded.destroy_here(HANDLE))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(guarded.destroy(HANDLE))
    third = asyncio.ensure_future(guarded.destroy_here(HANDLE))
    await asyncio.sleep(0)
    second.cancel()  # stops nothing
    toy.gate.set()
    await asyncio.gather(first, third)
    assert toy.calls == 1
    await guarded.destroy_here(HANDLE)
    assert toy.calls == 1


async def test_a_destroy_that_fails_can_be_tried_again(toy: Toy, guarded: Guarded) -> None:
    toy.fault = HostLimit("busy")
    first = asyncio.ensure_future(guarded.destroy_here(HANDLE))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(guarded.destroy(HANDLE))
    await asyncio.sleep(0)
    toy.gate.set()
    for task in (first, second):
        with pytest.raises(HostLimit, match="busy"):
            await task
    toy.fault = None
    await guarded.destroy(HANDLE)
    assert toy.calls == 2


async def test_who_is_called_back_hears_of_the_same_end(toy: Toy, guarded: Guarded) -> None:
    ends: list[Exit] = []
    guarded.waiting(HANDLE).add_done_callback(lambda task: ends.append(task.result()))
    waiter = asyncio.ensure_future(guarded.wait(HANDLE))
    await asyncio.sleep(0)
    toy.gate.set()
    assert [await waiter] == ends == [Exit(signal=9)]
