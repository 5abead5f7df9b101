"""Which tasks are taken for stuck, and why: for `gracekit tasks --stuck`.

A task that runs is judged by its last safe point, or its start, and the history of its method.
One without history, and one that nobody works on, is judged by the clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.listings.listed_task import ListedTask
from gracekit.tracker.task import TaskState

TIMES_P95: Final = 3.0
"""A running task may take so many times the p95 of its method."""
SHORTEST_S: Final = 1.0
"""And so long at least: what is shorter has ended before anybody has read it."""
UNTOUCHED_S: Final = 600.0
"""So long may a task run without history, or be left to itself."""
_NOBODY: Final = "taken by nobody"


def why_stuck(task: ListedTask, *, recent: Collection[str]) -> str | None:
    """Why it is taken for stuck; None if it is not.

    Args:
        task: Any.
        recent: Request ids of what was handed over less than `UNTOUCHED_S` ago.
    """
    if not task.is_transient:
        return None
    state = TaskState(task.columns["state"])
    if state is TaskState.RUNNING and not task.orphaned:
        why = _running(task)
    elif state is TaskState.HANDED_OVER:
        why = _handed_over(task, recent)
    else:
        why = _waiting(task)
    if why is None or task.waits_for is None:
        return why
    return f"{why}; waits for {task.waits_for}"


def _running(task: ListedTask) -> str | None:
    since_safe_point = task.safe_point_age_s
    idle_s = task.age_s if since_safe_point is None else min(task.age_s, since_safe_point)
    p95_s = task.said("p95_s")
    if p95_s is not None and idle_s >= max(SHORTEST_S, TIMES_P95 * p95_s):
        why = f"{idle_s / max(p95_s, 0.001):.1f}x its p95 of {_short(p95_s)}"
    elif p95_s is None and idle_s >= UNTOUCHED_S:
        known = "no history" if task.live else "its process says nothing"
        why = f"{known}, running {duration(task.age_s)}"
    else:
        return None
    return why if since_safe_point is None else f"{why}, no safe point since {duration(idle_s)}"


def _handed_over(task: ListedTask, recent: Collection[str]) -> str | None:
    columns = task.columns
    if columns["owner"] is not None and not task.orphaned:
        return None  # a living run settles it
    if columns["request_id"] in recent or task.age_s < UNTOUCHED_S:
        return None
    # It settles, or its probe said Wait: somebody looks at it then.
    due = max(columns["not_before"] or 0.0, columns["next_check"] or 0.0)
    if age_s(task.now, due) < UNTOUCHED_S:
        return None
    return f"handed over, {_NOBODY} for {duration(UNTOUCHED_S)} or more"


def _waiting(task: ListedTask) -> str | None:
    """Of one that was accepted or parked; and of one whose process is gone."""
    if task.age_s < UNTOUCHED_S:
        return None
    if task.orphaned:
        return f"its process is gone, {_NOBODY}"
    if task.columns["owner"] is None:
        return f"{task.columns['state']} {duration(task.age_s)} ago, {_NOBODY}"
    return f"not begun for {duration(task.age_s)}"


def _short(seconds: float) -> str:
    """As `duration`, with milliseconds below a second."""
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else duration(seconds)
