"""Quotas: each limit holds, and counters are the sum of what lives, whatever failed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.control.quotas import HOST_CPUS, HOST_MEMORY, Oversell, Quota, Quotas, Usage
from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    NodeUnavailable,
    QuotaExceeded,
    StoreUnavailable,
)
from ringfence.model.policy import Policy, Resources
from ringfence.placement.contract import Capacity
from ringfence.store.contract import Put, Row, Store
from ringfence.store.opening import open_store
from ringfence.store.sqlite import SqliteStore

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


async def test_the_machines_are_oversold_so_far_and_no_further(store: Store) -> None:
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


# --- any sequence -------------------------------------------------------------------------------------------

PROJECTS = ("p", "q")
_sizes = st.builds(
    Resources,
    cpus=st.sampled_from([0.1, 0.25, 1 / 3, 1, 2.5]),
    memory=st.integers(1, 50),
    disk=st.integers(1, 50),
)
_failures = st.sampled_from(["", "", "", "conflict", "cancelled", "locked"])
_steps = st.one_of(
    st.tuples(st.just("create"), st.sampled_from(PROJECTS), _sizes, _failures),
    st.tuples(st.just("warm"), st.just(""), _sizes, _failures),
    st.tuples(st.just("claim"), st.sampled_from(PROJECTS), st.none(), _failures),
    st.tuples(st.just("end"), st.integers(0, 30), st.none(), _failures),
    st.tuples(st.just("volume"), st.sampled_from(PROJECTS), st.integers(1, 50), _failures),
    st.tuples(st.just("unvolume"), st.integers(0, 30), st.none(), _failures),
    st.tuples(
        st.just("limit"),
        st.sampled_from(PROJECTS),
        st.fixed_dictionaries(
            {},
            optional={
                "alive": st.integers(0, 5),
                "memory": st.integers(0, 200),
                "storage": st.integers(0, 200),
            },
        ),
        st.just(""),
    ),
    st.tuples(st.just("reopen"), st.just(""), st.none(), st.just("")),
)


class World:
    """Sandboxes and volumes as rows, made and ended as a service does it, with failures on the way."""

    def __init__(self, address: str, who: str = "", busy: float = 0.01) -> None:
        self.address = address
        self.who = who
        self.busy = busy
        self.made = 0

    async def open(self) -> None:
        if self.address.startswith("postgresql:"):
            self.store: Store = await open_store(self.address)
        else:
            self.store = await SqliteStore.open(self.address, busy=self.busy)
        none = Quota(None, None, None, None, None, None, None)
        self.quotas = Quotas(self.store, default=none, capacity=self.capacity, oversell=Oversell(1.0, 1.0))

    async def capacity(self) -> Capacity:
        return Capacity(cpus=6.0, memory=300, disk=0, sandboxes=0)

    async def close(self) -> None:
        await self.quotas.close()
        await self.store.close()

    async def commit(self, failure: str, *changes: Any) -> None:
        """One transaction, or one that fails in the asked way."""
        if failure == "conflict":
            changes = (*changes, Put(Row("sandbox", "sb-nothing", revision=7)))
        with contextlib.ExitStack() as stack:
            if failure == "locked":
                other = stack.enter_context(closing(sqlite3.connect(self.address, isolation_level=None)))
                other.execute("BEGIN IMMEDIATE")
            task = asyncio.create_task(self.store.commit(*changes))
            if failure == "cancelled":
                for _ in range(self.made % 4):
                    await asyncio.sleep(0)
                task.cancel()
            with contextlib.suppress(QuotaExceeded, Conflict, StoreUnavailable, asyncio.CancelledError):
                await task

    async def step(self, what: str, whom: Any, how: Any, failure: str) -> None:
        self.made += 1
        if what == "create" or what == "warm":
            document = {"cpus": how.cpus, "memory": how.memory, "disk": how.disk}
            row = Row("sandbox", f"sb-{self.made:04}{self.who}", whom, "alive", document=document)
            await self.commit(failure, Put(row), *await self.quotas.admission(whom, how))
        elif what == "claim":
            warm = await self.store.find("sandbox", project="", states=["alive"], limit=1)
            for row in warm:
                need = Resources(**row.document)
                await self.commit(
                    failure, Put(replace(row, project=whom)), *await self.quotas.claim(whom, need)
                )
        elif what == "end":
            alive = await self.store.find("sandbox", states=["alive"])
            for row in alive[whom % len(alive) :][:1] if alive else []:
                less = await self.quotas.release(row.project, Resources(**row.document))
                # Twice, as two processes would that both believe it is theirs to do: once is let.
                await self.commit(failure, Put(replace(row, state="ended")), *less)
                await self.commit("", Put(replace(row, state="ended")), *less)
        elif what == "volume":
            row = Row("volume", f"vol-{self.made:04}{self.who}", whom, document={"size": how})
            await self.commit(failure, Put(row), *await self.quotas.storage(whom, how))
        elif what == "unvolume":
            volumes = await self.store.find("volume", states=[""])
            for row in volumes[whom % len(volumes) :][:1] if volumes else []:
                less = await self.quotas.storage(row.project, -row.document["size"])
                await self.commit(failure, Put(replace(row, state="gone")), *less)
        elif what == "limit":
            with contextlib.suppress(StoreUnavailable):  # 10 ms are soon over on a busy machine
                await self.quotas.set(whom, how)
        else:
            await self.close()
            await self.open()

    async def holds(self) -> None:
        """Every counter is the sum of what lives, and the machines are not oversold."""
        rows = await self.store.find("sandbox", states=["alive"], limit=1000)
        needs = [(row.project, Resources(**row.document)) for row in rows]
        volumes = await self.store.find("volume", states=[""], limit=1000)
        for project in PROJECTS:
            mine = [need for owner, need in needs if owner == project]
            usage = await self.quotas.usage(project)
            assert usage.alive == len(mine)
            assert round(usage.cpus * 1000) == sum(_up(need.cpus) for need in mine)
            assert usage.memory == sum(need.memory for need in mine)
            stored = sum(row.document["size"] for row in volumes if row.project == project)
            assert usage.storage == sum(need.disk for need in mine) + stored
        assert await self.store.counter(HOST_MEMORY) == sum(need.memory for _, need in needs) <= 300
        assert await self.store.counter(HOST_CPUS) == sum(_up(need.cpus) for _, need in needs) <= 6000


def _up(cpus: float) -> int:
    return {0.1: 100, 0.25: 250, 1 / 3: 334, 1: 1000, 2.5: 2500}[cpus]


@settings(max_examples=40)
@given(st.lists(_steps, min_size=5, max_size=40))
def test_counters_are_the_sum_of_what_lives(steps: list[tuple[str, Any, Any, str]]) -> None:
    async def run(folder: Path) -> None:
        world = World(str(folder / "store.db"))
        await world.open()
        try:
            for step in steps:
                await world.step(*step)
                await world.holds()
        finally:
            await world.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))


async def test_and_with_many_at_once(ringfence_store_address: str) -> None:
    # Several processes end, claim and change the same things at the same time; what is late is refused.
    address = ringfence_store_address.removeprefix("sqlite://")
    worlds = [World(address, who, busy=60.0) for who in "abc"]
    for world in worlds:
        await world.open()
    randoms = random.Random(7)
    kinds = ["create"] * 4 + ["warm", "claim", "claim", "end", "end", "end", "volume", "unvolume"]

    async def live(world: World) -> None:
        for _ in range(40):
            what = randoms.choice(kinds)
            whom: Any = randoms.choice(PROJECTS) if what in ("create", "claim", "volume") else ""
            if what in ("end", "unvolume"):
                whom = randoms.randrange(30)
            how: Any = randoms.randrange(1, 50) if what == "volume" else None
            if what in ("create", "warm"):
                how = Resources(cpus=randoms.choice([0.1, 0.25, 1]), memory=randoms.randrange(1, 50), disk=3)
            await world.step(what, whom, how, randoms.choice(["", "", "", "conflict", "cancelled"]))

    try:
        await asyncio.gather(*(live(world) for world in worlds for _ in range(2)))
        # A cancelled change may still be on its way: whoever writes after it comes after it.
        await asyncio.gather(*(world.store.commit(Put(Row("last", world.who))) for world in worlds))
        assert await worlds[0].store.count("sandbox", states=["alive"]) > 0
        assert await worlds[0].store.count("sandbox", states=["ended"]) > 0

        async def settled() -> bool:
            try:
                await worlds[0].holds()
            except AssertionError:
                return False
            return True

        deadline = time.monotonic() + 60
        while not await settled() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await worlds[0].holds()
    finally:
        for world in worlds:
            await world.close()
