"""Lanes and their scheduler: a request's place, its gate, and the lines that it stands in.

A lane has a capacity (deliveries that it may have in flight), a claim limit (for recovered
rows that wait for their turn), slots (handlers at one time), threads, and a gate that
a drain closes. A turn is a place inside of every line that a task needs: its
resource's, its method's, its lane's threads' and its lane's. It has all of them
before its attempt is recorded, so its code can run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gracekit.journal.rows import Acceptance, Address
from gracekit.leases.lines import Kind, Lines
from gracekit.process import Threads
from gracekit.request.claim_limit import ClaimLimit
from gracekit.request.suspects import Suspects, Suspicion
from gracekit.rpc.methods import Method
from gracekit.rpc.server import Capacity
from gracekit.rpc.transport import Delivery
from gracekit.tracing.spans import Attempt
from gracekit.tracker.task import Awaited, Lane, TrackedTask


@dataclass(slots=True, eq=False)
class LaneGate:
    """One lane's intake: its capacity, slots and threads, and whether it is open.

    Attributes:
        lane: Which.
        capacity: Deliveries that it may have in flight.
        claim_limit: How many recovered rows may be claimed here. They take no place, as they are
            accepted already.
        max_running: Handlers at one time.
        threads: Worker threads.
        is_open: Closed, no accepting or RUNNING commit of the lane is submitted.
        is_shut: No handler begins any more, whatever commit still lands.
        entering: Jobs between the submission of their acceptance and their start.
        not_started: Request ids given up by those that the closed gate stopped.
    """

    lane: Lane
    capacity: Capacity
    claim_limit: ClaimLimit
    max_running: int
    threads: Threads
    is_open: bool = True
    is_shut: bool = False
    entering: dict[Job, None] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Unfinished:
    """What one process has cut short or put back, for the report of its drain.

    Attributes:
        handed_over: Request ids that a drain has handed over, their handlers having returned.
        unrecorded: Tasks among them whose hand-over the store did not take.
        given_back: Deliveries and `requeue` tasks given back to the transport.
    """

    handed_over: list[str] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    given_back: int = 0

    def hand_over(self, task: TrackedTask, *, recorded: bool) -> None:
        """Note that a drain has handed *task* over, and whether that is on record."""
        self.handed_over.append(task.request_id)
        if not recorded:
            self.unrecorded.append(str(task))

    def forget(self) -> None:
        """The drain was resumed: the next one counts anew."""
        self.handed_over, self.unrecorded, self.given_back = [], [], 0


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One request in this process: the tracked task and what is needed to run it.

    Attributes:
        caller_hash: Of who calls, as the journal keeps it.
        reply: Where the answer goes, for tasks without a row; others ask the journal.
        copies: Further deliveries of a request without a row, settled and answered with it.
        settle_s: Seconds between an unclean end and recovery's first look.
        expires_at: Loop time until which the caller waits; None if unknown.
        inside: Lines that it stands inside of, innermost last.
        claimed_ahead: Whether it is recovered, and waits for its lane alone.
        waiting: Whether it waits for its turn, and may be cancelled out of it.
        refused: Its lease was elsewhere when it had its turn.
        answered: Its callers were answered before it ended.
        stuck: The drain recorded it without waiting for it any longer.
        in_doubt: An entry of it failed: its row, if there is one, may be nobody's work.
        suspicion: None if it may run beside others.
        alone: Whether nothing else runs beside it, as its row will say.
        unended: Its start was told, and no end of it yet.
        traced: The trace of its present or last attempt; None without one.
        version: Interface version that was asked for.
        parkings: How often it was parked for want of capacity.
        pending_deadline: Wall time until which it may be PENDING; None if it never was.
    """

    task: TrackedTask
    method: Method[Any, Any]
    gate: LaneGate
    args: Mapping[str, Any]
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
    parkings: int = 0
    pending_deadline: float | None = None

    def begin_claimed(self) -> None:
        """It has begun, or waits for something of its own: another row may be claimed."""
        if self.claimed_ahead:
            self.claimed_ahead = False
            self.gate.claim_limit.begin()


class Scheduler:
    """Decides which task of this process begins next: it must be inside of all its lines."""

    def __init__(self, lines: Lines, suspects: Suspects) -> None:
        self._lines = lines
        self._suspects = suspects

    async def wait(self, job: Job) -> bool:
        """Stand in line until it is our turn; false if the gate closed or it was cancelled."""
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
                    if self._is_its_own(job, key) and self._lines.is_full(key, width):
                        job.begin_claimed()
                    job.task.waits_for = _wait_of(job, key)
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

    def _is_its_own(self, job: Job, key: Hashable) -> bool:
        """Whether that line is not the lane's, and no matter of who waits for the lane."""
        return key is not job.gate and key is not job.gate.threads

    def keeps_out_recovery(self, job: Job) -> bool:
        """Whether it waits for a lease in a place that recovery needs.

        What recovery finds out may be what the lease waits for, so neither would ever get on.
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
        """Its handler has returned: give back all but the place in its resource's line.

        That one is kept until the lease is back. Whoever is next begins in a later step of the
        loop: what is submitted in this one is committed before its start, unless it is refused.
        """
        self._leave_to_resource(job)
        if not job.alone:  # else its outcome must be on record before others begin
            self._suspects.leave(job)

    def leave_for_lease(self, job: Job) -> None:
        """Its lease is elsewhere: wait for it in the resource's line, and keep nobody else."""
        self._leave_to_resource(job)
        self._suspects.leave(job)
        job.alone = False

    def _leave_to_resource(self, job: Job) -> None:
        while job.inside and job.inside[-1] != job.task.resource:
            self._lines.leave(job.inside.pop())

    def resize(self, gate: LaneGate, max_running: int) -> None:
        """Let so many handlers of a lane run from now on; running ones go on."""
        gate.claim_limit.widen(max_running - gate.max_running)
        gate.max_running = max_running
        self._lines.resize(gate, max_running)

    def leave(self, job: Job) -> None:
        """Give back every place that *job* has taken; may be called twice."""
        if not job.inside and not job.alone:
            return
        while job.inside:
            self._lines.leave(job.inside.pop())
        self._suspects.leave(job)

    def _widths(self, job: Job) -> list[tuple[Hashable, int]]:
        """The lines of a task and their widths, in the order in which all enter them."""
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
    """Ops requests do not, unless they are suspects: whoever is alone may need their answer."""
    return job.gate.lane is not Lane.OPS or job.suspicion is not None
