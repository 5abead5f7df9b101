"""The reconciler: takes over the rows of dead runs, and settles them in the background.

It makes a pass at start, when it is poked, when an operator asks, and every 30 s. All its writes
are compare-and-set, so several reconcilers may work on one store. In a drain it claims nothing. It
never touches a row whose owner may still live.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.errors import StoreError
from gracekit.journal.findings import FindingRows
from gracekit.journal.holds import Holds
from gracekit.journal.outbox import OutboxRows
from gracekit.journal.pending import PendingRows
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import RunLeases
from gracekit.process import Point
from gracekit.recovery.adoption import Adoption
from gracekit.recovery.ends import Ends, Gates
from gracekit.recovery.hook_calls import HookCalls, MethodHooks
from gracekit.recovery.left_work import Duties, LeftHolds, LeftOrders, Overdue
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.results import PassReport
from gracekit.recovery.resources.schedule import Resources
from gracekit.recovery.settling import Settling
from gracekit.recovery.shared import Shared, SideTasks
from gracekit.recovery.starts import Starts
from gracekit.rpc.failures import words_of
from gracekit.rpc.server import RpcServer
from gracekit.store.batch import Batch
from gracekit.tracker.task import Lane

LAST_GIVE_BACK_S: Final = 1.0
"""Seconds for the last release of leases at a stop: the stop must still be recorded in time."""
BETWEEN_PASSES_S: Final = 0.05
"""The shortest time between two passes, if nobody asks for the second."""
CLOCK_SET_S: Final = 1.0
"""The wall clock counts as set if it moved by so many seconds more or less than the loop's time."""


