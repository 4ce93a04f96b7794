"""What is due for commands: done by whoever is there, also when the one that began to has died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.api import commands
from ringfence.api.commands import KIND, Commands
from ringfence.model.errors import NotFound
from ringfence.store.contract import Put, Store
from ringfence.store.opening import open_store


class Links:
    """Links that are there once ``answers`` is set."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked = 0

    async def link(self, sandbox: str) -> str:
        self.asked += 1
        await self.answers.wait()
        return sandbox


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = await open_store(str(tmp_path / "store"))
    yield made
    await made.close()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    async def kill_tree(link: Any, number: str) -> None:
        done.append(number)

    monkeypatch.setattr(commands, "kill_tree", kill_tree)
    return done


def process(store: Store, links: Links) -> Commands:
    service: Any = SimpleNamespace(control=SimpleNamespace(store=store, links=links))
    return Commands(service)


async def come_up_again(store: Store) -> None:
    """As if its time had passed."""
    row = await store.get(KIND, "sb-1.c")
    await store.commit(Put(replace(row, due=time.time() - 1)))


async def until_gone(store: Store) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            await store.get(KIND, "sb-1.c")
        except NotFound:
            return
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_what_a_dead_process_began_is_due_again_soon(store: Store, killed: list[str]) -> None:
    first = process(store, Links())
    await first.due("sb-1", "c", "deadline", -1.0, "p")
    await first.sweep()
    assert (await store.get(KIND, "sb-1.c")).due <= time.time() + 6.0, "deadlines are at most 5 s late"
    await first.close()  # it ends in the middle
    assert killed == []
    links = Links()
    links.answers.set()
    second = process(store, links)
    await come_up_again(store)
    await second.sweep()
    await until_gone(store)
    assert killed == ["c"]
    await second.close()


async def test_what_comes_up_again_while_it_is_done_is_done_once(store: Store, killed: list[str]) -> None:
    links = Links()
    only = process(store, links)
    await only.due("sb-1", "c", "deadline", -1.0, "p")
    for _ in range(3):
        await only.sweep()
        await come_up_again(store)
    await only.sweep()
    links.answers.set()
    await until_gone(store)
    assert (killed, links.asked) == (["c"], 1)
    await only.close()


async def test_who_comes_back_to_a_command_takes_its_deadline_not_away(
    store: Store, killed: list[str]
) -> None:
    links = Links()
    links.answers.set()
    made = process(store, links)
    await made.due("sb-1", "c", "deadline", 60.0, "p")
    before = await store.get(KIND, "sb-1.c")
    await made.due("sb-1", "c", "kill", 30.0, "p")  # its last client has gone
    await made.undue_idle("sb-1", "c")  # and comes back
    assert await store.find(KIND) == [before]
    await made.due("sb-1", "c", "kill", -1.0, "p")
    await made.sweep()
    end = time.monotonic() + 60
    while not killed:
        assert time.monotonic() < end
        await asyncio.sleep(0.005)
    assert killed == ["c"]
    await made.due("sb-1", "c", "kill", 30.0, "p")
    await made.due("sb-1", "c", "forget", 600.0, "p")  # it has ended: nothing kills the next one of that name
    assert [row.state for row in await store.find(KIND)] == ["forget"]
    await made.due("sb-1", "c", "kill", 30.0, "p")
    await made.undue("sb-1", "c")
    assert await store.find(KIND) == []
    await made.close()
