"""Tracking a task, against the task alone: `asyncio.create_task` of a coroutine that returns.

In processor time: nothing here waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from benchmarks.measure import Figure, Goal, Plan, against, turns
from gracekit.tracker.task import Lane, TaskState, TrackedTask
from gracekit.tracker.tracker import Tracker

NAME: Final = "tracking"
GOAL: Final = Goal(1.35, beyond=1.25)
BESIDE: Final = 100
"""Tasks that are made before the loop runs them."""

# Bound once, as the dispatcher has them at hand: an enum's member costs a call in Python 3.11.
_LANE = Lane.REQUESTS
_RUNNING, _SUCCEEDED = TaskState.RUNNING, TaskState.SUCCEEDED

Life = Coroutine[Any, Any, None]


def run(plan: Plan) -> Iterator[Figure]:
    """A record that is added and removed, then with its states and as the dispatcher does it."""
    yield from asyncio.run(_run(plan))


async def _run(plan: Plan) -> list[Figure]:
    number = plan.size(20_000, BESIDE)
    ids = [f"{i:032}" for i in range(number)]
    lives = _Lives()
    cases: tuple[tuple[str, Callable[[str], Life], Goal | None], ...] = (
        ("record, add, remove", lives.known, None),
        ("with start, end and states", lives.whole, GOAL),
    )
    figures = []
    for case, life, goal in cases:

        async def ours(life: Callable[[str], Life] = life) -> list[float]:
            return [await _time_of(ids, life)]

        async def bare() -> list[float]:
            return [await _time_of(ids, _alone)]

        (pairs,) = await turns(max(plan.rounds, plan.size(21, 1)), ours, bare)
        figures.append(against(NAME, case, pairs, "ns", goal))
    return figures


async def _time_of(ids: list[str], life: Callable[[str], Life]) -> float:
    """Processor nanoseconds from the making of a task to its end, on average."""
    loop = asyncio.get_running_loop()
    begun = time.thread_time_ns()
    for start in range(0, len(ids), BESIDE):
        for request_id in ids[start : start + BESIDE]:
            last = loop.create_task(life(request_id))
        await last
    return (time.thread_time_ns() - begun) / len(ids)


async def _nothing() -> None:
    pass


def _alone(_request_id: str) -> Life:
    return _nothing()


class _Lives:
    """What the dispatcher asks of the tracker, around a handler that does nothing."""

    def __init__(self) -> None:
        self._tracker = Tracker()

    def _record(self, request_id: str) -> TrackedTask:
        task = TrackedTask(
            request_id=request_id,
            recipient="",
            method="work",
            lane=_LANE,
            holds_drain=True,
            journaled=True,
            on_interrupt="error",
            resource=None,
            tracked_at=1.0,
        )
        self._tracker.add(task)
        return task

    def known(self, request_id: str) -> Life:
        return self._known(self._record(request_id))

    async def _known(self, task: TrackedTask) -> None:
        await _nothing()
        self._tracker.remove(task)

    def whole(self, request_id: str) -> Life:
        return self._whole(self._record(request_id))

    async def _whole(self, task: TrackedTask) -> None:
        tracker = self._tracker
        task.advance(_RUNNING)
        tracker.started(task)
        await _nothing()
        task.advance(_SUCCEEDED)
        tracker.ended(task)
        tracker.remove(task)
