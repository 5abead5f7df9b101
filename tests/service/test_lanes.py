"""Lanes and lines: how many run at a time, in which order, and what is read meanwhile."""

from __future__ import annotations

import asyncio
import re
from contextvars import ContextVar
from dataclasses import replace

import pytest

from gracekit import CallTimeoutError, Context, InvalidArgumentsError, LeaseHeld, Service, backoff
from gracekit.errors import (
    TaskInterruptedError,
    Undeliverable,
)
from gracekit.process import Point
from gracekit.request.lanes import ClaimLimit
from tests.service.kit import Doors, Fault, World

pytestmark = pytest.mark.looptime


async def test_a_lane_runs_so_many_at_a_time_in_order(world: World, svc: Service):
    """Beyond max_running tasks are accepted and wait, first come, first served."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    await world.start(svc, max_running=2)
    client = await world.client(svc)
    ids = [await client.cast(work, n=n) for n in range(4)]
    await world.settle()

    assert doors.entered == [0, 1]
    assert [world.state(one) for one in ids] == ["running", "running", "accepted", "accepted"]
    doors.open(1)
    assert await doors.wait(3) == [0, 1, 2]
    doors.open(0, 2, 3)
    await doors.wait(4)


@pytest.mark.parametrize("callers", [1, 2, 3])
async def test_a_lane_full_of_tasks_that_wait_for_it_is_one_line(
    world: World, svc: Service, callers: int
):
    """A warning while each place is taken by a handler that waits for its own service; again once
    the lane was filled anew. None while one handler there waits for something else, or for ops
    methods.
    """
    doors, calls = Doors(), 0

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    @svc.ops
    async def look(ctx: Context) -> None:
        await doors.pass_("look")

    @svc.rpc
    async def outer(ctx: Context) -> None:
        nonlocal calls
        calls += 1
        await client.prepare(timeout=30).call(work, n=10 + calls)

    @svc.rpc
    async def watch(ctx: Context) -> None:
        await client.prepare(timeout=30).call(look)

    life = await world.start(svc, max_running=3)
    client = await world.client(svc)
    for method in [outer] * callers + [watch] * (3 - callers):
        await client.cast(method)
    await client.cast(work, n=0)
    await world.settle()

    def lines() -> list[object]:
        return [fields for name, fields in life.events if name == "lane.self_blocked"]

    tracker = life.runtime.wired.tracker
    line = {"lane": "requests", "running": 3}
    assert lines() == [line] * (callers == 3)
    assert tracker.self_blocked == ["requests"] * (callers == 3)
    await client.cast(work, n=1)
    await world.settle()
    assert lines() == [line] * (callers == 3)
    doors.open("look", *range(20))
    await asyncio.sleep(31)
    assert tracker.self_blocked == []

    for _ in range(3):
        await client.cast(outer)
    await world.settle()
    assert lines() == [line] * (1 + (callers == 3))
    await asyncio.sleep(31)
    assert (await life.drain()).exit_code == 0


async def test_a_lane_with_a_free_place_is_not_full_of_tasks_that_wait_for_it(
    world: World, svc: Service
):
    """Handlers that call their own service, while its lane has a place for what they call, are
    served.
    """

    @svc.rpc
    async def work(ctx: Context, n: int) -> int:
        return n

    @svc.rpc
    async def outer(ctx: Context, n: int) -> int:
        return await client.call(work, n=n)

    life = await world.start(svc, max_running=3)
    client = await world.client(svc)
    views = [client.call(outer, n=n) for n in range(2)]

    assert await asyncio.gather(*views) == [0, 1]
    assert "lane.self_blocked" not in life.names()


async def test_a_lane_is_made_wider_and_narrower_while_it_runs(world: World, svc: Service):
    """If it becomes wider, waiting tasks begin at once, recovered rows too; if narrower, none
    begins until fewer run than are allowed.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    first = await world.start(svc, max_running=1)
    client = await world.client(svc)
    for n in range(6):
        await client.cast(work, n=n)
    await world.settle()
    doors.open(0)
    await doors.wait(2)
    await first.crash()
    life = await world.start(svc, max_running=1)
    live, before = life.runtime.ground.live, len(await doors.wait(3))

    live.take(replace(live.now, max_running=4))
    await doors.wait(before + 3)
    await world.settle()
    assert life.runtime.wired.tracker.running == 4
    assert len(doors.entered) == before + 3
    live.take(replace(live.now, max_running=2))
    doors.open(*doors.entered[-3:-1])
    await world.settle()
    assert (life.runtime.wired.tracker.running, len(doors.entered)) == (2, before + 3)
    doors.open(doors.entered[-1])
    await doors.wait(before + 4)
    doors.open(*range(6))
    assert (await life.drain()).exit_code == 0


