"""Doors that are opened again while their rules change, or while they are closed."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from ringfence.egress.client import Doors, DoorSpec

WIDE: dict[str, Any] = {"mode": "egress", "allow": [{"host": "*.example"}]}
NARROW: dict[str, Any] = {"mode": "egress", "allow": [{"host": "a.example"}]}


class Scripted(Doors):
    """A proxy that answers to everything, and opens a door only when it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.calls: list[tuple[str, Any]] = []
        self.may = asyncio.Event()
        self.may.set()
        self._up.set()

    async def _call(self, command: str, *descriptors: int, **values: Any) -> Any:
        self.calls.append((command, values.get("network") or values.get("spec", {}).get("network")))
        if command == "open":
            await self.may.wait()
        return {"ended": 0}


@pytest.fixture
async def doors(tmp_path: Path) -> Scripted:
    made = Scripted(tmp_path)

    async def dial() -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    await made.open(DoorSpec("sb-1", network=WIDE), dial)
    return made


async def reopening(doors: Scripted) -> asyncio.Task[None]:
    doors.may.clear()
    task = asyncio.create_task(doors._open_again("sb-1"))
    while [command for command, _ in doors.calls].count("open") < 2:
        await asyncio.sleep(0)
    return task


async def test_rules_that_are_given_meanwhile_stay(doors: Scripted) -> None:
    task = await reopening(doors)
    await doors.update("sb-1", NARROW)
    await doors.remember("sb-1", ["https a.example:443"])
    doors.may.set()
    await task
    spec = doors._specs["sb-1"][0]
    assert (spec.network, spec.answers) == (NARROW, ("https a.example:443",))
    opened = max(number for number, call in enumerate(doors.calls) if call[0] == "open")
    assert ("update", NARROW) in doors.calls[opened + 1 :], "the proxy may have had them before it opened"
    before = len(doors.calls)
    await doors._open_again("sb-1")
    assert doors.calls[before:] == [("open", NARROW)]


async def test_what_is_closed_meanwhile_stays_closed(doors: Scripted) -> None:
    task = await reopening(doors)
    await doors.close("sb-1")
    doors.may.set()
    await task
    assert doors._specs == {}
    assert doors.calls[-1][0] == "close"


async def test_what_is_closed_and_opened_anew_meanwhile_stays_open(doors: Scripted) -> None:
    dial = doors._specs["sb-1"][1]
    task = await reopening(doors)
    await doors.close("sb-1", keep=True)
    anew = asyncio.create_task(doors.open(DoorSpec("sb-1", network=NARROW), dial))
    while [command for command, _ in doors.calls].count("open") < 3:
        await asyncio.sleep(0)
    doors.may.set()
    await asyncio.gather(task, anew)
    assert doors._specs["sb-1"][0].network == NARROW
    assert [command for command, _ in doors.calls[-2:]] == ["close", "open"]
