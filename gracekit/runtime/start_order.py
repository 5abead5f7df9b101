"""The order in which the parts of a service start; they stop in the reverse order.

Only this list defines it. For a new part, add a line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

from gracekit.admin.api import AdminApi
from gracekit.background import Background, Work
from gracekit.config.admin import OFF
from gracekit.control.door import Door
from gracekit.control.facts import StoreFacts
from gracekit.control.verbs import Control
from gracekit.drain.bounded import Drained
from gracekit.drain.coordinator import RECORD, ShutdownCoordinator
from gracekit.drain.untracked import Untracked
from gracekit.errors import ConfigError, StoreError
from gracekit.journal.retention import Retention
from gracekit.leases.epoch import Epoch
from gracekit.membership import Membership, cancel_bound
from gracekit.parts import Action, ListedPart, Part, PartList, StepPart
from gracekit.phase import ServiceState
from gracekit.recovery.reconciler import Reconciler
from gracekit.request.outbox_sender import Outbox
from gracekit.rpc.foreign_readers import ForeignReaders
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import announced_queues, shared_queue
from gracekit.runs.members import Members
from gracekit.runs.names import door_name
from gracekit.runtime.built import Ground, Records, Requests
from gracekit.runtime.ground import count_metrics
from gracekit.tracker.task import Lane
from gracekit.upkeep import LifeSigns, RunWatch, Tidying, Watchdog


def in_order(
    ground: Ground,
    records: Records,
    requests: Requests,
    parts: Drained,
    coordinator: ShutdownCoordinator,
    control: Control,
    admin: AdminApi,
    facts: StoreFacts,
) -> PartList:
    """The list of all parts: starting goes from the first line down, stopping from the last up."""
    reconciler, margin_s = parts.reconciler, ground.settings.exit_margin_s
    epoch, signs = _epoch(ground), _life_signs(ground, records, reconciler, coordinator)
    work, abandoning = partial(_work, ground), requests.dispatcher.abandon_threads
    feeding = work(_watchdog(ground).feed)
    gate = reconciler.gates.hold_all if ground.settings.startup_reconciliation_enabled else None
    untracked, ends = Untracked(parts.tracker, ground.telemetry), parts.ends_process
    listening = partial(records.wakeups.start, requests.trigger.poke, on_nudge=requests.waits.wake)
    return PartList(
        [
            # Stopped last: a drain may wait for the store until its end. Started last: the first
            # message starts systemd's watchdog, and a start may take longer than WatchdogSec.
            ListedPart("end of the watchdog", StepPart(end=feeding.stop)),
            # Early, so that it answers probes during the start; stopped after the stop record.
            ListedPart("HTTP endpoint", _endpoint(ground, admin)),
            ListedPart("store and seat", ground.seat),
            ListedPart("count of accounts", StepPart(end=facts.accounts.stop)),
            ListedPart("wake-ups", StepPart(_soon(listening), end=_soon(records.wakeups.stop))),
            ListedPart(RECORD, records.own),
            ListedPart("hosts", _hosts(ground, records, requests, parts, control)),
            # Here a Runtime is open. The parts below do the work, and stop before the stop record.
            ListedPart("kinds", StepPart(partial(_check_kinds, ground, records.members))),
            ListedPart("door", _door(ground, control)),
            ListedPart("adoption", StepPart(reconciler.take_over)),
            ListedPart("history", StepPart(partial(_seed_history, ground, records, requests))),
            ListedPart("transport", _transport(ground, parts.servers), reserve_s=margin_s / 4),
            ListedPart("answers", _answers(requests, control)),
            ListedPart("outbox", _outbox(ground, requests.outbox)),
            ListedPart("epoch", StepPart(None if epoch is None else epoch.begin)),
            ListedPart("foreign readers", StepPart(partial(_look_for_readers, ground))),
            ListedPart("deadlines", work(reconciler.keep_deadlines)),
            ListedPart("untracked work", StepPart(end=untracked.tell if ends else None)),
            ListedPart("hooks", parts.hooks, reserve_s=margin_s / 4),
            ListedPart("threads", StepPart(untracked.note_known, end=_soon(abandoning))),
            ListedPart("ops server", _intake(ground, Lane.OPS, parts.servers)),
            ListedPart("gate", StepPart(gate)),
            ListedPart("new-request server", _intake(ground, Lane.REQUESTS, parts.servers)),
            ListedPart("state", StepPart(partial(_serve, ground, records.members))),
            ListedPart("recovery", StepPart(end=reconciler.stop)),
            ListedPart("reconciler", work(reconciler.run)),
            ListedPart("jobs", work(parts.jobs.run)),
            ListedPart("watch", work(_watch(ground, signs, parts.servers).watch)),
            ListedPart("beat", work(signs.beat)),
            ListedPart("tidying", work(_tidying(ground, records, epoch, reconciler).tidy)),
            ListedPart("facts", work(facts.keep)),
            ListedPart("watchdog", StepPart(feeding.start)),
        ]
    )


def _soon(step: Callable[[], object]) -> Action:
    """Make a coroutine function of a plain function."""

    async def take() -> None:
        step()

    return take


def _work(ground: Ground, work: Work) -> Background:
    name = f"gracekit-{work.__qualname__}"
    return Background(work, name, telemetry=ground.telemetry, clock=ground.clock)


def _intake(ground: Ground, lane: Lane, servers: Mapping[Lane, RpcServer]) -> StepPart:
    server = servers[lane]
    shared = shared_queue(ground.topics[lane])

    async def start() -> None:
        if shared not in server.queues:  # from before queues="directed": it would keep requests
            with contextlib.suppress(ConfigError):  # a quorum queue stays
                await ground.transport.prune([shared])
        await server.start()
        ground.telemetry.emit("intake.opened", lane=lane.value)

    return StepPart(start, end=server.stop)


def _transport(ground: Ground, servers: Mapping[Lane, RpcServer]) -> StepPart:
    """The part that connects; a start that the broker would refuse later ends here."""
    transport = ground.transport

    async def start() -> None:
        store = await ground.engine.identity()
        await transport.start()
        queues = [queue for server in servers.values() for queue in server.queues]
        await transport.compare(queues, store=store)

    return StepPart(start, end=transport.stop)


def _answers(requests: Requests, control: Control) -> StepPart:
    async def end() -> None:
        await control.callers.stop()
        for client in requests.clients.values():
            await client.stop()
        requests.answers.stop()

    return StepPart(end=end)


def _outbox(ground: Ground, outbox: Outbox) -> StepPart:
    """The part that sends notifications; it stops after the parts that write them."""
    sending = _work(ground, outbox.work)

    async def end() -> None:
        await outbox.finish()
        await sending.stop()

    return StepPart(sending.start, end=end)


def _hosts(
    ground: Ground,
    records: Records,
    requests: Requests,
    parts: Drained,
    control: Control,
) -> StepPart:
    """What a run does beside those of other hosts, and for the leases that people hold in it."""
    works = [_work(ground, records.held.keep)]
    if ground.seat.heart is not None:
        bound = partial(cancel_bound, ground.tracker)
        membership = Membership(
            ground.seat.heart,
            ground.engine,
            records.members,
            cancel=lambda: any([bound(), records.held.cancel()]),
            on_left=requests.trigger.poke,
            phase=ground.phase,
            process=ground.process,
            telemetry=ground.telemetry,
            clock=ground.clock,
            ends_process=parts.ends_process,
        )
        ground.engine.on_status(membership.follow_store)
        works += [_work(ground, loop) for loop in (membership.keep, membership.watch)]
    if ground.seat.heart is not None or ground.service.answers_callers:
        works.append(_work(ground, control.orders.keep_left))

    async def start() -> None:
        for work in works:
            await work.start()

    async def end() -> None:
        for work in works:
            await work.stop()

    return StepPart(start, end=end)


async def _check_kinds(ground: Ground, members: Members) -> None:
    await members.check_kinds([kind.name for kind in ground.service.kinds])


async def _serve(ground: Ground, members: Members) -> None:
    # The state comes last, and all parts after this one start without waiting. So a drain that
    # finds the service SERVING finds all parts started, and can be resumed.
    await members.beat(ServiceState.SERVING.value)
    ground.phase.advance(ServiceState.SERVING)


async def _seed_history(ground: Ground, records: Records, requests: Requests) -> None:
    methods = [(method.namespace, method.name) for method in ground.service.methods]
    try:
        requests.history.seed(await records.journal.last_attempts(), methods)
    except StoreError as error:  # without history there are no estimates, which is safe
        ground.telemetry.emit("store.error", what="history", error=str(error))


def _door(ground: Ground, control: Control) -> Door:
    directory = ground.location.run_directory
    path = None if directory is None else directory / door_name(ground.seat.run_id)
    return Door(path, control, ground.telemetry, ground.clock)


def _endpoint(ground: Ground, admin: AdminApi) -> Part:
    if ground.settings.admin == OFF:
        return StepPart()
    try:
        from gracekit.admin.endpoint import AdminServer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            f"admin = {ground.settings.admin} needs a package that is not installed ({error}): "
            "pip install 'gracekit[web]', or set GRACEKIT_ADMIN=off"
        ) from error
    ends_process = ground.signals is not None and ground.signals.for_good
    return AdminServer(
        ground.settings,
        lambda: admin,
        ground.telemetry,
        count_metrics(ground.service, ground.telemetry),
        keeps_listening=ends_process,
    )


async def _look_for_readers(ground: Ground) -> None:
    """Refuse to share a queue with a living process that uses another store."""
    store = await ground.engine.identity()
    if store is None:
        return
    main, ops = ground.topics[Lane.REQUESTS], ground.topics[Lane.OPS]
    queues = announced_queues(main, ops, ground.settings.host, queues=ground.service.queues)
    label = f"{ground.service.topic}@{ground.seat.instance}"
    readers = ForeignReaders(
        partial(ground.transport.announce, queues, store=store, label=label),
        ground.telemetry,
        store=ground.location.url,
        methods=ground.service.methods,
        accepts=ground.settings.accept_unshared_store,
    )
    await readers.start()


def _epoch(ground: Ground) -> Epoch | None:
    name, locks = ground.location.name, ground.location.run_directory
    if name is None or locks is None:
        return None
    keep = ground.transport.keep_mark
    return Epoch(ground.engine, name, locks, keep, ground.telemetry, ground.clock)


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


def _watch(ground: Ground, signs: LifeSigns, servers: Mapping[Lane, RpcServer]) -> RunWatch:
    return RunWatch(
        signs,
        servers,
        ground.signals,
        ground.phase,
        ground.process.notify,
        ground.telemetry,
        ground.clock,
        every_s=ground.settings.look_every_s,
    )


def _watchdog(ground: Ground) -> Watchdog:
    every_s = ground.settings.look_every_s
    return Watchdog(ground.process.notify, ground.clock, look_every_s=every_s)


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