async def test_beside_another_store_what_is_accepted_follows_what_may_run(
    world: World, svc: Service
):
    """A reload that changes max_running changes the limit with it: what cannot begin stays in the
    queue.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, accept_unshared_store=True, max_running=1)
    live, accepted = life.runtime.ground.live, lambda: len(world.rows("SELECT id FROM task"))
    client = await world.client(svc)
    for n in range(8):
        await client.cast(work, n=n)
    await world.settle()
    assert accepted() == len(doors.entered) == 1

    live.take(replace(live.now, max_running=4))
    await world.settle()
    assert accepted() == len(doors.entered) == 4
    live.take(replace(live.now, max_running=2))
    doors.open(0, 1)
    await world.settle()
    assert accepted() == len(doors.entered) == 4
    doors.open(2)
    await world.settle()
    assert accepted() == len(doors.entered) == 5

    doors.open(3, 4)
    assert (await life.drain()).exit_code == 0
    assert world.broker.waiting("compute") == 3


async def test_as_many_rows_are_claimed_ahead_as_the_lane_may_run():
    """If that becomes fewer than are already claimed, none is claimed until those have begun."""
    limit = ClaimLimit(ahead=3, total=100)
    assert limit.take_some(10) == 3
    limit.widen(2)
    assert limit.take_some(10) == 2
    limit.widen(-4)
    for _ in range(4):
        limit.begin()
        assert not limit.take()
    limit.begin()

    assert limit.take_some(10) == 1


async def test_beyond_the_places_nothing_is_accepted(world: World, svc: Service):
    """While no place is free, a delivery waits, and no more than there are places; after 30 s it
    goes back to the queue for others.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    await world.start(svc, max_accepted=2)
    client = await world.client(svc)
    for n in range(5):
        await client.cast(work, n=n)
    await world.settle()
    assert world.tally()["accepted"] == 2
    assert world.broker.waiting("compute") == 1

    await asyncio.sleep(31)
    assert world.broker.waiting("compute") == 3

    doors.open(0, 1, 2, 3, 4)
    await doors.wait(5)
    assert doors.entered == [0, 1, 2, 3, 4]


async def test_a_method_has_slots_of_its_own(world: World, svc: Service):
    """max_running of one method holds back that method only."""
    doors = Doors()

    @svc.rpc(max_running=1)
    async def heavy(ctx: Context, n: int) -> None:
        await doors.pass_(("heavy", n))

    @svc.rpc
    async def light(ctx: Context) -> None:
        await doors.pass_("light")

    await world.start(svc)
    client = await world.client(svc)
    for n in range(2):
        await client.cast(heavy, n=n)
    await client.cast(light)
    await world.settle()

    assert doors.entered == [("heavy", 0), "light"]
    doors.open(("heavy", 0), ("heavy", 1), "light")
    await doors.wait(3)


async def test_what_a_handler_sets_in_its_context_reaches_no_other_request(
    world: World, svc: Service
):
    """Not the one that gets its place, and none of those that come after a pause for want of
    places.
    """
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
    doors, seen = Doors(), []

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        seen.append(tenant.get())
        tenant.set(f"of {n}")
        await doors.pass_(n)

    life = await world.start(svc, max_accepted=1)
    client = await world.client(svc)
    for n in range(3):
        await client.cast(work, n=n)
    await doors.wait(1)
    doors.open(0)
    await doors.wait(2)
    await asyncio.sleep(31)
    assert world.broker.waiting("compute") == 1

    doors.open(1, 2, 3)
    await client.cast(work, n=3)
    await life.hears("task.finished", 4)
    assert seen == ["nobody"] * 4


