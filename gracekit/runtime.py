"""The Runtime: the only place that builds things.

The start order reads down in `_open` and `_start`, the stop order up in
`_stop_rest`. `run_service` is the whole life of a process: signals, one
Runtime, one drain, one exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anyio.to_thread

from gracekit import sdnotify
from gracekit.clock import Clock
from gracekit.config import Settings, load, redact_url, sqlite_path
from gracekit.control import Control
from gracekit.dispatcher import Dispatcher
from gracekit.errors import (
    AlreadyRunningError,
    ConfigError,
    DeclarationError,
    DependencyError,
    GracekitError,
    StoreError,
)
from gracekit.exits import ExitCode
from gracekit.hands import RecoveryHands
from gracekit.leases.leases import Leases
from gracekit.leases.lines import Lines
from gracekit.leases.members import Members, claim_slot
from gracekit.periodic import PeriodicJobs
from gracekit.process import LifeLock, Process
from gracekit.recovery.reconciler import Reconciler
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.context import Services
from gracekit.request.custody import Custody
from gracekit.request.lanes import LaneGate, Turns
from gracekit.request.refusals import Refusals
from gracekit.rpc.connect import open_transport
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.message import Request
from gracekit.rpc.server import Places, RpcServer
from gracekit.rpc.transport import Queue, QueueKind, Transport, directed_queue, shared_queue
from gracekit.service import Service
from gracekit.shutdown import (
    ALARM_AFTER_HARD_LIMIT_S,
    DrainReport,
    Parts,
    Phase,
    ServiceState,
    ShutdownCoordinator,
    StopRequest,
)
from gracekit.signals import STOP_SIGNALS, SignalWatcher
from gracekit.store.bell import Bell, ring
from gracekit.store.engine import Engine, MemoryEngine, SqliteEngine
from gracekit.store.migrate import load_migrations
from gracekit.telemetry import Telemetry
from gracekit.tracker.claims import Claims
from gracekit.tracker.holds import Holds
from gracekit.tracker.journal import Journal
from gracekit.tracker.retention import Retention
from gracekit.tracker.task import Lane, TrackedTask
from gracekit.tracker.tracker import Tracker

MIGRATIONS: Final = "gracekit.store.migrations"


class Runtime:
    """One run of one service.

    Use it embedded as `async with Runtime(service, settings) as runtime: await
    runtime.serve()`; `run_service` and the CLI add the signals.

    Args:
        service: What to serve.
        settings: None for the environment's.
        signals: Whether this Runtime owns the process's signals and its kernel alarm.
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
        self.telemetry = telemetry or Telemetry()
        self.phase = Phase()
        self.run_id = ""
        self.instance = ""
        self._signals = signals
        self._process = process or Process()
        self._clock = clock or Clock()
        self._engine = engine or open_store(self.settings, self._process)
        self._transport = transport or open_transport(
            self.settings.transport_url, process=self._process, clock=self._clock, broker=broker
        )
        self._interrupted = False
        self._lock: LifeLock | None = None
        self._bell: Bell | None = None
        self._background: list[asyncio.Task[None]] = []
        self._report: DrainReport | None = None
        self._serving = asyncio.Lock()
        self._loop_started_at = 0.0
        self.built = False

    # -- life ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        try:
            await self._start()
        except BaseException as error:
            await self._stop_after_failed_start(f"start failed: {error!r}")
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._report is None:
            reason = "the block ended" if error is None else f"the block raised {error!r}"
            self.request_stop(source="user", by="embedder", reason=reason)
            await self.serve()

    async def serve(self) -> DrainReport:
        """Serve until a stop is asked for, then drain; returns the report.

        May be awaited by several at a time; there is one drain.
        """
        async with self._serving:
            while self._report is None:
                request = await self.coordinator.wait_requested()
                self._report = await self.coordinator.drain(request)
        return self._report

    def request_stop(self, *, source: str, by: str, reason: str, final: bool = True) -> None:
        """Ask for a drain, from the event loop. The first request stands."""
        self.coordinator.request_stop(
            StopRequest(source=source, by=by, reason=reason, final=final, at=self._clock.loop())
        )

    # -- start order, down --------------------------------------------------------------

    async def open(self) -> None:
        """Store, run lock, member; then everything is built, and a stop can be asked for.

        Raises:
            ConfigError: the store cannot be used as configured.
            AlreadyRunningError: a run of this instance lives.
        """
        settings = self.settings
        await self._engine.start()
        try:
            self.run_id = self._clock.new_id()
            self.instance, self._lock = await claim_slot(
                self._engine,
                self._process,
                run_directory(settings),
                service=self.service.topic,
                host=settings.host,
                instance=settings.instance,
            )
            self._bell = self._bell_of(self.run_id)
            self._build()
            await self.members.join(
                host=settings.host,
                instance=self.instance,
                lock_path=self._lock.path if self._lock else Path(),
                version=package_version(),
                topic=self.service.topic,
                ops_topic=settings.ops_topic_of(self.service.topic),
                transport=_absolute(settings.transport_url),
            )
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            await self._engine.stop()
            raise
        self._engine.on_broken(self._store_broke)
        self._transport.on_broken(self._store_broke)
        if self._bell is not None:
            self._bell.start(self.reconciler.poke)
        self.telemetry.identify(service=self.service.topic, instance=self.instance)
        self.telemetry.observe_in_flight(self.tracker.counts)
        self.telemetry.emit("service.starting", service=self.service.topic, instance=self.instance)

    def _build(self) -> None:
        settings, clock, service = self.settings, self._clock, self.service
        names = {"run_id": self.run_id, "service": service.topic}
        self.journal = Journal(self._engine, clock, **names)
        locks = run_directory(settings)
        self.members = Members(self._engine, clock, self._process, lock_directory=locks, **names)
        self.tracker = Tracker()
        self.holds = Holds(self.journal, host=settings.host)
        leases = Leases(self._engine, clock, run_id=self.run_id)
        lines = Lines()
        services = Services(
            journal=self.journal,
            holds=self.holds,
            leases=leases,
            tracker=self.tracker,
            phase=self.phase,
            clock=clock,
        )
        self._gates = {
            Lane.REQUESTS: LaneGate(
                Lane.REQUESTS,
                Places(settings.max_accepted),
                settings.max_running,
                self._process.threads(settings.threads),
            ),
            Lane.OPS: LaneGate(
                Lane.OPS,
                Places(settings.ops_max_accepted),
                settings.ops_max_running,
                self._process.threads(settings.ops_threads),
            ),
        }
        answers = Answers(self._transport, self.journal, self._process, self.telemetry, clock)
        arrivals = Arrivals(
            service.methods,
            Refusals(self.journal, answers, self.telemetry, clock, self._answer_verb),
            self.phase,
            settings,
            clock,
            instance=self.instance,
        )
        self.dispatcher = Dispatcher(
            services,
            arrivals,
            Custody(self.journal, leases, self.telemetry, self._look_again),
            Turns(lines, clock),
            answers,
            self.telemetry,
            gates=self._gates,
            on_hand_over=self._note_handed_over,
            on_give_back=self._note_given_back,
        )
        self.reconciler = Reconciler(
            journal=self.journal,
            claims=Claims(
                self.journal,
                host=settings.host,
                instance=self.instance,
                on_damage=self._tell_damage,
            ),
            holds=self.holds,
            leases=leases,
            members=self.members,
            lines=lines,
            tracker=self.tracker,
            methods=service.methods,
            places={lane: gate.places for lane, gate in self._gates.items()},
            hands=RecoveryHands(services, arrivals, self.dispatcher, answers, self._gates),
            settings=settings,
            telemetry=self.telemetry,
            clock=clock,
        )
        self._retention = Retention(self.journal, retention_s=settings.retention_s)
        self._jobs = PeriodicJobs(
            service.jobs, services, self.telemetry, self._process.threads(settings.threads)
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
            clock=clock,
        )
        self.built = True

    # The dispatcher is built before those it tells: the coordinator and the reconciler act on it.

    async def _answer_verb(self, request: Request) -> dict[str, Any]:
        return await self.control(request)

    def _tell_damage(self, error: StoreError) -> None:
        self.telemetry.emit("store.error", what="row", error=str(error))

    def _look_again(self) -> None:
        self.reconciler.poke()

    def _note_handed_over(self, task: TrackedTask, recorded: bool) -> None:  # noqa: FBT001
        self.coordinator.note_handed_over(task, recorded=recorded)

    def _note_given_back(self) -> None:
        self.coordinator.note_given_back()

    def _server(self, lane: Lane) -> RpcServer:
        settings = self.settings
        return RpcServer(
            self._transport,
            self._queues(lane),
            lambda delivery: self.dispatcher.take(delivery, lane),
            self._gates[lane].places,
            prefetch=settings.prefetch,
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
        fanout = Queue(f"{topic}_fanout_{self._clock.new_id()}", QueueKind.FANOUT, topic)
        return [shared_queue(topic), *(directed_queue(topic, name) for name in names), fanout]

    def _parts(self) -> Parts:
        return Parts(
            tracker=self.tracker,
            dispatcher=self.dispatcher,
            requests=self.requests,
            ops=self.ops,
            background=(self._jobs, self.reconciler),
            record_intent=self._record_intent,
            withdraw_intent=self.members.withdraw_stop,
            count_holds=self._count_holds,
            stop_rest=self._stop_rest,
            record_stop=self._record_stop,
            process=self._process,
            alarm=self._signals,
        )

    async def _start(self) -> None:
        """Adoption, transport, on_start, ops server, gate, new-request server: then ready."""
        await self.reconciler.adopt_dead_runs()
        await self._transport.start()
        await self._call_start_hooks()
        if self.coordinator.stop_requested:
            return  # a hook has swallowed the cancellation that came with it
        await self.ops.start()
        if self.settings.startup_reconciliation_enabled:
            await self.reconciler.gate()
        await self.requests.start()
        self.phase.advance(ServiceState.SERVING)
        self._loop_started_at = self._clock.loop()
        await self.members.beat(self.phase.state.value)
        for work in (self.reconciler.run, self._jobs.run, self._beat, self._tidy):
            self._background.append(asyncio.create_task(work(), name=f"gracekit-{work.__name__}"))
        self.telemetry.emit(
            "service.serving", service=self.service.topic, instance=self.instance, run=self.run_id
        )
        self.telemetry.emit("intake.opened", channel=Lane.REQUESTS.value)
        sdnotify.ready("serving")

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

    async def _beat(self) -> None:
        """Show that the loop turns: in the store for listings, to systemd for its watchdog."""
        watched = sdnotify.watchdog_interval_s() is not None
        while True:
            with contextlib.suppress(StoreError):
                await self.members.beat(self.phase.state.value)
            if watched:
                sdnotify.watchdog()
            await asyncio.sleep(self.settings.beat_s)

    async def _tidy(self) -> None:
        """Retention, and rows whose host or instance does not come back."""
        settings = self.settings
        while True:
            await asyncio.sleep(self._clock.jitter(settings.reconcile_every_s))
            if self.phase.state is not ServiceState.SERVING:
                continue
            with contextlib.suppress(StoreError):
                await self._end_abandoned("fanout", settings.fanout_gone_after_s)
                await self._end_abandoned("directed", settings.host_gone_after_s)
                if self._clock.loop() - self._loop_started_at >= settings.retention_after_s:
                    await self._retention.remove_all_old()

    async def _end_abandoned(self, route: str, gone_s: float) -> None:
        for row in await self._retention.abandoned(route, gone_s=gone_s):
            await self.reconciler.end_abandoned(row)

    # -- stop order, up -----------------------------------------------------------------

    async def _record_intent(self, request: StopRequest) -> None:
        batch = self.members.stop_intent(
            source=request.source, by=request.by, reason=request.reason
        )
        await self._engine.commit(batch)

    async def _count_holds(self) -> int:
        return len(await self.holds.mine())

    async def _stop_rest(self, hard_limit: float) -> None:
        """Ops server, background work, on_stop, transport; each within what is left."""
        await self.ops.stop()
        await self.requests.stop()
        await self.reconciler.stop()
        await _end(self._background)
        for hook in self.service.stop_hooks:
            left = hard_limit - self._clock.loop() - self.settings.exit_margin_s / 2
            timeout = max(0.1, min(self.settings.stop_hook_timeout_s, left))
            try:
                async with asyncio.timeout(timeout):
                    await _call(hook)
            except Exception as error:  # noqa: BLE001 - the application's; we stop all the same
                self.telemetry.emit("hook.failed", hook=_name(hook), error=repr(error))
        await self._transport.stop()

    def _bell_of(self, run_id: str) -> Bell | None:
        """The bell that siblings ring when they leave something for others to claim."""
        directory = run_directory(self.settings)
        return None if directory is None else Bell(directory / f"{run_id}.bell")

    async def _ring_siblings(self) -> None:
        for run in await self.members.others():
            if (bell := self._bell_of(run.run_id)) is not None:
                ring(bell.path)

    async def _record_stop(self, report: DrainReport) -> None:
        try:
            await self.members.stop_record(int(report.exit_code), report.as_json())
            await self._ring_siblings()
        finally:
            self.telemetry.emit("service.stopped", run=self.run_id, exit_code=int(report.exit_code))
            if self._bell is not None:
                self._bell.stop()
            await self._engine.stop()
            if self._lock is not None and not report.must_die:
                self._lock.release()

    async def _stop_after_failed_start(self, reason: str) -> DrainReport:
        self.coordinator.fail(reason)
        self.request_stop(source="error", by="start", reason=reason)
        return await self.serve()

    def _store_broke(self, error: Exception) -> None:
        """Final: intake stops, everything unaccepted goes back, exit 70."""
        self.telemetry.emit("store.broken", error=str(error))
        self.coordinator.fail(f"the store is broken: {error}")
        self.request_stop(source="error", by="store", reason=str(error)[:200])

    # -- a process of its own -----------------------------------------------------------

    async def live(self) -> DrainReport:
        """After `open`: start, serve and drain; a stop asked for meanwhile ends the start."""
        starting = asyncio.create_task(self._start(), name="gracekit-start")
        stopping = asyncio.create_task(self.coordinator.wait_requested())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting}, timeout=self.settings.handover_grace_s)
        if not starting.done():
            self.coordinator.fail("the start did not end when it was cancelled")
        elif not starting.cancelled() and (error := starting.exception()) is not None:
            await self._stop_after_failed_start(f"start failed: {error!r}")
            raise error
        return await self.serve()

    def on_signal(self, number: int, at: float) -> None:
        """Act on a signal, on the loop. *at*: loop time at which it arrived."""
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

    def exit_now(self, report: DrainReport) -> None:
        """Leave at once: a handler never ended, and only our death frees its lease."""
        self._process.exit_now(int(report.exit_code))


