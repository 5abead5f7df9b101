"""Periodic jobs: each process runs its own. A drain waits for them; they are not journaled.

A job never overlaps itself: its pause begins when its last run ends. During a
drain no job starts, and a running one may finish. A singleton needs a lease: if
another process holds it, the run is skipped, and recovery checks whether that
process has died.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from gracekit import background
from gracekit.errors import StoreError
from gracekit.leases.leases import Guard
from gracekit.process import Threads
from gracekit.request.calls import call_hook
from gracekit.request.context import Services
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.suspects import Suspects
from gracekit.request.work_context import WorkContext
from gracekit.rpc.failures import words_of
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import CancelCause, Lane, TrackedTask


class PeriodicJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as declared.

    Attributes:
        every_s: Seconds between the end of one run and the start of the next.
        singleton: Run by at most one process of the store at a time.
    """

    name: str
    handler: Callable[..., Any]
    every_s: float
    singleton: bool


class JobOutcome(enum.Enum):
    """How one run of a periodic job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # it raised, or its lease could not be taken
    CUT = "cut"  # a drain cancelled it at the deadline: no failure


class PeriodicJobs:
    """The jobs of one process.

    Args:
        suspects: No job begins beside a suspect.
        trigger: Asks recovery to look for dead runs if the lease of a singleton is taken.

    Attributes:
        succeeded_at: Wall time of the last success of each job that has succeeded in this process.
    """

    def __init__(
        self,
        jobs: list[PeriodicJob],
        services: Services,
        telemetry: Telemetry,
        threads: Threads,
        suspects: Suspects,
        trigger: RecoveryTrigger,
    ) -> None:
        self._jobs = jobs
        self._services = services
        self._telemetry = telemetry
        self._threads = threads
        self._suspects = suspects
        self._trigger = trigger
        self._paused = False
        self.succeeded_at: dict[str, float] = {}

    def pause(self) -> None:
        """Start nothing more."""
        self._paused = True

    def resume(self) -> None:
        """Start jobs again."""
        self._paused = False

    async def run(self) -> None:
        """Run all jobs until cancelled."""
        await asyncio.gather(*map(self._keep_repeating, self._jobs))

    async def _keep_repeating(self, job: PeriodicJob) -> None:
        await background.keep_on(
            partial(self._repeat, job),
            f"job {job.name}",
            telemetry=self._telemetry,
            clock=self._services.clock,
        )

    async def _repeat(self, job: PeriodicJob) -> None:
        while True:
            await asyncio.sleep(job.every_s)
            if self._paused:
                continue
            # In a task of its own: a drain may cancel this run, and later runs must still come.
            await asyncio.wait({asyncio.create_task(self._run_told(job))})

    async def _run_told(self, job: PeriodicJob) -> None:
        try:
            await self._run(job)
        except asyncio.CancelledError:
            self._telemetry.emit("hook.failed", hook=job.name, error="cancelled")
        except Exception as error:  # noqa: BLE001 - the application's; later runs still come
            self._telemetry.emit("hook.failed", hook=job.name, error=words_of(error))

    async def _run(self, job: PeriodicJob) -> None:
        async with self._suspects.beginning(("job", 0), None):
            if not self._paused:
                await self._run_now(job)

    async def _run_now(self, job: PeriodicJob) -> None:
        services = self._services
        tracked = services.tracker.background(job.name, services.clock, lane=Lane.PERIODIC)
        try:
            with tracked as task:
                if not await self._run_alone(job, task):
                    return
        except (asyncio.CancelledError, Exception):
            if task.cut is None:
                self._tell_ended(task, JobOutcome.FAILED)
                raise
            self._tell_ended(task, JobOutcome.CUT)
        else:
            self.succeeded_at[job.name] = services.clock.wall()
            self._tell_ended(task, JobOutcome.SUCCEEDED)

    async def _run_alone(self, job: PeriodicJob, task: TrackedTask) -> bool:
        """Run *job*, a singleton with its lease; false if it was not called."""
        guard = None
        if job.singleton:
            guard = await self._services.leases.take(("periodic", job.name), job.name)
            if guard is None:
                self._trigger.poke()  # recovery frees a dead run's lease before the next try
                return False
        try:
            if self._paused:  # a drain has begun while the lease was taken
                return False
            task.token = guard.token if guard else None
            ctx = WorkContext(task, self._services, what=f"periodic job {job.name}()")
            await call_hook(job.handler, ctx, {}, self._threads)
            return True
        finally:
            if guard is not None:
                await self._release(guard, task)

    def _tell_ended(self, task: TrackedTask, outcome: JobOutcome) -> None:
        began_at = task.started_at or 0.0
        self._telemetry.emit(
            "job.finished",
            # During a drain an operator wants to see the end of each job that it waits for.
            level=logging.INFO if self._services.phase.draining else None,
            task_id=task.request_id,
            method=task.method,
            outcome=outcome.value,
            ran_s=round(self._services.clock.loop() - began_at, 3),
        )

    async def _release(self, guard: Guard, task: TrackedTask) -> None:
        if task.cancel_cause not in {None, CancelCause.FENCED}:
            self._services.leases.kept += 1  # cut: only the death of this process frees it
            return
        try:
            await self._services.leases.release(guard, reason="clean")
        except (StoreError, asyncio.CancelledError) as error:
            self._services.leases.owe(guard, guard.resource[1])
            if isinstance(error, asyncio.CancelledError):  # the run may go on, if it is FENCED
                raise
