"""One request's life through a whole Runtime: lanes, lines, leases, ends of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from contextvars import ContextVar

import pytest

from gracekit import CallTimeoutError, Context, LeaseHeld, RpcError, Service
from gracekit.errors import (
    ConflictingRequestError,
    DeclarationError,
    MethodTimeoutError,
    TaskInterruptedError,
    Undeliverable,
)
from gracekit.process import Point
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.oslo_wire import decode_reply, encode_request
from gracekit.rpc.transport import reply_queue
from tests.rpc.kit import Inbox
from tests.service.kit import Doors, Fault, Life, World

pytestmark = pytest.mark.looptime


# -- lanes and lines ------------------------------------------------------------------------


async def test_a_lane_runs_so_many_at_a_time_in_order(world: World, svc: Service):
    """
    Beyond max_running tasks are accepted and wait, first come, first served.
    """
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


async def test_beyond_the_places_nothing_is_accepted(world: World, svc: Service):
    """
    While no place is free a delivery waits; after 30 s it goes back to the queue for others.
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
    assert world.broker.waiting("compute") == 0

    await asyncio.sleep(31)
    assert world.broker.waiting("compute") == 3

    doors.open(0, 1, 2, 3, 4)
    await doors.wait(5)
    assert doors.entered == [0, 1, 2, 3, 4]


async def test_a_method_has_slots_of_its_own(world: World, svc: Service):
    """
    max_running of one method holds back that method only.
    """
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
    """
    Not the one that gets its place, and none of those that come after a pause for want of places.
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
    """
    A store that is slow to take an outcome holds up its caller and its resource, not the lane.
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
    """
    Killed when the next has just begun, the service has its predecessor's outcome on record.
    """
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
    """
    Each lane has its own places and slots.
    """
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
    """
    One line a resource, first in, first out; other resources pass by; tokens only rise.
    """
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
    """
    The task stays accepted, others run past it, and it starts when the lease is free.
    """
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
    """
    Waiting for a lease ends with the caller's patience: ERRORED(expired), no handler.
    """
    doors = Doors()

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str, who: str) -> None:
        await doors.pass_(who)

    await world.start(svc, instance="a", host="a")
    await world.start(svc, instance="b", host="b")
    client = await world.client(svc)
    await client.prepare(host="a").cast(change, vm="v", who="a")
    await doors.wait(1)

    with pytest.raises((CallTimeoutError, TaskInterruptedError)):
        await client.prepare(host="b", timeout=5, request_id="late").call(change, vm="v", who="b")
    await world.until(lambda: world.state("late") == "errored", within_s=3)

    assert world.task("late")["reason"] == "expired"
    doors.open("a")
    await asyncio.sleep(5)
    assert doors.entered == ["a"]


async def test_a_further_lease_never_waits(world: World, svc: Service):
    """
    ctx.lease raises LeaseHeld, naming the task that has it; free, it is granted and given back.
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


async def test_a_guessed_token_brings_nothing_to_light(world: World, svc: Service):
    """
    A call that says it comes from the task that holds the resource is refused, and is not told
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
    with pytest.raises(LeaseHeld, match="its own caller holds and would wait with") as told:
        await client.prepare(context=forged).call(work, vm="v")
    doors.open("v")

    assert "holder-9f31" not in "".join([str(told.value), *told.value.__notes__])


# -- dedupe -----------------------------------------------------------------------------------


async def test_a_known_request_starts_no_second_handler(world: World, svc: Service):
    """
    In flight, the duplicate's caller is answered with the first; after it, from the record.
    """
    doors, starts = Doors(), []

    @svc.rpc
    async def work(ctx: Context) -> int:
        starts.append(ctx.request_id)
        await doors.pass_("in")
        return len(starts)

    await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same")
    first = asyncio.create_task(client.call(work))
    await doors.wait(1)
    second = asyncio.create_task(client.call(work))
    await world.until(lambda: world.tally().get("duplicate") == 1)
    doors.open("in")

    assert await asyncio.gather(first, second) == [1, 1]
    assert await client.call(work) == 1
    await client.cast(work)
    await world.until(lambda: world.tally()["duplicate"] == 3)
    assert starts == ["same"]
    assert world.rows("SELECT * FROM reply") == []


