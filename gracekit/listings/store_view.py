"""Reads a store: its runs and their reports, their unfinished tasks, the accounts, the incidents.

Whether a run is alive is judged in the same way as services judge each other (`gracekit.life`);
the columns `phase` and `beat_at` are only for display.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.exits import Verdict, classify
from gracekit.life import Liveness
from gracekit.listings import listings_sql as sql
from gracekit.phase import ServiceState
from gracekit.process import Process
from gracekit.runs import pages
from gracekit.runs.run import Run, evidence_of, judge_run, with_end
from gracekit.store.batch import Row
from gracekit.store.engine import Queries
from gracekit.store.older import copied_at
from gracekit.tracker.task import TERMINAL, TRANSIENT, TaskState

RunAnswer = dict[str, Any]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run.

    Attributes:
        answer: Its status; None without an answer.
        tasks: Its tasks in flight, if they were requested.
        brief: Why the answer or some tasks are missing, in a few words; otherwise empty.
        why: The same as a full sentence; empty if *brief* is enough.
    """

    answer: RunAnswer | None = None
    tasks: Sequence[RunAnswer] = ()
    brief: str = ""
    why: str = ""


Reports = Mapping[str, RunReport]
"""Reports by run id."""

NO_REPORT: Final = RunReport(brief=ServiceState.STARTING.value)
"""Stands for the report of a run that began after the reports were collected."""


async def list_incidents(view: StoreView, kind: str, *, limit: int) -> list[dict[str, Any]]:
    """The last incidents, newest first, as plain data.

    Args:
        view: The store.
        kind: Only kinds that begin with this text, such as `operator`; empty for all.
        limit: How many at most.
    """
    rows = await view.engine.query(sql.LAST_INCIDENTS, kind, limit)
    return [dict(zip(sql.INCIDENT_NAMES, row, strict=True)) for row in rows]


API_VERSION: Final = "1.0"
"""Of the JSON in which tasks are shown."""

