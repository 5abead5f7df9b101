"""One tracked task: its state and legal steps, its lane, and why it was cancelled or interrupted.

`_NEXT` is the drawing in ARCHITECTURE.md as data; only it says which state may
follow which. "Orphaned" is no state: so listings call a row whose owner is dead.

For each method the durations of the last successful attempts are kept, too, from which the end of
a task is estimated; at start they are read from the journal. With too few of them, or once a task
has run longer than all of them, there is no estimate.
"""

from __future__ import annotations

import asyncio
import bisect
import enum
import math
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit.config.choices import OnInterrupt
from gracekit.errors import IllegalTransitionError

KEPT: Final = 64
"""Attempts that are kept for each method."""
FEWEST: Final = 5
"""With fewer attempts there is no estimate."""
QUANTILE: Final = 0.95
MethodKey = tuple[str | None, str]


class Durations:
    """Seconds that the last attempts of one method took. May be read from any thread."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Add the duration of an attempt that has succeeded."""
        self._last.append(seconds)

    @property
    def usual(self) -> float | None:
        """Seconds within which 95 % of the kept attempts ended; None if there are too few."""
        return _high(sorted(self._last.copy())) if len(self._last) >= FEWEST else None

    def expected(self, elapsed_s: float) -> float | None:
        """Seconds from start to end of an attempt that has run for *elapsed_s*.

        The 95 % quantile of the kept attempts that took longer than that; None
        if too few are kept, or none took longer.
        """
        known = sorted(self._last.copy())
        if len(known) < FEWEST:
            return None
        longer = known[bisect.bisect_right(known, elapsed_s) :]
        return _high(longer) if longer else None


def _high(ordered: list[float]) -> float:
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1]


class History:
    """The durations of every method of one service."""

    def __init__(self) -> None:
        self._methods: dict[MethodKey, Durations] = {}

    def of(self, namespace: str | None, method: str) -> Durations:
        """The durations of one method; made empty if there are none."""
        key = (namespace, method)
        known = self._methods.get(key)
        if known is None:
            known = self._methods[key] = Durations()
        return known

    def seed(
        self, attempts: Iterable[tuple[str | None, str, float]], known: Iterable[MethodKey]
    ) -> None:
        """Add attempts from the journal, oldest first, of methods in *known*.

        Args:
            attempts: (namespace, method, seconds) of each.
            known: The methods that this version of the service has.
        """
        wanted = set(known)
        for namespace, method, seconds in attempts:
            if (namespace, method) in wanted:
                self.of(namespace, method).add(seconds)


SUSPECTED: Final = 2
"""A task with so many crashes is a suspect, and with fewer if only one attempt is left."""


class _Word(enum.Enum):
    """An enum that is hashed by identity, because Enum's own hash is a slow call into Python.

    Attributes:
        word: The value as a plain attribute, because `value` is two calls into Python.
    """

    __hash__ = object.__hash__

    def __init__(self, word: str) -> None:
        self.word = word


class TaskState(_Word):
    """Where a task is in its life, as the journal stores it and `gracekit tasks` shows it.

    A test compares: `one.state_of(request_id) is TaskState.SUCCEEDED`. A program that reads
    `gracekit tasks --json` makes a member of the text: `TaskState("handed_over")`.
    """

    ACCEPTED = "accepted"  # journaled, not started
    RUNNING = "running"  # an attempt was recorded; its handler may be at work
    PENDING = "pending"  # parked, as its handler found no capacity; owned by no run
    HANDED_OVER = "handed_over"  # started and cut; recovery decides
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the handler raised, or a probe or an operator said that it failed
    CANCELLED = "cancelled"  # by an order; or it was a fanout copy whose instance is gone
    ERRORED = "errored"  # recovery gave up; the reason is kept
    REJECTED = "rejected"  # never a task: oversize, unreadable, unknown method, conflicting id


