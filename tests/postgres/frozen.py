"""A process that takes the lock of a store, and stops at a moment of its choice.

python -m tests.postgres.frozen URL SCHEMA HOW

| HOW | the process has |
|---|---|
| locked | sent what a group begins with |
| idle | read the answer |
| sending | sent half of what it will send |
| large | sent much, with Syncs |
| unsynced | sent as much without any Sync |
| unread | not read large results |
"""

from __future__ import annotations

import os
import signal
import sys
import time

from gracekit.store.postgres import postgres_link
from gracekit.store.postgres.postgres_group import begin, lock_of
from gracekit.store.postgres.postgres_link import PostgresLink

LARGE = 100_000_000
"""Characters; more than the buffers of a connection hold."""
SYNCED = 100_000
"""Characters; a Sync follows so many."""


def main(url: str, schema: str, how: str) -> None:
    """Freeze; this process says that it has the lock by its stop."""
    link = PostgresLink(url, schema)
    if how == "unsynced":
        postgres_link._SYNC_BYTES = LARGE  # type: ignore[misc]  # what the test is about
    begin(link, lock_of(schema))
    if how != "locked":
        link.read()
    match how:
        case "sending":
            link.send("SELECT pg_sleep(0)")  # without a Sync: the server waits for more
        case "large" | "unsynced":
            for _ in range(3):
                link.send("SELECT length($1)", ("x" * SYNCED,))
        case "unread":
            link.send("SELECT repeat('x', CAST($1 AS INTEGER))", (LARGE,))
            link.sync()
    link._flush(time.monotonic() + 60)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
