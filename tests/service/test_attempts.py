"""Ends of every kind: results, errors, timeouts, cancellations, threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from gracekit import CallTimeoutError, Context, RpcError, Service
from gracekit.errors import (
    MethodTimeoutError,
    TaskInterruptedError,
)
from tests.service.kit import Doors, World

pytestmark = pytest.mark.looptime


async def test_at_a_timeout_the_caller_is_answered_at_once_and_the_task_stays(
    world: World, svc: Service
):
    """A handler that winds up slowly keeps its place and its lease until it has returned."""
    loop = asyncio.get_running_loop()

    @svc.rpc(resource="vm", timeout="5s")
    async def slow(ctx: Context, vm: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(10)

    life = await world.start(svc)
    client = await world.client(svc)
    begun = loop.time()
    with pytest.raises(MethodTimeoutError, match="exceeded its timeout of 5 s"):
        await client.prepare(request_id="t").call(slow, vm="v")

    assert loop.time() - begun == pytest.approx(5, abs=0.1)
    assert world.state("t") == "running"
    assert world.rows("SELECT owner FROM lease")[0]["owner"] == life.runtime.run_id
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    assert world.state("t") == "running"
    await life.hears("task.finished")
    assert loop.time() - begun == pytest.approx(15, abs=0.1)
    assert world.state("t") == "failed"


async def test_a_caller_that_was_answered_early_is_not_answered_by_the_next_start(
    world: World, svc: Service
):
    """Its reply queue may be gone by then: that would be counted as a reply that was given up."""

    @svc.rpc(timeout="5s")
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(60)

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="t").call(slow)
    await asyncio.sleep(1)
    await life.crash()
    assert world.rows("SELECT * FROM reply") == []
    again = await world.start(svc)

    await world.until(lambda: world.state("t") == "errored")
    await world.settle()
    assert again.told("reply.given_up") == []
    assert "reply_given_up" not in world.tally()


async def test_a_deadline_is_the_earliest_of_all(world: World, svc: Service):
    """Method timeout, the caller's patience and the drain's deadline: ctx knows the nearest."""
    loop = asyncio.get_running_loop()
    seen: dict[str, float | None] = {}
    asked, again = asyncio.Event(), asyncio.Event()

    @svc.rpc
    async def look(ctx: Context) -> None:
        seen["caller"] = ctx.time_left

    @svc.rpc(timeout=20)
    async def limited(ctx: Context) -> None:
        seen["method"] = ctx.time_left
        asked.set()
        await again.wait()
        seen["drain"] = ctx.time_left
        assert ctx.draining

    @svc.rpc
    async def free(ctx: Context) -> None:
        seen["none"] = ctx.deadline

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(timeout=30).call(look)
    await client.cast(free)
    call = asyncio.create_task(client.prepare(timeout=60).call(limited))
    await asked.wait()
    life.runtime.request_stop(source="signal", by="test", reason="test")
    await life.hears("intake.closed", 1)
    await asyncio.sleep(15)
    again.set()
    await call
    await life.wait_end()

    assert seen == {
        "caller": pytest.approx(30, abs=0.1),
        "method": pytest.approx(20, abs=0.1),
        "drain": pytest.approx(5, abs=0.2),
        "none": None,
    }
    assert loop.time() < 60


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_a_handler_cannot_end_the_service(world: World, svc: Service, error: BaseException):
    """Whatever a handler raises is its own failure: its caller is told and the next request
    runs.
    """

    @svc.rpc
    async def bad(ctx: Context) -> None:
        raise error

    @svc.rpc
    async def good(ctx: Context) -> int:
        return 1

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match=type(error).__name__):
        await client.prepare(request_id="b").call(bad)

    assert await client.call(good) == 1
    assert world.state("b") == "failed"


@pytest.mark.parametrize(
    "cancelled", [False, True], ids=["uncancelled", "swallowed a cancellation"]
)
@pytest.mark.parametrize("where", ["beside another task", "in a thread without a loop"])
async def test_a_task_that_is_thrown_away_with_its_loop_has_no_outcome(
    world: World, svc: Service, where: str, cancelled: bool
):
    """The interpreter closes its coroutine: the GeneratorExit in the handler is no failure. No step
    of ours can follow, so the row stays RUNNING, and the next start settles it.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await doors.pass_(ctx.attempt)
            return
        await doors.pass_("on")

    life = await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(work)
    await doors.wait(1)
    (task,) = life.runtime.wired.tracker
    assert task.handler is not None
    if cancelled:
        task.handler.cancel()
        await doors.wait(2)
    coroutine = task.handler.get_coro()
    if where == "beside another task":
        coroutine.close()
    else:
        thread = threading.Thread(target=coroutine.close)
        thread.start()
        thread.join()
    await asyncio.sleep(1)

    row = world.task(request_id)
    assert (row["state"], row["failure"], row["cut"]) == ("running", None, None)
    assert life.told("task.finished") == []
    await life.crash()
    doors.open(2)
    await world.start(svc)
    await world.until(lambda: world.state(request_id) == "succeeded")
    assert doors.entered == ([1, "on", 2] if cancelled else [1, 2])