async def test_a_slot_is_free_when_its_handler_has_returned(world: World, svc: Service):
    """A store that is slow to take an outcome holds up its caller and its resource, not the
    lane.
    """
    doors = Doors()

    @svc.rpc(resource="vm", max_running=1)
    async def change(ctx: Context, vm: str, n: int) -> None:
        await doors.pass_((vm, n))

    life = await world.start(svc, max_running=1)
    client = await world.client(svc)
    first = await client.cast(change, vm="v1", n=0)
    await doors.wait(1)
    await client.cast(change, vm="v1", n=1)
    await client.cast(change, vm="v2", n=0)
    life.plan(Point.FINISH, Fault.REFUSED, times=3)
    doors.open(("v1", 0))
    await world.settle()

    assert (doors.entered, world.state(first)) == ([("v1", 0), ("v2", 0)], "running")
    doors.open(("v2", 0), ("v1", 1))
    await life.hears("task.finished", 3)
    assert doors.entered == [("v1", 0), ("v2", 0), ("v1", 1)]


async def test_who_takes_a_slot_is_on_record_behind_the_outcome_of_who_had_it(
    world: World, svc: Service
):
    """Killed when the next has just begun, the service has its predecessor's outcome on record."""
    doors = Doors()

    @svc.rpc(max_running=1)
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    ids = [await client.cast(work, n=n) for n in range(2)]
    await world.settle()
    life.process.dies_at = (Point.BEGIN, "after")
    doors.open(0)
    await world.until(lambda: not life.process.lives)

    assert [world.state(one) for one in ids] == ["succeeded", "running"]
    assert doors.entered == [0]


