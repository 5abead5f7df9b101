"""Claims accepted rows that have no owner, and runs them like deliveries: a second intake."""

from __future__ import annotations

from typing import Final

from gracekit.journal.rows import TaskRow
from gracekit.leases.leases import Resource
from gracekit.process import Point
from gracekit.recovery.ends import Ends, unservable
from gracekit.recovery.gates import Gates
from gracekit.recovery.hooks import Hooks
from gracekit.recovery.shared import Shared
from gracekit.store.batch import Batch
from gracekit.tracker.task import Lane, TaskState

CLAIM_AT_ONCE: Final = 32


class Starts:
    """Starts rows that this run has claimed, as many as each lane has seats."""

    def __init__(self, shared: Shared, *, gates: Gates, hooks: Hooks, ends: Ends) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._dispatcher = shared.dispatcher
        self._seats = shared.seats
        self._gates = gates
        self._hooks = hooks
        self._ends = ends
        self._pace = shared.pace

    async def claim_accepted(self, lane: Lane) -> None:
        """Start ownerless accepted rows, oldest first, until there are none.

        No more are claimed ahead of their turn than the lane has seats.
        """
        look = True
        while not self._pace.is_paused:
            number = self._seats[lane].take_some(CLAIM_AT_ONCE)
            if number == 0:
                await self._seats[lane].wait_change()
            elif await self._claim_some(lane, number, look=look):
                look = False  # there may be more: what is submitted after the claim comes after it
            else:
                return

    async def _claim_some(self, lane: Lane, seats: int, *, look: bool) -> int:
        """Start up to so many, whose seats were taken; returns how many there were."""
        found = 0
        try:
            rows = await self._claims.claim(
                TaskState.ACCEPTED,
                limit=seats,
                lane=lane,
                look=look,
                without=self._ends.left_to_siblings(),
            )
            found = len(rows)
            for row in rows:
                seats -= 1
                await self.start(row, inside=None)
        finally:
            for _ in range(seats):
                self.give_seat(lane)
        return found

    async def start(self, row: TaskRow, *, inside: Resource | None) -> None:
        """Run an ACCEPTED row of ours, for which a seat was taken, or give it up.

        Args:
            row: As it stands.
            inside: Resource in whose line a place is handed on with it.
        """
        resumed = False
        try:
            method = self._hooks.method_of(row)
            if (why := unservable(row, method)) is not None:
                await self._ends.leave_or_end(row, method, why)
            elif self._pace.is_paused:
                await self.let_go(row)
            else:
                self._dispatcher.resume(row, inside=inside)
                resumed = True
        finally:
            if not resumed:
                self.give_seat(row.lane)
                if inside is not None:
                    self._gates.leave_handed(inside)

    def take_seat(self, lane: Lane) -> bool:
        """Take a seat if one is free, and nothing is paused."""
        return not self._pace.is_paused and self._seats[lane].take()

    def give_seat(self, lane: Lane) -> None:
        """Nobody has used it."""
        self._seats[lane].rise()
        self._seats[lane].leave()

    def wake(self) -> None:
        """Let who waits for a seat look whether anything may still be started."""
        for seats in self._seats.values():
            seats.wake()

    async def let_go(self, *rows: TaskRow) -> None:
        """Give claimed rows up: any run may claim them."""
        batch = Batch(Point.NOT_STARTED)
        for row in rows:
            self._claims.add_let_go(batch, row)
        await self._journal.commit(batch)
