"""Exceptions across the wire: what goes out, and the little that is rebuilt."""

from __future__ import annotations

import builtins
import copy
import sys
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

import pytest

from gracekit import errors
from gracekit.errors import (
    Draining,
    Gone,
    InvalidArgumentsError,
    NoCapacity,
    NoSuchMethodError,
    Parked,
    RemoteError,
    RpcError,
    StaleVersionError,
    UnsupportedVersionError,
)
from gracekit.rpc.failures import failure_of, is_foreign, rebuild, words_of
from gracekit.rpc.message import Failure, Reply
from gracekit.rpc.oslo_wire import MAX_BODY_BYTES, decode_reply, encode_reply

DISPATCHER = "oslo_messaging.rpc.dispatcher"


class NotFound(Exception):  # noqa: N818
    """An application's."""


class Opaque(Exception):  # noqa: N818
    """Hostile to whoever writes it down."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    @property
    def kwargs(self) -> object:
        raise RuntimeError("no kwargs")


class Large(list[int]):
    """Something large, which must not be walked through on the loop."""

    def __init__(self) -> None:
        super().__init__([1] * 100_000)

    def __iter__(self) -> NoReturn:
        raise AssertionError("walked through")

    __repr__ = __iter__


class WithKwargs(Exception):  # noqa: N818
    """As OpenStack's exceptions are made."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__("they have kwargs")
        self.kwargs = kwargs


class Counted(Exception):  # noqa: N818
    """One with a short text of its own."""

    def __str__(self) -> str:
        return f"{len(self.args[0])} volumes"


def raised(exception: Exception) -> Exception:
    """*exception* with a traceback."""
    try:
        raise exception  # noqa: TRY301 - for its traceback
    except Exception as error:  # noqa: BLE001
        return error


def failure(module: str, name: str, *args: object) -> Failure:
    return Failure(exc_class=name, module=module, message="said", args=args, tb=("line 1",))


def test_an_exception_is_written_in_full():
    """Class, module, message, arguments and the traceback's lines go out."""
    written = failure_of(raised(NotFound("vm-1 not found", 404)))

    assert (written.exc_class, written.module) == ("NotFound", NotFound.__module__)
    assert written.args == ("vm-1 not found", 404)
    assert written.tb[-1].endswith("NotFound: ('vm-1 not found', 404)\n")
    assert all(line.index("\n") == len(line) - 1 for line in written.tb), "as oslo sends them"


@pytest.mark.parametrize(
    ("error", "name", "module"),
    [
        (NoSuchMethodError("m"), "NoSuchMethod", DISPATCHER),
        (UnsupportedVersionError("v"), "UnsupportedVersion", DISPATCHER),
        (InvalidArgumentsError("a"), "TypeError", "builtins"),
        (Draining("d"), "Draining", "gracekit.errors"),
        (RemoteError("r", exc_class="X", exc_module="far.away"), "X", "far.away"),
        (type("Gone_Remote", (Exception,), {"__module__": "app_Remote"})(), "Gone", "app"),
    ],
)
def test_names_are_what_oslo_callers_know(error, name, module):
    """Our own refusals go out as oslo's, and a remote error keeps its origin."""
    assert (failure_of(error).exc_class, failure_of(error).module) == (name, module)


def test_writing_never_fails_and_stays_small():
    """Whatever an exception holds, its failure fits into a reply."""
    for error in (
        Opaque(),
        NotFound(object(), "\ud800", "x" * 3_000_000),
        NotFound([1] * 1_000_000),
        raised(NotFound('"' * 1_000_000)),
        raised(NotFound("\x01" * 16_000, "\x02" * 2_000)),
        raised(NotFound("y\n" * 1_000_000)),
    ):
        body = encode_reply(Reply(msg_id="m", reply_id="r", failure=failure_of(error)))
        assert len(body) < MAX_BODY_BYTES
        assert decode_reply(body).failure is not None


@dataclass
class Record:
    volumes: Large


def in_its_own_args() -> Exception:
    error = ValueError(Large())
    error.args = (error, Large())
    return error


