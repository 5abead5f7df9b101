"""The Runtime: one run of one service, as the program that embeds it sees it.

The face only. `ground` has what there is before a run opens, `opening` opens it, `start` starts
what `wiring` has built, and `ending` drains it, once.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import anyio

from gracekit import background
from gracekit.admin.api import AdminApi
from gracekit.clock import Clock
from gracekit.config.choices import StopSource
from gracekit.config.live import LiveSettings
from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.errors import GracekitError
from gracekit.phase import ServiceState
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.transport import Transport
from gracekit.runtime.built import Wired
from gracekit.runtime.ending import Ending
from gracekit.runtime.ground import lay_ground
from gracekit.runtime.metrics import label_words
from gracekit.runtime.opening import open_run
from gracekit.runtime.start import Start
from gracekit.service import Service
from gracekit.store.engine import Engine
from gracekit.telemetry.metrics import LabelWords
from gracekit.telemetry.readings import Readings
from gracekit.telemetry.telemetry import Telemetry
from gracekit.upkeep import Starting


class Runtime:
    """One run of one service.

    Use it embedded as `async with Runtime(service, settings) as runtime: await
    runtime.serve()`; `run_service` and the CLI add the signals.

    Args:
        service: What to serve.
        settings: Used as they are. None for the environment's, over the service's own defaults.
            `gracekit.config.LiveSettings(settings, read=...)` says how SIGHUP reads them again.
        signals: Whether this Runtime owns the process's stop signals and its kernel
            alarm, from `open` to the end of its drain: SIGTERM and SIGINT drain, a
            second SIGINT or SIGQUIT hands over at once; SIGUSR1 writes the stacks. SIGHUP
            drains where standard input is a terminal. Elsewhere it reads the settings
            again (see `settings`), SIGTSTP closes the intake, and SIGCONT opens it; these
            three stay the program's where it has handlers for them. After the drain the
            old handlers are back. The alarm stays only
            where the report says `must_die`: a handler or a hook goes on although it was
            cancelled, and only the end of the process ends it.
        process: The process port.
        clock: The clock port.
        engine: The store port; None opens `settings.store_url`.
        transport: The transport port; None opens `settings.transport_url`.
        broker: The machine behind `memory://`.

    Attributes:
        ground: What there was before it opened. Internal: any release may change it.
        wired: What it is made of; None before it is open. Internal as well.
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
        self._starting = Starting(
            ground.phase, ground.process.notify, ground.settings, ground.telemetry, ground.clock
        )
        self._opening: asyncio.Event | None = None  # set when it has ended, either way
        self._ending: Ending | None = None

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
        """Drain, if nothing has yet: within the hard limit, however the block was left.

        Raises:
            asyncio.CancelledError: this wait was cancelled, which forces the drain: what still
                ran was handed over at once.
        """
        if self.report is None:
            reason = "the block ended" if error is None else f"the block raised {error!r}"
            self.request_stop(source="user", by="embedder", reason=reason)
            with anyio.CancelScope(shield=True):  # a cancelled scope of anyio's cancels each wait
                await (await self._opened()).wait_or_force()

    async def open(self) -> None:
        """Signals, store, seat and record: then everything is built, and others see this run.

        Raises:
            ConfigError: the store cannot be used as configured, or no event loop of asyncio runs.
            AlreadyRunningError: a run of this instance lives.
            DeclarationError: `signals=True` outside of the main thread, or while another Runtime
                of this process has the signals.
            GracekitError: it is open, or was.
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
            self._ending = Ending(self.ground, self.wired)
        finally:
            self._opening.set()
        self.ground.telemetry.watch(self)

    async def serve(self) -> DrainReport:
        """Wait for the end: until a stop is asked for and the drain is over; returns its report.

        May be awaited by several at a time, by nobody, and be cancelled: the service drains when
        it is asked to, once.

        Raises:
            GracekitError: the Runtime is not open.
        """
        return await (await self._opened()).wait()

    async def _opened(self) -> Ending:
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
        self.ground.stops.ask(source=source, by=by, reason=reason, final=final)

    # -- what it says of itself ---------------------------------------------------------

    @property
    def service(self) -> Service:
        """What it serves."""
        return self.ground.service

    @property
    def settings(self) -> Settings:
        """What it is configured with now, all sources taken together."""
        return self.ground.settings

    @property
    def run_id(self) -> str:
        """Id of this run; empty before it is open."""
        return self.ground.seat.run_id

    @property
    def instance(self) -> str:
        """Name of the instance that this run is; empty before it is open."""
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
        """What the gauges of its metrics show now, once it is open; from any thread."""
        return self._built.gauges.read()

    @property
    def report(self) -> DrainReport | None:
        """What the drain has left; None until it is over."""
        return None if self._ending is None else self._ending.report

    @property
    def state(self) -> ServiceState:
        """Where the service is in its life."""
        return self.ground.phase.state

    @property
    def not_ready(self) -> str | None:
        """Why no new requests should be sent here now; None if it is ready.

        Ready is a service that is SERVING, unless it has not been able to read its queues for
        five seconds.
        """
        return self.ground.phase.not_ready

    @property
    def _built(self) -> Wired:
        assert self.wired is not None, "open() first"
        return self.wired
