"""What time ends: the past, and rows whose host or instance does not come back.

Removal is in small batches and counted, so that accepted = terminal + transient
+ removed holds at every commit.
"""

from __future__ import annotations

from typing import Final

from gracekit.process import Point
from gracekit.store.batch import Batch, Value
from gracekit.store.schema import IS_OPEN
from gracekit.tracker.journal import ROW_COLUMNS, Journal, TaskRow, task_row

REMOVE_AT_ONCE: Final = 500

_OLD: Final = """
SELECT id FROM task WHERE finished_at < ? AND errored_due = 0
    AND id NOT IN (SELECT task_id FROM reply) ORDER BY finished_at LIMIT ?"""
_OLD_REST: Final = (
    "run WHERE adopted_at < ?1",
    "hold WHERE ended_at < ?1 AND errored_due = 0",
    "incident WHERE at < ?1",
)
_COUNT_REMOVED: Final = """
INSERT INTO tally (what, n) SELECT 'removed', count(*) FROM task
    WHERE id IN ({marks}) AND finished_at IS NOT NULL AND state <> 'rejected'
ON CONFLICT (what) DO UPDATE SET n = n + excluded.n"""
_REMOVE: Final = "DELETE FROM task WHERE id IN ({marks}) AND finished_at IS NOT NULL RETURNING id"
_ABANDONED: Final = f"""
SELECT {ROW_COLUMNS} FROM task
WHERE owner IS NULL AND state IN ('accepted', 'handed_over') AND {IS_OPEN} AND service = ?
    AND target <> '' AND route = ? AND NOT EXISTS (
        SELECT 1 FROM run WHERE run.service = task.service
            AND (run.host = task.target OR run.instance = task.target) AND run.beat_at > ?)
ORDER BY id LIMIT ?"""  # noqa: S608 - constants


class Retention:
    """Removes what nobody needs any more."""

    def __init__(self, journal: Journal, *, retention_s: float) -> None:
        self._journal = journal
        self._retention_s = retention_s

    async def remove_all_old(self) -> None:
        """Remove batch after batch until nothing is older than the retention."""
        while await self.remove_old():
            pass  # each batch is a commit of its own, and others get in between

    async def remove_old(self) -> int:
        """Remove one batch of terminal rows older than the retention; returns how many.

        With it go all ended holds, ended runs and incidents that are as old.
        """
        moment = self._journal.clock.wall() - self._retention_s
        rows = await self._journal.engine.query(_OLD, moment, REMOVE_AT_ONCE)
        rest = " OR ".join(f"EXISTS (SELECT 1 FROM {which})" for which in _OLD_REST)  # noqa: S608
        ((any_rest,),) = await self._journal.engine.query(f"SELECT {rest}", moment)
        if not rows and not any_rest:
            return 0
        ids = [row[0] for row in rows]
        batch = Batch(Point.RETIRE)
        # Counted from what is there at the commit: a sibling may have removed some of them.
        # Rejected rows were never counted as accepted.
        batch.add(_COUNT_REMOVED.format(marks=_marks(ids)), *ids)
        removed = batch.ask(_REMOVE.format(marks=_marks(ids)), *ids)
        for which in _OLD_REST:
            batch.add(f"DELETE FROM {which}", moment)  # noqa: S608 - constants
        return len((await self._journal.commit(batch))[removed])

    async def abandoned(self, route: str, *, gone_s: float) -> list[TaskRow]:
        """Ownerless rows for a host or instance that has had no run for *gone_s* seconds.

        The *route* is directed or fanout.
        """
        moment = self._journal.clock.wall() - gone_s
        rows = await self._journal.engine.query(
            _ABANDONED, self._journal.service, route, moment, REMOVE_AT_ONCE
        )
        return [task_row(row) for row in rows]


def _marks(ids: list[Value]) -> str:
    return ",".join("?" * len(ids))
