"""The events of a task's life: its start, its end, and what cuts it short."""

from __future__ import annotations

import logging
from typing import Any

from gracekit.clock import Clock
from gracekit.journal.rows import Outcome
from gracekit.phase import Phase
from gracekit.request.lanes import Job
from gracekit.request.outcomes import failure_from
from gracekit.rpc.failures import words_of
from gracekit.rpc.message import Failure
from gracekit.telemetry.safe_text import masked
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import OUT_OF_TIME, Interruption, TaskState, TrackedTask


class TaskEvents:
    """Emits the events of tasks in flight.

    Texts of the application are masked, so that no log shows what a request has sent.
    """

    def __init__(self, telemetry: Telemetry, phase: Phase, clock: Clock) -> None:
        self._telemetry = telemetry
        self._phase = phase
        self._clock = clock

    def not_started(self, job: Job) -> None:
        """Emit that a task was accepted, but does not start in this process."""
        self._emit("task.not_started", job)

    def started(self, job: Job) -> None:
        """Emit that a handler is about to be called; for a suspect, also that it may run alone."""
        if (suspicion := job.suspicion) is not None:
            crashes, for_s = suspicion.crashes, suspicion.apart_s
            self._emit("task.apart", job, alone=job.alone, crashes=crashes, for_s=for_s)
        if self._telemetry.hears("task.started", level := self._level_of(job.task)):
            self._emit("task.started", job, level=level)
        job.unended = True

    def interrupted(self, job: Job, error: str) -> None:
        """Emit that something other than gracekit cancelled a handler, or kept it from starting."""
        self._emit("task.interrupted", job, error=_masked(job, error))

    def result_left_out(self, job: Job, why: str) -> None:
        """Emit that a task has succeeded with a result that cannot be sent."""
        self._emit("task.result_left_out", job, error=_masked(job, why))

    def errored(self, job: Job, reason: str) -> None:
        """Emit that a task was given up before it began."""
        self._emit("task.errored", job, reason=reason)

    def ended(self, job: Job, outcome: Outcome, *, ran_s: float, expected: bool) -> None:
        """Emit that an attempt has ended and was not cut; nothing if a cut was logged before.

        Args:
            job: The job of the task.
            outcome: Of the attempt.
            ran_s: Duration of the attempt in seconds.
            expected: Whether `expect()` was called for what the handler raised.
        """
        if not job.unended:
            return
        job.unended = False
        if outcome.state is TaskState.PENDING:
            self._parked(job, outcome, ran_s=ran_s)
            return
        if outcome.state is TaskState.ACCEPTED and outcome.failure is not None:
            error, again_s = _words_of_failure(job, failure_from(outcome.failure)), outcome.again_s
            self._emit("task.retried", job, error=error, again_s=round(again_s, 1), ran_s=ran_s)
            return
        if self._telemetry.hears("task.finished", level := self._level_of(job.task)):
            self._emit("task.finished", job, level=level, outcome=outcome.state.word, ran_s=ran_s)
        if outcome.state is TaskState.FAILED and outcome.failure is not None:
            failure = failure_from(outcome.failure)
            with_trace = self._telemetry.log_failures == "traceback"
            self._emit(
                "task.failed",
                job,
                level=logging.DEBUG if expected else None,
                trace=_masked(job, "".join(failure.tb)) if with_trace else "",
                is_awaited=level is not None,
                error=_words_of_failure(job, failure),
                ran_s=ran_s,
            )

    def _parked(self, job: Job, outcome: Outcome, *, ran_s: float) -> None:
        """Emit that a task was parked, because its handler found no capacity."""
        parking = outcome.parking
        assert parking is not None
        self._emit(
            "task.parked",
            job,
            parkings=parking.version,
            waits_s=round(max(0.0, parking.deadline - self._clock.wall()), 1),
            reason=_masked(job, outcome.detail or ""),
            ran_s=ran_s,
        )

    def cut(self, job: Job, cut: Interruption) -> None:
        """Emit that an attempt was cut: its task goes on from its row, or from its queue."""
        if not job.unended:
            return
        job.unended = False
        task, now = job.task, self._clock.loop()
        was_cut = cut is not Interruption.SAFE_POINT or task.cancel_cause in OUT_OF_TIME
        is_late = self._phase.draining and was_cut
        cursor = None
        if task.journaled and task.safe_point_at is not None:
            cursor = _masked(job, words_of(task.cursor))
        self._emit(
            "task.handed_over" if task.journaled else "task.given_back",
            job,
            level=logging.WARNING if is_late else None,
            cut=cut.value,
            running_s=_since(task.started_at, now),
            safe_point_s=_since(task.safe_point_at, now),
            cursor=cursor,
        )

    def _emit(self, event: str, job: Job, **fields: Any) -> None:
        self._telemetry.emit(event, **job.task.event_fields, **fields)

    def _level_of(self, task: TrackedTask) -> int | None:
        """Level for starts and ends: INFO for those that a drain waits for, as operators do."""
        is_awaited = self._phase.draining and (task.holds_drain or task.is_awaited)
        return logging.INFO if is_awaited else None


def _since(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(now - moment, 1)


def _words_of_failure(job: Job, failure: Failure) -> str:
    """Class and message of a failure, with what the request sent masked."""
    return f"{failure.exc_class}: {_masked(job, failure.message)}".removesuffix(": ")


def _masked(job: Job, text: str) -> str:
    """A text of the application about a request, as a log may show it."""
    task = job.task
    return masked(text, job.caller, job.args, resource=task.shown_resource, who=str(task))
