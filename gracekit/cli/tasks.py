"""`gracekit tasks`: rows of the journal, joined with what living processes say."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from gracekit.cli import listings_sql as sql
from gracekit.cli.main import tell
from gracekit.cli.options import (
    CommonOptions,
    HintingGroup,
    common,
    refuse_options_before_the_verb,
)
from gracekit.cli.reach import ControlClient, RunAnswer
from gracekit.cli.records import StoreRecords, is_named, label
from gracekit.cli.status import LONGEST_WHY
from gracekit.cli.task_orders import cancel, fail, retry
from gracekit.cli.task_show import show
from gracekit.cli.text import duration, json_text, safe, table
from gracekit.clock import age_s
from gracekit.errors import DependencyError
from gracekit.life import Alive, Liveness
from gracekit.request.suspects import SUSPECTED
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.runs.run import Run
from gracekit.store.batch import Row, Value
from gracekit.tracker.task import TRANSIENT, Lane, TaskState

_HEADERS: Final = (
    "TASK", "METHOD", "RESOURCE", "STATE", "AGE", "EXPECTED", "ATTEMPTS", "OWNER",
    "LAST SAFE POINT", "REASON",
)  # fmt: skip
# No arguments, context, result or failure: they may hold what an operator must not see.
_WITHOUT_ROW: Final = {
    Lane.PERIODIC.value: "periodic job, takes no orders",
    Lane.BACKGROUND.value: "work of a handler, takes no orders",
}
_SHORT_ID: Final = 12
_MOST: Final = 1_000_000
_HEX_ID: Final = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")
_LONGEST_ID: Final = 40
_LONGEST_TEXT: Final = 60
_LONGEST_CURSOR: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTask:
    """One task in the list.

    Attributes:
        columns: As in the journal; of a task without a row, as its process says.
        owner: Instance that may act on it; None for nobody.
        orphaned: Whether its owner is proven dead.
        doubtful: Whether its owner is neither proven dead nor alive.
        live: What its process says of it; None if it does not, or does not answer.
        journaled: Whether it has a row.
        apart: Why it runs apart, or waits for what does; else empty.
    """

    columns: Mapping[str, Any]
    owner: str | None
    orphaned: bool
    doubtful: bool
    live: RunAnswer | None
    journaled: bool = True
    apart: str = ""

    @property
    def age_s(self) -> float:
        """Seconds since it has ended, else since its last start, else since it was accepted."""
        if self.live is not None and (not self.journaled or self._runs_here()):
            return float(self.live.get("age_s") or 0.0)
        column = self.columns
        since = column["finished_at"] or column["started_at"] or column["accepted_at"]
        return age_s(time.time(), since)

    def _runs_here(self) -> bool:
        # What only waits there may have been accepted by an earlier process: its row knows.
        return self.live is not None and self.live.get("state") == TaskState.RUNNING.value

    @property
    def resource(self) -> str | None:
        """`kind:id`."""
        kind = self.columns.get("resource_kind")
        return None if kind is None else f"{kind}:{self.columns['resource_id']}"

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            **self.columns,
            "resource": self.resource,
            "owner_run": self.columns.get("owner"),
            "owner": self.owner,
            "orphaned": self.orphaned,
            "owner_not_proven": self.doubtful,
            "ownerless": self.journaled and self.is_transient and self.owner is None,
            "journaled": self.journaled,
            "age_s": round(self.age_s, 1),
            "live": self.live is not None,
            "expected_s": self.live and self.live.get("expected_s"),
            "apart": self.apart,
        }

    @property
    def is_transient(self) -> bool:
        """Whether it still has to end."""
        return TaskState(self.columns["state"]) in TRANSIENT


@click.group(cls=HintingGroup, invoke_without_command=True)
@click.option("--resource", metavar="[KIND:]ID", help="Tasks of this resource.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["all", *(state.value for state in TaskState)]),
    help="Tasks in this state; may be repeated.  [default: those that have not ended]",
)
@click.option(
    "--limit", type=click.IntRange(1, _MOST), default=50, show_default=True, help="At most so many."
)
@common
def tasks(
    options: CommonOptions, /, *, resource: str | None, states: tuple[str, ...], limit: int
) -> None:
    """List tasks: those that have not ended, newest first, or as the options say.

    AGE is the time since the task has ended; until then since it last began to
    run, or since it was accepted if it has not begun. When a task was handed over is
    told by `gracekit tasks show`. OWNER is the instance that may act on a task: "none" waits
    for any living run, "gone" for the next start.

    `show` tells all that is on record of one task; `cancel`, `fail` and `retry`
    act on it.

    Exit status: 0; with --instance 4 if no run of that name is on record.
    """
    if click.get_current_context().invoked_subcommand is not None:
        refuse_options_before_the_verb()
        return
    with StoreRecords(options.settings) as records:
        entries, more, silent = asyncio.run(
            _look(records, options.instance, resource=resource, states=states, limit=limit)
        )
    if options.as_json:
        listed = [entry.as_json() for entry in entries]
        click.echo(json_text({"tasks": listed, "more": more, "not_heard": silent}))
        return
    click.echo(table(_HEADERS, _rows(entries)) if entries else "no tasks")
    if more:
        click.echo(f"and more; --limit shows above {limit}")
    for name, why in silent.items():
        words = safe(why, longest=LONGEST_WHY)
        tell(f"what {safe(name)} runs without a row is not listed: {words}", prefix="")


for _verb in (show, cancel, fail, retry):
    tasks.add_command(_verb)


async def _look(
    records: StoreRecords,
    name: str | None,
    *,
    resource: str | None,
    states: Sequence[str],
    limit: int,
) -> tuple[list[ListedTask], bool, dict[str, str]]:
    """What is listed, whether there is more, and which living runs told nothing, and why."""
    async with ControlClient(records.run_directory) as control:
        reports = await control.hear_all(records, name, every_task=True)
    runs = {run.run_id: run for run in await records.runs()}
    judged = {run_id: records.judge(run) for run_id, run in runs.items()}
    owners = [run for run in runs.values() if name is not None and is_named(run, name)]
    if name is not None and not owners:
        raise DependencyError(await records.what_is_known(name))
    text, params = _query(resource, states, owners)
    rows = await records.engine.query(text, *params, limit + 1)
    live = {
        (run_id, str(task.get("task_id"))): task
        for run_id, said in reports.items()
        for task in said.tasks
    }
    apart = {str(owner): str(task) for owner, task in await records.engine.query(sql.APART)}
    entries = [_entry(row, runs, judged, live, apart) for row in rows[:limit]]
    if not states or TaskState.RUNNING.value in states or "all" in states:
        entries += await _unjournaled(records, runs, live, resource)
    silent = {label(runs[i]): said.why or said.brief for i, said in reports.items() if said.brief}
    return entries[:limit], len(rows) > limit or len(entries) > limit, silent


def _query(
    resource: str | None, states: Sequence[str], owners: Sequence[Run]
) -> tuple[str, list[Value]]:
    """The SQL without its limit's value, and its parameters."""
    where, params, text = ["1 = 1"], list[Value](), sql.TASKS
    if "all" not in states:
        wanted = list(states) or sorted(state.value for state in TRANSIENT)
        where.append(f"state IN ({_marks(wanted)})")
        if all(TaskState(state) in TRANSIENT for state in wanted):
            text = sql.OPEN_TASKS
        params += wanted
    if resource is not None:
        kind, separator, key = resource.partition(":")
        # An id may itself hold a colon, so the whole word is tried as an id too.
        pair = " OR (resource_kind = ? AND resource_id = ?)" if separator else ""
        where.append(f"(resource_id = ?{pair})")
        params += [resource, kind, key] if separator else [resource]
    if owners:
        where.append(f"owner IN ({_marks(owners)})")
        params += [run.run_id for run in owners]
    return text.format(where=" AND ".join(where)), params


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _entry(
    row: Row,
    runs: Mapping[str, Run],
    judged: Mapping[str, Liveness],
    live: Mapping[tuple[str, str], RunAnswer],
    apart: Mapping[str, str],
) -> ListedTask:
    columns = dict(zip(sql.TASK_NAMES, row, strict=True))
    run_id = None if columns["owner"] is None else str(columns["owner"])
    is_transient = TaskState(str(columns["state"])) in TRANSIENT
    owner = runs.get(run_id or "")
    judgement = judged.get(run_id or "")
    is_owned = is_transient and run_id is not None
    found = live.get((run_id or "", str(columns["request_id"]))) if is_transient else None
    return ListedTask(
        columns=columns,
        owner=owner.instance if owner else run_id,
        orphaned=is_owned and (judgement is None or judgement.is_dead),
        doubtful=is_owned and judgement is not None and judgement.answer is Alive.NOT_PROVEN,
        live=found,
        apart=_apart(columns, apart),
    )


