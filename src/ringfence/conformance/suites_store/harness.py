"""What the store's suites stand on: an empty store, more of them on the same data, other processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest_asyncio

from ringfence.conformance.store_worker import opener
from ringfence.store.contract import Row, Store

PATIENCE = 60.0  # seconds that a test waits for what has to come, on however busy a machine


class StoreKit:
    """Opens stores on one address, and processes that do."""

    def __init__(self, opener_name: str, address: str) -> None:
        self.opener = opener_name
        self.address = address
        self._stores: list[Store] = []
        self._workers: list[Worker] = []

    async def open(self) -> Store:
        """One more, as another process would have it."""
        store = await opener(self.opener)(self.address)
        self._stores.append(store)
        return store

    async def workers(self, *commands: Sequence[object]) -> list[Worker]:
        """Several at once."""
        return await asyncio.gather(*(self.worker(*command) for command in commands))

    async def worker(self, *command: object) -> Worker:
        """A process that opens the store and does what ``store_worker.py`` knows by this name."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ringfence.conformance.store_worker",
            self.opener,
            self.address,
            *map(str, command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = Worker(process)
        self._workers.append(worker)
        assert await worker.line() == "ready"
        return worker

    async def close(self) -> None:
        """Everything."""
        for worker in self._workers:
            await worker.kill()
        for store in self._stores:
            await store.close()


class Worker:
    """Another process with the store open."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        """The next line that it prints; empty when it is gone."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            return (await self.process.stdout.readline()).decode().rstrip("\n")

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def result(self) -> Any:
        """What it found out, as its last line tells."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE * 2):
            text = await self.process.stdout.read()
            assert await self.process.wait() == 0
        return json.loads(text.decode().splitlines()[-1])

    async def kill(self) -> list[str]:
        """SIGKILL; returns the whole lines that it had printed and nobody had read."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        text = (await self.process.stdout.read()).decode()
        await self.process.wait()
        return text.split("\n")[:-1]


class StoreSuite:
    """Base of the suites."""

    @pytest_asyncio.fixture
    async def kit(self, ringfence_store_opener: str, ringfence_store_address: str) -> AsyncIterator[StoreKit]:
        """More stores and processes on the data of the test."""
        made = StoreKit(ringfence_store_opener, ringfence_store_address)
        try:
            yield made
        finally:
            await made.close()

    @pytest_asyncio.fixture
    async def store(self, kit: StoreKit) -> Store:
        """An empty store."""
        return await kit.open()


def row(id: str = "t-1", kind: str = "thing", **fields: Any) -> Row:
    """A row of the tests."""
    return Row(kind, id, **fields)


async def eventually(what: Callable[[], Awaitable[Any]], seconds: float = PATIENCE) -> Any:
    """Ask again until the answer is truthy."""
    deadline = time.monotonic() + seconds
    while True:
        answer = await what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.01)
