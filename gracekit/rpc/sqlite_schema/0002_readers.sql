-- Who reads a shared queue, and in which store it keeps what it takes. Dedupe, one-at-a-time
-- resources and recovery hold within one store, so readers with another one are foreign to each
-- other. Written before the reader takes anything; it goes with its connection.
CREATE TABLE reader (
    queue         TEXT NOT NULL,             -- a shared one
    connection_id TEXT NOT NULL,
    store         TEXT NOT NULL,             -- identity of the store, the same by any path
    label         TEXT NOT NULL,             -- service@instance, for display
    PRIMARY KEY (queue, connection_id)
) STRICT, WITHOUT ROWID;
