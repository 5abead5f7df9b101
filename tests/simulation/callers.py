"""The callers: what they send, twice at times, until it is confirmed, and what they are told."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from gracekit import Context, RpcClient
from gracekit.errors import (
    CallTimeoutError,
    Draining,
    GracekitError,
    LeaseHeld,
    NoAnswerError,
    StoreError,
    Undeliverable,
)
from gracekit.rpc.client import ClientView
from gracekit.rpc.methods import Method
from tests.simulation.app import SETTLE_S, STYLES
from tests.simulation.truth import AROUND, Plan, violate

if TYPE_CHECKING:
    from tests.simulation.story import Story

CALLERS: Final = 2
REQUESTS: Final = 40
BUSY_S: Final = 50.0
ANSWERED_S: Final = 20.0
"""Within which the caller of a parked task is answered, where nothing goes wrong."""


@dataclass(kw_only=True)
class Sent:
    """One request as its client knows it.

    Attributes:
        confirmed: A publish of it has returned.
        is_call: Somebody waits for its answer.
    """

    plan: Plan
    method: Method[Any, Any]
    args: dict[str, Any]
    options: dict[str, Any]
    is_call: bool
    is_fanout: bool = False
    confirmed: bool = False
    answers: list[Any] = field(default_factory=list)


class Callers:
    """Processes that send requests and do not crash."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._clients: list[RpcClient] = []
        self._asked: set[tuple[str, int]] = set()

    async def connect(self) -> RpcClient:
        """A client, as soon as the broker can be reached."""
        while True:
            try:
                return await self._story.machine.client(self._story.app.svc)
            except GracekitError:
                await asyncio.sleep(1.0)

    async def send_all(self, number: int) -> None:
        rng = random.Random(f"{self._story.seed} client {number}")
        client = await self.connect()
        self._clients.append(client)
        sends = []
        for n in range(REQUESTS // CALLERS):
            await asyncio.sleep(rng.expovariate(REQUESTS / CALLERS / BUSY_S))
            one = self._draw(f"c{number}-{n}", n, rng)
            self._story.sent[one.plan.request_id] = one
            sends.append(self._story.spawn(self._send(client, one, rng.random())))
            if rng.random() < 0.12:
                again = self._story.sent[rng.choice(list(self._story.sent))]
                sends.append(self._story.spawn(self._send(client, again, rng.random())))
        await asyncio.wait(sends)
        for send in sends:
            send.result()

    def _draw(self, request_id: str, n: int, rng: random.Random) -> Sent:
        """A request of some kind."""
        options: dict[str, Any] = {"request_id": request_id, "timeout": rng.choice([20, 60])}
        args: dict[str, Any] = {"n": n}
        kind = rng.random()
        fanout = False
        if kind < 0.08:
            method, policy = rng.choice(self._story.app.ops), "ops"
        elif kind < 0.14:
            method, policy = rng.choice(self._story.app.holds), "retry"
        else:
            key = rng.choice(list(self._story.app.methods))
            method, policy = self._story.app.methods[key], key[0]
            if key[1]:
                args["vm"] = rng.choice(["v1", "v2", "v3"])
            where = rng.random()
            if where < 0.15:
                options["host"] = rng.choice(self._story.hosts)
            elif where < 0.25:
                options["ops"] = True
            elif where < 0.3:
                fanout = True
        method, policy = self._or_drop(method, policy, args, request_id)
        if self._story.capacity.is_on:
            knows = random.Random(f"{self._story.seed} {request_id} knows")
            options["pending"] = knows.random() < 0.5
        shape = random.Random(f"{self._story.seed} {request_id} shape")
        plan = Plan(
            request_id=request_id,
            policy=policy,
            items=rng.choice([1, 1, 2, 4]),
            item_s=rng.choice([0.01, 0.5, 2.0, 6.0]),
            raises=rng.random() < 0.1,
            stubborn_s=rng.choice([0, 0, 1.0, 30.0]),
            settle_s=SETTLE_S,
            seed=self._story.seed,
            around=shape.choice(["nothing", *AROUND]),
            cut_rate=shape.choice([0.0, 0.0, 0.0, 0.3]),
            kills=self._story.wants_killer(policy, method.name, n),
            fails=shape.choice([0] * 8 + [1, 2, 9]) if method.options.retry_on else 0,
        )
        plan = self._with_need(plan)
        self._story.truth.plans[request_id] = plan
        is_call = not fanout and rng.random() < 0.5
        user = self._story.inquirers.user_of(request_id)
        if self._story.inquirers.is_on and user is not None:
            options["context"] = {"user_id": user}
        if not (is_call or fanout) and shape.random() < 0.2:
            options["delay"] = shape.choice([5, 40, 120])
        return Sent(
            plan=plan, method=method, args=args, options=options, is_call=is_call, is_fanout=fanout
        )

    def _or_drop(
        self, method: Method[Any, Any], policy: str, args: dict[str, Any], request_id: str
    ) -> tuple[Method[Any, Any], str]:
        """The method that was drawn, or at times the one that deletes its resource."""
        rng = random.Random(f"{self._story.seed} {request_id} drop")
        if self._story.capacity.is_on and "vm" in args and rng.random() < 0.12:
            return self._story.app.drop, "retry"
        return method, policy

    def _with_need(self, plan: Plan) -> Plan:
        """With the room that it needs: asked for first, or where an error is no lost work, later.

        A group or a gather around the items would make something else of what they raise.
        """
        rng = random.Random(f"{self._story.seed} {plan.request_id} needs when")
        may_wait = plan.policy in {"retry", "probe"} and plan.items > 1
        needs = self._story.capacity.needs(plan.request_id)
        around = "nothing" if needs else plan.around
        return replace(
            plan, needs=needs, needs_at=int(may_wait and rng.random() < 0.3), around=around
        )

    # -- what waits for room --------------------------------------------------------------

    async def take_along(self, ctx: Context, vm: str) -> None:
        """A handler that deletes a resource cancels what waits for room for it."""
        story = self._story
        story.capacity.dropped.add(vm)
        moves = story.parked.moves.copy()
        before = self._pending("resource_id = ?", vm)
        story.ends["cancel_pending"] += await ctx.cancel_pending("vm", vm, reason="deleted")
        left = [row["request_id"] for row in before if row in self._pending("1")]
        if left := [one for one in left if story.parked.moves[one] == moves[one]]:
            story.judged(violate, f"Q5: cancel_pending of {vm} has returned, and {left} wait")

    def _pending(self, where: str, *params: Any) -> list[dict[str, Any]]:
        sql = f"SELECT request_id, parkings FROM task WHERE state = 'pending' AND {where}"
        return self._story.machine.rows(f"{sql} ORDER BY id", *params)

    def ask_again(self) -> None:
        """In the quiet phase, call once more with the id of each task that waits.

        Not while other work is open: a service that is full lets requests wait in their queue.
        """
        sql = "SELECT 1 FROM task WHERE state IN ('accepted', 'running', 'handed_over')"
        is_idle = not self._story.machine.rows(f"{sql} LIMIT 1")
        for row in self._pending("1") if is_idle else ():
            if (what := (row["request_id"], row["parkings"])) not in self._asked:
                self._asked.add(what)
                self._story.spawn(self._ask(*what))

    async def _ask(self, request_id: str, version: int) -> None:
        story, one = self._story, self._story.sent[request_id]
        knows = random.Random(f"{story.seed} {request_id} {version} again").random() < 0.5
        who = one.options.get("context", {})
        one = replace(one, options={"pending": knows})
        view = self._clients[0].prepare(
            request_id=request_id, pending=knows, timeout=ANSWERED_S, context=who
        )
        moves, serving = story.parked.moves[request_id], story.serving()
        try:
            await view.call(one.method, **one.args)
        except CallTimeoutError:
            if story.parked.moves[request_id] == moves and serving & story.serving():
                story.judged(violate, f"Q6: {request_id} is PENDING, and its caller hears nothing")
        except Exception as error:  # noqa: BLE001 - an answer too
            story.judged(story.parked.check_answer, one, error)
        story.ends["asked again"] += 1

    # -- the last drains ------------------------------------------------------------------

    async def busy_the_ops_lane(self, host: str) -> None:
        """Send an ops request of 3 s, and behind it in its lane work of 8 s that holds a drain.

        If only one may run, the work begins while a drain waits for an idle ops lane, and that wait
        is over (5 s) before the work is.
        """
        look, work = self._story.app.ops[0], self._story.app.methods["retry", False, STYLES[0]]
        for method, policy, items, item_s in ((look, "ops", 1, 3.0), (work, "retry", 2, 4.0)):
            plan = Plan(
                request_id=f"last-{policy}-{len(self._story.sent)}",
                policy=policy,
                items=items,
                item_s=item_s,
                raises=False,
                stubborn_s=0,
                settle_s=SETTLE_S,
                seed=self._story.seed,
            )
            one = Sent(
                plan=plan,
                method=method,
                args={"n": 0},
                options={"request_id": plan.request_id, "host": host, "ops": True},
                is_call=False,
            )
            self._story.truth.plans[plan.request_id] = plan
            self._story.sent[plan.request_id] = one
            self._story.spawn(self._send(self._clients[0], one, 0.0))
            await asyncio.sleep(0.5)

    # -- on the wire ----------------------------------------------------------------------

    async def _send(self, client: RpcClient, one: Sent, after: float) -> None:
        """Send until a publish is confirmed; for a call, hold the answer against the truth."""
        await asyncio.sleep(after)
        if "vm" in one.args:
            self._story.records.note_sent(one.args["vm"], one.plan.request_id)
        if "delay" in one.options:
            due = asyncio.get_running_loop().time() + one.options["delay"]
            self._story.truth.not_before.setdefault(one.plan.request_id, due)
        view = client.prepare(**one.options)
        for _ in range(40):
            try:
                await self._send_once(view, one)
            except (StoreError, Undeliverable, NoAnswerError) as error:
                self._story.tell(f"client: {one.plan.request_id} {type(error).__name__}")
                await asyncio.sleep(2.0)
            else:
                return

    async def _send_once(self, view: ClientView, one: Sent) -> None:
        if one.is_fanout:
            await view.fanout(one.method, **one.args)
            return
        if not one.is_call:
            await view.cast(one.method, **one.args)
            one.confirmed = True
            return
        try:
            result = await view.call(one.method, **one.args)
        except (StoreError, Undeliverable):
            raise
        except Exception as error:  # noqa: BLE001 - an answer too
            self._story.tell(
                f"client: {one.plan.request_id} answered {type(error).__name__}: {error}"
            )
            if not isinstance(error, CallTimeoutError | Draining | LeaseHeld):
                one.confirmed = True
            one.answers.append(error)
            self._story.judged(self._story.parked.check_answer, one, error)
        else:
            self._story.tell(f"client: {one.plan.request_id} answered {result!r}")
            one.confirmed = True
            one.answers.append(result)
            if result != one.plan.value():
                self._story.judged(violate, f"P10: {one.plan.request_id} was answered {result!r}")
