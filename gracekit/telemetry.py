"""Events: past facts with fields, and the three places that hear of them.

`CATALOGUE` is the contract with operators: logs, metrics and tests are made
of these names and fields, and `emit` refuses any other. Wire text in a field
is escaped and cut before it reaches a log; it is never a metric's label
unless the metric says so, and ids never are.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import json
import logging
import math
import re
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TextIO

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from gracekit import streams
from gracekit.config import did_you_mean, redact_url
from gracekit.errors import GracekitError
from gracekit.streams import LineHandler
from gracekit.tracing import Tracing

LOGGER: Final = "gracekit"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
LONGEST_TEXT: Final = 256
LONGEST_LIST: Final = 100
INDENT: Final = "  "
SHORTEST_MASKED: Final = 4
"""Shorter values of a request are no secrets, and part of many words."""
MOST_MASKED: Final = 32
MOST_COMPARED: Final = 1000
"""Texts of a request that are looked for in an error."""
LONGEST_NAME: Final = 40
_WITHHELD: Final = "<too much of the request stands in it to be shown>"

LogFormat = Literal["auto", "text", "json"]
LogFailures = Literal["line", "traceback", "off"]


class Running(Protocol):
    """Who runs here, as log lines name it: the context of a handler or hook."""

    @property
    def task_id(self) -> str:
        """The sender's id of the request; of a periodic job its own."""

    @property
    def method(self) -> str:
        """Name of the method."""


running: Final[ContextVar[Running | None]] = ContextVar("gracekit_context", default=None)
"""Set around handlers and hooks by the floor that calls them."""