_NEXT: Final[Mapping[TaskState, frozenset[TaskState]]] = {
    TaskState.ACCEPTED: frozenset({TaskState.RUNNING, TaskState.CANCELLED, TaskState.ERRORED}),
    TaskState.RUNNING: frozenset(
        {
            TaskState.SUCCEEDED,
            TaskState.FAILED,
            TaskState.CANCELLED,
            TaskState.PENDING,
            TaskState.HANDED_OVER,
            TaskState.ACCEPTED,  # its attempt has failed, and it is tried again later
        }
    ),
    TaskState.PENDING: frozenset({TaskState.ACCEPTED, TaskState.ERRORED, TaskState.CANCELLED}),
    TaskState.HANDED_OVER: frozenset(
        {
            TaskState.ACCEPTED,
            TaskState.SUCCEEDED,
            TaskState.FAILED,
            TaskState.CANCELLED,
            TaskState.ERRORED,
        }
    ),
    TaskState.SUCCEEDED: frozenset(),
    TaskState.FAILED: frozenset({TaskState.ACCEPTED}),  # by an operator's retry alone
    TaskState.CANCELLED: frozenset(),
    TaskState.ERRORED: frozenset({TaskState.ACCEPTED}),  # the same
    TaskState.REJECTED: frozenset(),
}

RETRIED: Final = frozenset({TaskState.FAILED, TaskState.ERRORED})
"""Ended states from which an operator may retry a task; its arguments are kept for that."""
TRANSIENT: Final = frozenset(state for state in TaskState if _NEXT[state]) - RETRIED
TERMINAL: Final = frozenset(TaskState) - TRANSIENT


class Lane(_Word):
    """Where a task came from; the first two lanes have a capacity, slots and threads each."""

    REQUESTS = "requests"  # closed first by a drain
    OPS = "ops"  # answers until the last task ends, or the drain's deadline
    PERIODIC = "periodic"  # tracked, not journaled
    BACKGROUND = "background"  # work that a handler tracks by itself


class Interruption(enum.Enum):
    """How an attempt was cut before it ended."""

    SAFE_POINT = "safe_point"  # it stopped at a safe point, whose cursor is committed
    CANCELLED = "cancelled"  # it was cancelled, and its coroutine or thread has returned
    UNCLEAN = "unclean"  # it may have been acting when its process died, or may act still


class Reason(enum.Enum):
    """Why a task is ERRORED."""

    INTERRUPTED = "interrupted"
    ATTEMPTS = "attempts"
    EXPIRED = "expired"
    GAVE_UP = "gave_up"
    METHOD_GONE = "method_gone"
    ARGUMENTS = "arguments"
    OPERATOR = "operator"


NO_CAPACITY: Final = "no_capacity"
"""Reason of PENDING. Clients that do not know the state are shown ERRORED with this reason."""


class CancelCause(enum.Enum):
    """Why gracekit cancelled a handler; the first cause wins."""

    DRAIN_DEADLINE = "drain deadline"
    FORCED = "forced stop"
    TIMEOUT = "method timeout"
    OPERATOR = "operator"
    FENCED = "fenced"  # others may act soon, or do so already, in place of this run


OUT_OF_TIME: Final = frozenset({CancelCause.DRAIN_DEADLINE, CancelCause.FORCED})
"""The causes by which a drain cancels what still runs at its end."""


class Awaited(enum.Enum):
    """What a task waits for; `tracker.waiting` shows it as a sentence."""

    RESOURCE = "resource"  # another task of this process has it, or is before it in the line
    LEASE = "lease"  # another process has it
    METHOD = "method"  # its method already runs `max_running` tasks
    THREAD = "thread"
    LANE = "lane"  # its lane already runs `max_running` tasks
    APART = "apart"  # it is a suspect, or a suspect runs alone
    SAME_ID = "same id"
    STORE = "store"  # its handler has returned, and the outcome cannot be recorded


class Verb(enum.Enum):
    """What may be ordered of one task."""

    CANCEL = "cancel"
    FAIL = "fail"
    RETRY = "retry"
    GIVE_UP = "give_up"  # of a task that waits for capacity


