"""What listings, probes and metrics cost beside very many parked tasks."""

from __future__ import annotations

from collections.abc import Iterator

import apsw
import pytest

from gracekit.listings import listings_sql
from gracekit.store.files import open_memory
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate

BY_PARKED_INDEX = "task USING COVERING INDEX task_pending"


@pytest.fixture
def database() -> Iterator[apsw.Connection]:
    """An empty store of SQLite."""
    made = open_memory()
    migrate(made, load_migrations(MIGRATIONS), path="memory")
    yield made
    made.close()


def plan(database: apsw.Connection, text: str, *params: object) -> list[str]:
    """The steps in which SQLite reads tables and indices."""
    found = database.execute(f"EXPLAIN QUERY PLAN {text}", params)
    return [str(row[3]) for row in found if str(row[3]).startswith(("SCAN ", "SEARCH "))]


def park(database: apsw.Connection, first: int, last: int) -> None:
    database.execute(
        """
        WITH RECURSIVE i (n) AS (SELECT ?1 UNION ALL SELECT n + 1 FROM i WHERE n < ?2)
        INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method,
            version, content_hash, on_interrupt, settle_s, state, accepted_at, parkings, parked_at,
            pending_deadline)
        SELECT 'order-' || n, '', 'compute', 'requests', 'compute', 'shared', '', 'work', '1.0', '',
            'retry', 10.0, 'pending', 0, 1, 0, 100 + n FROM i""",
        (first, last),
    )


def steps(database: apsw.Connection, text: str, *params: object) -> int:
    """Of SQLite's machine, for one query."""
    found: list[int] = []

    def count(event: dict[str, dict[str, int]]) -> None:
        found.append(event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"])

    database.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
    try:
        list(database.execute(text, params))
    finally:
        database.trace_v2(0, None)
    return found[-1]


def test_parked_rows_are_counted_by_their_index_and_not_read(database):
    """What probes, metrics and the status ask has no step through the table."""
    facts = plan(database, listings_sql.UNFINISHED_OF_SERVICE, "compute")
    counts = plan(database, listings_sql.PARKED_COUNTS, 1.0)
    unfinished = plan(database, listings_sql.UNFINISHED)

    assert facts == [
        "SEARCH task USING INDEX task_open (owner>?)",
        "SEARCH task USING INDEX task_open (owner=? AND state=?)",
        "SCAN unfinished",
        f"SEARCH {BY_PARKED_INDEX} (service=?)",
    ]
    assert counts == [f"SCAN {BY_PARKED_INDEX}"]
    assert unfinished == [facts[0], f"{facts[1][:-1]} AND due_at=?)"]


def test_the_list_reads_the_rows_that_it_shows(database):
    """The index has the order of deadlines, of one service or of all."""
    for text, params in (
        (listings_sql.PARKED, (51,)),
        (listings_sql.PARKED_OF_SERVICE, ("compute", 51)),
    ):
        rows, index = plan(database, text, *params)
        assert rows == "SEARCH task USING INTEGER PRIMARY KEY (rowid=?)"
        assert BY_PARKED_INDEX in index


def test_unsent_notifications_are_counted_by_an_index(database):
    """Their payloads are not read; the oldest is the first row."""
    due = plan(database, listings_sql.NOTIFICATIONS_DUE, "compute")
    unsent = plan(database, listings_sql.UNSENT)

    assert due == [
        "SEARCH outbox USING COVERING INDEX outbox_owner (owner=?)",
        "SEARCH run USING INDEX run_open (service=?)",
    ]
    assert unsent == ["SCAN outbox USING COVERING INDEX outbox_owner", "SCAN outbox"]


def test_beside_parked_tasks_a_look_costs_a_few_steps_for_each(database):
    """A count walks the index; what is unfinished beside 2,000 costs the same as beside two."""
    park(database, 1, 2)
    bare = {
        text: steps(database, text, *params)
        for text, params in (
            (listings_sql.UNFINISHED_OF_SERVICE, ("compute",)),
            (listings_sql.UNFINISHED, ()),
        )
    }
    park(database, 3, 2_000)

    assert steps(database, listings_sql.UNFINISHED) == bare[listings_sql.UNFINISHED]
    counted = (
        steps(database, listings_sql.UNFINISHED_OF_SERVICE, "compute")
        - bare[listings_sql.UNFINISHED_OF_SERVICE]
    )
    assert counted < 5 * 2_000
