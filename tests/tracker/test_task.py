"""The states of a task: the table is the only judge, and says what the design says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import gracekit
from gracekit.errors import IllegalTransitionError
from gracekit.tracker.task import (
    _NEXT,
    RETRIED,
    TERMINAL,
    TRANSIENT,
    CancelCause,
    Lane,
    Reason,
    TaskState,
    TrackedTask,
)

PAIRS = [(before, after) for before in TaskState for after in TaskState]

# As drawn in ARCHITECTURE.md, written down a second time.
DRAWN = {
    "accepted": "running cancelled errored",
    "running": "succeeded failed cancelled pending handed_over accepted",
    "pending": "accepted errored cancelled",
    "handed_over": "accepted succeeded failed cancelled errored",
    "failed": "accepted",
    "errored": "accepted",
}


def a_task(state: TaskState = TaskState.ACCEPTED) -> TrackedTask:
    return TrackedTask(request_id="r1", method="migrate", lane=Lane.REQUESTS, state=state)


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda state: state.value)
def test_a_step_is_legal_exactly_if_it_is_drawn(before: TaskState, after: TaskState):
    """Every pair of states is judged as the drawing says; a refused step changes nothing."""
    task = a_task(before)

    if after.value in DRAWN.get(before.value, "").split():
        task.advance(after)
        assert task.state is after
    else:
        with pytest.raises(IllegalTransitionError, match=rf"r1 .*{before.value} to {after.value}"):
            task.advance(after)
        assert task.state is before


def test_every_state_is_terminal_or_leads_somewhere():
    """Terminal is final, but for an operator's retry of what has failed, and nothing is both."""
    assert set(TaskState) == TERMINAL | TRANSIENT
    assert not TERMINAL & TRANSIENT
    assert {state.value for state in TRANSIENT | RETRIED} == set(DRAWN)
    assert all(not _NEXT[state] for state in TERMINAL - RETRIED)
    assert all(_NEXT[state] == {TaskState.ACCEPTED} for state in RETRIED)


@pytest.mark.parametrize(
    "start", sorted(TRANSIENT, key=lambda state: state.value), ids=lambda state: state.value
)
def test_every_transient_state_can_reach_an_end(start: TaskState):
    """From no state is a task lost: some way leads to a terminal one."""
    seen, frontier = {start}, {start}
    while frontier:
        frontier = {after for before in frontier for after in _NEXT[before]} - seen
        seen |= frontier

    assert seen & TERMINAL


async def test_the_first_cause_of_a_cancellation_stands():
    """Who asked first is who is told of; a task that is not cancellable only remembers it."""
    task = a_task(TaskState.RUNNING)
    sleeping = asyncio.create_task(asyncio.sleep(3600))
    await asyncio.sleep(0)
    task.handler = sleeping

    task.cancel(CancelCause.TIMEOUT)
    assert not sleeping.cancelling()
    task.cancellable = True
    task.cancel(CancelCause.DRAIN_DEADLINE)

    with pytest.raises(asyncio.CancelledError, match="drain deadline"):
        await sleeping
    assert task.cancel_cause is CancelCause.TIMEOUT


def test_every_reason_is_given_to_a_task_somewhere():
    """A reason that no code gives would have operators look for what never happens."""
    package = Path(gracekit.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if path.name != "rows.py"]

    given = {name for text in sources for name in re.findall(r"\bReason\.([A-Z_]+)", text)}

    assert given == {reason.name for reason in Reason}
