"""What becomes of a task is judged by what gracekit did to it, then by what its code raised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from gracekit import Context, RpcError, Service
from gracekit.errors import MethodTimeoutError
from gracekit.process import Point
from gracekit.testing.faults import Fault
from tests.service.kit import World

pytestmark = pytest.mark.looptime

ITEMS = 60


# -- stops at a safe point ---------------------------------------------------------------------


Steps = Callable[[], Awaitable[None]]


async def in_a_task_group(steps: Steps) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(steps())  # type: ignore[arg-type]


async def in_an_anyio_group(steps: Steps) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(steps)


async def in_gather(steps: Steps) -> None:
    await asyncio.gather(steps(), return_exceptions=True)


async def in_wait(steps: Steps) -> None:
    await asyncio.wait({asyncio.create_task(steps())})  # type: ignore[arg-type]


async def in_shield(steps: Steps) -> None:
    await asyncio.shield(steps())


async def behind_a_broad_except(steps: Steps) -> None:
    try:
        await steps()
    except BaseException as error:
        raise ValueError("some item failed") from error


WRAPPERS = (
    in_a_task_group,
    in_an_anyio_group,
    in_gather,
    in_wait,
    in_shield,
    behind_a_broad_except,
)


@pytest.mark.parametrize("around", WRAPPERS, ids=lambda function: function.__name__)
async def test_a_stop_at_a_safe_point_holds_whatever_is_around_the_steps(
    world: World, svc: Service, around: Any
):
    """The stop does not reach the handler, which returns or raises something else; its task is
    handed over at the safe point all the same, and the next start does the rest of its items, each
    once.
    """
    done: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> int:
        async def steps() -> None:
            async for item in ctx.steps(range(ITEMS)):
                await asyncio.sleep(1)
                done.append(item)

        await around(steps)
        return len(done)

    life = await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(copy)
    await asyncio.sleep(3.5)

    report = await life.drain()

    assert report.handed_over == [request_id]
    row = world.task(request_id)
    assert (row["state"], row["cut"], row["cursor"]) == ("handed_over", "safe_point", "3")
    await world.start(svc)
    await world.until(lambda: world.state(request_id) == "succeeded")
    assert done == list(range(ITEMS))
    assert world.task(request_id)["result"] == str(ITEMS)


@pytest.mark.looptime(False)  # a thread takes real time, and virtual time would not wait for it
async def test_a_stop_at_a_safe_point_holds_in_a_thread(world: World, svc: Service):
    """A plain handler that catches everything is handed over at its safe point too."""
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    @svc.rpc
    def copy(ctx: Context) -> str:
        try:
            for _ in ctx.steps(range(ITEMS)):
                loop.call_soon_threadsafe(began.set)
                while not ctx.draining:
                    pass
        except BaseException:  # noqa: BLE001 - that is the point
            return "caught"
        return "all"

    life = await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(copy)
    await began.wait()

    report = await life.drain()

    assert report.handed_over == [request_id]
    row = world.task(request_id)
    assert (row["state"], row["cut"], row["cursor"]) == ("handed_over", "safe_point", "0")


async def test_a_handler_that_works_on_after_its_stop_and_is_cut_was_interrupted(
    world: World, svc: Service
):
    """The deadline meets it in the middle of something: that is no stop at a safe point any
    more.
    """

    @svc.rpc
    async def stubborn(ctx: Context) -> None:
        try:
            async for _ in ctx.steps(range(ITEMS)):
                await asyncio.sleep(1)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(stubborn)
    await asyncio.sleep(2.5)

    await life.drain()

    assert world.task(request_id)["cut"] == "cancelled"


# -- cancellations of the application's own ----------------------------------------------------


async def cancel_me_soon() -> None:
    """What a library, or a mistake, may do to the task that runs a handler."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().call_soon(me.cancel)
    await asyncio.sleep(3600)


