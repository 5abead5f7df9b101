"""What must hold of a cell: at every death (P1, P2, P3, P5, P9), and in the end (P1, P3, P4, P8).

A `Snapshot` is what a death left on disk. From the last one follows how each
request must end, and how often it may still be started: `expected_of`.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gracekit.errors import CallTimeoutError, NoCapacity, TaskCancelledError
from gracekit.life import read_note
from gracekit.rpc.notifications import decode_notification
from tests.crash.cell import Cell
from tests.crash.stores import RUNS

TERMINAL: Final = {"succeeded", "failed", "cancelled", "errored", "rejected"}
VOLUME_ENDS: Final = {"creating": "available", "deleting": "deleted"}
"""What must become of a record in each transient status: the backend has all volumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of the journal."""

    request_id: str
    recipient: str
    method: str
    on_interrupt: str
    state: str
    reason: str | None
    cut: str | None
    attempts: int
    owner: str | None
    namespace: str | None
    parkings: int
    failures: int
    is_overdue: bool
    is_ordered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A life of the service, as it was recorded."""

    run_id: str
    serves: bool
    stop_begun: bool
    exit_code: int | None
    verdict: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is on disk and in the queues while no service runs.

    Attributes:
        tasks: By request id.
        queued: Bodies of messages to the service, waiting or claimed.
        dead: Bodies of dead letters.
        leases: (kind:id) to (token, owner).
        starts: How often each request was started.
        done: Requests whose work was done at least once.
        stopping: Runs whose lock file notes a stop that the store does not know.
        volumes: Status of each record of the application that rules settle.
        rules: How often a rule asked the backend, or deleted again, for each of them.
    """

    tasks: dict[str, Task]
    runs: list[Run]
    tally: dict[str, int]
    incidents: Counter[str]
    queued: list[bytes]
    dead: list[bytes]
    leases: dict[str, tuple[int, str | None]]
    starts: Counter[str]
    done: set[str]
    stopping: set[str]
    volumes: dict[str, str]
    rules: Counter[str]

    @property
    def on_record(self) -> set[str]:
        """Ids in the journal, refused ones too."""
        return set(self.tasks)

    def is_queued(self, request_id: str) -> bool:
        return any(request_id.encode() in body for body in self.queued)


def look(cell: Cell) -> Snapshot:
    """What is on disk now, and in the queues."""
    # First of all: what is accepted from here on is in both, and never in neither.
    queued, dead = cell.queues.bodies()
    tasks = cell.rows(
        "SELECT request_id, recipient, method, on_interrupt, state, reason, cut, attempts, owner, "
        "namespace, parkings, failures, pending_deadline <= ?, ordered IS NOT NULL FROM task",
        time.time(),
    )
    locks = cell.directory / RUNS
    return Snapshot(
        tasks={row[0]: Task(**dict(zip(Task.__slots__, row, strict=True))) for row in tasks},
        runs=[
            Run(**dict(zip(Run.__slots__, row, strict=True)))
            for row in cell.rows(
                "SELECT run_id, phase = 'serving', stop_at IS NOT NULL, exit_code, verdict "
                "FROM run ORDER BY started_at"
            )
        ],
        tally=dict(cell.rows("SELECT what, n FROM tally")),
        incidents=Counter(row[0] for row in cell.rows("SELECT what FROM incident")),
        queued=queued,
        dead=dead,
        leases={
            f"{kind}:{name}": (token, owner)
            for kind, name, token, owner in cell.rows("SELECT kind, id, lver, owner FROM lease")
        },
        starts=Counter(one["id"] for one in cell.effects("start")),
        done={one["id"] for one in cell.effects("done")},
        stopping={path.stem for path in locks.glob("*.lock") if read_note(path) == "stopping"},
        volumes=cell.volumes(),
        rules=Counter(one["volume"] for one in cell.effects() if one["what"] in {"ask", "delete"}),
    )


# -- at every death ---------------------------------------------------------------


def check_death(cell: Cell, history: Sequence[Snapshot]) -> None:
    """What holds at any moment, and so after each kill and each drain."""
    now = history[-1]
    check_custody(cell, history)
    check_accounting(now)
    check_starts(history)
    check_leases(cell, now)
    for before, after in itertools.pairwise(history):
        check_moved_on(before, after)


def check_custody(cell: Cell, history: Sequence[Snapshot]) -> None:
    """P1, P2: what was confirmed is queued, on record or set aside; or its record had ended."""
    now = history[-1]
    ended = {task.request_id for one in history for task in one.tasks.values() if is_over(task)}
    for request_id, (method, _) in cell.sent.items():
        held = request_id in now.on_record or now.is_queued(request_id)
        gone_well = request_id in ended or ("requeue" in method and request_id in now.done)
        assert held or gone_well, f"{method} {request_id} was confirmed and is nowhere"
    for body in cell.garbage:
        assert body in now.queued or body in now.dead, f"{body!r} is nowhere"


def check_accounting(now: Snapshot) -> None:
    """P9: accepted = terminal + transient + removed, and each count has its list."""
    accepted = sum(task.state != "rejected" for task in now.tasks.values())
    assert now.tally.get("accepted", 0) == accepted + now.tally.get("removed", 0), now.tally
    for what in ("duplicate", "rejected", "handed_over", "parked"):
        counted, listed = now.tally.get(what, 0), now.incidents[what]
        # Retention removes the list, never the count.
        assert counted == listed or ("removed" in now.tally and counted > listed), (what, now)


def check_starts(history: Sequence[Snapshot]) -> None:
    """P3: each start was recorded before; an `error` request is started again only if it stopped
    by itself at a safe point.
    """
    now = history[-1]
    for task in now.tasks.values():
        starts = now.starts[task.request_id]
        assert starts <= task.attempts or task.on_interrupt == "requeue", f"{starts} of {task}"
        stops = sum(stopped_by_itself(one.tasks.get(task.request_id)) for one in history)
        again = stops + task.parkings + task.failures
        assert task.on_interrupt != "error" or starts <= 1 + again, f"{starts} starts of {task}"


def check_leases(cell: Cell, now: Snapshot) -> None:
    """P5: along what was done to a resource, tokens never fall, and each start has its own."""
    highest: dict[str, int] = {}
    holder: dict[tuple[str, int], tuple[str, int]] = {}
    for one in cell.effects():
        resource, token = one.get("resource"), one.get("token") or one["fence"]
        if not resource:
            continue
        assert token >= highest.get(resource, 0), f"a stale owner acted: {one}"
        highest[resource] = token
        attempt = (one["id"], one["attempt"])
        assert holder.setdefault((resource, token), attempt) == attempt, f"two owners: {one}"
    for resource, token in highest.items():
        assert now.leases[resource][0] >= token, f"{resource} was fenced with {token}"


def check_moved_on(before: Snapshot, after: Snapshot) -> None:
    """What never goes back: a terminal record, a count, an attempt, a token."""
    for task in before.tasks.values():
        later = after.tasks.get(task.request_id)
        if later is None:
            assert is_over(task), f"{task} was removed"
            continue
        assert later.state == task.state or not is_over(task), f"{task} became {later}"
        assert later.attempts >= task.attempts, f"{task} became {later}"
    for what, number in before.tally.items():
        assert after.tally[what] >= number, what
    for resource, (token, _) in before.leases.items():
        assert after.leases[resource][0] >= token, resource
    for run in before.runs:
        later_runs = [one for one in after.runs if one.run_id == run.run_id]
        assert later_runs or "removed" in after.tally, f"{run} was removed"
        for one in later_runs:
            assert one.verdict == (run.verdict or one.verdict), f"{run} became {one}"


def is_over(task: Task) -> bool:
    return task.state in TERMINAL


def is_free(task: Task) -> bool:
    """Whether it is not at work, and nothing but a place is missing."""
    return not task.is_ordered and (task.state == "accepted" or stopped_by_itself(task))


def stopped_by_itself(task: Task | None) -> bool:
    return task is not None and task.state == "handed_over" and task.cut == "safe_point"


# -- in the end -------------------------------------------------------------------


def is_quiet(cell: Cell, crash: Snapshot, *, but_parked: bool = False) -> bool:
    """Whether the run after *crash* serves and has nothing left to do; its holds excepted, and
    what waits for its resolver with *but_parked*.
    """
    now = look(cell)
    return (
        len(now.runs) > len(crash.runs)
        and now.runs[-1].serves
        and all(
            is_over(task) or (but_parked and task.state == "pending") for task in now.tasks.values()
        )
        and not now.queued
        and all(call.done() for _, call in (*cell.calls, *cell.cancels))
        and all(run.verdict for run in now.runs[:-1])
        and not cell.rows("SELECT 1 FROM reply")
        and not cell.rows("SELECT 1 FROM task WHERE errored_due = 1")
        and not cell.rows("SELECT 1 FROM hold WHERE errored_due = 1")
        and not cell.rows("SELECT 1 FROM hold WHERE ended_at IS NULL AND owner IS NULL")
        and not VOLUME_ENDS.keys() & set(now.volumes.values())
        and not cell.rows("SELECT 1 FROM finding")
        and not cell.rows("SELECT 1 FROM outbox")
    )


def check_end(cell: Cell, history: Sequence[Snapshot], *, retired: bool = False) -> None:
    """P1, P3, P4, P8, after the last drain; the snapshot before its own is the last crash's."""
    crash, end = history[-2:]
    check_death(cell, history)
    for task in end.tasks.values():
        assert is_over(task), f"{task} is stuck"
        if task.namespace is None:  # else it is a resolver's order, which has no effects
            check_outcome(task, crash, end)
    for request_id, (method, _) in cell.sent.items():
        if request_id not in end.tasks:
            assert retired or request_id in end.done, f"{method} {request_id} did nothing"
    assert end.queued == [], "a message is left"
    assert sorted(end.dead) == sorted(cell.garbage)
    assert {owner for _, owner in end.leases.values()} <= {None}, f"owned by the dead: {end.leases}"
    check_answers(cell, end)
    check_verdicts(history)
    check_volumes(cell, crash, end)
    check_news(cell, end)
    check_cancels(cell, end)


