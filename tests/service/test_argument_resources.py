"""Resources inside of arguments: read before acceptance, and then as any other resource."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from gracekit import Context, NoCapacity, Service
from gracekit.rpc.methods import Method
from tests.service.kit import Doors, World
from tests.service.parked import Site

SHORT = {"drain_timeout_s": 0.3, "handover_grace_s": 0.2, "handover_flush_s": 0.2}
INSTANCE = {"uuid": "i-1", "name": "a"}


def rejected(world: World) -> list[str]:
    return [row["reason"] for row in world.rows("SELECT reason FROM task WHERE state = 'rejected'")]


@pytest.mark.looptime
@pytest.mark.parametrize(
    "source", ["instance.uuid", lambda args: args["instance"]["uuid"]], ids=["path", "function"]
)
async def test_tasks_for_one_instance_run_one_after_the_other(
    world: World, svc: Service, source: Any
):
    """Under one lease with a rising token, and beside those for another instance."""
    doors, fences = Doors(), []

    @svc.rpc(resource=("instance", source))
    async def build(ctx: Context, n: int, instance: dict[str, str]) -> None:
        fences.append(ctx.fence)
        await doors.pass_(n)

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="a").cast(build, n=1, instance=INSTANCE)
    await client.prepare(request_id="b").cast(build, n=2, instance={**INSTANCE, "name": "b"})
    await client.prepare(request_id="c").cast(build, n=3, instance={"uuid": "i-2"})
    assert await doors.wait(2) == [1, 3]
    doors.open(1, 2, 3)
    await world.until(lambda: set(world.states().values()) == {"succeeded"})

    assert [world.task(one)["resource_id"] for one in "abc"] == ["i-1", "i-1", "i-2"]
    assert world.task("a")["resource_kind"] == "instance"
    assert fences[0] < fences[2]


@pytest.mark.looptime
async def test_a_request_without_the_part_is_refused(world: World, svc: Service):
    """Before acceptance, also one of an ops method; its caller reads which part is missing."""
    calls = []

    @svc.rpc(resource=("instance", "instance.uuid"))
    async def build(ctx: Context, instance: Any) -> None:
        calls.append(instance)

    @svc.ops(resource=("instance", "instance.uuid"))
    async def look(ctx: Context, instance: Any) -> None:
        calls.append(instance)

    await world.start(svc)
    client = await world.client(svc)
    for method in (build, look):
        with pytest.raises(TypeError, match=r"needs a value for 'instance\.uuid': it"):
            await client.call(method, instance={"name": "secret"})

    assert calls == []
    assert rejected(world) == ["arguments", "arguments"]


@pytest.mark.looptime
async def test_a_function_is_called_once_for_each_request(world: World, svc: Service):
    """So it may also say something else the next time."""
    numbers = iter("123")

    @svc.rpc(resource=("thing", lambda args: next(numbers)))
    async def build(ctx: Context) -> None: ...

    await world.start(svc)
    client = await world.client(svc)
    for one in "abc":
        await client.prepare(request_id=one).call(build)

    assert [world.task(one)["resource_id"] for one in "abc"] == ["1", "2", "3"]


@pytest.mark.looptime
async def test_a_retry_of_a_parked_task_keeps_the_resource_inside_of_arguments(world: World):
    """Other arguments may be replaced, also in the same object."""
    room = [False, False]
    site = Site(world, Service("compute", task_api=True))

    @site.svc.rpc(resource=("instance", "instance.uuid"), on_interrupt="retry")
    async def build(ctx: Context, instance: dict[str, str]) -> None:
        if not room.pop(0):
            raise NoCapacity("no room", requested={})

    await site.start()
    client = await site.client()
    await client.prepare(request_id="t").cast(build, instance=INSTANCE)
    await world.until(lambda: site.state() == "pending")
    with pytest.raises(
        TypeError, match="acts on instance:i-1, and these arguments name instance:i-2"
    ):
        await site.order("retry", args={"instance": {"uuid": "i-2"}})
    with pytest.raises(TypeError, match="needs a value for"):
        await site.order("retry", args={"instance": {}})
    await site.order("retry", args={"instance": {**INSTANCE, "name": "b"}})
    await world.until(lambda: site.row()["parkings"] == 2)
    assert site.row()["resource_id"] == "i-1"


# -- arguments that must be deserialized, as those of endpoints of oslo.messaging ----------------


def read_by(
    method: Method[..., Any], serializer: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> None:
    """Have arguments read early, as `include_endpoints` does."""

    def reads_early(
        method: Method[..., Any], ctx: Mapping[str, Any], args: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        return method.resource_of(serializer(args))

    method.reads_early = partial(reads_early, method)


async def test_a_drain_gives_a_request_back_while_its_arguments_are_read(
    world: World, svc: Service
):
    """At once, however long the serializer takes; the next run runs it, once."""
    go, reading, begun = threading.Event(), threading.Event(), []

    def slow(args: Mapping[str, Any]) -> Mapping[str, Any]:
        reading.set()
        go.wait(30)
        return args

    @svc.rpc(resource=("instance", "instance.uuid"), on_interrupt="retry")
    async def build(ctx: Context, instance: Any) -> None:
        begun.append(ctx.fence)

    read_by(build, slow)
    life = await world.start(svc, **(SHORT | {"drain_timeout_s": 20}))
    client = await world.client(svc)
    await client.prepare(request_id="r").cast(build, instance=INSTANCE)
    await world.until(reading.is_set)
    report = await life.drain()

    assert (report.given_back, report.exit_code, report.waited_s < 5) == (1, 0, True)
    assert world.states() == {}
    go.set()
    await world.start(svc)
    await world.until(lambda: world.states() == {"r": "succeeded"})
    assert len(begun) == 1


async def test_a_serializer_that_hangs_takes_no_thread_of_a_handler(world: World, svc: Service):
    """Whatever waits for it is neither accepted nor lost."""
    go, reading = threading.Event(), threading.Event()

    def hangs(args: Mapping[str, Any]) -> Mapping[str, Any]:
        reading.set()
        go.wait(30)
        return args

    @svc.rpc(resource=("instance", "instance.uuid"))
    async def build(ctx: Context, instance: Any) -> None: ...

    @svc.rpc
    def work(ctx: Context) -> str:
        return "done"

    read_by(build, hangs)
    life = await world.start(svc, threads=1, **SHORT)
    client = await world.client(svc)
    for _ in range(3):
        await client.cast(build, instance=INSTANCE)
    await world.until(reading.is_set)

    assert await client.prepare(timeout=10).call(work) == "done"
    report = await life.drain()
    go.set()

    assert (report.given_back, report.exit_code) == (3, 0)
    assert world.broker.waiting("compute") == 3


async def test_recovery_runs_a_task_without_reading_its_resource_again(world: World, svc: Service):
    """The row has the resource, so a serializer that fails by then does not matter."""
    doors, begun = Doors(), []
    works = [True]

    def once(args: Mapping[str, Any]) -> Mapping[str, Any]:
        if not works.pop():
            raise AssertionError("read again")
        return args

    @svc.rpc(resource=("instance", "instance.uuid"), on_interrupt="retry", settle=0)
    async def build(ctx: Context, instance: Any) -> None:
        begun.append(ctx.fence)
        if len(begun) == 1:
            await doors.pass_("first")

    read_by(build, once)
    life = await world.start(svc, **SHORT)
    client = await world.client(svc)
    await client.prepare(request_id="r").cast(build, instance=INSTANCE)
    await doors.wait(1)
    await life.crash()
    await world.start(svc, startup_reconciliation_wait_seconds=0)
    await world.until(lambda: world.states() == {"r": "succeeded"})

    assert world.task("r")["resource_id"] == "i-1"
    assert begun[0] < begun[1]


async def test_a_request_whose_step_is_cancelled_from_outside_comes_again(
    world: World, svc: Service
):
    """A request whose arguments are being read comes again, and runs once."""
    go, reading, begun = threading.Event(), threading.Event(), []

    def slow(args: Mapping[str, Any]) -> Mapping[str, Any]:
        reading.set()
        go.wait(30)
        return args

    @svc.rpc(resource=("instance", "instance.uuid"))
    async def build(ctx: Context, instance: Any) -> None:
        begun.append(ctx.request_id)

    read_by(build, slow)
    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r").cast(build, instance=INSTANCE)
    await world.until(reading.is_set)
    for task in asyncio.all_tasks():
        if task.get_coro().__name__ == "dispatch":  # type: ignore[union-attr]
            task.cancel()
    go.set()
    await world.until(lambda: world.states() == {"r": "succeeded"})

    assert begun == ["r"]
