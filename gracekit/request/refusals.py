"""Refusals and control: deliveries that never become a task.

A refusal is recorded, answered and settled. What is asked of gracekit itself is
answered at once, without a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gracekit.clock import Clock
from gracekit.errors import Draining, GracekitError, InvalidArgumentsError, RpcError, StoreError
from gracekit.request.answers import Answers
from gracekit.request.attempt import succeeded
from gracekit.request.lanes import GIVE_BACK_PAUSE_S
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.transport import Delivery
from gracekit.telemetry import Telemetry
from gracekit.tracker.journal import Address, Journal
from gracekit.tracker.task import Lane

Control = Callable[[Request], Awaitable[Any]]


class Refusals:
    """Settles what is not accepted, and control verbs, which are only answered."""

    def __init__(
        self,
        journal: Journal,
        answers: Answers,
        telemetry: Telemetry,
        clock: Clock,
        control: Control,
    ) -> None:
        self._journal = journal
        self._answers = answers
        self._telemetry = telemetry
        self._clock = clock
        self._control = control

    async def reject(
        self,
        request: Request | None,
        delivery: Delivery,
        lane: Lane,
        reason: str,
        error: GracekitError,
        *,
        caller: ReplyAddress | None = None,
    ) -> None:
        """Record what never becomes a task, answer its caller, and settle it.

        Args:
            request: None where it could not be read; then it is kept aside.
            delivery: What brought it.
            lane: Where it came in.
            reason: One word for the record.
            error: What its caller is told.
            caller: Of what could not be read, if that much was found in it.
        """
        detail = {
            "request_id": (request and request.request_id) or self._clock.new_id(),
            # A refused id stays free: the same id may come again, mended.
            "recipient": f"rejected {self._clock.new_id()}",
            "lane": lane.value,
            "queue": delivery.queue.name,
            "route": delivery.queue.kind.value,
            "namespace": request and request.namespace,
            "method": request.method[:200] if request else "",
            "version": request.version[:50] if request else "",
        }
        try:
            await self._journal.reject(detail, reason=reason, detail=str(error))
        except StoreError as failure:
            self._telemetry.emit("store.error", what="rejection", error=str(failure))
            await asyncio.sleep(GIVE_BACK_PAUSE_S)
            await settle(delivery.give_back(), self._telemetry)
            return
        self._telemetry.emit("task.rejected", reason=reason, error=str(error))
        await self._answers.refuse(_address(request.reply if request else caller), error)
        settlement = delivery.ack() if request else delivery.dead_letter(f"{reason}: {error}")
        await settle(settlement, self._telemetry)

    async def answer_control(self, request: Request, delivery: Delivery) -> None:
        """A control verb: not journaled, not tracked, answered at once."""
        await settle(delivery.ack(), self._telemetry)
        address = _address(request.reply)
        if address is None:
            return
        try:
            answer = await self._control(request)
        except Exception as error:  # noqa: BLE001 - every fault goes to whoever asked
            await self._answers.refuse(address, error)
            return
        await self._answers.send(address, succeeded(f"verb {request.method}", answer))

    async def answer(self, request: Request, delivery: Delivery, answer: Any) -> None:
        """A question that changes nothing and that anybody may ask."""
        await settle(delivery.ack(), self._telemetry)
        address = _address(request.reply)
        if address is not None:
            await self._answers.send(address, succeeded(request.method, answer))


def _address(reply: ReplyAddress | None) -> Address | None:
    if reply is None:
        return None
    return Address(queue=reply.queue, msg_id=reply.msg_id, expires_at=None)


async def settle(settlement: Coroutine[Any, Any, None], telemetry: Telemetry) -> None:
    """Settle a delivery; what the transport cannot do now it does later, or delivers again."""
    try:
        await settlement
    except StoreError as error:
        telemetry.emit("store.error", what="settlement", error=str(error))


def reason_of(error: RpcError) -> str:
    """One word for the record."""
    match error:
        case InvalidArgumentsError():
            return "arguments"
        case Draining():
            return "draining"
        case _:
            return "unknown_method"
