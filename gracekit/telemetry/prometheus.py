"""The metrics of one run as Prometheus reads them; needs `pip install gracekit[prometheus]`.

Imported only when metrics are asked for. Nothing is registered with the library's own registry,
which belongs to the application.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gracekit.errors import ConfigError
from gracekit.telemetry.metrics import METRICS, Metric, MetricKind
from gracekit.telemetry.readings import Readings
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.telemetry.samples import gauge_samples

try:
    from prometheus_client import CollectorRegistry
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


def exposition(counted: RunMetrics, readings: Readings, *, accept: str = "") -> tuple[bytes, str]:
    """What `/metrics` answers: the body, and its content type.

    Args:
        counted: Counters and histograms of the run.
        readings: What its gauges show now.
        accept: The Accept header: OpenMetrics if it asks for that, else text format 0.0.4.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Run(counted, readings))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Run(Collector):
    """The metrics of one run at one moment, as families of the library."""

    def __init__(self, counted: RunMetrics, readings: Readings) -> None:
        self._counted = counted
        self._readings = readings

    def collect(self) -> Iterator[_Family]:
        """One family for each metric of the table that has a sample."""
        return (family for family in map(self._family, METRICS) if family.samples)

    def _family(self, metric: Metric) -> _Family:
        labels = [label.name for label in metric.labels]
        match metric.kind:
            case MetricKind.COUNTER:
                counter = CounterMetricFamily(metric.name, metric.help, labels=labels)
                for values, number in self._counted.counters(metric).items():
                    counter.add_metric(values, number)
                return counter
            case MetricKind.GAUGE:
                gauge = GaugeMetricFamily(metric.name, metric.help, labels=labels)
                for values, number in gauge_samples(metric, self._readings, self._counted.words):
                    gauge.add_metric(values, number)
                return gauge
            case MetricKind.HISTOGRAM:
                histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
                bounds = [*map(str, metric.bounds), "+Inf"]
                for values, seen in self._counted.histograms(metric).items():
                    sums = itertools.accumulate(seen.counts)
                    buckets = list(zip(bounds, map(float, sums), strict=True))
                    histogram.add_metric(values, buckets, seen.total)
                return histogram
