-- Everything lies in the first schema of the connection's search_path, so that one database can carry several
-- stores. Ids, names and times compare bytewise, whatever the database's language.

-- Rows of every kind: what all have in common as columns, the rest as a JSON document. The document is text: it
-- is only ever read whole, and text keeps what jsonb refuses (NUL in a string) and the order of its keys.
CREATE TABLE rf_rows (
    kind text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    project text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    due double precision,
    created double precision NOT NULL,
    revision bigint NOT NULL,
    labels jsonb NOT NULL,
    document text NOT NULL,
    PRIMARY KEY (kind, id)
);
-- Lists of a project, page by page.
CREATE INDEX rf_rows_by_project ON rf_rows (kind, project, id);
-- What the reconciler goes through: everything that is alive.
CREATE INDEX rf_rows_by_state ON rf_rows (kind, state, id);
-- Claims (the oldest of a key and state), names, hashes of keys.
CREATE INDEX rf_rows_by_key ON rf_rows (kind, key, state, created, id);
-- Deadlines.
CREATE INDEX rf_rows_by_due ON rf_rows (kind, due, id) WHERE due IS NOT NULL;
-- Lists by label.
CREATE INDEX rf_rows_by_label ON rf_rows USING gin (labels jsonb_path_ops);

-- Append-only; numbers are given under a lock, so that they become visible in their order.
CREATE TABLE rf_events (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    subject text COLLATE "C" NOT NULL,
    project text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    at double precision NOT NULL,
    data text NOT NULL
);
CREATE INDEX rf_events_by_subject ON rf_events (subject, number);
CREATE INDEX rf_events_by_project ON rf_events (project, number);

CREATE TABLE rf_counters (
    name text COLLATE "C" PRIMARY KEY,
    value bigint NOT NULL,
    until double precision NOT NULL -- the end of its period, seconds since the epoch; 0 for counters that have none
);

-- `until` is on the database's clock: the processes that share it need not agree on the time.
CREATE TABLE rf_leases (
    name text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C" NOT NULL,
    until timestamptz NOT NULL
);

