"""The store in PostgreSQL, shared by any number of processes on any number of machines.

A transaction is one call of a function in the database: no lock is ever held while a message is under way,
and a process that dies in the middle leaves nothing half done and nobody waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import psycopg
from psycopg import sql as identifiers
from psycopg.conninfo import conninfo_to_dict

from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    LeaseLost,
    NotFound,
    QuotaExceeded,
    RingfenceError,
    StoreUnavailable,
)
from ringfence.store import postgres_sql as sql
from ringfence.store.codec import check, check_lease, check_taken, decode, encode, row_of, storable
from ringfence.store.contract import ANSWERS, Change, Event, Put, Remove, Row
from ringfence.store.migrations import missing
from ringfence.store.postgres_pool import Connection, Late, Pool
from ringfence.store.watching import MISSED, Watchers

_T = TypeVar("_T")

MOST_CONNECTIONS = 10  # a process, besides the one that listens
PATIENCE = 10.0
_SERVERS = 0.8  # of the time for an answer: then the server itself gives up
_TRIES = 10  # of a transaction that the database asks to repeat
_LOST = ("57P", "08")  # the server ends the connection
_OURS: dict[str, type[RingfenceError]] = {"RF001": Conflict, "RF002": QuotaExceeded, "RF003": LeaseLost}


class PostgresStore:
    """A :class:`~ringfence.store.contract.Store`; see there. Made by :meth:`open`, used on one event loop."""

    def __init__(self, pool: Pool, answers: float) -> None:
        self._pool = pool
        self._answers = answers
        self._origin = secrets.token_hex(8)
        self._watchers = Watchers()
        self._listening: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        connections: int = MOST_CONNECTIONS,
        patience: float = PATIENCE,
        answers: float = ANSWERS,
    ) -> PostgresStore:
        """Connect, and bring the schema up to date. ``patience``: seconds for a row that another holds;
        ``answers``: for any call. A server that lives ends it itself, somewhat earlier.

        Raises:
            InvalidRequest: not an address of a database.
            WrongState: a newer Ringfence wrote it.
            StoreUnavailable: it does not answer, or refuses us.
        """
        try:
            conninfo_to_dict(url)
        except psycopg.Error as error:
            raise InvalidRequest(f"not an address of a database: {error}") from None
        session = sql.SESSION.format(lock=patience * 1000, statement=answers * _SERVERS * 1000)
        store = cls(Pool(url, connections, session, answers), answers)
        try:
            await store._call(store._migrate, within=None)  # a new version may have much to change
            heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            store._listening = asyncio.create_task(store._listen(heard), name="ringfence-store-listen")
            await heard
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Let go of every connection. Idempotent."""
        self._closed = True
        self._watchers.close()
        if self._listening is not None:
            self._listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listening
        await self._pool.close()

    async def _call(
        self,
        do: Callable[[Connection], Awaitable[_T]],
        *,
        again: bool = False,
        within: float | None = 0.0,
    ) -> _T:
        """One transaction. ``again``: it only reads, so a connection that was lost is no reason to fail.
        ``within``: seconds that the server has; 0: what the store was opened with, ``None``: any.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        for left in reversed(range(_TRIES)):
            late: Late | None = None
            try:
                async with self._pool.connection() as connection:
                    if within is None:
                        return await do(connection)
                    with Late(connection, within or self._answers) as late:
                        return await do(connection)
            except psycopg.Error as error:
                if late is not None and late.cut:
                    raise StoreUnavailable(
                        f"PostgreSQL: no answer within {within or self._answers:g} s",
                        hint=_HINTS[""],
                        cause="timeout",
                    ) from None
                ours = _OURS.get(error.sqlstate or "")
                if ours is not None:
                    raise ours(
                        error.diag.message_primary or "", **json.loads(error.diag.message_detail or "{}")
                    ) from None
                if error.sqlstate in ("40001", "40P01") and left:
                    # Serialisation or deadlock: the database chose us to go back, so that others go on.
                    await asyncio.sleep(random.uniform(0.001, 0.02))  # noqa: S311
                elif again and (not error.sqlstate or error.sqlstate.startswith(_LOST)):
                    again = False
                    await self._pool.clear()
                else:
                    raise _unavailable(error) from None
        raise AssertionError("not reached")

    async def _migrate(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute(sql.MIGRATING)
            if not await _value(connection, sql.HAS_VERSION):
                await connection.execute(sql.MAKE_VERSION)
            for number, text in missing("postgres", await _value(connection, sql.VERSION)):
                await connection.execute(text)
                await connection.execute(sql.SET_VERSION, (number,))

    # --- what others changed --------------------------------------------------------------------------------

    async def _listen(self, heard: asyncio.Future[None]) -> None:
        pause = 0.1
        while True:
            try:
                async with self._pool.own_connection() as connection:
                    schema = await _value(connection, sql.SCHEMA)
                    channel = identifiers.Identifier(f"ringfence_{schema}")
                    await connection.execute(identifiers.SQL("LISTEN {}").format(channel))
                    pause = 0.1
                    if heard.done():
                        self._watchers.tell([MISSED])
                    else:
                        heard.set_result(None)
                    async for notice in connection.notifies():
                        self._heard(notice.payload)
            except psycopg.Error as error:
                if not heard.done():
                    heard.set_exception(_unavailable(error))
                    return
            # The server went away: so did all the others' other ends.
            await self._pool.clear()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _heard(self, payload: str) -> None:
        try:
            origin, changed = json.loads(payload)
            rows = [(str(kind), str(id)) for kind, id in changed]
        except (ValueError, TypeError):  # somebody else's notice
            rows, origin = [MISSED], ""
        if origin != self._origin or MISSED in rows:
            self._watchers.tell(rows)

    # --- the contract ---------------------------------------------------------------------------------------

    async def get(self, kind: str, id: str) -> Row:
        """One row, or NotFound."""
        found = await self._rows(sql.GET, kind, id) if storable(kind, id) else []
        if not found:
            raise NotFound(f"there is no {kind} {id!r}", kind=kind, id=id)
        return found[0]

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
        where, values = _conditions(kind, project, states, key)
        if wanted:
            where += " AND labels @> %s::jsonb"
            values.append(encode(wanted))
        if after:
            where += " AND id < %s" if newest_first else " AND id > %s"
            values.append(after)
        order = "DESC" if newest_first else "ASC"
        text = f"SELECT {sql.COLUMNS} FROM rf_rows WHERE {where} ORDER BY id {order} LIMIT %s"  # noqa: S608
        return await self._rows(text, *values, limit)

    async def due(
        self, kind: str, before: float, *, states: Sequence[str] = (), limit: int = 100
    ) -> list[Row]:
        """Rows whose time has come."""
        if limit <= 0 or not storable(kind, *states):
            return []
        where, values = _conditions(kind, None, states, None)
        text = f"SELECT {sql.COLUMNS} FROM rf_rows WHERE {where} AND due <= %s ORDER BY due, id LIMIT %s"  # noqa: S608
        return await self._rows(text, *values, before, limit)

    async def count(
        self, kind: str, *, project: str | None = None, states: Sequence[str] = (), key: str | None = None
    ) -> int:
        """How many rows meet all conditions."""
        if not storable(kind, project, key, *states):
            return 0
        where, values = _conditions(kind, project, states, key)
        found = await self._read(f"SELECT count(*) FROM rf_rows WHERE {where}", *values)  # noqa: S608
        return int(found[0][0])

    async def commit(self, *changes: Change, durable: bool = False) -> list[Row]:
        """All changes in one transaction; those not ``durable`` as safe as ``synchronous_commit`` says."""
        check(changes)
        text = sql.changes_as_json(changes)
        await self._call(lambda connection: connection.execute(sql.COMMIT, (text, self._origin, durable)))
        self._watchers.tell(_changed(changes))
        return [_stored(change.row) for change in changes if isinstance(change, Put)]

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
        check_taken(into, project, due)
        if not storable(kind, key, state):
            return None
        more, text = encode(document), sql.changes_as_json(changes)
        values = (kind, key, state, into, more, project, due, text, self._origin)

        async def taking(connection: Connection) -> list[Any]:
            return await (await connection.execute(sql.TAKE, values)).fetchall()

        found = await self._call(taking)
        if not found:
            return None
        row = row_of(found[0])
        self._watchers.tell([(kind, row.id), *_changed(changes)])
        return row

    async def events(
        self, *, project: str | None = None, subject: str | None = None, after: int = 0, limit: int = 100
    ) -> list[Event]:
        """Events beyond a number."""
        if limit <= 0 or not storable(project, subject):
            return []
        text, values = sql.EVENTS, [after]
        for name, value in (("project", project), ("subject", subject)):
            if value is not None:
                text += f" AND {name} = %s"
                values.append(value)  # type: ignore[arg-type]
        found = await self._read(text + " ORDER BY number LIMIT %s", *values, limit)
        return [
            Event(kind, of, project_of, name, at, decode(data), number)
            for kind, of, project_of, name, at, data, number in found
        ]

    async def forget_before(self, moment: float, *, limit: int = 1000) -> int:
        """Remove events of before."""
        return await self._forget(sql.FORGET_BEFORE, limit, moment)

    async def forget_beyond(self, project: str, most: int, *, limit: int = 1000) -> int:
        """Remove a project's events but for the newest."""
        if not storable(project):
            return 0
        return await self._forget(sql.FORGET_BEYOND, project, project, most, limit)

    async def _forget(self, text: str, *values: Any) -> int:
        return (await self._call(lambda connection: connection.execute(text, values))).rowcount

    async def counter(self, name: str) -> int:
        """A counter's value."""
        found = await self._read(sql.COUNTER, name) if storable(name) else []
        return int(found[0][0]) if found else 0

    async def lease(self, name: str, owner: str, seconds: float) -> bool:
        """Get or renew the right to act on something."""
        check_lease(name, owner, seconds)
        done = await self._call(lambda connection: connection.execute(sql.LEASE, (name, owner, seconds)))
        return done.rowcount == 1

    async def release(self, name: str, owner: str) -> None:
        """Give a lease back."""
        check_lease(name, owner, 0)
        await self._call(lambda connection: connection.execute(sql.RELEASE, (name, owner)))

    def watch(self) -> AsyncIterator[tuple[str, str]]:
        """Kind and id of each row changed from now on."""
        return self._watchers.add()

    async def _read(self, text: str, *values: Any) -> list[Any]:
        async def reading(connection: Connection) -> list[Any]:
            return await (await connection.execute(text, values)).fetchall()

        return await self._call(reading, again=True)

    async def _rows(self, text: str, *values: Any) -> list[Row]:
        return [row_of(found) for found in await self._read(text, *values)]


