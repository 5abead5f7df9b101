"""The tracker: who is in flight, counted as it goes, waited for without polling."""

from __future__ import annotations

import asyncio
import time

import pytest

from gracekit.clock import Clock
from gracekit.tracker.task import Interruption, Lane, TaskState, TrackedTask
from gracekit.tracker.tracker import Tracker

pytestmark = pytest.mark.looptime


def a_task(request_id: str = "r", lane: Lane = Lane.REQUESTS, **more: object) -> TrackedTask:
    return TrackedTask(request_id=request_id, method="m", lane=lane, **more)


def run(tracker: Tracker, task: TrackedTask) -> TrackedTask:
    tracker.add(task)
    task.advance(TaskState.RUNNING)
    tracker.started(task)
    return task


async def test_a_key_is_tracked_once():
    """A second task of the same key is told of the first and changes nothing; another recipient is
    another key.
    """
    tracker = Tracker()
    first, second, copy = a_task(), a_task(), a_task(recipient="node-1-0")

    assert tracker.add(first) is None
    assert tracker.add(second) is first
    assert tracker.add(copy) is None

    assert list(tracker) == [first, copy]
    assert tracker.get("r") is first
    assert tracker.count(Lane.REQUESTS) == 2


@pytest.mark.parametrize("change", ["ended", "remove", "poke", None])
async def test_a_change_is_waited_for_and_not_longer_than_the_deadline(change: str | None):
    """An end, a removal or a poke wakes who waits; without one the deadline does, and nothing
    before.
    """
    tracker, loop = Tracker(), asyncio.get_running_loop()
    task = run(tracker, a_task())
    begun = loop.time()
    waiting = asyncio.create_task(tracker.wait_change(deadline=begun + 10))
    await asyncio.sleep(3)
    assert not waiting.done()

    if change == "poke":
        tracker.poke()
    elif change is not None:
        getattr(tracker, change)(task)

    assert await waiting is (change is not None)
    assert loop.time() - begun == pytest.approx(10 if change is None else 3)


async def test_counts_follow_every_step():
    """Each count is right after each step, and what never was there is not taken away."""
    tracker = Tracker()
    task = run(tracker, a_task("a"))
    ops = run(tracker, a_task("b", Lane.OPS, holds_drain=False))
    assert (tracker.running, tracker.running_ops, len(tracker)) == (1, 1, 2)
    assert tracker.counts() == {("m", "requests"): 1, ("m", "ops"): 1}

    tracker.ended(task)
    tracker.ended(ops)
    assert (tracker.running, tracker.running_ops, len(tracker)) == (0, 0, 2)

    tracker.remove(task)
    tracker.remove(task)
    tracker.remove(ops)
    assert (len(tracker), tracker.count(Lane.REQUESTS), tracker.count(Lane.OPS)) == (0, 0, 0)


async def test_only_what_has_ended_by_itself_counts_as_finished():
    """Neither a task that was cut, nor one that never began."""
    tracker = Tracker()
    ended, cut = run(tracker, a_task("a")), run(tracker, a_task("b"))
    ops = run(tracker, a_task("c", Lane.OPS, holds_drain=False))
    ended.started_at = cut.started_at = ops.started_at = 1.0
    cut.cut = Interruption.CANCELLED
    waiting = a_task("d")
    tracker.add(waiting)

    for task in (ended, cut, ops, waiting):
        tracker.remove(task)

    assert (tracker.finished, len(tracker)) == (2, 0)


async def wait_idle(tracker: Tracker, *, deadline: float) -> tuple[TrackedTask, ...]:
    """Wait as a drain does; returns what still holds it."""
    while tracker.running and await tracker.wait_change(deadline=deadline):
        pass
    return tuple(task for task in tracker if task.running and task.holds_drain)