-- All changes of a transaction in one call. Each is an object: t(ype) and its fields; see postgres_sql.py.
-- Errors: RF001 conflict, RF002 quota, RF003 lease; the detail is a JSON object.
CREATE FUNCTION rf_apply(changes jsonb, own text, origin text, taken jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c jsonb;
    changed jsonb := taken;
    happened jsonb := '[]';
    amount bigint;
    reached bigint;
    every double precision;
    now_at double precision;
    ends double precision;
BEGIN
    FOR c IN SELECT * FROM jsonb_array_elements(changes) LOOP
        CASE c ->> 't'
        WHEN 'put' THEN
            IF (c ->> 'unique')::boolean THEN
                -- Two that make the same name at once: the second waits here, and then sees the first's row.
                PERFORM pg_advisory_xact_lock(hashtextextended(
                    concat_ws(chr(31), current_schema(), c ->> 'kind', c ->> 'project', c ->> 'key'), 7263));
                PERFORM FROM rf_rows
                    WHERE kind = c ->> 'kind' AND key = c ->> 'key' AND project = c ->> 'project'
                        AND id <> c ->> 'id';
                IF FOUND THEN
                    RAISE EXCEPTION USING ERRCODE = 'RF001',
                        MESSAGE = format('there is a %s %s already', c ->> 'kind', c ->> 'key'),
                        DETAIL = jsonb_build_object('kind', c -> 'kind', 'key', c -> 'key');
                END IF;
            END IF;
            IF (c ->> 'revision')::bigint = 0 THEN
                INSERT INTO rf_rows
                    VALUES (c ->> 'kind', c ->> 'id', c ->> 'project', c ->> 'state', c ->> 'key',
                        (c ->> 'due')::double precision, (c ->> 'created')::double precision, 1,
                        c -> 'labels', c ->> 'document')
                    ON CONFLICT (kind, id) DO NOTHING;
            ELSE
                UPDATE rf_rows SET project = c ->> 'project', state = c ->> 'state', key = c ->> 'key',
                        due = (c ->> 'due')::double precision, created = (c ->> 'created')::double precision,
                        revision = revision + 1, labels = c -> 'labels', document = c ->> 'document'
                    WHERE kind = c ->> 'kind' AND id = c ->> 'id' AND revision = (c ->> 'revision')::bigint;
            END IF;
            IF NOT FOUND THEN
                RAISE EXCEPTION USING ERRCODE = 'RF001',
                    MESSAGE = format('%s %s was changed by somebody else', c ->> 'kind', c ->> 'id'),
                    DETAIL = jsonb_build_object('kind', c -> 'kind', 'id', c -> 'id', 'revision', c -> 'revision');
            END IF;
            changed := changed || jsonb_build_array(jsonb_build_array(c -> 'kind', c -> 'id'));
        WHEN 'remove' THEN
            DELETE FROM rf_rows
                WHERE kind = c ->> 'kind' AND id = c ->> 'id'
                    AND ((c ->> 'revision')::bigint < 0 OR revision = (c ->> 'revision')::bigint);
            IF FOUND THEN
                changed := changed || jsonb_build_array(jsonb_build_array(c -> 'kind', c -> 'id'));
            ELSIF (c ->> 'revision')::bigint >= 0 THEN
                RAISE EXCEPTION USING ERRCODE = 'RF001',
                    MESSAGE = format('%s %s was changed by somebody else', c ->> 'kind', c ->> 'id'),
                    DETAIL = jsonb_build_object('kind', c -> 'kind', 'id', c -> 'id', 'revision', c -> 'revision');
            END IF;
        WHEN 'add' THEN
            amount := (c ->> 'amount')::bigint;
            every := (c ->> 'every')::double precision;
            now_at := extract(epoch FROM clock_timestamp());
            ends := coalesce((floor(now_at / every) + 1) * every, 0);
            INSERT INTO rf_counters AS had VALUES (c ->> 'counter', greatest(0, amount), ends)
                ON CONFLICT (name) DO UPDATE
                    SET value = greatest(0, CASE WHEN had.until = ends THEN had.value ELSE 0 END + amount), until = ends
                RETURNING value INTO reached;
            IF amount > 0 AND reached > (c ->> 'most')::bigint THEN
                RAISE EXCEPTION USING ERRCODE = 'RF002',
                    MESSAGE = format('%s would be %s, and at most %s are allowed', c ->> 'counter', reached, c ->> 'most'),
                    DETAIL = jsonb_build_object('counter', c -> 'counter', 'most', c -> 'most',
                        'value', reached - amount, 'retry_after', ends - now_at)
                        - CASE WHEN every IS NULL THEN 'retry_after' ELSE '' END;
            END IF;
        WHEN 'held' THEN
            -- Locked until the end of the transaction: nobody else gets the lease in between.
            PERFORM FROM rf_leases
                WHERE name = c ->> 'lease' AND owner = c ->> 'owner' AND until > clock_timestamp() FOR SHARE;
            IF NOT FOUND THEN
                RAISE EXCEPTION USING ERRCODE = 'RF003',
                    MESSAGE = format('%s is not %s''s now', c ->> 'lease', c ->> 'owner'),
                    DETAIL = jsonb_build_object('lease', c -> 'lease');
            END IF;
        WHEN 'event' THEN
            happened := happened || jsonb_build_array(c);
        END CASE;
    END LOOP;
    IF jsonb_array_length(happened) > 0 THEN
        -- Last, and one at a time until the commit: who reads on from a number misses nothing below it.
        PERFORM pg_advisory_xact_lock(hashtextextended(current_schema(), 7264));
        INSERT INTO rf_events (kind, subject, project, name, at, data)
            SELECT e ->> 'kind', coalesce(nullif(e ->> 'subject', ''), own), e ->> 'project', e ->> 'name',
                    (e ->> 'at')::double precision, e ->> 'data'
                FROM jsonb_array_elements(happened) WITH ORDINALITY AS all_events (e, place) ORDER BY place;
    END IF;
    -- A notice may have 8000 bytes: a big change says only that something changed.
    IF jsonb_array_length(changed) > 0 THEN
        PERFORM pg_notify('ringfence_' || current_schema(), CASE
            WHEN octet_length(changed::text) < 7000 THEN jsonb_build_array(origin, changed)::text
            ELSE jsonb_build_array(origin, '[["", ""]]'::jsonb)::text END);
    END IF;
END $$;

-- `durable`: on disk when it returns, also where the operator has chosen speed (synchronous_commit = off).
CREATE FUNCTION rf_commit(changes jsonb, origin text, durable boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF durable AND current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM rf_apply(changes, '', origin, '[]');
END $$;

-- The oldest row of a key and state into another state; rows that somebody else is taking are passed over.
CREATE FUNCTION rf_take(
    of_kind text, of_key text, of_state text, into_state text, more text, for_project text,
    new_due double precision, changes jsonb, origin text
) RETURNS SETOF rf_rows
LANGUAGE plpgsql AS $$
DECLARE
    taken rf_rows;
BEGIN
    UPDATE rf_rows AS r SET state = into_state, project = coalesce(for_project, r.project),
            due = coalesce(new_due, r.due), revision = r.revision + 1,
            -- One JSON object behind the other: of a key that stands there twice, the reader takes the last.
            document = CASE WHEN more = '{}' THEN r.document WHEN r.document = '{}' THEN more
                ELSE left(r.document, -1) || ',' || substr(more, 2) END
        WHERE (r.kind, r.id) = (
            SELECT kind, id FROM rf_rows WHERE kind = of_kind AND key = of_key AND state = of_state
                ORDER BY created, id LIMIT 1 FOR UPDATE SKIP LOCKED)
        RETURNING * INTO taken;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM rf_apply(changes, taken.id, origin, jsonb_build_array(jsonb_build_array(taken.kind, taken.id)));
    RETURN NEXT taken;
END $$;
