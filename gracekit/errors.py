"""Every exception that gracekit raises on purpose, in one tree.

Each class's docstring says what happened and what to do; messages add the
values. Their names end in `Error`, but for six that are named for a state
of the world, in which nothing has failed: `Draining`, `Gone`, `LeaseHeld`,
`NoCapacity`, `Parked` and `Undeliverable`. Callers expect them, and do
something else then.
"""

from __future__ import annotations

import datetime as dt
import json
import reprlib
import typing
from collections import abc

MOST_REQUESTED: typing.Final = 4096
"""Bytes of JSON that a `NoCapacity` may say of what is missing."""

_MOST_LEVELS: typing.Final = 16  # of it; the messages that carry it may have 32
_LONGEST_ID: typing.Final = 255  # characters, as of every id on the wire
_LAST_TIME: typing.Final = 253_402_300_799  # the end of the year 9999, the last of a date


class GracekitError(Exception):
    """Root of everything gracekit raises on purpose."""


# -- configuration and declaration: exit 78 -----------------------------------


class ConfigError(GracekitError):
    """A setting is wrong, or two settings contradict each other."""


class DeclarationError(GracekitError):
    """A method, hook or argument of a service is declared in a way that cannot work."""


class SchemaTooNewError(ConfigError):
    """The store was written by a newer gracekit; upgrade this process or use another store."""


# -- the store ----------------------------------------------------------------


class StoreError(GracekitError):
    """The store did not do what was asked."""


class ConflictError(StoreError):
    """A compare-and-set found another value; the whole batch was rolled back.

    Attributes:
        statement: Index of the statement whose row count differed.
    """

    def __init__(self, message: str, *, statement: int) -> None:
        super().__init__(message)
        self.statement = statement


class UnknownCommitError(StoreError):
    """A commit neither succeeded nor failed visibly; read the rows again before acting."""


class StoreLockedError(StoreError):
    """Another program kept the database locked for as long as we wait; nothing was done."""


class StoreUnreachableError(StoreError):
    """The store cannot be reached for now; nothing was done."""


class StoreFinalError(StoreError):
    """This process commits nothing to its store any more; start it again."""


class StoreBrokenError(StoreFinalError):
    """An I/O error, a full or read-only disk, or corruption: final for this process."""


class StoreFencedError(StoreFinalError):
    """Others have declared this run dead and act in its place; its commits are refused for good."""


class StoreClosedError(StoreError):
    """The store is not open: it was not started yet, or is stopped."""


class DependencyError(GracekitError):
    """A broker or store cannot be reached at start: exit 69."""


# -- tracker and leases -------------------------------------------------------


class IllegalTransitionError(GracekitError):
    """A state may not follow the present one; see the table beside the enum."""


class LeaseHeld(GracekitError):  # noqa: N818 - named for a state
    """Another task or run holds the lease; it was not waited for.

    No `Error` in its name: the resource is in use, as it may be at any time, and who
    takes a lease by `ctx.lease` decides what to do then.
    """


class AlreadyRunningError(GracekitError):
    """A run of this instance is alive; give the second one another GRACEKIT_INSTANCE."""


# -- rpc ----------------------------------------------------------------------


class RpcError(GracekitError):
    """A request or its reply went wrong."""


class BadMessageError(RpcError):
    """Bytes that are no request: unreadable, too deep, or of another protocol version."""


class MessageTooLargeError(BadMessageError):
    """A body above `max_body_bytes`; nothing of it was parsed."""


class InvalidArgumentsError(RpcError, TypeError):
    """The arguments do not fit the method's signature."""


class NoSuchMethodError(RpcError):
    """No method of that name is served in that namespace."""


class UnsupportedVersionError(RpcError):
    """The service does not serve that version or namespace."""


class VersionCapError(RpcError):
    """The request needs a newer interface than `version_cap` allows; nothing was sent."""


class ConflictingRequestError(RpcError):
    """The request id is known with other content, or from another caller; draw new ids."""


class Undeliverable(RpcError):  # noqa: N818 - named for a state
    """No queue takes this message; nothing was kept.

    No `Error` in its name: the service or host is not there, or not yet, and the sender
    decides whether to try later.
    """


class UnconfirmedError(RpcError, TimeoutError):
    """The broker did not confirm a message in time; it may be in the queue, or not."""


class Draining(RpcError):  # noqa: N818 - named for a state
    """The service is draining and does not take this request; ask another host or later.

    No `Error` in its name: each service drains whenever it is stopped, and a client that
    may ask somebody else does.
    """


class CallTimeoutError(RpcError, TimeoutError):
    """No reply in time; the request may still run, now or after a restart."""


class HeartbeatTimeoutError(CallTimeoutError):
    """No heartbeat within `monitor_timeout`; the request may still run, as after any time-out."""


class MethodTimeoutError(RpcError, TimeoutError):
    """The method exceeded its own `timeout=`; its handler was cancelled."""


class RunEndedError(RpcError):
    """A control verb is meant for a run that has ended; its instance has another run now."""


class ControlOffError(RpcError):
    """Control verbs are not taken by this transport, whose senders are not known."""


class TaskInterruptedError(RpcError):
    """The task was started and its end is not known; recovery marked it ERRORED."""


class TaskCancelledError(RpcError):
    """The task was cancelled by an operator or its caller."""


