"""The table of metrics: it covers the catalogue, and no label comes from the wire."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any, Final

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from gracekit import Service
from gracekit.phase import ServiceState
from gracekit.recovery.resources.results import ResourceOutcome
from gracekit.runtime.ground import label_words
from gracekit.store.commit_times import RECENT_S, CommitTimes
from gracekit.telemetry.catalogue import CATALOGUE
from gracekit.telemetry.instruments import Instruments
from gracekit.telemetry.metrics import (
    BY_EVENT,
    METRICS,
    OTHER,
    STORE_COMMIT,
    Metric,
    MetricKind,
)
from gracekit.telemetry.readings import Readings, StoreNumbers, gauge_samples
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.version import VERSION

WORDS: Final = {
    "methods": frozenset({"resize", "copy"}),
    "jobs": frozenset({"sweep"}),
    "handlers": frozenset({"resize", "copy"}),
    "job_outcomes": frozenset({"succeeded", "cut"}),
    "lanes": frozenset({"requests", "ops"}),
    "outcomes": frozenset({"succeeded", "failed"}),
    "decisions": frozenset({"errored"}),
    "reasons": frozenset({"arguments"}),
    "states": frozenset({"accepted"}),
    "phases": frozenset({"serving", "draining"}),
    "versions": frozenset({VERSION}),
}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields of the catalogue that hold a number, and those that do not: a new field is put into one.
NUMBERS: Final = words(
    """
    hard_limit_s took_s exit_code again_s given_back not_started attempt crashes
    for_s ran_s waited_s tries in_flight running timeout_s running_s safe_point_s expected_s
    open_holds left_s limit_s finished handed_over unfinished by_s away_s uid pid blocked_s
    more_s settled failed waiting left waits_for number parkings waits_s lapses_s
    """
)
NO_NUMBERS: Final = words(
    """
    service instance host run loop text signal by lane error hook task_id method work queue store
    resource alone outcome verb reason state purpose what exchange source step holds tasks cut
    cursor path verdict hold key changed setting value wanted address why limit by_hand kind rule
    status written broken interrupted token topic dry_run siblings forced not_begun decision
    """
)
# Numbers that no metric shows, and why: (event or "*", field).
NOT_MEASURED: Final = {
    ("*", "attempt"): "names which attempt it is",
    ("*", "tries"): "names which try it is; each failed one is an event of its own",
    ("*", "running_s"): "of one task: how long it ran is measured when it has ended",
    ("*", "safe_point_s"): "of one task, for who reads its line",
    ("service.starting", "hard_limit_s"): "a setting",
    ("service.serving", "took_s"): "once a run; gracekit_phase shows it",
    ("service.stopped", "exit_code"): "the run is over, and cannot be scraped any more",
    ("background.failed", "again_s"): "the pause before the next try",
    ("intake.closed", "given_back"): "part of the line of one drain",
    ("intake.closed", "not_started"): "they are unfinished rows: gracekit_unfinished",
    ("lane.self_blocked", "running"): "a gauge: gracekit_tasks_running",
    ("task.apart", "crashes"): "of one task",
    ("task.apart", "for_s"): "of one task",
    ("task.retried", "again_s"): "the pause before the next try",
    ("task.retried", "ran_s"): "of one attempt",
    ("task.failed", "ran_s"): "its task.finished has it too",
    ("job.finished", "ran_s"): "of one run of a job, for who reads its line",
    ("broker.silent", "waited_s"): "a bound of gracekit's own",
    ("drain.started", "in_flight"): "a gauge: gracekit_tasks_in_flight",
    ("drain.started", "running"): "a gauge: gracekit_tasks_in_flight",
    ("drain.started", "timeout_s"): "a gauge: gracekit_drain_left_seconds",
    ("task.awaited", "expected_s"): "a gauge of all: gracekit_drain_expected_seconds",
    ("drain.progress", "in_flight"): "a gauge",
    ("drain.progress", "running"): "a gauge",
    ("drain.progress", "open_holds"): "asked of the store, which a scrape must not wait for",
    ("drain.progress", "left_s"): "a gauge",
    ("drain.progress", "expected_s"): "a gauge",
    ("drain.waiting", "limit_s"): "a setting",
    ("drain.out_of_time", "running"): "each has a line of its own",
    ("drain.out_of_time", "open_holds"): "drain.finished has it too",
    ("hold.awaited", "lapses_s"): "of one hold",
    ("work.ended", "ran_s"): "of one block of work",
    ("work.untracked", "number"): "part of the line of one drain",
    ("drain.extended", "more_s"): "what somebody asked for; gracekit_drain_left_seconds shows it",
    ("drain.extended", "left_s"): "a gauge: gracekit_drain_left_seconds",
    ("drain.finished", "finished"): "each was a task.finished",
    ("drain.finished", "handed_over"): "each was a task.handed_over",
    ("drain.finished", "not_started"): "they are unfinished rows",
    ("drain.finished", "given_back"): "each begun one was a task.given_back",
    ("drain.finished", "open_holds"): "the run is over",
    ("drain.finished", "unfinished"): "gracekit_unfinished, of the next run",
    ("drain.finished", "exit_code"): "the run is over",
    ("door.refused", "uid"): "a name of somebody",
    ("door.refused", "pid"): "a name of a process",
    ("run.classified", "unfinished"): "each is settled, and counted then",
    ("run.classified", "not_started"): "each is run, and counted then",
    ("clock.set", "by_s"): "once, if ever",
    ("task.passed_on", "waited_s"): "of one request; refused, it is a task.rejected",
    ("task.passed_on", "left_s"): "a bound of gracekit's own, or what is left of it",
    ("task.parked", "parkings"): "of one task; each is counted by gracekit_tasks_parked_total",
    ("task.parked", "waits_s"): "the setting pending_timeout, or what is left of it",
    ("task.parked", "ran_s"): "a call without room says nothing of how long calls take",
    ("*", "settled"): "each is a resource.reconciled",
    ("*", "failed"): "each is a resource.reconciled",
    ("*", "waiting"): "each is a resource.reconciled",
    ("*", "left"): "each is a resource.reconciled",
    ("resource.unruled", "number"): "each is a resource.reconciled",
    ("reconciliation.progress", "waits_for"): "part of the line of one pass",
    ("reconciliation.finished", "took_s"): "of one pass, for who reads its line",
    ("store.stranded", "unfinished"): "it must never come; who reads its line looks for why",
    ("store.stranded", "not_started"): "as unfinished",
    ("store.unreachable", "away_s"): "gracekit_ready shows it",
    ("store.reachable", "away_s"): "gracekit_ready shows it",
    ("beats.missed", "away_s"): "gracekit_ready shows it",
}


# -- the table ------------------------------------------------------------------------------


def test_every_field_of_the_catalogue_is_known_as_a_number_or_not():
    """Whoever adds a field has to say which it is, and so whether it needs a metric."""
    fields = set().union(*(event.fields for event in CATALOGUE.values()))

    assert fields == NUMBERS | NO_NUMBERS
    assert set() == NUMBERS & NO_NUMBERS
    assert {field for field in fields if field.endswith("_s")} <= NUMBERS


def test_every_number_of_an_event_is_measured_or_has_a_reason_not_to_be():
    """An event with a number has a row in the table, or an exception here that says why not."""
    numbers = {(e.name, f) for e in CATALOGUE.values() for f in e.fields & NUMBERS}
    measured = {(event, metric.value) for metric in METRICS for event in metric.events}
    excused = {(e, f) for e, f in numbers if {(e, f), ("*", f)} & NOT_MEASURED.keys()}

    assert numbers - measured - excused == set()
    assert measured & excused == set()
    used = {key for e, f in numbers for key in ((e, f), ("*", f))}
    assert NOT_MEASURED.keys() - used == set(), "an exception that nothing needs"


def test_a_row_names_what_there_is():
    """Its events have its fields, its labels have words, and the reading of its gauge exists."""
    for metric in METRICS:
        for event in metric.events:
            wanted = {label.field for label in metric.labels} | ({metric.value} - {""})
            assert wanted <= CATALOGUE[event].fields, metric.name
        assert all(label.words in label_words(Service("shop")) for label in metric.labels)
        assert (metric.kind is MetricKind.GAUGE) == bool(metric.reading) == (not metric.events) or (
            metric is STORE_COMMIT
        )
        if metric.reading:
            attrgetter(metric.reading)(readings())
        assert list(metric.bounds) == sorted(set(metric.bounds))
        assert metric.help.endswith(".")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_both_names_of_a_row_are_one_name():
    """OpenTelemetry's exporters to Prometheus turn one into the other, so a dashboard fits both."""
    suffix = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: ""}

    for metric in METRICS:
        unit = "_seconds" if metric.unit == "s" else ""
        made = metric.instrument.replace(".", "_") + unit + suffix[metric.kind]
        assert metric.name == made
        assert re.fullmatch(r"[a-z][a-z_]*", metric.name)


