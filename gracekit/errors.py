"""Every exception that gracekit raises on purpose, in one tree.

Each class's docstring says what happened and what to do; docs/errors.md is made of them. Nine
classes are named for a state in which nothing has failed, or for what is asked for: `Draining`,
`Gone`, `LeaseExists`, `LeaseHeld`, `NoCapacity`, `NoSuchLease`, `Parked`, `TryAgain` and
`Undeliverable`. Callers expect them. All other names end in `Error`.
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
_compact: typing.Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class GracekitError(Exception):
    """The base of every exception that gracekit raises on purpose.

    An error of this class itself means that something is not possible in the present state, for
    example to resume a service that does not drain. The message says why, and what to do instead.
    """

    def __str__(self) -> str:
        """The message. Halves of characters that it quotes are escaped, as no file takes them."""
        return Exception.__str__(self).encode(errors="backslashreplace").decode()


# -- configuration and declaration: exit 78 -----------------------------------


class ConfigError(GracekitError):
    """A setting, a URL or a file is wrong, or two settings contradict each other.

    The message names each wrong value, its rule, and what to set instead. A restart does not help.
    """


class DeclarationError(GracekitError):
    """A method, hook, job or kind of a service is declared in a way that cannot work.

    Mostly raised by that line, when the module is imported. Change the code as the message says.
    """


class SchemaTooNewError(ConfigError):
    """The store was written by a newer release of gracekit.

    Upgrade this process, or use another store.
    """


# -- the store ----------------------------------------------------------------


class StoreError(GracekitError):
    """The store could not be read or written.

    The message has the cause, and the subclasses say whether to try again.

    Attributes:
        request_id: Of the request, if a client has raised this for its queue file; else empty.
    """

    request_id: str = ""


class ConflictError(StoreError):
    """A compare-and-set found another value; nothing of its batch was written.

    Read the row again, and decide anew.

    Attributes:
        statement: Index of the statement whose row count differed.
    """

    def __init__(self, message: str, *, statement: int) -> None:
        super().__init__(message)
        self.statement = statement


class UnknownCommitError(StoreError):
    """It is not known whether a commit has succeeded.

    Read the rows again before acting.
    """


class StoreLockedError(StoreError):
    """Another program kept the database locked for too long; nothing was written.

    End the program that holds a transaction open on it, then try again.
    """


class StoreUnreachableError(StoreError):
    """The store cannot be reached for now; nothing was written.

    Try again later.
    """


class StoreFinalError(StoreError):
    """This process cannot write to its store any more.

    Start it again.
    """


class StoreBrokenError(StoreFinalError):
    """An I/O error, a full or read-only disk, or damage: this process stops using the store.

    Mend the disk, then start the service again.
    """


class StoreFencedError(StoreFinalError):
    """Another run has declared this run dead and acts in its place.

    The store refuses its further commits, so nothing is done twice. Start the process again.
    """


class StoreClosedError(StoreError):
    """The store is not open: it was not started yet, or has been stopped.

    Start it before you use it.
    """


class DependencyError(GracekitError):
    """A broker, a store or a run cannot be reached, or a broker refused a message: a queue is full.

    Check that it runs, and its URL. A supervisor may start the service again.
    """


# -- tracker and leases -------------------------------------------------------


class IllegalTransitionError(GracekitError):
    """A state may not follow the present one: a fault of gracekit.

    Report it.
    """


class LeaseHeld(GracekitError):  # noqa: N818 - named for a state
    """Another task or run holds the lease of the resource.

    `ctx.lease` raises it because it does not wait. Try again later, or name the resource in
    `@svc.rpc(resource=...)`: then the task waits for its turn. A request is refused with it if the
    lease belongs to the task that has sent it and waits for its answer, or to a task that only
    `gracekit reconcile` settles.
    """


class LeaseExists(GracekitError):  # noqa: N818 - named for a state
    """A lease of that kind and id is declared already.

    Nothing was changed. A call that is made again after an unknown end may get it for its own work.
    """


class NoSuchLease(GracekitError):  # noqa: N818 - named for a state
    """No lease of that kind and id is declared, or nobody holds it.

    Nothing was changed. Declare it by `gracekit lease create`, or look at `gracekit lease list`. A
    task's resource needs no declaration.
    """


class AlreadyRunningError(GracekitError):
    """A run of this instance is alive.

    Stop it, or set GRACEKIT_INSTANCE to another name for the second process.
    """


# -- rpc ----------------------------------------------------------------------


class RpcError(GracekitError):
    """A request or its reply went wrong: the base of all errors of calls.

    If a client is stopped, calls that wait for an answer raise this error itself; those requests
    may run. What is still being sent raises DependencyError or UnconfirmedError.

    Attributes:
        request_id: Of the request, if the client has raised this because it may run; else empty.
    """

    request_id: str = ""


class BadMessageError(RpcError):
    """A message is no request: it is unreadable, nested too deep, or of another protocol version.

    Correct the program that sent it. A service keeps such a message as a dead letter. A client
    raises it for a result that does not fit the return annotation of its method.
    """


class MessageTooLargeError(BadMessageError):
    """A message is above `max_body_bytes`; nothing of it was parsed.

    Send a reference to the data, or raise the setting for service and clients. Also raised for a
    result that is too large: then the task has succeeded, and only its result is left out.
    """


class InvalidArgumentsError(RpcError, TypeError):
    """The arguments do not fit the method's signature or types, or an option cannot be used.

    Nothing was run. Correct the call as the message says.
    """


class NoSuchMethodError(RpcError):
    """The service has no method of that name in that namespace.

    Check both; the message names the nearest method.
    """


class UnsupportedVersionError(RpcError):
    """The service does not serve that namespace, or not at that version.

    The major version must be the same, and the minor one not above what is served.
    """


class VersionCapError(RpcError):
    """The request needs a newer interface than `version_cap` allows; nothing was sent.

    Use what the cap allows, or raise the cap when all receivers are upgraded.
    """


class ConflictingRequestError(RpcError):
    """The request id is on record with other content, or from another caller.

    Use a new id for a new request.
    """


class Undeliverable(RpcError):  # noqa: N818 - named for a state
    """No queue takes the message; nothing was kept.

    The service or host has never run, or is gone. Check topic, host, exchange and virtual host. A
    service with `queues="directed"` takes only new requests that name a host.
    """


class UnconfirmedError(RpcError, TimeoutError):
    """The broker did not confirm a message in time; it may be in the queue, or not.

    Send it again under the same request id, which the error has as `request_id`. The service then
    runs it once, unless its method is `requeue`.
    """


class Draining(RpcError):  # noqa: N818 - named for a state
    """The service is draining or quiet and does not take this request.

    Send it to another host, or send it again later.
    """


class CallTimeoutError(RpcError, TimeoutError):
    """There was no reply in time; the request may still run, but only if a service has read it.

    A request that no service has read by then expires in its queue and never runs. If the broker
    stood still, it takes the request when it goes on, and the time in its queue begins then. Call
    again with the same `request_id`, which is set even if nothing was sent.
    """


class HeartbeatTimeoutError(CallTimeoutError):
    """There was no heartbeat within `monitor_timeout`; the request may still run.

    If no service has read it, it stays in its queue until the `timeout` of the call is over. Call
    again with the same request id to wait for its result.
    """


class NoAnswerError(RpcError, TimeoutError):
    """No server of the service has answered a question.

    It may be down, or busy. A delayed cast was not sent; a cancel may have been carried out. Ask
    again, or start the service.
    """


class MethodTimeoutError(RpcError, TimeoutError):
    """The method took longer than its `timeout=`; its handler was cancelled.

    The task has FAILED; its work may be done in part. Make the method faster, or raise `timeout=`.
    """


class RunEndedError(RpcError):
    """An operator's command is meant for a run that has ended; its instance may have another one.

    Look at `gracekit status`, and give the command again if you mean the new run.
    """


class TaskInterruptedError(RpcError):
    """The task was ended as ERRORED, and not by its handler.

    The message has the reason: an interruption whose effect is not known, a deadline that has
    passed, or an order of an operator. The work may be done, done in part, or not begun. Look at
    what the task acts on; `gracekit tasks retry` runs it again.
    """


class TaskCancelledError(RpcError):
    """An operator or a resolver has ended the task.

    The message says who, and the reason that was given.
    """


class NoCapacity(RpcError):  # noqa: N818 - named for a state
    """A handler raises this if there is no capacity now for what its request needs.

    With `use_pending_state` the task waits as PENDING. Without it, the task has FAILED.
    A NoCapacity of a service that the handler has called does not park the task: raise a new one.

    Args:
        message: Why, in a sentence.
        requested: What is missing, for the person or program that makes room, for example
            `{"memory_mb": 8192}`. Plain data, at most 4,096 bytes as JSON and 16 levels. It is not
            sent to callers.

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


