"""What a task in flight waits for, as a text for operators: `waits_for` of its status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final

from gracekit.tracker.task import TERMINAL, Awaited, TrackedTask

_WORDS: Final = {
    Awaited.METHOD: "a task of its method to end: as many as its max_running run",
    Awaited.THREAD: "a free thread",
    Awaited.LANE: "a task of its lane to end: as many as max_running run",
    Awaited.APART: "nothing else to run here: a task runs apart after crashes",
    Awaited.SAME_ID: "the task in flight with the same id to end",
    Awaited.STORE: "the store to take its outcome",
}
ANSWER: Final = "its answer to reach the caller"
ELSEWHERE: Final = "held by another run"
_Resource = tuple[str, str]


class Waiting:
    """What the tasks of one process wait for.

    Args:
        tasks: All in flight; read once, and only if one waits for a lease.
    """

    def __init__(self, tasks: Iterable[TrackedTask]) -> None:
        self._tasks = tasks

    @cached_property
    def _holders(self) -> Mapping[_Resource, str]:
        return {
            task.resource: task.request_id
            for task in self._tasks
            if task.resource is not None and task.running
        }

    def of(self, task: TrackedTask) -> str | None:
        """`lease vm:12 held by task order-1`; None if it waits for nothing."""
        match task.waits_for:
            case None:
                return ANSWER if task.state in TERMINAL else None
            case Awaited.RESOURCE | Awaited.LEASE as wait:
                return self._for_lease(task, wait)
            case other:
                return _WORDS[other]

    def _for_lease(self, task: TrackedTask, wait: Awaited) -> str:
        assert task.resource is not None
        lease = f"lease {':'.join(task.resource)}"
        if wait is Awaited.LEASE:
            return f"{lease} {ELSEWHERE}"
        holder = self._holders.get(task.resource)
        return f"{lease}, behind others" if holder is None else f"{lease} held by task {holder}"
