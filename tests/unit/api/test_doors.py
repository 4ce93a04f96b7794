"""The doors of a service: one that can't be opened holds up no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ringfence.control.records import KIND
from ringfence.model.errors import LinkLost, NotFound
from ringfence.serving.doors import ServiceDoors
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
