"""Members and their runs: which process fills an instance's slot, and who is proven dead.

A member is one instance of a service; a run is one life of its process. Who
lives is judged by `gracekit.life`, and by nothing else; beats are for display.
Nobody is declared dead by a clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from gracekit.clock import Clock
from gracekit.errors import AlreadyRunningError
from gracekit.exits import Evidence, Verdict, classify
from gracekit.life import Answer, Identity, Judgement, Life, LifeLock, LockFile, read_note
from gracekit.process import Point, Process
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine
from gracekit.store.files import make_directory

MAX_SLOTS: Final = 1000
_LONGEST_SLOT: Final = 200
# Notes in a lock file.
_STOPPING: Final = "stopping"
_ENDED: Final = "ended with "
OFFERS: Final = 20
"""So many different versions are remembered."""
BEAT_WRITTEN_S: Final = 15.0
"""A sign of life is written so often, and a change of phase at once: at one a second an idle
service wrote 0.4 GB a day."""
BACK_WITHIN_S: Final = 300.0
"""So long after the end of a run, its instance may be about to start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One life of a process, as stored.

    Attributes:
        run_id: 32 hex digits.
        instance: Slot that it fills, unique among living runs of the service.
        identity: Its process.
        lock_path: File whose lock proves that it lives, as the run itself saw it.
        lock_file: Which file that was; None where an older gracekit wrote the row.
        phase: ServiceState, for display.
        beat_at: Wall time of the last beat on record, some `BEAT_WRITTEN_S` old at most while it
            lives. It proves nothing, as clocks jump and loops block.
        stop_at: Wall time of its stop-intent; None if none stands.
        exit_code: Of its stop record; None if it wrote none.
        verdict: How it ended; None until it was classified.
        gone_by: Operator who said that it is gone; None if nobody did.
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
    stop_reason: str | None
    ended_at: float | None
    exit_code: int | None
    report: dict[str, Any] | None
    verdict: Verdict | None
    adopted_at: float | None
    gone_by: str | None
    gone_reason: str | None

    @property
    def life(self) -> Life:
        """What it is judged alive or dead by."""
        return Life(identity=self.identity, lock_name=self.lock_path.name, lock_file=self.lock_file)

    @property
    def evidence(self) -> Evidence:
        """What its end is judged by."""
        return Evidence(stop_begun=self.stop_at is not None, exit_code=self.exit_code)


_COLUMNS: Final = (
    "run_id, service, host, instance, generation, boot_id, pid_ns, time_ns, pid, start_ticks, "
    "lock_path, lock_file, phase, topic, ops_topic, transport, started_at, beat_at, "
    "stop_at, stop_source, stop_reason, ended_at, exit_code, report, verdict, adopted_at, "
    "gone_by, gone_reason"
)
_JOIN: Final = """
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, time_ns,
    pid, start_ticks, lock_path, lock_file, phase, topic, ops_topic, transport, methods,
    started_at, beat_at, schema)
SELECT ?, ?, ?, ?, 1 + coalesce(max(generation), 0), ?, ?, ?, ?, ?, ?, ?, ?, 'starting',
    ?, ?, ?, ?, ?, ?, (SELECT user_version FROM pragma_user_version)
FROM run WHERE service = ? AND instance = ? RETURNING generation"""
_IDENTITY: Final = ("boot_id", "pid_ns", "time_ns", "pid", "start_ticks")


def _run(row: Row) -> Run:
    names = [name.strip() for name in _COLUMNS.split(",")]
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    values["identity"] = Identity(**{name: values.pop(name) for name in _IDENTITY})
    values["lock_path"] = Path(values["lock_path"])
    lock_file = values["lock_file"]
    values["lock_file"] = None if lock_file is None else LockFile.from_text(lock_file)
    values["report"] = None if values["report"] is None else json.loads(values["report"])
    values["verdict"] = None if values["verdict"] is None else Verdict(values["verdict"])
    return Run(**values)


def judge_run(run: Run, process: Process, directory: Path | None) -> Judgement:
    """Whether *run* may still act: its process lives, and its record does not end it.

    *directory* is that of the run locks, as this process sees it.
    """
    if run.adopted_at is not None:
        return Judgement(Answer.DEAD, "it was classified, and its rows were taken over")
    if run.report is not None and run.report.get("left"):
        # Also while its process goes on: nothing of the run can act any more.
        return Judgement(Answer.DEAD, "its stop record says that nothing of it is left")
    if run.gone_by is not None:
        return Judgement(Answer.DEAD, f"{run.gone_by} said that it is gone: {run.gone_reason}")
    return process.judge(run.life, directory)


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


