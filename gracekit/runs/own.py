"""The run of this process: its instance and locks, and its row from the join to the stop record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.config.choices import StopSource
from gracekit.errors import StoreError
from gracekit.process import ForkGuard, Process
from gracekit.runs.members import Members
from gracekit.runs.seat import Seat, take_seat
from gracekit.store.engine import Engine
from gracekit.store.location import StoreLocation
from gracekit.store.wakeup import Wakeups

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
    """

    def __init__(
        self,
        engine: Engine,
        location: StoreLocation,
        process: Process,
        clock: Clock,
        *,
        service: str,
        host: str,
        instance: str | None,
    ) -> None:
        self._engine = engine
        self._location = location
        self._process = process
        self._clock = clock
        self.service = service
        self._host = host
        self._wanted = instance
        self._seat: Seat | None = None
        self._fork_guard: ForkGuard | None = None
        self._changing = asyncio.Lock()
        self.run_id = ""
        self.is_kept = False
        self.is_recorded = False

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
            try:
                self._seat = await self._take()
            except BaseException:
                await self._leave()
                raise

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
            is_shared=self._location.is_shared,
        )

    async def stop(self) -> None:
        """Close the store, then release the locks: no statement of this run is under way then."""
        async with self._changing:
            await self._leave()

    async def _leave(self) -> None:
        await self._engine.stop()
        if self.is_kept:
            return
        if self._seat is not None:
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
        written: Contents of the row, as arguments of `Members.join`.
        cancelled: Exit code and report to write if the start is cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        seat: OwnSeat,
        members: Members,
        wakeups: Wakeups,
        *,
        written: Mapping[str, Any],
        cancelled: tuple[int, dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._seat = seat
        self._members = members
        self._wakeups = wakeups
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
        joining = asyncio.ensure_future(self._members.join(seat=seat, **self._written))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            with contextlib.suppress(StoreError, TimeoutError):  # then only our death ends the row
                async with asyncio.timeout(TAKE_BACK_S):
                    await joining
                    await self._members.stop_record(*self._cancelled)
            raise

    async def stop(self) -> None:
        """Do nothing: `end` writes the last record, which needs the report of the drain."""

    async def intend_stop(self, *, source: StopSource, by: str, reason: str) -> None:
        """Record a stop-intent."""
        batch = self._members.stop_intent(source=source, by=by, reason=reason)
        self._seat.taken.note_stop()  # in case that the commit fails or comes too late
        await self._engine.commit(batch)
        self._seat.taken.clear_note()

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
        try:
            await self._members.stop_record(exit_code, report)
            self._seat.is_recorded = True
        finally:
            if not self._seat.is_recorded:
                self._seat.taken.note_stop(exit_code)
        self._wakeups.wake(run.run_id for run in await self._members.others())
