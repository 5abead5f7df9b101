"""A store of the schema before PENDING: it opens, its work goes on, and tasks can be parked."""

from __future__ import annotations

import pytest

from gracekit import Context, NoCapacity, Service
from gracekit.store.migrate import MIGRATIONS, load_migrations
from tests.service.kit import World
from tests.service.parked import Site
from tests.service.test_older_store import write_old_store

pytestmark = pytest.mark.looptime

BEFORE = 9
"""The last schema without parked tasks."""


def write_store_before_pending(world: World) -> None:
    """A task in each state, and a reply that is due, as a killed run of that schema left them."""
    write_old_store(world)
    for script in load_migrations(MIGRATIONS)[1:BEFORE]:
        world.disk.execute(script)
    world.disk.execute(f"PRAGMA user_version = {BEFORE}")
    wall = world.clock.wall()
    world.disk.execute(
        "INSERT INTO reply (task_id, queue, msg_id, expires_at, due_at) "
        "SELECT id, 'reply_gone', 'm', ?1, ?2 FROM task WHERE state = 'accepted'",
        (wall + 100, None),
    )


async def test_its_unfinished_tasks_can_be_parked_and_moved(world: World):
    """
    Accepted, running and handed over before: each is parked, listed, and runs again.
    """
    svc = Service("compute", task_api=True)
    free: set[str] = set()

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: str) -> str:
        if ctx.request_id not in free:
            raise NoCapacity("full", requested={"vm": vm})
        return "done"

    write_store_before_pending(world)
    columns = {row["name"] for row in world.rows("PRAGMA table_info(task)")}
    assert "parkings" not in columns
    site = Site(world, svc)
    await site.start()
    opened = {"accepted", "running", "handed_over"}
    await world.until(lambda: {world.state(one) for one in opened} == {"pending"})

    listed = (await site.api("list_pending"))["tasks"]
    # No version before this one has written PENDING; what says so has no deadline, and stays.
    assert {one["task_id"] for one in listed} - {"pending"} == opened
    assert {one["version"] for one in listed if one["task_id"] in opened} == {1}
    free |= opened
    for task_id in sorted(opened):
        await site.order("retry", task_id)
    await world.until(lambda: {world.state(one) for one in opened} == {"succeeded"})
    await world.until(lambda: not site.unsent() and not world.rows("SELECT * FROM reply"))
    steps = await site.steps()
    each = ["running>pending no_capacity 1", "pending>accepted  1", "running>succeeded  1"]
    assert sorted(steps) == sorted(3 * each)


async def test_its_callers_are_answered_as_before(world: World):
    """
    Whoever called an older run does not know the state, and owns no part of the reply.
    """
    svc = Service("compute")

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: str) -> str:
        return "done"

    write_store_before_pending(world)
    site = Site(world, svc)
    await site.start(use_pending_state=False)
    await site.ends("succeeded", "accepted")

    await world.until(lambda: not world.rows("SELECT * FROM reply"))
