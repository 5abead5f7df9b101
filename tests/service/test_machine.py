"""Any order of requests, duplicates, drains, crashes and hesitant commits, against what holds.

Each program is a history of one service in virtual time; hypothesis shrinks what breaks a claim.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import looptime
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gracekit import Context, Done, Fail, Retry, Service, Wait
from gracekit.process import Point
from gracekit.rpc.methods import Method
from tests.scale import scale
from tests.service.kit import Fault, Life, World

T = TypeVar("T")

POLICIES = ("error", "retry", "probe", "requeue")
ITEMS = 3
VMS = st.sampled_from(["v1", "v2"])
ANSWERS = st.sampled_from([Done("asked"), Retry(), Fail("no"), Wait(7)])
COMMITS = st.sampled_from(
    [
        Point.ACCEPT,
        Point.ACCEPT_AND_BEGIN,
        Point.BEGIN,
        Point.FINISH,
        Point.HAND_OVER,
        Point.NOT_STARTED,
        Point.CLAIM,
        Point.SETTLE,
        Point.TAKE_LEASE,
    ]
)
FAULTS = st.sampled_from([Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])


class Truth:
    """What the outside world saw of the handlers."""

    def __init__(self) -> None:
        self.items: Counter[tuple[str, int]] = Counter()
        self.running: Counter[str] = Counter()
        self.acting: Counter[str] = Counter()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.answer: Any = Retry()
        self.is_free = False
        self._steps: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))

    def let_pass(self, request_id: str) -> None:
        self._steps[request_id].release()

    def free_all(self) -> None:
        self.is_free = True
        for step in self._steps.values():
            for _ in range(100):
                step.release()

    async def act(self, ctx: Context, vm: str | None, *, stops: bool) -> int:
        """A handler: some items, each held up until it is let pass."""
        self.running[ctx.request_id] += 1
        if vm is not None:
            self.acting[vm] += 1
            assert ctx.fence is not None
            self.tokens[vm].append(ctx.fence)
        assert self.running[ctx.request_id] == 1, "two handlers of one request at a time"
        assert vm is None or self.acting[vm] == 1, "two handlers of one resource at a time"
        try:
            if stops:
                async for item in ctx.steps(range(ITEMS)):
                    await self._one(ctx.request_id, item)
            else:
                await self._one(ctx.request_id, 0)
        finally:
            self.running[ctx.request_id] -= 1
            if vm is not None:
                self.acting[vm] -= 1
        return ctx.attempt

    async def _one(self, request_id: str, item: int) -> None:
        self.items[request_id, item] += 1
        if not self.is_free:
            await self._steps[request_id].acquire()


def service(truth: Truth) -> tuple[Service, dict[tuple[str, bool, bool], Method[Any, Any]]]:
    """Methods of every policy, with and without a resource, with and without safe points."""
    svc = Service("compute")
    methods: dict[tuple[str, bool, bool], Method[Any, Any]] = {}

    def declare(policy: str, *, has_vm: bool, stops: bool) -> None:
        async def on_vm(ctx: Context, n: int, vm: str) -> int:
            return await truth.act(ctx, vm, stops=stops)

        async def alone(ctx: Context, n: int) -> int:
            return await truth.act(ctx, None, stops=stops)

        handler: Callable[..., Awaitable[int]] = on_vm if has_vm else alone
        handler.__name__ = f"{policy}{'_vm' * has_vm}{'_steps' * stops}"
        options: dict[str, Any] = {"on_interrupt": policy, "settle": 3, "max_wait": "10m"}
        method = svc.rpc(**options, **({"resource": "vm"} if has_vm else {}))(handler)
        methods[policy, has_vm, stops] = method

        @method.probe
        async def probe(ctx: Context, **args: Any) -> Any:
            return truth.answer

    for policy, has_vm, stops in itertools.product(POLICIES, (False, True), (False, True)):
        if policy != "requeue" or not has_vm:
            declare(policy, has_vm=has_vm, stops=stops)
    return svc, methods


class ServiceMachine(RuleBasedStateMachine):
    """One service on one machine, and everything that may befall it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = looptime.new_event_loop(noop_cycles=8)
        self.truth = Truth()
        self.svc, self.methods = service(self.truth)
        self.sent: list[tuple[str, Method[Any, Any], dict[str, Any]]] = []
        self.calls: list[asyncio.Task[Any]] = []
        self.most_lver: Counter[tuple[str, str]] = Counter()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(step)

    @initialize()
    def begin(self) -> None:
        self.run(self._begin())

    async def _begin(self) -> None:
        self.world = World()
        self.world.expects_faults = True
        self.client = await self.world.client(self.svc)
        self.life: Life = await self._start()

    async def _start(self) -> Life:
        return await self.world.start(self.svc, max_running=4, max_accepted=8, look_every_s=60.0)

    # -- what callers do ----------------------------------------------------------------

    @rule(
        policy=st.sampled_from(POLICIES),
        vm=st.none() | VMS,
        stops=st.booleans(),
        calls=st.booleans(),
    )
    def send(self, policy: str, vm: str | None, *, stops: bool, calls: bool) -> None:
        has_vm = vm is not None and policy != "requeue"
        args: dict[str, Any] = {"n": len(self.sent)} | ({"vm": vm} if has_vm else {})
        one = (f"r{len(self.sent)}", self.methods[policy, has_vm, stops], args)
        self.sent.append(one)
        self.run(self._send(*one, calls=calls))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000), calls=st.booleans())
    def duplicate(self, which: int, *, calls: bool) -> None:
        self.run(self._send(*self.sent[which % len(self.sent)], calls=calls))

    async def _send(
        self, request_id: str, method: Method[Any, Any], args: dict[str, Any], *, calls: bool
    ) -> None:
        view = self.client.prepare(request_id=request_id, timeout=3000)
        if calls:
            call = asyncio.create_task(view.call(method, **args))
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            self.calls.append(call)
        else:
            await view.cast(method, **args)
        await self.world.settle()

    # -- what time and operators do -------------------------------------------------------

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000))
    def progress(self, which: int) -> None:
        self.truth.let_pass(self.sent[which % len(self.sent)][0])
        self.run(self.world.settle())

    @rule(seconds=st.sampled_from([0.3, 2.0, 11.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(answer=ANSWERS)
    def change_the_truth(self, answer: Any) -> None:
        self.truth.answer = answer

    @rule(point=COMMITS, fault=FAULTS)
    def hesitate(self, point: Point, fault: Fault) -> None:
        self.life.plan(point, fault)

    @rule()
    def drain_and_restart(self) -> None:
        async def restart() -> None:
            report = await self.life.drain()
            # Three lost commits of one hand-over are final: the next start finds the row.
            assert report.exit_code in {0, 75} or "could not be recorded" in str(report.failure)
            self.life = await self._start()

        self.run(restart())

    @rule()
    def crash_and_restart(self) -> None:
        async def restart() -> None:
            await self.life.crash()
            self.life = await self._start()

        self.run(restart())

    @rule(
        point=st.sampled_from([Point.CLAIM, Point.SETTLE, Point.BEGIN, Point.FINISH, Point.ACK]),
        phase=st.sampled_from(["before", "after"]),
    )
    def crash_soon(self, point: Point, phase: Any) -> None:
        """At the next such step; by the end of a minute at the latest."""

        async def restart() -> None:
            self.life.crash_at(point, phase)
            try:
                async with asyncio.timeout(60):
                    await self.life.over.wait()
            except TimeoutError:
                await self.life.crash()
            self.life = await self._start()

        self.run(restart())

    # -- what holds -------------------------------------------------------------------------

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check_accounts()

    @invariant()
    def error_never_does_anything_twice(self) -> None:
        policies = {request_id: method.options for request_id, method, _ in self.sent}
        for (request_id, item), times in self.truth.items.items():
            if policies[request_id].on_interrupt == "error":
                assert times == 1, f"{request_id} did item {item} {times} times"

    @invariant()
    def tokens_only_rise(self) -> None:
        for vm, tokens in self.truth.tokens.items():
            assert tokens == sorted(set(tokens)), f"{vm}: {tokens}"
        if hasattr(self, "world"):
            for row in self.world.rows("SELECT kind, id, lver FROM lease"):
                key = row["kind"], row["id"]
                assert row["lver"] >= self.most_lver[key]
                self.most_lver[key] = row["lver"]

    @invariant()
    def nothing_belongs_to_the_dead(self) -> None:
        if hasattr(self, "life"):
            rows = self.world.rows(
                "SELECT request_id, state FROM task WHERE owner IS NOT NULL AND owner <> ? "
                "AND finished_at IS NULL",
                self.life.runtime.run_id,
            )
            assert rows == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "life"):
                self.run(self._quiet_phase())
        finally:
            self.run(self._close())
            self.loop.close()

    async def _quiet_phase(self) -> None:
        """Faults over, everybody lets everything pass: then all comes to its end."""
        self.life.faults.forget()
        self.truth.answer = Retry()
        self.truth.free_all()
        await asyncio.sleep(1800)
        left = {one: state for one, state in self.world.states().items() if state in OPEN}
        assert left == {}
        assert self.world.broker.waiting("compute") == 0
        assert self.world.rows("SELECT * FROM lease WHERE owner IS NOT NULL") == []
        assert self.world.rows("SELECT * FROM reply") == []
        assert len(self.life.runtime.wired.tracker) == 0
        assert all(call.done() for call in self.calls)
        report = await self.life.drain()
        assert report.exit_code == 0
        assert report.waited_s < 1
        self._check_ends()

    def _check_ends(self) -> None:
        for request_id, method, _ in self.sent:
            if method.options.on_interrupt == "requeue":
                assert self.truth.items[request_id, 0] >= 1
            else:
                assert self.world.state(request_id), f"{request_id} is not on record"

    async def _close(self) -> None:
        if hasattr(self, "world"):
            await self.world.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


OPEN = {"accepted", "running", "handed_over", "pending"}


@pytest.mark.timeout(scale(300, 36000))
def test_any_history_keeps_every_promise():
    """Accounts, single starts, tokens, owners at every step; and in the end nothing is left."""
    run_state_machine_as_test(
        ServiceMachine,
        settings=settings(
            max_examples=scale(40, 300),
            stateful_step_count=scale(20, 50),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )
