-- Callers that asked for heartbeats get them after a restart too, and nobody else ever does.
ALTER TABLE reply ADD COLUMN monitor_s REAL; -- seconds of silence that the caller bears; NULL: none asked for
