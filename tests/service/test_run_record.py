"""What is on record of a run: its end, its times, and how long it is kept."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import (
    Context,
    Done,
    Service,
    Wait,
)
from gracekit.errors import (
    UnknownCommitError,
)
from gracekit.exits import Verdict
from gracekit.listings.run_list import list_exits, look
from gracekit.listings.store_view import StoreView, verdict_of
from gracekit.process import Point
from gracekit.runs.run import Run
from gracekit.testing.ports import EPOCH_S
from tests.service.kit import Doors, Fault, World, now, run_row, start_with_work
from tests.service.left_over import Job

pytestmark = pytest.mark.looptime


async def test_how_each_run_ended_is_told_apart_once(world: World, svc: Service):
    """Drained, handed over, killed, and a stop begun but not ended: by evidence, not by a clock."""

    @svc.rpc
    async def work(ctx: Context, seconds: float) -> None:
        await asyncio.sleep(seconds)

    client = await world.client(svc)
    life = await world.start(svc)
    await life.drain()
    life = await world.start(svc)
    await client.cast(work, seconds=9999)
    await asyncio.sleep(1)
    await life.drain()
    life = await world.start(svc)
    await life.crash()
    life = await world.start(svc)
    await client.cast(work, seconds=9999)
    await asyncio.sleep(1)
    life.ask_to_stop()
    await asyncio.sleep(5)
    await life.crash()
    life = await world.start(svc)

    verdicts = [row["verdict"] for row in world.rows("SELECT verdict FROM run ORDER BY generation")]
    assert verdicts == ["drained", "handed_over", "killed", "stop_timeout", None]
    assert world.tally()["adopted_runs"] == 4


class EarlierView(StoreView):
    """Lists the runs that are not adopted as `read` has found them, however late it is asked."""

    async def read(self) -> None:
        self._earlier = await super().not_adopted()

    async def not_adopted(self, name: str | None = None) -> list[Run]:
        return self._earlier


async def test_a_run_that_ends_after_its_row_was_read_is_shown_by_its_stop_record(
    world: World, svc: Service
):
    """It is found dead then, while what was read has no stop record."""
    life, other = await world.start(svc), await world.start(svc, instance="b")
    view = EarlierView(other.engine, other.process, None, world.clock)
    life.ask_to_stop()
    await life.hears("drain.started")
    await view.read()
    await life.wait_end()

    exits = await list_exits(view)
    status = await look(view, {}, store="store", accounts=None)

    assert [verdict_of(run) for run in exits] == [Verdict.DRAINED]
    assert [verdict_of(run) for run in status.exits] == [Verdict.DRAINED]


async def test_as_many_of_the_last_ends_are_shown_as_asked_for(world: World, svc: Service):
    """The default is enough to see what has just happened, but not a bad night."""
    for _ in range(7):
        await (await world.start(svc)).drain()
    living = await world.start(svc)
    view = StoreView(living.engine, living.process, None, world.clock)

    usual = await look(view, {}, store="store", accounts=None)
    asked = await look(view, {}, store="store", accounts=None, exits=50)

    assert (len(usual.exits), len(asked.exits)) == (5, 7)
    assert asked.exits[:5] == usual.exits


async def test_an_end_that_an_older_copy_of_the_store_lacks_is_unknown(world: World, svc: Service):
    """Whether a stop was asked for is not known then; what ends after the restore is judged as
    ever.
    """
    stopping, _ = await start_with_work(world, svc)
    stopping.ask_to_stop()
    await asyncio.sleep(1)
    serving = await world.start(svc, instance="b")
    for life in (stopping, serving):
        await life.crash()
    # What a backup of this moment would say; the rest was recorded in the store that is gone.
    world.disk.execute("UPDATE epoch SET copied_at = ?", (world.clock.wall(),))
    life = await world.start(svc)
    await asyncio.sleep(20)
    await life.crash()
    await world.start(svc)

    verdicts = [row["verdict"] for row in world.rows("SELECT verdict FROM run ORDER BY generation")]
    assert verdicts == ["unknown", "unknown", "killed", None]


async def test_wall_time_that_steps_back_costs_a_delay_at_most(world: World, svc: Service):
    """Liveness and ownership ask no clock: an hour back, and the task is still settled in the
    end.
    """
    job = Job(world, svc, on_interrupt="retry", settle=5)
    life, call = await job.begin()
    await life.crash()
    world.clock.shift_s = -3600
    await world.start(svc)
    assert await call == 2
    assert world.clock.wall() > EPOCH_S - 3600


async def test_a_clock_set_back_while_a_task_settles_lengthens_nothing(world: World, svc: Service):
    """What is left of a settle time, of the task and of its lease, is at most its own length."""
    job = Job(world, svc, on_interrupt="retry", settle=20)
    life, call = await job.begin()
    await life.crash()
    await world.start(svc)
    await asyncio.sleep(2)
    began_at = now()
    world.clock.shift_s = -3600

    assert await call == 2
    assert 18 <= now() - began_at < 60


@pytest.mark.parametrize("shift_s", [-3600, 3600])
async def test_a_wait_of_a_probe_is_counted_by_time_that_passes(
    world: World, svc: Service, shift_s: float
):
    """A wall clock that is set meanwhile neither ends the wait nor prolongs it."""
    job = Job(world, svc, on_interrupt="probe", settle=0, max_wait="5m")
    job.with_probe()
    job.probe_answers = lambda n: Wait(20) if n < 3 else Done("it was done")
    life, call = await job.begin()
    await life.crash()
    await world.start(svc)
    await world.until(lambda: len(job.asked) == 1)
    await asyncio.sleep(1)
    began_at = now()
    world.clock.shift_s = shift_s

    assert await call == "it was done"
    assert now() - began_at < 80


@pytest.mark.parametrize("probe_s", [0, 20], ids=["between probes", "during a probe"])
async def test_a_clock_set_forward_does_not_end_the_wait_in_the_next_run(
    world: World, svc: Service, probe_s: int
):
    """What the clock was set forward by is not counted as waited, not even by a later run."""
    job = Job(world, svc, on_interrupt="probe", settle=0, max_wait="5m")
    job.with_probe()

    async def answer(n: int) -> Done | Wait:
        await asyncio.sleep(probe_s)
        return Wait(20) if n < 5 else Done("it was done")

    job.probe_answers = answer
    life, call = await job.begin()
    await life.crash()
    life = await world.start(svc)
    await world.until(lambda: len(job.asked) == 2)
    await asyncio.sleep(5)
    world.clock.shift_s = 3600
    await asyncio.sleep(10)
    await life.drain()
    await world.start(svc)

    assert await call == "it was done"


async def test_a_clock_set_meanwhile_changes_no_wait_for_a_hold(world: World, svc: Service):
    """A hold keeps its host as long as it was to, whichever way the wall clock is set."""

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most=100)

    life = await world.start(svc, drain_timeout_s=1000.0)
    await (await world.client(svc)).call(prepare_host, vm="v")
    for shift_s in (-3600, 3600):
        world.clock.shift_s = shift_s
        await asyncio.sleep(10)
    report = await life.drain()

    assert report.waited_s == pytest.approx(80, abs=3)
    assert report.open_holds == 0


async def test_retention_removes_only_after_this_run_has_served_long_enough(
    world: World, svc: Service
):
    """A restart after a long pause must not forget ids whose duplicates are still in the queue."""

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 1

    client = await world.client(svc)
    life = await world.start(svc, retention_s=100.0)
    await client.prepare(request_id="old").call(work)
    await life.drain()
    await asyncio.sleep(1000)
    await world.start(svc, retention_s=100.0)
    await asyncio.sleep(500)
    assert world.states() == {"old": "succeeded"}
    await world.until(lambda: world.states() == {}, within_s=200)

    assert world.tally() == {"accepted": 1, "removed": 1, "adopted_runs": 1}


async def test_retention_counts_the_time_of_runs_that_were_short(world: World, svc: Service):
    """A service that restarts every five minutes removes what is old, in its third life at last."""

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 1

    client = await world.client(svc)
    life = await world.start(svc, retention_s=100.0)
    await client.prepare(request_id="old").call(work)
    await life.drain()
    await asyncio.sleep(1000)
    for _ in range(2):
        life = await world.start(svc, retention_s=100.0)
        await asyncio.sleep(290)
        assert world.states() == {"old": "succeeded"}
        await life.drain()
        await asyncio.sleep(1000)
    await world.start(svc, retention_s=100.0)
    await world.until(lambda: world.states() == {}, within_s=200)


async def test_a_run_that_left_a_record_of_its_failure_has_failed(world: World, svc: Service):
    """It began a stop and ended it, only not in order: that is no stop that ran out of time."""

    @svc.on_start
    async def broken() -> None:
        if len(world.lives) == 1:
            raise RuntimeError("no backend")

    with pytest.raises(Exception, match="no backend"):
        await world.start(svc)
    await world.start(svc)

    (first, _) = world.rows("SELECT exit_code, verdict FROM run ORDER BY generation")
    assert first == {"exit_code": 70, "verdict": "failed"}


async def test_what_a_lost_take_may_have_brought_is_not_given_back_from_under_the_next(
    world: World, svc: Service
):
    """The same task takes again and has it: what was in doubt before is in doubt no more."""
    life = await world.start(svc)
    leases = life.runtime.wired.reconciler._leases
    life.plan(Point.TAKE_LEASE, Fault.LOST_BEFORE)
    with pytest.raises(UnknownCommitError):
        await world.run_as(life, leases.take(("vm", "v"), "task"))
    guard = await world.run_as(life, leases.take(("vm", "v"), "task"))
    await world.run_as(life, leases.give_back_owed())

    assert guard is not None
    assert world.rows("SELECT owner FROM lease") == [{"owner": life.runtime.run_id}]


async def test_who_acted_is_on_record_whatever_bytes_the_reason_has(world: World, svc: Service):
    """An argument that is no UTF-8 is written as its bytes: otherwise an operator leaves no
    trace.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await doors.wait(1)
    control, run_id = life.runtime.wired.control, life.runtime.run_id
    said = {"by": "uid 0 (j\udcf6rg)", "reason": "M\udcfcnchen"}
    await control.carry_out("cancel", run_id, {"task_id": "w", **said})
    await control.carry_out("drain", run_id, said)
    await life.wait_end()

    by, why = r"uid 0 (j\udcf6rg)", r"M\udcfcnchen"
    row = run_row(world)
    assert (row["stop_by"], row["stop_reason"]) == (by, why)
    drained, cancelled = (world.incidents(f"operator_{verb}") for verb in ("drain", "cancel"))
    assert [one["detail"] for one in drained] == [f"{by}: {why}"]
    assert [by in one["detail"] and why in one["detail"] for one in cancelled] == [True]
