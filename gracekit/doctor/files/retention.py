"""A check of what the retention keeps: whether the disk has room for it at the rate on record."""

from __future__ import annotations

from typing import Final

import msgspec

from gracekit.clock import Clock
from gracekit.config.settings import Settings, variable_name
from gracekit.config.values import duration, format_duration
from gracekit.doctor.files import disk
from gracekit.doctor.files.database import ReadOnlyDatabase
from gracekit.doctor.finding import Finding, ok, warn
from gracekit.store import files

LEAST_REQUESTS: Final = 1000
LEAST_S: Final = 3600.0
"""A shorter record, or one of fewer requests, does not tell a rate."""
LONGEST_S: Final = 7 * 86400.0
"""The rate is that of so many seconds at most: a week has busy days and others."""
ROW_BYTES: Final = 330
"""About so much an ended request with a short result takes, before a record tells it."""
LEAST_ROWS: Final = 500
"""So many rows tell what a request takes; in a smaller file empty tables and indexes count more."""
_DAY_S: Final = 86400.0
_ENDED: Final = "SELECT count(*), min(finished_at) FROM task WHERE finished_at >= ?"
_SIZE: Final = """
SELECT (SELECT count(*) FROM task), page_count * page_size,
    (page_count - freelist_count) * page_size
FROM pragma_page_count, pragma_page_size, pragma_freelist_count"""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the store tells of its growth.

    Attributes:
        requests: How many have ended in the last *seconds*.
        seconds: How long ago the first of them ended.
        rows: How many requests are on record.
        row_bytes: What each row takes on disk, with its share of all else.
        file_bytes: Size of the file, with its free pages.
    """

    requests: int
    seconds: float
    rows: int
    row_bytes: float
    file_bytes: int

    @property
    def per_second(self) -> float:
        """The rate."""
        return self.requests / self.seconds


def check_retention(look: ReadOnlyDatabase, settings: Settings) -> Finding:
    """Check that the disk has room for what the retention keeps at the present rate."""
    check, record = "retention", _read(look)
    if record.requests < LEAST_REQUESTS or record.seconds < LEAST_S:
        return ok(
            check,
            f"{record.requests:,} requests ended in the last {duration(record.seconds)}, which is "
            f"too little to tell a rate; {_at_one_a_second(settings, record)}",
        )
    kept = format_duration(settings.retention_s)
    free = files.free_bytes(look.path)
    keeps = record.per_second * record.row_bytes * settings.retention_s
    seen = (
        f"at the {record.per_second * _DAY_S:,.0f} requests a day of the last "
        f"{duration(record.seconds)}, the retention of {kept} keeps about "
        f"{disk.shown_bytes(keeps)}; the file has {disk.shown_bytes(record.file_bytes)}, and the "
        f"file system {disk.shown_bytes(free)} free"
    )
    if keeps <= record.file_bytes + free - disk.LITTLE:
        return ok(check, seen)
    return warn(check, seen, f"lower {variable_name('retention_s')}, or {disk.LARGER_DISK}")


def _at_one_a_second(settings: Settings, record: _Record) -> str:
    """`one a second, of 330 bytes each (a short result), keeps about 190.3 MiB in 7d`."""
    row_bytes, why = ROW_BYTES, "a short result, and no arguments kept"
    if record.rows >= LEAST_ROWS:
        row_bytes, why = round(record.row_bytes), "as in this file"
    keeps = disk.shown_bytes(settings.retention_s * row_bytes)
    return (
        f"one a second, of {row_bytes} bytes each ({why}), keeps about {keeps} in "
        f"{format_duration(settings.retention_s)}"
    )


def _read(look: ReadOnlyDatabase) -> _Record:
    now = Clock().wall()
    ((ended, first),) = look.rows(_ENDED, now - LONGEST_S)
    ((rows, size, used),) = (tuple(map(int, map(str, row))) for row in look.rows(_SIZE))
    return _Record(
        requests=int(str(ended)),
        seconds=0.0 if first is None else max(0.0, now - float(str(first))),
        rows=rows,
        row_bytes=used / max(rows, 1),
        file_bytes=size,
    )
