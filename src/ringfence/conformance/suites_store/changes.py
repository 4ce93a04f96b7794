"""Transactions: all of it or nothing, and counters that hold their limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ringfence.conformance.suites_store.harness import StoreKit, StoreSuite, eventually, row
from ringfence.model.errors import Conflict, InvalidRequest, LeaseLost, NotFound, QuotaExceeded
from ringfence.store.contract import Add, Change, Event, Held, Put, Remove, Store

EVENT = Event("thing", "t-1", "p", "thing.made", 1.0, {"a": 1})


class ChangeSuite(StoreSuite):
    """Several changes in one commit."""

    @pytest.mark.parametrize("durable", [False, True])
    async def test_all_of_it(self, store: Store, durable: bool) -> None:
        await store.commit(Put(row("old")), Add("gone", 5))
        rows = await store.commit(
            Put(row("t-1", labels={"a": "b"})),
            EVENT,
            Add("some", 3),
            Remove("thing", "old"),
            Put(row("t-2")),
            Add("gone", -2),
            durable=durable,
        )
        assert [(one.id, one.revision) for one in rows] == [("t-1", 1), ("t-2", 1)]
        assert [one.id for one in await store.find("thing")] == ["t-1", "t-2"]
        (event,) = await store.events()
        assert replace(event, number=0) == EVENT
        assert (await store.counter("some"), await store.counter("gone")) == (3, 3)

    @pytest.mark.parametrize(
        ("last", "error"),
        [
            (Put(row("there")), Conflict),
            (Put(row("there", revision=2)), Conflict),
            (Put(row("t-9", key="taken"), unique=True), Conflict),
            (Remove("thing", "there", 7), Conflict),
            (Add("full", 1, 10), QuotaExceeded),
            (Held("lease", "nobody"), LeaseLost),
            (Put(row(document={"x": float("nan")})), InvalidRequest),
            (Event("thing", "t", "p", "n", 0.0, {"x": float("nan")}), InvalidRequest),
        ],
        ids=range(8),
    )
    @pytest.mark.parametrize("place", [0, 3, 6])
    async def test_or_nothing(self, store: Store, last: Change, error: type[Exception], place: int) -> None:
        await store.commit(
            Put(row("there", key="taken", labels={"a": "1"})),
            Put(row("doomed")),
            Add("full", 10),
            Add("other", 1),
        )
        there = await store.get("thing", "there")
        changes: list[Change] = [
            Put(row("new", labels={"a": "1"})),
            Put(replace(there, labels={"a": "2"}))
            if not isinstance(last, Put | Remove)
            else Put(row("new2")),
            Remove("thing", "doomed"),
            EVENT,
            Add("other", 5),
            Add("fresh", 1),
        ]
        changes.insert(place, last)
        with pytest.raises(error):
            await store.commit(*changes)
        assert [one.id for one in await store.find("thing")] == ["doomed", "there"]
        assert await store.get("thing", "there") == there
        assert [one.id for one in await store.find("thing", labels={"a": "1"})] == ["there"]
        assert await store.events() == []
        assert [await store.counter(name) for name in ("full", "other", "fresh")] == [10, 1, 0]
        await store.commit(Put(row("after")))  # and nobody is in the way

    async def test_in_order(self, store: Store) -> None:
        rows = await store.commit(
            Put(row("t-1")),
            Put(row("t-1", revision=1, state="second")),
            Remove("thing", "t-1", 2),
            Put(row("t-1")),
        )
        assert [one.revision for one in rows] == [1, 2, 1]
        assert (await store.get("thing", "t-1")).state == ""
        with pytest.raises(Conflict):
            await store.commit(Put(row("t-2", revision=1)), Put(row("t-2")))

    async def test_nothing_at_all(self, store: Store) -> None:
        assert await store.commit() == []

    async def test_of_two_that_change_a_row_one_is_late(self, kit: StoreKit, store: Store) -> None:
        stores = [store, await kit.open(), await kit.open()]
        await store.commit(Put(row(document={"number": 0})))

        async def add(number: int) -> int:
            late = 0
            mine = stores[number % 3]
            while True:
                read = await mine.get("thing", "t-1")
                try:
                    await mine.commit(
                        Put(replace(read, document={"number": int(read.document["number"]) + 1}))
                    )
                except Conflict:
                    late += 1
                    continue
                return late

        await asyncio.gather(*(add(number) for number in range(30)))
        stored = await store.get("thing", "t-1")
        assert (stored.document["number"], stored.revision) == (30, 31)

    async def test_changes_in_opposite_orders_both_happen(self, kit: StoreKit, store: Store) -> None:
        other = await kit.open()

        async def back_and_forth(mine: Store, names: tuple[str, str]) -> None:
            for _ in range(40):
                await mine.commit(*(Add(name, 1) for name in names))

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(back_and_forth(store, ("a", "b")))
                group.create_task(back_and_forth(other, ("b", "a")))
        assert (await store.counter("a"), await store.counter("b")) == (240, 240)

    async def test_a_cancelled_commit_is_whole_or_not_there(self, store: Store) -> None:
        tasks = []
        for number in range(60):
            changes = (
                Put(row(f"t-{number:02}", labels={"n": "1"})),
                Add("rows", 1),
                replace(EVENT, subject=f"t-{number}"),
            )
            tasks.append(asyncio.create_task(store.commit(*changes)))
            if number % 3:
                # At every stage that a few turns of the loop can reach.
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                tasks[-1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        returned = sum(isinstance(one, list) for one in done)
        assert returned >= 20
        assert all(isinstance(one, list | asyncio.CancelledError) for one in done)
        await store.commit(Put(row("last")))

        async def settled() -> bool:  # what was under way may still be on its way
            counts = (
                await store.count("thing") - 1,
                len(await store.find("thing", labels={"n": "1"})),
                await store.counter("rows"),
                len(await store.events()),
            )
            return len(set(counts)) == 1 and counts[0] >= returned

        await eventually(settled)


class CounterSuite(StoreSuite):
    """Add, most, every."""

    async def test_it_counts(self, store: Store) -> None:
        assert await store.counter("c") == 0
        await store.commit(Add("c", 5), Add("c", 2), Add("d", 1))
        await store.commit(Add("c", -3))
        assert (await store.counter("c"), await store.counter("d")) == (4, 1)

    async def test_never_below_zero(self, store: Store) -> None:
        await store.commit(Add("c", -5))
        assert await store.counter("c") == 0
        await store.commit(Add("c", 3))
        await store.commit(Add("c", -(2**52)))
        await store.commit(Add("c", 1))
        assert await store.counter("c") == 1

    async def test_not_above_its_limit(self, store: Store) -> None:
        await store.commit(Add("c", 3, 3))
        with pytest.raises(QuotaExceeded) as refused:
            await store.commit(Add("c", 1, 3))
        assert {**refused.value.details, "value": 3} == {"counter": "c", "most": 3, "value": 3}
        assert "c" in str(refused.value)
        with pytest.raises(QuotaExceeded):
            await store.commit(Add("new", 1, 0))
        with pytest.raises(QuotaExceeded):
            await store.commit(Add("d", 2), Add("d", 2, 3))
        assert [await store.counter(name) for name in ("c", "new", "d")] == [3, 0, 0]

    async def test_less_is_never_refused(self, store: Store) -> None:
        await store.commit(Add("c", 10))
        await store.commit(Add("c", -1, 3))  # the limit became lower meanwhile
        await store.commit(Add("c", 0, 3))
        assert await store.counter("c") == 9

    @pytest.mark.parametrize("amount", [2**60, -(2**60)])
    async def test_no_overflow(self, store: Store, amount: int) -> None:
        with pytest.raises(InvalidRequest):
            await store.commit(Add("c", amount))
        await store.commit(Add("c", 2**52), Add("c", 2**52, 2**53))
        assert await store.counter("c") == 2**53

    async def test_many_at_once_stay_below(self, kit: StoreKit, store: Store) -> None:
        stores = [store, await kit.open(), await kit.open()]

        async def attempt(number: int) -> bool:
            try:
                await stores[number % 3].commit(Add("c", 1, 10), Put(row(f"t-{number}")))
            except QuotaExceeded:
                return False
            return True

        assert sum(await asyncio.gather(*map(attempt, range(40)))) == 10
        assert await store.counter("c") == await store.count("thing") == 10

    async def test_a_counter_of_a_period_begins_anew(self, store: Store) -> None:
        long = 10_000_000.0
        await store.commit(Add("long", 2, 2, every=long))
        with pytest.raises(QuotaExceeded) as refused:
            await store.commit(Add("long", 1, 2, every=long))
        assert 0 < refused.value.details["retry_after"] <= long
        assert await store.counter("long") == 2

        waits: list[float] = []

        async def let_again() -> bool:
            try:
                await store.commit(Add("short", 3, 3, every=0.2))
            except QuotaExceeded as error:
                waits.append(error.details["retry_after"])
                return False
            return True

        assert await let_again()
        await eventually(let_again)
        assert all(0 < wait <= 0.2 for wait in waits)

        async def over() -> bool:
            return await store.counter("short") == 0

        await eventually(over)

    @pytest.mark.parametrize("every", [0.0, -1.0, float("nan"), float("inf")])
    async def test_no_period(self, store: Store, every: float) -> None:
        with pytest.raises(InvalidRequest):
            await store.commit(Add("c", 1, every=every))

    async def test_a_refusal_leaves_no_row(self, store: Store) -> None:
        with pytest.raises(QuotaExceeded):
            await store.commit(Put(row()), Add("c", 1, 0))
        with pytest.raises(NotFound):
            await store.get("thing", "t-1")
