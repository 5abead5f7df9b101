"""Work that a handler has begun in threads and asyncio tasks of its own, and tracks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest

import gracekit
from gracekit import (
    Context,
    LeaseHeld,
    MethodTimeoutError,
    NoCapacity,
    RemoteError,
    RpcClient,
    Service,
    TaskCancelledError,
)
from tests.played import PATIENCE_S
from tests.service.kit import Life, World

pytestmark = pytest.mark.looptime


class Threads:
    """Threads of the application, which wait until they are let go."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4)
        self._go = threading.Event()
        self._futures: list[Future[object]] = []

    def submit(self, call: Callable[..., object], *args: object) -> Future[object]:
        future = self._pool.submit(call, *args)
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Called in a thread."""
        assert self._go.wait(PATIENCE_S)

    def go(self) -> None:
        """Let all go, and wait until they have ended: virtual time would not wait for them."""
        self._go.set()
        wait(self._futures)

    def close(self) -> None:
        self._go.set()
        self._pool.shutdown(wait=False)


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


async def sent(client: RpcClient, method: str, **args: object) -> asyncio.Task[object]:
    """A call under way, under the id of its method."""
    view = client.prepare(request_id=method, timeout=500)
    return asyncio.create_task(view.call(method, **args))


def works_in(life: Life) -> list[str]:
    """The tracked blocks of a process."""
    return [task.method for task in life.runtime.wired.tracker if task.lane.word == "background"]


async def test_a_thread_keeps_its_task_open(world: World, svc: Service, threads: Threads):
    """The handler has returned: its slot is free, its resource is not, and the caller waits."""

    def build(vm: str) -> None:
        threads.wait()

    @svc.rpc(resource="vm")
    async def create(ctx: Context, vm: str) -> str:
        assert ctx.track_call(threads.submit, build, vm).running
        return "created"

    @svc.rpc
    async def other(ctx: Context) -> str:
        async with ctx.lease("vm", "1"):
            return "held"

    life = await world.start(svc, max_running=1, threads=1, prefetch=5)
    client = await world.client(svc)
    call = await sent(client, "create", vm="1")
    await world.until(lambda: works_in(life) == ["create:build"])
    with pytest.raises(LeaseHeld, match="is held by task create"):  # in the only slot
        await client.call(other)
    assert (call.done(), world.state("create")) == (False, "running")
    threads.go()

    assert await call == "created"
    assert await client.call(other) == "held"
    assert works_in(life) == []


async def test_a_drain_waits_for_a_tracked_thread(world: World, svc: Service, threads: Threads):
    """Its caller is answered in the drain."""

    @svc.rpc
    def create(ctx: Context) -> str:
        ctx.track_call(threads.submit, threads.wait)
        return "created"

    life = await world.start(svc)
    client = await world.client(svc)
    call = await sent(client, "create")
    await world.until(lambda: works_in(life) == ["create:wait"])
    life.ask_to_stop()
    await life.hears("intake.closed")
    threads.go()
    report = await life.wait_end()

    assert await call == "created"
    assert (report.exit_code, world.state("create")) == (0, "succeeded")


async def test_a_thread_that_outlives_the_deadline_is_unclean(
    world: World, svc: Service, threads: Threads
):
    """It could read that it should stop; the lease stays with the process, and the task is
    listed.
    """
    told: list[bool] = []

    def build(ctx: Context) -> None:
        told.append(gracekit.current().cancelled)
        threads.wait()
        told.append(ctx.cancelled)

    @svc.rpc(resource="vm")
    async def create(ctx: Context, vm: str) -> None:
        ctx.track_call(threads.submit, build, ctx)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="one").cast(create, vm="1")
    await world.until(lambda: len(told) == 1)
    report = await life.drain()
    threads.go()

    assert (report.exit_code, report.unclean, report.leases_kept) == (75, ["one"], 1)
    assert world.rows("SELECT state, cut FROM task") == [{"state": "handed_over", "cut": "unclean"}]
    await world.until(lambda: told == [False, True])


async def test_what_a_thread_raises_makes_the_task_failed(
    world: World, svc: Service, threads: Threads
):
    """Also if the handler has ended before, and nothing looks at the future."""

    def build() -> None:
        threads.wait()
        raise ValueError("no disk")

    @svc.rpc
    async def create(ctx: Context) -> str:
        ctx.track_call(threads.submit, build)
        return "created"

    life = await world.start(svc)
    call = await sent(await world.client(svc), "create")
    await world.until(lambda: works_in(life) == ["create:build"])
    threads.go()

    with pytest.raises(ValueError, match="no disk"):
        await call
    assert world.state("create") == "failed"


async def test_a_thread_without_capacity_parks_the_task(
    world: World, svc: Service, threads: Threads
):
    """As if the handler had raised it."""

    def build() -> None:
        raise NoCapacity("no host", requested={"VCPU": 1})

    @svc.rpc
    async def create(ctx: Context) -> None:
        ctx.track_call(threads.submit, build)

    await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="one").cast(create)
    await world.until(lambda: world.state("one") == "pending")


@pytest.mark.parametrize(
    ("order", "told", "ends"),
    [(None, MethodTimeoutError, "failed"), ("cancel", TaskCancelledError, "cancelled")],
)
async def test_a_cancel_reaches_the_thread_and_the_caller_at_once(
    world: World,
    svc: Service,
    threads: Threads,
    order: str | None,
    told: type[Exception],
    ends: str,
):
    """A method's timeout and an operator's order: the thread reads it, and the task ends with
    it.
    """

    def build() -> None:
        threads.wait()
        if gracekit.current().cancelled:
            raise InterruptedError

    @svc.rpc(timeout="3s")
    async def create(ctx: Context) -> None:
        ctx.track_call(threads.submit, build)

    life = await world.start(svc)
    call = await sent(await world.client(svc), "create")
    await world.until(lambda: works_in(life) == ["create:build"])
    if order is not None:
        await world.verb(life, order, task_id="create", by="ann", reason="enough")
    with pytest.raises(told):
        await call
    assert world.state("create") == "running"
    threads.go()

    await world.until(lambda: world.state("create") == ends)


async def test_a_thread_by_itself_holds_the_drain_and_not_its_task(
    world: World, svc: Service, threads: Threads
):
    """keep_open=False: the caller is answered when the handler ends, and the thread stays
    listed.
    """
    asked: list[bool] = []

    def clean_up() -> None:
        asked.append(gracekit.current().cancelled)
        assert gracekit.current()["user_id"] == "ann"
        assert gracekit.current().request_id == "one"
        threads.wait()
        asked.append(gracekit.current().cancelled)

    @svc.rpc
    async def delete(ctx: Context) -> str:
        ctx.track_call(threads.submit, clean_up, keep_open=False)
        return "deleted"

    life = await world.start(svc)
    client = await world.client(svc)
    view = client.prepare(context={"user_id": "ann"}, request_id="one")
    assert await view.call(delete) == "deleted"
    assert works_in(life) == ["delete:clean_up"]
    report = await life.drain()
    threads.go()

    assert (report.exit_code, len(report.unclean)) == (75, 1)
    assert report.waited_s == pytest.approx(25, abs=0.5)
    await world.until(lambda: asked == [False, True])


async def test_a_block_in_an_asyncio_task_keeps_the_task_open(world: World, svc: Service):
    """And is cancelled at the deadline of a drain, as a handler is."""
    tasks = []

    @svc.rpc(on_interrupt="retry")
    async def create(ctx: Context) -> None:
        entered = asyncio.Event()

        async def build() -> None:
            async with ctx.track("build"):
                entered.set()
                await asyncio.sleep(3600)

        tasks.append(asyncio.create_task(build()))
        await entered.wait()

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="one").cast(create)
    await world.until(lambda: works_in(life) == ["create:build"])
    report = await life.drain()

    assert tasks[0].cancelled()
    assert (report.handed_over, report.unclean, report.must_die) == (["one"], [], False)


async def test_a_block_that_the_application_cancels_is_no_failure(world: World, svc: Service):
    """As a handler ends a reporter that it has begun."""
    tasks = []

    @svc.rpc
    async def create(ctx: Context) -> str:
        async def report() -> None:
            async with ctx.track("report"):
                await asyncio.sleep(3600)

        tasks.append(asyncio.create_task(report()))
        await asyncio.sleep(1)
        asyncio.get_running_loop().call_later(1, tasks[0].cancel)
        return "created"

    await world.start(svc)
    assert await (await world.client(svc)).call(create) == "created"


async def test_a_block_of_the_handler_itself_raises_into_it(
    world: World, svc: Service, threads: Threads
):
    """What the handler catches is no failure, in a coroutine and in a thread."""

    def fail() -> None:
        raise ValueError

    @svc.rpc
    async def create(ctx: Context) -> str:
        try:
            async with ctx.track("try"):
                fail()
        except ValueError:
            return "created"

    @svc.rpc
    def build(ctx: Context) -> str:
        try:
            with ctx.track("try"):
                fail()
        except ValueError:
            return "built"

    await world.start(svc)
    client = await world.client(svc)
    assert await client.call(create) == "created"
    assert await client.call(build) == "built"


async def test_a_call_that_the_executor_refuses_leaves_nothing(world: World, svc: Service):
    """The error is the handler's, and the task ends with it."""

    @svc.rpc
    async def create(ctx: Context) -> str:
        with ThreadPoolExecutor(1) as pool:
            pass
        with pytest.raises(RuntimeError, match="after shutdown"):
            ctx.track_call(pool.submit, str)
        return "created"

    life = await world.start(svc)
    assert await (await world.client(svc)).call(create) == "created"
    assert works_in(life) == []


