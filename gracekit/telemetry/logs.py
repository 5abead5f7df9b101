"""Log lines of a process: text or JSON, written by a thread, with the id of the request."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, Protocol, TextIO

from gracekit import streams
from gracekit.config.choices import LogFormat
from gracekit.errors import DeclarationError
from gracekit.streams import LineHandler
from gracekit.telemetry.catalogue import ATTRIBUTES, CATALOGUE, LOGGER
from gracekit.telemetry.safe_text import INDENT, clean, context_words, escape, escaped_lines, word

MOST_CONTEXT_KEYS: Final = 10


class Running(Protocol):
    """The task that runs here, for log lines: the context of a handler or hook."""

    _awaited: dict[str, Running]  # by request id: who waits for its answer, in its run

    @property
    def task_id(self) -> str:
        """The request id, or the id of a run of a periodic job."""

    @property
    def method(self) -> str:
        """Name of the method."""

    @property
    def shown_context(self) -> Mapping[str, str] | None:
        """What is shown of the caller's context; None for nothing."""


running: Final[ContextVar[Running | None]] = ContextVar("gracekit_context", default=None)
"""Set by the code that calls handlers and hooks, around the call."""


# The attributes of every record; others came from `extra`, or from the context of a caller.
_CONTEXT: Final = "gracekit_context"
_STANDARD: Final = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", _CONTEXT}
)
_OF_JSON: Final = frozenset(
    {"timestamp", "level", "logger", "exception", "trace_id", "span_id", "event", "left_out"}
)


def checked_context_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Raises DeclarationError for *keys* of contexts that log lines cannot show."""
    if not isinstance(keys, tuple | list) or len(keys) > MOST_CONTEXT_KEYS:
        raise DeclarationError(
            f"context_keys={keys!r} must be a tuple of at most {MOST_CONTEXT_KEYS} names, such as "
            "('request_id', 'user_id')"
        )
    for key in keys:
        is_name = isinstance(key, str) and key.isascii() and key.isidentifier()
        if not is_name or is_used(key):
            why = "log lines use that name already" if is_name else "write ASCII letters, digits, _"
            raise DeclarationError(
                f"context_keys has {key!r}, which cannot be a field of log lines: {why}"
            )
    return tuple(keys)


def is_used(name: str) -> bool:
    """Whether log lines have *name* already."""
    is_field = any(name in event.fields for event in CATALOGUE.values())
    return is_field or name in _STANDARD | _OF_JSON or name.startswith(LOGGER)


# Attribute of a record to key of its JSON line; an application's attribute of that name wins.
_KEYS: Final = MappingProxyType(
    {attribute: name for name, attribute in ATTRIBUTES.items()}
    | {"gracekit_request_id": "task_id", "gracekit_method": "method"}
)


@contextlib.contextmanager
def logging_around(
    log_format: LogFormat = "auto", *, level: int, overrides: bool
) -> Iterator[None]:
    """Send all logs of this process to standard output, from a block on that loads an application.

    If the application configures logging itself, its configuration is kept. A bare `basicConfig()`
    does not count, as `logging.warning()` calls it too. Lines that are logged inside the block go
    to the same place as later ones.

    If standard output has a file descriptor, a thread writes the lines. So a pipe that is not
    read blocks neither the event loop nor a drain.

    Args:
        log_format: `text` lines, `json` lines, or `auto`: text on a terminal.
        level: Lowest level shown.
        overrides: Replace the application's configuration.
    """
    handler, root = _formatting(log_format, sys.stdout), logging.getLogger()
    before, ours = root.level, _OurLevel(level)
    if overrides:
        _install(handler, level)
    else:
        logging.lastResort = handler  # Python uses it while the root has no handler
        root.setLevel(ours)
    yield
    _enable()  # `dictConfig` and `fileConfig` disable loggers that exist already
    if overrides or not _is_configured(root, ours):
        _install(handler, level)
    elif root.level is ours:
        root.setLevel(before)


def _enable() -> None:
    """Enable the loggers of gracekit again."""
    loggers = logging.getLogger().manager.loggerDict
    for name in (LOGGER, *(name for name in loggers if name.startswith(f"{LOGGER}."))):
        logging.getLogger(name).disabled = False


class _OurLevel(int):
    """A level that we set. Its identity tells it from an equal level set by the application."""


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
    handler = _handler(out)
    handler.setFormatter(_formatter(log_format, out))
    handler.addFilter(RequestFilter())
    return handler


def _formatter(log_format: LogFormat, out: TextIO) -> logging.Formatter:
    text = log_format == "text" or (log_format == "auto" and out.isatty())
    return TextFormatter() if text else JsonFormatter()


def change_format(log_format: LogFormat) -> None:
    """Log in this format from now on, even if the application has configured another."""
    root = logging.getLogger()
    ours = [
        one for one in root.handlers if isinstance(one.formatter, TextFormatter | JsonFormatter)
    ]
    for handler in ours:
        handler.setFormatter(_formatter(log_format, sys.stdout))
    if not ours:
        _install(_formatting(log_format, sys.stdout), root.level)


class RequestFilter(logging.Filter):
    """Adds the request of the running handler to each log record; drops no record.

    Add it to a handler of your own logging, and use `%(gracekit_request_id)s` and
    `%(gracekit_method)s` in its format. Both are empty outside of handlers. So is
    `%(gracekit_context)s`: what the service's `context_keys` copy of the caller's context, such as
    `request_id=req-1`. Each of these keys is an attribute, too, which is missing outside.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        here = running.get()
        record.gracekit_request_id = "" if here is None else here.task_id
        record.gracekit_method = "" if here is None else here.method
        shown = None if here is None else here.shown_context
        record.gracekit_context = context_words(shown)
        if shown and record.name != LOGGER:  # an event may be about another task
            vars(record).update({**shown, **vars(record)})
        return True


