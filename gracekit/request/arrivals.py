"""Turns a delivery, or a recovered row, into a job.

A delivery is checked in a fixed order: size, decoding, reply address, method,
arguments, state of the service. The first check that fails refuses it: nothing of
it is run, and only a record is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from msgspec import structs

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.config.choices import RejectReason
from gracekit.config.settings import Settings
from gracekit.config.values import words_in
from gracekit.errors import (
    BadMessageError,
    Draining,
    GracekitError,
    InvalidArgumentsError,
    MessageTooLargeError,
    RpcError,
)
from gracekit.journal.rows import Acceptance, Address, Due, TaskRow, caller_hash
from gracekit.phase import Phase, ServiceState
from gracekit.process import NoThreadError
from gracekit.request.calls import in_thread
from gracekit.request.events import TaskEvents
from gracekit.request.heartbeats import monitor_of
from gracekit.request.lanes import Job, LaneGate
from gracekit.request.refusals import Refusals
from gracekit.request.suspects import suspicion
from gracekit.rpc.foreign_readers import need_one_store
from gracekit.rpc.message import (
    CONTROL_NAMESPACE,
    DELAY,
    STATE_VERB,
    TASKS_NAMESPACE,
    CallerVerb,
    JsonObject,
    ReplyAddress,
    Request,
)
from gracekit.rpc.method_table import MethodTable
from gracekit.rpc.methods import Method
from gracekit.rpc.oslo_wire import (
    caller_in,
    check_size,
    decode_request,
    open_message,
    request_in,
)
from gracekit.rpc.plain import excerpt
from gracekit.rpc.transport import REPLY, Delivery, QueueKind, is_for_replies, settle
from gracekit.telemetry.safe_text import shown_context
from gracekit.tracing.carrier import adopted
from gracekit.tracker.task import Lane, TrackedTask

PING: Final = "oslo_rpc_server_ping"
FEATURES: Final = (DELAY,)
_QUESTIONS: Final = frozenset(
    [(CONTROL_NAMESPACE, STATE_VERB), *((TASKS_NAMESPACE, verb.value) for verb in CallerVerb)]
)
_CLOSED: Final = frozenset({ServiceState.QUIET, ServiceState.DRAINING, ServiceState.STOPPED})


class Arrivals:
    """Reads deliveries and recovered rows, for one instance.

    Attributes:
        answer_caller: Answers what a caller asks about its requests. `runtime.wiring` sets it,
            because a cancel is an order, which rooms above carry out.
    """

    answer_caller: Callable[[Request], Awaitable[None]]

    def __init__(
        self,
        methods: MethodTable,
        refusals: Refusals,
        phase: Phase,
        settings: Settings,
        clock: Clock,
        *,
        instance: str,
        is_directed: bool = False,
    ) -> None:
        self._methods = methods
        self._refusals = refusals
        self._phase = phase
        self._settings = settings
        self._clock = clock
        self._instance = instance
        self._is_directed = is_directed
        self._context_keys = refusals.context_keys
        self._dedupe_context = words_in(settings.dedupe_context)
        self._reply_queues = words_in(settings.reply_queues)

    # -- from the transport --------------------------------------------------------------

    async def read(self, delivery: Delivery, gate: LaneGate) -> Job | None:
        """The job that a delivery asks for; None if it was answered or refused, and settled."""
        message: JsonObject = {}
        try:
            check_size(delivery.dropped, max_bytes=self._settings.max_body_bytes)
            message = _opened(delivery, max_bytes=self._settings.max_body_bytes)
            _check_way(delivery)
            request = request_in(message)
            self._check_address(request.reply)
        except BadMessageError as error:
            reason: RejectReason = (
                "oversize" if isinstance(error, MessageTooLargeError) else "unreadable"
            )
            caller = self._caller_in(message)
            await self._refusals.reject(None, delivery, gate.lane, reason, error, caller=caller)
            return None
        if gate.lane is Lane.OPS and (request.namespace, request.method) in _QUESTIONS:
            await self._answer(request, delivery)
            return None
        try:
            method = self._methods.resolve(request.namespace, request.method, request.version)
            method.bind(request.args)
            job = self._job(request, method, delivery, gate)
            self._check_host(method, delivery)
            self._check_open(method, gate)
        except RpcError as error:
            if self._settings.rpc_ping_enabled and _is_ping(request):
                await self._refusals.answer(request, delivery, "pong")
            else:
                await self._refusals.refuse(request, delivery, gate, error)
            return None
        return job

    async def _answer(self, request: Request, delivery: Delivery) -> None:
        """Answer a question to gracekit itself, which is no task."""
        if request.method == STATE_VERB:
            await self._refusals.answer(request, delivery, self._state())
        else:
            await settle(delivery.ack(), self._refusals.telemetry)  # an unanswered one is repeated
            await self.answer_caller(request)

    def _check_address(self, reply: ReplyAddress | None) -> None:
        """Refuse an address that is no reply queue.

        Replies are sent with the permissions of this service. Without this check a client could
        let it write to any queue.
        """
        if reply is not None and not is_for_replies(reply.queue, self._reply_queues):
            raise BadMessageError(
                f"_reply_q {excerpt(reply.queue)} is no reply queue ({REPLY}...); "
                "GRACEKIT_REPLY_QUEUES may name more"
            )

    def _caller_in(self, message: JsonObject) -> ReplyAddress | None:
        """Where to answer that *message* cannot be read; None if it names no valid address."""
        caller = caller_in(message)
        try:
            self._check_address(caller)
        except BadMessageError:
            return None
        return caller

    async def read_early(self, job: Job, events: TaskEvents) -> RpcError | None:
        """Let a thread find a resource inside of arguments; returns what is wrong with them."""
        if (reads := job.method.reads_early) is None or job.request is None or job.delivery is None:
            return None
        job.delivery.taken()  # otherwise deliveries read after it would wait for the thread
        job.gate.entering[job] = None
        job.task.handler, job.waiting = asyncio.current_task(), True
        try:
            read = partial(reads, job.caller, job.args)
            while True:
                try:
                    resource = await in_thread(read, job.gate.readers, given_up=lambda: True)
                    break
                except NoThreadError as error:  # given back, it would come again at once
                    events.interrupted(job, str(error))
                    await asyncio.sleep(backoff.NO_THREAD.first_s)
            column = "ops_resource" if job.method.ops else "resource"
            setattr(job.task, column, resource)
            job.request = structs.replace(job.request, **{column: resource})
        except RpcError as error:
            return error
        except asyncio.CancelledError:
            if job.gate.is_open:  # otherwise the delivery goes back
                raise
        finally:
            job.waiting = False
        return None

    async def refuse(self, job: Job, reason: RejectReason, error: GracekitError) -> None:
        """Refuse a delivery that was already turned into a job."""
        assert job.delivery is not None
        request = decode_request(job.delivery.body, max_bytes=self._settings.max_body_bytes)
        await self._refusals.reject(request, job.delivery, job.gate.lane, reason, error)

    def _state(self) -> dict[str, Any]:
        """The answer to the verb `state`, which every client may send.

        `open` says whether new requests are taken.
        """
        return {
            "instance": self._instance,
            "host": self._settings.host,
            "state": self._phase.state.value,
            "open": self._phase.state not in _CLOSED,
            "ready": self._phase.not_ready is None,  # the reason is for operators only
            "features": FEATURES,
        }

    def _check_host(self, method: Method[Any, Any], delivery: Delivery) -> None:
        """Refuse what must run on one host, if each has a store of its own and none is named."""
        is_anywhere = delivery.queue.kind is QueueKind.SHARED and self._is_directed
        if is_anywhere and need_one_store([method]):
            raise InvalidArgumentsError(
                f"{method.name}() must not run twice, or on two hosts at a time, and each host has "
                "a store of its own (queues='directed'): say prepare(host=...)"
            )

    def _check_open(self, method: Method[Any, Any], gate: LaneGate) -> None:
        if gate.lane is not Lane.OPS or not self._phase.draining:
            return
        if not method.ops or method.options.in_drain == "refuse":
            raise Draining(
                f"{self._instance} is draining and does not take {method.name}: "
                "send it to another host, or again when this one is back"
            )

    def _job(
        self, request: Request, method: Method[Any, Any], delivery: Delivery, gate: LaneGate
    ) -> Job:
        if delivery.headers:
            request = structs.replace(request, context=adopted(request.context, delivery.headers))
        task = self._task(request, method, delivery, gate)
        waits_s = delivery.expires_in_s
        expires_at = None if waits_s is None else self._clock.wall() + waits_s
        reply = None
        if request.reply is not None:
            queue, msg_id = request.reply.queue, request.reply.msg_id
            reply = Address(
                queue=queue,
                msg_id=msg_id,
                expires_at=expires_at,
                monitor_s=monitor_of(request),
                knows_pending=request.reply.knows_pending,
            )
        due = None if request.delay_s is request.at is None else self._due(request)
        job = Job(
            task=task,
            method=method,
            gate=gate,
            args=request.args,
            values=request.args
            if method.types.arguments is None
            else method.converted(request.args),
            caller=request.context,
            delivery=delivery,
            caller_hash=caller_hash(request.context, self._dedupe_context),
            reply=reply,
            settle_s=self._settle_s(method),
            expires_at=None if waits_s is None else self._clock.loop() + waits_s,
            version=request.version,
            is_delayed=due is not None,
        )
        if task.journaled:
            job.request = self._acceptance(job, request, delivery, expires_at, due)
        return job

    def _due(self, request: Request) -> Due | None:
        """When it may begin; None for now."""
        if request.delay_s is not None:
            return Due.after(request.delay_s, self._clock)
        if request.at is not None and request.at > self._clock.wall():
            return Due(at=request.at)
        return None

    def _task(
        self, request: Request, method: Method[Any, Any], delivery: Delivery, gate: LaneGate
    ) -> TrackedTask:
        keys = self._context_keys
        resource = None if method.reads_early else method.resource_of(request.args)
        return TrackedTask(
            request_id=request.request_id or self._clock.new_request_id(),
            recipient=self._instance if delivery.queue.kind is QueueKind.FANOUT else "",
            method=method.name,
            lane=gate.lane,
            holds_drain=_holds_drain(method, gate.lane),
            # A redelivered `requeue` may have killed its process. A row counts its attempts. A
            # delayed one has nothing else to wait in.
            journaled=method.options.on_interrupt != "requeue"
            or delivery.redelivered
            or bool(request.delay_s or request.at),
            on_interrupt=method.options.on_interrupt,
            # An ops method takes no lease: it must reach a resource on which a task is running.
            resource=None if method.ops else resource,
            ops_resource=resource if method.ops else None,
            shown_context=shown_context(request.context, keys) if keys else None,
            tracked_at=self._clock.loop(),
        )

    def _acceptance(
        self,
        job: Job,
        request: Request,
        delivery: Delivery,
        expires_at: float | None,
        due: Due | None,
    ) -> Acceptance:
        task = job.task
        return Acceptance(
            request_id=task.request_id,
            recipient=task.recipient,
            lane=task.lane,
            queue=delivery.queue.name,
            route=delivery.queue.kind.value,
            target=self._target(delivery, job.method),
            namespace=request.namespace,
            method=task.method,
            version=request.version,
            args=request.args,
            context=request.context,
            on_interrupt=task.on_interrupt,
            settle_s=job.settle_s,
            resource=task.resource,
            ops_resource=task.ops_resource,
            shown_context=task.shown_context,
            reply=job.reply,
            expires_at=expires_at,
            due=due,
            caller_hash=job.caller_hash,
        )

    def _target(self, delivery: Delivery, method: Method[Any, Any]) -> str:
        """The only host or instance that may run it later; empty for any."""
        kind = delivery.queue.kind
        if kind is QueueKind.FANOUT:
            return self._instance
        if kind is QueueKind.DIRECTED and not method.options.anywhere:
            return delivery.queue.name.removeprefix(f"{delivery.queue.topic}.")
        return ""

    def _settle_s(self, method: Method[Any, Any]) -> float:
        default = self._settings.startup_reconciliation_wait_seconds
        return default if method.options.settle_s is None else method.options.settle_s

    # -- from the journal ------------------------------------------------------------------

    def job_of(self, row: TaskRow, gate: LaneGate) -> Job:
        """An accepted row as a job; this run must serve its method."""
        method = self._methods.resolve(row.namespace, row.method, row.version)
        expires_at = None
        if row.expires_at is not None and not row.attempts:
            expires_at = self._clock.loop() + row.expires_at - self._clock.wall()
        return Job(
            task=self.task_of(row, method),
            method=method,
            gate=gate,
            args=row.args or {},
            values=method.converted(row.args or {}),
            caller=row.context or {},
            settle_s=row.settle_s,
            expires_at=expires_at,
            suspicion=suspicion(
                row.crashes,
                method.options.max_attempts or self._settings.max_attempts,
                row.started_at,
            ),
            version=row.version,
            parkings=row.parkings,
            pending_deadline=row.pending_deadline,
        )

    def task_of(self, row: TaskRow, method: Method[Any, Any]) -> TrackedTask:
        """The row as a task of this process."""
        return TrackedTask(
            request_id=row.request_id,
            recipient=row.recipient,
            method=row.method,
            lane=row.lane,
            holds_drain=_holds_drain(method, row.lane),
            on_interrupt=row.on_interrupt,
            resource=row.resource,
            ops_resource=row.ops_resource,
            shown_context=row.shown_context,
            row_id=row.id,
            tracked_at=self._clock.loop(),
            attempt=row.attempts,
            failures=row.failures,
            cursor=row.cursor,
            state=row.state,
        )


def _opened(delivery: Delivery, *, max_bytes: int) -> JsonObject:
    """The message in a body; of one that kombu, which oslo.messaging uses, compressed, says so."""
    try:
        return open_message(delivery.body, max_bytes=max_bytes)
    except BadMessageError as error:
        how = delivery.headers.get("compression")
        if how is None or isinstance(error, MessageTooLargeError):
            raise
        raise BadMessageError(
            f"body is compressed ({excerpt(how)[1:-1]}), and gracekit reads only what is not: "
            "switch compression off where it is sent, in oslo.messaging kombu_compression"
        ) from error


def _check_way(delivery: Delivery) -> None:
    """Refuse a message that the broker copied here from another routing key.

    Its sender may lack the permission to send to this queue.
    """
    if delivery.sent_to:
        raise BadMessageError(
            f"it came to {delivery.queue.name!r} under the routing key "
            f"{excerpt(delivery.sent_to)}: send it to the topic itself, not as a copy"
        )


def _is_ping(request: Request) -> bool:
    """Whether it asks for oslo's built-in ping, which a method of that name overrides."""
    return request.method == PING and request.namespace is None


def _holds_drain(method: Method[Any, Any], lane: Lane) -> bool:
    """Whether it may stop at a safe point: all but ops methods that came by the ops lane."""
    return not (method.ops and lane is Lane.OPS)
