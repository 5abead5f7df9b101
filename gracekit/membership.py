"""One run among those of other hosts on its store: what it does while others could think it dead.

Its beats, and the watch over those of others, are in `runs.heart`. Here is what follows from them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import ConflictError, StoreError
from gracekit.exits import ExitCode
from gracekit.phase import Phase
from gracekit.process import Process
from gracekit.runs.heart import Heart
from gracekit.runs.members import Members
from gracekit.runs.run import WATCHED
from gracekit.store.engine import Engine
from gracekit.store.state import StoreState, StoreStatus
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import CancelCause, Lane, TrackedTask
from gracekit.tracker.tracker import Tracker

FAREWELL_S: Final = 0.1
"""A fenced process has so long for the cancellation of its handlers and for its last lines."""
LOOK_S: Final = 1.0
"""Seconds between two looks at the own trust and at the beats of others."""


class Membership:
    """Follows the trust in the own beats; declares dead who has stopped beating.

    Args:
        heart: Of this run.
        cancel: Cancels what acts for a row or a lease of this run; returns whether any still acts.
        on_left: Called when another run has left, or was declared dead.
        ends_process: Whether the process ends with the service.
    """

    def __init__(
        self,
        heart: Heart,
        engine: Engine,
        members: Members,
        *,
        cancel: Callable[[], bool],
        on_left: Callable[[], None],
        phase: Phase,
        process: Process,
        telemetry: Telemetry,
        clock: Clock,
        ends_process: bool,
    ) -> None:
        self._heart = heart
        self._engine = engine
        self._members = members
        self._cancel = cancel
        self._on_left = on_left
        self._phase = phase
        self._process = process
        self._telemetry = telemetry
        self._clock = clock
        self._ends_process = ends_process
        self._beating: frozenset[str] = frozenset()  # the runs that had a beat at the last look
        self._failed = False

    async def keep(self) -> None:
        """Follow the own trust until cancelled."""
        while True:
            self.follow_trust()
            await self._clock.wait_tick(LOOK_S)

    async def watch(self) -> None:
        """Watch the others until cancelled; beside `keep`, as the store may not answer for long."""
        while True:
            if not self._phase.draining:
                await self._declare_silent()
                self._notice_left()
            await self._clock.wait_tick(LOOK_S)

    # -- the own trust --------------------------------------------------------------------

    def follow_trust(self) -> None:
        """Take nothing more from *warn* on, and cancel what acts from *fail* on."""
        late_s, times = self._heart.trust_s, self._heart.timings
        if self._engine.status.state is StoreState.FENCED:
            self._rest()
            return
        self._warn(late_s if late_s >= times.warn_s else None)
        if late_s >= times.fail_s:
            self._fail(late_s)
        elif self._failed:
            self._failed = False
            self._engine.distrust(None)

    def _warn(self, late_s: float | None) -> None:
        was_late, self._phase.unproven = self._phase.unproven is not None, None
        if late_s is not None:
            self._phase.unproven = f"no sign of life has reached the store for {late_s:.0f} s"
        if was_late is (late_s is not None):
            return
        if late_s is None:
            self._telemetry.emit("beats.resumed")
        else:
            self._telemetry.emit("beats.missed", away_s=round(late_s, 1))
        self._process.notify.status(self._phase.trouble or self._phase.state.value)

    def _fail(self, late_s: float) -> None:
        if not self._failed:
            self._failed = True
            self._engine.distrust(f"no sign of life of this run has reached it for {late_s:.0f} s")
        self._rest()

    def _rest(self) -> None:
        """Disarm the timer if nothing acts any more."""
        if not self._cancel():
            self._heart.disarm_if_failed()

    def follow_store(self, status: StoreStatus) -> None:
        """Called by the engine with each change: end at once if others act in this run's place."""
        if status.state is not StoreState.FENCED:
            return
        self._cancel()
        if self._ends_process:
            leave = self._process.exit_now
            asyncio.get_running_loop().call_later(FAREWELL_S, leave, int(ExitCode.INTERNAL))

    # -- the others -----------------------------------------------------------------------

    async def _declare_silent(self) -> None:
        """Declare the runs dead whose beats have stopped; their rows are taken over at once."""
        silent, seen = dict(self._heart.silent), self._heart.seen
        silent.pop(self._members.run_id, None)
        if not silent:
            return
        with contextlib.suppress(StoreError):
            for run in await self._members.of(silent.keys() & seen.keys()):
                dead_s = seen[run.run_id].dead_s
                reason = f"{WATCHED} {dead_s:g} s, seen by {self._members.label}"
                with contextlib.suppress(ConflictError):
                    await self._members.declare_dead(run, silent[run.run_id], reason=reason)
                    self._telemetry.emit(
                        "run.declared_dead",
                        run=run.run_id,
                        instance=run.instance,
                        host=run.host,
                        reason=reason,
                    )

    def _notice_left(self) -> None:
        """Have recovery look at once if a run has left, or was declared dead."""
        before, self._beating = self._beating, frozenset(self._heart.seen)
        if before - self._beating:
            self._on_left()


def cancel_bound(tracker: Tracker) -> bool:
    """Cancel what acts for a row or a lease of this run; returns whether anything still acts."""
    acting = [task for task in tracker if _acts(task)]
    for task in acting:
        if task.cancel_cause is None:
            task.cancel(CancelCause.FENCED)
    return bool(acting)


def _acts(task: TrackedTask) -> bool:
    """Whether code of the application runs that another run must not meet."""
    if not task.running:
        return False
    if task.lane in (Lane.REQUESTS, Lane.OPS):
        is_bound = task.journaled or task.leases > 0
        return is_bound and bool(task.cancellable or task.children)
    return True
