-- Crashes are charged to what caused them: only what ran alone can have caused one for certain.
ALTER TABLE task ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;        -- 1: nothing else runs beside its attempt, probe or hook; 2: nothing did at the last crash
ALTER TABLE task ADD COLUMN calling INTEGER NOT NULL DEFAULT 0;      -- its errored hook was begun and has not returned
ALTER TABLE task ADD COLUMN hook_crashes INTEGER NOT NULL DEFAULT 0; -- processes that ended during that
ALTER TABLE hold ADD COLUMN asker TEXT;                              -- run in which its probe or errored hook is being called
ALTER TABLE hold ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;      -- processes that ended during that
ALTER TABLE hold ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;        -- as of a task
CREATE INDEX hold_asker ON hold (asker) WHERE asker IS NOT NULL;
-- What a run serves, so that siblings leave to it what only it can serve.
ALTER TABLE run ADD COLUMN methods TEXT;                             -- JSON list; NULL: a run of an older gracekit
