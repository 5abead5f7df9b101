"""The journal: what each commit of a task's life leaves on disk, and the accounts at every one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gracekit.errors import ConflictError, StoreError
from gracekit.leases.leases import Leases
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.testing.ports import PlayedEngine, PlayedProcess, VirtualClock
from gracekit.tracker.journal import Acceptance, Address, Journal, Outcome, content_hash
from gracekit.tracker.retention import Retention
from gracekit.tracker.task import Cut, Lane, OnInterrupt, TaskState, TrackedTask
from tests.service.kit import World

pytestmark = pytest.mark.looptime

CALLER = Address(queue="reply_1", msg_id="m1", expires_at=None)


class Book:
    """A journal on a disk of its own, and the shortest way to each of its commits."""

    def __init__(self, world: World, run_id: str = "run-1") -> None:
        self.world = world
        self.engine = PlayedEngine(world.disk, PlayedProcess(set(), 1))
        self.clock: VirtualClock = world.clock
        self.journal = Journal(self.engine, world.clock, run_id=run_id, service="compute")
        self.leases = Leases(self.engine, world.clock, run_id=run_id)

    async def accept(self, request_id: str = "r1", *, begin: bool = False, **more: Any) -> int:
        batch = Batch(Point.ACCEPT)
        index = self.journal.add_accept(batch, acceptance(request_id, **more), begin=begin)
        return int((await self.journal.commit(batch))[index][0][0] or 0)

    async def begin(self, task: TrackedTask) -> None:
        batch = Batch(Point.BEGIN)
        self.journal.add_begin(batch, task)
        await self.journal.commit(batch)

    async def finish(
        self,
        row_id: int,
        state: TaskState = TaskState.SUCCEEDED,
        expected: TaskState = TaskState.RUNNING,
        **more: Any,
    ) -> list[Any]:
        batch = Batch(Point.FINISH)
        index = self.journal.add_finish(
            batch, row_id, Outcome(state=state, **more), expected=expected
        )
        return (await self.journal.commit(batch))[index]

    async def hand_over(self, task: TrackedTask, cut: Cut, **more: Any) -> None:
        batch = Batch(Point.HAND_OVER)
        self.journal.add_hand_over(batch, task, cut, **more)
        await self.journal.commit(batch)

    async def running(self, request_id: str = "r1", **more: Any) -> TrackedTask:
        """A task whose attempt is on record."""
        row_id = await self.accept(request_id, begin=True, **more)
        return TrackedTask(
            request_id=request_id,
            method="migrate",
            lane=Lane.REQUESTS,
            row_id=row_id,
            state=TaskState.RUNNING,
        )


def acceptance(request_id: str, **more: Any) -> Acceptance:
    known: dict[str, Any] = {
        "request_id": request_id,
        "recipient": "",
        "lane": Lane.REQUESTS,
        "queue": "compute",
        "route": "shared",
        "target": "",
        "namespace": None,
        "method": "migrate",
        "version": "1.0",
        "args": {"vm": "v1"},
        "context": {"user": "ann"},
        "on_interrupt": OnInterrupt.ERROR,
        "settle_s": 10.0,
        "resource": None,
        "reply": None,
        "expires_at": None,
    }
    return Acceptance(**known | more)


@pytest.fixture
async def book() -> AsyncIterator[Book]:
    world = World()
    made = Book(world)
    await made.engine.start()
    yield made
    world.check_accounts()
    await made.engine.stop()


# -- in ---------------------------------------------------------------------------------


async def test_an_accepted_request_is_on_disk_with_all_that_a_later_run_needs(book: Book):
    """
    Custody is the row: method, arguments, caller and policy are in it, and it was counted.
    """
    await book.accept(reply=CALLER, expires_at=book.clock.wall() + 60)

    row = book.world.task("r1")
    assert (row["state"], row["owner"], row["attempts"]) == ("accepted", "run-1", 0)
    assert (row["method"], row["args"], row["context"]) == (
        "migrate",
        '{"vm":"v1"}',
        '{"user":"ann"}',
    )
    assert (row["on_interrupt"], row["settle_s"], row["accepted_at"]) == (
        "error",
        10.0,
        book.clock.wall(),
    )
    assert book.world.tally() == {"accepted": 1}
    (reply,) = book.world.rows("SELECT * FROM reply")
    assert (reply["msg_id"], reply["due_at"]) == ("m1", None)


async def test_an_attempt_that_begins_at_once_is_counted_in_the_accepting_commit(book: Book):
    """
    A crash right after that commit counts as started.
    """
    await book.running()

    row = book.world.task("r1")
    assert (row["state"], row["attempts"], row["started_at"]) == ("running", 1, book.clock.wall())


async def test_a_known_id_is_refused_as_a_whole(book: Book):
    """
    The second acceptance changes nothing: no row, no reply, no count.
    """
    await book.accept()
    before = book.world.task("r1")

    with pytest.raises(ConflictError):
        await book.accept(reply=CALLER, args={"vm": "other"})

    assert book.world.task("r1") == before
    assert book.world.rows("SELECT * FROM reply") == []
    assert book.world.tally() == {"accepted": 1}


async def test_copies_of_a_fanout_are_tasks_of_their_own(book: Book):
    """
    The key is request id and recipient.
    """
    await book.accept(recipient="node-1-0", route="fanout", target="node-1-0")
    await book.accept(recipient="node-2-0", route="fanout", target="node-2-0")

    assert book.world.tally() == {"accepted": 2}


def test_content_is_the_same_in_any_order_and_differs_in_any_part():
    """
    The hash is over namespace, method, version and arguments, not over how they were written.
    """
    base = content_hash(None, "m", "1.0", {"a": 1, "b": {"x": 1, "y": 2}})

    assert content_hash(None, "m", "1.0", {"b": {"y": 2, "x": 1}, "a": 1}) == base
    others = {
        content_hash("ns", "m", "1.0", {"a": 1}),
        content_hash(None, "n", "1.0", {"a": 1}),
        content_hash(None, "m", "1.1", {"a": 1}),
        content_hash(None, "m", "1.0", {"a": 2}),
        content_hash(None, "m", "1.0", {"a": "1"}),
        base,
    }
    assert len(others) == 6


async def test_an_attempt_begins_only_from_accepted_and_only_by_its_owner(book: Book):
    """
    The compare-and-set names owner and state; who misses either changes nothing.
    """
    row_id = await book.accept()
    task = TrackedTask(request_id="r1", method="m", lane=Lane.REQUESTS, row_id=row_id)
    stranger = Book(book.world, "run-2")
    await stranger.engine.start()

    with pytest.raises(ConflictError):
        await stranger.begin(task)
    await book.begin(task)
    with pytest.raises(ConflictError):
        await book.begin(task)

    assert book.world.task("r1")["attempts"] == 1


# -- out --------------------------------------------------------------------------------


async def test_an_outcome_makes_its_replies_due_and_purges_the_arguments(book: Book):
    """
    Outcome and due replies are one commit; what was asked stays as a hash only.
    """
    task = await book.running(reply=CALLER)

    due = await book.finish(task.row_id or 0, result='{"ok":true}')

    row = book.world.task("r1")
    assert (row["state"], row["result"], row["args"], row["context"]) == (
        "succeeded",
        '{"ok":true}',
        None,
        None,
    )
    assert len(row["content_hash"]) == 32
    assert due == [("reply_1", "m1", None)]
    (reply,) = book.world.rows("SELECT due_at FROM reply")
    assert reply["due_at"] == book.clock.wall()


@pytest.mark.parametrize("second", [TaskState.FAILED, TaskState.SUCCEEDED])
async def test_terminal_is_final(book: Book, second: TaskState):
    """
    A second outcome is refused, whatever it is.
    """
    task = await book.running()
    await book.finish(task.row_id or 0, result="1")

    with pytest.raises(ConflictError):
        await book.finish(task.row_id or 0, second)

    assert book.world.task("r1")["result"] == "1"


async def test_a_reply_is_forgotten_when_sent_and_counted_when_given_up(book: Book):
    """
    What could not be sent is listed beside its count.
    """
    other = Address(queue="reply_2", msg_id="m2", expires_at=None)
    task = await book.running(reply=CALLER)
    row = await book.journal.known("r1", "")
    assert row is not None
    assert await book.journal.add_reply_address(row, other)
    assert len(await book.finish(row.id)) == 2

    await book.journal.reply_done(task.row_id or 0, CALLER, sent=True)
    await book.journal.reply_done(task.row_id or 0, other, sent=False)

    assert book.world.rows("SELECT * FROM reply") == []
    assert book.world.tally()["reply_given_up"] == 1
    assert len(book.world.incidents("reply_given_up")) == 1


async def test_an_address_is_added_only_while_the_task_is_open(book: Book):
    """
    After the end the answer comes from the record; an address added twice is one.
    """
    task = await book.running()
    row = await book.journal.known("r1", "")
    assert row is not None

    assert await book.journal.add_reply_address(row, CALLER)
    assert await book.journal.add_reply_address(row, CALLER)
    assert await book.finish(task.row_id or 0) == [("reply_1", "m1", None)]
    late = Address(queue="reply_9", msg_id="m9", expires_at=None)
    assert not await book.journal.add_reply_address(row, late)


@pytest.mark.parametrize(
    ("cut", "owner", "waits"),
    [(Cut.SAFE_POINT, None, False), (Cut.CANCELLED, None, False), (Cut.UNCLEAN, "run-1", True)],
)
async def test_a_hand_over_frees_the_row_unless_it_is_unclean(
    book: Book, cut: Cut, owner: str | None, waits: bool
):
    """
    Unclean, the row stays with this run until that is proven dead, and waits to settle.
    """
    task = await book.running()
    task.cursor = 7

    await book.hand_over(task, cut, settle_s=10.0)

    row = book.world.task("r1")
    assert (row["state"], row["cut"], row["owner"], row["cursor"]) == (
        "handed_over",
        cut.value,
        owner,
        "7",
    )
    assert row["not_before"] == (book.clock.wall() + 10 if waits else None)
    assert row["args"] == '{"vm":"v1"}'
    assert book.world.tally()["handed_over"] == 1


# -- cursors ----------------------------------------------------------------------------


async def test_a_cursor_waits_at_most_one_second(book: Book):
    """
    The last cursor is on disk 1 s after the first that waits, however many came between.
    """
    task = await book.running()
    for n in range(10):
        task.cursor = n
        book.journal.mark_cursor(task)
        await asyncio.sleep(0.09)
    assert book.world.task("r1")["cursor"] is None

    await asyncio.sleep(0.11)
    assert book.world.task("r1")["cursor"] == "9"


async def test_a_cursor_travels_with_the_next_commit(book: Book):
    """
    A commit that comes by takes it along: no commit of its own is needed.
    """
    task = await book.running()
    task.cursor = {"block": 4}
    book.journal.mark_cursor(task)

    await book.accept("r2")

    assert book.world.task("r1")["cursor"] == '{"block":4}'


async def test_progress_forgives_crashes(book: Book):
    """
    Crashes are counted since the last progress.
    """
    task = await book.running()
    book.world.disk.execute("UPDATE task SET crashes = 2")
    task.cursor = 1
    book.journal.mark_cursor(task)
    await asyncio.sleep(1.1)

    assert book.world.task("r1")["crashes"] == 0


async def test_the_cursor_of_an_ended_task_is_not_written(book: Book):
    """
    A cursor that waits when its task ends is of no use to anybody.
    """
    task = await book.running()
    task.cursor = 5
    book.journal.mark_cursor(task)
    book.journal.forget_cursor(task)
    await book.finish(task.row_id or 0)
    await asyncio.sleep(2)

    assert book.world.task("r1")["cursor"] is None


# -- accounts and retention ---------------------------------------------------------------


async def test_retention_removes_what_is_old_and_done_and_counts_it(book: Book):
    """
    Open rows, young rows, rows with a reply due and rows with a hook due stay.
    """
    done = await book.running("done")
    await book.finish(done.row_id or 0)
    owing = await book.running("owing", reply=CALLER)
    await book.finish(owing.row_id or 0)
    hook = await book.running("hook")
    await book.finish(hook.row_id or 0)
    book.world.disk.execute("UPDATE task SET errored_due = 1 WHERE request_id = 'hook'")
    await book.running("open")
    await book.journal.reject(refused("refused"), reason="arguments", detail="no")
    await asyncio.sleep(3600)
    young = await book.running("young")
    await book.finish(young.row_id or 0)

    await Retention(book.journal, retention_s=3000).remove_all_old()

    left = [row["request_id"] for row in book.world.rows("SELECT request_id FROM task ORDER BY id")]
    assert left == ["owing", "hook", "open", "young"]
    assert book.world.tally() == {"accepted": 5, "rejected": 1, "removed": 1}


async def test_retention_removes_what_else_is_over(book: Book):
    """
    Ended holds, ended runs and incidents; not what is open, young or still to be told.
    """
    disk = book.world.disk
    for key, ended, due in (("open", None, 0), ("old", 10, 0), ("due", 10, 1), ("young", 99, 0)):
        disk.execute(
            "INSERT INTO hold (service, name, key, target, method, version, opened_at, lapses_at, "
            "ended_at, errored_due) VALUES ('compute', 'move', ?, 'h', 'move', '1.0', 0, 0, ?, ?)",
            (key, None if ended is None else book.world.clock.wall() + ended, due),
        )
    await book.journal.reject(refused("old"), reason="arguments", detail="old")
    await asyncio.sleep(99)
    await book.journal.reject(refused("young"), reason="arguments", detail="young")

    await Retention(book.journal, retention_s=50).remove_all_old()

    assert [row["key"] for row in book.world.rows("SELECT key FROM hold ORDER BY id")] == [
        "open",
        "due",
        "young",
    ]
    incidents = book.world.rows("SELECT detail FROM incident")
    assert [row["detail"] for row in incidents] == ["young"]


async def test_retention_works_in_batches(book: Book, monkeypatch: pytest.MonkeyPatch):
    """
    A backlog goes in several commits, all of it, and the accounts are right after each.
    """
    monkeypatch.setattr("gracekit.tracker.retention.REMOVE_AT_ONCE", 10)
    for n in range(35):
        task = await book.running(f"r{n}")
        await book.finish(task.row_id or 0)
    await asyncio.sleep(100)
    retention = Retention(book.journal, retention_s=50)

    assert await retention.remove_old() == 10
    book.world.check_accounts()
    await retention.remove_all_old()

    assert book.world.tally() == {"accepted": 35, "removed": 35}


async def test_what_else_is_over_goes_in_batches_too(book: Book, monkeypatch: pytest.MonkeyPatch):
    """
    Years of holds and incidents are no one commit, behind which every request would wait.
    """
    monkeypatch.setattr("gracekit.tracker.retention.REMOVE_AT_ONCE", 10)
    for n in range(35):
        book.world.disk.execute(
            "INSERT INTO hold (service, name, key, target, method, version, opened_at, lapses_at, "
            "ended_at) VALUES ('compute', 'move', ?, 'h', 'move', '1.0', 0, 0, ?)",
            (f"vm-{n}", book.world.clock.wall()),
        )
        await book.journal.reject(refused(f"r{n}"), reason="arguments", detail=f"{n}")
    book.world.disk.execute("DELETE FROM task")  # rejections, which are told of in incidents
    await asyncio.sleep(100)
    retention = Retention(book.journal, retention_s=50)
    counts = "SELECT (SELECT count(*) FROM hold) AS holds, (SELECT count(*) FROM incident) AS told"

    left = []
    while await retention.remove_old():
        left += [tuple(row.values()) for row in book.world.rows(counts)]

    assert left == [(25, 25), (15, 15), (5, 5), (0, 0)]


async def test_rejections_are_counted_apart(book: Book):
    """
    A rejected delivery was never accepted; each is listed.
    """
    for n in range(3):
        await book.journal.reject(refused(f"r{n}"), reason="unknown_method", detail="no such")

    assert book.world.tally() == {"rejected": 3}
    assert len(book.world.incidents("rejected")) == 3


def refused(request_id: str) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "recipient": "",
        "lane": "requests",
        "queue": "compute",
        "route": "shared",
        "namespace": None,
        "method": "nope",
        "version": "1.0",
    }


async def test_a_damaged_row_is_named(book: Book):
    """
    What cannot be read says which row it is.
    """
    row_id = await book.accept()
    book.world.disk.execute("UPDATE task SET args = '{broken'")

    with pytest.raises(StoreError, match=f"row {row_id} is damaged"):
        await book.journal.known("r1", "")
