"""Exceptions on the wire: written in oslo's failure form, rebuilt by an explicit table.

A received name is only looked up in the tables; it is never imported or used as an
attribute, and classes are never called with keyword arguments. An exception whose
name is in no table becomes a RemoteError with its text.
"""

from __future__ import annotations

import builtins
import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit import errors
from gracekit.config.choices import ErrorDetails
from gracekit.errors import RemoteError
from gracekit.rpc.message import Failure
from gracekit.rpc.plain import dumps, plain
from gracekit.telemetry.safe_text import LONGEST_WRITTEN, is_long

_DISPATCHER: Final = "oslo_messaging.rpc.dispatcher"
_EXPECTED: Final = "_gracekit_expected"
_FOREIGN: Final = "_gracekit_foreign"
_SUFFIX: Final = "_Remote"  # what oslo appends to a rebuilt exception's class and module

# Most characters of a message, of a traceback's end, of all args and of all kwargs. A failure is
# JSON in JSON in JSON, where a quote takes 8 bytes, and readers accept 1 MiB.
_MAX_TEXT: Final = LONGEST_WRITTEN
_MOST: Final = 100  # exceptions in one traceback, and args of one whose text is shortened
_USUAL_TEXTS: Final = (BaseException.__str__, KeyError.__str__, errors.GracekitError.__str__)

# Our own errors are sent under these names, which callers with oslo.messaging expect.
_SENT_AS: Final[Mapping[type[BaseException], tuple[str, str]]] = MappingProxyType(
    {
        errors.NoSuchMethodError: ("NoSuchMethod", _DISPATCHER),
        errors.UnsupportedVersionError: ("UnsupportedVersion", _DISPATCHER),
        errors.InvalidArgumentsError: ("TypeError", "builtins"),
    }
)

# Not rebuilt: they cannot be built from plain arguments, or break the coroutine that raises them.
# Or they say what became of a client's own request. From a handler they mean that of another one,
# which the handler has made: who takes it for its own might send a request twice.
_NOT_REBUILT: Final = (
    *(ExceptionGroup, StopIteration, StopAsyncIteration, RemoteError),
    *(errors.VersionCapError, errors.DependencyError, errors.Undeliverable),
    *(errors.UnconfirmedError, errors.CallTimeoutError, errors.NoAnswerError),
)


def _exceptions_of(module: object, prefix: str) -> dict[str, type[Exception]]:
    return {
        f"{prefix}.{name}": value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and not issubclass(value, _NOT_REBUILT)
        and not name.startswith("_")
    }


_REBUILT: Final[Mapping[str, type[Exception]]] = MappingProxyType(
    _exceptions_of(builtins, "builtins")
    | _exceptions_of(builtins, "exceptions")  # Python 2's name, still sent by old peers
    | _exceptions_of(errors, "gracekit.errors")
    | {
        f"{_DISPATCHER}.NoSuchMethod": errors.NoSuchMethodError,
        f"{_DISPATCHER}.UnsupportedVersion": errors.UnsupportedVersionError,
    }
)


# -- outgoing -----------------------------------------------------------------


def failure_of(exception: BaseException) -> Failure:
    """Convert an exception to data; never raises, even if the exception's own methods do.

    A RemoteError that a handler did not catch keeps the class and module of its origin.
    """
    try:
        return _written_down(exception)
    except BaseException as fault:  # noqa: BLE001 - properties and metaclasses are the application's
        message = f"<an exception that cannot be written down: {kind_of(fault)}>"
        return Failure(exc_class="Exception", module="builtins", message=message)


def words_of(value: object) -> str:
    """The repr of an application's object, for a log or a record; never raises."""
    return _text_of(value, repr)


def kind_of(value: object) -> str:
    """The name of a value's class; never raises."""
    try:
        return str(type(value).__name__)
    except BaseException:  # noqa: BLE001 - a metaclass may be the application's
        return "object"


def expect(exception: BaseException) -> None:
    """Mark an exception as declared by its handler, so that it is not logged as a warning."""
    with contextlib.suppress(Exception):  # it may take no attributes
        exception.__dict__[_EXPECTED] = True


