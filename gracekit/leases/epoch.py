"""Detects an older copy of a store, and keeps it from granting fencing tokens a second time.

A restored backup, a store that lost its `-wal` and a new store beside old run locks do not
know the tokens that were granted since. So the store has a mark that rises, and the lock
directory and the queue keep the highest mark that they have seen. A store with a lower mark
is an older copy: its epoch is raised, and tokens begin at `epoch * 2**40`, above all that
were granted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from gracekit.clock import Clock
from gracekit.journal.claims import add_restored
from gracekit.leases import epoch_sql as sql
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.older import EPOCH_BITS, FILE, LOST, OLDER, mark_of, read_mark
from gracekit.telemetry.telemetry import Telemetry

Keep = Callable[[str, int], Awaitable[int]]


class Epoch:
    """The epoch of one store, as one run keeps it.

    Args:
        engine: The store.
        name: Name of the store on this machine.
        directory: Directory of its run locks.
        keep: Keeps a mark for the name of the store in the queue, if it is the highest;
            returns the highest.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        directory: Path,
        keep: Keep,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._name = name
        self._directory = directory
        self._keep = keep
        self._telemetry = telemetry
        self._clock = clock

    async def begin(self) -> None:
        """Compare the store with the marks kept beside it, before any lease is granted."""
        # Before the store is read, as a living sibling raises the mark of the store first.
        known = max(read_mark(self._directory), await self._keep(self._name, 0))
        mark, is_copy = await self._look()
        if is_copy or known > mark:
            reason = _why(mark, is_copy=is_copy)
            await self._raise(known, LOST if _is_empty(mark, is_copy=is_copy) else OLDER, reason)
            self._telemetry.emit("store.older", store=self._name, reason=reason)
        await self.rise()

    async def rise(self) -> None:
        """Raise the mark, first in the store and then beside it."""
        batch = Batch(Point.JOIN)
        index = batch.ask(sql.RISE)
        ((epoch, age),) = (await self._engine.commit(batch))[index]
        mark = mark_of(epoch, age)
        self._write_file(mark)
        await self._keep(self._name, mark)

    async def _look(self) -> tuple[int, bool]:
        ((epoch, age, copied_at),) = await self._engine.query(sql.LOOK)
        return mark_of(epoch, age), copied_at is not None

    async def _raise(self, known: int, what: str, reason: str) -> None:
        """Raise the epoch, note why as an incident, and doubt rows of tasks, in one commit."""
        batch = Batch(Point.JOIN)
        add_restored(batch, self._clock.wall(), what, reason)
        batch.add(
            sql.RAISE,
            known >> EPOCH_BITS,
            known & (1 << EPOCH_BITS) - 1,
        )
        await self._engine.commit(batch)

    def _write_file(self, mark: int) -> None:
        """Write the file in one step; a sibling that writes a lower mark later does no harm."""
        new = self._directory / f"{FILE}.{os.getpid()}"
        with contextlib.suppress(OSError):  # the next rise writes it again
            if mark > read_mark(self._directory):
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(f"{mark}\n")
                new.replace(self._directory / FILE)


def add_restored_copy(batch: Batch, now: float) -> None:
    """Put on record that the store is a copy that was put back; new tokens are above its own."""
    batch.add(sql.MARK_COPY, now)


def add_retirement(batch: Batch, now: float) -> None:
    """The same of a store that nobody uses; a conflict if a run may act or a lease is held."""
    batch.add(sql.RETIRE, now, expect=1)


def _is_empty(mark: int, *, is_copy: bool) -> bool:
    """Whether the store is a new one, and the one that was used before is gone."""
    return mark == 0 and not is_copy


def _why(mark: int, *, is_copy: bool) -> str:
    """Why the store counts as an older one, for log and incident."""
    if is_copy:
        return "it is a backup: what was recorded since is not known"
    if _is_empty(mark, is_copy=is_copy):
        return (
            "it is new and empty, and another one was here: tasks that were unfinished there are "
            "not known, and nobody settles them. Stop the service, put that store or its backup "
            "back (docs/backup.md), and start it again"
        )
    return "a newer one was here: what was recorded there is not known; see docs/backup.md"
