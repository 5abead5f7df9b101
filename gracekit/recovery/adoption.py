"""Takes over the rows of dead runs; releases rows that this run owns and no task works on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from gracekit import backoff
from gracekit.errors import ConflictError
from gracekit.exits import Verdict
from gracekit.journal.rows import TaskRow
from gracekit.life import Liveness
from gracekit.process import Point
from gracekit.recovery.shared import Shared, SideTasks
from gracekit.request.waits import LEASE_BEAT_S
from gracekit.runs.run import Run, acted_until
from gracekit.runs.why import why
from gracekit.store.batch import Batch
from gracekit.tracker.task import TaskState


class Adoption:
    """Adopts runs that are proven dead; never touches one that may still live."""

    def __init__(self, shared: Shared, *, side_tasks: SideTasks) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._leases = shared.leases
        self._members = shared.members
        self._tracker = shared.tracker
        self._telemetry = shared.telemetry
        self._trigger = shared.trigger
        self._outbox = shared.outbox
        self._side_tasks = side_tasks
        self._doubts: dict[str, str] = {}  # run id to why it is proven neither alive nor dead
        self._looked_after: set[str] = set()  # ids of runs checked within LEASE_BEAT_S

    # -- runs ---------------------------------------------------------------------------

    async def adopt_dead_runs(self) -> None:
        """Record the verdict on each dead run, and take over its rows."""
        dead, doubtful = await self._members.survey()
        for run in dead:
            with contextlib.suppress(ConflictError):  # a sibling was quicker
                await self._adopt(run)
        for run in await self._members.explain_late():
            self._telemetry.emit(
                "run.explained", run=run.run_id, instance=run.instance, why=why(run)
            )
        self._report_doubts(doubtful)

    def _report_doubts(self, doubtful: Sequence[tuple[Run, Liveness]]) -> None:
        """Report runs that are proven neither alive nor dead, once for each reason."""
        known, self._doubts = self._doubts, {}
        for run, judgement in doubtful:
            self._doubts[run.run_id] = judgement.reason
            if known.get(run.run_id) != judgement.reason:
                self._telemetry.emit(
                    "run.not_proven",
                    run=run.run_id,
                    instance=run.instance,
                    reason=judgement.reason,
                )

    def look_after_asked(self) -> None:
        """Check the runs whose leases requests wait for; recovery adopts a dead one at once."""
        for run_id in self._trigger.take_asked_after():
            if run_id not in self._looked_after:
                self._look_after_soon(run_id)

    def _look_after_soon(self, run_id: str) -> None:
        self._looked_after.add(run_id)
        # Each waiting request asks once in LEASE_BEAT_S; one check in that time is enough.
        asyncio.get_running_loop().call_later(LEASE_BEAT_S, self._looked_after.discard, run_id)
        self._side_tasks.do(f"run {run_id}", partial(self._look_after, run_id))

    async def _look_after(self, run_id: str) -> None:
        dead, _ = await self._members.survey()
        if any(run.run_id == run_id for run in dead):
            self._trigger.poke()

    async def _adopt(self, run: Run) -> None:
        evidence = await self._members.evidence_on(run)
        known = self._members.known_end(run)
        batch = Batch(Point.ADOPT)
        verdict = self._members.add_adoption(batch, known, evidence)
        # What they left is settled alike. A boot of the host is nobody's fault.
        has_crashed = verdict in {Verdict.KILLED, Verdict.UNKNOWN} and not known.rebooted
        unfinished, not_started = await self._take_over(
            batch,
            run.run_id,
            crashed=has_crashed,
            charged=has_crashed or run.exit_code is not None,
            until=acted_until(run, self._journal.clock.wall()),
        )
        self._members.forget(run)
        self._telemetry.emit(
            "run.classified",
            run=run.run_id,
            instance=run.instance,
            verdict=verdict.value,
            why=why(msgspec.structs.replace(known, verdict=verdict, exit_code=evidence.exit_code)),
            unfinished=unfinished,
            not_started=not_started,
        )

    async def adopt_stranded(self) -> None:
        """Take over what belongs to a run that was adopted before; there should be nothing."""
        for run_id in await self._claims.stranded():
            until = self._journal.clock.wall()
            unfinished, not_started = await self._take_over(
                Batch(Point.ADOPT), run_id, crashed=False, charged=False, until=until
            )
            self._telemetry.emit(
                "store.stranded", run=run_id, unfinished=unfinished, not_started=not_started
            )

    async def _take_over(
        self, batch: Batch, dead_run: str, *, crashed: bool, charged: bool, until: float
    ) -> tuple[int, int]:
        """Commit the batch that makes its rows ownerless.

        Returns:
            How many tasks it left that had started, and that had not.
        """
        self._leases.add_take_away(batch, dead_run, acted_until=until)
        started = self._claims.add_adopt(
            batch, dead_run, crashed=crashed, charged=charged, acted_until=until
        )
        rows = await self._journal.commit(batch)
        self._outbox.poke()  # this run sends the notifications that the dead one has not sent
        self._trigger.poke()
        return len(rows[started]), len(rows[started + 1])

    # -- rows of this run ---------------------------------------------------------------

    async def adopt_missing(
        self, is_settled_now: Callable[[int], bool], claim_mark: Callable[[], tuple[int, int]]
    ) -> None:
        """Release rows that this run owns without a task in its tracker, after a lost commit.

        Args:
            is_settled_now: Whether the row of that id is being settled.
            claim_mark: As `Starts.claim_mark`. While accepted rows are being claimed, the tracker
                does not know them yet; a look soon after finds those that are really missing.
        """
        mark = claim_mark()
        rows = await self._claims.missing(frozenset(self._tracker.row_ids()))
        is_claiming = mark[0] > 0 or claim_mark() != mark
        in_doubt = False
        for row in rows:
            if self._is_known(row) or is_settled_now(row.id):
                continue  # it came into the tracker meanwhile, or is being settled
            if is_claiming and row.state is TaskState.ACCEPTED:
                in_doubt = True
            else:
                await self._disown(row)
        if in_doubt:
            asyncio.get_running_loop().call_later(backoff.MISSING_S, self._trigger.poke)

    async def free_forgotten(self, acted: Collection[str]) -> list[TaskRow]:
        """At the end of a drain, release rows that this run owns after a commit of unknown end.

        Args:
            acted: Request ids whose handlers were cut. If their hand-over is not on record, this
                process keeps rows and leases until it is proven dead. A row that is ACCEPTED
                again was handed over, so it is released.

        Returns:
            Those rows as they were.
        """
        # This empty commit comes after all that were submitted before. Otherwise a claim that
        # still waits for a slow store would give this run more rows after the look.
        await self._journal.commit(Batch(Point.ADOPT, durable=False))
        rows = [
            row
            for row in await self._claims.missing(frozenset(self._tracker.row_ids()))
            if (row.request_id not in acted or row.state is TaskState.ACCEPTED)
            and not self._is_known(row)
        ]
        for row in rows:
            await self._disown(row)
        return rows

    async def count_unfinished(self) -> int:
        """Rows of the store that this run, or its next start, could settle."""
        dead, _ = await self._members.survey()
        return await self._claims.unfinished([run.run_id for run in dead])

    async def _disown(self, row: TaskRow) -> None:
        batch = Batch(Point.ADOPT)
        self._claims.add_disown(batch, row)
        if row.resource is not None and row.state is not TaskState.ACCEPTED:
            # A lease that this run keeps would be refused to the row's next attempt for ever.
            self._leases.add_drop(batch, row.resource, row.request_id)
        with contextlib.suppress(ConflictError):
            await self._journal.commit(batch)
            self._telemetry.emit("task.adopted", **row.event_fields)

    def _is_known(self, row: TaskRow) -> bool:
        return self._tracker.get(row.request_id, row.recipient) is not None
