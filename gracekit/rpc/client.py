"""Clients: send requests, receive replies.

Options are given to `prepare`, which returns a new view and changes nothing.
Arguments of a method are keyword arguments only, so options cannot be confused
with them. Each send makes a new request id unless one was prepared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ParamSpec, Self, TypeVar, Unpack, overload

from msgspec import structs

from gracekit.background import need_loop
from gracekit.clock import Clock, SharedTimeouts
from gracekit.config.values import DECLARE_PROFILE, EXCHANGE, check_topic
from gracekit.errors import (
    HeartbeatTimeoutError,
    InvalidArgumentsError,
    MessageTooLargeError,
    RpcError,
    Undeliverable,
)
from gracekit.process import Process
from gracekit.rpc.call_options import (
    CALL_TIMEOUT_S,
    NAMED,
    AnyMethod,
    CallOptions,
    PrepareOptions,
    Sent,
    add_id,
    check_types,
    name_of,
    no_reply,
    request_of,
    too_late,
)
from gracekit.rpc.callers.questions import Questions
from gracekit.rpc.callers.task_lookups import Lookups, TaskInfo, unknown
from gracekit.rpc.client_life import ClientLife
from gracekit.rpc.connect import given_or_opened
from gracekit.rpc.failures import check_exceptions, rebuild
from gracekit.rpc.message import CONTROL_NAMESPACE, ReplyAddress, Request
from gracekit.rpc.methods import Method
from gracekit.rpc.oslo_wire import MAX_BODY_BYTES, encode_request
from gracekit.rpc.plain import is_too_long
from gracekit.rpc.replies import Replies
from gracekit.rpc.transport import Message, Queue, Transport, directed_queue, no_host, shared_queue
from gracekit.telemetry.logs import running
from gracekit.tracing.carrier import outgoing, stamped
from gracekit.tracing.spans import Tracing

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["CALL_TIMEOUT_S", "ClientView", "PrepareOptions", "RpcClient"]


class ClientView:
    """A client with options set; made by `prepare`, immutable."""

    __slots__ = ("_client", "_options")

    def __init__(self, client: RpcClient, options: CallOptions) -> None:
        self._client = client
        self._options = options

    def prepare(self, **options: Unpack[PrepareOptions]) -> ClientView:
        """A new view, with these options added to or replacing the present ones.

        Raises:
            TypeError: there is no such option.
            ConfigError: a value is invalid.
        """
        return ClientView(self._client, self._options.with_(options))

    def can_send_version(self, version: str | None = None) -> bool:
        """Whether the prepared `version_cap` allows a request of that interface version.

        Args:
            version: None for the prepared one, or 1.0.
        """
        return self._options.can_send(version or self._options.version or "1.0")

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
            kwargs: Its arguments; dataclasses, datetimes and others are sent as plain data.

        Returns:
            What the handler returned: of the annotated type if *method* is the method itself,
            otherwise plain data.

        Raises:
            CallTimeoutError: no reply in time; the request may still run if a service
                has read it. Or the prepared `timeout` was 0 or less: nothing was sent.
            HeartbeatTimeoutError: a CallTimeoutError; no heartbeat came within the
                prepared `monitor_timeout`.
            Draining: the service does not accept the request now; with `fail_fast`
                it was not sent.
            Undeliverable: no service ever read this topic.
            Parked: the task waits for capacity; only with `pending`.
            NoCapacity: there is no capacity; the task has ended, or it waits for
                capacity and the call was made without `pending`.
            VersionCapError: it needs a newer interface than `version_cap`.
            InvalidArgumentsError: arguments that the method does not take.
            BadMessageError: the task has succeeded, and its result does not fit the annotation.
            DependencyError: the broker cannot be reached, or takes nothing; nothing was sent.
            UnconfirmedError: the broker did not confirm the request, which may be in its queue;
                `request_id` has its id.
            StoreLockedError: another program kept the file of queues locked; nothing was sent.
            ConfigError: the client was started in another event loop or process.
            RpcError: why the service refused the request or interrupted it, as one of its classes
                (docs/errors.md). Itself: the client was stopped while the call waited for the
                answer to `request_id`.
            RemoteError: the handler raised a class that is not registered here, or one of those
                above that say what became of a request; registered, builtin and other gracekit
                classes are raised as themselves (docs/errors.md, 'What a caller gets').
        """
        return await self._client._call(self._options, method, args, kwargs)  # noqa: SLF001

    @overload
    async def cast(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    @overload
    async def cast(self, method: str, /, **kwargs: Any) -> str: ...
    async def cast(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> str:
        """Send a request without waiting for an answer; it never expires.

        Returns:
            The request id, once the transport has confirmed the message.

        Raises:
            Undeliverable: no service ever read this topic.
            Draining: as with `call`, with `fail_fast` only.
            DependencyError, UnconfirmedError, StoreLockedError, ConfigError: as with `call`.
            VersionCapError: it needs a newer interface than `version_cap`.
            InvalidArgumentsError: arguments that the method does not take.
            NoAnswerError: with `delay` or `at` only: no server says that it knows of them; nothing
                was sent. UnsupportedVersionError: one says that it does not.
        """
        return await self._client._cast(self._options, method, args, kwargs)  # noqa: SLF001

    @overload
    async def fanout(self, method: Method[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None: ...
    @overload
    async def fanout(self, method: str, /, **kwargs: Any) -> None: ...
    async def fanout(self, method: Method[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Send a request to every instance that runs now; possibly to none.

        Raises:
            Undeliverable: no service has made the file of queues yet.
            DependencyError, UnconfirmedError, StoreLockedError, ConfigError: as with `call`.
            VersionCapError: it needs a newer interface than `version_cap`.
            InvalidArgumentsError: arguments that the method does not take, or a
                prepared `host`, `fail_fast`, `delay` or `at`.
        """
        await self._client._fanout(self._options, method, args, kwargs)  # noqa: SLF001

    # -- what became of requests ------------------------------------------------

    async def state(self, request_id: str, /) -> TaskInfo:
        """What is known of a request; it starts nothing.

        The service must answer its callers: `Service(..., task_api="callers")`. The prepared
        `context` must name the caller that has sent the request, and `host` may name its host.

        Raises:
            UnknownTaskError: no server that answers knows it.
            NoAnswerError: no server has answered within 2 s.
            NoSuchMethodError: the service answers no such questions.
        """
        found = await self.states([request_id])
        if request_id not in found:
            raise unknown(request_id)
        return found[request_id]

    async def states(self, request_ids: Iterable[str], /) -> dict[str, TaskInfo]:
        """As `state`, of several requests by their ids, without those that are not known."""
        return await self._client._lookups.states(self._options, request_ids)  # noqa: SLF001

    async def result(
        self,
        request_id: str,
        /,
        *,
        wait: float | str = 0.0,
        of: Method[..., Any] | None = None,
    ) -> Any:
        """The result of a request, as its call would have returned it; it starts nothing.

        Args:
            request_id: The id that `cast` has returned, or a prepared one.
            of: Its method, to get a result of the annotated type; None for plain data.
            wait: Seconds (or "10m") to wait for its end, also while it is not known yet or the
                service is away.

        Raises:
            CallTimeoutError: it has not ended within *wait*.
            UnknownTaskError, NoAnswerError, NoSuchMethodError: as with `state`, after *wait*.
            Exception: what its call would have raised.
        """
        result = (await self.results([request_id], wait=wait))[request_id]
        if isinstance(result, Exception):
            raise result
        return result if of is None else of.converted_result(result)

    async def results(
        self, request_ids: Iterable[str], /, *, wait: float | str = 0.0
    ) -> dict[str, Any]:
        """As `result`, of several requests by their ids, once all have ended or *wait* is over.

        Returns:
            By id, in the given order, the result, or as an object the exception that `result`
            raises.
        """
        return await self._client._lookups.results(self._options, request_ids, wait)  # noqa: SLF001

    async def cancel(self, request_id: str, /, *, reason: str = "") -> TaskInfo:
        """End a request, if its method is declared with `allow_cancel`.

        A handler that is at work is cancelled, and its task ends when it has returned. A request
        that has ended stays as it is.

        Args:
            request_id: Its id.
            reason: Why, for the record and for whoever waits for the request.

        Returns:
            What is known of it then.

        Raises:
            UnknownTaskError: as with `state`; it may still be in the queue, and run later.
            NoAnswerError: no server has answered within 2 s; it may have been cancelled.
            RpcError: its method does not allow that to this caller; or it cannot be cancelled now,
                as the message says, and goes on.
            NoSuchMethodError: as with `state`.
        """
        return await self._client._lookups.cancel(self._options, request_id, reason)  # noqa: SLF001


class RpcClient(ClientView):
    """Sends requests to one service.

    Args:
        transport: A started transport, which the caller stops, or a URL, for which
            the client makes, starts and stops a transport.
        topic: The service's topic.
        ops_topic: The topic of its ops server; None for `{topic}-ops`.
        exceptions: Exception classes to rebuild from failures, by `module.Class` as
            the service sends it.
        clock: Time and ids; None for the real ones.
        process: Stands for another process in tests; None for this one. Used with a URL.
        max_body_bytes: Larger messages are refused before sending.
        exchange: Control exchange on RabbitMQ, if the URL names none.
        declare_profile: Declare profile on RabbitMQ, if the URL names none.

    Raises:
        ConfigError: the URL, a topic or *exceptions* is invalid.
    """

    __slots__ = (
        "_asker", "_clock", "_delaying", "_exceptions", "_life", "_lookups", "_max_body_bytes",
        "_replies", "_timeouts", "_topics", "_tracing", "_transport",
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
        exchange: str = EXCHANGE,
        declare_profile: str = DECLARE_PROFILE,
    ) -> None:
        super().__init__(self, CallOptions())
        check_exceptions(exceptions)
        check_topic(topic, "give the one that its service has")
        self._topics = (topic, check_topic(ops_topic or f"{topic}-ops", "give another ops_topic"))
        self._clock = clock or Clock()
        self._tracing = Tracing()
        self._tracing.look()
        self._transport = given_or_opened(
            transport,
            process=process,
            clock=self._clock,
            exchange=exchange,
            profile=declare_profile,
            max_body_bytes=max_body_bytes,
        )
        self._exceptions = dict(exceptions)
        self._max_body_bytes = max_body_bytes
        self._timeouts = SharedTimeouts()
        self._delaying: set[str | None] = set()
        self._replies = Replies(self._transport, self._clock, max_body_bytes=max_body_bytes)
        self._asker = Questions(
            self._transport, self._replies, self._clock, ops_topic=self._topics[True]
        )
        self._lookups = Lookups(
            self._asker, self._clock, self._exceptions, max_body_bytes=max_body_bytes
        )
        self._life = (
            ClientLife(
                self._transport.start,
                self._end,
                who="client",
                way="async with svc.client(...) as client",
            )
            if isinstance(transport, str)
            else None
        )

    async def start(self) -> None:
        """Connect, if the client was given a URL; may be called twice.

        Raises:
            ConfigError: the file cannot be used, no event loop of asyncio runs here, or the client
                was started in another one, or in a process of which this one is a fork.
            DependencyError: the transport cannot be reached.
            StoreLockedError: another program kept the file of queues locked.
        """
        need_loop()
        self._tracing.look()
        if self._life is not None:
            await self._life.start()

    async def stop(self) -> None:
        """End calls that still wait with an RpcError, and disconnect; may be called twice.

        If it is cancelled, it goes on in the background.

        Raises:
            ConfigError: the client was started in another event loop or process.
        """
        if self._life is not None:
            await self._life.stop()
        else:
            self._timeouts.stop()
            await self._replies.stop()

    async def _end(self) -> None:
        self._timeouts.stop()
        await self._replies.stop(self._transport.stop)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- the three ways to send -----------------------------------------------

    async def _call(
        self, options: CallOptions, method: AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if options.delay is not None or options.at is not None:
            raise _cannot_wait("call")
        request = self._request(options, method, args, kwargs)
        with self._sending("call", request, options, method):
            return await self._answer_to(request, options, method)

    def _sending(
        self, operation: str, request: Request, options: CallOptions, method: AnyMethod
    ) -> AbstractContextManager[None]:
        def destination() -> Mapping[str, Any]:
            is_fanout = operation == "fanout"
            topic = self._topic(options, method)
            queue = topic if is_fanout else self._queue(options, method).name
            return self._transport.messaging.destination(queue)

        return self._tracing.sending(
            operation, request.method, request.request_id, request.context, destination
        )

    async def _answer_to(self, request: Request, options: CallOptions, method: AnyMethod) -> Any:
        """Send *request* and wait for its answer."""
        address: ReplyAddress | None = None
        sent = Sent.NO
        timeout_s, monitor_s = options.timeout_s, options.monitor_timeout_s
        if timeout_s <= 0:
            raise too_late(request.method, options.timeout, request.request_id)
        awaited: dict[str, Any] = {} if (here := running.get()) is None else here._awaited  # noqa: SLF001
        awaited[request.request_id] = here
        try:
            async with asyncio.timeout(None) as scope:
                until = self._timeouts.begin(scope, timeout_s)
                if options.fail_fast:
                    await self._check_open(options, method)
                address, future = await self._replies.expect(pending=options.pending)
                request = structs.replace(request, reply=address, monitor_timeout_s=monitor_s)
                sent = Sent.UNCONFIRMED
                await self._send(options, method, request, expires_at=until)
                sent = Sent.QUEUED
                if monitor_s is not None:
                    silence = self._silence(options, method, request)
                    self._replies.monitor(address, monitor_s, silence)
                try:
                    reply = await future
                except RpcError as error:  # the client was stopped, or there was no heartbeat
                    add_id(error, request.request_id)
                    raise
        except NAMED as error:
            add_id(error, request.request_id)
            raise
        except TimeoutError as error:
            if not scope.expired():
                raise
            queue = self._queue(options, method).name
            raise no_reply(request.method, queue, timeout_s, request.request_id, sent) from error
        finally:
            self._timeouts.end(scope, timeout_s)
            awaited.pop(request.request_id, None)
            if address is not None:
                self._replies.forget(address)
        if reply.failure is not None:
            raise rebuild(reply.failure, self._exceptions)
        return reply.result if isinstance(method, str) else method.converted_result(reply.result)

    def _silence(
        self, options: CallOptions, method: AnyMethod, request: Request
    ) -> HeartbeatTimeoutError:
        error = HeartbeatTimeoutError(
            f"no heartbeat from {self._queue(options, method).name!r} about {request.method}() "
            f"within {request.monitor_timeout_s:g} s (monitor_timeout; the time-out of "
            f"{options.timeout_s:g} s is not over): its server is gone, or nobody has taken it "
            f"yet; request {request.request_id} may still run; call again with the same request id "
            "for its answer"
        )
        error.request_id = request.request_id
        return error

    async def _cast(
        self, options: CallOptions, method: AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        request = self._request(options, method, args, kwargs)
        check_types(method, request.args)
        with self._sending("cast", request, options, method):
            if options.fail_fast:
                await self._check_open(options, method)
            if request.delay_s is not None or request.at is not None:
                await self._check_delays(options)
            try:
                await self._send(options, method, request, expires_at=None)
            except NAMED as error:
                add_id(error, request.request_id)
                raise
        return request.request_id

    async def _fanout(
        self, options: CallOptions, method: AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if options.host is not None:
            raise InvalidArgumentsError(
                f"a fanout goes to every host and host={options.host!r} was prepared; "
                "use cast() for one host, or leave host out"
            )
        if options.delay is not None or options.at is not None:
            raise _cannot_wait("fanout")
        if options.fail_fast:
            raise InvalidArgumentsError(
                "a fanout goes to every instance, so there is nobody to ask: leave fail_fast out"
            )
        request = self._request(options, method, args, kwargs)
        check_types(method, request.args)
        topic = self._topic(options, method)
        with self._sending("fanout", request, options, method):
            try:
                await self._transport.publish_fanout(topic, self._message(request))
            except NAMED as error:
                add_id(error, request.request_id)
                raise

    async def _send(
        self, options: CallOptions, method: AnyMethod, request: Request, *, expires_at: float | None
    ) -> None:
        """Publish to the request's queue.

        If there is no ops queue, an ops request is sent to the new-request topic instead.

        Args:
            options: As prepared.
            method: As passed by the caller.
            request: The request to send.
            expires_at: Loop time at which the caller stops waiting; None for never.
        """
        queue = self._queue(options, method)
        message = self._message(request, expires_at=expires_at)
        try:
            await self._transport.publish(queue, message)
        except Undeliverable as error:
            is_ops = queue.topic == self._topics[True]
            host = no_host(options.host, ops=is_ops)
            # A server of oslo.messaging has only one topic, and reads ops requests from that.
            if not is_ops or options.namespace == CONTROL_NAMESPACE:
                raise Undeliverable(f"{error}{host}") from None
            other = _queue_of(self._topics[False], options.host)
            message = self._message(request, expires_at=expires_at)
            try:
                await self._transport.publish(other, message)
            except Undeliverable:
                raise Undeliverable(
                    f"{error}; nor is there {other.name!r}, which was tried in its place{host}"
                ) from None

    async def _check_open(self, options: CallOptions, method: AnyMethod) -> None:
        """Ask first whether a new request is accepted; the ops topic stays open in a drain."""
        if self._is_ops(options, method) or not options.has_ops_server:
            return
        await self._asker.check_open(options.host, within_s=options.timeout_s)

    async def _check_delays(self, options: CallOptions) -> None:
        """Ask once whether the service knows of delays: one that does not would begin at once."""
        if options.host in self._delaying:
            return
        await self._asker.check_delays(options.host)
        self._delaying.add(options.host)

    # -- a request's parts ----------------------------------------------------

    def _request(
        self, options: CallOptions, method: AnyMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Request:
        if self._life is not None:
            self._life.check(name_of(method))
        request_id = options.request_id or self._clock.new_request_id()
        return request_of(options, method, args, kwargs, request_id=request_id)

    def _message(self, request: Request, *, expires_at: float | None = None) -> Message:
        trace = outgoing()
        if trace:
            request = structs.replace(request, context=stamped(request.context, trace))
        most = self._max_body_bytes
        is_long = is_too_long(request.args, "args", most)
        body = b"" if is_long else encode_request(request)
        if is_long or len(body) > most:
            size = f"more than {most}" if is_long else len(body)
            raise MessageTooLargeError(
                f"{request.method}() makes a message of {size} bytes and at most "
                f"{most} are sent; pass a reference to the data, or give service "
                "and client a larger max_body_bytes"
            )
        expires_in_s = None if expires_at is None else max(0.0, expires_at - self._clock.loop())
        return Message(body=body, expires_in_s=expires_in_s, headers=trace)

    def _is_ops(self, options: CallOptions, method: AnyMethod) -> bool:
        return options.ops or (not isinstance(method, str) and method.ops)

    def _topic(self, options: CallOptions, method: AnyMethod) -> str:
        return self._topics[self._is_ops(options, method) and options.has_ops_server]

    def _queue(self, options: CallOptions, method: AnyMethod) -> Queue:
        return _queue_of(self._topic(options, method), options.host)


def _cannot_wait(verb: str) -> InvalidArgumentsError:
    return InvalidArgumentsError(
        f"a {verb} cannot wait: delay and at are for cast() alone, so leave them out"
    )


def _queue_of(topic: str, host: str | None) -> Queue:
    return directed_queue(topic, host) if host else shared_queue(topic)