def test_names_that_users_have_seen_stay():
    """This holds for instruments and for their attributes."""
    seen = {metric.instrument: {label.attribute for label in metric.labels} for metric in METRICS}

    assert (
        seen.items()
        >= {
            "gracekit.tasks.finished": {"method", "outcome"},
            "gracekit.tasks.handed_over": {"method"},
            "gracekit.tasks.given_back": {"method"},
            "gracekit.tasks.reconciled": {"outcome"},
            "gracekit.tasks.rejected": {"reason"},
            "gracekit.replies.given_up": set(),
            "gracekit.heartbeats.lost": set(),
            "gracekit.drain.duration": set(),
            "rpc.server.call.duration": {"rpc.method"},
            "gracekit.tasks.in_flight": {"method", "lane"},
            "gracekit.intake.open": {"lane"},
        }.items()
    )


# -- labels ---------------------------------------------------------------------------------


def shown_by(counted: RunMetrics) -> set[str]:
    """Every value of a label that was counted."""
    rows = [counted.counters(m) | counted.histograms(m) for m in METRICS]
    return {value for row in rows for values in row for value in values}


@given(st.text() | st.integers() | st.none() | st.lists(st.text()))
def test_no_value_of_an_event_becomes_a_label_by_itself(value: Any):
    """Whatever its fields hold, a label shows a word that the service knows, or `_OTHER`."""
    counted = RunMetrics(WORDS)
    known = {word for words in WORDS.values() for word in words}

    for event in BY_EVENT:
        fields = dict.fromkeys(CATALOGUE[event].fields, value)
        counted.record(event, fields | dict.fromkeys(CATALOGUE[event].fields & NUMBERS, 1.0))

    assert shown_by(counted) <= known | {OTHER}


