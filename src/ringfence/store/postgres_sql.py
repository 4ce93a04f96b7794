"""Every statement that the PostgreSQL store sends, by name, and changes as its functions want them."""

# ruff: noqa: S608 - the only thing put together here is our own list of columns

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ringfence.store.codec import encode
from ringfence.store.contract import Add, Change, Event, Held, Put, Remove

COLUMNS = "kind, id, project, state, key, due, created, revision, labels::text, document"

GET = f"SELECT {COLUMNS} FROM rf_rows WHERE kind = %s AND id = %s"
COMMIT = "SELECT rf_commit(%s, %s, %s)"
TAKE = f"SELECT {COLUMNS} FROM rf_take(%s, %s, %s, %s, %s, %s, %s, %s, %s)"
EVENTS = "SELECT kind, subject, project, name, at, data, number FROM rf_events WHERE number > %s"
FORGET_BEFORE = (
    "DELETE FROM rf_events WHERE number IN (SELECT number FROM"
    " (SELECT number, at FROM rf_events ORDER BY number LIMIT %s) AS oldest"
    " WHERE at < %s AND number < (SELECT max(number) FROM rf_events))"
)
FORGET_BEYOND = (
    "DELETE FROM rf_events WHERE number IN (SELECT number FROM rf_events WHERE project = %s AND number <="
    " (SELECT number FROM rf_events WHERE project = %s ORDER BY number DESC LIMIT 1 OFFSET %s)"
    " ORDER BY number LIMIT %s)"
)
COUNTER = (
    "SELECT value FROM rf_counters"
    " WHERE name = %s AND (until = 0 OR until > extract(epoch FROM clock_timestamp()))"
)

# A lease is had by whoever had it, or by anybody once its time is up.
LEASE = (
    "INSERT INTO rf_leases AS had VALUES (%s, %s, clock_timestamp() + make_interval(secs => %s))"
    " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, until = excluded.until"
    " WHERE had.owner = excluded.owner OR had.until <= clock_timestamp()"
)
RELEASE = "DELETE FROM rf_leases WHERE name = %s AND owner = %s"

SESSION = (
    "SET lock_timeout = {lock:.0f}; SET statement_timeout = {statement:.0f};"
    " SET default_transaction_isolation = 'read committed'"
)
SCHEMA = "SELECT current_schema()"

# One process migrates at a time; the lock goes with the transaction.
MIGRATING = (
    "SET LOCAL statement_timeout = 0; SELECT pg_advisory_xact_lock(hashtextextended(current_schema(), 7265))"
)
HAS_VERSION = "SELECT to_regclass(current_schema() || '.rf_schema') IS NOT NULL"
MAKE_VERSION = "CREATE TABLE rf_schema (version integer NOT NULL); INSERT INTO rf_schema VALUES (0)"
VERSION = "SELECT version FROM rf_schema"
SET_VERSION = "UPDATE rf_schema SET version = %s"


def changes_as_json(changes: Sequence[Change]) -> str:
    """The changes as ``rf_commit`` and ``rf_take`` take them."""
    return json.dumps([_as_object(change) for change in changes])


def _as_object(change: Change) -> dict[str, Any]:
    if isinstance(change, Put):
        row = change.row
        return {
            "t": "put",
            "unique": change.unique,
            "kind": row.kind,
            "id": row.id,
            "project": row.project,
            "state": row.state,
            "key": row.key,
            "due": row.due,
            "created": row.created,
            "revision": row.revision,
            "labels": dict(row.labels),
            "document": encode(row.document),
        }
    if isinstance(change, Event):
        return {
            "t": "event",
            "kind": change.kind,
            "subject": change.subject,
            "project": change.project,
            "name": change.name,
            "at": change.at,
            "data": encode(change.data),
        }
    if isinstance(change, Add):
        return {
            "t": "add",
            "counter": change.counter,
            "amount": change.amount,
            "most": change.most,
            "every": change.every,
        }
    if isinstance(change, Held):
        return {"t": "held", "lease": change.lease, "owner": change.owner}
    assert isinstance(change, Remove)
    return {"t": "remove", "kind": change.kind, "id": change.id, "revision": change.revision}
