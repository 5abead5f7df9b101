"""What commands read beside a long record: as much as beside a short one.

Counted in steps of SQLite's machine, which no load of the test machine changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import apsw
import pytest

from gracekit.journal.tasks_sql import IS_UNSUCCESSFUL
from gracekit.listings.chosen_task import find
from gracekit.listings.one_task import read_task
from gracekit.listings.run_list import list_exits, look
from gracekit.listings.store_view import Reports, RunReport, StoreView
from gracekit.listings.task_list import TaskList, TaskQuery, list_tasks
from gracekit.process import Process
from gracekit.runs.run import Run
from gracekit.store import older
from tests.journal.test_tasks import Book
from tests.service.kit import World

pytestmark = pytest.mark.looptime

_TASKS: Final = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, state, owner, accepted_at, finished_at)
SELECT ?2 || i, '', 'compute', 'requests', 'compute', 'shared', '', 'migrate', '1.0', '', 'error',
    10.0, ?2, 'ended-' || i, 0, ?3 FROM n"""

_RUNS: Final = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, time_ns,
    pid, start_ticks, lock_path, phase, topic, ops_topic, transport, started_at, beat_at, methods,
    kinds, schema, ended_at, exit_code, report, adopted_at, verdict)
SELECT ?2 || i, 'compute', 'h', ?3 || i, 1, '1', 'another boot', 1, 1, 1, 1, '/run/lock',
    'stopped', 'compute', 'compute-ops', 'memory://', ?4 + i, ?4 + i, '[]', '[]', 1,
    CASE WHEN ?5 THEN ?4 + i END, 0, '{}', CASE WHEN ?5 THEN ?4 + i END,
    CASE WHEN ?5 THEN 'drained' END FROM n"""
_INCIDENTS: Final = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
INSERT INTO incident (at, run_id, what) SELECT -i, 'run-1', 'duplicate' FROM n"""
FEW: Final = 100  # more than a page
MANY: Final = 2_000
SOME: Final = 10
"""Steps by which the search in a larger index may differ."""

Ask = Callable[[StoreView], Awaitable[Any]]


class Record:
    """A store with two open tasks, three that failed, two instances and a past.

    `run-1` owns the open tasks, and nobody can say whether it lives.

    Args:
        tasks: How many ended tasks it has that succeeded, each of a run of its own.
        runs: How many ended runs, each of an instance of its own: `ended-1` and so on.
        incidents: How many.
    """

    def __init__(self, *, tasks: int = 0, runs: int = 0, incidents: int = 0) -> None:
        self.world = World()
        self.book = Book(self.world, "run-1")
        self._tasks = tasks
        self._runs = runs
        self._incidents = incidents

    async def make(self) -> StoreView:
        await self.book.engine.start()
        await self.book.running("r1")
        await self.book.accept("r2")
        now, disk = self.world.clock.wall(), self.world.disk
        disk.execute(_TASKS, (3, "errored", now))
        disk.execute(_RUNS, (1, "run-", "api-", now - MANY, False))
        if self._tasks:
            disk.execute(_TASKS, (self._tasks, "succeeded", now))
        if self._runs:
            disk.execute(_RUNS, (self._runs, "ended-", "old-", now - MANY - 1, True))
        if self._incidents:
            disk.execute(_INCIDENTS, (self._incidents,))
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


async def status(view: StoreView) -> None:
    accounts = await view.accounts()
    await look(view, {}, store="store", accounts=accounts)
    await look(view, {}, "api-1", store="store", accounts=None)


async def exits(view: StoreView) -> None:
    assert len(await list_exits(view, limit=20)) == 20
    assert await list_exits(view, "compute@old-7")


async def one_task(view: StoreView) -> None:
    async def hear_all() -> Reports:
        return {}

    async def hear(_: Run) -> RunReport:
        return RunReport()

    await read_task(view, await find(view, "r1", "api-1", hear_all), hear)


def tasks(**query: Any) -> Ask:
    async def ask(view: StoreView) -> TaskList:
        return await list_tasks(view, {}, TaskQuery(**query))

    return ask


