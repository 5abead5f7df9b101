"""Rows of a host that does not come back, and holds whose run has died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import (
    Context,
    Done,
    Fail,
    Retry,
    RpcClient,
    Service,
    Wait,
)
from gracekit.phase import ServiceState
from gracekit.process import Point
from tests.service.kit import World, now

pytestmark = pytest.mark.looptime


async def test_a_directed_task_waits_for_its_host_unless_any_may_run_it(world: World, svc: Service):
    """Another host leaves it alone; `anywhere=True` lets it go."""
    ran: list[tuple[str, int]] = []

    def declare(name: str, **options: Any) -> Any:
        async def handler(ctx: Context) -> None:
            ran.append((name, ctx.attempt))
            if ctx.attempt == 1:
                await asyncio.sleep(100_000)

        handler.__name__ = name
        return svc.rpc(on_interrupt="retry", settle=0, **options)(handler)

    tied, free = declare("tied"), declare("free", anywhere=True)
    life = await world.start(svc, host="node-1")
    client = (await world.client(svc)).prepare(host="node-1")
    await client.prepare(request_id="tied").cast(tied)
    await client.prepare(request_id="free").cast(free)
    await world.until(lambda: len(ran) == 2)
    await life.crash()
    await world.start(svc, host="node-2")
    await asyncio.sleep(3600)
    assert world.states() == {"tied": "handed_over", "free": "succeeded"}

    await world.start(svc, host="node-1")
    await world.until(lambda: world.state("tied") == "succeeded")


async def test_a_host_that_does_not_come_back_is_given_up(world: World, svc: Service):
    """After host_gone_after any live run of the store marks its rows ERRORED(gave_up)."""
    ran, told = [], []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def tied(ctx: Context) -> None:
        ran.append(1)
        await asyncio.sleep(100_000)

    @tied.errored
    async def _(ctx: Context, reason: str) -> None:
        told.append(reason)

    life = await world.start(svc, host="node-1")
    client = await world.client(svc)
    await client.prepare(host="node-1", request_id="t").cast(tied)
    await world.until(lambda: ran == [1])
    await life.crash()
    await world.start(svc, host="node-2", host_gone_after_s=3600.0)
    await asyncio.sleep(3500)
    assert world.state("t") == "handed_over"
    await world.until(lambda: world.state("t") == "errored", within_s=300)

    assert world.task("t")["reason"] == "gave_up"
    await world.until(lambda: told == ["gave_up"])


async def test_a_fanout_of_an_instance_that_is_gone_is_cancelled(world: World, svc: Service):
    """Accepted and never started, for one instance alone: CANCELLED after 60 s; other instances
    do not run it.
    """
    entered = []

    @svc.rpc(max_running=1)
    async def refresh(ctx: Context, n: int) -> None:
        entered.append(n)
        if n == 0:
            await asyncio.sleep(100_000)

    life = await world.start(svc, host="a", instance="a")
    client = await world.client(svc)
    for n in range(2):
        await client.prepare(request_id=f"f{n}").fanout(refresh, n=n)
    await world.until(lambda: world.state("f1") == "accepted")
    await life.crash()
    await world.start(svc, host="b", instance="b")
    begun = now()
    await world.until(lambda: world.state("f1") == "cancelled", within_s=200)

    assert 55 <= now() - begun <= 130
    assert entered == [0]
    assert world.state("f0") == "errored"


async def left_over_hold(
    world: World, svc: Service, answer: Any, *, probe: bool = True
) -> tuple[list[float], list[str]]:
    """A hold of 10 minutes whose run has died, and a next start; when asked, and what was told."""
    asked: list[float] = []
    told: list[str] = []

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="10m")

    if probe:

        @prepare_host.probe
        async def _(ctx: Context, vm: str) -> Any:
            asked.append(now())
            return answer

    @prepare_host.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        told.append(f"{vm}: {reason}")

    life = await world.start(svc)
    client: RpcClient = await world.client(svc)
    await client.call(prepare_host, vm="v")
    await life.crash()
    await world.start(svc)
    return asked, told


@pytest.mark.parametrize(
    ("answer", "reason", "told"),
    [
        (Done(), "done", []),
        (Fail("no"), "failed", ["v: hold"]),
        (Retry(), "failed", ["v: hold"]),
    ],
)
async def test_a_left_over_hold_is_settled_by_the_probe_of_its_method(
    world: World, svc: Service, answer: Any, reason: str, told: list[str]
):
    """Done ends it; Fail and Retry end it and tell the hook."""
    asked, heard = await left_over_hold(world, svc, answer)
    await world.until(lambda: world.rows("SELECT end_reason FROM hold")[0]["end_reason"] == reason)
    await asyncio.sleep(60)

    assert heard == told
    (line,) = world.lives[-1].told("hold.ended")
    assert line == {"hold": "migration", "key": "v", "method": "prepare_host", "reason": reason}
    assert len(asked) == 1
    assert world.rows("SELECT args, errored_due FROM hold") == [{"args": None, "errored_due": 0}]


async def test_a_left_over_hold_that_waits_lapses_in_its_time(world: World, svc: Service):
    """Wait keeps it until at_most."""
    begun = now()
    asked, heard = await left_over_hold(world, svc, Wait(45))
    await world.until(
        lambda: world.rows("SELECT end_reason FROM hold")[0]["end_reason"] == "lapsed",
        within_s=700,
    )

    assert now() - begun == pytest.approx(600, abs=31)
    assert len(asked) > 5
    assert heard == []


async def test_a_left_over_hold_that_waits_keeps_the_next_run(world: World, svc: Service):
    """Its operation goes on: a drain waits for a later request that ends it, as for a hold of
    its own.
    """

    @svc.ops
    async def arrived(ctx: Context, vm: str) -> bool:
        return await ctx.end_hold("migration", vm)

    await left_over_hold(world, svc, Wait(45))
    life = world.lives[-1]
    await world.until(lambda: world.rows("SELECT owner FROM hold")[0]["owner"] is not None)
    client: RpcClient = await world.client(svc)

    life.ask_to_stop()
    await asyncio.sleep(12)
    assert life.runtime.state is ServiceState.DRAINING
    assert await client.call(arrived, vm="v") is True
    report = await life.wait_end()

    assert report.waited_s == pytest.approx(12, abs=0.6)
    assert (report.exit_code, report.open_holds) == (0, 0)


async def test_a_left_over_hold_is_asked_about_at_each_start(world: World, svc: Service):
    """A long Wait was the last run's; the next must know whether the hold keeps it too."""
    asked, _ = await left_over_hold(world, svc, Wait(500))
    await world.until(lambda: len(asked) == 1)
    await world.until(lambda: world.rows("SELECT owner FROM hold")[0]["owner"] is not None)
    await world.lives[-1].crash()
    await world.start(svc)
    await world.until(lambda: len(asked) == 2, within_s=40)

    await world.until(
        lambda: world.rows("SELECT end_reason FROM hold")[0]["end_reason"] == "lapsed",
        within_s=700,
    )
    assert len(asked) <= 3


