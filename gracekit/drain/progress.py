"""Shows the progress of a drain: a log line every few seconds, and messages to systemd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from gracekit.clock import Clock
from gracekit.drain.bounded import BoundedSteps, Drained
from gracekit.drain.report import DrainReport, StopRequest, list_first
from gracekit.drain.times import Times
from gracekit.errors import StoreError
from gracekit.journal.holds import Hold
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane, TrackedTask
from gracekit.tracker.tracker import Tracker

LISTED_TASKS: Final = 5
MOST_AWAITED: Final = 1000
"""The start of a drain logs a line for each running task, but only for so many, the oldest."""
LOOK_S: Final = 1.0
"""Seconds between two checks for progress; shorter than any timeout of a platform."""
HOLDS_TIMEOUT_S: Final = 1.0
EXTENSION_TICKS: Final = 3
"""systemd is asked for the time of so many progress lines at once; new progress asks again."""


class Forecast:
    """Computes how long tasks have run, and how long they are expected to go on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def age_s(self, since: float | None) -> float:
        """Seconds since that loop time; 0 if there was none."""
        return 0.0 if since is None else round(self._clock.loop() - since, 1)

    def since_s(self, moment: float | None) -> float | None:
        """Seconds since that loop time; None if there was none."""
        return None if moment is None else self.age_s(moment)

    def left_s(self, task: TrackedTask) -> float | None:
        """Seconds until *task* is expected to end; None without an estimate."""
        now = self._clock.loop()
        end = task.expected_end(now)
        return None if end is None else round(end - now, 1)

    def all_left_s(self, running: list[TrackedTask]) -> float | None:
        """Seconds until all of *running* are expected to end; None if one has no estimate."""
        left = [self.left_s(task) for task in running]
        known = [seconds for seconds in left if seconds is not None]
        return max(known, default=None) if len(known) == len(left) else None

    def status(self, running: list[TrackedTask], holds: int) -> str:
        """`draining: 2 running, 1 hold, expected finish 8s`, for `systemctl status`."""
        expected_s = self.all_left_s(running)
        known = "" if expected_s is None else f", expected finish {expected_s:.0f}s"
        held = f", {holds} hold{'s' if holds > 1 else ''}" if holds else ""
        return f"draining: {len(running)} running{held}{known}"

    def listed(self, running: list[TrackedTask]) -> str:
        """`migrate vm:vm-1 12.3s (expected finish 8.1s), copy 3.0s and 7 more`, oldest first."""
        oldest = sorted(running, key=lambda task: task.started_at or 0.0)[:LISTED_TASKS]
        more = len(running) - len(oldest)
        return ", ".join(map(self._line, oldest)) + (f" and {more} more" if more else "")

    def _line(self, task: TrackedTask) -> str:
        words = [task.method, *([":".join(task.shown_resource)] if task.shown_resource else [])]
        words += [f"({task.about})"] if task.about else []
        words.append(f"{self.age_s(task.started_at)}s")
        left_s = self.left_s(task)
        return " ".join(words) + ("" if left_s is None else f" (expected finish {left_s}s)")


class Movement:
    """Tells whether a drain has made progress since the last check.

    Progress is: a task (also an ops request) was removed from the tracker, a task has reached a
    safe point, a hold has ended, or, once no task runs any more, a step of the drain was taken.
    """

    def __init__(self, report: DrainReport, tracker: Tracker, steps: BoundedSteps) -> None:
        self._report = report
        self._tracker = tracker
        self._steps = steps
        self._seen = self._marks()

    def has_come_further(self) -> bool:
        """Whether there was progress since the last call."""
        before, self._seen = self._seen, self._marks()
        return any(now > seen for now, seen in zip(self._seen, before, strict=True))

    def _marks(self) -> tuple[float, ...]:
        """Numbers of which one grows with each progress."""
        reached = max((task.safe_point_at or 0.0 for task in self._tracker), default=0.0)
        # While tasks run, steps do not count: those before the wait are no progress of the tasks.
        steps = 0 if self._tracker.running + self._tracker.running_ops else self._steps.taken
        return self._tracker.removed, steps, reached, -self._report.open_holds


