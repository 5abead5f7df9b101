"""Events: the catalogue is the contract, and wire text harms no log."""

from __future__ import annotations

import ast
import gc
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracekit import Runtime, Service, Settings, streams
from gracekit.rpc.memory import MemoryBroker
from gracekit.telemetry.catalogue import CATALOGUE, GROUPS, LOGGER, UnknownEventError
from gracekit.telemetry.logs import JsonFormatter, RequestFilter, TextFormatter
from gracekit.telemetry.metrics import METRICS
from gracekit.telemetry.safe_text import Sentence, clean, escape, masked, shown_context
from gracekit.telemetry.telemetry import MOST_KINDS, Telemetry
from gracekit.tracker.task import Lane, TrackedTask
from tests.logs import configure_logging
from tests.process.helpers import fill

PACKAGE = Path(__file__).resolve().parent.parent / "gracekit"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back after the test."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def emissions() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call of an `emit` method in the product, for each event that it may name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            match node:
                case ast.Call(func=ast.Attribute(attr="emit" | "_emit"), args=[event, *_]):
                    for name in ast.walk(event):
                        if isinstance(name, ast.Constant) and isinstance(name.value, str):
                            yield f"{path.relative_to(PACKAGE)}:{node.lineno}", name.value, node


# What `event_fields` of an object has, by the name of its variable; of any other as of a task.
FIELDS_OF: Final = {
    "task": {*TrackedTask(request_id="", method="", lane=Lane.OPS).event_fields},
    "hold": {"hold", "key", "method"},
    "begun": {"resource", "status", "rule", "token"},
}


def fields_of(call: ast.Call) -> set[str | None]:
    """The names that a call of `emit` gives; None for a `**` that cannot be followed."""
    names: set[str | None] = {keyword.arg for keyword in call.keywords} - {None}
    if [getattr(one, "id", "") for one in call.args[1:]] == ["job"]:
        names |= FIELDS_OF["task"]
    for keyword in call.keywords:
        match keyword:
            case ast.keyword(arg=None, value=ast.Attribute(value=value, attr="event_fields")):
                names |= FIELDS_OF.get(getattr(value, "id", ""), FIELDS_OF["task"])
            case ast.keyword(arg=None):
                names.add(None)
    return names


# -- the contract -------------------------------------------------------------------


def test_every_emission_is_in_the_catalogue():
    """No code path can meet an event or field at run time that the catalogue does not list."""
    wrong = []
    for place, event, call in emissions():
        fields = fields_of(call) - {
            "cause",
            "level",
            "trace",
            "context",
            "is_awaited",
        }  # none of it
        if event not in CATALOGUE or fields - CATALOGUE[event].fields:
            wrong.append((place, event, fields))

    assert wrong == []


def test_every_event_of_the_catalogue_is_emitted():
    """Operators are promised no event that never comes."""
    emitted = {event for _, event, _ in emissions()}

    assert set(CATALOGUE) - emitted == set()


def test_every_field_of_the_catalogue_is_sent():
    """Operators are promised no field that never comes."""
    sent: dict[str, set[str | None]] = {}
    for _, event, call in emissions():
        sent.setdefault(event, set()).update(fields_of(call))

    never = {event.name: event.fields - sent[event.name] for event in CATALOGUE.values()}

    assert {name: fields for name, fields in never.items() if fields} == {}


def test_unknown_events_and_fields_are_refused():
    """A misspelled event or field is an error that offers the right one."""
    with pytest.raises(UnknownEventError, match=r"did you mean drain\.started"):
        Telemetry().emit("drain.start")
    with pytest.raises(UnknownEventError, match="has no field 'in_fligth'; did you mean in_flight"):
        Telemetry().emit("drain.started", in_fligth=1)


