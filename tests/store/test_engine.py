"""What both engines promise, and what group commit adds on a file."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import apsw
import pytest

from gracekit.errors import (
    ConflictError,
    SchemaTooNewError,
    StoreBrokenError,
    StoreError,
    UnknownCommitError,
)
from gracekit.process import Point, Process, Side
from gracekit.store import files
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.group import GroupCommit
from gracekit.store.migrate import load_migrations
from gracekit.store.sqlite.sqlite_engine import MemoryEngine, SqliteEngine
from gracekit.store.state import StatusSource, StoreState, StoreStatus
from tests.store.engine_suite import EngineSuite

SCHEMA = "CREATE TABLE kv (key INTEGER PRIMARY KEY, value ANY) STRICT"

MakeEngine = Callable[..., Engine]


def put(key: int, value: object = 0, *, durable: bool = True) -> Batch:
    batch = Batch(Point.ACCEPT, durable=durable)
    batch.add("INSERT INTO kv VALUES (?, ?)", key, value, expect=1)
    return batch


def swap(key: int, old: object, new: object) -> Batch:
    batch = Batch(Point.CLAIM)
    batch.add("UPDATE kv SET value = ? WHERE key = ? AND value = ?", new, key, old, expect=1)
    return batch


async def keys(engine: Engine) -> list[object]:
    return [key for (key,) in await engine.query("SELECT key FROM kv ORDER BY key")]


class RecordingProcess(Process):
    """Remembers the points that were passed; can hold the writer before its first commit."""

    def __init__(self, *, hold: bool = False) -> None:
        super().__init__()
        self.passed: list[tuple[Point, Side]] = []
        self.held = threading.Event()
        self.go_on = threading.Event()
        if not hold:
            self.go_on.set()

    def reach(self, point: Point, phase: Side) -> None:
        self.passed.append((point, phase))
        self.held.set()
        assert self.go_on.wait(30)

    @property
    def commits(self) -> int:
        """Each commit passes its "after" points in one piece."""
        phases = ["before", *(phase for _, phase in self.passed)]
        return sum(a != b == "after" for a, b in itertools.pairwise(phases))

    async def wait_held(self) -> None:
        assert await asyncio.to_thread(self.held.wait, 30)


class Crash(BaseException):
    """A simulated crash."""


class CrashingProcess(Process):
    def __init__(self, phase: Side) -> None:
        super().__init__()
        self.phase = phase

    def reach(self, point: Point, phase: Side) -> None:
        if phase == self.phase:
            raise Crash


@pytest.fixture(params=["sqlite", "memory"])
def make(request, tmp_path) -> MakeEngine:
    def make(migrations=(SCHEMA,), *, process=None, **options):
        process = process or Process()
        if request.param == "memory":
            return MemoryEngine(migrations, process=process, **options)
        return SqliteEngine(tmp_path / "store.db", migrations, process=process, **options)

    return make


@pytest.fixture
async def engine(make):
    engine = make()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def database(tmp_path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    """A database in memory, to look at from inside a commit."""
    made = apsw.Connection(":memory:")
    made.execute(SCHEMA)
    yield made
    made.close()


# -- both engines: the suite, and what is SQLite's ------------------------------------


class TestSqlite(EngineSuite):
    """On a file."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.places = itertools.count()
        self.directory = tmp_path

    def make(self, migrations: Sequence[str], process: Process) -> Engine:
        path = self.directory / f"store-{next(self.places)}.db"
        return SqliteEngine(path, migrations, process=process)


class TestMemory(EngineSuite):
    """In memory."""

    def make(self, migrations: Sequence[str], process: Process) -> Engine:
        return MemoryEngine(migrations, process=process)


