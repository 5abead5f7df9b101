"""The objects on which a drain acts, as one value; for the parts of a service see `parts`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gracekit.dispatcher import Dispatcher
from gracekit.hooks import ServiceHooks
from gracekit.journal.holds import Holds
from gracekit.periodic import PeriodicJobs
from gracekit.process import Process
from gracekit.recovery.reconciler import Reconciler
from gracekit.rpc.server import RpcServer
from gracekit.runs.own import OwnRecord, OwnSeat
from gracekit.tracker.task import Lane
from gracekit.tracker.tracker import Tracker


class DrainParts(msgspec.Struct, frozen=True, kw_only=True):
    """The objects on which a drain acts.

    Attributes:
        servers: The RPC server of each lane.
        alarm: Whether the kernel alarm may be armed: only if the Runtime owns the signals.
        ends_process: Whether the process ends with the service.
    """

    tracker: Tracker
    dispatcher: Dispatcher
    servers: Mapping[Lane, RpcServer]
    jobs: PeriodicJobs
    reconciler: Reconciler
    holds: Holds
    hooks: ServiceHooks
    seat: OwnSeat
    record: OwnRecord
    process: Process
    alarm: bool
    ends_process: bool
