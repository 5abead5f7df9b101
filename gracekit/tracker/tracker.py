"""The tracker of tasks in flight: one in a process, which the Runtime builds and passes on.

It has each task from before its acceptance is submitted until its reply is sent.
Adding, removing and counting are O(1). Code that needs a condition, such as no
running task, waits for changes with `wait_change`. `Waiting` says to operators what a task waits
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.telemetry.logs import Running
from gracekit.tracker.task import TERMINAL, Awaited, Interruption, Lane, TaskState, TrackedTask

FOLLOWING_WAIT_S: Final = 60.0
"""Timeout of one wait for the task in flight with the same key; the wait is repeated."""

_NO_TASKS: Final = frozenset({Lane.BACKGROUND})
_TO_END: Final = frozenset({TaskState.ACCEPTED, TaskState.RUNNING})
TaskKey = str | tuple[str, str]


class Tracker:
    """Tasks in flight, by (request id, recipient).

    It keeps a strong reference to each: otherwise an asyncio task, to which the
    loop has only a weak one, may be garbage-collected while it works.

    Attributes:
        awaited: By request id, the handler that waits for its answer; changed in any thread.
        blocked: By lane, what the handlers awaited that had all of it when it was last full so.
        finished: Number of removed tasks whose attempt was not cut.
        removed: Number of all removed tasks.
    """

    def __init__(self) -> None:
        # Most tasks have no recipient. Their key is the id alone, which saves making a pair.
        self._tasks: dict[TaskKey, TrackedTask] = {}
        self._added = 0
        self._by_lane = dict.fromkeys(Lane, 0)
        # Dictionaries instead of sets: the order of a set depends on addresses, but a simulation
        # must run the same way with the same seed.
        self._running: dict[TrackedTask, None] = {}  # those that hold a drain
        self._running_ops: dict[TrackedTask, None] = {}  # those that do not
        self._changed: dict[asyncio.Event, None] = {}
        self._following: dict[TrackedTask, None] = {}  # tasks that wait in `add_after`
        self._parents: dict[TrackedTask, asyncio.Event] = {}  # that wait in `wait_children`
        self.awaited: dict[str, Running] = {}
        self.blocked: dict[str, frozenset[str]] = {}
        self.finished = 0
        self.removed = 0

    # -- changes ---------------------------------------------------------------

    def add(self, task: TrackedTask) -> TrackedTask | None:
        """Add *task*; if its key is in flight already, return that task and change nothing."""
        key = (task.request_id, task.recipient) if task.recipient else task.request_id
        known = self._tasks.setdefault(key, task)
        if known is not task:
            return known
        self._added += 1
        task.serial = self._added
        self._by_lane[task.lane] += 1
        return None

    async def add_after(self, task: TrackedTask, clock: Clock) -> None:
        """Add *task* once its key is no longer in flight; `row_ids` includes it at once."""
        self._following[task] = None
        try:
            while self.add(task) is not None:
                await self.wait_change(deadline=clock.loop() + FOLLOWING_WAIT_S)
        finally:
            del self._following[task]

    def started(self, task: TrackedTask) -> None:
        """Count *task* as running; a drain waits for it if it has `holds_drain`."""
        (self._running if task.holds_drain else self._running_ops)[task] = None
        if self._changed:
            self.poke()

    def ended(self, task: TrackedTask) -> None:
        """Count *task* as running no more; it stays in flight until its reply is sent."""
        (self._running if task.holds_drain else self._running_ops).pop(task, None)
        if self._changed:
            self.poke()

    def remove(self, task: TrackedTask) -> None:
        """Remove *task*, which was answered, handed over or given back."""
        (self._running if task.holds_drain else self._running_ops).pop(task, None)
        key = (task.request_id, task.recipient) if task.recipient else task.request_id
        if self._tasks.pop(key, None) is not None:
            self._by_lane[task.lane] -= 1
            self.removed += 1
            if task.started_at is not None and task.cut is None and task.lane not in _NO_TASKS:
                self.finished += 1
        if self._changed:
            self.poke()

    def poke(self) -> None:
        """Wake all that wait, so that they check their conditions again."""
        for event in self._changed:
            event.set()

    @contextlib.contextmanager
    def background(
        self, name: str, clock: Clock, *, lane: Lane = Lane.BACKGROUND, about: str = ""
    ) -> Iterator[TrackedTask]:
        """Let a drain wait for a block of work that is no request; its deadline cancels it."""
        handler = asyncio.current_task()
        task = self.begin_work(name, clock, lane=lane, about=about, handler=handler)
        try:
            yield task
        except BaseException as error:
            self.end_work(task, error)
            raise
        self.end_work(task, None)

    def begin_work(
        self,
        name: str,
        clock: Clock,
        *,
        lane: Lane = Lane.BACKGROUND,
        about: str = "",
        handler: asyncio.Task[Any] | None = None,
        parent: TrackedTask | None = None,
    ) -> TrackedTask:
        """Begin to track work that is no request.

        Args:
            name: Shown as its method.
            clock: Has the time and the ids.
            lane: Where it came from.
            about: See `TrackedTask`.
            handler: The asyncio task to cancel; None for work in a thread.
            parent: The task that stays open until this work has ended, if it may still begin some.
        """
        now = clock.loop()
        task = TrackedTask(
            request_id=clock.new_id(),
            method=name,
            lane=lane,
            journaled=False,
            state=TaskState.RUNNING,
            tracked_at=now,
            started_at=now,
            handler=handler,
            cancellable=handler is not None,
            about=about,
        )
        if parent is not None and parent.children is not None:
            parent.children[task] = None
            task.parent, task.deadline = parent, parent.deadline
            task.cancel_cause = parent.cancel_cause
        self.add(task)
        self.started(task)
        if task.cancel_cause is not None and handler is not None:
            task.cancel(task.cancel_cause)  # its parent was cancelled before
        return task

    def end_work(self, task: TrackedTask, error: BaseException | None) -> None:
        """Track that work no more; *error* is what it has raised. May be called twice."""
        parent = task.parent
        if error is not None and (task.cancel_cause or (parent and parent.cancel_cause)):
            task.cut = Interruption.CANCELLED  # so it does not count as finished
        task.cancellable = False
        self.remove(task)
        if parent is None or parent.children is None or task not in parent.children:
            return
        del parent.children[task]
        # The application may cancel what it has begun: only gracekit's own cancellations count.
        cancelled = asyncio.CancelledError
        if task.cancel_cause is None and task.handler is not None and isinstance(error, cancelled):
            error = None
        if parent.child_error is None or isinstance(parent.child_error, cancelled):
            parent.child_error = error or parent.child_error
        if not parent.children and (waiting := self._parents.get(parent)):
            waiting.set()

    # -- questions -------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TrackedTask]:
        """Tasks in flight, in the order in which they were added."""
        return iter(tuple(self._tasks.values()))

    def page(self, *, after: int, limit: int) -> tuple[list[TrackedTask], bool]:
        """Up to *limit* tasks with a serial above *after*, and whether there are more."""
        later = (task for task in self._tasks.values() if task.serial > after)
        found = list(itertools.islice(later, limit + 1))
        return found[:limit], len(found) > limit

    def get(self, request_id: str, recipient: str = "") -> TrackedTask | None:
        """The task in flight under that key; None if there is none."""
        return self._tasks.get((request_id, recipient) if recipient else request_id)

    def row_ids(self) -> set[int]:
        """Ids of the rows on which a task of this process works, or is about to."""
        tasks = (*self._tasks.values(), *self._following)
        return {task.row_id for task in tasks if task.row_id is not None}

    def count(self, lane: Lane) -> int:
        """Number of tasks of *lane* in flight."""
        return self._by_lane[lane]

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Number of tasks in flight by (method, lane), for metrics."""
        return Counter((task.method, task.lane.value) for task in self)

    @property
    def self_blocked(self) -> list[str]:
        """The lanes that are full of handlers that wait for them: none of these has gone on."""
        return [lane for lane, ids in self.blocked.items() if ids <= self.awaited.keys()]

    def running_by_lane(self) -> Mapping[Lane, int]:
        """Number of attempts under way by lane, for metrics; may be called in any thread."""
        return Counter(task.lane for task in (*self._running, *self._running_ops))

    @property
    def running(self) -> int:
        """Number of attempts under way that hold a drain."""
        return len(self._running)

    @property
    def running_ops(self) -> int:
        """Number of attempts under way that do not hold a drain."""
        return len(self._running_ops)

    def has_ops(self, *, came_by: float) -> bool:
        """Whether a task of the ops lane that came by that loop time runs, or is about to."""
        return self._by_lane[Lane.OPS] > 0 and any(
            task.lane is Lane.OPS and task.tracked_at <= came_by and task.state in _TO_END
            for task in self._tasks.values()
        )

    # -- waiting ---------------------------------------------------------------

    async def wait_change(self, *, deadline: float) -> bool:
        """Wait for the next start, end, removal or poke.

        To wait for a condition, check it in a loop around this call. No change is missed in
        between, as long as the check does not await.

        Args:
            deadline: Loop time in seconds. In the past means "do not wait".

        Returns:
            Whether there was a change; false at the deadline.
        """
        changed = asyncio.Event()
        self._changed[changed] = None
        try:
            async with asyncio.timeout_at(deadline):
                return await changed.wait()
        except TimeoutError:
            return False
        finally:
            self._changed.pop(changed, None)

    async def wait_children(self, task: TrackedTask) -> None:
        """Wait until no child of *task* is left.

        A cancellation ends the wait only if the task was recorded as cut: its children may act.
        """
        while task.children:
            self._parents[task] = ended = asyncio.Event()
            try:
                await ended.wait()
            except asyncio.CancelledError:
                if task.cut is not None:
                    raise
            finally:
                del self._parents[task]


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
