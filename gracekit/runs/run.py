"""Runs on record: one row for each life of a process, and how it is judged.

Only `gracekit.life` judges whether a process lives. Beats are for display: no run counts as dead
because of a clock.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any, Final

import msgspec

from gracekit.exits import ExitEvidence, Verdict
from gracekit.life import Alive, Identity, Liveness, LockFile, RecordedLife, read_note
from gracekit.process import Point, Process
from gracekit.runs import runs_sql as sql
from gracekit.runs.end_records import EndRecord, read_crash, read_end
from gracekit.runs.names import crash_name, lock_name
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine, Queries


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a process, as stored.

    Attributes:
        run_id: 32 hex digits.
        instance: Its name, unique among living runs of the service.
        identity: Identity of its process.
        lock_path: File whose lock proves that it lives, as a path of the run itself.
        lock_file: Device and inode of that file; None beside a store in memory.
        phase: ServiceState, for display.
        beat_at: Wall time of the last beat on record, mostly less than `BEAT_WRITTEN_S` ago while
            it lives. It proves nothing, as clocks jump and loops block.
        stop_at: Wall time of its stop-intent; None if there is none.
        stop_by: Who asked for the stop: a user and host, the name of a token, a signal.
        exit_code: Exit code in its stop record; None if it wrote none.
        verdict: How it ended; None until another run has judged that.
        gone_by: Who said that it is gone: an operator, or a run that saw no beat; None: nobody.
        invocation: systemd's id of its start; None outside of a unit.
        host_stop: Whether the host was shut down when a signal stopped it.
        rebooted: Whether its host was booted since, if nothing of its end is on record.
        kernel: How its process ended, if its parent or systemd has recorded that.
        crash: What crashed and where, if faulthandler has written that.
    """

    run_id: str
    service: str
    host: str
    instance: str
    generation: int
    identity: Identity
    lock_path: Path
    lock_file: LockFile | None
    phase: str
    topic: str
    ops_topic: str
    transport: str
    started_at: float
    beat_at: float
    stop_at: float | None
    stop_source: str | None
    stop_by: str | None
    stop_reason: str | None
    ended_at: float | None
    exit_code: int | None
    report: dict[str, Any] | None
    verdict: Verdict | None
    adopted_at: float | None
    gone_by: str | None
    gone_reason: str | None
    invocation: str | None
    host_stop: bool | None
    rebooted: bool | None
    kernel: EndRecord | None
    crash: str | None

    @property
    def life(self) -> RecordedLife:
        """The part of the row by which `gracekit.life` judges whether it lives."""
        return RecordedLife(
            identity=self.identity, lock_name=self.lock_path.name, lock_file=self.lock_file
        )

    @property
    def has_lacked_memory(self) -> bool:
        """Whether the kernel has killed it for memory, as far as anybody knows."""
        if self.kernel is None or self.kernel.how == "exited":
            return False
        return self.kernel.status == signal.SIGKILL and self.kernel.oom_kills > 0

    @property
    def evidence(self) -> ExitEvidence:
        """The part of the row by which `exits.classify` judges its end."""
        return ExitEvidence(stop_begun=self.stop_at is not None, exit_code=self.exit_code)


def acted_until(run: Run, now: float) -> float:
    """Wall time since which nothing of a dead run can have acted.

    Args:
        run: Proven dead, and not adopted yet.
        now: The wall time; returned if nobody knows when the process has ended.
    """
    dies_by = (run.report or {}).get("dies_by")
    return now if dies_by is None else min(now, float(dies_by))


WATCHED: Final = "no beat for"
"""The reason begins so if a run was declared dead by the silence of its beats."""
# Notes in a lock file.
STOPPING: Final = "stopping"
ENDED: Final = "ended with "
_IDENTITY: Final = ("boot_id", "pid_ns", "time_ns", "pid", "start_ticks")
_NAMES: Final = tuple(name.strip() for name in sql.COLUMNS.split(","))


def run_of(row: Row) -> Run:
    """The run in a row of `COLUMNS`."""
    values: dict[str, Any] = dict(zip(_NAMES, row, strict=True))
    values["identity"] = Identity(**{name: values.pop(name) for name in _IDENTITY})
    values["lock_path"] = Path(values["lock_path"])
    lock_file = values["lock_file"]
    values["lock_file"] = None if lock_file is None else LockFile.from_text(lock_file)
    values["report"] = None if values["report"] is None else json.loads(values["report"])
    values["verdict"] = None if values["verdict"] is None else Verdict(values["verdict"])
    for name in ("host_stop", "rebooted"):
        values[name] = None if values[name] is None else bool(values[name])
    kernel = values["kernel"]
    values["kernel"] = None if kernel is None else msgspec.json.decode(kernel, type=EndRecord)
    return Run(**values)


