"""Rows of parked tasks in the store: the wall clock that they follow."""

from __future__ import annotations

import pytest

from gracekit.journal.pending import PendingRows
from gracekit.process import Point
from gracekit.store.batch import Batch
from tests.journal.test_claims import Run, change, of, runs

__all__ = ("runs",)

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize(
    ("ahead_s", "before_s", "now_s", "moved_s"),
    [
        (0, 0, 3600, 3600),
        (3600, 0, 3600, 0),
        (3600, 0, 7200, 3600),
        (-3600, 0, -7200, -3600),
        (0.4, 0, 3600, 3599.6),
        (9000, 0, 7200, 0),
        (-500, 0, 7200, 0),
    ],
    ids=[
        "not moved yet",
        "moved by a sibling",
        "a sibling has followed the first of two changes alone",
        "the same backwards",
        "written beside a clock that runs a little differently",
        "of another host, ahead",
        "of another host, behind",
    ],
)
async def test_a_row_follows_the_clock_once(
    runs: tuple[Run, Run, Run], ahead_s: float, before_s: float, now_s: float, moved_s: float
):
    """Whichever run sees the change, and however many changes it has slept through."""
    _, run, _ = runs
    await run.left("t")
    change(run, "t", pending_deadline=100_000.0, parked_at=50_000.0, parked_ahead_s=ahead_s)

    batch = Batch(Point.SETTLE)
    PendingRows(run.journal).add_follow_clock(batch, before_s, ahead_s=now_s)
    await run.journal.commit(batch)

    assert of(run, "t", "pending_deadline", "parked_at") == pytest.approx(
        (100_000.0 + moved_s, 50_000.0 + moved_s)
    )
