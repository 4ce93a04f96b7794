"""The store in one SQLite file, for any number of processes of one machine.

All of SQLite runs in one thread of its own, so that neither a slow disk nor another process's lock ever stops
the event loop. Writes go to a write-ahead log: a killed process loses nothing that returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ringfence.model.errors import NotFound, RingfenceError, StoreUnavailable
from ringfence.store import sqlite_sql as sql
from ringfence.store.codec import check, check_lease, check_taken, encode, storable
from ringfence.store.contract import ANSWERS, Change, Event, Row
from ringfence.store.sqlite_work import Work, move_log
from ringfence.store.watching import Watchers

_T = TypeVar("_T")

BUSY = 15.0  # seconds that a write waits for another process's
_MOVE_AFTER = 300  # transactions in the log
_LOOK = 0.05  # seconds between two looks at what other processes changed


class SqliteStore:
    """A :class:`~ringfence.store.contract.Store`; see there. Made by :meth:`open`, used on one event loop."""

    def __init__(self, path: str, busy: float, answers: float) -> None:
        self.path = path
        self._busy = busy
        self._answers = answers
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[Work], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._watchers = Watchers()
        self._closed = False
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="ringfence-store", daemon=True)

    @classmethod
    async def open(cls, path: str, *, busy: float = BUSY, answers: float = ANSWERS) -> SqliteStore:
        """Open the file, made for its owner only if it is not there.

        ``busy``: seconds that a write waits for another process's; ``answers``: that a call takes at most.

        Raises:
            InvalidRequest: it is another program's database.
            WrongState: a newer Ringfence wrote it.
            StoreUnavailable: it can't be opened.
        """
        store = cls(os.path.abspath(path), busy, answers)  # noqa: ASYNC240 - asks no disk
        store._thread.start()
        try:
            await store._do(lambda work: None, within=None)  # a new version may have much to change
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Finish what was begun, then let go. Idempotent."""
        if not self._closed:
            self._closed = True
            self._watchers.close()
            self._jobs.put(None)
        await self._ended.wait()
        self._thread.join()

    # --- the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        work: Work | None = None
        moving = threading.Thread()
        looked = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=None if work is None else _LOOK)
                if job is None:
                    break
                work = self._run(work, *job)
                if work is not None and work.transactions >= _MOVE_AFTER and not moving.is_alive():
                    work.transactions = 0
                    moving = threading.Thread(target=move_log, args=(self.path,), name="ringfence-store-log")
                    moving.start()
                if time.monotonic() - looked < _LOOK:
                    continue
            if work is not None:
                looked = time.monotonic()
                # What can't be done now is done at the next look.
                with contextlib.suppress(sqlite3.Error):
                    if changed := work.others():
                        self._tell(self._watchers.tell, changed)
        if moving.ident is not None:
            moving.join()
        if work is not None:
            with contextlib.suppress(sqlite3.Error):
                work.db.close()
        self._tell(self._ended.set)

    def _run(self, work: Work | None, future: asyncio.Future[Any], do: Callable[[Work], Any]) -> Work | None:
        if future.done():  # nobody waits any more: it is not begun
            return work
        result: Any = None
        failure: BaseException | None = None
        try:
            if work is None:
                work = self._opened()
            result = do(work)
        except RingfenceError as error:
            failure = error
        except sqlite3.Error as error:
            failure = self._unavailable(error)
            if work is not None and _broken(work, error):
                with contextlib.suppress(sqlite3.Error):
                    work.db.close()
                work = None
        except BaseException as error:
            failure = error
        self._tell(_resolve, future, result, failure)
        return work

    def _opened(self) -> Work:
        path = Path(self.path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made, not opened: to close a descriptor of the file gives up every lock this process has on it.
            with contextlib.suppress(FileExistsError):
                os.mknod(path.resolve(), 0o600 | stat.S_IFREG)
        except OSError as error:
            raise StoreUnavailable(
                f"{self.path}: {error.strerror}", hint="see its folder's rights and disk"
            ) from None
        work = Work(self.path, self._busy)
        try:
            work.prepare()
        except BaseException as error:
            work.db.close()
            if isinstance(error, RingfenceError):
                error.message = f"{self.path}: {error.message}"
                error.args = (error.message,)
            raise
        return work

    def _tell(self, call: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *arguments)

    def _unavailable(self, error: sqlite3.Error) -> RingfenceError:
        name = getattr(error, "sqlite_errorname", None) or type(error).__name__
        hint = next((hint for begin, hint in _HINTS.items() if name.startswith(begin)), "")
        return StoreUnavailable(f"{self.path}: {error}", hint=hint, cause=name)

    async def _do(self, do: Callable[[Work], _T], *, within: float | None = 0.0) -> _T:
        """``within``: seconds that it may take; 0: what the store was opened with, ``None``: any."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[_T] = self._loop.create_future()
        self._jobs.put((future, do))
        if within is None:
            return await future
        late = self._loop.call_later(within or self._answers, self._late, future)
        try:
            return await future
        finally:
            late.cancel()

    def _late(self, future: asyncio.Future[Any]) -> None:
        error = StoreUnavailable(f"{self.path}: no answer in time", hint=_HINTS["LATE"], cause="timeout")
        _resolve(future, None, error)

    async def _change(self, do: Callable[[Work], tuple[_T, Iterable[tuple[str, str]]]]) -> _T:
        def done(work: Work) -> _T:
            result, changed = do(work)
            self._tell(self._watchers.tell, changed)
            return result

        return await self._do(done)

    # --- the contract ---------------------------------------------------------------------------------------

    async def get(self, kind: str, id: str) -> Row:
        """One row, or NotFound."""
        if not storable(kind, id):
            raise NotFound(f"there is no {kind!r} {id!r}", kind=kind, id=id)
        return await self._do(lambda work: work.get(kind, id))

    async def find(
        self,
        kind: str,
        *,
        project: str | None = None,
        states: Sequence[str] = (),
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        after: str = "",
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Row]:
        """Rows that meet all conditions, by id."""
        wanted = dict(labels or {})
        if limit <= 0 or not storable(kind, project, key, after, *states, *wanted, *wanted.values()):
            return []
        return await self._do(
            lambda work: work.find(kind, project, states, key, wanted, after, limit, newest_first)
        )

    async def due(
        self, kind: str, before: float, *, states: Sequence[str] = (), limit: int = 100
    ) -> list[Row]:
        """Rows whose time has come."""
        if limit <= 0 or not storable(kind, *states):
            return []
        return await self._do(lambda work: work.due(kind, before, states, limit))

    async def count(
        self, kind: str, *, project: str | None = None, states: Sequence[str] = (), key: str | None = None
    ) -> int:
        """How many rows meet all conditions."""
        if not storable(kind, project, key, *states):
            return 0
        return await self._do(lambda work: work.count(kind, project, states, key))

    async def commit(self, *changes: Change, durable: bool = False) -> list[Row]:
        """All changes in one transaction."""
        check(changes)
        return await self._change(lambda work: work.commit(changes, durable))

    async def take(
        self,
        kind: str,
        *,
        key: str,
        state: str,
        into: str,
        document: Mapping[str, Any],
        project: str | None = None,
        due: float | None = None,
        changes: Sequence[Change] = (),
    ) -> Row | None:
        """The oldest row of a key and state, into another state."""
        check(changes)
        encode(document)
        if not storable(kind, key, state):
            return None
        check_taken(into, project, due)
        return await self._change(
            lambda work: work.take(kind, key, state, into, document, project, due, changes)
        )

    async def events(
        self, *, project: str | None = None, subject: str | None = None, after: int = 0, limit: int = 100
    ) -> list[Event]:
        """Events beyond a number."""
        if limit <= 0 or not storable(project, subject):
            return []
        return await self._do(lambda work: work.events(project, subject, after, limit))

    async def forget_before(self, moment: float, *, limit: int = 1000) -> int:
        """Remove events of before."""
        return await self._do(lambda work: work.forget(sql.FORGET_BEFORE, moment, limit))

    async def forget_beyond(self, project: str, most: int, *, limit: int = 1000) -> int:
        """Remove a project's events but for the newest."""
        if not storable(project):
            return 0
        return await self._do(lambda work: work.forget(sql.FORGET_BEYOND, project, most, limit))

    async def counter(self, name: str) -> int:
        """A counter's value."""
        return await self._do(lambda work: work.counter(name)) if storable(name) else 0

    async def lease(self, name: str, owner: str, seconds: float) -> bool:
        """Get or renew the right to act on something."""
        check_lease(name, owner, seconds)
        return await self._do(lambda work: work.lease(name, owner, seconds))

    async def release(self, name: str, owner: str) -> None:
        """Give a lease back."""
        check_lease(name, owner, 0)
        await self._do(lambda work: work.release(name, owner))

    def watch(self) -> AsyncIterator[tuple[str, str]]:
        """Kind and id of each row changed from now on."""
        return self._watchers.add()


_HINTS = {
    "LATE": "its disk is slow, or hangs; try again. A change that was under way may have happened",
    "SQLITE_FULL": "make room on its disk; nothing of this change was written",
    "SQLITE_BUSY": "another process writes to it for a long time; try again",
    "SQLITE_LOCKED": "another process writes to it for a long time; try again",
    "SQLITE_IOERR": "its disk reported an error; see the system's log",
    "SQLITE_READONLY": "the file or its folder can't be written by this user",
    "SQLITE_CANTOPEN": "see the rights of the file and its folder, and whether the disk is full",
    "SQLITE_NOTADB": "the file is no SQLite database",
    "SQLITE_CORRUPT": "the file is damaged; restore it from a copy",
}


def _broken(work: Work, error: sqlite3.Error) -> bool:
    """Whether this connection had better be opened anew."""
    name = getattr(error, "sqlite_errorname", None) or ""
    return work.db.in_transaction or name.startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _resolve(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():  # whoever asked has gone
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
