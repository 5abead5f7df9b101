"""The options of `prepare`: where a request goes, its timeouts, and which versions peers read.

What a client asks for is checked here, and becomes a value to send.
"""

from __future__ import annotations

import datetime as dt
import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypedDict

import msgspec

from gracekit import errors
from gracekit.config.values import did_you_mean, parse_duration
from gracekit.errors import (
    CallTimeoutError,
    ConfigError,
    InvalidArgumentsError,
    RpcError,
    StoreError,
    VersionCapError,
)
from gracekit.rpc.message import LEASE_KEY, Request, carried_lease
from gracekit.rpc.method_options import serves
from gracekit.rpc.methods import Method, MethodTarget
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.rpc.plain import plain

CALL_TIMEOUT_S: Final = 60.0
SHORTEST_MONITOR_S: Final = 2.0
"""The shortest `monitor_timeout`. A server sends a heartbeat every half of it, and at most one a
second."""

_VERSION: Final = re.compile(r"\d{1,9}\.\d{1,9}(\.\d{1,9})?", re.ASCII)

_TEXTS: Final = frozenset({"host", "version", "namespace", "request_id"})
_TRUTHS: Final = frozenset({"ops", "fail_fast", "pending"})

AnyMethod = Method[..., Any] | str


class Sent(enum.Enum):
    """How far the request of a call has come, in words for its caller."""

    NO = "was not sent, as its time was over before; call again, and give it more time"
    UNCONFIRMED = (
        "is not confirmed by the broker, so it may be in the queue, or not; call again with the "
        "same request id for its answer"
    )
    QUEUED = (
        "runs on if a service has read it; if none has, it has expired and never runs; call again "
        "with the same request id for its answer"
    )


def no_reply(
    method: str, queue: str, timeout_s: float, request_id: str, sent: Sent
) -> CallTimeoutError:
    """The error of a call without a reply; no transport delivers a message that has expired."""
    error = CallTimeoutError(
        f"no reply to {method}() from {queue!r} within {timeout_s:g} s: request {request_id} "
        f"{sent.value}"
    )
    error.request_id = request_id
    return error


NAMED: Final = (errors.UnconfirmedError, errors.StoreLockedError, errors.UnknownCommitError)
"""Errors of a send that name its request, which is to be sent again under the same id."""


def add_id(error: RpcError | StoreError, request_id: str) -> None:
    """Name the request in *error*, unless that has been done."""
    if not error.request_id:
        error.args = (f"{error}: {request_id}",)
        error.request_id = request_id


def too_late(method: str, timeout: object, request_id: str) -> CallTimeoutError:
    """The error of a call whose time was over before it was made."""
    error = CallTimeoutError(f"{method}() was not sent: its time-out of {timeout!r} was over")
    error.request_id = request_id
    return error


