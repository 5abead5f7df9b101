"""What a store says when nobody answers: its runs, what each left, and the accounts.

Read only. Who lives is judged as services judge it of each other
(`gracekit.life`); a row's phase and beat are for display.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import click

from gracekit.cli import listings_sql as sql
from gracekit.cli.text import counts, duration, plural
from gracekit.clock import age_s
from gracekit.config.settings import Settings
from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError
from gracekit.exits import Verdict, classify
from gracekit.life import Liveness
from gracekit.process import Process
from gracekit.runs.run import Run, judge_run, list_runs
from gracekit.store.location import StoreLocation
from gracekit.store.reader import StoreReader
from gracekit.tracker.task import TERMINAL, TRANSIENT, TaskState

ALL_RUNS: Final = 100_000
NEAR_RUNS: Final = 200
"""Enough to find a run again among those that started meanwhile."""

UnfinishedCounts = Mapping[str, int]  # state to number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Accepted = terminal + transient + removed, and everything else that was counted.

    Attributes:
        states: State to number of rows.
        tallies: Name to count, as the journal keeps them.
    """

    states: Mapping[str, int]
    tallies: Mapping[str, int]

    @property
    def accepted(self) -> int:
        """Requests that the journal ever took custody of."""
        return self.tallies.get("accepted", 0)

    @property
    def removed(self) -> int:
        """Terminal rows that retention removed."""
        return self.tallies.get("removed", 0)

    @property
    def terminal(self) -> Mapping[str, int]:
        """Rows that have ended, by state; REJECTED ones were never accepted."""
        return self._of(TERMINAL - {TaskState.REJECTED})

    @property
    def transient(self) -> Mapping[str, int]:
        """Rows that have not, by state."""
        return self._of(TRANSIENT)

    @property
    def off_by(self) -> int:
        """Accepted minus what is accounted for; 0 when it balances."""
        known = sum(self.terminal.values()) + sum(self.transient.values()) + self.removed
        return self.accepted - known

    def _of(self, states: frozenset[TaskState]) -> Mapping[str, int]:
        names = {state.value for state in states}
        return {name: n for name, n in sorted(self.states.items()) if name in names and n}

    def __str__(self) -> str:
        words = f"accepted {self.accepted} = {_sum(self.terminal, 'terminal')}"
        words += f" + {_sum(self.transient, 'transient')} + {self.removed} removed"
        verdict = "balanced" if self.off_by == 0 else f"NOT BALANCED: off by {self.off_by}"
        rejected = self.states.get(TaskState.REJECTED.value, 0)
        return f"{words}: {verdict}" + (f"; {rejected} rejected" if rejected else "")

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


