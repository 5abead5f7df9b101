"""Passes that an operator asks for: what cuts them short, what they wait for, what they count."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Done, Retry, Service, Settled, Wait
from gracekit.journal.rows import TaskRow
from gracekit.runtime.built import Wired
from tests.service.kit import Doors, Life, World
from tests.service.left_over import Job
from tests.service.shares import Shares, settle

pytestmark = pytest.mark.looptime

OFF = {"startup_reconciliation_enabled": False, "startup_reconciliation_wait_seconds": 1.0}


def wired(life: Life) -> Wired:
    """The objects of a process that lives."""
    assert life.runtime.wired is not None
    return life.runtime.wired


async def test_a_drain_while_tasks_are_settled_cuts_the_pass_short(world: World, svc: Service):
    """The pass has begun and settled something, so it is not refused."""
    asked = asyncio.Event()
    go = asyncio.Event()

    async def answer() -> Wait:
        asked.set()
        await go.wait()
        return Wait("1h")

    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()
    job.probe_answers = lambda _n: answer()
    killed, _ = await job.begin(**OFF)
    await killed.crash()
    life = await world.start(svc, **OFF)
    await asyncio.sleep(2)
    making = asyncio.ensure_future(settle(life))
    await asked.wait()
    life.ask_to_stop()
    await asyncio.sleep(1)
    go.set()
    await life.wait_end()

    assert (await making).interrupted


async def test_a_stop_cancels_a_pass_by_hand(world: World, svc: Service):
    """Like the periodic pass that it waits for: nothing of it is left when recovery has stopped."""
    shares = Shares(world, svc)
    shares.add("a")
    doors = Doors()

    async def answer() -> Settled:
        await doors.pass_("a")
        return Settled("available")

    shares.answers = lambda _id, _n: answer()
    life = await world.start(svc)
    await doors.wait(1)
    begun = await world.verb(life, "reconcile")
    stopping = asyncio.ensure_future(world.run_as(life, wired(life).reconciler.stop()))
    await asyncio.sleep(1)
    doors.open("a")
    await stopping

    assert [task for task in asyncio.all_tasks() if task.get_name() == "gracekit-reconcile"] == []
    shown = await world.verb(life, "reconciled", pass_id=begun["pass_id"])
    assert (shown["state"], shown["interrupted"], shown["error"]) == ("finished", True, None)


@pytest.mark.parametrize(
    ("answer", "settled"), [(Wait("1h"), 0), (OSError("away"), 0), (Done("ok"), 1), (Retry(), 1)]
)
async def test_tasks_that_still_wait_are_not_counted_as_settled(
    world: World, svc: Service, answer: object, settled: int
):
    """Only those count that have ended, or run again."""
    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()

    def say(_n: int) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    job.probe_answers = say
    killed, _ = await job.begin(**OFF)
    await killed.crash()
    life = await world.start(svc, **OFF)
    await asyncio.sleep(2)

    report = await settle(life)

    assert len(job.asked) == 1
    assert report.tasks == settled


async def test_tasks_that_end_while_others_are_claimed_are_counted(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """A slow store looks for further ones, and those of the first claim are settled by then."""
    job = Job(world, svc, on_interrupt="error")
    killed, _ = await job.begin(**OFF)
    await killed.crash()
    life = await world.start(svc, **OFF)
    await asyncio.sleep(2)
    claims = wired(life).reconciler._claims
    claim = claims.claim

    async def claim_slowly(*args: Any, **options: Any) -> list[TaskRow]:
        rows = await claim(*args, **options)
        if not rows:
            await asyncio.sleep(5)
        return rows

    monkeypatch.setattr(claims, "claim", claim_slowly)

    assert (await settle(life)).tasks == 1


async def test_a_dry_run_counts_the_tasks_that_would_be_settled_first(world: World, svc: Service):
    """Where nothing is settled unasked. It settles none, and one of a single kind counts none."""
    shares = Shares(world, svc)
    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()
    killed, _ = await job.begin(**OFF)
    await killed.crash()
    life = await world.start(svc, **OFF)
    await asyncio.sleep(2)

    assert (await settle(life, dry_run=True)).tasks == 1
    assert (await settle(life, dry_run=True, kind=shares.name)).tasks == 0
    assert job.asked == []
    assert (await settle(life)).tasks == 1
    assert (await settle(life, dry_run=True)).tasks == 0
