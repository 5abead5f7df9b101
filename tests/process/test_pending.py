"""Parked tasks in real processes: services and resolver are killed until every task has its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from gracekit import Parked, RpcClient
from gracekit.errors import CallTimeoutError
from tests.process import roomy
from tests.process.helpers import SLACK_S, Site, until
from tests.process.roomy import RECORDS, make_room, records
from tests.scale import scale

pytestmark = pytest.mark.timeout(scale(180, 3600))

BUILDS = scale(100, 1000)
ROOM = 5
CHAOS_S = scale(6.0, 90.0)
KILL_EVERY_S = 0.6
WAITS_S = scale(9.0, 60.0)
SETTINGS: dict[str, object] = {
    "use_pending_state": "true",
    "pending_timeout": f"{WAITS_S}s",
    "pending_max": 10 * BUILDS,
    "max_attempts": 1000,
    "reconcile_every": "0.5s",
}
KINDS = ("vm", "vm", "vm", "vm", "vm", "vm", "late", "huge", "spare", "vm")


async def play(site: Site) -> None:
    """Half of the builds at once, the others while something is killed again and again; then let
    everything end.
    """
    dice = random.Random(BUILDS)
    make_room(ROOM, site.root / RECORDS)
    services = [site.start_program("roomy", **SETTINGS) for _ in range(2)]
    for service in services:
        await service.serving()
    resolver = site.start_program("roomy", "resolver")
    names = [f"{KINDS[number % len(KINDS)]}-{number}" for number in range(BUILDS)]
    async with roomy.svc.client(site.url) as client:
        half = len(names) // 2
        waits_s = [0.0] * half + [dice.uniform(0, CHAOS_S) for _ in names[half:]]
        calls = [
            asyncio.create_task(call(client, name, wait_s))
            for name, wait_s in zip(names, waits_s, strict=True)
        ]
        end = time.monotonic() + CHAOS_S
        while time.monotonic() < end:
            await asyncio.sleep(dice.uniform(0.2, 2) * KILL_EVERY_S)
            check_deadlines(site, within_s=2 * SLACK_S)
            which = dice.choice(((), (), (), (0,), (1,), (0, 1)))
            for number in which:
                services[number].kill()
            for number in which:
                services[number] = site.start_program("roomy", **SETTINGS)
            # A run that is killed before it serves ends nothing, and so deadlines would pass.
            for number in which:
                await services[number].serving()
            if not which:
                resolver.kill()
                resolver = site.start_program("roomy", "resolver")
        answers = await asyncio.wait_for(
            asyncio.gather(*calls, return_exceptions=True), WAITS_S + 60
        )
        await until(lambda: has_settled(site), lambda: str(site.transient()), WAITS_S + 60)
    resolver.kill()
    for service in services:
        assert await service.stop() == 0
    check(site, names, answers)


async def call(client: RpcClient, name: str, wait_s: float) -> str:
    await asyncio.sleep(wait_s)
    view = client.prepare(request_id=name, pending=True, timeout=600)
    return await view.call(roomy.build, vm=name)


def has_settled(site: Site) -> bool:
    return (
        not site.transient()
        and not site.rows("SELECT 1 FROM outbox")
        and not site.rows("SELECT 1 FROM reply")
        and not site.rows("SELECT 1 FROM task WHERE errored_due = 1")
    )


def check_deadlines(site: Site, *, within_s: float) -> None:
    """Runs live, or start again: nothing waits for longer than it may."""
    late = site.rows(
        "SELECT request_id FROM task WHERE state = 'pending' AND pending_deadline < ?",
        time.time() - within_s,
    )
    assert late == []


def check(site: Site, names: list[str], answers: Sequence[object]) -> None:
    """The application's own record is the judge of what was built."""
    rows = {row["request_id"]: row for row in site.rows("SELECT * FROM task WHERE method='build'")}
    with records(site.root / RECORDS) as connection:
        built = Counter(vm for (vm,) in connection.execute("SELECT vm FROM built"))
    assert rows.keys() == set(names)
    assert set(built.values()) <= {1}, "a VM was built twice"
    for name, row in rows.items():
        assert (row["state"] == "succeeded") == (built[name] == 1), row
        ends = {("succeeded", None), ("errored", "expired"), ("errored", "gave_up")}
        assert row["state"] == "cancelled" or (row["state"], row["reason"]) in ends, row
        if row["reason"] == "expired":
            assert row["finished_at"] - row["pending_deadline"] < 2 * SLACK_S, row
    hooks = {one.key for one in site.seen("errored")}
    assert hooks == {name for name, row in rows.items() if row["state"] == "errored"}
    assert not [one for one in answers if isinstance(one, CallTimeoutError)]
    assert any(isinstance(one, Parked) for one in answers)
    tally = {row["what"]: row["n"] for row in site.rows("SELECT what, n FROM tally")}
    (count,) = site.rows("SELECT count(*) AS n FROM task WHERE state <> 'rejected'")
    assert tally["accepted"] == count["n"] + tally.get("removed", 0)
    assert tally["parked"] == sum(row["parkings"] for row in rows.values())
    assert site.rows("SELECT * FROM lease WHERE owner IS NOT NULL") == []
    states = Counter((row["state"], row["reason"]) for row in rows.values())
    print(f"\n{dict(states)}, parked {tally['parked']} times")  # noqa: T201 - for `pytest -s`
    assert states["succeeded", None] > ROOM


async def test_builds_end_once_while_services_and_resolver_are_killed(site: Site) -> None:
    """A burst of builds with room for few: no VM is built twice, none waits past its deadline, each
    caller is answered, and the accounts are even.
    """
    await play(site)
