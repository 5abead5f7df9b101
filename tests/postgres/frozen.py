"""A process that takes the lock of a store and stops: while idle, in mid-send, with results unread.

python -m tests.postgres.frozen URL SCHEMA idle|sending|unread
"""

from __future__ import annotations

import os
import signal
import sys
import time

from gracekit.store.postgres.postgres_group import begin, lock_of
from gracekit.store.postgres.postgres_link import PostgresLink

LARGE = 100_000_000
"""Characters; more than the buffers of a connection hold."""


def main(url: str, schema: str, how: str) -> None:
    """Freeze; this process says that it has the lock by its stop."""
    link = PostgresLink(url, schema)
    begin(link, lock_of(schema))
    link.read()
    if how == "sending":
        link.send("SELECT pg_sleep(0)")  # without a Sync: the server waits for more
        link._flush(time.monotonic() + 60)
    elif how == "unread":
        link.send("SELECT repeat('x', CAST($1 AS INTEGER))", (LARGE,))
        link.sync()
        link._flush(time.monotonic() + 60)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main(*sys.argv[1:])
