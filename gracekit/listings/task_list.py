"""Lists tasks: rows of the journal, joined with the reports of living processes.

Arguments, context, result and failure are left out, because they may hold secrets.

For `--stuck`, a running task is stuck if it is slow compared with the history of its method,
measured since its last safe point or its start. Without a history, or if no run works on it, a
fixed time decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.journal.rows import from_json
from gracekit.journal.tasks_sql import SHOWN_ID, SHOWN_KIND
from gracekit.life import Alive, Liveness
from gracekit.listings import listings_sql as sql
from gracekit.listings.listed_task import ListedTask, short_id
from gracekit.listings.store_view import API_VERSION, Reports, StoreView, label
from gracekit.runs.pages import is_known, named
from gracekit.runs.run import Run
from gracekit.store.batch import Row, Value
from gracekit.tracker.task import SUSPECTED, TRANSIENT, TaskState
from gracekit.tracker.tracker import ELSEWHERE

ALL_STATES: Final = "all"
_ALL: Final = 1_000_000
_OWNER: Final = sql.TASK_NAMES.index("owner")
_LEASE_OWNER: Final = 1
"""Its place in a row of `LEASE`."""


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks are listed.

    Attributes:
        name: INSTANCE or SERVICE@INSTANCE that owns them; None for all tasks.
        resource: `kind:id`, or only the id, or `kind:` for each of a kind; None for any.
        states: Values of `TaskState`, or `ALL_STATES`; empty for tasks that have not ended.
        stuck: Whether to list only tasks that count as stuck (`why_stuck`).
        limit: How many at most.
    """

    name: str | None = None
    resource: str | None = None
    states: Sequence[str] = ()
    stuck: bool = False
    limit: int = 50


class TaskList(msgspec.Struct, frozen=True, kw_only=True):
    """The listed tasks.

    Attributes:
        tasks: The newest first; tasks without a row last.
        more: Whether there are more than the limit.
        not_heard: Living runs that did not report all of their tasks, each with the reason.
    """

    tasks: Sequence[ListedTask]
    more: bool
    not_heard: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "api_version": API_VERSION,
            "tasks": [task.as_json() for task in self.tasks],
            "more": self.more,
            "not_heard": dict(self.not_heard),
        }


async def list_tasks(view: StoreView, reports: Reports, query: TaskQuery) -> TaskList:
    """The tasks of *query*.

    Args:
        view: The store.
        reports: Reports of living runs, with every task that they have in flight.
        query: Selects the tasks; the result is empty if no run has its name.
    """
    return await _Listing(view, reports).of(query)


