"""Ends tasks that no handler works on: commits the decision, then answers the callers.

Until then it keeps new requests from the resource of an unfinished task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from gracekit.errors import ConflictError, InvalidArgumentsError, TaskInterruptedError
from gracekit.journal.holds import Hold
from gracekit.journal.order_rows import subject_of
from gracekit.journal.outbox import News, add_update
from gracekit.journal.rows import RESTORED_SENTENCE, Address, Outcome, TaskRow, address_of
from gracekit.leases.leases import Guard, Resource
from gracekit.leases.lines import Kind
from gracekit.process import Point
from gracekit.recovery.hook_calls import MethodHooks
from gracekit.recovery.shared import Shared
from gracekit.request.outcomes import errored, failed, outcome_of
from gracekit.rpc.failures import words_of
from gracekit.rpc.methods import Method
from gracekit.rpc.offer import can_serve
from gracekit.rpc.transport import QueueKind
from gracekit.store.batch import Batch
from gracekit.telemetry.safe_text import masked
from gracekit.tracker.task import Reason, TaskState


def unservable(of: TaskRow | Hold, method: Method[Any, Any] | None) -> tuple[Reason, str] | None:
    """Why this version cannot run a row, or probe a hold, with a sentence; None if it can."""
    reason = Reason.METHOD_GONE
    if method is None:
        return reason, of.method
    try:
        method.bind(of.args or {})
        reason = Reason.ARGUMENTS
        method.converted(of.args or {})
    except InvalidArgumentsError as error:
        return reason, str(error)
    return None


def errored_row(row: TaskRow, reason: Reason, detail: str = "") -> Outcome:
    """The outcome of a task that recovery gives up."""
    is_restored = reason is Reason.INTERRUPTED and not row.attempts  # see `leases.epoch`
    why = RESTORED_SENTENCE if is_restored else ""
    return errored(str(row), reason, detail, why=why)


def failed_row(row: TaskRow, reason: object) -> Outcome:
    """The outcome of a task whose probe answered Fail; takes any *reason* without raising."""
    said = reason if isinstance(reason, str) else words_of(reason)
    return failed(TaskInterruptedError(f"{row}: {said}"))


class Ends:
    """Ends rows that this run has claimed."""

    def __init__(self, shared: Shared, *, hooks: MethodHooks, gates: Gates) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._leases = shared.leases
        self._members = shared.members
        self._answers = shared.answers
        self._outbox = shared.outbox
        self._hooks = hooks
        self._gates = gates
        self._trigger = shared.trigger
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._left: dict[int, float] = {}  # row id to loop time: a sibling may claim it until then

    async def end(
        self,
        row: TaskRow,
        outcome: Outcome,
        method: Method[Any, Any] | None,
        guard: Guard | None = None,
    ) -> None:
        """Commit a terminal state and the release of the lease, then answer the callers."""
        hook = (
            outcome.state is TaskState.ERRORED
            and method is not None
            and method.errored_hook is not None
        )
        batch = Batch(Point.SETTLE)
        replies = self._journal.add_finish(
            batch, row.id, outcome, expected=row.state, errored_hook=hook
        )
        self.add_release(batch, guard)
        if row.parkings:
            news, reason = News.of(self._clock, sender=self._journal.run_id), outcome.reason or ""
            add_update(batch, subject_of(row), news, row.state, outcome.state, reason=reason)
        addresses = (await self._journal.commit(batch))[replies]
        self._outbox.poke()
        self.tell(row, outcome.state.value, outcome.reason)
        self._tell_bad_end(row, outcome)
        self._gates.leave(row.resource)
        for address in map(address_of, addresses):
            await self.reply(row.id, address)
        if hook:
            self._trigger.go_on()

    def add_release(self, batch: Batch, guard: Guard | None) -> None:
        """Add to *batch* that the lease of the row is released."""
        if guard is not None:
            self._leases.add_release(batch, guard, reason="clean")

    async def reply(self, row_id: int, address: Address) -> None:
        """Answer a caller of an ended row from the record; the reply stays due if that fails."""
        row = await self._journal.row(row_id)
        if row is not None:
            await self._answers.send_due(row_id, address, outcome_of(row), patient=False)

    async def leave_or_end(
        self, row: TaskRow, method: Method[Any, Any] | None, why: tuple[Reason, str]
    ) -> bool:
        """Leave a row that this version cannot run to a living sibling that can, or end it.

        Returns:
            Whether it was ended.
        """
        if await self._is_served_elsewhere(row):
            # This run must not claim it again soon: it might be first each time, so that the
            # sibling never gets the row.
            left_for_s = 2 * self._settings.reconcile_every_s
            self._left[row.id] = self._clock.loop() + left_for_s
            await self.postpone(row, 0.0)
            return False
        await self.end(row, errored_row(row, *why), method)
        return True

    async def _is_served_elsewhere(self, row: TaskRow) -> bool:
        """Whether a living sibling may claim the row, and serves it."""
        asked, own = (row.namespace, row.method, row.version, row.args or {}), self._members.methods
        return any(
            row.target in {"", run.host, run.instance} and can_serve(methods, *asked, unlike=own)
            for run, methods in await self._members.siblings()
        )

    def left_to_siblings(self) -> Collection[int]:
        """Ids of rows that are left to siblings at present."""
        if self._left:
            now = self._clock.loop()
            self._left = {row_id: until for row_id, until in self._left.items() if now < until}
        return self._left.keys()

    async def postpone(self, row: TaskRow, seconds: float) -> None:
        """Release a claimed row; no run claims it for so many seconds."""
        batch = Batch(Point.SETTLE)
        self._claims.add_postpone(batch, row, next_check=self._clock.wall() + seconds)
        await self._journal.commit(batch)

    async def end_abandoned(self, row: TaskRow) -> None:
        """End an ownerless row whose host or instance does not come back.

        A fanout copy that never started is CANCELLED; all others are ERRORED(gave_up).
        """
        why = f"{row.target} has had no run for a long time, or is on record as gone"
        outcome = errored_row(row, Reason.GAVE_UP, why)
        if row.route == QueueKind.FANOUT.value and row.state is TaskState.ACCEPTED:
            outcome = msgspec.structs.replace(
                outcome, state=TaskState.CANCELLED, reason="instance_gone"
            )
        batch = Batch(Point.CLAIM)
        self._claims.add_take_over(batch, row)
        with contextlib.suppress(ConflictError):
            await self._journal.commit(batch)
            await self.end(row, outcome, self._hooks.method_of(row))

    # -- telling ------------------------------------------------------------------------

    def tell(self, row: TaskRow, decision: str, reason: str | None = None) -> None:
        """Log and trace what was decided."""
        self._telemetry.tracing.decided(row.request_id, decision, reason or "")
        self._telemetry.emit(
            "task.settled",
            **row.event_fields,
            decision=decision,
            reason=reason or "",
        )

    def _tell_bad_end(self, row: TaskRow, outcome: Outcome) -> None:
        if outcome.state is TaskState.ERRORED:
            self._telemetry.emit("task.errored", **row.event_fields, reason=outcome.reason or "")
        elif outcome.state is TaskState.FAILED:
            sent = (row.context or {}, row.args or {})
            said = masked(outcome.detail or "", *sent, resource=row.shown_resource, who=str(row))
            self._telemetry.emit("task.failed", **row.event_fields, error=f"the probe said: {said}")


class Gates:
    """The places that recovery holds in the lines of resources, one in each."""

    def __init__(self, shared: Shared) -> None:
        self._lines = shared.lines
        self._claims = shared.claims
        self._held: set[Resource] = set()

    async def hold_all(self) -> None:
        """Hold the line of every resource with an unfinished row."""
        for _, resource in await self._claims.unfinished_resources():
            if resource not in self._held and self._lines.enter_nowait(resource):
                self._held.add(resource)

    async def refresh(self, settling: Callable[[], set[Resource | None]]) -> None:
        """Leave the lines of resources that a sibling has settled and *settling* does not name."""
        if not self._held:
            return
        open_rows = {resource for _, resource in await self._claims.unfinished_resources()}
        for resource in sorted(self._held - open_rows - settling()):
            self.leave(resource)

    async def enter(self, resource: Resource | None) -> None:
        """Wait for a place in the line of *resource*, unless one is held; nothing for None."""
        if resource is not None and resource not in self._held:
            await self._lines.enter(resource, kind=Kind.SETTLING)
            self._held.add(resource)

    def leave(self, resource: Resource | None) -> None:
        """Leave the line of *resource*, so that the next one gets in; nothing if it is not held."""
        if resource is not None and resource in self._held:
            self._held.discard(resource)
            self._lines.leave(resource)

    def hand_on(self, resource: Resource | None) -> Resource | None:
        """Pass the place in the line to a task; returns the resource, None if no place is held."""
        if resource is None or resource not in self._held:
            return None
        self._held.discard(resource)
        return resource

    def leave_handed(self, resource: Resource) -> None:
        """Leave the line in place of a task that got the place by `hand_on` and does not begin."""
        self._lines.leave(resource)