async def test_a_wait_ends_at_the_moment_of_the_last_end():
    """The wait is an event, not a poll: it is over in the same instant."""
    loop = asyncio.get_running_loop()
    tracker = Tracker()
    task = run(tracker, a_task())

    def end() -> None:
        task.advance(TaskState.SUCCEEDED)
        tracker.ended(task)

    loop.call_later(12.345, end)

    left = await wait_idle(tracker, deadline=loop.time() + 3600)

    assert left == ()
    assert loop.time() == pytest.approx(12.345)


async def test_what_outlives_the_deadline_is_still_running():
    """At the deadline the answer is who still runs, oldest first; waiting and ops tasks are not
    it.
    """
    loop = asyncio.get_running_loop()
    tracker = Tracker()
    first, second = run(tracker, a_task("a")), run(tracker, a_task("b"))
    tracker.add(a_task("waits"))
    run(tracker, a_task("ops", Lane.OPS, holds_drain=False))

    assert await wait_idle(tracker, deadline=loop.time() + 25) == (first, second)
    assert loop.time() == pytest.approx(25)
    assert await wait_idle(tracker, deadline=loop.time() - 1) == (first, second)


async def test_a_waiting_task_does_not_hold_a_drain():
    """What is accepted and has not begun is safe in its row: idle does not wait for it."""
    tracker = Tracker()
    tracker.add(a_task())

    assert await wait_idle(tracker, deadline=asyncio.get_running_loop().time() + 60) == ()


async def test_every_waiter_is_woken():
    """Several parts may wait for several things at once; a poke lets all ask again."""
    loop = asyncio.get_running_loop()
    tracker, flag = Tracker(), []

    async def wait_for_flag() -> bool:
        while not flag and await tracker.wait_change(deadline=loop.time() + 9):
            pass
        return bool(flag)

    waits = [asyncio.create_task(wait_for_flag()) for _ in range(5)]
    await asyncio.sleep(1)
    flag.append(1)
    tracker.poke()

    assert await asyncio.gather(*waits) == [True] * 5
    assert loop.time() == pytest.approx(1)


async def test_background_work_is_counted_whatever_becomes_of_it():
    """A block of work is in flight exactly while it runs, also if it raises."""
    tracker = Tracker()

    def fail() -> None:
        with tracker.background("sync", Clock()) as task:
            assert tracker.running == 1
            assert task.handler is asyncio.current_task()
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()

    assert (tracker.running, len(tracker)) == (0, 0)


async def test_claims_cost_the_same_among_many():
    """Adding, finding, ending and removing do not get slower with the number in flight."""

    def seconds_of(rounds: int, tracker: Tracker, tag: str) -> float:
        begun = time.perf_counter()
        for n in range(rounds):
            task = run(tracker, a_task(f"{tag}{n}"))
            tracker.get(task.request_id)
            tracker.ended(task)
            tracker.remove(task)
        return time.perf_counter() - begun

    empty, full = Tracker(), Tracker()
    for n in range(50_000):
        full.add(a_task(f"x{n}"))
    ratios = []
    for attempt in range(5):
        few = seconds_of(500, empty, f"e{attempt}")
        ratios.append(seconds_of(500, full, f"f{attempt}") / few)

    # A scan of 50,000 would be thousands of times slower: generous for a busy machine.
    assert min(ratios) < 20


async def test_the_next_task_of_a_key_is_tracked_when_the_one_in_flight_has_left():
    """Until then its row counts as one that somebody works on; cancelled, it leaves no trace."""
    tracker = Tracker()
    first, second, third = a_task(row_id=1), a_task(row_id=1), a_task(row_id=2)
    tracker.add(first)
    following = [asyncio.ensure_future(tracker.add_after(one, Clock())) for one in (second, third)]
    await asyncio.sleep(0)
    assert tracker.row_ids() == {1, 2}
    following[1].cancel()
    await asyncio.sleep(0)
    assert tracker.row_ids() == {1}

    tracker.remove(first)
    await following[0]
    assert list(tracker) == [second]
