"""The emitter of events; logs, metrics and subscribers receive them.

All three use the names and fields of the catalogue, and `emit` refuses any other. Wire text in a
field is escaped and cut before it is logged. It becomes a label value of a metric only if it is a
known word, and ids never do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gracekit.config.choices import LogFailures
from gracekit.telemetry.catalogue import (
    ATTRIBUTES,
    CATALOGUE,
    LOGGER,
    Event,
    checked,
)
from gracekit.telemetry.instruments import instruments, somebody_measures
from gracekit.telemetry.metrics import BY_EVENT
from gracekit.telemetry.readings import Watched
from gracekit.telemetry.run_metrics import RunMetrics
from gracekit.telemetry.safe_text import INDENT, clean, escaped_lines, word
from gracekit.tracing.spans import Tracing

MOST_KINDS: Final = 1000
LIMIT_S: Final = 1.0
EventKind = tuple[str, ...]


class _Limit:
    """The rate limit of log lines: one a second for each kind. Usable from any thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._kinds: dict[EventKind, list[float]] = {}  # time of the last line, number left out

    def __len__(self) -> int:
        return len(self._kinds)

    def is_full(self) -> bool:
        """Whether kinds must be forgotten before another is added."""
        return len(self._kinds) >= MOST_KINDS

    def admit(self, kind: EventKind) -> int | None:
        """How many lines were left out before this one; None if this one is left out too."""
        with self._lock:
            now, known = self._now(), self._kinds.get(kind)
            if known is not None and now - known[0] < LIMIT_S:
                known[1] += 1
                return None
            self._kinds[kind] = [now, 0]
            return 0 if known is None else int(known[1])

    def end(self, *, at_once: bool) -> Iterator[tuple[EventKind, int]]:
        """Forget the kinds whose second is over, or all; return those with lines left out."""
        with self._lock:
            until = self._now() - (0.0 if at_once else LIMIT_S)
            over = {kind: known for kind, known in self._kinds.items() if known[0] <= until}
            for kind in over:
                del self._kinds[kind]
        return ((kind, int(number)) for kind, (_, number) in over.items() if number)


def _identity(service: str, instance: str) -> Mapping[str, str]:
    return {"service.name": service, ATTRIBUTES["instance"]: instance}


Subscriber = Callable[[str, Mapping[str, Any]], None]


