-- Commands are to be as fast beside a long record as beside none. Almost all ended rows succeeded: only
-- the others are counted, and listed, by state; the number of those that succeeded is the rest.
CREATE INDEX task_unsuccessful ON task (state)
    WHERE finished_at IS NOT NULL AND state <> 'succeeded';
-- Of ended runs, listings read the last ones to end: of all instances, or of one.
CREATE INDEX run_ended ON run (coalesce(ended_at, adopted_at)) WHERE adopted_at IS NOT NULL;
CREATE INDEX run_of_instance ON run (instance, coalesce(ended_at, adopted_at));
-- Each command looks whether the store was restored.
CREATE INDEX incident_store_older ON incident (at) WHERE what = 'store_older';
