"""Rows: what is written is what is read, and how they are found."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ringfence.conformance.suites_store.harness import StoreKit, StoreSuite, row
from ringfence.model.errors import Conflict, InvalidRequest, NotFound
from ringfence.store.contract import Put, Remove, Row, Store

HOSTILE = (
    "",
    " ",
    "'; DROP TABLE rows; --",
    '"$1" %s %(a)s {0} \\ \\u0000 \\x00',
    "ünï·çødé 日本 \N{PILE OF POO} \u202e",
    "line\nfeed\ttab\r\x01\x7f",
    "x" * 10_000,
)


class RowSuite(StoreSuite):
    """Put, get, remove."""

    async def test_what_is_put_is_what_is_got(self, store: Store) -> None:
        made = row(
            project="p",
            state="new",
            key="k",
            due=12.5,
            created=1e9 + 0.123456,
            labels={"a": "1", "b": ""},
            document={"n": [1, 2.5, None, True, {"deep": {"er": []}}], "big": 2**53 + 1, "text": "x"},
        )
        (stored,) = await store.commit(Put(made))
        assert stored == replace(made, revision=1)
        found = await store.get("thing", "t-1")
        assert found == stored
        assert list(found.document) == list(made.document)  # in their order, too

    async def test_a_bare_row_is_itself(self, store: Store) -> None:
        (stored,) = await store.commit(Put(row()))
        assert await store.get("thing", "t-1") == stored == row(revision=1)

    @pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
    async def test_any_text_is_only_a_text(self, store: Store, text: str) -> None:
        id = text[:2000] or "id"
        made = Row("thing", id, text[:500], text[:50], text[:500], labels={text[:500]: text[:500]})
        made = replace(made, document={text: text, "list": [text]})
        await store.commit(Put(made))
        found = await store.get("thing", id)
        assert found == replace(made, revision=1)
        by: dict[str, Any] = {"project": text[:500], "key": text[:500], "labels": dict(made.labels)}
        assert await store.find("thing", states=[text[:50]], **by) == [found]
        assert await store.find("thing", labels={text[:500]: text[:500] + "?"}) == []

    @pytest.mark.parametrize("text", ["\0", "a\0b", "\ud800", "a\udfff"])
    async def test_documents_hold_what_columns_can_not(self, store: Store, text: str) -> None:
        made = row(document={text: text, "in": {"side": [text]}})
        await store.commit(Put(made))
        assert (await store.get("thing", "t-1")).document == made.document
        for field in ("kind", "id", "project", "state", "key"):
            bad: dict[str, Any] = {field: "t" + text}
            with pytest.raises(InvalidRequest):
                await store.commit(Put(replace(row("t-2"), **bad)))
        for labels in ({text: "x"}, {"x": text}):
            with pytest.raises(InvalidRequest):
                await store.commit(Put(row("t-2", labels=labels)))
        with pytest.raises(NotFound):
            await store.get("thing", text)
        assert await store.find("thing", project=text) == []
        assert await store.find("thing", labels={"x": text}) == []
        assert await store.count("thing", key=text) == 0
        assert [found.id for found in await store.find("thing")] == ["t-1"]

    @pytest.mark.parametrize(
        "broken",
        [
            row(document={"x": float("nan")}),
            row(document={"x": float("inf")}),
            row(document={"x": b"bytes"}),
            row(document={"x": {1, 2}}),
            row(due=float("nan")),
            row(created=float("inf")),
            row(revision=-1),
            row(id=""),
            row(kind=""),
            row(labels={"a": 1}),
        ],
        ids=range(10),
    )
    async def test_what_is_no_row_is_refused_and_nothing_happens(self, store: Store, broken: Row) -> None:
        with pytest.raises(InvalidRequest):
            await store.commit(Put(row("other")), Put(broken))
        assert await store.find("thing") == []

    async def test_there_is_none(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await store.get("thing", "t-1")
        await store.commit(Put(row()))
        with pytest.raises(NotFound):
            await store.get("other", "t-1")  # ids are of their kind

    async def test_the_revision_grows_by_one(self, store: Store) -> None:
        (stored,) = await store.commit(Put(row()))
        for revision in range(1, 6):
            assert stored.revision == revision
            (stored,) = await store.commit(Put(replace(stored, document={"n": revision})))
        assert await store.get("thing", "t-1") == stored

    @pytest.mark.parametrize("revision", [0, 1, 3, 2**40])
    async def test_another_revision_is_a_conflict(self, store: Store, revision: int) -> None:
        (stored,) = await store.commit(Put(row(document={"n": 1})))
        (stored,) = await store.commit(Put(replace(stored, document={"n": 2})))
        with pytest.raises(Conflict):
            await store.commit(Put(replace(stored, revision=revision, document={"n": 3}, labels={"a": "b"})))
        assert await store.get("thing", "t-1") == stored
        assert await store.find("thing", labels={"a": "b"}) == []

    async def test_what_is_gone_can_not_be_changed(self, store: Store) -> None:
        with pytest.raises(Conflict):
            await store.commit(Put(row(revision=1)))
        (stored,) = await store.commit(Put(row()))
        await store.commit(Remove("thing", "t-1"))
        with pytest.raises(Conflict):
            await store.commit(Put(stored))
        with pytest.raises(NotFound):
            await store.get("thing", "t-1")

    async def test_made_anew_after_it_was_removed(self, store: Store) -> None:
        await store.commit(Put(row(labels={"a": "b"})))
        await store.commit(Remove("thing", "t-1"))
        (stored,) = await store.commit(Put(row()))
        assert stored.revision == 1
        assert await store.find("thing", labels={"a": "b"}) == []

    async def test_remove(self, store: Store) -> None:
        (stored,) = await store.commit(Put(row(labels={"a": "b"})))
        for revision in (0, 2):
            with pytest.raises(Conflict):
                await store.commit(Remove("thing", "t-1", revision))
        assert await store.get("thing", "t-1") == stored
        await store.commit(Remove("thing", "t-1", 1))
        with pytest.raises(NotFound):
            await store.get("thing", "t-1")
        with pytest.raises(Conflict):
            await store.commit(Remove("thing", "t-1", 1))
        await store.commit(Remove("thing", "t-1"))  # whatever it is, also if there is none
        assert await store.find("thing", labels={"a": "b"}) == []

    async def test_names_are_unique_where_asked(self, store: Store) -> None:
        (first,) = await store.commit(Put(row("t-1", project="p", key="name"), unique=True))
        with pytest.raises(Conflict):
            await store.commit(Put(row("t-2", project="p", key="name"), unique=True))
        await store.commit(Put(row("t-2", project="q", key="name"), unique=True))
        await store.commit(Put(row("t-2", kind="other", project="p", key="name"), unique=True))
        await store.commit(Put(row("t-3", project="p", key="name")))  # did not ask
        with pytest.raises(Conflict):
            await store.commit(Put(first, unique=True))  # now there is another
        await store.commit(Remove("thing", "t-3"))
        (first,) = await store.commit(Put(first, unique=True))  # its own name is no obstacle
        await store.commit(Put(replace(first, key="renamed"), unique=True))
        await store.commit(Put(row("t-4", project="p", key="name"), unique=True))

    async def test_one_of_many_gets_a_name(self, kit: StoreKit, store: Store) -> None:
        stores = [store, await kit.open(), await kit.open()]

        async def attempt(number: int) -> bool:
            try:
                await stores[number % 3].commit(Put(row(f"t-{number}", key="name"), unique=True))
            except Conflict:
                return False
            return True

        assert sorted(await asyncio.gather(*map(attempt, range(12)))) == [False] * 11 + [True]
        assert await store.count("thing", key="name") == 1

    async def test_a_big_document(self, store: Store) -> None:
        made = row(document={"text": "ü" * 1_000_000})
        await store.commit(Put(made))
        assert (await store.get("thing", "t-1")).document == made.document


class FindSuite(StoreSuite):
    """Conditions, order, pages, what is due."""

    async def _fill(self, store: Store) -> list[Row]:
        made = []
        for number in range(40):
            made.append(
                row(
                    f"t-{number:03}",
                    project="pq"[number % 2],
                    state="abc"[number % 3],
                    key="xy"[number // 20],
                    labels={"parity": str(number % 2), **({"fifth": "yes"} if number % 5 == 0 else {})},
                )
            )
        # Not in the order of their ids.
        stored = await store.commit(*(Put(one) for one in made[::-1]))
        await store.commit(Put(row("t-000", kind="other", project="p", state="a", key="x")))
        return sorted(stored, key=lambda one: one.id)

    @pytest.mark.parametrize(
        "condition",
        [
            {},
            {"project": "p"},
            {"project": ""},
            {"states": ["a"]},
            {"states": ["a", "c", "nothing"]},
            {"key": "y"},
            {"key": ""},
            {"labels": {}},
            {"labels": {"parity": "1"}},
            {"labels": {"parity": "0", "fifth": "yes"}},
            {"labels": {"fifth": "no"}},
            {"labels": {"nothing": "1"}},
            {"project": "q", "states": ["b", "c"], "key": "x", "labels": {"parity": "1", "fifth": "yes"}},
        ],
        ids=range(13),
    )
    async def test_all_conditions(self, store: Store, condition: dict[str, Any]) -> None:
        everything = await self._fill(store)

        def fits(one: Row) -> bool:
            return (
                condition.get("project") in (None, one.project)
                and (not condition.get("states") or one.state in condition["states"])
                and condition.get("key") in (None, one.key)
                and dict(condition.get("labels") or {}).items() <= one.labels.items()
            )

        expected = [one for one in everything if fits(one)]
        assert await store.find("thing", **condition) == expected
        assert await store.find("thing", **condition, newest_first=True) == expected[::-1]
        for page in (1, 7):
            found: list[Row] = []
            while more := await store.find(
                "thing", **condition, limit=page, after=found[-1].id if found else ""
            ):
                assert len(more) <= page
                found += more
            assert found == expected
            found = []
            while more := await store.find(
                "thing", **condition, limit=page, after=found[-1].id if found else "", newest_first=True
            ):
                found += more
            assert found == expected[::-1]
        if "labels" not in condition:
            assert await store.count("thing", **condition) == len(expected)

    async def test_a_page_survives_what_others_do(self, store: Store) -> None:
        everything = await self._fill(store)
        first = await store.find("thing", limit=10)
        await store.commit(Remove("thing", "t-009"), Remove("thing", "t-020"), Put(row("t-004x")))
        rest = await store.find("thing", after=first[-1].id)
        assert [one.id for one in rest] == [one.id for one in everything[10:] if one.id != "t-020"]

    async def test_nothing_asked_for(self, store: Store) -> None:
        await self._fill(store)
        assert await store.find("thing", limit=0) == []
        assert await store.find("nothing") == []
        assert await store.count("nothing") == 0
        assert len(await store.find("thing", limit=10_000_000)) == 40

    async def test_ids_compare_bytewise(self, store: Store) -> None:
        ids = ["A", "B", "_", "a", "a-b", "aB", "ab", "é", "\N{PILE OF POO}"]
        await store.commit(*(Put(row(id)) for id in reversed(ids)))
        assert [one.id for one in await store.find("thing")] == ids

    async def test_labels_follow_their_row(self, store: Store) -> None:
        (stored,) = await store.commit(Put(row(labels={"a": "1", "b": "1"})))
        (stored,) = await store.commit(Put(replace(stored, labels={"a": "2", "c": "1"})))
        for labels, there in [
            ({"a": "1"}, False),
            ({"b": "1"}, False),
            ({"a": "2"}, True),
            ({"a": "2", "c": "1"}, True),
        ]:
            assert bool(await store.find("thing", labels=labels)) is there, labels
        await store.commit(Put(replace(stored, labels={})))
        assert await store.find("thing", labels={"a": "2"}) == []

    async def test_due(self, store: Store) -> None:
        dues = {"t-1": 30.0, "t-2": 10.0, "t-3": None, "t-4": 20.0, "t-5": 20.5, "t-6": 10.0}
        for id, due in dues.items():
            await store.commit(Put(row(id, due=due, state="ab"[id == "t-4"])))
        await store.commit(Put(row("t-2", kind="other", due=1.0)))

        async def ids(before: float, **more: Any) -> list[str]:
            return [one.id for one in await store.due("thing", before, **more)]

        assert await ids(9.99) == []
        assert await ids(10.0) == ["t-2", "t-6"]
        assert await ids(20.0) == ["t-2", "t-6", "t-4"]
        assert await ids(1e12) == ["t-2", "t-6", "t-4", "t-5", "t-1"]
        assert await ids(1e12, limit=2) == ["t-2", "t-6"]
        assert await ids(1e12, states=["b"]) == ["t-4"]
        assert await ids(1e12, states=["c"]) == []
        assert await ids(1e12, limit=0) == []
        await store.commit(Put(replace(await store.get("thing", "t-2"), due=None)))
        assert await ids(10.0) == ["t-6"]