def readings(**more: Any) -> Readings:
    given: dict[str, Any] = {
        "started_at": 1.0,
        "state": ServiceState.SERVING,
        "is_ready": True,
        "in_flight": {},
        "open_intakes": {},
    }
    return Readings(**given | more)


def by_name(name: str) -> Metric:
    (found,) = (metric for metric in METRICS if metric.name == name)
    return found


def test_blocks_of_a_handler_count_for_its_method_and_unknown_ones_together():
    """A name given to `ctx.track` may hold an id, so they are summed for the method, or
    `_OTHER`.
    """
    counts = {
        ("resize", "requests"): 2,
        ("resize:vm-1", "requests"): 1,
        ("resize:vm-2", "requests"): 1,
        ("probe of copy", "ops"): 1,
        ("vm-3", "ops"): 1,
    }

    samples = gauge_samples(by_name("gracekit_tasks_in_flight"), readings(in_flight=counts), WORDS)

    shown = {values: number for values, number in samples if number}
    assert shown == {("resize", "requests"): 4, (OTHER, "ops"): 2}


def test_what_there_is_none_of_is_shown_as_0():
    """A sample that vanished would be "No data" on a dashboard, also at the end of a drain."""
    store = StoreNumbers(unfinished={})
    seen = readings(in_flight={("copy", "ops"): 1}, store=store)

    in_flight = gauge_samples(by_name("gracekit_tasks_in_flight"), seen, WORDS)
    unfinished = gauge_samples(by_name("gracekit_unfinished"), seen, WORDS)

    assert dict(in_flight) == {
        ("resize", "requests"): 0,
        ("resize", "ops"): 0,
        ("copy", "requests"): 0,
        ("copy", "ops"): 1,
    }
    assert dict(unfinished) == {("accepted",): 0}


