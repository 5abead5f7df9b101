-- The store of gracekit: what was accepted, who owns it, and how each run ended.
-- Moments (…_at, not_before, next_check) are wall-clock seconds since the epoch. They are
-- compared only where an error costs a delay or a reply, never for liveness or ownership.

-- One life of one process. In a file, alive means: its lock is held; never a column.
CREATE TABLE run (
    run_id       TEXT PRIMARY KEY,           -- 32 hex digits, drawn at start
    service      TEXT NOT NULL,
    host         TEXT NOT NULL,              -- names the directed queue
    instance     TEXT NOT NULL,              -- process slot; the member's name
    generation   INTEGER NOT NULL,           -- counts the runs of this instance
    version      TEXT NOT NULL,              -- of gracekit
    schema       INTEGER NOT NULL,           -- newest one that the run knows
    boot_id      TEXT NOT NULL,
    pid_ns       INTEGER NOT NULL,
    time_ns      INTEGER,                    -- inode of the time namespace of start_ticks; NULL: the kernel has none
    pid          INTEGER NOT NULL,
    start_ticks  INTEGER NOT NULL,
    lock_path    TEXT NOT NULL,
    lock_file    TEXT,                       -- device:inode in hexadecimal digits; NULL: a store in memory, without locks
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
    gone_at      REAL,                       -- it was declared dead, by an operator or by a run that saw no beat
    gone_by      TEXT,
    gone_reason  TEXT,
    -- Evidence of why it stopped; each column is written once, by whoever knows.
    invocation   TEXT,                       -- by itself: systemd's id of this start
    host_stop    INTEGER,                    -- by itself: 1: the host was shut down when a signal stopped it
    rebooted     INTEGER,                    -- by a later run of its host: 1: that found another boot
    kernel       TEXT,                       -- by its parent or systemd: how the process ended, as JSON
    crash        TEXT,                       -- by faulthandler: what crashed, and where
    -- JSON list of what it serves, so that siblings leave to it what only it can serve.
    methods      TEXT NOT NULL,
    -- JSON list of the kinds whose resources it settles. Two services that settle one kind would
    -- undo each other's work.
    kinds        TEXT NOT NULL,
    UNIQUE (service, instance, generation)
);
CREATE INDEX run_open ON run (service) WHERE adopted_at IS NULL;
-- Of ended runs, listings read the last ones to end: of all instances, or of one.
CREATE INDEX run_ended ON run (coalesce(ended_at, adopted_at)) WHERE adopted_at IS NOT NULL;
CREATE INDEX run_of_instance ON run (instance, coalesce(ended_at, adopted_at));

-- Instances that are to stay down: a stop from inside or an operator said so.
CREATE TABLE wish (
    service      TEXT NOT NULL,
    instance     TEXT NOT NULL,
    source       TEXT NOT NULL,              -- user | admin
    wished_by    TEXT NOT NULL,
    reason       TEXT NOT NULL,
    at           REAL NOT NULL,
    PRIMARY KEY (service, instance)
);

-- A run may act while it has a row here. In a store that hosts share, it changes the number every
-- few seconds, and others watch that. Whoever declares it dead removes the row.
CREATE TABLE beat (
    run_id       TEXT PRIMARY KEY,
    service      TEXT NOT NULL,
    instance     TEXT NOT NULL,
    number       INTEGER NOT NULL,
    -- Seconds without a beat after which its handlers are cancelled, and others may act; NULL where
    -- the death of a process can be proven.
    fail_s       REAL,
    dead_s       REAL,
    UNIQUE (service, instance)
);

