"""The world outside the service: what its handlers did to it, and what must never be seen there."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from gracekit import Context, Done, Fail, Retry, Wait
from gracekit.testing.loop import owner
from gracekit.tracker.task import OUT_OF_TIME, CancelCause, Lane, Verb
from tests.played import Life

Items = Callable[[], Coroutine[Any, Any, None]]


async def _in_task_group(items: Items) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(items())


async def _in_anyio_group(items: Items) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(items)


async def _in_gather(items: Items) -> None:
    await asyncio.gather(items(), return_exceptions=True)


async def _in_shield(items: Items) -> None:
    inner = asyncio.ensure_future(items())
    try:
        await asyncio.shield(inner)
    except asyncio.CancelledError:
        inner.cancel()
        await asyncio.wait({inner})
        raise


AROUND: Mapping[str, Callable[[Items], Coroutine[Any, Any, None]]] = {
    "nothing": lambda items: items(),
    "task group": _in_task_group,
    "anyio group": _in_anyio_group,
    "gather": _in_gather,
    "shield": _in_shield,
}


class Violation(AssertionError):  # noqa: N818 - what it is
    """A promise was broken."""


class Flaky(Exception):  # noqa: N818 - what the backend is
    """What methods try again."""


RETRIES = 3
BACKOFF_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one request is to do, wherever and however often it is started.

    Attributes:
        items: Effects, in order.
        item_s: Seconds for each.
        raises: It fails after its last item.
        stubborn_s: It ignores a cancellation for so long.
        settle_s: How long an effect may still be on its way after its process has died.
        around: What its coroutine has around its items: something of `AROUND`.
        cut_rate: How likely a start is that somebody else than gracekit cancels.
        kills: It kills its process at its first item, each time.
        fails: So many of its attempts fail before they have done anything.
        needs: So much room it needs, and says so before it does anything.
        needs_at: Before which item it asks for room; before 0 it has done nothing yet.
    """

    request_id: str
    policy: str
    items: int
    item_s: float
    raises: bool
    stubborn_s: float
    settle_s: float
    seed: int
    around: str = "nothing"
    cut_rate: float = 0.0
    kills: bool = False
    fails: int = 0
    needs: int = 0
    needs_at: int = 0

    def value(self) -> str:
        """What it returns."""
        return f"done {self.request_id}"


@dataclass(eq=False)
class Act:
    """One start of a handler that has not returned.

    Attributes:
        key: Request id, and for a fanout copy its instance: each copy is a task of its own.
        effect: The effect that is on its way.
        is_foreign: Whether somebody else than gracekit has cancelled this start.
        only_asks: It changes nothing: whoever asked may give it up before it has ended.
    """

    request_id: str
    key: str
    life: Life
    vm: str | None
    fence: int | None
    ctx: Context | None = None
    effect: asyncio.TimerHandle | None = None
    is_foreign: bool = False
    only_asks: bool = False