async def test_a_call_with_the_id_of_a_cast_in_flight_is_answered(world: World, svc: Service):
    """
    The end of a cast looks for no reply; a caller that joined it meanwhile waits all the same.
    """
    doors, starts = Doors(), []

    @svc.rpc
    async def work(ctx: Context) -> int:
        starts.append(ctx.request_id)
        await doors.pass_("in")
        return len(starts)

    life = await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same")
    await client.cast(work)
    await doors.wait(1)
    joined = asyncio.create_task(client.call(work))
    await world.until(lambda: len(world.rows("SELECT * FROM reply")) == 1)
    doors.open("in")

    assert await joined == 1
    assert starts == ["same"]
    assert world.rows("SELECT * FROM reply") == []
    assert life.told("store.error") == []


async def test_a_failure_is_answered_from_the_record_too(world: World, svc: Service):
    """
    A handler that raised is FAILED and not run again; its error is the record.
    """
    starts = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        starts.append(1)
        raise ValueError("no")

    await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await client.call(work)

    assert starts == [1]
    assert world.state("same") == "failed"


async def test_a_known_id_with_other_content_is_a_conflict(world: World, svc: Service):
    """
    The second is REJECTED with a row of its own, its caller is told, the first is untouched.
    """

    @svc.rpc
    async def work(ctx: Context, n: int) -> int:
        return n

    await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same")
    assert await client.call(work, n=1) == 1
    with pytest.raises(ConflictingRequestError, match="same is known with other content"):
        await client.call(work, n=2)

    (rejected,) = world.rows("SELECT * FROM task WHERE state = 'rejected'")
    assert rejected["reason"] == "conflicting_id"
    assert world.states() == {"same": "succeeded"}


ANN, BOB = {"user_id": "ann", "project_id": "p"}, {"user_id": "bob", "project_id": "p"}


@pytest.mark.parametrize("policy", ["error", "requeue"])
@pytest.mark.parametrize("other", [BOB, {"user_id": "ann"}, {}], ids=["bob", "less", "nobody"])
async def test_a_recorded_answer_is_for_its_caller_alone(
    world: World, svc: Service, policy: str, other: dict[str, str]
):
    """
    Who knows an id and the arguments, and is another user or of another project, gets neither the
    answer nor a word about it; the caller itself gets it, whatever else its context holds.
    """
    done = []

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context, n: int) -> str:
        await asyncio.sleep(10)
        done.append(ctx["user_id"])
        return f"secret of {ctx['user_id']}"

    await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same")
    first = asyncio.create_task(client.prepare(context=ANN).call(work, n=1))
    await asyncio.sleep(5)
    for _ in range(2):  # it runs; and, if it is on record, it has ended
        with pytest.raises(ConflictingRequestError, match="or from another caller") as told:
            await client.prepare(context=other).call(work, n=1)
        assert "ann" not in str(told.value)
        assert await first == "secret of ann"
        again = client.prepare(context={**ANN, "trace": "2"})
        assert await again.call(work, n=1) == "secret of ann"
        if policy == "requeue":  # nothing is kept of it, so it is another request then
            return
    assert done == ["ann"]


async def test_a_request_id_of_another_service_is_refused(world: World, svc: Service):
    """
    Services that share a store share its ids: neither gets the other's answer, nothing is lost.
    """
    other = Service("volume")
    done = []
    for service in (svc, other):

        @service.rpc
        async def work(ctx: Context) -> str:
            done.append(ctx.request_id)
            return "done"

    for service in (svc, other):
        await world.start(service)
    await (await world.client(svc)).prepare(request_id="same").call("work")

    with pytest.raises(ConflictingRequestError):
        await (await world.client(other)).prepare(request_id="same").call("work")

    assert done == ["same"]
    assert world.rows("SELECT service FROM task WHERE state = 'rejected'") == [
        {"service": "volume"}
    ]


@pytest.mark.parametrize("keys", ["", "tenant", ["tenant", "roles"]])
async def test_a_setting_says_by_what_callers_are_told_apart(
    world: World, svc: Service, keys: str | list[str]
):
    """
    None of the usual keys, or others; what a context does not have does not count.
    """

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    await world.start(svc, dedupe_context=keys if isinstance(keys, str) else ", ".join(keys))
    client = (await world.client(svc)).prepare(request_id="same")
    await client.prepare(context=ANN | {"tenant": 1}).call(work)
    await client.prepare(context=BOB | {"tenant": 1}).call(work)

    context = BOB | {"tenant": 2}
    if keys:
        with pytest.raises(ConflictingRequestError):
            await client.prepare(context=context).call(work)
    else:
        await client.prepare(context=context).call(work)


