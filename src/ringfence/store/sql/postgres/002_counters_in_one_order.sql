-- Transactions that add to the same counters in different orders would wait for each other, until the database
-- notices after a second and sends one of them back. So each locks all its counters before anything else, in the
-- order of their names. One that is new is not there to be locked; it is new only once.
CREATE FUNCTION rf_lock_counters(changes jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM rf_counters
        WHERE name IN (SELECT c ->> 'counter' FROM jsonb_array_elements(changes) AS c WHERE c ->> 't' = 'add')
        ORDER BY name FOR UPDATE;
END $$;

CREATE OR REPLACE FUNCTION rf_commit(changes jsonb, origin text, durable boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF durable AND current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    PERFORM rf_lock_counters(changes);
    PERFORM rf_apply(changes, '', origin, '[]');
END $$;

CREATE OR REPLACE FUNCTION rf_take(
    of_kind text, of_key text, of_state text, into_state text, more text, for_project text,
    new_due double precision, changes jsonb, origin text
) RETURNS SETOF rf_rows
LANGUAGE plpgsql AS $$
DECLARE
    taken rf_rows;
BEGIN
    PERFORM rf_lock_counters(changes);
    UPDATE rf_rows AS r SET state = into_state, project = coalesce(for_project, r.project),
            due = coalesce(new_due, r.due), revision = r.revision + 1,
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