def test_fields_do_not_collide_with_those_of_a_log_record(caplog):
    """Any logging formatter can show our fields as its own, and oslo.log shows its own as
    before.
    """
    taken = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
    oslos = {
        *("instance", "instance_uuid", "resource", "context", "extra", "project", "version"),
        *("request_id", "global_request_id", "user_identity", "user_name", "color", "isotime"),
        "error_summary",
    }
    caplog.set_level(logging.DEBUG, LOGGER)

    for event in CATALOGUE.values():
        assert event.fields & taken == set()
        Telemetry("shop", "till").emit(event.name, **dict.fromkeys(event.fields, 1))

    for record in caplog.records:
        RequestFilter().filter(record)
        assert set(vars(record)) & oslos == set()
    (started,) = (record for record in caplog.records if record.event == "task.started")
    assert json.loads(JsonFormatter().format(started))["resource"] == 1


@given(st.dictionaries(st.sampled_from("abc"), st.text() | st.floats() | st.lists(st.text())))
def test_what_is_shown_of_a_context_is_printable_and_short(context):
    """Any text that a message can carry, also half a character, which no log file can be written
    with.
    """
    shown = shown_context(context | {"d": "\ud800\n"}, ("b", "c", "d")) or {}

    assert shown["d"] == r"\ud800\n"
    assert "a" not in shown
    assert all(text.isprintable() and 0 < len(text) <= 255 for text in shown.values())
    assert {type(context[key]) for key in shown.keys() - {"d"}} <= {str, float}


# -- sinks --------------------------------------------------------------------------


def test_subscribers_hear_raw_fields_until_they_leave():
    """A test waits on the same events that operators read, with values as they are."""
    telemetry, heard = Telemetry(), []
    leave = telemetry.subscribe(lambda event, fields: heard.append((event, dict(fields))))

    telemetry.emit("drain.started", source="signal", in_flight=3)
    leave()
    leave()
    telemetry.emit("drain.resumed")

    assert heard == [("drain.started", {"source": "signal", "in_flight": 3})]


def test_a_failing_subscriber_stops_nobody(caplog):
    """A listener's fault is logged, and the next listener still hears."""
    telemetry, heard = Telemetry(), []
    telemetry.subscribe(lambda *_: 1 / 0)
    telemetry.subscribe(lambda event, _: heard.append(event))

    telemetry.emit("drain.resumed")

    assert heard == ["drain.resumed"]
    assert "a subscriber failed at drain.resumed" in caplog.text


class Moments:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reject(telemetry: Telemetry, number: int, reason: str = "arguments") -> None:
    for n in range(number):
        telemetry.emit("task.rejected", task_id=f"r{n}", method="resize", reason=reason)


def test_what_anybody_can_cause_is_one_line_a_kind_and_second(caplog):
    """A flood of refusals fills no disk; how many were left out is told, at the latest when
    asked.
    """
    caplog.set_level(logging.INFO, LOGGER)
    moments, heard = Moments(), []
    telemetry = Telemetry(now=moments)
    telemetry.subscribe(lambda event, _: heard.append(event))

    reject(telemetry, 500)
    reject(telemetry, 3, "unknown_method")
    moments.now += 1.0
    reject(telemetry, 1)
    telemetry.tell_left_out()
    moments.now += 0.5
    reject(telemetry, 7)
    telemetry.tell_left_out()
    told = len(caplog.records)
    telemetry.tell_left_out(at_once=True)

    assert len(heard) == 511
    assert told == 4
    assert [record.getMessage().partition(" ")[2] for record in caplog.records] == [
        "task_id=r0 method=resize reason=arguments",
        "task_id=r0 method=resize reason=unknown_method",
        "task_id=r0 method=resize reason=arguments left_out=499",
        "reason=unknown_method left_out=2",
        "reason=arguments left_out=7",
    ]


def test_at_debug_nothing_is_left_out(caplog):
    """Who asks for every request gets every line."""
    caplog.set_level(logging.DEBUG, LOGGER)

    reject(Telemetry(now=Moments()), 50)

    assert len(caplog.records) == 50