class Seat:
    """A slot that this process has taken: who it is there, and the locks that say so.

    The slot's lock keeps a second run of the instance out, also one of an older gracekit. The
    run's own proves its life, on a file that no other run ever uses.

    Attributes:
        instance: Name of the slot.
        identity: This process, read when it took the seat.
        lock_path: Of the run's own lock; empty without a directory.
        lock_file: On which file that is.
    """

    def __init__(
        self, instance: str, identity: Identity, slot: LifeLock | None, own: LifeLock | None
    ) -> None:
        self.instance = instance
        self.identity = identity
        self.lock_path = Path() if own is None else own.path
        self.lock_file = None if own is None else own.file
        self._slot = slot
        self._own = own

    def trouble(self) -> str | None:
        """Why others cannot see any more that this run lives, as a sentence; None if they can."""
        locks = [lock for lock in (self._own, self._slot) if lock is not None]
        return next((seen for lock in locks if (seen := lock.trouble()) is not None), None)

    def note_stop(self, code: int | None = None) -> None:
        """Note that a stop has begun, or ended with *code*, in case the store cannot take it."""
        self._note(_STOPPING if code is None else f"{_ENDED}{code}")

    def clear_note(self) -> None:
        """The store has taken the stop-intent, or the stop was withdrawn."""
        self._note("")

    def _note(self, text: str) -> None:
        if self._own is not None:
            self._own.write_note(text)

    def leave(self, *, is_recorded: bool) -> None:
        """Give the locks up; may be called twice.

        Args:
            is_recorded: Whether the run's end is on record, so that nobody asks for its lock.
        """
        if self._own is not None:
            self._own.release(remove=is_recorded)
        if self._slot is not None:
            self._slot.release()


async def take_seat(
    engine: Engine,
    process: Process,
    directory: Path | None,
    *,
    run_id: str,
    service: str,
    host: str,
    instance: str | None,
) -> Seat:
    """Take the slot *instance*, or the first free one of `{host}-{n}`.

    Without a *directory* for the locks no other process sees the store.

    Raises:
        AlreadyRunningError: the instance lives, or all slots are taken.
        ConfigError: *directory* or a lock in it is not ours, or no lock can be taken there.
    """
    if directory is not None:
        make_directory(directory)  # also before it is asked who lives
    identity = process.identify()
    rows = await engine.query(
        f"SELECT {_COLUMNS} FROM run "  # noqa: S608 - a constant
        "WHERE service = ? AND ended_at IS NULL AND adopted_at IS NULL",
        service,
    )
    taken = {run.instance for run in map(_run, rows) if judge_run(run, process, directory).is_alive}
    names: Iterable[str] = [instance] if instance else (f"{host}-{n}" for n in range(MAX_SLOTS))
    for name in names:
        if name in taken:
            continue
        if directory is None:
            return Seat(name, identity, None, None)
        slot = LifeLock(directory / slot_name(service, name))
        if slot.acquire():
            own = LifeLock(directory / lock_name(run_id))
            if own.acquire():
                return Seat(name, identity, slot, own)
            slot.release()
    if instance:
        raise AlreadyRunningError(
            f"instance {instance!r} of service {service!r} is running: two runs of one instance "
            "would answer for the same rows; stop it, or set GRACEKIT_INSTANCE to another name"
        )
    raise AlreadyRunningError(f"all {MAX_SLOTS} slots of service {service!r} on {host!r} are taken")


def slot_name(service: str, instance: str) -> str:
    """Name of the file whose lock keeps a second run of the instance out.

    Names of services and instances hold what no file name may; `%40` stands
    for `@`, and a digest for the rest of what is too long.
    """
    name = f"{quote(service, safe='')}@{quote(instance, safe='')}"
    if len(name) > _LONGEST_SLOT:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: _LONGEST_SLOT - len(digest)]}%-{digest}"  # `quote` writes no "%-"
    return f"{name}.lock"


