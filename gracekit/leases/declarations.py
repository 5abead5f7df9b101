"""Leases that people declare: made, removed, looked at, taken and given back by hand.

A declared lease is a row like that of a task's resource, and both exclude each other. It is kept
until it is deleted, and its token rises for ever: a lease that is made again begins above it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gracekit.clock import Clock
from gracekit.errors import (
    ConflictError,
    InvalidArgumentsError,
    LeaseExists,
    LeaseHeld,
    NoSuchLease,
    UnknownCommitError,
)
from gracekit.leases import declarations_sql as sql
from gracekit.leases import leases_sql
from gracekit.leases.leases import Guard, Resource
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine, Queries

LONGEST_PAYLOAD: Final = 4096
"""Bytes."""


class LeaseFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A lease as stored; the fields are the columns of `declarations_sql.COLUMNS`.

    Attributes:
        token: The last token that was granted.
        owner: Run that holds it; None if it is free.
        holder: Request id of the task, or id of the hold, that took it last.
        not_before: Wall time before which it is not granted; 0 for none.
        declared_at: None if people have not declared it, so that it is one of tasks.
    """

    kind: str
    id: str
    token: int
    owner: str | None
    holder: str | None
    not_before: float
    acquired_at: float
    released_at: float | None
    release_reason: str | None
    declared_at: float | None
    payload: str | None
    forced_by: str | None
    forced_reason: str | None
    settle_s: float


async def look(engine: Queries, resource: Resource) -> LeaseFacts | None:
    """The lease as stored, without taking it; None if there is no row."""
    rows = await engine.query(sql.LOOK, *resource)
    return _facts(rows[0]) if rows else None


async def page(engine: Queries, *, after: Resource, limit: int) -> list[LeaseFacts]:
    """Declared leases behind *after*, in the order of kind and id."""
    return [_facts(row) for row in await engine.query(sql.PAGE, *after, limit)]


def _facts(row: Row) -> LeaseFacts:
    return msgspec.convert(row, LeaseFacts)