async def test_a_row_of_an_older_gracekit_still_answers_its_caller(world: World, svc: Service):
    """
    It was accepted when nobody asked who calls: its content alone is compared.
    """
    done = []

    @svc.rpc
    async def work(ctx: Context) -> str:
        done.append(ctx.request_id)
        return "done"

    await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same", context=ANN)
    await client.call(work)
    world.disk.execute("UPDATE task SET caller_hash = NULL")

    assert await client.call(work) == "done"
    assert done == ["same"]


async def test_a_request_without_an_id_gets_one_and_is_never_a_duplicate(
    world: World, svc: Service
):
    """
    Each delivery without an id is a request of its own.
    """
    seen = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        seen.append(ctx.request_id)

    life = await world.start(svc)
    for _ in range(2):
        await world.deliver("compute", b'{"method": "work", "args": {}}')
    await life.hears("task.finished", 2)

    assert len(set(seen)) == 2
    assert world.tally()["accepted"] == 2


async def test_copies_of_a_requeue_request_end_with_it(world: World, svc: Service):
    """
    A second copy in flight starts nothing; in the end all are acked and every caller is answered.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> int:
        await doors.pass_(ctx.request_id)
        return 5

    @svc.rpc(on_interrupt="requeue")
    async def other(ctx: Context) -> None: ...

    life = await world.start(svc)
    client = await world.client(svc)
    view = client.prepare(request_id="same")
    await view.cast(read)
    calls = [asyncio.create_task(view.call(read)) for _ in range(3)]
    await world.settle()
    with pytest.raises(ConflictingRequestError, match="same is known with other content"):
        await view.call(other)
    doors.open("same")

    assert await asyncio.gather(*calls) == [5, 5, 5]
    assert doors.entered == ["same"]
    report = await life.drain()
    assert report.given_back == 0
    assert world.broker.waiting("compute") == 0


async def test_copies_of_an_ended_requeue_request_are_all_settled(world: World, svc: Service):
    """
    However many come at once after its end here: nothing is run, and none stays with the service.
    """
    ran = []

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> None:
        ran.append(ctx.request_id)

    life = await world.start(svc)
    body = b'{"method":"read","args":{},"_unique_id":"same"}'
    await world.deliver("compute", body)
    await life.hears("task.finished")
    for _ in range(3):
        await world.deliver("compute", body)
    await world.until(lambda: len(world.incidents("duplicate")) == 3)
    report = await life.drain()

    assert ran == ["same"]
    assert (report.given_back, world.broker.waiting("compute")) == (0, 0)


async def test_a_requeue_request_at_work_does_not_keep_others_from_being_read(
    world: World, svc: Service
):
    """
    `prefetch_bytes` bounds what is no task yet, however long the message of a task is held.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context, n: int, text: str) -> None:
        await doors.pass_(n)

    await world.start(svc, prefetch_bytes=1000)
    client = await world.client(svc)
    for n in (1, 2):
        await client.cast(read, n=n, text="x" * 2000)

    assert await doors.wait(2) == [1, 2]
    doors.open(1, 2)


async def test_reading_pauses_while_much_is_not_accepted_yet(world: World, svc: Service):
    """
    Here for a slow commit. What was accepted counts no more, and the rest is read.
    """
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


async def test_a_pause_of_reading_that_lasts_is_told(world: World, svc: Service):
    """
    A commit that takes a minute holds the lane up: the service says so, and is not ready.
    """

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
        r"requests cannot be read: 2\d+ bytes wait to be accepted, and 1000 may", why
    )
    assert life.runtime.not_ready is None


