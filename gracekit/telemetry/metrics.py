"""The table of metrics: name, source and labels of each.

Each row is one metric, in Prometheus and in OpenTelemetry. Both are made from this table, and so
are the page in docs and the checks of the dashboards. Counters and histograms are fed by events of
the catalogue, gauges by attributes of `Readings`. The values of a label are words that the
service's code defines (`LabelWords`). Any other value is shown as `_OTHER`, so that text from the
wire never becomes a label value.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

OTHER: Final = "_OTHER"
"""Shown instead of a label value that is not a known word."""


class MetricKind(enum.Enum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Together(enum.Enum):
    """How OpenTelemetry's gauges combine several Runtimes of one process into one number."""

    SUM = "sum"
    LARGEST = "largest"
    SMALLEST = "smallest"


LabelWords = Mapping[str, frozenset[str]]
"""Every value that a label may have in one service, by `Label.words`."""


class Label(msgspec.Struct, frozen=True):
    """One label of a metric.

    Attributes:
        name: Its name in Prometheus.
        attribute: Its name in OpenTelemetry.
        words: The key of its values in `LabelWords`.
        field: The field of the event with the value; empty for a gauge.
    """

    name: str
    attribute: str
    words: str
    field: str = ""

    def known(self, words: LabelWords) -> frozenset[str]:
        """Every value that it may have."""
        return words.get(self.words, frozenset())


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    Attributes:
        instrument: Its name in OpenTelemetry.
        help: One sentence for operators.
        unit: As OpenTelemetry writes it: `s`, or empty for a number of things.
        labels: In the order of the parts of a reading's key.
        events: The events that feed a counter or a histogram.
        value: The field of these events that is observed; if empty, each event counts 1.
        reading: The attribute of `Readings` that a gauge shows; `store.` leads to its numbers.
        shows_zero: Whether a gauge shows 0 for known label values that are not in its reading.
        together: How a gauge combines several Runtimes of one process.
        bounds: Upper bounds of a histogram's buckets, in *unit*.
        constants: Fixed attributes that OpenTelemetry's conventions require.
    """

    instrument: str
    help: str
    unit: str = ""
    labels: tuple[Label, ...] = ()
    events: tuple[str, ...] = ()
    value: str = ""
    reading: str = ""
    shows_zero: bool = False
    together: Together = Together.SUM
    bounds: tuple[float, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> MetricKind:
        """Its type: only gauges have a reading, only histograms have bounds."""
        if self.reading:
            return MetricKind.GAUGE
        return MetricKind.HISTOGRAM if self.bounds else MetricKind.COUNTER

    @property
    def name(self) -> str:
        """Its name in Prometheus, as OpenTelemetry's exporters make it of *instrument*."""
        unit = "_seconds" if self.unit else ""
        total = "_total" if self.kind is MetricKind.COUNTER else ""
        return self.instrument.replace(".", "_") + unit + total


