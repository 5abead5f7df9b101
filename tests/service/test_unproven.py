"""A run that could not show for a while that it lives: it ends what acts, and then goes on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from gracekit import Context, Service, Settled
from gracekit.process import Point
from gracekit.store.location import StoreLocation
from gracekit.testing.faults import Fault
from tests.service.kit import Life, World, now
from tests.service.shares import Shares, hang

pytestmark = pytest.mark.looptime

LOST_BEATS = 30
"""Each is tried again after half a second: more than `fail_after`, less than `hard_after`."""


class SharedLocation(StoreLocation):
    """The location of a store that hosts share."""

    is_shared = True


async def start(world: World, svc: Service, **settings: Any) -> Life:
    """A process beside others of other hosts, which watch its beats."""
    life = world.life(svc, **settings)
    life.runtime.ground.location.__class__ = SharedLocation
    await life.start()
    return life


async def lose_beats(life: Life) -> None:
    """Let so many beats fail that the run cancels what acts, until one succeeds again."""
    life.faults.plan("store", "aside", Fault.REFUSED, times=LOST_BEATS)
    await life.hears("store.unreachable")
    await life.hears("beats.resumed")


async def test_a_handler_is_told_that_it_is_lost_and_runs_again(world: World, svc: Service):
    """It was cancelled for no fault of its own; it is settled as its method says."""
    begun: list[bool] = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def build(ctx: Context) -> str:
        begun.append(ctx.lost)
        try:
            await asyncio.sleep(60 if len(begun) == 1 else 0)
        finally:
            begun[-1] = ctx.lost
        return "built"

    life = await start(world, svc)
    client = await world.client(svc)
    calling = asyncio.create_task(client.prepare(request_id="b", timeout=100).call(build))
    await life.hears("task.started")
    await lose_beats(life)

    assert await calling == "built"
    assert begun == [True, False]
    assert world.task("b")["crashes"] == 0
    await life.drain()


async def test_a_singleton_job_is_called_again(world: World, svc: Service):
    """Its lease is free again, once the store has heard of it."""
    ended: list[bool] = []

    @svc.periodic(every="10s", singleton=True)
    async def sweep(ctx: Context) -> None:
        try:
            await asyncio.sleep(0 if ended else 60)
        finally:
            ended.append(ctx.lost)

    life = await start(world, svc)
    await asyncio.sleep(11)
    await lose_beats(life)
    await life.hears("job.finished", 2)

    assert ended[:2] == [True, False]
    await life.drain()


async def test_a_rule_is_followed_again_after_its_settle_time(world: World, svc: Service):
    """Its last request may be under way when it was cancelled."""
    shares = Shares(world, svc)
    shares.add("s-1")
    shares.answers = lambda _id, n: hang() if n == 1 else Settled("available")

    life = await start(
        world,
        svc,
        startup_reconciliation_wait_seconds=5.0,
        probe_timeout_s=60.0,
        reconciliation_interval_s=10.0,
    )
    await world.until(lambda: bool(shares.asked))
    life.faults.plan("store", "aside", Fault.REFUSED, times=LOST_BEATS)
    await life.hears("store.unreachable")
    cancelled_at = now()
    await world.until(lambda: shares.statuses() == {"s-1": "available"})

    first, again = shares.asked
    assert again.at >= cancelled_at + 5.0
    assert (again.token or 0) > (first.token or 0)
    await life.drain()


async def test_the_kernel_may_end_a_run_until_the_last_hook_has_ended(world: World, svc: Service):
    """A probe that goes on after its cancellation acts, and others may act soon."""
    ended_at: list[float] = []

    async def stubborn() -> Settled:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(4)
        ended_at.append(now())
        return Settled("available")

    shares = Shares(world, svc)
    shares.add("s-1")
    shares.answers = lambda _id, n: stubborn() if n == 1 else Settled("available")
    life = await start(world, svc, startup_reconciliation_wait_seconds=1.0, probe_timeout_s=60.0)
    await world.until(lambda: bool(shares.asked))
    life.faults.plan("store", "aside", Fault.REFUSED, times=1000)
    await life.hears("store.unreachable")

    await asyncio.sleep(3)
    assert life.process._end is not None
    await asyncio.sleep(3)
    assert life.process._end is None
    assert len(ended_at) == 1

    life.faults.forget()
    await world.until(lambda: shares.statuses() == {"s-1": "available"})
    await life.drain()


async def test_recovery_rests_while_the_store_must_not_be_written(world: World, svc: Service):
    """It tried to claim a row that was due twenty times a second, and logged each try."""
    shares = Shares(world, svc)
    shares.add("s-1")
    shares.answers = lambda _id, _n: hang()
    life = await start(
        world,
        svc,
        startup_reconciliation_wait_seconds=1.0,
        probe_timeout_s=60.0,
    )
    await world.until(lambda: bool(shares.asked))
    life.faults.plan("store", "aside", Fault.REFUSED, times=1000)
    await life.hears("store.unreachable")
    before = len(life.told("store.error"))
    await asyncio.sleep(30)

    assert len(life.told("store.error")) - before < 30
    life.faults.forget()
    await life.hears("beats.resumed")
    await life.drain()


async def test_a_handler_is_cancelled_in_time_though_the_store_does_not_answer(
    world: World, svc: Service
):
    """A run that waited for its declaration of another one did not look at its own trust."""
    lost_at: list[float] = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def build(ctx: Context) -> None:
        try:
            await asyncio.sleep(200)
        finally:
            lost_at.append(now())

    dead = await start(world, svc, instance="a")
    life = world.life(svc, host="node-2", instance="b")
    life.runtime.ground.location.__class__ = SharedLocation
    life.faults.plan("process", "judge", Fault.NO_PROOF, times=100_000)
    await life.start()
    client = await world.client(svc)
    await dead.crash()
    await client.cast(build)
    await life.hears("task.started")
    heart = life.runtime.ground.seat.heart
    assert heart is not None

    life.faults.delay_s = 100.0
    life.plan(Point.ADOPT, Fault.DELAY)
    await world.until(lambda: bool(heart.silent))
    life.faults.plan("store", "aside", Fault.REFUSED, times=1000)
    trusted_at = now() - heart.trust_s
    await world.until(lambda: bool(lost_at), within_s=60)

    assert lost_at[0] <= trusted_at + heart.timings.fail_s + 1.0
    life.faults.forget()


async def test_the_proof_of_a_death_outlives_the_run_that_had_it(world: World, svc: Service):
    """It died before it took anything over, and the host was booted: no start could go on."""
    first = await start(world, svc, instance="a")
    await first.crash()
    second = world.life(svc, instance="a")
    second.runtime.ground.location.__class__ = SharedLocation
    second.crash_at(Point.ADOPT, "before")
    with pytest.raises(asyncio.CancelledError):
        await second.start()

    third = world.life(svc, instance="a")
    third.runtime.ground.location.__class__ = SharedLocation
    third.faults.plan("process", "judge", Fault.NO_PROOF, times=1000)
    await third.start()

    rows = world.rows("SELECT * FROM run WHERE adopted_at IS NULL")
    assert [row["run_id"] for row in rows] == [third.runtime.run_id]
    third.faults.forget()
    await third.drain()


async def test_the_lease_of_a_fenced_handler_is_free_after_its_settle_time(
    world: World, svc: Service
):
    """Its last request may be under way, as after a crash."""
    begun: list[float] = []

    @svc.rpc(on_interrupt="retry", resource="vm", settle="20s")
    async def build(ctx: Context, vm: str) -> None:
        begun.append(now())
        await asyncio.sleep(200 if len(begun) == 1 else 0)

    life = await start(world, svc)
    client = await world.client(svc)
    await client.cast(build, vm="1")
    await life.hears("task.started")
    await lose_beats(life)
    await life.hears("task.handed_over")
    (lease,) = world.rows("SELECT * FROM lease WHERE kind = 'vm'")

    assert lease["owner"] is None
    assert lease["not_before"] >= world.clock.wall() + 19.0
    await world.until(lambda: len(begun) == 2)
    await life.drain()
