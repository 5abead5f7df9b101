"""`Readings`: the values of all gauges of one run at one moment. `Watched`: a Runtime with them.

Events and readings become samples: a metric, its label values, and a number. A label value that is
not a known word becomes `_OTHER`, which bounds the number of samples.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, Protocol

import msgspec

from gracekit.phase import ServiceState
from gracekit.telemetry.metrics import BY_EVENT, OTHER, LabelWords, Metric
from gracekit.version import VERSION

LabelValues = tuple[str, ...]

MOST_ZEROS: Final = 200
"""Most samples of one gauge that are shown although they are 0: 50 methods on 4 lanes."""

Add = Callable[[float], object]
"""Adds a number to a counter, or to a histogram, under one set of label values."""


class Feeds:
    """Adds events to the metrics that they feed, for one service; usable from any thread.

    Args:
        words: Every value that a label may have.
        adder: Returns the function that adds to a metric with certain label values; called once
            for each combination of known words, of which there are few.
    """

    def __init__(self, words: LabelWords, adder: Callable[[Metric, LabelValues], Add]) -> None:
        self._words = words
        self._adder = adder
        self._fields = {
            event: tuple({label.field: None for metric in metrics for label in metric.labels})
            for event, metrics in BY_EVENT.items()
        }
        self._found: dict[tuple[object, ...], tuple[tuple[Add, str], ...]] = {}

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add to each metric that *event* feeds, if any."""
        names = self._fields.get(event)
        if names is None:
            return
        key = (event, *[fields.get(name) for name in names])
        try:
            found = self._found.get(key)
        except TypeError:  # an unhashable value is not a known word
            found = None
        for add, value in found or self._find(key, event, fields):
            add(fields.get(value) or 0.0 if value else 1)

    def _find(
        self, key: tuple[object, ...], event: str, fields: Mapping[str, Any]
    ) -> tuple[tuple[Add, str], ...]:
        found = []
        is_known = True
        for metric in BY_EVENT[event]:
            values = []
            for label in metric.labels:
                value = _bounded(fields.get(label.field), label.known(self._words))
                is_known &= value == fields.get(label.field)
                values.append(value)
            found.append((self._adder(metric, tuple(values)), metric.value))
        if is_known:  # otherwise the dictionary could grow without limit
            self._found[key] = tuple(found)
        return tuple(found)


def gauge_samples(
    metric: Metric, readings: Readings, words: LabelWords
) -> list[tuple[LabelValues, float]]:
    """The samples of one gauge, each as label values and a number; none if it is unknown."""
    shown = attrgetter(metric.reading)(readings)
    if shown is None:
        return []
    if not isinstance(shown, Mapping):
        return [((), float(shown))]
    known = [label.known(words) for label in metric.labels]
    sums = Counter(dict.fromkeys(_shown_as_zero(known), 0) if metric.shows_zero else {})
    for key, number in shown.items():
        values = (key,) if isinstance(key, str) else key
        sums[tuple(map(_bounded, values, known))] += number
    return [(values, float(number)) for values, number in sums.items()]


def _shown_as_zero(known: list[frozenset[str]]) -> Iterable[LabelValues]:
    """Every combination of known values; if there are too many, only those of the last label."""
    if math.prod(map(len, known)) > MOST_ZEROS:
        known = [frozenset({OTHER}), known[-1]]
    return itertools.product(*map(sorted, known))


def _bounded(value: object, known: frozenset[str]) -> str:
    if not isinstance(value, str):
        return OTHER
    if value in known:
        return value
    method = value.partition(":")[0]  # background work of a handler is named `resize:copy`
    return method if method in known else OTHER


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