-- Hosts of which an operator has said that they do not come back. What waits for one alone is ended.
-- The next run that joins there removes the row.
CREATE TABLE gone_host (
    host   TEXT PRIMARY KEY,
    at     REAL NOT NULL,
    by     TEXT NOT NULL,
    reason TEXT NOT NULL
);

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
    content_hash  TEXT NOT NULL,             -- of method, namespace, version, arguments
    -- A request id works like a password between callers: its recorded answer is for the caller
    -- alone that sent the request. Empty: it is not known who that was.
    caller_hash   TEXT NOT NULL DEFAULT '',
    on_interrupt  TEXT NOT NULL,             -- error | retry | probe | requeue
    settle_s      REAL NOT NULL,             -- seconds between an unclean end and the first look
    resource_kind TEXT,
    resource_id   TEXT,
    -- The resource that an ops method names. It has no lease, and the statements of leases, lines
    -- and passes must not see it: only listings and events show it.
    ops_kind      TEXT,
    ops_id        TEXT,
    shown_context TEXT,                      -- JSON object: what the service's context_keys copy of the caller's context; NULL for nothing
    state         TEXT NOT NULL,             -- TaskState
    reason        TEXT,                      -- of ERRORED, REJECTED, CANCELLED
    detail        TEXT,                      -- the sentence beside the reason
    owner         TEXT,                      -- run that may act on it; NULL: anyone may claim it
    cut           TEXT,                      -- how the last attempt was cut: safe_point | cancelled | unclean
    not_before    REAL,                      -- recovery waits until then
    attempts      INTEGER NOT NULL DEFAULT 0,-- starts of the handler, each counted before it runs
    crashes       INTEGER NOT NULL DEFAULT 0,-- since the last progress
    -- Crashes are charged to what caused them: only what ran alone can have caused one for certain.
    -- 1: nothing else runs beside its attempt, probe or hook; 2: nothing did at the last crash.
    alone         INTEGER NOT NULL DEFAULT 0,
    probing       INTEGER NOT NULL DEFAULT 0,-- a probe of it was begun and has not answered
    calling       INTEGER NOT NULL DEFAULT 0,-- its errored hook was begun and has not returned
    hook_crashes  INTEGER NOT NULL DEFAULT 0,-- processes that ended during that
    errored_due   INTEGER NOT NULL DEFAULT 0,-- the errored hook has still to be called
    token         INTEGER,                   -- fencing token of the last attempt
    cursor        TEXT,                      -- JSON; the last safe point
    cursor_at     REAL,
    accepted_at   REAL NOT NULL,
    started_at    REAL,
    finished_at   REAL,
    expires_at    REAL,                      -- the caller waits until then; NULL if unknown
    next_check    REAL,                      -- a probe said Wait
    waiting_since REAL,
    -- It is accepted and may not begin before: a failed attempt is tried again then, or its caller
    -- asked for that. It has no owner. NULL: it may begin now; recovery sets that once it is due.
    due_at        REAL,
    due_ahead_s   REAL,                      -- of the wall clock then, before the time that passes; NULL: due_at stands if the clock is set
    failures      INTEGER NOT NULL DEFAULT 0,-- attempts that failed and are tried again
    progress      TEXT,                      -- JSON object of ctx.progress: done, of, note, at
    -- A request without capacity is parked: PENDING, owned by no run, until somebody lets it run
    -- again or ends it. How often it was parked is the version that each order about it names.
    parkings         INTEGER NOT NULL DEFAULT 0,
    parked_at        REAL,                   -- the last time
    parked_ahead_s   REAL,                   -- of the wall clock then, before the time that passes
    pending_deadline REAL,                   -- of the first parking; it stands for later ones
    requested        TEXT,                   -- JSON object: what its handler said is missing
    -- JSON object: verb, by and reason of an order; NULL: none was taken. It outlives the process
    -- that has taken it: recovery carries it out if that process ended before the handler returned.
    ordered       TEXT,
    result        TEXT,                      -- JSON
    failure       TEXT,                      -- JSON object: class, module, message, ...
    UNIQUE (request_id, recipient)
);
-- An open row has no end. A list of states would say the same, and each write of a row would build
-- a table of them to ask it.
CREATE INDEX task_open ON task (owner, state, due_at) WHERE finished_at IS NULL;
CREATE INDEX task_open_resource ON task (resource_kind, resource_id)
    WHERE finished_at IS NULL AND resource_kind IS NOT NULL;
CREATE INDEX task_finished ON task (finished_at) WHERE finished_at IS NOT NULL;
-- Commands are to be as fast beside a long record as beside none. Almost all ended rows succeeded: only
-- the others are counted, and listed, by state; the number of those that succeeded is the rest.
CREATE INDEX task_unsuccessful ON task (state)
    WHERE finished_at IS NOT NULL AND state <> 'succeeded';
CREATE INDEX task_errored_due ON task (id) WHERE errored_due = 1;
CREATE INDEX task_rejected ON task (id) WHERE state = 'rejected'; -- they are kept up to a number
CREATE INDEX task_pending ON task (service, pending_deadline) WHERE state = 'pending';
CREATE INDEX task_ordered ON task (service) WHERE ordered IS NOT NULL AND finished_at IS NULL;

-- Arguments and context go when their task ends. In its row they would leave a hole there, among
-- rows that stay on record; here the room is used again by the next request.
CREATE TABLE content (
    row_id  INTEGER PRIMARY KEY REFERENCES task (id),
    args    TEXT NOT NULL,                   -- JSON object
    context TEXT NOT NULL                    -- JSON object, secret
);

