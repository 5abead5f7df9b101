"""What a run does besides its requests: signs of life, systemd, state of the store, old rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Mapping
from typing import Final

from gracekit import background
from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.errors import DependencyError, StoreError
from gracekit.journal.retention import Retention
from gracekit.leases.epoch import Epoch
from gracekit.leases.leases import RunLeases
from gracekit.notify import Notify
from gracekit.parts import PartList
from gracekit.phase import Phase, ServiceState
from gracekit.process import Threads
from gracekit.recovery.reconciler import Reconciler
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import QueueKind, Transport, fanout_queue
from gracekit.runs.members import BEAT_WRITTEN_S, Members
from gracekit.runs.own import OwnSeat
from gracekit.stop_signals import StopSignals
from gracekit.store.engine import Engine
from gracekit.store.state import StoreState, StoreStatus
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane

DISCARD_S: Final = 1800.0
"""After its start a run removes the fanout queues of runs that were adopted up to so many seconds
before; those of earlier ones have expired by themselves."""
DEAF_AFTER_S: Final = 5.0
"""Seconds without reading its queues after which a service is not ready."""
HELD_AFTER_S: Final = 30.0
"""The same, if reading pauses because too many bytes were read and are not accepted yet."""
START_SHOWN_S: Final = 5.0
"""Seconds between two lines of a start, at most: systemd waits for a start no longer than its
`TimeoutStartSec` unless it is asked for more time."""
BLOCKED_S: Final = 1.0
"""If the event loop was blocked for so long, a line is logged."""
SHORTEST_FEED_S: Final = 0.1
"""Shortest pause between two messages to systemd's watchdog: its WatchdogSec must be twice that."""


