"""What dead runs and passed deadlines leave: holds, orders, duties to ended tasks, parked tasks.

A run records an order about a task of its own before it cancels the handler. If the process ends
before the handler has returned, the row is handed over with the order. Nobody claims such a row:
the order ends it here, as the command line would, whatever the policy of its method is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from gracekit import backoff
from gracekit.errors import ConflictError, StoreError
from gracekit.journal.holds import Hold
from gracekit.journal.order_rows import (
    OrderTarget,
    order_of,
    state_of,
    targets_ordered,
    targets_overdue,
)
from gracekit.journal.outbox import utc_text
from gracekit.journal.rows import TaskRow
from gracekit.recovery.decisions import Done, Wait
from gracekit.recovery.ends import Ends, unservable
from gracekit.recovery.hook_calls import MethodHooks
from gracekit.recovery.shared import Shared
from gracekit.request.outcomes import expired, ordered
from gracekit.request.row_orders import RowOrders
from gracekit.request.suspects import is_guilty, suspicion
from gracekit.rpc.methods import Method
from gracekit.tracker.task import Reason, TaskState


class LeftHolds:
    """Settles such holds by the probe of the method that opened them."""

    def __init__(self, shared: Shared, *, hooks: MethodHooks) -> None:
        self._holds = shared.holds
        self._suspects = shared.suspects
        self._hooks = hooks
        self._host = shared.settings.host
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._clock = shared.clock

    async def settle_all(self) -> None:
        """Settle all holds that are due; during a drain, only end those that have lapsed."""
        for hold in await self._holds.due():
            if not hold.errored_due and self._has_lapsed(hold):
                await self._end(hold, "lapsed")
            elif self._trigger.is_paused:
                continue
            elif hold.errored_due:
                await self._tell_errored(hold)
            else:
                await self._settle(hold)

    def _has_lapsed(self, hold: Hold) -> bool:
        """Whether a hold that this run owns is due because it lapsed, not because of its probe."""
        if hold.owner is None:
            return False
        return hold.next_check is None or self._clock.wall() >= hold.lapses_at

    async def _tell_errored(self, hold: Hold) -> None:
        method = self._hooks.method_of(hold)
        if method is None or method.errored_hook is None:
            await self._holds.errored_done(hold)
        elif is_guilty(hold.crashes, self._hooks.cap_of(method), alone=hold.alone):
            why = self._hooks.give_up(f"{hold.method}.errored", hold.crashes)
            await self._holds.errored_done(hold, given_up=why)
        else:
            async with self._calling(hold, method) as is_ours:
                if is_ours:
                    subject = self._hooks.of_hold(hold)
                    fault = await self._hooks.call_errored(subject, method, "hold")
                    await self._holds.errored_done(hold, failed=fault)

    @contextlib.asynccontextmanager
    async def _calling(self, hold: Hold, method: Method[Any, Any]) -> AsyncIterator[bool]:
        """Surround a call of a hold's probe or errored hook; yields whether to call it here."""
        about = suspicion(hold.crashes, self._hooks.cap_of(method))
        async with self._suspects.beginning(("hold", hold.id), about) as alone:
            yield not self._trigger.is_paused and await self._holds.begin(hold, alone=alone)

    async def _settle(self, hold: Hold) -> None:
        """Probe a hold. Done ends it, Fail and Retry end it with the errored hook, Wait keeps it.

        A hold that is kept also keeps this run in its drain, until the hold lapses.
        """
        method = self._hooks.method_of(hold)
        if self._clock.wall() >= hold.lapses_at:
            await self._end(hold, "lapsed")
        elif hold.target != self._host:  # which is gone: a probe would ask about another host
            await self._end(hold, "host_gone", errored=method is not None)
        elif method is None or method.probe_hook is None:
            await self._end(hold, "no_probe", errored=method is not None)
        elif (gone := unservable(hold, method)) is not None:
            await self._end(hold, gone[0].value, errored=True)
        elif is_guilty(hold.crashes, self._hooks.cap_of(method), alone=hold.alone):
            why = self._hooks.give_up(f"{hold.method}.probe", hold.crashes)
            await self._end(hold, "given_up", errored=True, given_up=why)
        else:
            async with self._calling(hold, method) as is_ours:
                if is_ours:
                    await self._probe(hold, method)

    async def _probe(self, hold: Hold, method: Method[Any, Any]) -> None:
        match await self._hooks.ask(self._hooks.of_hold(hold), method):
            case Done():
                await self._end(hold, "done")
            case Wait(seconds):
                check = min(self._clock.wall() + seconds, hold.lapses_at)
                await self._holds.wait(hold, next_check=check)
            case _:
                await self._end(hold, "failed", errored=True)

    async def _end(
        self, hold: Hold, reason: str, *, errored: bool = False, given_up: str = ""
    ) -> None:
        if not await self._holds.settle(hold, reason, errored=errored, given_up=given_up):
            return
        self._telemetry.emit("hold.ended", **hold.event_fields, reason=reason)
        if errored:
            self._trigger.go_on()  # its errored hook is due now