async def test_a_left_over_hold_without_probe_is_ended_and_told(world: World, svc: Service):
    """Nobody can be asked."""
    asked, heard = await left_over_hold(world, svc, None, probe=False)
    await world.until(lambda: heard == ["v: hold"])

    assert asked == []
    assert world.rows("SELECT end_reason FROM hold") == [{"end_reason": "no_probe"}]
    assert [line["reason"] for line in world.lives[-1].told("hold.ended")] == ["no_probe"]


async def test_the_hook_of_a_hold_is_called_by_one_of_two_siblings(world: World, svc: Service):
    """A slow probe of another hold comes after it: a sibling that starts meanwhile finds it
    done.
    """
    told = []

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="10m")

    @prepare_host.probe
    async def _(ctx: Context, vm: str) -> Any:
        if vm == "failed":
            return Fail("no")
        await asyncio.sleep(20)
        return Wait(1)

    @prepare_host.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        told.append(vm)

    life = await world.start(svc)
    client: RpcClient = await world.client(svc)
    for vm in ("slow", "failed"):
        await client.call(prepare_host, vm=vm)
    await life.crash()
    second = world.life(svc)
    second.crash_at(Point.ERRORED_DONE, "before")
    await second.start()
    await second.over.wait()
    assert told == ["failed"]
    await asyncio.sleep(2)  # the slow one is due again
    for name in ("a", "b"):
        await world.start(svc, instance=name)
        await asyncio.sleep(5)
    await asyncio.sleep(60)

    assert told == ["failed", "failed"]