def test_a_service_with_many_methods_shows_0_for_each_lane_alone():
    """A scrape does not grow by thousands of samples that say nothing."""
    many = {**WORDS, "handlers": frozenset(f"m{n}" for n in range(1000))}
    seen = readings(in_flight={("m7", "requests"): 2})

    samples = gauge_samples(by_name("gracekit_tasks_in_flight"), seen, many)

    assert dict(samples) == {("m7", "requests"): 2, (OTHER, "requests"): 0, (OTHER, "ops"): 0}


def test_what_is_unknown_is_left_out():
    """There is no sample instead of a wrong number."""
    names = [metric.name for metric in METRICS if metric.kind is MetricKind.GAUGE]

    empty = {name for name in names if not gauge_samples(by_name(name), readings(), WORDS)}

    assert empty == {
        "gracekit_tasks_running",
        "gracekit_tasks_running_limit",
        "gracekit_job_last_success_time_seconds",
        "gracekit_intake_open",
        "gracekit_drain_left_seconds",
        "gracekit_drain_expected_seconds",
        "gracekit_requests_waiting",
        "gracekit_oldest_waiting_seconds",
        "gracekit_unfinished",
        "gracekit_oldest_unfinished_seconds",
        "gracekit_accounts_off_by",
        "gracekit_notifications_due",
        "gracekit_open_holds",
        "gracekit_broker_connected",
    }


def test_the_words_of_a_service_are_all_that_its_code_can_say():
    """These are the names of methods and jobs, and the words of each enum or list."""
    svc = Service("compute")

    @svc.rpc
    async def resize(ctx: Any) -> None: ...

    @svc.periodic(every=5)
    async def refresh(ctx: Any) -> None: ...

    svc.kind("vm")

    words = label_words(svc)

    assert words["methods"] == {"resize"}
    assert words["kinds"] == {"vm"}
    assert words["resource_outcomes"] == {outcome.value for outcome in ResourceOutcome}
    assert words["jobs"] == {"refresh"}
    assert words["handlers"] == {"resize", "refresh"}
    assert words["lanes"] == {"requests", "ops", "periodic", "background"}
    assert words["states"] == {"accepted", "running", "pending", "handed_over"}
    assert {"run_again", "errored", "succeeded"} <= words["decisions"]
    assert words["phases"] == {state.value for state in ServiceState}
    assert all(words.values())


# -- OpenTelemetry --------------------------------------------------------------------------


class One:
    """A Runtime that is watched."""

    label_words = WORDS

    def __init__(self, shown: Readings) -> None:
        self._shown = shown

    def readings(self) -> Readings:
        return self._shown


