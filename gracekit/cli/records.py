"""The store that a command reads, and sentences about its runs.

It is opened read-only; `gracekit.listings` has the queries and judges the runs.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import click

from gracekit.cli.text import counts, plural
from gracekit.clock import Clock, age_s
from gracekit.config.settings import Settings
from gracekit.config.values import did_you_mean, duration
from gracekit.errors import ConfigError, DependencyError
from gracekit.life import Liveness
from gracekit.listings.store_view import (
    Accounts,
    StoreView,
    gone_at,
    label,
    verdict_of,
)
from gracekit.process import Process
from gracekit.runs.names import door_name
from gracekit.runs.pages import is_known, list_instances, list_services
from gracekit.runs.run import Run
from gracekit.store.location import StoreLocation
from gracekit.store.older import PUT_BACK, lost_store

KNOWN: Final = 50
"""Most instances that the refusal of an unknown one names: those that started last."""


class StoreRecords(StoreView):
    """One look into the store of a command; use as `with StoreRecords(settings) as records`.

    Raises:
        ConfigError: the settings name no store that can be read.
    """

    def __init__(self, settings: Settings) -> None:
        location = StoreLocation(settings)
        reader = location.reader()
        if reader is None or location.run_directory is None:
            raise ConfigError(
                f"{location.url} is the memory of one process; name a file with --store"
            )
        super().__init__(
            reader, Process(), location.run_directory, Clock(), is_shared=location.is_shared
        )
        self.location: Final = location
        self.run_directory: Path = location.run_directory
        self._reader = reader
        self._wakeups = location.wakeups()

    def is_elsewhere(self, run: Run) -> bool:
        """Whether *run* may be one of another host, whose door no command of this one reaches."""
        door = self.run_directory / door_name(run.run_id)
        return self.location.is_shared and not door.exists()

    def __enter__(self) -> Self:
        lost = lost_store(self.location)
        if lost:
            raise ConfigError(
                f"{lost}; {PUT_BACK}. Until then no command can list its runs: look for processes "
                "of the service with systemctl or ps"
            )
        self._reader.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.close()

    async def wake_living(self, service: str) -> bool:
        """Let living runs of *service* look at once; false if there is none."""
        living = [run for run in await self.living() if run.service == service]
        self._wakeups.wake(run.run_id for run in living)
        return bool(living)

    async def name_of(self, run: Run) -> str:
        """How a command names *run*: its instance, with its service if another run has that too."""
        alike = await self.living(run.instance)
        return shlex.quote(label(run) if len(alike) > 1 else run.instance)

    async def need(self, name: str | None) -> None:
        """Refuse a name of which no run is on record.

        Raises:
            DependencyError: no run of that name is on record; the message says what is known.
        """
        if name is not None and not await is_known(self.engine, name):
            raise DependencyError(await self.what_is_known(name))

    async def need_service(self, name: str) -> None:
        """Refuse a service of which no run is on record.

        Raises:
            DependencyError: there is none; the message says what is known.
        """
        known = await list_services(self.engine)
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known) or 'none'}"
            raise DependencyError(
                f"no run of service {name!r} is on record in {self.location.name}{hint}"
            )

    async def what_is_known(self, name: str | None) -> str:
        """Why nobody answers to *name*, and what is known of it, as a sentence for an operator."""
        judged = await self.judge_all(await self.not_adopted(name))
        for run, judgement in judged:
            if not judgement.is_dead:
                return doubt(run, judgement)
        ended = await self.last_ended([run for run, _ in judged], name, limit=1)
        if not ended:
            newest = await list_instances(self.engine, limit=KNOWN + 1)
            known = sorted(newest[:KNOWN])
            listed = ", ".join([*known, *["others"] * (len(newest) > KNOWN)]) or "none"
            hint = did_you_mean(name or "", known) or f"; known are {listed}"
            wanted = "no run" if name is None else f"no run of instance {name!r}"
            return f"{wanted} is on record in {self.location.name}{hint}"
        last = ended[0]
        where = label(last) if name else self.location.name
        return (
            f"no process of {where} is alive: {ending(last)}; `gracekit tasks` shows what is left"
        )


def doubt(run: Run, judgement: Liveness) -> str:
    """What an operator has to know of a run of which nothing is proven."""
    return (
        f"{label(run)} (run {run.run_id}) is {judgement}; its tasks are left alone. It was seen "
        f"{duration(age_s(time.time(), run.beat_at))} ago. Look on host {run.host}, and give "
        "commands about it there; if it is gone: "
        f"gracekit runs gone {run.run_id} --reason '...'"
    )


def ending(run: Run) -> str:
    """`ended 2m10s ago: drained`, for a dead run."""
    return f"{label(run)} ended {since_end(run)} ago: {verdict_of(run).value}"


def since_end(run: Run) -> str:
    """How long ago a dead run ended: `2m10s`, or `<2m10s` if it left no stop record.

    It was last seen then.
    """
    known = "" if run.ended_at is not None else "<"
    return known + duration(age_s(time.time(), gone_at(run)))


def choose(living: Sequence[Run], name: str | None, *, everyone: bool | None) -> list[Run]:
    """The runs that a verb is for.

    Args:
        living: All that live.
        name: INSTANCE or SERVICE@INSTANCE; None if none was given.
        everyone: Whether `--all` was given; None for a command without that option.

    Raises:
        click.UsageError: it is not clear which one is meant.
    """
    if everyone or len(living) <= 1:
        return list(living)
    names = ", ".join(map(label, living))
    which = "INSTANCE or SERVICE@INSTANCE" if name is None else "SERVICE@INSTANCE"
    or_all = "" if everyone is None else ", or --all"
    raise click.UsageError(
        f"{plural(len(living), 'run')} live ({names}): name one as {which}{or_all}"
    )


def balance(accounts: Accounts) -> str:
    """The accounts as one line, and whether they balance."""
    words = f"accepted {accounts.accepted} = {_sum(accounts.terminal, 'terminal')}"
    words += f" + {_sum(accounts.transient, 'transient')} + {accounts.removed} removed"
    verdict = "balanced" if accounts.off_by == 0 else f"NOT BALANCED: off by {accounts.off_by}"
    rejected = accounts.rejected
    return f"{words}: {verdict}" + (f"; {rejected} rejected" if rejected else "")


def _sum(states: Mapping[str, int], name: str) -> str:
    total = sum(states.values())
    return f"{total} {name}" + (f" ({counts((k, v) for k, v in states.items())})" if total else "")
