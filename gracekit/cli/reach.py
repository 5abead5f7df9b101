"""Sends control verbs to living runs by their doors.

Every ask names the run id, so that a verb for a dead run does not hit its
successor, and expires with its timeout, so that no run acts on it later.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gracekit.cli.options import who
from gracekit.cli.records import StoreRecords
from gracekit.control.door_wire import LONGEST_ANSWER, Ask, address_of, line_of_ask, read_answer
from gracekit.doctor import proc
from gracekit.errors import (
    BadMessageError,
    DependencyError,
    GracekitError,
    RunEndedError,
    StoreError,
)
from gracekit.listings.chosen_task import ChosenTask, find
from gracekit.listings.store_view import RunAnswer, RunReport, StoreView, label
from gracekit.runs.names import door_name
from gracekit.runs.run import Run

STATUS_TIMEOUT_S: Final = 2.0
VERB_TIMEOUT_S: Final = 5.0

ENDS_WITHIN_S: Final = 1.0
"""A run that closes its door while it is asked ends within this time, if it is about to end."""
DOOR_S: Final = 2.0
"""A run that begins makes its door within this time, and one that ends ends."""
LOOK_S: Final = 0.05

ROUNDS: Final = 3
"""Runs that start while others are asked are asked too, so often."""


class NotAskedError(DependencyError):
    """A living run has no door."""


class SilentError(DependencyError):
    """A living run did not answer in time."""


class StoppedError(SilentError):
    """A living run did not answer because a signal has stopped its process."""


class ControlClient:
    """Asks runs.

    Args:
        records: The store of the runs, which says whether one has ended.
    """

    def __init__(self, records: StoreRecords) -> None:
        self._records = records

    async def ask(
        self,
        run: Run,
        verb: str,
        args: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout_s: float = VERB_TIMEOUT_S,
    ) -> RunAnswer:
        """Send *verb* to *run*, and return its answer.

        Raises:
            DependencyError: it cannot be reached, is not asked, or does not answer in time.
            RunEndedError: it has ended; its instance may have another run now.
            GracekitError: it refuses; the message says why.
        """
        try:
            return await self._ask(run, verb, {"by": who(), **args}, timeout_s)
        except DependencyError as error:
            if not await self._is_over(run, closed=isinstance(error.__cause__, ConnectionError)):
                raise
            raise await self._ended(run) from error

    async def _is_over(self, run: Run, *, closed: bool) -> bool:
        """Whether *run* is dead; if it has *closed* the connection, it may be so in a moment."""
        until = time.monotonic() + (ENDS_WITHIN_S if closed else 0.0)
        with contextlib.suppress(StoreError):  # the store does not say
            while not (await self._records.judge_again(run))[1].is_dead:
                if time.monotonic() >= until:
                    return False
                await asyncio.sleep(LOOK_S)
            return True
        return False

    async def _ended(self, run: Run) -> RunEndedError:
        what = f"{label(run)} (pid {run.identity.pid}) ended meanwhile"
        if await self._records.living(label(run)):
            what += ", and it runs again: give the command again if you mean the new run"
        return RunEndedError(f"{what}; `gracekit status` says how it ended")

    async def _ask(
        self, run: Run, verb: str, args: Mapping[str, Any], timeout_s: float
    ) -> RunAnswer:
        door = self._records.run_directory / door_name(run.run_id)
        until = time.monotonic() + DOOR_S
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await _ask_by_door(door, Ask(run_id=run.run_id, verb=verb, args=args))
            except TimeoutError as error:
                raise _silent(run, verb, timeout_s) from error
            except FileNotFoundError as error:
                if await self._is_over(run, closed=False):
                    raise await self._ended(run) from error
                if time.monotonic() >= until:
                    raise _without_door(run, door) from error
            except OSError as error:
                raise DependencyError(
                    f"{label(run)} cannot be reached by its door {door}: "
                    f"{error.strerror or error}; see `gracekit status`"
                ) from error
            await asyncio.sleep(LOOK_S)

    async def hear(self, run: Run, *, every_task: bool = False, **args: Any) -> RunReport:
        """The run's own status, or why there is none; each page within 2 s.

        Args:
            run: Who is asked.
            every_task: Ask on for the tasks that the first page has no room for.
            args: Of the verb `status`: which tasks, and how many.
        """
        answer: RunAnswer | None = None
        tasks: list[RunAnswer] = []
        try:
            page = answer = await self.ask(run, "status", args, timeout_s=STATUS_TIMEOUT_S)
            tasks += page.get("tasks", ())
            while every_task and page.get("next") is not None:
                more = args | {"after": page["next"]}
                page = await self.ask(run, "status", more, timeout_s=STATUS_TIMEOUT_S)
                tasks += page.get("tasks", ())
        except GracekitError as error:
            brief, why = _why_not(error)
            return RunReport(answer=answer, tasks=tasks, brief=brief, why=why)
        return RunReport(answer=answer, tasks=tasks)

    async def why_silent(self, run: Run) -> str:
        """`; it is not ready: ...` if *run* answers a question, though not an order."""
        answer = (await self.hear(run)).answer or {}
        return f"; it is not ready: {answer['not_ready']}" if answer.get("not_ready") else ""

    async def hear_all(
        self, records: StoreView, name: str | None, *, every_task: bool = False
    ) -> dict[str, RunReport]:
        """What each living run says, by run id; those that begin meanwhile are asked too."""
        reports: dict[str, RunReport] = {}
        for _ in range(ROUNDS):
            runs = [run for run in await records.living(name) if run.run_id not in reports]
            if not runs:
                break
            said = await asyncio.gather(*(self.hear(run, every_task=every_task) for run in runs))
            reports |= {run.run_id: one for run, one in zip(runs, said, strict=True)}
        return reports


async def find_task(records: StoreRecords, word: str, instance: str | None) -> ChosenTask:
    """The task that *word* means; living runs are asked if no row has that id.

    Raises:
        GracekitError: no task is meant, or more than one.
    """

    async def hear_all() -> dict[str, RunReport]:
        return await ControlClient(records).hear_all(records, instance, every_task=True)

    return await find(records, word, instance, hear_all)


async def _ask_by_door(door: Path, ask: Ask) -> RunAnswer:
    with address_of(door) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=LONGEST_ANSWER)
    try:
        writer.write(line_of_ask(ask))
        line = await reader.readline()
    except ValueError as error:
        raise BadMessageError(f"its answer is no line of {LONGEST_ANSWER:,} bytes") from error
    finally:
        writer.transport.abort()
    if not line:
        raise ConnectionResetError("it was closed before an answer came")
    return read_answer(line)


def _without_door(run: Run, door: Path) -> NotAskedError:
    return NotAskedError(
        f"{label(run)} has no door in {door.parent}: it has just begun or is about to end, its log "
        "says why, or that is not its run directory; on "
        f"its host, `kill -TERM {run.identity.pid}` drains it, -QUIT hands over at once, -USR1 "
        "writes its tasks to its standard error"
    )


def _silent(run: Run, verb: str, timeout_s: float) -> SilentError:
    pid = run.identity.pid
    words = f"{label(run)} (pid {pid}) lives and did not answer to {verb!r} within {timeout_s:g} s"
    if is_stopped(run):
        return StoppedError(
            f"{words}: it is stopped, as by SIGSTOP or a debugger; kill -CONT {pid} lets it go on"
        )
    return SilentError(words)


def is_stopped(run: Run) -> bool:
    """Whether its process is stopped; false if that cannot be seen from here."""
    identity = run.identity
    return proc.pid_namespace() == identity.pid_ns and proc.is_stopped(identity.pid)


def _why_not(error: GracekitError) -> tuple[str, str]:
    """Why a run gave no answer: in a few words, and the sentence where these do not say it."""
    match error:
        case NotAskedError():
            return "has no door", ""
        case StoppedError():
            return "does not answer", str(error)
        case SilentError():
            return "does not answer", ""
        case RunEndedError():
            return "ended meanwhile", str(error)
        case DependencyError():
            return "not reached", str(error)
        case _:
            return "answers with an error", str(error)
