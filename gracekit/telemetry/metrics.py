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


class LabelWords(msgspec.Struct, frozen=True, kw_only=True):
    """Every value that a label may have in one service.

    Attributes:
        methods: Names of its RPC methods.
        jobs: Names of its periodic jobs.
        handlers: Names of both.
        lanes: Names of the lanes.
        outcomes: The ends of an attempt.
        decisions: The decisions of recovery.
        reasons: The reasons for refusing a request.
        states: The states of a task that has not ended.
        job_outcomes: The ends of a run of a periodic job.
        kinds: Names of its kinds of resources.
        resource_outcomes: The results of a pass for a resource.
        phases: States of the service.
        versions: The version of gracekit.
    """

    methods: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    handlers: frozenset[str] = frozenset()
    lanes: frozenset[str] = frozenset()
    outcomes: frozenset[str] = frozenset()
    decisions: frozenset[str] = frozenset()
    reasons: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    job_outcomes: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    resource_outcomes: frozenset[str] = frozenset()
    phases: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()

    def of(self, label: Label) -> frozenset[str]:
        """Every value of *label*."""
        words: frozenset[str] = getattr(self, label.words)
        return words

    def joined(self, other: LabelWords) -> LabelWords:
        """The words of both."""
        return LabelWords(
            **{
                name: getattr(self, name) | getattr(other, name)
                for name in LabelWords.__struct_fields__
            }
        )


class Label(msgspec.Struct, frozen=True):
    """One label of a metric.

    Attributes:
        name: Its name in Prometheus.
        attribute: Its name in OpenTelemetry.
        words: The attribute of `LabelWords` with its values.
        field: The field of the event with the value; empty for a gauge.
    """

    name: str
    attribute: str
    words: str
    field: str = ""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    Attributes:
        name: Its name in Prometheus.
        instrument: Its name in OpenTelemetry, whose exporters to Prometheus turn it into *name*.
        kind: Its type.
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

    name: str
    instrument: str
    kind: MetricKind
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
    name="gracekit_store_commit_seconds",
    instrument="gracekit.store.commit",
    kind=MetricKind.HISTOGRAM,
    unit="s",
    bounds=_COMMIT_BOUNDS,
    help="How long the store took to commit a group, from its first submission to the answer.",
)

_COUNTERS: Final = (
    Metric(
        name="gracekit_tasks_finished_total",
        instrument="gracekit.tasks.finished",
        kind=MetricKind.COUNTER,
        labels=(_METHOD, Label("outcome", "outcome", "outcomes", "outcome")),
        events=("task.finished",),
        help="Tasks whose handler has ended in this run.",
    ),
    Metric(
        name="gracekit_jobs_finished_total",
        instrument="gracekit.jobs.finished",
        kind=MetricKind.COUNTER,
        # A label `job` would collide with the one that Prometheus adds.
        labels=(
            Label("method", "method", "jobs", "method"),
            Label("outcome", "outcome", "job_outcomes", "outcome"),
        ),
        events=("job.finished",),
        help="Runs of periodic jobs that have ended in this run of the service.",
    ),
    Metric(
        name="gracekit_resources_reconciled_total",
        instrument="gracekit.resources.reconciled",
        kind=MetricKind.COUNTER,
        labels=(
            Label("kind", "kind", "kinds", "kind"),
            Label("outcome", "outcome", "resource_outcomes", "outcome"),
        ),
        events=("resource.reconciled",),
        help="Resources that passes of this run have examined, by the outcome for each.",
    ),
    Metric(
        name="gracekit_resource_kinds_broken_total",
        instrument="gracekit.resource.kinds.broken",
        kind=MetricKind.COUNTER,
        labels=(Label("kind", "kind", "kinds", "kind"),),
        events=("reconciliation.broken",),
        help="How often this run could not list the resources of a kind, so that none was settled.",
    ),
    Metric(
        name="gracekit_tasks_handed_over_total",
        instrument="gracekit.tasks.handed_over",
        kind=MetricKind.COUNTER,
        labels=(_METHOD,),
        events=("task.handed_over",),
        help="Unfinished tasks that the journal keeps for the next run.",
    ),
    Metric(
        name="gracekit_tasks_parked_total",
        instrument="gracekit.tasks.parked",
        kind=MetricKind.COUNTER,
        labels=(_METHOD,),
        events=("task.parked",),
        help="Tasks whose handler found no capacity, each time that they were parked as PENDING.",
    ),
    Metric(
        name="gracekit_tasks_given_back_total",
        instrument="gracekit.tasks.given_back",
        kind=MetricKind.COUNTER,
        labels=(_METHOD,),
        events=("task.given_back",),
        help="Running requeue tasks that were cancelled; their messages went back to the queue.",
    ),
    Metric(
        name="gracekit_tasks_reconciled_total",
        instrument="gracekit.tasks.reconciled",
        kind=MetricKind.COUNTER,
        labels=(Label("outcome", "outcome", "decisions", "decision"),),
        events=("task.settled",),
        help="Unfinished tasks that recovery has settled, by what it decided to do with each.",
    ),
    Metric(
        name="gracekit_tasks_rejected_total",
        instrument="gracekit.tasks.rejected",
        kind=MetricKind.COUNTER,
        labels=(Label("reason", "reason", "reasons", "reason"),),
        events=("task.rejected",),
        help="Requests that were refused for good.",
    ),
    Metric(
        name="gracekit_replies_given_up_total",
        instrument="gracekit.replies.given_up",
        kind=MetricKind.COUNTER,
        events=("reply.given_up",),
        help="Replies that could not be delivered to their callers.",
    ),
    Metric(
        name="gracekit_heartbeats_lost_total",
        instrument="gracekit.heartbeats.lost",
        kind=MetricKind.COUNTER,
        events=("heartbeat.lost",),
        help="Heartbeats that could not be delivered to their callers.",
    ),
    Metric(
        name="gracekit_operators_refused_total",
        instrument="gracekit.operators.refused",
        kind=MetricKind.COUNTER,
        events=("admin.refused", "door.refused"),
        help="Requests to the HTTP endpoint or the door that were refused as not allowed.",
    ),
)

