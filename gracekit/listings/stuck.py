"""Decides which tasks count as stuck, and why, for `gracekit tasks --stuck`.

A running task is stuck if it is slow compared with the history of its method, measured since its
last safe point or its start. Without a history, or if no run works on it, a fixed time decides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.listings.listed_task import ListedTask
from gracekit.tracker.task import TaskState

TIMES_P95: Final = 3.0
"""A running task is stuck after this many times the p95 of its method."""
SHORTEST_S: Final = 1.0
"""A task with a history is not stuck before this many seconds, as it would end before you look."""
UNTOUCHED_S: Final = 600.0
"""Seconds after which a task is stuck that runs without a history, or that no run takes."""
_NOBODY: Final = "not taken by any run"


def why_stuck(task: ListedTask, *, recent: Collection[str]) -> str | None:
    """Why *task* counts as stuck; None if it does not.

    Args:
        task: Any task.
        recent: Request ids of tasks that were handed over less than `UNTOUCHED_S` ago.
    """
    if not task.is_transient or task.is_parked:  # a parked task has its own deadline
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
        known = "no history" if task.live else "no report from its process"
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
    # In its settle time, or after a probe answered `Wait`, recovery checks the task again at `due`.
    due = max(columns["not_before"] or 0.0, columns["next_check"] or 0.0)
    if age_s(task.now, due) < UNTOUCHED_S:
        return None
    return f"handed over, {_NOBODY} for {duration(UNTOUCHED_S)} or more"


def _waiting(task: ListedTask) -> str | None:
    """Why a task is stuck that is accepted, or whose process is gone."""
    if task.age_s < UNTOUCHED_S:
        return None
    if task.orphaned:
        return f"its process is gone, {_NOBODY}"
    if task.columns["owner"] is None:
        return f"{task.columns['state']} {duration(task.age_s)} ago, {_NOBODY}"
    return f"not begun for {duration(task.age_s)}"


def _short(seconds: float) -> str:
    """Like `duration`, but with milliseconds below a second."""
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else duration(seconds)
