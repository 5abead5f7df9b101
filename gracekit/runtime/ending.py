"""The end of one run: one asyncio task waits for a stop request and then drains."""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.drain.report import DrainReport
from gracekit.runtime.built import Ground, Wired

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
                with self._ground.telemetry.traced_drain():
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