async def test_a_task_whose_work_never_began_is_failed(
    world: World, svc: Service, threads: Threads
):
    """The executor has cancelled it, or could not call it: nothing was done."""
    begun = threading.Event()

    def hold() -> None:
        begun.set()
        threads.wait()

    def broken() -> None:
        raise OSError

    @svc.rpc
    async def cancelled(ctx: Context) -> str:
        pool = ThreadPoolExecutor(1)
        pool.submit(hold)
        begun.wait(PATIENCE_S)
        ctx.track_call(pool.submit, str)
        pool.shutdown(wait=False, cancel_futures=True)
        return "created"

    @svc.rpc
    async def uncalled(ctx: Context) -> str:
        logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL + 1)
        with ThreadPoolExecutor(1, initializer=broken) as pool:
            ctx.track_call(pool.submit, str)
        return "created"

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RemoteError, match=r"CancelledError: str\(\) was cancelled before it began"):
        await client.call(cancelled)
    threads.go()
    with pytest.raises(RemoteError, match="BrokenThreadPool"):
        await client.call(uncalled)


async def test_a_call_does_not_begin_after_its_task_was_cancelled(
    world: World, svc: Service, threads: Threads
):
    """It waited for a thread of its pool all the time."""
    ran: list[str] = []
    pool = ThreadPoolExecutor(1)

    @svc.rpc(timeout="3s")
    async def create(ctx: Context) -> None:
        ctx.track_call(pool.submit, threads.wait)
        ctx.track_call(pool.submit, ran.append, "late")

    await world.start(svc)
    with pytest.raises(MethodTimeoutError):
        await (await world.client(svc)).prepare(request_id="one").call(create)
    threads.go()
    pool.shutdown()
    await world.until(lambda: world.state("one") == "failed")
    assert ran == []


