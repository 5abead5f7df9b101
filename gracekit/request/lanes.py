"""Lanes and their scheduler: a request's place, its gate, and the lines that it waits in.

A lane has a capacity (deliveries that it may have in flight), a claim limit (for
recovered rows that wait for their turn), slots (handlers at one time), threads, and a
gate that a drain closes. It is a task's turn when it has a place inside every line that
it needs: of its resource, its method, its lane's threads and its lane. Only then is its
attempt recorded, so that its code can run at once.

The claim limit is low, so that siblings can claim the other rows. A row that waits for
something other than the lane, such as a busy resource, no longer counts as ahead:
otherwise it would keep the rows behind it from starting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Final

import msgspec

from gracekit.config.settings import Settings
from gracekit.journal.rows import Acceptance, Address
from gracekit.leases.lines import Kind, Lines
from gracekit.process import Threads
from gracekit.request.suspects import Suspects, Suspicion
from gracekit.rpc.methods import Method
from gracekit.rpc.server import Capacity
from gracekit.rpc.transport import Delivery
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracing.spans import Attempt
from gracekit.tracker.task import Awaited, Lane, TrackedTask
from gracekit.tracker.tracker import Tracker


class ClaimLimit:
    """The recovered rows of one lane in this process.

    Args:
        ahead: How many claimed rows may wait for a slot of the lane.
        total: How many claimed rows may be in flight.
    """

    def __init__(self, *, ahead: int, total: int) -> None:
        self._ahead = ahead
        self._room = total
        self._changed = asyncio.Event()

    def take(self) -> bool:
        """Count one more row, if the limit allows."""
        if self._ahead <= 0 or self._room == 0:
            return False
        self._ahead -= 1
        self._room -= 1
        return True

    def take_some(self, most: int) -> int:
        """Count up to *most* more rows; returns how many the limit allowed."""
        number = 0
        while number < most and self.take():
            number += 1
        return number

    def widen(self, by: int) -> None:
        """Let *by* more rows wait for a slot of the lane; fewer if it is negative."""
        self._ahead += by
        self._changed.set()

    def begin(self) -> None:
        """A row has started, or waits for something else than a slot: allow the next claim."""
        self._ahead += 1
        self._changed.set()

    def leave(self) -> None:
        """A row for which `begin` was called is no longer in flight in this process."""
        self._room += 1
        self._changed.set()

    async def wait_change(self) -> None:
        """Wait until the limit has changed, or `wake` is called."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        """End each `wait_change`."""
        self._changed.set()


_OF_LANE: Final = (Awaited.LANE, Awaited.THREAD)
MAX_ACCEPTED: Final = 1000
"""How many requests a process accepts at least if no setting says it and all use one store."""


def can_run(settings: Settings, methods: Iterable[Method[Any, Any]]) -> int:
    """How many requests to *methods* can run at a time: each plain function needs a thread."""
    plain = any(not method.is_async for method in methods)
    return min(settings.max_running, settings.threads) if plain else settings.max_running


def can_accept(settings: Settings, methods: Iterable[Method[Any, Any]]) -> int:
    """How many requests of the service's topic a process may have accepted.

    If other processes read the queue into another store, they could not run what waits in ours.
    """
    if settings.max_accepted is not None:
        return settings.max_accepted
    if not settings.accept_unshared_store:
        return max(MAX_ACCEPTED, settings.max_running)
    return can_run(settings, (method for method in methods if not method.ops))


class LaneGate(msgspec.Struct, eq=False):
    """One lane's intake: its capacity, slots and threads, and whether it is open.

    Attributes:
        lane: The lane.
        capacity: Deliveries that it may have in flight.
        claim_limit: How many recovered rows may be claimed here. They take no place, as they are
            accepted already.
        max_running: How many handlers may run at a time.
        threads: Worker threads of handlers, which find one free when it is their turn.
        readers: Those in which arguments are read before acceptance (`Method.reads_early`).
        is_open: If false, no commit that accepts or starts a request of the lane is submitted.
        is_shut: If true, no handler starts any more, even if its commit succeeds.
        entering: Jobs between the submission of their acceptance and their start.
        not_started: Request ids of accepted jobs that did not start because the gate closed.
    """

    lane: Lane
    capacity: Capacity
    claim_limit: ClaimLimit
    max_running: int
    threads: Threads
    readers: Threads
    is_open: bool = True
    is_shut: bool = False
    entering: dict[Job, None] = msgspec.field(default_factory=dict)
    not_started: list[str] = msgspec.field(default_factory=list)


class Unfinished(msgspec.Struct):
    """What one process has cut or given back, for the report of its drain.

    Attributes:
        handed_over: Ids of tasks that a drain has handed over after their handlers returned.
        unrecorded: Those among them whose hand-over could not be committed.
        given_back: Number of deliveries, also of `requeue` tasks, given back to the transport.
    """

    handed_over: list[str] = msgspec.field(default_factory=list)
    unrecorded: list[str] = msgspec.field(default_factory=list)
    given_back: int = 0

    def hand_over(self, task: TrackedTask, *, recorded: bool) -> None:
        """Note that a drain has handed *task* over, and whether that is on record."""
        self.handed_over.append(task.request_id)
        if not recorded:
            self.unrecorded.append(str(task))

    def forget(self) -> None:
        """Count from zero again, because the drain was resumed."""
        self.handed_over, self.unrecorded, self.given_back = [], [], 0


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One request in this process: the tracked task and what is needed to run it.

    Attributes:
        args: The arguments as sent: plain data.
        values: The arguments as the handler gets them.
        caller_hash: Hash of the caller's context, as the journal keeps it.
        reply: Where the answer goes, for tasks without a row; others ask the journal.
        copies: Further deliveries of a request without a row, settled and answered with it.
        settle_s: Seconds between an unclean end and recovery's first look.
        expires_at: Loop time until which the caller waits; None if unknown.
        inside: Lines in which it has a place, in the order of entry.
        claimed_ahead: Whether it is recovered and counts in the claim limit as waiting.
        waiting: Whether it waits for its turn, and a cancellation may end that wait.
        refused: Whether, when it had its turn, its lease was held elsewhere.
        answered: Whether its callers were answered before it ended.
        stuck: Whether the drain recorded it as unclean and no longer waits for it.
        in_doubt: Whether a commit of it failed, so that its row may have an owner and no task.
        suspicion: None if it may run beside others.
        alone: Whether it runs alone as a suspect; its row will say so.
        unended: Whether its start was logged, and its end was not yet.
        traced: The trace of its present or last attempt; None without one.
        version: Interface version that was asked for.
        is_delayed: Whether it is accepted only, and may not begin yet.
        parkings: How often it was parked.
        pending_deadline: Wall time until which it may be PENDING; None if it never was.
    """

    task: TrackedTask
    method: Method[Any, Any]
    gate: LaneGate
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    caller: Mapping[str, Any]
    delivery: Delivery | None = None
    request: Acceptance | None = None
    caller_hash: str = ""
    reply: Address | None = None
    copies: list[Job] = msgspec.field(default_factory=list)
    settle_s: float = 0.0
    expires_at: float | None = None
    inside: list[Hashable] = msgspec.field(default_factory=list)
    claimed_ahead: bool = False
    waiting: bool = False
    refused: bool = False
    answered: bool = False
    stuck: bool = False
    in_doubt: bool = False
    suspicion: Suspicion | None = None
    alone: bool = False
    unended: bool = False
    traced: Attempt | None = None
    version: str = "1.0"
    is_delayed: bool = False
    parkings: int = 0
    pending_deadline: float | None = None

    def begin_claimed(self) -> None:
        """A claimed job starts, or waits for more than its lane: allow the next claim."""
        if self.claimed_ahead:
            self.claimed_ahead = False
            self.gate.claim_limit.begin()


