"""Events are kept for some days, and of each project so many; the service removes the rest by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.control.forgetting import Keeping
from ringfence.control.quotas import Quotas
from ringfence.control.service import Control
from ringfence.control.tenancy import Tenancy
from ringfence.placement.fake import FakePlacement
from ringfence.placement.memory import Machine
from ringfence.store.contract import Event, Store
from ringfence.store.opening import open_store
from support.postgres import postgres
from support.services import QUICK

__all__ = ["postgres"]
DAY = 24 * 3600.0


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    sqlite = request.param == "sqlite"
    made = await open_store(str(tmp_path / "s.db") if sqlite else request.getfixturevalue("postgres").fresh())
    yield made
    await made.close()


async def test_a_service_forgets_what_is_old_and_too_much(store: Store) -> None:
    placement = FakePlacement(machine=Machine())
    tenancy = Tenancy(store, Quotas(store, capacity=placement.capacity))
    await tenancy.first_start()
    (project, *_) = await store.find("project")
    now = time.time()
    for day in (30, 8, 6, 0):
        await store.commit(Event("thing", f"d-{day}", "another", "thing.n", now - day * DAY))
    for number in range(2500):  # more than one transaction's worth
        await store.commit(Event("thing", "t", project.id, "thing.n", now, {"n": number}))
    keeping = Keeping(days=7, most=20, every=0.05)
    control = Control(store, placement, owner_id="api-1", settings=QUICK, keeping=keeping)
    try:
        async with control, asyncio.timeout(60):
            while await store.events(project=project.id, limit=21) != await store.events(
                project=project.id, limit=20
            ) or await store.events(subject="d-8"):
                await asyncio.sleep(0.05)
            kept = await store.events(project="another", limit=100)
            assert [each.subject for each in kept] == ["d-6", "d-0"]
            told = [each.data["n"] for each in await store.events(subject="t", limit=100)]
            assert told == list(range(2500))[-len(told) :] and 1 <= len(told) <= 20
    finally:
        await tenancy.close()
        await placement.close()


async def test_for_ever_is_for_ever(store: Store) -> None:
    placement = FakePlacement(machine=Machine())
    await store.commit(Event("thing", "old", "p", "thing.n", 0.0), Event("thing", "new", "p", "thing.n", 1.0))
    control = Control(store, placement, owner_id="api-1", settings=QUICK, keeping=Keeping(days=0, most=0))
    assert await control.forgetting.forget() == 0
    assert len(await store.events()) == 2
    control.forgetting.keeping = Keeping(days=7)
    assert await control.forgetting.forget() == 1  # the newest stays
    await control.close()
    await placement.close()
