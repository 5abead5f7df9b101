"""The journal: what each commit of a task's life leaves on disk, and the accounts at every one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gracekit.errors import ConflictError, StoreError
from gracekit.journal.retention import Retention
from gracekit.journal.rows import Acceptance, Address, Outcome, TaskRow, caller_hash, content_hash
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import RunLeases
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.state import StoreState
from gracekit.testing.faults import Fault, PlannedFaults
from gracekit.tracker.task import Interruption, Lane, TaskState, TrackedTask
from tests.played import PlayedEngine, PlayedProcess, VirtualClock
from tests.service.kit import World

pytestmark = pytest.mark.looptime

CALLER = Address(queue="reply_1", msg_id="m1", expires_at=None)


OWNERS_AND_STATES = list(
    itertools.product(("run-1", "run-2", None), ("accepted", "running", "handed_over", "succeeded"))
)


class Book:
    """A journal on a disk of its own, and the shortest way to each of its commits."""

    def __init__(self, world: World, run_id: str = "run-1") -> None:
        self.world = world
        self.faults = PlannedFaults()
        self.engine = PlayedEngine(world.disk, PlayedProcess(set(), 1), self.faults)
        self.clock: VirtualClock = world.clock
        self.journal = Journal(self.engine, world.clock, run_id=run_id, service="compute")
        self.leases = RunLeases(self.engine, world.clock, run_id=run_id)

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
        owing: bool = True,
        **more: Any,
    ) -> list[Any]:
        batch = Batch(Point.FINISH)
        index = self.journal.add_finish(
            batch, row_id, Outcome(state=state, **more), expected=expected, owing=owing
        )
        return (await self.journal.commit(batch))[index]

    async def hand_over(self, task: TrackedTask, cut: Interruption, **more: Any) -> None:
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
        "on_interrupt": "error",
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
    """Custody is the row: method, arguments, caller and policy are in it, and it was counted."""
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


@pytest.mark.parametrize("begin", [False, True])
async def test_a_row_reads_back_as_it_was_accepted(book: Book, begin: bool):
    """Every column is in its place, also when the first attempt is in the same commit; another copy
    of the request has no part in it.
    """
    await book.accept(recipient="node-2-0", resource=("vm", "v1"))
    copy = book.world.task("r1", "node-2-0")
    guard = await book.leases.take(("vm", "v1"), "r1")
    assert guard is not None
    now = book.clock.wall()
    reply = Address(queue="reply_7", msg_id="m7", expires_at=now + 30, monitor_s=20.5)
    row_id = await book.accept(
        begin=begin,
        recipient="node-1-0",
        lane=Lane.OPS,
        queue="compute.node-1",
        route="fanout",
        target="node-1",
        namespace="admin",
        version="2.3",
        on_interrupt="retry",
        settle_s=7.5,
        resource=("vm", "v1"),
        ops_resource=("host", "h1"),
        shown_context={"request_id": "req-1"},
        reply=reply,
        expires_at=now + 60,
    )

    assert await book.journal.known("r1", "node-1-0") == TaskRow(
        id=row_id,
        request_id="r1",
        recipient="node-1-0",
        lane=Lane.OPS,
        queue="compute.node-1",
        route="fanout",
        target="node-1",
        namespace="admin",
        method="migrate",
        version="2.3",
        args={"vm": "v1"},
        context={"user": "ann"},
        content_hash=content_hash("admin", "migrate", "2.3", {"vm": "v1"}),
        on_interrupt="retry",
        settle_s=7.5,
        resource=("vm", "v1"),
        state=TaskState.RUNNING if begin else TaskState.ACCEPTED,
        reason=None,
        detail=None,
        owner="run-1",
        cut=None,
        not_before=None,
        attempts=int(begin),
        crashes=0,
        token=guard.token if begin else None,
        cursor=None,
        accepted_at=now,
        started_at=now if begin else None,
        finished_at=None,
        expires_at=now + 60,
        next_check=None,
        waiting_since=None,
        result=None,
        failure=None,
        errored_due=False,
        alone=False,
        hook_crashes=0,
        service="compute",
        caller_hash="",
        parkings=0,
        pending_deadline=None,
        ordered=None,
        ops_resource=("host", "h1"),
        shown_context={"request_id": "req-1"},
        due_at=None,
        failures=0,
        progress=None,
    )
    assert book.world.rows("SELECT * FROM reply") == [
        {
            "row_id": row_id,
            "queue": "reply_7",
            "msg_id": "m7",
            "expires_at": now + 30,
            "due_at": None,
            "monitor_s": 20.5,
            "owner": None,
            "knows_pending": 0,
        }
    ]
    assert book.world.task("r1", "node-1-0")["service"] == "compute"
    assert book.world.task("r1", "node-2-0") == copy


async def test_what_happened_to_a_row_reads_back_too(book: Book):
    """How it was cut, where it stood, and how it ended."""
    task = await book.running()
    task.cursor = {"block": 4}
    await book.hand_over(task, Interruption.UNCLEAN, settle_s=5.0, returned=False)
    cut_at = book.clock.wall()
    cut = await book.journal.row(task.row_id or 0)
    assert cut is not None
    assert (cut.state, cut.cut, cut.cursor) == (
        TaskState.HANDED_OVER,
        Interruption.UNCLEAN,
        {"block": 4},
    )
    assert (cut.owner, cut.not_before, cut.resource) == ("run-1", cut_at + 5, None)

    await asyncio.sleep(5)
    batch = Batch(Point.SETTLE)
    outcome = Outcome(
        state=TaskState.ERRORED, failure='{"class":"X"}', reason="gave_up", detail="no truth"
    )
    book.journal.add_finish(
        batch, cut.id, outcome, expected=TaskState.HANDED_OVER, errored_hook=True
    )
    await book.journal.commit(batch)

    row = await book.journal.row(cut.id)
    assert row is not None
    assert (row.state, row.finished_at) == (TaskState.ERRORED, cut_at + 5)
    assert (row.result, row.failure, row.reason, row.detail) == (
        None,
        '{"class":"X"}',
        "gave_up",
        "no truth",
    )
    # The hook is told what was asked for.
    assert (row.errored_due, row.args, row.context) == (True, {"vm": "v1"}, {"user": "ann"})
    assert await book.journal.row(cut.id + 1) is None
    assert await book.journal.known("r1", "node-2-0") is None
    assert await book.journal.known("r2", "") is None


async def test_an_attempt_that_begins_at_once_is_counted_in_the_accepting_commit(book: Book):
    """A crash right after that commit counts as started."""
    await book.running()

    row = book.world.task("r1")
    assert (row["state"], row["attempts"], row["started_at"]) == ("running", 1, book.clock.wall())


async def test_a_known_id_is_refused_as_a_whole(book: Book):
    """The second acceptance changes nothing: no row, no reply, no count."""
    await book.accept()
    before = book.world.task("r1")

    with pytest.raises(ConflictError):
        await book.accept(reply=CALLER, args={"vm": "other"})

    assert book.world.task("r1") == before
    assert book.world.rows("SELECT * FROM reply") == []
    assert book.world.tally() == {"accepted": 1}


async def test_copies_of_a_fanout_are_tasks_of_their_own(book: Book):
    """The key is request id and recipient."""
    await book.accept(recipient="node-1-0", route="fanout", target="node-1-0")
    await book.accept(recipient="node-2-0", route="fanout", target="node-2-0")

    assert book.world.tally() == {"accepted": 2}


def test_content_is_the_same_in_any_order_and_differs_in_any_part():
    """The hash is over namespace, method, version and arguments, not over how they were written."""
    assert caller_hash({"user_id": None, "more": 1}, ["user_id"]) == caller_hash({}, []) == ""
    ann = caller_hash({"user_id": "ann", "project_id": "p", "more": 1}, ["user_id", "project_id"])
    assert ann == caller_hash({"project_id": "p", "user_id": "ann"}, ["project_id", "user_id"])
    assert ann not in {caller_hash({"user_id": "ann"}, ["user_id", "project_id"]), ""}

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
    """The compare-and-set names owner and state; who misses either changes nothing."""
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


async def test_an_attempt_that_begins_forgets_how_the_last_one_was_cut(book: Book):
    """It has the token of the lease that was taken for it, and touches no other row."""
    row_id = await book.accept(resource=("vm", "v1"))
    await book.accept("r2", resource=("vm", "v1"))
    await book.accept("r1", recipient="node-1-0", resource=("vm", "v1"))
    others = [book.world.task("r2"), book.world.task("r1", "node-1-0")]
    book.world.disk.execute(
        "UPDATE task SET cut = 'cancelled', not_before = 9, attempts = 4 WHERE id = ?", (row_id,)
    )
    for _ in range(2):
        guard = await book.leases.take(("vm", "v1"), "r1")
        assert guard is not None
        await book.leases.release(guard, reason="clean")
    task = TrackedTask(
        request_id="r1", method="m", lane=Lane.REQUESTS, row_id=row_id, resource=("vm", "v1")
    )
    await asyncio.sleep(5)
    await book.begin(task)

    row = book.world.task("r1")
    assert (row["state"], row["cut"], row["not_before"]) == ("running", None, None)
    assert (row["attempts"], row["token"], row["started_at"]) == (5, 2, book.clock.wall())
    assert [book.world.task("r2"), book.world.task("r1", "node-1-0")] == others


# -- out --------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("state", [TaskState.FAILED, TaskState.CANCELLED])
async def test_only_what_has_failed_keeps_what_it_was_asked(book: Book, state: TaskState, keeps):
    """So that an operator can have it run again; a setting says no."""
    book.journal.keep_failed = keeps
    task = await book.running()

    await book.finish(task.row_id or 0, state=state)

    row = book.world.task("r1")
    kept = keeps and state is TaskState.FAILED
    assert (row["args"] is not None, row["context"] is not None) == (kept, kept)


async def test_an_outcome_makes_its_replies_due_and_purges_the_arguments(book: Book):
    """Outcome and due replies are one commit; what was asked stays as a hash only."""
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
    assert due == [("reply_1", "m1", None, None, 0)]
    (reply,) = book.world.rows("SELECT due_at FROM reply")
    assert reply["due_at"] == book.clock.wall()


async def test_an_outcome_that_owes_nothing_is_refused_where_somebody_waits(book: Book):
    """Who ends a cast need not look for replies: a caller that joined it is a conflict."""
    owed = await book.running("r1", reply=CALLER)
    free = await book.running("r2")

    assert await book.finish(free.row_id or 0, owing=False) == []
    with pytest.raises(ConflictError):
        await book.finish(owed.row_id or 0, owing=False)

    assert book.world.states() == {"r1": "running", "r2": "succeeded"}


@pytest.mark.parametrize("second", [TaskState.FAILED, TaskState.SUCCEEDED])
async def test_terminal_is_final(book: Book, second: TaskState):
    """A second outcome is refused, whatever it is."""
    task = await book.running()
    await book.finish(task.row_id or 0, result="1")

    with pytest.raises(ConflictError):
        await book.finish(task.row_id or 0, second)

    assert book.world.task("r1")["result"] == "1"


CHANGES: dict[str, tuple[str, Callable[[Journal, Batch, TrackedTask], object]]] = {
    "finish": (
        "running",
        lambda journal, batch, task: journal.add_finish(
            batch,
            task.row_id or 0,
            Outcome(state=TaskState.SUCCEEDED, result="1"),
            expected=TaskState.RUNNING,
        ),
    ),
    "hand_over": (
        "running",
        lambda journal, batch, task: journal.add_hand_over(batch, task, Interruption.CANCELLED),
    ),
    "begin": ("accepted", lambda journal, batch, task: journal.add_begin(batch, task)),
    "not_started": ("accepted", lambda journal, batch, task: journal.add_not_started(batch, task)),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_for_one_row_of_ours_in_one_state(book: Book, change: str):
    """Whose owner or state is another one, or has moved on, conflicts and is left as it is."""
    starts_from, add = CHANGES[change]
    row_id = await book.accept()
    await book.accept("other")
    book.world.disk.execute("UPDATE task SET state = ?", (starts_from,))
    other = book.world.task("other")
    task = TrackedTask(request_id="r1", method="m", lane=Lane.REQUESTS, row_id=row_id)

    for owner, state in OWNERS_AND_STATES:
        ours = (owner, state) == ("run-1", starts_from)
        columns = (owner, state, row_id)
        book.world.disk.execute("UPDATE task SET owner = ?, state = ? WHERE id = ?", columns)
        before = book.world.task("r1")
        batch = Batch(Point.FINISH)
        add(book.journal, batch, task)
        with contextlib.nullcontext() if ours else pytest.raises(ConflictError):
            await book.journal.commit(batch)
        assert (book.world.task("r1") != before) is ours

    assert book.world.task("other") == other


async def test_a_cursor_is_written_only_while_its_task_is_ours_and_running(book: Book):
    """A late one of a task that was taken from us, was cut or has ended is dropped."""
    task = await book.running()
    await book.running("other")
    other = book.world.task("other")
    for n, (owner, state) in enumerate(OWNERS_AND_STATES):
        columns = (owner, state, task.row_id)
        book.world.disk.execute("UPDATE task SET owner = ?, state = ? WHERE id = ?", columns)
        before = book.world.task("r1")
        task.cursor = n
        book.journal.mark_cursor(task)
        await asyncio.sleep(1.1)
        ours = (owner, state) == ("run-1", "running")
        assert (book.world.task("r1") != before) is ours

    assert book.world.task("other") == other


async def test_what_was_not_started_is_free_for_anyone(book: Book):
    """Still accepted, and still with its arguments."""
    row_id = await book.accept()
    batch = Batch(Point.NOT_STARTED)
    task = TrackedTask(request_id="r1", method="m", lane=Lane.REQUESTS, row_id=row_id)
    book.journal.add_not_started(batch, task)
    await book.journal.commit(batch)

    row = book.world.task("r1")
    assert (row["state"], row["owner"], row["args"]) == ("accepted", None, '{"vm":"v1"}')


async def test_replies_are_due_one_by_one(book: Book):
    """Those of an ended task, each until it was sent; another task's to the same place are its
    own.
    """
    addresses = [
        Address(queue="reply_1", msg_id="m1", expires_at=5.0),
        Address(queue="reply_1", msg_id="m2", expires_at=None),
        Address(queue="reply_2", msg_id="m1", expires_at=None),
    ]
    tasks = [await book.running(request_id) for request_id in ("r1", "r2")]
    for task in tasks:
        row = await book.journal.row(task.row_id or 0)
        assert row is not None
        for address in addresses:
            assert await book.journal.add_reply_address(row, address)
    first, second = (task.row_id or 0 for task in tasks)
    assert await book.journal.replies_due(first) == []
    await book.finish(first)
    assert await book.journal.replies_due(second) == []
    await book.finish(second)

    book.journal.forget_reply(first, addresses[0], sent=True)
    await book.journal.tally("anything")  # written with the next commit

    assert await book.journal.replies_due(first) == addresses[1:]
    assert await book.journal.replies_due(second) == addresses


async def test_a_reply_is_forgotten_when_sent_and_counted_when_given_up(book: Book):
    """What could not be sent is listed beside its count."""
    other = Address(queue="reply_2", msg_id="m2", expires_at=None)
    task = await book.running(reply=CALLER)
    row = await book.journal.known("r1", "")
    assert row is not None
    assert await book.journal.add_reply_address(row, other)
    assert len(await book.finish(row.id)) == 2

    book.journal.forget_reply(task.row_id or 0, CALLER, sent=True)
    book.journal.forget_reply(task.row_id or 0, other, sent=False)
    await book.journal.tally("anything")  # written with the next commit

    assert book.world.rows("SELECT * FROM reply") == []
    assert book.world.tally()["reply_given_up"] == 1
    (note,) = book.world.incidents("reply_given_up")
    assert (note["request_id"], note["method"]) == ("r1", row.method)
    assert note["detail"] == "the reply to queue reply_2 was not sent"


async def test_an_address_is_added_only_while_the_task_is_open(book: Book):
    """After the end the answer comes from the record; an address added twice is one, and other
    tasks, open or ended, have no part in it.
    """
    task = await book.running()
    other = await book.running("other")
    await book.finish((await book.running("ended")).row_id or 0)
    row = await book.journal.known("r1", "")
    assert row is not None

    assert await book.journal.add_reply_address(row, CALLER)
    assert await book.journal.add_reply_address(row, CALLER)
    assert await book.finish(task.row_id or 0) == [("reply_1", "m1", None, None, 0)]
    late = Address(queue="reply_9", msg_id="m9", expires_at=None)
    assert not await book.journal.add_reply_address(row, late)
    assert await book.finish(other.row_id or 0) == []


@pytest.mark.parametrize(
    ("cut", "returned", "owner", "waits", "crashes"),
    [
        (Interruption.SAFE_POINT, True, None, False, 0),
        (Interruption.CANCELLED, True, None, False, 0),
        (Interruption.UNCLEAN, False, "run-1", True, 0),
        (Interruption.UNCLEAN, True, None, True, 1),
    ],
)
async def test_a_hand_over_frees_the_row_once_its_handler_has_returned(
    book: Book, cut: Interruption, returned: bool, owner: str | None, waits: bool, crashes: int
):
    """Until then the row stays with this run until that is proven dead. Unclean, it waits to
    settle; and if nobody but the application cut the handler, that counts as a crash.
    """
    task = await book.running()
    task.cursor = 7

    await book.hand_over(task, cut, settle_s=10.0, returned=returned)

    row = book.world.task("r1")
    assert (row["state"], row["cut"], row["owner"], row["cursor"]) == (
        "handed_over",
        cut.value,
        owner,
        "7",
    )
    assert row["not_before"] == (book.clock.wall() + 10 if waits else None)
    assert row["crashes"] == crashes
    assert row["args"] == '{"vm":"v1"}'
    assert book.world.tally()["handed_over"] == 1


@pytest.mark.parametrize("cursor", [None, 7, 8])
async def test_a_hand_over_keeps_the_last_cursor_and_forgives_only_progress(
    book: Book, cursor: int | None
):
    """Where nothing was done since the last crash, that crash still counts."""
    task = await book.running()
    book.world.disk.execute("UPDATE task SET crashes = 2, cursor = '7', cursor_at = 1")
    task.cursor = cursor
    await book.hand_over(task, Interruption.SAFE_POINT)

    row = book.world.task("r1")
    assert row["cursor"] == ("8" if cursor == 8 else "7")
    assert row["crashes"] == (0 if cursor == 8 else 2)
    assert row["cursor_at"] == (1 if cursor is None else book.clock.wall())
    (note,) = book.world.incidents("handed_over")
    assert (note["request_id"], note["method"], note["detail"]) == ("r1", "migrate", "safe_point")


# -- cursors ----------------------------------------------------------------------------


async def test_a_cursor_waits_at_most_one_second(book: Book):
    """The last cursor is on disk 1 s after the first that waits, however many came between."""
    task = await book.running()
    for n in range(10):
        task.cursor = n
        book.journal.mark_cursor(task)
        await asyncio.sleep(0.09)
    assert book.world.task("r1")["cursor"] is None

    await asyncio.sleep(0.11)
    assert book.world.task("r1")["cursor"] == "9"


async def test_a_cursor_travels_with_the_next_commit(book: Book):
    """A commit that comes by takes it along: no commit of its own is needed."""
    task = await book.running()
    task.cursor = {"block": 4}
    book.journal.mark_cursor(task)

    await book.accept("r2")

    assert book.world.task("r1")["cursor"] == '{"block":4}'


async def test_progress_forgives_crashes(book: Book):
    """Crashes are counted since the last progress."""
    task = await book.running()
    book.world.disk.execute("UPDATE task SET crashes = 2")
    task.cursor = 1
    book.journal.mark_cursor(task)
    await asyncio.sleep(1.1)

    assert book.world.task("r1")["crashes"] == 0


async def test_the_same_cursor_again_forgives_nothing(book: Book):
    """A task that crashes at its first step marks the point it began from, each time."""
    task = await book.running()
    book.world.disk.execute("UPDATE task SET crashes = 2, cursor = '1'")
    task.cursor = 1
    book.journal.mark_cursor(task)
    await asyncio.sleep(1.1)

    row = book.world.task("r1")
    assert (row["crashes"], row["cursor"]) == (2, "1")
    assert row["cursor_at"] == pytest.approx(book.clock.wall() - 0.1)


async def test_cursors_of_several_tasks_travel_together_and_later_ones_again(book: Book):
    """A second that has passed begins anew with the next cursor; a task without a row has none."""
    tasks = [await book.running(request_id) for request_id in ("a", "b")]
    nowhere = TrackedTask(request_id="c", method="m", lane=Lane.REQUESTS, cursor=1)
    for n in range(2):
        for task in (*tasks, nowhere):
            task.cursor = n
            book.journal.mark_cursor(task)
        await asyncio.sleep(1.1)
        assert [book.world.task(name)["cursor"] for name in ("a", "b")] == [str(n)] * 2


async def test_a_cursor_that_cannot_be_written_disturbs_nobody(book: Book):
    """Nobody awaits its commit, and a broken store tells of itself."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    task = await book.running()
    task.cursor = 1
    book.faults.plan("store", Point.SAFE_POINT.value, Fault.BROKEN)
    for _ in range(2):
        book.journal.mark_cursor(task)
        await asyncio.sleep(1.1)
    gc.collect()

    assert book.engine.status.state is StoreState.BROKEN
    assert complaints == []


