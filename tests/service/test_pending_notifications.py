"""The outbox: what resolvers are told of parked tasks, from the commit until it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, NoCapacity, Service
from gracekit.journal.order_rows import OrderTarget, add_order, incident_of, state_of, target_named
from gracekit.journal.outbox import News, utc_text
from gracekit.journal.pending import add_parked_order
from gracekit.process import Point
from gracekit.request.outcomes import ordered
from gracekit.rpc.transport import Message, Queue
from gracekit.store.batch import Batch
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.testing.faults import Fault
from gracekit.tracker.task import Order, TaskState, Verb
from tests.played import PlayedProcess, PlayedTransport
from tests.service.kit import Life, World, now
from tests.service.parked import Builds, step_of

pytestmark = pytest.mark.looptime

PARKED = "running>pending no_capacity 1"
QUEUES = ("compute-notifications.info", "compute-notifications.error")


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


async def park_cast(builds: Builds, task_id: str = "t") -> None:
    """Have a task parked for which nobody waits, so that nothing but notifications is sent."""
    client = await builds.client()
    await client.prepare(request_id=task_id).cast(builds.build, vm=task_id, memory_mb=5)
    await builds.ends("pending", task_id)


def cut_off(life: Life, times: int = 1000) -> None:
    """From now on the broker takes nothing from that run."""
    life.plan("publish", Fault.REFUSED, times=times)


async def order_on_disk(world: World, verb: Verb, task_id: str = "t") -> None:
    """What the command line does with a task that is parked, or that a dead run has left."""
    process = PlayedProcess(set(), 1)
    engine = MemoryEngine(load_migrations(MIGRATIONS), process=process, connection=world.disk)
    await engine.start()
    target = await target_named(engine, task_id, "")
    assert isinstance(target, OrderTarget)
    order = Order(verb=verb, by="ann@desk", reason="wrong host")
    news = News(message_id=f"m-{task_id}", at=world.clock.wall(), sender=None)
    outcome = None if verb is Verb.RETRY else ordered(str(target), order, target.state)
    was = state_of(target)
    mark = incident_of(order, task_id, "build", was, at=news.at, run="operator")
    batch = Batch(Point.UNPARK)
    if target.state is TaskState.PENDING:
        add_parked_order(batch, target, outcome, mark, news)
    else:
        add_order(batch, target, outcome, mark, news, dead=False)
    await engine.commit(batch)


# -- once, where nothing goes wrong ------------------------------------------------------------


async def test_a_stop_waits_for_what_is_being_sent(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """A drain that begins before the broker has confirmed them does not send them again."""
    at_once, draining = PlayedTransport.publish, asyncio.Event()

    async def confirmed_late(transport: PlayedTransport, queue: Queue, message: Message) -> None:
        await at_once(transport, queue, message)
        if "notifications" in str(queue):
            await draining.wait()
            await asyncio.sleep(0.2)

    monkeypatch.setattr(PlayedTransport, "publish", confirmed_late)
    builds = Builds(world, svc)
    life = await builds.start()
    await park_cast(builds)

    draining.set()
    await life.drain()

    assert builds.unsent() == []
    assert len(await builds.read()) == 2


async def test_what_was_sent_is_struck_with_the_next_commit(world: World, svc: Service):
    """Or a second later, where none comes: a commit for it alone would be one more for each
    step.
    """
    builds = Builds(world, svc)
    await builds.start()
    await park_cast(builds)
    await asyncio.sleep(0.5)
    assert len(builds.unsent()) == 2
    await park_cast(builds, "u")
    assert all('"u"' in row["payload"] for row in builds.unsent())

    await asyncio.sleep(1.1)
    assert builds.unsent() == []
    assert len(await builds.read()) == 4


# -- what they say -----------------------------------------------------------------------------


async def test_parking_sends_both_with_all_their_fields(world: World, svc: Service):
    """What a resolver needs to act, and of the caller's context what the setting names."""
    builds = Builds(world, svc)
    await builds.start(notification_context="project_id,user_id")
    context = {"project_id": "p1", "user_id": "ann", "password": "s3cret"}
    client = (await builds.client()).prepare(context=context, request_id="t")
    await client.cast(builds.build, vm="v", memory_mb=5)
    await builds.ends("pending")

    update, want = sorted(await builds.read(), key=lambda one: one.event_type, reverse=True)

    row = builds.row()
    at, deadline = (want.payload.pop(key) for key in ("at", "deadline"))
    assert (update.payload.pop("at"), update.payload.pop("deadline")) == (at, deadline)
    assert (update.event_type, update.priority) == ("task.update", "INFO")
    assert update.payload == {
        "task_id": "t",
        "service": "compute",
        "method": "build",
        "resource": "vm:v",
        "old_state": "running",
        "new_state": "pending",
        "reason": "no_capacity",
        "version": 1,
    }
    assert (want.event_type, want.priority) == ("task.no_capacity", "ERROR")
    assert want.payload == {
        "task_id": "t",
        "service": "compute",
        "method": "build",
        "resource": "vm:v",
        "reason": "no host has 5 MiB free",
        "requested": {"memory_mb": 5},
        "attempt": 1,
        "version": 1,
        "context": {"project_id": "p1", "user_id": "ann"},
    }
    assert at < deadline
    assert at.endswith("Z")
    assert deadline.endswith("Z")
    assert row["pending_deadline"] - row["parked_at"] == 3600
    assert {update.publisher_id, want.publisher_id} == {"compute.node-1"}
    assert "s3cret" not in str((update, want))