async def _value(connection: Connection, text: str) -> Any:
    found = await (await connection.execute(text)).fetchone()
    return found[0] if found else None


def _conditions(
    kind: str, project: str | None, states: Sequence[str], key: str | None
) -> tuple[str, list[Any]]:
    where, values = "kind = %s", [kind]
    if project is not None:
        where += " AND project = %s"
        values.append(project)
    if states:
        where += " AND state = ANY(%s)"
        values.append(list(states))  # type: ignore[arg-type]
    if key is not None:
        where += " AND key = %s"
        values.append(key)
    return where, values


def _stored(row: Row) -> Row:
    return replace(row, revision=row.revision + 1)


def _changed(changes: Sequence[Change]) -> list[tuple[str, str]]:
    rows = [(change.row.kind, change.row.id) for change in changes if isinstance(change, Put)]
    return rows + [(change.kind, change.id) for change in changes if isinstance(change, Remove)]


def _unavailable(error: psycopg.Error) -> RingfenceError:
    state = error.sqlstate or ""
    text = str(error).strip().splitlines()
    hint = next((hint for begin, hint in _HINTS.items() if begin and state.startswith(begin)), _HINTS[""])
    if not state and "FATAL" in str(error):  # while connecting, PostgreSQL's reason comes as text only
        hint = "see user, password and database in its address; `createdb` makes a database"
    return StoreUnavailable(
        f"PostgreSQL: {text[0] if text else type(error).__name__}", hint=hint, cause=state
    )


_HINTS = {
    "53100": "make room on the database's disk; nothing of this change was written",
    "53300": "the database has no connection left; raise its max_connections",
    "55P03": "another process holds it for a long time; try again",
    "57014": "the database was too slow; try again",
    "25006": "the database is read-only now; a standby?",
    "42501": "the database's user lacks a right",
    "": "the database does not answer; try again. A change that was under way may have happened",
}
