-- Commands are to be as fast beside a long record as beside none. Almost all ended rows succeeded: only
-- the others are counted, and listed, by state; the number of those that succeeded is the rest.
CREATE INDEX task_unsuccessful ON task (state)
    WHERE finished_at IS NOT NULL AND state <> 'succeeded';