async def test_the_cursor_of_an_ended_task_is_not_written(book: Book):
    """A cursor that waits when its task ends is of no use to anybody."""
    task = await book.running()
    book.journal.forget_cursor(task)  # none waits, as for most tasks
    task.cursor = 5
    book.journal.mark_cursor(task)
    book.journal.forget_cursor(task)
    await book.finish(task.row_id or 0)
    await asyncio.sleep(2)

    assert book.world.task("r1")["cursor"] is None


# -- accounts and retention ---------------------------------------------------------------


async def test_retention_removes_what_is_old_and_done_and_counts_it(book: Book):
    """Open rows, young rows, rows with a reply due and rows with a hook due stay."""
    done = await book.running("done")
    await book.finish(done.row_id or 0)
    owing = await book.running("owing", reply=CALLER)
    await book.finish(owing.row_id or 0)
    hook = await book.running("hook")
    await book.finish(hook.row_id or 0)
    book.world.disk.execute("UPDATE task SET errored_due = 1 WHERE request_id = 'hook'")
    await book.running("open")
    await book.journal.reject(refused("refused"), reason="arguments", detail="no")
    failed = await book.running("failed")
    await book.finish(failed.row_id or 0, TaskState.FAILED)
    assert len(book.world.rows("SELECT 1 FROM content")) == 2  # of what failed, and of what is open
    await asyncio.sleep(3600)
    young = await book.running("young")
    await book.finish(young.row_id or 0)

    await Retention(book.journal, retention_s=3000).remove_all_old()

    left = [row["request_id"] for row in book.world.rows("SELECT request_id FROM task ORDER BY id")]
    assert left == ["owing", "hook", "open", "young"]
    assert book.world.tally() == {"accepted": 6, "rejected": 1, "removed": 2}
    assert book.world.rows("SELECT row_id FROM content") == [
        {"row_id": book.world.task("open")["id"]}
    ]


