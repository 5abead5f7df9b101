-- An order outlives the process that has taken it: recovery carries it out if that process ended
-- before the handler had returned. A run of an older gracekit does not know the column.
ALTER TABLE task ADD COLUMN ordered TEXT;          -- JSON object: verb, by and reason of the order; NULL: none was taken
CREATE INDEX task_ordered ON task (service) WHERE ordered IS NOT NULL AND finished_at IS NULL;
