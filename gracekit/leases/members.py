"""Members and their runs: which process fills an instance's slot, and who is proven dead.

A member is one instance of a service; a run is one life of its process. Proof
of life is a lock that the kernel drops at death (`process.LifeLock`); beats
are for display. Nobody is declared dead by a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.errors import AlreadyRunningError
from gracekit.exits import Evidence, Verdict, classify
from gracekit.process import Identity, LifeLock, Point, Process
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine

MAX_SLOTS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One life of a process, as stored.

    Attributes:
        run_id: 32 hex digits.
        instance: Slot that it fills, unique among living runs of the service.
        identity: Its process.
        lock_path: File whose lock proves that it lives.
        phase: ServiceState, for display.
        beat_at: Wall time of the last beat, for display.
        stop_at: Wall time of its stop-intent; None if none stands.
        exit_code: Of its stop record; None if it wrote none.
        verdict: How it ended; None until it was classified.
    """

    run_id: str
    service: str
    host: str
    instance: str
    generation: int
    identity: Identity
    lock_path: Path
    phase: str
    topic: str
    ops_topic: str
    transport: str
    started_at: float
    beat_at: float
    stop_at: float | None
    stop_source: str | None
    stop_reason: str | None
    ended_at: float | None
    exit_code: int | None
    report: dict[str, Any] | None
    verdict: Verdict | None
    adopted_at: float | None

    @property
    def evidence(self) -> Evidence:
        """What its end is judged by."""
        return Evidence(stop_begun=self.stop_at is not None, exit_code=self.exit_code)


_COLUMNS: Final = (
    "run_id, service, host, instance, generation, boot_id, pid_ns, pid, start_ticks, lock_path, "
    "phase, topic, ops_topic, transport, started_at, beat_at, stop_at, stop_source, stop_reason, "
    "ended_at, exit_code, report, verdict, adopted_at"
)
_JOIN: Final = """
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, pid,
    start_ticks, lock_path, phase, topic, ops_topic, transport, started_at, beat_at)
SELECT ?, ?, ?, ?, 1 + coalesce(max(generation), 0), ?, ?, ?, ?, ?, ?, 'starting', ?, ?, ?, ?, ?
FROM run WHERE service = ? AND instance = ? RETURNING generation"""


def _run(row: Row) -> Run:
    names = [name.strip() for name in _COLUMNS.split(",")]
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    values["identity"] = Identity(
        **{name: values.pop(name) for name in ("boot_id", "pid_ns", "pid", "start_ticks")}
    )
    values["lock_path"] = Path(values["lock_path"])
    values["report"] = None if values["report"] is None else json.loads(values["report"])
    values["verdict"] = None if values["verdict"] is None else Verdict(values["verdict"])
    return Run(**values)


async def list_runs(engine: Engine, *, service: str | None = None, limit: int = 100) -> list[Run]:
    """Runs on record, newest first; of one service, or of all."""
    rows = await engine.query(
        f"SELECT {_COLUMNS} FROM run WHERE ? IS NULL OR service = ? "  # noqa: S608 - a constant
        "ORDER BY started_at DESC, generation DESC LIMIT ?",
        service,
        service,
        limit,
    )
    return [_run(row) for row in rows]


async def claim_slot(
    engine: Engine,
    process: Process,
    directory: Path | None,
    *,
    service: str,
    host: str,
    instance: str | None,
) -> tuple[str, LifeLock | None]:
    """Take the run lock of *instance*, or of the first free slot `{host}-{n}`.

    The lock file is named for the slot, so that a second run of the same
    instance is refused while the first lives.

    Without a *directory* for the locks no other process sees the store.

    Raises:
        AlreadyRunningError: the instance lives, or all slots are taken.
    """
    # A process never opens its own lock files twice: closing one would drop the lock.
    me = process.identity
    rows = await engine.query(
        "SELECT instance FROM run WHERE service = ? AND ended_at IS NULL "
        "AND boot_id = ? AND pid_ns = ? AND pid = ? AND start_ticks = ?",
        service,
        me.boot_id,
        me.pid_ns,
        me.pid,
        me.start_ticks,
    )
    mine = {row[0] for row in rows}
    names: Iterable[str] = [instance] if instance else (f"{host}-{n}" for n in range(MAX_SLOTS))
    for name in names:
        if name in mine:
            continue
        if directory is None:
            return name, None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: ASYNC240 - once, at start
        lock = LifeLock(directory / f"{service}@{name}.lock")
        if lock.acquire():
            return name, lock
    if instance:
        raise AlreadyRunningError(
            f"instance {instance!r} of service {service!r} is running: two runs of one instance "
            "would answer for the same rows; stop it, or set GRACEKIT_INSTANCE to another name"
        )
    raise AlreadyRunningError(f"all {MAX_SLOTS} slots of service {service!r} on {host!r} are taken")


