"""The Runtime: the only place that builds things.

The start order reads down in `_join` and `_start`, the stop order up in
`_stop_rest`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Final, Literal, Self, cast, get_args

import anyio
import anyio.to_thread

from gracekit import background, sdnotify
from gracekit.clock import Clock
from gracekit.config import Settings, check_queues, did_you_mean, load, shown_url, sqlite_path
from gracekit.control import Control
from gracekit.dispatcher import Dispatcher
from gracekit.drain import (
    ALARM_AFTER_HARD_LIMIT_S,
    DrainReport,
    Parts,
    ShutdownCoordinator,
    StopRequest,
)
from gracekit.errors import (
    ConfigError,
    ControlOffError,
    DependencyError,
    GracekitError,
    StoreError,
)
from gracekit.exits import exit_code_of
from gracekit.leases.epoch import Epoch
from gracekit.leases.leases import Leases
from gracekit.leases.lines import Lines
from gracekit.periodic import PeriodicJobs
from gracekit.phase import Phase, ServiceState
from gracekit.process import STANDARD_ERROR, ForkGuard, Process, never_in_a_fork
from gracekit.recovery.reconciler import Reconciler
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.attempt import CALLERS
from gracekit.request.context import Services
from gracekit.request.custody import Custody
from gracekit.request.lanes import LaneGate, Turns
from gracekit.request.orders import Orders
from gracekit.request.pace import Pace
from gracekit.request.refusals import Detour, Refusals
from gracekit.request.seats import Seats
from gracekit.request.suspects import Suspects
from gracekit.request.waits import LeaseWaits
from gracekit.rpc import offer
from gracekit.rpc.connect import open_transport
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.message import Request
from gracekit.rpc.readers import FOREIGN_REMEDY, foreign_seen, need_one_store
from gracekit.rpc.server import Places, RpcServer
from gracekit.rpc.transport import (
    Queue,
    Transport,
    directed_queue,
    fanout_queue,
    shared_queue,
)
from gracekit.runs.members import BEAT_WRITTEN_S, Members
from gracekit.runs.seat import MAX_SLOTS, Seat, take_seat
from gracekit.service import Service
from gracekit.signals import DUMP_SIGNAL, HANGUP_SIGNAL, WATCHED_SIGNALS, SignalWatch
from gracekit.store.engine import Engine
from gracekit.store.place import StorePlace
from gracekit.telemetry import LOGGER, LogFailures, Telemetry
from gracekit.tracker.claims import Claims
from gracekit.tracker.history import History
from gracekit.tracker.holds import Holds
from gracekit.tracker.journal import Journal
from gracekit.tracker.retention import Retention
from gracekit.tracker.stacks import dump
from gracekit.tracker.task import Lane
from gracekit.tracker.tracker import Tracker

STANDARD_INPUT: Final = 0
LAST_STEPS: Final = 3
"""Each has `exit_margin_s` once the stop is on record: executors, other tasks, other threads."""
TAKE_BACK_S: Final = 2.0
"""A store that does not answer must not hold a cancelled opening for longer."""
DISCARD_S: Final = 1800.0
"""Age of adoptions whose fanout queues are removed; older ones are gone by themselves."""
DEAF_AFTER_S: Final = 30.0
"""A service that could not read its queues for so long is not ready."""

FOREIGN_CANCELLATION: Final = (
    "something in this process cancelled gracekit's own task: the program ends (by SystemExit in "
    "another task, for example), or it cancels all tasks"
)

StopSource = Literal["signal", "operator", "user", "error"]


class Runtime:
    """One run of one service.

    Use it embedded as `async with Runtime(service, settings) as runtime: await
    runtime.serve()`; `run_service` and the CLI add the signals.

    Args:
        service: What to serve.
        settings: None for the environment's.
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
        self.settings = settings or load({}, os.environ, None)
        self.settings.ops_topic_of(service.topic)  # refused before anything is made
        self.telemetry = telemetry or Telemetry()
        self.phase = Phase()
        self.run_id = ""
        self.instance = ""
        self._process = process or Process()
        self._signals = _Signals(self, self._process) if signals else None
        self._clock = clock or Clock()
        self._place = StorePlace(self.settings.store_url)
        self._engine = engine or self._place.engine(self._process)
        self._transport = transport or open_transport(
            self.settings.transport_url,
            process=self._process,
            clock=self._clock,
            broker=broker,
            exchange=self.settings.exchange,
            profile=self.settings.declare_profile,
            max_body_bytes=self.settings.max_body_bytes,
            telemetry=self.telemetry,
        )
        self._interrupted = False
        self._dumping: threading.Thread | None = None
        self._seat: Seat | None = None
        self._fork_guard: ForkGuard | None = None
        self._is_lost = False  # others cannot see that it lives
        self._epoch: Epoch | None = None
        self._background: list[asyncio.Task[None]] = []
        self._deaf: dict[Lane, str] = {}
        self._report: DrainReport | None = None
        self._ending: asyncio.Task[DrainReport] | None = None
        self._opening: asyncio.Event | None = None  # set when it has ended, either way
        self._is_open = False
        self._early: list[Callable[[], None]] = []  # asked for before it was open
        self._opened_at = 0.0
        self.built = False

    # -- life ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
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
                self.coordinator.force()
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
                request = await self.coordinator.wait_requested()
                self._report = await self.coordinator.drain(request)
            except asyncio.CancelledError as error:
                self.coordinator.survive(error)
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
        sources = get_args(StopSource)
        if source not in sources:
            raise ConfigError(
                f"source={source!r} is none of {', '.join(sources)}{did_you_mean(source, sources)}"
            )

        def ask() -> None:
            at = self._clock.loop()  # not before it is open: the drain then has its whole time
            self.coordinator.request_stop(
                StopRequest(source=source, by=by, reason=reason, final=final, at=at)
            )

        self._when_open(ask)

    def _when_open(self, step: Callable[[], None]) -> None:
        if self._is_open:
            step()
        else:
            self._early.append(step)

    def in_flight(self) -> Mapping[tuple[str, str], int]:
        """Tasks in flight by (method, lane), for metrics."""
        return self.tracker.counts()

    def open_intakes(self) -> Mapping[str, int]:
        """1 for each lane whose queues are read, for metrics."""
        servers = ((Lane.REQUESTS, self.requests), (Lane.OPS, self.ops))
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

    # -- start order, down --------------------------------------------------------------

    async def open(self) -> None:
        """Signals, store, run lock, member; then everything is built.

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
                self.take_signals().follow()
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
        settings = self.settings
        self._check_names()
        await self._engine.start()
        try:
            self._fork_guard = self._process.guard_forks(asyncio.get_running_loop())
            self.run_id = self._clock.new_id()
            self._seat = await take_seat(
                self._engine,
                self._process,
                self._place.run_directory,
                run_id=self.run_id,
                service=self.service.topic,
                host=settings.host,
                instance=settings.instance,
            )
            self.instance = self._seat.instance
            self._build()
            await self._write_down(self._seat)
        except BaseException:
            self._leave_seat(is_recorded=False)
            await self._engine.stop()
            raise
        self._engine.on_broken(partial(self._broke, "store"))
        self._transport.on_broken(partial(self._broke, "queue"))
        self.telemetry.log_failures = cast("LogFailures", settings.log_failures)
        self._bells.start(self._pace.poke, on_nudge=self._waits.wake)
        self.telemetry.identify(service=self.service.topic, instance=self.instance)
        self.telemetry.watch(self)
        self.telemetry.emit(
            "service.starting",
            service=self.service.topic,
            instance=self.instance,
            host=settings.host,
            run=self.run_id,
            hard_limit_s=settings.hard_limit_s,
        )
        for text in self.service.doubts():
            self.telemetry.emit("service.doubted", text=text)

    def _check_names(self) -> None:
        """Refuse names of queues that are too long together, before anything is taken."""
        longest = max((self.service.topic, self.settings.ops_topic_of(self.service.topic)), key=len)
        if self.settings.instance:
            check_queues(longest, self.settings.instance, "shorten GRACEKIT_INSTANCE")
        check_queues(longest, f"{self.settings.host}-{MAX_SLOTS - 1}", "shorten GRACEKIT_HOST")

    async def _write_down(self, seat: Seat) -> None:
        """Join; cancelled meanwhile, take back what the commit may still bring.

        A row of a run that never began, of a process that lives, would keep the instance.
        """
        settings = self.settings
        joining = asyncio.ensure_future(
            self.members.join(
                host=settings.host,
                seat=seat,
                version=package_version(),
                topic=self.service.topic,
                ops_topic=settings.ops_topic_of(self.service.topic),
                transport=_absolute(settings.transport_url),
                methods=offer.written(self.service.methods),
            )
        )
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            with contextlib.suppress(StoreError, TimeoutError):  # then the row waits for our death
                async with asyncio.timeout(TAKE_BACK_S):
                    await joining
                    report = DrainReport(failure="the start was cancelled")
                    await self.members.stop_record(int(report.exit_code), report.as_json())
            raise

    def _build(self) -> None:
        settings, clock, service = self.settings, self._clock, self.service
        names = {"run_id": self.run_id, "service": service.topic}
        self.journal = Journal(
            self._engine, clock, keep_failed=settings.keep_failed_arguments, **names
        )
        locks = self._place.run_directory
        self.members = Members(self._engine, clock, self._process, lock_directory=locks, **names)
        self.tracker = Tracker()
        self.history = History()
        self.holds = Holds(self.journal, host=settings.host)
        self._leases = leases = Leases(self._engine, clock, run_id=self.run_id)
        if locks is not None and self._place.path is not None:
            keep, path = self._transport.keep_mark, self._place.path
            self._epoch = Epoch(self._engine, path, locks, keep, leases, self.telemetry, clock)
        lines = Lines()
        suspects = Suspects(clock, self.journal.parole, self.telemetry)
        services = Services(
            journal=self.journal,
            holds=self.holds,
            leases=leases,
            tracker=self.tracker,
            phase=self.phase,
            clock=clock,
            loop=asyncio.get_running_loop(),
            safe_points=self._process.safe_points,
        )
        self._gates = {
            Lane.REQUESTS: LaneGate(
                Lane.REQUESTS,
                Places(settings.max_accepted),
                Seats(ahead=settings.max_running, total=settings.max_accepted),
                settings.max_running,
                self._process.threads(settings.threads),
            ),
            Lane.OPS: LaneGate(
                Lane.OPS,
                Places(settings.ops_max_accepted),
                Seats(ahead=settings.ops_max_running, total=settings.ops_max_accepted),
                settings.ops_max_running,
                self._process.threads(settings.ops_threads),
            ),
        }
        answers = Answers(
            self._transport,
            self.journal,
            self._process,
            self.telemetry,
            clock,
            error_details=settings.error_details,
        )
        self._answers = answers
        arrivals = Arrivals(
            service.methods,
            Refusals(
                self.journal,
                answers,
                self.telemetry,
                clock,
                self._answer_verb,
                Detour(self.members, clock),
            ),
            self.phase,
            settings,
            clock,
            instance=self.instance,
        )
        self._pace = pace = Pace()
        self._bells = self._place.bells(self.run_id)
        custody = Custody(self.journal, leases, self.telemetry, pace)
        turns = Turns(lines, suspects)
        self._waits = LeaseWaits(
            custody,
            leases,
            turns,
            clock,
            run_id=self.run_id,
            bells=self._bells,
            pace=pace,
        )
        self.dispatcher = Dispatcher(
            services,
            arrivals,
            custody,
            turns,
            self._waits,
            answers,
            self.telemetry,
            gates=self._gates,
            history=self.history,
        )
        self.reconciler = Reconciler(
            services,
            self.dispatcher,
            pace=pace,
            claims=Claims(
                self.journal,
                host=settings.host,
                instance=self.instance,
                on_damage=self._tell_damage,
            ),
            members=self.members,
            arrivals=arrivals,
            answers=answers,
            lines=lines,
            suspects=suspects,
            methods=service.methods,
            seats={lane: gate.seats for lane, gate in self._gates.items()},
            threads=self._process.threads(settings.threads),
            settings=settings,
            telemetry=self.telemetry,
        )
        self._retention = Retention(
            self.journal, retention_s=settings.retention_s, after_s=settings.retention_after_s
        )
        self._jobs = PeriodicJobs(
            service.jobs,
            services,
            self.telemetry,
            self._process.threads(settings.threads),
            suspects,
            pace,
        )
        self.requests = self._server(Lane.REQUESTS)
        self.ops = self._server(Lane.OPS)
        self.coordinator = ShutdownCoordinator(
            self.phase, self._parts(), settings, self.telemetry, clock
        )
        self.control = Control(
            run_id=self.run_id,
            instance=self.instance,
            phase=self.phase,
            tracker=self.tracker,
            coordinator=self.coordinator,
            orders=Orders(
                self.journal,
                self.tracker,
                self.telemetry,
                obey=self.dispatcher.obey,
                pace=pace,
            ),
            clock=clock,
        )
        self.built = True

    async def _answer_verb(self, request: Request) -> dict[str, Any]:
        if not self._transport.is_local:
            raise ControlOffError(
                f"control verb {request.method[:50]!r} is off on a broker, where anybody may send "
                f"it: on host {self.settings.host}, `kill -TERM {os.getpid()}` drains this run"
            )
        return await self.control(request)

    def _tell_damage(self, error: StoreError) -> None:
        self.telemetry.emit("store.error", what="row", error=str(error))

    def _server(self, lane: Lane) -> RpcServer:
        settings = self.settings
        return RpcServer(
            self._transport,
            self._queues(lane),
            lambda delivery: self.dispatcher.take(delivery, lane),
            self._gates[lane].places,
            prefetch=settings.prefetch,
            prefetch_bytes=settings.prefetch_bytes,
            wait_s=settings.accept_wait_s,
            cancel_ok_timeout_s=settings.cancel_ok_timeout_s,
        )

    def _queues(self, lane: Lane) -> list[Queue]:
        topic = self.service.topic
        names = [self.settings.host]
        if lane is Lane.OPS:
            topic = self.settings.ops_topic_of(topic)
            if self.instance not in names:
                names.append(self.instance)  # control verbs mean one run, not one host
        directed = [directed_queue(topic, name) for name in names]
        return [shared_queue(topic), *directed, fanout_queue(topic, self.run_id)]

    def _parts(self) -> Parts:
        return Parts(
            tracker=self.tracker,
            dispatcher=self.dispatcher,
            requests=self.requests,
            ops=self.ops,
            jobs=self._jobs,
            reconciler=self.reconciler,
            holds=self.holds,
            record_intent=self._record_intent,
            withdraw_intent=self._withdraw_intent,
            stop_rest=self._stop_rest,
            record_stop=self._record_stop,
            process=self._process,
            alarm=self._signals is not None,
        )

    async def _start_unless_stopped(self) -> None:
        """Start; a stop that was asked for, or is meanwhile, ends the start in order."""
        if self.coordinator.stop_requested:
            return
        starting = asyncio.create_task(self._start(), name="gracekit-start")
        stopping = asyncio.create_task(self.coordinator.wait_requested())
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
        if starting.cancelled() and not self.coordinator.stop_requested:
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
            self.coordinator.fail("the start did not end when it was cancelled")

    async def _start(self) -> None:
        """Adoption, transport, on_start, ops server, gate, new-request server: then ready."""
        await self.reconciler.adopt_dead_runs()
        await self._seed_history()
        await self._transport.start()
        if self._epoch is not None:
            await self._epoch.begin()
        await self._look_for_foreign_readers()
        await self._call_start_hooks()
        if self.coordinator.stop_requested:
            return  # a hook has swallowed the cancellation that came with it
        await self.ops.start()
        self.telemetry.emit("intake.opened", channel=Lane.OPS.value)
        if self.settings.startup_reconciliation_enabled:
            await self.reconciler.gate()
        await self.requests.start()
        self.phase.advance(ServiceState.SERVING)
        await self.members.beat(self.phase.state.value)
        for work in (
            self.reconciler.run,
            self._jobs.run,
            self._look_around,
            self._beat,
            self._tidy,
        ):
            name = f"gracekit-{work.__qualname__}"
            self._background.append(
                background.start(work, name, telemetry=self.telemetry, clock=self._clock)
            )
        self.telemetry.emit(
            "service.serving",
            service=self.service.topic,
            instance=self.instance,
            run=self.run_id,
            took_s=round(self._clock.loop() - self._opened_at, 3),
        )
        self.telemetry.emit("intake.opened", channel=Lane.REQUESTS.value)
        sdnotify.ready("serving")

    async def _look_for_foreign_readers(self) -> None:
        """Refuse to share a queue with a living process that keeps what it takes elsewhere."""
        store, topic = self._place.identity(), self.service.topic
        if store is None:
            return
        queues = [shared_queue(name) for name in (topic, self.settings.ops_topic_of(topic))]
        label = f"{topic}@{self.instance}"
        readers = await self._transport.announce(queues, store=store, label=label)
        methods = need_one_store(self.service.methods)
        if readers and methods and not self.settings.accept_unshared_store:
            seen = foreign_seen(readers, self._place.url, methods)
            raise ConfigError(f"{seen}; {FOREIGN_REMEDY}")
        for reader in readers:
            self.telemetry.emit(
                "reader.foreign", queue=reader.queue, by=reader.label, store=reader.store
            )

    async def _seed_history(self) -> None:
        methods = [(method.namespace, method.name) for method in self.service.methods]
        try:
            await self.history.seed(self._engine, service=self.service.topic, methods=methods)
        except StoreError as error:  # nothing is expected then, and that is safe
            self.telemetry.emit("store.error", what="history", error=str(error))

    async def _call_start_hooks(self) -> None:
        limit = self.settings.start_timeout_s
        for hook in self.service.start_hooks:
            try:
                async with asyncio.timeout(limit):
                    await _call(hook)
            except TimeoutError as error:
                raise GracekitError(
                    f"on_start hook {_name(hook)}() took over {limit:g} s: make it faster or raise "
                    "GRACEKIT_START_TIMEOUT"
                ) from error

    # -- work beside requests -----------------------------------------------------------

    async def _look_around(self) -> None:
        """What is looked at each second, whatever the store does; and systemd's watchdog is fed."""
        watched = sdnotify.watchdog_interval_s() is not None
        while True:
            self._look_at_files()
            self._listen()
            self._keep_signals()
            self.telemetry.tell_left_out()
            self.telemetry.look_for_metrics()
            if watched:
                sdnotify.watchdog()
            await asyncio.sleep(self.settings.beat_s)

    async def _beat(self) -> None:
        """Show in the store that the loop turns, for listings; a slow store holds it up."""
        # Whose sign of life is too old is taken for gone, with its fanouts.
        gone_s = min(self.settings.fanout_gone_after_s, self.settings.host_gone_after_s)
        written_s = min(BEAT_WRITTEN_S, gone_s / 4)
        while True:
            with contextlib.suppress(StoreError):
                taken = await self.members.beat(self.phase.state.value, written_s=written_s)
                if taken is not None:
                    self._end_lost(taken)
                    self.coordinator.force()  # its tasks are others' now
                await self.reconciler.follow_clock()
            await asyncio.sleep(self.settings.beat_s)

    def _look_at_files(self) -> None:
        """End this run if its store is another file now, or others cannot see that it lives."""
        self._engine.look_at_files()
        if self._seat is not None and (trouble := self._seat.trouble()) is not None:
            self._end_lost(
                f"{trouble}: others cannot see that this run lives, and may take its tasks over"
            )

    def _end_lost(self, why: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self.telemetry.emit("run.lost", error=why)
        self.coordinator.fail(why)
        self.request_stop(source="error", by="life", reason=why[:200])

    def _keep_signals(self) -> None:
        """A handler, or a library that it uses, may have taken or ignored them."""
        if self._signals is not None:
            for number, by in self._signals.take_back().items():
                self.telemetry.emit("signal.taken", signal=number.name, by=by)

    def _listen(self) -> None:
        """Notice that a lane cannot be read, or can again."""
        now, deaf = self._clock.loop(), {}
        for lane, server in ((Lane.REQUESTS, self.requests), (Lane.OPS, self.ops)):
            failure = server.failure
            if failure is not None and now - failure.since >= DEAF_AFTER_S:
                deaf[lane] = f"{lane.value} cannot be read: {failure.why}"
                if lane not in self._deaf:
                    self.telemetry.emit("service.deaf", channel=lane.value, error=failure.why)
            elif lane in self._deaf and server.is_open:
                self.telemetry.emit("service.hears", channel=lane.value)
        if deaf.keys() != self._deaf.keys():
            sdnotify.status("; ".join(deaf.values()) or self.phase.state.value)
        self._deaf = deaf
        self.phase.deaf = "; ".join(deaf.values()) or None

    async def _tidy(self) -> None:
        """Retention, and rows whose host or instance does not come back."""
        settings, since = self.settings, self._clock.wall() - DISCARD_S
        noted_at = self._clock.loop()
        while True:
            await asyncio.sleep(self._clock.jitter(settings.reconcile_every_s))
            with contextlib.suppress(StoreError, DependencyError):
                since = await self._discard_fanouts(since)
            with contextlib.suppress(StoreError):
                if self._epoch is not None:
                    await self._epoch.rise()
            if self.phase.state is not ServiceState.SERVING:
                noted_at = self._clock.loop()
                continue
            with contextlib.suppress(StoreError):
                await self._end_abandoned("fanout", settings.fanout_gone_after_s)
                await self._end_abandoned("directed", settings.host_gone_after_s)
                now = self._clock.loop()
                await self._retention.note_consumed(now - noted_at)
                noted_at = now
                await self._retention.remove_all_old()
                await self._leases.remove_old(self._clock.wall() - settings.retention_s)

    async def _discard_fanouts(self, since: float) -> float:
        """Remove the fanout queues of runs that were adopted since then; returns now."""
        now = self._clock.wall()
        for run in await self.members.ended_badly(since=since):
            topics = (run.topic, run.ops_topic)
            await self._transport.discard([fanout_queue(topic, run.run_id) for topic in topics])
        return now

    async def _end_abandoned(self, route: str, gone_s: float) -> None:
        for row in await self._retention.abandoned(route, gone_s=gone_s):
            await self.reconciler.end_abandoned(row)

    # -- stop order, up -----------------------------------------------------------------

    async def _record_intent(self, request: StopRequest) -> None:
        batch = self.members.stop_intent(
            source=request.source, by=request.by, reason=request.reason
        )
        if self._seat is not None:
            self._seat.note_stop()  # the commit may fail, or wait for longer than we live
        await self._engine.commit(batch)
        if self._seat is not None:
            self._seat.clear_note()

    async def _withdraw_intent(self) -> None:
        if self._seat is not None:
            self._seat.clear_note()
        await self.members.withdraw_stop()

    async def _stop_rest(self, hooks_until: float) -> None:
        """Ops server, background work, on_stop, transport; each within what is left."""
        await self.ops.stop()
        await self.requests.stop()
        await self.reconciler.stop()
        await _end(self._background)
        self.dispatcher.abandon_threads()
        for hook in self.service.stop_hooks:
            left = hooks_until - self._clock.loop()
            timeout = max(0.1, min(self.settings.stop_hook_timeout_s, left))
            try:
                async with asyncio.timeout(timeout):
                    await _call(hook)
            except Exception as error:  # noqa: BLE001 - the application's; we stop all the same
                self.telemetry.emit("hook.failed", hook=_name(hook), error=repr(error))
        self._answers.stop()
        await self._transport.stop()

    async def _record_stop(self, report: DrainReport) -> None:
        code = int(report.exit_code)
        is_recorded = False
        try:
            await self.members.stop_record(code, report.as_json())
            is_recorded = True
            self._bells.ring(run.run_id for run in await self.members.others())
        finally:
            if self._seat is not None and not is_recorded:
                self._seat.note_stop(code)
            if self._signals is not None and self._signals.for_good:
                self._process.exit_within(LAST_STEPS * self.settings.exit_margin_s, code)
            self.telemetry.tell_left_out(at_once=True)
            self.telemetry.emit(
                "service.stopped",
                service=self.service.topic,
                instance=self.instance,
                run=self.run_id,
                exit_code=code,
            )
            self._bells.stop()
            await self._engine.stop()
            if not report.must_die:
                self._leave_seat(is_recorded=is_recorded)

    def _leave_seat(self, *, is_recorded: bool) -> None:
        if self._seat is not None:
            self._seat.leave(is_recorded=is_recorded)
        if self._fork_guard is not None:
            self._fork_guard.end()

    async def _stop_after_failed_start(self, error: BaseException) -> DrainReport:
        reason = f"start failed: {error!r}"
        self.coordinator.fail(reason, exit_code_of(error))
        self.request_stop(source="error", by="start", reason=reason)
        return await self.serve()

    def _broke(self, what: str, error: Exception) -> None:
        """Final: intake stops, everything unaccepted goes back, exit 70."""
        self.telemetry.emit("store.broken", what=what, error=str(error))
        self.coordinator.fail(f"the {what} is broken: {error}")
        self.request_stop(source="error", by=what, reason=str(error)[:200])

    def loop_left(self, error: BaseException) -> None:
        """Something raised *error* out of the event loop, or stopped it: drain in order."""
        self.telemetry.emit("loop.left", error=repr(error))
        logging.getLogger(LOGGER).error("this left the event loop:", exc_info=error)
        self._when_open(lambda: self.coordinator.fail(f"{error!r} left the event loop"))
        self.request_stop(source="error", by=type(error).__name__, reason=repr(error)[:200])

    # -- signals ------------------------------------------------------------------------

    def take_signals(self, *, for_good: bool = False) -> _Signals:
        """Own the signals from here on, in the main thread; `open` does it otherwise.

        Args:
            for_good: The process ends with the service: then they are ignored at
                the end, and the alarm stays.
        """
        assert self._signals is not None, "a Runtime with signals=True"
        self._signals.take(for_good=for_good)
        return self._signals

    def _give_signals_back(self) -> None:
        if self._signals is not None:
            self._signals.give_back(self._report)

    def on_signal(self, number: int, at: float) -> None:
        """A signal, on the loop; kept until it is open. *at*: loop time at which it arrived."""
        self._when_open(lambda: self._obey(number, at))

    def ignore_hangup(self) -> None:
        """SIGHUP, on the loop, where no terminal can have been closed."""
        text = "SIGHUP is ignored: there is nothing to reload; SIGTERM drains"
        self.telemetry.emit("signal.hint", text=text)

    def _obey(self, number: int, at: float) -> None:
        name = signal.Signals(number).name
        again, self._interrupted = self._interrupted, self._interrupted or number == signal.SIGINT
        self.telemetry.emit("signal.received", signal=name)
        if number == signal.SIGQUIT or (number == signal.SIGINT and again):
            self.coordinator.force()
        elif number == signal.SIGINT:
            self.telemetry.emit("signal.hint", text="Ctrl-C again hands over now")
        self.coordinator.request_stop(
            StopRequest(source="signal", by=name, reason=f"signal {name}", final=True, at=at)
        )

    def record_signal(self, number: int) -> None:
        """From the signal thread: alarm and stop-intent, even while the loop is blocked."""
        self._process.arm_alarm(self.settings.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S)
        if self.built:
            name = signal.Signals(number).name
            batch = self.members.stop_intent(source="signal", by=name, reason=f"signal {name}")
            with contextlib.suppress(StoreError):
                self._engine.commit_from_thread(batch, timeout_s=1.0)

    def dump_stacks(self) -> None:
        """From any thread: write tasks and stacks to standard error, in a thread of its own.

        Beside the loop, which may be blocked, and beside the thread that asks: standard
        error may be a pipe that nobody reads, and the next signal must get through.
        """
        if self._dumping is None or not self._dumping.is_alive():
            self._dumping = threading.Thread(
                target=self._dump_stacks, name="gracekit-stacks", daemon=True
            )
            self._dumping.start()

    def _dump_stacks(self) -> None:
        text = dump(
            self.tracker if self.built else None,
            now=time.monotonic(),  # what loop.time() is; a virtual loop has no signals
            loop_thread=threading.main_thread().ident or 0,  # signals are the main thread's
            title=f"gracekit {self.service.topic}@{self.instance or '?'} pid {os.getpid()}",
            callers=CALLERS,
        )
        rest = text.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while rest:  # not by a logger: the blocked thread may hold its lock
                rest = rest[os.write(STANDARD_ERROR, rest) :]

    def exit_now(self, report: DrainReport) -> None:
        """Leave at once: a handler never ended, and only our death frees its lease."""
        self._process.exit_now(int(report.exit_code))


class _Signals:
    """The process's stop signals while they are one Runtime's: from their thread to its loop."""

    def __init__(self, runtime: Runtime, process: Process) -> None:
        self._runtime = runtime
        self._process = process
        self._watch: SignalWatch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came: deque[tuple[int, float]] = deque()  # and not yet handed on
        self.for_good = False
        self._has_terminal = False
        self.first: int | None = None

    def take(self, *, for_good: bool) -> None:
        """Watch them; once. Those that come before `follow` wait."""
        if self._watch is None:
            self.for_good = for_good
            # Now: a terminal that has been closed is none any more.
            self._has_terminal = os.isatty(STANDARD_INPUT)
            watch = self._process.watch_signals(self._arrive)
            watch.__enter__()
            self._watch = watch

    def follow(self) -> None:
        """Hand them to the Runtime, on the loop that runs here."""
        self._loop = asyncio.get_running_loop()
        self._deliver()

    def take_back(self) -> Mapping[signal.Signals, str]:
        """Where something has replaced their handlers: set ours again, and say what it was."""
        return {} if self._watch is None else self._watch.take_back()

    def _arrive(self, number: int) -> None:
        """In the signal thread."""
        if number == DUMP_SIGNAL:
            self._runtime.dump_stacks()
            return
        if number == HANGUP_SIGNAL and not self._has_terminal:
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has just closed
                    self._loop.call_soon_threadsafe(self._runtime.ignore_hangup)
            return
        # What loop.time() is; a virtual loop has no signals.
        self._came.append((number, time.monotonic()))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(self._deliver)
        if self.first is None:
            self.first = number
            self._runtime.record_signal(number)

    def _deliver(self) -> None:
        while self._came:
            self._runtime.on_signal(*self._came.popleft())

    def give_back(self, report: DrainReport | None) -> None:
        """The old handlers again, and no alarm; *report* is None if nothing was ever served."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if self.for_good and report is not None:
            # The stop is on record: one more, while the interpreter closes, must not change its
            # code. The watch leaves alone what has replaced its handlers.
            for number in WATCHED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        watch.__exit__(None, None, None)
        if not self.for_good and not (report is not None and report.must_die):
            self._process.disarm_alarm()  # after the last signal that could have armed it


@cache
def package_version() -> str:
    """Of gracekit, as installed; `unknown` from a bare source tree."""
    try:
        return version("gracekit")
    except PackageNotFoundError:
        return "unknown"


def _absolute(url: str) -> str:
    """A transport URL that means the same from another directory, without its secrets."""
    if url.startswith("sqlite:"):
        return f"sqlite:///{sqlite_path(url).absolute()}"
    return shown_url(url)


async def _call(hook: Callable[[], Any]) -> None:
    try:
        if inspect.iscoroutinefunction(hook):
            await hook()
        else:
            await anyio.to_thread.run_sync(never_in_a_fork(hook), abandon_on_cancel=True)
    except (SystemExit, KeyboardInterrupt) as error:
        # Out of a task it would end the loop, and with it the drain.
        raise RuntimeError(f"{_name(hook)}() raised {error!r}") from error


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", repr(hook))


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
