"""What the parts of recovery share: they look at the same rows, and act by the same dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the parts of recovery share, in one run.

    Attributes:
        services: What a context needs; journal, holds, leases, tracker and clock are its own.
        trigger: What others ask of recovery.
        gates: Of each lane; its claim limit says how many recovered rows may wait for it.
        threads: For plain hooks: they must not take a thread that a handler was promised.
        is_local: Whether the transport is a file, which holds what is read until it is accepted.
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
