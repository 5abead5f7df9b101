"""Rows that nobody is working on: taken from the dead, claimed once, settled once.

Every statement is a compare-and-set, so that several runs of one store may all
try and exactly one acts. Rows of a living run are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final

from gracekit.errors import StoreError
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.store.schema import IS_OPEN
from gracekit.tracker.journal import (
    COUNT,
    HOOK_DONE,
    ROW_COLUMNS,
    Address,
    Journal,
    TaskRow,
    address_of,
    task_row,
)
from gracekit.tracker.task import Lane, TaskState

LONGEST_WAIT_S: Final = 120.0
"""A row that may begin waits so long at most for others to settle."""

# What a dead run left. If it wrote a stop record, its handed-over rows are not charged; only a
# handler or probe that was under way ended with the process. A row that was only claimed keeps
# `cut`: if its handler stopped at a safe point, a later crash of the claimer does not count.
_ADOPT: Final = (
    f"""
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?2, ?1, 'adopted', request_id, method, state || ' of run ' || ?3 FROM task
WHERE owner = ?3 AND state IN ('running', 'handed_over', 'accepted') AND {IS_OPEN}""",  # noqa: S608
    # What ops requests did beside a suspect is on record too: then it was not alone.
    f"""
UPDATE task SET alone = 0 WHERE alone = 1 AND owner = ?1
    AND id IN (SELECT id FROM task WHERE owner = ?1 AND {IS_OPEN}
        UNION SELECT id FROM task WHERE errored_due = 1)
    AND EXISTS (SELECT 1 FROM task AS other WHERE other.owner = ?1 AND other.{IS_OPEN}
        AND (other.state = 'running' OR other.probing) AND other.id <> task.id)""",  # noqa: S608
    f"""
UPDATE hold SET alone = 0 WHERE asker = ?1
    AND EXISTS (SELECT 1 FROM task WHERE owner = ?1 AND {IS_OPEN}
        AND (state = 'running' OR probing))""",  # noqa: S608 - a constant
    f"""
UPDATE task SET owner = NULL,
    alone = CASE WHEN (?2 AND state = 'running') OR (?1 AND probing) THEN iif(alone = 1, 2, 0)
        ELSE iif(alone = 1, 0, alone) END,
    crashes = crashes + ((?2 AND state = 'running') OR (?1 AND probing)), probing = 0,
    not_before = CASE WHEN state = 'running' OR cut = 'unclean' THEN ?3 + settle_s END,
    cut = CASE WHEN state = 'running' THEN 'unclean' ELSE cut END, state = 'handed_over'
WHERE owner = ?4 AND state IN ('running', 'handed_over') AND {IS_OPEN}""",  # noqa: S608
    f"UPDATE task SET owner = NULL WHERE owner = ?1 AND state = 'accepted' AND {IS_OPEN}",  # noqa: S608
    "UPDATE hold SET owner = NULL, next_check = NULL WHERE owner = ?1 AND ended_at IS NULL",
    """
UPDATE hold SET crashes = crashes + ?2, alone = iif(?2 AND alone = 1, 2, 0), asker = NULL
WHERE asker = ?1""",
    # By what is due: the planner would rather walk all that has ever finished.
    """
UPDATE task SET owner = ?1, alone = iif(?3 AND calling AND alone = 1, 2, 0),
    hook_crashes = hook_crashes + (?3 AND calling), calling = 0
WHERE owner = ?2 AND finished_at IS NOT NULL AND id IN (
    SELECT task_id FROM reply WHERE due_at IS NOT NULL
    UNION SELECT id FROM task WHERE errored_due = 1)""",
)
# What had not begun at a crash is claimable at once. Suspects among it would begin alone, before
# the one that has caused the crash, which settles; and that one would begin beside them.
_WAIT_FOR_SETTLING: Final = f"""
UPDATE task SET not_before = max(coalesce(not_before, 0), min(?1 + ?2, (
    SELECT max(not_before) FROM task AS other WHERE other.owner IS NULL AND other.{IS_OPEN}
    AND other.service = ?3 AND other.cut = 'unclean' AND other.crashes > 0)))