def judge_run(
    run: Run, process: Process, directory: Path | None, *, is_shared: bool = False
) -> Liveness:
    """Whether *run* may still act: its process lives, and no record says that it is over.

    *directory* is where this process sees the run locks; *is_shared* says that other hosts use the
    store, too.
    """
    if run.adopted_at is not None:
        return Liveness(Alive.DEAD, "another run has recorded its end, and taken over its tasks")
    if run.report is not None and run.report.get("left"):
        # Even if its process goes on, nothing of the run can act any more.
        return Liveness(Alive.DEAD, "its stop record says that nothing of it is left")
    if run.gone_by is not None:
        return Liveness(Alive.DEAD, f"{run.gone_by} said that it is gone: {run.gone_reason}")
    return process.judge(run.life, directory, is_shared=is_shared)


def evidence_of(run: Run, directory: Path | None, *, copied_at: float = -math.inf) -> ExitEvidence:
    """The evidence in its row; if that has no stop record, also the note in its lock file.

    *copied_at* is from `gracekit.store.older`: whether the row may be an outdated one.
    """
    note = ""
    if directory is not None and run.exit_code is None:
        note = read_note(directory / lock_name(run.run_id))
    code = note.removeprefix(ENDED)
    if note.startswith(ENDED) and code.isdecimal():
        return run.evidence._replace(exit_code=int(code))
    return run.evidence._replace(
        stop_begun=run.evidence.stop_begun or note == STOPPING,
        is_outdated=run.beat_at <= copied_at,
    )


def with_end(run: Run, directory: Path | None, *, boot_id: str = "") -> Run:
    """*run* with what files of its host say of its end and its row does not, as yet.

    Args:
        run: One that is dead.
        directory: Of the run locks, as this process sees it; None without.
        boot_id: Of this machine, if it is the one of the run.
    """
    more: dict[str, Any] = {}
    if directory is not None and run.kernel is None:
        more["kernel"] = read_end(directory, run.identity, run.invocation)
    if directory is not None and run.crash is None:
        more["crash"] = read_crash(directory / crash_name(run.run_id))
    if boot_id and run.rebooted is None and run.ended_at is None and run.adopted_at is None:
        more["rebooted"] = run.identity.boot_id != boot_id
    return msgspec.structs.replace(run, **more)


def end_all_beats(batch: Batch) -> None:
    """Let no run act any more that has joined before."""
    batch.add(sql.END_ALL_BEATS)


async def list_runs(engine: Queries, *, limit: int = 100) -> list[Run]:
    """Runs on record of all services, newest first."""
    return [run_of(row) for row in await engine.query(sql.ALL, limit)]


async def list_open(engine: Engine, service: str) -> list[Run]:
    """Runs of *service* that have neither ended nor been adopted; some may be dead."""
    rows = await engine.query(sql.OPEN, service)
    return [run_of(row) for row in rows]


def gone(run: Run, *, by: str, reason: str, at: float) -> Batch:
    """A batch that records that an operator said *run* is gone; a conflict if one did before."""
    batch = Batch(Point.ADOPT)
    batch.add(sql.GONE, at, by, reason, run.run_id, expect=1)
    batch.add(sql.END_BEAT, run.run_id)
    return batch


def declared(run_id: str, number: int, *, by: str, reason: str, at: float) -> Batch:
    """As `gone`, for a run that was watched; a conflict if it has beaten since, too."""
    batch = Batch(Point.ADOPT)
    batch.add(sql.DECLARE_DEAD, run_id, number, expect=1)
    batch.add(sql.GONE, at, by, reason, run_id, expect=1)
    return batch


def host_gone(host: str, *, by: str, reason: str, at: float) -> Batch:
    """A batch that records that *host* does not come back; a conflict if a run of it may act."""
    batch = Batch(Point.ADOPT)
    batch.add(sql.HOST_GONE, host, at, by, reason, expect=1)
    return batch


def run_as_json(run: Run) -> dict[str, Any]:
    """The run as plain data for `--json`."""
    data = msgspec.structs.asdict(run)
    data["identity"] = msgspec.structs.asdict(run.identity)
    data["lock_path"] = str(run.lock_path)
    data["lock_file"] = None if run.lock_file is None else str(run.lock_file)
    data["verdict"] = run.verdict.value if run.verdict else None
    data["kernel"] = None if run.kernel is None else msgspec.structs.asdict(run.kernel)
    return data
