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