UnfinishedCounts = Mapping[str, int]  # state to number of rows


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of requests; accepted must equal terminal + transient + removed.

    Attributes:
        states: Number of rows by state.
        tallies: The journal's counts by name.
    """

    states: Mapping[str, int]
    tallies: Mapping[str, int]

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Accounts:
        """The accounts from the rows of `listings_sql.ACCOUNTS`."""
        found: dict[str, Counter[str]] = {"tally": Counter(), "state": Counter(), "rows": Counter()}
        for kind, name, number in rows:
            found[str(kind)][str(name)] += int(number or 0)
        states = found["state"]
        succeeded = found["rows"].total() - states.total()
        return cls(
            states=states + Counter({TaskState.SUCCEEDED.value: succeeded}),
            tallies=dict(found["tally"]),
        )

    @property
    def accepted(self) -> int:
        """How many requests were ever accepted."""
        return self.tallies.get("accepted", 0)

    @property
    def removed(self) -> int:
        """How many terminal rows retention has deleted."""
        return self.tallies.get("removed", 0)

    @property
    def terminal(self) -> Mapping[str, int]:
        """Rows of ended tasks, by state; without REJECTED ones, which were never accepted."""
        return self._of(TERMINAL - {TaskState.REJECTED})

    @property
    def transient(self) -> Mapping[str, int]:
        """Rows of tasks that have not ended, by state."""
        return self._of(TRANSIENT)

    @property
    def off_by(self) -> int:
        """Accepted minus terminal, transient and removed; 0 if nothing was lost."""
        known = sum(self.terminal.values()) + sum(self.transient.values()) + self.removed
        return self.accepted - known

    def _of(self, states: frozenset[TaskState]) -> Mapping[str, int]:
        names = {state.value for state in states}
        return {name: n for name, n in sorted(self.states.items()) if name in names and n}

    @property
    def rejected(self) -> int:
        """How many refused requests are on record."""
        return self.states.get(TaskState.REJECTED.value, 0)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "accepted": self.accepted,
            "terminal": dict(self.terminal),
            "transient": dict(self.transient),
            "removed": self.removed,
            "balanced": self.off_by == 0,
            "off_by": self.off_by,
            "tallies": dict(self.tallies),
        }


class StoreView:
    """Reads one store.

    Args:
        engine: A started `Engine` or `StoreReader`.
        process: Judges which runs are alive.
        run_directory: Directory of the run locks, as this process sees it; None for a store in
            memory.
        clock: The present time, for ages.
        is_shared: Whether other hosts use the store, too.

    Attributes:
        engine: As given.
        clock: As given.
    """

    def __init__(
        self,
        engine: Queries,
        process: Process,
        run_directory: Path | None,
        clock: Clock,
        *,
        is_shared: bool = False,
    ) -> None:
        self.engine: Final = engine
        self.clock: Final = clock
        self._process = process
        self._run_directory = run_directory
        self._is_shared = is_shared

    async def not_adopted(self, name: str | None = None) -> list[Run]:
        """Runs whose end no other run has recorded, newest first; of one name, or of all.

        All that live, or may, are among them; a dead one is until the next start.
        """
        found = await pages.list_not_adopted(self.engine)
        runs = await self._with_evidence_of(
            run for run in found if name is None or is_named(run, name)
        )
        return list(runs.values())

    async def runs_of(self, run_ids: Collection[str]) -> dict[str, Run]:
        """The runs with these ids that are on record, by id."""
        found = await pages.find_runs(self.engine, run_ids)
        return await self._with_evidence_of(found.values())

    async def last_ended(
        self, dead: Iterable[Run], name: str | None = None, *, limit: int
    ) -> list[Run]:
        """The runs that ended last, newest end first; of one name, or of all.

        Args:
            dead: Dead runs of that name that are not adopted.
            name: INSTANCE or SERVICE@INSTANCE; None for all.
            limit: How many at most.
        """
        adopted = await self._with_evidence_of(
            await pages.list_last_ended(self.engine, name, limit=limit)
        )
        found = {run.run_id: run for run in (*dead, *adopted.values())}
        return sorted(found.values(), key=seen_to_end_at, reverse=True)[:limit]

    async def _with_evidence_of(self, runs: Iterable[Run]) -> dict[str, Run]:
        copied = await copied_at(self.engine, self._run_directory)
        return {run.run_id: self._with_evidence(run, copied) for run in runs}

    def _with_evidence(self, run: Run, copied: float) -> Run:
        """*run* with what is known of its end outside of its row.

        That is the exit code in its lock file, if it could not record it in the store; and that
        the store is an older copy, so that nobody knows how the run ended.
        """
        boot_id = "" if self._is_shared else self._process.identify().boot_id
        run = with_end(run, self._run_directory, boot_id=boot_id)
        if run.exit_code is not None or run.adopted_at is not None:
            return run
        evidence = evidence_of(run, self._run_directory, copied_at=copied)
        run = msgspec.structs.replace(run, exit_code=evidence.exit_code)
        if classify(evidence) is Verdict.UNKNOWN and self.judge(run).is_dead:
            return msgspec.structs.replace(run, verdict=Verdict.UNKNOWN)
        return run

    async def living(self, name: str | None = None) -> list[Run]:
        """Runs that are proven alive, by name."""
        alive = [run for run in await self.not_adopted(name) if self.judge(run).is_alive]
        return sorted(alive, key=lambda run: (run.instance, run.service))

    async def judge_again(self, run: Run) -> tuple[Run, Liveness]:
        """Read *run* again and judge it, as `judge_all` does."""
        return (await self.judge_all((await self.runs_of({run.run_id})).values() or [run]))[0]

    async def judge_all(self, runs: Iterable[Run]) -> list[tuple[Run, Liveness]]:
        """Judge *runs*; those that are dead are returned as they are on record after that.

        A run may have written its stop record, and ended, after its row was read.
        """
        judged = [(run, self.judge(run)) for run in runs]
        late = {run.run_id for run, life in judged if life.is_dead and not _is_told(run)}
        again = await self.runs_of(late)
        return [(again.get(run.run_id, run), life) for run, life in judged]

    def judge(self, run: Run) -> Liveness:
        """Whether the run is alive, so that it may still act."""
        return judge_run(run, self._process, self._run_directory, is_shared=self._is_shared)

    async def unfinished(self) -> Mapping[str | None, UnfinishedCounts]:
        """Numbers of transient rows, by owner and then by state; None stands for no owner.

        Parked tasks, and those that may not begin yet, are left out: they do not wait for a run.
        """
        found: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
        for owner, state, number in await self.engine.query(sql.UNFINISHED):
            found[None if owner is None else str(owner)][str(state)] = int(number or 0)
        return found

    async def not_due(self) -> tuple[int, float] | None:
        """Number of accepted tasks that may not begin yet, and when the next may; None for none."""
        ((number, next_at),) = await self.engine.query(sql.NOT_DUE)
        return (int(number or 0), float(next_at)) if next_at is not None else None

    async def open_holds(self) -> Mapping[str, list[str]]:
        """The open holds of each run, as `name key`, oldest first; without left-over ones."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for owner, name, key in await self.engine.query(sql.OPEN_HOLDS, self.clock.wall()):
            found[str(owner)].append(f"{name!s} {key!s}")
        return found

    async def accounts(self) -> Accounts:
        """Count the accounts now; walks an index with every row of the store."""
        return Accounts.of_rows(await self.engine.query(sql.ACCOUNTS))


def _is_told(run: Run) -> bool:
    """Whether the end of *run* is on record, by itself or by the run that adopted it."""
    return run.ended_at is not None or run.adopted_at is not None


def is_named(run: Run, name: str) -> bool:
    """Whether *name* is the run's INSTANCE or SERVICE@INSTANCE."""
    return name in {run.instance, label(run)}


def label(run: Run) -> str:
    """`service@instance`."""
    return f"{run.service}@{run.instance}"


def verdict_of(run: Run) -> Verdict:
    """How a dead run ended: the recorded verdict, or else one from its evidence."""
    return run.verdict or classify(run.evidence)


def ended(run: Run) -> Run:
    """A dead *run* with its verdict, as `why` wants it."""
    return msgspec.structs.replace(run, verdict=verdict_of(run))


def seen_to_end_at(run: Run) -> float:
    """Wall time of its stop record, else of its adoption; infinity for a run that ended just now.

    That is a run that left no stop record and is not adopted yet.
    """
    return run.ended_at or run.adopted_at or math.inf


def gone_at(run: Run) -> float:
    """Wall time of its stop record, or else of its last beat."""
    return run.ended_at if run.ended_at is not None else run.beat_at
