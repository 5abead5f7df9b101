"""Checks of a store's runs: which are alive, what dead ones left, whether the accounts balance."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from gracekit.clock import Clock, age_s
from gracekit.config.settings import Settings
from gracekit.config.values import duration
from gracekit.control.door_wire import LONGEST_LINE, Ask, address_of, line_of_ask, read_answer
from gracekit.doctor.finding import Finding, fail, ok, warn
from gracekit.errors import GracekitError
from gracekit.exits import ExitCode
from gracekit.journal.tasks_sql import IS_OPEN, IS_UNSUCCESSFUL
from gracekit.life import Liveness
from gracekit.listings.resources import ResourceStatus, list_resources
from gracekit.process import Process
from gracekit.runs.names import door_name
from gracekit.runs.pages import count_runs, list_not_adopted
from gracekit.runs.run import Run, judge_run, list_runs
from gracekit.store.batch import Row, Value
from gracekit.store.location import ReadOnlyStore, StoreLocation
from gracekit.store.older import LOST, PUT_BACK, lost_store, mark_of, read_mark
from gracekit.store.place import StorePlace
from gracekit.tracker.task import SUSPECTED, TERMINAL, TRANSIENT, TaskState

LAST_RUNS: Final = 1000
SHOWN: Final = 5
ANSWER_S: Final = 2.0
"""A run that has not answered a probe by its door within this time is reported."""
SETTLED_BY_START: Final = "start the service: it settles them"
START_AND_RECONCILE: Final = "start the service and run `gracekit reconcile`"

_OPEN: Final = ", ".join(f"'{state.value}'" for state in sorted(TRANSIENT, key=lambda s: s.value))
_ENDED: Final = ", ".join(f"'{state.value}'" for state in sorted(TERMINAL, key=lambda s: s.value))
_OPEN_TASKS: Final = f"""
SELECT state, cut = 'unclean', owner, count(*) FROM task WHERE {IS_OPEN}
GROUP BY state, cut = 'unclean', owner"""  # noqa: S608 - a constant
_DUE: Final = """
SELECT (SELECT count(*) FROM task WHERE state = 'pending' AND pending_deadline <= ?),
       (SELECT count(*) FROM task WHERE errored_due = 1),
       (SELECT count(*) FROM hold WHERE ended_at IS NULL),
       (SELECT count(*) FROM reply WHERE due_at IS NOT NULL)"""
# The names of tasks, hooks and holds, how many crashes each was running in, and the run that is
# working on it now.
_AT_WORK: Final = f"""
SELECT 'task ' || request_id || ' (' || method || ')', crashes,
    CASE WHEN state = 'running' OR probing = 1 THEN owner END FROM task WHERE {IS_OPEN} UNION ALL
SELECT 'the errored hook of task ' || request_id || ' (' || method || ')', hook_crashes,
    CASE WHEN calling = 1 THEN owner END FROM task WHERE errored_due = 1 UNION ALL