def _handler(out: TextIO) -> logging.Handler:
    try:
        handler = _SafeLines(out)
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return logging.StreamHandler(out)
    if isinstance(out, io.TextIOWrapper):
        # The handler bypasses the stream's buffer. Without line_buffering printed lines would come
        # later. With write_through (PYTHONUNBUFFERED=1) each piece of a printed line would be a
        # write, and a log line could come between two of them.
        out.reconfigure(line_buffering=True, write_through=False)
    return handler


class _SafeLines(LineHandler):
    """Reports a record that cannot be formatted as a log line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """See `logging.Handler`, whose version prints the traceback and the raw arguments."""
        if record.name == LOGGER:
            return  # our records cannot fail so, and this may be such a report
        error, place = sys.exc_info()[1], f"{record.pathname}:{record.lineno}"
        text = f"a line of logger {record.name} cannot be written ({error!r}): {place}"
        self.handle(logging.LogRecord(LOGGER, logging.ERROR, __file__, 0, text, (), None))


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO    drain.started source=signal in_flight=3`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line, followed by the traceback if there is one."""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = escape(record.getMessage(), longest=8192)
        origin = "" if record.name == LOGGER else f"{escape(record.name)}: "
        request = "" if record.name == LOGGER else getattr(record, "gracekit_request_id", "")
        context = getattr(record, _CONTEXT, "")
        ending = f" task_id={word(clean(request))} {context}".rstrip() if request else ""
        line = f"{when} {record.levelname:<7} {origin}{message}{ending}"
        return f"\n{INDENT}".join((line, *_traceback(record)))


class JsonFormatter(logging.Formatter):
    """One JSON object on each line, with the keys of the docs; times are UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line."""
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
    """The lines of the exception, each escaped, as its message may come from the wire."""
    if record.exc_info and record.exc_info[0] is not None:
        return escaped_lines("".join(traceback.format_exception(*record.exc_info)))
    return escaped_lines(textwrap.dedent(record.exc_text or ""))


def said(
    text: str, *, trace: str = "", as_json: bool = False, level: int = logging.CRITICAL
) -> str:
    """*text*, with a traceback, escaped and redacted for a terminal or a log.

    The lines after the first are indented, so that none can look like a separate log line.

    Args:
        text: May contain text from a peer or from the application.
        trace: The text of a traceback.
        as_json: Return one line of a JSON log.
        level: The level of that line.
    """
    if not as_json:
        return f"\n{INDENT}".join([*escaped_lines(text), *escaped_lines(trace)])
    record = logging.LogRecord(LOGGER, level, __file__, 0, text, (), None)
    record.exc_text = trace or None
    return JsonFormatter().format(record)


def take_hooks() -> None:
    """Log uncaught exceptions, which Python would print; for the command line."""

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
            tell("an exception that was not caught:", error)

    sys.excepthook = in_main
    threading.excepthook = lambda args: tell(
        f"thread {args.thread.name if args.thread else '?'} ended by an exception:", args.exc_value
    )
    sys.unraisablehook = lambda args: tell(
        f"{args.err_msg or 'an exception that cannot be raised'}: {args.object!r}", args.exc_value
    )


def _trace() -> dict[str, str]:
    # Imported here: it takes 20 ms, and most commands of the command line write no JSON line.
    from opentelemetry import trace  # noqa: PLC0415 - see above

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


# As libraries do. Without a handler Python would print warnings of an embedded library to stderr.
logging.getLogger(LOGGER).addHandler(logging.NullHandler())