async def test_the_error_of_work_counts_beside_a_stop_at_a_safe_point(
    world: World, svc: Service, threads: Threads
):
    """The handler would begin again from its cursor, and nobody would hear of the error."""

    def build() -> None:
        threads.wait()
        raise ValueError("no disk")

    @svc.rpc
    async def create(ctx: Context) -> None:
        ctx.track_call(threads.submit, build)
        async for _ in ctx.steps(range(1000)):
            await asyncio.sleep(1)

    life = await world.start(svc)
    call = await sent(await world.client(svc), "create")
    await world.until(lambda: works_in(life) == ["create:build"])
    life.ask_to_stop()
    await life.hears("intake.closed")
    await asyncio.sleep(2)
    threads.go()

    with pytest.raises(ValueError, match="no disk"):
        await call
    assert (await life.wait_end()).exit_code == 0


async def test_work_that_is_cut_is_no_stop_at_a_safe_point(world: World, svc: Service):
    """The handler has stopped at one, and what goes on is cancelled at the deadline."""
    kept: list[asyncio.Task[None]] = []

    @svc.rpc
    async def create(ctx: Context) -> None:
        async def build() -> None:
            async with ctx.track("build"):
                await asyncio.sleep(3600)

        await begin(kept, build)
        async for _ in ctx.steps(range(1000)):
            await asyncio.sleep(1)

    life = await world.start(svc)
    await (await world.client(svc)).cast(create)
    await world.until(lambda: works_in(life) == ["create:build"])
    await life.drain()
    assert [row["cut"] for row in world.rows("SELECT cut FROM task")] == ["cancelled"]


async def test_a_block_may_end_elsewhere_than_it_began(
    world: World, svc: Service, threads: Threads
):
    """Entered by the handler and left by a thread, it keeps the task open, and its error counts."""

    @svc.rpc
    async def create(ctx: Context) -> str:
        block = contextlib.ExitStack()
        block.enter_context(ctx.track("build"))

        def build() -> None:
            with block:
                threads.wait()
                raise ValueError("no disk")

        threads.submit(build)
        return "created"

    life = await world.start(svc)
    call = await sent(await world.client(svc), "create")
    await asyncio.sleep(5)
    assert (works_in(life), call.done()) == (["create:build"], False)
    threads.go()
    with pytest.raises(ValueError, match="no disk"):
        await call


