"""Builds all objects of one run of a service.

`wire` returns a frozen value. Nothing is started here; `start_order` has the list of what starts
when.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Final

from gracekit.admin.api import AdminApi
from gracekit.callables import name_of
from gracekit.config.values import words_in
from gracekit.control.accounts import AccountsCount
from gracekit.control.caller_tasks import CallerTasks
from gracekit.control.facts import StoreFacts
from gracekit.control.gauges import Gauges
from gracekit.control.hand_passes import HandPasses
from gracekit.control.health import HealthCheck
from gracekit.control.orders import Orders
from gracekit.control.reload import Reload
from gracekit.control.signal_orders import SignalOrders
from gracekit.control.verbs import Control
from gracekit.dispatcher import Dispatcher
from gracekit.drain.bounded import Drained
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.drain.report import DrainReport
from gracekit.errors import DeclarationError
from gracekit.hooks import ServiceHooks
from gracekit.journal.claims import Claims
from gracekit.journal.findings import FindingRows
from gracekit.journal.holds import Holds
from gracekit.journal.outbox import OutboxRows
from gracekit.journal.pending import PendingRows
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import RunLeases
from gracekit.leases.lines import Lines
from gracekit.leasing import Leases
from gracekit.listings.store_view import StoreView
from gracekit.periodic import PeriodicJobs
from gracekit.recovery.reconciler import Reconciler
from gracekit.recovery.shared import Shared
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.context import Services
from gracekit.request.custody import Custody
from gracekit.request.lanes import MAX_ACCEPTED, ClaimLimit, LaneGate, Scheduler, can_accept
from gracekit.request.outbox_sender import Outbox
from gracekit.request.parked_tasks import ParkedTasks
from gracekit.request.parking import ParkingPlace
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.refusals import Detour, Refusals
from gracekit.request.suspects import Suspects
from gracekit.request.waits import LeaseWaits
from gracekit.rpc import offer
from gracekit.rpc.client import RpcClient
from gracekit.rpc.connect import written_url
from gracekit.rpc.server import Capacity, RpcServer
from gracekit.rpc.transport import Queue, directed_queue, fanout_queue, shared_queue
from gracekit.runs.members import Members
from gracekit.runs.own import OwnRecord
from gracekit.runtime.built import Ground, Records, Requests, Wired
from gracekit.runtime.start_order import in_order
from gracekit.tracker.task import History, Lane
from gracekit.version import VERSION

SCOPE: Final = re.compile(r"[\w.:-]{1,100}")


def wire(ground: Ground) -> Wired:
    """Build one run. The seat must be taken, and an event loop must run."""
    records = _records(ground)
    requests = _requests(ground, records)
    servers = {lane: _server(ground, lane, requests) for lane in requests.gates}
    reconciler = _reconciler(ground, records, requests, servers)
    jobs = _jobs(ground, requests)
    hooks = _hooks(ground)
    parts = Drained(
        tracker=requests.services.tracker,
        dispatcher=requests.dispatcher,
        servers=servers,
        jobs=jobs,
        reconciler=reconciler,
        holds=requests.services.holds,
        hooks=hooks,
        seat=ground.seat,
        record=records.own,
        process=ground.process,
        alarm=ground.signals is not None,
        ends_process=ground.signals is not None and ground.signals.for_good,
    )
    coordinator = ShutdownCoordinator(
        ground.phase, parts, ground.live, ground.telemetry, ground.clock
    )
    view = _view(ground)
    accounts = AccountsCount(view, ground.location.reader(), ground.process.threads(1))
    facts = StoreFacts(view, accounts, ground.telemetry, servers, service=ground.service.topic)
    health = HealthCheck(ground.phase, coordinator, servers, ground.engine, facts, ground.clock)
    passes = HandPasses(reconciler, ground.service.kinds, ground.clock)
    control = _control(ground, records, requests, coordinator, health, passes)
    gauges = _gauges(ground, records, requests, servers, jobs, facts)
    admin = _admin(ground, control, health, gauges, facts, view, records.held)
    return Wired(
        record=records.own,
        journal=records.journal,
        tracker=requests.services.tracker,
        history=requests.history,
        gates=requests.gates,
        trigger=requests.trigger,
        answers=requests.answers,
        dispatcher=requests.dispatcher,
        reconciler=reconciler,
        servers=servers,
        coordinator=coordinator,
        control=control,
        leases=records.held,
        signal_orders=_signal_orders(ground, control, coordinator),
        admin=admin,
        gauges=gauges,
        parts=in_order(ground, records, requests, parts, coordinator, control, admin, facts),
    )


def _hooks(ground: Ground) -> ServiceHooks:
    on_start, on_stop = ground.service.start_hooks, ground.service.stop_hooks
    return ServiceHooks(
        on_start,
        on_stop,
        ground.telemetry,
        ground.clock,
        ground.process.threads(len(on_start) + len(on_stop) + 1),
        start_timeout_s=ground.settings.start_timeout_s,
        stop_timeout_s=ground.settings.stop_hook_timeout_s,
    )


# -- what a run is made of ----------------------------------------------------------------


def _records(ground: Ground) -> Records:
    settings, clock, seat = ground.settings, ground.clock, ground.seat
    locks = ground.location.run_directory
    names = {"run_id": seat.run_id, "service": ground.service.topic}
    members = Members(
        ground.engine, clock, ground.process, lock_directory=locks, heart=seat.heart, **names
    )
    wakeups = ground.location.wakeups(seat.run_id)
    cancelled = DrainReport(failure="the start was cancelled")
    topics = ground.topics
    own = OwnRecord(
        ground.engine,
        seat,
        members,
        wakeups,
        ground.process,
        keeps_wishes=settings.instance is not None and settings.on_user_stop == "down",
        written={
            "host": settings.host,
            "version": VERSION,
            "topic": topics[Lane.REQUESTS],
            "ops_topic": topics[Lane.OPS],
            "transport": written_url(settings.transport_url),
            "schema": ground.location.schema,
            "methods": offer.written(ground.service.methods),
            "kinds": json.dumps(sorted(kind.name for kind in ground.service.kinds)),
        },
        cancelled=(int(cancelled.exit_code), cancelled.as_json()),
    )
    journal = Journal(ground.engine, clock, keep_failed=settings.keep_failed_arguments, **names)
    return Records(
        journal=journal,
        pending=PendingRows(journal),
        notifications=OutboxRows(journal),
        members=members,
        leases=RunLeases(ground.engine, clock, run_id=seat.run_id),
        held=Leases.within(ground.engine, seat, members, _view(ground), ground.telemetry, clock),
        wakeups=wakeups,
        own=own,
    )


def _requests(ground: Ground, records: Records) -> Requests:
    settings, clock, telemetry = ground.settings, ground.clock, ground.telemetry
    journal, leases = records.journal, records.leases
    trigger, lines = RecoveryTrigger(), Lines()
    outbox = _outbox(ground, records)
    clients: dict[str, RpcClient] = {}
    services = _services(ground, records, outbox, clients, trigger)
    answers = Answers(
        ground.transport,
        journal,
        ground.process,
        telemetry,
        clock,
        error_details=settings.error_details,
    )
    arrivals = _arrivals(ground, records, answers)
    suspects = Suspects(clock, journal.parole, telemetry)
    custody = Custody(journal, leases, telemetry, trigger, outbox)
    scheduler = Scheduler(lines, suspects, ground.tracker, telemetry)
    waits = LeaseWaits(
        custody,
        leases,
        scheduler,
        clock,
        run_id=ground.seat.run_id,
        wakeups=records.wakeups,
        trigger=trigger,
        settles=settings.startup_reconciliation_enabled,
    )
    history, gates = History(), _gates(ground)
    methods, resize = ground.service.methods, partial(scheduler.resize, gates[Lane.REQUESTS])
    ground.live.on_change(lambda _, now: resize(now.max_running, places=can_accept(now, methods)))
    dispatcher = Dispatcher(
        services,
        arrivals,
        custody,
        scheduler,
        waits,
        answers,
        ParkingPlace(journal, records.pending, custody, outbox, settings, trigger=trigger),
        telemetry,
        gates=gates,
        history=history,
    )
    return Requests(
        services=services,
        arrivals=arrivals,
        answers=answers,
        clients=clients,
        suspects=suspects,
        lines=lines,
        trigger=trigger,
        waits=waits,
        history=history,
        gates=gates,
        dispatcher=dispatcher,
        outbox=outbox,
    )


def _arrivals(ground: Ground, records: Records, answers: Answers) -> Arrivals:
    service, clock, telemetry = ground.service, ground.clock, ground.telemetry
    keys, detour = service.context_keys, Detour(records.members, clock, telemetry)
    who = words_in(ground.settings.dedupe_context)
    return Arrivals(
        service.methods,
        Refusals(records.journal, answers, telemetry, clock, detour, keys, who),
        ground.phase,
        ground.settings,
        clock,
        instance=ground.seat.instance,
        is_directed=service.queues == "directed",
    )


def _outbox(ground: Ground, records: Records) -> Outbox:
    return Outbox(
        ground.transport,
        records.notifications,
        records.journal,
        ground.process,
        ground.telemetry,
        topic=ground.settings.notification_topic_of(ground.service.topic),
        publisher=f"{ground.service.topic}.{ground.settings.host}",
    )


def _services(
    ground: Ground,
    records: Records,
    outbox: Outbox,
    clients: dict[str, RpcClient],
    trigger: RecoveryTrigger,
) -> Services:
    parked_tasks = ParkedTasks(
        records.journal,
        records.pending,
        outbox,
        ground.service.methods,
        ground.telemetry,
        trigger=trigger,
        members=records.members,
        wakeups=records.wakeups,
        shows_classes=ground.settings.error_details != "none",
    )
    return Services(
        journal=records.journal,
        holds=Holds(records.journal, host=ground.settings.host),
        leases=records.leases,
        tracker=ground.tracker,
        phase=ground.phase,
        clock=ground.clock,
        loop=asyncio.get_running_loop(),
        parked_tasks=parked_tasks,
        trigger=trigger,
        request_stop=lambda by, reason: ground.stops.ask(
            source="user", by=by, reason=reason, stays_down=True
        ),
        client=partial(_client, ground, clients),
        host=ground.settings.host,
        parks=ground.settings.use_pending_state,
        safe_points=ground.process.safe_points,
    )


def _client(ground: Ground, clients: dict[str, RpcClient], topic: str | None) -> RpcClient:
    """The run's own client of the service with that topic, None for this one; made at first use.

    Raises:
        ConfigError: *topic* cannot be one.
    """
    own = ground.service.topic
    topic = own if topic is None else topic
    if topic not in clients:
        clients[topic] = RpcClient(
            ground.transport,
            topic,
            ops_topic=ground.settings.ops_topic_of(topic) if topic == own else None,
            exceptions=ground.service.exceptions,
            clock=ground.clock,
            max_body_bytes=ground.settings.max_body_bytes,
        )
    return clients[topic]


def _gates(ground: Ground) -> dict[Lane, LaneGate]:
    settings, threads = ground.settings, ground.process.threads
    return {
        Lane.REQUESTS: LaneGate(
            Lane.REQUESTS,
            Capacity(can_accept(settings, ground.service.methods)),
            ClaimLimit(ahead=settings.max_running, total=settings.max_accepted or MAX_ACCEPTED),
            settings.max_running,
            threads(settings.threads),
            threads(settings.threads),
        ),
        Lane.OPS: LaneGate(
            Lane.OPS,
            Capacity(settings.ops_max_accepted),
            ClaimLimit(ahead=settings.ops_max_running, total=settings.ops_max_accepted),
            settings.ops_max_running,
            threads(settings.ops_threads),
            threads(settings.ops_threads),
        ),
    }


def _scoped(ground: Ground) -> str:
    """The host, or what of it the service finds its resources for."""
    host, scope = ground.settings.host, ground.service.scope
    if scope is None:
        return host
    name: object = scope()
    if not isinstance(name, str) or not SCOPE.fullmatch(name):
        raise DeclarationError(
            f"scope={name_of(scope)} returned {name!r}: it names a part of the host by letters, "
            "digits, '_', '-', '.' and ':'"
        )
    return f"{host}/{name}"


def _reconciler(
    ground: Ground,
    records: Records,
    requests: Requests,
    servers: Mapping[Lane, RpcServer],
) -> Reconciler:
    settings, telemetry = ground.settings, ground.telemetry
    shared = Shared(
        services=requests.services,
        dispatcher=requests.dispatcher,
        claims=Claims(
            records.journal,
            host=settings.host,
            instance=ground.seat.instance,
            on_damage=lambda e: telemetry.emit("store.error", what="row", error=str(e)),
        ),
        members=records.members,
        arrivals=requests.arrivals,
        answers=requests.answers,
        lines=requests.lines,
        suspects=requests.suspects,
        methods=ground.service.methods,
        gates=requests.gates,
        findings=FindingRows(records.journal, host=_scoped(ground)),
        pending=records.pending,
        notifications=records.notifications,
        outbox=requests.outbox,
        threads=ground.process.threads(settings.threads),
        is_local=ground.transport.is_local,
        trigger=requests.trigger,
        settings=settings,
        telemetry=telemetry,
    )
    reconciler = Reconciler(shared, ground.service.kinds, servers)
    # An order is carried out below recovery, and recovery starts the task.
    requests.services.parked_tasks.commit_retry = reconciler.starts.commit_retry
    return reconciler


def _jobs(ground: Ground, requests: Requests) -> PeriodicJobs:
    return PeriodicJobs(
        ground.service.jobs,
        requests.services,
        ground.telemetry,
        ground.process.threads(ground.settings.threads),
        requests.suspects,
        requests.trigger,
    )


def _server(ground: Ground, lane: Lane, requests: Requests) -> RpcServer:
    settings, capacity = ground.settings, requests.gates[lane].capacity
    return RpcServer(
        ground.transport,
        _queues(ground, lane),
        lambda delivery: requests.dispatcher.take(delivery, lane),
        capacity,
        prefetch=min(settings.prefetch, capacity.total),
        prefetch_bytes=settings.prefetch_bytes,
        wait_s=settings.accept_wait_s,
        cancel_ok_timeout_s=settings.cancel_ok_timeout_s,
    )


def _queues(ground: Ground, lane: Lane) -> list[Queue]:
    topic, names = ground.topics[lane], [ground.settings.host]
    if lane is Lane.OPS and ground.seat.instance not in names:
        names.append(ground.seat.instance)  # control verbs are for one run, not for a host
    directed = [directed_queue(topic, name) for name in names]
    is_shared = lane is Lane.OPS or ground.service.queues == "all"
    shared = [shared_queue(topic)] if is_shared else []
    return [*shared, *directed, fanout_queue(topic, ground.seat.run_id)]


# -- the operator -------------------------------------------------------------------------


def _control(
    ground: Ground,
    records: Records,
    requests: Requests,
    coordinator: ShutdownCoordinator,
    health: HealthCheck,
    passes: HandPasses,
) -> Control:
    tracker = requests.services.tracker
    orders = Orders(
        records.journal,
        tracker,
        requests.dispatcher,
        requests.services.parked_tasks,
        ground.telemetry,
        trigger=requests.trigger,
    )
    return Control(
        run_id=ground.seat.run_id,
        service=ground.service.topic,
        instance=ground.seat.instance,
        phase=ground.phase,
        tracker=tracker,
        coordinator=coordinator,
        orders=orders,
        callers=_callers(ground, records, requests, orders),
        health=health,
        journal=records.journal,
        stacks=ground.stacks,
        stacks_thread=ground.process.threads(1),
        passes=passes,
        telemetry=ground.telemetry,
        clock=ground.clock,
    )


def _callers(ground: Ground, records: Records, requests: Requests, orders: Orders) -> CallerTasks:
    settings, service = ground.settings, ground.service
    callers = CallerTasks(
        records.journal,
        requests.answers,
        orders,
        service.methods,
        ground.tracker,
        ground.phase,
        ground.clock,
        host=settings.host,
        who=settings.dedupe_context,
        is_apart=service.queues == "directed" or settings.accept_unshared_store,
        is_on=service.answers_callers,
    )
    # A cancel is an order, which the rooms above carry out.
    requests.arrivals.answer_caller = callers.take
    return callers


def _signal_orders(
    ground: Ground, control: Control, coordinator: ShutdownCoordinator
) -> SignalOrders:
    process, telemetry = ground.process, ground.telemetry
    reload = Reload(
        ground.live,
        coordinator,
        ground.phase,
        process.notify,
        process.threads(1),
        telemetry,
    )
    return SignalOrders(control, coordinator, ground.phase, reload, telemetry)


def _view(ground: Ground) -> StoreView:
    return StoreView(
        ground.engine,
        ground.process,
        ground.location.run_directory,
        ground.clock,
        is_shared=ground.location.is_shared,
    )


def _gauges(
    ground: Ground,
    records: Records,
    requests: Requests,
    servers: Mapping[Lane, RpcServer],
    jobs: PeriodicJobs,
    facts: StoreFacts,
) -> Gauges:
    return Gauges(
        ground.phase,
        ground.tracker,
        records.members,
        requests.gates,
        servers,
        ground.transport,
        jobs,
        facts,
        loop=asyncio.get_running_loop(),
    )


def _admin(
    ground: Ground,
    control: Control,
    health: HealthCheck,
    gauges: Gauges,
    facts: StoreFacts,
    view: StoreView,
    leases: Leases,
) -> AdminApi:
    store = ground.location.name or ground.location.url
    run_id, live = ground.seat.run_id, ground.live
    return AdminApi(run_id, control, health, gauges, facts, view, live, leases, store=store)