def caused_by(error: Exception) -> Exception:
    outer = ValueError("outer")
    outer.__cause__ = error
    return raised(outer)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(Large()),
        KeyError(Large()),
        ValueError("two", Large()),
        ValueError({"key": (Large(),)}),
        WithKwargs(volumes=Large()),
        caused_by(KeyError(Large())),
        ExceptionGroup("many", [ValueError(Large())]),
        RpcError(Large()),
        ValueError(deque([1] * 9_000)),
        ValueError(Record(Large())),
        in_its_own_args(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_too_long_to_be_shown_is_not_written_out(error: Exception):
    """That would take seconds on the loop, and be cut to 16,384 characters afterwards."""
    failure = failure_of(raised(error))

    assert failure.kwargs == {}
    assert failure.tb[-1].endswith(f"{type(error).__name__}: {failure.message}\n")
    assert len(words_of(error)) < 1000


def test_the_begin_of_a_long_text_is_shown():
    """Also that of an exception with a text of its own, which says what matters."""
    failure = failure_of(ValueError("no volume " + "x" * 1_000_000))

    assert failure.message.startswith("no volume xxx")
    assert failure_of(Counted(Large())).message == "100000 volumes"


def test_an_exception_with_a_long_part_keeps_its_other_words_and_its_causes():
    """A decoding error has much data and a short text; others have a short argument beside a
    long one.
    """
    undecoded = UnicodeDecodeError("utf-8", b"x" * 100_000, 7, 8, "invalid start byte")
    group = ExceptionGroup("two failed", [ValueError("x" * 20_000), ValueError("y")])

    assert "position 7: invalid start byte" in failure_of(undecoded).message
    assert "position 7: invalid start byte" in "".join(failure_of(caused_by(undecoded)).tb)
    assert failure_of(group).message == "two failed (2 sub-exceptions)"
    assert failure_of(NotFound("upstream said no", Large())).message == (
        "'upstream said no', <Large, too long to be shown>"
    )


def test_of_a_thousand_causes_the_last_hundred_are_shown():
    """A loop that raises each error from the last one makes such a chain."""
    error: Exception = ValueError("first")
    for _ in range(1000):
        error = caused_by(error)

    assert "".join(failure_of(error).tb).count("ValueError: outer") in range(20, 101)


def test_builtins_are_rebuilt_with_their_arguments():
    """A ValueError there is a ValueError here, and shows the remote traceback as a note."""
    error = rebuild(failure("builtins", "ValueError", "bad", 5), {})

    assert type(error) is ValueError
    assert error.args == ("bad", 5)
    assert error.__notes__ == ["remote traceback:\nline 1"]


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        (DISPATCHER, "NoSuchMethod", NoSuchMethodError),
        (DISPATCHER, "UnsupportedVersion", UnsupportedVersionError),
        ("gracekit.errors", "Draining", Draining),
        ("exceptions", "KeyError", KeyError),
        ("builtins_Remote", "KeyError_Remote", KeyError),
    ],
)
def test_known_names_become_our_classes(module, name, kind):
    """Oslo's two refusals and gracekit's own errors can be caught as such."""
    assert type(rebuild(failure(module, name), {})) is kind


@pytest.mark.parametrize(
    "name",
    [
        "DependencyError",
        "VersionCapError",
        "Undeliverable",
        "UnconfirmedError",
        "CallTimeoutError",
        "HeartbeatTimeoutError",
    ],
)
def test_what_a_client_says_of_its_own_request_is_never_that_of_a_handler(name: str):
    """The "nothing was sent" of a request that the handler has made would be taken for the caller's
    own, which has run.
    """
    sent = failure_of(getattr(errors, name)("nothing was sent"))

    error = rebuild(sent, {})

    assert isinstance(error, RemoteError)
    assert (error.exc_class, error.exc_module) == (name, "gracekit.errors")
    assert str(error) == f"{name}: nothing was sent"


def test_registered_classes_are_rebuilt():
    """What the application registered by name is raised as its class, without keyword arguments."""
    sent = Failure(exc_class="NotFound", module="far", message="m", args=("a",), kwargs={"x": 1})

    error = rebuild(sent, {"far.NotFound": NotFound})

    assert type(error) is NotFound
    assert error.args == ("a",)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("subprocess", "Popen"),
        ("builtins", "eval"),
        ("builtins", "SystemExit"),
        ("builtins", "KeyboardInterrupt"),
        ("builtins", "BaseException"),
        ("builtins", "StopIteration"),
        ("builtins", "StopAsyncIteration"),
        ("builtins", "ExceptionGroup"),
        ("builtins", "object"),
        ("builtins", "ValueError.__class__"),
        ("builtins", "UnicodeDecodeError"),
        ("builtins.ValueError", "__class__"),
        ("antigravity", "Error"),
        ("gracekit.errors", "annotations"),
        ("tests.rpc.test_failures", "NotFound"),
        ("", ""),
    ],
)
def test_every_other_name_is_text(module, name):
    """Nothing is imported, looked up or called for a name that is in no table."""
    before = set(sys.modules)

    error = rebuild(failure(module, name, "echo pwned"), {})

    assert type(error) is RemoteError
    assert (error.exc_class, error.exc_module, error.traceback) == (name, module, "line 1")
    assert set(sys.modules) == before


