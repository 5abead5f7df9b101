"""What commands read beside a long record: as much as beside a short one.

Counted in steps of SQLite's machine, which no load of the test machine changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import apsw
import pytest

from gracekit.listings.store_view import StoreView
from gracekit.process import Process
from gracekit.store.open_rows import IS_UNSUCCESSFUL
from tests.journal.test_tasks import Book
from tests.service.kit import World

pytestmark = pytest.mark.looptime

_TASKS: Final = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, state, owner, accepted_at, finished_at)
SELECT ?2 || i, '', 'compute', 'requests', 'compute', 'shared', '', 'migrate', '1.0', '', 'error',
    10.0, ?2, 'ended-' || i, 0, ?3 FROM n"""

FEW: Final = 100
MANY: Final = 2_000
SOME: Final = 10
"""Steps by which the search in a larger index may differ."""

Ask = Callable[[StoreView], Awaitable[Any]]


class Record:
    """A store with two open tasks, three that failed, and a past.

    Args:
        tasks: How many ended tasks it has that succeeded.
    """

    def __init__(self, *, tasks: int = 0) -> None:
        self.world = World()
        self.book = Book(self.world, "run-1")
        self._tasks = tasks

    async def make(self) -> StoreView:
        await self.book.engine.start()
        await self.book.running("r1")
        await self.book.accept("r2")
        now, disk = self.world.clock.wall(), self.world.disk
        disk.execute(_TASKS, (3, "errored", now))
        if self._tasks:
            disk.execute(_TASKS, (self._tasks, "succeeded", now))
        return StoreView(self.book.engine, Process(), None, self.world.clock)

    async def steps(self, ask: Ask) -> dict[str, int]:
        """Steps of each statement of *ask*."""
        view = await self.make()
        steps: dict[str, int] = {}

        def count(event: dict[str, Any]) -> None:
            more = event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]
            steps[event["sql"]] = steps.get(event["sql"], 0) + more

        self.world.disk.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
        await ask(view)
        self.world.disk.trace_v2(0)
        await self.book.engine.stop()
        return steps


async def accounts(view: StoreView) -> None:
    await view.accounts()


@pytest.mark.parametrize("ask", [accounts])
async def test_a_listing_reads_no_more_beside_a_long_record(ask: Ask):
    """
    Of the tasks that succeeded only the number counts, which the pages of an index have.
    """
    few, many = Record(tasks=FEW), Record(tasks=MANY)

    beside_few, beside_many = await few.steps(ask), await many.steps(ask)

    assert beside_many.keys() == beside_few.keys()
    assert {sql for sql, n in beside_many.items() if n > beside_few[sql] + SOME} == set()


async def test_the_accounts_have_each_row_under_its_state():
    """
    What is only known as the rest is exact, because all is counted at one moment.
    """
    record = Record(tasks=20)
    view = await record.make()
    record.world.disk.execute("INSERT INTO tally VALUES ('removed', 4)")
    record.world.disk.execute("UPDATE tally SET n = 29 WHERE what = 'accepted'")
    record.world.disk.execute("UPDATE task SET state = 'rejected' WHERE request_id = 'errored3'")

    accounts = await view.accounts()
    await record.book.engine.stop()

    assert accounts.transient == {"accepted": 1, "running": 1}
    assert accounts.terminal == {"errored": 2, "succeeded": 20}
    assert (accounts.rejected, accounts.off_by) == (1, 1)


async def test_the_words_of_indexes_are_those_of_the_queries():
    """
    Word for word, or SQLite does not use them.
    """
    record = Record()
    await record.make()
    rows = record.world.rows("SELECT name, sql FROM sqlite_schema WHERE type = 'index'")
    indexes = {row["name"]: row["sql"] or "" for row in rows}
    await record.book.engine.stop()

    assert indexes["task_unsuccessful"].endswith(f"WHERE {IS_UNSUCCESSFUL}")
