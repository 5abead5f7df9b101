"""Rows of every kind that a run has left, and what the next one makes of each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    Service,
    TaskInterruptedError,
)
from gracekit.errors import (
    AlreadyRunningError,
)
from gracekit.process import Point
from tests.service.kit import Fault, World, now
from tests.service.left_over import Job

pytestmark = pytest.mark.looptime


async def test_what_was_accepted_and_not_started_is_simply_run(world: World, svc: Service):
    """Under every policy, after a crash too: nobody has begun it."""
    entered = []

    @svc.rpc(max_running=1)
    async def work(ctx: Context, n: int) -> int:
        entered.append(n)
        if len(entered) == 1:
            await asyncio.sleep(100_000)
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r0").cast(work, n=0)
    call = asyncio.create_task(client.prepare(request_id="r1").call(work, n=1))
    await world.until(lambda: world.state("r1") == "accepted")
    await life.crash()
    await world.start(svc)

    assert await call == 1
    assert entered == [0, 1]
    await world.until(lambda: world.state("r0") == "errored")


async def test_a_restored_task_that_is_not_known_to_have_begun_is_not_said_to_have_been_started(
    world: World, svc: Service
):
    """It was ACCEPTED in the copy: its caller and its record learn that it may have begun since."""

    @svc.rpc(max_running=1)
    async def work(ctx: Context, n: int) -> int:
        await asyncio.sleep(100_000)
        return n

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r0").cast(work, n=0)
    call = asyncio.create_task(client.prepare(request_id="r1", timeout=1000).call(work, n=1))
    await world.until(lambda: world.state("r1") == "accepted")
    await life.crash()
    world.disk.execute(  # as the start with a restored store does
        "UPDATE task SET state = 'handed_over', cut = 'unclean', owner = NULL, not_before = 0 "
        "WHERE request_id = 'r1'"
    )
    await world.start(svc)

    with pytest.raises(
        TaskInterruptedError,
        match=r"marked ERRORED\(interrupted\): it was accepted in an older copy of the store, and "
        "it is not known whether it has begun since",
    ):
        await call
    detail = world.task("r1")["detail"]
    assert "it is not known whether it has begun since" in detail
    assert "it was started" not in detail
    assert "it was started" in world.task("r0")["detail"]


async def test_an_accepted_call_whose_caller_has_left_expires(world: World, svc: Service):
    """ERRORED(expired), no handler, the hook told; a cast of the same age is run."""
    entered, told = [], []

    @svc.rpc(max_running=1)
    async def work(ctx: Context, n: int) -> None:
        entered.append(n)
        if len(entered) == 1:
            await asyncio.sleep(100_000)

    @work.errored
    async def _(ctx: Context, n: int, reason: str) -> None:
        told.append((n, reason))

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r0").cast(work, n=0)
    call = asyncio.create_task(client.prepare(request_id="r1", timeout=20).call(work, n=1))
    await client.prepare(request_id="r2").cast(work, n=2)
    await asyncio.sleep(1)
    await life.crash()
    with pytest.raises(CallTimeoutError):
        await call
    await asyncio.sleep(20)
    await world.start(svc)
    await world.until(lambda: world.state("r2") == "succeeded")

    assert entered == [0, 2]
    assert (world.task("r1")["state"], world.task("r1")["reason"]) == ("errored", "expired")
    await world.until(lambda: len(told) == 2)
    assert (1, "expired") in told


async def test_a_method_that_is_gone_ends_its_tasks(world: World):
    """Accepted or started: ERRORED(method_gone), and the caller hears."""
    old, new = Service("compute"), Service("compute")
    entered = []

    @old.rpc(max_running=1, on_interrupt="retry")
    async def removed(ctx: Context) -> None:
        entered.append(1)
        await asyncio.sleep(100_000)

    @new.rpc
    async def other(ctx: Context) -> None: ...

    life = await world.start(old)
    client = await world.client(old)
    calls = [
        asyncio.create_task(client.prepare(request_id=f"r{n}").call(removed)) for n in range(2)
    ]
    await world.until(lambda: world.state("r1") == "accepted")
    await life.crash()
    await world.start(new)
    ends = await asyncio.gather(*calls, return_exceptions=True)

    assert all("method_gone" in str(one) for one in ends)
    assert entered == [1]
    assert world.rows("SELECT DISTINCT reason FROM task") == [{"reason": "method_gone"}]


async def test_replies_that_a_dead_run_owed_are_sent_once(world: World, svc: Service):
    """The outcome was committed, the answer was not sent: the next start sends it."""

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 42

    life = await world.start(svc)
    client = await world.client(svc)
    life.crash_at(Point.REPLY, "before")
    call = asyncio.create_task(client.prepare(request_id="w").call(work))
    await life.over.wait()
    assert world.state("w") == "succeeded"
    await world.start(svc)

    assert await call == 42
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    assert client._replies.ignored == 0


async def test_replies_that_nobody_waits_for_any_more_are_given_up(world: World, svc: Service):
    """Older than the call's timeout: counted and listed, not sent."""

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 42

    life = await world.start(svc)
    client = await world.client(svc)
    life.crash_at(Point.REPLY, "before")
    with pytest.raises(CallTimeoutError):
        await client.prepare(request_id="w", timeout=30).call(work)
    await asyncio.sleep(5)
    await world.start(svc)
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])

    assert world.tally()["reply_given_up"] == 1