def lock_name(run_id: str) -> str:
    """Name of the file whose lock proves the life of a run."""
    return f"{run_id}.lock"


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
        self._beaten: tuple[str, float] | None = None  # phase on record, and loop time of that

    async def join(
        self,
        *,
        host: str,
        seat: Seat,
        version: str,
        topic: str,
        ops_topic: str,
        transport: str,
        methods: str | None = None,
    ) -> int:
        """Write this run down; returns its generation, which counts the runs of the instance.

        *methods* says what it serves, in words that only those who act on requests read.
        """
        now = self._clock.wall()
        me = seat.identity
        batch = Batch(Point.JOIN)
        batch.ask(
            _JOIN,
            self.run_id,
            self._service,
            host,
            seat.instance,
            version,
            *(me.boot_id, me.pid_ns, me.time_ns, me.pid, me.start_ticks),
            str(seat.lock_path),
            None if seat.lock_file is None else str(seat.lock_file),
            topic,
            ops_topic,
            transport,
            methods,
            now,
            now,
            self._service,
            seat.instance,
            expect=1,
        )
        rows = await self._engine.commit(batch)
        return int(rows[0][0][0] or 1)

    async def beat(self, phase: str, *, written_s: float = BEAT_WRITTEN_S) -> str | None:
        """Look whether this run may act, and refresh what listings show.

        Args:
            phase: Of the service; a new one is written at once.
            written_s: Seconds after which a sign of life is written again.

        Returns:
            Why this run may not act any more, as a sentence; None if it may. Others have taken
            its rows over, at the word of an operator.
        """
        await self._show(phase, written_s)
        rows = await self._engine.query(
            "SELECT gone_by, gone_reason, adopted_by FROM run WHERE run_id = ?", self.run_id
        )
        for gone_by, reason, adopted_by in rows:
            if gone_by is not None:
                return f"{gone_by!s} said that this run is gone: {reason!s}"
            if adopted_by is not None:
                return f"run {adopted_by!s} has taken this run's rows over"
        return None

    async def _show(self, phase: str, written_s: float) -> None:
        now = self._clock.loop()
        if self._beaten is not None:
            shown, since = self._beaten
            if shown == phase and now - since < written_s:
                return
        batch = Batch(Point.JOIN, durable=False)
        batch.add(
            "UPDATE run SET beat_at = ?, phase = ? WHERE run_id = ?",
            *(self._clock.wall(), phase, self.run_id),
        )
        await self._engine.commit(batch)
        self._beaten = phase, now

    def stop_intent(self, *, source: str, by: str, reason: str) -> Batch:
        """The record that this stop is meant; the first one stands."""
        self._beaten = None  # it writes the phase, too
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
        self._beaten = None
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

    def judge(self, run: Run) -> Judgement:
        """Whether *run* may still act."""
        if run.run_id == self.run_id:
            return Judgement(Answer.ALIVE, "it is this run")
        return judge_run(run, self._process, self._lock_directory)

    async def others(self) -> list[Run]:
        """Runs of this service that have not ended, this one excepted; some may be dead."""
        rows = await self._engine.query(
            f"SELECT {_COLUMNS} FROM run "  # noqa: S608 - a constant
            "WHERE service = ? AND adopted_at IS NULL AND ended_at IS NULL AND run_id <> ?",
            self._service,
            self.run_id,
        )
        return list(map(_run, rows))

    async def siblings(self) -> list[tuple[Run, str | None]]:
        """Other runs of this service that may serve now or again, with the methods they wrote down.

        They are those that live; those of whom nothing is proven, if they have beaten less than
        `BACK_WITHIN_S` ago; and those that ended less than that ago and whose instance has no run
        now: it may be starting again, in an upgrade for example.
        """
        since = self._clock.wall() - BACK_WITHIN_S
        rows = await self._engine.query(
            f"SELECT {_COLUMNS}, methods FROM run WHERE service = ? "  # noqa: S608 - a constant
            "AND (coalesce(ended_at, adopted_at) IS NULL OR coalesce(ended_at, adopted_at) >= ?) "
            "ORDER BY generation DESC",
            self._service,
            since,
        )
        known = [(_run(row[:-1]), None if row[-1] is None else str(row[-1])) for row in rows]
        found = [one for one in known if not self._is_silent(one[0], since)]
        living = [
            one for one in found if one[0].ended_at is None and not self.judge(one[0]).is_dead
        ]
        last: dict[str, tuple[Run, str | None]] = {}
        for one in found:
            last.setdefault(one[0].instance, one)
        for run, _ in living:
            last.pop(run.instance, None)
        others = [one for one in living if one[0].run_id != self.run_id]
        return [*others, *last.values()]

    def _is_silent(self, run: Run, since: float) -> bool:
        return (
            run.beat_at < since
            and run.ended_at is None
            and self.judge(run).answer is Answer.NOT_PROVEN
        )

    async def offers(self) -> list[str]:
        """What runs on record have served, as texts of `gracekit.rpc.offer`; newest first."""
        rows = await self._engine.query(
            "SELECT methods FROM run WHERE service = ? AND methods IS NOT NULL "
            "GROUP BY methods ORDER BY max(started_at) DESC LIMIT ?",
            self._service,
            OFFERS,
        )
        return [str(methods) for (methods,) in rows]

    async def survey(self) -> tuple[list[Run], list[tuple[Run, Judgement]]]:
        """Runs of this service that are not yet adopted, this one excepted, oldest first.

        Returns:
            Those proven dead, and those of whom nothing is proven.
        """
        dead, doubtful = list[str](), list[tuple[Run, Judgement]]()
        for run in await self._not_adopted():
            judgement = self.judge(run)
            if judgement.is_dead:
                dead.append(run.run_id)
            elif not judgement.is_alive:
                doubtful.append((run, judgement))
        # Read again: it may have written its stop record, and ended, since its row was read.
        ended = [run for run in await self._not_adopted() if run.run_id in dead] if dead else []
        return ended, doubtful

    async def _not_adopted(self) -> list[Run]:
        rows = await self._engine.query(
            f"SELECT {_COLUMNS} FROM run "  # noqa: S608 - a constant
            "WHERE service = ? AND adopted_at IS NULL AND run_id <> ? ORDER BY started_at",
            self._service,
            self.run_id,
        )
        return list(map(_run, rows))

    async def ended_badly(self, *, since: float) -> list[Run]:
        """Runs of this service that were adopted from that wall time on, but for drained ones."""
        rows = await self._engine.query(
            f"SELECT {_COLUMNS} FROM run "  # noqa: S608 - a constant
            "WHERE service = ? AND adopted_at >= ? AND verdict <> ?",
            self._service,
            since,
            Verdict.DRAINED.value,
        )
        return list(map(_run, rows))

    def forget(self, run: Run) -> None:
        """Remove the lock file of a run that was adopted: nobody asks for it any more."""
        if (path := self._lock_of(run)) is not None:
            with contextlib.suppress(OSError):
                path.unlink()

    def _evidence_of(self, run: Run) -> Evidence:
        """What its row says; where that says nothing of a stop, the note in its lock file."""
        path = self._lock_of(run)
        note = "" if path is None or run.exit_code is not None else read_note(path)
        code = note.removeprefix(_ENDED)
        if note.startswith(_ENDED) and code.isdecimal():
            return replace(run.evidence, exit_code=int(code))
        return replace(run.evidence, stop_begun=run.evidence.stop_begun or note == _STOPPING)

    def _lock_of(self, run: Run) -> Path | None:
        """Its own lock file, as this process sees it; an older gracekit wrote none."""
        if self._lock_directory is None or run.lock_path.name != lock_name(run.run_id):
            return None
        return self._lock_directory / run.lock_path.name

    def add_adoption(self, batch: Batch, run: Run) -> Verdict:
        """Write the verdict on a dead run, once; a second adopter's batch rolls back."""
        verdict = classify(self._evidence_of(run))
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


def gone(run: Run, *, by: str, reason: str, at: float) -> Batch:
    """An operator's word that a run is gone; refused if somebody was quicker."""
    batch = Batch(Point.ADOPT)
    batch.add(
        "UPDATE run SET gone_at = ?, gone_by = ?, gone_reason = ? "
        "WHERE run_id = ? AND adopted_at IS NULL AND gone_at IS NULL",
        *(at, by, reason, run.run_id),
        expect=1,
    )
    return batch


def run_as_json(run: Run) -> dict[str, Any]:
    """The run as plain data for `--json`."""
    data = asdict(run)
    data["lock_path"] = str(run.lock_path)
    data["lock_file"] = None if run.lock_file is None else str(run.lock_file)
    data["verdict"] = run.verdict.value if run.verdict else None
    return data
