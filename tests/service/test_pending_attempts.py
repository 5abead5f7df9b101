"""Around a parked task: duplicates, arguments, its cursor, its hooks, and what it owes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import (
    Context,
    Fail,
    GracekitError,
    NoCapacity,
    Parked,
    Retry,
    Service,
)
from gracekit.errors import TaskCancelledError, TaskInterruptedError
from tests.service.kit import Doors, Fault, World, now
from tests.service.parked import Builds, Site

pytestmark = pytest.mark.looptime


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


# -- duplicates --------------------------------------------------------------------------------


async def test_a_duplicate_is_answered_by_what_is_true_then(world: World, svc: Service):
    """While it waits: as its caller was; while it runs again: by its end; after that: by its end
    too.
    """
    doors = Doors()
    site = Site(world, svc)

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise NoCapacity("full")
        await doors.pass_("b")
        return f"attempt {ctx.attempt}"

    life = await site.start()
    client = (await site.client()).prepare(request_id="t", timeout=200)
    with pytest.raises(NoCapacity):
        await client.call(build)
    begun = now()
    with pytest.raises(NoCapacity):
        await client.call(build)
    with pytest.raises(Parked):
        await client.prepare(pending=True).call(build)
    assert now() - begun < 1
    await site.order("retry")
    await doors.wait(1)

    waiting = [
        asyncio.create_task(view.call(build)) for view in (client, client.prepare(pending=True))
    ]
    await asyncio.sleep(10)
    assert not any(call.done() for call in waiting)
    doors.open("b")

    assert await asyncio.gather(*waiting) == ["attempt 2", "attempt 2"]
    assert await client.call(build) == "attempt 2"
    assert world.tally()["duplicate"] == 5
    assert doors.entered == ["b"]
    assert len(life.told("task.started")) == 2 + 1  # and the retry, an ops request


async def test_a_caller_of_the_second_attempt_hears_that_it_is_parked_again(
    world: World, svc: Service
):
    """With the version that holds then."""
    doors = Doors()
    site = Site(world, svc)

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        if ctx.attempt > 1:
            await doors.pass_("b")
        raise NoCapacity("full")

    await site.start()
    client = (await site.client()).prepare(request_id="t", pending=True)
    with pytest.raises(Parked) as first:
        await client.call(build)
    await site.order("retry")
    await doors.wait(1)
    again = asyncio.create_task(client.call(build))
    await asyncio.sleep(1)
    doors.open("b")

    with pytest.raises(Parked) as second:
        await again
    assert (first.value.version, second.value.version) == (1, 2)
    assert second.value.deadline == first.value.deadline


async def test_other_content_under_its_id_is_refused(world: World, svc: Service):
    """A parked task keeps its id as any other."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)

    with pytest.raises(GracekitError, match="other content"):
        await builds.call(memory_mb=6)
    assert builds.state() == "pending"


