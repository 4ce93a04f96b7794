-- Rows of every kind: what all have in common as columns, the rest as a JSON document.
CREATE TABLE rows (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    project TEXT NOT NULL,
    state TEXT NOT NULL,
    key TEXT NOT NULL,
    due REAL,
    created REAL NOT NULL,
    revision INTEGER NOT NULL,
    labels TEXT NOT NULL,
    document TEXT NOT NULL,
    PRIMARY KEY (kind, id)
);
-- Lists of a project, page by page.
CREATE INDEX rows_by_project ON rows (kind, project, id);
-- What the reconciler goes through: everything that is alive.
CREATE INDEX rows_by_state ON rows (kind, state, id);
-- Claims (the oldest of a key and state), names, hashes of keys.
CREATE INDEX rows_by_key ON rows (kind, key, state, created, id);
-- Deadlines.
CREATE INDEX rows_by_due ON rows (kind, due, id) WHERE due IS NOT NULL;

-- The labels of rows once more, for lists by label.
CREATE TABLE labels (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (kind, id, name)
) WITHOUT ROWID;
CREATE INDEX labels_by_value ON labels (kind, name, value, id);

-- Append-only: as long as the newest is never removed, no number is given twice.
CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    at REAL NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX events_by_subject ON events (subject, number);
CREATE INDEX events_by_project ON events (project, number);

CREATE TABLE counters (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL,
    until REAL NOT NULL -- the end of its period, seconds since the epoch; 0 for counters that have none
) WITHOUT ROWID;

-- `until` is on the clock of this boot, which no change of the date moves; another boot has ended every lease.
CREATE TABLE leases (
    name TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    boot TEXT NOT NULL,
    until REAL NOT NULL
) WITHOUT ROWID;

-- The last rows that changed, and by which opened store: how other processes learn of it. The oldest are removed.
CREATE TABLE changes (
    number INTEGER PRIMARY KEY,
    origin TEXT NOT NULL,
    kind TEXT NOT NULL,
    id TEXT NOT NULL
);
