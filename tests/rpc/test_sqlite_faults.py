"""The SQLite consumer when its store answers late, wrongly or not at all."""

from __future__ import annotations

import asyncio
import errno
import json
import re
from collections.abc import AsyncIterator, Callable, Hashable
from pathlib import Path

import pytest

from gracekit.clock import Clock
from gracekit.errors import DependencyError, StoreBrokenError, StoreError, UnknownCommitError
from gracekit.life import Liveness, RecordedLife
from gracekit.process import Point, Process
from gracekit.rpc.sqlite import sqlite_rows
from gracekit.rpc.sqlite import sqlite_transport as sqlite
from gracekit.rpc.sqlite.sqlite_rows import KEPT_LETTERS, KEPT_LETTERS_S
from gracekit.rpc.sqlite.sqlite_transport import QUEUES_SCHEMA, SqliteTransport
from gracekit.rpc.transport import Delivery, shared_queue
from gracekit.store import files
from gracekit.store.batch import Batch, Row, Value
from gracekit.store.engine import Rows
from gracekit.store.migrate import load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from tests.rpc.kit import PATIENCE_S, Inbox, ShiftedClock, counted, dead_letters, message

QUEUE = shared_queue("q")


class FaultyTransport(SqliteTransport):
    """Its engine fails the next commits of some points, before or after their effect."""

    def __init__(self, path: Path, *, process: Process | None = None) -> None:
        super().__init__(path, process=process or Process(), clock=Clock(), poll_s=0.02)
        self.faults: list[tuple[Point, bool, StoreError]] = []
        self._engine: SqliteEngine = FaultyEngine(self._engine, self.faults)  # type: ignore[assignment]


class FaultyEngine:
    """The real engine, with faults drawn from a list that the test fills."""

    def __init__(self, engine: SqliteEngine, faults: list[tuple[Point, bool, StoreError]]) -> None:
        self._real = engine
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def commit(self, batch: Batch) -> Rows:
        if self._faults and self._faults[0][0] is batch.point:
            _, has_effect, error = self._faults.pop(0)
            if has_effect:
                await self._real.commit(batch)
            raise error
        return await self._real.commit(batch)


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[FaultyTransport]:
    transport = FaultyTransport(tmp_path / "queues.db")
    await transport.start()
    yield transport
    await transport.stop()


@pytest.mark.parametrize("has_effect", [True, False])
async def test_a_claim_of_unknown_outcome_loses_nothing(transport, has_effect):
    """Whether the claim held or not, its messages are delivered, in order and as new."""
    inbox = Inbox()
    await transport.declare([QUEUE])
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    transport.faults.append((Point.DELIVER, has_effect, UnknownCommitError("lost the answer")))

    await transport.consume([QUEUE], inbox.put, prefetch=10)
    await inbox.take(2)

    assert inbox.bodies == ["a", "b"]
    assert not any(delivery.redelivered for delivery in inbox.all)


@pytest.mark.parametrize("has_effect", [True, False])
async def test_a_settlement_is_tried_twice(transport, has_effect):
    """One lost answer does not leave a message in limbo: the second try settles it, once."""
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    delivery = await inbox.next()
    transport.faults.append((Point.ACK, has_effect, UnknownCommitError("lost the answer")))

    await delivery.ack()

    assert (await inbox.next()).body == b"b"


async def test_a_cancel_during_a_claim_puts_back_what_it_took(transport):
    """Messages claimed for a consumer that was cancelled meanwhile go to others as new."""
    await transport.declare([QUEUE])
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    first, second = Inbox(), Inbox()

    consumer = await transport.consume([QUEUE], first.put, prefetch=10)
    await asyncio.sleep(0)  # its claim is on the way now
    await consumer.cancel()
    await transport.consume([QUEUE], second.put, prefetch=10)
    await second.take(2 - len(first.bodies))

    assert first.bodies + second.bodies == ["a", "b"]
    assert not any(delivery.redelivered for delivery in second.all)


