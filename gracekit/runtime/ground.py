"""Makes what one run needs before it opens anything, from settings and ports; and its metrics."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import Final

from gracekit.clock import Clock
from gracekit.config.choices import RejectReason, choices_of
from gracekit.config.live import LiveSettings
from gracekit.config.loading import load
from gracekit.config.settings import ALARM_AFTER_HARD_LIMIT_S, Settings
from gracekit.periodic import JobOutcome
from gracekit.phase import Phase, ServiceState
from gracekit.process import Process, refuse_patched_threads
from gracekit.recovery.decisions import Step
from gracekit.recovery.resources.results import ResourceOutcome
from gracekit.request.attempt import CALLERS
from gracekit.rpc.connect import open_transport
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.transport import Transport
from gracekit.runs.own import OwnSeat
from gracekit.runtime.built import Ground, KeptStops
from gracekit.service import Service
from gracekit.stop_signals import StopSignals
from gracekit.store.engine import Engine
from gracekit.store.location import StoreLocation
from gracekit.telemetry.metrics import LabelWords
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.stacks import StackDump
from gracekit.tracker.task import TERMINAL, TRANSIENT, Lane, TaskState
from gracekit.tracker.tracker import Tracker
from gracekit.version import VERSION

_ENDS: Final = frozenset(state.value for state in TERMINAL - {TaskState.REJECTED})


def label_words(service: Service) -> LabelWords:
    """Every value that a label of the service's metrics may have."""
    methods = frozenset(method.name for method in service.methods)
    jobs = frozenset(job.name for job in service.jobs)
    return {
        "methods": methods,
        "jobs": jobs,
        "handlers": methods | jobs,
        "lanes": frozenset(lane.value for lane in Lane),
        "outcomes": _ENDS,
        "decisions": _ENDS | {Step.RUN_AGAIN.value},
        "reasons": frozenset(choices_of(RejectReason)),
        "states": frozenset(state.value for state in TRANSIENT),
        "job_outcomes": frozenset(outcome.value for outcome in JobOutcome),
        "kinds": frozenset(kind.name for kind in service.kinds),
        "resource_outcomes": frozenset(outcome.value for outcome in ResourceOutcome),
        "phases": frozenset(state.value for state in ServiceState),
        "versions": frozenset({VERSION}),
    }


def count_metrics(service: Service, telemetry: Telemetry) -> RunMetrics | None:
    """Begin to count for `/metrics`; None if `prometheus_client` is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    counted = RunMetrics(label_words(service))
    telemetry.count_into(counted)
    return counted


def lay_ground(
    service: Service,
    settings: Settings | LiveSettings | None,
    *,
    signals: bool,
    process: Process | None,
    clock: Clock | None,
    engine: Engine | None,
    transport: Transport | None,
    broker: MemoryBroker | None,
    telemetry: Telemetry | None,
) -> Ground:
    """Make the ports that were not given; the arguments are those of `Runtime`.

    Opens nothing, and needs no running event loop.

    Raises:
        ConfigError: a setting is wrong, or the topics do not fit together.
        DeclarationError: a kind of resources cannot work, or eventlet has patched the threads.
    """
    refuse_patched_threads()
    settings = settings or load({}, os.environ, defaults=service.defaults)
    live = LiveSettings(settings) if isinstance(settings, Settings) else settings
    settings = live.now
    settings.ops_topic_of(service.topic)  # raises before anything is made
    settings.notification_topic_of(service.topic)
    service.check()
    telemetry, process, clock = telemetry or Telemetry(), process or Process(), clock or Clock()
    location = StoreLocation(settings)
    engine = engine or location.engine(process)
    engine.commits.on_commit(telemetry.note_commit)
    seat = OwnSeat(
        engine,
        location,
        process,
        clock,
        telemetry,
        settings,
        service=service.topic,
    )
    transport = transport or _transport(settings, process, clock, broker, telemetry)
    telemetry.tracing.messaging = transport.messaging
    tracker = Tracker()
    stacks = StackDump(partial(_title, service, seat), tracker, callers=CALLERS)
    return Ground(
        service=service,
        live=live,
        process=process,
        clock=clock,
        location=location,
        engine=engine,
        transport=transport,
        telemetry=telemetry,
        phase=Phase(engine.commits.blocked),
        tracker=tracker,
        stacks=stacks,
        stops=KeptStops(clock),
        seat=seat,
        signals=_signals(live, process, telemetry, stacks) if signals else None,
    )


def _transport(
    settings: Settings,
    process: Process,
    clock: Clock,
    broker: MemoryBroker | None,
    telemetry: Telemetry,
) -> Transport:
    return open_transport(
        settings.transport_url,
        process=process,
        clock=clock,
        broker=broker,
        exchange=settings.exchange,
        profile=settings.declare_profile,
        max_body_bytes=settings.max_body_bytes,
        telemetry=telemetry,
    )


def _signals(
    live: LiveSettings,
    process: Process,
    telemetry: Telemetry,
    stacks: StackDump,
) -> StopSignals:
    return StopSignals(
        process,
        telemetry,
        alarm_s=lambda: live.now.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S,
        on_dump=stacks.write,
    )


def _title(service: Service, seat: OwnSeat) -> str:
    """First line of a dump of stacks; the name of the instance is known once the seat is taken."""
    return f"gracekit {service.topic}@{seat.instance or '?'} pid {os.getpid()}"