def test_kinds_of_one_second_are_bounded(caplog):
    """Names that never end cost no memory: the kinds of the moment are told and forgotten."""
    caplog.set_level(logging.INFO, LOGGER)
    telemetry = Telemetry(now=Moments())

    for n in range(3 * MOST_KINDS):
        telemetry.emit("hook.failed", hook=f"job{n}", error="no")

    assert len(telemetry._limit) <= MOST_KINDS


def test_a_log_line_reads_like_the_event(caplog):
    """The line is the event's name and its fields; absent ones are left out."""
    caplog.set_level(logging.INFO, LOGGER)

    Telemetry("compute").emit("drain.finished", waited_s=12.4, handed_over=2, given_back=None)

    (record,) = caplog.records
    assert record.getMessage() == "drain.finished waited_s=12.4 handed_over=2"
    assert (record.event, record.waited_s, record.levelno) == ("drain.finished", 12.4, logging.INFO)


def test_one_line_a_request_is_for_debugging(caplog):
    """At INFO a busy service is silent while it works."""
    caplog.set_level(logging.INFO, LOGGER)

    Telemetry().emit("task.finished", method="resize", outcome="succeeded", ran_s=0.1)

    assert caplog.records == []


def test_metrics_accept_every_event():
    """Counting fails at no event, with few fields or many."""
    telemetry = Telemetry()
    for event in CATALOGUE.values():
        telemetry.emit(event.name, **dict.fromkeys(event.fields, 1))


async def test_a_runtime_that_has_stopped_can_be_forgotten():
    """OpenTelemetry keeps instruments for ever; what they ask goes when nobody else has it."""
    settings = Settings(transport_url="memory://", store_url="memory://")
    runtime = Runtime(Service("compute"), settings, broker=MemoryBroker())
    async with runtime:
        tracker = weakref.ref(runtime.wired.tracker)
    del runtime
    gc.collect()

    assert tracker() is None


def instruments() -> int:
    """Objects that OpenTelemetry's API keeps for want of an SDK."""
    gc.collect()
    kinds = ("opentelemetry.metrics", "opentelemetry.trace")
    return sum(str(type(one).__module__).startswith(kinds) for one in gc.get_objects())


async def test_without_an_sdk_nobody_keeps_more_for_each_runtime_and_client():
    """Instruments are made once in a process."""

    async def life() -> None:
        settings = Settings(transport_url="memory://", store_url="memory://")
        async with Runtime(Service("compute"), settings, broker=MemoryBroker()):
            Telemetry("client")

    await life()
    before = instruments()
    for _ in range(5):
        await life()

    assert instruments() <= before


@pytest.mark.process
def test_gauges_and_counters_are_those_of_all_runtimes_that_live():
    """With a provider that comes late: two in one process are added up, and one that is closed
    is not.
    """
    program = Path(__file__).with_name("process") / "measured.py"

    told = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
    )

    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == {
        "two run": [[2, {"lane": "requests", "method": "work"}]],
        "two are open": [[2, {"lane": "ops"}], [2, {"lane": "requests"}]],
        "one runs": [[1, {"lane": "requests", "method": "work"}]],
        "one is open": [[1, {"lane": "ops"}], [1, {"lane": "requests"}]],
        "finished": 1,
        "instruments": len(METRICS),
    }


# -- wire text ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202egnp", "\\u202egnp"),
        ("\udc80", "\\udc80"),
        ("naïve", "naïve"),
        ("%s %(x)s {0}", "%s %(x)s {0}"),
        ("x" * 300, "x" * 256 + "…"),
        ("amqp://me:canary@host/v is gone", "amqp://***@host/v is gone"),
    ],
)
def test_text_is_escaped_cut_and_redacted(text, shown):
    """Line breaks, terminal codes, bidi marks, long names and passwords do not reach a log."""
    assert escape(text) == shown


@pytest.mark.parametrize("kind", [tuple, dict, list])
def test_a_large_field_is_not_written_out(kind):
    """Only its begin is shown, or its size."""

    class Large(kind):
        __str__ = __repr__ = None  # type: ignore[assignment]

    shown = clean(Large.fromkeys(range(100_000)) if kind is dict else Large(range(100_000)))

    assert shown == (list(range(100)) if kind is list else "<Large, too long to be shown>")


