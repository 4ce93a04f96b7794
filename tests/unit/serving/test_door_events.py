"""What one sandbox's door tells holds up nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

from ringfence.model.errors import WrongState
from ringfence.serving.door_events import DoorEvents


class World:
    """Doors, and a control plane with one sandbox that is slow to pause."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.told = events
        self.go = asyncio.Event()
        self.pauses: list[str] = []
        self.kept: list[str] = []
        self.written: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.core = self.powers = self

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        for event in self.told:
            yield event

    async def get(self, id: str) -> Any:
        return SimpleNamespace(id=id, project="p")

    def event(self, name: str, id: str, project: str, **_: Any) -> str:
        return f"{name} {id}"

    async def commit(self, event: str) -> None:
        self.written.append(event)

    def task(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def whole(self, work: Any) -> None:
        await self.task(work)

    async def pause(self, sandbox: Any) -> None:
        self.pauses.append(sandbox.id)
        await self.go.wait()
        raise WrongState("it has ended meanwhile")

    async def keep(self, event: Mapping[str, Any]) -> None:
        if "remembered" in event:
            self.kept.append(str(event["sandbox"]))


async def test_a_pause_that_takes_long_holds_up_no_other_event() -> None:
    over = {"event": "egress.over_budget", "sandbox": "slow", "pause": True}
    answered = {"event": "egress.answered", "sandbox": "other", "remembered": {}}
    world = World([over, over, {**over, "sandbox": "third"}, answered])
    async with asyncio.timeout(60):
        await DoorEvents(world, world, world.keep).run()  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert world.kept == ["other"] and world.written[-1] == "egress_answered other"
    assert sorted(world.pauses) == ["slow", "third"]  # once each, and both under way
    world.go.set()
    assert await asyncio.gather(*world.tasks) == [None, None]  # an error ends nothing