async def test_a_cancellation_that_nobody_asked_for_is_an_interruption(world: World, svc: Service):
    """A library may raise CancelledError: how far the handler came is not known, so it is no
    failure.
    """

    @svc.rpc
    async def odd(ctx: Context) -> None:
        raise asyncio.CancelledError("from a library")

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(TaskInterruptedError, match="its end is not known"):
        await client.prepare(request_id="c", timeout=60).call(odd)
    assert (world.state("c"), world.task("c")["reason"]) == ("errored", "interrupted")


async def test_a_handler_that_cancels_itself_hurts_nobody_else(world: World, svc: Service):
    """A cancellation left behind by the handler never reaches gracekit's own steps."""

    @svc.rpc
    async def odd(ctx: Context) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)

    assert await client.prepare(request_id="c", timeout=10).call(odd) == "done"
    await world.settle()
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    report = await life.drain()
    assert report.waited_s == pytest.approx(0, abs=0.1)


async def test_a_swallowed_cancellation_ends_by_itself(world: World, svc: Service):
    """A handler that catches its cancellation and returns has ended: its result is the record."""

    @svc.rpc(timeout=5)
    async def stubborn(ctx: Context) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            assert ctx.cancelled
        return "done anyway"

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="s").call(stubborn)
    await life.hears("task.finished")

    assert world.task("s")["result"] == '"done anyway"'


async def test_a_result_that_cannot_be_sent_is_left_out_and_its_place_told(
    world: World, svc: Service
):
    """The caller learns which part of the result is no plain data; the work was done."""

    @svc.rpc
    async def bad(ctx: Context) -> dict[str, object]:
        return {"vm": {"handle": object()}}

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match=r"result\.vm\.handle: object of type object"):
        await client.prepare(request_id="u").call(bad)
    assert world.state("u") == "succeeded"


@pytest.mark.parametrize("depth", range(28, 34))
async def test_a_deep_result_is_sent_or_refused_but_never_lost(
    world: World, svc: Service, depth: int
):
    """At the edge of what a message may nest the caller gets the result or a clear error."""

    @svc.rpc
    async def deep(ctx: Context) -> object:
        value: object = 1
        for _ in range(depth):
            value = [value]
        return value

    life = await world.start(svc)
    client = await world.client(svc)
    try:
        await client.prepare(timeout=10).call(deep)
    except CallTimeoutError:
        pytest.fail("nothing came back")
    except RpcError as error:
        assert "nest" in str(error)  # noqa: PT017 - either end is fine
    await life.drain()
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])


@pytest.mark.parametrize("keys", [9_990, 9_998, 10_000, 10_001])
async def test_a_wide_result_is_sent_or_refused_but_never_lost(
    world: World, svc: Service, keys: int
):
    """At the edge of what a message may hold the caller gets the result or a clear error."""

    @svc.rpc
    async def wide(ctx: Context) -> dict[str, int]:
        return {str(n): n for n in range(keys)}

    life = await world.start(svc)
    client = await world.client(svc)
    try:
        assert len(await client.prepare(timeout=10).call(wide)) == keys
    except CallTimeoutError:
        pytest.fail("nothing came back")
    except RpcError as error:
        assert "keys" in str(error)  # noqa: PT017 - either end is fine
    await life.drain()
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])


async def test_a_cursor_that_cannot_be_kept_fails_its_own_task_only(world: World, svc: Service):
    """A safe point takes plain data; other tasks' commits do not suffer from one that is not."""

    @svc.rpc
    async def bad(ctx: Context) -> None:
        await ctx.safe_point(object())

    @svc.rpc
    async def good(ctx: Context) -> int:
        return 1

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match="cursor"):
        await client.prepare(timeout=5).call(bad)
    assert await client.prepare(timeout=5).call(good) == 1


@pytest.mark.looptime(False)
async def test_plain_handlers_run_in_threads_of_their_lane(world: World, svc: Service):
    """A plain `def` runs beside the loop, its result comes back, and a full lane leaves ops
    alone.
    """
    go = threading.Event()

    @svc.rpc
    def work(ctx: Context) -> str:
        go.wait(30)
        return threading.current_thread().name

    @svc.ops
    def ping(ctx: Context) -> str:
        return threading.current_thread().name

    life = await world.start(svc, threads=1)
    client = await world.client(svc)
    calls = [asyncio.create_task(client.call(work)) for _ in range(2)]
    await life.hears("task.started")
    pong = await client.call(ping)
    started = len(life.told("task.started"))
    go.set()
    names = await asyncio.gather(*calls)

    assert started == 2, "of one thread, and of ops"
    assert threading.main_thread().name not in {pong, *names}
    report = await life.drain()
    assert report.exit_code == 0


@pytest.mark.looptime(False)
async def test_a_thread_that_raises_system_exit_is_a_failed_task(world: World, svc: Service):
    """sys.exit in a plain handler ends that handler."""

    @svc.rpc
    def bad(ctx: Context) -> None:
        raise SystemExit(1)

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match="SystemExit"):
        await client.prepare(timeout=10).call(bad)


@pytest.mark.looptime(False)
async def test_a_thread_is_over_when_it_has_returned(world: World, svc: Service):
    """A timed-out thread keeps task and lease until it returns; it can ask whether it was
    cancelled.
    """
    go = threading.Event()
    seen = []

    @svc.rpc(resource="vm", timeout=1)
    def work(ctx: Context, vm: str) -> None:
        go.wait(30)
        seen.append(ctx.cancelled)

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="t").call(work, vm="v")
    assert world.state("t") == "running"
    go.set()
    await life.hears("task.finished")

    assert seen == [True]
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]
