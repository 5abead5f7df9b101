-- What is over must not be walked: ended holds and old incidents are found, and removed, by index.
CREATE INDEX hold_ended ON hold (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX hold_errored_due ON hold (service) WHERE errored_due = 1;
CREATE INDEX incident_at ON incident (at);

-- An open row has no end. A list of states would say the same, and each write of a row would build
-- a table of them to ask it.
DROP INDEX task_open;
DROP INDEX task_open_resource;
CREATE INDEX task_open ON task (owner, state) WHERE finished_at IS NULL;
CREATE INDEX task_open_resource ON task (resource_kind, resource_id)
    WHERE finished_at IS NULL AND resource_kind IS NOT NULL;