async def test_full_requests_do_not_hold_up_ops(world: World, svc: Service):
    """Each lane has its own places and slots."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    @svc.ops
    async def ping(ctx: Context) -> str:
        return "pong"

    await world.start(svc, max_accepted=1, max_running=1)
    client = await world.client(svc)
    for _ in range(3):
        await client.cast(work)
    await doors.wait(1)

    assert await client.prepare(timeout=1).call(ping) == "pong"
    doors.open("work")


async def test_tasks_of_a_resource_go_one_by_one_in_order(world: World, svc: Service):
    """One line a resource, first in, first out; other resources pass by; tokens only rise."""
    doors, tokens = Doors(), []

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str, n: int) -> None:
        tokens.append((vm, n, ctx.fence))
        await doors.pass_((vm, n))

    life = await world.start(svc)
    client = await world.client(svc)
    for n in range(3):
        await client.cast(change, vm="v1", n=n)
    await client.cast(change, vm="v2", n=0)
    await world.settle()
    assert doors.entered == [("v1", 0), ("v2", 0)]

    doors.open(*[("v1", n) for n in range(3)], ("v2", 0))
    await life.hears("task.finished", 4)
    assert tokens == [("v1", 0, 1), ("v2", 0, 1), ("v1", 1, 2), ("v1", 2, 3)]
    assert world.rows("SELECT owner FROM lease WHERE owner IS NOT NULL") == []


async def test_a_lease_held_by_another_process_is_waited_for_without_a_slot(
    world: World, svc: Service
):
    """The task stays accepted, others run past it, and it starts when the lease is free."""
    doors = Doors()

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str, who: str) -> str:
        await doors.pass_(who)
        return f"{who} {ctx.fence}"

    await world.start(svc, instance="a", host="a", max_running=1)
    await world.start(svc, instance="b", host="b", max_running=1)
    client = await world.client(svc)
    first = asyncio.create_task(client.prepare(host="a").call(change, vm="v", who="a"))
    await doors.wait(1)
    second = asyncio.create_task(client.prepare(host="b").call(change, vm="v", who="b"))
    other = asyncio.create_task(client.prepare(host="b").call(change, vm="w", who="other"))
    assert await doors.wait(2) == ["a", "other"]

    doors.open("a", "b", "other")
    assert await asyncio.gather(first, second, other) == ["a 1", "b 2", "other 1"]


async def test_a_task_whose_caller_left_while_the_lease_was_away_expires(
    world: World, svc: Service
):
    """Waiting for a lease ends with the caller's patience: ERRORED(expired), no handler, one
    line.
    """
    doors = Doors()

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str, who: str) -> None:
        await doors.pass_(who)

    await world.start(svc, instance="a", host="a")
    life = await world.start(svc, instance="b", host="b")
    client = await world.client(svc)
    await client.prepare(host="a").cast(change, vm="v", who="a")
    await doors.wait(1)

    with pytest.raises((CallTimeoutError, TaskInterruptedError)):
        await client.prepare(host="b", timeout=5, request_id="late").call(change, vm="v", who="b")
    await world.until(lambda: world.state("late") == "errored", within_s=3)

    assert world.task("late")["reason"] == "expired"
    (told,) = life.told("task.errored")
    assert (told["task_id"], told["reason"]) == ("late", "expired")
    doors.open("a")
    await asyncio.sleep(5)
    assert doors.entered == ["a"]


async def test_a_further_lease_never_waits(world: World, svc: Service):
    """ctx.lease raises LeaseHeld, naming the task that has it; free, it is granted and given
    back.
    """
    doors = Doors()

    @svc.rpc
    async def take(ctx: Context, who: str) -> int:
        async with ctx.lease("volume", "vol-1") as guard:
            await doors.pass_(who)
            return guard.token

    await world.start(svc)
    client = await world.client(svc)
    first = asyncio.create_task(client.prepare(request_id="holder").call(take, who="a"))
    await doors.wait(1)
    with pytest.raises(LeaseHeld, match=r"volume:vol-1 is held by task holder"):
        await client.call(take, who="b")
    doors.open("a", "c")

    assert await first == 1
    assert await client.call(take, who="c") == 2


@pytest.mark.parametrize("odd", [1.0, True, None, "", "x" * 256])
async def test_a_further_lease_has_an_id_as_that_of_a_request(
    world: World, svc: Service, odd: object
):
    """The text of `1.0` or None would be the id of another resource than the one that is meant."""

    @svc.rpc
    async def take(ctx: Context) -> str:
        with pytest.raises(InvalidArgumentsError) as refused:
            async with ctx.lease("volume", odd):  # type: ignore[arg-type]
                pass
        async with ctx.lease("volume", 7) as guard:  # type: ignore[arg-type]
            assert guard.resource == ("volume", "7")
        return str(refused.value)

    await world.start(svc)
    said = await (await world.client(svc)).call(take)

    assert said.startswith("the id of a volume is text or a whole number of 1 to 255 characters")


async def test_a_lease_that_the_task_has_itself_is_said_to_be_its_own(world: World, svc: Service):
    """Waiting for itself would never end, and another resource= would not help."""

    @svc.rpc(resource="volume")
    async def twice(ctx: Context, volume: str) -> None:
        async with ctx.lease("volume", volume):
            pass

    await world.start(svc)
    with pytest.raises(LeaseHeld, match=r"volume:vol-1 is held by this task itself: .* resource="):
        await (await world.client(svc)).call(twice, volume="vol-1")


async def test_a_guessed_token_brings_nothing_to_light(world: World, svc: Service):
    """A call that says it comes from the task that holds the resource is refused, and is not told
    which task that is: a token is a small number.
    """
    doors = Doors()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="holder-9f31").cast(work, vm="v")
    await doors.wait(1)
    token = world.task("holder-9f31")["token"]
    forged = {"gracekit_lease": {"kind": "vm", "id": "v", "token": token}}
    with pytest.raises(LeaseHeld, match="its own caller holds, so that both would wait") as told:
        await client.prepare(context=forged).call(work, vm="v")
    doors.open("v")

    assert "holder-9f31" not in "".join([str(told.value), *told.value.__notes__])


async def test_reading_pauses_while_much_is_not_accepted_yet(world: World, svc: Service):
    """Here for a slow commit. What was accepted counts no more, and the rest is read."""
    doors = Doors()

    @svc.rpc
    async def keep(ctx: Context, n: int, text: str) -> None:
        await doors.pass_(n)

    life = await world.start(svc, prefetch_bytes=1000)
    client = await world.client(svc)
    life.faults.delay_s = 5.0
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.DELAY)
    for n in (1, 2, 3):
        await client.cast(keep, n=n, text="x" * 2000)
    await world.settle()

    assert (doors.entered, world.broker.waiting("compute")) == ([], 2)
    assert await doors.wait(3) == [1, 2, 3]
    doors.open(1, 2, 3)


@pytest.mark.parametrize("size", [1, 2000], ids=["waited long", "large"])
async def test_each_place_that_becomes_free_is_filled_though_messages_are_held(
    world: World, svc: Service, size: int
):
    """The reader that comes after a pause is for as many as had places then; more became free
    since.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context, n: int, text: str) -> None:
        await doors.pass_(n)

    await world.start(svc, max_accepted=3, max_running=3, prefetch_bytes=1000)
    client = await world.client(svc)
    for n in range(4):
        await client.cast(read, n=n, text="x" * size)
    await doors.wait(3)
    await asyncio.sleep(60)
    doors.open(0)
    await doors.wait(4)
    doors.open(1, 2)
    await world.settle()
    for n in (4, 5):
        await client.cast(read, n=n, text="x" * size)

    assert await doors.wait(6) == [0, 1, 2, 3, 4, 5]
    doors.open(3, 4, 5)


