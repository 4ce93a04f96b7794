"""PostgreSQL when things go wrong: restarts, crashes, a server that is away, connections that are cut."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
import pytest_asyncio

from ringfence.model.errors import InvalidRequest, StoreUnavailable, WrongState
from ringfence.store.contract import Add, Event, Held, Put, Row, Store
from ringfence.store.migrations import migrations
from ringfence.store.opening import open_store
from ringfence.store.postgres import PostgresStore
from support.postgres import PostgresServer

PATIENCE = 60.0


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """One that these tests may end and start again."""
    server = PostgresServer(max_connections="60")
    try:
        yield server
    finally:
        server.remove()


@pytest_asyncio.fixture
async def store(own_server: PostgresServer) -> AsyncIterator[Store]:
    opened = await open_store(own_server.fresh())
    yield opened
    await opened.close()


async def until_it_answers(store: Store) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await store.counter("c")
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL], ids=lambda how: how.name)
async def test_restarted_in_the_middle(own_server: PostgresServer, store: Store, how: signal.Signals) -> None:
    changes = store.watch()
    returned: set[str] = set()
    unknown: set[str] = set()
    enough = asyncio.Event()
    stop = False

    async def write(who: str) -> None:
        number = 0
        while not stop:
            id = f"{who}-{number:06}"
            number += 1
            try:
                await store.commit(
                    Put(Row("thing", id, labels={"who": who})),
                    Add("written", 1),
                    Event("thing", id, "p", "thing.written", 0.0),
                )
            except StoreUnavailable:
                unknown.add(id)
                await asyncio.sleep(0.01)
            else:
                returned.add(id)
                if len(returned) > 100:
                    enough.set()

    async with asyncio.timeout(PATIENCE * 3):
        writers = [asyncio.create_task(write(f"w{number}")) for number in range(8)]
        try:
            await enough.wait()
            await asyncio.to_thread(own_server.stop, how)
            while not unknown:
                await asyncio.sleep(0.01)
            own_server.start()
            await until_it_answers(store)
            before = len(returned)
            while len(returned) < before + 50:  # they go on by themselves
                await asyncio.sleep(0.01)
        finally:
            stop = True
            await asyncio.gather(*writers)
        there = {row.id for row in await store.find("thing", limit=1_000_000)}
        assert returned <= there <= returned | unknown
        assert len(there) == await store.counter("written") == len(await store.events(limit=1_000_000))
        # Who watches is told that it may have missed some, and hears the next change again.
        while await anext(changes) != ("", ""):
            pass
        await store.commit(Put(Row("thing", "last")))
        while await anext(changes) != ("thing", "last"):
            pass


async def test_two_stores_hear_of_each_other_after_a_restart(own_server: PostgresServer) -> None:
    url = own_server.fresh()
    one, two = await open_store(url), await open_store(url)
    try:
        changes = two.watch()
        await asyncio.to_thread(own_server.stop)
        own_server.start()
        async with asyncio.timeout(PATIENCE):
            while await anext(changes) != ("", ""):  # it listens again
                pass
            await until_it_answers(one)
            await one.commit(Put(Row("thing", "t-1")))
            while await anext(changes) != ("thing", "t-1"):
                pass
    finally:
        await one.close()
        await two.close()


async def test_away_is_unavailable_at_once_and_never_wrong(own_server: PostgresServer, store: Store) -> None:
    await store.commit(Put(Row("thing", "t-1")), Add("c", 1))
    assert await store.lease("l", "a", 300)
    await asyncio.to_thread(own_server.stop)
    try:
        async with asyncio.timeout(PATIENCE):
            for call in (
                lambda: store.get("thing", "t-1"),
                lambda: store.get("thing", "nothing"),
                lambda: store.find("thing"),
                lambda: store.commit(Put(Row("thing", "t-2"))),
                lambda: store.commit(Held("l", "a")),
                lambda: store.take("thing", key="", state="", into="x", document={}),
                lambda: store.lease("l", "b", 1.0),
                lambda: store.counter("c"),
            ):
                with pytest.raises(StoreUnavailable):
                    await call()
            with pytest.raises(StoreUnavailable):
                await open_store(own_server.url)
    finally:
        own_server.start()
    assert (await store.get("thing", "t-1")).revision == 1
    assert await store.count("thing") == await store.counter("c") == 1
    assert not await store.lease("l", "b", 300)


async def test_closed_while_the_server_is_away(own_server: PostgresServer) -> None:
    store = await open_store(own_server.fresh())
    await asyncio.to_thread(own_server.stop)
    try:
        async with asyncio.timeout(PATIENCE):
            await store.close()
    finally:
        own_server.start()


async def test_events_become_visible_in_the_order_of_their_numbers(own_server: PostgresServer) -> None:
    url = own_server.fresh()
    store = await open_store(url)
    event = {
        "t": "event",
        "kind": "thing",
        "subject": "s",
        "project": "p",
        "name": "first",
        "at": 0,
        "data": "{}",
    }
    with psycopg.connect(url) as other:
        other.execute(
            "SELECT rf_commit(%s, 'x', false)", (json.dumps([event]),)
        )  # has its number, not yet visible
        waiting = asyncio.create_task(store.commit(Event("thing", "s", "p", "second", 0.0)))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        assert await store.events() == []
        await store.commit(Put(Row("thing", "t-1")), Add("c", 1))  # what tells nothing goes on
        other.commit()
    await waiting
    assert [told.name for told in await store.events()] == ["first", "second"]
    await store.close()


async def test_all_connections_are_cut(own_server: PostgresServer, store: Store) -> None:
    await asyncio.gather(*(store.commit(Add("c", 1)) for _ in range(8)))
    with psycopg.connect(own_server.url, autocommit=True) as other:
        # All but the one that listens, which would notice.
        idle = "FROM pg_stat_activity WHERE application_name = 'ringfence' AND query NOT LIKE 'LISTEN%'"
        other.execute(f"SELECT pg_terminate_backend(pid) {idle}")
        async with asyncio.timeout(PATIENCE):
            while other.execute(f"SELECT count(*) {idle}").fetchone() != (0,):
                await asyncio.sleep(0.01)
    # Those that were idle are found out before anything is sent over them.
    await store.commit(Put(Row("thing", "t-1")))
    assert await store.counter("c") == 8
    assert (await store.get("thing", "t-1")).revision == 1


async def test_connections_are_bounded_and_given_back(own_server: PostgresServer) -> None:
    store = await PostgresStore.open(own_server.fresh(), connections=3)
    await asyncio.gather(*(store.commit(Add("c", 1)) for _ in range(50)))
    tasks = [asyncio.create_task(store.commit(Add("c", 1))) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(store.commit(Add("c", 1)) for _ in range(50)))  # none was lost with the cancelled
    assert 100 <= await store.counter("c") <= 120
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ringfence'"
    with psycopg.connect(own_server.url, autocommit=True) as other:
        async with asyncio.timeout(
            PATIENCE
        ):  # three, and who listens; those of the cancelled may still leave
            while other.execute(ours).fetchone()[0] > 4:  # type: ignore[index]
                await asyncio.sleep(0.01)
        await store.close()
        async with asyncio.timeout(PATIENCE):
            while other.execute(ours).fetchone() != (0,):
                await asyncio.sleep(0.01)


async def test_who_holds_a_row_for_ever_stops_nobody_for_ever(own_server: PostgresServer) -> None:
    url = own_server.fresh()
    store = await PostgresStore.open(url, patience=0.3)
    await store.commit(Put(Row("thing", "t-1")), Put(Row("thing", "t-2")))
    with psycopg.connect(url) as other:
        other.execute("UPDATE rf_rows SET state = 'held' WHERE id = 't-1'")
        waiting = asyncio.create_task(store.commit(Put(Row("thing", "t-1", revision=1)), Add("c", 1)))
        await store.commit(Put(Row("thing", "t-2", revision=1)))  # the others go on
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreUnavailable) as refused:
                await waiting
        assert refused.value.details["cause"] == "55P03"
        other.rollback()
    await store.commit(Put(Row("thing", "t-1", revision=1)))
    assert await store.counter("c") == 0
    await store.close()


async def test_not_an_address(own_server: PostgresServer) -> None:
    with pytest.raises(InvalidRequest):
        await open_store("postgresql://host:notaport:x/db?nonsense=1")
    with pytest.raises(StoreUnavailable) as refused:
        await open_store(f"postgresql://postgres@/nothing?host={own_server.folder}")
    assert "createdb" in refused.value.hint
    with pytest.raises(StoreUnavailable):
        await open_store(f"postgresql://nobody-of-this-name@/postgres?host={own_server.folder}")


async def test_a_newer_store_is_refused_untouched(own_server: PostgresServer) -> None:
    url = own_server.fresh()
    await (await open_store(url)).close()
    newer = len(migrations("postgres")) + 1
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("UPDATE rf_schema SET version = %s", (newer,))
        with pytest.raises(WrongState) as refused:
            await open_store(url)
        assert refused.value.details["version"] == newer
        assert other.execute("SELECT version FROM rf_schema").fetchone() == (newer,)


async def test_migrations_run_once_and_whole(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_server.fresh()
    await (await open_store(url)).close()

    from ringfence.store import postgres

    known = migrations("postgres")
    half = (*known, (len(known) + 1, "CREATE TABLE later (a int); INSERT INTO later VALUES (1); NONSENSE"))
    monkeypatch.setattr(postgres, "missing", lambda dialect, version: half[version:])
    with pytest.raises(StoreUnavailable):
        await open_store(url)
    with psycopg.connect(url, autocommit=True) as other:
        assert other.execute("SELECT version FROM rf_schema").fetchone() == (len(known),)
        assert other.execute("SELECT to_regclass('later')").fetchone() == (None,)
        whole = (*known, (len(known) + 1, "CREATE TABLE later (a int); INSERT INTO later VALUES (1)"))
        monkeypatch.setattr(postgres, "missing", lambda dialect, version: whole[version:])
        stores = await asyncio.gather(*(open_store(url) for _ in range(4)))
        assert other.execute("SELECT count(*) FROM later").fetchone() == (1,)
    for store in stores:
        await store.close()


async def test_stores_in_one_database_know_nothing_of_each_other(own_server: PostgresServer) -> None:
    one, two = await open_store(own_server.fresh()), await open_store(own_server.fresh())
    changes = two.watch()
    await one.commit(Put(Row("thing", "t-1", key="k"), unique=True), Add("c", 1))
    assert await two.lease("l", "a", 300)
    assert await one.lease("l", "b", 300)
    assert (await two.count("thing"), await two.counter("c")) == (0, 0)
    await two.commit(Put(Row("thing", "t-2", key="k"), unique=True))
    async with asyncio.timeout(PATIENCE):
        assert await anext(changes) == ("thing", "t-2")
    await one.close()
    await two.close()


async def test_a_notice_of_anybody_else_is_no_harm(own_server: PostgresServer) -> None:
    url = own_server.fresh()
    store = await open_store(url)
    changes = store.watch()
    with psycopg.connect(url, autocommit=True) as other:
        for payload in ("", "nonsense", "[1]", '["x", [1]]', "{}", '["x", {"a": 1}]', "null"):
            other.execute("SELECT pg_notify('ringfence_' || current_schema(), %s)", (payload,))
        async with asyncio.timeout(PATIENCE):
            assert await anext(changes) == ("", "")
    await store.commit(Put(Row("thing", "t-1")))
    async with asyncio.timeout(PATIENCE):
        while await anext(changes) != ("thing", "t-1"):
            pass
    await store.close()


async def test_durable_is_durable_where_the_operator_chose_speed(own_server: PostgresServer) -> None:
    fresh = own_server.fresh()
    store = await open_store(fresh + "%20-csynchronous_commit%3Doff")
    seen = "SELECT current_setting('synchronous_commit')"
    with psycopg.connect(fresh, autocommit=True) as other:
        # A trigger tells which it is while the transaction ends.
        other.execute("CREATE TABLE told (durable text, was text)")
        other.execute(
            f"CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" INSERT INTO told VALUES (NEW.key, ({seen})); RETURN NULL; END $$"
        )
        other.execute(
            "CREATE CONSTRAINT TRIGGER t AFTER INSERT ON rf_rows DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION tell()"
        )
        await store.commit(Put(Row("thing", "t-1", key="quick")))
        await store.commit(Put(Row("thing", "t-2", key="durable")), durable=True)
        await store.commit(Put(Row("thing", "t-3", key="quick again")))
        told = other.execute("SELECT durable, was FROM told").fetchall()
    assert told == [("quick", "off"), ("durable", "on"), ("quick again", "off")]
    await store.close()


async def test_who_waits_for_a_counter_holds_nothing_that_others_want(own_server: PostgresServer) -> None:
    """Else two that add to the same counters in different orders would be a deadlock: a second for each."""
    url = own_server.fresh()
    store = await PostgresStore.open(url)
    await store.commit(Add("a", 1), Add("b", 1), Put(Row("thing", "t-1", state="free", key="k")))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
    with psycopg.connect(url) as other, psycopg.connect(url, autocommit=True) as watcher:
        other.execute("UPDATE rf_counters SET value = value WHERE name = 'a'")
        ours = [
            asyncio.create_task(store.commit(Add("b", 1), Add("a", 1))),
            asyncio.create_task(
                store.take("thing", key="k", state="free", into="taken", document={}, changes=[Add("a", 1)])
            ),
        ]
        async with asyncio.timeout(PATIENCE):
            while watcher.execute(waiting, (watcher.info.dbname,)).fetchone() != (2,):
                await asyncio.sleep(0.01)
        await store.commit(Add("b", 1))
        await store.commit(Put(Row("thing", "t-1", state="free", key="k", revision=1)))
        assert not any(task.done() for task in ours)
        other.rollback()
    _, taken = await asyncio.gather(*ours)
    assert taken is not None
    assert taken.revision == 3
    assert (await store.counter("a"), await store.counter("b")) == (3, 3)
    await store.close()
