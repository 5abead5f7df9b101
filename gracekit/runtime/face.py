"""The Runtime: one run of one service, as the program that embeds it sees it.

This is only the interface. `ground` makes what a run needs before it opens, `opening` opens it,
`start` starts what `wiring` has built, and `ending` drains it, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from types import TracebackType
from typing import Any, Self

from gracekit import background
from gracekit.admin.api import AdminApi
from gracekit.clock import Clock
from gracekit.config.choices import StopSource
from gracekit.config.live import LiveSettings
from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.errors import GracekitError
from gracekit.leasing import Leases
from gracekit.phase import ServiceState
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.transport import Transport
from gracekit.runtime.built import Wired
from gracekit.runtime.ground import label_words, lay_ground
from gracekit.runtime.opening import open_run
from gracekit.runtime.serving import DrainTask, Start
from gracekit.service import Service
from gracekit.store.engine import Engine
from gracekit.telemetry.metrics import LabelWords
from gracekit.telemetry.readings import Readings
from gracekit.telemetry.telemetry import Telemetry
from gracekit.upkeep import StartProgress


class Runtime:
    """One run of one service.

    Use it embedded as `async with Runtime(service, settings) as runtime: await
    runtime.serve()`; `run_service` and the CLI add the signals.

    Args:
        service: What to serve.
        settings: Used as they are. None to read the environment, over the service's own defaults.
            `gracekit.config.LiveSettings(settings, read=...)` says how SIGHUP reads them again.
        signals: Whether this Runtime owns the process's stop signals and its kernel
            alarm, from `open` to the end of its drain. SIGTERM and SIGINT drain; a
            second SIGINT, or SIGQUIT, hands over at once; SIGUSR1 writes the stacks. If
            standard input is a terminal, SIGHUP drains. If not, SIGHUP reads the settings
            again (see `settings`), SIGTSTP closes the intake, and SIGCONT opens it; if the
            program has handlers for these three, they stay. After the drain the old
            handlers are restored. The alarm stays armed only if the report has
            `must_die`: a handler or a hook still runs although it was cancelled, and only
            the end of the process ends it.
        process: The process port.
        clock: The clock port.
        engine: The store port; None opens `settings.store_url`.
        transport: The transport port; None opens `settings.transport_url`.
        broker: The machine behind `memory://`.

    Attributes:
        ground: What it has before it is open. Internal: any release may change it.
        wired: All its objects; None before it is open. Internal as well.
    """

    def __init__(
        self,
        service: Service,
        settings: Settings | LiveSettings | None = None,
        *,
        signals: bool = False,
        process: Process | None = None,
        clock: Clock | None = None,
        engine: Engine | None = None,
        transport: Transport | None = None,
        broker: MemoryBroker | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.ground = lay_ground(
            service,
            settings,
            signals=signals,
            process=process,
            clock=clock,
            engine=engine,
            transport=transport,
            broker=broker,
            telemetry=telemetry,
        )
        self.wired: Wired | None = None
        ground = self.ground
        self._starting = StartProgress(
            ground.phase, ground.process.notify, ground.settings, ground.telemetry, ground.clock
        )
        self._opening: asyncio.Event | None = None  # set when it has ended, either way
        self._ending: DrainTask | None = None

    # -- life ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        with self._starting:
            await self.open()
            wired, ending = self._built, await self._opened()
            await Start(self.ground, wired, self._starting).run_unless_stopped(ending)
        ending.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drain, if that was not done before; takes at most until the hard limit.

        Raises:
            asyncio.CancelledError: this wait was cancelled, which forces the drain: what still
                ran was handed over at once.
        """
        if self.report is None:
            reason = "the block ended" if error is None else f"the block raised {error!r}"
            self.request_stop(source="user", by="embedder", reason=reason)
            with _shielded():
                await (await self._opened()).wait_or_force()

    async def open(self) -> None:
        """Take the signals, open the store, take an instance, and write the row of this run.

        Raises:
            ConfigError: the store cannot be used as configured, or no event loop of asyncio runs.
            AlreadyRunningError: a run of this instance lives.
            DeclarationError: `signals=True` outside of the main thread, or while another Runtime
                of this process has the signals.
            GracekitError: it was opened before.
        """
        background.need_loop()
        if self._opening is not None and not (self._opening.is_set() and self.wired is None):
            raise GracekitError(
                "this Runtime was opened before, and is one run of its service: to run it again, "
                "make another Runtime"
            )
        self._opening = asyncio.Event()
        try:
            self.wired = await open_run(self.ground, self._starting)
            self._ending = DrainTask(self.ground, self.wired)
        finally:
            self._opening.set()
        self.ground.telemetry.watch(self)

    async def serve(self) -> DrainReport:
        """Wait until a stop was asked for and the drain is over; returns the report.

        May be awaited by several tasks at a time, or not at all, and may be cancelled: the service
        drains once, when it is asked to.

        Raises:
            GracekitError: the Runtime is not open.
        """
        return await (await self._opened()).wait()

    async def _opened(self) -> DrainTask:
        if self._opening is None:
            raise GracekitError(
                "this Runtime is not open: nothing would be served; serve inside of "
                "`async with runtime`"
            )
        await self._opening.wait()
        if self._ending is None:
            raise GracekitError("this Runtime did not open, and has nothing to serve")
        return self._ending

    def request_stop(
        self,
        *,
        source: StopSource = "user",
        by: str = "program",
        reason: str = "",
        final: bool = True,
    ) -> None:
        """Ask for a drain; to be called on the event loop. The first request counts.

        A request before the Runtime is open is kept: the service then starts
        nothing and drains at once.

        Args:
            source: Kind of the sender, for the record.
            by: Who asks, for the record.
            reason: Why, in a sentence, for the record.
            final: Whether the drain cannot be resumed.

        Raises:
            ConfigError: there is no such source.
        """
        self.ground.stops.ask(source=source, by=by, reason=reason, final=final)

    # -- what can be read of it ---------------------------------------------------------

    @property
    def leases(self) -> Leases:
        """The leases that people hold in this run; those of tasks are `ctx.lease`.

        Raises:
            GracekitError: the Runtime is not open.
        """
        return self._built.leases

    @property
    def service(self) -> Service:
        """The service that it runs."""
        return self.ground.service

    @property
    def settings(self) -> Settings:
        """The settings in force now, from all sources."""
        return self.ground.settings

    @property
    def run_id(self) -> str:
        """Id of this run; empty before it is open."""
        return self.ground.seat.run_id

    @property
    def instance(self) -> str:
        """Name of the instance of this run; empty before it is open."""
        return self.ground.seat.instance

    @property
    def admin(self) -> AdminApi | None:
        """What `gracekit.web.application` serves; None before it is open. Internal."""
        return None if self.wired is None else self.wired.admin

    @property
    def label_words(self) -> LabelWords:
        """Every value that a label of its metrics may have."""
        return label_words(self.ground.service)

    def readings(self) -> Readings:
        """What the gauges of its metrics show now. From any thread, but only once it is open."""
        return self._built.gauges.read()

    @property
    def report(self) -> DrainReport | None:
        """The report of the drain; None until it is over."""
        return None if self._ending is None else self._ending.report

    @property
    def state(self) -> ServiceState:
        """The state of the service."""
        return self.ground.phase.state

    @property
    def not_ready(self) -> str | None:
        """Why no new requests should be sent to it now; None if it is ready.

        It is ready if it is SERVING, can reach its store, and could read its queues within the last
        five seconds.
        """
        return self.ground.phase.not_ready

    @property
    def _built(self) -> Wired:
        assert self.wired is not None, "open() first"
        return self.wired


def _shielded() -> contextlib.AbstractContextManager[Any]:
    """A block whose waits go on in a cancelled scope of anyio, which would cancel each of them.

    Only a program that has loaded anyio can be in one.
    """
    anyio = sys.modules.get("anyio")
    return contextlib.nullcontext() if anyio is None else anyio.CancelScope(shield=True)
