"""Ends give way to claims, and never for long."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ringfence.control import courtesy
from ringfence.control.courtesy import AT_WORK, Courtesy


class Ends:
    """Some that begin as soon as they may, and go on when they are told to."""

    def __init__(self, line: Courtesy, count: int) -> None:
        self.line = line
        self.begun: list[int] = []
        self.gates = [asyncio.Event() for _ in range(count)]
        self.tasks = [asyncio.ensure_future(self._one(number)) for number in range(count)]

    async def _one(self, number: int) -> None:
        async with self.line.ending():
            self.begun.append(number)
            await self.gates[number].wait()

    async def all(self) -> list[int]:
        for gate in self.gates:
            gate.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.begun


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courtesy, "PATIENCE", 3600.0)
    monkeypatch.setattr(courtesy, "AFTERWARDS", 3600.0)


async def test_without_claims_nobody_stands_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(Courtesy(), 10)
    await settled()
    assert ends.begun == list(range(10))
    await ends.all()


async def test_with_claims_they_come_in_turn() -> None:
    line = Courtesy()
    with line.claim():
        ends = Ends(line, 6)
        await settled()
        assert ends.begun == [0, 1] == list(range(AT_WORK))
        ends.gates[1].set()
        await settled()
        assert ends.begun == [0, 1, 2]
    ends.gates[0].set()  # a moment afterwards it is so still
    await settled()
    assert ends.begun == [0, 1, 2, 3]
    assert await ends.all() == list(range(6))


async def test_when_the_claims_are_over_all_go(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Courtesy()
    with line.claim():
        ends = Ends(line, 9)
        await settled()
    monkeypatch.setattr(courtesy, "AFTERWARDS", 0.0)
    ends.gates[0].set()
    await settled()
    assert ends.begun == list(range(9))
    await ends.all()


async def test_one_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courtesy, "PATIENCE", 0.01)
    line = Courtesy()
    with line.claim():
        ends = Ends(line, 5)  # none of the first ends
        async with asyncio.timeout(30):
            while len(ends.begun) < 5:
                await asyncio.sleep(0.005)
        await ends.all()


async def test_who_is_cancelled_in_line_leaves_no_place() -> None:
    line = Courtesy()
    with line.claim():
        ends = Ends(line, 4)
        await settled()
        ends.tasks[2].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ends.tasks[2]
        ends.gates[0].set()
        await settled()
        assert ends.begun == [0, 1, 3]
        await ends.all()


async def test_who_is_cancelled_when_it_is_his_turn_lets_the_next_go() -> None:
    line = Courtesy()
    with line.claim():
        ends = Ends(line, 4)
        await settled()
        ends.gates[0].set()
        ends.tasks[0].add_done_callback(lambda _: ends.tasks[2].cancel())
        await settled()
        ends.gates[1].set()
        await settled()
        assert 3 in ends.begun
        await ends.all()