class Reconciler:
    """Recovery of one run: decides when a pass is made, and the order of its steps.

    Attributes:
        adoption: Takes over the rows of dead runs.
        gates: Keep new requests from resources with an unfinished task.
        ends: Ends rows that no handler works on.
        starts: Starts rows that this run has claimed.
        resources: Settles the resources of the application.
        by_hand: Makes the passes that operators ask for.
        settles: Whether unfinished tasks and resources are settled without an operator's request.
        least_age_s: Age in seconds that a status must have in a pass that an operator asks for.
    """

    def __init__(self, shared: Shared, kinds: KindTable, servers: Mapping[Lane, RpcServer]) -> None:
        self._journal: Journal = shared.journal
        self._holds: Holds = shared.holds
        self._findings: FindingRows = shared.findings
        self._pending: PendingRows = shared.pending
        self._notifications: OutboxRows = shared.notifications
        self._leases: RunLeases = shared.leases
        self._clock: Clock = shared.clock
        self._claims = shared.claims
        self._suspects = shared.suspects
        self._lanes = tuple(shared.gates)
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._trigger = shared.trigger
        self._look_by = 0.0  # loop time of the next full look, however often passes are asked for
        self._ahead_s: float | None = None  # wall time minus loop time
        self._following = asyncio.Lock()

        self._side_tasks = SideTasks(shared.trigger, shared.telemetry)
        self.gates = gates = Gates(shared)
        calls = HookCalls(shared.threads)
        hooks = MethodHooks(shared, calls)
        self.adoption = Adoption(shared, side_tasks=self._side_tasks)
        self.ends = ends = Ends(shared, hooks=hooks, gates=gates)
        self.starts = starts = Starts(shared, gates=gates, hooks=hooks, ends=ends)
        self._settling = Settling(shared, gates=gates, hooks=hooks, ends=ends, starts=starts)
        self._duties = Duties(shared, hooks=hooks, ends=ends)
        self._left_holds = LeftHolds(shared, hooks=hooks)
        self._left_orders = LeftOrders(shared)
        self.overdue = Overdue(shared)
        self.resources = Resources(shared, calls, kinds, shared.findings, servers)
        self.by_hand = PassesByHand(
            shared, adoption=self.adoption, settling=self._settling, resources=self.resources
        )
        self.settles = shared.settings.startup_reconciliation_enabled
        self.least_age_s = shared.settings.startup_reconciliation_wait_seconds

    # -- life ---------------------------------------------------------------------------

    def pause(self) -> None:
        """Start nothing more. Probes under way go on; rows that only wait are released."""
        self._trigger.is_paused = True
        self.starts.wake()
        self._settling.let_go_of_waiting()
        self.resources.pause()

    def resume(self) -> None:
        """Start work again, after a drain was resumed."""
        self._trigger.is_paused = False
        self._trigger.poke()

    async def stop(self) -> None:
        """Cancel what is still being settled; its rows and leases are released."""
        self.pause()
        self._suspects.stop()
        tasks: list[asyncio.Task[Any]] = [
            *self._settling.tasks,
            *self._side_tasks.tasks,
            *self.by_hand.tasks,
            *self.resources.tasks,
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # If this fails, the death of this process frees them later.
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LAST_GIVE_BACK_S):
                await self._leases.give_back_owed()

    async def keep_deadlines(self) -> None:
        """End each parked task at its deadline, until cancelled."""
        await self.overdue.keep(self.follow_clock)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            self._trigger.begin()
            try:
                await self.reconcile()
            except Exception as error:  # noqa: BLE001 - recovery goes on, whatever one pass raised
                # The next pass looks at all rows, as this one left some out or half done.
                self._trigger.looks_around = True
                self._look_by = self._clock.loop() + backoff.RECOVERY_S
                self._telemetry.emit("store.error", what="reconciliation", error=words_of(error))
            with contextlib.suppress(TimeoutError):
                self._trigger.sleeps_until = await self._next_pass()
                async with asyncio.timeout_at(self._trigger.sleeps_until):
                    await self._wait_rung()
                    continue
            self._trigger.looks_around = True

    async def _wait_rung(self) -> None:
        """Wait until a pass is due; meanwhile check runs whose leases requests wait for."""
        while not self._trigger.is_set:
            await self._trigger.wait()
            self.adoption.look_after_asked()

    async def _next_pass(self) -> float:
        """The loop time of the next pass, if nothing asks for one; a tick, if no row is due."""
        last = self._clock.tick(self._clock.jitter(self._settings.reconcile_every_s))
        if self._trigger.is_paused:
            return last  # `resume` asks for a pass
        soonest = self._clock.loop() + BETWEEN_PASSES_S
        last = min(last, max(soonest, self._look_by))
        if self._journal.engine.status.error is not None:
            return last  # what is due stays due; the return of the store asks for a pass
        if (due_s := self.resources.due_in_s()) is not None:
            last = min(last, max(soonest, self._clock.loop() + due_s))
        if self._trigger.is_set:
            return last
        with contextlib.suppress(StoreError):
            look = None
            if self.settles and not self._settling.is_full:  # else none is claimed, even if due
                look = await self._claims.next_look(self.ends.left_to_siblings())
            for moment in (look, await self._claims.next_due()):
                if moment is not None:
                    due_at = self._clock.loop() + moment - self._clock.wall()
                    last = min(last, max(soonest, due_at))
        return last

    # -- one pass -----------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Make one pass over all work that no run is doing; in a drain it starts nothing."""
        if self._trigger.is_paused:
            await self.follow_clock()
            return
        await self.follow_clock()
        await self._duties.look_at_due()
        await self._leases.give_back_owed()
        await self.adoption.adopt_dead_runs()
        # A full look lists all rows in flight and all unfinished resources. If each settled row
        # caused one, the cost would grow with the square of their number.
        look = self._trigger.looks_around or self._clock.loop() >= self._look_by
        if look:
            self._trigger.looks_around = False
            self._look_by = self._clock.tick(self._settings.reconcile_every_s)
            await self.adoption.adopt_stranded()
            await self.adoption.adopt_missing(
                self._settling.is_settled_now, lambda: self.starts.claim_mark
            )
        self._side_tasks.do("orders", self._left_orders.carry_out)
        await self._claims.take_duties()
        await self._duties.take_notifications(look_around=look)
        await self._duties.send_due_replies()
        if self.settles:
            if look:
                await self.gates.hold_all()
            await self._settling.settle_rows()
            self._side_tasks.do("holds", self._left_holds.settle_all)
        self._side_tasks.do("resources", self.resources.look)
        self._side_tasks.do("errored hooks", self._duties.call_errored_hooks)
        for lane in self._lanes:
            claim = partial(self.starts.claim_accepted, lane)
            self._side_tasks.do(f"accepted rows, {lane.value}", claim)
        if look:
            await self.gates.refresh(self._settling.resources)

    @property
    def clock_was_set(self) -> bool:
        """Whether the wall clock was set since the last `follow_clock`."""
        ahead_s = self._clock.wall() - self._clock.loop()
        return self._ahead_s is not None and abs(ahead_s - self._ahead_s) > CLOCK_SET_S

    async def follow_clock(self) -> None:
        """If the wall clock was set since the last call, adjust the times of waits in the store.

        The store has wall times because they must outlive runs. Without this, a wait could last
        longer by as much as the clock was set back.
        """
        async with self._following:
            ahead_s = self._clock.wall() - self._clock.loop()
            by_s = 0.0 if self._ahead_s is None else ahead_s - self._ahead_s
            if abs(by_s) > CLOCK_SET_S:
                batch = Batch(Point.SETTLE)
                self._leases.add_follow_clock(batch)
                self._claims.add_follow_clock(batch, by_s, ahead_s=ahead_s)
                self._holds.add_follow_clock(batch, by_s)
                self._findings.add_follow_clock(batch, by_s, ahead_s=ahead_s)
                self._pending.add_follow_clock(batch, ahead_s - by_s, ahead_s=ahead_s)
                self._notifications.add_follow_clock(batch, by_s)
                await self._journal.commit(batch)
                self.resources.follow_clock(by_s)
                self._telemetry.emit("clock.set", by_s=round(by_s, 1))
                self._trigger.poke()
            self._ahead_s = ahead_s

    # -- what others ask ----------------------------------------------------------------

    async def take_over(self) -> None:
        """At a start: adopt runs that are proven dead, and take over their rows.

        Also end parked tasks whose deadline has passed while no run was there.
        """
        await self.adoption.adopt_dead_runs()
        await self.overdue.end_all()