async def test_copies_of_a_requeue_request_survive_a_crash(world: World, svc: Service):
    """
    None was acked: each caller is answered after the restart.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue", settle=0)
    async def read(ctx: Context) -> int:
        await doors.pass_("in")
        return 5

    life = await world.start(svc)
    view = (await world.client(svc)).prepare(request_id="same")
    calls = [asyncio.create_task(view.call(read)) for _ in range(2)]
    await view.cast(read)
    await world.settle()
    await life.crash()
    doors.open("in")
    await world.start(svc)

    assert await asyncio.gather(*calls) == [5, 5]
    assert world.broker.waiting("compute") == 0


async def test_a_requeue_request_that_comes_again_after_its_end_is_acked_and_answered(
    world: World, svc: Service
):
    """
    Its ack was lost: it does not run again in this process, and its caller gets what it was owed.
    """
    ran, inbox = [], Inbox()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> int:
        ran.append(ctx.request_id)
        return 5

    life = await world.start(svc)
    life.faults.delay_s = 1.5  # before the transport tries the ack again
    life.faults.plan("transport", "deliver", Fault.DUPLICATE)
    life.faults.plan("transport", "ack", Fault.LOST_BEFORE)
    address = ReplyAddress(queue="reply_x", msg_id="m")
    request = Request(request_id="same", method="read", args={}, reply=address)
    await world.deliver("compute", encode_request(request))
    await life.hears("reply.given_up")  # there is no such queue yet
    caller = MemoryTransport(world.broker, life.process)
    await caller.start()
    await caller.consume([reply_queue("reply_x")], inbox.put, prefetch=10)

    assert decode_reply((await inbox.next()).body).result == 5
    await world.settle()
    assert ran == ["same"]
    assert world.states() == {}
    assert world.tally()["duplicate"] == 1
    assert world.broker.waiting("compute") == 0


async def test_every_instance_has_its_copy_of_a_fanout(world: World, svc: Service):
    """
    One fanout, one task an instance, each deduped by itself.
    """
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
    """
    The directed queue is that host's; to an unknown host nothing is kept.
    """

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


# -- ends of every kind ------------------------------------------------------------------------


async def test_at_a_timeout_the_caller_is_answered_at_once_and_the_task_stays(
    world: World, svc: Service
):
    """
    A handler that winds up slowly keeps its place and its lease until it has returned.
    """
    loop = asyncio.get_running_loop()

    @svc.rpc(resource="vm", timeout="5s")
    async def slow(ctx: Context, vm: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(10)

    life = await world.start(svc)
    client = await world.client(svc)
    begun = loop.time()
    with pytest.raises(MethodTimeoutError, match="exceeded its timeout of 5 s"):
        await client.prepare(request_id="t").call(slow, vm="v")

    assert loop.time() - begun == pytest.approx(5, abs=0.1)
    assert world.state("t") == "running"
    assert world.rows("SELECT owner FROM lease")[0]["owner"] == life.runtime.run_id
    await life.hears("task.finished")
    assert loop.time() - begun == pytest.approx(15, abs=0.1)
    assert world.state("t") == "failed"
    await world.settle()
    assert world.rows("SELECT * FROM reply") == []


async def test_a_deadline_is_the_earliest_of_all(world: World, svc: Service):
    """
    Method timeout, the caller's patience and the drain's deadline: ctx knows the nearest.
    """
    loop = asyncio.get_running_loop()
    seen: dict[str, float | None] = {}
    asked, again = asyncio.Event(), asyncio.Event()

    @svc.rpc
    async def look(ctx: Context) -> None:
        seen["caller"] = ctx.time_left

    @svc.rpc(timeout=20)
    async def limited(ctx: Context) -> None:
        seen["method"] = ctx.time_left
        asked.set()
        await again.wait()
        seen["drain"] = ctx.time_left
        assert ctx.draining

    @svc.rpc
    async def free(ctx: Context) -> None:
        seen["none"] = ctx.deadline

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(timeout=30).call(look)
    await client.cast(free)
    call = asyncio.create_task(client.prepare(timeout=60).call(limited))
    await asked.wait()
    life.runtime.request_stop(source="signal", by="test", reason="test")
    await life.hears("intake.closed", 1)
    await asyncio.sleep(15)
    again.set()
    await call
    await life.wait_end()

    assert seen == {
        "caller": pytest.approx(30, abs=0.1),
        "method": pytest.approx(20, abs=0.1),
        "drain": pytest.approx(5, abs=0.2),
        "none": None,
    }
    assert loop.time() < 60


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
async def test_a_handler_cannot_end_the_service(world: World, svc: Service, error: BaseException):
    """
    Whatever a handler raises is its own failure: its caller is told and the next request runs.
    """

    @svc.rpc
    async def bad(ctx: Context) -> None:
        raise error

    @svc.rpc
    async def good(ctx: Context) -> int:
        return 1

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match=type(error).__name__):
        await client.prepare(request_id="b").call(bad)

    assert await client.call(good) == 1
    assert world.state("b") == "failed"


@pytest.mark.parametrize(
    "cancelled", [False, True], ids=["uncancelled", "swallowed a cancellation"]
)
@pytest.mark.parametrize("where", ["beside another task", "in a thread without a loop"])
async def test_a_task_that_is_thrown_away_with_its_loop_has_no_outcome(
    world: World, svc: Service, where: str, cancelled: bool
):
    """
    The interpreter closes its coroutine: the GeneratorExit in the handler is no failure. No step of
    ours can follow, so the row stays RUNNING, and the next start settles it.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await doors.pass_(ctx.attempt)
            return
        await doors.pass_("on")

    life = await world.start(svc)
    client = await world.client(svc)
    request_id = await client.cast(work)
    await doors.wait(1)
    (task,) = life.runtime.tracker
    assert task.handler is not None
    if cancelled:
        task.handler.cancel()
        await doors.wait(2)
    coroutine = task.handler.get_coro()
    if where == "beside another task":
        coroutine.close()
    else:
        thread = threading.Thread(target=coroutine.close)
        thread.start()
        thread.join()
    await asyncio.sleep(1)

    row = world.task(request_id)
    assert (row["state"], row["failure"], row["cut"]) == ("running", None, None)
    assert life.told("task.finished") == []
    await life.crash()
    doors.open(2)
    await world.start(svc)
    await world.until(lambda: world.state(request_id) == "succeeded")
    assert doors.entered == ([1, "on", 2] if cancelled else [1, 2])


