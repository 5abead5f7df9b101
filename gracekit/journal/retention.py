"""Retention: removes old rows, and finds rows whose host or instance does not come back.

Rows are removed in small batches and counted, so that accepted = terminal +
transient + removed holds after every commit.
"""

from __future__ import annotations

from typing import Final

from gracekit.journal import retention_sql as sql
from gracekit.journal.rows import TaskRow, task_row
from gracekit.journal.tasks import Journal
from gracekit.process import Point
from gracekit.store.batch import Batch, Value

REMOVE_AT_ONCE: Final = 500


class Retention:
    """Removes rows that are older than the retention.

    Args:
        journal: The journal.
        retention_s: Age in seconds at which ended rows may be removed.
        after_s: The runs of the store must have consumed requests for so many seconds, in all,
            since a row reached that age. Otherwise a duplicate of its request may still be in a
            queue, and would be run again.
    """

    def __init__(self, journal: Journal, *, retention_s: float, after_s: float = 0.0) -> None:
        self._journal = journal
        self._retention_s = retention_s
        self._after_s = after_s

    async def note_consumed(self, seconds: float) -> None:
        """Note that requests were consumed in the last *seconds*; overlapping runs count once."""
        now = self._journal.clock.wall()
        batch = Batch(Point.RETIRE, durable=False)
        batch.add(sql.FORGET_FUTURE, now)  # there are some if the clock was set back
        batch.add(sql.NOTE_CONSUMED, now - seconds, now)
        batch.add(sql.FORGET_BEFORE, self._after_s)
        await self._journal.commit(batch)

    async def _oldest_needed(self) -> float | None:
        """Rows that ended before this wall time may be removed; None if none may be yet."""
        if not self._after_s:
            return self._journal.clock.wall() - self._retention_s
        ((since,),) = await self._journal.engine.query(sql.SINCE, self._after_s)
        return None if since is None else float(since) - self._retention_s

    async def remove_all_old(self) -> None:
        """Remove batch after batch until nothing is older than the retention."""
        while await self.remove_old():
            pass  # each batch is its own commit, so that other commits come in between

    async def remove_old(self) -> int:
        """Remove one batch of rows that are older than the retention; returns how many.

        Removes terminal tasks, adopted runs, ended holds and incidents.
        """
        moment = await self._oldest_needed()
        if moment is None:
            return 0
        batch = Batch(Point.RETIRE)
        removed = []
        rows = await self._journal.engine.query(sql.OLD, moment, REMOVE_AT_ONCE)
        if ids := [row[0] for row in rows]:
            # The commit counts the rows itself, as a sibling may have removed some meanwhile.
            # Rejected rows were never counted as accepted.
            batch.add(sql.COUNT_REMOVED.format(marks=_marks(ids)), *ids)
            removed.append(batch.ask(sql.REMOVE.format(marks=_marks(ids)), *ids))
            batch.add(sql.REMOVE_CONTENT.format(marks=_marks(ids)), *ids)
        for old, remove in sql.PAST:
            found = await self._journal.engine.query(old, moment, REMOVE_AT_ONCE)
            if ids := [row[0] for row in found]:
                removed.append(batch.ask(remove.format(marks=_marks(ids)), *ids))
        if not removed:
            return 0
        gone = await self._journal.commit(batch)
        return sum(len(gone[index]) for index in removed)

    async def abandoned(self, route: str, *, gone_s: float) -> list[TaskRow]:
        """Ownerless rows for a host or instance that has had no run for *gone_s* seconds.

        Or of which an operator has said that it does not come back.
        *route* is `directed` or `fanout`.
        """
        moment = self._journal.clock.wall() - gone_s
        rows = await self._journal.engine.query(
            sql.ABANDONED, self._journal.service, route, moment, REMOVE_AT_ONCE
        )
        return [task_row(row) for row in rows]


def _marks(ids: list[Value]) -> str:
    return ",".join("?" * len(ids))
