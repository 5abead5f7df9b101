"""How each point is reached: a scenario drives the service there, under each `on_interrupt`.

`TABLE` says which scenario reaches which points; `cells` makes the matrix of
it. The service is armed at one of its starts: in its first life, or, for what
recovery does, after an end that left it something to recover.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gracekit.process import Point, Side
from tests.crash.cell import SIGKILLED, Cell
from tests.crash.checks import Snapshot, check_death, look
from tests.crash.service import JOURNALED, POLICIES

HANDED_OVER: Final = 75
PHASES: Final[tuple[Side, Side]] = ("before", "after")
AT_ONCE: Final = {"STARTUP_RECONCILIATION_WAIT_SECONDS": "0s"}
SHORT: Final = {"DRAIN_TIMEOUT": "100ms", "HANDOVER_GRACE": "100ms"}
HASTY: Final = {"PENDING_TIMEOUT": "50ms"}
FORGETFUL: Final = {"RETENTION": "50ms", "RETENTION_AFTER": "50ms", "RECONCILE_EVERY": "100ms"}


class Story:
    """The lives of one cell's service up to the kill at *failpoint*.

    Attributes:
        work: Method of the policy. thing: The same, with a resource where that may be.
        history: What each end left on disk.
        armed: Set once the process that is to die was started.
    """

    def __init__(self, cell: Cell, policy: str, failpoint: str) -> None:
        self.cell = cell
        self.work = f"work_{policy}"
        self.thing = f"thing_{policy}" if policy in JOURNALED else self.work
        self.failpoint = failpoint
        self.history: list[Snapshot] = []
        self.armed = asyncio.Event()

    async def arm(self, **settings: str) -> None:
        """Start the life that ends at the failpoint."""
        await self.cell.start(self.failpoint, **settings)
        self.armed.set()

    async def killed(self) -> None:
        """Wait until the service has died by SIGKILL."""
        code = await self.cell.ended()
        assert code == SIGKILLED, f"{self.failpoint} was not reached: the end was {code}"
        await self.look()

    async def drained(self, *codes: int) -> None:
        """Drain the service, which is to exit with one of *codes*."""
        self.cell.terminate()
        code = await self.cell.ended()
        assert code in codes, f"the drain ended with {code}"
        await self.look()

    async def look(self) -> None:
        """Take a snapshot and check what holds at any moment."""
        await self.cell.queues.wait_left()
        self.history.append(look(self.cell))
        check_death(self.cell, self.history)

    async def under_way(self, how: str, **settings: str) -> str:
        """Start the service and a request, as far as its handler; its id."""
        await self.cell.start("", **settings)
        return await self.begun(how)

    async def begun(self, how: str) -> str:
        request_id = await self.cell.call(self.thing, how=how, thing="a")
        if how == "steps":
            await self.cell.until_told("item", 2)
        else:
            await self.cell.until_told("start")
        return request_id


Scenario = Callable[[Story], Awaitable[None]]

# -- the first life ---------------------------------------------------------------


async def boot(story: Story) -> None:
    """A start with a request waiting."""
    await story.cell.cast(story.work)
    await story.arm()


async def call(story: Story) -> None:
    """A call on a resource, from the delivery to the reply."""
    await story.cell.call(story.thing, thing="a")
    await story.arm()


async def cast(story: Story) -> None:
    """Casts, nobody being answered."""
    await story.cell.cast(story.work)
    await story.cell.cast(story.work)
    await story.arm()


async def line(story: Story) -> None:
    """Two calls on one resource: the second waits for its turn."""
    await story.arm()
    await story.begun("gate")
    second = await story.cell.call(story.thing, thing="a")
    await story.cell.until_state(second, "accepted")
    story.cell.open_gate()


async def steps(story: Story) -> None:
    """A safe point, whose cursor travels with the next commit."""
    await story.arm()
    await story.begun("steps")
    await story.cell.cast(story.work)


async def borrow(story: Story) -> None:
    """`ctx.lease`, taken and given back."""
    await story.cell.call(story.work, how="borrow", thing="b")
    await story.arm()


async def hold(story: Story) -> None:
    """A hold that one request opens and another ends."""
    await story.arm()
    await story.cell.cast(story.work, how="hold", thing="c")
    await story.cell.until_told("done")
    await story.cell.cast(story.work, how="end_hold", thing="c")


async def duplicate(story: Story) -> None:
    """The same request three times: twice in flight, once after its end."""
    await story.arm()
    request_id = await story.begun("gate")
    again = {"how": "gate", "thing": "a"}
    await story.cell.call(story.thing, request_id, **again)
    await story.cell.until(lambda: bool(story.cell.rows("SELECT 1 FROM incident")))
    story.cell.open_gate()
    await story.cell.until_state(request_id, "succeeded")
    await story.cell.call(story.thing, request_id, **again)


async def refuse(story: Story) -> None:
    """A call of a method that there is not."""
    await story.cell.call("no_such_method")
    await story.arm()


async def garbage(story: Story) -> None:
    """Bytes that are no request."""
    await story.cell.send_garbage()
    await story.arm()


async def caller(story: Story) -> None:
    """It is the caller that dies: its request is sent as a whole, or not at all."""
    request_id = os.urandom(16).hex()
    await story.cell.start_caller(story.failpoint, story.work, request_id)
    story.armed.set()
    await story.cell.ended()
    if story.failpoint == "publish.after":
        story.cell.sent[request_id] = (story.work, {})


async def full(story: Story) -> None:
    """A request that finds no place, and is given back after a while."""
    await story.arm(MAX_RUNNING="1", MAX_ACCEPTED="1", ACCEPT_WAIT="50ms")
    await story.begun("gate")
    await story.cell.call(story.work)


async def park(story: Story) -> None:
    """A call whose handler finds no capacity."""
    await story.cell.call(story.thing, how="park", thing="a")
    await story.arm()


async def unpark(story: Story) -> None:
    """A resolver retries a parked task."""
    await story.cell.call(story.thing, how="park", thing="a")
    await story.arm()
    await story.cell.until(lambda: bool(story.cell.rows("SELECT 1 FROM task WHERE parkings = 1")))
    story.cell.open_gate()
    await story.cell.retry_parked()


async def expire(story: Story) -> None:
    """A parked task waits until its deadline."""
    await story.cell.call(story.thing, how="park", thing="a")
    await story.arm(**HASTY)


async def fail(story: Story) -> None:
    """A call whose first attempt fails, and which is tried again."""
    await story.cell.call(story.thing, how="fail", thing="a")
    await story.arm()


async def later(story: Story) -> None:
    """A cast that may not begin at once."""
    await story.arm()
    await story.cell.until(lambda: bool(story.cell.rows("SELECT 1 FROM run WHERE phase='serving'")))
    await story.cell.cast(story.thing, delay="50ms", thing="a")


async def cancel(story: Story) -> None:
    """A caller cancels what runs."""
    await story.arm()
    story.cell.cancel(await story.begun("gate"))


async def cancel_waiting(story: Story) -> None:
    """A caller cancels what waits for its turn."""
    await story.arm()
    await story.begun("gate")
    second = await story.cell.call(story.thing, thing="a")
    await story.cell.until_state(second, "accepted")
    story.cell.cancel(second)


async def cancel_later(story: Story) -> None:
    """A caller cancels what is not due yet, and has no owner."""
    await story.arm()
    await story.cell.until(lambda: bool(story.cell.rows("SELECT 1 FROM run WHERE phase='serving'")))
    request_id = await story.cell.cast(story.thing, delay="10s", thing="a")
    await story.cell.until_state(request_id, "accepted")
    story.cell.cancel(request_id)


async def cancel_parked(story: Story) -> None:
    """A caller cancels what waits for capacity."""
    request_id = await story.cell.call(story.thing, how="park", thing="a")
    await story.arm()
    await story.cell.until_state(request_id, "pending")
    story.cell.cancel(request_id)


# -- drains -----------------------------------------------------------------------


async def drain_idle(story: Story) -> None:
    """A drain with nothing to wait for."""
    request_id = await story.cell.call(story.thing, thing="a")
    await story.arm()
    await dict(story.cell.calls)[request_id]
    story.cell.terminate()


async def drain_steps(story: Story) -> None:
    """A drain that stops a task at a safe point."""
    await story.arm()
    await story.begun("steps")
    story.cell.terminate()


async def drain_cut(story: Story) -> None:
    """A drain whose deadline cancels a task."""
    await story.arm(**SHORT)
    await story.begun("gate")
    story.cell.terminate()


async def drain_stuck(story: Story) -> None:
    """A drain with a task that ignores its cancellation."""
    await story.arm(**SHORT)
    await story.begun("stuck")
    story.cell.terminate()


async def drain_queued(story: Story) -> None:
    """A drain with a request that was accepted and not started."""
    await story.arm(MAX_RUNNING="1")
    await story.begun("gate")
    second = await story.cell.call(story.work)
    await story.cell.until_state(second, "accepted")
    story.cell.terminate()


async def resume(story: Story) -> None:
    """A drain that an operator takes back."""
    await story.arm()
    await story.begun("gate")
    await story.cell.control("drain")
    await story.cell.until(lambda: bool(story.cell.rows("SELECT 1 FROM run WHERE stop_at > 0")))
    await story.cell.control("resume")


# -- recovery ---------------------------------------------------------------------


async def after_kill(story: Story) -> None:
    """The start after a handler ended its process in the middle of the work."""
    await story.cell.call(story.thing, how="die", thing="a")
    await story.cell.start("", **AT_ONCE)
    await story.killed()
    await story.arm(**AT_ONCE)


async def after_two_kills(story: Story) -> None:
    """The start after a request was at work in two processes as they died: it runs apart."""
    await story.under_way("gate", **AT_ONCE)
    story.cell.kill()
    await story.killed()
    await story.cell.start("", **AT_ONCE)
    await story.cell.until_told("start", 2)
    story.cell.kill()
    await story.killed()
    await story.arm(**AT_ONCE)


def after_another(first: str) -> Scenario:
    """The start after a start that died in its recovery, at *first*."""

    async def after_two(story: Story) -> None:
        await story.cell.call(story.thing, how="die", thing="a")
        for failpoint in ("", first):
            await story.cell.start(failpoint, **AT_ONCE)
            await story.killed()
        await story.arm(**AT_ONCE)

    return after_two


async def after_work(story: Story) -> None:
    """The start after a handler ended its process with the work done."""
    await story.cell.call(story.thing, how="die_done", thing="a")
    await story.cell.start("", **AT_ONCE)
    await story.killed()
    await story.arm(**AT_ONCE)


async def after_outcome(story: Story) -> None:
    """The start after an outcome was committed and its reply not sent."""
    await story.cell.call(story.thing, thing="a")
    await story.cell.start("reply.before")
    await story.killed()
    await story.arm()


async def after_park(story: Story) -> None:
    """The start after a task was parked, and nobody was told."""
    await story.cell.call(story.thing, how="park", thing="a")
    await story.cell.start("park.after")
    await story.killed()
    await story.arm()


async def after_deadline(story: Story) -> None:
    """The start after the deadline of a parked task, which ends it."""
    await story.cell.call(story.thing, how="park", thing="a")
    await story.cell.start("unpark.before", **HASTY)
    await story.killed()
    await story.arm()


async def after_accept(story: Story) -> None:
    """The start after requests were accepted and not begun: one stands in line."""
    await story.under_way("gate", **AT_ONCE)
    second = await story.cell.call(story.thing, thing="a")
    await story.cell.until_state(second, "accepted")
    story.cell.kill()
    await story.killed()
    story.cell.open_gate()
    await story.arm(**AT_ONCE)


async def after_cancel(story: Story) -> None:
    """The start after a cancel was on record, and its handler had not returned."""
    await story.cell.start("tally.after", **AT_ONCE)
    story.cell.cancel(await story.begun("gate"))
    await story.killed()
    await story.arm(**AT_ONCE)


async def after_hold(story: Story) -> None:
    """The start after a process died that was held."""
    await story.cell.start()
    await story.cell.call(story.work, how="hold", thing="c")
    await story.cell.until(story.cell.calls[0][1].done)
    story.cell.kill()
    await story.killed()
    await story.arm()


async def after_safe_point(story: Story) -> None:
    """The start after a drain stopped a task at a safe point."""
    await story.under_way("steps")
    await story.drained(HANDED_OVER)
    await story.arm()


async def after_cut(story: Story) -> None:
    """The start after a drain cancelled a task."""
    await story.under_way("gate", **SHORT, **AT_ONCE)
    await story.drained(HANDED_OVER)
    story.cell.open_gate()
    await story.arm(**AT_ONCE)


async def after_stuck(story: Story) -> None:
    """The start after a drain left a task behind that never ended."""
    await story.under_way("stuck", **SHORT, **AT_ONCE)
    await story.drained(HANDED_OVER)
    story.cell.open_gate()
    await story.arm(**AT_ONCE)


async def rules(story: Story) -> None:
    """The first pass of a start over resources that nobody works on, one at a time."""
    story.cell.add_volumes("creating", "a", "c-waits")
    story.cell.add_volumes("deleting", "b")
    await story.arm(RECONCILE_AT_ONCE="1", **AT_ONCE)


async def after_rule(story: Story) -> None:
    """The start after a rule's process died with the answer of the backend, before its write."""
    story.cell.add_volumes("creating", "a-dies")
    await story.cell.start("", **AT_ONCE)
    await story.killed()
    await story.arm(**AT_ONCE)