AT_ONCE: Final = 50


class LeftOrders:
    """Carries out the orders on rows of the service that no run owns; each run does so."""

    def __init__(self, shared: Shared) -> None:
        self._journal = shared.journal
        self._rows = RowOrders.of_run(shared.journal)
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry

    async def carry_out(self) -> None:
        """End every ownerless row that has an order, until there are none or recovery is paused."""
        journal = self._journal
        while not self._trigger.is_paused:
            targets = await targets_ordered(journal.engine, journal.service, limit=AT_ONCE)
            ended = [await self._end(target) for target in targets]
            if not any(ended):
                return  # there are none, or siblings end them, or the store refused
            self._trigger.poke()  # their replies and errored hooks are due; requests may go on

    async def _end(self, target: OrderTarget) -> bool:
        """End one row; false if it has changed meanwhile, or cannot be ended now."""
        try:
            order = order_of(target)
            outcome = ordered(str(target), order, target.state)
            why = order.reason or "no reason given"
            detail = f"{order.verb.value} of {order.by}: {why} (it was {state_of(target)})"
            if not await self._rows.end(target, outcome, what="order_carried_out", detail=detail):
                return False
        except StoreError as error:
            self._telemetry.emit("store.error", what="orders", error=str(error))
            return False
        self._tell(target, outcome.state)
        return True

    def _tell(self, target: OrderTarget, end: TaskState) -> None:
        self._telemetry.emit(
            "task.settled",
            **target.event_fields,
            decision=end.value,
            reason=Reason.OPERATOR.value,
        )
        if end is TaskState.ERRORED:
            self._telemetry.emit(
                "task.errored",
                **target.event_fields,
                reason=Reason.OPERATOR.value,
            )


UNKNOWN_CALL_TIMEOUT_S: Final = 60.0
"""Timeout of a call that did not say its own: after it, a reply of a dead run is not sent."""


class Duties:
    """Sends due replies and notifications, and calls due `errored` hooks."""

    def __init__(self, shared: Shared, *, hooks: MethodHooks, ends: Ends) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._tracker = shared.tracker
        self._suspects = shared.suspects
        self._hooks = hooks
        self._ends = ends
        self._trigger = shared.trigger
        self._clock = shared.clock
        self._notifications = shared.notifications
        self._outbox = shared.outbox
        self._heartbeats = shared.dispatcher.heartbeats

    async def look_at_due(self) -> None:
        """Let tasks begin whose time has come; send heartbeats to callers of those that wait."""
        waits = await self._claims.ripen()
        self._heartbeats.keep(await self._claims.waiting_callers() if waits else [])

    async def take_notifications(self, *, look_around: bool) -> None:
        """Take over notifications that no run sends; with *look_around* also such replies."""
        if await self._notifications.take_ownerless(look_around=look_around):
            self._outbox.poke()
        if look_around:
            await self._claims.take_left_replies()

    async def send_due_replies(self) -> None:
        """Try once to send each reply of a dead run whose caller may still be waiting."""
        for row_id, address, accepted_at in await self._claims.due_replies():
            if row_id in self._tracker.row_ids():
                continue  # its task is still here, and sends it
            until = address.expires_at or accepted_at + UNKNOWN_CALL_TIMEOUT_S
            if self._clock.wall() > until:
                self._journal.forget_reply(row_id, address, sent=False)
            else:
                await self._ends.reply(row_id, address)

    async def call_errored_hooks(self) -> None:
        """Call the due hooks of rows that recovery or an operator has ended as ERRORED."""
        tried = 0  # id of the last row, so that none is called twice in one go
        while rows := await self._claims.errored_due(after=tried):
            for row in rows:
                if self._trigger.is_paused:
                    return
                tried = row.id
                method = self._hooks.method_of(row)
                if method is None or method.errored_hook is None:
                    await self._claims.errored_done(row)
                else:
                    await self._call_due(row, method)

    async def _call_due(self, row: TaskRow, method: Method[Any, Any]) -> None:
        """Call one hook: recorded before, alone if it is a suspect, given up after crashes."""
        cap = self._hooks.cap_of(method)
        if is_guilty(row.hook_crashes, cap, alone=row.alone):
            why = self._hooks.give_up(f"{row.method}.errored", row.hook_crashes)
            await self._claims.errored_done(row, given_up=why)
            return
        about = suspicion(row.hook_crashes, cap)
        async with self._suspects.beginning(("task", row.id), about) as alone:
            if self._trigger.is_paused:
                return
            with contextlib.suppress(ConflictError):  # an operator has ended it
                await self._claims.begin_errored(row, alone=alone)
                subject = self._hooks.of_row(row, method)
                fault = await self._hooks.call_errored(subject, method, row.reason or "")
                await self._claims.errored_done(row, failed=fault)


