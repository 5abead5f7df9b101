"""Who begins next, over several processes: leases that others hold, and threads at a stop."""

from __future__ import annotations

import asyncio

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import SLACK_S, Site, until

PASSED = 3
"""Younger requests that may begin before one that waits: those on their way when it asks first."""


async def test_who_waits_for_a_lease_is_not_passed_by_younger_requests(
    site: Site, client: RpcClient
) -> None:
    """One process always has the next request for the resource; those of two others come in their
    order all the same, and quickly.
    """
    busy = await site.start(host="busy", max_accepted=2, prefetch=2).serving()
    others = [await site.start(host=host).serving() for host in ("one", "two")]
    flood = [
        await client.prepare(host="busy").cast(served.retried, key=f"busy{n}", vm="v", s=0.1)
        for n in range(200)
    ]
    await site.effect("start", times=5)
    waiting = []
    for n in range(3):
        for host in ("one", "two"):
            to = client.prepare(host=host)
            waiting.append(await to.cast(served.retried, key=f"{host}{n}", vm="v", s=0.03))
            await asyncio.sleep(0.05)
    for one in waiting:
        await site.in_state(one, "succeeded")

    rows = site.rows("SELECT id, request_id, started_at FROM task WHERE started_at IS NOT NULL")
    row_of = {row["request_id"]: row for row in rows}
    for one in waiting:
        mine = row_of[one]
        passed = [
            row for row in rows if row["id"] > mine["id"] and row["started_at"] < mine["started_at"]
        ]
        assert len(passed) <= PASSED, (mine, passed)
    assert any(site.state(one) != "succeeded" for one in flood), "the flood had not ended"
    for process in (busy, *others):
        process.kill()


async def test_a_lease_of_a_killed_process_is_taken_over_at_once(
    site: Site, client: RpcClient
) -> None:
    """Whoever waits for it has recovery look: it does not wait for recovery's next period."""
    calm = {"reconcile_every": "60s", "startup_reconciliation_wait_seconds": "0s"}
    holder = await site.start(host="one", **calm).serving()
    waiter = await site.start(host="two", **calm).serving()
    await client.prepare(host="one").cast(served.retried, key="first", vm="v", s=300, again_s=0)
    await site.effect("start", "first")
    second = await client.prepare(host="two").cast(served.retried, key="second", vm="v", s=0)
    await until(lambda: site.state(second) == "accepted", "the second waits")
    holder.kill()
    killed = len(site.effects)

    await until(lambda: site.state(second) == "succeeded", "its lease", within_s=3 + SLACK_S)
    assert [effect.word for effect in site.effects[killed:]].count("done") >= 1
    assert holder.run["verdict"] == "killed"
    assert await waiter.stop() == 0


async def test_no_plain_handler_begins_after_term(site: Site, client: RpcClient) -> None:
    """Requests that wait for a thread are left to the next start, none of them judged."""
    short = {"drain_timeout": "0.5s", "handover_grace": "0.2s", "handover_flush": "0.5s"}
    service = await site.start(threads=2, **short).serving()
    ids = [await client.cast(served.in_thread, key=f"k{n}", s=0.1) for n in range(6)]
    for one in ids:
        await until(lambda one=one: site.state(one), f"{one} on record")
    await site.effect("start", times=2)

    assert await service.stop() == 75

    assert [site.state(one) for one in ids].count("succeeded") == 2
    assert {row["state"] for row in site.transient()} == {"accepted"}
    assert len(site.seen("start")) == 2


async def test_the_timeout_of_a_plain_handler_counts_from_its_thread(
    site: Site, client: RpcClient
) -> None:
    """A request that waits for a thread, for longer than its method's timeout, does not use it
    up.
    """
    service = await site.start(threads=1).serving()
    holds = await client.cast(served.count_in_thread, key="a")
    await site.effect("step", "a")
    waits = await client.cast(served.timed_in_thread, key="b")
    await site.in_state(waits, "accepted")

    await asyncio.sleep(2.5)  # its timeout and more, by the clock of another process
    assert site.state(waits) == "accepted"
    site.go()

    await site.in_state(holds, "succeeded")
    await site.in_state(waits, "succeeded")
    assert await service.stop() == 0
