"""What is held against a story while it unfolds."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from gracekit import Context
from gracekit.drain.hand_over import FREE_TRIES
from gracekit.errors import GracekitError
from gracekit.phase import ServiceState
from gracekit.rpc.message import Reply
from gracekit.rpc.oslo_wire import decode_reply, decode_request
from gracekit.rpc.transport import Delivery, Message
from gracekit.testing.faults import Fault
from gracekit.tracker.task import CancelCause
from tests.played import Life
from tests.simulation.ledger import state_of
from tests.simulation.truth import Violation, key_of, violate

if TYPE_CHECKING:
    from tests.simulation.ports import SimLife
    from tests.simulation.story import Story

HARMLESS: Final = frozenset({Fault.CRASH, Fault.JUMP, Fault.NO_PROOF, Fault.REORDER})
"""Faults that give a process no reason to change what it has said."""


class Watch:
    """Asked at starts, cancellations, acks, replies, closed intakes and ends."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._answers: dict[tuple[SimLife, str], str] = {}

    def check_start(self, life: Life, ctx: Context, vm: str | None) -> None:
        """I4, P3, and I17: whose attempt is on record can run, and waits for no thread."""
        if any(gate.threads.was_full for gate in life.runtime.wired.gates.values()):
            raise Violation(f"I17: an attempt of {life.name} was on record before it had a thread")
        if self._story.truth.plans[ctx.request_id].policy == "requeue":
            return
        serves = life.runtime.state is ServiceState.SERVING  # it may have been resumed since
        if not serves and (life.name, key_of(ctx)) in self._story.ledger.begun_late:
            raise Violation(f"I4: {ctx.request_id} began in {life.name} after its intake closed")
        if self._story.capacity.is_on:
            self._story.parked.check_start(ctx)
        state = state_of(self._story.machine.disk, key_of(ctx))
        if state != "running":
            raise Violation(f"P3: {ctx.request_id} started while its row is {state!r}")

    def check_ack(self, life: SimLife, delivery: Delivery) -> None:
        """I2: an ack means an accepted row, or the end of a `requeue` handler."""
        try:
            request = decode_request(delivery.body)
        except GracekitError:
            return
        if request.namespace == "gracekit":
            return
        one = self._story.sent.get(request.request_id or "")
        if one is None:
            return
        if one.plan.policy == "requeue":
            self._check_requeue_ack(life, one.plan.request_id)
            return
        sql = "SELECT 1 FROM task WHERE request_id = ? AND (recipient = ? OR state = 'rejected')"
        recipient = life.runtime.instance if one.is_fanout else ""
        if not self._story.machine.rows(sql, one.plan.request_id, recipient):
            raise Violation(f"I2: {one.plan.request_id} acked without a row")

    def _check_requeue_ack(self, life: SimLife, request_id: str) -> None:
        sql = "SELECT 1 FROM task WHERE request_id = ?"
        if self._story.machine.rows(sql, request_id):
            return  # journaled, because it was redelivered
        acts = [act for act in self._story.truth.acting() if act.request_id == request_id]
        if any(act.life is life for act in acts):
            raise Violation(f"P1: {request_id} acked before its handler's end")
        # A plain handler may meet its timeout before a thread is free for it.
        if not self._story.truth.has_started(request_id) and not self.was_started(request_id):
            raise Violation(f"P1: {request_id} acked before its handler's end")

    def was_started(self, request_id: str) -> bool:
        return any(
            started["task_id"] == request_id
            for life in self._story.machine.lives
            for started in life.told("task.started")
        )

    def check_reply(self, life: SimLife, message: Message) -> None:
        """P10: what a reply tells is on record; Q6: without faults a call hears one thing."""
        reply = decode_reply(message.body)
        if reply.ending:
            self._check_answered(life, reply)
        if reply.failure is not None or not isinstance(reply.result, str):
            return
        request_id = reply.result.removeprefix("done ")
        one = self._story.sent.get(request_id)
        if one is None or one.plan.policy == "requeue":
            return
        state = state_of(self._story.machine.disk, f"{request_id}/")
        if state != "succeeded":
            raise Violation(f"P10: {request_id} is answered while its row is {state!r}")

    def _check_answered(self, life: SimLife, reply: Reply) -> None:
        """An answer may be sent twice; another one after it would be for nobody."""
        what = "a result" if reply.failure is None else reply.failure.exc_class
        first = self._answers.setdefault((life, reply.msg_id), what)
        if what != first and self._story.swarm.rates.keys() <= HARMLESS:
            raise Violation(f"Q6: {life.name} answers {reply.msg_id} with {first}, then {what}")

    def note_closed(self, life: SimLife) -> None:
        """P4: what was not accepted goes back at once; asked a little later."""
        self._story.spawn(self._check_given_back(life))

    async def _check_given_back(self, life: SimLife) -> None:
        closing = life.closings
        await asyncio.sleep(10 + self._slack_s)
        if not life.process.lives or not life.closed or life.closings != closing:
            return
        tracked = {task.request_id for task in life.runtime.wired.tracker}
        for delivery in life.transport.taken:  # type: ignore[attr-defined]
            if delivery.settled or "-ops" in delivery.queue.name:
                continue
            request = decode_request(delivery.body)
            if request.request_id not in tracked:
                self._story.judged(
                    violate,
                    f"P4: {life.name} keeps {request.request_id} in a drain and did not accept it",
                )

    @property
    def _slack_s(self) -> float:
        """What faults may add to a step."""
        return 0.0 if self._story.swarm.is_off else 21.0

    def check_cancel(self, life: Life, ctx: Context) -> None:
        """I5: nothing running is cancelled before the deadline."""
        task = life.runtime.wired.tracker.get(ctx.request_id)
        if task is None or task.cancel_cause is not CancelCause.DRAIN_DEADLINE:
            return
        deadline = life.runtime.ground.phase.deadline
        if deadline is None or self._story.loop.time() < deadline - 0.001:
            raise Violation(f"I5: {ctx.request_id} was cancelled before the deadline {deadline}")

    def check_end(self, life: SimLife) -> None:
        """I6: what a process leaves behind when it goes in order."""
        report = life.report
        assert report is not None
        if report.failure is not None or report.left_behind or life.engine.status.is_final:
            return
        if life.told("store.unreachable"):
            return
        rows = self._story.machine.rows(
            "SELECT request_id, state, cut FROM task WHERE owner = ? AND finished_at IS NULL",
            life.runtime.run_id,
        )
        failed = life.told("drain.step_failed")
        steps = Counter(told["step"] for told in failed)
        # The last try of all, or the one in which the time ran out.
        no_try_was_taken = steps["freeing of rows"] == FREE_TRIES or any(
            told["step"] == "freeing of rows" and told["error"].startswith("took over")
            for told in failed
        )
        # What a slow store did not take is in the report, and a death by must_die proves it.
        unrecorded = report.unclean if "hand-over of stuck tasks" in steps else []
        for row in rows:
            if row["state"] == "running" and row["request_id"] in unrecorded:
                continue
            if row["state"] == "accepted" and no_try_was_taken:
                continue  # the run that adopts this one finds the row
            if row["state"] != "handed_over" or row["cut"] != "unclean":
                raise Violation(f"I6: {life.name} left {row} behind, with {report}")