async def test_a_cancellation_that_nobody_asked_for_is_an_interruption(world: World, svc: Service):
    """
    A library may raise CancelledError: how far the handler came is not known, so it is no failure.
    """

    @svc.rpc
    async def odd(ctx: Context) -> None:
        raise asyncio.CancelledError("from a library")

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(TaskInterruptedError, match="its end is not known"):
        await client.prepare(request_id="c", timeout=60).call(odd)
    assert (world.state("c"), world.task("c")["reason"]) == ("errored", "interrupted")


async def test_a_handler_that_cancels_itself_hurts_nobody_else(world: World, svc: Service):
    """
    A cancellation left behind by the handler never reaches gracekit's own steps.
    """

    @svc.rpc
    async def odd(ctx: Context) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)

    assert await client.prepare(request_id="c", timeout=10).call(odd) == "done"
    await world.settle()
    assert world.rows("SELECT * FROM reply") == []
    report = await life.drain()
    assert report.waited_s == pytest.approx(0, abs=0.1)


async def test_a_swallowed_cancellation_ends_by_itself(world: World, svc: Service):
    """
    A handler that catches its cancellation and returns has ended: its result is the record.
    """

    @svc.rpc(timeout=5)
    async def stubborn(ctx: Context) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            assert ctx.cancelled
        return "done anyway"

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="s").call(stubborn)
    await life.hears("task.finished")

    assert world.task("s")["result"] == '"done anyway"'


async def test_a_result_that_cannot_be_sent_is_left_out_and_its_place_told(
    world: World, svc: Service
):
    """
    The caller learns which part of the result is no plain data; the work was done.
    """

    @svc.rpc
    async def bad(ctx: Context) -> dict[str, object]:
        return {"vm": {"handle": object()}}

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match=r"result\.vm\.handle: object of type object"):
        await client.prepare(request_id="u").call(bad)
    assert world.state("u") == "succeeded"


@pytest.mark.parametrize("depth", range(28, 34))
async def test_a_deep_result_is_sent_or_refused_but_never_lost(
    world: World, svc: Service, depth: int
):
    """
    At the edge of what a message may nest the caller gets the result or a clear error.
    """

    @svc.rpc
    async def deep(ctx: Context) -> object:
        value: object = 1
        for _ in range(depth):
            value = [value]
        return value

    life = await world.start(svc)
    client = await world.client(svc)
    try:
        await client.prepare(timeout=10).call(deep)
    except CallTimeoutError:
        pytest.fail("nothing came back")
    except RpcError as error:
        assert "nest" in str(error)  # noqa: PT017 - either end is fine
    await life.drain()
    assert world.rows("SELECT * FROM reply") == []


@pytest.mark.parametrize("keys", [9_990, 9_998, 10_000, 10_001])
async def test_a_wide_result_is_sent_or_refused_but_never_lost(
    world: World, svc: Service, keys: int
):
    """
    At the edge of what a message may hold the caller gets the result or a clear error.
    """

    @svc.rpc
    async def wide(ctx: Context) -> dict[str, int]:
        return {str(n): n for n in range(keys)}

    life = await world.start(svc)
    client = await world.client(svc)
    try:
        assert len(await client.prepare(timeout=10).call(wide)) == keys
    except CallTimeoutError:
        pytest.fail("nothing came back")
    except RpcError as error:
        assert "keys" in str(error)  # noqa: PT017 - either end is fine
    await life.drain()
    assert world.rows("SELECT * FROM reply") == []


