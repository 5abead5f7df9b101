-- Which of the stores that were here this is. A store that is older than what is known beside it
-- (in the lock directory, in the queue file) was restored, or lost its -wal, or is new.
CREATE TABLE epoch (
    one       INTEGER PRIMARY KEY CHECK (one = 1),
    age       INTEGER NOT NULL,              -- rises at each start, and each half minute of a run
    epoch     INTEGER NOT NULL,              -- rises when the store was found to be an older one; tokens begin at epoch * 2^40
    copied_at REAL                           -- set in a copy by `gracekit store backup`, until its first start
) STRICT;
INSERT INTO epoch VALUES (1, 0, 0, NULL);
