"""From events and readings to samples: a metric, the values of its labels, and a number.

Here label values are kept within bounds: what is no known word is shown as `_OTHER`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gracekit.telemetry.metrics import BY_EVENT, OTHER, LabelWords, Metric
from gracekit.telemetry.readings import Readings

LabelValues = tuple[str, ...]


class Feeds:
    """What each event adds to which metric; once made for the words of one service."""

    def __init__(self, words: LabelWords) -> None:
        self._by_event = {
            event: tuple(
                (metric, tuple((label.field, words.of(label)) for label in metric.labels))
                for metric in metrics
            )
            for event, metrics in BY_EVENT.items()
        }

    def of(self, event: str, fields: Mapping[str, Any]) -> Iterator[Sample]:
        """Each metric that *event* feeds, under which values of its labels, and by how much."""
        for metric, labels in self._by_event.get(event, ()):
            values = tuple([_bounded(fields.get(field), known) for field, known in labels])
            yield metric, values, fields.get(metric.value) or 0.0 if metric.value else 1


Sample = tuple[Metric, LabelValues, float]


def gauge_samples(
    metric: Metric, readings: Readings, words: LabelWords
) -> list[tuple[LabelValues, float]]:
    """The samples of one gauge: the values of its labels, and the number; none if it is unknown."""
    shown = getattr(readings, metric.reading)
    if shown is None:
        return []
    if not isinstance(shown, Mapping):
        return [((), float(shown))]
    sums: Counter[LabelValues] = Counter()
    known = [words.of(label) for label in metric.labels]
    for key, number in shown.items():
        values = (key,) if isinstance(key, str) else key
        sums[tuple(map(_bounded, values, known))] += number
    return [(values, float(number)) for values, number in sums.items()]


def _bounded(value: object, known: frozenset[str]) -> str:
    if not isinstance(value, str):
        return OTHER
    if value in known:
        return value
    method = value.partition(":")[0]  # a block of work that a handler tracks: `resize:copy`
    return method if method in known else OTHER