_LANE: Final = Label("lane", "lane", "lanes")
_METHOD: Final = Label("method", "method", "methods", "method")
_CALL_BOUNDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0),
)
_COMMIT_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BLOCKED_BOUNDS: Final = (2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_DRAIN_BOUNDS: Final = (0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0, 1800.0, 3600.0)

STORE_COMMIT: Final = Metric(
    instrument="gracekit.store.commit",
    unit="s",
    bounds=_COMMIT_BOUNDS,
    help="How long the store took to commit a group, from its first submission to the answer.",
)

_COUNTERS: Final = (
    Metric(
        instrument="gracekit.tasks.finished",
        labels=(_METHOD, Label("outcome", "outcome", "outcomes", "outcome")),
        events=("task.finished",),
        help="Tasks whose handler has ended in this run.",
    ),
    Metric(
        instrument="gracekit.jobs.finished",
        # A label `job` would collide with the one that Prometheus adds.
        labels=(
            Label("method", "method", "jobs", "method"),
            Label("outcome", "outcome", "job_outcomes", "outcome"),
        ),
        events=("job.finished",),
        help="Runs of periodic jobs that have ended in this run of the service.",
    ),
    Metric(
        instrument="gracekit.resources.reconciled",
        labels=(
            Label("kind", "kind", "kinds", "kind"),
            Label("outcome", "outcome", "resource_outcomes", "outcome"),
        ),
        events=("resource.reconciled",),
        help="Resources that passes of this run have examined, by the outcome for each.",
    ),
    Metric(
        instrument="gracekit.resource.kinds.broken",
        labels=(Label("kind", "kind", "kinds", "kind"),),
        events=("reconciliation.broken",),
        help="How often this run could not list the resources of a kind, so that none was settled.",
    ),
    Metric(
        instrument="gracekit.tasks.handed_over",
        labels=(_METHOD,),
        events=("task.handed_over",),
        help="Unfinished tasks that the journal keeps for the next run.",
    ),
    Metric(
        instrument="gracekit.tasks.parked",
        labels=(_METHOD,),
        events=("task.parked",),
        help="Tasks whose handler found no capacity, each time that they were parked as PENDING.",
    ),
    Metric(
        instrument="gracekit.tasks.given_back",
        labels=(_METHOD,),
        events=("task.given_back",),
        help="Running requeue tasks that were cancelled; their messages went back to the queue.",
    ),
    Metric(
        instrument="gracekit.tasks.reconciled",
        labels=(Label("outcome", "outcome", "decisions", "decision"),),
        events=("task.settled",),
        help="Unfinished tasks that recovery has settled, by what it decided to do with each.",
    ),
    Metric(
        instrument="gracekit.tasks.rejected",
        labels=(Label("reason", "reason", "reasons", "reason"),),
        events=("task.rejected",),
        help="Requests that were refused for good.",
    ),
    Metric(
        instrument="gracekit.replies.given_up",
        events=("reply.given_up",),
        help="Replies that could not be delivered to their callers.",
    ),
    Metric(
        instrument="gracekit.heartbeats.lost",
        events=("heartbeat.lost",),
        help="Heartbeats that could not be delivered to their callers.",
    ),
    Metric(
        instrument="gracekit.operators.refused",
        events=("admin.refused", "door.refused"),
        help="Requests to the HTTP endpoint or the door that were refused as not allowed.",
    ),
)

_HISTOGRAMS: Final = (
    Metric(
        instrument="rpc.server.call.duration",
        unit="s",
        labels=(Label("rpc_method", "rpc.method", "methods", "method"),),
        constants=(("rpc.system.name", "gracekit"),),
        events=("task.finished",),
        value="ran_s",
        bounds=_CALL_BOUNDS,
        help="How long handlers ran whose attempts have ended.",
    ),
    Metric(
        instrument="gracekit.drain.duration",
        unit="s",
        events=("drain.finished",),
        value="waited_s",
        bounds=_DRAIN_BOUNDS,
        help="How long a drain waited for tasks; known when the run is over.",
    ),
    STORE_COMMIT,
    Metric(
        instrument="gracekit.loop.blocked",
        unit="s",
        events=("loop.blocked",),
        value="blocked_s",
        bounds=_BLOCKED_BOUNDS,
        help="How long the event loop was blocked, each time that it was for 1 s or more.",
    ),
)

_GAUGES: Final = (
    Metric(
        instrument="gracekit.build_info",
        labels=(Label("version", "version", "versions"),),
        reading="builds",
        together=Together.LARGEST,
        help="Always 1; its label is the version of gracekit.",
    ),
    Metric(
        instrument="gracekit.run.start_time",
        unit="s",
        reading="started_at",
        together=Together.LARGEST,
        help="When this run began, in seconds since the epoch.",
    ),
    Metric(
        instrument="gracekit.phase",
        labels=(Label("phase", "phase", "phases"),),
        reading="phases",
        help="1 for the state that the service is in, 0 for the others.",
    ),
    Metric(
        instrument="gracekit.ready",
        reading="is_ready",
        together=Together.SMALLEST,
        help="1 while new requests should be sent here, else 0.",
    ),
    Metric(
        instrument="gracekit.tasks.in_flight",
        labels=(Label("method", "method", "handlers"), _LANE),
        reading="in_flight",
        shows_zero=True,
        help="Tasks that are accepted, or about to be, and not answered yet.",
    ),
    Metric(
        instrument="gracekit.tasks.running",
        labels=(_LANE,),
        reading="running",
        help="Tasks whose handler runs now; the others in flight wait.",
    ),
    Metric(
        instrument="gracekit.tasks.running_limit",
        labels=(_LANE,),
        reading="running_limits",
        help="How many handlers of the lane may run at one time.",
    ),
    Metric(
        instrument="gracekit.job.last_success_time",
        unit="s",
        labels=(Label("method", "method", "jobs"),),
        reading="job_successes",
        together=Together.LARGEST,
        help="When a periodic job last succeeded in this run, in seconds since the epoch.",
    ),
    Metric(
        instrument="gracekit.intake.open",
        labels=(_LANE,),
        reading="open_intakes",
        help="1 while intake of the lane is open and its queues can be read, else 0.",
    ),
    Metric(
        instrument="gracekit.drain.left",
        unit="s",
        reading="drain_left_s",
        together=Together.LARGEST,
        help="Seconds until the deadline of the drain; only in a drain.",
    ),
    Metric(
        instrument="gracekit.drain.expected",
        unit="s",
        reading="drain_expected_s",
        together=Together.LARGEST,
        help="Seconds until what the drain waits for is expected to end; only if that is known.",
    ),
    Metric(
        instrument="gracekit.drain.at_risk",
        reading="drain_at_risk",
        help="Running tasks that are expected to end after the deadline of the drain.",
    ),
    Metric(
        instrument="gracekit.drain.unknown",
        reading="drain_unknown",
        help="Running tasks that a drain waits for and whose method has no history to judge by.",
    ),
    Metric(
        instrument="gracekit.requests.waiting",
        labels=(_LANE,),
        reading="waiting",
        together=Together.LARGEST,
        help="Requests that wait in the queues of the lane and are not accepted yet.",
    ),
    Metric(
        instrument="gracekit.oldest_waiting",
        unit="s",
        labels=(_LANE,),
        reading="oldest_waiting_s",
        together=Together.LARGEST,
        help="Age of the oldest request that waits in the queues; only where that is known.",
    ),
    Metric(
        instrument="gracekit.unfinished",
        labels=(Label("state", "state", "states"),),
        reading="store.unfinished",
        shows_zero=True,
        together=Together.LARGEST,
        help="Tasks on record that have not ended, also those of other runs of the service.",
    ),
    Metric(
        instrument="gracekit.oldest_unfinished",
        unit="s",
        reading="store.oldest_unfinished_s",
        together=Together.LARGEST,
        help="Age of the oldest unfinished task on record that is not parked; 0 if there is none.",
    ),
    Metric(
        instrument="gracekit.accounts.off_by",
        reading="store.accounts_off_by",
        together=Together.LARGEST,
        help="Accepted tasks minus those that ended, are unfinished or were removed; must be 0.",
    ),
    Metric(
        instrument="gracekit.notifications.due",
        reading="store.notifications_due",
        together=Together.LARGEST,
        help="Notifications about parked tasks that are on record and not sent yet.",
    ),
    Metric(
        instrument="gracekit.open_holds",
        reading="store.open_holds",
        together=Together.LARGEST,
        help="Holds on record that are open, also those of other runs of the service.",
    ),
    Metric(
        instrument="gracekit.broker.connected",
        reading="broker_connected",
        together=Together.SMALLEST,
        help="1 while the broker is connected, else 0; only where there is a broker.",
    ),
)

METRICS: Final = (*_COUNTERS, *_HISTOGRAMS, *_GAUGES)
BY_EVENT: Final[Mapping[str, tuple[Metric, ...]]] = MappingProxyType(
    {
        event: tuple(metric for metric in METRICS if event in metric.events)
        for event in {event: None for metric in METRICS for event in metric.events}
    }
)
"""Each event that feeds metrics, and these metrics."""
