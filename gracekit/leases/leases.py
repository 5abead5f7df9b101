"""Lease rows: who may act on a resource, and with which fencing token.

A lease is granted by one conditional statement in the same commit as the
attempt that needs it. Its token (`lver`) rises with each grant and is never
lowered; it survives release. On one machine death is proved, so a lease has no
timer: it ends with its task, or its owner is dead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from gracekit.clock import Clock
from gracekit.errors import StoreError
from gracekit.leases import leases_sql as sql
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine

Resource = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A lease that was granted: `async with ctx.lease("disk", "d-1") as guard`.

    Send the token along with each change, to whatever can compare it: it is higher than all that
    were granted for the resource before. Who refuses a token below the highest that it has seen
    is safe from a handler that goes on after its lease was given to another.

    Attributes:
        resource: (kind, id) of what the lease is for.
        token: The fencing token, a whole number.
    """

    resource: Resource
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A lease as stored.

    Attributes:
        token: The last one granted.
        owner: Run that holds it; None if free.
        request_id: Of the task that took it last.
        not_before: Wall time before which nobody gets it; 0 for none.
    """

    resource: Resource
    token: int
    owner: str | None
    request_id: str | None
    not_before: float


class Rivals(NamedTuple):
    """Whom a wait for a lease meets.

    Attributes:
        holder: Run that holds the lease; None for nobody.
        is_free: Whether nobody holds it, and it need not settle any more.
        following: Run of the oldest request that waits for it and has asked lately; None if none.
    """

    holder: str | None
    is_free: bool
    following: str | None


class _Owed(NamedTuple):
    """A lease to give back.

    Attributes:
        token: None if it is not known whether it was granted.
    """

    resource: Resource
    request_id: str
    token: int | None = None


class Leases:
    """The leases of one run.

    Attributes:
        lowest: Every token is above it; see `epoch`.
    """

    def __init__(self, engine: Engine, clock: Clock, *, run_id: str) -> None:
        self._engine = engine
        self._clock = clock
        self._run_id = run_id
        self._owed: list[_Owed] = []
        self._looked_to: Resource = ("", "")  # by `remove_old`
        self.lowest = 0
        self.kept = 0  # granted to tasks that were cut: only the death of this process frees them

    def add_take(
        self, batch: Batch, resource: Resource, request_id: str, row_id: int | None
    ) -> int:
        """Take the lease for a task, or roll the batch back if it is held.

        Args:
            batch: Gets the statement.
            resource: On what.
            request_id: Of the task.
            row_id: Its row, which says who is older; None before there is one. The copies of a
                fanout have one request id and a row each.

        Returns:
            Index of the statement that returns the token.
        """
        return batch.ask(sql.TAKE, *self._take_params(resource, request_id, row_id), expect=1)

    def _take_params(
        self, resource: Resource, request_id: str, row_id: int | None
    ) -> tuple[str | int | float | None, ...]:
        who = (self._run_id, request_id, self._clock.wall(), row_id)
        return (*resource, self.lowest, *who)

    def add_release(self, batch: Batch, guard: Guard, *, reason: str) -> None:
        """Give the lease back; one that was lost already is left alone."""
        batch.add(
            sql.RELEASE, self._clock.wall(), reason, *guard.resource, self._run_id, guard.token
        )

    def add_drop(self, batch: Batch, resource: Resource, request_id: str) -> None:
        """Give back what this run holds on *resource* for a task that does not run here."""
        batch.add(sql.DROP, self._clock.wall(), *resource, self._run_id, request_id)

    def add_take_away(self, batch: Batch, dead_run: str) -> None:
        """Free every lease of a run proven dead; after an unclean end only when it has settled.

        Must precede the adoption of the run's rows in the batch: it reads whose they are.
        """
        now = self._clock.wall()
        batch.add(sql.TAKE_AWAY, now, now, dead_run)

    def add_follow_clock(self, batch: Batch) -> None:
        """After the wall clock was set back: a lease settles for no longer than it was to."""
        batch.add(sql.FOLLOW_CLOCK, self._clock.wall())

    def add_take_away_one(
        self, batch: Batch, dead_run: str, request_id: str, *, settle_s: float
    ) -> None:
        """As `add_take_away`, for one task of that run that may have acted when it died."""
        now = self._clock.wall()
        batch.add(sql.TAKE_AWAY_ONE, now, now + settle_s, dead_run, request_id)

    async def take(self, resource: Resource, request_id: str) -> Guard | None:
        """Take a lease by itself; None if it is held."""
        batch = Batch(Point.TAKE_LEASE)
        index = batch.ask(sql.TAKE, *self._take_params(resource, request_id, None))
        # What an earlier take for the same task may have brought must not be given back any
        # more once this one is on its way: it would take this one's lease from under it.
        doubt, doubted = _Owed(resource, request_id), self.forget_doubt(resource, request_id)
        try:
            rows = (await self._engine.commit(batch))[index]
        except (StoreError, asyncio.CancelledError):
            self._owed.append(doubt)  # the commit may have landed, or may still land
            raise
        if not rows and doubted:
            self._owed.append(doubt)
        return Guard(resource=resource, token=int(rows[0][0] or 0)) if rows else None

    async def release(self, guard: Guard, *, reason: str) -> None:
        """Give one lease back by itself."""
        batch = Batch(Point.RELEASE_LEASE)
        self.add_release(batch, guard, reason=reason)
        await self._engine.commit(batch)

    def owe(self, guard: Guard, request_id: str) -> None:
        """A lease of ours that nobody here uses could not be given back: do it later."""
        self._owed.append(_Owed(guard.resource, request_id, guard.token))

    def doubt(self, resource: Resource, request_id: str) -> None:
        """A commit that takes a lease may have landed, or may still land: give it back later."""
        self._owed.append(_Owed(resource, request_id))

    def forget_doubt(self, resource: Resource, request_id: str) -> bool:
        """Give nothing back for an earlier `doubt`: it is taken again; whether there was one."""
        doubt, before = _Owed(resource, request_id), len(self._owed)
        self._owed = [owed for owed in self._owed if owed != doubt]
        return len(self._owed) < before

    async def is_ours(self, guard: Guard) -> bool:
        """Whether the lease is still the one that was granted."""
        row = await self.look(guard.resource)
        return row is not None and row.owner == self._run_id and row.token == guard.token

    async def give_back_owed(self) -> None:
        """Give back what is owed; what fails stays owed."""
        if not self._owed:
            return
        paid = list(self._owed)
        batch = Batch(Point.RELEASE_LEASE)
        for resource, request_id, token in paid:
            if token is None:
                self.add_drop(batch, resource, request_id)
            else:
                self.add_release(batch, Guard(resource=resource, token=token), reason="clean")
        await self._engine.commit(batch)
        self._owed = [owed for owed in self._owed if owed not in paid]

    async def remove_old(self, moment: float) -> None:
        """Look at the next page of rows, and remove those that are free since before *moment*."""
        page = await self._engine.query(sql.PAGE, moment, *self._looked_to)
        is_last = len(page) < sql.REMOVE_AT_ONCE
        self._looked_to = ("", "") if is_last else (str(page[-1][0]), str(page[-1][1]))
        old = [(kind, name, int(token or 0)) for kind, name, token, is_old in page if is_old]
        if not old:
            return
        batch = Batch(Point.RETIRE)
        batch.add(sql.RAISE_FLOOR, max(token for *_, token in old))
        for row in old:
            batch.add(sql.REMOVE, moment, *row)
        await self._engine.commit(batch)

    async def rivals(self, resource: Resource) -> Rivals:
        """Who keeps the lease from us, without asking for it."""
        rows = await self._engine.query(sql.RIVALS, *resource, self._clock.wall())
        holder, taken, following = rows[0]
        return Rivals(
            holder=None if holder is None else str(holder),
            is_free=not taken,
            following=None if following is None else str(following),
        )

    async def unsettled(self, resource: Resource) -> str | None:
        """The oldest interrupted task of the resource that is to be settled; None for none."""
        rows = await self._engine.query(sql.UNSETTLED, *resource, self._run_id)
        return str(rows[0][0]) if rows else None

    async def look(self, resource: Resource) -> LeaseRow | None:
        """The lease as stored, without taking it; None if it was never granted."""
        rows = await self._engine.query(
            sql.LOOK,
            *resource,
        )
        if not rows:
            return None
        token, owner, request_id, not_before = rows[0]
        return LeaseRow(
            resource=resource,
            token=int(token or 0),
            owner=None if owner is None else str(owner),
            request_id=None if request_id is None else str(request_id),
            not_before=float(not_before or 0),
        )
