-- Numbers that only rise, kept here for stores beside the queue: one that is older than its mark
-- was restored or lost.
CREATE TABLE mark (
    name  TEXT PRIMARY KEY,                  -- whose: the path of a store
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
