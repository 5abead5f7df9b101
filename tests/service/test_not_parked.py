"""What says why a task whose handler found no capacity does not wait for it."""

from __future__ import annotations

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


async def test_with_the_setting_off_no_reason_is_given(world: World, svc: Service):
    """For the record, the log and callers it is a failure as any other."""

    @svc.rpc(on_interrupt="retry")
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
