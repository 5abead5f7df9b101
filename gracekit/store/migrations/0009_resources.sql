-- A resource of the application on which a rule acts now, or that waits to be settled. What was
-- settled has no row: the application's own record is the truth.
CREATE TABLE finding (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    service       TEXT NOT NULL,
    host          TEXT NOT NULL,             -- whose runs find it
    kind          TEXT NOT NULL,
    name          TEXT NOT NULL,             -- id of the resource
    status        TEXT NOT NULL,             -- as it was found last
    first_seen    REAL NOT NULL,             -- in that status
    seen_at       REAL NOT NULL,             -- last
    ahead_s       REAL NOT NULL,             -- of the wall clock, before the time that passes: when its moments were written
    page          TEXT,                      -- id behind which its page begins; NULL: the first page
    rule          TEXT,                      -- that has begun; NULL: none has
    owner         TEXT,                      -- run in which the rule acts now
    settle_s      REAL NOT NULL DEFAULT 0,   -- how long it is left alone after the death of that run
    tries         INTEGER NOT NULL DEFAULT 0,-- of the rule, without an end
    waiting_since REAL,                      -- the first of them
    next_check    REAL,                      -- asked again then
    detail        TEXT,                      -- why it waits
    crashes       INTEGER NOT NULL DEFAULT 0,-- processes that ended while its rule acted
    alone         INTEGER NOT NULL DEFAULT 0,-- as of a task
    UNIQUE (service, host, kind, name)
);
CREATE INDEX finding_owner ON finding (owner) WHERE owner IS NOT NULL;
CREATE INDEX finding_check ON finding (next_check) WHERE next_check IS NOT NULL;

-- The last pass over all resources of a host.
CREATE TABLE resource_pass (
    service     TEXT NOT NULL,
    host        TEXT NOT NULL,
    run_id      TEXT NOT NULL,
    began_at    REAL NOT NULL,
    finished_at REAL NOT NULL,
    settled     INTEGER NOT NULL,
    failed      INTEGER NOT NULL,
    waiting     INTEGER NOT NULL,            -- to be asked again
    left_alone  INTEGER NOT NULL,
    found_only  INTEGER NOT NULL DEFAULT 0,  -- nothing is settled unasked: waiting counts what would be
    PRIMARY KEY (service, host)
);
-- Two services that settle resources of one kind would undo each other's work.
ALTER TABLE run ADD COLUMN kinds TEXT;       -- JSON list; NULL: none, or a run of an older gracekit