WHERE owner IS NULL AND {IS_OPEN} AND service = ?3 AND crashes > 0 AND on_interrupt <> 'error'
    AND EXISTS (SELECT 1 FROM task AS other WHERE other.owner IS NULL AND other.{IS_OPEN}
        AND other.service = ?3 AND other.cut = 'unclean' AND other.crashes > 0
        AND other.not_before > ?1)"""  # noqa: S608
# An `error` row is only judged: that touches no backend, and need not wait for it to settle.
_CLAIMABLE: Final = f"""
SELECT id FROM task WHERE owner IS NULL AND state = ? AND {IS_OPEN} AND service = ?
    AND target IN ('', ?, ?) AND lane IN (?, ?) AND coalesce(next_check, 0) <= ?
    AND (on_interrupt = 'error' OR coalesce(not_before, 0) <= ?)
    AND id NOT IN (SELECT value FROM json_each(?))
ORDER BY id LIMIT ?"""  # noqa: S608 - a constant
_CLAIM: Final = f"""
UPDATE task SET owner = ? WHERE id IN ({_CLAIMABLE})
AND owner IS NULL AND state = ? RETURNING {ROW_COLUMNS}"""  # noqa: S608 - constants
_AGAIN: Final = """
UPDATE task SET state = 'accepted', cut = NULL, next_check = NULL, waiting_since = NULL,
    not_before = NULL, probing = 0 WHERE id = ? AND owner = ? AND state = 'handed_over'"""
_WAIT: Final = """
UPDATE task SET owner = NULL, next_check = ?, probing = 0,
    waiting_since = coalesce(waiting_since, CASE WHEN ? THEN ? END)
WHERE id = ? AND owner = ? AND state = 'handed_over'"""
# Siblings may do the same: the settle time is kept, and a probe may be asked early.
_FOLLOW_CLOCK: Final = f"""
UPDATE task SET not_before = min(not_before, max(not_before + ?1, ?2 + settle_s)),
    next_check = min(next_check, max(next_check + ?1, ?2)), waiting_since = min(waiting_since, ?2)
WHERE owner IS NULL AND state IN ('accepted', 'handed_over') AND {IS_OPEN} AND service = ?3"""  # noqa: S608
_NEXT_LOOK: Final = f"""
SELECT min(max(iif(on_interrupt = 'error', 0, coalesce(not_before, 0)), coalesce(next_check, 0)))
FROM task
WHERE owner IS NULL AND state = 'handed_over' AND {IS_OPEN} AND service = ?
    AND target IN ('', ?, ?) AND id NOT IN (SELECT value FROM json_each(?))"""  # noqa: S608 - a constant
_UNFINISHED: Final = f"""
SELECT (SELECT count(*) FROM task WHERE {IS_OPEN} AND service = ?1 AND target IN ('', ?2, ?3)
        AND (owner IS NULL OR owner IN (SELECT value FROM json_each(?4))))
    + (SELECT count(*) FROM hold WHERE ended_at IS NULL AND service = ?1 AND target = ?2
        AND lapses_at > ?5 AND (owner IS NULL OR owner IN (SELECT value FROM json_each(?4))))
