"""Finds the task that an operator names by its request id or an unambiguous prefix of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from gracekit.errors import GracekitError
from gracekit.journal.order_rows import OrderTarget, targets_between, targets_of
from gracekit.listings.store_view import Reports, RunAnswer, StoreView, label
from gracekit.runs.run import Run
from gracekit.telemetry.safe_text import LONGEST_TEXT, escape
from gracekit.tracker.task import TaskState

HearAll = Callable[[], Awaitable[Reports]]
"""Asks all living runs for the tasks that they have in flight."""

LISTED: Final = 5
_ABOVE_ALL: Final = chr(0x10FFFF)


class ChosenTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an order.

    Attributes:
        row_id: Id of its journal row; None for a task without a row.
        run: The run that works on it, if it has no row.
        state: Its state when it was found.
        where: ` on api-1`, or empty.
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
        """Whether *task*, from the report of a run, is this task."""
        key = (task.get("task_id"), task.get("recipient", ""))
        return key == (self.request_id, self.recipient)

    def __str__(self) -> str:
        words = [self.method, *([self.resource] if self.resource else [])]
        return f"{_safe(self.request_id)} ({_safe(' '.join(words))})"


async def find(view: StoreView, word: str, instance: str | None, hear_all: HearAll) -> ChosenTask:
    """The task that *word* means.

    Args:
        view: The store.
        word: The id, or its beginning, as typed.
        instance: Only a fanout's copy for this instance, or tasks that it owns; None for any.
        hear_all: Called if no row has exactly that id.

    Raises:
        GracekitError: no task matches, or more than one.
    """
    if not word:
        raise GracekitError("an empty ID names no task; see `gracekit tasks`")
    found = await _rows(view, word, instance, exactly=True)
    if not found:
        live, silent = await _live(view, await hear_all())
        found = [subject for subject in live if subject.request_id == word]
        if not found:
            found = await _rows(view, word, instance)
            found += [subject for subject in live if subject.request_id.startswith(word)]
        if not found:
            raise GracekitError(
                f"no task {_safe(word)} is on record{silent}; see `gracekit tasks --state all`. "
                "A periodic job is no task, and a `requeue` request is known while it runs only"
            )
    if len(found) > 1:
        shown = ", ".join(_name(subject) for subject in found[:LISTED])
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        raise GracekitError(
            f"{_safe(word)} stands for {len(found)} tasks: {shown}{more}; write more of "
            "the ID, and --instance NAME for one copy of a fanout"
        )
    return found[0]


def _name(subject: ChosenTask) -> str:
    return f"{subject}{f' for {_safe(subject.recipient)}' if subject.recipient else ''}"


async def _rows(
    view: StoreView, word: str, instance: str | None, *, exactly: bool = False
) -> list[ChosenTask]:
    if exactly:
        found = await targets_of(view.engine, word)
    else:
        found = await targets_between(view.engine, word, word + _ABOVE_ALL)
    # If a refused request has the same id as a task, the operator means the task.
    found = [target for target in found if target.state is not TaskState.REJECTED] or found
    runs = await view.runs_of({target.owner for target in found if target.owner is not None})
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
        resource=target.shown_resource and ":".join(target.shown_resource),
        state=target.state.value,
        row_id=target.id,
        where=f" on {owner.instance}" if owner else "",
    )


async def _live(view: StoreView, reports: Reports) -> tuple[list[ChosenTask], str]:
    """Tasks without rows from the reports, and words about runs that did not report theirs."""
    runs = await view.runs_of(reports.keys())
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


def _safe(text: str) -> str:
    return escape(text, longest=LONGEST_TEXT)