def test_lists_in_lists_are_shown_as_text():
    """A list that holds another one sixty times, and so on, would be walked through for hours."""
    nested: list[object] = [0]
    for _ in range(5):
        nested = [nested] * 60

    assert clean([nested, [1, [2]]]) == ["<list, too long to be shown>", "[1, [2]]"]


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_the_remedy_at_the_end_of_a_sentence_is_logged(formatter, caplog):
    """Messages of gracekit itself are logged in full, up to 1,000 characters, on one line."""
    sentence = Sentence("x" * 500 + "\n: chmod 600")
    with caplog.at_level(logging.INFO, logger=LOGGER):
        Telemetry().emit("service.reload_failed", error=sentence)
        Telemetry().emit("service.reload_failed", error=Sentence("x" * 2000))
    whole, cut = (formatter.format(record) for record in caplog.records)

    assert "x" * 500 in whole
    assert ": chmod 600" in whole
    assert len(whole.splitlines()) == 1
    assert "x" * 1001 not in cut


@given(st.text())
def test_no_text_breaks_a_line(text):
    """Whatever a caller calls its method, one event stays one line, as text and as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        for formatter in (TextFormatter(), JsonFormatter()):
            handler.setFormatter(formatter)
            Telemetry().emit("task.rejected", method=text, reason="unknown_method")
    finally:
        logger.removeHandler(handler)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1]).get("method", "") == clean(text)


def test_a_huge_name_costs_little():
    """A name of 1 MiB, or a list of them, is cut before it is looked at."""
    assert len(escape("\n" * (1 << 20))) < 2000
    assert len(clean(["x"] * 10_000)) == 100


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no disk s3cret", "no disk <disk>"),
        ("'s3cret' and s3cret's twin", "'<disk>' and <disk>'s twin"),
        ("deep-one of two", "<disks> of two"),
        ("KeyError: 'size'", "KeyError: 'size'"),
        (r"a\nb-c is", "<text> is"),
        ("a\nb-c is", "<text> is"),
        ("vm-1 is gone", "vm-1 is gone"),
        ("abc", "abc"),
        ("tok-tok-tok", "<auth>"),
    ],
)
def test_what_a_request_has_sent_is_masked(text, shown):
    """Each text stands as the name that it was sent under, but for the short and the known."""
    args = {"disk": "s3cret", "disks": [{"size": "deep-one"}], "text": "a\nb-c", "short": "abc"}
    context = {"auth": "tok-tok-tok", "part": "tok-"}

    assert masked(text, args, {"vm": "vm-1"}, context, resource=("vm", "vm-1")) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("task pfail-fail (pfail): no fail", "task pfail-fail (pfail): no <how>"),
        ("fail (pfail): task pfail-fail (pfail)", "<how> (p<how>): task pfail-fail (pfail)"),
        ("task pfail-fail (pfail): x", "task pfail-fail (pfail): x"),
        ("my task pfail-fail (pfail): y", "<more>: y"),
    ],
)
def test_the_name_of_the_task_stays_readable(text, shown):
    """An argument that repeats a part of id or method hides neither, as the log shows both
    anyway.
    """
    args = {"how": "fail", "more": "my task pfail-fail (pfail)"}

    assert masked(text, args, who="task pfail-fail (pfail)") == shown


def bomb() -> tuple[str, dict[str, str]]:
    """A context whose names hold the texts of others: each replacement would make more of them."""
    words = [chr(97 + n) * (20 - n) for n in range(16)]
    context = {(words[n + 1] if n + 1 < 16 else "z") * 40: words[n] for n in range(16)}
    return " ".join(words), context


@pytest.mark.parametrize("kind", ["names of texts", "many texts", "texts that begin alike"])
def test_masking_costs_little_whatever_was_sent(kind: str):
    """Its text does not grow, and a request of a megabyte does not hold the loop."""
    text, context = bomb()
    args: dict[str, list[str]] = {}
    if kind == "many texts":
        args = {"names": [f"name-{n:08}" for n in range(50_000)]}
    elif kind == "texts that begin alike":
        text, args = "y" * 16_000, {"names": ["y" * 8 + str(n) for n in range(50_000)]}
    begun = time.thread_time()

    shown = masked(text, context, args)

    assert time.thread_time() - begun < 0.3
    assert len(shown) < 12 * len(text)
    assert "aaaa" not in shown


def test_a_text_that_repeats_much_of_a_request_is_withheld():
    """Rather than shown with a part of it."""
    args = {f"n{n}": f"secret-{n:04}" for n in range(100)}

    assert "secret" not in masked(" ".join(args.values()), args)


def test_a_value_cannot_forge_a_field_of_a_text_line(root):
    """Quotes and backslashes are escaped, so that a reader finds where a value ends."""
    stream = io.StringIO()
    configure_logging("text", stream=stream)

    Telemetry().emit("store.error", what='vm1\\" state=ok y="', error="-")

    assert stream.getvalue().endswith('what="vm1\\\\\\" state=ok y=\\"" error=-\n')


def test_what_follows_a_url_is_shown():
    """Its login alone is left out, though a later word holds an at-sign."""
    text = (
        "GET https://u:p@api.example.org/v1 answered 503; ask team@example.org, or write @ as %40"
    )

    assert escape(text) == text.replace("u:p@", "***@")


def test_the_name_of_a_logger_forges_no_line(root):
    """An application may name loggers by what it was sent."""
    stream = io.StringIO()
    configure_logging("text", stream=stream)

    logging.getLogger("x.\n00:00:00 CRITICAL forged\x1b").warning("text")

    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


def test_a_line_break_in_an_exception_forges_no_line(root):
    """Each line of a traceback is escaped and indented, as its message may come from the wire."""
    stream = io.StringIO()
    configure_logging("text", stream=stream)

    error = ValueError("\x1b[2J gone\n12:00:01 INFO    forged")
    logging.getLogger("app").error("it\nfailed", exc_info=error)

    assert "\x1b" not in stream.getvalue()
    assert "ERROR   app: it\\nfailed\n  ValueError: \\x1b[2J gone" in stream.getvalue()


# -- the command line's logging -------------------------------------------------------


def test_json_lines_have_the_documented_keys(root):
    """A log that is no terminal gets one JSON object a line."""
    stream = io.StringIO()
    configure_logging("auto", stream=stream)

    telemetry = Telemetry()
    telemetry.identify(service="compute", instance="node-1-0")
    telemetry.emit("task.errored", task_id="t1", method="resize", reason="interrupted")

    entry = json.loads(stream.getvalue())
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "level": "WARNING",
        "logger": "gracekit",
        "event": "task.errored",
        "message": "task.errored task_id=t1 method=resize reason=interrupted",
        "service.name": "compute",
        "instance": "node-1-0",
        "task_id": "t1",
        "method": "resize",
        "reason": "interrupted",
    }


def test_auto_means_text_on_a_terminal(root):
    """A person at a terminal reads lines, not JSON."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure_logging("auto", stream=stream)
    Telemetry().emit("drain.started", source="signal", by="pid 1 (root)")

    assert stream.getvalue().endswith(' INFO    drain.started source=signal by="pid 1 (root)"\n')


