"""Watch: who waits for changes hears of them; open and closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ringfence.conformance.suites_store.harness import PATIENCE, StoreKit, StoreSuite, row
from ringfence.model.errors import Conflict, RingfenceError, StoreUnavailable
from ringfence.store.contract import Add, Event, Put, Remove, Store

MISSED = ("", "")


async def heard(changes: AsyncIterator[tuple[str, str]], *wanted: tuple[str, str]) -> None:
    """Wait until all of these were heard of; ``("", "")`` counts as any."""
    left = set(wanted)
    async with asyncio.timeout(PATIENCE):
        while left:
            one = await anext(changes)
            if one == MISSED:
                return
            left.discard(one)


class WatchSuite(StoreSuite):
    """Changes by whom ever."""

    async def test_our_own(self, store: Store) -> None:
        changes = store.watch()
        stored, _ = await store.commit(Put(row("t-1")), Put(row("o-1", kind="other")))
        await heard(changes, ("thing", "t-1"), ("other", "o-1"))
        await store.commit(Put(stored))
        await heard(changes, ("thing", "t-1"))
        await store.commit(Remove("thing", "t-1"))
        await heard(changes, ("thing", "t-1"))

    async def test_those_of_others(self, kit: StoreKit, store: Store) -> None:
        other = await kit.open()
        changes = store.watch()
        await other.commit(Put(row("t-1", key="k", state="a")))
        await heard(changes, ("thing", "t-1"))
        await other.take("thing", key="k", state="a", into="b", document={}, changes=(Put(row("t-2")),))
        await heard(changes, ("thing", "t-1"), ("thing", "t-2"))
        await other.commit(Remove("thing", "t-2"))
        await heard(changes, ("thing", "t-2"))

    async def test_every_one_of_many(self, kit: StoreKit, store: Store) -> None:
        other = await kit.open()
        changes = store.watch()
        await other.commit(*(Put(row(f"t-{number}")) for number in range(1000)))
        await heard(changes, *(("thing", f"t-{number}") for number in range(1000)))

    async def test_every_watcher(self, kit: StoreKit, store: Store) -> None:
        all_changes = [store.watch() for _ in range(3)] + [(await kit.open()).watch()]
        await store.commit(Put(row("t-1")))
        for changes in all_changes:
            await heard(changes, ("thing", "t-1"))

    async def test_who_waits_already(self, store: Store) -> None:
        changes = store.watch()
        waiting = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        assert not waiting.done()
        await store.commit(Put(row("t-1")))
        async with asyncio.timeout(PATIENCE):
            assert await waiting in (("thing", "t-1"), MISSED)

    async def test_only_what_happened(self, store: Store) -> None:
        await store.commit(Put(row("t-1")))
        changes = store.watch()
        await store.commit(Add("c", 1), Event("thing", "t-9", "p", "n", 0.0))
        with pytest.raises(Conflict):
            await store.commit(Put(row("t-9")), Put(row("t-1")))
        await store.commit(Put(row("t-2")))
        async with asyncio.timeout(PATIENCE):
            while (one := await anext(changes)) != ("thing", "t-2"):
                assert one in (("thing", "t-1"), MISSED)  # may repeat what was before

    async def test_a_slow_one_stands_in_nobodys_way(self, store: Store) -> None:
        slow, quick = store.watch(), store.watch()
        for start in range(0, 6000, 1000):
            await store.commit(*(Put(row(f"t-{number}")) for number in range(start, start + 1000)))
        await heard(quick, ("thing", "t-5999"))
        await store.commit(Put(row("last")))
        await heard(slow, ("thing", "last"))

    async def test_ends_with_the_store(self, store: Store) -> None:
        changes = store.watch()
        waiting = asyncio.ensure_future(anext(changes, None))
        await asyncio.sleep(0)
        await store.close()
        async with asyncio.timeout(PATIENCE):
            assert await waiting is None
            assert await anext(store.watch(), None) is None


class LifeSuite(StoreSuite):
    """Open, closed, opened again."""

    async def test_nothing_is_lost(self, kit: StoreKit) -> None:
        store = await kit.open()
        (stored,) = await store.commit(
            Put(row(labels={"a": "b"})), Add("c", 2), Event("thing", "t-1", "p", "n", 0.0)
        )
        assert await store.lease("l", "a", 300)
        await store.close()
        store = await kit.open()
        assert await store.find("thing", labels={"a": "b"}) == [stored]
        assert await store.counter("c") == 2
        assert len(await store.events()) == 1
        assert not await store.lease("l", "b", 300)

    async def test_closed_is_closed(self, store: Store) -> None:
        await store.close()
        await store.close()
        for call in (
            lambda: store.get("thing", "t-1"),
            lambda: store.find("thing"),
            lambda: store.due("thing", 1.0),
            lambda: store.count("thing"),
            lambda: store.commit(Put(row())),
            lambda: store.take("thing", key="", state="", into="x", document={}),
            lambda: store.events(),
            lambda: store.counter("c"),
            lambda: store.lease("l", "a", 1.0),
            lambda: store.release("l", "a"),
        ):
            with pytest.raises(StoreUnavailable):
                await call()

    async def test_closed_while_many_ask(self, kit: StoreKit) -> None:
        store = await kit.open()
        calls = [asyncio.ensure_future(store.commit(Put(row(f"t-{n}")), Add("c", 1))) for n in range(30)]
        await asyncio.sleep(0)
        await store.close()
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, list | RingfenceError) for one in results), results
        store = await kit.open()
        returned = sum(isinstance(one, list) for one in results)
        assert await store.count("thing") == await store.counter("c") >= returned

    async def test_many_open_it_at_once(self, kit: StoreKit) -> None:
        stores = await asyncio.gather(*(kit.open() for _ in range(6)))
        await asyncio.gather(*(store.commit(Add("c", 1)) for store in stores))
        assert await stores[0].counter("c") == 6
