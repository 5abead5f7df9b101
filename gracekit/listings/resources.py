"""Lists the resources that wait to be settled, and the results of each host's last pass."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.journal.findings_sql import PAUSES
from gracekit.listings import listings_sql as sql
from gracekit.store.engine import Queries


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of one service and host.

    Attributes:
        waiting: How many have had a rule begun, but without a final result. If *settles* is False:
            how many the last pass found that it would settle.
        settles: Whether passes settle resources automatically, or only find them.
        oldest: `kind`, `id` and `since` (wall time at which it was first seen) of the one that
            waits longest; None if none waits.
        undeclared: `kind`, `number` and one `id` of those that wait although the newest run there
            does not declare their kind, so that no rule settles them.
        broken: `kind`, `why` and `since` (wall time) of kinds that the last pass could not list.
        last_pass: Wall times `began_at` and `finished_at`, and the numbers `settled`, `failed`,
            `waiting` and `left`, of resources; None before the first pass has finished.
    """

    service: str
    host: str
    waiting: int
    settles: bool
    oldest: Mapping[str, Any] | None
    undeclared: Sequence[Mapping[str, Any]]
    broken: Sequence[Mapping[str, Any]]
    last_pass: Mapping[str, float] | None

    def troubles(self, now: float) -> Iterator[tuple[str, str]]:
        """What its passes do not settle, each with a remedy; *now* is wall time."""
        of = f"of {self.service} on {self.host}"
        for one in self.broken:
            since = duration(age_s(now, one["since"]))
            yield (
                f"kind {one['kind']} {of} could not be listed for {since}: {one['why'][:200]}",
                "mend its find, or what that asks; `hook.failed` in the log has the traceback",
            )
        for one in self.undeclared:
            yield (
                f"{one['kind']}:{one['id']} (1 of {one['number']}) {of} has no rule: no such kind",
                "`gracekit reconcile` drops what is on record of them; or declare the kind again",
            )


async def list_pauses(engine: Queries, now: float) -> list[dict[str, Any]]:
    """The services that begin no pass unasked: `service`, `until`, `by` and `reason`."""
    names = ("service", "until", "by", "reason")
    rows = await engine.query(PAUSES, now)
    return [dict(zip(names, row, strict=True)) for row in rows]


async def list_resources(engine: Queries) -> list[ResourceStatus]:
    """One entry for each service and host with waiting resources or a pass on record."""
    waiting = await _by_host(engine, sql.WAITING_RESOURCES, ("kind", "id", "number"))
    broken = await _by_host(engine, sql.BROKEN_KINDS, ("kind", "why", "since"))
    passes = await _by_host(engine, sql.RESOURCE_PASSES, sql.PASS_NAMES)
    found = []
    for place in sorted({*waiting, *passes}):
        newest = await engine.query(sql.NEWEST_KINDS, *place)
        # Without a run of the host on record, nobody knows which kinds it declares.
        declared = (
            json.loads(str(newest[0][0])) if newest else {one["kind"] for one in waiting[place]}
        )
        oldest = await _by_host(engine, sql.OLDEST_RESOURCE, ("kind", "id", "since"), *place)
        last_pass = next(iter(passes[place]), None)
        settles = last_pass is None or not last_pass.pop("found_only")
        number = sum(one["number"] for one in waiting[place])
        found.append(
            ResourceStatus(
                service=place[0],
                host=place[1],
                waiting=number if settles or last_pass is None else last_pass["waiting"],
                settles=settles,
                oldest=next(iter(oldest[place]), None),
                undeclared=[one for one in waiting[place] if one["kind"] not in declared],
                broken=broken[place],
                last_pass=last_pass,
            )
        )
    return found


async def _by_host(
    engine: Queries, text: str, names: Sequence[str], *params: str
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of a query by their first two columns, service and host; *names* are the others."""
    found = defaultdict(list)
    for service, host, *row in await engine.query(text, *params):
        found[str(service), str(host)].append(dict(zip(names, row, strict=True)))
    return found
