"""Callers: requests out, replies in.

Options live in `prepare`, which returns a view and changes nothing; arguments
are keyword arguments only, so no option can be mistaken for one. Each send
draws a new request id unless one was prepared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from msgspec import structs

from gracekit.clock import Clock
from gracekit.config import did_you_mean, parse_duration
from gracekit.errors import (
    CallTimeoutError,
    ConfigError,
    InvalidArgumentsError,
    MessageTooLargeError,
)
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.failures import rebuild
from gracekit.rpc.message import LEASE_KEY, ReplyAddress, Request, carried_lease
from gracekit.rpc.methods import Method, Place
from gracekit.rpc.oslo_wire import MAX_BODY_BYTES, MAX_NAME, encode_request
from gracekit.rpc.replies import Replies
from gracekit.rpc.transport import Message, Queue, Transport, directed_queue, shared_queue

P = ParamSpec("P")
R = TypeVar("R")

CALL_TIMEOUT_S: Final = 60.0


class PrepareOptions(TypedDict, total=False):
    """What `prepare` takes.

    Attributes:
        host: Send to this host only; None for any.
        ops: Send to the ops topic; methods marked `ops` go there by themselves.
        timeout: Seconds (or "5m") that a call waits for its reply.
        version: Interface version asked for; None for the method's own, or 1.0.
        namespace: Interface namespace; None for the method's own, or the default.
        context: Travels with the request; handlers read `ctx["user_id"]`.
        request_id: An idempotency key of the caller's own: while the service
            remembers it, a second send starts nothing. None for a new id each send.
    """

    host: str | None
    ops: bool
    timeout: float | str
    version: str | None
    namespace: str | None
    context: Mapping[str, Any]
    request_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """`PrepareOptions`, complete."""

    host: str | None = None
    ops: bool = False
    timeout: float | str = CALL_TIMEOUT_S
    version: str | None = None
    namespace: str | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    request_id: str | None = None

    def with_(self, changes: Mapping[str, Any]) -> _Options:
        for name in changes:
            if name not in _Options.__slots__:
                raise TypeError(
                    f"prepare() has no option {name!r}{did_you_mean(name, _Options.__slots__)}; "
                    f"it takes {', '.join(_Options.__slots__)}, and call() takes the arguments"
                )
        options = replace(self, **changes)
        options.check()
        return replace(options, context=MappingProxyType(dict(options.context)))

    @property
    def timeout_s(self) -> float:
        return parse_duration(self.timeout)

    def check(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout={self.timeout!r} must be above 0")
        if self.request_id is not None and not 0 < len(self.request_id) <= MAX_NAME:
            raise ConfigError(f"request_id must have 1 to {MAX_NAME} characters")
        if self.host == "":
            raise ConfigError("host='' names no host; leave it out to send to any")


class ClientView:
    """A client with options set; made by `prepare`, immutable."""

    __slots__ = ("_client", "_options")

    def __init__(self, client: RpcClient, options: _Options) -> None:
        self._client = client
        self._options = options

    def prepare(self, **options: Unpack[PrepareOptions]) -> ClientView:
        """A further view, with these options over the present ones.

        Raises:
            TypeError: there is no such option.
            ConfigError: a value cannot be.
        """
        return ClientView(self._client, self._options.with_(options))

    @overload
    async def call(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: str, /, **kwargs: Any) -> Any: ...
    async def call(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Send a request and wait for its answer.

        Args:
            method: The method itself, so that arguments and result are typed
                and checked before sending, or its name.
            args: Refused: requests carry their arguments by name.
            kwargs: Its arguments, plain data.

        Returns:
            What the handler returned, as plain data.

        Raises:
            CallTimeoutError: no reply in time; the request may still run.
            Undeliverable: no service ever read this topic.
            InvalidArgumentsError: arguments that the method does not take.
            RemoteError: the handler raised a class that is not registered here;
                registered, builtin and gracekit classes are raised as themselves.
        """
        return await self._client._call(self._options, method, args, kwargs)  # noqa: SLF001

    @overload
    async def cast(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    @overload
    async def cast(self, method: str, /, **kwargs: Any) -> str: ...
    async def cast(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Send a request whose answer nobody waits for; it never expires.

        Returns:
            The request id, once the transport has confirmed the message.

        Raises:
            Undeliverable: no service ever read this topic.
            InvalidArgumentsError: arguments that the method does not take.
        """
        return await self._client._cast(self._options, method, args, kwargs)  # noqa: SLF001

    @overload
    async def fanout(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    async def fanout(self, method: str, /, **kwargs: Any) -> None: ...
    async def fanout(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Send a request to every instance that runs now; possibly to none.

        Raises:
            InvalidArgumentsError: arguments that the method does not take, or a
                prepared `host`.
        """
        await self._client._fanout(self._options, method, args, kwargs)  # noqa: SLF001


class RpcClient(ClientView):
    """Sends requests to one service.

    Args:
        transport: A started transport, which stays the caller's, or a URL,
            whose transport this client starts and stops.
        topic: The service's.
        ops_topic: Where its ops server listens; None for `{topic}-ops`.
        exceptions: Classes to rebuild from failures, by `module.Class` as the
            service sends it.
        clock: Time and ids; None for the real ones.
        process: Who this is; None for this process. Used with a URL.
        max_body_bytes: Messages above this are refused before sending.
    """

    __slots__ = (
        "_clock", "_exceptions", "_max_body_bytes", "_owned", "_replies", "_topics", "_transport",
    )  # fmt: skip

    def __init__(
        self,
        transport: Transport | str,
        topic: str,
        *,
        ops_topic: str | None = None,
        exceptions: Mapping[str, type[Exception]] = MappingProxyType({}),
        clock: Clock | None = None,
        process: Process | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        super().__init__(self, _Options())
        _check_exceptions(exceptions)
        self._clock = clock or Clock()
        self._owned = isinstance(transport, str)
        self._transport = (
            open_transport(transport, process=process or Process(), clock=self._clock)
            if isinstance(transport, str)
            else transport
        )
        self._topics = (topic, ops_topic or f"{topic}-ops")
        self._exceptions = dict(exceptions)
        self._max_body_bytes = max_body_bytes
        self._replies = Replies(self._transport, self._clock, max_body_bytes=max_body_bytes)

    @property
    def ignored_replies(self) -> int:
        """Replies that no call waited for (late, repeated, foreign), and unreadable ones."""
        return self._replies.ignored

    async def start(self) -> None:
        """Connect, where the transport is this client's own; may be called twice.

        Raises:
            ConfigError: the file cannot be used.
            DependencyError: the transport cannot be reached.
        """
        if self._owned:
            await self._transport.start()

    async def stop(self) -> None:
        """End calls that still wait with an RpcError, and disconnect; may be called twice."""
        await self._replies.stop()
        if self._owned:
            await self._transport.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- the three ways to send -----------------------------------------------

    async def _call(
        self, options: _Options, method: _AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        request = self._request(options, method, args, kwargs)
        address: ReplyAddress | None = None
        timeout_s = options.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as scope:
                address, future = await self._replies.expect()
                request = structs.replace(request, reply=address)
                message = self._message(request, expires_in_s=timeout_s)
                await self._transport.publish(self._queue(options, method), message)
                reply = await future
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise CallTimeoutError(
                f"no reply to {request.method}() from {self._queue(options, method).name!r} within "
                f"{timeout_s:g} s; request {request.request_id} may still run, now or later"
            ) from error
        finally:
            if address is not None:
                self._replies.forget(address)
        if reply.failure is not None:
            raise rebuild(reply.failure, self._exceptions)
        return reply.result

    async def _cast(
        self, options: _Options, method: _AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        request = self._request(options, method, args, kwargs)
        await self._transport.publish(self._queue(options, method), self._message(request))
        return request.request_id

    async def _fanout(
        self, options: _Options, method: _AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if options.host is not None:
            raise InvalidArgumentsError(
                f"a fanout goes to every host and host={options.host!r} was prepared; "
                "use cast() for one host, or leave host out"
            )
        request = self._request(options, method, args, kwargs)
        await self._transport.publish_fanout(self._topic(options, method), self._message(request))

    # -- a request's parts ----------------------------------------------------

    def _request(
        self, options: _Options, method: _AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Request:
        name = method if isinstance(method, str) else method.name
        if args:
            raise InvalidArgumentsError(
                f"{name}() takes its arguments by name; {len(args)} came by position: "
                f"write {name}, argument=value"
            )
        if not isinstance(method, str):
            method.bind(kwargs)
        place = _place(options, method)
        return Request(
            request_id=options.request_id or self._clock.new_id(),
            method=name,
            args=kwargs,
            namespace=place.namespace,
            version=place.version,
            context=_with_lease(options.context),
        )

    def _message(self, request: Request, *, expires_in_s: float | None = None) -> Message:
        body = encode_request(request)
        if len(body) > self._max_body_bytes:
            raise MessageTooLargeError(
                f"{request.method}() makes a message of {len(body)} bytes and at most "
                f"{self._max_body_bytes} are sent; pass a reference to the data instead"
            )
        return Message(body=body, expires_in_s=expires_in_s)

    def _topic(self, options: _Options, method: _AnyMethod) -> str:
        is_ops = options.ops or (not isinstance(method, str) and method.ops)
        return self._topics[is_ops]

    def _queue(self, options: _Options, method: _AnyMethod) -> Queue:
        topic = self._topic(options, method)
        return directed_queue(topic, options.host) if options.host else shared_queue(topic)


_AnyMethod = Method[..., Any] | str


def _place(options: _Options, method: _AnyMethod) -> Place:
    """What was prepared, else the method's own."""
    if isinstance(method, str):
        return Place(options.namespace, options.version or "1.0")
    return method.place(namespace=options.namespace, version=options.version)


def _check_exceptions(exceptions: Mapping[str, object]) -> None:
    for name, kind in exceptions.items():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigError(
                f"exceptions[{name!r}] is {kind!r}, not a subclass of Exception; "
                "map 'module.Class' as the service sends it to a class of yours"
            )


def _with_lease(context: Mapping[str, Any]) -> Mapping[str, Any]:
    """*context*, and the lease of the task that sends from here."""
    lease = carried_lease.get()
    return context if lease is None else {**context, LEASE_KEY: lease}