class _Listing:
    """Reads the tasks of a store once, and of its runs those that have to do with them."""

    def __init__(self, view: StoreView, reports: Reports) -> None:
        self._view = view
        self._reports = reports
        self._runs: dict[str, Run] = {}
        self._judged: dict[str, Liveness] = {}
        self._now = view.clock.wall()
        self._live = {
            (run_id, str(task.get("task_id"))): task
            for run_id, said in reports.items()
            for task in said.tasks
        }

    async def of(self, query: TaskQuery) -> TaskList:
        """See `list_tasks`."""
        if query.name is not None and not await is_known(self._view.engine, query.name):
            return TaskList(tasks=[], more=False, not_heard={})
        text, params = _query(query)
        rows = await self._view.engine.query(text, *params)
        await self._know({*self._reports, *(row[_OWNER] for row in rows)})
        found = await self._view.engine.query(sql.APART)
        apart = {str(owner): str(task) for owner, task in found}
        entries = [self._entry(row, apart) for row in rows]
        if not query.states or {TaskState.RUNNING.value, ALL_STATES} & {*query.states}:
            entries += self._unjournaled(query.resource)
        if query.stuck:
            entries = await self._stuck(entries)
        return TaskList(
            tasks=[await self._with_holder(entry) for entry in entries[: query.limit]],
            more=len(entries) > query.limit,
            not_heard={
                label(self._runs[run_id]): said.why or said.brief
                for run_id, said in self._reports.items()
                if said.brief
            },
        )

    async def _know(self, run_ids: Iterable[Value]) -> None:
        """Read and judge the runs with these ids that are not known yet."""
        missing = {str(run_id) for run_id in run_ids if run_id is not None} - self._runs.keys()
        if missing:
            found = await self._view.runs_of(missing)
            self._runs |= found
            self._judged |= {run_id: self._view.judge(run) for run_id, run in found.items()}

    async def _stuck(self, entries: Sequence[ListedTask]) -> list[ListedTask]:
        since = self._now - UNTOUCHED_S
        lately = await self._view.engine.query(sql.HANDED_OVER_SINCE, since)
        recent = {str(request_id) for (request_id,) in lately}
        judged = ((entry, why_stuck(entry, recent=recent)) for entry in entries)
        return [
            msgspec.structs.replace(entry, why_listed=why)
            for entry, why in judged
            if why is not None
        ]

    async def _with_holder(self, entry: ListedTask) -> ListedTask:
        """Add the holder of the lease that a task waits for, from the store.

        The task's own run does not know the holder if another run has the lease; and the task may
        have no run at all.
        """
        columns, said = entry.columns, entry.waits_for
        is_waiting = entry.waits_on_record if said is None else said.endswith(ELSEWHERE)
        if not is_waiting:
            return entry
        key = (columns["resource_kind"], columns["resource_id"])
        for row in await self._view.engine.query(sql.LEASE, *key):
            await self._know({row[_LEASE_OWNER]})
            if (holder := self._holder(columns, row)) is not None:
                words = f"lease {entry.resource} {holder}"
                why = entry.why_listed
                if why is not None:
                    why = why.replace(said, words) if said else f"{why}; waits for {words}"
                return msgspec.structs.replace(entry, waits_for=words, why_listed=why)
        return entry

    def _holder(self, columns: Mapping[str, Any], lease: Row) -> str | None:
        """Words about the holder in a row of `LEASE`; None if the task may take the lease."""
        _, owner, request_id, _, not_before = lease
        if owner is None:
            left_s = float(not_before or 0.0) - self._now
            if left_s <= 0:
                return None
            return f"that no task gets for another {duration(left_s)}, because a process died"
        if request_id == columns["request_id"]:
            return None
        holder = f"held by task {short_id(str(request_id))}"
        if (run := self._runs.get(str(owner))) is None:
            return holder
        is_dead = self._judged[run.run_id].is_dead
        return f"{holder} on {run.instance}" + (", which has ended" if is_dead else "")

    def _entry(self, row: Row, apart: Mapping[str, str]) -> ListedTask:
        columns: dict[str, Any] = dict(zip(sql.TASK_NAMES, row, strict=True))
        columns["ordered"] = from_json(columns["ordered"])
        columns["progress"] = from_json(columns["progress"])
        columns["shown_context"] = from_json(columns["shown_context"])
        run_id = None if columns["owner"] is None else str(columns["owner"])
        is_transient = TaskState(str(columns["state"])) in TRANSIENT
        owner = self._runs.get(run_id or "")
        judgement = self._judged.get(run_id or "")
        is_owned = is_transient and run_id is not None
        key = (run_id or "", str(columns["request_id"]))
        live = self._live.get(key) if is_transient else None
        return ListedTask(
            columns=columns,
            owner=owner.instance if owner else run_id,
            orphaned=is_owned and (judgement is None or judgement.is_dead),
            doubtful=is_owned and judgement is not None and judgement.answer is Alive.NOT_PROVEN,
            live=live,
            now=self._now,
            apart=_apart(columns, apart),
            waits_for=_due_words(columns, self._now) if live is None else live.get("waits_for"),
        )

    def _unjournaled(self, resource: str | None) -> list[ListedTask]:
        """Tasks without a row: `requeue`, periodic and background work, from the reports."""
        entries = []
        for (run_id, request_id), task in self._live.items():
            if task["journaled"]:
                continue
            kind, _, key = str(task.get("resource") or "").partition(":")
            if resource is not None and resource not in {key, f"{kind}:{key}", f"{kind}:"}:
                continue
            columns = dict[str, Any].fromkeys(sql.TASK_NAMES) | {
                "request_id": request_id,
                "method": task.get("method"),
                "lane": task.get("lane"),
                "state": task.get("state"),
                "attempts": task.get("attempt"),
                "resource_kind": kind or None,
                "resource_id": key or None,
                "shown_context": task.get("shown_context"),
                "owner": run_id,
            }
            entry = ListedTask(
                columns=columns,
                owner=self._runs[run_id].instance,
                orphaned=False,
                doubtful=False,
                live=task,
                now=self._now,
                journaled=False,
                waits_for=task.get("waits_for"),
            )
            entries.append(entry)
        return entries