@pytest.mark.parametrize(
    ("verb", "error", "text"),
    [
        ("give_up", TaskInterruptedError, "was given up by a caller of gracekit.tasks: too large"),
        ("cancel", TaskCancelledError, "was cancelled by a caller of gracekit.tasks: no need"),
    ],
)
async def test_a_duplicate_after_an_end_hears_how_it_ended(
    world: World, svc: Service, verb: str, error: type[Exception], text: str
):
    """By the record; nothing is started."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)
    await builds.order(verb, **({"reason": "no need"} if verb == "cancel" else {}))

    with pytest.raises(error, match=text):
        await builds.call(memory_mb=5)
    assert len(builds.begun) == 1


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("verb", ["retry", "give_up", "cancel"])
async def test_arguments_are_purged_with_the_end(world: World, svc: Service, verb: str, keep: bool):
    """Kept while it waits and until the errored hook has had them; then only where an operator may
    retry, and the setting says so.
    """
    builds = Builds(world, svc)
    await builds.start(keep_failed_arguments=keep)
    await builds.park(memory_mb=5)
    assert builds.row()["args"] is not None
    builds.free = 5
    await builds.order(verb)
    await world.until(lambda: bool(builds.row()["finished_at"]) and not builds.row()["errored_due"])

    kept = keep and verb == "give_up"
    assert (builds.row()["args"] is not None) == kept
    assert (builds.row()["context"] is not None) == kept
    assert builds.hooks == ([("v", "gave_up")] if verb == "give_up" else [])


async def test_without_a_hook_arguments_are_purged_too(world: World, svc: Service):
    """Whatever run looks after the end finds that there is no hook to call."""
    builds = Builds(world, svc, hook=False)
    await builds.start(keep_failed_arguments=False)
    await builds.park(memory_mb=5)
    await builds.order("give_up")

    await world.until(lambda: builds.row()["args"] is None)
    assert (builds.state(), builds.row()["errored_due"]) == ("errored", 0)


async def test_an_operator_may_run_again_what_has_expired(world: World, svc: Service):
    """It may wait anew, as if it had just been accepted, under the next version."""
    builds = Builds(world, svc)
    life = await builds.start(pending_timeout_s=60)
    first = await builds.park(memory_mb=5)
    await builds.ends("errored")
    await world.until(lambda: not builds.row()["errored_due"])

    await world.verb(life, "retry", task_id="t", by="ann", reason="more hosts")
    await builds.ends("pending")

    row = builds.row()
    assert row["parkings"] == 2
    assert row["pending_deadline"] >= first.deadline + 59
    builds.free = 5
    await builds.order("retry", version=2)
    await builds.ends("succeeded")


# -- attempts ----------------------------------------------------------------------------------


async def test_a_retry_goes_on_from_the_cursor(world: World, svc: Service):
    """What was done before no capacity was found is not done again."""
    site = Site(world, svc)
    seen: list[int] = []

    @svc.rpc(on_interrupt="retry")
    async def fill(ctx: Context) -> int:
        async for number in ctx.steps(range(6)):
            if number == 3 and ctx.attempt == 1:
                raise NoCapacity("the disk is full")
            seen.append(number)
        return ctx.attempt

    await site.start()
    await (await site.client()).prepare(request_id="t").cast(fill)
    await site.ends("pending")
    await site.order("retry")
    await site.ends("succeeded")

    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("args", [{}, {"size": 4}])
async def test_a_retry_that_replaces_nothing_goes_on_from_the_cursor(
    world: World, svc: Service, args: dict[str, Any]
):
    """No arguments, or those that it has."""
    site = Site(world, svc)
    seen: list[int] = []

    @svc.rpc(on_interrupt="retry")
    async def fill(ctx: Context, size: int) -> None:
        async for number in ctx.steps(range(size)):
            if number == 2 and ctx.attempt == 1:
                raise NoCapacity("the disk is full")
            seen.append(number)

    await site.start()
    await (await site.client()).prepare(request_id="t").cast(fill, size=4)
    await site.ends("pending")
    await site.order("retry", args=args)
    await site.ends("succeeded")

    assert seen == [0, 1, 2, 3]


async def test_a_retry_with_other_arguments_begins_anew(world: World, svc: Service):
    """A cursor is progress with the arguments before; nothing of the new ones is left out."""
    site = Site(world, svc)
    seen: list[str] = []

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context, parts: list[str]) -> None:
        async for part in ctx.steps(parts):
            if part == "gpu":
                raise NoCapacity("no gpu")
            seen.append(part)

    await site.start()
    await (await site.client()).prepare(request_id="t").cast(build, parts=["cpu", "disk", "gpu"])
    await site.ends("pending")
    await site.order("retry", args={"parts": ["small cpu", "small disk", "net"]})
    await site.ends("succeeded")

    assert seen == ["cpu", "disk", "small cpu", "small disk", "net"]


class Parts:
    """Builds of three parts, for the last of which there is no room at the first attempt.

    Attributes:
        done: The parts that are there.
        undone: Whether the first attempt has set its cursor back, and undone what it had done.
    """

    ALL = ("cpu", "disk", "gpu")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.done: set[str] = set()
        self.doors = Doors()
        self.undone = asyncio.Event()

        @site.svc.rpc(on_interrupt="retry", settle=0)
        async def build(ctx: Context) -> None:
            async for part in ctx.steps(self.ALL):
                if part == "gpu" and ctx.attempt == 1:
                    await self.doors.pass_("gpu")
                    await ctx.safe_point(None)
                    self.undo()
                    await self.doors.pass_("undone")
                    raise NoCapacity("no gpu")
                self.done.add(part)
                await asyncio.sleep(2)

        @site.svc.rpc(on_interrupt="retry", settle=0)
        def build_in_thread(ctx: Context) -> None:
            for part in ctx.steps(self.ALL):
                if part == "gpu" and ctx.attempt == 1:
                    ctx.safe_point_in_thread(None)
                    self.undo()
                    raise NoCapacity("no gpu")
                self.done.add(part)

        self.build = build
        self.build_in_thread = build_in_thread

    def undo(self) -> None:
        self.done.clear()
        self.undone.set()

    async def cast(self, method: Any) -> None:
        await (await self.site.client()).prepare(request_id="t").cast(method)

    async def resolve(self) -> None:
        await self.site.ends("pending")
        await self.site.order("retry")
        await self.site.ends("succeeded")


async def test_a_handler_that_undoes_its_work_sets_its_cursor_back(world: World, svc: Service):
    """`ctx.safe_point(None)`: the next attempt begins at the first step."""
    parts = Parts(Site(world, svc))
    await parts.site.start()
    await parts.cast(parts.build)
    parts.doors.open("gpu", "undone")

    await parts.resolve()

    assert parts.done == {"cpu", "disk", "gpu"}


async def test_a_plain_handler_that_undoes_its_work_sets_its_cursor_back(
    world: World, svc: Service
):
    """`ctx.safe_point_in_thread(None)` returns when it is committed."""
    parts = Parts(Site(world, svc))
    await parts.site.start()
    await parts.cast(parts.build_in_thread)

    await parts.resolve()

    assert parts.done == {"cpu", "disk", "gpu"}


async def test_a_drain_stops_at_a_cursor_that_is_set_back(world: World, svc: Service):
    """Nothing is undone, and the next start begins at the first step."""
    parts = Parts(Site(world, svc))
    life = await parts.site.start()
    await parts.cast(parts.build)
    await parts.doors.wait(1)
    life.ask_to_stop()
    await asyncio.sleep(1)
    parts.doors.open("gpu", "undone")
    await life.wait_end()
    assert not parts.undone.is_set()
    parts.done.clear()

    await parts.site.start()
    await parts.site.ends("succeeded")

    assert parts.done == {"cpu", "disk", "gpu"}


async def test_a_crash_behind_a_cursor_that_is_set_back_leaves_nothing_out(
    world: World, svc: Service
):
    """It is committed before anything is undone, and does not count as progress."""
    parts = Parts(Site(world, svc))
    life = await parts.site.start()
    await parts.cast(parts.build)
    parts.doors.open("gpu")
    await parts.undone.wait()
    await life.crash()

    await parts.site.start()
    await parts.site.ends("succeeded")

    assert parts.done == {"cpu", "disk", "gpu"}


async def test_a_process_that_dies_in_a_retry_leads_to_its_policy(world: World, svc: Service):
    """`retry` runs it again, where it may be parked again: same deadline, next version."""
    site = Site(world, svc)
    doors = Doors()

    @svc.rpc(on_interrupt="retry", settle=0)
    async def build(ctx: Context) -> None:
        if ctx.attempt == 2:
            await doors.pass_("b")
        raise NoCapacity("full")

    life = await site.start()
    await (await site.client()).prepare(request_id="t").cast(build)
    await site.ends("pending")
    deadline = site.row()["pending_deadline"]
    await site.order("retry")
    await doors.wait(1)
    await life.crash()
    assert site.state() == "running"
    await site.start()
    await site.ends("pending")

    row = site.row()
    assert (row["parkings"], row["pending_deadline"], row["attempts"]) == (2, deadline, 3)
    assert (row["crashes"], row["alone"]) == (0, 0)


async def test_who_is_parked_is_no_suspect_any_more(world: World, svc: Service):
    """It was at work in two processes that died, ran apart, and ended by itself: its crashes do not
    count at its next attempt.
    """
    site = Site(world, svc)

    @svc.rpc(on_interrupt="retry", settle=0)
    async def build(ctx: Context) -> str:
        if ctx.attempt <= 2:
            await asyncio.sleep(1000)
        if ctx.attempt == 3:
            raise NoCapacity("full")
        return "built"

    for _ in range(2):
        life = await site.start()
        if not site.state():
            await (await site.client()).prepare(request_id="t").cast(build)
        await site.ends("running")
        await life.crash()
    await site.start()
    await site.ends("pending")
    assert (site.row()["crashes"], site.row()["alone"]) == (0, 0)
    await site.order("retry")

    await site.ends("succeeded")


# -- hooks and probes --------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["probe", "errored hook"])
async def test_no_capacity_of_a_hook_parks_nothing(world: World, svc: Service, where: str):
    """A probe that raises is asked again; a hook that raises has failed. The task does not wait."""
    world.expects_faults = True
    asked: list[str] = []

    @svc.rpc(on_interrupt="probe" if where == "probe" else "error", settle=0, max_wait="30s")
    async def build(ctx: Context) -> None:
        await asyncio.sleep(1000)

    @build.probe
    async def _(ctx: Context) -> Any:
        asked.append("probe")
        raise NoCapacity("full")

    @build.errored
    async def _(ctx: Context, reason: str) -> None:
        asked.append(reason)
        raise NoCapacity("full")

    site = Site(world, svc)
    life = await site.start()
    await (await site.client()).prepare(request_id="t").cast(build)
    await site.ends("running")
    await life.crash()
    life = await site.start()
    await site.ends("errored")
    await world.until(lambda: not site.row()["errored_due"])

    reason = "gave_up" if where == "probe" else "interrupted"
    assert (site.row()["reason"], asked[-1]) == (reason, reason)
    assert site.row()["parkings"] == 0
    assert len(life.told("hook.failed")) == len(asked)


async def test_a_probe_s_verdict_may_be_no_capacity_as_a_failure(world: World, svc: Service):
    """Fail ends it; Retry runs it again, and that attempt may be parked."""
    site = Site(world, svc)

    @svc.rpc(on_interrupt="probe", settle=0)
    async def build(ctx: Context, answer: str) -> None:
        await asyncio.sleep(1000 if ctx.attempt == 1 else 0)
        raise NoCapacity("full")

    @build.probe
    async def _(ctx: Context, answer: str) -> Any:
        return Fail("no capacity") if answer == "fail" else Retry()

    life = await site.start()
    client = await site.client()
    for answer in ("fail", "retry"):
        await client.prepare(request_id=answer).cast(build, answer=answer)
        await site.ends("running", answer)
    await life.crash()
    await site.start()

    await site.ends("failed", "fail")
    await site.ends("pending", "retry")


# -- what it owes ------------------------------------------------------------------------------


async def test_a_caller_behind_a_slow_broker_is_answered_once_by_either(world: World, svc: Service):
    """The transport takes no reply for a while; the task is retried meanwhile. The first answer
    that leaves counts, and none is left.
    """
    world.expects_faults = True
    builds = Builds(world, svc)
    life = await builds.start()
    call = asyncio.create_task(builds.call(memory_mb=5))
    life.plan("publish", Fault.REFUSED, times=3)
    await builds.ends("pending")
    builds.free = 5
    await builds.order("retry")
    await builds.ends("succeeded")

    answer = (await asyncio.gather(call, return_exceptions=True))[0]
    assert life.faults.left() == []
    assert isinstance(answer, Parked) or answer == "v with 5"
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    assert len(builds.begun) == 2


async def test_waiting_tasks_keep_the_accounts_even(world: World, svc: Service):
    """At each step what was accepted is on record, and a drain of a run with parked tasks ends
    with 0.
    """
    builds = Builds(world, svc)
    life = await builds.start()
    for number in range(5):
        await builds.park(f"v{number}", f"t{number}", memory_mb=5)
        world.check_accounts()
    builds.free = 5
    for number, verb in enumerate(("retry", "give_up", "cancel")):
        await builds.order(verb, f"t{number}")
        world.check_accounts()
    await builds.ends("succeeded", "t0")
    report = await life.drain()
    world.check_accounts()

    assert (report.exit_code, report.unfinished, report.not_started) == (0, 0, [])
    assert world.tally()["accepted"] == 5
    counts = {"succeeded": 1, "errored": 1, "cancelled": 1, "pending": 2}
    assert sorted(world.states().values()) == sorted(
        state for state, number in counts.items() for _ in range(number)
    )
