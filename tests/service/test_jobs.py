"""Periodic jobs: what they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import Context, Service, current
from gracekit.errors import DeclarationError
from gracekit.process import Point
from tests.service.kit import Doors, Fault, World, now

pytestmark = pytest.mark.looptime


def asks(what: str) -> Callable[[Context], Any]:
    return lambda ctx: getattr(ctx, what)


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("request_id", asks("request_id")),
        ("attempt", asks("attempt")),
        ("hold()", lambda ctx: ctx.hold("migration", "vm-1", at_most="1m")),
    ],
)
async def test_a_job_that_asks_for_a_request_is_told_that_it_has_none(
    world: World, svc: Service, what: str, ask: Callable[[Context], Any]
):
    """The error names the job, what it has asked for, and what to do instead."""
    raised: list[DeclarationError] = []

    @svc.periodic(every="10s")
    async def sweep(ctx: Context) -> None:
        try:
            if (answer := ask(ctx)) is not None:
                await answer
        except DeclarationError as error:
            raised.append(error)

    life = await world.start(svc)
    await asyncio.sleep(11)

    assert str(raised[0]).startswith(
        f"periodic job sweep() answers no request, so it has no ctx.{what}: "
    )
    await life.drain()


async def test_a_job_has_what_any_work_has(world: World, svc: Service):
    """Its fence, its time in a drain, a lease of its own; the mapping of the caller is empty."""
    seen: list[Any] = []

    @svc.periodic(every="10s", singleton=True)
    async def sweep(ctx: Context) -> None:
        async with ctx.lease("vm", "1") as guard:
            seen.extend([ctx.fence, guard.token, ctx.method, dict(ctx), ctx.deadline])
        seen.extend([ctx.draining, ctx.cancelled, current() is ctx])

    life = await world.start(svc)
    await asyncio.sleep(11)

    fence, token, *rest = seen
    assert fence is not None
    assert token is not None
    assert rest == ["sweep", {}, None, False, False, True]
    await life.drain()


async def test_a_drain_starts_no_periodic_job_and_waits_for_a_running_one(
    world: World, svc: Service
):
    """Periodic jobs are refused in a drain; a running one finishes."""
    doors, ticks = Doors(), []

    @svc.periodic(every="10s")
    async def long_job(ctx: Context) -> None:
        await doors.pass_("job")

    @svc.periodic(every="1s")
    async def tick(ctx: Context) -> None:
        ticks.append(now())

    life = await world.start(svc)
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    before = len(ticks)
    await asyncio.sleep(6)
    assert len(ticks) == before
    doors.open("job")
    report = await life.wait_end()

    assert report.waited_s == pytest.approx(6, abs=0.1)
    assert doors.ended == ["job"]


async def test_a_job_that_a_drain_cuts_has_neither_failed_nor_finished(
    world: World, svc: Service, caplog: pytest.LogCaptureFixture
):
    """The log says at INFO that it was cut, no error is logged, and the report does not count
    it.
    """
    caplog.set_level("INFO", "gracekit")

    @svc.periodic(every="1s")
    async def long_job(ctx: Context) -> None:
        await asyncio.sleep(3600)

    life = await world.start(svc, drain_timeout_s=5)
    await asyncio.sleep(2)
    report = await life.drain()

    assert [fields["outcome"] for fields in life.told("job.finished")] == ["cut"]
    assert "job.finished" in {record.__dict__["event"] for record in caplog.records}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert life.told("hook.failed") == []
    assert (report.finished, report.exit_code) == (0, 0)


async def test_a_job_that_fails_while_it_is_cut_counts_as_cut(world: World, svc: Service):
    """What its clean-up raises after the cancellation of a drain says nothing about the job."""

    @svc.periodic(every="1s")
    async def long_job(ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise LookupError

    life = await world.start(svc, drain_timeout_s=5)
    await asyncio.sleep(2)
    report = await life.drain()

    assert [fields["outcome"] for fields in life.told("job.finished")] == ["cut"]
    assert life.told("hook.failed") == []
    assert report.finished == 0


async def test_a_job_that_ends_in_a_drain_counts_as_finished(world: World, svc: Service):
    """The drain waits for it, so its report has it; the event has seconds to three places."""

    @svc.periodic(every="1s")
    async def short_job(ctx: Context) -> None:
        await asyncio.sleep(3.00049)

    life = await world.start(svc)
    await asyncio.sleep(2)
    report = await life.drain()

    (ended,) = life.told("job.finished")
    assert (ended["outcome"], ended["ran_s"]) == ("succeeded", 3.0)
    assert report.finished == 1


async def test_a_block_that_a_drain_cuts_has_not_finished(world: World, svc: Service):
    """Neither the block that a handler tracks nor its task counts as finished in the report."""

    @svc.rpc(on_interrupt="retry")
    async def copy(ctx: Context) -> None:
        async with ctx.track("blocks"):
            await asyncio.sleep(3600)

    life = await world.start(svc, drain_timeout_s=5)
    await (await world.client(svc)).cast("copy")
    await life.hears("task.started")
    report = await life.drain()

    assert len(report.handed_over) == 1
    assert report.finished == 0


async def test_a_periodic_job_never_overlaps_and_survives_its_faults(world: World, svc: Service):
    """The pause counts from the end; whatever a job raises, the next still comes."""
    starts = []

    @svc.periodic(every=10)
    async def job(ctx: Context) -> None:
        starts.append(now())
        await asyncio.sleep(5)
        if len(starts) == 2:
            raise ValueError("no")
        if len(starts) == 3:
            raise SystemExit(1)

    life = await world.start(svc)
    begun = now()
    await asyncio.sleep(72)

    assert [round(at - begun) for at in starts] == [10, 25, 40, 55, 70]
    assert len(life.told("hook.failed")) == 2
    await life.drain()


async def test_a_singleton_job_runs_in_one_process_of_the_store(world: World, svc: Service):
    """The others skip while it runs."""
    running, most = [0], [0]

    @svc.periodic(every=10, singleton=True)
    async def job(ctx: Context) -> None:
        assert ctx.fence is not None
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(15)
        running[0] -= 1

    for n in range(3):
        await world.start(svc, instance=f"i{n}")
    await asyncio.sleep(200)

    assert most == [1]


async def test_a_lease_that_lands_after_its_job_was_cancelled_is_given_back(
    world: World, svc: Service
):
    """A drain cuts a singleton job while the store takes its time over the lease: who leaves with 0
    leaves no lease behind.
    """
    world.expects_faults = True  # the stop-intent is behind it

    @svc.periodic(every=10, singleton=True)
    async def sweep(ctx: Context) -> None: ...

    life = await world.start(svc, drain_timeout_s=1)
    life.faults.delay_s = 3
    life.plan(Point.TAKE_LEASE, Fault.DELAY)
    await asyncio.sleep(10.5)
    report = await life.drain()

    assert report.exit_code == 0
    assert world.rows("SELECT lver, owner FROM lease") == [{"lver": 1, "owner": None}]


async def test_the_last_give_back_of_a_lease_is_bounded(world: World, svc: Service):
    """A store that stands still then does not hold the process until its alarm: our death frees the
    lease too.
    """
    world.expects_faults = True  # the stop record finds the store as it is

    @svc.periodic(every=10, singleton=True)
    async def sweep(ctx: Context) -> None: ...

    life = await world.start(svc, drain_timeout_s=1)
    hard_limit_s = life.runtime.settings.hard_limit_s
    life.faults.delay_s = 3
    life.plan(Point.TAKE_LEASE, Fault.DELAY)
    await asyncio.sleep(10.5)
    life.faults.delay_s = hard_limit_s
    life.plan(Point.RELEASE_LEASE, Fault.DELAY)
    begun = now()
    await life.drain()

    assert now() - begun < hard_limit_s


async def test_a_singleton_whose_holder_was_killed_runs_again_at_once(world: World, svc: Service):
    """A sibling that meets the dead one's lease has it looked at now, not at the next
    reconciliation.
    """
    ran_by = []

    @svc.periodic(every=1, singleton=True)
    async def job(ctx: Context) -> None:
        ran_by.append(ctx.fence)
        await asyncio.sleep(3600 if len(ran_by) == 1 else 0)

    victim = await world.start(svc, instance="a")
    await world.until(lambda: ran_by == [1])
    sibling = await world.start(svc, instance="b")
    await asyncio.sleep(100)
    assert ran_by == [1]
    await victim.crash()
    killed_at = now()
    await world.until(lambda: len(ran_by) > 1)

    assert now() - killed_at <= 3
    assert ran_by[1] > ran_by[0]
    assert len(sibling.told("run.classified")) == 1