async def test_another_topic_is_used_where_the_setting_names_it(world: World, svc: Service):
    """The name of the service stands for itself in it."""
    builds = Builds(world, svc)
    await builds.start(notification_topic="alerts-{topic}")
    await park_cast(builds)
    await world.until(lambda: not builds.unsent())

    assert world.broker.waiting("alerts-compute.info") == 1
    assert world.broker.waiting("alerts-compute.error") == 1


# -- how a retried task ends --------------------------------------------------------------------


@pytest.mark.parametrize("end", ["succeeded", "failed"])
async def test_the_end_of_a_retried_task_is_reported_at_once(world: World, svc: Service, end: str):
    """With the fields that each `task.update` has, in the commit of the end: a resolver that
    follows the task hears what became of it.
    """
    builds = Builds(world, svc)
    life = await builds.start()
    builds.free = 5
    builds.fails = end == "failed"
    builds.holds.clear()
    await builds.park(memory_mb=6)
    builds.free = 6
    await builds.order("retry")
    await builds.ends("running")
    assert await builds.steps() == [PARKED, "pending>accepted  1"]
    begun = now()

    builds.holds.set()
    await builds.ends(end)
    await world.until(lambda: not builds.unsent())

    assert now() - begun < 3
    (told,) = await builds.read("info")
    row = builds.row()
    at, deadline = told.payload.pop("at"), told.payload.pop("deadline")
    assert (told.event_type, told.priority) == ("task.update", "INFO")
    assert told.payload == {
        "task_id": "t",
        "service": "compute",
        "method": "build",
        "resource": "vm:v",
        "old_state": "running",
        "new_state": end,
        "reason": "",
        "version": 1,
    }
    assert (at, deadline) == (utc_text(row["finished_at"]), utc_text(row["pending_deadline"]))
    await life.drain()


async def test_a_task_that_never_waited_ends_without_a_notification(world: World, svc: Service):
    """No row of the outbox and no message: those who never wait pay nothing."""
    builds = Builds(world, svc)
    await builds.start()
    builds.free = 5

    assert await builds.call() == "v with 1"

    assert builds.unsent() == []
    assert await builds.read() == []


async def test_each_notification_names_the_resource_of_an_ops_method(world: World, svc: Service):
    """It takes no lease of it; a resolver still finds the task by it, at its end, too."""
    builds = Builds(world, svc)

    @svc.ops(resource="vm", on_interrupt="retry")
    async def move(ctx: Context, vm: str) -> None:
        if ctx.attempt == 1:
            raise NoCapacity("no host")

    await builds.start()
    await (await builds.client()).prepare(ops=True, request_id="t").cast(move, vm="v")
    await builds.ends("pending")
    await builds.order("retry")
    await builds.ends("succeeded")
    await world.until(lambda: not builds.unsent())

    told = [one.payload for one in await builds.read("info")]

    assert [one["new_state"] for one in told] == ["pending", "accepted", "succeeded"]
    assert {one["resource"] for one in told} == {"vm:v"}


