"""Settles started, unfinished tasks: claims each, decides, calls its probe if needed, ends it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gracekit.errors import ConflictError
from gracekit.journal.rows import TaskRow
from gracekit.leases.leases import Guard, Resource
from gracekit.process import Point
from gracekit.recovery.decisions import (
    Done,
    Fail,
    Retry,
    Step,
    Wait,
    decide,
    policy_of,
    probe_pause_s,
)
from gracekit.recovery.ends import Ends, Gates, errored_row, failed_row, unservable
from gracekit.recovery.hook_calls import MethodHooks
from gracekit.recovery.shared import Shared
from gracekit.recovery.starts import CLAIM_AT_ONCE, Starts
from gracekit.request.outcomes import succeeded
from gracekit.request.suspects import suspicion
from gracekit.request.waits import LEASE_BEAT_S
from gracekit.rpc.failures import words_of
from gracekit.rpc.methods import Method
from gracekit.store.batch import Batch
from gracekit.tracker.task import Interruption, Reason, TaskState

PROBED: Final = "its probe answered Retry"
MOST_WAITS: Final = 10_000
"""Rows whose wait for a probe is measured in loop time; the wait of further rows in wall time."""


class Settling:
    """Settles the HANDED_OVER rows that this run has claimed, several at a time."""

    def __init__(
        self, shared: Shared, *, gates: Gates, hooks: MethodHooks, ends: Ends, starts: Starts
    ) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._leases = shared.leases
        self._suspects = shared.suspects
        self._gates = gates
        self._hooks = hooks
        self._ends = ends
        self._starts = starts
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._at_work: dict[asyncio.Task[bool], TaskRow] = {}
        self._number = 0  # number of rows settled by this run
        self._waits: dict[int, float] = {}  # row id to the loop time at which its probes began

    # -- what is under way --------------------------------------------------------------

    @property
    def tasks(self) -> list[asyncio.Task[bool]]:
        """One asyncio task for each row; it returns whether the row has ended or runs again."""
        return list(self._at_work)

    @property
    def is_full(self) -> bool:
        """Whether a row must be settled before another one can be claimed."""
        return len(self._at_work) >= CLAIM_AT_ONCE

    def is_settled_now(self, row_id: int) -> bool:
        """Whether the row of that id is being settled."""
        return any(row.id == row_id for row in self._at_work.values())

    def resources(self) -> set[Resource | None]:
        """The resources of the rows that are being settled."""
        return {row.resource for row in self._at_work.values()}

    def let_go_of_waiting(self) -> None:
        """Release the rows that only wait; a probe that is running goes on to its answer."""
        for task in self.tasks:  # in a fixed order, for simulations
            if task not in self._hooks.asking:
                task.cancel()

    # -- claim --------------------------------------------------------------------------

    async def settle_rows(self) -> None:
        """Claim rows and begin to settle them, until there are no more or `is_full`."""
        while not self._trigger.is_paused and not self.is_full:
            rows = await self._claims.claim(
                TaskState.HANDED_OVER,
                limit=CLAIM_AT_ONCE - len(self._at_work),
                without=self._ends.left_to_siblings(),
            )
            if self._is_paused_by_now():
                await self._starts.let_go(*rows)
                return
            for row in rows:
                task = asyncio.create_task(self._settle_or_let_go(row))
                self._at_work[task] = row
                task.add_done_callback(self._settled)
            if not rows:
                return

    async def settle_all(self) -> int:
        """Claim and settle until there is no row that may be claimed now.

        Returns:
            How many have ended or run again; those whose probe is called again do not count.
        """
        before = self._number
        while True:
            await self.settle_rows()
            if not self._at_work:
                return self._number - before
            await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)

    async def count_due(self) -> int:
        """How many rows `settle_all` would claim now."""
        without = self._ends.left_to_siblings()
        return await self._claims.count_claimable(TaskState.HANDED_OVER, without=without)

    def _is_paused_by_now(self) -> bool:
        """Whether recovery was paused since the claim was submitted."""
        return self._trigger.is_paused

    def _settled(self, task: asyncio.Task[bool]) -> None:
        self._at_work.pop(task, None)
        self._number += _is_settled(task)
        if task.cancelled():
            self._trigger.poke()
        elif (error := task.exception()) is not None:
            self._telemetry.emit("dispatch.failed", error=words_of(error))
            self._trigger.poke()  # no task works on its row and its lease any more
        else:
            self._trigger.go_on()

    async def _settle_or_let_go(self, row: TaskRow) -> bool:
        try:
            with self._telemetry.tracing.settling(
                row.context or {},
                method=row.method,
                message_id=row.request_id,
                attempt=row.attempts,
            ):
                return await self._settle(row)
        except (asyncio.CancelledError, ConflictError):  # a drain; an operator's order
            await self._put_down(row, wait_s=0.0)
        except Exception as error:  # noqa: BLE001 - whatever failed, it is tried again later
            self._telemetry.emit("store.error", what="settling", error=words_of(error))
            await self._put_down(row, wait_s=probe_pause_s(row.waiting_since, self._clock.wall()))
        return False

    async def _put_down(self, row: TaskRow, *, wait_s: float) -> None:
        """Release a row that was being settled, with its lease, if the row is still as claimed."""
        self._gates.leave(row.resource)
        batch = Batch(Point.NOT_STARTED)
        self._claims.add_postpone(batch, row, next_check=self._clock.wall() + wait_s)
        if row.resource is not None:
            self._leases.add_drop(batch, row.resource, row.request_id)
        await self._journal.commit(batch)

    # -- decide -------------------------------------------------------------------------

    async def _settle(self, row: TaskRow) -> bool:
        """Carry out the decision on one claimed row; returns whether it has ended or runs again."""
        method = self._hooks.method_of(row)
        if (gone := unservable(row, method)) is not None:
            return await self._ends.leave_or_end(row, method, gone)
        assert method is not None
        decision = decide(
            row,
            policy=policy_of(row.on_interrupt, method.options.on_interrupt),
            max_attempts=self._hooks.cap_of(method),
            has_probe=method.probe_hook is not None,
        )
        settles_s = (row.not_before or 0.0) - self._clock.wall()
        if decision.step is not Step.ERROR and settles_s > 0:
            # It may be claimed before its settle time, because the policy at its acceptance was
            # `error`, which need not wait. The present policy must.
            await self._ends.postpone(row, settles_s)
            return False
        match decision.step:
            case Step.ERROR:
                reason = decision.reason or Reason.INTERRUPTED
                await self._ends.end(row, errored_row(row, reason), method)
            case Step.RUN_AGAIN:
                await self._gates.enter(row.resource)
                is_at_safe_point = row.cut is Interruption.SAFE_POINT
                why = "it stopped at a safe point" if is_at_safe_point else "its method says so"
                await self._run_again(row, why)
            case Step.PROBE:
                await self._gates.enter(row.resource)
                return await self._probe(row, method)
        return True

    async def _run_again(self, row: TaskRow, why: str, guard: Guard | None = None) -> None:
        """Make a row ACCEPTED; start it here if the claim limit allows, else any run claims it."""
        claimed_ahead = self._starts.take_seat(row.lane)
        try:
            batch = Batch(Point.SETTLE)
            self._claims.add_run_again(batch, row)
            if why == PROBED:
                # Otherwise the record would not show that a probe came before the next attempt.
                detail = f"Retry, after attempt {row.attempts}"
                self._journal.add_note(batch, "probe_answered", row.request_id, row.method, detail)
            if not claimed_ahead:
                self._claims.add_let_go(batch, row)
            self._ends.add_release(batch, guard)
            await self._journal.commit(batch)
        except BaseException:
            if claimed_ahead:
                self._starts.give_seat(row.lane)
            raise
        self._ends.tell(row, "run_again", why)
        if not claimed_ahead:
            self._gates.leave(row.resource)
            return
        inside = self._gates.hand_on(row.resource)  # the place in the line goes to the task
        await self._starts.start(self._claims.accepted(row), inside=inside)

    # -- ask ----------------------------------------------------------------------------

    async def _probe(self, row: TaskRow, method: Method[Any, Any]) -> bool:
        """Call the probe with the resource's lease, and carry out its answer; see `_settle`."""
        about = suspicion(row.crashes, self._hooks.cap_of(method), row.started_at)
        try:
            async with self._suspects.beginning(("task", row.id), about) as alone:
                guard = await self._begin_probe(row, alone=alone)
                answer = await self._hooks.ask(self._hooks.of_row(row, method), method, guard)
        except ConflictError:  # the resource has a settle time left, or its lease is held elsewhere
            self._gates.leave(row.resource)  # an older row may wait behind this one in the line
            await self._wait(row, None, LEASE_BEAT_S, counts=False)
            return False
        match answer:
            case Done(result):
                await self._ends.end(row, succeeded("the probe's Done", result), method, guard)
            case Retry():
                await self._run_again(row, PROBED, guard)
            case Fail(reason):
                await self._ends.end(row, failed_row(row, reason), method, guard)
            case Wait(seconds):
                return await self._wait_or_give_up(row, method, guard, seconds)
            case None:
                outcome = errored_row(row, Reason.INTERRUPTED, "its probe is not implemented")
                await self._ends.end(row, outcome, method, guard)
        return True

    async def _begin_probe(self, row: TaskRow, *, alone: bool) -> Guard | None:
        batch = Batch(Point.TAKE_LEASE)
        lease = None
        if row.resource is not None:
            lease = self._leases.add_take(batch, row.resource, row.request_id, row.id)
        self._claims.add_probing(batch, row, alone=alone)
        rows = await self._journal.commit(batch)
        if row.resource is None or lease is None:
            return None
        return Guard(resource=row.resource, token=int(rows[lease][0][0] or 0))

    async def _wait_or_give_up(
        self, row: TaskRow, method: Method[Any, Any], guard: Guard | None, seconds: float
    ) -> bool:
        """Let the probe be called again later, or end the task after `max_wait`; see `_settle`."""
        left_s = method.options.max_wait_s - self._waited_s(row)
        if left_s <= 0:
            self._waits.pop(row.id, None)
            await self._ends.end(row, errored_row(row, Reason.GAVE_UP), method, guard)
        else:
            await self._wait(row, guard, min(seconds, left_s))
        return left_s <= 0

    def _waited_s(self, row: TaskRow) -> float:
        """Seconds since the probe first answered Wait; the part before this run is wall time."""
        now = self._clock.loop()
        if row.waiting_since is None:
            self._waits.pop(row.id, None)  # it was of an earlier attempt
            before_s = 0.0
        else:
            before_s = max(0.0, self._clock.wall() - row.waiting_since)
        since = self._waits.setdefault(row.id, now - before_s)
        if len(self._waits) > MOST_WAITS:
            del self._waits[next(iter(self._waits))]
        return now - since

    async def _wait(
        self, row: TaskRow, guard: Guard | None, seconds: float, *, counts: bool = True
    ) -> None:
        batch = Batch(Point.SETTLE)
        next_check = self._clock.wall() + max(0.05, seconds)
        self._claims.add_wait(batch, row, next_check=next_check, counts=counts)
        self._ends.add_release(batch, guard)
        await self._journal.commit(batch)


def _is_settled(task: asyncio.Task[bool]) -> bool:
    """Whether the row of a done task has ended or runs again."""
    return not task.cancelled() and task.exception() is None and task.result()
