-- What is over must not be walked: ended holds and old incidents are found, and removed, by index.
CREATE INDEX hold_ended ON hold (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX hold_errored_due ON hold (service) WHERE errored_due = 1;
CREATE INDEX incident_at ON incident (at);
