"""A store with a long record of ended tasks, and its file without a page in the page cache."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from gracekit.clock import Clock

PARTS: Final = 16
"""Statements that make the rows. The ids of each are sorted, as the index could only be written
page by page, at random; those of all in one would leave it without the gaps that it has."""
CACHE_KIB: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class Ids:
    """How request ids are made.

    Attributes:
        words: Behind the name of a case.
        sql: An expression for those on record.
        new: Makes those that are sent.
    """

    words: str
    sql: str
    new: Callable[[], str]


_RANDOM: Final = "lower(hex(randomblob(16)))"
OSLO: Final = Ids("", _RANDOM, lambda: uuid.uuid4().hex)
"""As its clients make them."""
GRACEKIT: Final = Ids(
    ", our ids",
    "printf('%012x7', CAST((unixepoch() - ?2) * 1000 AS INTEGER) + i * 100)"
    " || substr(lower(hex(randomblob(10))), 1, 19)",
    Clock().new_request_id,
)
"""Those of our own clients, which sort by time."""

_ROWS: Final = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, state, owner, attempts, accepted_at, started_at,
    finished_at, result)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
SELECT request_id, '', 'bench', 'requests', 'bench', 'shared', '', 'work', '1.0',
    lower(hex(zeroblob(16))), 'error', 10.0, 'succeeded', lower(hex(zeroblob(16))), 1,
    unixepoch() - ?2 + i * 0.1, unixepoch() - ?2 + i * 0.1, unixepoch() - ?2 + i * 0.1, 'null'
FROM (SELECT request_id, row_number() OVER () AS i
    FROM (SELECT {ids} AS request_id FROM n ORDER BY 1))"""
_COUNT: Final = """
INSERT INTO tally (what, n) VALUES ('accepted', ?1)
ON CONFLICT (what) DO UPDATE SET n = tally.n + ?1"""

_REMOVE: Final = "DELETE FROM task WHERE id > ?"
_REMOVED: Final = _COUNT.replace("'accepted'", "'removed'")


def add_history(path: Path, size: int, ids: Ids = OSLO) -> int:
    """Add ended rows to the store at *path*, as a service leaves them; no process may use it.

    Ten a second, the last one a while ago. The rows lie closer together than a service leaves them,
    because their arguments need not be removed; the index over their ids is as it leaves it.

    Returns:
        The id of the last row.
    """
    connection = apsw.Connection(str(path))
    for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}"):
        connection.execute(f"PRAGMA {pragma}")
    with connection:
        for part in range(PARTS):
            first, end = size * part // PARTS, size * (part + 1) // PARTS
            if first < end:
                ago = (size - first) * 0.1 + 3600.0
                connection.execute(_ROWS.format(ids=ids.sql), (end - first, ago))
        connection.execute(_COUNT, (size,))
    connection.execute("PRAGMA journal_mode=WAL")
    last: int = connection.execute("SELECT coalesce(max(id), 0) FROM task").get
    connection.close()
    return last


def remove_later(path: Path, last: int) -> None:
    """Remove the rows behind the id *last*, all ended; a service may use the store meanwhile.

    Otherwise the store without a history soon has one: beside some thousand rows, each request of
    a group already touches another page of the index.
    """
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    with connection:
        connection.execute(_REMOVE, (last,))
        connection.execute(_REMOVED, (connection.changes(),))
    connection.close()


def drop_pages(path: Path) -> None:
    """Write a database out, and drop it from the page cache.

    Not for the process that uses it: when that closes the file, it loses its locks on it.
    """
    for file in (path, path.with_name(f"{path.name}-wal")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # a page that is not written yet stays
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
