-- Queues in one file: what was sent and not yet settled, and who reads it.
-- Moments (…_at) are wall-clock seconds since the epoch; an error in them costs at most a
-- message that its sender no longer waits for. Nothing here is decided by age otherwise.

-- One live transport object. Alive means: its process lives, as the lock on its file or its identity
-- proves; never a column. Whoever finds a dead one gives its claims back and removes it.
CREATE TABLE connection (
    connection_id TEXT PRIMARY KEY,          -- 32 hex digits, drawn at each start
    boot_id       TEXT NOT NULL,
    pid_ns        INTEGER NOT NULL,          -- inode of the pid namespace
    time_ns       INTEGER,                   -- inode of the time namespace of start_ticks; NULL: the kernel has none
    pid           INTEGER NOT NULL,
    start_ticks   INTEGER NOT NULL,
    lock_path     TEXT NOT NULL,             -- file whose lock proves life
    lock_file     TEXT NOT NULL,             -- device:inode of that very file, in hexadecimal digits
    wakeup_path   TEXT NOT NULL,             -- named pipe that wakes it
    connected_at  REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- A queue exists from its first declaration on. One with an owner goes with that connection.
CREATE TABLE queue (
    name  TEXT PRIMARY KEY,
    kind  TEXT NOT NULL,                     -- shared, directed, fanout, reply
    topic TEXT NOT NULL,                     -- empty for reply queues
    owner TEXT                               -- connection; set for fanout and reply queues
) STRICT, WITHOUT ROWID;

CREATE INDEX queue_of_owner ON queue (owner) WHERE owner IS NOT NULL;
CREATE INDEX queue_of_fanout ON queue (topic) WHERE kind = 'fanout';

-- Who may hold messages; it stays until its connection ends, so that a cancelled consumer
-- can still settle what it holds.
CREATE TABLE consumer (
    consumer_id   TEXT PRIMARY KEY,          -- 32 hex digits
    connection_id TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX consumer_of_connection ON consumer (connection_id);

-- Who is to be woken when a queue gets a message; removed by cancel.
CREATE TABLE subscription (
    queue         TEXT NOT NULL,
    consumer_id   TEXT NOT NULL,
    connection_id TEXT NOT NULL,
    PRIMARY KEY (queue, consumer_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX subscription_of_connection ON subscription (connection_id);

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

-- A message from its publish to its settlement. The id is its place: one that is given back
-- stands where it stood.
CREATE TABLE message (
    message_id   INTEGER PRIMARY KEY AUTOINCREMENT,
    queue        TEXT NOT NULL,
    claimed_by   TEXT,                       -- consumer; NULL while it waits
    redelivered  INTEGER NOT NULL DEFAULT 0, -- 1: was in a consumer's hands and came back
    expires_at   REAL,                       -- dropped and counted if nobody took it by then
    published_at REAL NOT NULL,
    headers      TEXT,                       -- JSON object of short texts; NULL for none
    body         BLOB NOT NULL               -- the enveloped message, any content
) STRICT;

CREATE INDEX message_waiting ON message (queue, message_id) WHERE claimed_by IS NULL;
CREATE INDEX message_claimed ON message (claimed_by) WHERE claimed_by IS NOT NULL;
CREATE INDEX message_expiring ON message (expires_at)
    WHERE claimed_by IS NULL AND expires_at IS NOT NULL;

-- Messages that no consumer could use, kept for people.
CREATE TABLE dead_letter (
    dead_letter_id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue          TEXT NOT NULL,            -- where it was taken from
    reason         TEXT NOT NULL,
    published_at   REAL NOT NULL,
    died_at        REAL NOT NULL,
    headers        TEXT,
    body           BLOB NOT NULL
) STRICT;

-- How many dead letters were removed, for their number or their age.
CREATE TABLE removed_letter (
    queue   TEXT PRIMARY KEY,                -- where they were taken from
    number  INTEGER NOT NULL,
    last_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- How many messages expired unread.
CREATE TABLE expired (
    queue   TEXT PRIMARY KEY,
    number  INTEGER NOT NULL,
    last_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Numbers that only rise, kept here for stores beside the queue: one that is older than its mark
-- was restored or lost.
CREATE TABLE mark (
    name  TEXT PRIMARY KEY,                  -- whose: the path of a store
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
