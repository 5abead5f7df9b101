"""Requests and replies as values, independent of how a wire spells them.

Structs, not frozen dataclasses: one is made for every message, and those cost five times as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

import msgspec

JsonObject = dict[str, Any]

LEASE_KEY: Final = "gracekit_lease"
"""Context key under which a handler's requests carry its lease: {kind, id, token}."""

CONTROL_NAMESPACE: Final = "gracekit"
"""Of what gracekit itself is asked over an ops topic."""

TASKS_NAMESPACE: Final = "gracekit.tasks"
"""Of what a service is asked about its tasks that wait for capacity, if it says `task_api=True`."""

STATE_VERB: Final = "state"
"""The one question there that anybody may ask: whether new requests are taken."""

carried_lease: Final[ContextVar[JsonObject | None]] = ContextVar("gracekit_lease", default=None)
"""The lease of the task that runs here; a client adds it to each request it sends."""


class ReplyAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the answer of a call goes.

    Attributes:
        queue: Name of the caller's reply queue.
        msg_id: Echoed in the reply, so that the caller finds its call.
        knows_pending: Whether the caller has said that it knows the state PENDING: if its task is
            parked, the call ends with Parked, else with NoCapacity.
    """

    queue: str
    msg_id: str
    knows_pending: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        request_id: The sender's unique id; empty if it sent none.
        method: Name of the method, as sent.
        args: Keyword arguments, plain JSON data.
        namespace: None for the default one.
        version: Interface version asked for, for example `"1.2"`.
        context: The caller's context; secret by default, never logged.
        reply: Where the answer goes; None for casts and fanouts.
        monitor_timeout_s: Seconds after which a caller that asked for
            heartbeats gives up waiting for one; None if it asked for none.
    """

    request_id: str
    method: str
    args: JsonObject
    namespace: str | None = None
    version: str = "1.0"
    context: Mapping[str, Any] = msgspec.field(default_factory=dict)
    reply: ReplyAddress | None = None
    monitor_timeout_s: float | None = None


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
        msg_id: The call's.
        reply_id: Unique id of this reply message.
        result: Plain JSON data; None beside a failure.
        failure: Why there is no result.
        ending: False for heartbeats, true for the answer.
    """

    msg_id: str
    reply_id: str
    result: Any = None
    failure: Failure | None = None
    ending: bool = True
