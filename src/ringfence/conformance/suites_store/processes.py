"""Several processes on one store, some of them killed in the middle."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.conformance.suites_store.harness import StoreKit, StoreSuite, row
from ringfence.store.contract import Event, Put, Store

WHO = ("a", "b", "c")


class ProcessesSuite(StoreSuite):
    """What must hold across processes."""

    async def test_a_row_has_one_taker(self, kit: StoreKit, store: Store) -> None:
        made = [f"t-{number:03}" for number in range(150)]
        await store.commit(*(Put(row(id, key="pool", state="ready")) for id in made))
        workers = await kit.workers(*(("takes", who) for who in WHO))
        for worker in workers:
            worker.go()
        taken = {who: await worker.result() for who, worker in zip(WHO, workers, strict=True)}
        while late := await store.take(
            "thing", key="pool", state="ready", into="taken", document={"by": "us"}
        ):
            taken.setdefault("us", []).append(late.id)
        assert sorted(id for ids in taken.values() for id in ids) == made
        for who, ids in taken.items():
            for id in ids:
                found = await store.get("thing", id)
                assert (found.state, found.document["by"], found.revision) == ("taken", who, 2)
        workers_took = sum(len(ids) for who, ids in taken.items() if who != "us")
        assert await store.counter("taken") == workers_took == len(await store.events(limit=1000))

    async def test_no_change_is_overwritten(self, kit: StoreKit, store: Store) -> None:
        await store.commit(Put(row("t-1", document={"number": 0})))
        workers = await kit.workers(*[("adds", "t-1", 40)] * 3)
        for worker in workers:
            worker.go()
        for worker in workers:
            await worker.result()
        found = await store.get("thing", "t-1")
        assert found.document["number"] == found.revision - 1 == await store.counter("added") == 120

    async def test_limits_and_names_hold(self, kit: StoreKit, store: Store) -> None:
        workers = await kit.workers(*[("counts", 100)] * 2, *(("names", who, 30) for who in WHO[:2]))
        counting, naming = workers[:2], workers[2:]
        for worker in counting + naming:
            worker.go()
        assert sum([await worker.result() for worker in counting]) == 100 == await store.counter("limited")
        got = [name for worker in naming for name in await worker.result()]
        assert sorted(got) == sorted(f"name-{number}" for number in range(30))

    async def test_a_lease_is_a_fence(self, kit: StoreKit, store: Store) -> None:
        await store.commit(Put(row("fenced", document={"number": 0})))
        workers = await kit.workers(*(("fences", who, 15) for who in WHO))
        for worker in workers:
            worker.go()
        assert [await worker.result() for worker in workers] == [15, 15, 15]
        assert (await store.get("thing", "fenced")).document["number"] == 45

    async def test_events_of_all(self, kit: StoreKit, store: Store) -> None:
        workers = await kit.workers(*(("events", who, 60) for who in WHO))
        for worker in workers:
            worker.go()
        seen: list[Event] = []
        while len(seen) < 360:  # reading on while they are told: nothing is ever missed behind us
            seen += await store.events(after=seen[-1].number if seen else 0, limit=50)
            await asyncio.sleep(0)
        for worker in workers:
            await worker.result()
        assert await store.events(after=seen[-1].number) == []
        for who in WHO:
            mine = [(one.data["number"], one.name) for one in seen if one.subject == who]
            assert mine == [(n, name) for n in range(60) for name in ("thing.first", "thing.second")]

    @pytest.mark.parametrize("durable", ["quick", "durable"])
    async def test_killed_in_the_middle_of_commits(self, kit: StoreKit, store: Store, durable: str) -> None:
        for attempt in range(3):
            who = [f"{attempt}{name}" for name in WHO[:2]]
            workers = await kit.workers(*(("writes", name, durable) for name in who))
            for worker in workers:
                worker.go()
            returned = {}
            for name, worker in zip(who, workers, strict=True):
                for _ in range(10 + 3 * attempt):
                    line = await worker.line()
                    assert line, "it ended by itself"
                returned[name] = int(line)
            for name, worker in zip(who, workers, strict=True):
                more = await worker.kill()
                returned[name] = int(more[-1]) if more else returned[name]
            for name in who:
                found = await store.find("thing", labels={"by": name}, limit=1_000_000)
                numbers = [one.document["number"] for one in found]
                # Everything that returned is there, and at most one that had not returned yet.
                assert numbers == list(range(len(numbers)))
                assert returned[name] + 1 <= len(numbers) <= returned[name] + 2
        rows = await store.count("thing")
        assert rows == await store.counter("written") == len(await store.events(limit=1_000_000))
        await store.commit(Put(row("after")))  # and nobody is in the way