@pytest.mark.parametrize("how", ["running", "handed over"])
async def test_an_operator_s_end_of_a_retried_task_is_reported(
    world: World, svc: Service, how: str
):
    """CANCELLED, whether its handler ran or no run worked on it."""
    builds = Builds(world, svc, on_interrupt="error", settle=600)
    life = await builds.start()
    await builds.park()
    builds.free = 1
    builds.holds.clear()
    await builds.order("retry")
    await builds.ends("running")
    await builds.steps()
    if how == "running":
        await world.verb(life, "cancel", task_id="t", by="ann@desk", reason="wrong host")
    else:
        await life.crash()
        await builds.start()
        await builds.ends("handed_over")
        await order_on_disk(world, Verb.CANCEL)
    await builds.ends("cancelled")
    await world.until(lambda: not builds.unsent())

    assert await builds.steps() == [f"{how.replace(' ', '_')}>cancelled operator 1"]


async def test_what_recovery_makes_of_a_retried_task_is_reported(world: World, svc: Service):
    """Its run has died in its handler, and its policy does not run it again: ERRORED."""
    builds = Builds(world, svc, on_interrupt="error")
    life = await builds.start()
    await builds.park()
    builds.free = 1
    builds.holds.clear()
    await builds.order("retry")
    await builds.ends("running")
    await builds.steps()

    await life.crash()
    await builds.start()
    await builds.ends("errored")
    await world.until(lambda: not builds.unsent())

    assert await builds.steps() == ["handed_over>errored interrupted 1"]


async def test_a_task_that_an_operator_has_retried_ends_without_a_deadline(
    world: World, svc: Service
):
    """`gracekit tasks retry` of a task that was given up takes its deadline away; none is shown."""
    builds = Builds(world, svc, hook=False)
    life = await builds.start()
    await builds.park()
    await builds.order("give_up")
    builds.free = 1
    await builds.read()
    await world.verb(life, "retry", task_id="t", by="ann@desk", reason="new host")
    await builds.ends("succeeded")
    await world.until(lambda: not builds.unsent())

    (told,) = await builds.read()

    assert step_of(told.payload) == "running>succeeded  1"
    assert told.payload["deadline"] is None


# -- where the broker is away ------------------------------------------------------------------


async def test_a_task_is_parked_while_the_broker_is_away(world: World, svc: Service):
    """Its notifications stay, and are sent when the broker is back; the trouble is logged once, and
    so is its end.
    """
    builds = Builds(world, svc)
    life = await builds.start()
    cut_off(life)
    await park_cast(builds)
    await asyncio.sleep(300)
    assert (builds.state(), len(builds.unsent())) == ("pending", 2)
    assert len(life.told("notifications.failed")) == 1
    life.faults.forget()
    begun = now()

    await life.hears("notifications.resumed")

    assert now() - begun <= 37
    await asyncio.sleep(1)
    assert builds.unsent() == []
    assert [step_of(one.payload) for one in await builds.read("info")] == [PARKED]
    assert len(life.told("notifications.failed")) == 1


async def test_what_nobody_needs_any_more_is_not_sent(world: World, svc: Service):
    """Notifications end with the deadline of their task, in the outbox and in the queue; those that
    could not be sent are counted.
    """
    builds = Builds(world, svc)
    life = await builds.start(pending_timeout_s=1200)
    cut_off(life, times=100_000)
    await park_cast(builds)
    await asyncio.sleep(1300)
    life.faults.forget()
    await world.until(lambda: not builds.unsent())

    assert [step_of(one.payload) for one in await builds.read("info")] == [
        "pending>errored expired 1"
    ]
    assert world.tally()["notification_expired"] == 2
    assert await builds.read("error") == []


