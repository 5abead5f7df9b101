"""Orders that a run has taken, and whose handler has not returned when the process ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, NoCapacity, Service
from gracekit.errors import TaskCancelledError, TaskInterruptedError
from gracekit.process import Point
from gracekit.tracker.task import Order, Verb
from tests.service.kit import Doors, Fault, Life, World
from tests.service.test_orders import order, order_on_disk

pytestmark = pytest.mark.looptime

POLICIES = ("retry", "error", "probe")


async def ignore_orders(called: list[Any]) -> None:
    """What a handler does that no cancellation of gracekit ends, but the end of its process."""
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError as error:
            if not error.args:
                raise
            called.append("cancelled")


class Site:
    """A service whose handlers ignore a cancellation; what was called of it, and its callers."""

    def __init__(self, world: World, svc: Service, **options: Any) -> None:
        self.world = world
        self.svc = svc
        self.called: list[str] = []
        self.told: list[str] = []
        self.calls: dict[str, asyncio.Task[Any]] = {}

        @svc.rpc(resource="vm", settle=60, **options)
        async def work(ctx: Context, vm: str) -> str:
            self.called.append(f"attempt {ctx.attempt}")
            if ctx.attempt == 1:
                await ignore_orders(self.called)
            return "done"

        @work.probe
        async def _(ctx: Context, vm: str) -> None:
            self.called.append("probe")
            raise AssertionError("not asked")

        @work.errored
        async def _(ctx: Context, vm: str, reason: str) -> None:
            self.told.append(reason)

        self.work = work

    async def start(self, **settings: Any) -> Life:
        return await self.world.start(self.svc, **settings)

    async def call(self, life: Life, request_id: str, vm: str = "a") -> None:
        """A call whose handler is at work."""
        client = await self.world.client(self.svc)
        begun = len(life.told("task.started"))
        view = client.prepare(request_id=request_id, timeout=900)
        self.calls[request_id] = call = asyncio.create_task(view.call(self.work, vm=vm))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        await life.hears("task.started", begun + 1)


async def end_by_kill(life: Life) -> None:
    """Kill -9."""
    await life.crash()


async def end_by_drain(life: Life) -> None:
    """A drain, whose deadline passes."""
    report = await life.drain()
    assert report.unclean == ["w"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("end", [end_by_kill, end_by_drain])
async def test_a_cancel_that_was_taken_is_carried_out_when_the_process_has_ended(
    world: World, svc: Service, policy: str, end: Any
):
    """Whatever the policy is, the task does not run again: recovery cancels it, as the command
    would.
    """
    site = Site(world, svc, on_interrupt=policy)
    life = await site.start(drain_timeout_s=5)
    await site.call(life, "w")
    answer = await order(world, life, "cancel", "w")
    with pytest.raises(TaskCancelledError, match="was cancelled by an operator: wrong host"):
        await site.calls["w"]
    assert (answer["asked"], world.state("w")) == (True, "running")
    await end(life)
    again = await site.start()
    await world.until(lambda: world.state("w") == "cancelled", within_s=10)

    row = world.task("w")
    assert (row["reason"], row["detail"]) == ("operator", "ann@desk: wrong host")
    assert (row["attempts"], row["args"], row["errored_due"]) == (1, None, 0)
    (note,) = world.incidents("order_carried_out")
    assert note["detail"] == "cancel of ann@desk: wrong host (it was handed_over)"
    assert len(world.incidents("operator_cancel")) == 1
    assert again.told("task.settled")[0]["decision"] == "cancelled"
    (lease,) = world.rows("SELECT * FROM lease")
    assert lease["owner"] is None
    assert lease["not_before"] > world.clock.wall()  # its last request may still be on its way
    await asyncio.sleep(120)
    assert site.called == ["attempt 1", *["cancelled"] * site.called.count("cancelled")]
    assert site.told == []
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    world.check_accounts()


async def test_a_fail_that_was_taken_marks_the_task_errored_and_its_hook_is_called_once(
    world: World, svc: Service
):
    """As `tasks fail` does with a handed-over task; its caller and a second one get the error."""
    site = Site(world, svc, on_interrupt="retry")
    life = await site.start()
    await site.call(life, "w")
    await order(world, life, "fail", "w")
    await life.crash()
    again = await site.start()
    await world.until(lambda: bool(site.told))

    assert (world.state("w"), site.told) == ("errored", ["operator"])
    assert [one["reason"] for one in again.told("task.errored")] == ["operator"]
    view = (await world.client(svc)).prepare(request_id="w", timeout=60)
    with pytest.raises(TaskInterruptedError, match="was failed by an operator: wrong host"):
        await view.call(site.work, vm="a")
    assert site.called == ["attempt 1", "cancelled"]


async def test_an_order_in_line_is_carried_out_if_its_run_dies_at_once(world: World, svc: Service):
    """The process dies as soon as the order is on record: the accepted task is never started."""
    site = Site(world, svc, on_interrupt="retry")
    life = await site.start()
    await site.call(life, "first", vm="a")
    second = await world.client(svc)
    await second.prepare(request_id="w").cast(site.work, vm="a")
    await world.until(lambda: world.state("w") == "accepted")
    life.crash_at(Point.TALLY, "after")
    asked = asyncio.create_task(order(world, life, "cancel", "w"))
    await life.over.wait()
    asked.cancel()
    await site.start()
    await world.until(lambda: world.state("w") == "cancelled", within_s=10)

    assert world.task("w")["attempts"] == 0
    (note,) = world.incidents("order_carried_out")
    assert note["detail"] == "cancel of ann@desk: wrong host (it was accepted)"


async def test_a_retry_after_the_order_is_what_counts(world: World, svc: Service):
    """An operator who has changed his mind retries the task before the next start: it runs
    again.
    """
    site = Site(world, svc, on_interrupt="error")
    life = await site.start()
    await site.call(life, "w")
    await order(world, life, "cancel", "w")
    await life.crash()
    await order_on_disk(world, Verb.RETRY, "w", dead=True)
    await site.start()
    await world.until(lambda: world.state("w") == "succeeded")

    assert site.called == ["attempt 1", "cancelled", "attempt 2"]
    assert world.incidents("order_carried_out") == []


async def test_what_has_failed_after_an_order_runs_again_by_a_retry(world: World, svc: Service):
    """The order ended with the task: it does not end the attempt that a later retry begins."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> str:
        if ctx.attempt == 1:
            await asyncio.sleep(1000)
        await doors.pass_("second")
        return "done"

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await order(world, life, "fail", "w")
    await world.until(lambda: world.state("w") == "failed")
    await order(world, life, "retry", "w")
    await doors.wait(1)
    await life.crash()
    await world.start(svc)
    await world.until(lambda: world.state("w") == "errored")

    assert world.task("w")["reason"] == "interrupted"
    assert world.incidents("order_carried_out") == []


