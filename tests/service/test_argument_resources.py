"""Resources inside of arguments: read before acceptance, and then as any other resource."""

from __future__ import annotations

from typing import Any

import pytest

from gracekit import Context, NoCapacity, Service
from tests.service.kit import Doors, World
from tests.service.parked import Site

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
    """
    Under one lease with a rising token, and beside those for another instance.
    """
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
    """
    Before acceptance, also one of an ops method; its caller reads which part is missing.
    """
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
    """
    So it may also say something else the next time.
    """
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
    """
    Other arguments may be replaced, also in the same object.
    """
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
