"""Answers: replies on their way to callers, each bounded and accounted for."""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import (
    MessageTooLargeError,
    StoreError,
    Undeliverable,
    UnserialisableError,
)
from gracekit.process import Point, Process
from gracekit.request.attempt import failed, failure_from, failure_text
from gracekit.rpc.failures import failure_of
from gracekit.rpc.message import Reply
from gracekit.rpc.oslo_wire import MAX_BODY_BYTES, encode_reply
from gracekit.rpc.transport import Message, Transport, reply_queue
from gracekit.telemetry import Telemetry
from gracekit.tracker.journal import Address, Journal, Outcome, from_json
from gracekit.tracker.task import TaskState

REPLY_TIMEOUT_S: Final = 5.0
"""A reply that finds no way within this time is given up and counted."""


class Answers:
    """Sends replies and forgets them when they were confirmed or given up."""

    def __init__(
        self,
        transport: Transport,
        journal: Journal,
        process: Process,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._transport = transport
        self._journal = journal
        self._process = process
        self._telemetry = telemetry
        self._clock = clock

    async def send(self, address: Address, outcome: Outcome) -> bool:
        """Publish one reply; false if it was given up."""
        body = self._body(address, outcome)
        self._process.reach(Point.REPLY, "before")
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._transport.publish(reply_queue(address.queue), Message(body=body))
        except (Undeliverable, TimeoutError, StoreError) as error:
            self._telemetry.emit("reply.given_up", queue=address.queue, error=str(error))
            return False
        self._process.reach(Point.REPLY, "after")
        return True

    async def send_due(self, row_id: int, address: Address, outcome: Outcome) -> None:
        """Send a reply that is on record, then forget it."""
        sent = await self.send(address, outcome)
        await self.forget(row_id, address, sent=sent)

    async def forget(self, row_id: int, address: Address, *, sent: bool) -> None:
        """Strike a reply that was sent, or given up, from the record."""
        try:
            await self._journal.reply_done(row_id, address, sent=sent)
        except StoreError as error:
            # It stays due: the next start sends it again, once.
            self._telemetry.emit("store.error", what="reply record", error=str(error))

    async def refuse(self, address: Address | None, error: Exception) -> None:
        """Answer a request that was not accepted; casts are not answered."""
        if address is not None:
            refusal = Outcome(state=TaskState.REJECTED, failure=failure_text(failure_of(error)))
            await self.send(address, refusal)

    def _body(self, address: Address, outcome: Outcome) -> bytes:
        try:
            body = encode_reply(self._reply(address, outcome))
        except UnserialisableError as error:  # within the limits, but not with the envelope around
            return encode_reply(self._reply(address, failed(error)))
        if len(body) <= MAX_BODY_BYTES:
            return body
        # The caller would refuse it unread and wait on: tell it at least that the work was done.
        too_large = MessageTooLargeError(
            f"the task {outcome.state.value}, but its reply of {len(body)} bytes is above "
            f"{MAX_BODY_BYTES}: return a reference to the data instead"
        )
        return encode_reply(self._reply(address, failed(too_large)))

    def _reply(self, address: Address, outcome: Outcome) -> Reply:
        return Reply(
            msg_id=address.msg_id,
            reply_id=self._clock.new_id(),
            result=from_json(outcome.result),
            failure=None if outcome.failure is None else failure_from(outcome.failure),
        )