def is_expected(exception: BaseException) -> bool:
    """Whether `expect` marked it; never raises."""
    try:
        return _EXPECTED in exception.__dict__
    except BaseException:  # noqa: BLE001 - a property of that name may be the application's
        return False


def is_foreign(exception: BaseException) -> bool:
    """Whether `rebuild` made it, so that another service raised it; never raises.

    If a handler does not catch such an exception, its callee failed, not the handler itself.
    """
    try:
        return _FOREIGN in exception.__dict__
    except BaseException:  # noqa: BLE001 - a property of that name may be the application's
        return False


def _written_down(exception: BaseException) -> Failure:
    exc_class, module = _name_of(exception)
    return Failure(
        exc_class=exc_class,
        module=module,
        message=_message_of(exception),
        args=_args_of(exception),
        kwargs=_kwargs_of(exception),
        tb=traceback_lines(exception),
    )


def _name_of(exception: BaseException) -> tuple[str, str]:
    kind = type(exception)
    if kind in _SENT_AS:
        return _SENT_AS[kind]
    if isinstance(exception, RemoteError) and exception.exc_class:
        return exception.exc_class, exception.exc_module
    return kind.__name__.removesuffix(_SUFFIX), kind.__module__.removesuffix(_SUFFIX)


def _message_of(value: object) -> str:
    return _text_of(value, str)


def _text_of(value: object, write: Callable[[object], str]) -> str:
    try:
        text = _short_text(value, write) if is_long(value) else write(value)
    except BaseException as error:  # noqa: BLE001 - __str__ and __repr__ are the application's
        text = f"<{kind_of(value)} whose text cannot be had: {kind_of(error)}>"
    return text[:_MAX_TEXT].encode(errors="replace").decode()


def _short_text(value: object, write: Callable[[object], str]) -> str:
    """The text of a long *value*: its begin, or that of an exception without its long parts."""
    if type(value) is str:
        return write(value[:_MAX_TEXT])
    if not isinstance(value, BaseException):
        return f"<{kind_of(value)}, too long to be shown>"
    if write is str and type(value).__str__ not in _USUAL_TEXTS:
        return write(value)
    parts = [_part_of(one, write if len(value.args) == 1 else repr) for one in value.args[:_MOST]]
    return ", ".join(parts) if write is str else f"{kind_of(value)}({', '.join(parts)})"


def _part_of(value: object, write: Callable[[object], str]) -> str:
    is_short = type(value) is str or not is_long(value)
    return write(value)[:_MAX_TEXT] if is_short else f"<{kind_of(value)}, too long to be shown>"


def _plain_or_text(value: object) -> Any:
    try:
        written = plain(value, "arg", 4)
        dumps(written, "arg")  # an integer may be too long to be written
    except BaseException:  # noqa: BLE001 - a Mapping may be the application's
        return _message_of(value)
    return written


def _args_of(exception: BaseException) -> tuple[Any, ...]:
    try:
        args = () if is_long(exception.args) else tuple(map(_plain_or_text, exception.args))
    except BaseException:  # noqa: BLE001 - a property of that name may be the application's
        return ()
    return args if len(msgspec.json.encode(args)) <= _MAX_TEXT else ()


def _kwargs_of(exception: BaseException) -> dict[str, Any]:
    try:
        kwargs = getattr(exception, "kwargs", None) or {}
        kwargs = {} if is_long(kwargs) else dict(kwargs)
    except BaseException:  # noqa: BLE001 - any attribute of that name may stand there
        return {}
    written = {_message_of(key): _plain_or_text(value) for key, value in kwargs.items()}
    return written if len(msgspec.json.encode(written)) <= _MAX_TEXT else {}


def traceback_lines(exception: BaseException) -> tuple[str, ...]:
    """The traceback with its line ends, the end of a long one; never raises."""
    try:
        chain = _chain(exception)
        is_usual = len(chain) <= _MOST and not any(map(is_long, chain))
        lines = traceback.format_exception(exception) if is_usual else _long_traceback(chain)
    except BaseException:  # noqa: BLE001 - it calls the application's __str__ and __repr__
        return ()
    return tuple(_message_of("".join(lines)[-_MAX_TEXT:]).splitlines(keepends=True))