async def test_a_cursor_that_cannot_be_kept_fails_its_own_task_only(world: World, svc: Service):
    """
    A safe point takes plain data; other tasks' commits do not suffer from one that is not.
    """

    @svc.rpc
    async def bad(ctx: Context) -> None:
        await ctx.safe_point(object())

    @svc.rpc
    async def good(ctx: Context) -> int:
        return 1

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match="cursor"):
        await client.prepare(timeout=5).call(bad)
    assert await client.prepare(timeout=5).call(good) == 1


@pytest.mark.looptime(False)
async def test_plain_handlers_run_in_threads_of_their_lane(world: World, svc: Service):
    """
    A plain `def` runs beside the loop, its result comes back, and a full lane leaves ops alone.
    """
    go = threading.Event()

    @svc.rpc
    def work(ctx: Context) -> str:
        go.wait(30)
        return threading.current_thread().name

    @svc.ops
    def ping(ctx: Context) -> str:
        return threading.current_thread().name

    life = await world.start(svc, threads=1)
    client = await world.client(svc)
    calls = [asyncio.create_task(client.call(work)) for _ in range(2)]
    await life.hears("task.started")
    pong = await client.call(ping)
    started = len(life.told("task.started"))
    go.set()
    names = await asyncio.gather(*calls)

    assert started == 2, "of one thread, and of ops"
    assert threading.main_thread().name not in {pong, *names}
    report = await life.drain()
    assert report.exit_code == 0


@pytest.mark.looptime(False)
async def test_a_thread_that_raises_system_exit_is_a_failed_task(world: World, svc: Service):
    """
    sys.exit in a plain handler ends that handler.
    """

    @svc.rpc
    def bad(ctx: Context) -> None:
        raise SystemExit(1)

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(RpcError, match="SystemExit"):
        await client.prepare(timeout=10).call(bad)


@pytest.mark.looptime(False)
async def test_a_thread_is_over_when_it_has_returned(world: World, svc: Service):
    """
    A timed-out thread keeps task and lease until it returns; it can ask whether it was cancelled.
    """
    go = threading.Event()
    seen = []

    @svc.rpc(resource="vm", timeout=0.1)
    def work(ctx: Context, vm: str) -> None:
        go.wait(30)
        seen.append(ctx.cancelled)

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="t").call(work, vm="v")
    assert world.state("t") == "running"
    go.set()
    await life.hears("task.finished")

    assert seen == [True]
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]


# -- the store in doubt ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
@pytest.mark.parametrize("point", [Point.ACCEPT_AND_BEGIN, Point.FINISH])
async def test_a_commit_in_doubt_loses_nothing_and_runs_nothing_twice(
    world: World, svc: Service, point: Point, fault: Fault
):
    """
    The row decides: the handler runs once, its caller is answered soon, the row is terminal.
    """
    starts = []

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> int:
        starts.append(ctx.attempt)
        return 7

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan(point, fault)

    assert await client.prepare(request_id="d", timeout=5).call(work, vm="v") == 7
    assert starts == [1]
    assert world.state("d") == "succeeded"
    assert await client.prepare(timeout=5).call(work, vm="v") == 7
    await asyncio.sleep(100)
    assert world.rows("SELECT * FROM reply") == []


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
async def test_a_begin_in_doubt_runs_once_in_the_end(world: World, svc: Service, fault: Fault):
    """
    A task whose turn came while the store hesitated is started once, at the latest when
    recovery looks.
    """
    doors = Doors()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    ids = [await client.cast(work, vm="v", n=n) for n in range(2)]
    await doors.wait(1)
    life.plan(Point.BEGIN, fault)
    doors.open(0, 1)
    await world.until(lambda: set(world.states().values()) == {"succeeded"})

    assert doors.entered == [0, 1]
    assert world.task(ids[1])["attempts"] == 1


@pytest.mark.parametrize("on_interrupt", ["error", "retry"])
async def test_an_acceptance_whose_trace_is_lost_is_settled_by_the_living_run(
    world: World, svc: Service, on_interrupt: str
):
    """
    Commit unknown and the read after it failed too: the row is found, its lease freed, and it
    ends, without a restart.
    """
    starts = []

    @svc.rpc(resource="vm", on_interrupt=on_interrupt)
    async def work(ctx: Context, vm: str) -> None:
        starts.append(ctx.attempt)

    life = await world.start(svc, beat_s=60.0)  # which reads, too
    client = await world.client(svc)
    await asyncio.sleep(3)  # until nothing else reads
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.LOST_AFTER)
    life.faults.plan("store", "query", Fault.REFUSED)
    request_id = await client.cast(work, vm="v")
    await world.until(lambda: world.state(request_id) in {"errored", "succeeded"}, within_s=120)

    assert len(life.told("task.adopted")) == 1
    # That it never started is known to the run that accepted it: also `error` may be run.
    assert (world.state(request_id), len(starts)) in {("succeeded", 1), ("errored", 0)}
    assert world.task(request_id)["attempts"] <= 2
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]


