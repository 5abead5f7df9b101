"""An order on a row as the command line carries it out, while no run lives."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.journal.order_rows import OrderTarget, target_named
from gracekit.journal.tasks_sql import NOTE
from gracekit.request.row_orders import RowOrders
from gracekit.store.batch import Batch
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.tracker.task import Order, TaskState, Verb
from tests.service.kit import World
from tests.service.test_orders import crash_at_work, engine_of

pytestmark = pytest.mark.looptime
FAIL = Order(verb=Verb.FAIL, by="ann@desk", reason="wrong host")
CANCEL = Order(verb=Verb.CANCEL, by="ann@desk", reason="")


async def left_by_the_dead(world: World) -> tuple[MemoryEngine, OrderTarget]:
    """A store without a run, and the row of a task that was running when its process died."""
    svc = Service("compute")

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context, vm: str) -> None:
        await asyncio.sleep(1000)

    @work.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        raise AssertionError

    await crash_at_work(world, svc, work, "w")
    engine = await engine_of(world)
    return engine, await row_of(engine)


async def row_of(engine: MemoryEngine) -> OrderTarget:
    target = await target_named(engine, "w", "")
    assert target is not None
    return target


def orders(world: World, engine: MemoryEngine) -> RowOrders:
    return RowOrders(engine, world.clock, "operator", engine.commit)


async def test_a_task_that_a_dead_run_left_running_counts_as_handed_over(world: World):
    """So it ends as ERRORED, and its hook is due; the record says whose it was."""
    engine, before = await left_by_the_dead(world)

    end = await orders(world, engine).carry_out(before, FAIL, dead=True)
    again = await orders(world, engine).carry_out(before, FAIL, dead=True)

    assert (end, again, world.state("w")) == (TaskState.ERRORED, None, "errored")
    (note,) = world.incidents("operator_fail")
    was = f"(it was running of run {before.owner}, gone)"
    assert (note["run_id"], note["detail"]) == ("operator", f"ann@desk: wrong host {was}")
    assert (world.task("w")["errored_due"], world.task("w")["owner"]) == (1, None)


async def test_what_is_added_to_an_order_is_of_its_commit(world: World):
    """It takes effect with the order, and not at all if the row has changed."""
    engine, before = await left_by_the_dead(world)

    def note(batch: Batch) -> None:
        batch.add(NOTE, 1.0, "operator", "beside", "w", "work", "")

    for _ in range(2):
        await orders(world, engine).carry_out(before, FAIL, dead=True, also=note)

    assert len(world.incidents("beside")) == 1


@pytest.mark.parametrize("keep", [True, False])
async def test_a_hook_that_is_due_is_cancelled_once(world: World, keep: bool):
    """With *keep* the arguments stay, so that the task can be retried."""
    engine, before = await left_by_the_dead(world)
    await orders(world, engine).carry_out(before, FAIL, dead=True)
    ended = await row_of(engine)

    done = [await orders(world, engine).drop_hook(ended, CANCEL, keep=keep) for _ in range(2)]

    assert (done, world.task("w")["errored_due"]) == ([True, False], 0)
    assert (world.task("w")["args"] is not None) is keep
    (note,) = world.incidents("operator_cancel")
    assert note["detail"] == "ann@desk: no reason given (it was errored, its errored hook due)"