async def retire(story: Story) -> None:
    """A start that removes old records, refusals among them."""
    for _ in range(3):
        await story.cell.call(story.thing, thing="a")
    await story.cell.call("no_such_method")
    await story.cell.start()
    await story.cell.until(lambda: all(one.done() for _, one in story.cell.calls))
    await story.cell.until(lambda: not story.cell.rows("SELECT 1 FROM reply"))
    await story.drained(0)
    await story.arm(**FORGETFUL)


# -- the matrix -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reaches:
    """A scenario, points that it passes (a number: the n-th time), and for which policies.

    Attributes:
        always: In every quick run: here alone a fault of this kind shows.
    """

    scenario: Scenario
    points: Sequence[Point | tuple[Point, int]]
    policies: Sequence[str]
    always: bool = False


ENOUGH: Final = 2
ANY: Final = ("retry",)  # where no policy makes a difference
ERROR: Final = ("error",)
PROBE: Final = ("probe",)
AGAIN: Final = ("retry", "probe")
REQUEUE: Final = ("requeue",)
P: Final = Point

TABLE: Final = (
    Reaches(boot, (P.JOIN, (P.JOIN, 2), P.CONNECT, (P.CONNECT, 3)), POLICIES),
    # The first claim of messages is the ops server's and finds nothing.
    Reaches(call, ((P.DELIVER, 2), P.ACK, P.PUBLISH, P.REPLY), POLICIES),
    Reaches(call, (P.ACCEPT_AND_BEGIN, P.FINISH, P.REPLY_SENT), JOURNALED),
    Reaches(cast, ((P.DELIVER, 2), P.ACK, (P.ACK, 2)), POLICIES),
    Reaches(cast, (P.ACCEPT_AND_BEGIN, (P.ACCEPT_AND_BEGIN, 2), (P.FINISH, 2)), JOURNALED),
    Reaches(line, (P.ACCEPT, P.BEGIN), JOURNALED),
    Reaches(steps, (P.SAFE_POINT,), JOURNALED),
    Reaches(borrow, (P.TAKE_LEASE, P.RELEASE_LEASE), POLICIES),
    Reaches(hold, (P.HOLD, P.END_HOLD), POLICIES),
    Reaches(duplicate, (P.TALLY, (P.TALLY, 2), P.ADD_REPLY_ADDRESS, (P.REPLY, 3)), JOURNALED),
    Reaches(park, (P.PARK, P.NOTIFY, (P.NOTIFY, 2), P.OUTBOX_SENT, P.REPLY), JOURNALED),
    Reaches(unpark, (P.UNPARK,), JOURNALED),
    Reaches(expire, (P.UNPARK,), JOURNALED),
    Reaches(fail, (P.TRY_LATER, P.CLAIM, (P.CLAIM, 2), P.BEGIN, P.FINISH), JOURNALED),
    Reaches(later, (P.ACCEPT, P.CLAIM, (P.CLAIM, 2), P.BEGIN), JOURNALED),
    # Progress rides with the cursors, at SAFE_POINT; a lookup commits nothing, so it has no point.
    Reaches(cancel, (P.TALLY, P.FINISH, P.REPLY, P.REPLY_SENT), JOURNALED),
    Reaches(cancel_waiting, (P.TALLY, P.FINISH, P.REPLY), JOURNALED),
    Reaches(cancel_later, (P.SETTLE, P.REPLY), JOURNALED),
    Reaches(cancel_parked, (P.UNPARK, (P.NOTIFY, 3)), JOURNALED),
    Reaches(refuse, (P.REJECT, P.REPLY, P.ACK), ANY),
    Reaches(garbage, (P.REJECT, P.DEAD_LETTER), ANY),
    Reaches(caller, (P.CONNECT, P.PUBLISH), ANY),
    Reaches(drain_idle, (P.STOP_INTENT, P.GIVE_BACK, P.STOP_RECORD), ANY),
    Reaches(drain_steps, (P.STOP_INTENT, P.HAND_OVER, P.STOP_RECORD), JOURNALED),
    Reaches(drain_cut, (P.HAND_OVER, P.STOP_RECORD), JOURNALED),
    Reaches(drain_cut, (P.GIVE_BACK, P.STOP_RECORD), REQUEUE),
    Reaches(drain_stuck, (P.HAND_OVER, P.STOP_RECORD), JOURNALED),
    Reaches(drain_stuck, (P.GIVE_BACK,), REQUEUE),
    Reaches(drain_queued, (P.NOT_STARTED,), JOURNALED),
    Reaches(resume, (P.STOP_INTENT, P.WITHDRAW_STOP), JOURNALED),
    Reaches(after_kill, (P.ADOPT, P.CLAIM, P.SETTLE), JOURNALED),
    Reaches(after_kill, (P.BEGIN, P.FINISH), AGAIN),
    Reaches(after_kill, (P.TAKE_LEASE,), PROBE),
    Reaches(after_kill, (P.CALL_HOOK, P.ERRORED_DONE, P.REPLY, P.REPLY_SENT), ERROR),
    Reaches(after_kill, (P.GIVE_BACK, P.ACCEPT_AND_BEGIN, P.FINISH), REQUEUE),
    Reaches(after_work, (P.SETTLE, P.REPLY), PROBE),
    Reaches(after_two_kills, (P.PAROLE,), AGAIN),
    Reaches(after_outcome, (P.ADOPT, P.REPLY, P.REPLY_SENT), JOURNALED),
    Reaches(after_park, (P.ADOPT, P.NOTIFY, (P.NOTIFY, 2), P.OUTBOX_SENT, P.REPLY), JOURNALED),
    Reaches(after_deadline, (P.UNPARK, P.NOTIFY, P.OUTBOX_SENT), JOURNALED),
    Reaches(after_accept, (P.ADOPT, P.CLAIM, P.BEGIN), JOURNALED),
    Reaches(after_cancel, (P.ADOPT, P.SETTLE, P.REPLY, P.REPLY_SENT), JOURNALED),
    Reaches(after_hold, (P.ADOPT, P.CALL_HOOK, P.END_HOLD, P.ERRORED_DONE), JOURNALED),
    Reaches(after_safe_point, (P.CLAIM, P.SETTLE), ERROR, always=True),
    Reaches(after_safe_point, (P.CLAIM, P.SETTLE), AGAIN),
    Reaches(after_safe_point, (P.BEGIN, P.FINISH), JOURNALED),
    Reaches(after_cut, (P.ADOPT, P.CLAIM, P.SETTLE), JOURNALED),
    Reaches(after_stuck, (P.ADOPT, P.CLAIM, P.SETTLE), JOURNALED),
    Reaches(retire, (P.RETIRE,), ANY),
    # In the order of their ids. A pass commits findings for what waits, then for what it has not
    # found, then for itself; it has a lease of its own, as one of a host makes it.
    Reaches(rules, (P.TAKE_LEASE, P.RULE, (P.RULE, 2), (P.RULE, 3)), ANY),
    Reaches(rules, (P.RESOURCE_SETTLED, (P.RESOURCE_SETTLED, 2), P.RELEASE_LEASE), ANY),
    Reaches(rules, (P.FINDING, (P.FINDING, 2), (P.FINDING, 3)), ANY),
    Reaches(after_rule, (P.ADOPT, P.RULE, P.RESOURCE_SETTLED), ANY),
)

