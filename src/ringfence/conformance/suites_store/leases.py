"""Leases and fencing; events and their numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ringfence.conformance.suites_store.harness import StoreKit, StoreSuite, eventually, row
from ringfence.model.errors import InvalidRequest, LeaseLost
from ringfence.store.contract import Add, Event, Held, Put, Store


class LeaseSuite(StoreSuite):
    """The right to act."""

    async def test_one_owner(self, kit: StoreKit, store: Store) -> None:
        other = await kit.open()
        assert await store.lease("l", "a", 300)
        assert await store.lease("l", "a", 300)  # renewed
        assert not await other.lease("l", "b", 300)
        assert await other.lease("m", "b", 300)  # another one
        assert await store.lease("l", "a", 300)

    async def test_given_back(self, store: Store) -> None:
        await store.lease("l", "a", 300)
        await store.release("l", "b")  # not his
        assert not await store.lease("l", "b", 300)
        await store.release("l", "a")
        await store.release("l", "a")
        assert await store.lease("l", "b", 300)
        assert not await store.lease("l", "a", 300)

    async def test_its_time_ends(self, store: Store) -> None:
        assert await store.lease("l", "a", 0.05)

        async def free() -> bool:
            return await store.lease("l", "b", 300)

        await eventually(free)
        assert not await store.lease("l", "a", 300)
        await store.release("l", "a")  # the former owner ends nothing
        assert not await store.lease("l", "a", 300)

    async def test_renewed_for_shorter(self, store: Store) -> None:
        assert await store.lease("l", "a", 300)
        assert await store.lease("l", "a", 0.01)

        async def free() -> bool:
            return await store.lease("l", "b", 300)

        await eventually(free)

    async def test_of_many_one_gets_it(self, kit: StoreKit, store: Store) -> None:
        stores = [store, await kit.open(), await kit.open()]
        got = await asyncio.gather(*(stores[n % 3].lease("l", f"o-{n}", 300) for n in range(24)))
        assert sum(got) == 1

    async def test_only_while_held(self, store: Store) -> None:
        with pytest.raises(LeaseLost):
            await store.commit(Held("l", "a"), Put(row()))
        await store.lease("l", "a", 300)
        await store.commit(Held("l", "a"), Put(row(), unique=True))
        with pytest.raises(LeaseLost):
            await store.commit(Add("c", 1), Held("l", "b"))
        await store.release("l", "a")
        await store.lease("l", "b", 300)
        with pytest.raises(LeaseLost) as lost:
            await store.commit(Add("c", 1), Held("l", "a"))
        assert lost.value.details["lease"] == "l"
        await store.commit(Add("c", 1), Held("l", "b"))
        assert await store.counter("c") == 1

    async def test_what_is_over_is_not_held(self, store: Store) -> None:
        assert await store.lease("l", "a", 0.01)

        async def lost() -> bool:
            try:
                await store.commit(Held("l", "a"))
            except LeaseLost:
                return True
            return False

        await eventually(lost)
        assert await store.lease("l", "a", 300)
        await store.commit(Held("l", "a"))

    @pytest.mark.parametrize(("owner", "seconds"), [("", 1.0), ("a\0", 1.0), ("a", float("nan"))])
    async def test_no_lease(self, store: Store, owner: str, seconds: float) -> None:
        with pytest.raises(InvalidRequest):
            await store.lease("l", owner, seconds)


class EventSuite(StoreSuite):
    """What happened, in order."""

    async def test_oldest_first(self, store: Store) -> None:
        for number in range(10):
            await store.commit(
                Event(
                    "thing", f"t-{number % 2}", "pq"[number % 3 == 0], "thing.n", float(number), {"n": number}
                ),
                Event("thing", "both", "p", "thing.m", float(number), {"n": number}),
            )
        events = await store.events()
        assert [(one.name[-1], one.data["n"]) for one in events] == [
            (name, number) for number in range(10) for name in "nm"
        ]
        numbers = [one.number for one in events]
        assert numbers == sorted(set(numbers))
        assert numbers[0] > 0
        assert await store.events(limit=3) == events[:3]
        assert await store.events(after=numbers[4]) == events[5:]
        assert await store.events(after=numbers[4], limit=2) == events[5:7]
        assert await store.events(after=numbers[-1]) == []
        assert await store.events(limit=0) == []
        assert await store.events(subject="t-1") == [one for one in events if one.subject == "t-1"]
        assert await store.events(project="q") == [one for one in events if one.project == "q"]
        both = await store.events(project="q", subject="t-1", after=numbers[2], limit=1)
        assert both == [e for e in events[3:] if (e.project, e.subject) == ("q", "t-1")][:1]
        assert await store.events(subject="nothing") == []

    async def test_the_old_are_forgotten(self, store: Store) -> None:
        for number in range(10):
            await store.commit(Event("thing", "t", "p", "thing.n", float(number), {"n": number}))
        assert await store.forget_before(0.0) == 0
        assert await store.forget_before(3.0) == 3
        assert await store.forget_before(6.0, limit=2) == 2
        left = await store.events()
        assert [one.data["n"] for one in left] == [5, 6, 7, 8, 9]
        # The newest stays, and numbers go on.
        assert await store.forget_before(1e12) == 4
        (last,) = await store.events()
        assert last == left[-1]
        await store.commit(Event("thing", "t", "p", "thing.n", 10.0))
        assert (await store.events())[-1].number > last.number

    async def test_of_a_project_only_so_many_are_kept(self, store: Store) -> None:
        for number in range(10):
            await store.commit(
                Event("thing", "t", "p", "thing.n", float(number), {"n": number}),
                Event("thing", "t", "q", "thing.n", float(number), {"n": number}),
            )
        assert await store.forget_beyond("p", 10) == 0
        assert await store.forget_beyond("p", 4, limit=5) == 5
        assert await store.forget_beyond("p", 4) == 1
        assert await store.forget_beyond("p", 4) == 0
        assert await store.forget_beyond("nobody's", 1) == 0
        assert [one.data["n"] for one in await store.events(project="p")] == [6, 7, 8, 9]
        assert len(await store.events(project="q")) == 10

    async def test_what_is_told_is_what_is_read(self, store: Store) -> None:
        told = Event("thing", "t'\"%", "p", "ü", 1e9 + 0.25, {"\0": ["\ud800", 1.5, None]})
        await store.commit(told)
        (read,) = await store.events()
        assert replace(read, number=0) == told

    async def test_who_reads_on_misses_nothing(self, kit: StoreKit, store: Store) -> None:
        # Numbers that are given before the commit would become visible out of order.
        stores = [store, await kit.open(), await kit.open()]
        done = False

        async def tell(number: int) -> None:
            for count in range(40):
                await stores[number % 3].commit(
                    Event("thing", f"t-{number}", "p", "thing.n", 0.0, {"n": count}), Add("told", 1)
                )

        seen: list[Event] = []

        async def follow() -> None:
            while True:
                last = done
                more = await store.events(after=seen[-1].number if seen else 0, limit=7)
                seen.extend(more)
                if last and not more:
                    return
                await asyncio.sleep(0)

        following = asyncio.create_task(follow())
        await asyncio.gather(*map(tell, range(6)))
        done = True
        await following
        assert sorted((one.subject, one.data["n"]) for one in seen) == [
            (f"t-{number}", count) for number in range(6) for count in range(40)
        ]
        for number in range(6):  # and each teller's in his own order
            assert [one.data["n"] for one in seen if one.subject == f"t-{number}"] == list(range(40))
