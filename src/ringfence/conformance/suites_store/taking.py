"""Take: a row has one taker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ringfence.conformance.suites_store.harness import StoreKit, StoreSuite, row
from ringfence.model.errors import Conflict, InvalidRequest, LeaseLost, QuotaExceeded
from ringfence.store.contract import Add, Event, Held, Put, Remove, Row, Store

BY: dict[str, Any] = {"key": "pool", "state": "ready", "into": "taken"}


def member(id: str, **fields: Any) -> Put:
    """One that may be taken."""
    return Put(row(id, **{"key": "pool", "state": "ready", **fields}))


class TakeSuite(StoreSuite):
    """Claims of pool members."""

    async def test_the_oldest_of_that_key_and_state(self, store: Store) -> None:
        await store.commit(
            member("t-1", key="other"),
            member("t-2", state="taken"),
            member("t-3", created=3.0),
            member("t-4", created=2.0),
            member("t-5", created=2.0),
            Put(row("t-0", kind="other", key="pool", state="ready")),
        )
        taken = [await store.take("thing", document={}, **BY) for _ in range(4)]
        assert [one.id if one else None for one in taken] == ["t-4", "t-5", "t-3", None]

    async def test_into_another_state(self, store: Store) -> None:
        await store.commit(
            member(
                "t-1", project="p", due=5.0, labels={"a": "b"}, document={"a": {"x": 1}, "b": [1], "c": "\0"}
            )
        )
        taken = await store.take("thing", document={"a": {"y": 2}, "d": None, "e\0": "\ud800"}, **BY)
        assert taken == row(
            "t-1",
            key="pool",
            state="taken",
            project="p",
            due=5.0,
            labels={"a": "b"},
            revision=2,
            document={"a": {"y": 2}, "b": [1], "c": "\0", "d": None, "e\0": "\ud800"},
        )
        assert taken is not None
        assert await store.get("thing", "t-1") == taken
        assert await store.find("thing", labels={"a": "b"}, states=["taken"]) == [taken]
        await store.commit(Put(replace(taken, state="ready")))
        again = await store.take("thing", document={"a": 1}, project="q", due=9.0, **BY)
        assert again is not None
        assert (again.project, again.due, again.revision) == ("q", 9.0, 4)
        assert again.document == {**taken.document, "a": 1}
        assert await store.due("thing", 9.0) == [again] == await store.find("thing", project="q")

    @pytest.mark.parametrize(("had", "more"), [({}, {}), ({}, {"a": 1}), ({"a": 1}, {})])
    async def test_empty_documents(self, store: Store, had: dict[str, Any], more: dict[str, Any]) -> None:
        await store.commit(member("t-1", document=had))
        taken = await store.take("thing", document=more, **BY)
        assert taken is not None
        assert taken.document == {**had, **more}

    async def test_with_what_goes_with_it(self, store: Store) -> None:
        await store.commit(member("t-1"), Put(row("old")))
        taken = await store.take(
            "thing",
            document={},
            changes=(
                Add("alive", 1, 1),
                Put(row("new")),
                Remove("thing", "old"),
                Event("thing", "", "p", "thing.taken", 1.0, {"a": 1}),
                Event("thing", "new", "p", "thing.made", 1.0),
            ),
            **BY,
        )
        assert taken is not None
        assert [one.id for one in await store.find("thing")] == ["new", "t-1"]
        events = await store.events()
        assert [(one.subject, one.name) for one in events] == [("t-1", "thing.taken"), ("new", "thing.made")]
        assert await store.counter("alive") == 1

    async def test_what_goes_with_it_may_change_it_again(self, store: Store) -> None:
        await store.commit(member("t-1"))
        known = await store.get("thing", "t-1")
        await store.take(
            "thing", document={}, changes=(Put(replace(known, revision=2, state="third")),), **BY
        )
        assert (await store.get("thing", "t-1")).state == "third"

    async def test_nothing_there_nothing_happens(self, store: Store) -> None:
        changes = (Add("alive", 1), Put(row("new")), Event("thing", "", "p", "n", 0.0))
        assert await store.take("thing", document={}, changes=changes, **BY) is None
        assert await store.counter("alive") == 0
        assert await store.find("thing") == []
        assert await store.events() == []

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (Add("alive", 1, 0), QuotaExceeded),
            (Put(row("there")), Conflict),
            (Held("lease", "me"), LeaseLost),
            (Put(row("x", document={"x": float("nan")})), InvalidRequest),
        ],
        ids=range(4),
    )
    async def test_refused_it_stays_where_it_was(
        self, store: Store, change: Any, error: type[Exception]
    ) -> None:
        await store.commit(member("t-1"), Put(row("there")))
        before = await store.get("thing", "t-1")
        with pytest.raises(error):
            await store.take("thing", document={"a": 1}, changes=(Add("n", 1), change), **BY)
        assert await store.get("thing", "t-1") == before
        assert await store.counter("n") == 0
        assert await store.take("thing", document={}, **BY) is not None

    async def test_bad_documents_are_refused(self, store: Store) -> None:
        await store.commit(member("t-1"))
        for bad in ({"document": {"x": float("nan")}}, {"document": {}, "due": float("inf")}):
            with pytest.raises(InvalidRequest):
                await store.take("thing", **bad, **BY)
        with pytest.raises(InvalidRequest):
            await store.take("thing", document={}, key="pool", state="ready", into="\0")
        assert (await store.get("thing", "t-1")).revision == 1

    async def test_many_takers_at_once(self, kit: StoreKit, store: Store) -> None:
        stores = [store, await kit.open(), await kit.open()]
        await store.commit(*(member(f"t-{number:02}") for number in range(30)))

        async def take(number: int) -> Row | None:
            return await stores[number % 3].take(
                "thing", document={"by": number}, changes=(Add("taken", 1),), **BY
            )

        taken = await asyncio.gather(*map(take, range(45)))
        ids = [one.id for one in taken if one is not None]
        assert len(ids) == len(set(ids))
        # Some may have come away empty-handed while a row was in another's hand; none is left over for ever.
        while (late := await store.take("thing", document={}, changes=(Add("taken", 1),), **BY)) is not None:
            ids.append(late.id)
        assert sorted(ids) == [f"t-{number:02}" for number in range(30)]
        assert await store.counter("taken") == 30