class DrainProgress:
    """Shows how far one drain is, and asks systemd for more time as long as there is progress.

    Args:
        report: Report of the drain, which is filled in meanwhile.
        times: Times of the drain; no time is asked for beyond its hard limit.
        every_s: Seconds between two lines.
    """

    def __init__(
        self,
        report: DrainReport,
        steps: BoundedSteps,
        times: Times,
        parts: Drained,
        telemetry: Telemetry,
        clock: Clock,
        *,
        every_s: float,
    ) -> None:
        self._report = report
        self._steps = steps
        self._forecast = Forecast(clock)
        self._times = times
        self._tracker = parts.tracker
        self._holds = parts.holds
        self._notify = parts.process.notify
        self._telemetry = telemetry
        self._clock = clock
        self._every_s = every_s
        self._movement = Movement(report, parts.tracker, steps)
        self._moved_at = times.now
        self._blocks: list[TrackedTask] = []  # awaited ones whose end has no other line
        self._open_holds: dict[int, Hold] = {}

    def tell_started(self, request: StopRequest) -> None:
        """Log that the drain begins, and each task that it waits for; `show` logs the holds."""
        running = self._running()
        self._telemetry.emit(
            "drain.started",
            source=request.source,
            by=request.by,
            in_flight=len(self._tracker),
            running=len(running),
            timeout_s=self._times.deadline - request.at,
        )
        self._blocks = [task for task in running if task.lane is Lane.BACKGROUND]
        for task in running[:MOST_AWAITED]:
            task.is_awaited = True
            self._telemetry.emit(
                "task.awaited",
                **task.event_fields,
                running_s=self._forecast.age_s(task.started_at),
                safe_point_s=self._forecast.since_s(task.safe_point_at),
                expected_s=self._forecast.left_s(task),
            )

    def note_holds(self, holds: Sequence[Hold]) -> None:
        """Take in which holds are open; log those that are new, and those that have ended."""
        before, wall = self._open_holds, self._clock.wall()
        self._open_holds = {hold.id: hold for hold in holds}
        for hold in self._open_holds.values():
            if hold.id not in before:
                lapses_s = round(hold.lapses_at - wall, 1)
                self._telemetry.emit("hold.awaited", **hold.event_fields, lapses_s=lapses_s)
        for hold in before.values():
            if hold.id not in self._open_holds:
                reason = "lapsed" if hold.lapses_at <= wall else "ended"
                self._telemetry.emit("hold.ended", **hold.event_fields, reason=reason)

    def tell_ended(self) -> None:
        """Log which of the awaited blocks of work have ended since the last call."""
        tracked = set(self._tracker)
        for block in self._blocks:
            if block not in tracked:
                self._telemetry.emit(
                    "work.ended",
                    **block.event_fields,
                    outcome="cut" if block.cut else "ended",
                    ran_s=self._forecast.age_s(block.started_at),
                )
        self._blocks = [block for block in self._blocks if block in tracked]

    def tell_platform(self, *, stopping: bool) -> None:
        """Send systemd the state, and STOPPING=1 if *stopping*; `show` asks for time later."""
        if stopping:
            self._notify.stopping(self.status(), extend_s=self.extension_s())
        else:
            self._notify.status(self.status())

    def tell_finished(self) -> None:
        """Log the numbers of the report, at the end of the drain."""
        self.tell_ended()
        report = self._report
        self._telemetry.emit(
            "drain.finished",
            waited_s=round(report.waited_s, 3),
            finished=report.finished,
            handed_over=len(report.handed_over) + len(report.unclean),
            not_started=len(report.not_started),
            given_back=report.given_back,
            open_holds=report.open_holds,
            holds=report.named_holds,
            unfinished=report.unfinished,
            exit_code=int(report.exit_code),
        )

    def extension_s(self) -> float | None:
        """Seconds to ask systemd for; None if there is neither progress nor an expected end.

        So if nothing moves, systemd ends the drain after its own timeout. A drain whose tasks go
        on ending, or are expected to end before the deadline, gets the time that it needs.
        """
        now = self._times.now
        moved = self._movement.has_come_further()
        if moved:
            self._moved_at = now
        ends = (task.expected_end(now) for task in self._tracker)
        hopeful = any(end is not None and end <= self._times.deadline for end in ends)
        if not (moved or hopeful):
            return None
        return max(0.0, min(EXTENSION_TICKS * self._every_s, self._times.hard_limit - now))

    async def show(self) -> None:
        """Show the progress until cancelled."""
        await self._look_at_holds()
        look_s = min(LOOK_S, self._every_s)
        next_line_at = self._times.now + self._every_s
        while True:
            await asyncio.sleep(look_s)
            self.tell_ended()
            extension_s = self.extension_s()
            if extension_s is not None:
                self._notify.extend(extension_s, self.status())
            if self._times.now >= next_line_at:
                next_line_at += self._every_s
                await self._look_at_holds()
                self._emit()
                if extension_s is None:
                    self._notify.status(self.status())

    def status(self) -> str:
        """`draining: 2 running, expected finish 8s`, or `…, no progress for 12s`."""
        text = self._forecast.status(self._running(), len(self._open_holds))
        idle_s = self._times.now - self._moved_at
        return text if idle_s < self._every_s else f"{text}, no progress for {idle_s:.0f}s"

    async def _look_at_holds(self) -> None:
        """Read which holds are open; if the store does not answer, keep what was read before."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(HOLDS_TIMEOUT_S):
                self.note_holds(await self._holds.mine())

    def _running(self) -> list[TrackedTask]:
        return [task for task in self._tracker if task.running]

    def _emit(self) -> None:
        running, holds = self._running(), [hold.title for hold in self._open_holds.values()]
        self._telemetry.emit(
            "drain.progress",
            step=self._steps.under_way,
            in_flight=len(self._tracker),
            running=len(running),
            open_holds=len(holds),
            holds=list_first(holds, len(holds)),
            tasks=self._forecast.listed(running),
            left_s=round(max(0.0, self._times.deadline - self._times.now), 1),
            expected_s=self._forecast.all_left_s(running),
        )