class Telemetry:
    """Receives all events of the product, and passes them on; usable from any thread.

    Args:
        service: Added to every log line, as `service.name`.
        instance: Added likewise; set later by `identify`, once it is chosen. Events
            with a field `instance` keep their own value.
        now: A clock in seconds, for the rate limit of log lines.

    Attributes:
        is_measured: Whether the process had a meter provider when it was last looked for.
    """

    def __init__(
        self, service: str = "", instance: str = "", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = _Limit(now)
        self._identity = _identity(service, instance)
        self._logger = logging.getLogger(LOGGER)
        self.is_measured = True
        self._counting: tuple[RunMetrics, ...] = ()
        self.tracing = Tracing()
        self._subscribers: tuple[Subscriber, ...] = ()
        self.log_failures: LogFailures = "line"

    def identify(self, *, service: str, instance: str) -> None:
        """Set service and instance for later events, at the beginning of a run.

        From now on tracing and metrics use the providers that the process has by now.
        """
        self._identity = _identity(service, instance)
        self.tracing.look()
        self.look_for_metrics()

    def look_for_metrics(self) -> None:
        """Feed OpenTelemetry's instruments from now on, if the process has a meter provider."""
        self.is_measured = somebody_measures()

    def hears(self, event: str, level: int | None) -> bool:
        """Whether anything uses *event*. Checked first for the two events of each request."""
        if self._subscribers:
            return True
        if event in BY_EVENT and (self.is_measured or self._counting):
            return True
        return self._logger.isEnabledFor(CATALOGUE[event].level if level is None else level)

    def emit(
        self,
        event: str,
        *,
        level: int | None = None,
        cause: BaseException | None = None,
        trace: str = "",
        context: Mapping[str, str] | None = None,
        is_awaited: bool = False,
        **fields: Any,
    ) -> None:
        """Report that *event* has happened, to logs, metrics and subscribers.

        Args:
            event: Its name in the catalogue.
            level: Of its log line, if not the catalogue's.
            cause: An exception whose traceback is logged.
            trace: The text of a traceback, if the exception itself is not available.
            context: What is shown of the caller's context: further fields, by name.
            is_awaited: Whether a drain waits for it: then the rate limit does not apply.
            fields: Its fields, as the catalogue lists them.

        Raises:
            UnknownEventError: the catalogue does not list it or one of the fields.
        """
        known = CATALOGUE.get(event) or checked(event, ())
        if level is None:
            level = known.level
        is_logged = self._logger.isEnabledFor(level)
        if not (is_logged or self.is_measured or self._counting or self._subscribers):
            return  # saves time, as each request has two events
        if not fields.keys() <= known.fields:
            checked(event, tuple(fields))
        if context:
            fields |= context
        if is_logged:
            self._log(known, level, fields, cause, trace, not is_awaited)
        for metrics in self._counting:
            metrics.record(event, fields)
        if self.is_measured:
            instruments().record(event, fields)
        for subscriber in self._subscribers:
            self._tell(subscriber, event, fields)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call *subscriber* with name and fields of every event, in the thread that emits it.

        Returns:
            A function that ends the subscription; may be called twice.
        """
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    # -- metrics ------------------------------------------------------------------------

    def watch(self, watched: Watched) -> None:
        """Let OpenTelemetry's gauges read *watched*, without keeping it alive."""
        instruments().watch(watched)

    def count_into(self, metrics: RunMetrics) -> None:
        """From now on count events in *metrics* too."""
        self._counting = (*self._counting, metrics)

    def note_commit(self, seconds: float) -> None:
        """Record how long the commit of a group took; from any thread."""
        for metrics in self._counting:
            metrics.observe_commit(seconds)
        if self.is_measured:
            instruments().observe_commit(seconds)

    # -- logs ---------------------------------------------------------------------------

    def _log(
        self,
        event: Event,
        level: int,
        fields: Mapping[str, Any],
        cause: BaseException | None,
        trace: str,
        is_limited: bool,  # noqa: FBT001 - the test kit passes all on
    ) -> None:
        if event.name == "task.failed" and self.log_failures == "off":
            return
        if is_limited and event.kind is not None and not self._logger.isEnabledFor(logging.DEBUG):
            left_out = self._admit(event, fields)
            if left_out is None:
                return
            fields = {**fields, "left_out": left_out or None}
        self._write(event, level, fields, cause, trace)

    def _write(
        self,
        event: Event,
        level: int,
        fields: Mapping[str, Any],
        cause: BaseException | None,
        trace: str,
    ) -> None:
        shown = {name: clean(value) for name, value in fields.items() if value is not None}
        words = " ".join(f"{name}={word(value)}" for name, value in shown.items())
        extra = {ATTRIBUTES.get(name, name): value for name, value in shown.items()}
        # No arguments: a `%` in wire text must not be formatting.
        record = self._logger.makeRecord(
            LOGGER,
            level,
            __file__,
            0,
            f"{event.name} {words}".rstrip(),
            (),
            None if cause is None else (type(cause), cause, cause.__traceback__),
            extra={"event": event.name, **self._identity, **extra},
        )
        # Set here, where every formatter looks for it, also an application's.
        record.exc_text = "\n".join(f"{INDENT}{line}" for line in escaped_lines(trace)) or None
        self._logger.handle(record)

    def _admit(self, event: Event, fields: Mapping[str, Any]) -> int | None:
        if self._limit.is_full():
            self.tell_left_out(at_once=True)
        assert event.kind is not None
        # Of an error only the class counts: messages of the same kind mostly differ by an id.
        values = (str(fields.get(name, "")).partition(":")[0][:100] for name in event.kind)
        return self._limit.admit((event.name, *values))

    def tell_left_out(self, *, at_once: bool = False) -> None:
        """Log how many lines were left out since the last one of their kind.

        Args:
            at_once: Also for kinds whose second is not over.
        """
        for (name, *values), number in self._limit.end(at_once=at_once):
            event = CATALOGUE[name]
            fields = dict(zip(event.kind or (), values, strict=True))
            self._write(event, event.level, {**fields, "left_out": number}, None, "")

    def _tell(self, subscriber: Subscriber, event: str, fields: Mapping[str, Any]) -> None:
        try:
            subscriber(event, fields)
        except Exception:
            # An error in a subscriber must not stop a drain.
            self._logger.exception("a subscriber failed at %s", event)
