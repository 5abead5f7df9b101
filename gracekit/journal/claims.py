"""Rows that no run is working on: taken over from dead runs, claimed once, settled once.

Every statement is a compare-and-set: several runs of one store may try, and
exactly one succeeds. Rows of a living run are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import msgspec

from gracekit.errors import StoreError
from gracekit.journal import claims_sql as sql
from gracekit.journal import findings_sql, outbox_sql
from gracekit.journal.rows import Address, TaskRow, address_of, task_row
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import COUNT, HOOK_DONE, NOTE, REMOVE_CONTENT
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.tracker.task import Lane, TaskState

LONGEST_WAIT_S: Final = 120.0
"""After a crash, rows with crashes wait at most so long for the settle time of others."""
RIPE_AT_ONCE: Final = 500
"""So many tasks whose time has come are let begin in one commit."""
MOST_COUNTED: Final = 1_000_000_000
"""A limit that is never reached, for a statement that must have one."""


class Claims:
    """The rows that one run may take over, for its host and instance."""

    def __init__(
        self,
        journal: Journal,
        *,
        host: str,
        instance: str,
        on_damage: Callable[[StoreError], None],
    ) -> None:
        self._journal = journal
        self._on_damage = on_damage
        self._targets = (host, instance)

    def add_adopt(
        self, batch: Batch, dead_run: str, *, crashed: bool, charged: bool, acted_until: float
    ) -> int:
        """Take over the rows of *dead_run*.

        Running rows become HANDED_OVER and unclean, accepted rows and holds lose
        their owner, and this run now owes the due replies and errored hooks.

        Args:
            batch: Gets the statements.
            dead_run: Id of the dead run.
            crashed: Whether it crashed, so that a hook that was under way may have caused that.
            charged: Whether a crash is counted for each running row. Also true if the run ended by
                itself and left it running.
            acted_until: Wall time since which nothing of it can have acted: settle times count from
                there.

        Returns:
            Index of the statement that returns a row for each task that had started; the next
            statement returns one for each that had not.
        """
        now = self._journal.clock.wall()
        me = self._journal.run_id
        batch.add(sql.NOTE_ADOPTED, me, now, dead_run)
        batch.add(sql.WAS_NOT_ALONE, dead_run)
        batch.add(sql.HOLDS_WERE_NOT_ALONE, dead_run)
        batch.add(findings_sql.WERE_NOT_ALONE, dead_run)
        index = batch.ask(sql.CUT, int(crashed), int(charged), acted_until, dead_run)
        batch.ask(sql.FREE_ACCEPTED, dead_run)
        if charged:
            latest, service = now + LONGEST_WAIT_S, self._journal.service
            batch.add(sql.WAIT_FOR_SETTLING, now, latest, service)
        batch.add(sql.FREE_HOLDS, dead_run)
        batch.add(sql.FREE_ASKED, dead_run, int(crashed))
        batch.add(findings_sql.FREE, dead_run, int(crashed), acted_until)
        batch.add(sql.TAKE_DUTIES_OF_THE_DEAD, me, dead_run, int(crashed))
        batch.add(sql.TAKE_REPLIES_OF_THE_DEAD, me, dead_run)
        batch.add(outbox_sql.ADOPT, me, dead_run)
        batch.add_up(COUNT, "adopted_runs", 1)
        return index

    async def stranded(self) -> list[str]:
        """Ids of runs that own something open and were adopted, or are on record no more."""
        return [str(owner) for (owner,) in await self._journal.engine.query(sql.STRANDED)]

    async def claim(
        self,
        state: TaskState,
        *,
        limit: int,
        lane: Lane | None = None,
        look: bool = True,
        without: Collection[int] = (),
    ) -> list[TaskRow]:
        """Claim up to *limit* ownerless rows in *state*, oldest first.

        Rows in their settle time, or before the next check that a probe asked
        for, are not claimed.

        Args:
            state: ACCEPTED or HANDED_OVER.
            limit: At most so many.
            lane: Lane of the rows; None for both.
            look: Read first whether there are any; not needed if it is known.
            without: Ids of rows that are left to siblings.
        """
        which = self._which(state, lane, without)
        others = ", ?" * len(without)
        # Mostly there are none. Reading is cheap, and does not block the writes of siblings.
        claimable = sql.CLAIMABLE.format(others=others)
        if look and not await self._journal.engine.query(claimable, *which, 1):
            return []
        batch = Batch(Point.CLAIM)
        claim = sql.CLAIM.format(others=others)
        batch.ask(claim, self._journal.run_id, *which, limit, state.value)
        rows = await self._journal.commit(batch)
        return sorted(self._readable(rows[0]), key=lambda row: row.id)

    def add_claim(self, batch: Batch, row_id: int) -> int:
        """Claim a row that *batch* makes ACCEPTED, if this run may run it.

        Returns:
            Index of the statement; `claimed` reads what it returns.
        """
        return batch.ask(sql.CLAIM_ONE, self._journal.run_id, row_id, *self._targets)

    def claimed(self, rows: Iterable[Row]) -> list[TaskRow]:
        """The row that `add_claim` has claimed, or none."""
        return list(self._readable(rows))

    async def count_claimable(self, state: TaskState, *, without: Collection[int] = ()) -> int:
        """How many rows `claim` could take now; arguments as there."""
        which = self._which(state, None, without)
        text = sql.COUNT_CLAIMABLE.format(others=", ?" * len(without))
        rows = await self._journal.engine.query(text, *which, MOST_COUNTED)
        return int(rows[0][0] or 0)

    def _which(self, state: TaskState, lane: Lane | None, without: Collection[int]) -> Row:
        """The parameters of `CLAIMABLE`, all but its limit."""
        now = self._journal.clock.wall()
        lanes = (lane or Lane.REQUESTS).value, (lane or Lane.OPS).value
        return (state.value, self._journal.service, *self._targets, *lanes, now, now, *without)

    async def ripen(self) -> bool:
        """Let accepted tasks begin whose time has come, as far as this run may claim them.

        Returns:
            Whether there were tasks that had to wait.
        """
        journal, now = self._journal, self._journal.clock.wall()
        next_due = await self.next_due()
        if next_due is not None and next_due <= now:
            batch = Batch(Point.CLAIM, durable=False)
            batch.add(sql.RIPEN, journal.service, *self._targets, now, RIPE_AT_ONCE)
            await journal.commit(batch)
        return next_due is not None

    async def next_due(self) -> float | None:
        """Wall time at which the next accepted task may begin that must wait; None without one."""
        rows = await self._journal.engine.query(sql.NEXT_DUE, self._journal.service, *self._targets)
        return None if rows[0][0] is None else float(rows[0][0])

    async def waiting_callers(self) -> list[tuple[int, Address]]:
        """(row id, address) of callers of accepted tasks without an owner that want heartbeats."""
        rows = await self._journal.engine.query(sql.WAITING_CALLERS, self._journal.service)
        return [(int(row[0] or 0), address_of(row[1:])) for row in rows]

    async def next_look(self, without: Collection[int] = ()) -> float | None:
        """Wall time at which the next HANDED_OVER row may be claimed; None if there is none.

        Rows with an id in *without* are left to siblings.
        """
        text = sql.NEXT_LOOK.format(others=", ?" * len(without))
        rows = await self._journal.engine.query(
            text, self._journal.service, *self._targets, *without
        )
        return None if rows[0][0] is None else float(rows[0][0])

    async def unfinished(self, dead: Collection[str]) -> int:
        """Number of rows that this run could settle now or later: its own, ownerless, of *dead*.

        Counts rows in their settle time, open holds of this host, and errored hooks that are due;
        not rows of runs that are not proven dead, or that only another host or instance may run.
        """
        journal, owners = self._journal, (self._journal.run_id, *dead)
        host, instance = self._targets
        text = sql.UNFINISHED.format(owners=", ".join("?" * len(owners)))
        service, now = journal.service, journal.clock.wall()
        params: Row = (service, host, instance, *owners, service, host, now, *owners)
        rows = await journal.engine.query(text, *params, service, *owners, service, host)
        return int(rows[0][0] or 0)

    async def unfinished_resources(self) -> list[tuple[int, tuple[str, str]]]:
        """(row id, resource) of each started, ownerless row with a resource, oldest first."""
        rows = await self._journal.engine.query(
            sql.UNFINISHED_RESOURCES,
            self._journal.service,
            *self._targets,
        )
        return [(int(row[0] or 0), (str(row[1]), str(row[2]))) for row in rows]

    def add_follow_clock(self, batch: Batch, by_s: float, *, ahead_s: float) -> None:
        """After the wall clock was set by *by_s*, adjust waits and when they began.

        *ahead_s* is wall time minus loop time now.

        If it was set back (below 0), the next check is moved back by as much. If it was set
        forward, the next check has come nearer, and is left so; what counts towards `max_wait`
        begins later by as much.
        """
        now, back_s, forward_s = self._journal.clock.wall(), min(0.0, by_s), max(0.0, by_s)
        batch.add(
            sql.FOLLOW_CLOCK, back_s, now, self._journal.service, self._journal.run_id, forward_s
        )
        least_s, most_s = sorted((ahead_s - by_s, ahead_s))
        batch.add(sql.FOLLOW_DUE, ahead_s, self._journal.service, least_s, most_s)

    def add_run_again(self, batch: Batch, row: TaskRow) -> None:
        """Make a HANDED_OVER row of this run ACCEPTED again, to be run from its cursor."""
        batch.add(sql.AGAIN, row.id, self._journal.run_id, expect=1)

    def accepted(self, row: TaskRow) -> TaskRow:
        """*row* as `add_run_again` changes it."""
        return msgspec.structs.replace(row, state=TaskState.ACCEPTED, cut=None, next_check=None)

    def add_probing(self, batch: Batch, row: TaskRow, *, alone: bool = False) -> None:
        """Record that a probe of the row begins, so that a crash meanwhile is counted."""
        batch.add(
            sql.PROBING,
            int(alone),
            row.id,
            self._journal.run_id,
            expect=1,
        )

    def add_wait(self, batch: Batch, row: TaskRow, *, next_check: float, counts: bool) -> None:
        """Release a HANDED_OVER row, to be claimed again from wall time *next_check* on.

        *counts* says whether the wait counts towards `max_wait`: only if the probe asked for it.
        """
        now = self._journal.clock.wall()
        batch.add(sql.WAIT, next_check, int(counts), now, row.id, self._journal.run_id, expect=1)

    def add_disown(self, batch: Batch, row: TaskRow) -> None:
        """Release a row of this run on which no task works; it is settled like a dead run's.

        A running row counts a crash, so that a row to which this happens repeatedly ends.
        """
        if row.state is TaskState.RUNNING:
            batch.add(
                sql.DISOWN,
                row.id,
                self._journal.run_id,
                expect=1,
            )
        else:
            self.add_let_go(batch, row)

    def add_take_over(self, batch: Batch, row: TaskRow) -> None:
        """Claim an ownerless row, even if it is for another host or instance."""
        batch.add(
            sql.TAKE_OVER,
            self._journal.run_id,
            row.id,
            row.state.value,
            expect=1,
        )

    def add_postpone(self, batch: Batch, row: TaskRow, *, next_check: float) -> None:
        """Release a claimed row until wall time *next_check*; nothing if it has changed."""
        batch.add(
            sql.POSTPONE,
            next_check,
            row.id,
            self._journal.run_id,
        )

    def add_let_go(self, batch: Batch, row: TaskRow) -> None:
        """Release a claimed row without another change; nothing if it has changed."""
        batch.add(
            sql.LET_GO,
            row.id,
            self._journal.run_id,
        )

    async def take_duties(self) -> None:
        """Take over the due replies and errored hooks of ended rows without an owner."""
        service = self._journal.service
        if await self._journal.engine.query(sql.OWING, service):
            batch = Batch(Point.CLAIM)
            batch.add(sql.TAKE_DUTIES, self._journal.run_id, service)
            await self._journal.commit(batch)

    async def take_left_replies(self) -> None:
        """Take over due replies of parked tasks whose run was adopted without them."""
        me, service = self._journal.run_id, self._journal.service
        if await self._journal.engine.query(sql.LEFT_REPLIES, me, service):
            batch = Batch(Point.CLAIM)
            batch.add(sql.TAKE_LEFT_REPLIES, me, service)
            await self._journal.commit(batch)

    async def due_replies(self) -> list[tuple[int, Address, float]]:
        """(row id, address, accepted at) of replies that this run owes."""
        me = self._journal.run_id
        rows = await self._journal.engine.query(sql.DUE_REPLIES, me, me)
        due = [(int(r[0] or 0), address_of(r[1:6]), float(r[6] or 0)) for r in rows]
        done = self._journal.answered
        return [one for one in due if (one[0], one[1].queue, one[1].msg_id) not in done]

    async def errored_due(self, *, after: int, limit: int = 100) -> list[TaskRow]:
        """ERRORED rows of this run, with an id above *after*, whose hook has still to be called."""
        rows = await self._journal.engine.query(
            sql.ERRORED_DUE,
            self._journal.run_id,
            after,
            limit,
        )
        return list(self._readable(rows))

    async def begin_errored(self, row: TaskRow, *, alone: bool) -> None:
        """Record that the errored hook is about to be called.

        Raises:
            ConflictError: it is not due any more.
        """
        batch = Batch(Point.CALL_HOOK)
        batch.add(
            sql.BEGIN_ERRORED,
            int(alone),
            row.id,
            self._journal.run_id,
            expect=1,
        )
        await self._journal.commit(batch)

    async def errored_done(self, row: TaskRow, *, given_up: str = "", failed: str = "") -> None:
        """Record that the errored hook was called or is given up; purge what was kept for it.

        Args:
            row: The row of the task.
            given_up: Why it is given up; empty if it was called.
            failed: Why its call has failed; empty if it has not.
        """
        batch = Batch(Point.ERRORED_DONE)
        batch.add(HOOK_DONE, row.id)
        if not self._journal.keep_failed:
            batch.add(REMOVE_CONTENT, row.id)
        if given_up or failed:
            what = "hook_given_up" if given_up else "hook_failed"
            batch.add_up(COUNT, what, 1)
            self._journal.add_note(batch, what, row.request_id, row.method, given_up or failed)
        await self._journal.commit(batch)

    async def missing(self, known: frozenset[int]) -> list[TaskRow]:
        """Open rows of this run that are not in *known*, left by commits of unknown end."""
        ids = await self._journal.engine.query(sql.MINE, self._journal.run_id)
        if known.issuperset(row[0] for row in ids):
            return []
        rows = await self._journal.engine.query(sql.MY_ROWS, self._journal.run_id)
        return [row for row in self._readable(rows) if row.id not in known]

    def _readable(self, rows: Iterable[Row]) -> Iterator[TaskRow]:
        """Rows as values; a damaged row is reported and left out, and the others are returned."""
        for row in rows:
            try:
                yield task_row(row)
            except StoreError as error:
                self._on_damage(error)


def add_restored(batch: Batch, now: float, what: str, reason: str) -> None:
    """Note that the store is an older one, and doubt its rows; see `leases.epoch`.

    Accepted rows whose policy does not allow a second run become like interrupted ones, because
    they may have begun after the copy was made.
    """
    batch.add(NOTE, now, "", what, None, None, reason)
    batch.add(sql.NOTE_RESTORED, now)
    batch.add(sql.NOTE_RESTORED_PARKED, now)
    batch.add(sql.CUT_RESTORED, now)
