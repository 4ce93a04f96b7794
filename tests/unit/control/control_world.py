from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.control.core import Settings, stopped
from ringfence.control.records import KIND, MEMBERS, CreateSandbox, Sandbox
from ringfence.control.service import Control
from ringfence.model.policy import Limits, Policy
from ringfence.model.states import State
from ringfence.placement.fake import FakePlacement, Fault, Faults
from ringfence.placement.memory import Machine
from ringfence.store.contract import Store
from ringfence.store.opening import open_store
from support.services import ALICE, QUICK

SECONDS = float(os.environ.get("RINGFENCE_TEST_PATIENCE", "60"))


class World:
    """One store, one machine, and any number of orchestrators: each as in a process of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.machine = Machine()
        self.faults = Faults()
        self.controls: list[Control] = []
        self._stack = AsyncExitStack()

    async def control(self, owner: str = "api-1", **settings: Any) -> Control:
        """Another orchestrator, at work."""
        store = await open_store(self.url)
        placement = FakePlacement(self.faults, self.machine)
        known: Settings = replace(QUICK, **settings)
        control = Control(store, placement, owner_id=owner, settings=known)
        self.controls.append(control)
        await control.start()
        return control

    async def crash(self, control: Control) -> None:
        """As `kill -9`: what it was doing stops in the middle, nothing is given back or said."""
        self.controls.remove(control)
        tasks = [*control._background, *control.core._tasks]
        release, control.store.release = control.store.release, _nothing  # type: ignore[method-assign]
        commit, control.store.commit = control.store.commit, _nothing  # type: ignore[method-assign]
        await stopped(tasks)
        control.store.release, control.store.commit = release, commit  # type: ignore[method-assign]
        if control._quotas is not None:
            await control._quotas.close()
        await control.placement.close()
        await control.store.close()

    async def close(self) -> None:
        """End everything."""
        for control in self.controls:
            await control.close()
            await control.placement.close()
            await control.store.close()
        self.machine.close()

    # -- what is true at the end of every test

    async def settled(self, control: Control) -> None:
        """Store and machine agree: all that lives is owned, all that is owned lives, once."""

        async def agree() -> bool:
            rows = await rows_of(control.store)
            living = {row.id for row in rows if row.state in (State.RUNNING, State.PAUSED, State.WARM)}
            moving = [row for row in rows if not row.final and row.id not in living]
            return not moving and living == set(self.machine.sandboxes)

        await until(agree)
        destroys = self.machine.destroys
        assert all(starts - destroys.get(id, 0) <= 1 for id, starts in self.machine.starts.items())

    async def counted(self, control: Control) -> None:
        """Counters say what is true."""
        alive = [row for row in await rows_of(control.store) if not row.final and row.project == "default"]
        assert control._quotas is not None
        usage = await control._quotas.usage("default")
        assert usage.alive == len(alive)


async def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


async def rows_of(store: Store) -> list[Sandbox]:
    return [Sandbox.from_row(row) for row in await store.find(KIND, limit=10_000)]


async def until(check: Callable[[], Awaitable[Any]], seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (found := await check()):
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.01)
    return found


async def state_of(control: Control, id: str, *states: State) -> Sandbox:
    """The sandbox once it is in one of these states."""

    async def there() -> Sandbox | None:
        sandbox = Sandbox.from_row(await control.store.get(KIND, id))
        return sandbox if sandbox.state in states else None

    found: Sandbox = await until(there)
    return found


def asked(
    *, timeout: float = 3600, idle: float | None = None, on_idle: Any = "pause", **changes: Any
) -> CreateSandbox:
    policy = Policy().with_door(limits=Limits(timeout=timeout, idle=idle, on_idle=on_idle))
    return CreateSandbox(policy=changes.pop("policy", policy), **changes)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(str(tmp_path / "store.db"))
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def control(world: World) -> Control:
    return await world.control()


__all__ = ["ALICE", "MEMBERS", "Fault", "World", "asked", "control", "rows_of", "state_of", "until", "world"]
