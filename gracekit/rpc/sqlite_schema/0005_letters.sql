-- How many dead letters were removed, for their number or their age.
CREATE TABLE removed_letter (
    queue   TEXT PRIMARY KEY,                -- where they were taken from
    number  INTEGER NOT NULL,
    last_at REAL NOT NULL
) STRICT, WITHOUT ROWID;
