"""Connections to PostgreSQL, made when needed and kept; a lost one is replaced by the next who asks.

No timers and no tasks of its own: while the server is away every call says so at once, and the first call
after it is back finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import AsyncIterator
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

Connection = psycopg.AsyncConnection[Any]

WAIT = 10.0  # seconds for a free connection, and for a new one
# A peer that vanished without a word is noticed within half a minute.
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": int(WAIT),
    "application_name": "ringfence",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def _spoken_to(connection: Connection) -> bool:
    """Whether the server has said something that nobody asked for, or hung up: it ends the connection. So a
    change that is sent over one that was idle is not lost on a server that has left long ago.
    """
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


class Late:
    """A limit in seconds to all that is done on a connection in its block, also where the server neither
    answers nor hangs up: then our end is cut, and whoever waits gets an OperationalError. ``cut`` tells.
    """

    __slots__ = ("_connection", "_seconds", "_timer", "cut")

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self.cut = False

    def __enter__(self) -> Late:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cut)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _cut(self) -> None:
        self.cut = True
        # Not closed here: the loop still waits for this descriptor, and now hears that it has ended.
        with (
            contextlib.suppress(OSError, psycopg.Error),  # it may be closed already
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)


class Pool:
    """At most ``most`` connections at a time, each set up with the statements of ``session``, which the
    server has to answer within ``answers`` seconds.
    """

    def __init__(self, url: str, most: int, session: str, answers: float = WAIT) -> None:
        given = conninfo_to_dict(url)
        self._settings = {**{name: value for name, value in _DEFAULTS.items() if name not in given}, **given}
        self._session = session
        self._answers = answers
        self._free = asyncio.Semaphore(most)
        self._idle: list[Connection] = []
        self._generation = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """One that nobody else uses; psycopg.OperationalError if there is none in time."""
        if not self._free.locked():
            await self._free.acquire()
        else:
            try:
                async with asyncio.timeout(WAIT):
                    await self._free.acquire()
            except TimeoutError:
                raise psycopg.OperationalError("all connections are busy") from None
        try:
            generation = self._generation
            connection = self._pop() or await self._connect()
            try:
                yield connection
            finally:
                await self._put(connection, generation)
        finally:
            self._free.release()

    @contextlib.asynccontextmanager
    async def own_connection(self) -> AsyncIterator[Connection]:
        """One besides the others, for as long as it is wanted."""
        connection = await self._connect()
        try:
            yield connection
        finally:
            await connection.close()

    async def clear(self) -> None:
        """The server went away: let go of what is idle, and of what is in use when it comes back."""
        self._generation += 1
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def close(self) -> None:
        """Let go of all. Idempotent."""
        self._closed = True
        await self.clear()

    def _pop(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the one used last: its memory is warm, and the others may rest
            if not connection.closed and not _spoken_to(connection):
                return connection
            connection.pgconn.finish()
        return None

    async def _put(self, connection: Connection, generation: int) -> None:
        idle = psycopg.pq.TransactionStatus.IDLE
        usable = not connection.closed and connection.info.transaction_status == idle
        if usable and generation == self._generation and not self._closed:
            self._idle.append(connection)
        else:
            await connection.close()

    async def _connect(self) -> Connection:
        connection = await psycopg.AsyncConnection.connect(autocommit=True, **self._settings)
        try:
            with Late(connection, self._answers):
                await connection.execute(self._session)
        except BaseException:
            await connection.close()
            raise
        return connection