# -- the catalogue ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of fact.

    Attributes:
        name: `noun.past_participle`, stable.
        level: Of its log line, as in `logging`.
        meaning: One sentence for operators.
        fields: What it may carry; `_s` marks seconds.
        kind: Fields of which each combination is logged once a second, with the number that was
            left out; None for an event that is always logged.
    """

    name: str
    level: int
    meaning: str
    fields: frozenset[str]
    kind: tuple[str, ...] | None = None


def _event(
    name: str, level: int, meaning: str, fields: str = "", *, kind: str | None = None
) -> Event:
    split = None if kind is None else tuple(kind.split())
    return Event(name, level, meaning, frozenset(fields.split()), split)


_D, _I, _W, _E, _C = (
    logging.DEBUG,  # one a request
    logging.INFO,  # a phase, or a decision about one task that somebody will ask about
    logging.WARNING,  # somebody waits for something that will not come
    logging.ERROR,  # a fault that the run survives
    logging.CRITICAL,  # a fault that ends the run
)

_TASK: Final = "task_id method channel resource attempt"

_EVENTS: Final = (
    # a service
    _event("service.starting", _I, "A run begins.", "service instance host run hard_limit_s"),
    _event("service.doubted", _W, "What it declares will not do what was meant.", "text"),
    _event("service.serving", _I, "It is ready.", "service instance run took_s"),
    _event("service.quieted", _I, "Intake is closed, and may be resumed."),
    _event("service.stopped", _I, "The run is over.", "service instance run exit_code"),
    _event("signal.received", _I, "A signal came.", "signal"),
    _event("signal.taken", _W, "Something had replaced its handler; ours is back.", "signal by"),
    _event("signal.hint", _I, "What another signal would do.", "text"),
    _event(
        "loop.left",
        _E,
        "SystemExit or KeyboardInterrupt of the application left an asyncio task that is no "
        "handler's own, or the event loop was stopped; a drain follows.",
        "error",
    ),
    _event("service.deaf", _W, "It cannot read requests, and is not ready.", "channel error"),
    _event("service.hears", _I, "It reads requests again, and is ready.", "channel"),
    _event(
        "hook.failed",
        _E,
        "Code of the application raised.",
        "hook task_id method error",
        kind="hook",
    ),
    _event(
        "background.failed",
        _E,
        "Work beside requests met a fault of gracekit itself; it begins again.",
        "work error again_s",
    ),
    _event(
        "reader.foreign",
        _W,
        "Another process reads a shared queue into another store.",
        "queue by store",
    ),
    # intake
    _event("intake.opened", _I, "Requests of a lane are taken.", "channel"),
    _event("intake.closed", _I, "Requests are no longer taken.", "channel given_back not_started"),
    # a request
    _event("task.started", _D, "Its handler runs.", _TASK),
    _event(
        "task.apart",
        _W,
        "It was running when processes died: it begins apart, and other tasks wait for a while.",
        f"{_TASK} crashes alone for_s",
    ),
    _event(
        "task.interrupted",
        _W,
        "Something other than gracekit cancelled its handler: it counts as crashed.",
        f"{_TASK} error",
    ),
    _event("task.finished", _D, "Its handler has ended.", f"{_TASK} outcome ran_s"),
    _event(
        "task.result_left_out",
        _W,
        "Its work is done, and what it returned cannot be sent: whoever asks is told so.",
        f"{_TASK} error",
        kind="method",
    ),
    _event(
        "task.failed",
        _W,
        "Its handler raised, or took too long: it is FAILED, and not run again.",
        f"{_TASK} error ran_s",
        kind="method error",
    ),
    _event(
        "task.ordered",
        _I,
        "An operator's word about a task.",
        "task_id method verb by reason state",
    ),
    _event(
        "task.rejected",
        _W,
        "A request was refused for good.",
        "task_id method reason error",
        kind="reason",
    ),
    _event("dispatch.failed", _E, "A request met a fault of gracekit itself.", "error", kind=""),
    _event("reply.given_up", _W, "A reply found no way to its caller.", "queue error", kind=""),
    _event("heartbeat.lost", _W, "A heartbeat found no way to its caller.", "queue error", kind=""),
    _event("message.unreadable", _W, "A message was set aside unread.", "queue error", kind=""),
    # a broker
    _event("broker.lost", _W, "A connection to the broker ended.", "purpose error"),
    _event(
        "broker.silent",
        _W,
        "It answered nothing and sent nothing; the connection is cut.",
        "purpose what waited_s",
    ),
    _event("broker.unreachable", _W, "Connecting again failed.", "purpose tries error"),
    _event("broker.connected", _I, "The broker is connected again.", "purpose tries"),
    _event("consumer.lost", _W, "A queue is read no more; it will be again.", "queue error"),
    _event("consumer.refused", _W, "Reading it again failed.", "queue tries error"),
    _event("consumer.resumed", _I, "A queue is read again.", "queue"),
    _event(
        "binding.lost", _W, "An exchange was deleted; it is made and bound again.", "queue exchange"
    ),
    _event("binding.refused", _W, "A queue cannot be bound to its exchange.", "queue error"),
    _event("publish.repeated", _W, "A message was not confirmed and is sent again.", "queue error"),
    # a drain
    _event("drain.started", _I, "A stop was asked for.", "source by in_flight running timeout_s"),
    _event(
        "task.awaited",
        _I,
        "It runs at the start of a drain, which waits for it.",
        f"{_TASK} running_s safe_point_s expected_s",
    ),
    _event(
        "drain.progress",
        _I,
        "What a drain waits for.",
        "step in_flight running open_holds holds tasks left_s expected_s",
    ),
    _event("drain.waiting", _I, "A step takes its time; limit_s is its bound.", "step limit_s"),
    _event(
        "drain.step_failed", _E, "A step failed or took too long; the next began.", "step error"
    ),
    _event("drain.resumed", _I, "Quiet or a drain was undone."),
    _event(
        "drain.finished",
        _I,
        "Nothing is in flight any more.",
        "waited_s finished handed_over not_started given_back open_holds holds unfinished "
        "exit_code",
    ),
    _event("task.stuck", _W, "Cancelled, and did not return.", f"{_TASK} running_s safe_point_s"),
    _event(
        "task.handed_over",
        _I,
        "Unfinished; the journal has it for the next run.",
        f"{_TASK} cut running_s safe_point_s cursor",
    ),
    _event(
        "task.not_started",
        _I,
        "The journal has it for the next run; no handler of this one works on it.",
        _TASK,
    ),
    _event(
        "task.given_back",
        _I,
        "Its handler was begun and cut; it has no row, and its message goes back to the queue.",
        f"{_TASK} cut running_s safe_point_s",
    ),
    # recovery
    _event(
        "run.classified",
        _I,
        "How an earlier run ended, and what it left.",
        "run instance verdict unfinished not_started",
    ),
    _event(
        "run.not_proven",
        _W,
        "Nobody can prove whether an earlier run is dead; it is left alone.",
        "run instance reason",
    ),
    _event("task.adopted", _I, "A task that nobody kept has a keeper.", _TASK),
    _event("task.settled", _I, "Recovery decided.", f"{_TASK} verdict reason"),
    _event("task.errored", _W, "It will not be run again.", f"{_TASK} reason"),
    _event("hold.ended", _I, "Not by a request: lapsed, or settled.", "hold key method reason"),
    _event("clock.set", _W, "The wall clock was set; what waits keeps its length.", "by_s"),
    # the store
    _event(
        "store.error",
        _E,
        "A commit or read failed; rows are read again.",
        "what error",
        kind="what",
    ),
    _event("run.lost", _C, "Others cannot see that this run lives; it ends.", "error"),
    _event(
        "store.older",
        _E,
        "The store is not the last one that was here: what was recorded since is lost.",
        "store reason",
    ),
    _event("store.broken", _C, "The disk under a file fails; the run ends.", "what error"),
)

CATALOGUE: Final = MappingProxyType({event.name: event for event in _EVENTS})


class UnknownEventError(GracekitError):
    """An event or field that the catalogue does not list; add it there first."""


@functools.cache  # calls in the code are few, and each is made for every request
def _checked(name: str, fields: tuple[str, ...]) -> Event:
    event = CATALOGUE.get(name)
    if event is None:
        raise UnknownEventError(f"no event {name!r}{did_you_mean(name, CATALOGUE)}")
    for field in fields:
        if field not in event.fields:
            hint = did_you_mean(field, event.fields)
            raise UnknownEventError(f"event {name} has no field {field!r}{hint}")
    return event


# -- the limit of lines that others can cause ----------------------------------------

MOST_KINDS: Final = 1000
LIMIT_S: Final = 1.0

Kind = tuple[str, ...]


class _Limit:
    """Which events of a kind are logged: the first of each second. Usable from any thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._kinds: dict[Kind, list[float]] = {}  # since when, and how many were left out

    def __len__(self) -> int:
        return len(self._kinds)

    def is_full(self) -> bool:
        """Whether kinds must go before another one comes."""
        return len(self._kinds) >= MOST_KINDS

    def admit(self, kind: Kind) -> int | None:
        """How many were left out before this one; None if it is left out too."""
        with self._lock:
            now, known = self._now(), self._kinds.get(kind)
            if known is not None and now - known[0] < LIMIT_S:
                known[1] += 1
                return None
            self._kinds[kind] = [now, 0]
            return 0 if known is None else int(known[1])

    def end(self, *, at_once: bool) -> Iterator[tuple[Kind, int]]:
        """Forget the kinds whose second is over, or all; those of which something was left out."""
        with self._lock:
            until = self._now() - (0.0 if at_once else LIMIT_S)
            over = {kind: known for kind, known in self._kinds.items() if known[0] <= until}
            for kind in over:
                del self._kinds[kind]
        return ((kind, int(number)) for kind, (_, number) in over.items() if number)