async def test_a_foreign_cancellation_of_an_idempotent_task_is_a_crash_and_it_is_run_again(
    world: World, svc: Service
):
    """Its resource settles first, as after the death of a process; its caller gets the result."""
    starts: list[float] = []
    loop = asyncio.get_running_loop()

    @svc.rpc(on_interrupt="retry", resource="vm", settle=10)
    async def resize(ctx: Context, vm: str) -> int:
        starts.append(loop.time())
        if ctx.attempt == 1:
            await cancel_me_soon()
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)

    assert await client.prepare(timeout=60, request_id="r").call(resize, vm="v") == 2
    assert starts[1] - starts[0] == pytest.approx(10, abs=2)
    row = world.task("r")
    assert (row["state"], row["attempts"], row["crashes"], row["token"]) == ("succeeded", 2, 1, 2)
    report = await life.drain()
    assert (report.exit_code, report.handed_over, report.leases_kept) == (0, [], 0)


@pytest.mark.parametrize("foreign", [True, False])
async def test_a_foreign_cancellation_of_a_clean_up_in_a_drain_is_unclean(
    world: World, svc: Service, foreign: bool
):
    """The drain has cancelled the handler, and something else cuts what it does about that: its
    last request may still be on its way.
    """

    @svc.rpc(on_interrupt="retry", settle=7)
    async def work(ctx: Context) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            me = asyncio.current_task()
            assert me is not None
            if foreign and ctx.attempt == 1:
                asyncio.get_running_loop().call_later(0.5, me.cancel)
            await asyncio.sleep(1)

    life = await world.start(svc, drain_timeout_s=1)
    client = await world.client(svc)
    await client.prepare(request_id="t").cast(work)
    await world.until(lambda: world.state("t") == "running")

    await life.drain()

    row = world.task("t")
    assert row["cut"] == ("unclean" if foreign else "cancelled")
    assert (row["not_before"] or 0) > world.clock.wall() if foreign else row["not_before"] is None


async def test_a_foreign_cancellation_again_and_again_ends_at_the_cap(world: World, svc: Service):
    """It counts as a crash counts, so a task that always cancels itself ends."""

    @svc.rpc(on_interrupt="retry", settle=1)
    async def resize(ctx: Context) -> None:
        await cancel_me_soon()

    await world.start(svc, max_attempts=3)
    client = await world.client(svc)
    request_id = await client.cast(resize)

    await world.until(lambda: world.state(request_id) == "errored")

    row = world.task(request_id)
    assert (row["reason"], row["attempts"], row["crashes"]) == ("attempts", 3, 3)


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_foreign_cancellation_is_no_failure_whatever_it_is_turned_into(
    world: World, svc: Service, wrapped: bool
):
    """Nobody knows how far the handler came: an `error` task is ERRORED, and its hook is called."""
    errored: list[str] = []

    @svc.rpc(settle=1)
    async def create(ctx: Context) -> None:
        try:
            await cancel_me_soon()
        except asyncio.CancelledError as error:
            if wrapped:
                raise ValueError("the backend went away") from error
            raise

    @create.errored
    async def _(ctx: Context, reason: str) -> None:
        errored.append(reason)

    await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(create)
    await world.until(lambda: world.state(request_id) == "errored")

    assert world.task(request_id)["reason"] == "interrupted"
    await world.until(lambda: errored == ["interrupted"])


async def test_a_foreign_cancellation_gives_a_requeue_cast_back(world: World, svc: Service):
    """It is not acked and gone: it comes again, is journaled, and ends in the record."""
    starts: list[int] = []

    @svc.rpc(on_interrupt="requeue")
    async def fetch(ctx: Context) -> str:
        starts.append(ctx.attempt)
        if len(starts) == 1:
            await cancel_me_soon()
        return "fetched"

    await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(fetch)

    await world.until(lambda: world.state(request_id) == "succeeded")
    assert len(starts) == 2


async def test_a_result_after_a_foreign_cancellation_counts(world: World, svc: Service):
    """What a handler returns was done, whoever tried to cancel it meanwhile."""

    @svc.rpc
    async def odd(ctx: Context) -> str:
        try:
            await cancel_me_soon()
        except asyncio.CancelledError:
            return "done anyway"
        return ""

    await world.start(svc)
    client = await world.client(svc)

    assert await client.prepare(timeout=10).call(odd) == "done anyway"


