"""When resources are settled: after each start, now and then, when asked; by one run of a host."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gracekit import backoff
from gracekit.errors import GracekitError, StoreError
from gracekit.journal.findings import FindingRows, PassRecord
from gracekit.leases.leases import Guard
from gracekit.phase import ServiceState
from gracekit.recovery.hook_calls import HookCalls
from gracekit.recovery.resources.acting import Acting
from gracekit.recovery.resources.asking_again import AskingAgain
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.passes import ResourcePass
from gracekit.recovery.resources.queue_wait import LONGEST_S, QueueWait
from gracekit.recovery.resources.reading import Reader
from gracekit.recovery.resources.results import PassReport, ResourceOutcome
from gracekit.recovery.shared import Shared
from gracekit.rpc.server import RpcServer
from gracekit.tracker.task import Lane

LEASE_KIND: Final = "gracekit reconciliation"
"""No application's kind has a name like that."""


class Resources:
    """Settles the resources of one run's host."""

    def __init__(
        self,
        shared: Shared,
        calls: HookCalls,
        kinds: KindTable,
        findings: FindingRows,
        servers: Mapping[Lane, RpcServer],
    ) -> None:
        self._shared = shared
        self._leases = shared.leases
        self._trigger = shared.trigger
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._phase = shared.services.phase
        self._run_id = shared.journal.run_id
        self._kinds = kinds
        self._findings = findings
        self._reader = Reader(shared, calls)
        self._acting = Acting(shared, calls, findings, self.may_begin)
        self._queues = QueueWait(
            servers.values(),
            self._clock,
            self._note_wait,
            self._siblings_s,
            is_local=shared.is_local,
        )
        self._again = AskingAgain(
            shared, kinds, findings, self._reader, self._acting, self.may_begin
        )
        self._one_pass = asyncio.Lock()
        self._running: ResourcePass | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._lease = (LEASE_KIND, f"{shared.journal.service}@{shared.settings.host}")
        self._ready_at: float | None = None  # wall time of the first look in service
        self._known: PassRecord | None = None  # the last pass since then, if there was one
        self._next_at = 0.0  # loop time
        self._pauses = backoff.BROKEN_PASS.pauses(self._clock)
        self._reported_wait = False
        self._may_ask_again = False  # what stood in the queues at this run's start has been taken
        self._report = PassReport(keeps=False)  # of the pass under way, or the last one
        self._is_looking = False

    def may_begin(self) -> bool:
        """Whether the service takes requests, and no drain has begun."""
        return self._phase.state is ServiceState.SERVING and not self._trigger.is_paused

    def pause(self) -> None:
        """Begin nothing more; a rule under way is waited for."""
        for task in self._waiting:
            task.cancel()
        if self._running is not None:
            self._running.interrupt()

    def due_in_s(self) -> float | None:
        """Seconds until `look` has something to do; None if it has nothing."""
        if not self._kinds or not self.may_begin() or self._is_looking:
            return None
        self._note_ready()
        due_at = min(self._next_at, self._again.due_at) if self._asks_again() else self._next_at
        return max(0.0, due_at - self._clock.loop())

    # -- looks --------------------------------------------------------------------------

    async def look(self) -> None:
        """Do what is due: a whole pass, or a question that is to be asked again."""
        if self.due_in_s() != 0:
            return
        self._is_looking = True
        try:
            await self._do_due()
        finally:
            self._is_looking = False
            self._trigger.go_on()  # to learn when something is due again

    async def _do_due(self) -> None:
        if self._clock.loop() >= self._next_at:
            await self._look_at_pass()
        if self._asks_again() and self._clock.loop() >= self._again.due_at:
            async with self._one_pass:
                await self._again.ask_due()

    def _asks_again(self) -> bool:
        return self._may_ask_again and self._settings.startup_reconciliation_enabled

    def _note_ready(self) -> None:
        """At the first look while the service takes requests."""
        if self._ready_at is None:
            self._ready_at = self._clock.wall()
            wait_s = self._settings.startup_reconciliation_wait_seconds
            self._next_at = self._clock.loop() + wait_s

    async def _look_at_pass(self) -> None:
        """Make the pass that is due, unless another run of the host has made it."""
        assert self._ready_at is not None
        every_s, wait_s = self._settings.reconciliation_interval_s, backoff.RESOURCES_S
        self._next_at = self._clock.loop() + wait_s
        last = await self._findings.last_pass()
        if last is not None and last != self._known and last.began_at >= self._ready_at:
            self._known = last  # once: its wall time says nothing if the clock is set
            due_at = last.finished_at + every_s if every_s else float("inf")
            left_s = due_at - self._clock.wall()
            self._may_ask_again = True
            if left_s > 0:
                self._next_at = self._clock.loop() + min(left_s, every_s or left_s)
                return
        request = PassRequest()
        if self._known is None:
            request = PassRequest(at_least_s=self._settings.startup_reconciliation_wait_seconds)
        if not self._settings.startup_reconciliation_enabled:
            request = replace(request, dry_run=True)  # listings say how many wait
        report = PassReport(keeps=False)
        if not await self._make(request, report) or report.interrupted:
            return
        if report.broken:
            # As soon as the application's database is back, and at the interval's pace at last.
            pause_s = next(self._pauses)
            self._next_at = self._clock.loop() + min(pause_s, every_s or pause_s)
        else:
            self._pauses = backoff.BROKEN_PASS.pauses(self._clock)
            self._next_at = self._clock.loop() + (every_s or float("inf"))

    async def make_by_hand(self, request: PassRequest, report: PassReport) -> None:
        """Make a pass that an operator asks for; waits for one that is under way.

        Raises:
            GracekitError: it cannot be made now; the message says why.
        """
        if not self.may_begin():
            raise GracekitError(
                f"the service is {self._phase.state.value}, and settles nothing before it takes "
                "requests again"
            )
        if request.dry_run:
            await self._new_pass(request, report).run()
        elif not await self._make(request, report):
            row = await self._leases.look(self._lease)
            raise GracekitError(
                f"run {row.owner if row else 'unknown'} of this host settles its resources now: "
                "ask again when it has finished"
            )

    def _new_pass(self, request: PassRequest, report: PassReport) -> ResourcePass:
        return ResourcePass(
            self._kinds,
            self._reader,
            self._acting,
            self._findings,
            request,
            report,
            self._telemetry,
            self._clock,
            at_once=self._settings.reconcile_at_once,
            may_begin=self.may_begin,
        )

    # -- a pass -------------------------------------------------------------------------

    async def _make(self, request: PassRequest, report: PassReport) -> bool:
        """Make a pass; false if another run of the host makes one."""
        async with self._one_pass:
            guard = await self._leases.take(self._lease, "reconciliation")
            if guard is None:
                await self._ask_after_holder()
                return False
            try:
                await self._make_alone(request, report)
            finally:
                await self._give_back(guard)
            return True

    async def _ask_after_holder(self) -> None:
        holder = (await self._leases.rivals(self._lease)).holder
        if holder is not None:
            self._trigger.look_after(holder)

    async def _give_back(self, guard: Guard) -> None:
        try:
            await self._leases.release(guard, reason="clean")
        except StoreError:
            self._leases.owe(guard, "reconciliation")

    async def _make_alone(self, request: PassRequest, report: PassReport) -> None:
        # Its moment: what is younger waits for the next one.
        one = self._new_pass(request, report)
        self._report = report
        began = self._clock.loop()
        self._telemetry.emit("reconciliation.started", by_hand=request.by_hand)
        telling = asyncio.create_task(self._tell_progress(report))
        try:
            if await self._wait_for_queues():
                self._may_ask_again = True
                self._running = one
                await one.run()
            else:
                report.interrupted = True
        finally:
            telling.cancel()
            self._running = None
        is_done = not report.interrupted and not report.broken
        if is_done and (request.is_whole or not request.by_hand):
            settles = self._settings.startup_reconciliation_enabled
            record = one.record(self._run_id, settles=settles)
            await self._findings.note_pass(record)
            self._known = self._known if request.by_hand else record
        numbers = report.numbers
        self._telemetry.emit(
            "reconciliation.finished",
            settled=numbers[ResourceOutcome.SETTLED],
            failed=numbers[ResourceOutcome.FAILED],
            waiting=numbers[ResourceOutcome.WAITING],
            left=numbers[ResourceOutcome.LEFT],
            broken=sorted(report.broken),
            interrupted=report.interrupted,
            took_s=round(self._clock.loop() - began, 3),
        )
        await self._again.note_next()

    async def _wait_for_queues(self) -> bool:
        """Wait for the requests that stand in the queues; false if a drain has ended the wait."""
        self._reported_wait = False
        task = asyncio.create_task(self._queues.wait_read())
        self._waiting.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._waiting.discard(task)
            self._report.waits_for = 0
        if task.cancelled():
            return False
        task.result()
        return self.may_begin()

    async def _siblings_s(self) -> float:
        """How long a sibling may keep a delivery for which it has no place.

        A local queue holds it until it is accepted; a broker says only what it has not sent.
        """
        if self._shared.is_local or not await self._shared.members.siblings():
            return 0.0
        return self._settings.accept_wait_s

    def _note_wait(self, requests: int, waited_s: float) -> None:
        self._report.waits_for = requests
        if waited_s >= LONGEST_S and not self._reported_wait:
            self._reported_wait = True
            self._telemetry.emit(
                "reconciliation.waits", requests=requests, waited_s=round(waited_s, 1)
            )

    async def _tell_progress(self, report: PassReport) -> None:
        while True:
            await asyncio.sleep(self._settings.progress_every_s)
            numbers = report.numbers
            self._telemetry.emit(
                "reconciliation.progress",
                settled=numbers[ResourceOutcome.SETTLED],
                failed=numbers[ResourceOutcome.FAILED],
                waiting=numbers[ResourceOutcome.WAITING],
                left=numbers[ResourceOutcome.LEFT],
                waits_for=report.waits_for,
            )
