"""`Readings`: the values of all gauges of one run at one moment. `Watched`: a Runtime with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from gracekit.phase import ServiceState
from gracekit.telemetry.metrics import LabelWords
from gracekit.version import VERSION


class StoreNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges about the store, for all runs of the service; None is unknown.

    `control.facts` queries the store for them; reading the gauges does not.

    Attributes:
        unfinished: Tasks that have not ended, by state.
        oldest_unfinished_s: Age in seconds of the oldest of them that is not parked; 0 if there
            is none.
        accounts_off_by: By how many tasks the accounts are wrong.
        notifications_due: Notifications about parked tasks that are not sent yet.
        open_holds: Open holds of all runs of the service.
    """

    unfinished: Mapping[str, int] | None = None
    oldest_unfinished_s: float | None = None
    accounts_off_by: int | None = None
    notifications_due: int | None = None
    open_holds: int | None = None


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges of one run at one moment; None is unknown, and not shown.

    Attributes:
        started_at: Wall time at which the run began.
        state: The state of the service.
        is_ready: Whether new requests should be sent here.
        in_flight: Tasks by (method, lane), as the tracker names them.
        running: Handlers that run now, by lane, for the lanes that have a limit.
        running_limits: How many handlers may run at a time, by lane.
        open_intakes: By lane, whether intake is open and its queues can be read.
        job_successes: Wall time of the last success, by periodic job.
        drain_left_s: Seconds until the deadline; None outside of a drain.
        drain_expected_s: Seconds until everything that the drain waits for should have ended.
        drain_at_risk: Tasks that are expected to end after the deadline; 0 outside of a drain.
        drain_unknown: Tasks that the drain waits for without an estimate; 0 outside of a drain.
        broker_connected: None without a broker.
        waiting: Requests that wait in the queues, by lane.
        oldest_waiting_s: Age in seconds of the oldest of them, by lane; 0 if there is none.
        store: The numbers from the last query of the store.
    """

    started_at: float | None
    state: ServiceState
    is_ready: bool
    in_flight: Mapping[tuple[str, str], int]
    open_intakes: Mapping[str, bool]
    running: Mapping[str, int] | None = None
    running_limits: Mapping[str, int] | None = None
    job_successes: Mapping[str, float] | None = None
    drain_left_s: float | None = None
    drain_expected_s: float | None = None
    drain_at_risk: int | None = 0
    drain_unknown: int | None = 0
    broker_connected: bool | None = None
    waiting: Mapping[str, int] | None = None
    oldest_waiting_s: Mapping[str, float] | None = None
    store: StoreNumbers = StoreNumbers()

    @property
    def builds(self) -> Mapping[str, int]:
        """The version of gracekit, mapped to 1."""
        return {VERSION: 1}

    @property
    def phases(self) -> Mapping[str, bool]:
        """Each state of the service, mapped to whether it is in that state."""
        return {state.value: state is self.state for state in ServiceState}


class Watched(Protocol):
    """A Runtime, as the gauges read it from any thread."""

    @property
    def label_words(self) -> LabelWords:
        """Every value that a label of its metrics may have."""
        ...

    def readings(self) -> Readings:
        """The present values of its gauges."""
        ...