async def test_retention_removes_what_else_is_over(book: Book):
    """Ended holds, ended runs and incidents; not what is open, young or still to be told."""
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
    """A backlog goes in several commits, all of it, and the accounts are right after each."""
    monkeypatch.setattr("gracekit.journal.retention.REMOVE_AT_ONCE", 10)
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
    """Years of holds and incidents are no one commit, behind which every request would wait."""
    monkeypatch.setattr("gracekit.journal.retention.REMOVE_AT_ONCE", 10)
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


async def test_time_in_which_two_runs_consumed_counts_once(book: Book):
    """Two siblings for six minutes are no ten minutes, as each reads a queue of its own too."""
    retention, sibling = (Retention(book.journal, retention_s=50, after_s=600) for _ in range(2))
    task = await book.running("old")
    await book.finish(task.row_id or 0)
    await asyncio.sleep(100)

    for removed in (False, True):
        for _ in range(12 if not removed else 8):
            await asyncio.sleep(30)
            await retention.note_consumed(30)
            await asyncio.sleep(1)
            await sibling.note_consumed(31)
            await retention.remove_all_old()
        assert (book.world.states() == {}) is removed


async def test_a_clock_stepped_back_does_not_end_retention(book: Book):
    """What was noted in the future is forgotten, and the count begins again."""
    retention = Retention(book.journal, retention_s=50, after_s=600)
    task = await book.running("old")
    await book.finish(task.row_id or 0)
    await retention.note_consumed(30)
    book.world.clock.shift_s -= 3600
    await asyncio.sleep(3600 + 100)

    for _ in range(21):
        await asyncio.sleep(30)
        await retention.note_consumed(30)
        await retention.remove_all_old()

    assert book.world.states() == {}


