"""Quotas: each limit holds, on both stores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from ringfence.control.quotas import HOST_CPUS, HOST_MEMORY, Oversell, Quota, Quotas, Usage
from ringfence.model.errors import (
    InvalidRequest,
    NodeUnavailable,
    QuotaExceeded,
)
from ringfence.model.policy import Policy, Resources
from ringfence.placement.contract import Capacity
from ringfence.store.contract import Put, Row, Store
from ringfence.store.opening import open_store

MIB = 1024**2
NOTHING = Usage(0, 0.0, 0, 0, 0, 0)
SMALL = Resources(cpus=0.5, memory=100 * MIB, disk=50 * MIB)


@pytest_asyncio.fixture
async def store(ringfence_store_address: str) -> AsyncIterator[Store]:
    opened = await open_store(ringfence_store_address)
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def quotas(store: Store) -> AsyncIterator[Quotas]:
    made = Quotas(store, default=Quota(None, None, None, None, None, None, None))
    yield made
    await made.close()


async def test_counted_and_given_back(store: Store, quotas: Quotas) -> None:
    needs = [SMALL, Policy(), Resources(cpus=1.2345, memory=7, disk=3)]
    for need in needs:
        await store.commit(*await quotas.admission("p", need))
    had = await quotas.usage("p")
    assert (had.alive, had.cpus) == (3, 2.735)  # thousandths, rounded up
    assert had.memory == 100 * MIB + Policy().wall.resources.memory + 7
    assert had.storage == 50 * MIB + Policy().wall.resources.disk + 3
    assert await store.counter(HOST_MEMORY) == had.memory
    assert await quotas.usage("q") == NOTHING
    for need in needs:
        await store.commit(*await quotas.release("p", need))
    assert await quotas.usage("p") == NOTHING
    assert (await store.counter(HOST_MEMORY), await store.counter(HOST_CPUS)) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"alive": 2}, "sandboxes of p"),
        ({"cpus": 1.25}, "CPUs of p"),
        ({"memory": 250 * MIB}, "memory of p"),
        ({"storage": 120 * MIB}, "storage of p"),
        ({"creates": 2}, "creates a minute of p"),
    ],
)
async def test_each_limit(store: Store, quotas: Quotas, limits: dict[str, Any], word: str) -> None:
    await quotas.set("p", limits)
    while "creates" in limits and time.time() % 60 > 30:  # its minutes are the clock's
        await asyncio.sleep(0.1)
    for _ in range(2):
        await store.commit(*await quotas.admission("p", SMALL))
    with pytest.raises(QuotaExceeded, match=word) as refused:
        await store.commit(*await quotas.admission("p", SMALL), Put(Row("sandbox", "sb-1")))
    assert ("retry_after" in refused.value.details) == ("creates" in limits)
    assert await store.count("sandbox") == 0
    assert (await quotas.usage("p")).alive == 2
    await store.commit(*await quotas.admission("q", SMALL))  # another project's is its own
    await store.commit(*await quotas.release("p", SMALL))
    if "creates" not in limits:  # what was made was made
        await store.commit(*await quotas.admission("p", SMALL))


async def test_storage_and_pools(store: Store, quotas: Quotas) -> None:
    await quotas.set("p", {"storage": 100, "pool": 5})
    await store.commit(*await quotas.storage("p", 60), *await quotas.pool("p", 5))
    with pytest.raises(QuotaExceeded, match="storage of p"):
        await store.commit(*await quotas.storage("p", 41))
    with pytest.raises(QuotaExceeded, match="pool members of p"):
        await store.commit(*await quotas.pool("p", 1))
    assert await quotas.usage("p") == replace(NOTHING, storage=60, pool=5)
    await store.commit(*await quotas.storage("p", -60), *await quotas.pool("p", -2))
    await store.commit(*await quotas.storage("p", 100), *await quotas.pool("p", 2))


async def test_members_of_pools_are_the_machines_until_somebody_claims_them(
    store: Store, quotas: Quotas
) -> None:
    await quotas.set("p", {"alive": 1})
    await store.commit(*await quotas.admission("", SMALL))
    await store.commit(*await quotas.admission("", SMALL))
    assert await store.counter(HOST_MEMORY) == 200 * MIB
    await store.commit(*await quotas.claim("p", SMALL))
    assert await store.counter(HOST_MEMORY) == 200 * MIB
    assert (await quotas.usage("p")).memory == 100 * MIB
    with pytest.raises(QuotaExceeded):
        await store.commit(*await quotas.claim("p", SMALL))
    await store.commit(*await quotas.release("p", SMALL))
    await store.commit(*await quotas.release("", SMALL))
    assert await store.counter(HOST_MEMORY) == await store.counter(HOST_CPUS) == 0


async def test_the_machines_are_oversold_so_far_and_no_further(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.control.quotas._CAPACITY_LIFE", 600.0)
    asked = 0

    async def capacity() -> Capacity:
        nonlocal asked
        asked += 1
        return Capacity(cpus=2.0, memory=300 * MIB, disk=0, sandboxes=0)

    quotas = Quotas(store, capacity=capacity, oversell=Oversell(cpus=1.0, memory=1.0))
    for number in range(3):
        await store.commit(*await quotas.admission(f"p{number}", SMALL))
    with pytest.raises(QuotaExceeded, match="memory of the machines"):
        await store.commit(*await quotas.admission("p9", SMALL))
    light = replace(SMALL, memory=0)
    await store.commit(*await quotas.admission("p9", light))
    with pytest.raises(QuotaExceeded, match="CPUs of the machines"):
        await store.commit(*await quotas.admission("p8", light))
    assert asked == 1
    await quotas.close()
    twice = Quotas(store, capacity=capacity, oversell=Oversell(cpus=2.0, memory=2.0))
    for _ in range(3):
        await store.commit(*await twice.admission("p9", SMALL))
    with pytest.raises(QuotaExceeded, match="memory of the machines"):
        await store.commit(*await twice.admission("p9", SMALL))
    await twice.close()


async def test_nobody_is_let_in_by_a_guess(store: Store) -> None:
    async def capacity() -> Capacity:
        raise NodeUnavailable("away")

    quotas = Quotas(store, capacity=capacity)
    with pytest.raises(NodeUnavailable):
        await quotas.admission("p", SMALL)
    await quotas.release("p", SMALL)  # ending needs nobody's leave
    await quotas.close()


async def test_setting_limits(store: Store, quotas: Quotas) -> None:
    other = Quotas(store)
    assert (await other.of("p")).alive == Quota().alive
    assert (await quotas.set("p", {"alive": 7, "cpus": 2})).alive == 7
    made = await quotas.set("p", {"cpus": None})
    assert (made.alive, made.cpus) == (7, None)
    async with asyncio.timeout(60):
        while (await other.of("p")).alive != 7:  # heard of in every process
            await asyncio.sleep(0.01)
    assert (await other.of("p")).memory == Quota().memory  # what nobody set is the default
    for wrong in (
        {"alive": -1},
        {"alive": 1.5},
        {"alive": "7"},
        {"alive": True},
        {"cpus": float("nan")},
        {"cpus": float("inf")},
        {"memory": 2**60},
        {"burst": None},
        {"nothing": 1},
        {"alive\0": 1},
        {"alive": [1]},
    ):
        with pytest.raises(InvalidRequest):
            await quotas.set("p", wrong)
    assert await quotas.of("p") == made
    assert [event.name for event in await store.events(project="p")] == ["quota.changed"] * 2
    await other.close()


async def test_a_lower_limit_ends_nobody_and_lets_nobody_in(store: Store, quotas: Quotas) -> None:
    for _ in range(3):
        await store.commit(*await quotas.admission("p", SMALL))
    await quotas.set("p", {"alive": 1})
    with pytest.raises(QuotaExceeded):
        await store.commit(*await quotas.admission("p", SMALL))
    for left in (2, 1, 0):
        await store.commit(*await quotas.release("p", SMALL))
        assert (await quotas.usage("p")).alive == left
    await store.commit(*await quotas.admission("p", SMALL))


async def test_many_at_once_stay_below(ringfence_store_address: str) -> None:
    stores = [await open_store(ringfence_store_address) for _ in range(3)]
    all_quotas = [Quotas(store) for store in stores]
    await all_quotas[0].set("p", {"alive": 10})

    async def create(number: int) -> bool:
        store, quotas = stores[number % 3], all_quotas[number % 3]
        row = Row("sandbox", f"sb-{number:02}", "p", "running")
        try:
            await store.commit(Put(row), *await quotas.admission("p", SMALL))
        except QuotaExceeded:
            return False
        return True

    # All have heard of the limit before they begin.
    async with asyncio.timeout(60):
        while any([(await quotas.of("p")).alive != 10 for quotas in all_quotas]):
            await asyncio.sleep(0.01)
    assert sum(await asyncio.gather(*map(create, range(40)))) == 10
    assert await stores[0].count("sandbox") == 10 == (await all_quotas[0].usage("p")).alive
    for quotas, store in zip(all_quotas, stores, strict=True):
        await quotas.close()
        await store.close()