async def test_a_block_that_never_ends_is_unclean(world: World, svc: Service):
    """As a thread that does not."""
    blocks = []

    @svc.rpc
    async def create(ctx: Context) -> None:
        for keep_open in (True, False):
            blocks.append(ctx.track("build", keep_open=keep_open))
            blocks[-1].__enter__()

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="one").cast(create)
    await world.until(lambda: len(works_in(life)) == 2)
    report = await life.drain()

    assert (report.exit_code, len(report.unclean), report.unclean[0]) == (75, 2, "one")


async def test_a_block_in_a_thread_has_its_context_as_the_current_one(
    world: World, svc: Service, threads: Threads
):
    """A thread of the application has none before."""
    seen: list[object] = []

    @svc.rpc
    async def create(ctx: Context) -> None:
        def build() -> None:
            with ctx.track("build") as inside:
                seen.append(gracekit.current() is inside)
            with pytest.raises(LookupError):
                gracekit.current()

        await asyncio.wrap_future(threads.submit(build))

    await world.start(svc)
    await (await world.client(svc)).prepare(timeout=3000).call(create)
    assert seen == [True]


async def test_a_coroutine_function_is_no_call_for_a_thread(
    world: World, svc: Service, threads: Threads
):
    """The error says how to track it."""

    async def build() -> None: ...

    @svc.rpc
    async def create(ctx: Context) -> None:
        ctx.track_call(threads.submit, build)

    await world.start(svc)
    with pytest.raises(TypeError, match=r"async with ctx\.track\('build'\)"):
        await (await world.client(svc)).call(create)


async def test_a_safe_point_in_a_tracked_thread_stops_the_task_there(
    world: World, svc: Service, threads: Threads
):
    """The next start begins the handler again, from that cursor."""

    def build(ctx: Context) -> None:
        for part in ctx.steps(range(5)):
            if part == 2:
                threads.wait()

    @svc.rpc
    async def create(ctx: Context) -> None:
        ctx.track_call(threads.submit, build, ctx)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="one").cast(create)
    await world.until(lambda: works_in(life) == ["create:build"])
    life.ask_to_stop()
    await life.hears("intake.closed")
    threads.go()
    report = await life.wait_end()

    assert report.handed_over == ["one"]
    (row,) = world.rows("SELECT state, cut, cursor FROM task")
    assert (row["state"], row["cut"]) == ("handed_over", "safe_point")
    again = await world.start(svc)
    await world.until(lambda: world.state("one") == "succeeded")
    await again.drain()


async def test_a_crash_in_a_tracked_thread_is_one_of_its_task(
    world: World, svc: Service, threads: Threads
):
    """The row is RUNNING until the thread has ended, so `on_interrupt` decides."""

    @svc.rpc
    async def create(ctx: Context) -> None:
        ctx.track_call(threads.submit, threads.wait)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="one").cast(create)
    await world.until(lambda: works_in(life) == ["create:wait"])
    await life.crash()
    await world.start(svc)

    await world.until(lambda: world.state("one") == "errored")


async def test_a_handler_may_block_the_loop_until_its_tracked_threads_have_ended(
    world: World, svc: Service
):
    """A pool that is closed in a coroutine does so, and the end of its threads does not wait for
    that.
    """

    @svc.rpc
    async def create(ctx: Context) -> str:
        with ThreadPoolExecutor(2) as pool:
            ctx.track_call(pool.submit, str)
        return "created"

    await world.start(svc)
    assert await (await world.client(svc)).call(create) == "created"


# -- blocks in asyncio tasks of the handler ---------------------------------------------


async def begin(kept: list[asyncio.Task[None]], *works: Callable[[], Awaitable[None]]) -> None:
    """Leave work to asyncio tasks, and let each begin."""
    kept.extend(asyncio.ensure_future(work()) for work in works)
    await asyncio.sleep(0)


async def test_nothing_is_kept_of_a_request_that_has_left_work(world: World, svc: Service):
    """Otherwise no suspect could be alone in this process any more."""
    kept: list[asyncio.Task[None]] = []

    @svc.rpc(on_interrupt="requeue")
    async def create(ctx: Context) -> str:
        async def work() -> None:
            async with ctx.track("work"):
                await asyncio.sleep(1)

        await begin(kept, work)
        return "created"

    life = await world.start(svc)
    assert await (await world.client(svc)).call(create) == "created"
    assert not life.runtime.wired.dispatcher._scheduler._suspects._inside