class FullPipe:
    """A stream that takes nothing more until it is read, and what is read from it then."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        fill(writing)
        self.stream = os.fdopen(writing, "w", encoding="utf-8")
        self._data = b""
        self._reader = threading.Thread(target=self._read)

    def _read(self) -> None:
        while data := os.read(self._reading, 65536):
            self._data += data

    def read(self) -> None:
        """Begin to read."""
        self._reader.start()

    def lines(self) -> list[str]:
        """All that came, once everything logged was written; without what filled the pipe."""
        assert streams.flush(30.0)
        self.stream.close()
        self._reader.join()
        return self._data.decode().lstrip("x").splitlines()

    def close(self) -> None:
        self.stream.close()
        os.close(self._reading)


@pytest.fixture
def full_pipe(root) -> Iterator[FullPipe]:
    made = FullPipe()
    configure_logging("text", stream=made.stream)
    yield made
    made.close()


def test_what_a_full_stream_does_not_take_is_counted_and_said(full_pipe, monkeypatch):
    """Who logs never waits; so many lines are kept, and the others are told of when there is
    room.
    """
    monkeypatch.setattr(streams, "MOST_LINES", 100)
    logging.getLogger("app").info("line 0")
    every = logging.getLogger().handlers
    (handler,) = [one for one in every if isinstance(one, streams.LineHandler)]
    limit = time.monotonic() + 30.0
    while handler._lines.qsize():  # until the writer has taken it, and is stuck
        assert time.monotonic() < limit
        time.sleep(0.001)
    for n in range(1, 150):
        logging.getLogger("app").info("line %d", n)

    full_pipe.read()
    assert streams.flush(30.0)
    logging.getLogger("app").info("again")

    *kept, dropped, again = full_pipe.lines()
    assert [line.rpartition(": ")[2] for line in kept] == [f"line {n}" for n in range(101)]
    told = "49 log lines were dropped: the stream was not read"
    assert dropped.endswith(told)
    assert again.endswith("app: again")


class Raw(io.FileIO):
    """A pipe's end that keeps each write apart."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w")
        self.writes: list[bytes] = []

    def write(self, data) -> int:
        self.writes.append(bytes(data))
        return len(self.writes[-1])