@dataclass
class Truth:
    """What happened, by request and by resource.

    Attributes:
        fail: Told of each broken promise.
        jumps: Whether the wall clock may be set, which shortens settle times.
        foreign: Keys of starts that somebody else than gracekit cancelled, or that were cancelled
            as their process could not show that it lives.
        late: Starts that ended that way, with an effect that may still be on its way.
        taken: The order that a run has taken, by key.
        is_fenced: Whether a process was declared gone while it lived. What its handlers do until
            they are cancelled breaks no promise; a resource refuses their old tokens.
        refused: Effects that a resource has refused for their token.
        is_declared: Whether others have declared it dead, as its beats had stopped.
        hooks: Errored hooks at work, with their process.
        failed: How many attempts have failed that are tried again, by key.
        not_before: Loop time before which a delayed request must not begin.
    """

    plans: dict[str, Plan] = field(default_factory=dict)
    acts: list[Act] = field(default_factory=list)
    landed: Counter[tuple[str, int]] = field(default_factory=Counter)
    starts: Counter[str] = field(default_factory=Counter)
    fences: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    on_start: Callable[[Life, Context, str | None], None] = lambda *_: None
    on_cancel: Callable[[Life, Context], None] = lambda *_: None
    tell: Callable[[str], None] = lambda _: None
    judged: Callable[..., None] = lambda *_: None
    orders: dict[str, set[Verb]] = field(default_factory=dict)
    probes: Counter[str] = field(default_factory=Counter)
    errored: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    jumps: bool = False
    is_quiet: bool = False
    take_room: Callable[[str, int], None] = lambda *_: None
    take_along: Callable[[Context, str], Coroutine[Any, Any, None]] | None = None
    on_hook: Callable[[Context, Life], None] = lambda *_: None
    on_effect: Callable[[Act], None] = lambda _: None
    hook_s: tuple[float, ...] = (0.0,)
    built: dict[str, Life] = field(default_factory=dict)
    has_left: Callable[[Life], bool] = lambda _: False
    foreign: set[str] = field(default_factory=set)
    late: list[Act] = field(default_factory=list)
    taken: dict[str, Verb] = field(default_factory=dict)
    is_fenced: Callable[[Life], bool] = lambda _: False
    refused: int = 0
    is_declared: Callable[[Life], bool] = lambda _: False
    hooks: list[tuple[str, Life]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    not_before: dict[str, float] = field(default_factory=dict)

    # -- one start ----------------------------------------------------------------------

    def begin(self, ctx: Context, vm: str | None) -> Act:
        """A handler starts."""
        life = owner.get()
        assert isinstance(life, Life)
        act = Act(ctx.request_id, key_of(ctx), life, vm, ctx.fence, ctx)
        self.starts[act.key] += 1
        self.tell(f"{life.name} begins {ctx.request_id} attempt {ctx.attempt} fence {ctx.fence}")
        if life.process.lives and not self.is_fenced(life):
            self.judged(self.on_start, life, ctx, vm)
            self.judged(self._check_begin, ctx, act, vm)
        self.acts.append(act)
        return act

    def _check_begin(self, ctx: Context, act: Act, vm: str | None) -> None:
        if self.plans[ctx.request_id].policy in {"retry", "probe"}:
            self._check_settled(ctx)
        if ctx._task.journaled or vm is not None:
            self.check_may_begin(act.life, ctx.request_id)
        for other in self.acting():
            if other.key == act.key and self.plans[ctx.request_id].policy != "requeue":
                raise Violation(f"I8: {ctx.request_id} runs twice at a time")
            if vm is not None and other.vm == vm:
                raise Violation(f"I7: {ctx.request_id} and {other.request_id} act on {vm} at once")
        verb = self.order_taken(act.key)
        if verb is not None:
            raise Violation(f"O1: {ctx.request_id} is begun again after its {verb.value} was taken")
        if self._is_built(act) and not self.was_ordered(ctx.request_id, Verb.RETRY):
            raise Violation(f"Q10: {ctx.request_id} is begun again after it has returned")
        self._check_due(ctx.request_id)
        if vm is not None:
            if ctx.fence is None or ctx.fence <= self.fences[vm]:
                raise Violation(f"I7: {vm} got fence {ctx.fence} after {self.fences[vm]}")
            self.fences[vm] = ctx.fence

    def _check_due(self, request_id: str) -> None:
        left_s = self.not_before.get(request_id, 0.0) - asyncio.get_running_loop().time()
        is_ordered = self.was_ordered(request_id, Verb.RETRY)
        if left_s > 0.01 and not (self.jumps or is_ordered):  # the simulation rounds time
            raise Violation(f"D2: {request_id} is begun {left_s:g} s before it is due")

    def check_may_begin(self, life: Life, request_id: str) -> None:
        """beat: nothing begins in a process that was declared dead."""
        if self.is_declared(life):
            raise Violation(f"beat: {request_id} begins in a run that was declared dead")

    def bound(self, life: Life) -> list[str]:
        """What acts for a row or with a lease in that process."""
        acts = [act for act in self.acts if act.life is life]
        found = [one.request_id for one in acts if one.vm or (one.ctx and one.ctx._task.journaled)]
        return found + [f"hook of {request_id}" for request_id, who in self.hooks if who is life]

    def _is_built(self, act: Act) -> bool:
        """Whether a handler of it has returned in a process that still lives and records that."""
        builder = self.built.get(act.key)
        if builder is None or not builder.process.lives:
            return False
        return not (self.has_left(builder) or self.is_fenced(builder) or self.is_declared(builder))

    def end(self, act: Act) -> None:
        if act in self.acts:
            self.acts.remove(act)
        if act.ctx is not None and act.ctx.lost:
            self.foreign.add(act.key)
        if act.life.process.lives:
            self.tell(f"{act.life.name} ends {act.request_id}")

    def has_started(self, request_id: str) -> bool:
        """Whether a handler of it was ever started, here or as a copy."""
        return any(key.partition("/")[0] == request_id for key in self.starts)

    def acting(self) -> list[Act]:
        """Starts whose handler has not returned, in processes that live and may act."""
        return [act for act in self.acts if act.life.process.lives and not self.is_fenced(act.life)]

    def has_company(self, life: Life) -> bool:
        """Whether something ran in it that leaves no row, and that a suspect must not meet."""
        return any(
            act.ctx is None or not (act.ctx._task.journaled or act.ctx._task.lane is Lane.OPS)
            for act in self.acts
            if act.life is life
        )

    # -- effects ------------------------------------------------------------------------

    def send_effect(self, act: Act, item: int) -> None:
        """An effect sets out; it lands even if the process dies meanwhile."""
        if act.life.process.lives and not self.is_fenced(act.life):
            self.judged(self.on_effect, act)
        plan = self.plans[act.request_id]
        rng = random.Random(f"{plan.seed}:{act.key}:{item}:{self.starts[act.key]}")
        delay = rng.random() * min(plan.item_s, 0.9 * plan.settle_s)
        act.effect = asyncio.get_running_loop().call_later(
            delay, self._land, act, item, context=contextvars.Context()
        )

    def call_off(self, act: Act) -> None:
        """A handler that returns takes back what is on its way; a dead one cannot."""
        if act.effect is not None and act.life.process.lives:
            act.effect.cancel()
            act.effect = None

    def _land(self, act: Act, item: int) -> None:
        act.effect = None
        if act.vm and (act.fence or 0) < self.fences[act.vm] and self.is_fenced(act.life):
            self.tell(f"{act.vm} refuses fence {act.fence} of {act.request_id}")
            self.refused += 1
            return
        self.landed[act.key, item] += 1
        self.tell(f"{act.life.name} did {act.request_id} item {item}")
        self.judged(self._check_landed, act, item)

    def _check_landed(self, act: Act, item: int) -> None:
        if act.vm is not None and (act.fence or 0) < self.fences[act.vm] and not self.jumps:
            raise Violation(
                f"P5: an effect of {act.request_id} on {act.vm} with fence {act.fence} came after "
                f"fence {self.fences[act.vm]} had begun"
            )
        plan = self.plans[act.request_id]
        is_retried = self.was_ordered(act.request_id, Verb.RETRY)
        if plan.policy == "error" and not is_retried and self.landed[act.key, item] > 1:
            raise Violation(f"I3: error task {act.request_id} did item {item} twice")

    def is_done(self, key: str) -> bool:
        """Whether all its effects are there."""
        items = self.plans[key.partition("/")[0]].items
        return all(self.landed[key, n] for n in range(items))

    # -- what handlers and probes do ------------------------------------------------------

    async def work(self, ctx: Context, vm: str | None, *, steps: bool) -> str:
        plan = self.plans[ctx.request_id]
        act = self.begin(ctx, vm)
        foreign = self._cancel_some_time(act, plan)
        try:
            self._fail_some(act, plan)
            await AROUND[plan.around](partial(self._items, act, plan, steps=steps))
            return self._end_of(plan, act, steps=steps)
        except asyncio.CancelledError:
            if (act.is_foreign and ctx._task.order is None) or ctx.lost:
                self.late.append(act)  # its last request is not taken back
            raise
        finally:
            foreign.cancel()
            if act not in self.late:
                self.call_off(act)
            self.end(act)

    def _fail_some(self, act: Act, plan: Plan) -> None:
        if self.failed[act.key] < plan.fails:
            self.failed[act.key] += 1
            raise Flaky(f"the backend of {act.request_id} is slow")

    async def _items(self, act: Act, plan: Plan, *, steps: bool) -> None:
        assert act.ctx is not None
        if steps:
            async for item in act.ctx.steps(range(plan.items)):
                await self._one(act, item, plan)
        else:
            for item in range(plan.items):
                await self._one(act, item, plan)

    def _cancel_some_time(self, act: Act, plan: Plan) -> asyncio.TimerHandle:
        """At times the application cancels the task of a handler, as a library of it may."""
        me = asyncio.current_task()
        assert me is not None
        rng = random.Random(f"{plan.seed}:{act.key}:foreign:{self.starts[act.key]}")

        def cancel() -> None:
            if act.life.process.lives and not self.is_quiet:
                self.tell(f"{act.life.name} cancels {act.request_id} by itself")
                self.foreign.add(act.key)
                act.is_foreign = True
                me.cancel()

        after = rng.random() * plan.items * plan.item_s
        handle = asyncio.get_running_loop().call_later(after, cancel)
        if rng.random() >= plan.cut_rate:
            handle.cancel()
        return handle

    async def _one(self, act: Act, item: int, plan: Plan) -> None:
        if plan.needs and item == plan.needs_at:
            self.take_room(plan.request_id, plan.needs)
        self.send_effect(act, item)
        try:
            if plan.kills:
                await asyncio.sleep(plan.item_s / 2)
                self.tell(f"{act.life.name} is killed by {act.request_id}")
                act.life.end()
                await asyncio.Event().wait()  # what is dead does nothing more
            await asyncio.sleep(plan.item_s)
        except asyncio.CancelledError:
            if act.life.process.lives:
                self.judged(self.on_cancel, act.life, act.ctx)
            if plan.stubborn_s:
                await asyncio.sleep(plan.stubborn_s)
            raise

    def work_in_thread(
        self, ctx: Context, vm: str | None, sleep: Callable[[float], None], *, steps: bool
    ) -> str:
        plan = self.plans[ctx.request_id]
        act = self.begin(ctx, vm)
        try:
            self._fail_some(act, plan)
            items: Any = ctx.steps(range(plan.items)) if steps else range(plan.items)
            for item in items:
                if plan.needs and item == plan.needs_at:
                    self.take_room(plan.request_id, plan.needs)
                self.send_effect(act, item)
                sleep(plan.item_s)
            return self._end_of(plan, act, steps=steps)
        finally:
            self.call_off(act)
            self.end(act)

    def _end_of(self, plan: Plan, act: Act, *, steps: bool) -> str:
        if self._counts(plan, act) and not steps:  # a safe point may have left items out
            self.built[act.key] = act.life
        if plan.raises:
            raise ValueError(f"no {plan.request_id}")
        return plan.value()

    @staticmethod
    def _counts(plan: Plan, act: Act) -> bool:
        """Whether this end must be recorded as the end of the task.

        An error that is raised after a drain cancelled the handler, or its process could not
        show that it lives, is not: it may be what the handler made of its cancellation (decision
        0005).
        """
        assert act.ctx is not None
        cut = act.ctx._task.cancel_cause in {*OUT_OF_TIME, CancelCause.FENCED}
        return plan.policy != "requeue" and not (plan.raises and cut)

    def answer(self, ctx: Context) -> Done | Retry | Fail | Wait:
        """What a probe finds: the truth, or that it cannot tell now."""
        plan = self.plans[ctx.request_id]
        self.judged(self._check_settled, ctx)
        self.probes[key_of(ctx)] += 1
        if self.is_done(key_of(ctx)):
            return Fail(f"no {ctx.request_id}") if plan.raises else Done(plan.value())
        rng = random.Random(f"{plan.seed}:{ctx.request_id}:probe:{self.probes[key_of(ctx)]}")
        if not self.is_quiet and rng.random() < 0.2:
            raise OSError("the backend does not answer")
        if not self.is_quiet and rng.random() < 0.2:
            return Wait(rng.random() * 10)
        return Fail(f"gone {ctx.request_id}") if rng.random() < 0.1 else Retry()

    def was_ordered(self, request_id: str, verb: Verb) -> bool:
        """Whether the operator has asked for that, whatever came of it."""
        return verb in self.orders.get(request_id, ())

    def order_taken(self, key: str) -> Verb | None:
        """The order that a run has taken about a task, and that no retry may have undone."""
        is_retried = self.was_ordered(key.partition("/")[0], Verb.RETRY)
        return None if is_retried else self.taken.get(key)

    def _check_settled(self, ctx: Context) -> None:
        if self.was_ordered(ctx.request_id, Verb.RETRY):
            return  # whoever orders it does not want to wait
        for act in (*self.acts, *self.late):
            is_late = act.effect is not None and not self.is_fenced(act.life)
            if act.key == key_of(ctx) and is_late and not self.jumps:
                raise Violation(f"settle: {ctx.request_id} is begun with an effect on its way")

    async def call_errored(self, ctx: Context) -> None:
        """The errored hook."""
        life = owner.get()
        assert isinstance(life, Life)
        self.errored[ctx.request_id] += 1
        if life.process.lives:
            self.judged(self.on_hook, ctx, life)
            self.judged(self.check_may_begin, life, f"hook of {ctx.request_id}")
        rng = random.Random(f"{ctx.request_id}:hook:{self.errored[ctx.request_id]}")
        self.hooks.append((ctx.request_id, life))
        try:
            if (seconds := rng.choice(self.hook_s)) > 0:
                await asyncio.sleep(seconds)
        finally:
            self.hooks.remove((ctx.request_id, life))

    async def job(self, ctx: Context) -> None:
        """The periodic job: one at a time in the whole store."""
        life = owner.get()
        assert isinstance(life, Life)
        others = [act for act in self.acting() if act.vm == "the job"]
        if others:
            self.judged(violate, "I7: the singleton job runs twice at a time")
        if life.process.lives and not self.is_fenced(life):
            self.judged(self.check_may_begin, life, "the job")
        act = Act("job", "job", life, "the job", ctx.fence)
        self.acts.append(act)
        try:
            await asyncio.sleep(3)
        finally:
            self.acts.remove(act)


def key_of(ctx: Context) -> str:
    """`id/` or, for a fanout copy, `id/instance`; as the journal's key."""
    return f"{ctx.request_id}/{ctx._task.recipient}"


def violate(text: str) -> None:
    """Raise one."""
    raise Violation(text)
