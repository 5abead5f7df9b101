"""What a request and a recovery cost beside a long record: the same as beside none.

Counted in steps of SQLite's machine, which no load of the test machine changes.
"""

from __future__ import annotations

from typing import Any

import apsw
import pytest

from gracekit.journal.claims import Claims
from gracekit.journal.holds import Holds
from gracekit.journal.retention import Retention
from gracekit.journal.tasks_sql import IS_OPEN
from gracekit.leases.leases import Guard
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.tracker.task import Interruption, TaskState
from tests.journal.test_tasks import CALLER, Book
from tests.service.kit import World

pytestmark = pytest.mark.looptime

VM = ("vm", "v1")
_PAST = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, resource_kind, resource_id, state, owner, accepted_at,
    finished_at)
SELECT 'old' || i, '', 'compute', 'requests', 'compute', 'shared', '', 'migrate', '1.0', '',
    'error', 10.0, 'vm', 'v1', 'succeeded', iif(i % 2, 'run-1', 'run-2'), 0, ? FROM n"""
_PAST_HOLDS = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
INSERT INTO hold (service, name, key, owner, target, method, version, opened_at, lapses_at,
    ended_at, end_reason)
SELECT 'compute', 'migration', 'v1', iif(i % 2, 'run-1', 'run-2'), 'h', 'migrate', '1.0', 0, 0, ?,
    'ended' FROM n"""


async def story(past: int) -> dict[str, int]:
    """Steps of each statement of a life, its death and its recovery, beside *past* ended tasks."""
    world = World()
    dead, heir = Book(world, "run-1"), Book(world, "run-2")
    for book in (dead, heir):
        await book.engine.start()
    if past:
        for ended in (_PAST, _PAST_HOLDS):
            world.disk.execute(ended, (past, world.clock.wall()))
    steps: dict[str, int] = {}

    def count(event: dict[str, Any]) -> None:
        steps[event["sql"]] = event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    world.disk.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
    await live(dead)
    await recover(heir)
    world.disk.trace_v2(0)
    for book in (dead, heir):
        await book.engine.stop()
    return {sql: n for sql, n in steps.items() if " task" in sql or " hold" in sql}


async def live(book: Book) -> None:
    """Tasks that end, go on, wait and are handed over; their owner dies over some of them."""
    held = await book.leases.take(VM, "r1")
    assert isinstance(held, Guard)
    await book.finish((await book.running("r1", resource=VM, reply=CALLER)).row_id or 0)
    await book.leases.release(held, reason="clean")
    assert await book.leases.take(VM, "r2")
    await open_hold(Holds(book.journal, host="h"))
    await book.running("r2", resource=VM)
    await book.accept("r3")
    await book.hand_over(await book.running("r4"), Interruption.SAFE_POINT)


async def open_hold(holds: Holds) -> None:
    await holds.open("migration", "v1", at_most_s=900, method=(None, "migrate", "1.0"), args={})


async def recover(book: Book) -> None:
    """Another run takes over what is left, and asks all that a reconciler asks."""
    claims = Claims(book.journal, host="h", instance="i", on_damage=lambda error: None)
    batch = Batch(Point.ADOPT)
    until = book.journal.clock.wall()
    book.leases.add_take_away(batch, "run-1", acted_until=until)
    claims.add_adopt(batch, "run-1", crashed=True, charged=True, acted_until=until)
    await book.journal.commit(batch)
    await claims.take_duties()
    await claims.due_replies()
    await claims.errored_due(after=0)
    holds = Holds(book.journal, host="h")
    assert [hold.key for hold in await holds.due()] == ["v1"]
    await open_hold(holds)
    assert [hold.key for hold in await holds.mine()] == ["v1"]
    assert await holds.end("migration", "v1")
    await claims.next_look()
    assert await claims.unfinished_resources()
    await Retention(book.journal, retention_s=1e9).abandoned("directed", gone_s=60)
    assert await claims.claim(TaskState.HANDED_OVER, limit=32)
    assert await claims.claim(TaskState.ACCEPTED, limit=32)
    assert await claims.missing(frozenset())


async def test_no_statement_takes_longer_beside_a_long_record():
    """Past tasks of the same resource and of the same runs: SQLite uses an index of open rows
    only for a query that repeats the index's condition, and reads all of the past for others.
    """
    assert await story(2_000) == await story(0)


async def test_what_a_query_repeats_is_the_condition_of_the_indexes():
    """Word for word, or SQLite does not use them."""
    world = World()
    book = Book(world)
    await book.engine.start()
    (plain,) = world.rows("SELECT sql FROM sqlite_schema WHERE name = 'task_open'")
    (resource,) = world.rows("SELECT sql FROM sqlite_schema WHERE name = 'task_open_resource'")
    await book.engine.stop()

    assert plain["sql"].endswith(f"WHERE {IS_OPEN}")
    assert resource["sql"].endswith(f"WHERE {IS_OPEN} AND resource_kind IS NOT NULL")
