"""Waits for a lease that another process holds: oldest first, over all processes of the store.

A request whose lease is held elsewhere says so in its row, again each time it
asks. As long as it has asked within `PATIENCE_S`, the lease is granted to no
younger request of another process (`leases.leases`). Only the head of a
resource's line asks, so a process asks once a beat, however many wait in it.

Nobody is told of a release in another process. So who finds the lease free and
somebody older next in line nudges that one, and so does a request that has
waited itself, at its end. A lease of a dead run is freed by recovery, which is
asked to look.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import LeaseHeld, StoreError
from gracekit.leases.leases import Leases
from gracekit.request.context import lease_in
from gracekit.request.custody import Custody
from gracekit.request.lanes import Job, Scheduler
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.store.wakeup import Wakeups
from gracekit.tracker.task import Awaited

LEASE_BEAT_S: Final = 1.0
"""A lease held by another process is asked for again this often; a nudge is heard at once."""


class LeaseWaits:
    """The waits of one run for leases that other runs hold.

    Args:
        wakeups: Wake the run that is next.
        trigger: Recovery is asked whether the run that holds a lease has died.
        settles: Whether unfinished tasks are settled unasked; a wait for them would have no end.
    """

    def __init__(
        self,
        custody: Custody,
        leases: Leases,
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
                    "nothing settles that unasked: "
                    "startup_reconciliation_enabled is false here; run `gracekit reconcile`, then "
                    "send the request again"
                )
        return await self._is_for_itself(job)

    async def _is_for_itself(self, job: Job) -> LeaseHeld | None:
        """Why it may not wait: it was called by the very task that holds its resource.

        Each would wait for the other's end. None if that is not so.
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
            # Not which task: a token is a small number, and may be a guess.
            f"{job.task} wants {':'.join(resource)}, which its own caller holds and would wait "
            f"with for ever: make {job.method.name} an ops method, call it as a plain function, "
            "or cast it"
        )

    async def wait(self, job: Job) -> None:
        """The lease is elsewhere: stand in line until it is worth a turn to ask for it again.

        No slot is taken meanwhile. Ends too when recovery needs our place in the resource's line,
        the caller has left, the gate has closed, or the task is cancelled.
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
        """Seconds until it looks again; not positive where it waits no more."""
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
            return False  # whoever cancelled has closed the gate, or has said why
        finally:
            self._waiting -= 1
            job.waiting = False
            job.task.waits_for = None
        return True

    def wake(self) -> None:
        """A lease may be free: a release here, or a nudge."""
        if self._waiting:
            self._woken.set()
            self._woken = asyncio.Event()

    async def pass_on(self, job: Job) -> None:
        """A request that has waited has given its lease back: others may wait for it still."""
        await self._see_rivals(job)

    async def _see_rivals(self, job: Job) -> bool:
        """Whether the lease may be ours; else wake who is next, or see whether its holder died."""
        assert job.task.resource is not None
        try:
            rivals = await self._leases.rivals(job.task.resource)
        except StoreError:
            return True  # a commit tells what has become of the store
        if rivals.holder is not None and rivals.holder != self._run_id:
            self._trigger.look_after(rivals.holder)
        if rivals.is_free and rivals.following is not None and rivals.following != self._run_id:
            self._wakeups.nudge(rivals.following)
            return False
        return rivals.is_free
