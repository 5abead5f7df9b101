"""kill -9 at every commit, and before and after every ack, reply and lease change; then a restart.

Each cell is one kill in a real process, at a point of `gracekit.process.Point`.
A quick run takes the policies in turn; a soak takes the whole product.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import pytest

from gracekit.process import Point
from tests.crash.cell import Cell, cell_in
from tests.crash.checks import check_answers, check_end, is_quiet, look
from tests.crash.queues import SqliteQueues
from tests.crash.scenarios import (
    CellId,
    Pair,
    Scenario,
    Story,
    after_another,
    cells,
    pairs,
    retire,
    some_cells,
    some_pairs,
)
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

AT_LEAST: Final = 60


async def check_kill(cell: Cell, where: CellId) -> None:
    """Let the cell be killed there, and hold what follows against the promises."""
    story = Story(cell, where.policy, where.failpoint)
    await play(story, where.scenario)
    await recover(story)
    check_end(cell, story.history, retired=where.scenario is retire)


async def check_two_kills(cell: Cell, where: Pair) -> None:
    """The same of a recovery that is killed twice."""
    story = Story(cell, where.policy, where.second)
    await play(story, after_another(where.first))
    await recover(story)
    check_end(cell, story.history)


async def play(story: Story, scenario: Scenario) -> None:
    """Drive the service until it is killed at the failpoint."""
    driving = asyncio.ensure_future(scenario(story))
    arming = asyncio.create_task(story.armed.wait())
    await asyncio.wait({driving, arming}, return_when=asyncio.FIRST_COMPLETED)
    if not arming.done():
        arming.cancel()
        await driving  # it failed
    dying = asyncio.create_task(story.killed())
    await asyncio.wait({driving, dying}, return_when=asyncio.FIRST_COMPLETED)
    if driving.done():
        driving.result()
    driving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await driving
    await dying


async def recover(story: Story) -> None:
    """Start once more, unhurt, wait until nothing is left to do, and drain."""
    cell, crash = story.cell, story.history[-1]
    cell.open_gate()
    await cell.start()
    await cell.until(lambda: is_quiet(cell, crash, but_parked=True))
    await cell.retry_parked()
    await cell.until(lambda: is_quiet(cell, crash))
    for thing, key in cell.rows("SELECT name, key FROM hold WHERE ended_at IS NULL"):
        assert thing == "operation"
        await cell.cast("work_retry", how="end_hold", thing=key)
    await send_again(cell)
    await cell.until(lambda: is_quiet(cell, crash))
    await story.drained(0)


async def send_again(cell: Cell) -> None:
    """P3: what is known by its id is not started again, but answered from the record.

    `requeue` requests are journaled when they come again only, and are not deduped.
    """
    sql = "SELECT request_id FROM task WHERE state <> 'rejected' AND on_interrupt <> 'requeue'"
    known = {row[0] for row in cell.rows(sql)}
    before = look(cell).starts
    for request_id, (method, args) in list(cell.sent.items()):
        if request_id in known:
            await cell.call(method, request_id, **args)
    await cell.until(lambda: all(call.done() for _, call in cell.calls))
    now = look(cell)
    assert {one: now.starts[one] for one in known} == {one: before[one] for one in known}
    check_answers(cell, now)


@pytest.mark.parametrize("where", scale(list(some_cells()), list(cells())), ids=str)
async def test_a_kill_loses_nothing_and_starts_nothing_twice(where: CellId, tmp_path: Path):
    """Whatever was confirmed ends as its policy says, is accounted for and answered, and the
    resource is free.
    """
    async with cell_in(tmp_path, SqliteQueues(tmp_path)) as cell:
        await check_kill(cell, where)


@pytest.mark.parametrize("where", scale(list(some_pairs()), list(pairs())), ids=str)
async def test_a_recovery_that_dies_twice_is_recovered(where: Pair, tmp_path: Path):
    """Killed in its work, then in the recovery of it, then in the recovery of that: nothing is
    lost.
    """
    async with cell_in(tmp_path, SqliteQueues(tmp_path)) as cell:
        await check_two_kills(cell, where)


def test_every_point_has_a_cell():
    """A commit, ack, reply or lease change that is never interrupted is not known to be safe."""
    covered = {cell.point for cell in some_cells()}

    assert covered == set(Point)


def test_the_matrix_is_large_enough():
    """Each point is stopped at before and after, in at least sixty cells of a quick run."""
    some = list(some_cells())

    assert len(some) >= AT_LEAST
    assert {(cell.point, cell.phase) for cell in some} >= {
        (point, phase) for point in Point for phase in ("before", "after")
    }
    assert {cell.policy for cell in some} == {"error", "retry", "probe", "requeue"}
