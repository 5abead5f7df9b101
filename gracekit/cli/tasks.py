"""`gracekit tasks`: rows of the journal, joined with what living processes say."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click

from gracekit.cli.main import HintingGroup, tell
from gracekit.cli.options import CommonOptions, common, limit_option
from gracekit.cli.order_progress import order_words
from gracekit.cli.reach import ControlClient
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import cancel, fail, retry
from gracekit.cli.task_show import show
from gracekit.cli.text import LONGEST_WHY, json_text, progress_words, safe, table
from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.listings.listed_task import ListedTask, short_id
from gracekit.listings.parked_list import deadline_words
from gracekit.listings.task_list import ALL_STATES, TaskList, TaskQuery, list_tasks
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.telemetry.safe_text import context_words
from gracekit.tracker.task import Lane, TaskState

_HEADERS: Final = (
    "TASK", "METHOD", "RESOURCE", "STATE", "AGE", "EXPECTED", "ATTEMPTS", "OWNER",
    "LAST SAFE POINT",
)  # fmt: skip
_WITHOUT_ROW: Final = {
    "rule ": "rule of a kind, takes no orders",
    "probe of ": "probe of a method, takes no orders",
    "errored hook of ": "hook of a method, takes no orders",
    "": "work of a handler, takes no orders",
}
"""By the beginning of its name: what runs on the lane of background work."""
_LONGEST_TEXT: Final = 100
_LONGEST_CURSOR: Final = 24


@click.group(cls=HintingGroup, invoke_without_command=True)
@click.option(
    "--resource",
    metavar="[KIND:]ID",
    help="Tasks of this resource. `KIND:` alone lists those of a kind.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([ALL_STATES, *(state.value for state in TaskState)]),
    help="Tasks in this state; may be repeated.  [default: those that have not ended]",
)
@click.option("--stuck", is_flag=True, help="Only tasks that make no progress, and why.")
@limit_option()
@common
def tasks(
    options: CommonOptions,
    /,
    *,
    resource: str | None,
    states: tuple[str, ...],
    stuck: bool,
    limit: int,
) -> None:
    """List tasks: by default those that have not ended, newest first.

    AGE is the time since the task has ended; before that, since it last began to
    run, or was accepted. OWNER is the instance that may act on the task: "none"
    waits for any living run, "gone" for the next start. A parked task waits for
    capacity (`gracekit pending`): it has no owner, and AGE is since its parking.
    `gracekit tasks show` says when a task was handed over.

    --stuck lists tasks that have run for three times the p95 of their method
    without a safe point (10 minutes without a history), have not begun for 10
    minutes, or were handed over 10 minutes ago and taken by no run. WHY LISTED
    says which, and what it waits for. Parked tasks and waiting probes are not stuck.

    `show` prints all that is on record of one task; `cancel`, `fail` and `retry`
    act on it.

    Exit status: 0; with --instance, 4 if no run of that name is on record.
    """
    query = TaskQuery(
        name=options.instance,
        resource=resource,
        states=states,
        stuck=stuck,
        limit=limit,
    )
    with StoreRecords(options.settings) as records:
        found = asyncio.run(_look(records, query))
    click.echo(json_text(found.as_json()) if options.as_json else _text(found, query))
    for sentence in () if options.as_json else (*_not_heard(found), *_perhaps_a_kind(found, query)):
        tell(sentence, prefix="")


for _verb in (show, cancel, fail, retry):
    tasks.add_command(_verb)


async def _look(records: StoreRecords, query: TaskQuery) -> TaskList:
    reports = await ControlClient(records).hear_all(records, query.name, every_task=True)
    await records.need(query.name)
    return await list_tasks(records, reports, query)


def _text(found: TaskList, query: TaskQuery) -> str:
    headers: tuple[str, ...] = (*_HEADERS, "WHY LISTED" if query.stuck else "REASON", "CONTEXT")
    nothing = "no task is stuck" if query.stuck else "no tasks"
    rows = _rows(found.tasks)
    if not any(row[-1] for row in rows):  # the service copies nothing of contexts
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    text = table(headers, rows) if rows else nothing
    return (
        f"{text}\nthere are more than {query.limit}: a larger --limit shows them"
        if found.more
        else text
    )


def _not_heard(found: TaskList) -> list[str]:
    return [
        f"what {safe(name)} runs that is not in the store (requeue requests, periodic jobs, hooks) "
        f"is not listed: {safe(why, longest=LONGEST_WHY)}"
        for name, why in found.not_heard.items()
    ]


def _perhaps_a_kind(found: TaskList, query: TaskQuery) -> Iterator[str]:
    """Say how to list a kind, if its name may have been taken for an id."""
    if not found.tasks and query.resource and ":" not in query.resource:
        word = safe(query.resource)
        yield f"if {word} is a kind of resources, write --resource {word}:"


def _rows(entries: Sequence[ListedTask]) -> list[tuple[object, ...]]:
    """The rows of the table.

    Ids are shown in a short form, for a user to copy. If two have the same short form, both are
    shown whole.
    """
    whole = {entry.shown_id for entry in entries}
    known = Counter(map(short_id, whole))
    return [_row(entry, known) for entry in entries]


def _row(entry: ListedTask, known: Mapping[str, int]) -> tuple[object, ...]:
    columns = entry.columns
    short = short_id(entry.shown_id)
    return (
        short if known[short] == 1 else safe(entry.shown_id, longest=MAX_NAME),
        columns["method"],
        entry.resource,
        columns["state"],
        duration(entry.age_s),
        _expected(entry),
        columns["attempts"],
        _owner(entry),
        _safe_point(columns),
        entry.why_listed or _reason(entry),
        context_words(columns["shown_context"]),
    )


def _expected(entry: ListedTask) -> str:
    """`in 12s`: when its method's history expects it to end."""
    seconds = entry.live.get("expected_s") if entry.live else None
    return "-" if seconds is None else f"in {duration(seconds)}"


