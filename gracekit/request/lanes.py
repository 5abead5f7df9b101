"""Lanes and turns: a request's place, its gate, and the lines that it stands in.

A lane has places (what it may have in flight), slots (handlers at one time),
threads, and a gate that a drain closes. A turn is the head of every line that a
task needs: its resource's, its method's, its lane's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.leases.lines import Lines
from gracekit.process import Threads
from gracekit.recovery.suspects import Suspects
from gracekit.rpc.methods import Method
from gracekit.rpc.server import Places
from gracekit.rpc.transport import Delivery
from gracekit.tracker.journal import Acceptance, Address
from gracekit.tracker.task import Lane, TrackedTask

GIVE_BACK_PAUSE_S: Final = 0.5
"""Before a delivery goes back for want of its record: the transport may hand it out to us again in
the same moment, and a store that stays broken would keep the loop busy with that alone."""
LEASE_BEAT_S: Final = 1.0
"""A lease held by another process is asked for again this often; a release here rings at once."""


@dataclass(slots=True, eq=False)
class LaneGate:
    """One lane's intake: its places, slots and threads, and whether it is open.

    Attributes:
        lane: Which.
        places: What it may have in flight.
        max_running: Handlers at one time.
        threads: Worker threads.
        is_open: Closed, no accepting or RUNNING commit of the lane is submitted.
        is_shut: No handler begins any more, whatever commit still lands.
        entering: Jobs between the submission of their acceptance and their start.
        not_started: Request ids given up by those that the closed gate stopped.
    """

    lane: Lane
    places: Places
    max_running: int
    threads: Threads
    is_open: bool = True
    is_shut: bool = False
    entering: dict[Job, None] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)


class Job(msgspec.Struct, kw_only=True, eq=False):
    """One request in this process: the tracked task and what is needed to run it.

    Attributes:
        reply: Where the answer goes, for tasks without a row; others ask the journal.
        copies: Further deliveries of a request without a row, settled and answered with it.
        settle_s: Seconds between an unclean end and recovery's first look.
        expires_at: Loop time until which the caller waits; None if unknown.
        inside: Lines that it stands inside of, innermost last.
        waiting: Whether it waits for its turn, and may be cancelled out of it.
        answered: Its callers were answered before it ended.
        stuck: The drain recorded it without waiting for it any longer.
        in_doubt: An entry of it failed: its row, if there is one, may be nobody's work.
        apart_s: How long it is kept apart from others; None for no suspect.
        alone: Whether nothing else runs beside it, as its row will say.
    """

    task: TrackedTask
    method: Method[Any, Any]
    gate: LaneGate
    args: Mapping[str, Any]
    caller: Mapping[str, Any]
    delivery: Delivery | None = None
    request: Acceptance | None = None
    reply: Address | None = None
    copies: list[Job] = msgspec.field(default_factory=list)
    settle_s: float = 0.0
    expires_at: float | None = None
    inside: list[Hashable] = msgspec.field(default_factory=list)
    waiting: bool = False
    answered: bool = False
    stuck: bool = False
    in_doubt: bool = False
    apart_s: float | None = None
    alone: bool = False


class Turns:
    """Who is next: the lines of this process, and the news of leases released in it."""

    def __init__(self, lines: Lines, suspects: Suspects, clock: Clock) -> None:
        self._lines = lines
        self._suspects = suspects
        self._clock = clock
        self._released = asyncio.Event()
        self._lease_waiters = 0

    async def wait(self, job: Job) -> bool:
        """Stand in line until it is our turn; false if the gate closed or it was cancelled."""
        if not job.gate.is_open or job.task.cancel_cause is not None:
            return False
        job.task.handler = asyncio.current_task()
        job.waiting = True
        try:
            for key, width in self._widths(job):
                if key not in job.inside:
                    await self._lines.enter(key, width)
                    job.inside.append(key)
            if _asks_whether_apart(job):
                row = ("task", job.task.row_id or 0)
                job.alone = await self._suspects.enter(job, row, job.apart_s)
        except asyncio.CancelledError:
            return False
        finally:
            job.waiting = False
        return job.gate.is_open

    async def wait_lease(self, job: Job) -> None:
        """The lease is elsewhere: try again on a release here, a beat, or at its deadline."""
        wait_s = LEASE_BEAT_S
        if job.expires_at is not None:
            wait_s = min(wait_s, max(0.0, job.expires_at - self._clock.loop()))
        job.waiting = True
        self._lease_waiters += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._released.wait()
        except (TimeoutError, asyncio.CancelledError):
            pass  # the turn is asked for again, and refused if the gate has closed
        finally:
            self._lease_waiters -= 1
            job.waiting = False

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
        while job.inside and job.inside[-1] != job.task.resource:
            self._lines.leave(job.inside.pop())
        if not job.alone:  # else its outcome must be on record before others begin
            self._suspects.leave(job)

    def leave(self, job: Job) -> None:
        """Give back every place that *job* has taken."""
        while job.inside:
            self._lines.leave(job.inside.pop())
        self._suspects.leave(job)

    def tell_released(self) -> None:
        """A lease was given back here: whoever waits for one asks again."""
        if self._lease_waiters:
            self._released.set()
            self._released = asyncio.Event()

    def _widths(self, job: Job) -> list[tuple[Hashable, int]]:
        """The lines of a task and their widths: the resource's, the method's, the lane's."""
        widths: list[tuple[Hashable, int]] = []
        if job.task.resource is not None:
            widths.append((job.task.resource, 1))
        if job.method.options.max_running is not None:
            widths.append((job.method, job.method.options.max_running))
        return [*widths, (job.gate, job.gate.max_running)]


def _asks_whether_apart(job: Job) -> bool:
    """Ops requests do not, unless they are suspects: whoever is alone may need their answer."""
    return job.gate.lane is not Lane.OPS or job.apart_s is not None
