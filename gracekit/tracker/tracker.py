"""The in-flight task tracker: one per process, built and handed down by the Runtime.

It knows every task from before its acceptance is submitted until its reply is
sent. Adding, finishing and asking are O(1); whoever needs a moment waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from gracekit.clock import Clock
from gracekit.tracker.task import Interruption, Lane, TaskState, TrackedTask

FOLLOWING_WAIT_S: Final = 60.0
"""How long at a time the next task of a key waits for the one in flight to leave."""

TaskKey = str | tuple[str, str]


class Tracker:
    """Tasks in flight, by (request id, recipient).

    Keeps a strong reference to each: an asyncio task that only the loop knows
    may be collected in the middle of its work.

    Attributes:
        finished: How many tasks that hold a drain have left after an attempt that was not cut.
        removed: How many tasks have left, of any kind and in any way.
    """

    def __init__(self) -> None:
        # Nearly every task has no recipient, and then its id alone is the key: no pair to build.
        self._tasks: dict[TaskKey, TrackedTask] = {}
        self._added = 0
        self._by_lane = dict.fromkeys(Lane, 0)
        # Dictionaries instead of sets: a set's order is a matter of addresses, and the same
        # seed must give the same run.
        self._running: dict[TrackedTask, None] = {}  # those that hold a drain
        self._running_ops: dict[TrackedTask, None] = {}  # those that do not
        self._changed: dict[asyncio.Event, None] = {}
        self._following: dict[TrackedTask, None] = {}  # the next of a key, still to be added
        self.finished = 0
        self.removed = 0

    # -- changes ---------------------------------------------------------------

    def add(self, task: TrackedTask) -> TrackedTask | None:
        """Track *task*; if its key is in flight already, return that one and change nothing."""
        key = (task.request_id, task.recipient) if task.recipient else task.request_id
        known = self._tasks.setdefault(key, task)
        if known is not task:
            return known
        self._added += 1
        task.serial = self._added
        self._by_lane[task.lane] += 1
        return None

    async def add_after(self, task: TrackedTask, clock: Clock) -> None:
        """Track *task* as soon as its key is in flight no more; until then `row_ids` has it."""
        self._following[task] = None
        try:
            while self.add(task) is not None:
                await self.wait_change(deadline=clock.loop() + FOLLOWING_WAIT_S)
        finally:
            del self._following[task]

    def started(self, task: TrackedTask) -> None:
        """Count *task* as running: a drain waits for it if it holds drains."""
        (self._running if task.holds_drain else self._running_ops)[task] = None
        if self._changed:
            self._wake()

    def ended(self, task: TrackedTask) -> None:
        """The attempt of *task* is over, if one was; it stays in flight until its reply is sent."""
        (self._running if task.holds_drain else self._running_ops).pop(task, None)
        if self._changed:
            self._wake()

    def remove(self, task: TrackedTask) -> None:
        """Forget *task*: answered, handed over, or given back; its attempt is over too."""
        (self._running if task.holds_drain else self._running_ops).pop(task, None)
        key = (task.request_id, task.recipient) if task.recipient else task.request_id
        if self._tasks.pop(key, None) is not None:
            self._by_lane[task.lane] -= 1
            self.removed += 1
            if task.holds_drain and task.started_at is not None and task.cut is None:
                self.finished += 1
        if self._changed:
            self._wake()

    def poke(self) -> None:
        """Let everybody who waits ask their condition again."""
        self._wake()

    @contextlib.contextmanager
    def background(
        self, name: str, clock: Clock, *, lane: Lane = Lane.BACKGROUND
    ) -> Iterator[TrackedTask]:
        """Let a drain wait for a block of work that is no request; cancelled at its deadline."""
        now = clock.loop()
        task = TrackedTask(
            request_id=clock.new_id(),
            method=name,
            lane=lane,
            journaled=False,
            state=TaskState.RUNNING,
            tracked_at=now,
            started_at=now,
            handler=asyncio.current_task(),
            cancellable=True,
        )
        self.add(task)
        self.started(task)
        try:
            yield task
        except BaseException:
            if task.cancel_cause is not None:
                task.cut = Interruption.CANCELLED  # so it does not count as finished
            raise
        finally:
            task.cancellable = False
            self.remove(task)

    # -- questions -------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TrackedTask]:
        """Tasks in flight, in the order they were added."""
        return iter(tuple(self._tasks.values()))

    def page(self, *, after: int, limit: int) -> tuple[list[TrackedTask], bool]:
        """Up to *limit* tasks in flight behind the serial *after*, and whether there are more."""
        later = (task for task in self._tasks.values() if task.serial > after)
        found = list(itertools.islice(later, limit + 1))
        return found[:limit], len(found) > limit

    def get(self, request_id: str, recipient: str = "") -> TrackedTask | None:
        """The task in flight under that key; None if there is none."""
        return self._tasks.get((request_id, recipient) if recipient else request_id)

    def row_ids(self) -> set[int]:
        """Rows that somebody here works on, or is about to."""
        tasks = (*self._tasks.values(), *self._following)
        return {task.row_id for task in tasks if task.row_id is not None}

    def count(self, lane: Lane) -> int:
        """Tasks of *lane* in flight."""
        return self._by_lane[lane]

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Tasks in flight by (method, lane), for metrics."""
        return Counter((task.method, task.lane.value) for task in self)

    def running_by_lane(self) -> Mapping[Lane, int]:
        """Attempts under way by lane, for metrics; may be asked from any thread."""
        return Counter(task.lane for task in (*self._running, *self._running_ops))

    @property
    def running(self) -> int:
        """Attempts under way that hold a drain."""
        return len(self._running)

    @property
    def running_ops(self) -> int:
        """Attempts under way that do not hold a drain."""
        return len(self._running_ops)

    # -- waiting ---------------------------------------------------------------

    async def wait_change(self, *, deadline: float) -> bool:
        """Wait for the next start, end, removal or poke.

        A caller that waits for something of its own asks in a loop: nothing is missed between its
        question and this wait, as neither gives the loop away.

        Args:
            deadline: Loop time in seconds. In the past means "do not wait".

        Returns:
            Whether there was one; false at the deadline.
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

    def _wake(self) -> None:
        for event in self._changed:
            event.set()
