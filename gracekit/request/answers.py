"""Sends replies and heartbeats to callers; each try has a timeout, each failure is logged."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from typing import Final

import msgspec

from gracekit import backoff
from gracekit.clock import Clock, SharedTimeouts
from gracekit.config.choices import ErrorDetails
from gracekit.errors import (
    DependencyError,
    MessageTooLargeError,
    Parked,
    StoreBrokenError,
    StoreError,
    Undeliverable,
    UnserialisableError,
)
from gracekit.journal.rows import Address, Outcome
from gracekit.journal.tasks import Journal
from gracekit.process import Point, Process
from gracekit.request.outcomes import failure_from, failure_text, without_result
from gracekit.rpc.failures import REFUSED, failure_of, shown
from gracekit.rpc.message import Failure, Reply
from gracekit.rpc.oslo_wire import MAX_BODY_BYTES, encode_reply
from gracekit.rpc.transport import Message, Transport, reply_queue
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Reason, TaskState

REPLY_TIMEOUT_S: Final = 5.0
"""Timeout of one try."""
LAST_TRY_S: Final = 0.5
CALLER_WAITS_S: Final = 60.0
"""How long a reply is tried if its caller did not say how long it waits."""


class SendResult(enum.Enum):
    """What became of a reply, or of a heartbeat."""

    YES = "yes"
    GIVEN_UP = "given_up"  # its reply queue is gone, or its caller's time is up
    NOT_YET = "not_yet"  # it stays due


class Answers:
    """Sends replies, and removes each from the record once it was confirmed or given up."""

    def __init__(
        self,
        transport: Transport,
        journal: Journal,
        process: Process,
        telemetry: Telemetry,
        clock: Clock,
        *,
        error_details: ErrorDetails = "full",
    ) -> None:
        self._error_details = error_details
        self._transport = transport
        self._journal = journal
        self._process = process
        self._telemetry = telemetry
        self._clock = clock
        self._stopped = asyncio.Event()
        self._timeouts = SharedTimeouts()

    def stop(self) -> None:
        """Repeat no failed try any more, as the process ends; the next start sends what is left.

        A try that is under way ends within `LAST_TRY_S`.
        """
        self._stopped.set()
        self._timeouts.hasten(LAST_TRY_S)

    async def send(self, address: Address, outcome: Outcome, *, patient: bool = True) -> SendResult:
        """Publish one reply; it is given up if its queue is gone.

        Args:
            address: The queue and message id of the caller.
            outcome: What to answer.
            patient: Whether to try again, as long as the caller may be waiting, when the
                transport cannot take the reply now.
        """
        body = self._body(address, outcome)
        now = self._clock.wall()
        until = address.expires_at if address.expires_at is not None else now + CALLER_WAITS_S
        while True:
            try:
                await self._publish(address, body)
            except (TimeoutError, StoreError, DependencyError) as error:
                final = isinstance(error, StoreBrokenError) or self._clock.wall() >= until
                if final:
                    return self._give_up(address, error)
                if not patient or await self._is_stopped_within(backoff.REPLY_S):
                    return SendResult.NOT_YET
            except Exception as error:  # noqa: BLE001 - no such queue, or an address is malformed
                return self._give_up(address, error)
            else:
                return SendResult.YES

    def written(self, outcome: Outcome) -> str:
        """The reply to a call whose task has ended so, as text: a part of another answer."""
        return self._body(Address(queue="", msg_id="part", expires_at=None), outcome).decode()

    async def _is_stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        return self._stopped.is_set()

    def _give_up(self, address: Address, error: Exception) -> SendResult:
        told = str(error) or f"it took over {REPLY_TIMEOUT_S:g} s"
        if isinstance(error, Undeliverable):
            told = "there is no such queue: its caller has ended"
        self._telemetry.emit("reply.given_up", queue=address.queue, error=told)
        return SendResult.GIVEN_UP

    async def beat(self, address: Address, *, within_s: float) -> SendResult:
        """Publish one heartbeat. A failure is only logged: the task goes on."""
        beat = Reply(msg_id=address.msg_id, reply_id=self._clock.new_id(), ending=False)
        try:
            async with asyncio.timeout(within_s):
                await self._publish(address, encode_reply(beat))
        except Exception as error:  # noqa: BLE001 - whatever the transport raises, the task goes on
            told = str(error) or type(error).__name__
            self._telemetry.emit("heartbeat.lost", queue=address.queue, error=told)
            return SendResult.GIVEN_UP if isinstance(error, Undeliverable) else SendResult.NOT_YET
        return SendResult.YES

    async def _publish(self, address: Address, body: bytes) -> None:
        self._process.reach(Point.REPLY, "before")
        is_last = self._stopped.is_set()
        async with asyncio.timeout(LAST_TRY_S if is_last else None) as scope:
            if not is_last:  # no shared timer outlives the stop
                self._timeouts.begin(scope, REPLY_TIMEOUT_S)
            try:
                await self._transport.publish(reply_queue(address.queue), Message(body=body))
            finally:
                self._timeouts.end(scope, REPLY_TIMEOUT_S)
        self._process.reach(Point.REPLY, "after")

    async def send_due(
        self, row_id: int, address: Address, outcome: Outcome, *, patient: bool = True
    ) -> None:
        """Send a reply that is on record, then remove it from the record."""
        sent = await self.send(address, outcome, patient=patient)
        if sent is not SendResult.NOT_YET:
            self._journal.forget_reply(row_id, address, sent=sent is SendResult.YES)

    async def refuse(self, address: Address | None, error: Exception) -> None:
        """Answer a request that was not accepted; casts are not answered."""
        if address is not None:
            said = failure_text(msgspec.structs.replace(failure_of(error), tb=(REFUSED,)))
            await self.send(address, Outcome(state=TaskState.REJECTED, failure=said))

    def _body(self, address: Address, outcome: Outcome) -> bytes:
        try:
            body = encode_reply(self._reply(address, outcome))
        except UnserialisableError as error:
            return self._body_without(address, error)
        if len(body) <= MAX_BODY_BYTES:
            return body
        # The caller would refuse so large a reply unread, and go on waiting.
        size = f"a reply of {len(body)} bytes is above {MAX_BODY_BYTES}"
        return self._body_without(address, MessageTooLargeError(size))

    def _body_without(
        self, address: Address, error: UnserialisableError | MessageTooLargeError
    ) -> bytes:
        """A reply that leaves the result out: it was recorded while the limit was higher."""
        return encode_reply(self._reply(address, without_result("the task", error)))

    def _reply(self, address: Address, outcome: Outcome) -> Reply:
        return Reply(
            msg_id=address.msg_id,
            reply_id=self._clock.new_id(),
            result=None if outcome.result is None else msgspec.Raw(outcome.result.encode()),
            failure=self._failure(address, outcome),
        )

    def _failure(self, address: Address, outcome: Outcome) -> Failure | None:
        if outcome.parking is not None and address.knows_pending:
            said = outcome.parking
            return failure_of(Parked(said.task_id, said.deadline, said.version))
        return None if outcome.failure is None else self._shown(outcome, outcome.failure)

    def _shown(self, outcome: Outcome, failure: str) -> Failure:
        return shown(
            failure_from(failure),
            self._error_details,
            is_ours=outcome.state is TaskState.REJECTED,
            sentence=_sentence(outcome),
        )


def _sentence(outcome: Outcome) -> str:
    """How gracekit ended a task, in fixed words; empty if its handler failed."""
    match outcome.state:
        case TaskState.SUCCEEDED:
            return "the task has succeeded, but its result cannot be sent and is left out"
        case TaskState.CANCELLED:
            return "the task was cancelled"
        case TaskState.ERRORED:
            return "the task was interrupted and marked ERRORED"
        case TaskState.PENDING:
            return "there is no capacity for the task now"
        case TaskState.FAILED if outcome.reason == Reason.OPERATOR.value:
            return "the task was failed by an operator"
    return ""
