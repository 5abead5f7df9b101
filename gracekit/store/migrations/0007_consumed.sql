-- Stretches of time in which runs consumed requests: a record goes only when that came to ten
-- minutes since it was old enough, as a duplicate of its request may still have been queued.
CREATE TABLE consumed (
    at      REAL PRIMARY KEY,                -- its beginning
    seconds REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Free lease rows go with the rest of the past. Tokens rise all the same: the first one of a
-- resource without a row is above the floor. A run of an older gracekit does not know the floor, so
-- none goes while such a run may live.
ALTER TABLE epoch ADD COLUMN floor INTEGER NOT NULL DEFAULT 0; -- highest token of a row that was removed
ALTER TABLE run ADD COLUMN schema INTEGER;   -- newest one that the run knows; NULL: below 7
