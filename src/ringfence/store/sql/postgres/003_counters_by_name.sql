-- As before, but what adds to no counter asks for none, and the names are looked up one by one, however many
-- counters there are.
CREATE OR REPLACE FUNCTION rf_lock_counters(changes jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT jsonb_path_exists(changes, '$[*].counter') THEN
        RETURN;
    END IF;
    PERFORM FROM rf_counters
        WHERE name = ANY (ARRAY(
            SELECT c ->> 'counter' FROM jsonb_array_elements(changes) AS c WHERE c ->> 't' = 'add'))
        ORDER BY name FOR UPDATE;
END $$;