async def test_the_errored_hook_is_called_at_least_once(world: World, svc: Service):
    """A crash between the verdict and the hook, or in the hook: the next start calls it."""
    job = Job(world, svc)
    job.with_errored()
    life, _ = await job.begin()
    await life.crash()
    second = world.life(svc)
    second.crash_at(Point.ERRORED_DONE, "before")
    await second.start()
    await second.over.wait()
    assert job.told == ["v: interrupted"]
    assert job.row()["args"] is not None
    await world.start(svc)
    await world.until(lambda: job.row()["errored_due"] == 0)

    assert job.told == ["v: interrupted"] * 2


async def test_an_errored_hook_that_fails_is_told_and_not_repeated(world: World, svc: Service):
    """It was called; what it did is its own affair; the service goes on."""
    job = Job(world, svc)

    @job.work.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        job.told.append(vm)
        raise SystemExit(1)

    life, _ = await job.begin()
    await life.crash()
    second = await world.start(svc)
    await second.hears("hook.failed")
    await asyncio.sleep(120)

    assert job.told == ["v"]
    assert job.row()["errored_due"] == 0
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=99).call(job.work, vm="x"))
    await world.until(lambda: len(job.attempts) == 2)
    call.cancel()


@pytest.mark.parametrize("at", [Point.CLAIM, Point.SETTLE])
@pytest.mark.parametrize("phase", ["before", "after"])
async def test_a_crash_of_recovery_itself_changes_no_verdict(
    world: World, svc: Service, at: Point, phase: Any
):
    """A task that had stopped at a safe point goes on from there, whoever died since."""
    seen: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> int:
        async for block in ctx.steps(range(6)):
            seen.append(block)
            await asyncio.sleep(1)
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=500).call(copy))
    await asyncio.sleep(2.5)
    await life.drain()
    second = world.life(svc)
    second.crash_at(at, phase)
    await second.start()
    await second.over.wait()
    await world.start(svc)

    assert await call == 2
    assert seen == list(range(6))


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
@pytest.mark.parametrize("point", [Point.CLAIM, Point.SETTLE, Point.TAKE_LEASE])
@pytest.mark.parametrize("policy", ["error", "retry", "probe"])
async def test_recovery_survives_a_store_that_hesitates(
    world: World, svc: Service, policy: str, point: Point, fault: Fault
):
    """One commit of recovery fails, in any way: the row is settled all the same, without a
    restart.
    """
    job = Job(world, svc, on_interrupt=policy, settle=0)
    job.with_probe()
    life, call = await job.begin()
    await life.crash()
    second = world.life(svc)
    second.plan(point, fault)
    await second.start()
    await asyncio.gather(call, return_exceptions=True)

    assert job.row()["state"] == ("errored" if policy == "error" else "succeeded")
    await asyncio.sleep(100)
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]
    assert world.rows("SELECT * FROM reply") == []
    report = await second.drain()
    assert report.exit_code == 0


