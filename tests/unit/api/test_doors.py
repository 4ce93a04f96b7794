"""The doors of a service: one that can't be opened holds up no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ringfence.control.quotas import Quota
from ringfence.control.records import KIND, Sandbox
from ringfence.model.errors import LinkLost, NotFound
from ringfence.serving.doors import ServiceDoors, _Held, _network
from ringfence.store.contract import Row

NETWORK = {"mode": "egress", "allow": [{"host": "a.example"}]}


class Doors:
    """An egress proxy that waits for the first sandbox's agent, and for no other."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.given_up: list[str] = []

    async def open(self, spec: Any, dial: Any) -> None:
        self.asked.append(spec.sandbox)
        if spec.sandbox == "sb-0":
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.append(spec.sandbox)
        raise LinkLost("no more is needed here")


class Store:
    async def find(self, kind: str, **_: Any) -> list[Row]:
        policy = {"apiVersion": "ringfence/v1", "kind": "Policy", "network": NETWORK}
        return [Row(KIND, f"sb-{n}", "p", "running", document={"policy": policy}) for n in range(3)]

    async def get(self, kind: str, id: str) -> Row:
        raise NotFound(id)

    async def lease(self, name: str, owner: str, seconds: float) -> bool:
        return True

    async def release(self, name: str, owner: str) -> None:
        return None


class Control:
    def __init__(self) -> None:
        self.store = Store()
        self.placement = None


async def test_a_sandbox_that_does_not_answer_holds_up_no_other_door() -> None:
    doors = Doors()
    made = ServiceDoors(doors, Control(), "me", Path("/nowhere"))  # type: ignore[arg-type]
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(60):
            while len(set(doors.asked)) < 3:
                await asyncio.sleep(0.01)
        assert doors.asked.count("sb-0") == 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert doors.given_up == ["sb-0"], "nothing goes on behind its back"


def row(revision: int, host: str) -> Sandbox:
    network = {"mode": "egress", "allow": [{"host": host}]}
    policy = {"apiVersion": "ringfence/v1", "kind": "Policy", "network": network}
    return Sandbox.from_row(Row(KIND, "sb-1", "p", "running", document={"policy": policy}, revision=revision))


class Updated:
    """A proxy that takes its time over the first rules."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.go = asyncio.Event()

    async def update(self, sandbox: str, network: Any) -> int:
        self.hosts.append(network["allow"][0]["host"])
        if len(self.hosts) == 1:
            await self.go.wait()
        return 0

    async def close(self, sandbox: str) -> None:
        return None


async def test_a_door_follows_the_newest_row() -> None:
    doors = Updated()
    made = ServiceDoors(doors, Control(), "me", Path("/nowhere"))  # type: ignore[arg-type]
    first = row(1, "first.example")
    made._open["sb-1"] = _Held("p", _network(first) or {}, (), Quota(), (), 1, asyncio.Lock())
    slow = asyncio.create_task(made.refresh(row(5, "second.example")))
    while not doors.hosts:
        await asyncio.sleep(0)
    newest = asyncio.create_task(made.refresh(row(7, "third.example")))
    await asyncio.sleep(0.01)
    doors.go.set()
    await asyncio.gather(slow, newest)
    await made.refresh(row(6, "second.example"))  # read before, told of later
    assert doors.hosts == ["second.example", "third.example"]
    assert made._open["sb-1"].revision == 7


async def test_a_door_that_is_closed_meanwhile_is_not_kept() -> None:
    doors = Updated()
    made = ServiceDoors(doors, Control(), "me", Path("/nowhere"))  # type: ignore[arg-type]
    made._open["sb-1"] = _Held("p", _network(row(1, "a.example")) or {}, (), Quota(), (), 1, asyncio.Lock())
    slow = asyncio.create_task(made.refresh(row(5, "b.example")))
    while not doors.hosts:
        await asyncio.sleep(0)
    await made.close("sb-1")
    doors.go.set()
    await slow
    assert made._open == {}
