"""Lease rows: which task may act on a resource, and with which fencing token.

A lease is granted by one conditional statement in the same commit as the
attempt that needs it. Its token (`lver`) rises with each grant, and is kept
after a release. A lease has no timer, because on one machine the death of a run
can be proved: it ends with its task, or when its owner is dead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

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

    The token is higher than all that were granted for the resource before. Send it with each
    change to a backend that can compare tokens. If the backend refuses a token below the highest
    that it has seen, a handler that goes on after it lost its lease can do no harm.

    Attributes:
        resource: (kind, id) of the resource.
        token: The fencing token, a whole number.
    """

    resource: Resource
    token: int


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as stored.

    Attributes:
        token: The last token that was granted.
        owner: Run that holds it; None if free.
        request_id: Request id of the task that took it last.
        not_before: Wall time before which it is not granted, a settle time; 0 for none.
    """

    resource: Resource
    token: int
    owner: str | None
    request_id: str | None
    not_before: float


class Rivals(NamedTuple):
    """The other runs that hold a lease or wait for it.

    Attributes:
        holder: Run that holds the lease; None if it is not held.
        is_free: Whether it is not held, and its settle time is over.
        following: Run of the oldest request that waits for it and has asked within `PATIENCE_S`;
            None if there is none.
    """

    holder: str | None
    is_free: bool
    following: str | None


class _Owed(NamedTuple):
    """A lease that is to be released.

    Attributes:
        token: None if it is not known whether it was granted.
        settles_at: Wall time before which it is not granted again; None if nobody need wait.
    """

    resource: Resource
    request_id: str
    token: int | None = None
    settles_at: float | None = None


class RunLeases:
    """The leases of one run."""

    def __init__(self, engine: Engine, clock: Clock, *, run_id: str) -> None:
        self._engine = engine
        self._clock = clock
        self._run_id = run_id
        self._owed: list[_Owed] = []
        self._looked_to: Resource = ("", "")  # the last one that `remove_old` has seen
        self.kept = 0  # leases of tasks that were cut: only the death of this process frees them

    def add_take(
        self, batch: Batch, resource: Resource, request_id: str, row_id: int | None
    ) -> int:
        """Take the lease for a task, or roll the batch back if it is held.

        Args:
            batch: Gets the statement.
            resource: The resource.
            request_id: Request id of the task.
            row_id: Row of the task; rows with lower ids are older. None if it has none yet. The
                copies of a fanout have the same request id, and a row each.

        Returns:
            Index of the statement that returns the token.
        """
        return batch.ask(sql.TAKE, *self._take_params(resource, request_id, row_id), expect=1)

    def _take_params(
        self, resource: Resource, request_id: str, row_id: int | None
    ) -> tuple[str | int | float | None, ...]:
        who = (self._run_id, request_id, self._clock.wall(), row_id)
        return (*resource, *who)

    def add_release(self, batch: Batch, guard: Guard, *, reason: str) -> None:
        """Release the lease; nothing if it was lost already."""
        batch.add(
            sql.RELEASE, self._clock.wall(), reason, *guard.resource, self._run_id, guard.token
        )

    def add_drop(self, batch: Batch, resource: Resource, request_id: str) -> None:
        """Release the lease that this run holds on *resource* for a task that does not run here."""
        batch.add(sql.DROP, self._clock.wall(), *resource, self._run_id, request_id)

    def add_take_away(self, batch: Batch, dead_run: str, *, acted_until: float) -> None:
        """Free all leases of a dead run; that of an unclean task only after its settle time.

        In the batch it must come before the adoption of the run's rows, as it reads their owner.

        Args:
            batch: Gets the statement.
            dead_run: Id of the run.
            acted_until: Wall time from which the settle time counts.
        """
        batch.add(sql.TAKE_AWAY, self._clock.wall(), acted_until, dead_run)

    def add_follow_clock(self, batch: Batch) -> None:
        """After the wall clock was set back, limit settle times to their length from now on."""
        batch.add(sql.FOLLOW_CLOCK, self._clock.wall())

    def add_take_away_one(
        self, batch: Batch, dead_run: str, request_id: str, *, settle_s: float
    ) -> None:
        """As `add_take_away`, for one task of that run whose last request may be under way."""
        now = self._clock.wall()
        batch.add(sql.TAKE_AWAY_ONE, now, now + settle_s, dead_run, request_id)

    async def take(self, resource: Resource, request_id: str) -> Guard | None:
        """Take a lease by itself; None if it is held."""
        batch = Batch(Point.TAKE_LEASE)
        index = batch.ask(sql.TAKE, *self._take_params(resource, request_id, None))
        # A lease that an earlier take for the same task may have got is not released any more:
        # that would release the lease of this one.
        doubt, doubted = _Owed(resource, request_id), self.forget_doubt(resource, request_id)
        try:
            rows = (await self._engine.commit(batch))[index]
        except (StoreError, asyncio.CancelledError):
            self._owed.append(doubt)  # the commit may have taken effect, or may still do so
            raise
        if not rows and doubted:
            self._owed.append(doubt)
        return Guard(resource=resource, token=int(rows[0][0] or 0)) if rows else None

    async def release(self, guard: Guard, *, reason: str) -> None:
        """Release one lease, in a commit of its own."""
        batch = Batch(Point.RELEASE_LEASE)
        self.add_release(batch, guard, reason=reason)
        await self._engine.commit(batch)

    def owe(self, guard: Guard, request_id: str, *, settle_s: float | None = None) -> None:
        """Note that a lease of this run, which no task uses, must be released later.

        With *settle_s*, a last request of its task may be under way for so many seconds.
        """
        settles_at = None if settle_s is None else self._clock.wall() + settle_s
        self._owed.append(_Owed(guard.resource, request_id, guard.token, settles_at))

    def doubt(self, resource: Resource, request_id: str) -> None:
        """Note that a lease must be released later if a commit of unknown end has taken it."""
        self._owed.append(_Owed(resource, request_id))

    def forget_doubt(self, resource: Resource, request_id: str) -> bool:
        """Cancel an earlier `doubt`, as the lease is taken again; returns whether there was one."""
        doubt, before = _Owed(resource, request_id), len(self._owed)
        self._owed = [owed for owed in self._owed if owed != doubt]
        return len(self._owed) < before

    async def is_ours(self, guard: Guard) -> bool:
        """Whether this run still holds the lease with that token."""
        row = await self.look(guard.resource)
        return row is not None and row.owner == self._run_id and row.token == guard.token

    async def give_back_owed(self) -> None:
        """Release the leases noted by `owe` and `doubt`; if that fails, they stay noted."""
        if not self._owed:
            return
        paid = list(self._owed)
        batch = Batch(Point.RELEASE_LEASE)
        for resource, request_id, token, settles_at in paid:
            if token is None:
                self.add_drop(batch, resource, request_id)
            elif settles_at is not None:
                now, me = self._clock.wall(), self._run_id
                batch.add(sql.GIVE_UP, now, settles_at, *resource, me, token)
            else:
                self.add_release(batch, Guard(resource=resource, token=token), reason="clean")
        await self._engine.commit(batch)
        self._owed = [owed for owed in self._owed if owed not in paid]

    async def remove_old(self, moment: float) -> None:
        """Read the next page of rows, and remove those that were released before *moment*."""
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
        """The runs that hold the lease or wait for it; does not ask for it."""
        rows = await self._engine.query(sql.RIVALS, *resource, self._clock.wall())
        holder, taken, following = rows[0]
        return Rivals(
            holder=None if holder is None else str(holder),
            is_free=not taken,
            following=None if following is None else str(following),
        )

    async def unsettled(self, resource: Resource) -> str | None:
        """The oldest interrupted task of the resource that is still to be settled, or None."""
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
