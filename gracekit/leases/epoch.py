"""Whether this store is the one that was here last, and which tokens it may still give.

A restored backup, a store that lost its `-wal` and a new one beside old run locks do not
know the tokens that were given since. So the store keeps a mark that rises; the lock
directory and the queue keep the highest that they have seen. A store below that is an older
one: its epoch is raised, and tokens begin at `epoch * 2**40`, above all that were given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from gracekit.clock import Clock
from gracekit.leases import epoch_sql as sql
from gracekit.leases.leases import Leases
from gracekit.process import Point
from gracekit.store.batch import Batch, Value
from gracekit.store.engine import Engine
from gracekit.telemetry.telemetry import Telemetry

EPOCH_BITS: Final = 40
FILE: Final = "mark"

Keep = Callable[[str, int], Awaitable[int]]


class Epoch:
    """The epoch of one store, as one run keeps it.

    Args:
        engine: The store.
        name: What it is called on this machine.
        directory: Where its run locks are.
        keep: Keeps a mark under the name of the store in the queue, if it is the highest;
            returns the highest.
        leases: Who is told the lowest token.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        directory: Path,
        keep: Keep,
        leases: Leases,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._name = name
        self._directory = directory
        self._keep = keep
        self._leases = leases
        self._telemetry = telemetry
        self._clock = clock

    async def begin(self) -> None:
        """Compare the store with what is known beside it, before any lease is granted."""
        # Before the store is read: a living sibling raises the store's mark first.
        known = max(read_mark(self._directory), await self._keep(self._name, 0))
        mark, is_copy = await self._look()
        if is_copy or known > mark:
            await self._raise(known)
            self._telemetry.emit(
                "store.older",
                store=self._name,
                reason=_why(mark, is_copy=is_copy),
            )
        await self.rise()

    async def rise(self) -> None:
        """Raise the mark: in the store, and then beside it."""
        batch = Batch(Point.JOIN)
        index = batch.ask(sql.RISE)
        ((epoch, age),) = (await self._engine.commit(batch))[index]
        mark = mark_of(epoch, age)
        self._leases.lowest = mark >> EPOCH_BITS << EPOCH_BITS
        self._write_file(mark)
        await self._keep(self._name, mark)

    async def _look(self) -> tuple[int, bool]:
        ((epoch, age, copied_at),) = await self._engine.query(sql.LOOK)
        return mark_of(epoch, age), copied_at is not None

    async def _raise(self, known: int) -> None:
        """In one commit, so that of two that start together each raises it by itself at most.

        Accepted rows that must not be run twice unasked go the way of interrupted ones.
        """
        now = self._clock.wall()
        batch = Batch(Point.JOIN)
        batch.add(sql.NOTE_DOUBT, now)
        batch.add(sql.NOTE_PARKED, now)
        batch.add(sql.DOUBT, now)
        batch.add(
            sql.RAISE,
            known >> EPOCH_BITS,
            known & (1 << EPOCH_BITS) - 1,
        )
        await self._engine.commit(batch)

    def _write_file(self, mark: int) -> None:
        """Whole or not at all; a sibling that writes a lower one late does no harm."""
        new = self._directory / f"{FILE}.{os.getpid()}"
        with contextlib.suppress(OSError):  # the next rise writes it again
            if mark > read_mark(self._directory):
                new.write_text(f"{mark}\n")
                new.replace(self._directory / FILE)


def _why(mark: int, *, is_copy: bool) -> str:
    """What the store is, for the log."""
    if is_copy:
        return "it is a backup"
    if mark == 0:
        return "it is new and empty, and another one was here: restore that, or its backup"
    return "a newer one was here"


def read_mark(directory: Path) -> int:
    """The highest mark of a store that was seen beside its run locks; 0 for none."""
    try:
        return int((directory / FILE).read_text())
    except (OSError, ValueError):  # none yet, or somebody else's
        return 0


def mark_of(epoch: Value, age: Value) -> int:
    """Epoch and age as one number, which rises with either."""
    assert isinstance(epoch, int)
    assert isinstance(age, int)
    return epoch << EPOCH_BITS | age
