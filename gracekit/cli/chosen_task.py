"""The one task that an operator means: by request id, or by its unmistakable beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gracekit.cli.reach import ControlClient, RunAnswer
from gracekit.cli.records import StoreRecords, label
from gracekit.cli.text import plural, safe
from gracekit.errors import GracekitError
from gracekit.journal.order_rows import OrderTarget, targets_between, targets_of
from gracekit.runs.run import Run
from gracekit.tracker.task import TaskState

LISTED: Final = 5
_ABOVE_ALL: Final = chr(0x10FFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTask:
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

    def is_task(self, task: RunAnswer) -> bool:
        """Whether a living process means it."""
        key = (task.get("task_id"), task.get("recipient", ""))
        return key == (self.request_id, self.recipient)

    def __str__(self) -> str:
        words = [self.method, *([self.resource] if self.resource else [])]
        return f"{safe(self.request_id)} ({safe(' '.join(words))})"


async def find(records: StoreRecords, word: str, instance: str | None) -> ChosenTask:
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
    found = await _rows(records, word, instance, exactly=True)
    if not found:
        live, silent = await _live(records, instance)
        found = [subject for subject in live if subject.request_id == word]
        if not found:
            found = await _rows(records, word, instance)
            found += [subject for subject in live if subject.request_id.startswith(word)]
        if not found:
            raise GracekitError(
                f"no task {safe(word)} is on record{silent}; see `gracekit tasks --state all`. "
                "A periodic job is no task, and a `requeue` request is known while it runs only"
            )
    if len(found) > 1:
        shown = ", ".join(_name(subject) for subject in found[:LISTED])
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        raise GracekitError(
            f"{safe(word)} stands for {plural(len(found), 'task')}: {shown}{more}; write more of "
            "the ID, and --instance NAME for one copy of a fanout"
        )
    return found[0]


def _name(subject: ChosenTask) -> str:
    return f"{subject}{f' for {safe(subject.recipient)}' if subject.recipient else ''}"


async def _rows(
    records: StoreRecords, word: str, instance: str | None, *, exactly: bool = False
) -> list[ChosenTask]:
    if exactly:
        found = await targets_of(records.engine, word)
    else:
        found = await targets_between(records.engine, word, word + _ABOVE_ALL)
    # A refused request may have had the id of a task, which is the one that is meant.
    found = [target for target in found if target.state is not TaskState.REJECTED] or found
    runs = {run.run_id: run for run in await records.runs()}
    if instance is not None:
        found = [target for target in found if _is_of(target, instance, runs)]
    return [_subject(target, runs) for target in found]


def _is_of(target: OrderTarget, instance: str, runs: dict[str, Run]) -> bool:
    if target.recipient:
        return target.recipient == instance
    owner = runs.get(target.owner or "")
    return owner is None or owner.instance == instance


def _subject(target: OrderTarget, runs: dict[str, Run]) -> ChosenTask:
    owner = runs.get(target.owner or "")
    return ChosenTask(
        request_id=target.request_id,
        recipient=target.recipient,
        method=target.method,
        resource=None if target.resource is None else ":".join(target.resource),
        state=target.state.value,
        row_id=target.id,
        where=f" on {owner.instance}" if owner else "",
    )


async def _live(records: StoreRecords, instance: str | None) -> tuple[list[ChosenTask], str]:
    """What processes run without a row; and which of them did not say, for a message."""
    async with ControlClient(records.run_directory) as control:
        reports = await control.hear_all(records, instance, every_task=True)
    runs = {run.run_id: run for run in await records.runs()}
    found = [
        ChosenTask(
            request_id=str(task.get("task_id")),
            recipient=str(task.get("recipient") or ""),
            method=str(task.get("method")),
            resource=task.get("resource"),
            state=str(task.get("state")),
            row_id=None,
            run=runs[run_id],
            where=f" on {runs[run_id].instance}",
        )
        for run_id, said in reports.items()
        for task in said.tasks
        if not task.get("journaled")
    ]
    silent = [
        f"{label(runs[i])}: {said.why or said.brief}" for i, said in reports.items() if said.brief
    ]
    return (
        found,
        f" (what runs without a row is not known of {'; '.join(silent)})" if silent else "",
    )
