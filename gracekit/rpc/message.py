"""Requests and replies as values, independent of their wire format.

They are msgspec structs because one is made for every message: frozen dataclasses cost five
times as much.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

import msgspec

JsonObject = dict[str, Any]

LEASE_KEY: Final = "gracekit_lease"
"""Context key under which a handler's requests carry its lease: {kind, id, token}."""

CONTROL_NAMESPACE: Final = "gracekit"
"""Namespace of gracekit's own methods on the ops topic."""

TASKS_NAMESPACE: Final = "gracekit.tasks"
"""Namespace of the methods about tasks, which a service with `task_api` serves."""


class CallerVerb(enum.Enum):
    """What a caller may ask about its own requests, in TASKS_NAMESPACE."""

    LOOK = "look_up"
    OUTCOME = "outcome"
    CANCEL = "cancel_request"


STATE_VERB: Final = "state"
"""The method of CONTROL_NAMESPACE that any client may call: whether new requests are accepted."""

DELAY: Final = "delay"
"""One of the `features` in the answer to that: requests that may not begin at once."""

carried_lease: Final[ContextVar[JsonObject | None]] = ContextVar("gracekit_lease", default=None)
"""The lease of the task that runs in this context; a client adds it to each request it sends."""


def lease_in(caller: Mapping[str, Any]) -> dict[str, Any] | None:
    """The lease that a request carries; None if it has none, or a malformed one."""
    match caller.get(LEASE_KEY):
        case {"kind": str(kind), "id": str(resource_id), "token": int(token)}:
            return {"kind": kind, "id": resource_id, "token": token}
    return None


class ReplyAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address for the reply to a call.

    Attributes:
        queue: Name of the caller's reply queue.
        msg_id: Echoed in the reply, so that the caller finds its call.
        knows_pending: Whether the caller asked for the state PENDING: if its task is parked, the
            call then ends with Parked, otherwise with NoCapacity.
    """

    queue: str
    msg_id: str
    knows_pending: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        request_id: The unique id that the sender gave; empty if it gave none.
        method: Name of the method, as sent.
        args: Keyword arguments, plain JSON data.
        namespace: None for the default one.
        version: Interface version asked for, for example `"1.2"`.
        context: The caller's context; it may hold secrets and is never logged.
        reply: The address for the reply; None for casts and fanouts.
        monitor_timeout_s: Seconds without a heartbeat after which the caller gives
            up; None if it wants no heartbeats.
        delay_s: Seconds from its acceptance until it may begin; None for at once.
        at: Wall time before which it may not begin; None for at once.
    """

    request_id: str
    method: str
    args: JsonObject
    namespace: str | None = None
    version: str = "1.0"
    context: Mapping[str, Any] = msgspec.field(default_factory=dict)
    reply: ReplyAddress | None = None
    monitor_timeout_s: float | None = None
    delay_s: float | None = None
    at: float | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception, as text; nothing in it is ever imported or called.

    Attributes:
        exc_class: Class name, for example `"NotFound"`.
        module: Module of the class, for example `"myapp.errors"`.
        message: `str()` of the exception.
        args: Its positional arguments, plain JSON data.
        kwargs: Its keyword arguments, plain JSON data.
        tb: Traceback, a list of lines.
    """

    exc_class: str
    module: str
    message: str
    args: tuple[Any, ...] = ()
    kwargs: JsonObject = msgspec.field(default_factory=dict)
    tb: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a call: a result, or a failure.

    Attributes:
        msg_id: The `msg_id` of the call.
        reply_id: Unique id of this reply message.
        result: Plain JSON data; None beside a failure. A sender may give it as `msgspec.Raw`: JSON
            text that was checked before.
        failure: The exception, if there is no result.
        ending: False for heartbeats, True for the answer.
    """

    msg_id: str
    reply_id: str
    result: Any = None
    failure: Failure | None = None
    ending: bool = True
