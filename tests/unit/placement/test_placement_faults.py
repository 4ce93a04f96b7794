"""Scripted faults do what they say, and what they leave is what a real fault leaves."""

from __future__ import annotations

import asyncio
import time

import pytest

from ringfence.model.errors import HostLimit, InvalidRequest, NodeUnavailable, StartFailed
from ringfence.model.ids import new_id
from ringfence.placement.contract import Happened, PlacedSpec
from ringfence.placement.fake import FakePlacement, Fault, Faults


def spec() -> PlacedSpec:
    return PlacedSpec(id=new_id("sb"), policy={})


async def test_refused_and_lost_calls_do_nothing() -> None:
    placement = FakePlacement(Faults([Fault("start", "refuse"), Fault("start", "lost")]))
    wanted = spec()
    with pytest.raises(HostLimit):
        await placement.start(wanted)
    with pytest.raises(NodeUnavailable):
        await placement.start(wanted)
    assert await placement.list() == []
    assert (await placement.start(wanted)).state == "running"  # used up
    assert placement.faults.calls["start"] == 3
    await placement.close()


async def test_errors_of_ones_own() -> None:
    placement = FakePlacement(Faults([Fault("*", "refuse", times=2, error=InvalidRequest("mine"))]))
    for call in (placement.list, placement.capacity):
        with pytest.raises(InvalidRequest, match="mine"):
            await call()
    assert await placement.list() == []
    await placement.close()


async def test_lost_answers_and_partial_starts_have_happened() -> None:
    faults = Faults([Fault("start", "lost_answer"), Fault("start", "partial", after=1)])
    placement = FakePlacement(faults)
    first, second, third = spec(), spec(), spec()
    with pytest.raises(NodeUnavailable):
        await placement.start(first)
    await placement.start(second)
    with pytest.raises(StartFailed):
        await placement.start(third)
    assert {each.id for each in await placement.list()} == {first.id, second.id, third.id}
    await placement.start(first)
    assert placement.machine.starts[first.id] == 1  # never doubled
    await placement.close()


async def test_slow_and_hanging_calls() -> None:
    placement = FakePlacement(Faults([Fault("list", "slow", seconds=0.01), Fault("list", "hang", times=-1)]))
    assert await placement.list() == []
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await placement.list()
    await placement.close()


async def test_a_node_that_goes_and_comes_back() -> None:
    placement = FakePlacement()
    wanted = spec()
    await placement.start(wanted)
    seen: asyncio.Queue[Happened] = asyncio.Queue()

    async def collect() -> None:
        async for event in placement.happened():
            seen.put_nowait(event)

    task = asyncio.create_task(collect())
    async with asyncio.timeout(60):
        assert (await seen.get()).name == "back"
        placement.go_down()
        assert (await seen.get()).name == "lost"
        for call in (placement.list(), placement.destroy(wanted.id), placement.get(wanted.id)):
            with pytest.raises(NodeUnavailable):
                await call
        placement.machine.end(wanted.id, "runtime_crash")  # missed by who listens: the list is the truth
        placement.come_back()
        assert (await seen.get()).name == "back"
    end = (await placement.get(wanted.id)).end
    assert end is not None
    assert end["cause"] == "runtime_crash"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await placement.close()


async def test_deadlines_of_a_closed_machine_do_not_fire() -> None:
    placement = FakePlacement()
    wanted = spec()
    await placement.start(wanted)
    await placement.bind(wanted.id, deadline=time.time() + 3600)
    await placement.close()
    assert placement.machine.sandboxes[wanted.id].placed.state == "running"


def test_faults_that_are_none() -> None:
    with pytest.raises(ValueError, match="no fault"):
        Fault("start", "explode")