SELECT 'hold ' || name || ' ' || key || ' (' || method || ')', crashes, asker
    FROM hold WHERE ended_at IS NULL OR errored_due = 1"""  # noqa: S608 - a constant
_ACCOUNTS: Final = f"""
SELECT coalesce((SELECT n FROM tally WHERE what = 'accepted'), 0),
       coalesce((SELECT n FROM tally WHERE what = 'removed'), 0),
       (SELECT count(*) FROM task),
       (SELECT count(*) FROM task WHERE {IS_UNSUCCESSFUL} AND state = 'rejected'),
       (SELECT count(*) FROM task WHERE {IS_OPEN} AND state NOT IN ({_OPEN})),
       (SELECT count(*) FROM task WHERE state = 'pending' AND owner IS NOT NULL),
       (SELECT count(*) FROM task WHERE {IS_UNSUCCESSFUL} AND state NOT IN ({_ENDED}))"""  # noqa: S608 - as above


class Look(Protocol):
    """A store that is only read."""

    def read(self, sql: str, *params: Value) -> list[Row]:
        """The rows of a query.

        Raises:
            StoreError: it cannot be read.
        """
        ...


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """The runs on record.

    Attributes:
        living: Runs that are proven alive.
        doubtful: Runs neither proven alive nor dead, each with the reason.
        all: The newest runs, living or not.
        number: How many runs are on record.
        resources: What passes over resources have left.
    """

    living: Sequence[Run]
    doubtful: Sequence[tuple[Run, Liveness]]
    all: Sequence[Run]
    number: int = 0
    resources: Sequence[ResourceStatus] = ()

    @property
    def not_dead(self) -> Sequence[Run]:
        """The runs that may still act: living and doubtful ones."""
        return [*self.living, *(run for run, _ in self.doubtful)]

    @property
    def topics(self) -> set[str]:
        """Names of the shared queues that the runs read."""
        return {topic for run in self.all for topic in (run.topic, run.ops_topic)}


def read_runs(location: StoreLocation) -> Runs:
    """The runs of a store that is not in memory, outside an event loop.

    Raises:
        GracekitError: it cannot be read as a store of this version.
    """
    reader = location.reader()
    assert reader is not None
    reader.open()
    try:
        newest, not_adopted, number = asyncio.run(_read(reader))
        resources = asyncio.run(list_resources(reader))
    finally:
        reader.close()
    process, directory, is_shared = Process(), location.run_directory, location.is_shared
    judged = [(run, judge_run(run, process, directory, is_shared=is_shared)) for run in not_adopted]
    return Runs(
        living=[run for run, judgement in judged if judgement.is_alive],
        doubtful=[(run, j) for run, j in judged if not j.is_alive and not j.is_dead],
        all=newest,
        number=number,
        resources=resources,
    )


async def _read(reader: ReadOnlyStore) -> tuple[list[Run], list[Run], int]:
    """The newest runs, those that may live, and the number of all."""
    newest = await list_runs(reader, limit=LAST_RUNS)
    return newest, await list_not_adopted(reader), await count_runs(reader)


def check_epoch(look: Look, directory: Path) -> Iterator[Finding]:
    """Check by the mark in *directory* that the store is not an older copy of the last one."""
    known = read_mark(directory)
    ((epoch, age, copied_at),) = look.read("SELECT epoch, age, copied_at FROM epoch")
    remedy = "the next start raises the tokens above all that it can know; see docs/backup.md"
    if copied_at is not None:
        yield warn("history", "it is a backup that no service has started with", remedy)
    elif known > mark_of(epoch, age):
        seen = "a newer store was here: this one was restored, or lost its -wal, or is new"
        yield warn("history", seen, remedy)
    elif (begun_at := _begun_anew_at(look)) is not None:
        yield warn(
            "history",
            "the store used before was lost, and this one was begun empty "
            f"{duration(age_s(Clock().wall(), begun_at))} ago: the unfinished tasks of the lost "
            "one are not known, and nobody settles them",
            "if you have that store or a backup of it, stop the services and put it back as "
            "docs/backup.md tells; what this store has recorded is then not known",
        )
    else:
        yield ok("history", "it is the last one that was here")


def _begun_anew_at(look: Look) -> float | None:
    """When a start began this store in the place of a lost one, while that is on record."""
    rows = look.read("SELECT max(at) FROM incident WHERE what = ?", LOST)
    return next((float(str(at)) for (at,) in rows if at is not None), None)


def check_lost(place: StorePlace) -> Iterator[Finding]:
    """Check whether a store existed at *place*, where there is none now."""
    if lost := lost_store(place):
        yield fail(
            "history",
            lost,
            f"{PUT_BACK}; a start without it begins a new one and knows no request of before",
        )


def pids_here(runs: Runs) -> list[int]:
    """Pids of the living runs in this pid namespace."""
    here = Process().identify().pid_ns
    return sorted({run.identity.pid for run in runs.living if run.identity.pid_ns == here})


def check_living(runs: Runs) -> Finding:
    """Report the living runs."""
    if not runs.living:
        return ok("runs", f"none lives; {runs.number} on record")
    names = [f"{_label(run)} (pid {run.identity.pid}, {run.phase})" for run in runs.living]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ok("runs", f"{len(names)} live: {', '.join(names[:SHOWN])}{more}")


def check_doubtful(runs: Runs) -> Finding:
    """Warn about runs that recovery leaves alone, as they are neither proven alive nor dead."""
    check = "not proven"
    if not runs.doubtful:
        return ok(check, "each run is proven alive or dead")
    listed = [f"{_label(run)} ({judgement.reason})" for run, judgement in runs.doubtful]
    first, _ = runs.doubtful[0]
    return warn(
        check,
        f"{len(listed)} may be dead: {'; '.join(listed[:SHOWN])}: its tasks and leases are left "
        "alone",
        "look from where it ran; if it is gone, say so: "
        f"gracekit runs gone {first.run_id} --reason '...'",
    )


def check_doors(runs: Runs, directory: Path) -> Iterator[Finding]:
    """Check that each living run has a door, by which commands reach it, and what it says there."""
    check = "doors"
    doors = {run.run_id: directory / door_name(run.run_id) for run in runs.living}
    without = [run for run in runs.living if not doors[run.run_id].is_socket()]
    answers = [(run, _answer(doors[run.run_id], run)) for run in runs.living]
    for run, answer in answers:
        for lane in (answer or {}).get("self_blocked", ()):
            seen = f"{_label(run)}: lane {lane} is full of handlers that wait for this lane"
            yield warn("lanes", seen, "see docs/handlers.md, 'How much runs at a time'")
    if silent := [run for run, answer in answers if answer is None]:
        first = silent[0]
        yield fail(
            check,
            f"{', '.join(map(_label, silent[:SHOWN]))} did not answer within {ANSWER_S:g} s: its "
            "event loop is blocked, or its process is stopped",
            f"kill -USR1 {first.identity.pid} writes its stacks to its standard error; if it is "
            f"stopped, kill -CONT {first.identity.pid} lets it go on",
            ExitCode.DEPENDENCY,
        )
    elif not without:
        yield ok(check, "each run that lives has one, and answers")
    else:
        names = ", ".join(_label(run) for run in without[:SHOWN])
        yield warn(
            check,
            f"{len(without)} without: {names}: no command can ask them",
            f"look for door.missing in its log; do not let others tidy {directory}; a run that "
            "begins or ends at this moment has none",
        )


def _answer(door: Path, run: Run) -> Mapping[str, Any] | None:
    """What *run* says by its door; None if it does not answer, although it can be reached."""
    ask = Ask(run_id=run.run_id, verb="health", args={"probe": "live"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with address_of(door) as address:
                connection.connect(address)
            connection.sendall(line_of_ask(ask))
            return read_answer(connection.recv(LONGEST_LINE))
        except TimeoutError:
            return None
        except (OSError, GracekitError):  # it has no door, has ended, or is another user's
            return {}


def check_unfinished(look: Look, runs: Runs, settings: Settings) -> Finding:
    """Count what is not finished; warn if no run settles it, or only when asked."""
    not_dead, kept = {run.run_id for run in runs.not_dead}, Counter[str]()
    left, unclean = Counter[str](), 0
    for state, is_unclean, owner, number in look.read(_OPEN_TASKS):
        count = int(str(number))
        if state == TaskState.PENDING.value or owner in not_dead:
            kept[str(state)] += count
        else:
            left[str(state)] += count
            unclean += count if is_unclean or state == TaskState.RUNNING.value else 0
    overdue, errored, holds, replies = map(int, map(str, look.read(_DUE, Clock().wall())[0]))
    waiting = sum(one.waiting for one in runs.resources)
    counts = {
        **dict(sorted(kept.items())),
        **{f"{state} without a living owner": number for state, number in sorted(left.items())},
        "of them cut uncleanly": unclean,
        "pending after their deadline": overdue,
        "resources waiting": waiting,
        "errored hooks due": errored,
        "open holds": holds,
        "replies due": replies,
    }
    seen = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "nothing"
    by_hand = not settings.startup_reconciliation_enabled
    if by_hand and (waiting or sum(left.values()) > left[TaskState.ACCEPTED.value]):
        remedy = "`gracekit reconcile` settles them" if runs.living else START_AND_RECONCILE
        return warn("unfinished", f"{seen}; started ones are not settled unasked", remedy)
    if not runs.living and any((*left.values(), overdue, errored, holds, replies)):
        return warn("unfinished", seen, f"{SETTLED_BY_START}; `gracekit tasks` lists them")
    return ok("unfinished", seen)


def check_resources(runs: Runs) -> Iterator[Finding]:
    """Report what passes over resources do not settle, and runs that share their passes."""
    for one in runs.resources:
        for seen, remedy in one.troubles(Clock().wall()):
            yield warn("resources", seen, remedy)
        beside = [run for run in runs.living if (run.service, run.host) == (one.service, one.host)]
        if len(beside) > 1:
            yield ok(
                "resources",
                f"{len(beside)} runs of {one.service} on {one.host}: one of them makes each pass "
                "for all, so their find must return the same records; a run with a backend of its "
                "own needs another GRACEKIT_HOST",
            )


def check_suspects(look: Look, runs: Runs) -> Finding:
    """Report tasks, hooks and holds that were running at the crashes of several processes."""
    living = {run.run_id for run in runs.living}
    suspects = [
        f"{str(name)[:80]}: {times}"
        for name, crashes, owner in look.read(_AT_WORK)
        # Add one crash if the owner is dead: the next start will count it.
        if (times := int(str(crashes)) + (owner not in {None, *living})) >= SUSPECTED
    ]
    if not suspects:
        seen = "no task, hook or probe was running in two or more processes when they died"
        return ok("suspects", seen)
    more = f" and {len(suspects) - SHOWN} more" if len(suspects) > SHOWN else ""
    return warn(
        "suspects",
        f"running in processes when they died: {', '.join(suspects[:SHOWN])}{more}",
        "each runs apart from others until it is known which kills; to end one by hand: "
        "`gracekit tasks cancel ID --reason TEXT`, `gracekit holds end NAME KEY --reason TEXT`",
    )


def check_accounts(look: Look) -> Finding:
    """Check the accounts: accepted = ended + unfinished + removed; no row contradicts itself."""
    ((accepted, removed, all_, rejected, *wrong),) = (
        tuple(map(int, map(str, row))) for row in look.read(_ACCOUNTS)
    )
    rows, odd = all_ - rejected, sum(wrong)
    seen = f"accepted {accepted} = {rows} on record + {removed} removed"
    if accepted == rows + removed and not odd:
        return ok("accounts", f"{seen}: balanced")
    off = accepted - rows - removed
    return fail(
        "accounts",
        f"{seen} does not balance: off by {off}"
        if off
        else f"{odd} rows contradict themselves: open and ended, or pending with an owner",
        "keep a copy of the store (sqlite3 .backup) and report it: a record is lost or forged",
        ExitCode.INTERNAL,
    )


def _label(run: Run) -> str:
    return f"{run.service}@{run.instance}"
