"""The objects that all modules of recovery use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.dispatcher import Dispatcher
from gracekit.journal.claims import Claims
from gracekit.journal.findings import FindingRows
from gracekit.journal.holds import Holds
from gracekit.journal.outbox import OutboxRows
from gracekit.journal.pending import PendingRows
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import Leases
from gracekit.leases.lines import Lines
from gracekit.process import Threads
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.context import Services
from gracekit.request.lanes import LaneGate
from gracekit.request.outbox import Outbox
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.suspects import Suspects
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
    def leases(self) -> Leases:
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