def _apart(columns: Mapping[str, Any], apart: Mapping[str, str]) -> str:
    """Why a task runs apart or waits for one that does, by what is on record."""
    state, crashes = columns["state"], int(columns["crashes"] or 0)
    died = f"processes died around it, {crashes} times"
    if state == TaskState.RUNNING.value and columns["alone"] == 1:
        return f"runs apart: {died}"
    if state != TaskState.ACCEPTED.value or columns["owner"] is None:
        return ""
    if crashes >= SUSPECTED:
        return f"waits to run apart: {died}"
    other = apart.get(str(columns["owner"]))
    return f"waits: {_short_id(other)} runs apart" if other else ""


async def _unjournaled(
    records: StoreRecords,
    runs: Mapping[str, Run],
    live: Mapping[tuple[str, str], RunAnswer],
    resource: str | None,
) -> list[ListedTask]:
    """What processes run without a row: `requeue`, periodic and background work."""
    entries = []
    for (run_id, request_id), task in live.items():
        if task.get("journaled"):
            continue
        if await records.engine.query(sql.HAS_ROW, request_id):
            continue  # of a run of an older gracekit, which does not say whether it has a row
        kind, _, key = str(task.get("resource") or "").partition(":")
        if resource is not None and resource not in {key, f"{kind}:{key}"}:
            continue
        columns = dict[str, Any].fromkeys(sql.TASK_NAMES) | {
            "request_id": request_id,
            "method": task.get("method"),
            "lane": task.get("lane"),
            "state": task.get("state"),
            "attempts": task.get("attempt"),
            "resource_kind": kind or None,
            "resource_id": key or None,
            "owner": run_id,
        }
        entry = ListedTask(
            columns=columns,
            owner=runs[run_id].instance,
            orphaned=False,
            doubtful=False,
            live=task,
            journaled=False,
        )
        entries.append(entry)
    return entries


