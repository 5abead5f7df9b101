"""The states of a task in SQL: what the statements write is what the table of steps allows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from gracekit.tracker.task import _NEXT, TaskState
from tests.store.test_sql import texts

# Their states are parameters. `TrackedTask.advance`, `ENDS` or `RETRIED` has judged the step.
JUDGED_BEFORE: Final = {
    "tasks_sql.FINISH",
    "tasks_sql.FINISH_OWING_NOTHING",
    "order_rows_sql.END",
    "order_rows_sql.RUN_AGAIN",
    "pending_sql.END",
}
# No process has this step in memory: the task was accepted in a store that was replaced since.
IN_A_RESTORED_STORE: Final = {("accepted", "handed_over")}
_CASE: Final = re.compile(r"CASE (?:(?!\bCASE\b).)*? END\b", re.DOTALL)  # the innermost one
_IN_PARENTHESES: Final = re.compile(r"\((?!')[^()]*\)")
_STATES: Final = re.compile(r"\bstate (?:= |IN \()('\w+'(?:, '\w+')*|\?\d*)")


def changes() -> Iterator[tuple[str, str, str]]:
    """(statement, what it sets, what it asks for) of each statement that changes rows of tasks."""
    for name, text in texts().items():
        head, is_update, change = text.partition("UPDATE task SET")
        if is_update and not head.strip():
            values, _, where = _without_parts(change).partition("WHERE")
            yield name, values, where


def steps() -> Iterator[tuple[str, str, str]]:
    """(statement, state before, state after) of each statement that changes the state of a task."""
    for name, values, where in changes():
        for after in _states_in(values):
            yield from ((name, before, after) for before in _states_in(where))


def _without_parts(text: str) -> str:
    """*text* without its CASEs and without what stands in parentheses, but for lists of words."""
    for part in (_CASE, _IN_PARENTHESES):
        while part.search(text):
            text = part.sub("", text)
    return text


def _states_in(text: str) -> list[str]:
    """The states that a text sets or asks for; `?` for a parameter."""
    return [
        word.strip("'")
        for words in _STATES.findall(text)
        for word in (["?"] if words.startswith("?") else words.split(", "))
    ]


def test_each_statement_takes_a_step_that_is_legal():
    """A statement changes the state of a row as the table allows, or leaves it as it is."""
    legal = {(before.value, after.value) for before in TaskState for after in _NEXT[before]}
    allowed = legal | IN_A_RESTORED_STORE | {(state.value, state.value) for state in TaskState}
    found = list(steps())

    assert len(found) > 15
    assert {name for name, *step in found if "?" in step} == JUDGED_BEFORE
    assert [step for step in found if "?" not in step and step[1:] not in allowed] == []
    assert {step[1:] for step in found} >= IN_A_RESTORED_STORE


def test_each_statement_that_sets_a_state_asks_for_the_one_before():
    """None changes a row whatever its state is: it would undo what another run did meanwhile."""
    setting = {name for name, values, _ in changes() if _states_in(values)}

    assert setting == {name for name, *_ in steps()}
