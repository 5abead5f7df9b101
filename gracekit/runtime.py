"""The Runtime: one run of one service, as the program that embeds it sees it.

It opens, serves, and drains once. `wiring` builds what it is made of, and knows the order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Final, Self

import anyio

from gracekit import background
from gracekit.built import Ground, Wired
from gracekit.clock import Clock
from gracekit.config.choices import StopSource, choices_of
from gracekit.config.loading import load
from gracekit.config.settings import Settings
from gracekit.config.values import check_queues, did_you_mean
from gracekit.drain.coordinator import ALARM_AFTER_HARD_LIMIT_S, RECORD
from gracekit.drain.report import DrainReport, StopRequest
from gracekit.errors import ConfigError, GracekitError
from gracekit.exits import exit_code_of
from gracekit.phase import Phase, ServiceState
from gracekit.process import Process
from gracekit.request.attempt import CALLERS
from gracekit.rpc.connect import open_transport
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.transport import Transport
from gracekit.runs.own import OwnSeat
from gracekit.runs.seat import MAX_SLOTS
from gracekit.service import Service
from gracekit.stop_signals import StopSignals
from gracekit.store.engine import Engine
from gracekit.store.place import StorePlace
from gracekit.telemetry.catalogue import LOGGER
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.stacks import StackDump
from gracekit.tracker.tracker import Tracker
from gracekit.upkeep import Starting, StoreChanges
from gracekit.wiring import wire

SIGNAL_RECORD_S: Final = 1.0
"""A store gets so long for the stop-intent that the signal thread writes."""

FOREIGN_CANCELLATION: Final = (
    "something in this process cancelled gracekit's own task: the program ends (by SystemExit in "
    "another task, for example), or it cancels all tasks"
)


class Runtime:
    """One run of one service.

    Use it embedded as `async with Runtime(service, settings) as runtime: await
    runtime.serve()`; `run_service` and the CLI add the signals.

    Args:
        service: What to serve.
        settings: Used as they are. None for the environment's, over the service's own defaults.
        signals: Whether this Runtime owns the process's stop signals and its kernel
            alarm, from `open` to the end of its drain: SIGTERM and SIGINT drain, a
            second SIGINT or SIGQUIT hands over at once. SIGHUP, unless the program has
            a handler for it, drains where standard input is a terminal, and is
            ignored elsewhere. Then the old handlers are back. The alarm stays only
            where the report says `must_die`: a handler is still running, and only the
            end of the process frees its lease.
        process: The process port.
        clock: The clock port.
        engine: The store port; None opens `settings.store_url`.
        transport: The transport port; None opens `settings.transport_url`.
        broker: The machine behind `memory://`.

    Attributes:
        wired: What it is made of; None before it is open. Internal: any release may change it.
    """

    def __init__(
        self,
        service: Service,
        settings: Settings | None = None,
        *,
        signals: bool = False,
        process: Process | None = None,
        clock: Clock | None = None,
        engine: Engine | None = None,
        transport: Transport | None = None,
        broker: MemoryBroker | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.service = service
        self.settings = settings or load({}, os.environ, defaults=service.defaults)
        self.settings.ops_topic_of(service.topic)  # refused before anything is made
        self.telemetry = telemetry or Telemetry()
        self.phase = Phase()
        self._process = process or Process()
        self._clock = clock or Clock()
        self._dump = StackDump(self._title, self._tracker, callers=CALLERS)
        self._signals = self._stop_signals() if signals else None
        self._ground = self._lay_ground(engine, transport, broker)
        self.wired: Wired | None = None
        self._report: DrainReport | None = None
        self._ending: asyncio.Task[DrainReport] | None = None
        self._opening: asyncio.Event | None = None  # set when it has ended, either way
        self._is_open = False
        self._early: list[Callable[[], None]] = []  # asked for before it was open
        self._opened_at = 0.0
        self._starting = Starting(self.phase, self.settings, self.telemetry, self._clock)

    def _stop_signals(self) -> StopSignals:
        return StopSignals(
            self._process,
            self.telemetry,
            on_stop=self.on_signal,
            on_first=self._record_signal,
            on_dump=self._dump.write,
        )

    def _lay_ground(
        self, engine: Engine | None, transport: Transport | None, broker: MemoryBroker | None
    ) -> Ground:
        settings, process, clock = self.settings, self._process, self._clock
        place = StorePlace(settings.store_url)
        engine = engine or place.engine(process)
        return Ground(
            service=self.service,
            settings=settings,
            process=process,
            clock=clock,
            place=place,
            engine=engine,
            transport=transport
            or open_transport(
                settings.transport_url,
                process=process,
                clock=clock,
                broker=broker,
                exchange=settings.exchange,
                profile=settings.declare_profile,
                max_body_bytes=settings.max_body_bytes,
                telemetry=self.telemetry,
            ),
            telemetry=self.telemetry,
            phase=self.phase,
            seat=OwnSeat(
                engine,
                place,
                process,
                clock,
                service=self.service.topic,
                host=settings.host,
                instance=settings.instance,
            ),
            signals=self._signals,
        )

    # -- life ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        with self._starting:
            await self.open()
            await self._start_unless_stopped()
        self._begin_ending()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drain, if nothing has yet: within the hard limit, however the block was left.

        Raises:
            asyncio.CancelledError: this wait was cancelled, which forces the drain: what still
                ran was handed over at once.
        """
        if self._report is None:
            reason = "the block ended" if error is None else f"the block raised {error!r}"
            self.request_stop(source="user", by="embedder", reason=reason)
            with anyio.CancelScope(shield=True):  # a cancelled scope of anyio's cancels each wait
                await self._wait_end_or_force()

    async def _wait_end_or_force(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        while self._report is None:
            try:
                await self.serve()
            except asyncio.CancelledError as error:
                if self._process.has_ended():
                    raise
                self._built.coordinator.force()
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def serve(self) -> DrainReport:
        """Wait for the end: until a stop is asked for and the drain is over; returns its report.

        May be awaited by several at a time, by nobody, and be cancelled: the service drains when
        it is asked to, once.

        Raises:
            GracekitError: the Runtime is not open.
        """
        if self._opening is None:
            raise GracekitError(
                "this Runtime is not open: nothing would be served; serve inside of "
                "`async with runtime`"
            )
        await self._opening.wait()
        if not self._is_open:
            raise GracekitError("this Runtime did not open, and has nothing to serve")
        ending = self._begin_ending()
        await asyncio.wait({ending})
        return ending.result()

    def _begin_ending(self) -> asyncio.Task[DrainReport]:
        """The one task that waits for a stop and drains; it begins again if it was thrown away."""
        if self._ending is None or self._ending.cancelled():
            self._ending = asyncio.create_task(self._serve(), name="gracekit-serve")
        return self._ending

    async def _serve(self) -> DrainReport:
        while self._report is None:
            try:
                request = await self._built.coordinator.wait_requested()
                self._report = await self._built.coordinator.drain(request, self._built.parts)
            except asyncio.CancelledError as error:
                self._built.coordinator.survive(error)
                self.request_stop(source="error", by="cancellation", reason=FOREIGN_CANCELLATION)
        self._give_signals_back()
        return self._report

    def request_stop(
        self,
        *,
        source: StopSource = "user",
        by: str = "program",
        reason: str = "",
        final: bool = True,
    ) -> None:
        """Ask for a drain, from the event loop. The first request stands.

        One that comes before the Runtime is open is kept: the service then
        starts nothing and drains at once.

        Args:
            source: What the record tells stops apart by.
            by: Who asks.
            reason: A sentence for the record.
            final: Whether it cannot be resumed.

        Raises:
            ConfigError: there is no such source.
        """
        sources = choices_of(StopSource)
        if source not in sources:
            raise ConfigError(
                f"source={source!r} is none of {', '.join(sources)}{did_you_mean(source, sources)}"
            )

        def ask() -> None:
            at = self._clock.loop()  # not before it is open: the drain then has its whole time
            self._built.coordinator.request_stop(
                StopRequest(source=source, by=by, reason=reason, final=final, at=at)
            )

        self._when_open(ask)

    def _when_open(self, step: Callable[[], None]) -> None:
        if self._is_open:
            step()
        else:
            self._early.append(step)

    # -- what it says of itself ---------------------------------------------------------

    @property
    def run_id(self) -> str:
        """Id of this run; empty before it is open."""
        return self._ground.seat.run_id

    @property
    def instance(self) -> str:
        """Name of the instance that this run is; empty before it is open."""
        return self._ground.seat.instance

    def in_flight(self) -> Mapping[tuple[str, str], int]:
        """Tasks in flight by (method, lane), for metrics."""
        return self._built.tracker.counts()

    def open_intakes(self) -> Mapping[str, int]:
        """1 for each lane whose queues are read, for metrics."""
        servers = self._built.servers.items()
        return {lane.value: int(server.is_open) for lane, server in servers}

    @property
    def report(self) -> DrainReport | None:
        """What the drain has left; None until it is over."""
        return self._report

    @property
    def state(self) -> ServiceState:
        """Where the service is in its life."""
        return self.phase.state

    @property
    def not_ready(self) -> str | None:
        """Why no new requests should be sent here now; None if it is ready.

        Ready is a service that is SERVING, unless it has not been able to read its queues for
        half a minute.
        """
        return self.phase.not_ready

    @property
    def _built(self) -> Wired:
        assert self.wired is not None, "open() first"
        return self.wired

    # -- opening and starting -----------------------------------------------------------

    async def open(self) -> None:
        """Signals, store, seat and record: then everything is built, and others see this run.

        Raises:
            ConfigError: the store cannot be used as configured, or no event loop of asyncio runs.
            AlreadyRunningError: a run of this instance lives.
            DeclarationError: `signals=True` outside of the main thread, or while another Runtime
                of this process has the signals.
        """
        background.need_loop()
        self._opening = asyncio.Event()
        self._opened_at = self._clock.loop()
        try:
            if self._signals is not None:
                self._signals.take()
                self._signals.follow()
            await self._join()
        except BaseException:
            self._give_signals_back()
            raise
        else:
            self._is_open = True
        finally:
            self._opening.set()
        early, self._early = self._early, []
        for step in early:
            step()

    async def _join(self) -> None:
        self._check_names()
        seat = self._ground.seat
        await seat.start()
        try:
            self.wired = wire(self._ground)
            self._starting.order = self.wired.parts
            await self.wired.parts.start(through=RECORD)
        except BaseException:
            if self.wired is None:
                await seat.stop()
            else:
                await self.wired.parts.undo()
            raise
        changes = StoreChanges(self._built.coordinator, self.phase, self.telemetry, self._clock)
        self._ground.engine.on_status(changes.follow)
        self._ground.transport.on_broken(partial(changes.end_broken, "queue"))
        self._report_opening()

    def _check_names(self) -> None:
        """Refuse names of queues that are too long together, before anything is taken."""
        longest = max((self.service.topic, self.settings.ops_topic_of(self.service.topic)), key=len)
        if self.settings.instance:
            check_queues(longest, self.settings.instance, "shorten GRACEKIT_INSTANCE")
        check_queues(longest, f"{self.settings.host}-{MAX_SLOTS - 1}", "shorten GRACEKIT_HOST")

    def _report_opening(self) -> None:
        telemetry, settings = self.telemetry, self.settings
        telemetry.log_failures = settings.log_failures
        telemetry.identify(service=self.service.topic, instance=self.instance)
        telemetry.watch(self)
        telemetry.emit(
            "service.starting",
            service=self.service.topic,
            instance=self.instance,
            host=settings.host,
            run=self.run_id,
            hard_limit_s=settings.hard_limit_s,
        )
        for text in self.service.doubts():
            telemetry.emit("service.doubted", text=text)

    async def _start_unless_stopped(self) -> None:
        """Start; a stop that was asked for, or is meanwhile, ends the start in order."""
        if self._built.coordinator.stop_requested:
            return
        starting = asyncio.create_task(self._start(), name="gracekit-start")
        stopping = asyncio.create_task(self._built.coordinator.wait_requested())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._cut_short(starting)
            self._check_started(starting)
        except BaseException as error:
            await self._cut_short(starting)
            await self._stop_after_failed_start(error)
            raise
        finally:
            stopping.cancel()

    def _check_started(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() and not self._built.coordinator.stop_requested:
            raise GracekitError(
                "the start was cancelled, and nobody had asked for a stop: an on_start hook "
                "raised CancelledError"
            )
        if starting.done() and not starting.cancelled():
            starting.result()

    async def _cut_short(self, starting: asyncio.Task[None]) -> None:
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting}, timeout=self.settings.handover_grace_s)
        if not starting.done():
            self._built.coordinator.fail("the start did not end when it was cancelled")

    async def _start(self) -> None:
        """Everything below the record, in its order: then ready."""
        coordinator = self._built.coordinator
        await self._built.parts.start(unless=lambda: coordinator.stop_requested)
        if coordinator.stop_requested:
            return  # a hook has swallowed the cancellation that came with it
        self.telemetry.emit(
            "service.serving",
            service=self.service.topic,
            instance=self.instance,
            run=self.run_id,
            took_s=round(self._clock.loop() - self._opened_at, 3),
        )
        self._starting.end_ready()

    async def _stop_after_failed_start(self, error: BaseException) -> DrainReport:
        reason = f"start failed: {error!r}"
        self._built.coordinator.fail(reason, exit_code_of(error))
        self.request_stop(source="error", by="start", reason=reason)
        return await self.serve()

    # -- what ends it -------------------------------------------------------------------

    def loop_left(self, error: BaseException) -> None:
        """Something raised *error* out of the event loop, or stopped it: drain in order."""
        self.telemetry.emit("loop.left", error=repr(error))
        logging.getLogger(LOGGER).error("this left the event loop:", exc_info=error)
        self._when_open(lambda: self._built.coordinator.fail(f"{error!r} left the event loop"))
        self.request_stop(source="error", by=type(error).__name__, reason=repr(error)[:200])

    def take_signals(self) -> StopSignals:
        """Own the signals from here on, in the main thread, until the process ends."""
        assert self._signals is not None, "a Runtime with signals=True"
        self._signals.take(for_good=True)
        return self._signals

    def _give_signals_back(self) -> None:
        if self._signals is not None:
            must_die = self._report is not None and self._report.must_die
            self._signals.give_back(served=self._report is not None, must_die=must_die)

    def on_signal(self, number: int, at: float) -> None:
        """A signal, on the loop; kept until it is open. *at*: loop time at which it arrived."""
        self._when_open(lambda: self._built.control.obey_signal(number, at))

    def _record_signal(self, number: int) -> None:
        """From the signal thread: alarm and stop-intent, even while the loop is blocked."""
        self._process.arm_alarm(self.settings.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S)
        if self.wired is not None:
            name = signal.Signals(number).name
            self.wired.record.intend_stop_from_thread(by=name, timeout_s=SIGNAL_RECORD_S)

    def _title(self) -> str:
        name = f"{self.service.topic}@{self.instance or '?'}"
        return f"gracekit {name} pid {os.getpid()}"

    def _tracker(self) -> Tracker | None:
        return None if self.wired is None else self.wired.tracker

    def exit_now(self, report: DrainReport) -> None:
        """Leave at once: a handler never ended, and only our death frees its lease."""
        self._process.exit_now(int(report.exit_code))