async def test_a_broken_file_ends_claiming_and_settles_nothing(transport):
    """After a disk error acks do nothing and raise nothing: the messages come again after a
    restart.
    """
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)
    await transport.publish(QUEUE, message("a"))
    delivery = await inbox.next()
    transport.faults.append((Point.ACK, False, StoreBrokenError("disk")))

    await delivery.ack()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_broken_queue_file_is_named_and_is_not_called_the_store(tmp_path):
    """A service has two files, and who only casts has no store at all."""
    transport = SqliteTransport(tmp_path / "queues.db", process=Process(), clock=Clock())
    schema = load_migrations(QUEUES_SCHEMA)
    transport._engine = SqliteEngine(transport.path, schema, process=Process(), max_page_count=40)
    await transport.start()
    await transport.declare([QUEUE])

    with pytest.raises(StoreBrokenError) as refused:
        await transport.publish(QUEUE, message("x" * 1_000_000))

    told = str(refused.value)
    assert told.startswith(f"the disk of {transport.path} is full: make room on it")
    assert "store" not in told.replace(str(transport.path), "")
    assert "this process" not in told
    await transport.stop()


BAD_HEADERS = [b"{", b"[1]", b'{"a": 1}', b'"text"', b'{"a": "\xff"}']


async def put_raw(transport: FaultyTransport, headers: bytes, body: bytes) -> None:
    """A row as no gracekit writes it; nobody is rung."""
    batch = Batch(Point.PUBLISH)
    batch.add(
        "INSERT INTO message (queue, headers, body, published_at) "
        "VALUES (?, CAST(? AS TEXT), ?, 0)",
        *(QUEUE.name, headers, body),
    )
    await transport._engine.commit(batch)


@pytest.mark.parametrize("headers", BAD_HEADERS)
async def test_a_row_whose_headers_are_no_object_of_texts_goes_to_the_dead_letters(
    transport, headers
):
    """It is set aside with the reason, and what stands before and behind it is delivered."""
    inbox = Inbox()
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("before"))
    await put_raw(transport, headers, b"bad")
    await transport.publish(QUEUE, message("behind"))

    await transport.consume([QUEUE], inbox.put, prefetch=3)
    await inbox.take(2)

    assert inbox.bodies == ["before", "behind"]
    async with asyncio.timeout(PATIENCE_S):
        while not (letters := await dead_letters(transport)):
            await asyncio.sleep(0.01)
    assert [(letter.body, dict(letter.headers)) for letter in letters] == [(b"bad", {})]
    assert "headers" in letters[0].reason


async def test_dead_letters_are_kept_up_to_a_number_and_an_age(tmp_path: Path):
    """Whoever may send cannot fill the disk with them: the oldest go, and are counted."""
    clock, inbox = ShiftedClock(), Inbox()
    transport = SqliteTransport(tmp_path / "q.db", process=Process(), clock=clock, poll_s=0.02)
    await transport.start()
    batch = Batch(Point.PUBLISH)
    batch.add(
        "INSERT INTO dead_letter (queue, reason, published_at, died_at, body) "
        "SELECT 'old', 'odd', 0, ?, CAST('x' AS BLOB) FROM json_each(?)",
        *(clock.wall(), json.dumps(list(range(KEPT_LETTERS)))),
    )
    await transport._engine.commit(batch)
    await transport.consume([QUEUE], inbox.put, prefetch=3)

    await transport.publish(QUEUE, message("bad"))
    await (await inbox.next()).dead_letter("no request")

    letters = await dead_letters(transport)
    assert (len(letters), letters[-1].body) == (KEPT_LETTERS, b"bad")
    assert await counted(transport, "removed_letter") == {"old": 1}

    clock.shift_s = KEPT_LETTERS_S + 1
    async with asyncio.timeout(PATIENCE_S):
        while await dead_letters(transport):
            await asyncio.sleep(0.01)
    assert await counted(transport, "removed_letter") == {"old": KEPT_LETTERS, QUEUE.name: 1}
    await transport.stop()


async def test_a_message_whose_callback_fails_does_not_end_the_reading(transport):
    """A fault in the middle of a delivery is met with another try: later messages still come."""
    inbox, met = Inbox(), []

    def fail_once(delivery: Delivery) -> None:
        if not met:
            met.append(delivery)
            raise RuntimeError("nobody foresaw this")
        inbox.put(delivery)

    consumer = await transport.consume([QUEUE], fail_once, prefetch=10)
    await transport.publish(QUEUE, message("a"))
    await transport.publish(QUEUE, message("b"))

    assert (await inbox.next()).body == b"b"
    await until(lambda: consumer.failure is None)  # its claim may still be asking for more


