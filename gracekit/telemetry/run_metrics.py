"""The counters and histograms of one run, as numbers in memory, without any library."""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit.telemetry.metrics import METRICS, STORE_COMMIT, LabelWords, Metric, MetricKind
from gracekit.telemetry.readings import Add, Feeds, LabelValues


class Histogram(msgspec.Struct, frozen=True):
    """The observations with one set of label values.

    Attributes:
        counts: Observations in each bucket, in the order of the metric's bounds, then those above.
        total: The sum of all observations.
    """

    counts: tuple[int, ...]
    total: float


class RunMetrics:
    """Counts the events of one run from the creation of this object; usable from any thread.

    Args:
        words: Every value that a label may have.

    Attributes:
        observe_commit: Call it with the duration of each commit of a group, in seconds.
    """

    def __init__(self, words: LabelWords) -> None:
        self.words = words
        self._feeds = Feeds(words, self._adder)
        self._lock = threading.Lock()
        # By the name of the metric, then by label values.
        self._counters: dict[str, dict[LabelValues, list[float]]] = {}  # one number each
        self._histograms: dict[str, dict[LabelValues, list[float]]] = {}  # buckets, then the sum
        for metric in METRICS:
            if metric.kind is MetricKind.COUNTER:  # rate() needs a 0 before the first 1
                words_of = (sorted(label.known(words)) for label in metric.labels)
                for values in itertools.product(*words_of):
                    self._adder(metric, values)
            elif metric.kind is MetricKind.HISTOGRAM and not metric.labels:
                self._adder(metric, ())
        self.observe_commit: Final = self._adder(STORE_COMMIT, ())

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count one event of the catalogue."""
        self._feeds.record(event, fields)

    def _adder(self, metric: Metric, values: LabelValues) -> Add:
        with self._lock:
            if metric.kind is MetricKind.HISTOGRAM:
                shown = self._histograms.setdefault(metric.name, {})
                buckets = shown.setdefault(values, [0] * (len(metric.bounds) + 2))
                return functools.partial(self._observe, metric.bounds, buckets)
            cell = self._counters.setdefault(metric.name, {}).setdefault(values, [0])
            return functools.partial(self._count, cell)

    def _count(self, cell: list[float], number: float) -> None:
        with self._lock:
            cell[0] += number

    def _observe(self, bounds: Sequence[float], buckets: list[float], number: float) -> None:
        bucket = bisect.bisect_left(bounds, number)
        with self._lock:
            buckets[bucket] += 1
            buckets[-1] += number

    def counters(self, metric: Metric) -> dict[LabelValues, float]:
        """The counts, by label values."""
        with self._lock:
            found = self._counters.get(metric.name, {})
            return {values: cell[0] for values, cell in found.items()}

    def histograms(self, metric: Metric) -> dict[LabelValues, Histogram]:
        """The histograms, by label values."""
        with self._lock:
            found = self._histograms.get(metric.name, {})
            return {
                values: Histogram(tuple(map(int, buckets[:-1])), buckets[-1])
                for values, buckets in found.items()
            }
