-- The store of gracekit: what was accepted, who owns it, and how each run ended.
-- Moments (…_at, not_before, next_check) are wall-clock seconds since the epoch. They are
-- compared only where an error costs a delay or a reply, never for liveness or ownership.

-- One life of one process. Alive means: its lock is held; never a column.
CREATE TABLE run (
    run_id       TEXT PRIMARY KEY,           -- 32 hex digits, drawn at start
    service      TEXT NOT NULL,
    host         TEXT NOT NULL,              -- names the directed queue
    instance     TEXT NOT NULL,              -- process slot; the member's name
    generation   INTEGER NOT NULL,           -- counts the runs of this instance
    version      TEXT NOT NULL,              -- of gracekit
    boot_id      TEXT NOT NULL,
    pid_ns       INTEGER NOT NULL,
    pid          INTEGER NOT NULL,
    start_ticks  INTEGER NOT NULL,
    lock_path    TEXT NOT NULL,
    phase        TEXT NOT NULL,              -- ServiceState, for display
    topic        TEXT NOT NULL,
    ops_topic    TEXT NOT NULL,
    transport    TEXT NOT NULL,              -- URL without secrets, so that a CLI finds the queues
    started_at   REAL NOT NULL,
    beat_at      REAL NOT NULL,              -- for display only
    stop_at      REAL,                       -- stop-intent: when, by whom, why; NULL once withdrawn
    stop_source  TEXT,                       -- signal | operator | user | error
    stop_by      TEXT,
    stop_reason  TEXT,
    ended_at     REAL,                       -- stop record: its last act
    exit_code    INTEGER,
    report       TEXT,                       -- DrainReport as JSON
    verdict      TEXT,                       -- written once, by whoever adopted the run
    adopted_by   TEXT,
    adopted_at   REAL,
    UNIQUE (service, instance, generation)
);
CREATE INDEX run_open ON run (service) WHERE adopted_at IS NULL;

-- One accepted request. Custody is this row.
CREATE TABLE task (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,   -- order of acceptance; never reused
    request_id    TEXT NOT NULL,
    recipient     TEXT NOT NULL,             -- '' or, for fanout, the instance
    service       TEXT NOT NULL,
    lane          TEXT NOT NULL,             -- requests | ops
    queue         TEXT NOT NULL,             -- wire name that it came by
    route         TEXT NOT NULL,             -- shared | directed | fanout
    target        TEXT NOT NULL,             -- '' | host | instance that alone may run it
    namespace     TEXT,
    method        TEXT NOT NULL,
    version       TEXT NOT NULL,
    args          TEXT,                      -- JSON object; NULL once purged
    context       TEXT,                      -- JSON object, secret; NULL once purged
    content_hash  TEXT NOT NULL,             -- of method, namespace, version, arguments
    on_interrupt  TEXT NOT NULL,             -- error | retry | probe | requeue
    settle_s      REAL NOT NULL,             -- seconds between an unclean end and the first look
    resource_kind TEXT,
    resource_id   TEXT,
    state         TEXT NOT NULL,             -- TaskState
    reason        TEXT,                      -- of ERRORED, REJECTED, CANCELLED
    detail        TEXT,                      -- the sentence beside the reason
    owner         TEXT,                      -- run that may act on it; NULL: anyone may claim it
    cut           TEXT,                      -- how the last attempt was cut: safe_point | cancelled | unclean
    not_before    REAL,                      -- recovery waits until then
    attempts      INTEGER NOT NULL DEFAULT 0,-- starts of the handler, each counted before it runs
    crashes       INTEGER NOT NULL DEFAULT 0,-- since the last progress
    probing       INTEGER NOT NULL DEFAULT 0,-- a probe of it was begun and has not answered
    token         INTEGER,                   -- fencing token of the last attempt
    cursor        TEXT,                      -- JSON; the last safe point
    cursor_at     REAL,
    accepted_at   REAL NOT NULL,
    started_at    REAL,
    finished_at   REAL,
    expires_at    REAL,                      -- the caller waits until then; NULL if unknown
    next_check    REAL,                      -- a probe said Wait
    waiting_since REAL,
    result        TEXT,                      -- JSON
    failure       TEXT,                      -- JSON object: class, module, message, ...
    errored_due   INTEGER NOT NULL DEFAULT 0,-- the errored hook has still to be called
    UNIQUE (request_id, recipient)
);
CREATE INDEX task_open ON task (owner, state)
    WHERE state IN ('accepted', 'running', 'pending', 'handed_over');
CREATE INDEX task_open_resource ON task (resource_kind, resource_id)
    WHERE state IN ('accepted', 'running', 'pending', 'handed_over') AND resource_kind IS NOT NULL;
CREATE INDEX task_finished ON task (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX task_errored_due ON task (id) WHERE errored_due = 1;

-- An answer that somebody waits for; the row goes when it was sent or given up.
CREATE TABLE reply (
    task_id    INTEGER NOT NULL REFERENCES task (id),
    queue      TEXT NOT NULL,
    msg_id     TEXT NOT NULL,
    expires_at REAL,                         -- the caller waits until then; NULL if unknown
    due_at     REAL,                         -- outcome committed, not yet confirmed as sent
    PRIMARY KEY (task_id, queue, msg_id)
) WITHOUT ROWID;
CREATE INDEX reply_due ON reply (due_at) WHERE due_at IS NOT NULL;

-- Who may act on a resource. lver is the fencing token: it only rises and survives release.
CREATE TABLE lease (
    kind           TEXT NOT NULL,
    id             TEXT NOT NULL,
    lver           INTEGER NOT NULL,
    owner          TEXT,                     -- run; NULL: free
    request_id     TEXT,                     -- of the task that took it last
    acquired_at    REAL NOT NULL,
    released_at    REAL,
    release_reason TEXT,                     -- clean | handoff | taken
    not_before     REAL NOT NULL DEFAULT 0,  -- granted to nobody before (after an unclean end)
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE INDEX lease_owner ON lease (owner) WHERE owner IS NOT NULL;

-- Keeps a host in its drain across the requests of one operation.
CREATE TABLE hold (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    service     TEXT NOT NULL,
    name        TEXT NOT NULL,
    key         TEXT NOT NULL,
    owner       TEXT,                        -- run that it keeps; NULL: left over, to be settled
    target      TEXT NOT NULL,               -- host of that run
    namespace   TEXT,
    method      TEXT NOT NULL,               -- whose probe settles it
    version     TEXT NOT NULL,
    args        TEXT,                        -- copy of the arguments; NULL once ended
    opened_at   REAL NOT NULL,
    lapses_at   REAL NOT NULL,
    next_check  REAL,
    ended_at    REAL,
    end_reason  TEXT,                        -- ended | lapsed | done | failed | no_probe
    errored_due INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX hold_open ON hold (service, name, key) WHERE ended_at IS NULL;

-- Accounting: accepted = terminal + transient + removed, and everything else that was counted.
CREATE TABLE tally (
    what TEXT PRIMARY KEY,
    n    INTEGER NOT NULL
) WITHOUT ROWID;

-- The list behind the counts: duplicates, returns, expiries, dead letters, hand-overs, adoptions.
CREATE TABLE incident (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    at         REAL NOT NULL,
    run_id     TEXT NOT NULL,
    what       TEXT NOT NULL,
    request_id TEXT,
    method     TEXT,
    detail     TEXT
);