def _chain(exception: BaseException) -> list[BaseException]:
    """An exception, the one that it was raised from, and so on, to a little beyond `_MOST`.

    The members of a group are among its `args`.
    """
    chain: list[BaseException] = []
    one: BaseException | None = exception
    while one is not None and len(chain) <= _MOST and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return chain


def _long_traceback(chain: Sequence[BaseException]) -> list[str]:
    """As `traceback.format_exception`, with short texts and without the members of groups."""
    lines: list[str] = []
    for one in reversed(chain[:_MOST]):
        lines += ["\nIt led to this:\n\n"] if lines else []
        lines += ["Traceback (most recent call last):\n", *traceback.format_tb(one.__traceback__)]
        lines.append(f"{kind_of(one)}: {_message_of(one)}\n")
    return lines


def shown(
    failure: Failure, details: ErrorDetails, *, is_ours: bool = False, sentence: str = ""
) -> Failure:
    """The part of a failure that is sent to the caller.

    Args:
        failure: The failure as recorded.
        details: `full`, `message` (no traceback and no arguments), or `none`.
        is_ours: Whether gracekit refused the request. Then the message is always sent, because
            it says how to correct the request, and `REFUSED` in place of a traceback.
        sentence: If gracekit ended the task: the text that `none` sends in place of the recorded
            one, which may be the application's or an operator's. Empty if a handler raised. The
            class cannot tell, as handlers may raise gracekit's classes too.
    """
    if details == "full":
        return failure
    if details == "message" or is_ours:
        tb = failure.tb if is_ours else ()
        return msgspec.structs.replace(failure, args=(), kwargs={}, tb=tb)
    exc_class = failure.exc_class if sentence else RemoteError.__name__
    message = f"{sentence or 'the request failed'}; {_KEPT}"
    return Failure(exc_class=exc_class, module=errors.__name__, message=message)


_KEPT: Final = "its service keeps the reason under the request id"
REFUSED: Final = "the service refused the request, and ran nothing"


# -- incoming -----------------------------------------------------------------


def rebuild(failure: Failure, allowed: Mapping[str, type[Exception]]) -> Exception:
    """Turn a failure into an exception that the caller can catch.

    Args:
        failure: From the wire.
        allowed: Classes that the application registered, by `module.Class`.

    Returns:
        An instance of a class from *allowed*, of a builtin Exception, or of a class
        of gracekit; otherwise a RemoteError. `is_foreign` is true for it.
    """
    exception = _rebuilt(failure, allowed)
    with contextlib.suppress(Exception):  # it may take no attributes
        exception.__dict__[_FOREIGN] = True
    return exception


def _rebuilt(failure: Failure, allowed: Mapping[str, type[Exception]]) -> Exception:
    exc_class = failure.exc_class.removesuffix(_SUFFIX)
    module = failure.module.removesuffix(_SUFFIX)
    name = f"{module}.{exc_class}"
    kind = allowed.get(name) or _REBUILT.get(name)
    remote = "\n".join(line.rstrip("\n") for line in failure.tb)  # with and without line ends
    exception = _build(kind, failure) if kind else None
    if exception is None:
        text = f"{exc_class or 'unnamed remote error'}: {failure.message}"
        return RemoteError(text, exc_class=exc_class, exc_module=module, traceback=remote)
    if remote:
        exception.add_note(f"remote traceback:\n{remote}")
    return exception


def _build(kind: type[Exception], failure: Failure) -> Exception | None:
    for args in (failure.args or (failure.message,), (failure.message,)):
        try:
            exception = kind(*args)
        except Exception:  # noqa: BLE001, S112 - the class is the application's
            continue
        if isinstance(exception, kind):
            return exception
    return None


def check_exceptions(exceptions: object) -> None:
    """Check that *exceptions* maps names to exception classes.

    Raises:
        ConfigError: it is no mapping, or a value is no exception class.
    """
    if not isinstance(exceptions, Mapping):
        raise errors.ConfigError(
            f"exceptions={exceptions!r} is no mapping: write exceptions={{'myapp.errors.Refused': "
            "Refused}, by module and class as the service raises them"
        )
    for name, kind in exceptions.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise errors.ConfigError(
                f"exceptions[{name!r}] is {kind!r}, not a subclass of Exception; "
                "map 'module.Class' as the service sends it to a class of yours"
            )