# An order to fail makes a running task FAILED. If no handler works on it, it becomes ERRORED, as
# recovery would mark it, so that its `errored` hook is called.
ENDS: Final[Mapping[Verb, Mapping[TaskState, TaskState]]] = MappingProxyType(
    {
        Verb.CANCEL: {
            TaskState.ACCEPTED: TaskState.CANCELLED,
            TaskState.RUNNING: TaskState.CANCELLED,
            TaskState.PENDING: TaskState.CANCELLED,
            TaskState.HANDED_OVER: TaskState.CANCELLED,
        },
        Verb.FAIL: {
            TaskState.ACCEPTED: TaskState.ERRORED,
            TaskState.RUNNING: TaskState.FAILED,
            TaskState.PENDING: TaskState.ERRORED,
            TaskState.HANDED_OVER: TaskState.ERRORED,
        },
        Verb.RETRY: {
            TaskState.PENDING: TaskState.ACCEPTED,
            TaskState.HANDED_OVER: TaskState.ACCEPTED,
            TaskState.FAILED: TaskState.ACCEPTED,
            TaskState.ERRORED: TaskState.ACCEPTED,
        },
        Verb.GIVE_UP: {TaskState.PENDING: TaskState.ERRORED},
    }
)
DONE: Final = MappingProxyType(
    {
        Verb.CANCEL: "cancelled",
        Verb.FAIL: "failed",
        Verb.RETRY: "retried",
        Verb.GIVE_UP: "given up",
    }
)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody orders of one task.

    Attributes:
        by: Who has given the order, such as `name@host`.
        reason: Why, in a sentence; for the record and for the caller.
        source: Kind of the sender: operator, resolver, handler or caller. It becomes the reason of
            a task that the order ends.
    """

    verb: Verb
    by: str
    reason: str
    source: str = Reason.OPERATOR.value


class TrackedTask(msgspec.Struct, kw_only=True, eq=False):
    """A request, or other work, that is in flight in this process.

    A Struct, not a dataclass: one is made for each request, and a Struct costs a third of that.

    Attributes:
        request_id: The sender's id, or one drawn here.
        recipient: Empty, or the instance that a fanout copy is for.
        method: Name of the handler, as registered.
        lane: Where it came from.
        holds_drain: Whether a drain stops it at its next safe point, and waits for it before it
            looks at the others, which are ops methods on the ops lane.
        is_awaited: Whether a drain has logged that it waits for it.
        journaled: Whether it has a row; `requeue`, periodic and background work has none.
        on_interrupt: Policy of its method: what recovery does if it is interrupted.
        resource: (kind, id) of the resource that it acts on, under a lease; None for none.
        ops_resource: The resource that an ops method or a tracked block names, without a lease;
            None for none.
        shown_context: What the service's context_keys copy of the caller's context; None for none.
        row_id: Its journal row; None before acceptance.
        tracked_at: Loop time in seconds.
        started_at: Loop time of the present attempt's start; None before it.
        deadline: Loop time in seconds at which its handler is cancelled; None for never.
        attempt: Number of the present attempt, from 1; 0 before the first.
        token: Fencing token of the present attempt; None without a resource.
        cursor: Cursor of the last safe point, plain JSON data.
        safe_point_at: Loop time of the last safe point; None for none.
        state: Changed only by `advance()`.
        handler: The asyncio task that runs it; the tracker keeps it alive.
        cancellable: Whether the handler itself runs; gracekit never cancels its own steps.
        cancel_cause: Why gracekit cancelled it; None if it did not.
        stopped: Whether gracekit stopped the attempt at a safe point, and did not cancel it since.
        waits_for: What it waits for; None while it waits for nothing.
        order: The order that ends it; None if there is none.
        thread_id: Ident of the worker thread in which a plain handler runs; None outside one.
        history: How long its method's attempts took; None before it has started.
        cut: How the attempt was cut; None while it runs or if it ended.
        cancels: How often gracekit cancelled the handler.
        serial: Its number in the order in which tasks were added to the tracker, from 1.
        about: What recovery's work is for: the request id of a task, or the name of a hold.
        calling: The asyncio task in which its handler calls code of the application, for the dump
            of stacks; None if its handler calls it directly.
        failures: How many of its attempts have failed and were tried again.
        progress: How far it has come, as the journal keeps it; None for nothing said.
        children: The tracked work that its handler has begun and that keeps it open, in order; None
            while no handler of it may begin any.
        parent: The task that this work keeps open; None if it keeps none open.
        leases: So many leases it has taken by `ctx.lease`.
        child_error: What the first of its children that failed has raised; None if none failed.
    """

    request_id: str
    method: str
    lane: Lane
    recipient: str = ""
    holds_drain: bool = True
    is_awaited: bool = False
    journaled: bool = True
    on_interrupt: OnInterrupt = "error"
    resource: tuple[str, str] | None = None
    ops_resource: tuple[str, str] | None = None
    shown_context: Mapping[str, str] | None = None
    row_id: int | None = None
    tracked_at: float = 0.0
    started_at: float | None = None
    deadline: float | None = None
    attempt: int = 0
    token: int | None = None
    cursor: Any = None
    safe_point_at: float | None = None
    state: TaskState = TaskState.ACCEPTED
    handler: asyncio.Task[Any] | None = None
    cancellable: bool = False
    cancel_cause: CancelCause | None = None
    stopped: bool = False
    waits_for: Awaited | None = None
    order: Order | None = None
    thread_id: int | None = None
    history: Durations | None = None
    cut: Interruption | None = None
    cancels: int = 0
    serial: int = 0
    about: str = ""
    calling: asyncio.Future[Any] | None = None
    failures: int = 0
    progress: Mapping[str, Any] | None = None
    children: dict[TrackedTask, None] | None = None
    parent: TrackedTask | None = None
    leases: int = 0
    child_error: BaseException | None = None

    def advance(self, to: TaskState) -> None:
        """Take one step of the state machine.

        Raises:
            IllegalTransitionError: *to* does not follow the present state.
        """
        if to not in _NEXT[self.state]:
            raise IllegalTransitionError(f"{self} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def cancel(self, cause: CancelCause) -> None:
        """Cancel the handler and its children; what does not run now reads the cause later."""
        if self.cancel_cause is None:
            self.cancel_cause = cause
        if self.cancellable and self.handler is not None:
            if self.thread_id is None:  # a thread goes on to its end, so its stop stays true
                self.stopped = False
            self.cancels += 1
            self.handler.cancel(cause.value)
        for child in self.children or ():
            child.cancel(cause)

    def expected_end(self, now: float) -> float | None:
        """Estimated loop time of its end, by its method's history; None without an estimate."""
        if self.history is None or self.started_at is None or not self.running:
            return None
        seconds = self.history.expected(now - self.started_at)
        return None if seconds is None else self.started_at + seconds

    @property
    def usual_s(self) -> float | None:
        """Seconds within which nearly all attempts of its method ended; None without history."""
        return None if self.history is None else self.history.usual

    @property
    def running(self) -> bool:
        """Whether an attempt is under way."""
        return self.state is TaskState.RUNNING

    @property
    def shown_resource(self) -> tuple[str, str] | None:
        """(kind, id) of what it acts on or names; for events and listings only."""
        return self.resource or self.ops_resource

    @property
    def event_fields(self) -> dict[str, Any]:
        """What every event about it has; `context` becomes a field for each of its keys."""
        return {
            "task_id": self.request_id,
            "method": self.method,
            "lane": self.lane.word,
            "resource": self.shown_resource,
            "attempt": self.attempt,
            "context": self.shown_context,
        }

    def __str__(self) -> str:
        return f"task {self.request_id} ({self.method})"