class DeclaredLeases:
    """Changes declared leases, each in one commit."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def create(self, resource: Resource, payload: str | None = None) -> None:
        """Declare a lease.

        Raises:
            LeaseExists: it was declared before.
            InvalidArgumentsError: the payload is too long.
        """
        if payload is not None and len(payload.encode()) > LONGEST_PAYLOAD:
            raise InvalidArgumentsError(
                f"a payload of {len(payload.encode())} bytes is longer than {LONGEST_PAYLOAD}: "
                "keep it elsewhere, and its name here"
            )
        batch, now = Batch(Point.TAKE_LEASE), self._clock.wall()
        batch.add(sql.CREATE, *resource, now, payload, expect=1)
        try:
            await self._engine.commit(batch)
        except UnknownCommitError:
            facts = await look(self._engine, resource)
            if facts is None or facts.declared_at != now:
                raise
        except ConflictError as error:
            raise LeaseExists(f"lease {shown(resource)} is declared already") from error

    async def delete(self, resource: Resource) -> None:
        """Remove a declared lease that nobody holds.

        Raises:
            NoSuchLease: it is not declared.
            LeaseHeld: it is held, or the end of its last holder still settles.
        """
        batch = Batch(Point.RETIRE)
        batch.add(sql.KEEP_TOKEN, *resource)
        batch.add(sql.DELETE, *resource, self._clock.wall(), expect=1)
        try:
            await self._engine.commit(batch)
        except ConflictError as error:
            if (await self.need(resource)).owner is None:
                raise LeaseHeld(
                    f"lease {shown(resource)} is free, but late effects of its last holder may be "
                    "under way: delete it when `gracekit lease status` shows no time below "
                    "GRANTED IN"
                ) from error
            raise LeaseHeld(
                f"lease {shown(resource)} is held, and only a free one can be deleted: end its "
                "holder, or order it to end by `gracekit lease force`"
            ) from error

    async def need(self, resource: Resource) -> LeaseFacts:
        """The declared lease.

        Raises:
            NoSuchLease: there is none.
        """
        facts = await look(self._engine, resource)
        if facts is None or facts.declared_at is None:
            raise NoSuchLease(
                f"lease {shown(resource)} is not declared: "
                f"`gracekit lease create {shown(resource)}` does that"
            )
        return facts

    async def take(
        self, resource: Resource, hold: str, run_id: str, *, settle_s: float
    ) -> Guard | None:
        """Take it for a hold; None if it is held, or not to be granted yet.

        Raises:
            NoSuchLease: it is not declared.
            StoreError: it was not taken.
        """
        batch = Batch(Point.TAKE_LEASE)
        declared = batch.ask(sql.IS_DECLARED, *resource, expect=1)
        who = (run_id, hold, self._clock.wall(), None)
        taken = batch.ask(leases_sql.TAKE, *resource, *who, expect=1)
        batch.add(sql.HELD_BY_PEOPLE, settle_s, *resource)
        try:
            rows = await self._engine.commit(batch)
        except ConflictError as error:
            if error.statement == declared:
                await self.need(resource)
            return None
        except UnknownCommitError:
            facts = await self.need(resource)
            if facts.owner != run_id or facts.holder != hold:
                raise
            return Guard(resource=resource, token=facts.token)
        return Guard(resource=resource, token=int(rows[taken][0][0] or 0))

    async def give_back(self, guard: Guard, hold: str, run_id: str, *, settle_s: float) -> None:
        """Release it; nothing if it is lost. It is granted to nobody for *settle_s*."""
        now, batch = self._clock.wall(), Batch(Point.RELEASE_LEASE)
        if settle_s:
            batch.add(leases_sql.TAKE_AWAY_ONE, now, now + settle_s, run_id, hold)
        else:
            batch.add(leases_sql.RELEASE, now, "clean", *guard.resource, run_id, guard.token)
        await self._engine.commit(batch)

    async def order_end(
        self, resource: Resource, token: int, *, by: str, reason: str, batch: Batch | None = None
    ) -> None:
        """Order the hold with that token to end, in *batch*; its member reads that in seconds.

        Raises:
            LeaseHeld: a task has it, or another hold.
        """
        batch = batch or Batch(Point.RELEASE_LEASE)
        batch.add(sql.FORCE, by, reason, *resource, token, expect=1)
        await self._change_held(batch, resource, token)

    async def take_away_now(
        self, resource: Resource, token: int, *, by: str, reason: str, batch: Batch
    ) -> None:
        """As `order_end`, but free it at once: two may have it until its holder reads that.

        Raises:
            LeaseHeld: another one has it now.
        """
        now = self._clock.wall()
        batch.add(sql.TAKE_AWAY_NOW, now, by, reason, *resource, token, expect=1)
        await self._change_held(batch, resource, token)

    async def _change_held(self, batch: Batch, resource: Resource, token: int) -> None:
        try:
            await self._engine.commit(batch)
        except ConflictError as error:
            facts = await self.need(resource)
            if facts.owner is None:
                raise NoSuchLease(f"lease {shown(resource)} is free: nobody is to end") from error
            if facts.token != token:
                raise LeaseHeld(
                    f"lease {shown(resource)} has token {facts.token} now, and not {token}: look "
                    "again who holds it"
                ) from error
            raise LeaseHeld(
                f"lease {shown(resource)} is held by task {facts.holder}: "
                f"`gracekit tasks cancel {facts.holder}` ends that"
            ) from error

    async def forced(self, run_id: str) -> dict[Resource, str]:
        """The leases of that run that were ordered to end, each with who said so and why."""
        rows = await self._engine.query(sql.FORCED, run_id)
        return {
            (str(kind), str(name)): f"{by!s} ordered it: {reason!s}"
            for kind, name, by, reason in rows
        }

    def add_free_all(self, batch: Batch, run_id: str) -> None:
        """Release all leases of a run that ends."""
        batch.add(sql.FREE_ALL, self._clock.wall(), run_id)


def shown(resource: Resource) -> str:
    """`vm:vm-1`, as commands take it."""
    return ":".join(resource)