_HISTOGRAMS: Final = (
    Metric(
        name="rpc_server_call_duration_seconds",
        instrument="rpc.server.call.duration",
        kind=MetricKind.HISTOGRAM,
        unit="s",
        labels=(Label("rpc_method", "rpc.method", "methods", "method"),),
        constants=(("rpc.system.name", "gracekit"),),
        events=("task.finished",),
        value="ran_s",
        bounds=_CALL_BOUNDS,
        help="How long handlers ran whose attempts have ended.",
    ),
    Metric(
        name="gracekit_drain_duration_seconds",
        instrument="gracekit.drain.duration",
        kind=MetricKind.HISTOGRAM,
        unit="s",
        events=("drain.finished",),
        value="waited_s",
        bounds=_DRAIN_BOUNDS,
        help="How long a drain waited for tasks; known when the run is over.",
    ),
    STORE_COMMIT,
    Metric(
        name="gracekit_loop_blocked_seconds",
        instrument="gracekit.loop.blocked",
        kind=MetricKind.HISTOGRAM,
        unit="s",
        events=("loop.blocked",),
        value="blocked_s",
        bounds=_BLOCKED_BOUNDS,
        help="How long the event loop was blocked, each time that it was for 1 s or more.",
    ),
)

_GAUGES: Final = (
    Metric(
        name="gracekit_build_info",
        instrument="gracekit.build_info",
        kind=MetricKind.GAUGE,
        labels=(Label("version", "version", "versions"),),
        reading="builds",
        together=Together.LARGEST,
        help="Always 1; its label is the version of gracekit.",
    ),
    Metric(
        name="gracekit_run_start_time_seconds",
        instrument="gracekit.run.start_time",
        kind=MetricKind.GAUGE,
        unit="s",
        reading="started_at",
        together=Together.LARGEST,
        help="When this run began, in seconds since the epoch.",
    ),
    Metric(
        name="gracekit_phase",
        instrument="gracekit.phase",
        kind=MetricKind.GAUGE,
        labels=(Label("phase", "phase", "phases"),),
        reading="phases",
        help="1 for the state that the service is in, 0 for the others.",
    ),
    Metric(
        name="gracekit_ready",
        instrument="gracekit.ready",
        kind=MetricKind.GAUGE,
        reading="is_ready",
        together=Together.SMALLEST,
        help="1 while new requests should be sent here, else 0.",
    ),
    Metric(
        name="gracekit_tasks_in_flight",
        instrument="gracekit.tasks.in_flight",
        kind=MetricKind.GAUGE,
        labels=(Label("method", "method", "handlers"), _LANE),
        reading="in_flight",
        shows_zero=True,
        help="Tasks that are accepted, or about to be, and not answered yet.",
    ),
    Metric(
        name="gracekit_tasks_running",
        instrument="gracekit.tasks.running",
        kind=MetricKind.GAUGE,
        labels=(_LANE,),
        reading="running",
        help="Tasks whose handler runs now; the others in flight wait.",
    ),
    Metric(
        name="gracekit_tasks_running_limit",
        instrument="gracekit.tasks.running_limit",
        kind=MetricKind.GAUGE,
        labels=(_LANE,),
        reading="running_limits",
        help="How many handlers of the lane may run at one time.",
    ),
    Metric(
        name="gracekit_job_last_success_time_seconds",
        instrument="gracekit.job.last_success_time",
        kind=MetricKind.GAUGE,
        unit="s",
        labels=(Label("method", "method", "jobs"),),
        reading="job_successes",
        together=Together.LARGEST,
        help="When a periodic job last succeeded in this run, in seconds since the epoch.",
    ),
    Metric(
        name="gracekit_intake_open",
        instrument="gracekit.intake.open",
        kind=MetricKind.GAUGE,
        labels=(_LANE,),
        reading="open_intakes",
        help="1 while intake of the lane is open and its queues can be read, else 0.",
    ),
    Metric(
        name="gracekit_drain_left_seconds",
        instrument="gracekit.drain.left",
        kind=MetricKind.GAUGE,
        unit="s",
        reading="drain_left_s",
        together=Together.LARGEST,
        help="Seconds until the deadline of the drain; only in a drain.",
    ),
    Metric(
        name="gracekit_drain_expected_seconds",
        instrument="gracekit.drain.expected",
        kind=MetricKind.GAUGE,
        unit="s",
        reading="drain_expected_s",
        together=Together.LARGEST,
        help="Seconds until what the drain waits for is expected to end; only if that is known.",
    ),
    Metric(
        name="gracekit_drain_at_risk",
        instrument="gracekit.drain.at_risk",
        kind=MetricKind.GAUGE,
        reading="drain_at_risk",
        help="Running tasks that are expected to end after the deadline of the drain.",
    ),
    Metric(
        name="gracekit_drain_unknown",
        instrument="gracekit.drain.unknown",
        kind=MetricKind.GAUGE,
        reading="drain_unknown",
        help="Running tasks that a drain waits for and whose method has no history to judge by.",
    ),
    Metric(
        name="gracekit_requests_waiting",
        instrument="gracekit.requests.waiting",
        kind=MetricKind.GAUGE,
        labels=(_LANE,),
        reading="waiting",
        together=Together.LARGEST,
        help="Requests that wait in the queues of the lane and are not accepted yet.",
    ),
    Metric(
        name="gracekit_oldest_waiting_seconds",
        instrument="gracekit.oldest_waiting",
        kind=MetricKind.GAUGE,
        unit="s",
        labels=(_LANE,),
        reading="oldest_waiting_s",
        together=Together.LARGEST,
        help="Age of the oldest request that waits in the queues; only where that is known.",
    ),
    Metric(
        name="gracekit_unfinished",
        instrument="gracekit.unfinished",
        kind=MetricKind.GAUGE,
        labels=(Label("state", "state", "states"),),
        reading="store.unfinished",
        shows_zero=True,
        together=Together.LARGEST,
        help="Tasks on record that have not ended, also those of other runs of the service.",
    ),
    Metric(
        name="gracekit_oldest_unfinished_seconds",
        instrument="gracekit.oldest_unfinished",
        kind=MetricKind.GAUGE,
        unit="s",
        reading="store.oldest_unfinished_s",
        together=Together.LARGEST,
        help="Age of the oldest unfinished task on record that is not parked; 0 if there is none.",
    ),
    Metric(
        name="gracekit_accounts_off_by",
        instrument="gracekit.accounts.off_by",
        kind=MetricKind.GAUGE,
        reading="store.accounts_off_by",
        together=Together.LARGEST,
        help="Accepted tasks minus those that ended, are unfinished or were removed; must be 0.",
    ),
    Metric(
        name="gracekit_notifications_due",
        instrument="gracekit.notifications.due",
        kind=MetricKind.GAUGE,
        reading="store.notifications_due",
        together=Together.LARGEST,
        help="Notifications about parked tasks that are on record and not sent yet.",
    ),
    Metric(
        name="gracekit_open_holds",
        instrument="gracekit.open_holds",
        kind=MetricKind.GAUGE,
        reading="store.open_holds",
        together=Together.LARGEST,
        help="Holds on record that are open, also those of other runs of the service.",
    ),
    Metric(
        name="gracekit_broker_connected",
        instrument="gracekit.broker.connected",
        kind=MetricKind.GAUGE,
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