class Overdue:
    """Ends overdue parked tasks of a service; each run does so, from its start to its end."""

    def __init__(self, shared: Shared) -> None:
        self._journal = shared.journal
        self._orders = RowOrders.of_run(shared.journal)
        self._rows = shared.pending
        self._outbox = shared.outbox
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        own = (method.options.pending_timeout_s for method in shared.methods)
        timeouts_s = (shared.settings.pending_timeout_s, *(one for one in own if one is not None))
        # This run does not learn what siblings park. A deadline is at least the shortest timeout
        # ahead, so a look at that interval finds each deadline before it passes.
        self._look_every_s = min(shared.settings.reconcile_every_s, *timeouts_s)

    async def end_all(self) -> None:
        """End every task whose deadline has passed."""
        journal = self._journal
        while targets := await targets_overdue(
            journal.engine, journal.service, self._clock.wall(), limit=AT_ONCE
        ):
            ended = await asyncio.gather(*map(self._end, targets))
            if not any(ended):
                return  # siblings end them, or the store refused: the next pass looks again
            self._outbox.poke()
            self._trigger.go_on()  # their errored hooks are due

    async def keep(self, follow_clock: Callable[[], Awaitable[None]]) -> None:
        """End each task at its deadline, until cancelled.

        Args:
            follow_clock: Adjusts the deadlines after the wall clock was set.
        """
        while True:
            try:
                await follow_clock()
                await self.end_all()
                pause_s = await self._pause_s()
            except StoreError as error:
                self._telemetry.emit("store.error", what="deadlines", error=str(error))
                pause_s = backoff.RECOVERY_S
            await self._trigger.wait_deadline(pause_s, self._clock.loop())

    async def _pause_s(self) -> float:
        """Seconds until a task is overdue, or until siblings may have parked one that will be."""
        deadline = await self._rows.next_deadline()
        longest = self._clock.tick(self._look_every_s) - self._clock.loop()
        if deadline is None:
            return longest
        left_s = deadline - self._clock.wall()
        # A task that is overdue already could not be ended; perhaps the store refuses.
        return min(longest, max(0.05, left_s) if left_s > 0 else backoff.OVERDUE_S)

    async def _end(self, target: OrderTarget) -> bool:
        """End one task; false if its row has changed meanwhile."""
        deadline = utc_text(target.pending_deadline or 0.0)
        outcome = expired(str(target), deadline, target.detail or "")
        detail = f"version {target.parkings}, deadline {deadline}"
        if not await self._orders.end(target, outcome, what="pending_expired", detail=detail):
            return False
        self._tell(target)
        return True

    def _tell(self, target: OrderTarget) -> None:
        self._telemetry.tracing.decided(
            target.request_id, TaskState.ERRORED.value, Reason.EXPIRED.value
        )
        self._telemetry.emit("task.errored", **target.event_fields, reason=Reason.EXPIRED.value)
