"""A store elsewhere may be unreachable for a time, or fence the run: what the service does then."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.errors import StoreFencedError
from gracekit.process import Point
from gracekit.runs.run import gone, list_runs
from gracekit.store.batch import Batch
from gracekit.tracker.task import Lane
from tests.service.kit import Doors, World

pytestmark = pytest.mark.looptime


@pytest.fixture
def doors() -> Doors:
    return Doors()


@pytest.fixture
def svc(doors: Doors) -> Service:
    made = Service("compute")

    @made.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> str:
        await doors.pass_("work")
        return "done"

    @made.ops(on_interrupt="requeue")
    async def ping(ctx: Context) -> str:
        return "pong"

    return made


async def test_a_service_without_its_store_is_not_ready_and_says_so_once(
    world: World, svc: Service, doors: Doors
):
    """What a handler has returned meanwhile is recorded when the store is back, and then
    answered.
    """
    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=300, request_id="w").call("work"))
    await doors.wait(1)

    life.engine.disconnect()
    lost = await life.hears("store.unreachable")
    doors.open("work")
    await asyncio.sleep(60)
    why = f"the store cannot be reached: {lost['error']}"
    assert life.runtime.not_ready == why
    assert (await world.verb(life, "status"))["not_ready"] == why
    assert not call.done()

    life.engine.reconnect()
    back = await life.hears("store.reachable")
    assert life.runtime.not_ready is None
    assert await call == "done"
    assert world.state("w") == "succeeded"
    assert back["away_s"] == pytest.approx(60, abs=1)
    assert lost["away_s"] == 0
    assert life.names().count("store.unreachable") == 1


async def test_a_run_that_is_fenced_stops_its_handlers_at_once_and_fails(
    world: World, svc: Service, doors: Doors
):
    """Its tasks belong to other runs; nothing that it might still write of them is taken."""
    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    task = await client.cast("work")
    await doors.wait(1)
    began_at = asyncio.get_running_loop().time()

    life.engine.fence()
    report = await life.wait_end()

    assert asyncio.get_running_loop().time() - began_at < life.runtime.settings.drain_timeout_s
    assert report.exit_code == 70
    assert "may not act any more: this run was declared dead" in (report.failure or "")
    assert doors.ended == []
    assert world.state(task) == "running"
    assert life.names().count("store.fenced") == 1
    assert "store.broken" not in life.names()


async def test_a_run_that_was_adopted_alive_commits_nothing_more(
    world: World, svc: Service, doors: Doors
):
    """An operator erred: the run lives. A request that it would accept would be found by nobody."""
    world.expects_faults = True
    first = await world.start(svc, host="node-1")
    client = await world.client(svc)
    working = await client.cast("work")
    await doors.wait(1)
    second = await world.start(svc, host="node-2")
    (run,) = [one for one in await list_runs(second.engine) if one.run_id == first.runtime.run_id]
    await second.engine.commit(gone(run, by="an operator", reason="it burns", at=0.0))

    with pytest.raises(StoreFencedError):
        await first.engine.commit(Batch(Point.ACCEPT))
    await second.hears("run.classified")
    doors.open("work")
    report = await first.wait_end()
    late = [await client.cast("work") for _ in range(8)]
    for task in (working, *late):
        await world.until(lambda task=task: world.state(task) == "succeeded")

    assert report.exit_code == 70
    assert "this run was declared dead" in (report.failure or "")
    assert "store.fenced" in first.names()
    assert world.rows("SELECT 1 FROM task WHERE owner IS NOT NULL AND finished_at IS NULL") == []


async def test_what_belongs_to_a_run_that_may_not_act_is_taken_over_and_told(
    world: World, svc: Service, doors: Doors
):
    """No commit can leave such a row; one that is there nevertheless is not left for ever."""
    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    await life.drain()
    for task in ("ran", "waits"):
        await client.prepare(request_id=task).cast("work")
    cut = await world.start(svc)
    await doors.wait(2)
    await cut.crash()
    world.disk.execute("UPDATE run SET adopted_at = 0, verdict = 'killed' WHERE adopted_at IS NULL")
    world.disk.execute("DELETE FROM beat")
    world.disk.execute("UPDATE task SET state = 'accepted' WHERE request_id = 'waits'")
    doors.open("work")
    heir = await world.start(svc)

    told = await heir.hears("store.stranded")
    for task in ("ran", "waits"):
        await world.until(lambda task=task: world.state(task) == "succeeded")

    assert told == {"run": cut.runtime.run_id, "unfinished": 1, "not_started": 1}
    assert len(heir.told("store.stranded")) == 1


async def test_a_drain_without_its_store_ends_in_time_and_fails(
    world: World, svc: Service, doors: Doors
):
    """The rows stay as they are for the next start, and the exit says that this was no order."""
    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    task = await client.cast("work")
    await doors.wait(1)

    life.engine.disconnect()
    began_at = asyncio.get_running_loop().time()
    report = await life.drain()

    took_s = asyncio.get_running_loop().time() - began_at
    assert took_s <= life.runtime.settings.hard_limit_s
    assert report.exit_code == 70
    assert world.state(task) == "running"


async def test_a_request_that_comes_without_a_store_waits_in_its_queue(
    world: World, svc: Service, doors: Doors
):
    """Intake closes once, so a broker does not get the request back again and again."""
    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    life.engine.disconnect()
    doors.open("work")
    task = await client.cast("work")
    await asyncio.sleep(60)
    refused = [told for told in life.told("store.error") if told["what"] == "acceptance"]
    closed = [told["lane"] for told in life.told("intake.closed")]

    assert await client.prepare(ops=True).call("ping") == "pong"
    life.engine.reconnect()
    await world.until(lambda: world.state(task) == "succeeded")

    assert doors.entered == ["work"]
    assert len(refused) <= 3
    assert closed == ["requests"]
    assert [told["lane"] for told in life.told("intake.opened")][-1] == "requests"


async def test_a_store_that_comes_back_opens_no_intake_that_an_operator_has_closed(
    world: World, svc: Service, doors: Doors
):
    """Nor does a resume open it while the store is away, or a drain keep it open."""
    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    server = life.runtime.wired.servers[Lane.REQUESTS]
    life.engine.disconnect()
    await life.hears("intake.closed")
    await world.verb(life, "quiet")
    life.engine.reconnect()
    await asyncio.sleep(60)
    assert not server.is_open
    life.engine.disconnect()
    await asyncio.sleep(5)
    await world.verb(life, "resume")
    await asyncio.sleep(5)
    assert not server.is_open

    life.engine.reconnect()
    doors.open("work")
    task = await client.cast("work")
    await world.until(lambda: world.state(task) == "succeeded")
    report = await life.drain()

    assert report.exit_code == 0
    assert not server.is_open
