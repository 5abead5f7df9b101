"""No rule judges a record while its request stands in a queue."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from tests.process import resourced
from tests.process.helpers import Site, until
from tests.process.volume_sites import make_records, start, statuses, times_asked
from tests.scale import scale

CREATES = scale(200, 1000)


async def check_creates(site: Site, *, siblings: int = 1, **settings: object) -> None:
    """Send creates to a service that is down, start it, and judge what its rules have done.

    Its *siblings* are of one host, and start together.
    """
    records = make_records(site)
    first = await start(site).serving()  # from now on there are queues
    assert await first.stop() == 0
    names = [f"v-{n:05}" for n in range(CREATES)]
    async with resourced.svc.client(site.url) as client:
        for name in names:
            records.add([name], "creating", since=time.time())
            await client.cast(resourced.create, volume=name, s=0.04)
    await until(lambda: site.queued() == CREATES, "all in the queue")

    # Few are accepted at a time: the others are in no record, as if nobody worked on them.
    few = {"max_running": 2, "max_accepted": 4}
    again = [start(site, **few, **settings) for _ in range(siblings)]
    await asyncio.gather(*(process.serving() for process in again))
    began = time.monotonic()
    await site.effect("built", times=1)
    await until(lambda: len(built(site)) == CREATES and not site.queued(), "their end", 120)
    took_s = time.monotonic() - began
    await until(lambda: site.rows("SELECT 1 FROM resource_pass"), "the end of the pass")
    assert await asyncio.gather(*(process.stop() for process in again)) == [0] * siblings

    judged = times_asked(site)
    told = f"{len(judged)} of {CREATES} were judged by a rule; built in {took_s:.1f} s"
    print(f"\n{told}")  # noqa: T201 - for `pytest -s`
    assert not judged, told
    assert took_s > 0.2, "the queue took no longer than the pause before a pass"
    assert built(site) == dict.fromkeys(names, 1)
    assert statuses(records) == {"available": CREATES}


def built(site: Site) -> Counter[str]:
    return Counter(effect.key for effect in site.seen("built"))


@pytest.mark.timeout(scale(120, 600))
@pytest.mark.parametrize("siblings", [1, 2])
async def test_creates_sent_to_a_stopped_service_are_built_and_not_judged(
    site: Site, siblings: int
) -> None:
    """Their records are found before their requests: the pass waits until all have been taken."""
    await check_creates(site, siblings=siblings)


@pytest.mark.timeout(scale(120, 600))
async def test_without_the_wait_for_the_queue_creates_are_judged(site: Site) -> None:
    """The claim above fails with that wait taken out: it is the wait that protects them."""
    with pytest.raises(AssertionError, match="were judged by a rule"):
        await check_creates(site, test_planted="no wait for the queue")