async def test_commit_returns_the_rows_of_each_statement(engine):
    """Each statement's rows come back in its place, typed as SQLite holds them."""
    batch = Batch(Point.ACCEPT)
    first = batch.add("INSERT INTO kv VALUES (1, ?), (2, ?)", b"\0x", 1.5, expect=2)
    second = batch.ask("SELECT key, value FROM kv ORDER BY key", expect=2)
    third = batch.ask("UPDATE kv SET value = NULL WHERE key = 1 RETURNING key", expect=1)

    rows = await engine.commit(batch)

    assert rows[first] == []
    assert rows[second] == [(1, b"\0x"), (2, 1.5)]
    assert rows[third] == [(1,)]
    assert await engine.query("SELECT value FROM kv WHERE key = ?", 1) == [(None,)]


async def test_insert_tells_the_row_id_or_conflicts(engine):
    """One row or none of the batch: an INSERT that found its row there is a conflict."""
    sql = "INSERT INTO kv VALUES (?, 0) ON CONFLICT DO NOTHING"
    batch, again = Batch(Point.ACCEPT), Batch(Point.ACCEPT)
    index = batch.insert(sql, 7)
    again.insert(sql, 8)
    again.insert(sql, 7)

    assert (await engine.commit(batch))[index] == [(7,)]
    with pytest.raises(ConflictError, match="changed 0 rows instead of 1") as caught:
        await engine.commit(again)

    assert caught.value.statement == 1
    assert await keys(engine) == [7]


@pytest.mark.parametrize(
    ("sql", "params"),
    [
        ("INSERT INTO kv VALUES (1, 0)", ()),
        ("INSERT INTO nowhere VALUES (1)", ()),
        ("not sql", ()),
        ("INSERT INTO kv VALUES (?, ?)", (2,)),
        ("INSERT INTO kv VALUES (2, ?)", ({},)),
        ("INSERT INTO kv VALUES (2, ?)", ("\udc80",)),
        ("INSERT INTO kv VALUES (2, ?)", (2**70,)),
    ],
    ids=["constraint", "table", "syntax", "too-few", "type", "surrogate", "too-large"],
)
async def test_refused_statement_undoes_its_batch_alone(engine, sql, params):
    """What SQLite refuses is a StoreError to its own waiter, and the engine goes on."""
    await engine.commit(put(1))
    bad = put(3)
    bad.add(sql, *params)

    outcomes = await asyncio.gather(
        engine.submit(put(4)), engine.submit(bad), engine.submit(put(5)), return_exceptions=True
    )

    assert type(outcomes[1]) is StoreError
    assert outcomes[0] == outcomes[2] == [[]]
    assert await keys(engine) == [1, 4, 5]


async def test_query_refuses_to_write(engine):
    """Reading is reading: a write by way of `query` is refused and breaks nothing."""
    with pytest.raises(StoreError, match=r"readonly|read-only"):
        await engine.query("INSERT INTO kv VALUES (1, 1)")
    with pytest.raises(StoreError, match="no such table"):
        await engine.query("SELECT * FROM nowhere")

    assert engine.status.state is StoreState.REACHABLE
    await engine.commit(put(1))
    assert await keys(engine) == [1]


async def test_full_disk_breaks_the_store_for_good(make):
    """A full disk fails the batch, breaks the engine once and for all, and keeps what was there."""
    engine = make(max_page_count=20)
    told: list[StoreStatus] = []
    engine.on_status(told.append)
    await engine.start()
    await engine.commit(put(1))

    with pytest.raises(StoreBrokenError, match=r"the disk of .+ is full: make room"):
        await engine.commit(put(2, b"x" * 200_000))
    with pytest.raises(StoreBrokenError):
        await engine.commit(put(3))
    with pytest.raises(StoreBrokenError):
        await asyncio.to_thread(engine.commit_from_thread, put(3), timeout_s=20)
    engine.on_status(told.append)
    await asyncio.sleep(0)

    assert engine.status.state is StoreState.BROKEN
    assert told == [engine.status, engine.status]
    assert await keys(engine) == [1]
    await engine.stop()