# -- and what of it there is on a broker

_FRAMES: Final = "no commit of ours: it is frames, which a broker has or has not"
_ITS_OWN: Final = "a broker takes back by itself what a connection held that ends"
_NO_CONTROL: Final = "control verbs are off on a broker"
_OTHER_NUMBER: Final = "passed once a message there, and here once a look at the file"

NOT_ON_A_BROKER: Final[dict[tuple[Scenario, Point], str]] = {
    (boot, P.CONNECT): _FRAMES,
    (call, P.PUBLISH): _FRAMES,
    (caller, P.CONNECT): _FRAMES,
    (caller, P.PUBLISH): _FRAMES,
    (drain_idle, P.GIVE_BACK): _ITS_OWN,
    (after_kill, P.GIVE_BACK): _ITS_OWN,
    (resume, P.STOP_INTENT): _NO_CONTROL,
    (resume, P.WITHDRAW_STOP): _NO_CONTROL,
    (call, P.DELIVER): _OTHER_NUMBER,
    (cast, P.DELIVER): _OTHER_NUMBER,
}
"""Cells of `TABLE` that are left out there, each with its reason."""

ONLY_ON_A_BROKER: Final = (
    Reaches(call, (P.DELIVER,), POLICIES),
    Reaches(cast, (P.DELIVER, (P.DELIVER, 2)), POLICIES),
    Reaches(full, (P.GIVE_BACK,), POLICIES),
)