async def test_an_order_is_carried_out_although_recovery_settles_nothing_unasked(
    world: World, svc: Service
):
    """It needs no decision of recovery: the operator has decided."""
    site = Site(world, svc, on_interrupt="retry")
    life = await site.start()
    await site.call(life, "w")
    await order(world, life, "cancel", "w")
    await life.crash()
    await site.start(startup_reconciliation_enabled=False)

    await world.until(lambda: world.state("w") == "cancelled", within_s=10)


async def test_a_requeue_task_with_a_row_does_not_come_again(world: World, svc: Service):
    """It was redelivered, so it has a row, which the order ends."""
    called = []

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> None:
        called.append(ctx.attempt)
        await ignore_orders(called)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(read)
    await life.hears("task.started")
    await life.crash()
    life = await world.start(svc)
    await life.hears("task.started")
    assert world.state("w") == "running"
    await order(world, life, "cancel", "w")
    await life.crash()
    await world.start(svc)
    await world.until(lambda: world.state("w") == "cancelled", within_s=10)

    await asyncio.sleep(120)
    assert called == [1, 1, "cancelled"]


async def test_a_requeue_task_without_a_row_is_acked_by_the_drain(world: World, svc: Service):
    """Its handler has not returned at the deadline: the drain does not give the message back."""

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> None:
        await ignore_orders([])

    life = await world.start(svc, drain_timeout_s=5)
    call = asyncio.create_task((await world.client(svc)).prepare(request_id="w").call(read))
    await life.hears("task.started")
    await order(world, life, "cancel", "w")
    with pytest.raises(TaskCancelledError):
        await call
    report = await life.drain()

    assert (report.given_back, world.broker.waiting("compute")) == (0, 0)


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER])
async def test_an_order_whose_commit_was_in_doubt_is_taken_once(
    world: World, svc: Service, fault: Fault
):
    """The record shows whether it was committed; if it was not, it is recorded again."""
    site = Site(world, svc, on_interrupt="retry")
    life = await site.start()
    await site.call(life, "w")
    life.plan(Point.TALLY, fault)
    assert (await order(world, life, "cancel", "w"))["asked"]
    await world.until(lambda: site.called[1:] == ["cancelled"])
    await life.crash()
    await site.start()
    await world.until(lambda: world.state("w") == "cancelled")

    assert len(world.incidents("operator_cancel")) == 1


async def test_a_handler_that_finds_no_capacity_meanwhile_ends_as_ordered(
    world: World, svc: Service
):
    """The order is on record and has not reached the handler: a task that was ordered to end is not
    parked.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        await doors.pass_("build")
        raise NoCapacity("full", requested={"memory_mb": 1})

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="w").cast(build)
    await doors.wait(1)
    task = life.runtime.wired.tracker.get("w")
    assert task is not None
    word = Order(verb=Verb.CANCEL, by="ann@desk", reason="wrong host")
    assert await life.runtime.wired.control.orders._note(task, word)
    doors.open("build")
    await world.until(lambda: world.state("w") not in {"running", "accepted"})

    assert (world.state("w"), world.task("w")["reason"]) == ("cancelled", "operator")
