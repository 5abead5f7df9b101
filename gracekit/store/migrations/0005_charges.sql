-- Crashes are charged to what caused them: only what ran alone can have caused one for certain.
ALTER TABLE task ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;        -- nothing else ran beside the attempt, probe or hook
ALTER TABLE task ADD COLUMN hook_crashes INTEGER NOT NULL DEFAULT 0; -- processes that ended during the errored hook
ALTER TABLE hold ADD COLUMN asker TEXT;                              -- run in which its probe or errored hook is being called
ALTER TABLE hold ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;      -- processes that ended during that
ALTER TABLE hold ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;        -- nothing else ran beside it
-- What a run serves, so that siblings leave to it what only it can serve.
ALTER TABLE run ADD COLUMN methods TEXT;                             -- JSON list; NULL: a run of an older gracekit