def _due_words(columns: Mapping[str, Any], now: float) -> str | None:
    """What a task waits for that may not begin yet; None if it may."""
    if columns["due_at"] is None or columns["finished_at"] is not None:
        return None
    which = f"try {columns['attempts'] + 1}" if columns["attempts"] else "its time"
    return f"{which}, in {duration(max(0.0, columns['due_at'] - now))}"


def _query(query: TaskQuery) -> tuple[str, list[Value]]:
    """The SQL and its parameters."""
    where, params = _condition(query)
    limit = 1 + (_ALL if query.stuck else query.limit)
    if ALL_STATES in query.states:
        return sql.TASKS.format(where=where), [*params, limit]
    wanted = _wanted(query)
    if all(TaskState(state) in TRANSIENT for state in wanted):
        text, is_wanted = sql.OPEN_TASKS, f"state IN ({_marks(wanted)})" if wanted else "1 = 0"
    elif TaskState.SUCCEEDED.value in wanted:  # most of a long record, so the newest rows have some
        text, is_wanted = sql.TASKS, f"state IN ({_marks(wanted)})"
    else:
        return _of_few_states(wanted, where, params, limit)
    return text.format(where=f"{is_wanted} AND {where}"), [*wanted, *params, limit]


def _of_few_states(
    wanted: Sequence[str], where: str, params: Sequence[Value], limit: int
) -> tuple[str, list[Value]]:
    """The same for states that a long record has few rows of: the newest of each."""
    ids, values = [], list[Value]()
    for state in wanted:
        text = sql.OPEN_IDS if TaskState(state) in TRANSIENT else sql.UNSUCCESSFUL_IDS
        ids.append(text.format(where=where))
        values += [state, *params, limit]
    return sql.TASKS_OF_IDS.format(ids=" UNION ALL ".join(ids)), [*values, limit]


def _condition(query: TaskQuery) -> tuple[str, list[Value]]:
    """The condition for the owner and the resource of *query*, with its parameters."""
    where, params = ["1 = 1"], list[Value]()
    if query.name is not None:
        condition, names = named(query.name)
        where.append(sql.OWNED_BY.format(where=condition))
        params += names
    resource = query.resource
    if resource is not None:
        kind, separator, key = resource.partition(":")
        # An id may contain a colon, so also try the whole word as an id.
        pair = f" OR ({SHOWN_KIND} = ?{f' AND {SHOWN_ID} = ?' if key else ''})" if separator else ""
        where.append(f"({SHOWN_ID} = ?{pair})")
        params += [resource, *([kind] if separator else []), *([key] if key else [])]
    return " AND ".join(where), params


