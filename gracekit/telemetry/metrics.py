"""OpenTelemetry's instruments, made once a process."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from gracekit.telemetry.catalogue import LOGGER

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"


class Watched(Protocol):
    """What the gauges ask: a Runtime. From any thread."""

    def in_flight(self) -> Mapping[tuple[str, str], int]:
        """Tasks in flight by (method, lane)."""
        ...

    def open_intakes(self) -> Mapping[str, int]:
        """1 for each lane that is read, else 0."""
        ...


class Instruments:
    """OpenTelemetry instruments, once in a process: an API that has no SDK keeps each for ever.

    So does an SDK, and it ignores what is registered twice. Gauges look at all Runtimes that live.
    """

    def __init__(self) -> None:
        meter = metrics.get_meter(LOGGER, schema_url=SCHEMA_URL)
        self._finished = meter.create_counter("gracekit.tasks.finished")
        self._cut = {
            event: meter.create_counter(event.replace("task.", "gracekit.tasks."))
            for event in ("task.handed_over", "task.given_back")
        }
        self._reconciled = meter.create_counter("gracekit.tasks.reconciled")
        self._rejected = meter.create_counter("gracekit.tasks.rejected")
        self._replies_given_up = meter.create_counter("gracekit.replies.given_up")
        self._heartbeats_lost = meter.create_counter("gracekit.heartbeats.lost")
        self._drain = meter.create_histogram("gracekit.drain.duration", unit="s")
        self._call = meter.create_histogram("rpc.server.call.duration", unit="s")
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        meter.create_observable_gauge("gracekit.tasks.in_flight", callbacks=[self._in_flight])
        meter.create_observable_gauge("gracekit.intake.open", callbacks=[self._open_intakes])

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count what the metrics are about; methods here are registered ones, never wire text."""
        match event:
            case "task.finished":
                method, outcome = fields.get("method", ""), fields.get("outcome", "")
                self._finished.add(1, {"method": method, "outcome": outcome})
                labels = {"rpc.system.name": LOGGER, "rpc.method": method}
                self._call.record(fields.get("ran_s") or 0.0, labels)
            case "task.handed_over" | "task.given_back":
                self._cut[event].add(1, {"method": fields.get("method", "")})
            case "task.settled":
                self._reconciled.add(1, {"outcome": fields.get("verdict", "")})
            case "task.rejected":
                self._rejected.add(1, {"reason": fields.get("reason", "")})
            case "reply.given_up":
                self._replies_given_up.add(1)
            case "heartbeat.lost":
                self._heartbeats_lost.add(1)
            case "drain.finished":
                self._drain.record(fields.get("waited_s") or 0.0)

    def watch(self, watched: Watched) -> None:
        """Let the gauges ask it, for as long as it lives."""
        with self._lock:
            self._watched.add(watched)

    def _all(self) -> list[Watched]:
        with self._lock:  # the SDK asks in a thread of its own
            return list(self._watched)

    def _in_flight(self, _options: CallbackOptions) -> Iterable[Observation]:
        counts: Counter[tuple[str, str]] = Counter()
        for watched in self._all():
            counts.update(watched.in_flight())
        for (method, channel), count in counts.items():
            yield Observation(count, {"method": method, "channel": channel})

    def _open_intakes(self, _options: CallbackOptions) -> Iterable[Observation]:
        counts: Counter[str] = Counter()
        for watched in self._all():
            counts.update(watched.open_intakes())
        for channel, count in counts.items():
            yield Observation(count, {"channel": channel})


instruments: Final = functools.cache(Instruments)


def somebody_measures() -> bool:
    """Whether the process has a meter provider that is more than the API's own stand-ins."""
    return not type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")