class PrepareOptions(TypedDict, total=False):
    """The options of `prepare`.

    Attributes:
        host: Send to this host only; None for any.
        ops: Send to the ops topic; methods marked `ops` always go there.
        timeout: Seconds (or "5m") that a call waits for its reply. With 0 or less, for
            example the rest of a deadline in the past, it fails with CallTimeoutError, unsent.
        monitor_timeout: Seconds (or "1m", at least 2 s) without a heartbeat after which a
            call ends with HeartbeatTimeoutError; None to ask for none.
        version: Interface version asked for; None for the method's own, or 1.0.
        namespace: Interface namespace; None for the method's own, or the default.
        version_cap: Newest interface version that the receiver reads, such as "6.4"; a request
            that needs a newer one is refused before sending. None for no cap.
        ops_since: Interface version in which the service got its ops server. With a lower
            `version_cap`, ops requests go to the new-request topic. None if it always had one.
        context: Sent with the request; handlers read `ctx["user_id"]`.
        request_id: An idempotency key chosen by the caller: while the service
            remembers it, a second send starts nothing. None for a new id for each send.
        fail_fast: Ask over the ops topic first, and raise Draining instead of sending a
            request that would wait until the topic is read again.
        delay: Seconds (or "10m") from its acceptance before which a cast does not begin.
        at: The moment before which a cast does not begin, a datetime with a time zone.
        pending: Whether the caller handles the state PENDING: a call whose task is parked
            because there is no capacity then ends with Parked, otherwise with NoCapacity.
    """

    host: str | None
    ops: bool
    timeout: float | str
    monitor_timeout: float | str | None
    version: str | None
    namespace: str | None
    version_cap: str | None
    ops_since: str | None
    context: Mapping[str, Any]
    request_id: str | None
    fail_fast: bool
    delay: float | str | None
    at: dt.datetime | None
    pending: bool


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`PrepareOptions` with all defaults, checked."""

    host: str | None = None
    ops: bool = False
    timeout: float | str = CALL_TIMEOUT_S
    monitor_timeout: float | str | None = None
    version: str | None = None
    namespace: str | None = None
    version_cap: str | None = None
    ops_since: str | None = None
    context: Mapping[str, Any] = msgspec.field(default_factory=dict)
    request_id: str | None = None
    fail_fast: bool = False
    delay: float | str | None = None
    at: dt.datetime | None = None
    pending: bool = False

    def with_(self, changes: Mapping[str, Any]) -> CallOptions:
        """A copy with *changes*.

        Raises:
            TypeError: there is no such option.
            ConfigError: a value is invalid.
        """
        known = self.__struct_fields__
        for name in changes:
            if name not in known:
                raise TypeError(
                    f"prepare() has no option {name!r}{did_you_mean(name, known)}; "
                    f"it takes {', '.join(known)}, and call() takes the arguments"
                )
        for name, value in changes.items():
            _check_type(name, value)
        # JSON is written from plain text only.
        texts = {k: str.__str__(v) for k, v in changes.items() if isinstance(v, str)}
        options = msgspec.structs.replace(self, **{**changes, **texts})
        options.check()
        return msgspec.structs.replace(options, context=MappingProxyType(dict(options.context)))

    def check(self) -> None:
        """Raise ConfigError for an invalid value."""
        _ = self.timeout_s  # raises for text that is no duration
        monitor_s = self.monitor_timeout_s
        if monitor_s is not None and monitor_s < SHORTEST_MONITOR_S:
            raise ConfigError(
                f"monitor_timeout={self.monitor_timeout!r} is below {SHORTEST_MONITOR_S:g} s: a "
                "server sends a heartbeat every half of it, and at most one a second"
            )
        if self.request_id is not None and not 0 < len(self.request_id) <= MAX_NAME:
            raise ConfigError(f"request_id must have 1 to {MAX_NAME} characters")
        if self.request_id is not None and not _is_storable(self.request_id):
            raise ConfigError(
                f"request_id={self.request_id!r} has a NUL or half a character, which no store "
                "takes; write it without"
            )
        _ = self.delay_s
        if self.delay is not None and self.at is not None:
            raise ConfigError("delay and at both say when a cast begins: leave one out")
        if self.host is not None and not (self.host and self.host.isprintable()):
            raise ConfigError(f"host={self.host!r} names no host; leave it out to send to any")
        for name in ("version_cap", "ops_since"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and _VERSION.fullmatch(value)):
                raise ConfigError(f"{name}={value!r} is no version; write it as '6.4'")

    @property
    def timeout_s(self) -> float:
        """Seconds that a call waits; 0 if its time is over."""
        left = self.timeout
        if isinstance(left, int | float) and not isinstance(left, bool) and left <= 0:
            return 0.0
        return parse_duration(left)

    @property
    def delay_s(self) -> float | None:
        """Seconds before which a cast does not begin; None for at once."""
        seconds = 0.0 if self.delay is None else parse_duration(self.delay)
        return seconds or None

    @property
    def monitor_timeout_s(self) -> float | None:
        """Seconds without a heartbeat before a call fails; an int if whole, as oslo sends it."""
        if self.monitor_timeout is None:
            return None
        seconds = parse_duration(self.monitor_timeout)
        return int(seconds) if seconds == int(seconds) else seconds

    def target(self, method: AnyMethod) -> MethodTarget:
        """Namespace and version of the request: the prepared ones, or else the method's."""
        if isinstance(method, str):
            return MethodTarget(self.namespace, self.version or "1.0")
        return method.target(namespace=self.namespace, version=self.version)

    def can_send(self, version: str) -> bool:
        """Whether a receiver at the cap serves *version*: same major, minor not above."""
        return self.version_cap is None or serves(self.version_cap, version)

    @property
    def has_ops_server(self) -> bool:
        """Whether the receiver has an ops server, judging by its `version_cap`."""
        if self.version_cap is None or self.ops_since is None:
            return True
        # Compared by order, unlike in `can_send`: all later versions have the server too.
        return _numbers(self.version_cap) >= _numbers(self.ops_since)


