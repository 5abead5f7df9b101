"""Rows that a commit of unknown end has left to nobody: recovery finds them in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import (
    Context,
    Done,
    Service,
    TaskInterruptedError,
    Wait,
)
from gracekit.process import Point
from tests.service.kit import Fault, Life, World, now

pytestmark = pytest.mark.looptime


PERIOD_S = 30.0
"""`reconcile_every_s`, after which recovery looks for rows that nobody works on."""


def lose(world: World, life: Life, request_id: str) -> None:
    """Leave an ended request as a commit of unknown end would: open, and known to nobody."""
    world.disk.execute(
        "UPDATE task SET state = 'accepted', finished_at = NULL, owner = ? WHERE request_id = ?",
        (life.runtime.run_id, request_id),
    )
    world.disk.execute(
        "INSERT INTO content SELECT id, ?, '{}' FROM task WHERE request_id = ?",
        ('{"seconds":0}', request_id),
    )


def asked_again(svc: Service, *waits_s: float) -> Any:
    """A method whose probe answers Wait with these seconds, and then Done: each answer rings."""
    waits = iter(waits_s)

    @svc.rpc(on_interrupt="probe", settle=0)
    async def work(ctx: Context, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @work.probe
    async def _(ctx: Context, seconds: float) -> Done | Wait:
        wait_s = next(waits, None)
        return Done(None) if wait_s is None else Wait(wait_s)

    return work


async def with_a_left_over(world: World, svc: Service, work: Any) -> Life:
    """A run that has `lost` on record, ended, and recovers a row that is asked about."""
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="lost").call(work, seconds=0)
    await client.cast(work, seconds=100_000)
    await life.hears("task.started", 2)
    await life.crash()
    return await world.start(svc)


async def test_a_lost_row_is_found_in_time_however_often_recovery_is_rung(
    world: World, svc: Service
):
    """Each row that was looked at rings recovery, which then looks at a part only; a period passes
    all the same.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, *[1.0] * 200))
    await asyncio.sleep(PERIOD_S + 10)
    lose(world, life, "lost")
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun <= PERIOD_S


async def rung_late(world: World, svc: Service, *, at_s: float) -> Life:
    """A run that has lost a row half a period ago, and is rung *at_s* after its start and then no
    more: by the row that it asks about.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, at_s))
    await asyncio.sleep(1.5 * PERIOD_S - 1)
    lose(world, life, "lost")
    return life


async def test_a_lost_row_is_found_in_time_after_a_last_ring(world: World, svc: Service):
    """Rung just before it would have looked, recovery does not wait for another whole period."""
    life = await rung_late(world, svc, at_s=2 * PERIOD_S - 0.5)
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun <= PERIOD_S


async def test_a_pass_that_failed_does_not_count_as_a_look(world: World, svc: Service):
    """It had begun to look for lost rows, and the next one, whoever rings it, does so again."""
    life = await rung_late(world, svc, at_s=2 * PERIOD_S + 1)
    life.plan(Point.ADOPT, Fault.REFUSED)
    await life.hears("store.error")
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun < 2


# -- rows that the store has lost ---------------------------------------------------------------


def forget(world: World, request_id: str) -> None:
    """Lose a row, as a store does that was repaired, or restored under a living run."""
    world.disk.execute(
        "DELETE FROM reply WHERE row_id IN (SELECT id FROM task WHERE request_id = ?)",
        (request_id,),
    )
    world.disk.execute("DELETE FROM task WHERE request_id = ?", (request_id,))
    world.disk.execute("UPDATE tally SET n = n - 1 WHERE what = 'accepted'")  # or accounts differ


async def test_a_task_whose_row_vanished_ends_and_its_caller_is_told(world: World, svc: Service):
    """Its outcome can never be recorded: it is dropped and logged, the lease goes back, and the
    drain does not wait for it.
    """
    world.expects_faults = True

    @svc.rpc(resource="vm")
    async def resize(ctx: Context, vm: str) -> str:
        await asyncio.sleep(10)
        return "resized"

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="r", timeout=100).call(resize, vm="1"))
    await life.hears("task.started")
    forget(world, "r")

    with pytest.raises(TaskInterruptedError, match=r"the store has lost its row"):
        await call
    (told,) = life.told("task.row_lost")
    assert (told["task_id"], told["method"]) == ("r", "resize")
    again = await client.prepare(request_id="r2", timeout=100).call(resize, vm="1")
    assert again == "resized"  # its lease is free
    assert (await life.drain()).exit_code == 0


async def test_a_cast_whose_row_vanished_does_not_hold_the_drain(world: World, svc: Service):
    """It has no caller to tell; the error is logged once, and not at each try for ever."""
    world.expects_faults = True

    @svc.rpc
    async def resize(ctx: Context) -> None:
        await asyncio.sleep(10)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r").cast(resize)
    await life.hears("task.started")
    forget(world, "r")
    began = now()
    report = await life.drain()

    assert (report.exit_code, report.left_behind) == (0, 0)
    assert now() - began < 20
    assert len(life.told("task.row_lost")) == 1
    assert len(life.told("store.error")) <= 3


async def test_an_order_on_a_task_in_line_whose_row_vanished_ends_it(world: World, svc: Service):
    """It never began, and no try to record its end is left over."""
    world.expects_faults = True

    @svc.rpc(resource="vm")
    async def resize(ctx: Context, vm: str) -> None:
        await asyncio.sleep(5)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="first").cast(resize, vm="1")
    await client.prepare(request_id="r").cast(resize, vm="1")
    await world.until(lambda: world.state("r") == "accepted")
    forget(world, "r")
    await world.verb(life, "cancel", task_id="r", reason="wrong host")
    await life.hears("task.row_lost")

    report = await life.drain()
    assert (report.exit_code, report.left_behind) == (0, 0)


@pytest.mark.parametrize(
    ("before", "after", "is_found"),
    [
        ((1, 0), (1, 0), False),
        ((1, 0), (0, 1), False),
        ((0, 0), (0, 1), False),
        ((0, 1), (0, 1), True),
    ],
    ids=["under way", "ended meanwhile", "begun and ended meanwhile", "none"],
)
async def test_a_row_that_is_being_claimed_is_not_taken_for_lost(
    world: World,
    svc: Service,
    before: tuple[int, int],
    after: tuple[int, int],
    is_found: bool,
):
    """It is ours on the disk before its claim has returned; both looked at once, and so each gave
    up what the other had just claimed, for ever.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, 1000.0))
    lose(world, life, "lost")
    adoption = life.runtime.wired.reconciler.adoption  # type: ignore[union-attr]
    marks = iter([before, after])
    look = adoption.adopt_missing(lambda _: False, lambda: next(marks))

    await world.run_as(life, look)

    assert bool(life.told("task.adopted")) is is_found
