"""The order of a service: what starts before what, and stops after it.

This list is the only place that knows it. A new part is one more line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gracekit.background import Background, Work
from gracekit.built import Ground, Records, Requests
from gracekit.drain.coordinator import RECORD, ShutdownCoordinator
from gracekit.drain.parts import Parts
from gracekit.errors import StoreError
from gracekit.journal.retention import Retention
from gracekit.journal.tasks import Journal
from gracekit.leases.epoch import Epoch
from gracekit.parts import Listed, Once, Part, PartList, Step
from gracekit.phase import ServiceState
from gracekit.recovery.reconciler import Reconciler
from gracekit.rpc.readers import ForeignReaders
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import shared_queue
from gracekit.runs.members import Members
from gracekit.tracker.history import History
from gracekit.tracker.task import Lane
from gracekit.upkeep import LifeSigns, Tidying, Watch, Watchdog


def in_order(
    ground: Ground,
    records: Records,
    requests: Requests,
    parts: Parts,
    coordinator: ShutdownCoordinator,
) -> PartList:
    """All that starts, from the first line down, and stops, from the last line up."""
    settings, reconciler, seat = ground.settings, parts.reconciler, ground.seat
    margin_s = settings.exit_margin_s
    epoch = _epoch(ground, records)
    signs = _life_signs(ground, records, reconciler, coordinator)
    watch = _watch(ground, signs, parts.servers)
    tidying = _tidying(ground, records, epoch, reconciler)
    work = partial(_work, ground)
    feeding = work(Watchdog(ground.telemetry, beat_s=settings.beat_s).feed)
    seed = partial(_seed_history, ground, records.journal, requests.history)
    gate = reconciler.gate if settings.startup_reconciliation_enabled else None
    rings = partial(records.bells.start, requests.pace.poke, on_nudge=requests.waits.wake)
    return PartList(
        [
            # Stopped last: a drain may wait for the store until its end. Started last: what feeds
            # systemd's watchdog also sets it off, and it must not watch a start.
            Listed("end of the watchdog", Once(end=feeding.stop)),
            Listed("store and seat", seat),
            Listed("bell", Once(_soon(rings), end=_soon(records.bells.stop))),
            Listed(RECORD, records.own),
            # A Runtime is open. What follows works, and stops before the stop record.
            Listed("adoption", Once(reconciler.adopt_dead_runs)),
            Listed("history", Once(seed)),
            Listed("transport", ground.transport, reserve_s=margin_s / 4),
            Listed("answers", Once(end=_soon(requests.answers.stop))),
            Listed("epoch", Once(None if epoch is None else epoch.begin)),
            Listed("foreign readers", _readers(ground)),
            Listed("hooks", parts.hooks, reserve_s=margin_s / 4),
            Listed("threads", Once(end=_soon(requests.dispatcher.abandon_threads))),
            Listed("ops server", _intake(ground, Lane.OPS, parts.servers)),
            Listed("gate", Once(gate)),
            Listed("new-request server", _intake(ground, Lane.REQUESTS, parts.servers)),
            Listed("state", Once(partial(_serve, ground, records.members))),
            Listed("recovery", Once(end=reconciler.stop)),
            Listed("reconciler", work(reconciler.run)),
            Listed("jobs", work(parts.jobs.run)),
            Listed("watch", work(watch.watch)),
            Listed("beat", work(signs.beat)),
            Listed("tidying", work(tidying.tidy)),
            Listed("watchdog", Once(feeding.start)),
        ]
    )


def _soon(step: Callable[[], object]) -> Step:
    """A step that does not wait, as one that may."""

    async def take() -> None:
        step()

    return take


def _work(ground: Ground, work: Work) -> Background:
    name = f"gracekit-{work.__qualname__}"
    return Background(work, name, telemetry=ground.telemetry, clock=ground.clock)


def _intake(ground: Ground, lane: Lane, servers: Mapping[Lane, RpcServer]) -> Once:
    server = servers[lane]

    async def start() -> None:
        await server.start()
        ground.telemetry.emit("intake.opened", channel=lane.value)

    return Once(start, end=server.stop)


async def _serve(ground: Ground, members: Members) -> None:
    ground.phase.advance(ServiceState.SERVING)
    await members.beat(ground.phase.state.value)


async def _seed_history(ground: Ground, journal: Journal, history: History) -> None:
    methods = [(method.namespace, method.name) for method in ground.service.methods]
    try:
        history.seed(await journal.last_attempts(), methods)
    except StoreError as error:  # nothing is expected then, and that is safe
        ground.telemetry.emit("store.error", what="history", error=str(error))


def _readers(ground: Ground) -> Part:
    """Refuses to share a queue with a living process that keeps what it takes elsewhere."""
    store = ground.place.identity()
    if store is None:
        return Once()
    queues = [shared_queue(topic) for topic in ground.topics.values()]
    label = f"{ground.service.topic}@{ground.seat.instance}"
    return ForeignReaders(
        partial(ground.transport.announce, queues, store=store, label=label),
        ground.telemetry,
        store=ground.place.url,
        methods=ground.service.methods,
        accepts=ground.settings.accept_unshared_store,
    )


def _epoch(ground: Ground, records: Records) -> Epoch | None:
    name, locks = ground.place.name, ground.place.run_directory
    if name is None or locks is None:
        return None
    keep = ground.transport.keep_mark
    return Epoch(ground.engine, name, locks, keep, records.leases, ground.telemetry, ground.clock)


def _life_signs(
    ground: Ground,
    records: Records,
    reconciler: Reconciler,
    coordinator: ShutdownCoordinator,
) -> LifeSigns:
    return LifeSigns(
        ground.engine,
        ground.seat,
        records.members,
        reconciler,
        coordinator,
        ground.phase,
        ground.settings,
        ground.telemetry,
    )


def _watch(ground: Ground, signs: LifeSigns, servers: Mapping[Lane, RpcServer]) -> Watch:
    return Watch(
        signs,
        servers,
        ground.signals,
        ground.phase,
        ground.telemetry,
        ground.clock,
        every_s=ground.settings.beat_s,
    )


def _tidying(
    ground: Ground, records: Records, epoch: Epoch | None, reconciler: Reconciler
) -> Tidying:
    settings = ground.settings
    retention = Retention(
        records.journal, retention_s=settings.retention_s, after_s=settings.retention_after_s
    )
    return Tidying(
        retention,
        epoch,
        records.leases,
        records.members,
        reconciler,
        ground.transport,
        ground.phase,
        settings=settings,
        clock=ground.clock,
    )
