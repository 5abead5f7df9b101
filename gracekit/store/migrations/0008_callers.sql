-- A request id works like a password between callers: its recorded answer is for the caller alone who
-- accepted it. NULL: a row of an older gracekit, which did not ask who calls.
ALTER TABLE task ADD COLUMN caller_hash TEXT;
-- Refused requests are kept up to a number.
CREATE INDEX task_rejected ON task (id) WHERE state = 'rejected';
CREATE INDEX incident_rejected ON incident (id) WHERE what = 'rejected';
