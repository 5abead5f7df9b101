"""Waits for a lease that another process holds: oldest first, over all processes of the store.

A request whose lease is held elsewhere records each time it asks that it waits.
If it has asked within `PATIENCE_S`, the lease is granted to no younger request of
another process (`leases.leases`). Only the head of a resource's line asks, so a
process asks once in `LEASE_BEAT_S`, even if many of its requests wait.

A process does not see when another one releases a lease. So a request that finds
the lease free, but an older request next in line, nudges the run of that one. So
does a request that had to wait itself, at its end. If the holder may be dead,
recovery is asked to check, and then frees the lease.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import LeaseHeld, StoreError
from gracekit.leases.leases import RunLeases
from gracekit.request.custody import Custody
from gracekit.request.lanes import Job, Scheduler
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.rpc.message import lease_in
from gracekit.store.wakeup import Wakeups
from gracekit.tracker.task import Awaited

LEASE_BEAT_S: Final = 1.0
"""Seconds between two requests for a lease that another process holds; a nudge comes at once."""


class LeaseWaits:
    """The waits of one run for leases that other runs hold.

    Args:
        wakeups: Wake the run of the request that is next.
        trigger: Asks recovery to check whether the run that holds a lease has died.
        settles: Whether recovery settles unfinished tasks by itself. If not, a lease that such a
            task holds may never become free, so requests for it are refused.
    """

    def __init__(
        self,
        custody: Custody,
        leases: RunLeases,
        scheduler: Scheduler,
        clock: Clock,
        *,
        run_id: str,
        wakeups: Wakeups,
        trigger: RecoveryTrigger,
        settles: bool,
    ) -> None:
        self._custody = custody
        self._leases = leases
        self._scheduler = scheduler
        self._clock = clock
        self._run_id = run_id
        self._wakeups = wakeups
        self._trigger = trigger
        self._settles = settles
        self._woken = asyncio.Event()
        self._waiting = 0

    async def refusal(self, job: Job) -> LeaseHeld | None:
        """Why a request may not wait for its resource; None if it may."""
        if not self._settles and job.task.resource is not None:
            unsettled = await self._leases.unsettled(job.task.resource)
            if unsettled is not None:
                resource = ":".join(job.task.resource)
                return LeaseHeld(
                    f"{job.task} wants {resource}, on which task {unsettled} was interrupted, and "
                    "nothing settles that by itself, as "
                    "startup_reconciliation_enabled is false here: run `gracekit reconcile`, then "
                    "send the request again"
                )
        return await self._is_for_itself(job)

    async def _is_for_itself(self, job: Job) -> LeaseHeld | None:
        """Refuse a call from the task that holds the resource: each would wait for the other.

        None if it is no such call.
        """
        lease, resource = lease_in(job.caller), job.task.resource
        if lease is None or resource is None or job.reply is None:
            return None
        if resource != (lease["kind"], lease["id"]):
            return None
        row = await self._leases.look(resource)
        if row is None or row.owner is None or row.token != lease["token"]:
            return None
        return LeaseHeld(
            # Does not name that task: a token is a small number, which a client may have guessed.
            f"{job.task} wants {':'.join(resource)}, which its own caller holds, so that both "
            f"would wait for ever: make {job.method.name} an ops method, call it as a plain "
            "function, or cast it"
        )

    async def wait(self, job: Job) -> None:
        """Wait, without a slot, until the lease may be free for this request.

        Returns also when recovery needs the place in the resource's line, the caller has left, the
        gate has closed, or the task is cancelled.
        """
        job.refused = True
        job.begin_claimed()
        await self._custody.stand_in_line(job.task)
        await self._see_rivals(job)
        while (wait_s := self._wait_s(job)) > 0 and await self._sleep(job, wait_s):
            if self._scheduler.keeps_out_recovery(job) or await self._see_rivals(job):
                return
            await self._custody.stand_in_line(job.task)

    def _wait_s(self, job: Job) -> float:
        """Seconds until it looks again; 0 or less if it must not wait any more."""
        if not job.gate.is_open or job.task.cancel_cause is not None:
            return 0.0
        if job.expires_at is None:
            return LEASE_BEAT_S
        return min(LEASE_BEAT_S, job.expires_at - self._clock.loop())

    async def _sleep(self, job: Job, seconds: float) -> bool:
        """Wait for a beat or a nudge; false if it was cancelled."""
        job.waiting = True
        job.task.waits_for = Awaited.LEASE
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            return False  # gate and task say why: one is closed, or the other is cancelled
        finally:
            self._waiting -= 1
            job.waiting = False
            job.task.waits_for = None
        return True

    def wake(self) -> None:
        """Let all waits look again, after a release in this process or a nudge."""
        if self._waiting:
            self._woken.set()
            self._woken = asyncio.Event()

    async def pass_on(self, job: Job) -> None:
        """After a request that had to wait has released its lease, nudge the next one."""
        await self._see_rivals(job)

    async def _see_rivals(self, job: Job) -> bool:
        """Whether the job may get its lease; if not, nudge the next run or check on the holder."""
        assert job.task.resource is not None
        try:
            rivals = await self._leases.rivals(job.task.resource)
        except StoreError:
            return True  # the commit that follows meets the same error, and treats it
        if rivals.holder is not None and rivals.holder != self._run_id:
            self._trigger.look_after(rivals.holder)
        if rivals.is_free and rivals.following is not None and rivals.following != self._run_id:
            self._wakeups.nudge(rivals.following)
            return False
        return rivals.is_free