async def test_a_thread_goes_on_when_the_task_around_it_is_cancelled(world: World, svc: Service):
    """Who cancels all tasks of the process does not reach a plain handler: its row stays RUNNING,
    its lease held, until its thread has returned, and what it returned is the outcome.
    """
    began, end = asyncio.Event(), False
    loop = asyncio.get_running_loop()

    @svc.rpc(resource="vm")
    def resize(ctx: Context, vm: str) -> str:
        loop.call_soon_threadsafe(began.set)
        while not end:
            pass
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.ensure_future(client.prepare(request_id="r", timeout=1e6).call(resize, vm="v"))
    await began.wait()
    for task, who in list(world._owners.items()):
        if who is life and isinstance(task, asyncio.Task) and "Threads" in repr(task.get_coro()):
            task.cancel()
    handler = life.runtime.wired.tracker.get("r").handler  # type: ignore[union-attr]
    assert handler is not None
    handler.cancel()
    await world.settle()

    assert world.state("r") == "running"
    assert world.rows("SELECT owner FROM lease")[0]["owner"] == life.runtime.run_id
    end = True
    while not call.done():
        await asyncio.sleep(0)  # virtual time does not wait for a thread; so it must not pass
    assert await call == "done"
    assert world.state("r") == "succeeded"


async def test_a_hand_over_of_an_interrupted_task_that_fails_is_found_by_recovery(
    world: World, svc: Service
):
    """Where the store refuses the hand-over, the row is still RUNNING, and this run's own."""

    @svc.rpc(on_interrupt="retry", settle=1)
    async def resize(ctx: Context) -> int:
        if ctx.attempt == 1:
            await cancel_me_soon()
        return ctx.attempt

    life = await world.start(svc)
    life.plan(Point.HAND_OVER, Fault.REFUSED, times=3)
    client = await world.client(svc)

    assert await client.prepare(timeout=300).call(resize) == 2


# -- a timeout, an operator ---------------------------------------------------------------------


async def test_what_a_timed_out_handler_raises_does_not_hide_its_timeout(
    world: World, svc: Service
):
    """The record says what its caller was told; what it raised is in the traceback."""

    @svc.rpc(timeout=5)
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise OSError("the rollback failed")

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="s").call(slow)
    await life.hears("task.finished")

    row = world.task("s")
    assert row["state"] == "failed"
    assert "MethodTimeoutError" in row["failure"]
    assert "the rollback failed" in row["failure"]


async def test_what_a_cancelled_handler_raises_does_not_hide_the_operators_order(
    world: World, svc: Service
):
    """Ordered to end, it has ended by that order."""
    began = asyncio.Event()

    @svc.rpc
    async def slow(ctx: Context) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError as error:
            raise ValueError("not now") from error

    life = await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(slow)
    await began.wait()

    await world.verb(life, "cancel", task_id=request_id, by="me", reason="")
    await life.hears("task.finished")

    assert world.state(request_id) == "cancelled"


@pytest.mark.parametrize("then", ["raised", "caught", "timeout"])
async def test_a_child_that_fails_while_its_group_is_waited_for_fails_the_task(
    world: World, svc: Service, then: str
):
    """TaskGroup cancels its parent and, before Python 3.13, does not take that back: the count of
    cancellations says nothing then.
    """
    starts: list[int] = []

    async def child() -> None:
        await asyncio.sleep(1)
        raise KeyError("missing")

    @svc.rpc(on_interrupt="retry", settle=1)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(asyncio.sleep(3600))
        except* KeyError:
            if then == "raised":
                raise
        if then == "timeout":
            async with asyncio.timeout(1):
                await asyncio.sleep(3600)
        raise RuntimeError("something else")

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises((RpcError, RuntimeError, TimeoutError)):
        await client.prepare(request_id="w", timeout=60).call(work)

    assert (world.state("w"), starts) == ("failed", [1])
    detail = {"raised": "unhandled errors", "caught": "something else", "timeout": ""}[then]
    assert detail in world.task("w")["detail"]


