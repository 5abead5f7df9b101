"""Members: this run and the other runs of its service, and which of those are proven dead.

A member is one instance of a service; a run is one life of its process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.config.choices import StopSource
from gracekit.errors import ConfigError, ConflictError
from gracekit.exits import ExitEvidence, Verdict, classify
from gracekit.life import Alive, Liveness
from gracekit.process import Point, Process
from gracekit.runs import runs_sql as sql
from gracekit.runs.end_records import (
    invocation,
    is_old,
    late_records,
)
from gracekit.runs.heart import Heart
from gracekit.runs.names import crash_name, door_name, lock_name
from gracekit.runs.pages import find_runs
from gracekit.runs.run import Run, declared, evidence_of, judge_run, list_open, run_of, with_end
from gracekit.runs.seat import Seat, taken
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.older import copied_at
from gracekit.store.wakeup import pipe_of

LEASE_MEMBERS: Final = "gracekit-leases"
"""The service of members that hold leases and serve nothing; runs of every service adopt them."""
OFFERS: Final = 20
"""Most versions of which `Members.offers` returns what they served."""
BEAT_WRITTEN_S: Final = 15.0
"""Seconds between two beats that are written; a change of phase is written at once. With one beat a
second, an idle service wrote 0.4 GB a day."""
BACK_WITHIN_S: Final = 300.0
"""Seconds after the end of a run within which its instance may be starting again."""


class Members:
    """The rows of this run and of the other runs of its service.

    Attributes:
        joined_at: Wall time at which the row of this run was written; None before that.
        methods: What this run serves, as a text of `gracekit.rpc.offer`.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        process: Process,
        *,
        run_id: str,
        service: str,
        lock_directory: Path | None,
        heart: Heart | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._process = process
        self.run_id = run_id
        self._service = service
        self.label = f"{service} run {run_id}"
        self._lock_directory = lock_directory
        self._heart = heart
        self.joined_at: float | None = None
        self.methods = "[]"
        self._beaten: tuple[str, float] | None = None  # phase and loop time of the last beat
        self._may_act_at: Hashable = None  # mark of the store that says so

    async def join(
        self,
        *,
        host: str,
        seat: Seat,
        version: str,
        topic: str,
        ops_topic: str,
        transport: str,
        schema: int,
        methods: str = "[]",
        kinds: str = "[]",
    ) -> int:
        """Write the row of this run; from then on the store takes commits only while it may act.

        Returns its generation, which counts runs of the instance.

        *methods* is what it serves, as a text of `gracekit.rpc.offer`; *kinds* is a JSON list of
        the kinds of resources that it settles.

        Raises:
            AlreadyRunningError: another run has joined as this instance meanwhile.
        """
        now, heart = self._clock.wall(), self._heart
        self.joined_at, self.methods, me = now, methods, seat.identity
        batch = Batch(Point.JOIN)
        for dead in seat.replaced:
            self._add_replaced(batch, dead, at=now)
        batch.add(sql.HOST_BACK, host)
        batch.add(sql.REBOOTED, host, me.boot_id)
        times = (None, None) if heart is None else (heart.timings.fail_s, heart.timings.dead_s)
        batch.add(sql.JOIN_BEAT, self.run_id, self._service, seat.instance, *times, expect=1)
        joining = batch.ask(
            sql.JOIN,
            self.run_id,
            self._service,
            host,
            seat.instance,
            version,
            *(me.boot_id, me.pid_ns, me.time_ns, me.pid, me.start_ticks),
            str(seat.lock_path),
            None if seat.lock_file is None else str(seat.lock_file),
            *(topic, ops_topic, transport, methods, kinds, now, schema),
            invocation(),
            expect=1,
        )
        since = 0.0 if heart is None else heart.arm()
        try:
            rows = await self._engine.commit(batch)
        except ConflictError as error:
            raise taken(self._service, seat.instance) from error
        self._engine.guard(sql.MAY_ACT, self.run_id)
        if heart is not None:
            heart.join(self.run_id, since)
        return int(rows[joining][0][0] or 1)

    def _add_replaced(self, batch: Batch, dead: str, *, at: float) -> None:
        batch.add(sql.END_BEAT, dead)
        if (
            self._heart is not None
        ):  # the proof ends with this process, or with this boot of its host
            why = "its process has ended, as the next one of its host has seen"
            batch.add(sql.GONE, at, f"run {self.run_id}", why, dead)

    def is_beat_due(self, phase: str, mark: Hashable | None, *, written_s: float) -> bool:
        """Whether `beat` would write anything, or could find anything new."""
        return self._is_unread(mark) or self._is_unwritten(phase, written_s)

    def _is_unread(self, mark: Hashable | None) -> bool:
        # In a store that hosts share, the beats find out.
        return self._heart is None and (mark is None or mark != self._may_act_at)

    def _is_unwritten(self, phase: str, written_s: float) -> bool:
        if self._beaten is None:
            return True
        shown, since = self._beaten
        # With half a second less: the last beat was written a little after its tick.
        return shown != phase or self._clock.loop() - since >= written_s - min(0.5, written_s / 2)

    async def beat(
        self, phase: str, mark: Hashable | None = None, *, written_s: float = BEAT_WRITTEN_S
    ) -> str | None:
        """Check whether this run may still act, and refresh what listings show.

        Args:
            phase: State of the service; a new one is written at once.
            mark: What `Engine.look_at_files` has returned just before. If it is the one of the last
                check, nothing is read.
            written_s: Seconds after which a beat is written again.

        Returns:
            None if it may act. Otherwise a sentence that says why not: an operator has said that
            it is gone, or another run has taken over its rows.
        """
        if self._is_unwritten(phase, written_s):
            await self._show(phase)
        if not self._is_unread(mark):
            return None
        rows = await self._engine.query(sql.STANDING, self.run_id)
        for gone_by, reason, adopted_by in rows:
            if gone_by is not None:
                return f"{gone_by!s} said that this run is gone: {reason!s}"
            if adopted_by is not None:
                return f"run {adopted_by!s} has taken this run's rows over"
        self._may_act_at = mark
        return None

    async def _show(self, phase: str) -> None:
        now = self._clock.loop()
        batch = Batch(Point.JOIN, durable=False)
        batch.add(
            sql.SHOW,
            *(self._clock.wall(), phase, self.run_id),
        )
        await self._engine.commit(batch)
        self._beaten = phase, now

    def stop_intent(self, *, source: StopSource, by: str, reason: str) -> Batch:
        """A batch that records a stop-intent; if there is one already, it stays."""
        self._beaten = None  # the batch also writes the phase
        batch = Batch(Point.STOP_INTENT)
        batch.add(
            sql.STOP_INTENT,
            self._clock.wall(),
            source,
            by,
            reason,
            self.run_id,
        )
        return batch

    def add_host_stop(self, batch: Batch) -> None:
        """Add that the host is being shut down."""
        batch.add(sql.HOST_STOP, self.run_id)

    async def withdraw_stop(self) -> None:
        """Remove the stop-intent, because the drain was resumed."""
        self._beaten = None
        batch = Batch(Point.WITHDRAW_STOP)
        batch.add(sql.UNWISH_OF_RUN, self.run_id)
        batch.add(
            sql.WITHDRAW_STOP,
            self.run_id,
        )
        await self._engine.commit(batch)

    async def stop_record(self, exit_code: int, report: dict[str, Any]) -> None:
        """Write the stop record, the last commit of a run that ends by itself."""
        batch = Batch(Point.STOP_RECORD)
        batch.add(
            sql.STOP_RECORD,
            self._clock.wall(),
            exit_code,
            json.dumps(report),
            self.run_id,
        )
        if report.get("left"):  # nothing of it can act any more
            batch.add(sql.END_BEAT, self.run_id)
        await self._engine.commit(batch)

    def judge(self, run: Run) -> Liveness:
        """Whether *run* may still act."""
        if run.run_id == self.run_id:
            return Liveness(Alive.ALIVE, "it is this run")
        is_shared = self._heart is not None
        life = judge_run(run, self._process, self._lock_directory, is_shared=is_shared)
        if life.answer is Alive.NOT_PROVEN and self._heart is not None:
            return self._heart.judge(run.run_id) or life
        return life

    async def of(self, run_ids: Collection[str]) -> list[Run]:
        """The runs with these ids that are on record."""
        return list((await find_runs(self._engine, run_ids)).values())

    async def others(self) -> list[Run]:
        """Other runs of this service that have not ended; some may be dead."""
        runs = await list_open(self._engine, self._service)
        return [run for run in runs if run.run_id != self.run_id]

    async def siblings(self) -> list[tuple[Run, str]]:
        """Other runs of this service that may serve now or soon, with the methods on their rows.

        These are runs that live; runs proven neither alive nor dead, if their last beat is less
        than `BACK_WITHIN_S` old; and runs that ended less than that ago and whose instance has no
        run now, as it may be starting again, for example in an upgrade.
        """
        since = self._clock.wall() - BACK_WITHIN_S
        rows = await self._engine.query(
            sql.SIBLINGS,
            self._service,
            since,
        )
        known = [(run_of(row[:-1]), str(row[-1])) for row in rows]
        found = [one for one in known if not self._is_silent(one[0], since)]
        living = [
            one for one in found if one[0].ended_at is None and not self.judge(one[0]).is_dead
        ]
        last: dict[str, tuple[Run, str]] = {}
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
            and self.judge(run).answer is Alive.NOT_PROVEN
        )

    async def check_kinds(self, kinds: Collection[str]) -> None:
        """Check that no living run of another service settles resources of the same *kinds*.

        Raises:
            ConfigError: one does; their rules would undo each other's work.
        """
        if not kinds:
            return
        for *columns, theirs in await self._engine.query(sql.WITH_KINDS, self._service):
            both = sorted(set(kinds) & set(json.loads(str(theirs))))
            run = run_of(tuple(columns))
            if both and self.judge(run).is_alive:
                raise ConfigError(
                    f"kind {both[0]!r} is settled by {run.service}@{run.instance} and by "
                    f"{self._service} in one store, and their rules would fight: let one service "
                    "declare it, or give each a store of its own (GRACEKIT_STORE_URL)"
                )

    async def offers(self) -> list[str]:
        """What runs on record have served, as texts of `gracekit.rpc.offer`, newest first."""
        rows = await self._engine.query(
            sql.OFFERS,
            self._service,
            OFFERS,
        )
        return [str(methods) for (methods,) in rows]

    async def survey(self) -> tuple[list[Run], list[tuple[Run, Liveness]]]:
        """Other runs of this service that are not adopted yet, oldest first.

        Returns:
            Those proven dead; and those proven neither dead nor alive, each with its judgement.
        """
        dead, doubtful = list[str](), list[tuple[Run, Liveness]]()
        for run in await self._not_adopted():
            judgement = self.judge(run)
            if judgement.is_dead:
                dead.append(run.run_id)
            elif not judgement.is_alive:
                doubtful.append((run, judgement))
        # Read again: a run may have written its stop record, and ended, after its row was read.
        ended = [run for run in await self._not_adopted() if run.run_id in dead] if dead else []
        return ended, doubtful

    async def _not_adopted(self) -> list[Run]:
        rows = await self._engine.query(
            sql.NOT_ADOPTED,
            self._service,
            LEASE_MEMBERS,
            self.run_id,
        )
        return list(map(run_of, rows))

    async def ended_badly(self, *, since: float) -> list[Run]:
        """Runs of this service adopted since that wall time, without those that drained."""
        rows = await self._engine.query(
            sql.ENDED_BADLY,
            self._service,
            since,
            Verdict.DRAINED.value,
        )
        return list(map(run_of, rows))

    def forget(self, run: Run) -> None:
        """Remove the files of an adopted run: its lock, its socket, its pipe for wake-ups."""
        if (directory := self._lock_directory) is not None:
            for path in (
                directory / crash_name(run.run_id),
                directory / lock_name(run.run_id),
                directory / door_name(run.run_id),
                pipe_of(directory, run.run_id),
            ):
                with contextlib.suppress(OSError):
                    path.unlink()

    def known_end(self, run: Run) -> Run:
        """The dead *run* with what files of this host say of its end, and its row does not."""
        boot_id = "" if self._heart is not None else self._process.identify().boot_id
        return with_end(run, self._lock_directory, boot_id=boot_id)

    async def evidence_on(self, run: Run) -> ExitEvidence:
        """What is known of how the dead *run* ended."""
        copied = await copied_at(self._engine, self._lock_directory)
        return evidence_of(run, self._lock_directory, copied_at=copied)

    def add_adoption(self, batch: Batch, run: Run, evidence: ExitEvidence) -> Verdict:
        """Add the verdict on a dead run; if another run was quicker, the batch is rolled back.

        *run* is as `known_end` returns it.
        """
        verdict = classify(evidence)
        kernel = None if run.kernel is None else msgspec.json.encode(run.kernel).decode()
        batch.add(
            sql.ADOPT,
            self._clock.wall(),
            self.run_id,
            verdict.value,
            evidence.exit_code,
            kernel,
            run.crash,
            run.run_id,
            expect=1,
        )
        batch.add(sql.END_BEAT, run.run_id)
        return verdict

    async def explain_late(self) -> list[Run]:
        """Record what became known of processes whose runs were adopted before; those runs."""
        explained = list[Run]()
        directory = self._lock_directory
        for file, kernel in [] if directory is None else late_records(directory):
            of = (kernel.boot_id, kernel.pid, kernel.start_ticks, kernel.invocation)
            if not (runs := await self._engine.query(sql.OF_PROCESS, *of)) and is_old(file):
                file.unlink(missing_ok=True)  # of a start that never had a run
            for run in map(run_of, runs):
                if run.kernel is None:
                    batch = Batch(Point.ADOPT)
                    text = msgspec.json.encode(kernel).decode()
                    batch.add(sql.KERNEL, text, run.run_id, expect=1)
                    with contextlib.suppress(ConflictError):  # a sibling was quicker
                        await self._engine.commit(batch)
                        explained.append(msgspec.structs.replace(run, kernel=kernel))
                file.unlink(missing_ok=True)
        return explained

    async def declare_dead(self, run: Run, number: int, *, reason: str) -> None:
        """Put on record that *run* is dead, as its beat has stopped at *number*.

        Raises:
            ConflictError: it has beaten since, or another run was quicker.
        """
        by, at = f"run {self.run_id}", self._clock.wall()
        await self._engine.commit(declared(run.run_id, number, by=by, reason=reason, at=at))
