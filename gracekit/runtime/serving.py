"""Starts the parts of an open run, and drains it: one asyncio task waits for a stop request.

A stop request cuts the start short.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.drain.report import DrainReport
from gracekit.errors import GracekitError
from gracekit.exits import exit_code_of
from gracekit.runtime.built import Ground, Wired
from gracekit.telemetry.safe_text import Sentence
from gracekit.upkeep import StartProgress


class Start:
    """The start of one run: starts all parts below `RECORD` in order, then reports readiness.

    Args:
        starting: Reports the progress of the start, and its end, to systemd.
    """

    def __init__(self, ground: Ground, wired: Wired, starting: StartProgress) -> None:
        self._ground = ground
        self._wired = wired
        self._starting = starting

    async def run_unless_stopped(self, ending: DrainTask) -> None:
        """Start, unless a stop was asked for; a stop request meanwhile cuts the start short.

        Args:
            ending: If the start fails, drains what was started before the error is raised.
        """
        coordinator = self._wired.coordinator
        if coordinator.stop_requested:
            return
        starting = asyncio.create_task(self._start(), name="gracekit-start")
        stopping = asyncio.create_task(coordinator.wait_requested())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._cut_short(starting)
            self._check_started(starting)
        except BaseException as error:
            await self._cut_short(starting)
            self._ask_stop(error)
            await ending.wait()
            raise
        finally:
            stopping.cancel()

    async def _start(self) -> None:
        ground, coordinator = self._ground, self._wired.coordinator
        await self._wired.parts.start(unless=lambda: coordinator.stop_requested)
        if coordinator.stop_requested:
            return  # the stop request cancelled the start, but a hook swallowed the cancellation
        ground.telemetry.emit(
            "service.serving",
            service=ground.service.topic,
            instance=ground.seat.instance,
            run=ground.seat.run_id,
            took_s=round(self._starting.took_s, 3),
        )
        self._starting.end_ready()

    async def _cut_short(self, starting: asyncio.Task[None]) -> None:
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting}, timeout=self._ground.settings.handover_grace_s)
        if not starting.done():
            self._wired.coordinator.fail("the start did not end when it was cancelled")

    def _check_started(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() and not self._wired.coordinator.stop_requested:
            raise GracekitError(
                "the start was cancelled although no stop was asked for: an on_start hook "
                "raised CancelledError"
            )
        if starting.done() and not starting.cancelled():
            starting.result()

    def _ask_stop(self, error: BaseException) -> None:
        reason = f"start failed: {error!r}"
        if isinstance(error, Exception):
            text = Sentence(f"{type(error).__name__}: {error}")
            self._ground.telemetry.emit("service.start_failed", error=text)
        self._wired.coordinator.fail(reason, exit_code_of(error))
        self._ground.stops.ask(source="error", by="start", reason=reason)


FOREIGN_CANCELLATION: Final = (
    "something in this process cancelled gracekit's own task: the program ends (by SystemExit in "
    "another task, for example), or it cancels all tasks"
)


class DrainTask:
    """Waits for a stop request, drains, and restores the signal handlers.

    Attributes:
        report: The report of the drain; None until it is over.
    """

    def __init__(self, ground: Ground, wired: Wired) -> None:
        self._ground = ground
        self._wired = wired
        self._task: asyncio.Task[DrainReport] | None = None
        self.report: DrainReport | None = None

    def begin(self) -> asyncio.Task[DrainReport]:
        """The task that drains; made at the first call, and again if it was cancelled."""
        if self._task is None or self._task.cancelled():
            self._task = asyncio.create_task(self._end(), name="gracekit-serve")
        return self._task

    async def wait(self) -> DrainReport:
        """Wait for the end of the drain; cancelling this wait does not cancel the drain."""
        ending = self.begin()
        await asyncio.wait({ending})
        return ending.result()

    async def wait_or_force(self) -> None:
        """Wait for the end of the drain; cancelling this wait makes the drain hand over at once.

        Raises:
            asyncio.CancelledError: the wait was cancelled.
        """
        cancelled: asyncio.CancelledError | None = None
        while self.report is None:
            try:
                await self.wait()
            except asyncio.CancelledError as error:
                if self._ground.process.has_ended():
                    raise
                self._wired.coordinator.force()
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _end(self) -> DrainReport:
        coordinator = self._wired.coordinator
        while self.report is None:
            try:
                request = await coordinator.wait_requested()
                self.report = await coordinator.drain(request, self._wired.parts)
            except asyncio.CancelledError as error:
                coordinator.survive(error)
                self._ground.stops.ask(
                    source="error", by="cancellation", reason=FOREIGN_CANCELLATION
                )
            except KeyboardInterrupt:
                # In a program that runs in `asyncio.run`, a second Ctrl-C is raised at any place of
                # the main thread; here it was in a step of the drain. The drain is begun again.
                self._ground.stops.ask(source="user", by="KeyboardInterrupt", reason="Ctrl-C")
                coordinator.force()
        if self._ground.signals is not None:
            self._ground.signals.give_back(served=True, must_die=self.report.must_die)
        return self.report