@pytest.mark.parametrize(
    "ask",
    [
        status,
        exits,
        one_task,
        tasks(),
        tasks(name="api-1"),
        tasks(name="compute@api-1", stuck=True),
        tasks(states=["all"]),
        tasks(states=["errored"]),
        tasks(states=["errored", "failed", "running"]),
    ],
    ids=["status", "exits", "show", "tasks", "named", "stuck", "all", "errored", "some"],
)
async def test_a_listing_reads_no_more_beside_a_long_record(ask: Ask):
    """It reads the tasks and runs that it shows: the ended ones are in indexes that it asks a
    page of.
    """
    few = Record(tasks=FEW, runs=FEW, incidents=FEW)
    many = Record(tasks=MANY, runs=MANY, incidents=MANY)

    beside_few, beside_many = await few.steps(ask), await many.steps(ask)

    assert beside_many.keys() == beside_few.keys()
    assert {sql for sql, n in beside_many.items() if n > beside_few[sql] + SOME} == set()


async def test_the_accounts_have_each_row_under_its_state():
    """What is only known as the rest is exact, because all is counted at one moment."""
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


async def test_status_shows_the_instances_that_ended_last_and_says_that_there_are_more():
    """A run that may live is shown whatever the limit is, and so is an ended one that owns
    tasks.
    """
    record = Record(runs=MANY)
    view = await record.make()
    record.world.disk.execute("UPDATE task SET owner = 'ended-9' WHERE request_id = 'r2'")

    some = await look(view, {}, store="store", accounts=None, limit=2)
    all_ = await look(view, {}, store="store", accounts=None, limit=MANY)
    await record.book.engine.stop()

    newest = [f"old-{MANY}", f"old-{MANY - 1}"]
    assert [entry.run.instance for entry in some.entries] == ["api-1", *newest, "old-9"]
    assert (some.more, all_.more) == (True, False)
    assert some.as_json()["more"]
    assert len(all_.entries) == 1 + MANY


async def test_an_instance_that_began_again_is_not_gone():
    """Of each instance the last run counts: one that lives, or that ended long ago, stands for
    it.
    """
    record = Record(runs=3)
    view = await record.make()
    disk, now = record.world.disk, record.world.clock.wall()
    again = "UPDATE run SET instance = 'old-1', generation = started_at WHERE ended_at IS NOT NULL"
    disk.execute(again)
    (last,) = record.world.rows("SELECT max(started_at) AS at FROM run WHERE ended_at IS NOT NULL")

    lately = await look(view, {}, store="store", accounts=None)
    disk.execute("UPDATE run SET ended_at = ?, beat_at = ? WHERE ended_at = ?", (0, 0, last["at"]))
    long_ago = await look(view, {}, store="store", accounts=None)
    await record.book.engine.stop()

    assert now - last["at"] < 3600
    assert [entry.run.run_id for entry in lately.entries] == ["run-1", "ended-3"]
    assert [entry.run.run_id for entry in long_ago.entries] == ["run-1"]


async def test_tasks_are_listed_by_states_and_owner_whatever_index_is_asked():
    """The newest first, open and ended ones, up to the limit; an unknown name has none."""
    record = Record(tasks=5, runs=2)
    view = await record.make()

    async def listed(**query: Any) -> list[str]:
        found = await list_tasks(view, {}, TaskQuery(**query))
        return [str(task.columns["request_id"]) for task in found.tasks]

    some = await listed(states=["errored", "running"])
    page = await listed(states=["errored", "running"], limit=2)
    succeeded = await listed(states=["succeeded", "running"], limit=3)
    owned = await listed(states=["all"], name="compute@old-1")
    unknown = await listed(name="old-3")
    await record.book.engine.stop()

    assert some == ["errored3", "errored2", "errored1", "r1"]
    assert page == some[:2]
    assert succeeded == ["succeeded5", "succeeded4", "succeeded3"]
    assert owned == ["succeeded1", "errored1"]
    assert unknown == []


async def test_the_words_of_indexes_are_those_of_the_queries():
    """Word for word, or SQLite does not use them."""
    record = Record()
    await record.make()
    rows = record.world.rows("SELECT name, sql FROM sqlite_schema WHERE type = 'index'")
    indexes = {row["name"]: row["sql"] or "" for row in rows}
    await record.book.engine.stop()

    assert indexes["task_unsuccessful"].endswith(f"WHERE {IS_UNSUCCESSFUL}")
    assert indexes["incident_store_older"].endswith(f"WHERE what = '{older.OLDER}'")