async def test_newer_schema_is_refused_and_names_both_versions(tmp_path):
    """An old process must not write rows that it does not understand."""
    connection = apsw.Connection(":memory:")
    second = "ALTER TABLE kv ADD COLUMN extra"
    for make in (
        lambda texts: MemoryEngine(texts, process=Process(), connection=connection),
        lambda texts: SqliteEngine(tmp_path / "store.db", texts, process=Process()),
    ):
        new = make([SCHEMA, second.replace("extra", "extra ANY")])
        await new.start()
        await new.stop()

        with pytest.raises(SchemaTooNewError, match=r"version 2 .* up to 1"):
            await make([SCHEMA]).start()


async def test_missing_migrations_are_applied_to_an_older_database(database):
    """Rows survive an upgrade, and only what is missing is applied."""
    old = SqliteEngine(database, [SCHEMA], process=Process())
    await old.start()
    await old.commit(put(1))
    await old.stop()

    new = SqliteEngine(database, [SCHEMA, "ALTER TABLE kv ADD COLUMN extra ANY"], process=Process())
    await new.start()

    assert await new.query("SELECT * FROM kv") == [(1, 0, None)]
    await new.stop()


@pytest.fixture
async def old(database) -> None:
    """A store with the first migration."""
    engine = SqliteEngine(database, [SCHEMA], process=Process())
    await engine.start()
    await engine.commit(put(1))
    await engine.stop()


GROWS = "CREATE TABLE big AS SELECT randomblob(1000000) AS data"


async def test_a_migration_that_fills_the_disk_leaves_it_as_it_was(database, old):
    """The error says that it needs room; without it the WAL would keep what it had taken, and the
    older version could not start either.
    """
    full = f"{GROWS}; PRAGMA max_page_count = 20; CREATE TABLE more AS SELECT * FROM big"
    new = SqliteEngine(database, [SCHEMA, full], process=Process())
    command = apsw.Connection(str(database))  # while it is open, the WAL is not removed
    command.execute("SELECT * FROM kv").fetchall()

    with pytest.raises(StoreBrokenError, match=r"could not be migrated .* up to three times the "):
        await new.start()

    assert database.with_name("store.db-wal").stat().st_size == 0
    command.close()
    again = SqliteEngine(database, [SCHEMA], process=Process())
    await again.start()
    assert await again.query("SELECT key FROM kv") == [(1,)]
    await again.stop()


async def test_a_migration_whose_file_would_not_fit_is_undone(database, old, monkeypatch):
    """Its WAL is on the disk by then, but could not be moved to the file: each write would fail,
    and the older version could not start any more.
    """
    before, full = os.statvfs(database), types.SimpleNamespace(f_bavail=0, f_frsize=4096)
    new = SqliteEngine(database, [SCHEMA, GROWS], process=Process())

    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(StoreBrokenError, match=r"could not be migrated .* nothing was changed"):
        await new.start()
    monkeypatch.setattr(os, "statvfs", lambda _: before)
    again = SqliteEngine(database, [SCHEMA], process=Process())
    await again.start()
    await again.stop()
    await new.start()

    assert await new.query("SELECT key FROM kv") == [(1,)]
    await new.stop()


async def test_a_migration_leaves_a_small_wal(database, old):
    """It would be as large as what was written, and doctor would look for a reader that keeps it
    so.
    """
    new = SqliteEngine(database, [SCHEMA, GROWS], process=Process())
    await new.start()

    assert database.with_name("store.db-wal").stat().st_size == 0
    await new.stop()


async def test_migrations_are_made_beside_living_runs(database, old):
    """So processes that share a store can be restarted one after the other."""
    run = SqliteEngine(database, [SCHEMA], process=Process())
    await run.start()
    new = SqliteEngine(database, [SCHEMA, "ALTER TABLE kv ADD COLUMN extra ANY"], process=Process())
    await new.start()
    swapped = Batch(Point.CLAIM)
    swapped.add("UPDATE kv SET value = 7 WHERE key = 1", expect=1)
    await run.commit(swapped)

    assert await new.query("SELECT * FROM kv") == [(1, 7, None)]
    await new.stop()
    await run.stop()