AT_THE_WIRE: Final = (
    (call, P.DELIVER),
    (call, P.ACCEPT_AND_BEGIN),
    (call, P.ACK),
    (call, P.FINISH),
    (call, P.REPLY),
    (full, P.GIVE_BACK),
    (garbage, P.DEAD_LETTER),
    (park, P.PARK),
    (park, P.NOTIFY),
    (after_park, P.NOTIFY),
)
"""Where a broker and the journal could come to differ about a request."""


@dataclass(frozen=True, slots=True)
class CellId:
    """Which scenario, where it is killed, and under which policy."""

    scenario: Scenario
    point: Point
    phase: Side
    number: int
    policy: str
    always: bool = False

    @property
    def failpoint(self) -> str:
        number = f":{self.number}" if self.number > 1 else ""
        return f"{self.point.value}.{self.phase}{number}"

    def __str__(self) -> str:
        return f"{self.scenario.__name__}-{self.failpoint}-{self.policy}"


def cells(table: Iterable[Reaches] = TABLE) -> Iterator[CellId]:
    """Every cell: row x point x phase x policy."""
    for row in table:
        for entry in row.points:
            point, number = entry if isinstance(entry, tuple) else (entry, 1)
            for phase in PHASES:
                for policy in row.policies:
                    yield CellId(row.scenario, point, phase, number, policy, row.always)


