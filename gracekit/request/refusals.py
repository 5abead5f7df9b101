"""Deliveries that never become a task: refused requests, and questions to gracekit itself.

A refusal is recorded, answered and settled. A question is answered at once, without a row.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Final

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.config.choices import RejectReason
from gracekit.errors import Draining, GracekitError, InvalidArgumentsError, RpcError, StoreError
from gracekit.journal.rows import Address, caller_hash
from gracekit.journal.tasks import Journal
from gracekit.request.answers import Answers
from gracekit.request.lanes import LaneGate
from gracekit.request.outcomes import succeeded
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.offer import can_serve
from gracekit.rpc.transport import Delivery, Queue, QueueKind, settle
from gracekit.runs.members import Members
from gracekit.runs.run import Run
from gracekit.telemetry.safe_text import shown_context
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane

SHOWN: Final = 3

PASS_ON_FOR_S: Final = 300.0
"""Seconds for which a delivery is given back for a sibling; after that it is refused."""
TOLD_EVERY_S: Final = 60.0
MOST_REMEMBERED: Final = 10_000


class Detour:
    """In a rolling upgrade, gives deliveries back that only a sibling of another version serves.

    Any reader of the queue may get them next, also this process. So there is a
    pause before each is given back; and after `PASS_ON_FOR_S` it is refused, as
    a sibling may be alive and yet take nothing.

    Args:
        members: Knows which runs live, and what they serve.
        clock: Measures pause and limit.
        telemetry: Told which methods go back, each at most every `TOLD_EVERY_S`.
    """

    def __init__(self, members: Members, clock: Clock, telemetry: Telemetry) -> None:
        self._members = members
        self._clock = clock
        self._telemetry = telemetry
        self._told: dict[str, float] = {}  # by method; only those that some sibling serves
        self._since: dict[str, float] = {}  # loop time at which each was first passed on

    async def pause_s(self, request: Request, delivery: Delivery) -> float | None:
        """Seconds after which the delivery is given back to the queue for a sibling.

        0 if it is to be refused and its body kept as a dead letter: because it was given back
        before, or because it is a cast that another version served and no caller learns of the
        refusal. None if it is to be refused without keeping its body.
        """
        key = request.request_id or hashlib.blake2b(delivery.body, digest_size=16).hexdigest()
        siblings = await self._siblings_that_serve(request, delivery.queue)
        if not siblings:
            went_back = self._since.pop(key, None) is not None
            return 0.0 if went_back or await self._was_served(request) else None
        now = self._clock.loop()
        since = self._since.setdefault(key, now)
        if now - since >= PASS_ON_FOR_S:
            del self._since[key]
            return 0.0
        if len(self._since) > MOST_REMEMBERED:  # forget the oldest: it was most likely served
            del self._since[next(iter(self._since))]
        self._tell(request, delivery, siblings, now - since)
        return backoff.SIBLING.after(now - since)

    async def _was_served(self, request: Request) -> bool:
        """Whether it is a cast that some run on record could have served."""
        if request.reply is not None:
            return False
        asked = (request.namespace, request.method, request.version, request.args)
        own = self._members.methods
        return any(can_serve(text, *asked, unlike=own) for text in await self._members.offers())

    async def _siblings_that_serve(self, request: Request, queue: Queue) -> list[str]:
        """The names of the instances of another version that serve it."""
        asked = (request.namespace, request.method, request.version, request.args)
        own = self._members.methods
        return [
            run.instance
            for run, methods in await self._members.siblings()
            if _reads(run, queue) and can_serve(methods, *asked, unlike=own)
        ]

    def _tell(
        self, request: Request, delivery: Delivery, siblings: Sequence[str], waited_s: float
    ) -> None:
        now = self._clock.loop()
        if now - self._told.get(request.method, -TOLD_EVERY_S) < TOLD_EVERY_S:
            return
        self._told[request.method] = now
        self._telemetry.emit(
            "task.passed_on",
            task_id=request.request_id,
            method=request.method,
            queue=delivery.queue.name,
            siblings=", ".join(sorted(siblings)[:SHOWN]),
            waited_s=round(waited_s, 3),
            left_s=round(PASS_ON_FOR_S - waited_s, 3),
        )


def _reads(run: Run, queue: Queue) -> bool:
    """Whether *run* consumes from *queue*."""
    topics = {run.topic, run.ops_topic}
    match queue.kind:
        case QueueKind.SHARED:
            return queue.name in topics
        case QueueKind.DIRECTED:
            return queue.name in {f"{topic}.{name}" for topic in topics for name in _names(run)}
        case _:
            return False  # only this run reads its fanout queue


def _names(run: Run) -> tuple[str, str]:
    return run.host, run.instance


class Refusals:
    """Records, answers and settles deliveries that are refused; answers questions.

    Attributes:
        context_keys: Of the service; what is shown of the contexts of requests.
        telemetry: Gets the events of refusals.
    """

    def __init__(
        self,
        journal: Journal,
        answers: Answers,
        telemetry: Telemetry,
        clock: Clock,
        detour: Detour,
        context_keys: tuple[str, ...] = (),
        who: Sequence[str] = (),
    ) -> None:
        self._journal = journal
        self._detour = detour
        self._answers = answers
        self.telemetry = telemetry
        self._clock = clock
        self.context_keys = context_keys
        self._who = who  # keys of a caller's context by which it is known

    async def refuse(
        self, request: Request, delivery: Delivery, gate: LaneGate, error: RpcError
    ) -> None:
        """Refuse a request that cannot be served here; give it back if a living sibling can."""
        reason = reason_of(error)
        pause_s = None
        if reason in _OF_THE_VERSION:
            try:
                pause_s = await self._detour.pause_s(request, delivery)
            except StoreError as failure:
                self.telemetry.emit("store.error", what="siblings", error=str(failure))
                pause_s = backoff.GIVE_BACK_S
        if pause_s:
            delivery.taken()  # otherwise deliveries read after it would wait for this pause
            if gate.is_open:
                await asyncio.sleep(pause_s)
            await settle(delivery.give_back(), self.telemetry)
        else:
            keep = pause_s is not None
            await self.reject(request, delivery, gate.lane, reason, error, keep=keep)

    async def reject(
        self,
        request: Request | None,
        delivery: Delivery,
        lane: Lane,
        reason: RejectReason,
        error: GracekitError,
        *,
        caller: ReplyAddress | None = None,
        keep: bool = False,
    ) -> None:
        """Record a refusal, answer the caller, and settle the delivery.

        Args:
            request: None if it could not be read; the delivery is then kept as a dead letter.
            delivery: The delivery that brought it.
            lane: The lane of its queue.
            reason: One word for the record.
            error: The answer to the caller.
            caller: Address found in a request that could not be read as a whole, if any.
            keep: Whether to keep the delivery as a dead letter although it could be read.
        """
        context = shown_context(request.context, self.context_keys) if request else None
        detail = {
            "request_id": (request and request.request_id) or self._clock.new_id(),
            # A recipient of its own keeps the request id free: it may come again, corrected.
            "recipient": f"rejected {self._clock.new_id()}",
            "lane": lane.value,
            "queue": delivery.queue.name,
            "route": delivery.queue.kind.value,
            "namespace": request and request.namespace,
            "method": request.method[:200] if request else "",
            "version": request.version[:50] if request else "",
            "shown_context": context,
            "caller_hash": caller_hash(request.context, self._who) if request else "",
        }
        try:
            await self._journal.reject(detail, reason=reason, detail=str(error))
        except StoreError as failure:
            self.telemetry.emit("store.error", what="rejection", error=str(failure))
            await asyncio.sleep(backoff.GIVE_BACK_S)
            await settle(delivery.give_back(), self.telemetry)
            return
        self.telemetry.emit(
            "task.rejected",
            task_id=detail["request_id"],
            method=detail["method"],
            reason=reason,
            error=str(error),
            context=context,
        )
        await self._answers.refuse(_address(request.reply if request else caller), error)
        kept = keep or request is None
        settlement = delivery.dead_letter(f"{reason}: {error}") if kept else delivery.ack()
        await settle(settlement, self.telemetry)

    async def answer(self, request: Request, delivery: Delivery, answer: Any) -> None:
        """Ack a question that changes nothing and that every client may ask; send *answer*."""
        await settle(delivery.ack(), self.telemetry)
        address = _address(request.reply)
        if address is not None:
            await self._answers.send(address, succeeded(request.method, answer))


def _address(reply: ReplyAddress | None) -> Address | None:
    if reply is None:
        return None
    return Address(queue=reply.queue, msg_id=reply.msg_id, expires_at=None)


_OF_THE_VERSION: Final[frozenset[RejectReason]] = frozenset({"arguments", "unknown_method"})


def reason_of(error: RpcError) -> RejectReason:
    """The word under which the record counts a refusal for *error*."""
    match error:
        case InvalidArgumentsError():
            return "arguments"
        case Draining():
            return "draining"
        case _:
            return "unknown_method"