class TryAgain(RpcError):  # noqa: N818 - named for what is asked for
    """A handler raises this if its attempt has failed and the task is to be tried again later.

    It counts in the method's `retries`; if none is left, the task has FAILED with this error. A
    TryAgain of a service that the handler has called does nothing of the kind.

    Args:
        reason: Why, in a sentence.
        after: Seconds (or "30s") until the next attempt, less than 0 for at once; None for the
            method's `backoff`.
    """

    def __init__(self, reason: str = "", *, after: float | str | None = None) -> None:
        super().__init__(reason)
        self.after = after


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
                f"NoCapacity(requested=...) has the key {reprlib.repr(key)[:50]}, which is no text"
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


class Parked(RpcError):  # noqa: N818 - named for a state
    """The task waits for capacity, as PENDING; its call is answered by this.

    Only a client that was prepared by `prepare(pending=True)` gets it; any other client gets
    `NoCapacity`. Call again with the same request id to ask what has become of the task.

    Attributes:
        task_id: The request id, under which the task can be looked up and moved.
        deadline: Wall time, in seconds since 1970, until which it waits.
        version: How often it was parked; an order about it names this number.

    Raises:
        TypeError: a value is of another type.
        ValueError: a value is impossible; it is checked, because a reply may contain anything.
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
            f"{self.version}): until then a resolver or an operator may let it run or give it up, "
            "and after that it expires"
        )


class Gone(RpcError):  # noqa: N818 - named for a state
    """The task has ended: the order came too late and has changed nothing."""


class StaleVersionError(RpcError):
    """The order names another version of the task than the present one; nothing has changed.

    The task has been parked again since, or runs again, or was never parked. Look at it again, and
    decide anew.
    """


class UnknownTaskError(RpcError):
    """No task with that id is on record.

    Ended tasks are removed after `retention`.
    """


class UnserialisableError(RpcError, TypeError):
    """A value cannot be written as JSON.

    Use plain data: None, truth values, numbers, text, lists and mappings. Also raised for a result
    that cannot be sent: then the task has succeeded, and only its result is left out.
    """


class RemoteError(RpcError):
    """A handler raised an exception whose class this client does not know.

    To get the exception as itself, name its class in `exceptions=` of the Service or RpcClient.

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
