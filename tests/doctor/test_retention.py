"""Doctor on what the retention keeps: at the rate on record, beside the room of the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import apsw
import pytest

from gracekit import Settings
from gracekit.clock import Clock
from gracekit.doctor.finding import Finding, Level
from gracekit.doctor.store_file import ReadOnlyDatabase, check_retention, shown_bytes
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate

HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0
_ENDED: Final = """
WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?1)
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, state, accepted_at, finished_at)
SELECT hex(randomblob(16)), '', 'compute', 'requests', 'compute', 'shared', '', 'work', '1.0', '',
    'error', 10.0, 'succeeded', ?2 + i * ?3, ?2 + i * ?3 FROM n"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store without a row."""
    path = tmp_path / "store.db"
    connection = apsw.Connection(str(path))
    migrate(connection, load_migrations(MIGRATIONS), path=path)
    connection.close()
    return path


def end(store: Path, number: int, *, over_s: float) -> None:
    """So many requests have ended, evenly, from *over_s* ago until now."""
    connection = apsw.Connection(str(store))
    with connection:
        connection.execute(_ENDED, (number, Clock().wall() - over_s, over_s / number))
    connection.close()


def checked(store: Path, *, retention_s: float = 7 * DAY_S) -> Finding:
    with ReadOnlyDatabase(store) as look:
        return check_retention(look, Settings(retention_s=retention_s))


def test_a_record_that_is_too_short_tells_no_rate(store: Path):
    """A few requests, or a short time, say little about a week."""
    empty = checked(store)
    end(store, 2_000, over_s=HOUR_S / 2)
    young = checked(store)
    end(store, 10, over_s=2 * DAY_S)

    assert (empty.level, young.level) == (Level.OK, Level.OK)
    assert empty.seen.startswith("0 requests ended in the last 0s, which is too little")
    assert young.seen.startswith("2,000 requests ended in the last 30m00s, which is too")
    assert "requests a day of the last 2d00h" in checked(store).seen


def test_the_rate_on_record_is_set_against_the_retention(store: Path):
    """What it keeps is the rate times the retention times what each row takes."""
    end(store, 12_000, over_s=2 * DAY_S)

    found = checked(store, retention_s=10 * DAY_S)

    assert found.level is Level.OK
    assert found.seen.startswith(
        "at the 6,000 requests a day of the last 2d00h, the retention of 10d keeps about "
    )
    size = store.stat().st_size
    assert f"keeps about {shown_bytes(5 * size)}; the file has {shown_bytes(size)}" in (found.seen)
    assert found.seen.endswith(" free")


def test_a_week_tells_the_rate_of_an_older_record(store: Path):
    """What was long ago says little about what comes."""
    end(store, 50_000, over_s=100 * DAY_S)

    assert checked(store).seen.startswith("at the 500 requests a day of the last 6d23h")


def test_a_retention_that_does_not_fit_is_a_warning(store: Path):
    """Before the disk is full, which ends a run."""
    end(store, 50_000, over_s=2 * HOUR_S)

    found = checked(store, retention_s=1e12)

    assert found.level is Level.WARN
    assert found.remedy.startswith("lower GRACEKIT_RETENTION, or ")
    assert found.remedy.endswith("give the file a path on a larger disk; a full disk ends a run")
