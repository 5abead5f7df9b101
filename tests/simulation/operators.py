"""An operator who cancels, fails and retries tasks, as `gracekit tasks` does, at bad moments."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gracekit.errors import GracekitError
from gracekit.journal.order_rows import (
    OrderTarget,
    add_order,
    incident_of,
    refusal_of,
    target_named,
)
from gracekit.journal.outbox import News
from gracekit.journal.pending import add_parked_order
from gracekit.leases.leases import RunLeases
from gracekit.phase import ServiceState
from gracekit.process import Point
from gracekit.request.outcomes import ordered
from gracekit.store.batch import Batch
from gracekit.testing.ports import EPOCH_S, Died
from gracekit.tracker.task import Order, TaskState, Verb
from tests.played import PlayedEngine, PlayedProcess

if TYPE_CHECKING:
    from tests.simulation.story import Story

NAME = "operator"
ANSWER_S = 10.0
"""It waits so long for the answer of a run at most."""
LATE_S = 20.0
"""It waits so long for the deadline of a parked task at most."""


class Operator:
    """Orders something of some task now and then, until the quiet phase."""

    def __init__(self, story: Story, rng: random.Random) -> None:
        self._story = story
        self._rng = rng
        self.name = NAME
        # What the ledger asks of whoever commits.
        self.runtime = SimpleNamespace(run_id=NAME, state=ServiceState.STOPPED)
        self.closed = True
        self.process = PlayedProcess(set(), 2)

    async def work(self, *, orders: int, within_s: float) -> None:
        """Give so many orders about open tasks, and about some that have failed."""
        for _ in range(orders):
            await asyncio.sleep(self._rng.expovariate(orders / within_s))
            if not self._story.ledger.is_ready:
                continue
            verb = self._rng.choice(list(Verb))
            # What has failed may be retried too; the other verbs are for what has not ended.
            failed = "state IN ('failed', 'errored')" if verb is Verb.RETRY else "0"
            rows = self._rows(f"finished_at IS NULL OR {failed}", order="id")
            if rows:
                await self._order(self._rng.choice(rows), verb)

    async def work_on_parked(self, *, orders: int, within_s: float) -> None:
        """Give so many orders about parked tasks, some of them as their deadline passes."""
        for _ in range(orders):
            await asyncio.sleep(self._rng.expovariate(orders / within_s))
            if not self._story.ledger.is_ready:
                continue
            if is_late := self._rng.random() < 0.6:
                await self._wait_deadline()
            if rows := self._rows("state = 'pending'", order="pending_deadline, id"):
                verb = self._rng.choice([*Verb, Verb.RETRY, Verb.RETRY, Verb.RETRY])
                await self._order(rows[0] if is_late else self._rng.choice(rows), verb)

    def _rows(self, where: str, *, order: str) -> list[dict[str, Any]]:
        return self._story.machine.rows(
            f"SELECT request_id, recipient, owner FROM task WHERE ({where}) "
            f"AND on_interrupt <> 'requeue' ORDER BY {order}"
        )

    async def _wait_deadline(self) -> None:
        """Until about the next deadline of a parked task, or a little later."""
        sql = "SELECT min(pending_deadline) AS due FROM task WHERE state = 'pending'"
        due = self._story.machine.rows(sql)[0]["due"]
        if due is not None:
            clock = self._story.machine.clock
            left = due - EPOCH_S - clock.loop() - clock.shift_s
            after = self._rng.choice([0.0, 0.01, 0.05, 0.3])
            await asyncio.sleep(min(max(0.0, left), LATE_S) + after)

    async def _order(self, row: dict[str, Any], verb: Verb) -> None:
        story = self._story
        life = story.ledger.runs.get(row["owner"] or "")
        key = f"{row['request_id']}/{row['recipient']}"
        answer: Any
        try:
            out = story.ledger.fenced | story.ledger.declared
            may_act = life is not None and life.process.lives and life.runtime.run_id not in out
            if may_act and (wired := life.runtime.wired):
                story.truth.orders.setdefault(row["request_id"], set()).add(verb)
                asked = {"task_id": row["request_id"], "recipient": row["recipient"], "by": NAME}
                async with asyncio.timeout(ANSWER_S):
                    answer = await wired.control.carry_out(
                        verb.value, life.runtime.run_id, asked | {"reason": "simulated"}
                    )
                if answer.get("asked"):
                    story.truth.taken[key] = verb
                    story.ends["operator: order taken"] += 1
            else:
                answer = await self._change(row, verb, life)
        except (GracekitError, TimeoutError, Died) as error:
            answer = f"{type(error).__name__}: {error}"
        story.tell(f"operator: {verb.value} {key}: {answer}")

    async def _change(self, row: dict[str, Any], verb: Verb, owner: Any) -> str:
        """By compare-and-set on the store, as the command line does without a living owner."""
        story = self._story
        engine = story.machine.engine_for(self)
        await engine.start()
        try:
            case = await target_named(engine, row["request_id"], row["recipient"])
            if case is None or refusal_of(case, verb) is not None:
                return "refused"
            if case.owner != row["owner"]:
                return "it has moved"
            if case.state is TaskState.PENDING:
                return await self._change_parked(engine, case, verb)
            story.truth.orders.setdefault(row["request_id"], set()).add(verb)
            order = Order(verb=verb, by=NAME, reason="simulated")
            outcome = None if verb is Verb.RETRY else ordered(str(case), order, case.state)
            now = story.machine.clock.wall()
            mark = incident_of(order, case.request_id, case.method, "", at=now, run=NAME)
            batch = Batch(Point.SETTLE)
            if owner is not None and case.acted and case.owner is not None:
                leases = RunLeases(engine, story.machine.clock, run_id=NAME)
                leases.add_take_away_one(batch, case.owner, case.request_id, settle_s=case.settle_s)
            news = News.of(story.machine.clock, sender=None)
            add_order(batch, case, outcome, mark, news, dead=owner is not None)
            await engine.commit(batch)
        finally:
            await engine.stop()
        return "done"

    async def _change_parked(self, engine: PlayedEngine, case: OrderTarget, verb: Verb) -> str:
        story, clock = self._story, self._story.machine.clock
        story.capacity.asked[case.request_id].add(verb)
        order = Order(verb=verb, by=NAME, reason="simulated")
        outcome = None if verb is Verb.RETRY else ordered(str(case), order, case.state)
        news = News.of(clock, sender=None)
        mark = incident_of(order, case.request_id, case.method, "", at=news.at, run=NAME)
        batch = Batch(Point.SETTLE)
        add_parked_order(batch, case, outcome, mark, news)
        await engine.commit(batch)
        story.ends[f"operator: {verb.value} of a parked task"] += 1
        return "done, to a parked task"
