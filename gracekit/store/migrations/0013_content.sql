-- Alone: runs of an older gracekit read and write the columns that are dropped here.
--
-- Arguments and context go when their task ends. In its row they would leave a hole there, among
-- rows that stay on record; here the room is used again by the next request.
CREATE TABLE content (
    task_id INTEGER PRIMARY KEY REFERENCES task (id),
    args    TEXT NOT NULL,                   -- JSON object
    context TEXT NOT NULL                    -- JSON object, secret
);
INSERT INTO content SELECT id, args, coalesce(context, '{}') FROM task WHERE args IS NOT NULL;
ALTER TABLE task DROP COLUMN args;
ALTER TABLE task DROP COLUMN context;
