"""Schedules passes over resources: after a start, at an interval, on request; one run a host.

A pass waits until all requests that were in this host's queues have been read. An application
writes `creating`, then sends the request. A service that was down sees the record before it reads
the request. If it settled the record first, the request would then meet a resource that was marked
as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.config.values import did_you_mean
from gracekit.errors import GracekitError, InvalidArgumentsError, StoreError
from gracekit.journal.findings import FindingRows, UnaskedPass
from gracekit.leases.leases import Guard, Resource
from gracekit.phase import ServiceState
from gracekit.recovery.hook_calls import HookCalls
from gracekit.recovery.resources.acting import Acting
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.kinds import ResourceKind
from gracekit.recovery.resources.passes import AskingAgain, ResourcePass
from gracekit.recovery.resources.reading import Reader
from gracekit.recovery.resources.results import PassReport, ResourceOutcome, Result
from gracekit.recovery.resources.rule_calls import KindCalls, UnendedRules
from gracekit.recovery.shared import Shared
from gracekit.rpc.failures import words_of
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import Queue
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane

UNREAD_S: Final = 60.0
"""A pass over all kinds that has given way to one with `every` is tried again after that."""
PAUSED_S: Final = 5.0
"""During a pause its row is read so often, as an operator may end it."""
LEASE_KIND: Final = "gracekit reconciliation"
"""Kind of the lease for a pass; no kind of an application can have a name with a blank."""


class Resources:
    """Decides, for one run, when the resources of its host are settled."""

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
        self._calls = KindCalls(calls, shared.telemetry, shared.clock)
        self._reader = Reader(shared, self._calls)
        self._unended = UnendedRules(shared, on_end=self._ask_again_soon)
        # A kind that is looked at often must not wait for slow rules, nor for a full queue.
        often_s = [kind.every_s for kind in kinds if kind.every_s is not None]
        self._patience_s = min(often_s, default=None)
        self._acting = Acting(
            shared, self._calls, findings, self.may_begin, self._unended, self._patience_s
        )
        self._queues = QueueWait(shared, servers.values())
        self._again = AskingAgain(
            shared, kinds, findings, self._reader, self._acting, self.may_begin
        )
        self._one_pass = asyncio.Lock()
        self._running: ResourcePass | None = None
        self._foreseeing: set[ResourcePass] = set()  # dry runs
        self._lease = (LEASE_KIND, f"{shared.journal.service}@{findings.host}")
        self._ready_at: float | None = None  # wall time at which it first took requests
        self._known: UnaskedPass | None = None  # the last pass since then that was judged
        self._next_at = 0.0  # loop time of the next pass
        self._pauses = backoff.BROKEN_PASS.pauses(self._clock)
        self._may_ask_again = False  # set once the requests of before the start were read
        self._read: frozenset[str] = frozenset()  # kinds that have had their first pass
        self._is_looking = False
        self._kind_at: dict[str, float] = {}  # loop time of the next pass over one kind
        self._for_use: dict[asyncio.Task[Any], ResourcePass] = {}
        shared.trigger.settle = self.settle

    def may_begin(self) -> bool:
        """Whether the service takes requests, and no drain has begun."""
        return self._phase.state is ServiceState.SERVING and not self._trigger.is_paused

    def pause(self) -> None:
        """Begin nothing more; rules under way are waited for."""
        self._queues.pause()
        self._acting.let_go_of_waiting()
        for one in (*self._foreseeing, *([] if self._running is None else [self._running])):
            one.interrupt()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks of rules that have not ended and for which no pass waits any longer."""
        return [*self._unended.tasks, *self._for_use]

    def follow_clock(self, by_s: float) -> None:
        """Adjust a time of this object after the wall clock was set by so many seconds."""
        if self._ready_at is not None:
            self._ready_at += by_s

    def due_in_s(self) -> float | None:
        """Seconds until `look` has something to do; None if it has nothing to do."""
        if not self._kinds or not self.may_begin() or self._is_looking:
            return None
        self._note_ready()
        due_at = min([self._next_at, *self._kind_at.values()])
        if self._asks_again():
            due_at = min(due_at, self._again.due_at)
        return max(0.0, due_at - self._clock.loop())

    # -- looks --------------------------------------------------------------------------

    async def look(self) -> None:
        """Do what is due: a whole pass, or rules that are to be followed again."""
        if self.due_in_s() != 0:
            return
        self._is_looking = True
        try:
            await self._do_due()
        finally:
            self._is_looking = False
            self._trigger.go_on()  # the reconciler must compute anew when something is due

    async def _do_due(self) -> None:
        if (paused_s := await self._findings.paused_s()) > 0:
            self._next_at = self._again.due_at = self._clock.loop() + min(paused_s, PAUSED_S)
            self._kind_at = dict.fromkeys(self._kind_at, self._next_at)
            return
        if self._clock.loop() >= self._next_at:
            await self._look_at_pass()
        for name, due_at in list(self._kind_at.items()):
            if self._clock.loop() >= due_at:
                await self._look_at_kind(self._kinds[name])
        if self._asks_again() and self._clock.loop() >= self._again.due_at:
            async with self._one_pass:
                await self._again.ask_due()

    def _asks_again(self) -> bool:
        return self._may_ask_again and self._settings.startup_reconciliation_enabled

    def _ask_again_soon(self) -> None:
        self._again.due_at = self._clock.loop()
        self._trigger.go_on()

    def _note_ready(self) -> None:
        """At the first look while the service takes requests, plan the first pass."""
        if self._ready_at is None:
            self._ready_at = self._clock.wall()
            wait_s = self._settings.startup_reconciliation_wait_seconds
            self._next_at = self._clock.loop() + wait_s
            for kind in self._kinds if self._settings.startup_reconciliation_enabled else ():
                if kind.every_s is not None:
                    self._kind_at[kind.name] = self._next_at + kind.every_s

    async def _look_at_pass(self) -> None:
        """Make the pass that is due, unless another run of the host has made it."""
        assert self._ready_at is not None
        every_s, wait_s = self._settings.reconciliation_interval_s, backoff.RESOURCES_S
        self._next_at = self._clock.loop() + wait_s
        last = await self._findings.last_unasked_pass()
        if last is not None and self._is_news(last):
            self._known = last  # not judged again, so that a clock set later changes nothing
            self._read = frozenset(kind.name for kind in self._kinds)
            due_at = last.finished_at + every_s if every_s else float("inf")
            left_s = due_at - self._clock.wall()
            self._may_ask_again = True
            if left_s > 0:
                self._next_at = self._clock.loop() + min(left_s, every_s or left_s)
                return
        request = PassRequest(
            at_least_s=self._settings.startup_reconciliation_wait_seconds,
            had_first=self._read,
            # If recovery settles nothing by itself, a dry run counts what waits, for listings.
            dry_run=not self._settings.startup_reconciliation_enabled,
            within_s=self._patience_s,
        )
        report = PassReport(keeps=False)
        if not await self._make(request, report) or report.interrupted:
            if report.is_unread:
                self._next_at = self._clock.loop() + UNREAD_S
            return
        self._read |= {kind.name for kind in self._kinds} - report.broken.keys()
        if report.broken:
            # Soon, as the application's database may be back; at last once in the interval.
            pause_s = next(self._pauses)
            self._next_at = self._clock.loop() + min(pause_s, every_s or pause_s)
        else:
            self._pauses = backoff.BROKEN_PASS.pauses(self._clock)
            self._next_at = self._clock.loop() + (every_s or float("inf"))

    async def _look_at_kind(self, kind: ResourceKind) -> None:
        """Make a pass over one kind whose resources are to be looked at more often."""
        assert kind.every_s is not None
        request = PassRequest(
            kind=kind.name,
            at_least_s=self._settings.startup_reconciliation_wait_seconds,
            had_first=self._read,
            within_s=kind.every_s,
        )
        report = PassReport(keeps=False)
        if await self._make(request, report) and not (report.interrupted or report.broken):
            self._read |= {kind.name}
        self._kind_at[kind.name] = self._clock.loop() + kind.every_s

    async def settle(self, kind: str, within_s: float, but: Resource) -> list[Result]:
        """Follow the rules of *kind* that have `before_use`, for a handler that needs the room.

        Args:
            kind: Name of a declared kind.
            within_s: Return after so many seconds; rules that act then go on.
            but: The caller's own resource, which is left alone.

        Returns:
            What became of the resources so far.

        Raises:
            InvalidArgumentsError: there is no such kind.
        """
        kind = getattr(kind, "name", kind)  # a kind itself is meant, too
        if not isinstance(kind, str) or kind not in self._kinds:
            raise InvalidArgumentsError(
                f"no kind {kind!r} is declared"
                f"{did_you_mean(str(kind), [one.name for one in self._kinds])}"
            )
        request = PassRequest(by_hand=True, kind=kind, before_use=True, but=but)
        report = PassReport(keeps=True)
        one = self._new_pass(request, report, may_begin=lambda: True)
        running = asyncio.create_task(one.run(), name="gracekit-settle")
        self._for_use[running] = one
        running.add_done_callback(self._end_for_use)
        await asyncio.wait({running}, timeout=within_s)
        one.interrupt()
        return list(report.results)

    def _end_for_use(self, running: asyncio.Task[Any]) -> None:
        del self._for_use[running]
        if not running.cancelled() and (error := running.exception()) is not None:
            self._telemetry.emit("store.error", what="resources", error=words_of(error))

    def _is_news(self, last: UnaskedPass) -> bool:
        """Whether *last* is new to this run, and serves instead of the pass that is due.

        It must have begun after this run was ready. If this run is to settle resources, *last* must
        have done so, too; if this run only counts them, *last* must have only counted them. A pass
        for an operator does not count: it may begin before the wait after a start is over, and then
        leaves out what must wait for that.
        """
        settles = self._settings.startup_reconciliation_enabled
        is_of_our_time = self._ready_at is not None and last.began_at >= self._ready_at
        return last != self._known and is_of_our_time and last.found_only is not settles

    async def make_by_hand(self, request: PassRequest, report: PassReport) -> None:
        """Make a pass for an operator, after any pass that is under way.

        Raises:
            GracekitError: it cannot be made now; the message says why.
        """
        if not self.may_begin():
            does = "looks at no resources" if request.dry_run else "settles nothing"
            raise GracekitError(
                f"the service is {self._phase.state.value}, and {does} before it takes requests "
                "again"
            )
        if request.dry_run:
            one = self._new_pass(request, report)
            self._foreseeing.add(one)
            try:
                await one.run()
            finally:
                self._foreseeing.discard(one)
        elif not await self._make(request, report):
            row = await self._leases.look(self._lease)
            raise GracekitError(
                f"run {row.owner if row else 'unknown'} of this host settles its resources now: "
                "ask again when it has finished"
            )

    def _new_pass(
        self,
        request: PassRequest,
        report: PassReport,
        *,
        may_begin: Callable[[], bool] | None = None,
    ) -> ResourcePass:
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
            may_begin=may_begin or self.may_begin,
        )

    # -- a pass -------------------------------------------------------------------------

    async def _make(self, request: PassRequest, report: PassReport) -> bool:
        """Make a pass; false if another run of the host makes one."""
        report.waits_for_pass = self._one_pass.locked()
        async with self._one_pass:
            report.waits_for_pass = False
            guard = await self._leases.take(self._lease, "reconciliation")
            if guard is None:
                await self._ask_after_holder()
                return False
            try:
                await self._acting.let_go_owed()
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
        # Made before the wait: resources that are younger than this moment wait for the next pass.
        one = self._new_pass(request, report)
        self._calls.begin_pass()
        events = PassEvents(one, self._telemetry, self._clock)
        telling = asyncio.create_task(events.tell_progress(self._settings.progress_every_s))
        try:
            if (
                self.may_begin()
                and await self._queues.wait_for(report, within_s=request.within_s)
                and self.may_begin()
                and not (report.is_unread and request.is_of_all)  # it is tried again soon
            ):
                self._may_ask_again = True
                self._running = one
                await one.run()
            else:
                report.interrupted = True
        finally:
            telling.cancel()
            self._running = None
        is_by_dry_run = request.by_hand and request.dry_run
        if not report.interrupted and request.is_of_all and not is_by_dry_run:
            settles = self._settings.startup_reconciliation_enabled
            record = one.record(self._run_id, settles=settles)
            await self._findings.note_pass(record)
            self._known = record.unasked or self._known
        events.finished()
        await self._again.note_next()