# -- the emitter ------------------------------------------------------------------

# Attributes of our log records that are called otherwise than the field: oslo.log has a meaning of
# its own for these. A JSON line has the field's name.
_ATTRIBUTES: Final = MappingProxyType(
    {"instance": "gracekit_instance", "resource": "gracekit_resource"}
)


def _identity(service: str, instance: str) -> Mapping[str, str]:
    return {"service.name": service, _ATTRIBUTES["instance"]: instance}


Subscriber = Callable[[str, Mapping[str, Any]], None]


class Watched(Protocol):
    """What the gauges ask: a Runtime. From any thread."""

    def in_flight(self) -> Mapping[tuple[str, str], int]:
        """Tasks in flight by (method, channel)."""
        ...

    def open_intakes(self) -> Mapping[str, int]:
        """1 for each channel that is read, else 0."""
        ...


class Telemetry:
    """Where the product says what happened; usable from any thread.

    Args:
        service: Goes with every log line, as `service.name`.
        instance: As above; set later by `identify`, once it is chosen. The
            events that name an instance themselves keep theirs.
        now: A clock in seconds, for the limit of lines.
    """

    def __init__(
        self, service: str = "", instance: str = "", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = _Limit(now)
        self._identity = _identity(service, instance)
        self._logger = logging.getLogger(LOGGER)
        self._is_measured = True
        self.tracing = Tracing()
        self._subscribers: tuple[Subscriber, ...] = ()
        self.log_failures: LogFailures = "line"

    def identify(self, *, service: str, instance: str) -> None:
        """Name the service and instance that later events speak of.

        The run begins: a tracer provider that the process has by now is used.
        """
        self._identity = _identity(service, instance)
        self.tracing.look()
        self.look_for_metrics()

    def look_for_metrics(self) -> None:
        """Measure only if the process has a meter provider by now."""
        self._is_measured = _somebody_measures()

    def hears(self, event: str, level: int | None) -> bool:
        """Whether anybody listens to *event*: asked before two that each request has are made."""
        if self._is_measured or self._subscribers:
            return True
        return self._logger.isEnabledFor(CATALOGUE[event].level if level is None else level)

    def emit(
        self,
        event: str,
        *,
        level: int | None = None,
        cause: BaseException | None = None,
        trace: str = "",
        **fields: Any,
    ) -> None:
        """Tell everybody that *event* has happened.

        Args:
            event: Its name in the catalogue.
            level: Of its log line, where that is not the catalogue's.
            cause: An exception whose traceback belongs into the log.
            trace: The text of a traceback, where there is no exception any more.
            fields: As the catalogue lists them.

        Raises:
            UnknownEventError: the catalogue does not list it or one of the fields.
        """
        known = CATALOGUE.get(event) or _checked(event, ())
        if level is None:
            level = known.level
        is_logged = self._logger.isEnabledFor(level)
        if not (is_logged or self._is_measured or self._subscribers):
            return  # two a request: nothing more is made where nobody listens
        _checked(event, tuple(fields))
        if is_logged:
            self._log(known, level, fields, cause, trace)
        if self._is_measured:
            _instruments().record(event, fields)
        for subscriber in self._subscribers:
            self._tell(subscriber, event, fields)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call *subscriber* with name and fields of every event, in the emitting thread.

        Returns:
            A function that ends the subscription; may be called twice.
        """
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    def watch(self, watched: Watched) -> None:
        """Let the metrics `gracekit.tasks.in_flight` and `gracekit.intake.open` ask *watched*.

        It is not kept alive.
        """
        _instruments().watch(watched)

    def _log(
        self,
        event: Event,
        level: int,
        fields: Mapping[str, Any],
        cause: BaseException | None,
        trace: str,
    ) -> None:
        if event.name == "task.failed" and self.log_failures == "off":
            return
        if event.kind is not None and not self._logger.isEnabledFor(logging.DEBUG):
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
        words = " ".join(f"{name}={_word(value)}" for name, value in shown.items())
        extra = {_ATTRIBUTES.get(name, name): value for name, value in shown.items()}
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
        # Where any formatter looks for it: an application's own, too.
        record.exc_text = "\n".join(f"{INDENT}{line}" for line in _escaped(trace)) or None
        self._logger.handle(record)

    def _admit(self, event: Event, fields: Mapping[str, Any]) -> int | None:
        if self._limit.is_full():
            self.tell_left_out(at_once=True)
        assert event.kind is not None
        # Of an error its class: what is said of two in one second mostly differs by an id.
        values = (str(fields.get(name, "")).partition(":")[0][:100] for name in event.kind)
        return self._limit.admit((event.name, *values))

    def tell_left_out(self, *, at_once: bool = False) -> None:
        """Log how many lines were left out since the last one of their kind.

        Args:
            at_once: Also where the second is not over.
        """
        for (name, *values), number in self._limit.end(at_once=at_once):
            event = CATALOGUE[name]
            fields = dict(zip(event.kind or (), values, strict=True))
            self._write(event, event.level, {**fields, "left_out": number}, None, "")

    def _tell(self, subscriber: Subscriber, event: str, fields: Mapping[str, Any]) -> None:
        try:
            subscriber(event, fields)
        except Exception:
            # A listener's fault must not stop a drain.
            self._logger.exception("a subscriber failed at %s", event)


# -- metrics ----------------------------------------------------------------------


class _Instruments:
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


_instruments: Final = functools.cache(_Instruments)


def _somebody_measures() -> bool:
    """Whether the process has a meter provider that is more than the API's own stand-ins."""
    return not type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")


# -- text that is safe to show ----------------------------------------------------

_PLAIN: Final = re.compile(r"[^\s\"'=]+")


def clean(value: Any) -> Any:
    """*value* as a log may show it: scalars as they are, text escaped and cut, the rest as text."""
    match value:
        case enum.Enum():
            return clean(value.value)
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case tuple():  # a name in parts, as of a resource
            return clean(":".join(map(str, value)))
        case list() | set() | frozenset():
            return [clean(item) for item in list(value)[:LONGEST_LIST]]
    return escape(str(value))


def escape(text: str, *, longest: int = LONGEST_TEXT) -> str:
    """*text* on one line, cut at *longest*; control, bidi and other unseen characters escaped."""
    cut = text[:longest]
    if "://" in cut and "@" in text:
        cut = redact_url(text[: 2 * longest])[:longest]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return cut if len(text) <= longest else cut + "…"


def masked(text: str, *sent: object, known: str = "") -> str:
    """*text* with `<name>` in the place of each text that one of *sent* holds under that name.

    For what an application says of a request: arguments and contexts are their callers' secrets.
    Texts below 4 characters stay, and what the application has rewritten. Where very many of them
    stand in *text*, all of it is withheld.

    Args:
        text: An error's message, for example.
        sent: Arguments and context of the request, plain JSON data; a damaged row may hold any.
        known: A value that is told anyway: the name of its resource.
    """
    found: dict[str, str] = {}
    # Forms are compared with the text only where it has their first characters: a request can hold
    # tens of thousands of texts, and an error repeats few of them.
    begins = {text[at : at + SHORTEST_MASKED] for at in range(len(text) - SHORTEST_MASKED + 1)}
    compared = 0
    for name, form in _forms(sent, known):
        if form in found:
            found[form] = name
        elif form[:SHORTEST_MASKED] in begins:
            compared += 1
            if form in text:
                found[form] = name
            if len(found) > MOST_MASKED or compared > MOST_COMPARED:
                return _WITHHELD
    return _without(text, found) if found else text


def _forms(sent: Iterable[object], known: str) -> Iterator[tuple[str, str]]:
    """Name and form of each text that may stand in an error: as it is, and as its repr has it."""
    for given in sent:
        for name, value in (given if isinstance(given, Mapping) else {"request": given}).items():
            for part in _texts(value):
                if part != known and len(part) >= SHORTEST_MASKED:
                    yield str(name), part
                    yield str(name), repr(part)[1:-1]


def _without(text: str, found: Mapping[str, str]) -> str:
    """*text* with a name in the place of each run of characters that forms of *found* cover."""
    spans = [span for form, name in found.items() for span in _spans(text, form, name)]
    spans.sort(key=lambda span: (span[0], -span[1]))
    pieces, shown_to = [], 0
    for begin, end, name in spans:
        if begin >= shown_to:
            pieces += [text[shown_to:begin], f"<{name[:LONGEST_NAME]}>"]
        shown_to = max(shown_to, end)
    return "".join([*pieces, text[shown_to:]])


def _spans(text: str, form: str, name: str) -> Iterator[tuple[int, int, str]]:
    at = text.find(form)
    while at >= 0:
        yield at, at + len(form), name
        at = text.find(form, at + len(form))


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain JSON data, but not the keys."""
    match value:
        case str():
            yield value
        case Mapping():
            for item in value.values():
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)


def _word(value: Any) -> str:
    """One value of a text line, quoted where a reader could not see its end."""
    if isinstance(value, list):
        return ",".join(_word(item) for item in value) or "-"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


# -- logging ----------------------------------------------------------------------

# What every record has; the rest came as extra.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Attribute of a record to key of its JSON line; an application's own attribute of that name stands.
_KEYS: Final = MappingProxyType(
    {attribute: name for name, attribute in _ATTRIBUTES.items()}
    | {"gracekit_request_id": "task_id", "gracekit_method": "method"}
)


def configure_logging(
    log_format: LogFormat = "auto", *, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Send all logs of this process to *stream*; for the command line, never for embedded use.

    Where the stream is a file of the system, a thread writes them: one that nobody reads
    stops neither the event loop nor a drain.

    Args:
        log_format: `text` lines, `json` lines, or `auto`: text on a terminal.
        level: Lowest level shown.
        stream: None for standard output.
    """
    _install(_formatting(log_format, sys.stdout if stream is None else stream), level)


@contextlib.contextmanager
def logging_around(
    log_format: LogFormat = "auto", *, level: int, overrides: bool
) -> Iterator[None]:
    """`configure_logging` for a block that loads an application.

    If that configures logging itself, it stands. A bare `basicConfig()` counts for nothing, as
    `logging.warning()` calls it too. What is logged meanwhile goes the same way as later lines.

    Args:
        log_format: As there.
        level: As there.
        overrides: Let the application's configuration give way.
    """
    handler, root = _formatting(log_format, sys.stdout), logging.getLogger()
    before, ours = root.level, _OurLevel(level)
    if overrides:
        _install(handler, level)
    else:
        logging.lastResort = handler  # what Python asks as long as the root has no handler
        root.setLevel(ours)
    yield
    _enable()  # `dictConfig` and `fileConfig` disable loggers that are there before them
    if overrides or not _is_configured(root, ours):
        _install(handler, level)
    elif root.level is ours:
        root.setLevel(before)


def _enable() -> None:
    """Let the loggers of gracekit be heard again."""
    loggers = logging.getLogger().manager.loggerDict
    for name in (LOGGER, *(name for name in loggers if name.startswith(f"{LOGGER}."))):
        logging.getLogger(name).disabled = False


class _OurLevel(int):
    """A level that can be told from an equal one that somebody else has set."""


def _is_configured(root: logging.Logger, ours: int) -> bool:
    match root.handlers:
        case []:
            return False
        case [logging.StreamHandler(stream=sys.stderr, formatter=logging.Formatter() as form)]:
            return root.level is not ours or form._fmt != logging.BASIC_FORMAT  # noqa: SLF001
    return True


def _install(handler: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _formatting(log_format: LogFormat, out: TextIO) -> logging.Handler:
    text = log_format == "text" or (log_format == "auto" and out.isatty())
    handler = _handler(out)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    handler.addFilter(RequestFilter())
    return handler


class RequestFilter(logging.Filter):
    """Gives each log record the request whose handler has logged it; lets all pass.

    Add it to a handler of your own logging, and name `%(gracekit_request_id)s` and
    `%(gracekit_method)s` in its format; both are empty outside of handlers.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        here = running.get()
        record.gracekit_request_id = "" if here is None else here.task_id
        record.gracekit_method = "" if here is None else here.method
        return True


def _handler(out: TextIO) -> logging.Handler:
    try:
        handler = _SafeLines(out)
    except (OSError, ValueError):  # it is in memory, or closed
        return logging.StreamHandler(out)
    if isinstance(out, io.TextIOWrapper):
        # The handler writes past its buffer: what the application prints must not lag behind.
        out.reconfigure(line_buffering=True)
    return handler


class _SafeLines(LineHandler):
    """Says of a record that cannot be formatted what it is, in a line of the log."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """See `logging.Handler`, which prints the traceback and the arguments as they are."""
        if record.name == LOGGER:
            return  # ours have no arguments, and this one may be the report of another
        error, place = sys.exc_info()[1], f"{record.pathname}:{record.lineno}"
        text = f"a line of logger {record.name} cannot be written ({error!r}): {place}"
        self.handle(logging.LogRecord(LOGGER, logging.ERROR, __file__, 0, text, (), None))


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO    drain.started source=signal in_flight=3`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback if there is one."""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = escape(record.getMessage(), longest=8192)
        origin = "" if record.name == LOGGER else f"{escape(record.name)}: "
        request = "" if record.name == LOGGER else getattr(record, "gracekit_request_id", "")
        ending = f" task_id={_word(clean(request))}" if request else ""
        line = f"{when} {record.levelname:<7} {origin}{message}{ending}"
        return f"\n{INDENT}".join((line, *_traceback(record)))


class JsonFormatter(logging.Formatter):
    """One JSON object a line, keys as in docs; times are UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        whole, milliseconds = time.gmtime(record.created), int(record.msecs)
        entry = {
            "timestamp": f"{time.strftime('%Y-%m-%dT%H:%M:%S', whole)}.{milliseconds:03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": escape(record.getMessage(), longest=8192),
        }
        more = {k: clean(v) for k, v in vars(record).items() if k not in _STANDARD and v != ""}
        ours = {name: more.pop(key) for key, name in _KEYS.items() if key in more}
        entry |= {**ours, **more}
        entry |= _trace()
        if lines := _traceback(record):
            entry["exception"] = "\n".join(lines)
        return json.dumps(entry)


def _traceback(record: logging.LogRecord) -> list[str]:
    """Lines of the exception, each escaped: its message may be wire text."""
    if record.exc_info and record.exc_info[0] is not None:
        return _escaped("".join(traceback.format_exception(*record.exc_info)))
    return _escaped(textwrap.dedent(record.exc_text or ""))


def _escaped(text: str) -> list[str]:
    return [escape(line, longest=2048) for line in text.splitlines()]


# -- what is said beside the log -----------------------------------------------------


def said(text: str, *, trace: str = "", as_json: bool = False) -> str:
    """*text*, with a traceback, as a terminal or a log may show it: escaped and redacted.

    The lines after the first are indented, so that none can pass for another's.

    Args:
        text: May hold words of a peer or of the application.
        trace: The text of a traceback.
        as_json: Say it as one line of a JSON log.
    """
    if not as_json:
        return f"\n{INDENT}".join([*_escaped(text), *_escaped(trace)])
    record = logging.LogRecord(LOGGER, logging.CRITICAL, __file__, 0, text, (), None)
    record.exc_text = trace or None
    return JsonFormatter().format(record)


def take_hooks() -> None:
    """Say what Python would print of an exception that no code has caught; for the command line."""

    def tell(where: str, error: BaseException | None) -> None:
        if logging.getLogger().handlers:
            logging.getLogger(LOGGER).critical("%s", where, exc_info=error)
        else:
            trace = "" if error is None else "".join(traceback.format_exception(error))
            streams.say(said(where, trace=trace))

    def in_main(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            tell("an exception that nobody caught:", error)

    sys.excepthook = in_main
    threading.excepthook = lambda args: tell(
        f"thread {args.thread.name if args.thread else '?'} ended by an exception:", args.exc_value
    )
    sys.unraisablehook = lambda args: tell(
        f"{args.err_msg or 'an exception that cannot be raised'}: {args.object!r}", args.exc_value
    )


def _trace() -> dict[str, str]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


# Without it Python prints warnings of an embedded library to stderr; this is what libraries do.
logging.getLogger(LOGGER).addHandler(logging.NullHandler())
