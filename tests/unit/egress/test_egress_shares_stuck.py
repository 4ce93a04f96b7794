"""A project whose row in the store stands still costs no other project its share."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from ringfence.control.quotas import Quota
from ringfence.egress import shares
from ringfence.egress.sharing import Shared
from ringfence.model.errors import NotFound
from ringfence.serving.sharing import Shares
from ringfence.store.contract import Put, Row

STUCK = [f"stuck{number}" for number in range(12)]  # more than are looked after at once


class World:
    """A store, rows of which can stand still, and the doors. The clock is the test's."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.rows: dict[str, Row] = {}
        self.go = asyncio.Event()
        self.go.set()
        self.shared: dict[str, Shared] = {}

    def of(self, project: str) -> Shared:
        return self.shared.setdefault(project, Shared(lambda: self.now))

    # -- as Store

    async def get(self, kind: str, id: str) -> Row:
        if id not in self.rows:
            raise NotFound(id)
        return self.rows[id]

    async def commit(self, put: Put) -> list[Row]:
        if put.row.id in STUCK:
            await self.go.wait()
        self.rows[put.row.id] = replace(put.row, revision=put.row.revision + 1)
        return [self.rows[put.row.id]]

    # -- as Doors

    async def share_wants(self) -> dict[str, dict[str, int]]:
        return {project: shared.wants() for project, shared in self.shared.items()}

    async def share_shrink(self, project: str, amounts: Any) -> dict[str, Any]:
        return self.of(project).shrink(amounts) | {"used": [0.0] * 4}

    async def share_grant(
        self, project: str, limits: Any, amounts: Any, until: float, gain: float, elsewhere: Any
    ) -> None:
        self.of(project).grant(limits, amounts, until, gain)

    async def share_drop(self, project: str, *, cut: bool) -> dict[str, Any]:
        self.of(project).close()
        return {"open": 0, "level": 0.0}


async def test_a_row_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "EVERY", 0.01)
    world = World()
    made = Shares(world, world, "a", lambda: world.now)  # type: ignore[arg-type]
    projects = {*STUCK, "free"}
    for project in (*STUCK, "free"):
        await made.cover(project, Quota(connections=5))
    assert all(world.of(project).amount("connections") == 5 for project in projects)  # control
    world.go.clear()
    for _ in range(4):  # far beyond what a share is good for
        world.now += shares.BEAT + 1
        async with asyncio.timeout(60):
            await made.look(lambda: projects)
    assert world.of("free").amount("connections") == 5
    assert not any(world.of(project).amount("connections") for project in STUCK)  # closed, not open
    world.go.set()

    async def all_again() -> None:
        while not all(world.of(project).amount("connections") == 5 for project in projects):
            await made.look(lambda: projects)

    async with asyncio.timeout(60):
        await all_again()
    world.go.clear()
    world.now += shares.BEAT + 1
    await made.look(lambda: projects)
    monkeypatch.setattr("ringfence.serving.sharing._CLOSING", 0.05)
    await made.close()  # nothing of it goes on
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for shared in world.shared.values():
        with contextlib.suppress(RuntimeError):
            shared.close()
