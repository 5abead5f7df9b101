"""The one task that an operator means: by request id, or by its unmistakable beginning."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Final

from gracekit.cli.reach import Answer, Desk
from gracekit.cli.records import Records
from gracekit.cli.text import plural, safe
from gracekit.errors import GracekitError
from gracekit.leases.members import Run
from gracekit.store.schema import IS_OPEN
from gracekit.tracker.orders import Case, cases

LISTED: Final = 5
NEAR: Final = 1000
"""Open tasks among which a mistyped id is looked for."""
_ABOVE_ALL: Final = chr(0x10FFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What an order is about.

    Attributes:
        row_id: Its journal row; None for work without one.
        run: Whose work it is, if it has no row.
        state: As seen when it was found.
        where: ` on api-1`, or nothing.
    """

    request_id: str
    recipient: str
    method: str
    resource: str | None
    state: str
    row_id: int | None
    run: Run | None = None
    where: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "task_id": self.request_id,
            "recipient": self.recipient,
            "method": self.method,
            "resource": self.resource,
            "before": self.state,
            "journaled": self.row_id is not None,
        }

    def is_task(self, task: Answer) -> bool:
        """Whether a living process means it."""
        key = (task.get("task_id"), task.get("recipient", ""))
        return key == (self.request_id, self.recipient)

    def __str__(self) -> str:
        words = [self.method, *([self.resource] if self.resource else [])]
        return f"{safe(self.request_id)} ({safe(' '.join(words))})"


async def find(records: Records, word: str, instance: str | None) -> Subject:
    """The task that *word* means.

    Args:
        records: The store.
        word: As typed.
        instance: Which copy of a fanout, or whose work.

    Raises:
        GracekitError: no task is meant, or more than one.
    """
    if not word:
        raise GracekitError("an empty ID names no task; see `gracekit tasks`")
    found = await _rows(records, word, instance) or await _live(records, word, instance)
    if not found:
        raise GracekitError(f"no task {safe(word)} is on record{await _hint(records, word)}")
    if len(found) > 1:
        shown = ", ".join(_name(subject) for subject in found[:LISTED])
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        raise GracekitError(
            f"{safe(word)} stands for {plural(len(found), 'task')}: {shown}{more}; write more of "
            "the ID, and --instance NAME for one copy of a fanout"
        )
    return found[0]


def _name(subject: Subject) -> str:
    return f"{subject}{f' for {safe(subject.recipient)}' if subject.recipient else ''}"


async def _rows(records: Records, word: str, instance: str | None) -> list[Subject]:
    found = await cases(records.engine, "request_id = ? ORDER BY id DESC", [word])
    if not found:
        between = "request_id >= ? AND request_id < ? ORDER BY id DESC LIMIT 100"
        found = await cases(records.engine, between, [word, word + _ABOVE_ALL])
    runs = {run.run_id: run for run in await records.runs()}
    if instance is not None:
        found = [case for case in found if _is_of(case, instance, runs)]
    return [_subject(case, runs) for case in found]


def _is_of(case: Case, instance: str, runs: dict[str, Run]) -> bool:
    if case.recipient:
        return case.recipient == instance
    owner = runs.get(case.owner or "")
    return owner is None or owner.instance == instance


def _subject(case: Case, runs: dict[str, Run]) -> Subject:
    owner = runs.get(case.owner or "")
    return Subject(
        request_id=case.request_id,
        recipient=case.recipient,
        method=case.method,
        resource=None if case.resource is None else ":".join(case.resource),
        state=case.state.value,
        row_id=case.id,
        where=f" on {owner.instance}" if owner else "",
    )


async def _live(records: Records, word: str, instance: str | None) -> list[Subject]:
    """What processes run without a row."""
    living = await records.living(instance)
    async with Desk() as desk:
        answers = await desk.statuses(living)
    tasks = [(run, task) for run in living for task in answers.get(run.run_id, {}).get("tasks", ())]
    exact = [(run, task) for run, task in tasks if task.get("task_id") == word]
    begins = [(r, task) for r, task in tasks if str(task.get("task_id")).startswith(word)]
    return [
        Subject(
            request_id=str(task.get("task_id")),
            recipient=str(task.get("recipient") or ""),
            method=str(task.get("method")),
            resource=task.get("resource"),
            state=str(task.get("state")),
            row_id=None,
            run=run,
            where=f" on {run.instance}",
        )
        for run, task in exact or begins
    ]


async def _hint(records: Records, word: str) -> str:
    """The nearest id of an open task, by as many letters as were typed."""
    rows = await records.engine.query(
        f"SELECT request_id FROM task WHERE {IS_OPEN} ORDER BY +id DESC LIMIT ?",  # noqa: S608
        NEAR,
    )
    ids = {str(row[0])[: len(word)]: str(row[0]) for row in rows}
    near = difflib.get_close_matches(word, ids, n=1)
    return f"; did you mean {safe(ids[near[0]])}?" if near else "; see `gracekit tasks --state all`"