def _owner(entry: ListedTask) -> str:
    if entry.orphaned:
        return f"{entry.owner} (gone)"
    if entry.doubtful:
        return f"{entry.owner} (not proven)"
    if entry.is_ownerless:
        return "none"
    return entry.owner or "-"


def _safe_point(columns: Mapping[str, Any]) -> str:
    """`41 of 100 copying, 12s ago`, or `cursor 41, 12s ago`."""
    if columns["progress"] is not None:
        return safe(progress_words(columns["progress"]), longest=_LONGEST_TEXT)
    if columns["cursor"] is None:
        return "-"
    words = f"cursor {safe(columns['cursor'], longest=_LONGEST_CURSOR)}"
    if columns["cursor_at"] is None:
        return words
    return f"{words}, {duration(age_s(time.time(), columns['cursor_at']))} ago"


def _reason(entry: ListedTask) -> str:
    columns = entry.columns
    if not entry.journaled:
        return _without_row(str(columns["lane"]), str(columns["method"]))
    if entry.is_transient and (order := columns["ordered"]):
        return safe(order_words(order), longest=_LONGEST_TEXT)
    if columns["state"] == TaskState.HANDED_OVER.value and columns["cut"]:
        return f"cut: {columns['cut']}{_wait_of_cut(entry)}"
    if entry.is_parked:
        when = deadline_words((columns["pending_deadline"] or 0.0) - time.time())
        why = f": {columns['detail']}" if columns["detail"] else ""
        return safe(f"waits for capacity, {when}{why}", longest=_LONGEST_TEXT)
    reason, detail = columns["reason"] or "", str(columns["detail"] or "")
    # The sentence on record begins with the task and its reason, which are other columns here.
    detail = detail.partition(f" ERRORED({reason}): ")[2] or detail
    if columns["due_at"] is not None and entry.is_transient:
        reason, detail = f"waits for {entry.waits_for}", str(columns["detail"] or "")
    words = ": ".join(filter(None, (reason, detail)))
    words = words or entry.apart or (f"waits for {entry.waits_for}" if entry.waits_for else "")
    return safe(words, longest=_LONGEST_TEXT)


def _wait_of_cut(entry: ListedTask) -> str:
    """What a handed-over task waits for: its settle time, or the next try to settle it."""
    columns = entry.columns
    if entry.orphaned:  # only then is known from when its settle time counts
        return ", waits until a run takes it over"
    settle_s, again_s = (
        (columns[name] or 0.0) - time.time() for name in ("not_before", "next_check")
    )
    if settle_s > 0:
        return f", left for {duration(settle_s)}"
    # Almost always after a probe; after an error of the store it may be a task without one.
    return f", its probe waits: recovery asks again in {duration(again_s)}" if again_s > 0 else ""


def _without_row(lane: str, method: str) -> str:
    if lane == Lane.PERIODIC.value:
        return "periodic job, takes no orders"
    if lane != Lane.BACKGROUND.value:
        return "not journaled"
    return next(words for begin, words in _WITHOUT_ROW.items() if method.startswith(begin))
