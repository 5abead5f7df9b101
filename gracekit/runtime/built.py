"""The objects of one run, as frozen values: `ground` makes the first, `wiring` the others.

A program may ask for a stop before there is a coordinator: such a request is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gracekit.admin.api import AdminApi
from gracekit.clock import Clock
from gracekit.config.choices import StopSource, choices_of
from gracekit.config.live import LiveSettings
from gracekit.config.settings import Settings
from gracekit.config.values import did_you_mean
from gracekit.control.gauges import Gauges
from gracekit.control.signal_orders import SignalOrders
from gracekit.control.verbs import Control
from gracekit.dispatcher import Dispatcher
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.drain.report import StopRequest
from gracekit.errors import ConfigError
from gracekit.journal.outbox import OutboxRows
from gracekit.journal.pending import PendingRows
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import RunLeases
from gracekit.leases.lines import Lines
from gracekit.leasing import Leases
from gracekit.parts import PartList
from gracekit.phase import Phase
from gracekit.process import Process
from gracekit.recovery.reconciler import Reconciler
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.context import Services
from gracekit.request.lanes import LaneGate
from gracekit.request.outbox_sender import Outbox
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.suspects import Suspects
from gracekit.request.waits import LeaseWaits
from gracekit.rpc.client import RpcClient
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import Transport
from gracekit.runs.members import Members
from gracekit.runs.own import OwnRecord, OwnSeat
from gracekit.service import Service
from gracekit.stop_signals import StopSignals
from gracekit.store.engine import Engine
from gracekit.store.location import StoreLocation
from gracekit.store.wakeup import Wakeups
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.stacks import StackDump
from gracekit.tracker.task import History, Lane
from gracekit.tracker.tracker import Tracker


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has before it opens: the service, the four ports, the settings, the seat.

    Attributes:
        live: The settings, of which a few may change; `settings` are the present ones.
        tracker: Made here, because a dump of stacks may be asked for at any time.
        stacks: Makes that dump.
        stops: Made here, because a stop may be asked for at any time.
        signals: None if this Runtime does not own the signals of the process.
    """

    service: Service
    live: LiveSettings
    process: Process
    clock: Clock
    location: StoreLocation
    engine: Engine
    transport: Transport
    telemetry: Telemetry
    phase: Phase
    tracker: Tracker
    stacks: StackDump
    stops: KeptStops
    seat: OwnSeat
    signals: StopSignals | None

    @property
    def settings(self) -> Settings:
        """The settings as they are now."""
        return self.live.now

    @property
    def topics(self) -> dict[Lane, str]:
        """The topic that the RPC server of each lane reads."""
        topic = self.service.topic
        return {Lane.REQUESTS: topic, Lane.OPS: self.settings.ops_topic_of(topic)}


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that read and write the store."""

    journal: Journal
    pending: PendingRows
    notifications: OutboxRows
    members: Members
    leases: RunLeases
    held: Leases
    wakeups: Wakeups
    own: OwnRecord


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that carry requests through their life.

    Attributes:
        clients: Those that handlers, hooks and jobs have asked for, by topic.
    """

    services: Services
    arrivals: Arrivals
    answers: Answers
    clients: Mapping[str, RpcClient]
    suspects: Suspects
    lines: Lines
    trigger: RecoveryTrigger
    waits: LeaseWaits
    history: History
    gates: Mapping[Lane, LaneGate]
    dispatcher: Dispatcher
    outbox: Outbox


class Wired(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a service, built and not started.

    Attributes:
        admin: What the HTTP endpoint shows and does; made even if there is no endpoint.
        gauges: Reads the gauges of the run's metrics.
        parts: The parts that start and stop, in their order.
    """

    record: OwnRecord
    journal: Journal
    tracker: Tracker
    history: History
    gates: Mapping[Lane, LaneGate]
    trigger: RecoveryTrigger
    answers: Answers
    dispatcher: Dispatcher
    reconciler: Reconciler
    servers: Mapping[Lane, RpcServer]
    coordinator: ShutdownCoordinator
    control: Control
    leases: Leases
    signal_orders: SignalOrders
    admin: AdminApi
    gauges: Gauges
    parts: PartList


class KeptStops:
    """Passes the program's stop requests to the coordinator, and keeps them until there is one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._coordinator: ShutdownCoordinator | None = None
        self._kept: list[Callable[[ShutdownCoordinator], None]] = []

    def ask(
        self,
        *,
        source: StopSource,
        by: str,
        reason: str,
        final: bool = True,
        stays_down: bool = False,
    ) -> None:
        """Ask for a drain; see `Runtime.request_stop` and `StopRequest`.

        Raises:
            ConfigError: there is no such source, or *by* or *reason* is no text.
        """
        sources = choices_of(StopSource)
        if source not in sources:
            hint = did_you_mean(str(source), sources)
            raise ConfigError(f"source={source!r} is none of {', '.join(sources)}{hint}")
        for name, text in (("by", by), ("reason", reason)):
            if not isinstance(text, str):
                raise ConfigError(f"{name}={text!r} is no text; say in words who asks, and why")

        def ask(coordinator: ShutdownCoordinator) -> None:
            at = self._clock.loop()  # a kept request counts from the opening, with its whole time
            coordinator.request_stop(
                StopRequest(
                    source=source, by=by, reason=reason, final=final, at=at, stays_down=stays_down
                )
            )

        self._pass_on(ask)

    def fail(self, reason: str) -> None:
        """Note that the end is not in order; see `ShutdownCoordinator.fail`."""
        self._pass_on(lambda coordinator: coordinator.fail(reason))

    def _pass_on(self, step: Callable[[ShutdownCoordinator], None]) -> None:
        if self._coordinator is None:
            self._kept.append(step)
        else:
            step(self._coordinator)

    def hand_to(self, coordinator: ShutdownCoordinator) -> None:
        """Pass the kept requests to *coordinator*, in order, and later ones at once."""
        self._coordinator = coordinator
        kept, self._kept = self._kept, []
        for step in kept:
            step(coordinator)