class NoCapacity(RpcError):  # noqa: N818 - named for a state
    """What a request needs is not to be had now; its handler raises this.

    No `Error` in its name: resources are taken now and then, and somebody may make room.

    With `use_pending_state` the task waits as PENDING; without it, it is FAILED. A NoCapacity that
    came from a service which the handler has called parks nothing: raise a new one for that.

    Args:
        message: Why, in a sentence.
        requested: What is missing, for whoever makes room: `{"memory_mb": 8192}`. Plain data, at
            most `MOST_REQUESTED` bytes as JSON and 16 levels. Callers are not sent it.

    Attributes:
        requested: A copy as plain data; empty if nothing was given.

    Raises:
        InvalidArgumentsError: *requested* cannot be kept.
    """

    def __init__(
        self, message: str = "", *, requested: abc.Mapping[str, typing.Any] | None = None
    ) -> None:
        super().__init__(message)
        self.requested: dict[str, typing.Any] = checked_request(requested)


def checked_request(requested: object) -> dict[str, typing.Any]:
    """A copy of what is said to be missing, as plain data.

    Raises:
        InvalidArgumentsError: it cannot be kept; the message says why.
    """
    if requested is None:
        return {}
    if not isinstance(requested, abc.Mapping):
        raise InvalidArgumentsError(
            f"NoCapacity(requested={reprlib.repr(requested)[:50]}) is no mapping; write "
            "requested={'memory_mb': 8192}"
        )
    kept: dict[str, typing.Any] = {}
    for key, value in requested.items():
        if not isinstance(key, str):
            raise InvalidArgumentsError(
                f"NoCapacity(requested=...) has the key {str(key)[:50]!r}, which is no text"
            )
        try:
            _check_levels(value, _MOST_LEVELS - 1)
            kept[key] = json.loads(json.dumps(value, allow_nan=False))
            _compact({key: kept[key]}).encode()  # refuses half a character, as a message does
        except (TypeError, ValueError) as error:
            raise InvalidArgumentsError(
                f"NoCapacity(requested=...) has at {key[:50]!r} what is no plain data: {error}; "
                "use None, truth values, finite numbers, text, lists and mappings"
            ) from error
    size = len(_compact(kept).encode())
    if size > MOST_REQUESTED:
        raise InvalidArgumentsError(
            f"NoCapacity(requested=...) has {size} bytes as JSON, and at most {MOST_REQUESTED} are "
            "kept: name what is missing, not all that was asked for"
        )
    return kept


def _check_levels(value: object, most: int) -> None:
    """See that *value* is not nested deeper, and that no key in it would be turned into text."""
    if not isinstance(value, dict | list | tuple):
        return
    if most <= 0:
        raise ValueError(f"more than {_MOST_LEVELS} levels, or a circle")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise TypeError("a mapping with a key that is no text")
    for member in value.values() if isinstance(value, dict) else value:
        _check_levels(member, most - 1)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Parked(RpcError):  # noqa: N818 - named for a state
    """The task waits for capacity, as PENDING; its call is answered by this.

    No `Error` in its name: nothing has failed, and the task may still succeed.

    Clients get it that have said `prepare(pending=True)`; any other gets `NoCapacity`.

    Attributes:
        task_id: The request id, under which the task can be looked up and moved.
        deadline: Wall time, in seconds since 1970, until which it waits.
        version: How often it was parked; an order about it names this number.

    Raises:
        TypeError: a value is of another type.
        ValueError: a value cannot be. From the wire anything may come.
    """

    def __init__(self, task_id: str, deadline: float, version: int = 1) -> None:
        if [type(task_id), type(version)] != [str, int] or type(deadline) not in {int, float}:
            raise TypeError("Parked(task_id, deadline, version) needs a text and two numbers")
        if not 0 < len(task_id) <= _LONGEST_ID:
            raise ValueError(f"task_id must have 1 to {_LONGEST_ID} characters")
        if not 0 <= deadline <= _LAST_TIME:  # NaN is not between them either
            raise ValueError("deadline must be seconds since 1970, up to the year 9999")
        if version < 1:
            raise ValueError("version must be 1 or more")
        super().__init__(task_id, float(deadline), version)
        self.task_id = task_id
        self.deadline = float(deadline)
        self.version = version

    def __str__(self) -> str:
        """A sentence; `args` are the values, by which a client rebuilds it."""
        until = dt.datetime.fromtimestamp(self.deadline, dt.UTC)
        return (
            f"task {self.task_id} waits for capacity until {until:%Y-%m-%d %H:%M:%S} UTC (version "
            f"{self.version}), and its call is answered by this: a resolver or an operator lets "
            "it run, or it expires"
        )


class Gone(RpcError):  # noqa: N818 - named for a state
    """The task has ended; the order about it came too late and has changed nothing.

    No `Error` in its name: several may order something about one task, and one of them is first.
    """


class StaleVersionError(RpcError):
    """The order does not fit the task as it is: look at it again, and decide anew.

    It was parked again since, or runs again, or never was parked.
    """


class UnknownTaskError(RpcError):
    """No task of that id is on record."""


class UnserialisableError(RpcError, TypeError):
    """A value cannot be written as JSON; return plain data."""


class RemoteError(RpcError):
    """The handler raised, and its class is not one this client was told to rebuild.

    Attributes:
        exc_class: Class name as sent, for example `"NotFound"`.
        exc_module: Module as sent, for example `"myapp.errors"`; never imported.
        traceback: The remote traceback as text, possibly empty.
    """

    def __init__(
        self, message: str, *, exc_class: str = "", exc_module: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.exc_class = exc_class
        self.exc_module = exc_module
        self.traceback = traceback
