"""Rows that nobody is working on: taken from the dead, claimed once, settled once.

Every statement is a compare-and-set, so that several runs of one store may all
try and exactly one acts. Rows of a living run are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final

from gracekit.errors import StoreError
from gracekit.journal import claims_sql as sql
from gracekit.journal import findings_sql, outbox_sql
from gracekit.journal.rows import Address, TaskRow, address_of, task_row
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import COUNT, HOOK_DONE
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.tracker.task import Lane, TaskState

LONGEST_WAIT_S: Final = 120.0
"""A row that may begin waits so long at most for others to settle."""
MOST_COUNTED: Final = 1_000_000_000
"""For a statement that needs a limit."""


class Claims:
    """What one run may take over, for its host and instance."""

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

    def add_adopt(self, batch: Batch, dead_run: str, *, crashed: bool, charged: bool) -> int:
        """Take over what *dead_run* left.

        Started rows become HANDED_OVER unclean, accepted ones ownerless, holds
        left over; replies and errored hooks that are due become ours.

        Args:
            batch: What is to be done.
            dead_run: Its id.
            crashed: Whether it died unasked: what was under way may have killed it.
            charged: Whether a crash is counted for each started row: also where the run ended
                by itself, and yet left it running.

        Returns:
            Index of the statement that lists how many were unclean.
        """
        now = self._journal.clock.wall()
        me = self._journal.run_id
        batch.add(sql.NOTE_ADOPTED, me, now, dead_run)
        batch.add(sql.WAS_NOT_ALONE, dead_run)
        batch.add(sql.HOLDS_WERE_NOT_ALONE, dead_run)
        batch.add(findings_sql.WERE_NOT_ALONE, dead_run)
        index = batch.ask(sql.CUT, int(crashed), int(charged), now, dead_run)
        batch.ask(sql.FREE_ACCEPTED, dead_run)
        if charged:
            latest, service = now + LONGEST_WAIT_S, self._journal.service
            batch.add(sql.WAIT_FOR_SETTLING, now, latest, service)
        batch.add(sql.FREE_HOLDS, dead_run)
        batch.add(sql.FREE_ASKED, dead_run, int(crashed))
        batch.add(findings_sql.FREE, dead_run, int(crashed), now)
        batch.add(sql.TAKE_DUTIES_OF_THE_DEAD, me, dead_run, int(crashed))
        batch.add(sql.TAKE_REPLIES_OF_THE_DEAD, me, dead_run)
        batch.add(outbox_sql.ADOPT, me, dead_run)
        batch.add_up(COUNT, "adopted_runs", 1)
        return index

    async def claim(
        self,
        state: TaskState,
        *,
        limit: int,
        lane: Lane | None = None,
        look: bool = True,
        without: Collection[int] = (),
    ) -> list[TaskRow]:
        """Make up to *limit* ownerless rows of that state ours, oldest first; of one lane or both.

        ACCEPTED rows are a second intake; HANDED_OVER ones wait for their
        settle time and the next check that a probe asked for.

        Args:
            state: Of the rows.
            limit: At most so many.
            lane: None for both.
            look: First look whether there are any; not where there are.
            without: Ids of rows that are left to others.
        """
        which = self._which(state, lane, without)
        others = ", ?" * len(without)
        # Mostly there is nothing: a look is cheap, and keeps no sibling from writing.
        claimable = sql.CLAIMABLE.format(others=others)
        if look and not await self._journal.engine.query(claimable, *which, 1):
            return []
        batch = Batch(Point.CLAIM)
        claim = sql.CLAIM.format(others=others)
        batch.ask(claim, self._journal.run_id, *which, limit, state.value)
        rows = await self._journal.commit(batch)
        return sorted(self._readable(rows[0]), key=lambda row: row.id)

    def add_claim(self, batch: Batch, row_id: int) -> int:
        """Make a row ours that *batch* has made ACCEPTED, if this run may run it.

        Returns:
            Index of the statement; `claimed` reads what it returns.
        """
        return batch.ask(sql.CLAIM_ONE, self._journal.run_id, row_id, *self._targets)

    def claimed(self, rows: Iterable[Row]) -> list[TaskRow]:
        """What `add_claim` has made ours: one row, or none."""
        return list(self._readable(rows))

    async def count_claimable(self, state: TaskState, *, without: Collection[int] = ()) -> int:
        """How many rows `claim` could take now; arguments as there."""
        which = self._which(state, None, without)
        text = sql.COUNT_CLAIMABLE.format(others=", ?" * len(without))
        rows = await self._journal.engine.query(text, *which, MOST_COUNTED)
        return int(rows[0][0] or 0)

    def _which(self, state: TaskState, lane: Lane | None, without: Collection[int]) -> Row:
        """What binds `CLAIMABLE`, all but its limit."""
        now = self._journal.clock.wall()
        lanes = (lane or Lane.REQUESTS).value, (lane or Lane.OPS).value
        return (state.value, self._journal.service, *self._targets, *lanes, now, now, *without)

    async def next_look(self, without: Collection[int] = ()) -> float | None:
        """Wall time at which the next HANDED_OVER row may be claimed; None if there is none.

        Rows *without* are left to others.
        """
        text = sql.NEXT_LOOK.format(others=", ?" * len(without))
        rows = await self._journal.engine.query(
            text, self._journal.service, *self._targets, *without
        )
        return None if rows[0][0] is None else float(rows[0][0])

    async def unfinished(self, dead: Collection[str]) -> int:
        """Rows that this run could settle, now or later: its own, ownerless ones, the dead's.

        Also those in their settle time, and the holds of this host. Not what a living run owns, or
        one of which nothing is proven, nor what another host or instance alone may run.
        """
        journal, owners = self._journal, (self._journal.run_id, *dead)
        host, instance = self._targets
        text = sql.UNFINISHED.format(owners=", ".join("?" * len(owners)))
        service, now = journal.service, journal.clock.wall()
        rows = await journal.engine.query(
            text, service, host, instance, *owners, service, host, now, *owners
        )
        return int(rows[0][0] or 0)

    async def unfinished_resources(self) -> list[tuple[int, tuple[str, str]]]:
        """(row id, resource) of each started, ownerless row that names one, oldest first."""
        rows = await self._journal.engine.query(
            sql.UNFINISHED_RESOURCES,
            self._journal.service,
            *self._targets,
        )
        return [(int(row[0] or 0), (str(row[1]), str(row[2]))) for row in rows]

    def add_follow_clock(self, batch: Batch, by_s: float) -> None:
        """After the wall clock was set by so many seconds: nothing waits longer than it was to.

        Nor does it wait less for that: what a clock that was set forward has shortened is over.
        """
        now = self._journal.clock.wall()
        batch.add(sql.FOLLOW_CLOCK, min(0.0, by_s), now, self._journal.service)

    def add_run_again(self, batch: Batch, row: TaskRow) -> None:
        """HANDED_OVER back to ACCEPTED, ours: it will be run from its cursor."""
        batch.add(sql.AGAIN, row.id, self._journal.run_id, expect=1)

    def accepted(self, row: TaskRow) -> TaskRow:
        """*row* as it stands after `add_run_again`."""
        return replace(row, state=TaskState.ACCEPTED, cut=None, next_check=None)

    def add_probing(self, batch: Batch, row: TaskRow, *, alone: bool = False) -> None:
        """Record that a probe of the row begins: if the process dies of it, that counts."""
        batch.add(
            sql.PROBING,
            int(alone),
            row.id,
            self._journal.run_id,
            expect=1,
        )

    def add_wait(self, batch: Batch, row: TaskRow, *, next_check: float, counts: bool) -> None:
        """Leave the row HANDED_OVER and free until wall time *next_check*.

        Only a wait that the probe asked for *counts* towards `max_wait`.
        """
        now = self._journal.clock.wall()
        batch.add(sql.WAIT, next_check, int(counts), now, row.id, self._journal.run_id, expect=1)

    def add_disown(self, batch: Batch, row: TaskRow) -> None:
        """Make a row of ours that nobody here works on claimable: settled like a dead run's.

        A begun one counts a crash, so that a row which loses its place again and again ends.
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
        """Make an ownerless row ours, whomever it was for."""
        batch.add(
            sql.TAKE_OVER,
            self._journal.run_id,
            row.id,
            row.state.value,
            expect=1,
        )

    def add_postpone(self, batch: Batch, row: TaskRow, *, next_check: float) -> None:
        """Give a claimed row up until wall time *next_check*; one that moved on is left alone."""
        batch.add(
            sql.POSTPONE,
            next_check,
            row.id,
            self._journal.run_id,
        )

    def add_let_go(self, batch: Batch, row: TaskRow) -> None:
        """Give a claimed row up untouched; one that has moved on is left alone."""
        batch.add(
            sql.LET_GO,
            row.id,
            self._journal.run_id,
        )

    async def take_duties(self) -> None:
        """Make ours what ended rows without an owner still owe: replies, errored hooks."""
        service = self._journal.service
        if await self._journal.engine.query(sql.OWING, service):
            batch = Batch(Point.CLAIM)
            batch.add(sql.TAKE_DUTIES, self._journal.run_id, service)
            await self._journal.commit(batch)

    async def take_left_replies(self) -> None:
        """Make ours the replies of parked tasks whose run was adopted without them."""
        me, service = self._journal.run_id, self._journal.service
        if await self._journal.engine.query(sql.LEFT_REPLIES, me, service):
            batch = Batch(Point.CLAIM)
            batch.add(sql.TAKE_LEFT_REPLIES, me, service)
            await self._journal.commit(batch)

    async def due_replies(self) -> list[tuple[int, Address, float]]:
        """(row id, address, accepted at) of replies that this run owes."""
        me = self._journal.run_id
        rows = await self._journal.engine.query(sql.DUE_REPLIES, me, me)
        return [(int(r[0] or 0), address_of(r[1:6]), float(r[6] or 0)) for r in rows]

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

    async def errored_done(self, row: TaskRow, *, given_up: str = "") -> None:
        """The errored hook was called, or is given up: purge what was kept for it alone."""
        batch = Batch(Point.ERRORED_DONE)
        batch.add(HOOK_DONE, int(self._journal.keep_failed), row.id)
        if given_up:
            batch.add_up(COUNT, "hook_given_up", 1)
            self._journal.add_note(batch, "hook_given_up", row.request_id, row.method, given_up)
        await self._journal.commit(batch)

    async def missing(self, known: frozenset[int]) -> list[TaskRow]:
        """Our own open rows that are not among *known*: a commit whose end we never saw."""
        ids = await self._journal.engine.query(sql.MINE, self._journal.run_id)
        if known.issuperset(row[0] for row in ids):
            return []
        rows = await self._journal.engine.query(sql.MY_ROWS, self._journal.run_id)
        return [row for row in self._readable(rows) if row.id not in known]

    def _readable(self, rows: Iterable[Row]) -> Iterator[TaskRow]:
        """Rows as values; a damaged one is told and left alone, and stops no other."""
        for row in rows:
            try:
                yield task_row(row)
            except StoreError as error:
                self._on_damage(error)