def some_cells() -> Iterator[CellId]:
    """A quick run: what is `always`, and of the rest each point on both sides and each scenario.

    A point that several scenarios reach is stopped at in up to two cells. The
    policies take turns.
    """
    times: Counter[Point] = Counter()
    played: set[Scenario] = set()
    for turn, group in enumerate(_by_point(cells())):
        point, scenario = group[0].point, group[0].scenario
        chosen = [cell for cell in group if cell.always]
        if not chosen:
            pick_before, pick_after = _both_sides(group, turn)
            if not times[point]:
                chosen = [pick_before, pick_after]
            elif times[point] < ENOUGH or scenario not in played:
                chosen = [pick_before if turn % 2 else pick_after]
        times[point] += len(chosen)
        played.add(scenario)
        yield from chosen


def cells_on_a_broker() -> Iterator[CellId]:
    """Every cell that there is on a broker."""
    for cell in cells():
        if (cell.scenario, cell.point) not in NOT_ON_A_BROKER:
            yield cell
    yield from cells(ONLY_ON_A_BROKER)


def some_cells_on_a_broker() -> Iterator[CellId]:
    """A quick run: both sides of each point at the wire, the policies taking turns."""
    for turn, place in enumerate(AT_THE_WIRE):
        there = [cell for cell in cells_on_a_broker() if (cell.scenario, cell.point) == place]
        yield from _both_sides(there, turn)