class PassesByHand:
    """Makes such passes, each in the asyncio task of its caller.

    Attributes:
        tasks: The tasks of the callers; a stop of recovery cancels them.
    """

    def __init__(
        self, shared: Shared, *, adoption: Adoption, settling: Settling, resources: Resources
    ) -> None:
        self._settings = shared.settings
        self._adoption = adoption
        self._settling = settling
        self._resources = resources
        self.tasks: list[asyncio.Task[object]] = []  # a list: a simulation needs a fixed order

    async def make(self, request: PassRequest, report: PassReport) -> None:
        """Settle what an operator asks for.

        Args:
            request: What to settle.
            report: Filled in while the pass is made.

        Raises:
            GracekitError: it cannot be done now; the message says why.
        """
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            await self._make(request, report)
        except asyncio.CancelledError:
            report.interrupted = True
            raise
        finally:
            self.tasks.remove(task)

    async def _make(self, request: PassRequest, report: PassReport) -> None:
        settles = self._settings.startup_reconciliation_enabled
        if request.is_of_all and not settles and self._resources.may_begin():
            if request.dry_run:
                report.tasks = await self._settling.count_due()
            else:
                await self._adoption.adopt_dead_runs()
                report.tasks = await self._settling.settle_all()
            if not self._resources.may_begin():
                report.interrupted = True  # not an error, as the pass has begun
                return
        await self._resources.make_by_hand(request, report)