async def test_what_nobody_reads_leaves_the_queue_in_the_end(world: World, svc: Service):
    """No queue grows without end where there is no resolver."""
    builds = Builds(world, svc)
    await builds.start(pending_timeout_s=700)
    for number in range(5):
        await park_cast(builds, f"t{number}")
    await world.until(lambda: not builds.unsent())
    assert [world.broker.waiting(queue) for queue in QUEUES] == [5, 5]

    await asyncio.sleep(1400)

    assert [world.broker.waiting(queue) for queue in QUEUES] == [0, 0]
    assert {builds.state(f"t{number}") for number in range(5)} == {"errored"}


async def test_many_notifications_are_sent_after_a_long_absence(world: World, svc: Service):
    """Each once: more than are sent at one time."""
    builds = Builds(world, svc)
    life = await builds.start(pending_max=1000)
    cut_off(life, times=10_000)
    for number in range(120):
        await park_cast(builds, f"t{number}")
    life.faults.forget()
    await world.until(lambda: not builds.unsent())

    news = await builds.read()
    assert len({one.message_id for one in news}) == 240
    updates = [one.payload["task_id"] for one in news if one.priority == "INFO"]
    assert set(updates) == {f"t{number}" for number in range(120)}


# -- where the run is gone ---------------------------------------------------------------------


@pytest.mark.parametrize("who", ["sibling", "next start"])
@pytest.mark.parametrize("how", ["crash", "drain"])
async def test_what_a_run_has_not_sent_is_sent_by_another(
    world: World, svc: Service, who: str, how: str
):
    """A living sibling takes it over, or the next start does: the same messages, each once."""
    builds = Builds(world, svc)
    life = await builds.start(host="a")
    cut_off(life)
    await park_cast(builds)
    await asyncio.sleep(5)
    due = {row["message_id"] for row in builds.unsent()}
    if who == "sibling":
        await builds.start(host="b")
    await (life.crash() if how == "crash" else life.drain())
    if who == "next start":
        await asyncio.sleep(100)
        assert {row["message_id"] for row in builds.unsent()} == due
        await builds.start(host="a")
    await world.until(lambda: not builds.unsent())

    news = await builds.read()
    assert {one.message_id for one in news} == due
    assert len(news) == 2


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("verb", [Verb.RETRY, Verb.GIVE_UP, Verb.CANCEL, Verb.FAIL])
async def test_what_an_operators_command_leaves_is_done_by_a_run(
    world: World, svc: Service, verb: Verb, there: bool
):
    """A living one within its next pass, or the next start: notification, hook, and the retry
    itself.
    """
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    builds.free = 5
    assert len(await builds.read()) == 2
    if not there:
        await life.drain()
    await order_on_disk(world, verb)
    begun = now()
    if not there:
        await builds.start()
    states = {"retry": "succeeded", "give_up": "errored", "cancel": "cancelled", "fail": "errored"}
    await builds.ends(states[verb.value])
    await world.until(lambda: not builds.unsent())

    assert now() - begun < (37 if there else 2)
    sent, *ends = await builds.read()
    assert sent.message_id == "m-t"
    retried = ["running>succeeded  1"] if verb is Verb.RETRY else []
    assert [step_of(one.payload) for one in ends] == retried
    reasons = {"give_up": "gave_up", "fail": "operator"}
    hooks: list[Any] = [("v", reasons[verb.value])] if verb.value in reasons else []
    await world.until(lambda: builds.hooks == hooks)


async def test_another_service_s_runs_leave_them_alone(world: World, svc: Service):
    """Each service sends its own, also where they share a store."""
    builds = Builds(world, svc)
    life = await builds.start()
    cut_off(life)
    await park_cast(builds)
    await order_on_disk(world, Verb.CANCEL)
    await life.drain()
    other = Builds(world, Service("network"))
    await other.start()
    await asyncio.sleep(100)

    assert world.broker.waiting("network-notifications.info") == 0
    assert {row["service"] for row in builds.unsent()} == {"compute"}
    assert len(builds.unsent()) == 3