def test_a_printed_line_leaves_in_one_write_also_where_python_is_unbuffered(root):
    """A log line, which a thread writes, cannot come between the pieces of a printed line."""
    reading, writing = os.pipe()
    raw = Raw(writing)
    with io.TextIOWrapper(raw, write_through=True) as stream:  # as with PYTHONUNBUFFERED=1
        configure_logging("json", stream=stream)

        print("working on", 3, file=stream)
    os.close(reading)

    assert raw.writes == [b"working on 3\n"]


def test_a_flush_waits_for_the_stream_no_longer_than_its_bound(full_pipe):
    """False if it was not taken in time; true once it is."""
    logging.getLogger("app").info("last words")
    began_at = time.monotonic()

    assert not streams.flush(0.2)
    assert time.monotonic() - began_at < 10.0

    full_pipe.read()
    assert full_pipe.lines()[-1].endswith("app: last words")


@pytest.mark.process
def test_a_forked_child_writes_its_own_lines_and_not_those_of_its_parent(full_pipe):
    """The thread that writes stays in the parent; a line is neither lost nor written twice."""
    logging.getLogger("app").info("of the parent")
    full_pipe.read()
    child = os.fork()
    if child == 0:
        logging.getLogger("app").info("of the child")
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = [line.rpartition(": ")[2] for line in full_pipe.lines()]
    assert sorted(lines) == ["of the child", "of the parent"]


@pytest.mark.process
def test_what_fails_at_the_interpreter_s_end_does_not_keep_the_process():
    """No thread can begin then, and so nobody waits for one that would say it."""
    code = "from gracekit.telemetry.logs import take_hooks; take_hooks(); print('lost')"
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # its last flush is the one that fails
            stdout=full,
            check=False,
            timeout=30,
        )

    assert ran.returncode == 120


def test_embedded_use_leaves_the_root_logger_alone(root):
    """Building and using Telemetry installs nothing but the library's NullHandler."""
    before = root.handlers[:]

    Telemetry().emit("drain.resumed")

    assert root.handlers == before
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger(LOGGER).handlers)


# -- the page -------------------------------------------------------------------------------


def test_no_event_is_in_two_groups():
    """Otherwise the page would have more rows than the catalogue has events."""
    assert sum(map(len, GROUPS.values())) == len(CATALOGUE)