async def test_a_pause_of_reading_that_lasts_is_told(world: World, svc: Service):
    """A commit that takes a minute holds the lane up: the service says so, and is not ready."""

    @svc.rpc
    async def keep(ctx: Context, n: int, text: str) -> None:
        """Done at once."""

    life = await world.start(svc, prefetch_bytes=1000)
    client = await world.client(svc)
    life.faults.delay_s = 60.0
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.DELAY)
    await client.cast(keep, n=1, text="x" * 2000)
    await life.hears("service.deaf")
    why = life.runtime.not_ready
    await life.hears("service.hears")

    assert why is not None
    assert re.fullmatch(
        r"requests cannot be read: 2\d+ bytes wait to be accepted, and 1000 may; "
        r"the store takes no writes for \d+s",
        why,
    )
    assert life.runtime.not_ready is None


async def test_what_is_given_back_and_read_again_does_not_end_a_pause(world: World, svc: Service):
    """A store that refuses gives back what was read, and it comes again: nothing is accepted."""

    @svc.rpc
    async def keep(ctx: Context, n: int, text: str) -> None:
        """Done at once."""

    life = await world.start(svc, prefetch_bytes=1000)
    client = await world.client(svc)
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.REFUSED, times=80)
    await client.cast(keep, n=1, text="x" * 2000)
    await life.hears("service.deaf")
    await life.hears("service.hears")

    assert life.names().count("store.error") > 1


async def test_pauses_between_which_something_is_accepted_are_not_one(world: World, svc: Service):
    """Each ends before it is long, and so does the trouble: the service stays ready."""

    @svc.rpc
    async def keep(ctx: Context, n: int, text: str) -> None:
        """Done at once."""

    life = await world.start(svc, prefetch_bytes=1000)
    client = await world.client(svc)
    for n in range(4):
        life.plan(Point.ACCEPT_AND_BEGIN, Fault.REFUSED, times=30)
        await client.cast(keep, n=n, text="x" * 2000)
        await life.hears("task.finished", n + 1)

    assert world.clock.loop() >= 4 * 30 * backoff.GIVE_BACK_S
    assert "service.deaf" not in life.names()


async def test_every_instance_has_its_copy_of_a_fanout(world: World, svc: Service):
    """One fanout, one task an instance, each deduped by itself."""
    seen = []

    @svc.rpc
    async def refresh(ctx: Context, tag: str) -> None:
        seen.append(ctx.request_id)

    lives = [
        await world.start(svc, host=f"node-{n}", instance=f"node-{n}-0", max_accepted=9)
        for n in range(3)
    ]
    client = (await world.client(svc)).prepare(request_id="f")
    await client.fanout(refresh, tag="x")
    for life in lives:
        await life.hears("task.finished")
    await client.fanout(refresh, tag="x")
    await world.until(lambda: world.tally().get("duplicate") == 3)

    assert seen == ["f", "f", "f"]
    recipients = world.rows("SELECT recipient, route, target FROM task ORDER BY recipient")
    assert recipients == [
        {"recipient": f"node-{n}-0", "route": "fanout", "target": f"node-{n}-0"} for n in range(3)
    ]


async def test_a_directed_request_goes_to_its_host_alone(world: World, svc: Service):
    """The directed queue is that host's; to an unknown host nothing is kept."""

    @svc.rpc
    async def where(ctx: Context) -> str:
        return ctx.request_id

    one = await world.start(svc, host="node-1", instance="node-1-0")
    two = await world.start(svc, host="node-2", instance="node-2-0")
    client = await world.client(svc)
    for host in ("node-2", "node-2", "node-1"):
        await client.prepare(host=host).call(where)

    assert len(one.told("task.finished")) == 1
    assert len(two.told("task.finished")) == 2
    targets = world.rows("SELECT target FROM task ORDER BY id")
    assert [row["target"] for row in targets] == ["node-2", "node-2", "node-1"]
    with pytest.raises(Undeliverable):
        await client.prepare(host="nowhere").cast(where)
