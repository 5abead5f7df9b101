"""Services with and without a kind of resources, and the table in which the resources are."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Final

from gracekit import Context, Found, Service, Settled

TABLE: Final = "GRACEKIT_TEST_BENCH_SHARES"
"""Variable: the application's database."""

_PAGE: Final = """
SELECT id, status, updated_at FROM share WHERE status = 'creating' AND id > ? ORDER BY id LIMIT ?"""
_WRITE: Final = """
UPDATE share SET status = ?, size = ?, fence = ?, updated_at = ?
WHERE id = ? AND status = ? AND fence < ?"""
_MAKE: Final = """
PRAGMA journal_mode = WAL;
CREATE TABLE share (id TEXT PRIMARY KEY, status TEXT NOT NULL, updated_at REAL NOT NULL,
    size INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX transient ON share (id) WHERE status = 'creating';"""
_FILL: Final = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
INSERT INTO share (id, status, updated_at)
SELECT printf('share-%08d', i), ?2, unixepoch() - 3600 FROM n"""


def make_table(path: Path, rows: int, status: str) -> None:
    """Make the application's database: *rows* shares that have had *status* for an hour."""
    connection = sqlite3.connect(path)
    connection.executescript(_MAKE)
    with connection:
        connection.execute(_FILL, (rows, status))
    connection.close()


def number_of(path: Path, status: str) -> int:
    """How many shares have *status*."""
    connection = sqlite3.connect(path)
    ((number,),) = connection.execute("SELECT count(*) FROM share WHERE status = ?", (status,))
    connection.close()
    return int(number)


plain = Service("bench")
svc = Service("bench")
share = svc.kind("share")
_database: Final = sqlite3.connect(os.environ.get(TABLE, ":memory:"), isolation_level=None)
# As usual with WAL: a power cut may take the last commits, a crash of the process nothing.
_database.execute("PRAGMA synchronous = NORMAL")


async def build(ctx: Context, share: str) -> None:
    """Do nothing."""


for one in (plain, svc):
    one.rpc(resource="share")(build)


@share.find
async def transient(ctx: Context, *, after: str | None, limit: int) -> list[Found]:  # noqa: ARG001 - as called
    """A page of them."""
    rows = _database.execute(_PAGE, (after or "", limit))
    return [Found(name, status, since=since) for name, status, since in rows]


@share.write
async def write(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
    """Compare both the status and the token, and write."""
    values = (status, facts["size"], ctx.fence, time.time(), found.id, found.status, ctx.fence)
    return _database.execute(_WRITE, values).rowcount == 1


@share.probe("creating", failed="error")
async def was_it_created(ctx: Context, found: Found) -> Settled:  # noqa: ARG001 - as called
    """A backend that answers at once."""
    return Settled("available", size=1)