async def test_rejections_are_counted_apart(book: Book):
    """A rejected delivery was never accepted; each is listed."""
    for n in range(3):
        await book.journal.reject(refused(f"r{n}"), reason="unknown_method", detail="no such")

    assert book.world.tally() == {"rejected": 3}
    assert len(book.world.incidents("rejected")) == 3


async def test_refused_requests_are_kept_up_to_a_number(book: Book):
    """Whoever may send may have any number refused: the oldest rows and incidents go, and are
    counted.
    """
    book.journal.kept_rejected = 20
    for n in range(50):
        await book.journal.reject(refused(f"r{n}"), reason="unknown_method", detail="no such")
    await book.accept("other")

    rows = book.world.rows("SELECT request_id FROM task WHERE state = 'rejected' ORDER BY id")
    assert [row["request_id"] for row in rows] == [f"r{n}" for n in range(30, 50)]
    assert [one["request_id"] for one in book.world.incidents("rejected")] == [
        row["request_id"] for row in rows
    ]
    assert book.world.tally() == {"accepted": 1, "rejected": 50, "rejected_removed": 30}


async def test_a_rejected_delivery_is_on_record_with_the_reason(book: Book):
    """What is needed to find its sender; of what it asked for nothing is kept."""
    delivery = refused("r1") | {"recipient": "node-1-0", "lane": "ops", "namespace": "admin"}
    await book.journal.reject(delivery, reason="arguments", detail="x" * 2000)

    now = book.clock.wall()
    row = {name: value for name, value in book.world.task("r1", "node-1-0").items() if value}
    assert row == {
        "id": 1,
        "request_id": "r1",
        "recipient": "node-1-0",
        "service": "compute",
        "lane": "ops",
        "queue": "compute",
        "route": "shared",
        "namespace": "admin",
        "method": "nope",
        "version": "1.0",
        "on_interrupt": "error",
        "state": "rejected",
        "reason": "arguments",
        "detail": "x" * 1000,
        "accepted_at": now,
        "finished_at": now,
    }
    (note,) = book.world.incidents("rejected")
    del note["id"]
    assert note == {
        "at": now,
        "run_id": "run-1",
        "what": "rejected",
        "request_id": "r1",
        "method": "nope",
        "detail": "x" * 1000,
    }
    await book.journal.reject(delivery, reason="other", detail="again")
    assert book.world.task("r1", "node-1-0")["reason"] == "arguments"
    assert book.world.tally() == {"rejected": 2}


async def test_what_is_no_row_is_counted_and_listed(book: Book):
    """Each by its own word."""
    await book.journal.tally("duplicate", request_id="r1", method="migrate", detail="running")
    await book.journal.tally("duplicate", request_id="r2")
    await book.journal.tally("returned")

    assert book.world.tally() == {"duplicate": 2, "returned": 1}
    first, second = book.world.incidents("duplicate")
    assert (first["request_id"], first["method"], first["detail"]) == ("r1", "migrate", "running")
    assert (second["request_id"], second["method"], second["detail"]) == ("r2", "", "")


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
        "shown_context": None,
    }


async def test_a_damaged_row_is_named(book: Book):
    """What cannot be read says which row it is."""
    row_id = await book.accept()
    book.world.disk.execute("UPDATE content SET args = '{broken'")

    with pytest.raises(StoreError, match=f"row {row_id} is damaged"):
        await book.journal.known("r1", "")