class Members:
    """This run among the runs of its service."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        process: Process,
        *,
        run_id: str,
        service: str,
        lock_directory: Path | None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._process = process
        self.run_id = run_id
        self._service = service
        self._lock_directory = lock_directory
        self._lock_name = ""

    async def join(
        self,
        *,
        host: str,
        instance: str,
        lock_path: Path,
        version: str,
        topic: str,
        ops_topic: str,
        transport: str,
    ) -> int:
        """Write this run down; returns its generation, which counts the runs of the instance."""
        self._lock_name = lock_path.name
        now = self._clock.wall()
        me = self._process.identity
        batch = Batch(Point.JOIN)
        batch.ask(
            _JOIN,
            self.run_id,
            self._service,
            host,
            instance,
            version,
            me.boot_id,
            me.pid_ns,
            me.pid,
            me.start_ticks,
            str(lock_path),
            topic,
            ops_topic,
            transport,
            now,
            now,
            self._service,
            instance,
            expect=1,
        )
        rows = await self._engine.commit(batch)
        return int(rows[0][0][0] or 1)

    async def beat(self, phase: str) -> None:
        """Refresh what listings show; proves nothing."""
        batch = Batch(Point.JOIN, durable=False)
        batch.add(
            "UPDATE run SET beat_at = ?, phase = ? WHERE run_id = ?",
            self._clock.wall(),
            phase,
            self.run_id,
        )
        await self._engine.commit(batch)

    def stop_intent(self, *, source: str, by: str, reason: str) -> Batch:
        """The record that this stop is meant; the first one stands."""
        batch = Batch(Point.STOP_INTENT)
        batch.add(
            "UPDATE run SET stop_at = ?, stop_source = ?, stop_by = ?, stop_reason = ?, "
            "phase = 'draining' WHERE run_id = ? AND stop_at IS NULL",
            self._clock.wall(),
            source,
            by,
            reason,
            self.run_id,
        )
        return batch

    async def withdraw_stop(self) -> None:
        """A drain was resumed: no stop is meant any more."""
        batch = Batch(Point.WITHDRAW_STOP)
        batch.add(
            "UPDATE run SET stop_at = NULL, stop_source = NULL, stop_by = NULL, "
            "stop_reason = NULL WHERE run_id = ?",
            self.run_id,
        )
        await self._engine.commit(batch)

    async def stop_record(self, exit_code: int, report: dict[str, Any]) -> None:
        """The last act of a run that ends by itself."""
        batch = Batch(Point.STOP_RECORD)
        batch.add(
            "UPDATE run SET ended_at = ?, exit_code = ?, report = ?, phase = 'stopped' "
            "WHERE run_id = ?",
            self._clock.wall(),
            exit_code,
            json.dumps(report),
            self.run_id,
        )
        await self._engine.commit(batch)

    def is_alive(self, run: Run) -> bool:
        """Whether *run* may still act: its process lives, and it did not end in good order."""
        if run.run_id == self.run_id:
            return True
        if run.report is not None and run.report.get("left"):
            return False  # nothing of it can act any more, even if its process goes on
        lock_path = run.lock_path
        if self._lock_directory is not None:
            # Beside our own store: another mount may know the same file by another path.
            lock_path = self._lock_directory / lock_path.name
        mine = bool(self._lock_name) and lock_path.name == self._lock_name
        if mine and run.identity != self._process.identity:
            # We hold the lock of its slot, so it is dead; and opening the file would drop our lock.
            return False
        return self._process.is_alive(run.identity, lock_path)

    async def others(self) -> list[Run]:
        """Runs of this service that have not ended, this one excepted; some may be dead."""
        rows = await self._engine.query(
            f"SELECT {_COLUMNS} FROM run "  # noqa: S608 - a constant
            "WHERE service = ? AND adopted_at IS NULL AND ended_at IS NULL AND run_id <> ?",
            self._service,
            self.run_id,
        )
        return list(map(_run, rows))

    async def dead_runs(self) -> list[Run]:
        """Runs of this service that are proven dead and not yet adopted, oldest first."""
        rows = await self._engine.query(
            f"SELECT {_COLUMNS} FROM run "  # noqa: S608 - a constant
            "WHERE service = ? AND adopted_at IS NULL AND run_id <> ? ORDER BY started_at",
            self._service,
            self.run_id,
        )
        return [run for run in map(_run, rows) if not self.is_alive(run)]

    def add_adoption(self, batch: Batch, run: Run) -> Verdict:
        """Write the verdict on a dead run, once; a second adopter's batch rolls back."""
        verdict = classify(run.evidence)
        batch.add(
            "UPDATE run SET adopted_at = ?, adopted_by = ?, verdict = ? "
            "WHERE run_id = ? AND adopted_at IS NULL",
            self._clock.wall(),
            self.run_id,
            verdict.value,
            run.run_id,
            expect=1,
        )
        return verdict


def run_as_json(run: Run) -> dict[str, Any]:
    """The run as plain data for `--json`."""
    data = asdict(run)
    data["lock_path"] = str(run.lock_path)
    data["verdict"] = run.verdict.value if run.verdict else None
    return data
