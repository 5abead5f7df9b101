"""`gracekit tasks show`: everything that is on record of one task, and what its process says.

Arguments, context and result are not shown, only whether and how much of each is kept: they may
hold what an operator must not see.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from gracekit.cli.options import CommonOptions, common
from gracekit.cli.order_progress import order_words
from gracekit.cli.reach import ControlClient, find_task
from gracekit.cli.records import StoreRecords
from gracekit.cli.text import json_text, progress_words, requested_words, safe
from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.listings.listed_task import resource_in
from gracekit.listings.one_task import TaskRecord, read_task
from gracekit.listings.parked_list import deadline_words
from gracekit.listings.store_view import RunReport
from gracekit.runs.run import Run
from gracekit.telemetry.safe_text import context_words
from gracekit.tracker.task import TaskState

_LONGEST: Final = 2048
_WHY: Final = " (it answered Wait, raised or timed out)"  # the record does not say which
_PARKED: Final = "parked"


@click.command()
@click.argument("task_id", metavar="ID")
@common
def show(options: CommonOptions, /, *, task_id: str) -> None:
    """Show everything that is on record of one task.

    That is when it entered each of its states, its attempts, orders with who gave
    them and why, its failure with the traceback, its cursor, its lease, what is
    still due, and what its process answers. Arguments, context and result are not
    shown.

    ID is a request id or the beginning of one, if no other id begins so.
    """
    with StoreRecords(options.settings) as records:
        record = asyncio.run(_look(records, task_id, options.instance))
    if options.as_json:
        click.echo(json_text(record.as_json()))
    else:
        click.echo("\n".join(_text(record)))


async def _look(records: StoreRecords, word: str, instance: str | None) -> TaskRecord:
    subject = await find_task(records, word, instance)

    async def hear(run: Run) -> RunReport:
        named: Any = {"task_id": subject.request_id, "recipient": subject.recipient}
        return await ControlClient(records).hear(run, **named)

    return await read_task(records, subject, hear)


# -- as text ----------------------------------------------------------------------------


def _text(record: TaskRecord) -> Iterator[str]:
    for name, words in _facts(record):
        if words:
            yield f"{name:<10}{safe(words, longest=_LONGEST)}"
    if history := _history(record):  # a periodic job has none
        yield "history"
    for at, words in history:
        yield f"  {_moment(at)}  {safe(words, longest=_LONGEST)}"
    failure = record.columns["failure"]
    if failure and (failure["tb"] or failure["message"] != record.columns["detail"]):
        yield "last failure"
        yield from _failure(failure)


def _facts(record: TaskRecord) -> Iterator[tuple[str, str]]:
    columns = record.columns
    place = f"{columns['namespace']}." if columns["namespace"] else ""
    yield "task", columns["request_id"] + _said(" for ", columns["recipient"])
    yield "method", f"{place}{columns['method']}" + _said(" version ", columns["version"])
    yield "came by", _said("", columns["queue"]) + _said(" for ", columns["target"])
    yield "resource", resource_in(columns) or ""
    yield "context", context_words(columns["shown_context"])
    sentence = ": ".join(str(columns[name]) for name in ("reason", "detail") if columns[name])
    yield "state", f"{columns['state']}{_said(' cut ', columns['cut'])}{_said(': ', sentence)}"
    yield "waits", _waits(columns)
    yield "policy", _said("", columns["on_interrupt"])
    yield "owner", record.owner or ("nobody" if columns["finished_at"] is None else "")
    if columns["attempts"] is not None:
        budgets = f"failures {columns['failures']}, crashes without progress {columns['crashes']}"
        yield "attempts", f"{columns['attempts']}, {budgets}"
        kept = (f"{name} {size} bytes" for name, size in record.kept.items() if size is not None)
        yield "kept", ", ".join(kept) or "neither arguments, context nor result"
    if columns["progress"] is not None:
        yield "progress", progress_words(columns["progress"])
    if columns["cursor"] is not None:
        yield "cursor", f"{columns['cursor']}, {_ago(columns['cursor_at'])}"
    yield "lease", _lease(record)
    for words in _due(record):
        yield "due", words
    yield "now", _now(record)


def _waits(columns: Mapping[str, Any]) -> str:
    """`for capacity, in 55m, version 1: memory_mb=8192`, of a parked task, or when it is due."""
    if columns["state"] == TaskState.ACCEPTED.value and columns["due_at"] is not None:
        which = "its next try" if columns["attempts"] else "its time"
        return f"for {which}, {deadline_words(columns['due_at'] - time.time())}"
    if columns["state"] != TaskState.PENDING.value:
        return ""
    left_s = (columns["pending_deadline"] or 0.0) - time.time()
    words = f"for capacity, {deadline_words(left_s)}, version {columns['parkings']}"
    return words + _said(": ", requested_words(columns["requested"] or {}))


def _lease(record: TaskRecord) -> str:
    lease, columns = record.lease, record.columns
    mine = _said("; the last attempt of this task had token ", columns["token"])
    if lease is None:
        return ""
    if lease["owner"] is None:
        wait_s = lease["not_before"] - time.time()
        return f"free{f', granted in {duration(wait_s)}' if wait_s > 0 else ''}{mine}"
    whose = "this task" if lease["request_id"] == columns["request_id"] else lease["request_id"]
    since = f"since {_moment(lease['acquired_at'])}, token {lease['token']}"
    return f"held for {whose} {since}{mine if lease['token'] != columns['token'] else ''}"


def _due(record: TaskRecord) -> Iterator[str]:
    columns, now = record.columns, time.time()
    for reply in record.replies:
        until = _said(
            ", its caller waits until ", reply["expires_at"] and _moment(reply["expires_at"])
        )
        when = "with its end" if reply["due_at"] is None else f"since {_moment(reply['due_at'])}"
        yield f"an answer to {reply['queue']} {when}{until}"
    if columns["errored_due"]:
        called = "is being called" if columns["calling"] else "has still to be called"
        died = _said("; processes that ended while it ran: ", columns["hook_crashes"])
        yield f"its errored hook, which {called}{died}"
    if columns["finished_at"] is None:
        if columns["ordered"]:
            yield f"{order_words(columns['ordered'])}, when its handler or its process has ended"
        if record.orphaned:
            yield "to be taken over by a run"  # only then is known until when it settles
            return
        for name, what in (("not_before", "it settles"), ("next_check", f"its probe waits{_WHY}")):
            if (columns[name] or 0) > now:
                yield f"{what} until {_moment(columns[name])}"
        if columns["probing"]:
            yield "its probe is being asked"


def _now(record: TaskRecord) -> str:
    if record.reports.brief:
        return f"its process says nothing: {record.reports.why or record.reports.brief}"
    if (live := record.live) is None:
        return ""
    expected = live.get("expected_s")
    words = [f"{live.get('state')} for {duration(live.get('age_s'))}"]
    words += [f"expected to end in {duration(expected)}"] if expected is not None else []
    words += [f"cancelled: {live['cancelled_by']}"] if live.get("cancelled_by") else []
    return ", ".join(words)


def _history(record: TaskRecord) -> list[tuple[float, str]]:
    """The last moment of each state, and incidents, in order of time."""
    columns = record.columns
    states = [
        (columns["accepted_at"], "accepted"),
        (columns["started_at"], f"running: attempt {columns['attempts']}"),
        (columns["waiting_since"], _waited(columns)),
        (columns["finished_at"], str(columns["state"])),
    ]
    seen = list(_incidents(record))
    if not any(one["what"] == _PARKED for one in record.incidents):  # removed before the task was
        seen.append((columns["parked_at"], f"parked as version {columns['parkings']}"))
    return sorted(((at, words) for at, words in states + seen if at is not None), key=_at)


def _waited(columns: Mapping[str, Any]) -> str:
    """What `waiting_since` means in a row of that state."""
    if columns["state"] == TaskState.ACCEPTED.value:
        return "last asked for a lease that is held elsewhere"
    return f"its probe gave no decision{_WHY}, and is asked again"


def _incidents(record: TaskRecord) -> Iterator[tuple[float, str]]:
    """The oldest first; each parking with its version."""
    newest = record.columns["parkings"] or 0
    number = sum(one["what"] == _PARKED for one in record.incidents)
    versions = itertools.count(newest - number + 1)
    for one in record.incidents:
        version = f" as version {next(versions)}" if one["what"] == _PARKED else ""
        yield one["at"], f"{one['what']}{version}: {one['detail']}"


def _at(line: tuple[float, str]) -> float:
    return line[0]


def _failure(failure: dict[str, Any]) -> Iterator[str]:
    """Class, message and traceback, indented so that no line looks like one of gracekit."""
    words = f"{failure['module']}.{failure['exc_class']}: {failure['message']}"
    yield f"  {safe(words, longest=_LONGEST)}"
    trace = "".join(failure["tb"])
    if trace.strip() == words.strip():  # it was not raised, so there is nothing more
        return
    for line in trace.splitlines():
        yield f"  {safe(line, longest=_LONGEST)}" if line.strip() else ""


def _said(before: str, value: object) -> str:
    return f"{before}{value}" if value else ""


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _ago(at: float | None) -> str:
    return "-" if at is None else f"{duration(age_s(time.time(), at))} ago"