"""  # noqa: S608 - a constant
# An operator ended a row that nobody owned: what it owes is anyone's.
_OWING: Final = """
owner IS NULL AND finished_at IS NOT NULL AND service = ? AND id IN (
    SELECT task_id FROM reply WHERE due_at IS NOT NULL
    UNION SELECT id FROM task WHERE errored_due = 1)"""
_DUE_REPLIES: Final = """
SELECT task.id, reply.queue, reply.msg_id, reply.expires_at, reply.monitor_s, task.accepted_at
FROM reply JOIN task ON task.id = reply.task_id
WHERE reply.due_at IS NOT NULL AND task.owner = ?"""


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
        note, company, beside, cut, free, holds, asked, duties = _ADOPT
        batch.add(note, me, now, dead_run)
        batch.add(company, dead_run)
        batch.add(beside, dead_run)
        index = batch.ask(cut + " RETURNING id", int(crashed), int(charged), now, dead_run)
        batch.ask(free + " RETURNING id", dead_run)
        if charged:
            batch.add(_WAIT_FOR_SETTLING, now, LONGEST_WAIT_S, self._journal.service)
        batch.add(holds, dead_run)
        batch.add(asked, dead_run, int(crashed))
        batch.add(duties, me, dead_run, int(crashed))
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
        now = self._journal.clock.wall()
        lanes = (lane or Lane.REQUESTS).value, (lane or Lane.OPS).value
        others = json.dumps(list(without))
        which = (state.value, self._journal.service, *self._targets, *lanes, now, now, others)
        # Mostly there is nothing: a look is cheap, and keeps no sibling from writing.
        if look and not await self._journal.engine.query(_CLAIMABLE, *which, 1):
            return []
        batch = Batch(Point.CLAIM)
        batch.ask(_CLAIM, self._journal.run_id, *which, limit, state.value)
        rows = await self._journal.commit(batch)
        return sorted(self._readable(rows[0]), key=lambda row: row.id)

    async def next_look(self, without: Collection[int] = ()) -> float | None:
        """Wall time at which the next HANDED_OVER row may be claimed; None if there is none.

        Rows *without* are left to others.
        """
        others = json.dumps(list(without))
        rows = await self._journal.engine.query(
            _NEXT_LOOK, self._journal.service, *self._targets, others
        )
        return None if rows[0][0] is None else float(rows[0][0])

    async def unfinished(self, dead: Collection[str]) -> int:
        """Rows that this run could settle, now or later: its own, ownerless ones, the dead's.

        Also those in their settle time, and the holds of this host. Not what a living run owns, or
        one of which nothing is proven, nor what another host or instance alone may run.
        """
        owners = json.dumps([self._journal.run_id, *dead])
        names = (self._journal.service, *self._targets)
        now = self._journal.clock.wall()
        rows = await self._journal.engine.query(_UNFINISHED, *names, owners, now)
        return int(rows[0][0] or 0)

    async def unfinished_resources(self) -> list[tuple[int, tuple[str, str]]]:
        """(row id, resource) of each started, ownerless row that names one, oldest first."""
        rows = await self._journal.engine.query(
            "SELECT id, resource_kind, resource_id FROM task WHERE owner IS NULL "  # noqa: S608
            f"AND state = 'handed_over' AND {IS_OPEN} AND resource_kind IS NOT NULL "
            "AND service = ? AND target IN ('', ?, ?) ORDER BY id",
            self._journal.service,
            *self._targets,
        )
        return [(int(row[0] or 0), (str(row[1]), str(row[2]))) for row in rows]

    def add_follow_clock(self, batch: Batch, by_s: float) -> None:
        """After the wall clock was set by so many seconds: nothing waits longer than it was to.

        Nor does it wait less for that: what a clock that was set forward has shortened is over.
        """
        now = self._journal.clock.wall()
        batch.add(_FOLLOW_CLOCK, min(0.0, by_s), now, self._journal.service)

    def add_run_again(self, batch: Batch, row: TaskRow) -> None:
        """HANDED_OVER back to ACCEPTED, ours: it will be run from its cursor."""
        batch.add(_AGAIN, row.id, self._journal.run_id, expect=1)

    def accepted(self, row: TaskRow) -> TaskRow:
        """*row* as it stands after `add_run_again`."""
        return replace(row, state=TaskState.ACCEPTED, cut=None, next_check=None)

    def add_probing(self, batch: Batch, row: TaskRow, *, alone: bool = False) -> None:
        """Record that a probe of the row begins: if the process dies of it, that counts."""
        batch.add(
            "UPDATE task SET probing = 1, alone = ? "
            "WHERE id = ? AND owner = ? AND state = 'handed_over'",
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
        batch.add(_WAIT, next_check, int(counts), now, row.id, self._journal.run_id, expect=1)

    def add_disown(self, batch: Batch, row: TaskRow) -> None:
        """Make a row of ours that nobody here works on claimable: settled like a dead run's.

        A begun one counts a crash, so that a row which loses its place again and again ends.
        """
        if row.state is TaskState.RUNNING:
            batch.add(
                "UPDATE task SET owner = NULL, state = 'handed_over', cut = 'unclean', "
                "crashes = crashes + 1, alone = 0 "
                "WHERE id = ? AND owner = ? AND state = 'running'",
                row.id,
                self._journal.run_id,
                expect=1,
            )
        else:
            self.add_let_go(batch, row)

    def add_take_over(self, batch: Batch, row: TaskRow) -> None:
        """Make an ownerless row ours, whomever it was for."""
        batch.add(
            "UPDATE task SET owner = ? WHERE id = ? AND owner IS NULL AND state = ?",
            self._journal.run_id,
            row.id,
            row.state.value,
            expect=1,
        )

    def add_postpone(self, batch: Batch, row: TaskRow, *, next_check: float) -> None:
        """Give a claimed row up until wall time *next_check*; one that moved on is left alone."""
        batch.add(
            "UPDATE task SET owner = NULL, next_check = ?, probing = 0 WHERE id = ? AND owner = ? "
            "AND state IN ('accepted', 'handed_over')",
            next_check,
            row.id,
            self._journal.run_id,
        )

    def add_let_go(self, batch: Batch, row: TaskRow) -> None:
        """Give a claimed row up untouched; one that has moved on is left alone."""
        batch.add(
            "UPDATE task SET owner = NULL WHERE id = ? AND owner = ? "
            "AND state IN ('accepted', 'handed_over')",
            row.id,
            self._journal.run_id,
        )

    async def take_duties(self) -> None:
        """Make ours what ended rows without an owner still owe: replies, errored hooks."""
        service = self._journal.service
        query = f"SELECT 1 FROM task WHERE {_OWING} LIMIT 1"  # noqa: S608 - constants
        if await self._journal.engine.query(query, service):
            batch = Batch(Point.CLAIM)
            batch.add(
                f"UPDATE task SET owner = ? WHERE {_OWING}",  # noqa: S608 - constants
                *(self._journal.run_id, service),
            )
            await self._journal.commit(batch)

    async def due_replies(self) -> list[tuple[int, Address, float]]:
        """(row id, address, accepted at) of replies that this run owes."""
        rows = await self._journal.engine.query(_DUE_REPLIES, self._journal.run_id)
        return [(int(r[0] or 0), address_of(r[1:5]), float(r[5] or 0)) for r in rows]

    async def errored_due(self, *, limit: int = 100) -> list[TaskRow]:
        """ERRORED rows of this run whose hook has still to be called."""
        rows = await self._journal.engine.query(
            f"SELECT {ROW_COLUMNS} FROM task "  # noqa: S608 - a constant
            "WHERE errored_due = 1 AND owner = ? ORDER BY id LIMIT ?",
            self._journal.run_id,
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
            "UPDATE task SET calling = 1, alone = ? WHERE id = ? AND owner = ? AND errored_due = 1",
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
        mine = (
            f"SELECT {{}} FROM task WHERE owner = ? AND {IS_OPEN} "  # noqa: S608 - a constant
            "AND state IN ('accepted', 'running', 'handed_over')"
        )
        # An index has these; whole rows of thousands in flight would be read to be thrown away.
        ids = await self._journal.engine.query(mine.format("id"), self._journal.run_id)
        if known.issuperset(row[0] for row in ids):
            return []
        rows = await self._journal.engine.query(mine.format(ROW_COLUMNS), self._journal.run_id)
        return [row for row in self._readable(rows) if row.id not in known]

    def _readable(self, rows: Iterable[Row]) -> Iterator[TaskRow]:
        """Rows as values; a damaged one is told and left alone, and stops no other."""
        for row in rows:
            try:
                yield task_row(row)
            except StoreError as error:
                self._on_damage(error)
