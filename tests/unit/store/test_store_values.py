"""What both stores make of values, addresses, watchers and versions; no database needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.model.errors import InvalidRequest, NotFound, WrongState
from ringfence.store import codec
from ringfence.store.contract import Add, Event, Held, Put, Remove, Row
from ringfence.store.migrations import migrations, missing
from ringfence.store.opening import open_store
from ringfence.store.postgres_sql import changes_as_json
from ringfence.store.sqlite import SqliteStore
from ringfence.store.sqlite_work import Work
from ringfence.store.watching import MISSED, Watchers

ANY = st.characters(exclude_categories=())  # halves of surrogate pairs and NUL, too
DOCUMENTS = st.dictionaries(
    st.text(ANY, max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(ANY),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(ANY, max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(DOCUMENTS)
def test_any_document_comes_back_and_is_ascii(document: dict[str, Any]) -> None:
    text = codec.encode(document)
    assert text.isascii()
    assert "\0" not in text
    assert codec.decode(text) == document


@given(DOCUMENTS, DOCUMENTS)
def test_one_object_behind_the_other_is_both_merged(had: dict[str, Any], more: dict[str, Any]) -> None:
    # What rf_take makes of a document in the database, and merged() in Python.
    first, second = codec.encode(had), codec.encode(more)
    joined = first if second == "{}" else second if first == "{}" else first[:-1] + "," + second[1:]
    assert codec.decode(joined) == codec.merged(had, more)


@given(st.text(ANY))
def test_storable_is_what_utf8_without_nul_can_say(text: str) -> None:
    try:
        text.encode()
        expected = "\0" not in text
    except UnicodeEncodeError:
        expected = False
    assert codec.storable(text) is expected
    assert codec.storable(None, "a", text) is expected


def test_what_is_no_change_is_refused() -> None:
    for bad in ("a text", None, Row("k", "i"), {"t": "put"}):
        with pytest.raises(InvalidRequest):
            codec.check([bad])  # type: ignore[list-item]
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        codec.encode({"deep": deep})


@given(DOCUMENTS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_changes_as_the_database_takes_them(document: dict[str, Any], labels: dict[str, str]) -> None:
    row = Row("k", "i", "p", "s", "key", 1.5, 2.5, 3, labels, document)
    event = Event("k", "i", "p", "n", 1.0, document)
    changes = [Put(row, unique=True), event, Add("c", -1, 2, 3.0), Held("l", "o"), Remove("k", "i", 4)]
    text = changes_as_json(changes)
    # PostgreSQL's jsonb has no NUL and no half of a pair: those of documents stand in a text of their own.
    sent = json.loads(text)
    for one in sent:
        for value in one.values():
            if isinstance(value, str):
                assert codec.storable(value)
    put, told, add, held, gone = sent
    assert (put["t"], put["unique"], put["revision"], put["labels"]) == ("put", True, 3, labels)
    assert codec.decode(put["document"]) == codec.decode(told["data"]) == document
    assert add == {"t": "add", "counter": "c", "amount": -1, "most": 2, "every": 3.0}
    assert held == {"t": "held", "lease": "l", "owner": "o"}
    assert gone == {"t": "remove", "kind": "k", "id": "i", "revision": 4}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "mysql://host/db",
        "http://example.test/",
        "file:///tmp/x.db",
        "sqlite://",
        "sqlite:///",
        "sqlite://host/path.db",
        "sqlite:///path.db?mode=ro",
        "sqlite:///path.db#x",
    ],
)
async def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidRequest):
        await open_store(url)


@pytest.mark.parametrize("form", ["{}", "sqlite://{}", "sqlite:{}", "sqlite://localhost{}"])
async def test_addresses_of_a_file(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "st%20re.db"
    store = await open_store(form.format(path if form == "{}" else str(path).replace("%", "%25")))
    assert isinstance(store, SqliteStore)
    assert store.path == str(path)
    assert path.exists()
    await store.close()


async def test_a_relative_path_is_where_we_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("store.db", "./store.db", "sqlite:store.db"):
        store = await open_store(url)
        assert isinstance(store, SqliteStore)
        assert store.path == str(tmp_path / "store.db")
        await store.close()


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_versions(dialect: str) -> None:
    known = migrations(dialect)
    assert [number for number, _ in known] == list(range(1, len(known) + 1))
    assert missing(dialect, 0) == known
    assert missing(dialect, len(known)) == ()
    with pytest.raises(WrongState) as refused:
        missing(dialect, len(known) + 1)
    assert refused.value.details["known"] == len(known)


async def test_watchers() -> None:
    watchers = Watchers()
    one, two = watchers.add(), watchers.add()
    watchers.tell([("k", "1"), ("k", "2"), ("k", "1")])
    assert [await anext(one) for _ in range(2)] == [("k", "1"), ("k", "2")]  # each once
    await one.aclose()
    await one.aclose()
    watchers.tell([("k", "3")])
    assert [found async for found in one] == []  # who has gone hears no more
    watchers.close()
    assert [found async for found in two] == [("k", "1"), ("k", "2"), ("k", "3")]
    assert [found async for found in watchers.add()] == []


async def test_a_watcher_that_lies_behind_loses_details_not_memory() -> None:
    watchers = Watchers()
    slow = watchers.add()
    for number in range(10_000):
        watchers.tell([("k", str(number))])
    watchers.close()
    found = [one async for one in slow]
    assert found[0] == MISSED
    assert len(found) < 5_000
    assert found[-1] == ("k", "9999")


async def test_a_watcher_that_nobody_holds_is_gone() -> None:
    watchers = Watchers()
    watchers.add()
    gc.collect()
    assert len(watchers._all) == 0


async def test_two_that_wait_on_one_watcher_are_both_ended() -> None:
    watchers = Watchers()
    watcher = watchers.add()
    waiting = [asyncio.ensure_future(anext(watcher, None)) for _ in range(2)]
    await asyncio.sleep(0)
    watchers.close()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting) == [None, None]


def _plans(work: Work, read: Callable[[], object]) -> list[str]:
    statements: list[str] = []
    work.db.set_trace_callback(statements.append)
    read()
    work.db.set_trace_callback(None)
    (statement,) = statements
    return [line[3] for line in work.db.execute(f"EXPLAIN QUERY PLAN {statement}")]


def test_sqlite_reads_by_index(tmp_path: Path) -> None:
    # What is read all the time must not walk through all rows that ever were.
    work = Work(str(tmp_path / "store.db"), 1.0)
    work.prepare()
    for read, index in {
        (
            lambda: work.find("k", "p", [], None, {}, "x", 9, False)
        ): "rows_by_project (kind=? AND project=? AND id>?)",
        (
            lambda: work.find("k", "p", ["a"], None, {}, "x", 9, True)
        ): "rows_by_project (kind=? AND project=? AND id<?)",
        (
            lambda: work.find("k", None, ["a", "b"], None, {}, "", 9, False)
        ): "rows_by_state (kind=? AND state=?)",
        (lambda: work.find("k", "p", [], "key", {}, "", 9, False)): "rows_by_key (kind=? AND key=?)",
        (
            lambda: work.find("k", None, ["a"], "key", {}, "", 9, False)
        ): "rows_by_key (kind=? AND key=? AND state=?)",
        (lambda: work.find("k", None, [], None, {"a": "b"}, "", 9, False)): "(kind=? AND id=?)",
        (lambda: work.find("k", "p", [], None, {"a": "b"}, "", 9, False)): "labels_by_value",
        (lambda: work.due("k", 1.0, ["a"], 9)): "rows_by_due (kind=? AND due>? AND due<?)",
        (lambda: work.count("k", None, ["a"], "key")): "rows_by_key (kind=? AND key=? AND state=?)",
        (lambda: work.events("p", None, 5, 9)): "events_by_project (project=? AND number>?)",
        (lambda: work.events("p", "s", 5, 9)): "events_by_subject (subject=? AND number>?)",
        (lambda: work.get("k", "i")): "rows_1 (kind=? AND id=?)",
    }.items():
        lines = _plans(work, lambda read=read: _quietly(read))
        assert any(index in line for line in lines), (index, lines)
        assert not any(line.startswith("SCAN") for line in lines), lines
    work.db.close()


def _quietly(read: Callable[[], object]) -> None:
    with contextlib.suppress(NotFound):
        read()
