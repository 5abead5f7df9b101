"""The reconciler: takes over what dead runs left, and settles it in the background.

Everything here is compare-and-set, repeated at start, when poked and every
30 s; a second reconciler on the same store is harmless. In a drain it claims
nothing. It never judges a row whose owner may still live.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

from gracekit.clock import Clock
from gracekit.config import Settings
from gracekit.dispatcher import Dispatcher
from gracekit.errors import StoreError
from gracekit.leases.leases import Leases
from gracekit.leases.lines import Lines
from gracekit.process import Point, Threads
from gracekit.recovery.adoption import Adoption
from gracekit.recovery.beside import AGAIN_AFTER_S, Beside
from gracekit.recovery.duties import Duties
from gracekit.recovery.ends import Ends
from gracekit.recovery.gates import Gates
from gracekit.recovery.hooks import Hooks
from gracekit.recovery.left_holds import LeftHolds
from gracekit.recovery.settling import Settling
from gracekit.recovery.starts import Starts
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.context import Services
from gracekit.request.pace import Pace
from gracekit.request.seats import Seats
from gracekit.request.suspects import Suspects
from gracekit.rpc.failures import words_of
from gracekit.rpc.methods import MethodTable
from gracekit.runs.members import Members
from gracekit.store.batch import Batch
from gracekit.telemetry import Telemetry
from gracekit.tracker.claims import Claims
from gracekit.tracker.holds import Holds
from gracekit.tracker.journal import Journal, TaskRow
from gracekit.tracker.task import Lane

LAST_GIVE_BACK_S: Final = 1.0
"""A slow store must not eat the time in which a stop is recorded."""
CLOCK_SET_S: Final = 1.0
"""A wall clock that differs by more from the time that has passed was set."""


class Reconciler:
    """Recovery of one run: when it looks, and in which order.

    Args:
        services: Journal, holds, leases and tracker of the run.
        pace: What others ask of it.
        threads: For plain hooks: they must not take a thread that a handler was promised.
    """

    def __init__(
        self,
        services: Services,
        dispatcher: Dispatcher,
        *,
        pace: Pace,
        claims: Claims,
        members: Members,
        arrivals: Arrivals,
        answers: Answers,
        lines: Lines,
        suspects: Suspects,
        methods: MethodTable,
        seats: Mapping[Lane, Seats],
        threads: Threads,
        settings: Settings,
        telemetry: Telemetry,
    ) -> None:
        self._journal: Journal = services.journal
        self._holds: Holds = services.holds
        self._leases: Leases = services.leases
        self._clock: Clock = services.clock
        self._claims = claims
        self._suspects = suspects
        self._lanes = tuple(seats)
        self._settings = settings
        self._telemetry = telemetry
        self._look_by = 0.0  # loop time; being rung again and again must not put it off for ever
        self._ahead_s: float | None = None  # of the wall clock, before the time that passes
        self._following = asyncio.Lock()

        journal, leases, clock = self._journal, self._leases, self._clock
        tracker = services.tracker
        self._pace = pace
        self._beside = Beside(pace, telemetry)
        self._gates = gates = Gates(lines, claims)
        hooks = Hooks(
            services, arrivals, threads, methods=methods, settings=settings, telemetry=telemetry
        )
        self._adoption = Adoption(
            journal=journal,
            claims=claims,
            leases=leases,
            members=members,
            tracker=tracker,
            telemetry=telemetry,
            pace=pace,
            beside=self._beside,
        )
        self._ends = ends = Ends(
            journal=journal,
            claims=claims,
            leases=leases,
            members=members,
            answers=answers,
            hooks=hooks,
            gates=gates,
            pace=pace,
            settings=settings,
            telemetry=telemetry,
            clock=clock,
        )
        self._starts = starts = Starts(
            journal=journal,
            claims=claims,
            dispatcher=dispatcher,
            seats=seats,
            gates=gates,
            hooks=hooks,
            ends=ends,
            pace=pace,
        )
        self._settling = Settling(
            journal=journal,
            claims=claims,
            leases=leases,
            suspects=suspects,
            gates=gates,
            hooks=hooks,
            ends=ends,
            starts=starts,
            pace=pace,
            telemetry=telemetry,
            clock=clock,
        )
        self._duties = Duties(
            journal=journal,
            claims=claims,
            tracker=tracker,
            suspects=suspects,
            hooks=hooks,
            ends=ends,
            pace=pace,
            clock=clock,
        )
        self._left_holds = LeftHolds(
            holds=self._holds,
            suspects=suspects,
            hooks=hooks,
            pace=pace,
            telemetry=telemetry,
            clock=clock,
        )

    # -- life ---------------------------------------------------------------------------

    def pause(self) -> None:
        """Start nothing more. A probe under way is waited for; what only waits is let go."""
        self._pace.is_paused = True
        self._starts.wake()
        self._settling.let_go_of_waiting()

    def is_paused(self) -> bool:
        """Whether a drain has said that nothing more may be started."""
        return self._pace.is_paused

    def resume(self) -> None:
        """Go on after a drain that was resumed."""
        self._pace.is_paused = False
        self._pace.poke()

    async def stop(self) -> None:
        """End what is still being settled; its rows and leases are anyone's again."""
        self.pause()
        self._suspects.stop()
        tasks = [*self._settling.tasks, *self._beside.tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # Our death frees them too, only later; a commit on its way is carried out all the same.
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LAST_GIVE_BACK_S):
                await self._leases.give_back_owed()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            self._pace.begin()
            try:
                await self.reconcile()
            except Exception as error:  # noqa: BLE001 - recovery goes on, whatever one pass met
                # What this pass did not come to, or left half done.
                self._pace.looks_around = True
                self._look_by = self._clock.loop() + AGAIN_AFTER_S
                self._telemetry.emit("store.error", what="reconciliation", error=words_of(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(await self._pause_s()):
                    await self._wait_rung()
                    continue
            self._pace.looks_around = True

    async def _wait_rung(self) -> None:
        """Wait until a pass is due; look meanwhile at runs that are in somebody's way."""
        while not self._pace.is_rung:
            await self._pace.wait()
            self._adoption.look_after_asked()

    async def _pause_s(self) -> float:
        every = self._clock.jitter(self._settings.reconcile_every_s)
        longest = min(every, max(0.05, self._look_by - self._clock.loop()))
        if (
            self._pace.is_paused
            or not self._settings.startup_reconciliation_enabled
            or self._settling.is_full
            or self._pace.is_rung
        ):
            return longest  # whatever is due, nothing would be claimed before the next poke
        with contextlib.suppress(StoreError):
            moment = await self._claims.next_look(self._ends.left_to_siblings())
            if moment is not None:
                return max(0.05, min(longest, moment - self._clock.wall()))
        return longest

    # -- one pass -----------------------------------------------------------------------

    async def reconcile(self) -> None:
        """One pass over everything that nobody is working on; nothing in a drain."""
        if self._pace.is_paused:
            return
        await self.follow_clock()
        await self._leases.give_back_owed()
        await self._adoption.adopt_dead_runs()
        # Listing all that is in flight, or every unfinished resource, at each settled row would
        # square their number.
        look = self._pace.looks_around or self._clock.loop() >= self._look_by
        if look:
            self._pace.looks_around = False
            self._look_by = self._clock.loop() + self._settings.reconcile_every_s
            await self._adoption.adopt_missing(self._settling.is_settled_now)
        await self._claims.take_duties()
        await self._duties.send_due_replies()
        if self._settings.startup_reconciliation_enabled:
            if look:
                await self._gates.hold_all()
            await self._settling.settle_rows()
            self._beside.do("holds", self._left_holds.settle_all)
        self._beside.do("errored hooks", self._duties.call_errored_hooks)
        for lane in self._lanes:
            claim = partial(self._starts.claim_accepted, lane)
            self._beside.do(f"accepted rows, {lane.value}", claim)
        if look:
            await self._gates.refresh(self._settling.resources)

    async def follow_clock(self) -> None:
        """If the wall clock was set since the last look, give what waits its own length again.

        The store has wall times, as they outlive runs; within a run waits are counted by the time
        that passes.
        """
        async with self._following:
            ahead_s = self._clock.wall() - self._clock.loop()
            by_s = 0.0 if self._ahead_s is None else ahead_s - self._ahead_s
            if abs(by_s) > CLOCK_SET_S:
                batch = Batch(Point.SETTLE)
                self._leases.add_follow_clock(batch)
                self._claims.add_follow_clock(batch, by_s)
                self._holds.add_follow_clock(batch, by_s)
                await self._journal.commit(batch)
                self._telemetry.emit("clock.set", by_s=round(by_s, 1))
                self._pace.poke()
            self._ahead_s = ahead_s

    # -- what others ask ----------------------------------------------------------------

    async def adopt_dead_runs(self) -> None:
        """At a start: classify runs proven dead and take over what they left."""
        await self._adoption.adopt_dead_runs()

    async def gate(self) -> None:
        """At a start: hold the line of every resource with an unfinished row."""
        await self._gates.hold_all()

    async def end_abandoned(self, row: TaskRow) -> None:
        """End an ownerless row whose host or instance does not come back."""
        await self._ends.end_abandoned(row)

    async def free_forgotten(self, acted: Collection[str]) -> list[TaskRow]:
        """At the end of a drain: let go of rows that a commit of unknown end made ours.

        Args:
            acted: Request ids whose handler was cut: theirs stay with this process.

        Returns:
            Those rows as they were.
        """
        return await self._adoption.free_forgotten(acted)

    async def count_unfinished(self) -> int:
        """Rows of the store that this run, or its next start, could settle."""
        return await self._adoption.count_unfinished()
