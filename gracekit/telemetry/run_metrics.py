"""The counters and histograms of one run, as numbers in memory; no library is needed for that."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gracekit.telemetry.metrics import METRICS, LabelWords, Metric, MetricKind
from gracekit.telemetry.samples import Feeds, LabelValues


@dataclass(frozen=True, slots=True)
class Histogram:
    """What was observed under one set of label values.

    Attributes:
        counts: Observations by bucket, in the order of the metric's bounds, and those above.
        total: The sum of all that was observed.
    """

    counts: tuple[int, ...]
    total: float


class RunMetrics:
    """Counts what happens in one run, from the moment at which it is made; from any thread.

    Args:
        words: Every value that a label may have.
    """

    def __init__(self, words: LabelWords) -> None:
        self.words = words
        self._feeds = Feeds(words)
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, LabelValues], float] = {}
        self._histograms: dict[tuple[str, LabelValues], list[float]] = {}  # buckets, then the sum
        for metric in METRICS:
            if metric.kind is MetricKind.COUNTER:  # a rate needs the 0 before the first 1
                words_of = (sorted(words.of(label)) for label in metric.labels)
                self._counters |= {(metric.name, v): 0 for v in itertools.product(*words_of)}
            elif metric.kind is MetricKind.HISTOGRAM and not metric.labels:
                self._histograms[metric.name, ()] = _empty(metric)

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count one event of the catalogue."""
        for metric, values, number in self._feeds.of(event, fields):
            if metric.kind is MetricKind.HISTOGRAM:
                self.observe(metric, number, values)
                continue
            key = (metric.name, values)
            with self._lock:
                self._counters[key] = self._counters.get(key, 0) + number

    def observe(self, metric: Metric, number: float, values: LabelValues = ()) -> None:
        """Add one observation to a histogram."""
        key, bucket = (metric.name, values), bisect.bisect_left(metric.bounds, number)
        with self._lock:
            buckets = self._histograms.get(key)
            if buckets is None:
                buckets = self._histograms[key] = _empty(metric)
            buckets[bucket] += 1
            buckets[-1] += number

    def counters(self, metric: Metric) -> dict[LabelValues, float]:
        """What was counted, by the values of the labels."""
        with self._lock:
            found = list(self._counters.items())
        return {values: number for (name, values), number in found if name == metric.name}

    def histograms(self, metric: Metric) -> dict[LabelValues, Histogram]:
        """What was observed, by the values of the labels."""
        with self._lock:
            found = [(key, tuple(buckets)) for key, buckets in self._histograms.items()]
        return {
            values: Histogram(tuple(map(int, buckets[:-1])), buckets[-1])
            for (name, values), buckets in found
            if name == metric.name
        }


def _empty(metric: Metric) -> list[float]:
    return [0] * (len(metric.bounds) + 2)
