"""The suite for engines finds an engine that breaks a promise, and says which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gracekit.errors import ConflictError, StoreError
from gracekit.process import Point, Process
from gracekit.store.batch import Batch, Row, Value
from gracekit.store.engine import Engine
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.store.state import OnStatus, StoreState, StoreStatus
from tests.store.engine_suite import EngineSuite, SharedEngineSuite
from tests.store.remote import RemoteEngine

pytestmark = pytest.mark.looptime

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


class Untimed(MemoryEngine):
    """Does not note how long its commits take."""

    def __init__(self, migrations: Sequence[str], *, process: Process) -> None:
        super().__init__(migrations, process=process)
        self.commits.end = lambda: None  # type: ignore[method-assign]


class DeafThreads(MemoryEngine):
    """A thread's errors are swallowed."""

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:
        try:
            return super().commit_from_thread(batch, timeout_s=timeout_s)
        except ConflictError:
            return []


class Unguarded(MemoryEngine):
    """Commits also for a run that may not act any more."""

    def guard(self, sql: str, *params: Value) -> None:
        pass


class AnnouncesTwice(RemoteEngine):
    """Each change is notified twice."""

    def _become(self, state: StoreState, error: StoreError | None = None) -> None:
        before = self.status
        super()._become(state, error)
        if self.status is not before:
            for callback in self._callbacks:
                self._notify_soon(callback)


class NeverFenced(RemoteEngine):
    """A connection that comes back makes a fenced run commit again."""

    def reconnect(self) -> None:
        if self.status.state is StoreState.FENCED:
            self._status = StoreStatus()
        super().reconnect()


class SilentReturn(RemoteEngine):
    """Nobody is notified that the store can be reached again."""

    def reconnect(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        super().reconnect()
        self._callbacks = callbacks


class ForgetsTheLate(RemoteEngine):
    """Who subscribes after the change is notified of the next one only."""

    def on_status(self, callback: OnStatus) -> None:
        self._callbacks.append(callback)


class OneCallForAll(RemoteEngine):
    """A callback that raises is the last one to be called."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._listeners: list[OnStatus] = []
        super().on_status(self._notify_all)

    def on_status(self, callback: OnStatus) -> None:
        self._listeners.append(callback)
        if self.status.error is not None:
            asyncio.get_running_loop().call_soon(callback, self.status)

    def _notify_all(self, status: StoreStatus) -> None:
        for listener in self._listeners:
            listener(status)


class LateCommits(RemoteEngine):
    """What it has refused while the store was away is done when that is back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refused: list[Batch] = []

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        if self.status.state is StoreState.UNREACHABLE:
            self._refused.append(batch)
        return super().submit(batch)

    def reconnect(self) -> None:
        super().reconnect()
        refused, self._refused = self._refused, []
        for batch in refused:
            self._run(batch)


FAULTS: dict[type[MemoryEngine], set[str]] = {
    Unguarded: {"test_each_commit_asks_first_whether_its_run_may_act"},
    NoExpectations: {
        "test_a_missed_expectation_undoes_the_whole_batch",
        "test_rows_that_are_asked_for_are_counted",
        "test_insert_returns_the_row_id_or_conflicts",
        "test_batches_are_committed_in_the_order_in_which_they_were_submitted",
        "test_points_are_passed_around_the_commit_of_what_succeeds",
    },
    HalfBatches: {
        "test_a_statement_gets_the_id_of_a_row_that_was_inserted_before",
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
    Untimed: {"test_how_long_a_commit_took_is_noted_before_its_answer"},
    DeafThreads: {"test_errors_of_a_commit_from_a_thread_are_raised"},
    AnnouncesTwice: {
        "test_loss_and_return_are_notified_once_to_each_subscriber",
        "test_a_late_subscriber_is_notified_of_a_state_that_is_not_reachable",
        "test_a_subscriber_that_raises_does_not_silence_the_next",
        "test_a_fenced_run_commits_nothing_any_more",
        "test_a_run_may_be_fenced_while_it_is_cut_off",
    },
    NeverFenced: {
        "test_a_fenced_run_commits_nothing_any_more",
        "test_a_run_may_be_fenced_while_it_is_cut_off",
    },
    SilentReturn: {
        "test_loss_and_return_are_notified_once_to_each_subscriber",
        "test_a_commit_that_an_unreachable_store_refuses_is_not_done_later",
        "test_a_late_subscriber_is_notified_of_a_state_that_is_not_reachable",
    },
    ForgetsTheLate: {
        "test_a_late_subscriber_is_notified_of_a_state_that_is_not_reachable",
        "test_a_fenced_run_commits_nothing_any_more",
    },
    OneCallForAll: {"test_a_subscriber_that_raises_does_not_silence_the_next"},
    LateCommits: {"test_a_commit_that_an_unreachable_store_refuses_is_not_done_later"},
}


class Suite(EngineSuite):
    """The suite, for engines that are made by *kind*."""

    def __init__(self, kind: Callable[..., Engine]) -> None:
        self.kind = kind

    def make(self, migrations: Sequence[str], process: Process) -> Engine:
        return self.kind(migrations, process=process)


class SharedSuite(Suite, SharedEngineSuite):
    """That of a store elsewhere, for engines that play one."""

    async def disconnect(self, engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        engine.disconnect()

    async def reconnect(self, engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        engine.reconnect()

    async def fence(self, engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        engine.fence()


async def failing(make: type[MemoryEngine]) -> set[str]:
    """The tests of the suite that an engine does not pass."""
    suite = SharedSuite(make) if issubclass(make, RemoteEngine) else Suite(make)
    failed = set()
    for name in suite.names():
        try:
            async with asyncio.timeout(20):
                await getattr(suite, name)()
        except (Exception, asyncio.CancelledError):  # noqa: BLE001 - in whatever way it fails
            failed.add(name)
    return failed


@pytest.mark.parametrize("make", [MemoryEngine, RemoteEngine])
async def test_an_engine_that_keeps_its_promises_passes(make):
    """Or a failure would say nothing about the engine."""
    assert await failing(make) == set()


@pytest.mark.parametrize("make", FAULTS, ids=lambda kind: kind.__name__)
async def test_a_faulty_engine_fails_where_it_must(make):
    """Each fault is found by the tests of the promise that it breaks."""
    assert await failing(make) == FAULTS[make]
