"""Lists the resources that wait to be settled, and the results of each host's last pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import StoreView


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of one service and host.

    Attributes:
        waiting: How many have had a rule begun, but without a final result. If *settles* is False:
            how many the last pass found that it would settle.
        settles: Whether passes settle resources automatically, or only find them.
        oldest: (kind, id, wall time at which it was first seen) of the one that waits longest;
            None if none waits.
        last_pass: Wall times `began_at` and `finished_at`, and the numbers `settled`, `failed`,
            `waiting` and `left`, of resources; None before the first pass has finished.
    """

    service: str
    host: str
    waiting: int
    settles: bool
    oldest: tuple[str, str, float] | None
    last_pass: Mapping[str, float] | None

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        oldest = self.oldest and dict(zip(("kind", "id", "since"), self.oldest, strict=True))
        return {
            "service": self.service,
            "host": self.host,
            "waiting": self.waiting,
            "settles": self.settles,
            "oldest": oldest,
            "last_pass": None if self.last_pass is None else dict(self.last_pass),
        }


async def list_resources(view: StoreView) -> list[ResourceStatus]:
    """One entry for each service and host with waiting resources or a pass on record."""
    waiting = {}
    for service, host, number in await view.engine.query(sql.WAITING_RESOURCES):
        rows = await view.engine.query(sql.OLDEST_RESOURCE, service, host)
        oldest = [(str(kind), str(name), float(since or 0)) for kind, name, since in rows]
        waiting[str(service), str(host)] = int(number or 0), oldest[0] if oldest else None
    passes = {}
    for service, host, *numbers in await view.engine.query(sql.RESOURCE_PASSES):
        passes[str(service), str(host)] = {
            name: float(number or 0) if name.endswith("_at") else int(number or 0)
            for name, number in zip(sql.PASS_NAMES, numbers, strict=True)
        }
    found = []
    for service, host in sorted({*waiting, *passes}):
        number, oldest_one = waiting.get((service, host), (0, None))
        last_pass = passes.get((service, host))
        settles = last_pass is None or not last_pass.pop("found_only")
        found.append(
            ResourceStatus(
                service=service,
                host=host,
                waiting=number if settles or last_pass is None else int(last_pass["waiting"]),
                settles=settles,
                oldest=oldest_one,
                last_pass=last_pass,
            )
        )
    return found