async def test_failed_migration_leaves_the_database_as_it_was(database):
    """A migration is applied whole or not at all, together with its number."""
    broken = SqliteEngine(
        database, [SCHEMA, "CREATE TABLE a (b); CREATE TABLE kv (x)"], process=Process()
    )
    with pytest.raises(StoreError, match="migration 2"):
        await broken.start()

    engine = SqliteEngine(database, [SCHEMA], process=Process())
    await engine.start()
    assert await engine.query("SELECT name FROM sqlite_schema") == [("kv",)]
    await engine.stop()


def test_migrations_are_sorted_by_number(tmp_path, monkeypatch):
    """`10` comes after `2`, and a gap is refused."""
    package = tmp_path / "some_migrations"
    package.mkdir()
    for number in range(1, 11):
        (package / f"{number}_step.sql").write_text(f"-- {number}")
    (package / "README").write_text("no migration")
    monkeypatch.syspath_prepend(tmp_path)

    assert load_migrations("some_migrations") == [f"-- {number}" for number in range(1, 11)]

    (package / "4_step.sql").unlink()
    with pytest.raises(Exception, match="without a gap"):
        load_migrations("some_migrations")


# -- memory -----------------------------------------------------------------------


async def test_memory_commit_is_done_when_submit_returns():
    """A simulation sees no moment between a submit and its commit."""
    engine = MemoryEngine([SCHEMA], process=Process())
    await engine.start()

    assert engine.submit(put(1)).done()
    await engine.stop()


@pytest.mark.parametrize(("phase", "left"), [("before", []), ("after", [1])])
async def test_simulated_crash_leaves_what_a_real_one_would(phase, left):
    """A crash before COMMIT leaves nothing, one after it everything, for the next engine to
    find.
    """
    disk = apsw.Connection(":memory:")
    dying = MemoryEngine([SCHEMA], process=CrashingProcess(phase), connection=disk)
    await dying.start()
    with pytest.raises(Crash):
        dying.submit(put(1))
    await dying.stop()

    engine = MemoryEngine([SCHEMA], process=Process(), connection=disk)
    await engine.start()

    assert await keys(engine) == left


# -- group commit on a file -------------------------------------------------------


@pytest.fixture
async def held(database):
    """An engine whose writer stands before the commit of `put(0)`, and its process."""
    process = RecordingProcess(hold=True)
    engine = SqliteEngine(database, [SCHEMA], process=process)
    await engine.start()
    first = engine.submit(put(0))
    await process.wait_held()
    yield engine, process
    process.go_on.set()
    await engine.stop()
    await first


async def test_stop_that_joins_the_last_group_closes_the_file(held, database):
    """Nobody is left to empty the WAL later, and `stop` waits for it."""
    engine, process = held
    last = engine.submit(put(1))
    stopping = asyncio.create_task(engine.stop())
    while engine._writer._queue.qsize() < 2:  # the batch, and the stop behind it
        await asyncio.sleep(0)
    process.go_on.set()
    await asyncio.wait_for(stopping, 30)

    assert await last == [[]]
    assert not database.with_name("store.db-wal").exists()
    # Closed by the thread itself, not one day by the garbage collector.
    opened = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(database))]


async def test_everything_that_waits_shares_one_commit(held):
    """A hundred batches that came during a commit cost one more, not a hundred."""
    engine, process = held
    futures = [engine.submit(put(key)) for key in range(1, 101)]

    process.go_on.set()
    await asyncio.gather(*futures)

    assert process.commits == 2
    assert await keys(engine) == list(range(101))


async def test_conflict_in_a_group_rolls_back_alone(held):
    """The others of its group are committed, before and behind it, in one commit."""
    engine, process = held
    futures = [
        engine.submit(put(1)),
        engine.submit(swap(1, "no", "yes")),
        engine.submit(swap(1, 0, "mine")),
        engine.submit(put(1)),
        engine.submit(put(2)),
    ]

    process.go_on.set()
    outcomes = await asyncio.gather(*futures, return_exceptions=True)

    assert [type(o) for o in outcomes] == [list, ConflictError, list, StoreError, list]
    assert process.commits == 2
    assert await engine.query("SELECT * FROM kv") == [(0, 0), (1, "mine"), (2, 0)]


