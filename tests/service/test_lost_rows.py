"""Rows that a commit of unknown end has left to nobody: recovery finds them in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import (
    Context,
    Done,
    Service,
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
        "UPDATE task SET state = 'accepted', finished_at = NULL, args = ?, owner = ? "
        "WHERE request_id = ?",
        ('{"seconds":0}', life.runtime.run_id, request_id),
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
    """
    Each row that was looked at rings recovery, which then looks at a part only; a period passes
    all the same.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, *[1.0] * 200))
    await asyncio.sleep(PERIOD_S + 10)
    lose(world, life, "lost")
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun <= PERIOD_S


async def rung_late(world: World, svc: Service, *, at_s: float) -> Life:
    """
    A run that has lost a row half a period ago, and is rung *at_s* after its start and then no
    more: by the row that it asks about.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, at_s))
    await asyncio.sleep(1.5 * PERIOD_S - 1)
    lose(world, life, "lost")
    return life


async def test_a_lost_row_is_found_in_time_after_a_last_ring(world: World, svc: Service):
    """
    Rung just before it would have looked, recovery does not wait for another whole period.
    """
    life = await rung_late(world, svc, at_s=2 * PERIOD_S - 0.5)
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun <= PERIOD_S


async def test_a_pass_that_failed_does_not_count_as_a_look(world: World, svc: Service):
    """
    It had begun to look for lost rows, and the next one, whoever rings it, does so again.
    """
    life = await rung_late(world, svc, at_s=2 * PERIOD_S + 1)
    life.plan(Point.ADOPT, Fault.REFUSED)
    await life.hears("store.error")
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun < 2
