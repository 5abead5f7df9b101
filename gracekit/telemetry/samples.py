"""Turns events and readings into samples: a metric, its label values, and a number.

A label value that is not a known word becomes `_OTHER`, which bounds the number of samples.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from gracekit.telemetry.metrics import BY_EVENT, OTHER, LabelWords, Metric
from gracekit.telemetry.readings import Readings

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
                value = _bounded(fields.get(label.field), self._words.of(label))
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
    known = [words.of(label) for label in metric.labels]
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