async def test_sum_of_a_group_is_written_once_and_without_who_was_rolled_back(held):
    """The statement would fail if it were executed twice; the account holds at the group's
    commit.
    """
    engine, process = held
    batches = [put(1), swap(1, "no", "yes"), put(2), put(3)]
    for number, batch in enumerate(batches):
        batch.add_up("INSERT INTO kv VALUES (?, ?)", "900", 10**number)
    futures = [engine.submit(batch) for batch in batches]

    process.go_on.set()
    outcomes = await asyncio.gather(*futures, return_exceptions=True)

    assert [type(o) for o in outcomes] == [list, ConflictError, list, list]
    assert process.commits == 2
    assert await engine.query("SELECT value FROM kv WHERE key = 900") == [(1101,)]


@pytest.mark.parametrize(("setting", "durable"), [("FULL", 2), ("NORMAL", 1)])
def test_one_durable_batch_makes_its_whole_group_durable(connection, setting, durable):
    """What was reported durable, as all is that does not say otherwise, is synced by the commit
    that it is in, whatever came before it or travels with it; the rest costs no sync when it is
    alone.
    """
    levels = []

    class Levels(Process):
        def reach(self, point: Point, phase: Side) -> None:
            if phase == "before":
                levels.append(connection.execute("PRAGMA synchronous").get)

    group = GroupCommit(connection, Levels(), synchronous=setting, source=StatusSource())
    group.run([put(1, durable=False)])
    group.run([put(2)])
    group.run([put(3, durable=False)])
    group.run([swap(3, 0, 1)])
    group.run([put(4, durable=False)])
    group.run([put(5, durable=False), put(6), put(7, durable=False)])

    assert levels == [1, durable, 1, durable, 1, durable, durable, durable]


@pytest.mark.parametrize("final", [False, True])
def test_commit_that_fails_is_unknown_to_all_that_were_in_it(connection, final):
    """Each gets an error of its own; only a disk that failed ends the store, and then for good."""
    source = StatusSource()
    group = GroupCommit(connection, Process(), synchronous="FULL", source=source)
    failures = iter([apsw.IOError("the disk is gone") if final else apsw.BusyError("locked")])

    def fail() -> bool:
        if (failure := next(failures, None)) is not None:
            raise failure
        return False

    connection.set_commit_hook(fail)
    outcomes = group.run([put(1), swap(8, 0, 1), put(2)])

    assert [type(outcome) for outcome in outcomes] == [UnknownCommitError] * 3
    assert len({id(outcome) for outcome in outcomes}) == 3
    assert all(isinstance(outcome.__cause__, apsw.Error) for outcome in outcomes)
    assert not connection.in_transaction
    assert connection.execute("SELECT key FROM kv").fetchall() == []
    (after,) = group.run([put(1)])
    assert type(after) is (StoreBrokenError if final else list)
    assert source.status.is_final is final


async def test_lone_batch_waits_for_no_companion(database):
    """Batches that come one by one are committed one by one, without a timer between."""
    process = RecordingProcess()
    engine = SqliteEngine(database, [SCHEMA], process=process)
    await engine.start()

    async with asyncio.timeout(20):
        for key in range(50):
            await engine.commit(put(key, durable=key % 2 == 0))

    assert process.commits == 50
    await engine.stop()


async def test_full_disk_fails_the_whole_group(database):
    """No batch of a group is reported committed when the disk failed one of them."""
    process = RecordingProcess(hold=True)
    engine = SqliteEngine(database, [SCHEMA], process=process, max_page_count=20)
    await engine.start()
    first = engine.submit(put(0))
    await process.wait_held()
    futures = [engine.submit(batch) for batch in (put(1), put(2, b"x" * 200_000), put(3))]

    process.go_on.set()
    outcomes = await asyncio.gather(*futures, return_exceptions=True)

    assert await first == [[]]
    assert [type(outcome) for outcome in outcomes] == [StoreBrokenError] * 3
    assert await keys(engine) == [0]
    await engine.stop()