def check_cancels(cell: Cell, end: Snapshot) -> None:
    """What was told to be cancelled is, and what was not ordered on record is not."""
    for request_id, cancel in cell.cancels:
        if cancel.exception() is None and cancel.result().state == "cancelled":
            assert end.tasks[request_id].state == "cancelled", end.tasks[request_id]
    cancelled = {task.request_id for task in end.tasks.values() if task.state == "cancelled"}
    assert len(cancelled) == end.incidents["caller_cancel"], (cancelled, end.incidents)


def check_news(cell: Cell, end: Snapshot) -> None:
    """Each step of a parked task was reported, once or with a repetition of the same message."""
    news = {one.message_id: one for one in map(decode_notification, cell.queues.notifications())}
    told = Counter((one.event_type, one.payload["task_id"]) for one in news.values())
    said = [one.payload for one in news.values()]
    steps = {(one["task_id"], one.get("new_state"), one["version"]) for one in said}
    for task in end.tasks.values():
        assert told["task.no_capacity", task.request_id] == task.parkings, (task, told)
        # Each time it is parked, each time that somebody gets it out, and its end after a retry.
        last = (task.request_id, "accepted", task.parkings)
        due = 2 * task.parkings + (last in steps)
        assert told["task.update", task.request_id] == due, (task, told)


