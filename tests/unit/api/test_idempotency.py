"""The same key twice: one piece of work, one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.api import idempotency
from ringfence.api.idempotency import KIND, forget, once
from ringfence.model.errors import Conflict, IdempotencyConflict, InvalidRequest
from ringfence.store.contract import Put, Store
from ringfence.store.opening import open_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = await open_store(str(tmp_path / "s.sqlite"))
    yield made
    await made.close()


class Work:
    def __init__(self) -> None:
        self.done = 0
        self.go = asyncio.Event()

    async def __call__(self) -> tuple[int, bytes]:
        self.done += 1
        await self.go.wait()
        return 201, b'{"n":%d}' % self.done


async def test_many_at_once_are_one(store: Store) -> None:
    work = Work()
    asked = [asyncio.create_task(once(store, "p", "make", "k", b"body", work)) for _ in range(5)]
    await asyncio.sleep(0)
    work.go.set()
    answers = await asyncio.gather(*asked)
    assert work.done == 1
    assert {answer for answer, _ in answers} == {(201, b'{"n":1}')}
    assert sorted(again for _, again in answers) == [False, True, True, True, True]


async def test_another_request_with_the_key(store: Store) -> None:
    work = Work()
    work.go.set()
    await once(store, "p", "make", "k", b"body", work)
    with pytest.raises(IdempotencyConflict):
        await once(store, "p", "make", "k", b"other", work)
    for project, name in (("q", "make"), ("p", "other")):  # a key means something in one place only
        assert (await once(store, project, name, "k", b"other", work))[1] is False


@pytest.mark.parametrize("error", [Conflict("taken"), RuntimeError("fault"), InvalidRequest("x")])
async def test_a_failure_frees_the_key(store: Store, error: Exception) -> None:
    async def fail() -> tuple[int, bytes]:
        raise error

    with pytest.raises(type(error)):
        await once(store, "p", "make", "k", b"body", fail)
    work = Work()
    work.go.set()
    assert (await once(store, "p", "make", "k", b"body", work))[0] == (201, b'{"n":1}')


async def test_what_a_dead_process_left_is_taken_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    dead = asyncio.create_task(once(store, "p", "make", "k", b"body", work))
    while not await store.count(KIND):
        await asyncio.sleep(0.01)
    (row,) = await store.find(KIND)
    (row,) = await store.commit(Put(replace(row, created=time.time() - idempotency.ABANDONED - 1)))
    other = Work()
    other.go.set()
    assert (await once(store, "p", "make", "k", b"body", other))[0] == (201, b'{"n":1}')
    dead.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dead


async def test_answers_are_forgotten(store: Store) -> None:
    work = Work()
    work.go.set()
    await once(store, "p", "make", "k", b"body", work)
    (row,) = await store.find(KIND)
    await forget(store)
    assert await store.count(KIND) == 1
    await store.commit(Put(replace(row, due=time.time() - 1)))
    await forget(store)
    assert await store.count(KIND) == 0


@pytest.mark.parametrize("key", ["", "x" * 201, "a\nb", "ä"])
async def test_keys_that_are_none(store: Store, key: str) -> None:
    with pytest.raises(InvalidRequest):
        await once(store, "p", "make", key, b"", Work())
