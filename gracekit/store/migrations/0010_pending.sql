-- A request without capacity is parked: PENDING, owned by no run, until somebody lets it run again
-- or ends it. How often it was parked is the version that each order about it names.
ALTER TABLE task ADD COLUMN parkings INTEGER NOT NULL DEFAULT 0;
ALTER TABLE task ADD COLUMN parked_at REAL;        -- the last time
ALTER TABLE task ADD COLUMN parked_ahead_s REAL;   -- of the wall clock then, before the time that passes
ALTER TABLE task ADD COLUMN pending_deadline REAL; -- of the first parking; it stands for later ones
ALTER TABLE task ADD COLUMN requested TEXT;        -- JSON object: what its handler said is missing
CREATE INDEX task_pending ON task (service, pending_deadline) WHERE state = 'pending';

-- A parked task belongs to no run, and its callers are answered at once: by the run that parked it.
ALTER TABLE reply ADD COLUMN owner TEXT;
ALTER TABLE reply ADD COLUMN knows_pending INTEGER NOT NULL DEFAULT 0; -- its caller has said that it knows the state
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

-- The last pass that no operator has asked for: one by hand does not take its place. NULL: none yet.
ALTER TABLE resource_pass ADD COLUMN unasked_began_at REAL;
ALTER TABLE resource_pass ADD COLUMN unasked_finished_at REAL;
ALTER TABLE resource_pass ADD COLUMN unasked_found_only INTEGER;
