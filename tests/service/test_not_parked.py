"""What says why a task whose handler found no capacity does not wait for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, NoCapacity, Service
from tests.service.kit import Life, World
from tests.service.parked import full_placement

pytestmark = pytest.mark.looptime

SAID = "full; the task is not parked, because"


@pytest.fixture
def svc() -> Service:
    return Service("compute")


def errors_of(life: Life) -> list[str]:
    """What was logged of failed tasks."""
    return [fields["error"] for fields in life.told("task.failed")]


async def failure_of(world: World, svc: Service, method: Any, **args: Any) -> NoCapacity:
    """What a caller gets of *method* of a service whose `use_pending_state` is on."""
    client = await world.client(svc)
    with pytest.raises(NoCapacity) as caught:
        await client.prepare(request_id="t", pending=True).call(method, **args)
    return caught.value


async def test_the_log_says_that_the_setting_is_off(world: World, svc: Service):
    """For the record and for callers it is a failure as any other."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full")

    life = await world.start(svc)
    told = await failure_of(world, svc, build)

    assert errors_of(life) == [f"NoCapacity: {SAID} GRACEKIT_USE_PENDING_STATE is off"]
    assert (str(told), world.task("t")["detail"]) == ("full", "full")


async def test_with_the_setting_off_no_other_reason_is_given(world: World, svc: Service):
    """To turn it on would change nothing here, so nothing is said of it."""

    @svc.rpc(on_interrupt="requeue")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full")

    life = await world.start(svc)
    told = await failure_of(world, svc, build)

    assert (errors_of(life), str(told)) == (["NoCapacity: full"], "full")


async def test_the_caller_of_a_requeue_method_reads_that_nothing_waits(world: World, svc: Service):
    """The class is that of a parked task's answer, so the text has to differ."""

    @svc.rpc(on_interrupt="requeue")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full")

    life = await world.start(svc, use_pending_state=True)
    told = await failure_of(world, svc, build)

    why = f"{SAID} build() has on_interrupt='requeue', and so no record that could wait"
    assert (errors_of(life), str(told)) == ([f"NoCapacity: {why}"], why)


async def test_a_copy_of_a_fanout_is_on_record_with_why_it_does_not_wait(
    world: World, svc: Service
):
    """Each instance has a copy of its own, and the record of each says so."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full")

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").fanout(build)
    await life.hears("task.finished")

    why = f"{SAID} it is a copy of a fanout, which is meant for one instance"
    assert [row["detail"] for row in world.rows("SELECT detail FROM task")] == [why]
    assert errors_of(life) == [f"NoCapacity: {why}"]


async def test_what_a_callee_has_raised_says_that_it_parks_nothing_here(world: World, svc: Service):
    """It looks like an answer about this task, and is one about another task."""
    placement, claim = await full_placement(world)

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        await placement.call(claim)

    await world.start(svc, use_pending_state=True)
    told = await failure_of(world, svc, build)

    why = (
        "no inventory; the task is not parked, because its handler has passed on an error of a "
        "service that it called, and only a NoCapacity of its own parks it"
    )
    assert (str(told), world.task("t")["detail"]) == (why, why)


async def test_no_capacity_in_a_group_is_named_with_the_remedy(world: World, svc: Service):
    """The class of the failure is the group's; the log and the record show what is inside."""

    async def find_room() -> None:
        raise NoCapacity("full")

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(find_room())

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await life.hears("task.finished")

    why = (
        "unhandled errors in a TaskGroup (1 sub-exception); the task is not parked, because "
        "NoCapacity('full') is in a group of exceptions: catch it with `except* NoCapacity`, and "
        "raise one by itself"
    )
    assert world.task("t")["detail"] == why
    assert errors_of(life) == [f"ExceptionGroup: {why}"]
    assert "not parked" not in world.task("t")["failure"]


async def test_a_group_does_not_show_what_the_request_has_sent(world: World, svc: Service):
    """What a handler says of a request is masked in the log, also where it stands in a group."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context, flavor: str) -> None:
        raise ExceptionGroup("both", [NoCapacity(f"no {flavor}"), ValueError()])

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build, flavor="canary-large")
    await life.hears("task.finished")

    (line,) = errors_of(life)
    assert "NoCapacity('no <flavor>')" in line


async def test_a_group_without_no_capacity_is_a_failure_as_any_other(world: World, svc: Service):
    """Nothing is said of parking where nobody has asked for it."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        raise ExceptionGroup("both", [KeyError("a"), ValueError("b")])

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await life.hears("task.finished")

    assert errors_of(life) == ["ExceptionGroup: both (2 sub-exceptions)"]


async def test_the_reason_is_on_record_behind_a_long_message(world: World, svc: Service):
    """The message is cut, and not what explains it."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        raise NoCapacity("x" * 2000)

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").fanout(build)
    await life.hears("task.finished")

    (row,) = world.rows("SELECT detail FROM task")
    assert len(row["detail"]) == 1000
    assert row["detail"].endswith("which is meant for one instance")
