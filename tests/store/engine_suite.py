"""The conformance suite of engines: tests that every new engine must pass.

Derive a class whose name begins with `Test`, and override `make`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from gracekit.errors import (
    ConflictError,
    StoreClosedError,
    StoreError,
    StoreFencedError,
    StoreUnreachableError,
)
from gracekit.process import Point, Process, Side
from gracekit.store.batch import Batch, Value
from gracekit.store.engine import Engine
from gracekit.store.state import StoreState, StoreStatus

SCHEMA: Final = ("CREATE TABLE kv (key BIGINT PRIMARY KEY, value TEXT)",)
PATIENCE_S: Final = 30.0
SETTLED_S: Final = 0.05
"""Seconds to wait for notifications that should not come."""


def put(key: int, value: Value = "") -> Batch:
    """A batch that inserts one row."""
    batch = Batch(Point.ACCEPT)
    batch.add("INSERT INTO kv (key, value) VALUES (?, ?)", key, value, expect=1)
    return batch


def swap(key: int, old: Value, new: Value) -> Batch:
    """A batch that changes one row if it has the old value: a compare-and-set."""
    batch = Batch(Point.CLAIM)
    batch.add("UPDATE kv SET value = ? WHERE key = ? AND value = ?", new, key, old, expect=1)
    return batch


async def keys(engine: Engine) -> list[Value]:
    """The committed keys, in order."""
    return [key for (key,) in await engine.query("SELECT key FROM kv ORDER BY key")]


@contextlib.contextmanager
def raises(kind: type[StoreError], match: str = "") -> Iterator[list[StoreError]]:
    """Check that the block raises *kind*, with a text that *match* finds; the list gets the error.

    Raises:
        AssertionError: it raised nothing, or the text differs.
    """
    caught: list[StoreError] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind.__name__} was raised"
    assert re.search(match, str(caught[0])), f"{caught[0]!r} does not match {match!r}"


class PointsPassed(Process):
    """A process that records the points before and after each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[tuple[Point, Side]] = []

    def reach(self, point: Point, phase: Side) -> None:
        """Record a point; called by the engine in any thread."""
        self.passed.append((point, phase))


class Heard:
    """A subscriber that records the statuses that it is notified of, in order."""

    def __init__(self, engine: Engine) -> None:
        self.statuses: list[StoreStatus] = []
        self._news = asyncio.Event()
        engine.on_status(self._take)

    def _take(self, status: StoreStatus) -> None:
        self.statuses.append(status)
        self._news.set()

    @property
    def states(self) -> list[StoreState]:
        """The states of the recorded statuses."""
        return [status.state for status in self.statuses]

    async def wait(self, state: StoreState) -> None:
        """Wait for a notification of *state*, and a moment longer for surplus ones."""
        async with asyncio.timeout(PATIENCE_S):
            while state not in self.states:
                self._news.clear()
                await self._news.wait()
        await asyncio.sleep(SETTLED_S)