def _rows(entries: Sequence[ListedTask]) -> list[tuple[object, ...]]:
    """An id whose short form another one has too is shown whole: it is to be copied."""
    whole = {str(entry.columns["request_id"]) for entry in entries}
    known = Counter(map(_short_id, whole))
    return [_row(entry, known) for entry in entries]


def _row(entry: ListedTask, known: Mapping[str, int]) -> tuple[object, ...]:
    columns = entry.columns
    request_id = str(columns["request_id"])
    short = _short_id(request_id)
    return (
        short if known[short] == 1 else safe(request_id, longest=MAX_NAME),
        columns["method"],
        entry.resource,
        columns["state"],
        duration(entry.age_s),
        _expected(entry),
        columns["attempts"],
        _owner(entry),
        _safe_point(columns),
        _reason(entry),
    )


def _short_id(request_id: str) -> str:
    """Random ids are known by their beginning; those that callers chose are not."""
    if _HEX_ID.fullmatch(request_id):
        return request_id[:_SHORT_ID]
    return safe(request_id, longest=_LONGEST_ID)


def _expected(entry: ListedTask) -> str:
    """`in 12s`: when its method's history expects it to end."""
    seconds = entry.live.get("expected_s") if entry.live else None
    return "-" if seconds is None else f"in {duration(seconds)}"


def _owner(entry: ListedTask) -> str:
    if entry.orphaned:
        return f"{entry.owner} (gone)"
    if entry.doubtful:
        return f"{entry.owner} (not proven)"
    if entry.owner is None and entry.is_transient:
        return "none"
    return entry.owner or "-"


def _safe_point(columns: Mapping[str, Any]) -> str:
    """`cursor 41, 12s ago`."""
    if columns["cursor"] is None:
        return "-"
    words = f"cursor {safe(columns['cursor'], longest=_LONGEST_CURSOR)}"
    if columns["cursor_at"] is None:
        return words
    return f"{words}, {duration(age_s(time.time(), columns['cursor_at']))} ago"


def _reason(entry: ListedTask) -> str:
    columns = entry.columns
    if not entry.journaled:
        return _WITHOUT_ROW.get(str(columns["lane"]), "not journaled")
    if columns["state"] == TaskState.HANDED_OVER.value and columns["cut"]:
        wait_s = (columns["not_before"] or 0.0) - time.time()
        return f"cut: {columns['cut']}" + (f", left for {duration(wait_s)}" if wait_s > 0 else "")
    words = ": ".join(str(columns[name]) for name in ("reason", "detail") if columns[name])
    words = words or entry.apart
    return safe(words, longest=_LONGEST_TEXT)
