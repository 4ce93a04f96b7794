"""What the SQLite store does in its thread: functions of one connection, each a transaction or a read."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.model.errors import Conflict, InvalidRequest, LeaseLost, NotFound, QuotaExceeded
from ringfence.store import sqlite_sql as sql
from ringfence.store.codec import decode, encode, merged, row_of
from ringfence.store.contract import Add, Change, Event, Held, Put, Remove, Row
from ringfence.store.migrations import missing
from ringfence.store.watching import MISSED

APPLICATION = 0x52464E43  # "RFNC" in the file's header: this database is ours
_KEPT_CHANGES = 20_000  # other processes look 20 times a second
_FORGET_EVERY = 1_000
_AGAIN = 0.01  # seconds until a lock is asked for once more
_WAL_PAGES = 8_000  # in the log before a commit has to move them into the file
_WAL_KEPT = 64 * 1024**2  # bytes that the log's file keeps after a burst


def move_log(path: str) -> None:
    """Move what the log holds into the file, in nobody's way: on a connection of its own."""
    url = Path(path).as_uri() + "?mode=rw"  # never make one that was removed
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(url, uri=True)) as db:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


def boot() -> str:
    """This boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Work:
    """One connection to the file, for one thread."""

    def __init__(self, path: str, busy: float) -> None:
        self.origin = secrets.token_hex(8)
        self.boot = boot()
        self._busy = busy
        # Statements are compiled once and kept: compiling takes longer than running them.
        self.db = sqlite3.connect(path, isolation_level=None, timeout=busy, cached_statements=256)
        self.durable = False
        self.version = 0
        self.seen = 0
        self.written = 0
        self.transactions = 0

    def prepare(self) -> None:
        """Set the connection up and bring the schema up to date.

        Raises:
            InvalidRequest: the file is another program's database.
            WrongState: a newer Ringfence wrote it.
            sqlite3.Error: as it says.
        """
        db = self.db
        # One moment of the file: others may be making it.
        db.execute("BEGIN")
        (mine,) = db.execute("PRAGMA application_id").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        db.execute("COMMIT")
        if mine != APPLICATION and tables:
            raise InvalidRequest("the file is a database of another program")
        self._write_ahead()
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT}")
        # Moving the log into the file waits for the disk: usually a thread beside this one does it.
        db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        db.execute("PRAGMA temp_store = MEMORY")
        missing("sqlite", db.execute("PRAGMA user_version").fetchone()[0])
        with self.writing(durable=True):
            # Under the lock: of several that open it at once, one migrates.
            for number, text in missing("sqlite", db.execute("PRAGMA user_version").fetchone()[0]):
                for statement in _statements(text):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number}")
                db.execute(f"PRAGMA application_id = {APPLICATION}")
        self.version = db.execute("PRAGMA data_version").fetchone()[0]
        self.seen = self._newest()

    def _write_ahead(self) -> None:
        # While another connection is about to write, SQLite refuses this at once instead of waiting for it.
        give_up = time.monotonic() + self._busy
        while True:
            try:
                self.db.execute("PRAGMA journal_mode = WAL").fetchone()
                return
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() >= give_up:
                    raise
            time.sleep(_AGAIN)

    @contextmanager
    def writing(self, durable: bool = False) -> Iterator[None]:
        """A transaction: everything in it, or nothing."""
        if durable != self.durable:
            # Not possible inside a transaction. A full sync covers what was committed before it as well.
            self.db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self.durable = durable
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
            self.transactions += 1
        except BaseException:
            if self.db.in_transaction:  # some errors (disk full) have rolled back already
                self.db.execute("ROLLBACK")
            raise

    # --- reads ----------------------------------------------------------------------------------------------

    def get(self, kind: str, id: str) -> Row:
        """One row, or NotFound."""
        found = self.db.execute(sql.GET, (kind, id)).fetchone()
        if found is None:
            raise NotFound(f"there is no {kind} {id}", kind=kind, id=id)
        return row_of(found)

    def find(
        self,
        kind: str,
        project: str | None,
        states: Sequence[str],
        key: str | None,
        labels: Mapping[str, str],
        after: str,
        limit: int,
        newest_first: bool,
    ) -> list[Row]:
        """As the contract's ``find``."""
        where, values = _conditions(kind, project, states, key)
        for name, value in labels.items():
            where += " AND id IN (SELECT id FROM labels WHERE kind = ? AND name = ? AND value = ?)"
            values += [kind, name, value]
        if after:
            where += " AND id < ?" if newest_first else " AND id > ?"
            values.append(after)
        order = "DESC" if newest_first else "ASC"
        # SQLite itself would walk through all of the kind, as that gives the order, or through a state in all
        # projects: there are far fewer of a key, in a state or of a project.
        by = ""
        if key is not None:
            by = "INDEXED BY rows_by_key"
        elif not labels and (states or project is not None):
            by = "INDEXED BY rows_by_state" if project is None else "INDEXED BY rows_by_project"
        text = f"SELECT {sql.COLUMNS} FROM rows {by} WHERE {where} ORDER BY id {order} LIMIT ?"  # noqa: S608
        return [row_of(found) for found in self.db.execute(text, (*values, limit))]

    def due(self, kind: str, before: float, states: Sequence[str], limit: int) -> list[Row]:
        """As the contract's ``due``."""
        where, values = _conditions(kind, None, states, None)
        text = (
            f"SELECT {sql.COLUMNS} FROM rows INDEXED BY rows_by_due"  # noqa: S608
            f" WHERE {where} AND due IS NOT NULL AND due <= ? ORDER BY due, id LIMIT ?"
        )
        return [row_of(found) for found in self.db.execute(text, (*values, before, limit))]

    def count(self, kind: str, project: str | None, states: Sequence[str], key: str | None) -> int:
        """As the contract's ``count``."""
        where, values = _conditions(kind, project, states, key)
        return int(self.db.execute(f"SELECT count(*) FROM rows WHERE {where}", values).fetchone()[0])  # noqa: S608

    def events(self, project: str | None, subject: str | None, after: int, limit: int) -> list[Event]:
        """As the contract's ``events``."""
        text, values = sql.EVENTS, [after]
        for name, value in (("subject", subject), ("project", project)):
            if value is not None:
                # The plus keeps the index of projects out of it: of a subject there are fewer.
                text += f" AND {'+' if name == 'project' and subject is not None else ''}{name} = ?"
                values.append(value)  # type: ignore[arg-type]
        found = self.db.execute(text + " ORDER BY number LIMIT ?", (*values, limit))
        return [
            Event(kind, at_id, of, name, at, decode(data), number)
            for kind, at_id, of, name, at, data, number in found
        ]

    def counter(self, name: str) -> int:
        """A counter's value."""
        found = self.db.execute(sql.COUNTER, (name, time.time())).fetchone()
        return int(found[0]) if found else 0

    # --- writes ---------------------------------------------------------------------------------------------

    def forget(self, text: str, *values: Any) -> int:
        """Remove events; how many."""
        with self.writing(False):
            return self.db.execute(text, values).rowcount

    def commit(self, changes: Sequence[Change], durable: bool) -> tuple[list[Row], list[tuple[str, str]]]:
        """All changes or none; the rows put, and all that changed."""
        changed: list[tuple[str, str]] = []
        with self.writing(durable):
            rows = self._apply(changes, changed)
            self._note(changed)
        return rows, changed

    def take(
        self,
        kind: str,
        key: str,
        state: str,
        into: str,
        document: Mapping[str, Any],
        project: str | None,
        due: float | None,
        changes: Sequence[Change],
    ) -> tuple[Row | None, list[tuple[str, str]]]:
        """As the contract's ``take``."""
        with self.writing():
            found = self.db.execute(sql.OLDEST, (kind, key, state)).fetchone()
            if found is None:
                return None, []
            row = row_of(found)
            taken = replace(
                row,
                state=into,
                document=merged(row.document, document),
                project=row.project if project is None else project,
                due=row.due if due is None else due,
                revision=row.revision + 1,
            )
            had, now = (row.state, row.project, row.due), (into, taken.project, taken.due)
            self._update(kind, row.id, ("state", "project", "due"), had, now, encode(taken.document))
            changed = [(kind, row.id)]
            self._apply(changes, changed, subject=row.id)
            self._note(changed)
        return taken, changed

    def lease(self, name: str, owner: str, seconds: float) -> bool:
        """Get or renew it."""
        with self.writing():
            values = (name, owner, self.boot, time.clock_gettime(time.CLOCK_BOOTTIME), seconds)
            return self.db.execute(sql.LEASE, values).rowcount == 1

    def release(self, name: str, owner: str) -> None:
        """Give it back."""
        with self.writing():
            self.db.execute(sql.RELEASE, (name, owner))

    def _apply(
        self, changes: Sequence[Change], changed: list[tuple[str, str]], subject: str = ""
    ) -> list[Row]:
        rows = []
        for change in changes:
            if isinstance(change, Put):
                rows.append(self._put(change))
                changed.append((change.row.kind, change.row.id))
            elif isinstance(change, Event):
                self.db.execute(
                    sql.EVENT,
                    (
                        change.kind,
                        change.subject or subject,
                        change.project,
                        change.name,
                        change.at,
                        encode(change.data),
                    ),
                )
            elif isinstance(change, Add):
                self._add(change)
            elif isinstance(change, Held):
                now = time.clock_gettime(time.CLOCK_BOOTTIME)
                values = (change.lease, change.owner, self.boot, now)
                if self.db.execute(sql.HELD, values).fetchone() is None:
                    raise LeaseLost(f"{change.lease} is not {change.owner}'s now", lease=change.lease)
            elif self._remove(change):
                changed.append((change.kind, change.id))
        return rows

    def _put(self, change: Put) -> Row:
        row = change.row
        if change.unique:
            values: tuple[Any, ...] = (row.kind, row.key, row.project, row.id)
            if self.db.execute(sql.NAMESAKE, values).fetchone():
                raise Conflict(f"there is a {row.kind} {row.key} already", kind=row.kind, key=row.key)
        labels, document = encode(row.labels), encode(row.document)
        now = (row.project, row.state, row.key, row.due, row.created, labels)
        had: tuple[Any, ...] | None = ("{}",)
        if row.revision == 0:
            values = (row.kind, row.id, *now[:-1], labels, document)
            if self.db.execute(sql.INSERT, values).rowcount != 1:
                had = None
        else:
            had = self.db.execute(sql.HAD, (row.kind, row.id, row.revision)).fetchone()
            if had is not None:
                self._update(row.kind, row.id, sql.INDEXED, had, now, document)
        if had is None:
            raise Conflict(
                f"{row.kind} {row.id} was changed by somebody else",
                kind=row.kind,
                id=row.id,
                revision=row.revision,
            )
        if labels != had[-1]:
            self.db.execute(sql.UNLABEL, (row.kind, row.id))
            pairs = [(row.kind, row.id, name, value) for name, value in row.labels.items()]
            self.db.executemany(sql.LABEL, pairs)
        return replace(row, revision=row.revision + 1)

    def _update(
        self,
        kind: str,
        id: str,
        names: tuple[str, ...],
        had: tuple[Any, ...],
        now: tuple[Any, ...],
        document: str,
    ) -> None:
        new = [place for place in range(len(names)) if now[place] != had[place]]
        statement = sql.update(tuple(names[place] for place in new))
        self.db.execute(statement, (document, *(now[place] for place in new), kind, id))

    def _remove(self, change: Remove) -> bool:
        if change.revision < 0:
            gone = self.db.execute(sql.DELETE, (change.kind, change.id)).rowcount == 1
        else:
            values = (change.kind, change.id, change.revision)
            gone = self.db.execute(sql.DELETE_REVISION, values).rowcount == 1
            if not gone:
                raise Conflict(
                    f"{change.kind} {change.id} was changed by somebody else", kind=change.kind, id=change.id
                )
        if gone:
            self.db.execute(sql.UNLABEL, (change.kind, change.id))
        return gone

    def _add(self, change: Add) -> None:
        until, wait = 0.0, dict[str, Any]()
        if change.every is not None:
            now = time.time()
            until = (now // change.every + 1) * change.every
            wait = {"retry_after": until - now}
        (value,) = self.db.execute(sql.ADD, (change.counter, change.amount, until)).fetchone()
        if change.amount > 0 and change.most is not None and value > change.most:
            raise QuotaExceeded(
                f"{change.counter} would be {value}, and at most {change.most} are allowed",
                counter=change.counter,
                most=change.most,
                value=value - change.amount,
                **wait,
            )

    # --- what others changed --------------------------------------------------------------------------------

    def others(self) -> list[tuple[str, str]]:
        """What other connections changed since this was last asked."""
        (version,) = self.db.execute("PRAGMA data_version").fetchone()
        if version == self.version:
            return []
        self.version = version
        (oldest,) = self.db.execute(sql.OLDEST_CHANGE).fetchone()
        changed = [MISSED] if oldest is not None and oldest > self.seen + 1 else []
        for number, kind, id, origin in self.db.execute(sql.CHANGES, (self.seen,)):
            self.seen = number
            if origin != self.origin:
                changed.append((kind, id))
        return changed

    def _note(self, changed: Sequence[tuple[str, str]]) -> None:
        if not changed:
            return
        self.db.executemany(sql.CHANGED, [(self.origin, kind, id) for kind, id in changed])
        self.written += len(changed)
        if self.written >= _FORGET_EVERY:
            self.written = 0
            self.db.execute(sql.FORGET_CHANGES, (self._newest() - _KEPT_CHANGES,))

    def _newest(self) -> int:
        return int(self.db.execute(sql.NEWEST_CHANGE).fetchone()[0] or 0)


def _conditions(
    kind: str, project: str | None, states: Sequence[str], key: str | None
) -> tuple[str, list[Any]]:
    where, values = "kind = ?", [kind]
    if project is not None:
        where += " AND project = ?"
        values.append(project)
    if states:
        where += f" AND state IN ({', '.join('?' * len(states))})"
        values += states
    if key is not None:
        where += " AND key = ?"
        values.append(key)
    return where, values


def _statements(text: str) -> Iterator[str]:
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    assert not statement.strip(), f"half a statement: {statement}"
