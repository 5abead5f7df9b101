"""The runs on record as listings read them: those that may live, and pages of those that ended.

Ended runs stay for as long as the retention, so there may be very many. A listing reads the runs
that it shows, and not all of them to choose from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from gracekit.runs import runs_sql as sql
from gracekit.runs.run import Run, run_of
from gracekit.store.batch import Row
from gracekit.store.engine import Queries

AT_ONCE: Final = 500
"""Most run ids in one statement."""


class Place(NamedTuple):
    """The queues of one instance's runs: its topics, and the names of its directed queues."""

    service: str
    topic: str
    ops_topic: str
    host: str
    instance: str


def named(name: str | None) -> tuple[str, list[str]]:
    """The condition for runs of that INSTANCE or SERVICE@INSTANCE, None for all; its parameters."""
    if name is None:
        return sql.OF_ANY, []
    # Names may have an `@` themselves.
    pairs = [(name[:at], name[at + 1 :]) for at, one in enumerate(name) if one == "@"]
    conditions = [sql.OF_INSTANCE, *[sql.OF_SERVICE_INSTANCE] * len(pairs)]
    return f"({' OR '.join(conditions)})", [name, *(word for pair in pairs for word in pair)]


async def list_not_adopted(engine: Queries) -> list[Run]:
    """Runs of all services whose end no other run has recorded, newest first.

    These are the living and the doubtful ones, and the dead ones until the next start adopts them.
    """
    return _runs(await engine.query(sql.ALL_NOT_ADOPTED))


async def find_runs(engine: Queries, run_ids: Collection[str]) -> dict[str, Run]:
    """The runs with these ids, by id; those that are not on record are missing."""
    found, ids = list[Run](), sorted(run_ids)
    for at in range(0, len(ids), AT_ONCE):
        some = ids[at : at + AT_ONCE]
        marks = ", ".join("?" * len(some))
        found += _runs(await engine.query(sql.BY_ID.format(marks=marks), *some))
    return {run.run_id: run for run in found}


async def list_last_ended(engine: Queries, name: str | None, *, limit: int) -> list[Run]:
    """The adopted runs that ended last, newest end first; of one name, or of all."""
    where, params = named(name)
    return _runs(await engine.query(sql.LAST_ENDED.format(where=where), *params, limit))


async def list_gone(engine: Queries, name: str | None, *, since: float, limit: int) -> list[Run]:
    """Of each instance the last adopted run, if it was seen after *since*; the newest end first.

    Args:
        engine: The store.
        name: INSTANCE or SERVICE@INSTANCE; None for all.
        since: Wall time.
        limit: How many at most.
    """
    where, params = named(name)
    text = sql.LAST_OF_INSTANCES.format(where=where)
    return _runs(await engine.query(text, since, since, *params, limit))


async def count_runs(engine: Queries) -> int:
    """How many runs are on record."""
    ((number,),) = await engine.query(sql.COUNT)
    return int(number or 0)


async def is_known(engine: Queries, name: str | None) -> bool:
    """Whether a run of that name is on record; for None, whether any is."""
    where, params = named(name)
    return bool(await engine.query(sql.IS_KNOWN.format(where=where), *params))


async def list_services(engine: Queries, name: str | None = None) -> list[str]:
    """Services with a run on record, sorted; of one instance's name, or all."""
    where, params = named(name)
    rows = await engine.query(sql.SERVICES.format(where=where), *params)
    return [str(service) for (service,) in rows]


async def list_instances(engine: Queries, *, limit: int) -> list[str]:
    """Names of the instances that started last."""
    return [str(name) for (name,) in await engine.query(sql.NEWEST_INSTANCES, limit)]


async def list_places(engine: Queries) -> list[Place]:
    """Where runs on record have read requests; each place once."""
    return [Place(*map(str, row)) for row in await engine.query(sql.PLACES)]


async def list_seen_since(engine: Queries, since: float) -> set[str]:
    """Hosts and instances of the adopted runs that were seen after *since*, a wall time."""
    rows = await engine.query(sql.NAMES_SEEN_SINCE, since)
    return {str(name) for row in rows for name in row}


def _runs(rows: Sequence[Row]) -> list[Run]:
    return list(map(run_of, rows))
