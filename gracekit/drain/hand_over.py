"""Steps 5 and 6 of a drain: tasks that still run at the deadline are handed over to recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gracekit.config.settings import Settings
from gracekit.drain.bounded import BoundedSteps, Drained
from gracekit.drain.report import DrainReport, list_first
from gracekit.drain.times import SHORTEST_STEP_S, Times
from gracekit.journal.rows import TaskRow
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import CancelCause, Lane, TaskState, TrackedTask

FREE_TRIES: Final = 3


class HandOver:
    """Hands over the tasks for which one drain could not wait.

    Args:
        report: Report of the drain; gets the request ids.
    """

    def __init__(
        self,
        report: DrainReport,
        parts: Drained,
        steps: BoundedSteps,
        times: Times,
        settings: Settings,
        telemetry: Telemetry,
    ) -> None:
        self._report = report
        self._parts = parts
        self._steps = steps
        self._times = times
        self._settings = settings
        self._telemetry = telemetry

    async def hand_over(self) -> None:
        """Step 5: cancel running handlers, wait the grace period, record the rest as unclean."""
        tracker = self._parts.tracker
        self._parts.dispatcher.seal()
        self._tell_out_of_time()
        cause = CancelCause.FORCED if self._report.forced else CancelCause.DRAIN_DEADLINE
        for task in tracker:
            if task.running and task.parent is None:  # a parent passes it on
                task.cancel(cause)
        grace = self._times.now + self._settings.handover_grace_s
        while tracker.running + tracker.running_ops and await tracker.wait_change(deadline=grace):
            pass
        stuck = [task for task in tracker if task.running and task.parent is None]
        if stuck:
            await self._hand_over_stuck(stuck)

    def _tell_out_of_time(self) -> None:
        """Log, if something still runs or is held, that it is cut, and what has not begun."""
        tracker, report = self._parts.tracker, self._report
        running = tracker.running + tracker.running_ops
        if running or report.open_holds:
            self._telemetry.emit(
                "drain.out_of_time",
                running=running,
                open_holds=report.open_holds,
                holds=report.named_holds,
                not_begun=list_first(report.not_started, len(report.not_started)),
                forced=report.forced,
            )

    async def _hand_over_stuck(self, stuck: list[TrackedTask]) -> None:
        ids = [task.request_id for task in stuck]
        self._report.unclean = list(dict.fromkeys([*self._report.unclean, *ids]))
        # Uses time of the flush, as stuck tasks have no outcomes and replies; but leaves enough
        # for the release of rows, which follows.
        end = min(self._times.now + 1.0, self._times.flush_by - SHORTEST_STEP_S)
        handing = self._parts.dispatcher.hand_over_stuck(stuck)
        await self._steps.bounded("hand-over of stuck tasks", handing, self._times.until(end))
        now = self._times.now
        for task in stuck:
            if task.lane not in (Lane.REQUESTS, Lane.OPS):  # they have a line of their own
                running_s = round(now - (task.started_at or now), 1)
                self._telemetry.emit("task.stuck", **task.event_fields, running_s=running_s)

    async def flush(self) -> None:
        """Step 6: wait until outcomes are committed and replies are sent."""
        times = self._times
        end = min(times.now + self._settings.handover_flush_s, times.flush_by)
        deadline = times.now + times.until(end)
        await self._parts.dispatcher.wait_flushed(deadline=deadline)
        await self._free_forgotten(deadline)
        self._report.leases_kept = self._parts.dispatcher.leases.kept
        self._report.left_behind = self._parts.dispatcher.left_behind()

    async def _free_forgotten(self, deadline: float) -> None:
        """Release rows that this run owns without a task, as a failed commit may have left them.

        Has only the time of the flush, so that a slow store does not delay the steps after it.
        """
        acted = {*self._report.unclean, *self._parts.dispatcher.unfinished.handed_over}
        for _ in range(FREE_TRIES):
            freeing = self._parts.reconciler.adoption.free_forgotten(acted)
            rows = await self._steps.bounded(
                "freeing of rows", freeing, self._times.until(deadline)
            )
            if rows is not None:
                self._add_forgotten(rows)
            if rows is not None or self._times.now >= deadline:
                return

    def _add_forgotten(self, rows: Sequence[TaskRow]) -> None:
        lists = {
            TaskState.RUNNING: self._parts.dispatcher.unfinished.handed_over,
            TaskState.ACCEPTED: self._report.not_started,
        }
        for row in rows:  # HANDED_OVER rows were only claimed for recovery, and are not listed
            known = lists.get(row.state)
            if known is not None and row.request_id not in known:
                known.append(row.request_id)
                self._telemetry.emit("task.not_started", **row.event_fields)
