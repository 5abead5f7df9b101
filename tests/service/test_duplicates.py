"""Duplicates: copies of a request in flight, and of one that has ended."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.errors import (
    ConflictingRequestError,
)
from tests.service.kit import Doors, Fault, World

pytestmark = pytest.mark.looptime


async def test_a_known_request_starts_no_second_handler(world: World, svc: Service):
    """In flight, the duplicate's caller is answered with the first; after it, from the record."""
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
    """The end of a cast looks for no reply; a caller that joined it meanwhile waits all the
    same.
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
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    assert life.told("store.error") == []


async def test_a_failure_is_answered_from_the_record_too(world: World, svc: Service):
    """A handler that raised is FAILED and not run again; its error is the record."""
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
    """The second is REJECTED with a row of its own, its caller is told, the first is untouched."""

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
    """Who knows an id and the arguments, and is another user or of another project, gets neither
    the answer nor a word about it; the caller itself gets it, whatever else its context holds.
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
    """Services that share a store share its ids: neither gets the other's answer, nothing is
    lost.
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
    """None of the usual keys, or others; what a context does not have does not count."""

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


async def test_a_request_without_an_id_gets_one_and_is_never_a_duplicate(
    world: World, svc: Service
):
    """Each delivery without an id is a request of its own."""
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
    """A second copy in flight starts nothing; in the end all are acked and every caller is
    answered.
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
    """However many come at once after its end here: nothing is run, and none stays with the
    service.
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
    """`prefetch_bytes` bounds what is no task yet, however long the message of a task is held."""
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


async def test_copies_of_a_requeue_request_survive_a_crash(world: World, svc: Service):
    """None was acked: each caller is answered after the restart."""
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


async def test_a_requeue_request_that_comes_again_after_its_end_is_acked(
    world: World, svc: Service
):
    """Its ack was lost: it does not run again in this process."""
    ran = []

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> int:
        ran.append(ctx.request_id)
        return 5

    life = await world.start(svc)
    life.faults.delay_s = 1.5  # before the transport tries the ack again
    life.faults.plan("transport", "deliver", Fault.DUPLICATE)
    life.faults.plan("transport", "ack", Fault.LOST_BEFORE)
    client = await world.client(svc)

    assert await client.prepare(request_id="same").call(read) == 5
    await world.until(lambda: world.tally().get("duplicate") == 1)
    await world.settle()
    assert ran == ["same"]
    assert world.states() == {}
    assert world.broker.waiting("compute") == 0
