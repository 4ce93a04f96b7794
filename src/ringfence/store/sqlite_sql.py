"""Every statement that the SQLite store sends, by name."""

# ruff: noqa: S608 - the only thing put together here is our own list of columns

from functools import cache

COLUMNS = "kind, id, project, state, key, due, created, revision, labels, document"

GET = f"SELECT {COLUMNS} FROM rows WHERE kind = ? AND id = ?"
INSERT = (
    f"INSERT INTO rows ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?) ON CONFLICT (kind, id) DO NOTHING"
)
INDEXED = ("project", "state", "key", "due", "created", "labels")
HAD = f"SELECT {', '.join(INDEXED)} FROM rows WHERE kind = ? AND id = ? AND revision = ?"


@cache
def update(columns: tuple[str, ...]) -> str:
    """The statement that changes these columns and the document. Naming a column writes all of its indexes,
    whether its value is another or not: that was half of the time of a transaction.
    """
    changed = "".join(f", {name} = ?" for name in columns)
    return f"UPDATE rows SET revision = revision + 1, document = ?{changed} WHERE kind = ? AND id = ?"


# Another row of this name. `indexed by`: a project may have thousands of rows, a name has few.
NAMESAKE = (
    "SELECT id FROM rows INDEXED BY rows_by_key"
    " WHERE kind = ? AND key = ? AND project = ? AND id != ? LIMIT 1"
)
DELETE = "DELETE FROM rows WHERE kind = ? AND id = ?"
DELETE_REVISION = "DELETE FROM rows WHERE kind = ? AND id = ? AND revision = ?"

LABEL = "INSERT INTO labels (kind, id, name, value) VALUES (?, ?, ?, ?)"
UNLABEL = "DELETE FROM labels WHERE kind = ? AND id = ?"

OLDEST = (
    f"SELECT {COLUMNS} FROM rows INDEXED BY rows_by_key WHERE kind = ? AND key = ? AND state = ?"
    " ORDER BY created, id LIMIT 1"
)
EVENT = "INSERT INTO events (kind, subject, project, name, at, data) VALUES (?, ?, ?, ?, ?, ?)"
EVENTS = "SELECT kind, subject, project, name, at, data, number FROM events WHERE number > ?"
FORGET_BEFORE = (
    "DELETE FROM events WHERE number IN (SELECT number FROM"
    " (SELECT number, at FROM events ORDER BY number LIMIT ?2)"
    " WHERE at < ?1 AND number < (SELECT max(number) FROM events))"
)
FORGET_BEYOND = (
    "DELETE FROM events WHERE number IN (SELECT number FROM events WHERE project = ?1 AND number <="
    " (SELECT number FROM events WHERE project = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)"
    " ORDER BY number LIMIT ?3)"
)

ADD = (
    "INSERT INTO counters (name, value, until) VALUES (?1, max(0, ?2), ?3) ON CONFLICT (name) DO UPDATE"
    " SET value = max(0, CASE WHEN until = ?3 THEN value ELSE 0 END + ?2), until = ?3 RETURNING value"
)
COUNTER = "SELECT value FROM counters WHERE name = ? AND (until = 0 OR until > ?)"

# A lease is had by whoever had it, or by anybody once its time is up or its boot is over.
LEASE = (
    "INSERT INTO leases (name, owner, boot, until) VALUES (?1, ?2, ?3, ?4 + ?5)"
    " ON CONFLICT (name) DO UPDATE SET owner = ?2, boot = ?3, until = ?4 + ?5"
    " WHERE owner = ?2 OR boot != ?3 OR until <= ?4"
)
HELD = "SELECT 1 FROM leases WHERE name = ? AND owner = ? AND boot = ? AND until > ?"
RELEASE = "DELETE FROM leases WHERE name = ? AND owner = ?"

CHANGED = "INSERT INTO changes (origin, kind, id) VALUES (?, ?, ?)"
CHANGES = "SELECT number, kind, id, origin FROM changes WHERE number > ? ORDER BY number"
NEWEST_CHANGE = "SELECT max(number) FROM changes"
OLDEST_CHANGE = "SELECT min(number) FROM changes"
FORGET_CHANGES = "DELETE FROM changes WHERE number <= ?"
