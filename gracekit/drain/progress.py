"""What people are shown of a drain while it goes on: a line every few seconds, and systemd."""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit import sdnotify
from gracekit.clock import Clock
from gracekit.drain.report import DrainReport
from gracekit.drain.steps import BoundedSteps
from gracekit.phase import Phase
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import TrackedTask
from gracekit.tracker.tracker import Tracker

LISTED_TASKS: Final = 5


class Forecast:
    """How long tasks have run, and how long they are expected to go on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def age_s(self, since: float | None) -> float:
        """Seconds since that loop time; 0 if there was none."""
        return 0.0 if since is None else round(self._clock.loop() - since, 1)

    def since_s(self, moment: float | None) -> float | None:
        """Seconds since that loop time; None if there was none."""
        return None if moment is None else self.age_s(moment)

    def left_s(self, task: TrackedTask) -> float | None:
        """Seconds until *task* is expected to end; None if its history says nothing."""
        now = self._clock.loop()
        end = task.expected_end(now)
        return None if end is None else round(end - now, 1)

    def all_left_s(self, running: list[TrackedTask]) -> float | None:
        """Seconds until the last of *running* is expected to end; None if one is not known."""
        left = [self.left_s(task) for task in running]
        known = [seconds for seconds in left if seconds is not None]
        return max(known, default=None) if len(known) == len(left) else None

    def status(self, running: list[TrackedTask]) -> str:
        """`draining: 2 running, expected finish 8s`, for `systemctl status`."""
        expected_s = self.all_left_s(running)
        known = "" if expected_s is None else f", expected finish {expected_s:.0f}s"
        return f"draining: {len(running)} running{known}"

    def listed(self, running: list[TrackedTask]) -> str:
        """`migrate vm:vm-1 12.3s (expected finish 8.1s), copy 3.0s and 7 more`, oldest first."""
        oldest = sorted(running, key=lambda task: task.started_at or 0.0)[:LISTED_TASKS]
        more = len(running) - len(oldest)
        return ", ".join(map(self._line, oldest)) + (f" and {more} more" if more else "")

    def _line(self, task: TrackedTask) -> str:
        words = [task.method, *([":".join(task.resource)] if task.resource else [])]
        words.append(f"{self.age_s(task.started_at)}s")
        left_s = self.left_s(task)
        return " ".join(words) + ("" if left_s is None else f" (expected finish {left_s}s)")


class DrainProgress:
    """Shows how far one drain is.

    Args:
        report: Of the drain; it grows meanwhile.
        every_s: Seconds between two lines.
    """

    def __init__(
        self,
        report: DrainReport,
        steps: BoundedSteps,
        forecast: Forecast,
        tracker: Tracker,
        phase: Phase,
        telemetry: Telemetry,
        clock: Clock,
        *,
        every_s: float,
    ) -> None:
        self._report = report
        self._steps = steps
        self._forecast = forecast
        self._tracker = tracker
        self._phase = phase
        self._telemetry = telemetry
        self._clock = clock
        self._every_s = every_s

    async def show(self) -> None:
        """Show it until cancelled, and ask systemd for more time while that is of use."""
        while True:
            await asyncio.sleep(self._every_s)
            running = [task for task in self._tracker if task.running]
            deadline = self._phase.deadline or 0.0
            self._telemetry.emit(
                "drain.progress",
                step=self._steps.under_way,
                in_flight=len(self._tracker),
                running=len(running),
                open_holds=self._report.open_holds,
                holds=self._report.named_holds,
                tasks=self._forecast.listed(running),
                left_s=round(max(0.0, deadline - self._clock.loop()), 1),
                expected_s=self._forecast.all_left_s(running),
            )
            sdnotify.status(self._forecast.status(running), extend_s=3 * self._every_s)
