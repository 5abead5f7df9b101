"""Claims accepted rows that have no owner, and runs them as the intake runs deliveries."""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit.errors import StoreError, UnknownCommitError
from gracekit.journal.rows import TaskRow
from gracekit.leases.leases import Resource
from gracekit.process import Point
from gracekit.recovery.ends import Ends, Gates, unservable
from gracekit.recovery.hook_calls import MethodHooks
from gracekit.recovery.shared import Shared
from gracekit.store.batch import Batch
from gracekit.tracker.task import Lane, TaskState

CLAIM_AT_ONCE: Final = 32


class Starts:
    """Starts rows that this run has claimed, as many as the claim limit of each lane allows."""

    def __init__(self, shared: Shared, *, gates: Gates, hooks: MethodHooks, ends: Ends) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._dispatcher = shared.dispatcher
        self._claim_limit = {lane: gate.claim_limit for lane, gate in shared.gates.items()}
        self._lane_gates = shared.gates
        self._lines = shared.lines
        self._gates = gates
        self._hooks = hooks
        self._ends = ends
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._claiming = 0
        self._claimed = 0

    @property
    def claim_mark(self) -> tuple[int, int]:
        """How many claims of accepted rows are under way, and how many have ended.

        During a claim, the store says already that this run owns the row, which has no task yet.
        """
        return self._claiming, self._claimed

    async def claim_accepted(self, lane: Lane) -> None:
        """Start ownerless accepted rows, oldest first, until there are none.

        Waits whenever the lane's claim limit allows no more.
        """
        look = True
        while not self._trigger.is_paused:
            number = self._claim_limit[lane].take_some(CLAIM_AT_ONCE)
            if number == 0:
                await self._claim_limit[lane].wait_change()
            elif await self._claim_some(lane, number, look=look):
                look = False  # there are probably more, so claim them without reading first
            else:
                return

    async def _claim_some(self, lane: Lane, claim_limit: int, *, look: bool) -> int:
        """Start up to *claim_limit* rows, which are counted already; returns how many it found."""
        found = 0
        try:
            rows = await self._claim(lane, claim_limit, look=look)
            found = len(rows)
            for row in rows:
                claim_limit -= 1
                await self.start(row, inside=None)
        finally:
            for _ in range(claim_limit):
                self.give_seat(lane)
        return found

    async def _claim(self, lane: Lane, limit: int, *, look: bool) -> list[TaskRow]:
        self._claiming += 1
        try:
            return await self._claims.claim(
                TaskState.ACCEPTED,
                limit=limit,
                lane=lane,
                look=look,
                without=self._ends.left_to_siblings(),
            )
        finally:
            self._claiming -= 1
            self._claimed += 1

    async def commit_retry(self, batch: Batch, row_id: int, lane: Lane) -> bool:
        """Commit a batch that makes a row ACCEPTED; start it here if a slot of its lane is free.

        Returns:
            Whether it was claimed here; if not, any run that may run it can claim it.
        """
        gate = self._lane_gates[lane]
        # Otherwise a sibling may have a free slot now, while the row would wait for one here.
        has_seat = not self._lines.is_full(gate, gate.max_running) and self.take_seat(lane)
        rows: list[TaskRow] = []
        self._claiming += 1
        try:
            index = self._claims.add_claim(batch, row_id) if has_seat else None
            results = await self._journal.commit(batch)
            rows = [] if index is None else self._claims.claimed(results[index])
        except (asyncio.CancelledError, UnknownCommitError):
            self._trigger.poke()  # this run may own the row now, without a task for it
            raise
        finally:
            self._claiming -= 1
            self._claimed += 1
            if has_seat and not rows:
                self.give_seat(lane)
        try:
            for row in rows:
                await self.start(row, inside=None)
        except StoreError as error:  # the retry is committed nevertheless
            self._telemetry.emit("store.error", what="settling", error=str(error))
            self._trigger.poke()
        return bool(rows)

    async def start(self, row: TaskRow, *, inside: Resource | None) -> None:
        """Run an ACCEPTED row that this run has claimed, or release it.

        Args:
            row: As claimed.
            inside: Resource in whose line recovery passes its place to the row's task.
        """
        resumed = False
        try:
            method = self._hooks.method_of(row)
            if (why := unservable(row, method)) is not None:
                await self._ends.leave_or_end(row, method, why)
            elif self._trigger.is_paused:
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
        """Count one more row, if the claim limit allows and recovery is not paused."""
        return not self._trigger.is_paused and self._claim_limit[lane].take()

    def give_seat(self, lane: Lane) -> None:
        """Give back what `take_seat` counted, as no row was started."""
        self._claim_limit[lane].begin()
        self._claim_limit[lane].leave()

    def wake(self) -> None:
        """Let those that wait for the claim limit check again whether recovery is paused."""
        for claim_limit in self._claim_limit.values():
            claim_limit.wake()

    async def let_go(self, *rows: TaskRow) -> None:
        """Release claimed rows: any run may claim them."""
        batch = Batch(Point.NOT_STARTED)
        for row in rows:
            self._claims.add_let_go(batch, row)
        await self._journal.commit(batch)