LOOK_S: Final = 1.0
SHORTEST_S: Final = 5.0
"""The looks at a queue that is empty take 2 s."""
LOOKS: Final = 2
"""A queue must be found empty so many times in a row: a delivery on its way is neither in the queue
nor here, and RabbitMQ reports 0 messages for a quorum queue without a leader."""


class QueueWait:
    """Waits for the queues that the servers of one run read."""

    def __init__(self, shared: Shared, servers: Collection[RpcServer]) -> None:
        self._servers = tuple(servers)
        self._members = shared.members
        self._is_local = shared.is_local  # then a queue's depth includes unaccepted deliveries
        self._accept_wait_s = shared.settings.accept_wait_s
        self._report = PassReport(keeps=False)
        self._waiting: asyncio.Task[None] | None = None

    async def wait_for(self, report: PassReport, *, within_s: float | None = None) -> bool:
        """Wait, and show the number of requests in *report*; false if `pause` ended the wait.

        After *within_s* the wait ends, and the report says that they were not all read.
        """
        self._report = report
        task = self._waiting = asyncio.create_task(self.wait_read())
        most_s = None if within_s is None else max(within_s, SHORTEST_S) + await self._siblings_s()
        try:
            await asyncio.wait({task}, timeout=most_s)
            if not task.done():
                report.is_unread = True
                return True
        finally:
            task.cancel()
            self._waiting = None
            report.waits_for = 0
        if task.cancelled():
            return False
        task.result()
        return True

    def pause(self) -> None:
        """End the wait."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def wait_read(self) -> None:
        """Wait for the requests that are in the queues now.

        A queue is done when it is empty, or when as many fresh deliveries have come from it as
        were in it. A delivery for which the lane has no place yet does not count as read.
        """
        marks = {server: await self._marks(server) for server in self._servers}
        looks = 0
        while looks < LOOKS:
            left = [await self._left(server, of_queues) for server, of_queues in marks.items()]
            looks = 0 if any(left) else looks + 1
            self._report.waits_for = sum(left)
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(await self._siblings_s())

    async def _siblings_s(self) -> float:
        """Seconds for which a sibling may keep a delivery for which it has no place.

        A local queue counts it until it is accepted; a broker counts only what it has not sent.
        """
        if self._is_local or not await self._members.siblings():
            return 0.0
        return self._accept_wait_s

    async def _depth(self, server: RpcServer, queue: Queue) -> int:
        """How many requests in a queue are not read yet; raises GracekitError."""
        depth = await server.depth(queue)
        return max(0, depth - server.kept[queue.name]) if self._is_local else depth

    async def _marks(self, server: RpcServer) -> Mapping[Queue, int]:
        """For each queue, how many fresh deliveries must have come when it is done."""
        return {queue: await self._mark(server, queue) for queue in server.queues}

    async def _mark(self, server: RpcServer, queue: Queue) -> int:
        while True:
            fresh = server.fresh[queue.name]
            try:
                return fresh + await self._depth(server, queue)
            except GracekitError:  # the broker is away, and nothing is read either
                self._report.waits_for = 1
                await asyncio.sleep(LOOK_S)

    async def _left(self, server: RpcServer, marks: Mapping[Queue, int]) -> int:
        """How many requests are still to be read; 0 if all queues are done."""
        left = sum([await self._left_in(server, queue, mark) for queue, mark in marks.items()])
        return max(1, left) if server.has_waiting or server.failure is not None else left

    async def _left_in(self, server: RpcServer, queue: Queue, mark: int) -> int:
        missing = mark - server.fresh[queue.name]
        if missing <= 0:
            return 0
        try:
            return min(missing, await self._depth(server, queue))
        except GracekitError:
            return missing


class PassEvents:
    """The events of one pass; making this object emits the first."""

    def __init__(self, one: ResourcePass, telemetry: Telemetry, clock: Clock) -> None:
        self._pass = one
        self._telemetry = telemetry
        self._clock = clock
        self._began = clock.loop()
        telemetry.emit(
            "reconciliation.started", by_hand=one.request.by_hand, dry_run=one.request.dry_run
        )

    async def tell_progress(self, every_s: float) -> None:
        """Emit the progress each *every_s* seconds until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            numbers = self._pass.numbers
            self._telemetry.emit(
                "reconciliation.progress",
                settled=numbers[ResourceOutcome.SETTLED],
                failed=numbers[ResourceOutcome.FAILED],
                waiting=numbers[ResourceOutcome.WAITING],
                left=numbers[ResourceOutcome.LEFT],
                waits_for=self._pass.report.waits_for,
            )

    def finished(self) -> None:
        """Emit that the pass has ended."""
        numbers, report = self._pass.numbers, self._pass.report
        self._telemetry.emit(
            "reconciliation.finished",
            settled=numbers[ResourceOutcome.SETTLED],
            failed=numbers[ResourceOutcome.FAILED],
            waiting=numbers[ResourceOutcome.WAITING],
            left=numbers[ResourceOutcome.LEFT],
            broken=sorted(report.broken),
            interrupted=report.interrupted,
            dry_run=self._pass.request.dry_run,
            took_s=round(self._clock.loop() - self._began, 3),
        )