async def test_a_block_that_begins_as_another_ends_keeps_the_task_open(world: World, svc: Service):
    """Also in the moment in which a cancellation by the application is taken back."""
    kept: list[asyncio.Task[None]] = []

    @svc.rpc(resource="vm")
    async def create(ctx: Context, vm: str) -> str:
        go = asyncio.Event()

        async def first() -> None:
            async with ctx.track("first"):
                await asyncio.sleep(5)
            go.set()

        async def second() -> None:
            await go.wait()
            async with ctx.track("second"):
                await asyncio.sleep(5)

        me = asyncio.current_task()
        assert me is not None
        asyncio.get_running_loop().call_later(1, me.cancel)
        await begin(kept, second, first)
        return "created"

    life = await world.start(svc)
    call = await sent(await world.client(svc), "create", vm="1")
    await asyncio.sleep(7)
    assert (works_in(life), call.done()) == (["create:second"], False)
    assert await call == "created"


async def test_a_block_that_begins_after_the_cancel_of_its_task_is_cancelled(
    world: World, svc: Service
):
    """While another one cleans up after it."""
    kept: list[asyncio.Task[None]] = []

    @svc.rpc(timeout="5s")
    async def create(ctx: Context) -> None:
        async def first() -> None:
            async with ctx.track("first"):
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    await asyncio.sleep(10)

        async def second() -> None:
            await asyncio.sleep(10)
            async with ctx.track("second"):
                await asyncio.sleep(3600)

        await begin(kept, first, second)

    await world.start(svc)
    with pytest.raises(MethodTimeoutError):
        await (await world.client(svc)).prepare(request_id="one").call(create)
    await asyncio.sleep(15)
    assert (world.state("one"), kept[1].cancelled()) == ("failed", True)


async def test_a_failed_handler_stays_failed_whatever_its_work_does(world: World, svc: Service):
    """A safe point of the work in a drain takes nothing back."""
    kept: list[asyncio.Task[None]] = []

    @svc.rpc(on_interrupt="retry")
    async def create(ctx: Context) -> None:
        async def work() -> None:
            async with ctx.track("work"):
                for part in range(100):
                    await asyncio.sleep(1)
                    await ctx.safe_point(part)

        await begin(kept, work)
        raise ValueError("no disk")

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="one").cast(create)
    await world.until(lambda: works_in(life) == ["create:work"])
    assert (await life.drain()).exit_code == 0
    assert world.state("one") == "failed"


async def test_the_end_of_a_block_that_is_cut_is_a_line(world: World, svc: Service):
    """As that of one that ends by itself."""
    kept: list[asyncio.Task[None]] = []

    @svc.rpc
    async def create(ctx: Context) -> None:
        async def work() -> None:
            async with ctx.track("work", keep_open=False):
                await asyncio.sleep(3600)

        await begin(kept, work)

    life = await world.start(svc)
    await (await world.client(svc)).call(create)
    await life.drain()
    assert [told["outcome"] for told in life.told("work.ended")] == ["cut"]


async def test_a_submit_that_is_a_coroutine_function_is_refused(world: World, svc: Service):
    """Its thread may never begin, if what awaits it is cancelled; the error says what to write."""

    @svc.rpc
    async def create(ctx: Context) -> None:
        await ctx.track_call(asyncio.to_thread, str)

    life = await world.start(svc)
    with pytest.raises(TypeError, match=r"async with ctx\.track\('str'\)"):
        await (await world.client(svc)).call(create)
    assert works_in(life) == []


async def test_a_call_that_was_given_up_does_not_run(world: World, svc: Service):
    """Its task has FAILED without it: a thread that comes to it later gets the same error."""
    given: list[Callable[[], object]] = []
    ran: list[str] = []

    @svc.rpc
    async def create(ctx: Context) -> None:
        def submit(call: Callable[[str], object], word: str) -> asyncio.Future[object]:
            given.append(lambda: call(word))
            return asyncio.get_running_loop().create_future()

        ctx.track_call(submit, ran.append, "ran").cancel()
        await asyncio.sleep(0)

    await world.start(svc)
    with pytest.raises(RemoteError, match="was cancelled before it began"):
        await (await world.client(svc)).call(create)
    with pytest.raises(CancelledError):
        given[0]()
    assert ran == []
