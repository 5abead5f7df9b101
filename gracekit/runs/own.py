"""The run of this process: its instance and locks, and its row from the join to the stop record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.config.choices import StopSource
from gracekit.config.settings import Settings
from gracekit.errors import AlreadyRunningError, ConflictError, DependencyError, StoreError
from gracekit.process import ForkGuard, Point, Process
from gracekit.runs.heart import Heart
from gracekit.runs.members import Members
from gracekit.runs.names import crash_name
from gracekit.runs.run import WATCHED, Run, declared
from gracekit.runs.seat import Seat, take_seat
from gracekit.runs.wishes import Wish, add_wish
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.location import StoreLocation
from gracekit.store.wakeup import Wakeups
from gracekit.telemetry.telemetry import Telemetry

WATCHED_TIMES: Final = 3.0
"""A start watches an earlier run for so many times its own `dead_after`, at most."""
TAKE_BACK_S: Final = 2.0
"""Seconds for which a cancelled start waits for a store that does not answer."""


class OwnSeat:
    """Opens the store, and takes the instance and the locks of this run.

    Attributes:
        service: Topic of the service.
        run_id: Id of this run; empty before the start.
        is_kept: Whether the locks are kept at the stop, because something of the run may still
            act: only the death of the process ends that.
        is_recorded: Whether the end of the run is on record.
        heart: Beats for it in a store that hosts share; None in another one, and before the start.
    """

    def __init__(
        self,
        engine: Engine,
        location: StoreLocation,
        process: Process,
        clock: Clock,
        telemetry: Telemetry,
        settings: Settings,
        *,
        service: str,
    ) -> None:
        self._engine = engine
        self._timings = settings.timings
        self._telemetry = telemetry
        self._location = location
        self._process = process
        self._clock = clock
        self.service = service
        self._host = settings.host
        self._wanted = settings.instance
        self._seat: Seat | None = None
        self._fork_guard: ForkGuard | None = None
        self._changing = asyncio.Lock()
        self.run_id = ""
        self.is_kept = False
        self.is_recorded = False
        self.heart: Heart | None = None

    async def start(self) -> None:
        """Open the store, and take an instance and its locks.

        Raises:
            ConfigError: the store cannot be used as configured.
            AlreadyRunningError: a run of this instance lives.
        """
        async with self._changing:
            if self._seat is not None:
                return
            await self._engine.start()
            if self._location.is_shared:
                self._clock.follow(self._engine.wall)
                self.heart = Heart(self._engine, self._process, self._clock, self._timings)
                self.heart.start()
            try:
                self._seat = await self._take()
                self._catch_crash()
            except BaseException:
                await self._leave()
                raise

    def _catch_crash(self) -> None:
        if (directory := self._location.run_directory) is not None:
            with contextlib.suppress(OSError):  # then the kernel's word must do
                self._process.catch_crash(directory / crash_name(self.run_id))

    async def _take(self) -> Seat:
        self._fork_guard = self._process.guard_forks(asyncio.get_running_loop())
        self.run_id = self.run_id or self._clock.new_id()
        return await take_seat(
            self._engine,
            self._process,
            self._location.run_directory,
            run_id=self.run_id,
            service=self.service,
            host=self._host,
            instance=self._wanted,
            settle_doubts=None if self.heart is None else self._settle_doubts,
        )

    async def _settle_doubts(self, runs: list[Run]) -> None:
        """Watch the beats of *runs* until each is declared dead, or has left.

        Raises:
            AlreadyRunningError: one beats.
            DependencyError: the store does not answer for long.
        """
        heart = self.heart
        assert heart is not None
        for run in runs:
            self._telemetry.emit(
                "run.watched", run=run.run_id, instance=run.instance, host=run.host
            )
        try:
            async with asyncio.timeout(WATCHED_TIMES * self._timings.dead_s):
                for run in runs:
                    await self._settle_doubt(heart, run)
        except TimeoutError as error:
            raise DependencyError(
                "the store did not answer for long enough to say whether earlier runs of this "
                "host live; see that the server can be reached, and start again"
            ) from error

    async def _settle_doubt(self, heart: Heart, run: Run) -> None:
        await heart.next_look()
        while (seen := heart.seen.get(run.run_id)) is not None:
            if seen.has_changed:
                raise AlreadyRunningError(
                    f"instance {run.instance!r} of service {run.service!r} is running with host "
                    f"name {run.host!r} on another machine, or beside another run directory; "
                    "stop it, or set GRACEKIT_HOST and GRACEKIT_INSTANCE to other names"
                )
            number = heart.silent.get(run.run_id)
            if number is not None:
                reason = f"{WATCHED} {seen.dead_s:g} s, seen by a start on host {self._host}"
                by, at = f"run {self.run_id}", self._clock.wall()
                dead = declared(run.run_id, number, by=by, reason=reason, at=at)
                with contextlib.suppress(ConflictError):  # it beats, or another one was quicker
                    await self._engine.commit(dead)
            await heart.next_look()

    async def stop(self) -> None:
        """Close the store, then release the locks: no statement of this run is under way then."""
        async with self._changing:
            await self._leave()

    async def _leave(self) -> None:
        await self._engine.stop()
        if self.is_kept:
            return  # and beats go on, until this process ends
        if self.heart is not None:
            self.heart.leave()
            self.heart.stop()
        if self._seat is not None:
            self._process.catch_crash(None)
            if self.is_recorded and (directory := self._location.run_directory) is not None:
                (directory / crash_name(self.run_id)).unlink(missing_ok=True)
            self._seat.leave(is_recorded=self.is_recorded)
        if self._fork_guard is not None:
            self._fork_guard.end()

    @property
    def taken(self) -> Seat:
        """The seat, once it is taken."""
        assert self._seat is not None, "start() first"
        return self._seat

    @property
    def instance(self) -> str:
        """Name of the instance; empty before the start."""
        return "" if self._seat is None else self._seat.instance


class OwnRecord:
    """The row of this run.

    Args:
        keeps_wishes: Whether a stop from inside is to last: its instance has a name of its own.
        written: Contents of the row, as arguments of `Members.join`.
        cancelled: Exit code and report to write if the start is cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        seat: OwnSeat,
        members: Members,
        wakeups: Wakeups,
        process: Process,
        *,
        keeps_wishes: bool,
        written: Mapping[str, Any],
        cancelled: tuple[int, dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._seat = seat
        self._members = members
        self._wakeups = wakeups
        self._process = process
        self._keeps_wishes = keeps_wishes
        self._written = written
        self._cancelled = cancelled
        self._joining = asyncio.Lock()
        self._has_joined = False

    async def start(self) -> None:
        """Write the row. If cancelled meanwhile, end the row that the commit may have written.

        Otherwise that row, whose process lives, would keep the instance taken.
        """
        async with self._joining:
            if not self._has_joined:
                await self._join()
                self._has_joined = True

    async def _join(self) -> None:
        seat = self._seat.taken
        heart = self._seat.heart
        joining = asyncio.ensure_future(self._members.join(seat=seat, **self._written))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            with contextlib.suppress(StoreError, TimeoutError):  # then only our death ends the row
                async with asyncio.timeout(TAKE_BACK_S):
                    await joining
                    if heart is not None:
                        heart.leave()
                    await self._members.stop_record(*self._cancelled)
            raise

    async def stop(self) -> None:
        """Do nothing: `end` writes the last record, which needs the report of the drain."""

    async def intend_stop(
        self, *, source: StopSource, by: str, reason: str, stays_down: bool = False
    ) -> None:
        """Record a stop-intent, and with *stays_down* the wish that this instance stays down."""
        batch = self._members.stop_intent(source=source, by=by, reason=reason)
        if stays_down:
            self._add_wish(batch, by, reason)
        if source == "signal" and await self._process.host_is_stopping():
            self._members.add_host_stop(batch)
        self._seat.taken.note_stop()  # in case that the commit fails or comes too late
        await self._engine.commit(batch)
        self._seat.taken.clear_note()

    async def keep_down(self, by: str, reason: str) -> None:
        """Record the wish that this instance stays down, whoever has asked for the stop."""
        batch = Batch(Point.STOP_INTENT)
        self._add_wish(batch, by, reason)
        if batch.statements:
            await self._engine.commit(batch)

    def _add_wish(self, batch: Batch, by: str, reason: str) -> None:
        if self._keeps_wishes:
            wish = Wish(
                service=self._seat.service,
                instance=self._seat.instance,
                source="user",
                by=by,
                reason=reason,
                at=self._engine.wall(),
            )
            add_wish(batch, wish)

    def intend_stop_from_thread(self, *, by: str, timeout_s: float) -> None:
        """As `intend_stop`, for a signal; called in a thread, as the loop may be blocked."""
        batch = self._members.stop_intent(source="signal", by=by, reason=f"signal {by}")
        with contextlib.suppress(StoreError):
            self._engine.commit_from_thread(batch, timeout_s=timeout_s)

    async def withdraw_stop(self) -> None:
        """Remove the stop-intent."""
        self._seat.taken.clear_note()
        await self._members.withdraw_stop()

    async def end(self, exit_code: int, report: dict[str, Any]) -> None:
        """Write the stop record, and wake the siblings, which may now claim this run's rows."""
        if report.get("left") and self._seat.heart is not None:
            self._seat.heart.leave()
        try:
            await self._members.stop_record(exit_code, report)
            self._seat.is_recorded = True
        finally:
            if not self._seat.is_recorded:
                self._seat.taken.note_stop(exit_code)
        self._wakeups.wake(run.run_id for run in await self._members.others())
