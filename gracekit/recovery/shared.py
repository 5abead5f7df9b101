"""The objects that all modules of recovery use, and work that its passes do not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.dispatcher import Dispatcher
from gracekit.journal.claims import Claims
from gracekit.journal.findings import FindingRows
from gracekit.journal.holds import Holds
from gracekit.journal.outbox import OutboxRows
from gracekit.journal.pending import PendingRows
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import RunLeases
from gracekit.leases.lines import Lines
from gracekit.process import Threads
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.context import Services
from gracekit.request.lanes import LaneGate
from gracekit.request.outbox_sender import Outbox
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.suspects import Suspects
from gracekit.rpc.failures import words_of
from gracekit.rpc.method_table import MethodTable
from gracekit.runs.members import Members
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane
from gracekit.tracker.tracker import Tracker


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one run that the modules of recovery use.

    Attributes:
        services: What a Context needs; also has journal, holds, leases, tracker and clock.
        trigger: By which others ask for a pass.
        gates: The gate of each lane, with its slots and its claim limit.
        threads: Run plain hooks, so that these never take the threads of handlers.
        is_local: Whether the transport is a file, which keeps a delivery until it is accepted.
    """

    services: Services
    dispatcher: Dispatcher
    claims: Claims
    members: Members
    arrivals: Arrivals
    answers: Answers
    lines: Lines
    suspects: Suspects
    methods: MethodTable
    gates: Mapping[Lane, LaneGate]
    findings: FindingRows
    pending: PendingRows
    notifications: OutboxRows
    outbox: Outbox
    threads: Threads
    is_local: bool
    trigger: RecoveryTrigger
    settings: Settings
    telemetry: Telemetry

    @property
    def journal(self) -> Journal:
        """The rows of the service's tasks."""
        return self.services.journal

    @property
    def holds(self) -> Holds:
        """The holds of the service."""
        return self.services.holds

    @property
    def leases(self) -> RunLeases:
        """The leases of this run."""
        return self.services.leases

    @property
    def tracker(self) -> Tracker:
        """The tasks in flight."""
        return self.services.tracker

    @property
    def clock(self) -> Clock:
        """Wall time and loop time."""
        return self.services.clock


class SideTasks:
    """Runs work beside the passes, because the application or a full lane may delay it for long.

    Of each name one work runs at a time. If it is asked for meanwhile, a pass is made at its end.
    """

    def __init__(self, trigger: RecoveryTrigger, telemetry: Telemetry) -> None:
        self._trigger = trigger
        self._telemetry = telemetry
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked_again: set[str] = set()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The work under way."""
        return list(self._tasks.values())

    def do(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin *work*; if one of that name is under way, ask for a pass at its end."""
        if name in self._tasks:
            self._asked_again.add(name)
            return
        task = asyncio.create_task(work())
        self._tasks[name] = task

        def ended(done: asyncio.Task[None]) -> None:
            del self._tasks[name]
            if name in self._asked_again:
                self._asked_again.discard(name)
                self._trigger.go_on()
            if not done.cancelled() and (error := done.exception()) is not None:
                self._telemetry.emit("store.error", what=name, error=words_of(error))
                asyncio.get_running_loop().call_later(backoff.RECOVERY_S, self._trigger.poke)

        task.add_done_callback(ended)
