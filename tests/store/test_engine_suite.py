"""The suite for engines finds an engine that breaks a promise, and says which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gracekit.errors import ConflictError, StoreError
from gracekit.process import Point, Process
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine, MemoryEngine
from gracekit.testing.engines import EngineSuite

Rows = list[list[Row]]


class NoExpectations(MemoryEngine):
    """Commits whatever it is told, and asks for no number of rows."""

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        blind = Batch(batch.point)
        for one in batch.statements:
            blind.statements.append(one._replace(expect=None))
        return super().submit(blind)


class HalfBatches(MemoryEngine):
    """Commits each statement by itself."""

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        done: list[asyncio.Future[Rows]] = []
        for one in batch.statements:
            single = Batch(batch.point)
            single.statements.append(one._replace(after=None))
            done.append(super().submit(single))
        return asyncio.ensure_future(self._joined(done))

    async def _joined(self, done: list[asyncio.Future[Rows]]) -> Rows:
        return [(await one)[0] for one in done]


class LastFirst(MemoryEngine):
    """Commits what waits in the wrong order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._line: list[tuple[Batch, asyncio.Future[Rows]]] = []

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        future: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._line.append((batch, future))
        asyncio.get_running_loop().call_soon(self._work_off)
        return future

    def _work_off(self) -> None:
        while self._line:
            batch, future = self._line.pop()
            outcome = self._run(batch)
            if future.cancelled():
                continue
            if isinstance(outcome, StoreError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class Forgetful(LastFirst):
    """What is in line when it stops is dropped."""

    async def stop(self) -> None:
        self._line, dropped = [], self._line
        for _, future in dropped:
            future.cancel()
        await super().stop()


class WritingQueries(MemoryEngine):
    """A query may write."""

    async def query(self, sql: str, *params: Any) -> list[Row]:
        if sql.startswith("INSERT"):
            batch = Batch(Point.ACCEPT)
            batch.add(sql, *params)
            return (await self.commit(batch))[0]
        return await super().query(sql, *params)


class NoPoints(MemoryEngine):
    """Passes no point: the crash matrix could not stop it."""

    def __init__(self, migrations: Sequence[str], *, process: Process) -> None:
        super().__init__(migrations, process=Process())


class DeafThreads(MemoryEngine):
    """A thread's errors are swallowed."""

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:
        try:
            return super().commit_from_thread(batch, timeout_s=timeout_s)
        except ConflictError:
            return []


FAULTS: dict[Callable[..., Engine], set[str]] = {
    NoExpectations: {
        "test_a_missed_expectation_undoes_the_whole_batch",
        "test_rows_that_are_asked_for_are_counted",
        "test_insert_returns_the_row_id_or_conflicts",
        "test_batches_are_committed_in_the_order_in_which_they_were_submitted",
        "test_points_are_passed_around_the_commit_of_what_succeeds",
    },
    HalfBatches: {
        "test_a_missed_expectation_undoes_the_whole_batch",
        "test_rows_that_are_asked_for_are_counted",
        "test_insert_returns_the_row_id_or_conflicts",
        "test_a_statement_is_left_out_when_the_one_before_it_returned_nothing",
        "test_a_refused_statement_undoes_its_batch_alone",
    },
    LastFirst: {
        "test_batches_are_committed_in_the_order_in_which_they_were_submitted",
        "test_stop_waits_for_what_was_submitted",
    },
    Forgetful: {
        "test_batches_are_committed_in_the_order_in_which_they_were_submitted",
        "test_stop_waits_for_what_was_submitted",
    },
    WritingQueries: {"test_a_query_cannot_write"},
    NoPoints: {"test_points_are_passed_around_the_commit_of_what_succeeds"},
    DeafThreads: {"test_errors_of_a_commit_from_a_thread_are_raised"},
}


async def failing(make: Callable[..., Engine]) -> set[str]:
    """The tests of the suite that an engine does not pass."""

    class Suite(EngineSuite):
        def make(self, migrations: Sequence[str], process: Process) -> Engine:
            return make(migrations, process=process)

    failed = set()
    for name in Suite.names():
        try:
            async with asyncio.timeout(20):
                await getattr(Suite(), name)()
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - in whatever way it fails
            failed.add(name)
    return failed


async def test_an_engine_that_keeps_its_promises_passes():
    """
    Or a failure would say nothing about the engine.
    """
    assert await failing(MemoryEngine) == set()


@pytest.mark.parametrize("make", FAULTS, ids=lambda kind: kind.__name__)
async def test_a_faulty_engine_fails_where_it_must(make):
    """
    Each fault is found by the tests of the promise that it breaks.
    """
    assert await failing(make) == FAULTS[make]
