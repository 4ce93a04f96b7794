"""SQLite when things go wrong: a full disk, a lock that is not given back, files that are not ours."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from ringfence.model.errors import InvalidRequest, StoreUnavailable, WrongState
from ringfence.store.contract import Add, Event, Put, Remove, Row
from ringfence.store.migrations import migrations
from ringfence.store.opening import open_store
from ringfence.store.sqlite import BUSY, SqliteStore
from ringfence.store.sqlite_work import Work


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(str(tmp_path / "store.db"), busy=1.0)
    yield opened
    await opened.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def test_a_full_disk_writes_nothing_by_half(small_disk: Path) -> None:
    store = await open_store(str(small_disk / "store.db"))
    try:
        written = 0

        async def fill() -> None:
            nonlocal written
            while written < 10_000:
                # A row, its label, its counter and its event: four pages at least.
                await store.commit(
                    Put(Row("thing", f"t-{written:05}", labels={"a": "b"}, document={"x": "y" * 3000})),
                    Add("written", 1),
                    Event("thing", "t", "p", "n", 0.0),
                )
                written += 1

        with pytest.raises(StoreUnavailable) as refused:
            await fill()
        assert refused.value.details["cause"].startswith("SQLITE_FULL")
        assert "room" in refused.value.hint
        for _ in range(3):  # and again: the refusal is no accident, and changes nothing
            with pytest.raises(StoreUnavailable):
                await store.commit(
                    Put(Row("thing", "t-zzzzz", document={"x": "y" * 100_000})), Add("written", 1)
                )

        async def as_it_was(count: int) -> None:
            rows = await store.find("thing", limit=100_000)
            assert [row.id for row in rows] == [f"t-{number:05}" for number in range(count)]
            assert len(await store.find("thing", labels={"a": "b"}, limit=100_000)) == count
            assert await store.counter("written") == len(await store.events(limit=100_000)) == count

        await as_it_was(written)
        # Somebody makes room: it goes on by itself, without being opened anew.
        subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
        await store.commit(
            Put(Row("thing", f"t-{written:05}", labels={"a": "b"})),
            Add("written", 1),
            Event("thing", "t", "p", "n", 0.0),
        )
        await as_it_was(written + 1)
    finally:
        await store.close()
    with closing(sqlite3.connect(small_disk / "store.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_no_room_to_begin_with(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (2 * 1024**2 - 8192))
    with pytest.raises(StoreUnavailable):
        await open_store(str(small_disk / "store.db"))
    (small_disk / "filler").unlink()
    store = await open_store(str(small_disk / "store.db"))
    await store.commit(Put(Row("thing", "t-1")))
    await store.close()


async def test_another_process_holds_the_lock(store: SqliteStore, tmp_path: Path) -> None:
    await store.commit(Put(Row("thing", "t-1")))
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        turning = asyncio.create_task(turn())
        with pytest.raises(StoreUnavailable) as refused:
            await store.commit(Put(Row("thing", "t-2")), Add("c", 1))
        turning.cancel()
        assert refused.value.details["cause"] == "SQLITE_BUSY"
        assert turns > 10, "the loop stood still while the store waited"
        assert (await store.get("thing", "t-1")).revision == 1  # who only reads is not in the way
        other.execute("ROLLBACK")
    await store.commit(Put(Row("thing", "t-2")), Add("c", 1))
    assert await store.counter("c") == 1


async def test_waits_for_a_lock_that_comes_back(tmp_path: Path) -> None:
    store = await SqliteStore.open(str(tmp_path / "store.db"), busy=60)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.commit(Put(Row("thing", "t-1"))))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        other.execute("ROLLBACK")
        await waiting
    await store.close()


def test_another_makes_the_file_while_it_is_opened(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    others: list[threading.Thread] = []

    def other() -> None:
        work = Work(path, BUSY)
        work.prepare()
        work.db.close()

    def meanwhile(statement: str) -> None:
        if "sqlite_master" in statement:
            others.append(threading.Thread(target=other))
            others[0].start()
            others[0].join(0.3)  # it is done by now, or waits for this one

    with closing(sqlite3.connect(path)), closing((work := Work(path, BUSY)).db):
        work.db.set_trace_callback(meanwhile)
        work.prepare()  # not "a database of another program"
        others[0].join()
        assert work.db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,)


def test_another_is_about_to_write_while_it_is_opened(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with (
            closing(sqlite3.connect(path)) as control,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            control.execute("PRAGMA journal_mode = WAL")  # at once: SQLite itself waits for nobody here
        with closing((late := Work(path, 0.1)).db), pytest.raises(sqlite3.OperationalError, match="locked"):
            late.prepare()
        timer = threading.Timer(0.3, other.execute, ["COMMIT"])
        timer.start()
        with closing((work := Work(path, BUSY)).db):
            work.prepare()
            assert work.db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        timer.join()


async def test_opening_once_more_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    first = await SqliteStore.open(path)
    second = await SqliteStore.open(path)

    def write(id: str) -> None:
        """Another process writes once and lets go; the last to let go takes the log away."""
        code = (
            "import asyncio, sys\n"
            "from ringfence.store.contract import Put, Row\n"
            "from ringfence.store.sqlite import SqliteStore\n"
            "async def main():\n"
            "    store = await SqliteStore.open(sys.argv[1])\n"
            "    await store.commit(Put(Row('thing', sys.argv[2])))\n"
            "    await store.close()\n"
            "asyncio.run(main())\n"
        )
        subprocess.run([sys.executable, "-c", code, path, id], check=True)

    log = tmp_path / "store.db-wal"
    await asyncio.to_thread(write, "t-1")
    assert log.exists(), "the log of living connections was taken away"
    os.close(os.open(path, os.O_RDWR))  # the control: what opening must not do
    await asyncio.to_thread(write, "t-2")
    assert not log.exists()
    await second.close()
    await first.close()


async def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    had = os.umask(0)
    try:
        store = await open_store(str(tmp_path / "new" / "folder" / "store.db"))
        await store.commit(Put(Row("thing", "t-1")))
    finally:
        os.umask(had)
    files = list((tmp_path / "new" / "folder").iterdir())
    assert len(files) == 3  # the log and its index, too
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    await store.close()


async def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("not a database at all, but long enough to be read as one's header" * 20)
    before = text.read_bytes()
    with pytest.raises(StoreUnavailable, match=r"text\.db"):
        await open_store(str(text))
    assert text.read_bytes() == before

    others = tmp_path / "others.db"
    with closing(sqlite3.connect(others)) as database:
        database.execute("CREATE TABLE theirs (a)")
    before = others.read_bytes()
    with pytest.raises(InvalidRequest, match="another program"):
        await open_store(str(others))
    assert others.read_bytes() == before

    with pytest.raises(StoreUnavailable):
        await open_store(str(tmp_path))  # a folder


async def test_a_newer_store_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await (await open_store(str(path))).close()
    newer = len(migrations("sqlite")) + 1
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {newer}")
    with pytest.raises(WrongState) as refused:
        await open_store(str(path))
    assert (refused.value.details["version"], refused.value.details["known"]) == (newer, newer - 1)
    assert "newer" in refused.value.hint
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (newer,)


async def test_migrations_run_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    store = await open_store(str(path))
    (row,) = await store.commit(Put(Row("thing", "t-1", document={"a": 1})))
    await store.close()

    from ringfence.store import sqlite_work

    known = migrations("sqlite")
    later = (*known, (len(known) + 1, "CREATE TABLE later (a);\nINSERT INTO later VALUES (1);\nNONSENSE;"))
    monkeypatch.setattr(sqlite_work, "missing", lambda dialect, version: later[version:])
    with pytest.raises(StoreUnavailable):
        await open_store(str(path))
    with closing(sqlite3.connect(path)) as database:  # nothing of the half that worked
        assert database.execute("PRAGMA user_version").fetchone() == (len(known),)
        assert database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'later'").fetchone() == (0,)

    whole = (*known, (len(known) + 1, "CREATE TABLE later (a);\nINSERT INTO later VALUES (1);"))
    monkeypatch.setattr(sqlite_work, "missing", lambda dialect, version: whole[version:])
    stores = await asyncio.gather(*(open_store(str(path)) for _ in range(4)))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM later").fetchone() == (1,)
    assert await stores[0].get("thing", "t-1") == row
    for store in stores:
        await store.close()


async def test_a_damaged_file_is_an_error_and_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await open_store(str(path))
    await store.commit(
        *(Put(Row("thing", f"t-{number}", document={"x": "y" * 200})) for number in range(500))
    )
    await store.close()
    content = bytearray(path.read_bytes())
    content[8192:-8192] = os.urandom(len(content) - 16384)
    path.write_bytes(content)

    async def read() -> None:
        store = await open_store(str(path))
        try:
            await store.find("thing", limit=1000)
        finally:
            await store.close()

    with pytest.raises(StoreUnavailable) as refused:
        await read()
    assert "copy" in refused.value.hint


async def test_leases_end_with_the_boot(store: SqliteStore, tmp_path: Path) -> None:
    assert await store.lease("l", "a", 1e9)
    assert not await store.lease("l", "b", 1.0)
    with closing(sqlite3.connect(tmp_path / "store.db")) as database, database:
        database.execute("UPDATE leases SET boot = 'another'")
    assert await store.lease("l", "b", 1.0)


async def test_old_changes_are_forgotten_and_told_as_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringfence.store import sqlite_work

    monkeypatch.setattr(sqlite_work, "_KEPT_CHANGES", 50)
    monkeypatch.setattr(sqlite_work, "_FORGET_EVERY", 10)
    store, other = [await open_store(str(tmp_path / "store.db")) for _ in range(2)]
    changes = store.watch()
    # All in one transaction: no look falls in between.
    await other.commit(*(Put(Row("thing", f"t-{number}")) for number in range(500)))
    async with asyncio.timeout(60):
        assert await anext(changes) == ("", "")
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        assert database.execute("SELECT count(*) FROM changes").fetchone()[0] <= 60
    await store.close()
    await other.close()


def test_a_loop_that_ends_leaves_no_thread(tmp_path: Path) -> None:
    # Nobody closes it: the process still ends, and what returned is there.
    code = (
        "import asyncio\n"
        "from ringfence.store.opening import open_store\n"
        "from ringfence.store.contract import Put, Row\n"
        "async def main():\n"
        f"    store = await open_store({str(tmp_path / 'store.db')!r})\n"
        "    await store.commit(Put(Row('thing', 't-1')))\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        assert database.execute("SELECT id FROM rows").fetchall() == [("t-1",)]


async def test_remove_needs_room_too_and_says_so(small_disk: Path) -> None:
    # Not even a removal is half done.
    store = await open_store(str(small_disk / "store.db"))
    (row,) = await store.commit(Put(Row("thing", "t-1", labels={"a": "b"}, document={"x": "y" * 900_000})))
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))
    failed = False
    try:
        await store.commit(Remove("thing", "t-1"), Add("removed", 1))
    except StoreUnavailable:
        failed = True
    assert (await store.count("thing"), await store.counter("removed")) == ((1, 0) if failed else (0, 1))
    (small_disk / "filler").unlink()
    if failed:
        assert await store.get("thing", "t-1") == row
    await store.commit(Remove("thing", "t-1"))
    await store.close()
