-- What listings and events show of a task, and nothing else asks for.
--
-- The resource that an ops method names, in columns of its own: it has no lease, and the statements
-- of leases, lines and passes must not see it.
ALTER TABLE task ADD COLUMN ops_kind TEXT;
ALTER TABLE task ADD COLUMN ops_id TEXT;
-- JSON object: what the service's context_keys copy of the caller's context; NULL for nothing.
ALTER TABLE task ADD COLUMN shown_context TEXT;