def check_volumes(cell: Cell, crash: Snapshot, end: Snapshot) -> None:
    """Each record has one end; what had none at the crash is asked about, or deleted, once more."""
    for name, before in crash.volumes.items():
        assert end.volumes[name] == VOLUME_ENDS.get(before, before), name
        more = end.rules[name] - crash.rules[name]
        waits = name.endswith("waits") and not crash.rules[name]  # its first answer is Wait
        assert more == (1 + waits if before in VOLUME_ENDS else 0), f"{name}: {more} times more"
    writes = Counter(one["volume"] for one in cell.effects("wrote"))
    assert all(number == 1 for number in writes.values()), writes
    assert not cell.effects("refused")


def check_outcome(task: Task, crash: Snapshot, end: Snapshot) -> None:
    """P3: how a request ends, and how often it is started again, follows from the crash."""
    state, starts = expected_of(task, crash)
    assert task.state == state, (
        f"{task} should be {state}: it was {crash.tasks.get(task.request_id)}"
    )
    more = end.starts[task.request_id] - crash.starts[task.request_id]
    assert more == starts, f"{task} was started {more} times after the crash, not {starts}"
    assert state != "succeeded" or task.request_id in end.done, f"{task} did nothing"
    assert state != "cancelled" or task.request_id not in end.done, f"{task} was done"


def expected_of(task: Task, crash: Snapshot) -> tuple[str, int]:
    """State in which *task* must end, and how often it must be started after the last crash."""
    before = crash.tasks.get(task.request_id)
    if task.state == "rejected" or (before is not None and is_over(before)):
        return (before or task).state, 0
    if before is None or is_free(before):
        return "succeeded", 1
    match task.on_interrupt:
        case _ if before.is_ordered:
            return "cancelled", 0
        case _ if before.state == "pending":  # else the resolver lets it run
            return ("errored", 0) if before.is_overdue else ("succeeded", 1)
        case "error":
            return "errored", 0
        case policy:
            is_known = policy == "probe" and task.request_id in crash.done
            return "succeeded", 0 if is_known else 1


def check_answers(cell: Cell, end: Snapshot) -> None:
    """Each caller was answered, and as the record says."""
    for request_id, call in cell.calls:
        assert call.done(), f"{request_id} was not answered"
        error = call.exception()
        assert not isinstance(error, CallTimeoutError), f"{request_id} was not answered"
        task = end.tasks.get(request_id)
        if task is not None and not (task.parkings and isinstance(error, NoCapacity)):
            assert (task.state == "succeeded") == (error is None), f"{task} answered {error!r}"
            is_cancel = isinstance(error, TaskCancelledError)
            assert (task.state == "cancelled") == is_cancel, f"{task} answered {error!r}"


def check_verdicts(history: Sequence[Snapshot]) -> None:
    """P8: each end has the name that its evidence gives it; the last one drained."""
    end, noted = history[-1], set[str]().union(*(death.stopping for death in history))
    assert end.runs[-1].exit_code == 0
    for run in end.runs[:-1]:
        assert run.verdict == verdict_of(run, noted=run.run_id in noted), run


def verdict_of(run: Run, *, noted: bool) -> str:
    match run.exit_code:
        case 0:
            return "drained"
        case 75:
            return "handed_over"
        case None:
            return "stop_timeout" if run.stop_begun or noted else "killed"
        case _:
            return "failed"
