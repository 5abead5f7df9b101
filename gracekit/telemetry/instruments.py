"""OpenTelemetry's instruments, made once for each process from the table of metrics."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from opentelemetry import metrics as otel
from opentelemetry.metrics import CallbackOptions, Observation

from gracekit.phase import ServiceState
from gracekit.telemetry.catalogue import LOGGER
from gracekit.telemetry.metrics import (
    METRICS,
    STORE_COMMIT,
    LabelWords,
    Metric,
    MetricKind,
    Together,
)
from gracekit.telemetry.readings import Add, Feeds, LabelValues, Watched, gauge_samples
from gracekit.tracing.conventions import SCHEMA_URL

_TOGETHER: Final[Mapping[Together, Callable[[Sequence[float]], float]]] = {
    Together.SUM: sum,
    Together.LARGEST: max,
    Together.SMALLEST: min,
}


class Instruments:
    """OpenTelemetry's instruments of this process; a process should have one such object.

    The API and the SDK keep every instrument for ever, and the SDK ignores one that is registered
    twice. Gauges show the Runtimes that have not stopped; if there are none, the stopped ones. The
    known label values are those of all services that were ever watched.

    Args:
        provider: Makes the instruments; None for the process's provider, even if it is set later.

    Attributes:
        observe_commit: Call it with the duration of each commit of a group, in seconds.
    """

    def __init__(self, provider: otel.MeterProvider | None = None) -> None:
        meter = otel.get_meter(LOGGER, meter_provider=provider, schema_url=SCHEMA_URL)
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._words: LabelWords = {}
        self._feeds = Feeds(self._words, self._adder)
        self._add: dict[str, Callable[[float, dict[str, str]], None]] = {}
        for metric in METRICS:
            self._make(meter, metric)
        self.observe_commit: Final = self._adder(STORE_COMMIT, ())

    def _make(self, meter: otel.Meter, metric: Metric) -> None:
        named = {"name": metric.instrument, "unit": metric.unit, "description": metric.help}
        match metric.kind:
            case MetricKind.COUNTER:
                self._add[metric.name] = meter.create_counter(**named).add
            case MetricKind.HISTOGRAM:
                self._add[metric.name] = meter.create_histogram(
                    **named, explicit_bucket_boundaries_advisory=metric.bounds
                ).record
            case MetricKind.GAUGE:
                callback = functools.partial(self._observations, metric)
                meter.create_observable_gauge(**named, callbacks=[callback])

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count one event of the catalogue."""
        self._feeds.record(event, fields)

    def _adder(self, metric: Metric, values: LabelValues) -> Add:
        add, attributes = self._add[metric.name], _attributes(metric, values)
        return lambda number: add(number, attributes)

    def watch(self, watched: Watched) -> None:
        """Let the gauges read *watched*, without keeping it alive."""
        with self._lock:
            self._watched.add(watched)
            self._words = {
                name: self._words.get(name, frozenset()) | words
                for name, words in watched.label_words.items()
            }
            self._feeds = Feeds(self._words, self._adder)

    def _observations(self, metric: Metric, _options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:  # the SDK calls this in another thread
            watched, words = list(self._watched), self._words
        every = [one.readings() for one in watched]
        # A program may keep a stopped Runtime. It must not spoil the smallest and largest values
        # of the running ones.
        living = [one for one in every if one.state is not ServiceState.STOPPED]
        shown: dict[LabelValues, list[float]] = {}
        for one in living or every:
            for values, number in gauge_samples(metric, one, words):
                shown.setdefault(values, []).append(number)
        for values, numbers in shown.items():
            yield Observation(_TOGETHER[metric.together](numbers), _attributes(metric, values))


def _attributes(metric: Metric, values: LabelValues) -> dict[str, str]:
    attributes = dict(metric.constants)
    for label, value in zip(metric.labels, values, strict=True):
        attributes[label.attribute] = value
    return attributes


instruments: Final = functools.cache(Instruments)


def somebody_measures() -> bool:
    """Whether the process has a meter provider other than the API's own placeholders."""
    return not type(otel.get_meter_provider()).__module__.startswith("opentelemetry.metrics")
