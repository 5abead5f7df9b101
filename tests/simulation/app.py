"""The service under simulation: methods of every policy, style and lane."""

from __future__ import annotations

import itertools
from typing import Any

from gracekit import Context, Service
from gracekit.rpc.methods import Method
from tests.simulation.records import Records, declare_kinds
from tests.simulation.threads import sleep, spawn
from tests.simulation.truth import BACKOFF_S, RETRIES, Flaky, Truth

SETTLE_S = 3.0
POLICIES = ("error", "retry", "probe", "requeue")
STYLES = ("plain", "steps", "thread", "thread_steps", "spawned", "spawned_steps")
CANCELLED_BY = dict(
    zip(STYLES, ("sender", "anyone", "nobody", "sender", "anyone", "sender"), strict=True)
)


class App:
    """The service, and the world that its handlers act on.

    Attributes:
        truth: The present seed's; handlers look it up at each start.
        records: As `truth`.
        last_trace: Of the seed that was played last, also where it failed.
        methods: By (policy, on a resource, style).
        drop: Deletes a resource, and cancels the parked tasks that name it.
    """

    def __init__(self) -> None:
        self.truth = Truth()
        self.records: Records
        self.last_trace: list[str] = []
        self.svc = Service("compute", task_api=True)
        self.methods: dict[tuple[str, bool, str], Method[Any, Any]] = {}
        for policy, on_vm, style in itertools.product(POLICIES, (False, True), STYLES):
            if policy != "requeue" or not on_vm:
                self._declare(policy, on_vm=on_vm, style=style)
        self._declare_ops()
        self._declare_holds()
        self._declare_jobs()
        self._declare_drop()
        declare_kinds(self, self.svc)

    def _declare(self, policy: str, *, on_vm: bool, style: str) -> None:
        handler = self._handler(on_vm=on_vm, style=style)
        handler.__name__ = f"{policy}{'_vm' * on_vm}_{style}"
        options: dict[str, Any] = {
            "on_interrupt": policy,
            "settle": SETTLE_S,
            "max_wait": "10m",
            "timeout": 60,
            "allow_cancel": CANCELLED_BY[style],
        }
        if on_vm:
            options["resource"] = "vm"
        if policy != "requeue":
            options |= {"retry_on": Flaky, "retries": RETRIES, "backoff": BACKOFF_S}
        if policy == "retry":
            options["anywhere"] = True
        method = self.svc.rpc(**options)(handler)
        self.methods[policy, on_vm, style] = method
        if policy == "probe":
            self._add_probe(method)

        @method.errored
        async def errored(ctx: Context, reason: str, **args: Any) -> None:
            await self.truth.call_errored(ctx)

    def _add_probe(self, method: Method[Any, Any]) -> None:
        @method.probe
        async def probe(ctx: Context, **args: Any) -> Any:
            return self.truth.answer(ctx)

    def _handler(self, *, on_vm: bool, style: str) -> Any:
        steps = "steps" in style

        async def on_one(ctx: Context, n: int, vm: str) -> str:
            result = await self.truth.work(ctx, vm, steps=steps)
            self.records.note_built(vm, ctx.fence)
            return result

        async def alone(ctx: Context, n: int) -> str:
            return await self.truth.work(ctx, None, steps=steps)

        def on_one_in_thread(ctx: Context, n: int, vm: str) -> str:
            result = self.truth.work_in_thread(ctx, vm, sleep, steps=steps)
            self.records.note_built(vm, ctx.fence)
            return result

        def alone_in_thread(ctx: Context, n: int) -> str:
            return self.truth.work_in_thread(ctx, None, sleep, steps=steps)

        async def on_one_spawned(ctx: Context, n: int, vm: str) -> str:
            ctx.track_call(spawn, on_one_in_thread, ctx, n, vm)
            return self.truth.plans[ctx.request_id].value()

        async def alone_spawned(ctx: Context, n: int) -> str:
            ctx.track_call(spawn, alone_in_thread, ctx, n)
            return self.truth.plans[ctx.request_id].value()

        if "spawned" in style:
            return on_one_spawned if on_vm else alone_spawned
        if "thread" in style:
            return on_one_in_thread if on_vm else alone_in_thread
        return on_one if on_vm else alone

    def _declare_ops(self) -> None:
        @self.svc.ops
        async def look(ctx: Context, n: int) -> str:
            return await self.truth.work(ctx, None, steps=False)

        @self.svc.ops(on_interrupt="retry", in_drain="refuse")
        async def count(ctx: Context, n: int) -> str:
            return await self.truth.work(ctx, None, steps=False)

        self.ops = (look, count)

    def _declare_holds(self) -> None:
        @self.svc.rpc(on_interrupt="retry", settle=SETTLE_S)
        async def open_hold(ctx: Context, n: int) -> str:
            await ctx.hold("operation", str(n % 3), at_most=20)
            return await self.truth.work(ctx, None, steps=False)

        @self.svc.rpc(on_interrupt="retry", settle=SETTLE_S)
        async def end_hold(ctx: Context, n: int) -> str:
            await ctx.end_hold("operation", str(n % 3))
            return await self.truth.work(ctx, None, steps=False)

        self.holds = (open_hold, end_hold)

    def _declare_drop(self) -> None:
        @self.svc.rpc(resource="vm", on_interrupt="retry", settle=SETTLE_S, max_wait="10m")
        async def drop(ctx: Context, n: int, vm: str) -> str:
            if self.truth.take_along is not None:
                await self.truth.take_along(ctx, vm)
            return await self.truth.work(ctx, vm, steps=False)

        self.drop = drop

    def _declare_jobs(self) -> None:
        @self.svc.periodic(every=17, singleton=True)
        async def sweep(ctx: Context) -> None:
            await self.truth.job(ctx)