class EngineSuite:
    """The guarantees of `gracekit.store.engine.Engine`, one for each method."""

    def make(self, migrations: Sequence[str], process: Process) -> Engine:
        """Make an engine with an empty, separate database; do not start it."""
        raise NotImplementedError

    @classmethod
    def names(cls) -> list[str]:
        """The methods that are tests."""
        return [name for name in dir(cls) if name.startswith("test_")]

    @contextlib.asynccontextmanager
    async def opened(self, process: Process | None = None) -> AsyncIterator[Engine]:
        """An engine that is started, and stopped at the end of the block."""
        engine = self.make(SCHEMA, process or Process())
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    # -- batches ------------------------------------------------------------------------

    async def test_commit_returns_the_rows_of_each_statement(self) -> None:
        """Each statement's rows come back in its place."""
        async with self.opened() as engine:
            batch = Batch(Point.ACCEPT)
            first = batch.add("INSERT INTO kv (key, value) VALUES (1, ?), (2, ?)", "a", "b")
            second = batch.ask("SELECT key, value FROM kv ORDER BY key", expect=2)
            third = batch.ask("UPDATE kv SET value = NULL WHERE key = 1 RETURNING key", expect=1)
            rows = await engine.commit(batch)

            assert rows[first] == []
            assert rows[second] == [(1, "a"), (2, "b")]
            assert rows[third] == [(1,)]
            assert await engine.query("SELECT value FROM kv WHERE key = ?", 1) == [(None,)]

    async def test_numbered_parameters_may_be_used_twice(self) -> None:
        """`?1` is the first parameter wherever it is used."""
        async with self.opened() as engine:
            batch = Batch(Point.ACCEPT)
            text = "INSERT INTO kv (key, value) SELECT ?2, ?1 WHERE ?1 = ?1"
            batch.add(text, "a", 1, expect=1)
            await engine.commit(batch)

            assert await engine.query("SELECT key, value FROM kv") == [(1, "a")]

    async def test_a_missed_expectation_undoes_the_whole_batch(self) -> None:
        """A compare-and-set that misses names its statement and leaves no trace of its batch."""
        async with self.opened() as engine:
            batch = put(1)
            batch.add("UPDATE kv SET value = 'x' WHERE key = 99", expect=1)
            with raises(ConflictError, "changed 0 rows instead of 1") as caught:
                await engine.commit(batch)

            assert getattr(caught[0], "statement", None) == 1
            assert await keys(engine) == []

    async def test_rows_that_are_asked_for_are_counted(self) -> None:
        """An unexpected row is a conflict as well."""
        async with self.opened() as engine:
            await engine.commit(put(1))
            batch = put(2)
            batch.ask("SELECT 1 FROM kv WHERE key = 1", expect=0)
            with raises(ConflictError, "returned 1 rows instead of 0"):
                await engine.commit(batch)

            assert await keys(engine) == [1]

    async def test_insert_returns_the_row_id_or_conflicts(self) -> None:
        """One row, or none of the batch: an INSERT that found its row there is a conflict."""
        async with self.opened() as engine:
            sql = "INSERT INTO kv (key, value) VALUES (?, '') ON CONFLICT DO NOTHING"
            batch, again = Batch(Point.ACCEPT), Batch(Point.ACCEPT)
            batch.insert(sql, 7)
            again.insert(sql, 8)
            again.insert(sql, 7)
            await engine.commit(batch)
            with raises(ConflictError, "changed 0 rows instead of 1") as caught:
                await engine.commit(again)

            assert getattr(caught[0], "statement", None) == 1
            assert await keys(engine) == [7]

    async def test_a_statement_gets_the_id_of_a_row_that_was_inserted_before(self) -> None:
        """What belongs to a new task is inserted in the same batch, which does not know its id."""
        async with self.opened() as engine:
            batch = Batch(Point.ACCEPT)
            first = batch.insert("INSERT INTO kv (key, value) VALUES (?, '')", 7)
            batch.add("INSERT INTO kv (key, value) VALUES (1000 + ?, ?)", "of 7", of=first)
            rows = await engine.commit(batch)

            ((row_id,),) = rows[first]
            assert isinstance(row_id, int)
            assert await engine.query("SELECT key FROM kv WHERE value = 'of 7'") == [
                (1000 + row_id,)
            ]

    async def test_a_statement_is_left_out_when_the_one_before_it_returned_nothing(self) -> None:
        """It is not run if that returned no row: most tasks have no reply to mark."""
        async with self.opened() as engine:
            await engine.commit(put(1))
            batch = Batch(Point.FINISH)
            found = batch.ask("SELECT key FROM kv WHERE key = 1")
            missed = batch.ask("SELECT key FROM kv WHERE key = 2")
            done = batch.add("INSERT INTO kv (key, value) VALUES (3, '')", after=found)
            left = batch.add("INSERT INTO kv (key, value) VALUES (4, '')", expect=1, after=missed)
            rows = await engine.commit(batch)

            assert (rows[done], rows[left]) == ([], [])
            assert await keys(engine) == [1, 3]

    async def test_a_refused_statement_undoes_its_batch_alone(self) -> None:
        """An SQL error fails its own batch, and other batches are committed."""
        for sql in ("INSERT INTO kv (key) VALUES (1)", "INSERT INTO nowhere VALUES (1)", "no sql"):
            async with self.opened() as engine:
                await engine.commit(put(1))
                bad = put(3)
                bad.add(sql)
                outcomes = await asyncio.gather(
                    *(engine.submit(put(4)), engine.submit(bad), engine.submit(put(5))),
                    return_exceptions=True,
                )

                assert isinstance(outcomes[1], StoreError), sql
                assert outcomes[0] == outcomes[2] == [[]]
                assert await keys(engine) == [1, 4, 5]

    async def test_batches_are_committed_in_the_order_in_which_they_were_submitted(self) -> None:
        """A later batch sees an earlier one, even if that was not awaited yet."""
        async with self.opened() as engine:
            futures = [
                engine.submit(put(1, "a")),
                engine.submit(swap(1, "a", "b")),
                engine.submit(swap(1, "a", "c")),
                engine.submit(swap(1, "b", "d")),
            ]
            outcomes = await asyncio.gather(*futures, return_exceptions=True)

            assert [type(outcome) for outcome in outcomes] == [list, list, ConflictError, list]
            assert await engine.query("SELECT value FROM kv") == [("d",)]

    async def test_a_cancelled_wait_does_not_cancel_the_commit(self) -> None:
        """If a caller stops waiting, its batch is committed nevertheless."""
        async with self.opened() as engine:
            task = asyncio.create_task(engine.commit(put(1)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await engine.commit(put(2))

            assert await keys(engine) == [1, 2]

    async def test_points_are_passed_around_the_commit_of_what_succeeds(self) -> None:
        """A batch that is rolled back reaches no point, because its commit does not happen."""
        process = PointsPassed()
        async with self.opened(process) as engine:
            await engine.commit(put(1))
            with raises(ConflictError):
                await engine.commit(swap(1, "no", "yes"))

        assert process.passed == [(Point.ACCEPT, "before"), (Point.ACCEPT, "after")]

    async def test_each_commit_asks_first_whether_its_run_may_act(self) -> None:
        """Once the guard finds no row, no batch of a group is committed, nor anything later."""
        async with self.opened() as engine:
            heard = Heard(engine)
            await engine.commit(put(1))
            engine.guard("SELECT 1 FROM kv WHERE key = ?", 1)
            gone = Batch(Point.ADOPT)
            gone.add("DELETE FROM kv WHERE key = 1", expect=1)
            await engine.commit(gone)
            group = [engine.submit(put(3)), engine.submit(put(1)), engine.submit(put(4))]
            outcomes = await asyncio.gather(*group, return_exceptions=True)
            await heard.wait(StoreState.FENCED)
            with raises(StoreFencedError):
                await engine.commit(put(1))

            assert {type(outcome) for outcome in outcomes} == {StoreFencedError}
            assert await keys(engine) == []

    async def test_how_long_a_commit_took_is_noted_before_its_answer(self) -> None:
        """Once for each group, in seconds; metrics and health checks use it."""
        seen: list[float] = []
        async with self.opened() as engine:
            await engine.commit(put(1))
            engine.commits.on_commit(seen.append)
            await engine.commit(put(2))

            assert len(seen) == 1
            assert 0 <= seen[0] <= engine.commits.longest_s()

    # -- threads ------------------------------------------------------------------------

    async def test_a_thread_can_commit_while_the_loop_is_blocked(self) -> None:
        """So the signal thread can record a stop-intent while no coroutine can run."""
        async with self.opened() as engine:
            results: list[object] = []
            thread = threading.Thread(
                target=lambda: results.append(engine.commit_from_thread(put(1), timeout_s=20))
            )
            thread.start()
            thread.join(PATIENCE_S)  # the loop is held here

            assert results == [[[]]]
            assert await keys(engine) == [1]

    async def test_errors_of_a_commit_from_a_thread_are_raised(self) -> None:
        """A thread gets the same errors as a coroutine."""
        async with self.opened() as engine:
            with raises(ConflictError):
                await asyncio.to_thread(engine.commit_from_thread, swap(1, "", "x"), timeout_s=20)

    # -- reading, starting, stopping ----------------------------------------------------

    async def test_a_query_cannot_write(self) -> None:
        """A write by `query` is refused, and the engine still works."""
        async with self.opened() as engine:
            with raises(StoreError):
                await engine.query("INSERT INTO kv (key) VALUES (1)")
            with raises(StoreError):
                await engine.query("SELECT * FROM nowhere")

            assert engine.status.state is StoreState.REACHABLE
            await engine.commit(put(1))
            assert await keys(engine) == [1]

    async def test_start_and_stop_may_come_twice_and_in_the_wrong_order(self) -> None:
        """A stopped engine refuses work instead of hanging."""
        engine = self.make(SCHEMA, Process())
        with raises(StoreClosedError):
            await engine.commit(put(1))
        await engine.stop()
        await asyncio.gather(engine.start(), engine.start())
        await engine.commit(put(1))
        await asyncio.gather(engine.stop(), engine.stop())
        await engine.stop()

        with raises(StoreClosedError):
            await engine.commit(put(2))
        with raises(StoreClosedError):
            await engine.query("SELECT 1")
        with raises(StoreClosedError):
            engine.commit_from_thread(put(2), timeout_s=1)

    async def test_stop_waits_for_what_was_submitted(self) -> None:
        """Everything submitted before `stop` is committed and answered."""
        engine = self.make(SCHEMA, Process())
        await engine.start()
        futures = [engine.submit(put(key)) for key in range(50)]
        await engine.stop()

        assert await asyncio.gather(*futures) == [[[]]] * 50

    async def test_a_store_that_works_is_reachable(self) -> None:
        """There are no notifications while the store works."""
        async with self.opened() as engine:
            heard = Heard(engine)
            await engine.commit(put(1))
            await asyncio.sleep(SETTLED_S)

            assert engine.status == StoreStatus()
            assert heard.states == []


class SharedEngineSuite(EngineSuite):
    """Further guarantees of engines whose store is remote and shared by hosts.

    The methods to override may return before the engine has noticed the change.
    """

    async def disconnect(self, engine: Engine) -> None:
        """Make the store unreachable."""
        raise NotImplementedError

    async def reconnect(self, engine: Engine) -> None:
        """Make the store reachable again."""
        raise NotImplementedError

    async def fence(self, engine: Engine) -> None:
        """Declare this engine's run dead, as another run does that adopts its tasks."""
        raise NotImplementedError

    async def test_loss_and_return_are_notified_once_to_each_subscriber(self) -> None:
        """Also if many commits fail meanwhile. The status of the loss has its time and error."""
        async with self.opened() as engine:
            heard = [Heard(engine), Heard(engine)]
            before = asyncio.get_running_loop().time()
            await self.disconnect(engine)
            await asyncio.gather(*(engine.submit(put(n)) for n in range(3)), return_exceptions=True)
            for one in heard:
                await one.wait(StoreState.UNREACHABLE)
            with raises(StoreUnreachableError):
                await engine.commit(put(7))
            lost = engine.status
            await self.reconnect(engine)
            for one in heard:
                await one.wait(StoreState.REACHABLE)

            assert lost.since is not None
            assert before <= lost.since <= asyncio.get_running_loop().time()
            assert isinstance(lost.error, StoreUnreachableError)
            for one in heard:
                assert one.states == [StoreState.UNREACHABLE, StoreState.REACHABLE]
                assert one.statuses[0] == lost
                assert one.statuses[1].error is None

    async def test_a_commit_that_an_unreachable_store_refuses_is_not_done_later(self) -> None:
        """The error said that nothing was done, so its caller may have tried again or given up."""
        async with self.opened() as engine:
            heard = Heard(engine)
            await engine.commit(put(1))
            await self.disconnect(engine)
            await asyncio.gather(engine.submit(put(2)), return_exceptions=True)
            await heard.wait(StoreState.UNREACHABLE)
            with raises(StoreUnreachableError):
                await engine.commit(put(3))
            with raises(StoreUnreachableError):
                engine.commit_from_thread(put(4), timeout_s=20)
            with raises(StoreError):
                await engine.query("SELECT key FROM kv")
            await self.reconnect(engine)
            await heard.wait(StoreState.REACHABLE)
            await engine.commit(put(5))

            assert {1, 5} <= set(await keys(engine)) <= {1, 2, 5}

    async def test_a_late_subscriber_is_notified_of_a_state_that_is_not_reachable(self) -> None:
        """Once, like earlier subscribers; one that subscribes after the return is not notified."""
        async with self.opened() as engine:
            early = Heard(engine)
            await self.disconnect(engine)
            await asyncio.gather(engine.submit(put(1)), return_exceptions=True)
            await early.wait(StoreState.UNREACHABLE)
            late = Heard(engine)
            await late.wait(StoreState.UNREACHABLE)
            await self.reconnect(engine)
            await late.wait(StoreState.REACHABLE)
            latest = Heard(engine)
            await asyncio.sleep(SETTLED_S)

            assert early.states == late.states == [StoreState.UNREACHABLE, StoreState.REACHABLE]
            assert latest.states == []

    async def test_a_subscriber_that_raises_does_not_silence_the_next(self) -> None:
        """Its error goes to the loop's handler."""
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        async with self.opened() as engine:

            def fail(status: StoreStatus) -> None:
                raise ValueError(status.state)

            engine.on_status(fail)
            heard = Heard(engine)
            await self.disconnect(engine)
            await asyncio.gather(engine.submit(put(1)), return_exceptions=True)
            await heard.wait(StoreState.UNREACHABLE)

            assert len(reported) == 1

    async def test_a_fenced_run_commits_nothing_any_more(self) -> None:
        """Not even after a loss and return of the connection, as others act in its place."""
        async with self.opened() as engine:
            heard = Heard(engine)
            await engine.commit(put(1))
            await self.fence(engine)
            await asyncio.gather(engine.submit(put(2)), return_exceptions=True)
            await heard.wait(StoreState.FENCED)
            await self.disconnect(engine)
            await asyncio.gather(engine.submit(put(3)), return_exceptions=True)
            await self.reconnect(engine)
            await asyncio.sleep(SETTLED_S)
            with raises(StoreFencedError):
                await engine.commit(put(4))
            with raises(StoreFencedError):
                engine.commit_from_thread(put(5), timeout_s=20)
            late = Heard(engine)
            await late.wait(StoreState.FENCED)

            assert heard.states == late.states == [StoreState.FENCED]
            assert engine.status.is_final
            assert await keys(engine) == [1]

    async def test_a_run_may_be_fenced_while_it_is_cut_off(self) -> None:
        """Other runs declare it dead while it is cut off; it notices when the store is back."""
        async with self.opened() as engine:
            heard = Heard(engine)
            await self.disconnect(engine)
            await asyncio.gather(engine.submit(put(1)), return_exceptions=True)
            await heard.wait(StoreState.UNREACHABLE)
            await self.fence(engine)
            await self.reconnect(engine)
            await asyncio.gather(engine.submit(put(2)), return_exceptions=True)
            await heard.wait(StoreState.FENCED)
            with raises(StoreFencedError):
                await engine.commit(put(3))

            assert heard.states[0] is StoreState.UNREACHABLE
            assert heard.states[-1] is StoreState.FENCED
            assert heard.states.count(StoreState.FENCED) == 1