async def test_thread_that_waited_too_long_learns_that_it_is_unknown(held):
    """A timed-out commit is not a failed one: it may still happen, and here does."""
    engine, process = held

    with pytest.raises(UnknownCommitError, match="may still be"):
        await asyncio.to_thread(engine.commit_from_thread, put(1), timeout_s=0.01)
    process.go_on.set()
    await engine.commit(put(2))

    assert await keys(engine) == [0, 1, 2]


async def test_unexpected_exception_does_not_end_the_writer(database):
    """Whatever is raised around a commit is unknown to its waiters, and the thread goes on."""
    engine = SqliteEngine(database, [SCHEMA], process=CrashingProcess("after"))
    await engine.start()

    for key in (1, 2):
        with pytest.raises(UnknownCommitError, match="Crash"):
            await engine.commit(put(key))

    assert await keys(engine) == [1, 2]
    await engine.stop()


def test_closed_loop_does_not_end_the_writer(database):
    """A commit whose waiter's loop is gone holds all the same, and threads are still served."""
    process = RecordingProcess(hold=True)
    engine = SqliteEngine(database, [SCHEMA], process=process)

    async def leave_a_commit_behind() -> None:
        await engine.start()
        engine.submit(put(1))
        await process.wait_held()

    asyncio.run(leave_a_commit_behind())
    process.go_on.set()
    ask = Batch(Point.STOP_RECORD)
    ask.ask("SELECT key FROM kv")

    assert engine.commit_from_thread(ask, timeout_s=20) == [[(1,)]]
    engine._reader.end()
    engine._writer.end()


async def test_a_mark_stays_the_same_until_something_is_committed(make, monkeypatch):
    """What was read at one mark is still true at an equal one."""
    monkeypatch.setattr(files, "_SAME_TIME_S", 0.0)
    engine = make()
    await engine.start()
    before = engine.look_at_files()
    same = engine.look_at_files()
    await engine.commit(put(1))
    after = engine.look_at_files()
    await engine.stop()

    assert before is not None
    assert before == same != after


async def test_the_commit_of_another_process_changes_the_mark(tmp_path, monkeypatch):
    """It is seen in the file, not in this engine."""
    monkeypatch.setattr(files, "_SAME_TIME_S", 0.0)
    path = tmp_path / "store.db"
    engine, other = (SqliteEngine(path, (SCHEMA,), process=Process()) for _ in range(2))
    await engine.start()
    await other.start()
    before = engine.look_at_files()
    await other.commit(put(1))
    after = engine.look_at_files()
    await other.stop()
    await engine.stop()

    assert before != after


async def test_there_is_no_mark_while_a_commit_is_under_way(tmp_path, monkeypatch):
    """Its bytes may be in the file long before it can be read, so the file does not change then."""
    monkeypatch.setattr(files, "_SAME_TIME_S", 0.0)
    gate = RecordingProcess(hold=True)
    engine = SqliteEngine(tmp_path / "store.db", (SCHEMA,), process=gate)
    await engine.start()
    committing = asyncio.ensure_future(engine.commit(put(1)))
    await gate.wait_held()
    during = engine.look_at_files()
    gate.go_on.set()
    await committing
    after = engine.look_at_files()
    await engine.stop()

    assert during is None
    assert after is not None


def test_there_is_no_mark_as_long_as_a_later_write_may_have_the_same_time(tmp_path):
    """The kernel's clock for files stands still for milliseconds."""
    now = [0.0]
    path = tmp_path / "store.db"
    path.write_bytes(b"a")
    open_files = files.OpenFiles(path, lambda: now[0])

    marks = []
    for now[0] in (0.0, 0.05, 0.15, 1.0):
        open_files.look()
        marks.append(open_files.mark())

    assert marks[:2] == [None, None]
    assert marks[2] == marks[3] is not None