def _both_sides(group: Sequence[CellId], turn: int) -> tuple[CellId, CellId]:
    """Of the cells of one scenario and point one before it and one after it."""
    before, after = ([cell for cell in group if cell.phase == phase] for phase in PHASES)
    return before[turn % len(before)], after[(turn + 1) % len(after)]


def _by_point(all_cells: Iterable[CellId]) -> list[list[CellId]]:
    """Cells of one scenario and point together, in the table's order."""
    groups: dict[tuple[object, ...], list[CellId]] = {}
    for cell in all_cells:
        groups.setdefault((cell.scenario, cell.point, cell.number), []).append(cell)
    return [sorted(group, key=lambda cell: PHASES.index(cell.phase)) for group in groups.values()]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two kills of recovery, one after the other, and the policy of the work it recovers."""

    first: str
    second: str
    policy: str

    def __str__(self) -> str:
        return f"{self.first}-{self.second}-{self.policy}"


RECOVERY: Final = tuple(
    f"{point.value}.{phase}" for point in (P.ADOPT, P.CLAIM, P.SETTLE) for phase in PHASES
)


def pairs() -> Iterator[Pair]:
    """Every two kills of recovery that can follow each other."""
    for first in RECOVERY:
        for second in RECOVERY:
            # Once it is settled there is nothing more to claim or to settle.
            if first == "settle.after" and second.startswith(("claim", "settle")):
                continue
            for policy in JOURNALED:
                yield Pair(first, second, policy)


def some_pairs() -> Iterator[Pair]:
    """Each point once as the first kill and once as the second, the policies taking turns."""
    shift = len(RECOVERY) // 2
    for turn, first in enumerate(RECOVERY):
        second = RECOVERY[(turn + shift) % len(RECOVERY)]
        yield Pair(first, second, JOURNALED[turn % len(JOURNALED)])