def test_a_constructor_that_refuses_gives_a_remote_error():
    """A registered class that cannot be built from plain arguments does not break the caller."""

    class Picky(Exception):  # noqa: N818
        def __init__(self) -> None:
            super().__init__()

    assert type(rebuild(failure("app", "Picky", "a"), {"app.Picky": Picky})) is RemoteError


def test_every_rebuilt_builtin_can_be_raised_in_a_coroutine():
    """No name of builtins makes a caller raise what a coroutine must not."""
    for name in dir(builtins):
        error = rebuild(failure("builtins", name, "x"), {})
        assert isinstance(error, Exception)
        assert not isinstance(error, StopIteration | StopAsyncIteration)


# -- parked tasks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [NoCapacity("no memory"), Parked("t1", 1e9, 3), Gone("gone"), StaleVersionError("2 is now 3")],
)
def test_what_is_said_of_a_parked_task_is_rebuilt(error):
    """With its class, its arguments and its text, through the bytes of a reply."""
    reply = Reply(msg_id="m", reply_id="r", failure=failure_of(raised(error)))
    rebuilt = rebuild(decode_reply(encode_reply(reply)).failure, {})

    assert type(rebuilt) is type(error)
    assert (rebuilt.args, str(rebuilt)) == (error.args, str(error))


def test_a_rebuilt_parked_has_its_attributes():
    """They are its arguments."""
    rebuilt = rebuild(failure_of(Parked("t1", 1e9, 3)), {})

    assert isinstance(rebuilt, Parked)
    assert (rebuilt.task_id, rebuilt.deadline, rebuilt.version) == ("t1", 1e9, 3)


def test_what_is_missing_is_not_sent():
    """It is for those who make room, and not for the caller."""
    written = failure_of(NoCapacity("no memory", requested={"memory_mb": 8192}))

    assert "8192" not in repr(written)
    assert rebuild(written, {}).requested == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("t1",),
        (7, 1e9, 1),
        ("t1", "soon", 1),
        ("t1", True, 1),
        ("t1", 1e9, 1.5),
        ("t1", 1e9, True),
        ("t1", 1e9, 0),
        ("t1", -1, 1),
        ("t1", 10**400, 1),
        ("t1", float("nan"), 1),
        ("", 1e9, 1),
        ("t" * 256, 1e9, 1),
        ("t1", 1e9, 1, 1),
    ],
)
def test_a_parked_that_cannot_be_is_a_remote_error(args):
    """Whatever arguments arrive, the caller gets an exception with the text that was sent."""
    rebuilt = rebuild(failure("gracekit.errors", "Parked", *args), {})

    assert type(rebuilt) is RemoteError
    assert str(rebuilt) == "Parked: said"


@pytest.mark.parametrize(
    "sent",
    [
        failure("gracekit.errors", "NoCapacity", "no memory"),
        failure("builtins", "ValueError", "v"),
        failure("myapp", "NotFound", "n"),
        failure("far.away", "Unknown", "u"),
    ],
)
def test_what_came_in_a_message_is_foreign(sent):
    """Of any class, RemoteError too; also where it is raised on."""
    rebuilt = rebuild(sent, {"myapp.NotFound": NotFound})

    assert is_foreign(rebuilt)
    assert is_foreign(raised(rebuilt))
    assert is_foreign(copy.copy(rebuilt))


class Closed(Exception):  # noqa: N818
    """Shows nobody its attributes."""

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise RuntimeError("closed")


@pytest.mark.parametrize("error", [NoCapacity("here"), ValueError(), Closed()])
def test_what_was_raised_here_is_not_foreign(error):
    """Also a new one because of a foreign one; the question never raises."""
    error.__cause__ = rebuild(failure("gracekit.errors", "NoCapacity", "there"), {})

    assert not is_foreign(error)


def test_what_takes_no_mark_is_rebuilt_all_the_same():
    """An application's class may do as it likes."""
    assert type(rebuild(failure("app", "Closed"), {"app.Closed": Closed})) is Closed
