"""The metrics of one run in Prometheus's format; needs `pip install gracekit[prometheus]`.

It is imported only when metrics are requested. Nothing is registered with the library's default
registry, which belongs to the application.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from gracekit.errors import ConfigError
from gracekit.telemetry.metrics import METRICS, Metric, MetricKind
from gracekit.telemetry.readings import LabelValues, Readings, gauge_samples
from gracekit.telemetry.run_metrics import Histogram, RunMetrics

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        f"metrics for Prometheus need a package that is missing ({error}): "
        "pip install gracekit[prometheus]"
    ) from error

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_Samples = Mapping[LabelValues, float | Histogram]


class Exposition:
    """Writes the body of `/metrics` for each scrape.

    Args:
        counted: Counters and histograms of the run.
    """

    def __init__(self, counted: RunMetrics) -> None:
        self._counted = counted

    def write(self, readings: Readings, *, accept: str = "") -> tuple[bytes, str]:
        """The body, and its content type.

        Args:
            readings: What the gauges show now.
            accept: The Accept header. The format is OpenMetrics if it asks for that; otherwise,
                or if it cannot be parsed, text format 0.0.4.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # the header has a version that is no number
            encode, content_type = choose_encoder("")
        end = encode(_Families())  # the last line that OpenMetrics requires, or nothing
        pieces = [self._piece(metric, readings, encode, end) for metric in METRICS]
        return b"".join([*pieces, end]), content_type

    def _piece(
        self, metric: Metric, readings: Readings, encode: Callable[[Collector], bytes], end: bytes
    ) -> bytes:
        samples = self._samples(metric, readings)
        return encode(_Families(_family(metric, samples))).removesuffix(end) if samples else b""

    def _samples(self, metric: Metric, readings: Readings) -> _Samples:
        match metric.kind:
            case MetricKind.COUNTER:
                return self._counted.counters(metric)
            case MetricKind.GAUGE:
                return dict(gauge_samples(metric, readings, self._counted.words))
            case MetricKind.HISTOGRAM:
                return self._counted.histograms(metric)


class _Families(Collector):
    """Families of the library, for its encoder."""

    def __init__(self, *families: _Family) -> None:
        self._families = families

    def collect(self) -> Iterator[_Family]:
        """As they were given."""
        return iter(self._families)


def _family(metric: Metric, samples: _Samples) -> _Family:
    labels = [label.name for label in metric.labels]
    if metric.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        bounds = [*map(str, metric.bounds), "+Inf"]
        for values, seen in samples.items():
            assert isinstance(seen, Histogram)
            sums = map(float, itertools.accumulate(seen.counts))
            histogram.add_metric(values, list(zip(bounds, sums, strict=True)), seen.total)
        return histogram
    is_counter = metric.kind is MetricKind.COUNTER
    make = CounterMetricFamily if is_counter else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = make(metric.name, metric.help, labels=labels)
    for values, number in samples.items():
        assert not isinstance(number, Histogram)
        family.add_metric(values, number)
    return family