class Scheduler:
    """Decides which task of this process begins next: one with a place in all its lines."""

    def __init__(
        self, lines: Lines, suspects: Suspects, tracker: Tracker, telemetry: Telemetry
    ) -> None:
        self._lines = lines
        self._suspects = suspects
        self._tracker = tracker
        self._telemetry = telemetry

    async def wait(self, job: Job) -> bool:
        """Wait until it is the job's turn; false if the gate closed or the task was cancelled."""
        if not job.gate.is_open or job.task.cancel_cause is not None:
            return False
        if not job.inside and job.suspicion is None and not job.refused and self.enter_nowait(job):
            return True
        job.task.handler = asyncio.current_task()
        kind = Kind.NEW if job.delivery is not None else Kind.RECOVERED
        job.waiting = True
        try:
            if self.keeps_out_recovery(job):
                self.leave(job)
            for key, width in self._widths(job):
                if key not in job.inside:
                    job.task.waits_for = _wait_of(job, key)
                    if self._lines.is_full(key, width):
                        self._begin_wait(job)
                    await self._lines.enter(key, width, kind=kind, first=job.refused)
                    job.inside.append(key)
            if _asks_whether_apart(job) and not self._enters_beside_others(job):
                row = ("task", job.task.row_id or 0)
                job.task.waits_for = Awaited.APART
                job.alone = await self._suspects.enter(job, row, job.suspicion)
        except asyncio.CancelledError:
            return False
        finally:
            job.waiting = False
            job.task.waits_for = None
        return job.gate.is_open

    def _enters_beside_others(self, job: Job) -> bool:
        return job.suspicion is None and self._suspects.enter_nowait(job)

    def _begin_wait(self, job: Job) -> None:
        """Allow the next claim; or emit, if handlers that wait for the lane have all of it."""
        lane, tracker = job.gate.lane, self._tracker
        if job.task.waits_for not in _OF_LANE:
            job.begin_claimed()
        elif job.task.request_id in tracker.awaited and lane.word not in tracker.self_blocked:
            calls = {
                caller: called
                for request_id, here in tracker.awaited.copy().items()
                if (called := tracker.get(request_id)) and called.waits_for in _OF_LANE
                if (caller := tracker.get(here.task_id)) and caller.cancellable
                if caller.lane is called.lane is lane
            }
            both = [c for c, to in calls.items() if c.thread_id and to.waits_for is Awaited.THREAD]
            if len(calls) >= job.gate.max_running or len(both) >= job.gate.threads.number:
                tracker.blocked[lane.word] = frozenset(one.request_id for one in calls.values())
                self._telemetry.emit("lane.self_blocked", lane=lane.word, running=len(calls))

    def keeps_out_recovery(self, job: Job) -> bool:
        """Whether *job* waits for a lease in the place of the resource's line that recovery needs.

        The lease may become free only after recovery has probed the resource. If the job kept its
        place, both would wait for ever.
        """
        return job.refused and self._lines.is_settling(job.task.resource)

    def enter_nowait(self, job: Job) -> bool:
        """Take every place that *job* needs, or none."""
        for key, width in self._widths(job):
            if not self._lines.enter_nowait(key, width):
                self.leave(job)
                return False
            job.inside.append(key)
        if _asks_whether_apart(job) and not self._suspects.enter_nowait(job):
            self.leave(job)
            return False
        return True

    def leave_slots(self, job: Job) -> None:
        """After the handler has returned, give back all places but that in the resource's line.

        That one is kept until the lease is released. The next task starts in a later iteration of
        the loop, so a commit that is submitted in this one comes before its start, unless refused.
        """
        self.leave_to_resource(job)
        if not job.alone:  # a suspect's outcome must be on record before others begin
            self._suspects.leave(job)

    def leave_for_lease(self, job: Job) -> None:
        """Wait for the lease in the resource's line only, and give back all other places."""
        self.leave_to_resource(job)
        self._suspects.leave(job)
        job.alone = False

    def leave_to_resource(self, job: Job) -> None:
        """Give back all places but that in the resource's line."""
        while job.inside and job.inside[-1] != job.task.resource:
            self._lines.leave(job.inside.pop())

    def resize(self, gate: LaneGate, max_running: int, *, places: int) -> None:
        """Change how many handlers of a lane may run; those that run already go on."""
        gate.capacity.resize(places)
        gate.claim_limit.widen(max_running - gate.max_running)
        gate.max_running = max_running
        self._lines.resize(gate, max_running)

    async def rest(self, job: Job, pause_s: float) -> None:
        """Pause after a job found no thread, in its places: others would not find one either."""
        job.task.handler, job.waiting = asyncio.current_task(), True
        job.gate.entering[job] = None  # the gate ends the pause when it closes
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(pause_s)
        job.waiting = False
        job.gate.entering.pop(job, None)

    def leave(self, job: Job) -> None:
        """Give back every place that *job* has taken; may be called twice."""
        while job.inside:
            self._lines.leave(job.inside.pop())
        self._suspects.leave(job)

    def _widths(self, job: Job) -> list[tuple[Hashable, int]]:
        """The lines of a task and their widths, in the order of entry, which is fixed.

        If tasks entered them in different orders, two could wait for each other.
        """
        widths: list[tuple[Hashable, int]] = []
        method, gate = job.method, job.gate
        if job.task.resource is not None:
            widths.append((job.task.resource, 1))
        if method.options.max_running is not None:
            widths.append((method, method.options.max_running))
        if not method.is_async:
            widths.append((gate.threads, gate.threads.number))
        widths.append((gate, gate.max_running))
        return widths


def _wait_of(job: Job, key: Hashable) -> Awaited:
    """What a job waits for while it is in the line *key*."""
    if key is job.gate:
        return Awaited.LANE
    if key is job.gate.threads:
        return Awaited.THREAD
    return Awaited.METHOD if key is job.method else Awaited.RESOURCE


def _asks_whether_apart(job: Job) -> bool:
    """Whether it must wait for suspects; not so for an ops request, which a suspect may call."""
    return job.gate.lane is not Lane.OPS or job.suspicion is not None