async def test_what_children_raise_when_somebody_cancels_their_group_is_no_failure(
    world: World, svc: Service
):
    """Their clean-up fails because of the cancellation, and only because of it."""
    starts: list[int] = []

    async def child() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise ConnectionError("closed")

    @svc.rpc(on_interrupt="retry", settle=1)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)
        if ctx.attempt == 1:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                await asyncio.sleep(1)
                await cancel_me_soon()

    await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(work)
    await world.until(lambda: world.state(request_id) == "succeeded")

    assert starts == [1, 2]


async def test_an_error_of_its_own_is_a_failure_as_ever(world: World, svc: Service):
    """Nobody cancelled the handler: it failed."""

    @svc.rpc
    async def bad(ctx: Context) -> None:
        with anyio.move_on_after(1):
            await asyncio.sleep(3600)
        async with asyncio.timeout(1):
            await asyncio.sleep(3600)

    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises((RpcError, TimeoutError)):
        await client.prepare(request_id="b", timeout=30).call(bad)
    assert world.state("b") == "failed"


async def test_a_foreign_cancellation_of_a_wait_says_nothing_of_the_attempt_after_it(
    world: World, svc: Service
):
    """The task waits on for its lease, and what its handler then raises is its failure."""
    began, end = asyncio.Event(), asyncio.Event()

    @svc.rpc(resource="vm")
    async def hold(ctx: Context, vm: str) -> None:
        began.set()
        await end.wait()

    @svc.rpc(resource="vm")
    async def bad(ctx: Context, vm: str) -> None:
        raise ValueError("no room")

    await world.start(svc, host="one")
    other = await world.start(svc, host="two")
    client = await world.client(svc)
    await client.prepare(host="one").cast(hold, vm="v")
    await began.wait()
    call = asyncio.ensure_future(
        client.prepare(host="two", timeout=60, request_id="b").call(bad, vm="v")
    )
    await world.until(lambda: world.state("b") == "accepted")
    await asyncio.sleep(1.5)
    waiting = other.runtime.wired.tracker.get("b")
    assert waiting is not None
    assert waiting.handler is not None
    waiting.handler.cancel()
    await asyncio.sleep(0.1)
    end.set()

    with pytest.raises(ValueError, match="no room"):
        await call
    assert world.state("b") == "failed"


@pytest.mark.parametrize("how", ["drain", "order"])
async def test_what_gracekit_does_to_one_handler_fails_no_other_that_awaits_the_same(
    world: World, svc: Service, how: str
):
    """Two handlers await one future, which goes with the first: the second was interrupted."""
    shared: list[asyncio.Future[None]] = []

    @svc.rpc(on_interrupt="retry", settle=1)
    async def load(ctx: Context) -> str:
        if ctx.attempt > 1:
            return "loaded"
        if not shared:
            shared.append(asyncio.ensure_future(asyncio.sleep(3600)))
        await shared[0]
        return ""

    life = await world.start(svc, drain_timeout_s=1.0)
    client = await world.client(svc)
    first, second = [await client.cast(load) for _ in range(2)]
    await life.hears("task.started", 2)
    if how == "order":
        await world.verb(life, "cancel", task_id=first, by="me", reason="")
        await world.until(lambda: world.state(second) == "succeeded")
        assert world.state(first) == "cancelled"
    else:
        await life.drain()
        assert {world.state(first), world.state(second)} == {"handed_over"}


async def test_a_plain_handler_whose_thread_had_not_begun_begins_it_again(
    world: World, svc: Service
):
    """Somebody cancelled the task around the thread, in which nothing had been done."""
    ran: list[int] = []
    swept: list[bool] = []

    @svc.rpc
    def plain(ctx: Context) -> str:
        ran.append(ctx.attempt)
        return "done"

    await world.start(svc)
    client = await world.client(svc)
    # Virtual time leaps while a thread works, so its deadline must be far away.
    call = asyncio.ensure_future(client.prepare(timeout=1e6, request_id="p").call(plain))
    while not swept:
        await asyncio.sleep(0)
        tasks = [task for task in world._owners if isinstance(task, asyncio.Task)]
        threads = [task for task in tasks if "Threads.run" in repr(task.get_coro())]
        swept += [task.cancel() for task in threads]

    assert await call == "done"
    assert ran == [1]
