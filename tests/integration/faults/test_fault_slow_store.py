"""A store that is slow, hangs, or loses answers: requests are told so clearly, deadlines hold, nothing is
doubled, and it goes on by itself. Through the whole API in this process, on a fake placement."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from ringfence.placement.fake import FakePlacement
from ringfence.placement.memory import Machine
from ringfence.serving.worker import service
from ringfence.store.opening import open_store
from ringfence.store.postgres import PostgresStore
from ringfence.store.sqlite import SqliteStore
from support.postgres import PostgresServer, postgres
from support.slow_store import FaultyStore

__all__ = ["postgres"]
PATIENCE = 60.0
SMALL = {"memory": "64MiB", "disk": "16MiB"}


class Api:
    """One API process's worth of service."""

    def __init__(self, http: httpx.AsyncClient, machine: Machine) -> None:
        self.http = http
        self.machine = machine

    async def create(self, key: str, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/sandboxes", json={**SMALL, **body}, headers={"idempotency-key": key})

    async def alive(self) -> list[str]:
        """Once what was half done has been finished."""

        async def at_rest() -> bool:
            return all(item["state"] in ("running", "stopped", "failed") for item in await self.items())

        await until(at_rest)
        return [item["id"] for item in await self.items() if item["state"] == "running"]

    async def items(self) -> list[dict[str, Any]]:
        answer = await self.http.get("/v1/sandboxes?limit=1000")
        assert answer.status_code == 200, answer.text
        return list(answer.json()["items"])


@asynccontextmanager
async def api(store: Any, owner: str = "api-1") -> AsyncIterator[Api]:
    machine = Machine()
    placement = FakePlacement(machine=machine)
    try:
        async with service(store, placement, owner=owner) as made:
            first = await made.tenancy.first_start()
            assert first is not None
            transport = httpx.ASGITransport(app=made)
            headers = {"authorization": f"Bearer {first.secret}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", headers=headers, timeout=PATIENCE
            ) as http:
                yield Api(http, machine)
    finally:
        await placement.close()
        machine.close()


async def until(check: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await check():
            await asyncio.sleep(0.02)


def told(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer that says that the store is away, under the request's id."""
    assert answer.status_code in (503, 504), answer.text
    error = answer.json()["error"]
    assert error["code"] in ("store_unavailable", "deadline_exceeded"), error
    assert error["hint"]
    assert error["details"]["request_id"] == answer.headers["x-request-id"]
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
    return dict(error)


async def again(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """As a client does that was told to try again."""
    async with asyncio.timeout(PATIENCE):
        while (answer := await ask()).status_code == 503:
            told(answer)
            await asyncio.sleep(0.05)
    return answer


async def test_slow_is_slow_and_nothing_else(tmp_path: Path) -> None:
    inner = await open_store(str(tmp_path / "s.db"))
    store = FaultyStore(inner)
    async with api(store) as service:
        store.delay = 0.2
        many = await asyncio.gather(*(service.create(f"k{n % 3}", timeout=600) for n in range(6)))
        assert [answer.status_code for answer in many] == [201] * 6
        assert len({answer.json()["id"] for answer in many}) == 3
        short = (await service.create("short", timeout=1)).json()

        async def over() -> bool:
            seen = (await service.http.get(f"/v1/sandboxes/{short['id']}")).json()
            return bool(seen["state"] == "stopped" and seen["cause"] == "deadline")

        await until(over)
        assert short["id"] not in service.machine.sandboxes
        assert len(await service.alive()) == 3
        assert all(count == 1 for count in service.machine.starts.values())
    await inner.close()


async def test_away_is_told_and_deadlines_are_kept_when_it_is_back(tmp_path: Path) -> None:
    inner = await open_store(str(tmp_path / "s.db"))
    store = FaultyStore(inner)
    async with api(store) as service:
        made = (await service.create("k", timeout=1)).json()
        store.away = True
        for answer in (
            await service.create("other"),
            await service.http.get(f"/v1/sandboxes/{made['id']}"),
            await service.http.delete(f"/v1/sandboxes/{made['id']}"),
            await service.http.get("/v1/jobs"),
        ):
            assert told(answer)["code"] == "store_unavailable"
        assert len(service.machine.starts) == 1
        store.away = False

        async def over() -> bool:
            seen = (await service.http.get(f"/v1/sandboxes/{made['id']}")).json()
            return bool(seen["state"] == "stopped" and seen["cause"] == "deadline")

        await until(over)
        assert (await service.create("other")).status_code == 201
        assert len(await service.alive()) == 1
    await inner.close()


KINDS = {
    "sandboxes": ("/v1/sandboxes", SMALL),
    "pools": ("/v1/pools", {"name": "p", "min": 0, "max": 0, **SMALL}),
    "volumes": ("/v1/volumes", {"name": "v", "quota": 1 << 20}),
    "projects": ("/v1/projects", {"name": "a"}),
}


@pytest.mark.parametrize("befalls", ["refused", "lost"])
@pytest.mark.parametrize("kind", KINDS)
async def test_whichever_write_fails_the_same_key_makes_one(tmp_path: Path, kind: str, befalls: str) -> None:
    """Each write of a create in turn; the client repeats it with its Idempotency-Key."""
    inner = await open_store(str(tmp_path / "s.db"))
    store = FaultyStore(inner)
    path, body = KINDS[kind]
    failed = 0
    async with api(store) as service:
        for number in range(1, 9):
            count = 0
            asked = {**body, **({"name": f"n{number}"} if "name" in body else {})}

            def lose(name: str, changes: tuple[Any, ...], number: int = number) -> str:
                nonlocal count, failed
                named = {getattr(getattr(change, "row", change), "kind", "") for change in changes}
                if name == "commit" and not named & {"sandbox", "idempotency", "pool", "volume", "project"}:
                    return ""  # of the service's own background
                count += 1
                failed += count == number
                return befalls if count == number else ""

            store.lose = lose

            async def ask(number: int = number, asked: dict[str, Any] = asked) -> httpx.Response:
                return await service.http.post(path, json=asked, headers={"idempotency-key": f"k{number}"})

            answer = await again(ask)
            store.lose = lambda name, changes: ""
            if "name" in body and answer.status_code == 409:
                # It was made, or half made, and nobody knew. Names are taken once, so it is found by its
                # name; what was half made is removed, and the name is free again.
                assert answer.json()["error"]["code"] == "conflict", answer.text

                async def made(name: str = str(asked["name"]), ask: Any = ask) -> bool:
                    found = (await service.http.get(f"{path}?limit=1000")).json()["items"]
                    return name in [item["name"] for item in found] or (await ask()).status_code == 201

                await until(made)
                continue
            assert answer.status_code in (200, 201), answer.text
            assert (await ask()).json()["id"] == answer.json()["id"]
        assert failed >= 2
        if kind == "sandboxes":
            assert len(await service.alive()) == 8
            assert len(service.machine.sandboxes) == 8
            assert all(count == 1 for count in service.machine.starts.values())
        else:
            found = (await service.http.get(f"{path}?limit=1000")).json()["items"]
            assert len([item for item in found if item["name"].startswith("n")]) == 8
    await inner.close()


async def test_a_disk_that_hangs(tmp_path: Path) -> None:
    """The thread that speaks to SQLite hangs: calls end all the same, and what nobody waits for any more is
    not done afterwards."""
    from ringfence.model.errors import StoreUnavailable
    from ringfence.store.contract import Add

    store = await SqliteStore.open(str(tmp_path / "s.db"))
    store._answers = 0.3
    hold = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(_: Any) -> None:
        asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(PATIENCE)

    hanging = asyncio.ensure_future(store._do(hang, within=None))
    await asyncio.sleep(0)
    for call in (store.counter("c"), store.commit(Add("c", 1)), store.commit(Add("c", 1))):
        with pytest.raises(StoreUnavailable) as refused:
            await call
        assert refused.value.details["cause"] == "timeout" and refused.value.hint
    hold.set()
    await hanging
    store._answers = PATIENCE
    assert await store.counter("c") == 0
    await store.commit(Add("c", 1))
    assert await store.counter("c") == 1
    await store.close()


@asynccontextmanager
async def on_postgres(url: str, *, patience: float, answers: float) -> AsyncIterator[Api]:
    store = await PostgresStore.open(url, patience=patience, answers=answers)
    try:
        async with api(store) as made:
            yield made
    finally:
        await store.close()


async def one_only(service: Api, key: str) -> None:
    """The store is well again: the same key makes exactly one."""
    answer = await again(lambda: service.create(key))
    assert answer.status_code == 201, answer.text
    assert (await service.create(key)).json()["id"] == answer.json()["id"]
    assert await service.alive() == [answer.json()["id"]]
    assert list(service.machine.sandboxes) == [answer.json()["id"]]
    assert all(count == 1 for count in service.machine.starts.values())


async def test_postgresql_with_its_table_locked(postgres: PostgresServer) -> None:
    url = postgres.fresh()
    async with on_postgres(url, patience=2.0, answers=30.0) as service:
        with psycopg.connect(url) as other:
            other.execute("LOCK TABLE rf_rows IN ACCESS EXCLUSIVE MODE")
            writing, reading = await asyncio.gather(
                service.create("k"), service.http.get("/v1/sandboxes?limit=1")
            )
            assert told(writing)["details"]["cause"] == told(reading)["details"]["cause"] == "55P03"
            assert not service.machine.starts
            other.rollback()
        await one_only(service, "k")


async def test_postgresql_that_sleeps(postgres: PostgresServer) -> None:
    url = postgres.fresh()
    async with on_postgres(url, patience=30.0, answers=10.0) as service:
        with psycopg.connect(url, autocommit=True) as other:
            # Slow: it is done. Too slow: it is refused.
            other.execute("CREATE TABLE rf_slow (seconds float)")
            other.execute("INSERT INTO rf_slow VALUES (0.2)")
            other.execute(
                "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " PERFORM pg_sleep((SELECT seconds FROM rf_slow)); RETURN NEW; END $$"
            )
            other.execute(
                "CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON rf_rows FOR EACH ROW EXECUTE FUNCTION slow()"
            )
            slow = await service.create("slow")
            assert slow.status_code == 201, slow.text
            assert (await service.http.delete(f"/v1/sandboxes/{slow.json()['id']}")).status_code < 300
            other.execute("UPDATE rf_slow SET seconds = 600")
            assert told(await service.create("k"))["details"]["cause"] in ("57014", "timeout")
            other.execute("UPDATE rf_slow SET seconds = 0")
        await one_only(service, "k")


async def test_postgresql_whose_processes_hang(postgres: PostgresServer) -> None:
    """They are stopped: nobody answers, nobody hangs up."""
    url = postgres.fresh()
    async with on_postgres(url, patience=30.0, answers=5.0) as service:
        assert (await again(lambda: service.http.get("/v1/sandboxes"))).status_code == 200
        schema = url.partition("search_path%3D")[2]
        with psycopg.connect(postgres.url, autocommit=True) as other:
            found = other.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'ringfence' AND state = 'idle'"
            ).fetchall()
        assert found, schema
        stopped = [pid for (pid,) in found]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            answers = [await service.create("k") for _ in range(2)]
            assert all(answer.status_code in (201, 503, 504) for answer in answers)
            assert any(
                answer.status_code != 201 and told(answer)["details"].get("cause") == "timeout"
                for answer in answers
            )
            # Connections made since then are served by others.
            await one_only(service, "k")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