-- An answer that somebody waits for; the row goes when it was sent or given up.
CREATE TABLE reply (
    row_id        INTEGER NOT NULL REFERENCES task (id),
    queue         TEXT NOT NULL,
    msg_id        TEXT NOT NULL,
    expires_at    REAL,                      -- the caller waits until then; NULL if unknown
    due_at        REAL,                      -- outcome committed, not yet confirmed as sent
    -- Callers that asked for heartbeats get them after a restart too, and nobody else ever does.
    monitor_s     REAL,                      -- seconds of silence that the caller bears; NULL: none asked for
    -- A parked task belongs to no run, and its callers are answered at once: by the run that
    -- parked it, which is this one.
    owner         TEXT,
    knows_pending INTEGER NOT NULL DEFAULT 0,-- its caller has said that it knows the state
    PRIMARY KEY (row_id, queue, msg_id)
) WITHOUT ROWID;
CREATE INDEX reply_due ON reply (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX reply_monitored ON reply (row_id) WHERE monitor_s IS NOT NULL;
CREATE INDEX reply_owner ON reply (owner) WHERE owner IS NOT NULL;

-- Notifications that are not sent yet. Each was written in the commit of the step that it reports.
CREATE TABLE outbox (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL,
    service    TEXT NOT NULL,
    owner      TEXT,                         -- run that sends it; NULL: any run of the service
    event_type TEXT NOT NULL,                -- task.update | task.no_capacity
    priority   TEXT NOT NULL,                -- INFO | ERROR
    payload    TEXT NOT NULL,                -- JSON object
    at         REAL NOT NULL,
    expires_at REAL NOT NULL                 -- nobody needs it after that
);
CREATE INDEX outbox_owner ON outbox (owner, id);

-- Who may act on a resource. lver is the fencing token: it only rises and survives release.
CREATE TABLE lease (
    kind           TEXT NOT NULL,
    id             TEXT NOT NULL,
    lver           INTEGER NOT NULL,
    owner          TEXT,                     -- run; NULL: free
    request_id     TEXT,                     -- of the task, or the id of the hold, that took it last
    acquired_at    REAL NOT NULL,
    released_at    REAL,
    release_reason TEXT,                     -- clean | handoff | taken | forced
    not_before     REAL NOT NULL DEFAULT 0,  -- granted to nobody before (after an unclean end)
    -- People declare leases that they hold themselves: these are not removed. NULL: one of tasks.
    declared_at    REAL,
    payload        TEXT,                     -- what they want to read beside it
    settle_s       REAL NOT NULL DEFAULT 0,  -- of a hold that ends uncleanly
    forced_by      TEXT,                     -- who ordered the hold to end, and why
    forced_reason  TEXT,
    ousted         TEXT,                     -- run that had it when an operator freed it at once
    PRIMARY KEY (kind, id)
) WITHOUT ROWID;
CREATE INDEX lease_owner ON lease (owner) WHERE owner IS NOT NULL;
CREATE INDEX lease_forced ON lease (owner) WHERE forced_by IS NOT NULL;
CREATE INDEX lease_ousted ON lease (ousted) WHERE ousted IS NOT NULL;

-- Which of the stores that were here this is. A store that is older than what is known beside it
-- (in the lock directory, in the queue file) was restored, or lost its -wal, or is new.
CREATE TABLE epoch (
    one       INTEGER PRIMARY KEY CHECK (one = 1),
    age       INTEGER NOT NULL,              -- rises at each start, and each half minute of a run
    epoch     INTEGER NOT NULL,              -- rises when the store was found to be an older one
    copied_at REAL,                          -- set in a copy by `gracekit store backup`, until its first start
    -- All new tokens are above it. Free lease rows go with the rest of the past; it is the highest
    -- token of those, or of what a newer copy of the store can have granted.
    floor     INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO epoch VALUES (1, 0, 0, NULL, 0);

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
    end_reason  TEXT,                        -- ended | lapsed | done | failed | no_probe | host_gone
    errored_due INTEGER NOT NULL DEFAULT 0,
    asker       TEXT,                        -- run in which its probe or errored hook is being called
    crashes     INTEGER NOT NULL DEFAULT 0,  -- processes that ended during that
    alone       INTEGER NOT NULL DEFAULT 0   -- as of a task
);
CREATE UNIQUE INDEX hold_open ON hold (service, name, key) WHERE ended_at IS NULL;
CREATE INDEX hold_ended ON hold (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX hold_errored_due ON hold (service) WHERE errored_due = 1;
CREATE INDEX hold_asker ON hold (asker) WHERE asker IS NOT NULL;

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
-- Until then, no pass over resources of the service begins that nobody asks for.
CREATE TABLE pause (
    service     TEXT PRIMARY KEY,
    until       REAL NOT NULL,
    paused_by   TEXT NOT NULL,
    reason      TEXT NOT NULL
);

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
    -- The last pass that no operator has asked for: one by hand does not take its place. NULL: none yet.
    unasked_began_at    REAL,
    unasked_finished_at REAL,
    unasked_found_only  INTEGER,
    PRIMARY KEY (service, host)
);

-- A kind whose resources the last pass of a host could not list. The next pass that lists them
-- removes the row.
CREATE TABLE broken_kind (
    service TEXT NOT NULL,
    host    TEXT NOT NULL,
    kind    TEXT NOT NULL,
    why     TEXT NOT NULL,                   -- of the last pass
    since   REAL NOT NULL,                   -- when the first pass began that could not list them
    PRIMARY KEY (service, host, kind)
);

-- Stretches of time in which runs consumed requests: a record goes only when that came to ten
-- minutes since it was old enough, as a duplicate of its request may still have been queued.
CREATE TABLE consumed (
    at      REAL PRIMARY KEY,                -- its beginning
    seconds REAL NOT NULL
) STRICT, WITHOUT ROWID;

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
CREATE INDEX incident_at ON incident (at);
CREATE INDEX incident_rejected ON incident (id) WHERE what = 'rejected'; -- they are kept up to a number
-- Each command looks whether the store was restored.
CREATE INDEX incident_store_older ON incident (at) WHERE what = 'store_older';