class StoreRecords:
    """One look into a store; use as `with Records(settings) as records`.

    Raises:
        ConfigError: the settings name no store that can be read.
    """

    def __init__(self, settings: Settings) -> None:
        location = StoreLocation(settings.store_url)
        reader = location.reader()
        if reader is None or location.run_directory is None:
            raise ConfigError(
                f"{location.url} is the memory of one process; name a file with --store"
            )
        self.location: Final = location
        self.run_directory: Path = location.run_directory
        self.engine: StoreReader = reader
        self._wakeups = location.wakeups()
        self._process = Process()

    def __enter__(self) -> Self:
        self.engine.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.engine.close()

    async def runs(self, name: str | None = None) -> list[Run]:
        """Runs on record, newest first; of one INSTANCE or SERVICE@INSTANCE, or of all."""
        runs = await list_runs(self.engine, limit=ALL_RUNS)
        return runs if name is None else [run for run in runs if is_named(run, name)]

    async def living(self, name: str | None = None) -> list[Run]:
        """Runs that are proven alive, by name."""
        alive = [run for run in await self.runs(name) if self.judge(run).is_alive]
        return sorted(alive, key=lambda run: (run.instance, run.service))

    async def again(self, run: Run) -> Run:
        """*run* as it stands now."""
        for limit in (NEAR_RUNS, ALL_RUNS):
            for found in await list_runs(self.engine, service=run.service, limit=limit):
                if found.run_id == run.run_id:
                    return found
        return run

    def judge(self, run: Run) -> Liveness:
        """Whether the run may still act."""
        return judge_run(run, self._process, self.run_directory)

    async def wake_living(self, service: str) -> bool:
        """Let living runs of *service* look at once; false if there is none."""
        living = [run for run in await self.living() if run.service == service]
        self._wakeups.wake(run.run_id for run in living)
        return bool(living)

    async def unfinished(self) -> Mapping[str | None, UnfinishedCounts]:
        """Owner to its transient rows by state; None stands for rows that nobody owns."""
        found: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
        for owner, state, number in await self.engine.query(sql.UNFINISHED):
            found[None if owner is None else str(owner)][str(state)] = int(number or 0)
        return found

    async def accounts(self) -> Accounts:
        """The accounts of this moment."""
        rows = await self.engine.query(sql.ACCOUNTS)
        return Accounts(
            tallies={str(name): int(n or 0) for kind, name, n in rows if kind == "tally"},
            states={str(name): int(n or 0) for kind, name, n in rows if kind == "state"},
        )

    async def what_is_known(self, name: str | None) -> str:
        """Why nobody answers to *name*, and what is left: a sentence or two for an operator."""
        runs = await self.runs(name)
        if not runs:
            everyone = await self.runs()
            known = sorted({run.instance for run in everyone})
            hint = did_you_mean(name or "", known) or f"; known are {', '.join(known) or 'none'}"
            wanted = "no run" if name is None else f"no run of instance {name!r}"
            return f"{wanted} is on record in {self.location.name}{hint}"
        doubtful = [(run, j) for run in runs if not (j := self.judge(run)).is_dead]
        if doubtful:
            run, judgement = doubtful[0]
            return doubt(run, judgement)
        last = runs[0]
        unfinished = await self.unfinished()
        left = [(run, unfinished[run.run_id]) for run in runs if run.run_id in unfinished]
        sentences = [
            f"no process of {label(last) if name else self.location.name} is alive: {ending(last)}"
        ]
        sentences += [f"{label(run)} left {counts(rows.items())}" for run, rows in left]
        if None in unfinished:
            sentences.append(f"{counts(unfinished[None].items())} without owner")
        if len(sentences) > 1:
            sentences.append("the next start settles them")
        return "; ".join(sentences)


def is_named(run: Run, name: str) -> bool:
    """Whether *name* is the run's INSTANCE or SERVICE@INSTANCE."""
    return name in {run.instance, label(run)}


def label(run: Run) -> str:
    """`service@instance`."""
    return f"{run.service}@{run.instance}"


def doubt(run: Run, judgement: Liveness) -> str:
    """What an operator has to know of a run of which nothing is proven."""
    return (
        f"{label(run)} (run {run.run_id}) is {judgement}; its tasks are left alone. Look from "
        f"where it ran; if it is gone: gracekit runs gone {run.run_id} --reason '...'"
    )


def verdict_of(run: Run) -> Verdict:
    """How a dead run ended: as on record, else by its evidence."""
    return run.verdict or classify(run.evidence)


def gone_at(run: Run) -> float:
    """Wall time of its stop record, else of its last sign of life."""
    return run.ended_at if run.ended_at is not None else run.beat_at


def ending(run: Run) -> str:
    """`ended 2m10s ago: drained`, for a dead run."""
    ago = duration(age_s(time.time(), gone_at(run)))
    return f"{label(run)} ended {ago} ago: {verdict_of(run).value}"


def choose(living: Sequence[Run], name: str | None, *, everyone: bool) -> list[Run]:
    """The runs that a verb is for.

    Raises:
        click.UsageError: it is not clear which one is meant.
    """
    if everyone or len(living) <= 1:
        return list(living)
    names = ", ".join(map(label, living))
    which = "run INSTANCE or SERVICE@INSTANCE" if name is None else "SERVICE@INSTANCE"
    raise click.UsageError(
        f"{plural(len(living), 'run')} live ({names}): name one as {which}, or --all"
    )


def _sum(states: Mapping[str, int], name: str) -> str:
    total = sum(states.values())
    return f"{total} {name}" + (f" ({counts((k, v) for k, v in states.items())})" if total else "")
