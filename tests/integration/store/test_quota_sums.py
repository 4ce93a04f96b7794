"""Counters are the sum of what lives, after any sequence of changes and failures, by one process or more."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.control.quotas import HOST_CPUS, HOST_MEMORY, Oversell, Quota, Quotas
from ringfence.model.errors import Conflict, QuotaExceeded, StoreUnavailable
from ringfence.model.policy import Resources
from ringfence.placement.contract import Capacity
from ringfence.store.contract import Put, Row, Store
from ringfence.store.opening import open_store
from ringfence.store.sqlite import SqliteStore

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