class CountingEngine:
    """The real engine, which counts looks at the files, and queries."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._real = engine
        self.looks = self.queries = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def look_at_files(self) -> Hashable | None:
        self.looks += 1
        return self._real.look_at_files()

    async def query(self, sql: str, *params: Value) -> list[Row]:
        self.queries += 1
        return await self._real.query(sql, *params)


async def test_a_poll_reads_nothing_while_nobody_writes_the_file(tmp_path, monkeypatch):
    """A message that comes then without a wake-up is found by the next poll."""
    monkeypatch.setattr(files, "_SAME_TIME_S", 0.0)
    transport = FaultyTransport(tmp_path / "queues.db")
    transport._engine = counting = CountingEngine(transport._engine)  # type: ignore[assignment]
    inbox = Inbox()
    await transport.start()
    await transport.consume([QUEUE], inbox.put, prefetch=10)
    for looks in (10, 20):  # what the start has written is read by the first ones
        before = counting.queries
        await until(lambda looks=looks: counting.looks >= looks)  # type: ignore[misc]

    assert counting.queries == before

    await put_raw(transport, b"{}", b"a")

    assert (await inbox.next()).body == b"a"
    await transport.stop()


class WithoutFiles(Process):
    """A process that has no file descriptor left for `/proc` when a peer is looked at."""

    failures = 0

    def judge(self, life: RecordedLife, directory: Path | None) -> Liveness:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files", "/proc/1/stat")
        return super().judge(life, directory)


async def test_a_poll_that_could_not_look_at_peers_goes_on(tmp_path):
    """After EMFILE in reading /proc a message that nobody rang for is still found."""
    process = WithoutFiles()
    transport = FaultyTransport(tmp_path / "queues.db", process=process)
    other = SqliteTransport(transport.path, process=Process(), clock=Clock(), poll_s=PATIENCE_S)
    inbox = Inbox()
    await other.start()
    await transport.start()
    await transport.consume([QUEUE], inbox.put, prefetch=10)
    process.failures = 1
    await until(lambda: not process.failures)

    await put_raw(transport, b"{}", b"a")

    assert (await inbox.next()).body == b"a"
    await transport.stop()
    await other.stop()


async def test_a_consumer_says_since_when_it_cannot_read_and_why(transport):
    """While claims fail it names the moment of the first and the error of the last; then
    nothing.
    """
    inbox = Inbox()
    consumer = await transport.consume([QUEUE], inbox.put, prefetch=10)
    await transport.publish(QUEUE, message("a"))
    await inbox.next()
    await until(lambda: consumer.failure is None)  # its claim may still be asking for more
    began_at = asyncio.get_running_loop().time()

    transport.faults += [(Point.DELIVER, False, StoreError(f"locked {n}")) for n in range(10)]
    await transport.publish(QUEUE, message("b"))
    await until(lambda: len(transport.faults) <= 5)
    failure = consumer.failure

    assert failure is not None
    assert failure.since - began_at < 1.0
    assert failure.why.startswith("locked ")
    assert (await inbox.next()).body == b"b"
    await until(lambda: consumer.failure is None)  # its claim may still be asking for more


SLOW = (
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 2000000) "
    "SELECT max(x) FROM n"
)


async def test_a_file_that_does_not_answer_in_time_is_not_counted(
    transport, monkeypatch: pytest.MonkeyPatch
):
    """Who asks goes on without an answer, and may ask again."""
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("a"))
    slow = asyncio.ensure_future(transport._engine.query(SLOW))
    await asyncio.sleep(0)  # it is in line before the question
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "DEPTH_TIMEOUT_S", 0.01)
        with pytest.raises(DependencyError, match=r"queues\.db were not counted in 0\.01 s"):
            await transport.depth([QUEUE])
    await slow

    assert await transport.depth([QUEUE]) == 1


async def test_a_file_that_cannot_be_read_is_not_counted(tmp_path: Path):
    """Whatever the engine says of it, the error is the one that any transport raises."""
    transport = SqliteTransport(tmp_path / "queues.db", process=Process(), clock=Clock())
    await transport.start()
    await transport._engine.stop()

    with pytest.raises(DependencyError, match=r"were not counted: .* is not open"):
        await transport.depth([QUEUE])

    await transport.stop()


async def test_counting_reads_no_message_that_waits(transport):
    """It is asked once a second, and a backlog may be long: each of the three counts has its
    index.
    """
    sql = sqlite_rows.depth(["a", "b"])
    plan = await transport._engine.query(f"EXPLAIN QUERY PLAN {sql}", "a", "b", 1.0)

    steps = [str(row[3]) for row in plan if "message" in str(row[3])]
    assert [re.findall(r"USING (?:COVERING )?INDEX (\w+)", step) for step in steps] == [
        ["message_waiting"],
        ["message_claimed"],
        ["message_expiring"],
    ]