def _is_storable(text: str) -> bool:
    """Whether every store accepts it: PostgreSQL refuses NUL, and UTF-8 has no surrogates."""
    return "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def _check_type(name: str, value: object) -> None:
    """Check the types of values that `check` relies on; it checks durations and versions itself."""
    if name in _TEXTS and not isinstance(value, str | None):
        raise ConfigError(f"{name}={value!r} is no text; write {name}='...' or leave it out")
    if name in _TRUTHS and not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")
    if name == "at" and not (
        value is None or (isinstance(value, dt.datetime) and value.tzinfo is not None)
    ):
        raise ConfigError(
            f"at={value!r} is no datetime with a time zone: write "
            "at=datetime.now(UTC) + timedelta(hours=1), or delay='1h'"
        )
    if name == "context" and not isinstance(value, Mapping):
        raise ConfigError(f"context={value!r} is no mapping; write context={{'user_id': ...}}")


def _numbers(version: str) -> tuple[int, ...]:
    parts = tuple(map(int, version.split(".")))
    return (*parts, 0, 0)[:3]


def request_of(
    options: CallOptions,
    method: AnyMethod,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    request_id: str,
) -> Request:
    """The request for *method*, as a program asked for it.

    Raises:
        InvalidArgumentsError: *method* is none, or does not take these arguments.
        VersionCapError: it needs a newer interface than the prepared `version_cap`.
    """
    name = name_of(method)
    if args:
        raise InvalidArgumentsError(
            f"{name}() takes its arguments by name; {len(args)} came by position: "
            f"write {name}, argument=value"
        )
    if not isinstance(method, str):
        _bind(method, kwargs)
    target = options.target(method)
    if not options.can_send(target.version):
        raise VersionCapError(
            f"{name}() is asked for at {target.version} and version_cap="
            f"{options.version_cap!r} says that the receiver is older: send what the cap "
            "allows, or raise it once all receivers are upgraded"
        )
    return Request(
        request_id=request_id,
        method=name,
        args=kwargs,
        namespace=target.namespace,
        version=target.version,
        context=_with_lease(options.context),
        delay_s=None if options.delay is None else options.delay_s,
        at=None if options.at is None else options.at.timestamp(),
    )


def name_of(method: object) -> str:
    """The name of a method, which is given as a Method or as text.

    Raises:
        InvalidArgumentsError: it is neither.
    """
    match method:
        case str():
            return str.__str__(method)  # which turns a StrEnum member into a str
        case Method():
            return method.name
    name = getattr(method, "__name__", None)
    if name is None:
        raise InvalidArgumentsError(f"{method!r} is no method: pass a service's, or its name")
    raise InvalidArgumentsError(
        f"{name}() is a plain function and no method of a service: decorate it with @svc.rpc or "
        f"@svc.ops, or pass its name, {name!r}"
    )


def _bind(method: Method[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments. If options are among them, the error says where options belong."""
    try:
        method.bind(kwargs)
        if method.options.resource and method.options.resource[1] in method.signature.parameters:
            method.resource_of(kwargs)  # what is inside of one may look otherwise once it is sent
    except InvalidArgumentsError as error:
        options = PrepareOptions.__annotations__.keys() - method.signature.parameters
        given = ", ".join(f"{name}=..." for name in kwargs if name in options)
        if not given:
            raise
        raise InvalidArgumentsError(
            f"{error}; options of a call are given by client.prepare({given}).call(...)"
        ) from None


def check_types(method: AnyMethod, args: Mapping[str, Any]) -> None:
    """Check the arguments of a cast: if the service refused them, its sender would get no answer.

    Raises:
        InvalidArgumentsError: one does not fit the annotation of *method*.
    """
    if not isinstance(method, str) and method.types.arguments is not None:
        method.converted(plain(args, "args"))


def _with_lease(context: Mapping[str, Any]) -> Mapping[str, Any]:
    """*context*, plus the lease of the task whose handler sends the request, if any."""
    lease = carried_lease.get()
    return context if lease is None else {**context, LEASE_KEY: lease}
