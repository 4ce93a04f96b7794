"""The store's contract: rows of several kinds, changed in transactions, with conditions.

A row is what every kind has in common as columns (project, state, key, due, labels, revision), and the rest
as a document that only its owner in ``ringfence.control`` reads. So one small contract carries sandboxes,
pools, jobs, volumes, keys and quotas, and both implementations pass one shipped conformance suite.

One transition is one :meth:`Store.commit`, which holds the change, its conditions, its event and its
counters: all of it happens, or nothing. A commit that returned is on disk (SQLite: ``synchronous=FULL`` for
those that say ``durable``; else the operating system's crash may take the last ones, a killed process never
does).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from ringfence.model.values import dataclass

ANSWERS = 15.0  # seconds within which a store answers, or says that it does not


@dataclass(frozen=True, slots=True)
class Row:
    """One object. ``revision`` grows by one with every change; 0 has never been stored.

    ``key``: what rows of a kind are looked up by besides id and state (a pool's key, a key's hash, a name in
    a project …). ``due``: seconds since the epoch when something has to be done about it at the latest
    (deadline, idle, retry, expiry), ``None`` for never. ``created``: seconds since the epoch; ids sort by it.
    """

    kind: str
    id: str
    project: str = ""
    state: str = ""
    key: str = ""
    due: float | None = None
    created: float = 0.0
    revision: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to one object; append-only. ``number`` is given by the store and grows, per store."""

    kind: str
    subject: str  # id of the row
    project: str
    name: str  # e.g. sandbox.running
    at: float
    data: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Write a row. Its ``revision`` is the one it was read with, 0 to create it; the store adds one.

    Conflict: the stored revision is another, or the row to create exists. ``unique``: also in conflict if
    another row of that kind and project has the same ``key`` (names).
    """

    row: Row
    unique: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a row at this revision; -1: whatever it is, also if there is none."""

    kind: str
    id: str
    revision: int = -1


@dataclass(frozen=True, slots=True)
class Add:
    """Change a counter; ``most``: QuotaExceeded rather than grow above. Counters never go below 0, and what
    makes one smaller is never refused.

    ``every``: it begins at 0 again in each period of so many seconds on the store's clock (creates a
    minute); the error then has ``details['retry_after']``.
    """

    counter: str
    amount: int
    most: int | None = None
    every: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Only while this owner holds that lease (fencing): else LeaseLost. One whose time is up is not held."""

    lease: str
    owner: str


Change = Put | Remove | Add | Held | Event


class Store(Protocol):
    """Any number of processes may have one store open. Every call may raise StoreUnavailable: try again
    later (of a change that was under way nobody knows whether it happened: read it again), and those that
    write InvalidRequest: a text with NUL or half a surrogate pair, a document that is not JSON. Reading by
    such a text finds nothing.

    A call whose task is cancelled has happened wholly or not at all.

    No call is for ever: what is not done after :data:`ANSWERS` seconds (a disk that hangs, a server that was
    stopped) is StoreUnavailable, with ``details['cause'] == "timeout"``.
    """

    async def close(self) -> None:
        """Let go of it. Idempotent."""

    async def get(self, kind: str, id: str) -> Row:
        """One row.

        Raises:
            NotFound: there is none.
        """

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
        """Rows that meet all conditions, by id; ``after``: beyond this id in that order (pagination)."""

    async def due(
        self, kind: str, before: float, *, states: Sequence[str] = (), limit: int = 100
    ) -> list[Row]:
        """Rows whose ``due`` has come, the longest overdue first."""

    async def count(
        self, kind: str, *, project: str | None = None, states: Sequence[str] = (), key: str | None = None
    ) -> int:
        """How many rows meet all conditions."""

    async def commit(self, *changes: Change, durable: bool = False) -> list[Row]:
        """All changes in one transaction, in order. Returns the rows put, with their new revisions.

        Raises:
            Conflict: a revision or a unique key did not fit; read again and decide anew.
            QuotaExceeded: a counter would go above its limit; ``details['counter']`` names it.
            LeaseLost: a lease is somebody else's now.
        """

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
        """One row of that kind, key and state, the oldest, into another state, in one conditional write.

        ``document`` is merged into the row's own at the top level; ``project`` and ``due`` replace the row's
        if given; ``changes`` (counters, puts of other rows, events whose ``subject`` is ``""`` meaning this
        row) happen in the same transaction, and may fail it as in :meth:`commit`. No two callers, in any
        process, get the same row; one that somebody else is taking may be passed over. ``None``: there is
        none, and nothing happened.
        """

    async def events(
        self, *, project: str | None = None, subject: str | None = None, after: int = 0, limit: int = 100
    ) -> list[Event]:
        """Events beyond a number, oldest first."""

    async def forget_before(self, moment: float, *, limit: int = 1000) -> int:
        """Remove events that happened before a moment (seconds since the epoch): of the ``limit`` oldest
        ones. Returns how many went. The newest of all stays: numbers are not given twice.
        """

    async def forget_beyond(self, project: str, most: int, *, limit: int = 1000) -> int:
        """Remove a project's events but for the newest ``most`` (1 or more), the oldest first, at most
        ``limit``. Returns how many went.
        """

    async def counter(self, name: str) -> int:
        """A counter's value; 0 if it was never changed, or its period is over."""

    async def lease(self, name: str, owner: str, seconds: float) -> bool:
        """Get or renew the right to act on something; False while another owner has it."""

    async def release(self, name: str, owner: str) -> None:
        """Give a lease back. Idempotent."""

    def watch(self) -> AsyncIterator[tuple[str, str]]:
        """Kind and id of each row changed by any process from now on. May repeat; ``("", "")``: may have
        missed some.
        """
        ...