class _Signals:
    """Carries signals from their thread to the Runtime; those that come early wait."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[tuple[int, float]] = []
        self.first: int | None = None

    def arrive(self, number: int) -> None:
        """In the signal thread."""
        at = time.monotonic()  # what loop.time() is; a virtual loop has no signals
        first, self.first = self.first is None, self.first or number
        if self._loop is None:
            self._early.append((number, at))
        else:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(self._deliver, number, at)
        if first:
            self._runtime.record_signal(number)

    async def run(self) -> DrainReport:
        """The life of the process, on the loop."""
        self._loop = asyncio.get_running_loop()
        await self._runtime.open()
        early, self._early = self._early, []
        for number, at in early:
            self._runtime.on_signal(number, at)
        report = await self._runtime.live()
        if report.must_die or not await self._close_default_executor():
            self._runtime.exit_now(report)
        return report

    async def _close_default_executor(self) -> bool:
        """End the threads of `asyncio.to_thread`; false if one goes on.

        `asyncio.run` would wait for it until the alarm, and the exit code would be lost.
        """
        closing = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
        done, _ = await asyncio.wait({closing}, timeout=self._runtime.settings.exit_margin_s)
        return bool(done)

    def _deliver(self, number: int, at: float) -> None:
        if self._runtime.built:
            self._runtime.on_signal(number, at)
        else:
            self._early.append((number, at))


def run_service(service: Service, settings: Settings | None = None) -> int:
    """Run *service* until a signal ends it; returns the exit code.

    Does not return when a handler or a thread never ended: the process then
    leaves by `os._exit`, so that its leases are freed by its proven death.
    Ended by INT at a terminal, it re-raises INT. When it returns, stop signals
    are ignored: nothing but the end of the process is expected to follow.
    """
    try:
        runtime = Runtime(service, settings, signals=True)
        signals = _Signals(runtime)
        with SignalWatcher(signals.arrive):
            report = asyncio.run(signals.run())
            _ignore_stop_signals()
        if not _threads_ended(runtime.settings.exit_margin_s):
            runtime.exit_now(report)
    except GracekitError as error:
        print(f"gracekit: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return int(_exit_code(error))
    except Exception:  # noqa: BLE001 - an on_start of the application, or a fault of ours
        traceback.print_exc()
        return int(ExitCode.INTERNAL)
    if signals.first == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return int(report.exit_code)


def _ignore_stop_signals() -> None:
    """The stop is on record: one more, while the interpreter closes, must not change its code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _threads_ended(within_s: float) -> bool:
    """Wait for the threads that the interpreter would wait for without a limit."""
    deadline = time.monotonic() + within_s
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
    return True


def _exit_code(error: GracekitError) -> ExitCode:
    match error:
        case ConfigError() | DeclarationError() | AlreadyRunningError():
            return ExitCode.CONFIG
        case DependencyError():
            return ExitCode.DEPENDENCY
        case _:
            return ExitCode.INTERNAL


def open_store(settings: Settings, process: Process) -> Engine:
    """The engine that `settings.store_url` names; not started."""
    migrations = load_migrations(MIGRATIONS)
    if settings.store_url.startswith("memory:"):
        return MemoryEngine(migrations, process=process)
    path = sqlite_path(settings.store_url).absolute()
    return SqliteEngine(path, migrations, process=process)


def run_directory(settings: Settings) -> Path | None:
    """Where the run locks of a store are: beside it; None for a store in memory."""
    if settings.store_url.startswith("memory:"):
        return None
    path = sqlite_path(settings.store_url).absolute()
    return path.with_name(f"{path.name}-runs")


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
    return redact_url(url)


async def _call(hook: Callable[[], Any]) -> None:
    try:
        if inspect.iscoroutinefunction(hook):
            await hook()
        else:
            await anyio.to_thread.run_sync(hook, abandon_on_cancel=True)
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