def _wanted(query: TaskQuery) -> list[str]:
    """The states in the journal that correspond to the query."""
    wanted = {*query.states} or {state.value for state in TRANSIENT}
    if query.stuck:  # a parked task is never stuck, and there may be very many
        wanted.discard(TaskState.PENDING.value)
    return sorted(wanted)


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _apart(columns: Mapping[str, Any], apart: Mapping[str, str]) -> str:
    """Why a task runs alone, or waits for one that does, from its row; empty otherwise."""
    state, crashes = columns["state"], int(columns["crashes"] or 0)
    died = f"processes died around it, {crashes} times"
    if state == TaskState.RUNNING.value and columns["alone"] == 1:
        return f"runs apart: {died}"
    if state != TaskState.ACCEPTED.value or columns["owner"] is None:
        return ""
    if crashes >= SUSPECTED:
        return f"waits to run apart: {died}"
    other = apart.get(str(columns["owner"]))
    return f"waits: {short_id(other)} runs apart" if other else ""


TIMES_P95: Final = 3.0
"""A running task is stuck after this many times the p95 of its method."""
SHORTEST_S: Final = 1.0
"""A task with a history is not stuck before this many seconds, as it would end before you look."""
UNTOUCHED_S: Final = 600.0
"""Seconds after which a task is stuck that runs without a history, or that no run takes."""
_NOBODY: Final = "not taken by any run"


def why_stuck(task: ListedTask, *, recent: Collection[str]) -> str | None:
    """Why *task* counts as stuck; None if it does not.

    Args:
        task: Any task.
        recent: Request ids of tasks that were handed over less than `UNTOUCHED_S` ago.
    """
    # A parked task has its own deadline, and one that is not due waits for its time.
    if not task.is_transient or task.is_parked or task.columns["due_at"] is not None:
        return None
    state = TaskState(task.columns["state"])
    if state is TaskState.RUNNING and not task.orphaned:
        why = _running(task)
    elif state is TaskState.HANDED_OVER:
        why = _handed_over(task, recent)
    else:
        why = _waiting(task)
    if why is None or task.waits_for is None:
        return why
    return f"{why}; waits for {task.waits_for}"


def _running(task: ListedTask) -> str | None:
    since_safe_point = task.safe_point_age_s
    idle_s = task.age_s if since_safe_point is None else min(task.age_s, since_safe_point)
    p95_s = task.said("p95_s")
    if p95_s is not None and idle_s >= max(SHORTEST_S, TIMES_P95 * p95_s):
        why = f"{idle_s / max(p95_s, 0.001):.1f}x its p95 of {_short(p95_s)}"
    elif p95_s is None and idle_s >= UNTOUCHED_S:
        known = "no history" if task.live else "no report from its process"
        why = f"{known}, running {duration(task.age_s)}"
    else:
        return None
    return why if since_safe_point is None else f"{why}, no safe point since {duration(idle_s)}"


def _handed_over(task: ListedTask, recent: Collection[str]) -> str | None:
    columns = task.columns
    if columns["owner"] is not None and not task.orphaned:
        return None  # a living run settles it
    if columns["request_id"] in recent or task.age_s < UNTOUCHED_S:
        return None
    # In its settle time, or after a probe answered `Wait`, recovery checks the task again at `due`.
    due = max(columns["not_before"] or 0.0, columns["next_check"] or 0.0)
    if age_s(task.now, due) < UNTOUCHED_S:
        return None
    return f"handed over, {_NOBODY} for {duration(UNTOUCHED_S)} or more"


def _waiting(task: ListedTask) -> str | None:
    """Why a task is stuck that is accepted, or whose process is gone."""
    if task.age_s < UNTOUCHED_S:
        return None
    if task.orphaned:
        return f"its process is gone, {_NOBODY}"
    if task.columns["owner"] is None:
        return f"{task.columns['state']} {duration(task.age_s)} ago, {_NOBODY}"
    return f"not begun for {duration(task.age_s)}"


def _short(seconds: float) -> str:
    """Like `duration`, but with milliseconds below a second."""
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else duration(seconds)
