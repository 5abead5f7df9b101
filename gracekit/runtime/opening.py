"""Opens one run: takes its signals and its seat, builds its objects, writes its row."""

from __future__ import annotations

from functools import partial
from typing import Final

from gracekit.config.admin import admin_doubts
from gracekit.config.values import check_queues
from gracekit.drain.coordinator import RECORD
from gracekit.runs.seat import MAX_INSTANCES
from gracekit.runtime.built import Ground, Wired
from gracekit.runtime.loops import running_loop_name
from gracekit.runtime.wiring import wire
from gracekit.telemetry.safe_text import Sentence
from gracekit.upkeep import StartProgress, StoreChanges

SIGNAL_RECORD_S: Final = 1.0
"""Timeout in seconds for the stop-intent that the signal thread writes."""


async def open_run(ground: Ground, starting: StartProgress) -> Wired:
    """Open a run up to its row in the store, then pass on stop requests that came meanwhile.

    If it fails, everything is undone.

    Args:
        ground: What the run has before it opens.
        starting: Shows systemd which part is starting.

    Raises:
        ConfigError, AlreadyRunningError, DeclarationError: as `Runtime.open`.
    """
    signals = ground.signals
    try:
        if signals is not None:
            signals.take()
        _check_names(ground)
        wired = await _join(ground, starting)
        _report(ground)
    except BaseException:
        if signals is not None:
            signals.give_back(served=False, must_die=False)
        raise
    if signals is not None:
        signals.follow(wired.signal_orders.stop, wired.signal_orders.act)
    ground.stops.hand_to(wired.coordinator)
    return wired


def _check_names(ground: Ground) -> None:
    """Refuse a topic that is too long together with the names of queues, before anything opens."""
    settings, longest = ground.settings, max(ground.topics.values(), key=len)
    if settings.instance:
        check_queues(longest, settings.instance, "shorten GRACEKIT_INSTANCE")
    check_queues(longest, f"{settings.host}-{MAX_INSTANCES - 1}", "shorten GRACEKIT_HOST")


async def _join(ground: Ground, starting: StartProgress) -> Wired:
    """Take the seat, build the run, and start its parts down to its row in the store."""
    await ground.seat.start()
    try:
        wired = wire(ground)
    except BaseException:
        await ground.seat.stop()
        raise
    if ground.signals is not None:
        # In the signal thread, so that it works while the loop is blocked.
        intend = partial(wired.record.intend_stop_from_thread, timeout_s=SIGNAL_RECORD_S)
        ground.signals.record_by(lambda name: intend(by=name))
    starting.order = wired.parts
    try:
        await wired.parts.start(through=RECORD)
    except BaseException:
        await wired.parts.undo()
        raise
    changes = StoreChanges(
        wired.coordinator,
        wired.trigger,
        ground.phase,
        ground.process.notify,
        ground.telemetry,
        ground.clock,
    )
    ground.engine.on_status(changes.follow)
    ground.transport.on_broken(partial(changes.end_broken, "queue"))
    return wired


def _report(ground: Ground) -> None:
    telemetry, settings, seat = ground.telemetry, ground.settings, ground.seat
    telemetry.log_failures = settings.log_failures
    telemetry.identify(service=ground.service.topic, instance=seat.instance)
    telemetry.emit(
        "service.starting",
        service=ground.service.topic,
        instance=seat.instance,
        host=settings.host,
        run=seat.run_id,
        loop=running_loop_name(),
        hard_limit_s=settings.hard_limit_s,
    )
    unsafe = admin_doubts(settings.admin, tls=settings.admin_tls)
    declared = (f"{seen}: {remedy}" for seen, remedy in ground.service.doubts())
    for text in (*settings.doubts, *declared, *unsafe):
        telemetry.emit("service.doubted", text=Sentence(text))