async def test_a_row_that_could_not_be_put_down_is_taken_up_at_once(world: World, svc: Service):
    """Neither its verdict nor its giving up was committed: it is ours, and nobody works on it;
    until it is found, its lease keeps everyone from the resource.
    """
    world.expects_faults = True
    job = Job(world, svc, on_interrupt="probe", settle=0)
    job.with_probe()
    life, call = await job.begin()
    await life.crash()
    second = world.life(svc)
    second.plan(Point.SETTLE, Fault.REFUSED)
    second.plan(Point.NOT_STARTED, Fault.REFUSED)
    begun = now()
    await second.start()
    client = await world.client(svc)
    await client.cast(job.work, vm="v")

    assert await call == 2
    await world.until(lambda: len(job.attempts) == 3)
    assert now() - begun < 5
    assert second.faults.left() == []
    assert len(job.asked) == 2


async def test_a_task_whose_record_is_damaged_ends(world: World, svc: Service):
    """What is on record of its caller cannot be read: that fails its attempt, as a handler would,
    and does not start it again and again.
    """
    starts = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)
        await asyncio.sleep(100_000)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await world.until(lambda: starts == [1])
    await life.crash()
    world.disk.execute("UPDATE content SET context = '[1]'")
    await world.start(svc)
    await world.until(lambda: world.state("w") == "failed", within_s=100)

    assert starts == [1]
    assert world.task("w")["attempts"] == 2


async def test_without_reconciliation_nothing_started_is_judged(world: World, svc: Service):
    """startup_reconciliation_enabled=false: what was started stays, what was not is run, new work
    is taken; and the service does not spin.
    """
    job = Job(world, svc, on_interrupt="retry", settle=0)
    life, call = await job.begin()
    await life.crash()
    second = await world.start(svc, startup_reconciliation_enabled=False)
    before = world.rows("SELECT count(*) AS n FROM incident")
    await asyncio.sleep(600)

    row = job.row()
    assert (row["state"], row["owner"], len(job.attempts)) == ("handed_over", None, 1)
    assert world.rows("SELECT count(*) AS n FROM incident") == before
    await second.drain()
    await world.start(svc)
    assert await call == 2


async def test_rows_of_a_living_sibling_are_never_touched(world: World, svc: Service):
    """A start beside a living run leaves its tasks alone, for good."""
    job = Job(world, svc, on_interrupt="retry", settle=0)
    life, call = await job.begin(instance="a")
    second = await world.start(svc, instance="b")
    await asyncio.sleep(1800)
    assert (job.row()["state"], job.row()["owner"]) == ("running", life.runtime.run_id)

    await life.crash()
    assert await call == 2
    assert job.row()["owner"] == second.runtime.run_id


async def test_a_run_that_has_left_is_taken_over_while_its_process_lives(
    world: World, svc: Service
):
    """By its stop record nothing of it can act any more: a reply that no broker took need not wait
    for the end of the program around it.
    """

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 7

    life = await world.start(svc, instance="a")
    life.plan("publish", Fault.REFUSED, times=100)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="w", timeout=600).call(work))
    await life.hears("task.finished")
    sibling = await world.start(svc, instance="b")
    life.ask_to_stop()
    await life.hears("drain.finished")

    assert await call == 7
    assert life.process.lives
    assert world.task("w")["owner"] == sibling.runtime.run_id


async def test_of_two_siblings_exactly_one_takes_over(world: World, svc: Service):
    """Both see the dead run; one adopts it, each task is settled once."""
    attempts: list[str] = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context, n: int) -> None:
        attempts.append(ctx.request_id)
        if ctx.attempt == 1:
            await asyncio.sleep(100_000)

    life = await world.start(svc, instance="a")
    client = await world.client(svc)
    for n in range(20):
        await client.prepare(request_id=f"r{n:02}").cast(work, n=n)
    await world.until(lambda: len(attempts) == 20)
    for name in ("b", "c"):
        await world.start(svc, instance=name)
    await life.crash()
    await world.until(lambda: set(world.states().values()) == {"succeeded"})

    assert sorted(attempts[20:]) == sorted(set(attempts[:20]))
    assert world.tally()["adopted_runs"] == 1


async def test_a_second_run_of_an_instance_is_refused(world: World, svc: Service):
    """One process, one instance, one run."""
    life = await world.start(svc, instance="a")
    second = world.life(svc, instance="a")
    second.process.identity = life.process.identity

    with pytest.raises(AlreadyRunningError, match="instance 'a' of service 'compute' is running"):
        await second.runtime.open()
    world.living.add(life.process.identity)
