"""Compares lease rows with the rows of tasks and runs, and mends what does not fit, in one commit.

The rows *are* the truth, and no commit of gracekit leaves them so. A table that was edited by hand
or restored alone can be wrong.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gracekit.clock import Clock
from gracekit.leases import declarations_sql as sql
from gracekit.leases import epoch_sql
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine, Queries


class LeaseDamage(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a lease.

    Attributes:
        resource: `kind:id`.
        what: In words.
    """

    resource: str
    what: str


_CHECKS: Final = (
    (sql.NO_SUCH_OWNER, "is held by a run that is not on record"),
    (sql.OF_NOTHING, "is held for a task that has ended"),
    (sql.MISSING, "has a task that runs, and nobody holds it"),
    (sql.TOO_LOW, "has a lower token than the task that runs"),
)


async def check_leases(engine: Queries) -> list[LeaseDamage]:
    """What does not fit, at most a thousand of each kind."""
    return [
        LeaseDamage(resource=f"{kind!s}:{name!s}", what=what)
        for text, what in _CHECKS
        for kind, name in await engine.query(text)
    ]


async def mend_leases(engine: Engine, clock: Clock) -> None:
    """Free what nobody holds, give running tasks their leases again, and raise all new tokens."""
    batch = Batch(Point.TAKE_LEASE)
    batch.add(sql.FREE_DAMAGED, clock.wall())
    batch.add(sql.GIVE_AGAIN)
    batch.add(epoch_sql.RAISE_TOKENS)
    await engine.commit(batch)