class LifeSigns:
    """Whether others can see that this run lives, and whether it may still act.

    Args:
        coordinator: Drains the service if either is lost.
    """

    def __init__(
        self,
        engine: Engine,
        seat: OwnSeat,
        members: Members,
        reconciler: Reconciler,
        coordinator: ShutdownCoordinator,
        phase: Phase,
        settings: Settings,
        telemetry: Telemetry,
    ) -> None:
        self._engine = engine
        self._seat = seat
        self._members = members
        self._reconciler = reconciler
        self._coordinator = coordinator
        self._phase = phase
        self._telemetry = telemetry
        # A run whose beat is too old counts as gone, and its fanout queues are removed.
        gone_s = min(settings.fanout_gone_after_s, settings.host_gone_after_s)
        self._written_s = min(BEAT_WRITTEN_S, gone_s / 4)
        self._mark: Hashable = None  # of the store, at the last look
        self._due = asyncio.Event()
        self._is_lost = False

    async def beat(self) -> None:
        """Record in the store, for listings, that the loop runs; a slow store delays it.

        And ask the store whether this run may still act. `look` says when there is anything to do.
        """
        while True:
            with contextlib.suppress(StoreError):  # the next look asks for another beat
                phase = self._phase.state.value
                taken = await self._members.beat(phase, self._mark, written_s=self._written_s)
                if taken is not None:
                    self._end_lost(taken)
                    self._coordinator.force()  # its tasks belong to other runs now
                await self._reconciler.follow_clock()
            await self._due.wait()
            self._due.clear()

    def look(self) -> None:
        """End this run if its store is another file now, or others cannot see that it lives.

        Call it each `look_every_s`. It asks for a beat if one is due, if anybody has written the
        store since the last one, or if the wall clock was set.
        """
        self._mark = self._engine.look_at_files()
        if (trouble := self._seat.taken.trouble()) is not None:
            self._end_lost(
                f"{trouble}: others cannot see that this run lives, and may take its tasks over"
            )
        phase = self._phase.state.value
        if (
            self._members.is_beat_due(phase, self._mark, written_s=self._written_s)
            or self._reconciler.clock_was_set
        ):
            self._due.set()

    def _end_lost(self, why: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._telemetry.emit("run.lost", error=why)
            self._coordinator.give_up(why, by="life")


class StoreChanges:
    """Reacts when the state of the store changes: the run is not ready, or it ends.

    Args:
        coordinator: Drains the service if the change is final.
        trigger: Asks recovery to compare rows and tasks when the store is back.
    """

    def __init__(
        self,
        coordinator: ShutdownCoordinator,
        trigger: RecoveryTrigger,
        phase: Phase,
        notify: Notify,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._coordinator = coordinator
        self._trigger = trigger
        self._phase = phase
        self._notify = notify
        self._telemetry = telemetry
        self._clock = clock
        self._lost_at = 0.0

    def follow(self, status: StoreStatus) -> None:
        """Called by the engine with each change."""
        error = str(status.error)
        match status.state:
            case StoreState.UNREACHABLE:
                self._lost_at = self._clock.loop() if status.since is None else status.since
                self._telemetry.emit("store.unreachable", away_s=self._away_s(), error=error)
                self._show(f"the store cannot be reached: {error}")
            case StoreState.REACHABLE:
                self._telemetry.emit("store.reachable", away_s=self._away_s())
                self._show(None)
                self._trigger.poke()  # rows that are ours, and commits whose end is not known
            case StoreState.FENCED:
                self._telemetry.emit("store.fenced", error=error)
                self._coordinator.give_up(f"this run may not act any more: {error}", by="store")
                self._coordinator.force()  # its tasks belong to other runs now
            case StoreState.BROKEN:
                self.end_broken("store", error)

    def end_broken(self, what: str, error: object) -> None:
        """Close intake, give back everything unaccepted, and end with exit 70.

        Args:
            what: Which file is broken: the "store", or the "queue" of a transport.
            error: What is wrong with it.
        """
        self._telemetry.emit("store.broken", what=what, error=str(error))
        self._coordinator.give_up(f"the {what} is broken: {error}", by=what)

    def _away_s(self) -> float:
        return round(self._clock.loop() - self._lost_at, 3)

    def _show(self, cut_off: str | None) -> None:
        self._phase.cut_off = cut_off
        self._notify.status(self._phase.trouble or self._phase.state.value)


class Watchdog:
    """Reports to systemd that the event loop runs, from its readiness to the end of its drain.

    It waits for nothing but its timer. So a slow store does not stop the reports; a blocked
    event loop does.
    """

    def __init__(self, notify: Notify, clock: Clock, *, look_every_s: float) -> None:
        self._notify = notify
        self._clock = clock
        self._half_s = notify.watchdog_interval_s()
        self._every_s = max(SHORTEST_FEED_S, min(look_every_s, self._half_s or look_every_s))

    async def feed(self) -> None:
        """Report until cancelled, at least twice in WatchdogSec; return if there is no watchdog."""
        if self._half_s is None:
            return
        while True:
            self._notify.watchdog()
            await self._clock.wait_tick(self._every_s)


class StartProgress:
    """While the context is open, shows systemd how far a start is and asks it for more time.

    Attributes:
        order: The parts that are being started; None while the store is opened.
    """

    def __init__(
        self,
        phase: Phase,
        notify: Notify,
        settings: Settings,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._phase = phase
        self._notify = notify
        self._every_s = min(START_SHOWN_S, settings.progress_every_s)
        self._telemetry = telemetry
        self._clock = clock
        self._showing: asyncio.Task[None] | None = None
        self._began_at = 0.0
        self.order: PartList | None = None

    def __enter__(self) -> None:
        """Raises ConfigError where no event loop of asyncio runs."""
        background.need_loop()
        self._began_at = self._clock.loop()
        self._showing = background.start(
            self._show, "gracekit-starting", telemetry=self._telemetry, clock=self._clock
        )

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def took_s(self) -> float:
        """Seconds since the start began; opening the store counts."""
        return self._clock.loop() - self._began_at

    def end_ready(self) -> None:
        """Report that the service takes requests, and show no more progress."""
        self._end()
        self._notify.ready(ServiceState.SERVING.value)

    def _end(self) -> None:
        if self._showing is not None:
            self._showing.cancel()

    async def _show(self) -> None:
        await asyncio.sleep(self._every_s)
        while not self._phase.draining:
            what = "store and seat" if self.order is None else self.order.starting
            self._notify.extend(3 * self._every_s, f"starting: {what}")
            await asyncio.sleep(self._every_s)


class RunWatch:
    """Checks that are made each second, also while the store does not answer."""

    def __init__(
        self,
        signs: LifeSigns,
        servers: Mapping[Lane, RpcServer],
        signals: StopSignals | None,
        phase: Phase,
        notify: Notify,
        telemetry: Telemetry,
        clock: Clock,
        *,
        every_s: float,
    ) -> None:
        self._signs = signs
        self._servers = servers
        self._phase = phase
        self._notify = notify
        self._telemetry = telemetry
        self._clock = clock
        self._signals = signals
        self._every_s = every_s
        self._deaf: dict[Lane, str] = {}
        self._turning: asyncio.Task[None] | None = None  # opens or closes intake

    async def watch(self) -> None:
        """Look until cancelled."""
        try:
            await self._watch()
        finally:
            if self._turning is not None:
                self._turning.cancel()

    async def _watch(self) -> None:
        looked_at = self._clock.machine()
        while True:
            self._signs.look()
            self._listen()
            self._follow_store()
            if self._signals is not None:
                self._signals.keep()
            self._telemetry.tell_left_out()
            self._telemetry.look_for_metrics()
            waits_s = await self._clock.wait_tick(self._every_s)
            Threads.load()
            before, looked_at = looked_at, self._clock.machine()
            self._tell_blocked(looked_at - before - waits_s)

    def _tell_blocked(self, late_s: float) -> None:
        """Log that the loop was blocked: for *late_s* seconds, or up to one interval longer."""
        if late_s >= BLOCKED_S:
            self._telemetry.emit("loop.blocked", blocked_s=round(late_s, 1))

    def _follow_store(self) -> None:
        """Close the intake of new requests while the store is away, and open it when it is back.

        Otherwise a broker would get each request back twice a second, and it may count that.
        """
        is_open = self._servers[Lane.REQUESTS].is_open
        is_away = self._phase.cut_off is not None or self._phase.unproven is not None
        is_free = self._turning is None or self._turning.done()
        if self._phase.state is ServiceState.SERVING and is_open is is_away and is_free:
            name = "gracekit-intake"
            self._turning = asyncio.create_task(self._turn(is_away=is_away), name=name)

    async def _turn(self, *, is_away: bool) -> None:
        server, lane = self._servers[Lane.REQUESTS], Lane.REQUESTS.value
        if is_away:
            back = await server.close_intake()
            self._telemetry.emit("intake.closed", lane=lane, given_back=back, not_started=0)
        else:
            await server.open_intake()
            self._telemetry.emit("intake.opened", lane=lane)

    def _listen(self) -> None:
        """Note and log which lanes cannot be read, and which can be read again."""
        now, deaf = self._clock.loop(), {}
        for lane, server in self._servers.items():
            failure = server.failure
            patience_s = HELD_AFTER_S if server.is_held else DEAF_AFTER_S
            if failure is not None and now - failure.since >= patience_s:
                deaf[lane] = f"{lane.value} cannot be read: {failure.why}"
                if lane not in self._deaf:
                    self._telemetry.emit("service.deaf", lane=lane.value, error=failure.why)
            elif lane in self._deaf and server.is_open:
                self._telemetry.emit("service.hears", lane=lane.value)
        changed = deaf.keys() != self._deaf.keys()
        self._deaf = deaf
        self._phase.deaf = "; ".join(deaf.values()) or None
        if changed:
            self._notify.status(self._phase.trouble or self._phase.state.value)


class Tidying:
    """Removes old rows and the fanout queues of dead runs; ends rows that no run will take."""

    def __init__(
        self,
        retention: Retention,
        epoch: Epoch | None,
        leases: RunLeases,
        members: Members,
        reconciler: Reconciler,
        transport: Transport,
        phase: Phase,
        *,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._retention = retention
        self._epoch = epoch
        self._leases = leases
        self._members = members
        self._reconciler = reconciler
        self._transport = transport
        self._phase = phase
        self._settings = settings
        self._clock = clock

    async def tidy(self) -> None:
        """Tidy up every `reconcile_every` until cancelled."""
        settings, since = self._settings, self._clock.wall() - DISCARD_S
        noted_at = self._clock.loop()
        while True:
            await self._clock.wait_tick(self._clock.jitter(settings.reconcile_every_s))
            with contextlib.suppress(StoreError, DependencyError):
                since = await self._discard_fanouts(since)
            with contextlib.suppress(StoreError):
                if self._epoch is not None:
                    await self._epoch.rise()
            if self._phase.state is not ServiceState.SERVING:
                noted_at = self._clock.loop()
                continue
            with contextlib.suppress(StoreError):
                await self._end_abandoned(QueueKind.FANOUT, settings.fanout_gone_after_s)
                await self._end_abandoned(QueueKind.DIRECTED, settings.host_gone_after_s)
                now = self._clock.loop()
                await self._retention.note_consumed(now - noted_at)
                noted_at = now
                await self._retention.remove_all_old()
                await self._leases.remove_old(self._clock.wall() - settings.retention_s)

    async def _discard_fanouts(self, since: float) -> float:
        """Remove the fanout queues of runs adopted after *since*; returns the wall time now."""
        now = self._clock.wall()
        for run in await self._members.ended_badly(since=since):
            topics = (run.topic, run.ops_topic)
            await self._transport.discard([fanout_queue(topic, run.run_id) for topic in topics])
        return now

    async def _end_abandoned(self, route: QueueKind, gone_s: float) -> None:
        for row in await self._retention.abandoned(route.value, gone_s=gone_s):
            await self._reconciler.ends.end_abandoned(row)