def points(reader: InMemoryMetricReader) -> dict[str, dict[frozenset[Any], Any]]:
    """What an exporter would see: by instrument and attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: {
            frozenset(point.attributes.items()): getattr(point, "value", point)
            for point in metric.data.data_points
        }
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_opentelemetry_shows_every_row_of_the_table():
    """Each has its name, bounds and attributes; gauges of several Runtimes become one number."""
    reader = InMemoryMetricReader()
    instruments = Instruments(MeterProvider(metric_readers=[reader]))
    store = StoreNumbers(
        unfinished={"accepted": 3},
        oldest_unfinished_s=9.0,
        accounts_off_by=0,
        notifications_due=1,
        open_holds=1,
    )
    shown = readings(
        in_flight={("resize", "requests"): 2},
        running={"requests": 2},
        running_limits={"requests": 8},
        open_intakes={"ops": True},
        job_successes={"sweep": 1.0},
        drain_left_s=5.0,
        drain_expected_s=4.0,
        broker_connected=True,
        waiting={"requests": 5},
        oldest_waiting_s={"requests": 7.0},
        store=store,
    )
    watched = [One(shown), One(readings(broker_connected=False, drain_left_s=7.0))]
    for one in watched:
        instruments.watch(one)
    for event in BY_EVENT:
        instruments.record(event, {"method": "resize", "ran_s": 0.3, "outcome": "evil"})
    instruments.observe_commit(0.02)

    seen = points(reader)

    assert seen.keys() == {metric.instrument for metric in METRICS}
    in_flight = frozenset({("method", "resize"), ("lane", "requests")})
    assert seen["gracekit.tasks.in_flight"][in_flight] == 2
    assert sum(seen["gracekit.tasks.in_flight"].values()) == 2
    assert seen["gracekit.build_info"] == {frozenset({("version", VERSION)}): 1}
    assert seen["gracekit.drain.left"] == {frozenset(): 7.0}
    assert seen["gracekit.broker.connected"] == {frozenset(): 0.0}
    assert seen["gracekit.phase"][frozenset({("phase", "serving")})] == 2
    assert seen["gracekit.tasks.finished"] == {
        frozenset({("method", "resize"), ("outcome", OTHER)}): 1
    }
    ((labels, call),) = seen["rpc.server.call.duration"].items()
    assert labels == {("rpc.method", "resize"), ("rpc.system.name", "gracekit")}
    assert call.explicit_bounds == by_name("rpc_server_call_duration_seconds").bounds
    assert call.bucket_counts[call.explicit_bounds.index(0.5)] == 1


def test_a_run_that_has_stopped_does_not_count_beside_one_that_lives():
    """A program may keep a Runtime that has ended: others are ready, and connected, all the
    same.
    """
    reader = InMemoryMetricReader()
    instruments = Instruments(MeterProvider(metric_readers=[reader]))
    ended = readings(state=ServiceState.STOPPED, is_ready=False, broker_connected=False)
    stopped, living = One(ended), One(readings(is_ready=True, broker_connected=True))

    instruments.watch(stopped)
    alone = points(reader)
    instruments.watch(living)
    beside = points(reader)

    names = ("gracekit.ready", "gracekit.broker.connected")
    assert [alone[name] for name in names] == [{frozenset(): 0}] * 2
    assert [beside[name] for name in names] == [{frozenset(): 1}] * 2


# -- how long commits take ------------------------------------------------------------------


class Moments:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_longest_commit_is_remembered_for_a_while():
    """A commit under way counts with its time so far; an old one is forgotten."""
    moments = Moments()
    times, heard = CommitTimes(moments), []
    times.on_commit(heard.append)

    times.begin(moments.now)
    moments.now += 2.0
    meanwhile = times.longest_s()
    times.end()
    moments.now += RECENT_S
    later = times.longest_s()
    moments.now += RECENT_S

    assert (meanwhile, later, times.longest_s()) == (2.0, 2.0, 0.0)
    assert heard == [2.0]


def test_a_store_that_stays_locked_is_blocked_until_a_commit_succeeds():
    """A commit that is given up for the lock, and the pause before the next one, do not end
    that.
    """
    moments = Moments()
    times = CommitTimes(moments)

    times.begin(moments.now)
    moments.now += 10.0
    times.end(locked=True)
    between = times.blocked()
    moments.now += 1.0
    times.begin(moments.now)
    moments.now += 5.0
    again = times.blocked()
    times.end()

    assert between == "the store takes no writes for 10s"
    assert again == "the store takes no writes for 16s"
    assert times.blocked() is None


def test_a_listener_that_fails_keeps_no_commit():
    """It is called in the thread that commits, which must go on."""
    times, heard = CommitTimes(Moments()), []
    times.on_commit(lambda _: 1 / 0)
    times.on_commit(heard.append)

    times.begin(999.5)
    times.end()

    assert heard == [0.5]