@pytest.mark.parametrize(
    ("point", "again_after_s"),
    [
        (Point.ACCEPT_AND_BEGIN, 0.0),
        (Point.ACCEPT_AND_BEGIN, 20.0),
        (Point.ACCEPT, 0.0),
        (Point.ACCEPT, 20.0),
        (Point.BEGIN, None),
    ],
)
async def test_an_entry_whose_trace_is_lost_is_found_as_soon_as_it_has_left(
    world: World, svc: Service, point: Point, again_after_s: float | None
):
    """
    While its task, or that of its next delivery, is in the tracker recovery takes the row for
    known: it looks once more after that, and a caller does not wait for a whole period.
    """
    doors = Doors()

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(ctx.request_id)

    life = await world.start(svc, beat_s=60.0)  # which reads, too
    client = await world.client(svc)
    doors.open("lost")
    if point is not Point.ACCEPT_AND_BEGIN:  # it has to wait for its turn
        await client.prepare(request_id="first").cast(work, vm="v")
        await doors.wait(1)
    if point is Point.BEGIN:
        await client.prepare(request_id="lost").cast(work, vm="v")
        await world.until(lambda: world.state("lost") == "accepted")
    await asyncio.sleep(3)  # until nothing else reads
    life.plan(point, Fault.LOST_AFTER)
    life.faults.plan("store", "query", Fault.REFUSED)
    begun = asyncio.get_running_loop().time()
    if point is Point.BEGIN:
        doors.open("first")
    else:
        await client.prepare(request_id="lost").cast(work, vm="v")
    await life.hears("store.error")
    if again_after_s:
        life.faults.delay_s = again_after_s
        life.plan("deliver", Fault.DELAY)
    await life.hears("task.adopted")
    doors.open("first")
    await world.until(lambda: world.state("lost") == "succeeded")

    assert asyncio.get_running_loop().time() - begun < 5


async def claimed_in_flight(world: World, svc: Service, doors: Doors) -> Life:
    """A life that has claimed a row whose last attempt has still to leave the tracker."""

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        await doors.pass_(ctx.attempt)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="t").cast(work)
    await doors.wait(1)
    world.disk.execute("UPDATE task SET state = 'accepted', owner = NULL")
    life.runtime._pace.poke()
    await asyncio.sleep(10)
    return life


async def test_a_row_that_is_claimed_while_its_task_is_in_flight_begins_after_it(
    world: World, svc: Service
):
    """
    Its last attempt is over on record, and has not left the tracker: the row is not started beside
    that one, and as soon as it has left.
    """
    doors = Doors()
    await claimed_in_flight(world, svc, doors)
    assert doors.entered == [1]

    doors.open(1, 2)
    await world.settle()
    assert doors.ended == [1, 2]
    assert world.state("t") == "succeeded"


async def test_a_row_that_is_claimed_while_its_task_is_in_flight_is_not_kept_by_a_drain(
    world: World, svc: Service
):
    """
    The drain does not wait for what the row waits for: the row is anyone's again.
    """
    doors = Doors()
    life = await claimed_in_flight(world, svc, doors)
    life.ask_to_stop()
    await life.hears("intake.closed")

    assert world.rows("SELECT state, owner FROM task") == [{"state": "accepted", "owner": None}]
    doors.open(1)
    assert (await life.wait_end()).not_started == ["t"]


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER])
async def test_a_duplicate_in_doubt_starts_nothing(world: World, svc: Service, fault: Fault):
    """
    The duplicate of an ended task meets a commit of unknown outcome: the old row is not mistaken
    for a new acceptance.
    """
    starts = []

    @svc.rpc
    async def work(ctx: Context) -> int:
        starts.append(1)
        return len(starts)

    life = await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same", timeout=5)
    assert await client.call(work) == 1
    life.plan(Point.ACCEPT_AND_BEGIN, fault)

    assert await client.call(work) == 1
    assert starts == [1]


