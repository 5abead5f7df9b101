"""The resource that an ops method names: shown everywhere, and leased nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from gracekit import Context, NoCapacity, Service
from gracekit.journal.tasks_sql import ROW_COLUMNS
from gracekit.listings.chosen_task import find
from gracekit.listings.one_task import read_task
from gracekit.listings.store_view import Reports, RunReport, StoreView
from gracekit.listings.task_list import TaskQuery, list_tasks
from gracekit.request.attempt import CALLERS
from gracekit.runs.run import Run
from gracekit.tracker.stacks import StackDump
from tests.service.kit import Doors, Life, World
from tests.service.parked import Site
from tests.store.test_sql import texts

pytestmark = pytest.mark.looptime

VM = ("vm", "vm:1")
"""Its id has a colon, as ids may."""


class Machines(Service):
    """`work` takes the lease of a machine; `look` and `place` name one as ops methods."""

    def __init__(self) -> None:
        super().__init__("compute", task_api=True)
        self.doors = doors = Doors()

        @self.rpc(resource="vm", on_interrupt="retry")
        async def work(ctx: Context, vm: str) -> None:
            await doors.pass_("work")

        @self.ops(resource="vm", on_interrupt="retry")
        async def look(ctx: Context, vm: str) -> None:
            await doors.pass_("look")

        @self.ops(resource="vm")
        async def fail(ctx: Context, vm: str) -> None:
            raise LookupError(f"no machine {vm}")

        @self.ops(resource="vm")
        async def place(ctx: Context, vm: str, size: int = 9) -> None:
            if size > 1:
                raise NoCapacity("no room", requested={"size": size})


@pytest.fixture
def machines() -> Machines:
    return Machines()


def view_of(world: World, life: Life) -> StoreView:
    return StoreView(life.engine, life.process, None, world.clock)


async def listed(world: World, life: Life, **query: Any) -> dict[str, str | None]:
    """The resource by method."""
    found = await list_tasks(view_of(world, life), {}, TaskQuery(**query))
    return {task.columns["method"]: task.resource for task in found.tasks}


async def shown(world: World, life: Life, request_id: str) -> dict[str, Any]:
    """What `tasks show --json` has."""

    async def hear_all() -> Reports:
        return {}

    async def hear(_: Run) -> RunReport:
        return RunReport()

    view = view_of(world, life)
    return (await read_task(view, await find(view, request_id, None, hear_all), hear)).as_json()


async def test_an_ops_method_shows_its_resource_and_takes_no_lease(
    world: World, machines: Machines
):
    """It runs beside the task that has the lease, and events, listings, status and dump name what
    it is about.
    """
    life = await world.start(machines)
    client = await world.client(machines)
    await client.prepare(request_id="work-1").cast("work", vm="vm:1")
    await machines.doors.wait(1)
    await client.prepare(ops=True, request_id="look-1").cast("look", vm="vm:1")
    assert await machines.doors.wait(2) == ["work", "look"]

    row = world.task("look-1")
    assert (row["resource_kind"], row["resource_id"]) == (None, None)
    assert (row["ops_kind"], row["ops_id"], row["token"]) == (*VM, None)
    work = world.task("work-1")
    assert (work["resource_kind"], work["resource_id"], work["ops_kind"]) == (*VM, None)
    assert [lease["request_id"] for lease in world.rows("SELECT * FROM lease")] == ["work-1"]
    assert [event["resource"] for event in life.told("task.started")] == [VM, VM]
    task = life.runtime.wired.tracker.get("look-1", "")
    assert task is not None
    assert (task.resource, task.shown_resource) == (None, VM)

    stacks = StackDump(lambda: "x", life.runtime.wired.tracker, callers=CALLERS)
    told = stacks.text(now=0.0, loop_thread=0)
    assert told.count("resource=vm:vm:1") == 2
    page = await world.verb(life, "status", task_id="look-1")
    assert page["tasks"][0]["resource"] == "vm:vm:1"
    both = {"work": "vm:vm:1", "look": "vm:vm:1"}
    for word in ("vm:vm:1", "vm:1", "vm:"):
        assert await listed(world, life, resource=word) == both
    assert await listed(world, life, resource="vm:2") == {}
    record = await shown(world, life, "look-1")
    assert (record["task"]["ops_kind"], record["task"]["ops_id"], record["lease"]) == (*VM, None)
    machines.doors.open("work", "look")
    await life.hears("task.finished", 2)
    await world.settle()
    assert await listed(world, life, resource="vm:vm:1", states=("all",)) == both


async def test_the_next_run_still_shows_the_resource_of_an_ops_task(
    world: World, machines: Machines
):
    """Recovery starts it without a lease, and every event about it names the resource; so does the
    list of what a drain waits for, if it came by the topic of new requests.
    """
    first = await world.start(machines)
    client = await world.client(machines, ops_topic="compute")
    await client.prepare(ops=True, request_id="look-1").cast("look", vm="vm:1")
    await machines.doors.wait(1)
    await first.crash()
    life = await world.start(machines, startup_reconciliation_wait_seconds=0)
    await machines.doors.wait(2)

    life.ask_to_stop()
    awaited = await life.hears("task.awaited")
    progress = await life.hears("drain.progress")
    machines.doors.open("look")
    await life.wait_end()

    assert awaited["resource"] == VM
    assert progress["tasks"].startswith("look vm:vm:1 ")
    about = [fields for _, fields in life.events if fields.get("task_id") == "look-1"]
    assert {fields["resource"] for fields in about} == {VM}
    assert len(about) > 2
    assert world.rows("SELECT * FROM lease") == []


async def test_the_log_keeps_the_id_that_an_ops_method_names(world: World, machines: Machines):
    """As for other methods, the id of the resource is no secret of the caller in its error."""
    life = await world.start(machines)
    client = await world.client(machines)
    await client.prepare(ops=True).cast("fail", vm="vm:1")

    failed = await life.hears("task.failed")

    assert failed["error"] == "LookupError: no machine vm:1"


async def test_a_parked_ops_task_keeps_its_resource(world: World, machines: Machines):
    """Resolvers see it, and may retry the task with other arguments that name the same resource."""
    site = Site(world, machines)
    life = await site.start()
    client = await site.client()
    await client.prepare(ops=True, request_id="t").cast("place", vm="vm:1")
    await life.hears("task.parked")
    await world.settle()

    assert (await site.api("get", task_id="t"))["resource"] == "vm:vm:1"
    assert await listed(world, life, resource="vm:vm:1") == {"place": "vm:vm:1"}
    with pytest.raises(TypeError, match="acts on vm:vm:1, and these arguments name"):
        await site.order("retry", args={"vm": "vm:2"})
    await site.order("retry", args={"vm": "vm:1", "size": 1})
    await life.hears("task.finished")
    await world.settle()
    assert site.state() == "succeeded"


def test_only_rows_and_listings_ask_for_the_resource_of_an_ops_method():
    """A statement about leases, lines, recovery or passes would give it a lease after all."""
    asking = {
        name.split(".")[0]
        for name, text in texts().items()
        if "ops_kind" in text.replace(ROW_COLUMNS, "")  # a whole row is read, and not asked about
    }

    assert asking == {"tasks_sql", "order_rows_sql", "pending_sql", "listings_sql"}
