"""Asking again for a resource: not before its request may run, and not for another case."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gracekit import Absent, Context, Found, Service, Settled, Wait
from gracekit.testing import InMemoryService, run

FEW_PLACES = {"max_running": 2, "threads": 2, "max_accepted": 4, "prefetch": 4}


class Things:
    """The records of a service, and what its backend says of all of them.

    Attributes:
        records: Status by id, and when it was written; None for no time.
        asked: Ids that the probe was called with.
    """

    def __init__(self) -> None:
        self.svc = Service("things")
        self.records: dict[str, tuple[str, float | None]] = {}
        self.asked: list[str] = []
        self.answer: Settled | Absent | Wait = Wait("1m")
        kind = self.svc.kind("thing")
        kind.find(self.find)
        kind.write(self.write)
        kind.probe("creating", failed="error")(self.probe)
        self.create = self.svc.rpc(resource="thing")(create_with(self))

    async def find(self, _ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        found = [
            Found(id_, status, since=since)
            for id_, (status, since) in sorted(self.records.items())
            if status == "creating" and id_ > (after or "")
        ]
        return found[:limit]

    async def write(
        self, _ctx: Context, found: Found, status: str, _facts: Mapping[str, object]
    ) -> bool:
        self.records[found.id] = (status, None)
        return True

    async def probe(self, _ctx: Context, found: Found) -> Settled | Absent | Wait:
        self.asked.append(found.id)
        return self.answer

    @property
    def statuses(self) -> set[str]:
        return {status for status, _ in self.records.values()}


def create_with(things: Things):
    async def create(_ctx: Context, thing: str) -> None:
        await asyncio.sleep(0.5)
        things.records[thing] = ("available", None)

    return create


def test_nothing_is_asked_again_before_the_queues_of_a_start_are_read() -> None:
    """An id is used anew while no process runs: the request for it stands in the queue, and
    decides.
    """
    things = Things()
    ids = [f"t-{n:02}" for n in range(30)]
    things.records = dict.fromkeys(ids, ("creating", None))

    async def main() -> None:
        async with InMemoryService(things.svc, **FEW_PLACES) as one:
            await one.until(lambda: len(things.asked) == len(ids))
            await one.drain()
            things.asked.clear()
            things.answer = Absent()
            await asyncio.sleep(60)
            for id_ in ids:
                await one.client.cast(things.create, thing=id_)
            await one.start()
            await one.settled()
            await one.pass_time(600)

    run(main())

    assert things.statuses == {"available"}
    assert things.asked == []


def test_a_record_that_was_written_anew_is_not_asked_again_for_the_old_one() -> None:
    """It has the status that was found, and has had it for a shorter time: it waits for a pass."""
    things = Things()
    things.records = {"old": ("creating", 0.0), "new": ("creating", 0.0)}

    async def main() -> None:
        async with InMemoryService(things.svc, reconciliation_interval="1h") as one:
            await one.until(lambda: len(things.asked) == 2)
            things.records["new"] = ("creating", one.clock.wall())
            things.answer = Settled("available")
            await one.pass_time(300)
            assert things.asked[2:] == ["old"]
            assert things.records["new"][0] == "creating"
            await one.pass_time(3600)
            assert things.asked[2:] == ["old", "new"]
            assert things.statuses == {"available"}

    run(main())