@pytest.mark.parametrize("policy", ["error", "requeue"])
async def test_an_ack_that_fails_costs_nothing(world: World, svc: Service, policy: str):
    """
    The request runs once and is answered; the unacked copy comes again after the connection and
    is a duplicate, or an idempotent second read; no slot and no count is lost.
    """
    starts = []

    @svc.rpc(on_interrupt=policy, max_running=1)
    async def work(ctx: Context) -> int:
        starts.append(1)
        return 3

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan("ack", Fault.REFUSED)
    for _ in range(2):
        assert await client.prepare(timeout=5).call(work) == 3
    await world.settle()
    assert life.runtime.tracker.running == 0
    report = await life.drain()
    assert (report.exit_code, report.waited_s) == (0, pytest.approx(0, abs=0.1))
    assert world.broker.waiting("compute") == 1

    await world.start(svc)
    await world.until(lambda: world.broker.waiting("compute") == 0)
    await asyncio.sleep(1)
    assert len(starts) == (2 if policy == "error" else 3)


async def test_a_broken_store_ends_the_service_in_order(world: World, svc: Service):
    """
    Intake stops, what was not accepted stays in the queue, what runs may end, and the exit is 70.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    running = await client.cast(work, n=0)
    await doors.wait(1)
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.BROKEN)
    await client.cast(work, n=1)
    await life.hears("drain.started")
    doors.open(0)
    world.expects_faults = True
    report = await life.wait_end()

    assert report.exit_code == 70
    assert "the disk is gone" in (report.failure or "")
    assert doors.ended == [0]
    assert world.broker.waiting("compute") == 1
    assert world.state(running) == "running"
    assert "store.broken" in life.names()


async def test_a_pause_that_cannot_give_back_does_not_end_intake(world: World, svc: Service):
    """
    What a transport cannot take back now it owes; consuming goes on when a place is free.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, max_accepted=1, accept_wait_s=1, prefetch=4)
    client = await world.client(svc)
    for n in range(3):
        await client.cast(work, n=n)
    await doors.wait(1)
    life.plan("give_back", Fault.REFUSED)
    await asyncio.sleep(30)
    doors.open(0, 1, 2)

    await doors.wait(3)
    assert sorted(map(int, doors.entered)) == [0, 1, 2]


async def test_an_outcome_that_the_store_refuses_for_long_is_not_dropped(
    world: World, svc: Service
):
    """
    The answer waits with it, and both come when the store takes it.
    """

    @svc.rpc
    async def work(ctx: Context) -> str:
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan(Point.FINISH, Fault.REFUSED, times=20)
    answer = await client.prepare(request_id="w", timeout=100).call(work)

    assert answer == "done"
    assert world.state("w") == "succeeded"


async def test_a_broken_store_does_not_send_deliveries_round_and_round(world: World, svc: Service):
    """
    The ops lane stays open in the drain that follows; what comes by it waits between two tries.
    """
    world.expects_faults = True
    doors = Doors()

    @svc.ops
    async def look(ctx: Context) -> None: ...

    @svc.rpc(on_interrupt="requeue")
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.BROKEN)
    await client.cast(look)
    await life.hears("store.broken")
    await asyncio.sleep(5)

    tries = [fields for fields in life.told("store.error") if fields["what"] != "tally"]
    assert 2 <= len(tries) <= 30
    doors.open("work")
    assert (await life.wait_end()).exit_code == 70


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
async def test_a_second_loop_over_steps_is_refused(world: World, svc: Service, at_once: bool):
    """
    A task has one cursor: a second loop would pass its items over, without a word.
    """
    done: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> None:
        async def steps() -> None:
            async for item in ctx.steps(range(3)):
                await asyncio.sleep(1)
                done.append(item)

        if at_once:
            await asyncio.gather(steps(), steps())
        else:
            await steps()
            await steps()

    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(DeclarationError, match=r"two loops over ctx\.steps"):
        await client.prepare(timeout=60).call(copy)


async def test_a_safe_point_by_hand_before_a_loop_over_a_sequence_is_refused(
    world: World, svc: Service
):
    """
    The loop would begin behind that cursor, as if it were an index.
    """

    @svc.rpc
    async def copy(ctx: Context) -> None:
        await ctx.safe_point(1)
        async for _ in ctx.steps(range(3)):
            await asyncio.sleep(1)

    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(DeclarationError, match=r"give ctx\.steps\(\) a callable"):
        await client.prepare(timeout=60).call(copy)


async def test_a_loop_over_steps_that_was_left_may_be_begun_again(world: World, svc: Service):
    """
    It goes on behind its last safe point.
    """
    done: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> None:
        for n in range(2):
            async for item in ctx.steps(range(3)):
                if item == 1 and n == 0:
                    break
                done.append(item)

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(timeout=60).call(copy)

    assert done == [0, 1, 2]
