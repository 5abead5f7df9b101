"""A rule is cut by a crash, a broken store or a clock that is set: its resource has one end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Service, Settled, Wait
from gracekit.process import Point, Side
from gracekit.request.suspects import GATHER_S
from gracekit.testing.faults import Fault
from tests.service.kit import Life, World, now
from tests.service.shares import (
    LOOKS_S,
    WAIT_S,
    Shares,
    first_pass,
    hang,
    results,
    settle,
    why_left,
)

pytestmark = pytest.mark.looptime

SIDES: list[tuple[Point, Side]] = [
    (point, side)
    for point in (Point.RULE, Point.RESOURCE_SETTLED, Point.FINDING)
    for side in ("before", "after")
]


@pytest.mark.parametrize(("point", "side"), SIDES)
async def test_a_crash_at_any_step_leads_to_one_end(
    world: World, svc: Service, point: Point, side: Side
):
    """The next run asks about the same resource again; it is written once."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.add("d", status="deleting")
    shares.answers = lambda _id, n: Wait(1) if n == 1 else Settled("available")
    life = await world.start(svc, reconcile_at_once=1)
    life.crash_at(point, side)
    await life.over.wait()
    await asyncio.sleep(1)
    life = await world.start(svc, reconcile_at_once=1)

    await world.until(lambda: len(shares.written) == 2)
    await asyncio.sleep(120)

    assert sorted(shares.written) == [
        ("a", "creating", "available"),
        ("d", "deleting", "deleted"),
    ]
    assert 2 <= len(shares.asked) <= 3
    assert world.rows("SELECT * FROM finding") == []
    assert world.rows("SELECT * FROM lease WHERE owner IS NOT NULL") == []


async def test_a_crash_in_a_rule_is_on_record_and_settles_first(world: World, svc: Service):
    """Its last request to the backend may be under way: the wait of a start is left to it."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, n: hang() if n == 1 else Settled("available")
    life = await world.start(svc, startup_reconciliation_wait_seconds=60)
    await world.until(lambda: bool(shares.asked))
    finding = shares.finding("a")
    assert finding is not None
    assert (finding["rule"], finding["owner"]) == ("was_it_created", life.runtime.run_id)
    await life.crash()
    killed = now()
    life = await world.start(svc, startup_reconciliation_wait_seconds=5)
    await world.until(lambda: (shares.finding("a") or {}).get("owner") is None)
    assert (shares.finding("a") or {})["crashes"] == 1
    assert "a process that worked on it has died" in why_left(await settle(life))["a"]

    await world.until(lambda: bool(shares.written))

    assert 60 <= now() - killed < 75
    assert [asked.token for asked in shares.asked] == [1, 2]
    assert shares.finding("a") is None


@pytest.mark.parametrize("rule", ["probe", "delete"])
async def test_a_rule_that_kills_its_process_is_given_up(world: World, svc: Service, rule: str):
    """After `max_attempts` crashes that it met alone; the others are settled, and none is
    blamed.
    """
    shares = Shares(world, svc)
    others = [f"s{n}" for n in range(5)]
    shares.add(*others)
    shares.add("killer", status="creating" if rule == "probe" else "deleting")
    lives: list[Life] = []

    async def kill() -> None:
        await asyncio.sleep(0.1)
        lives[-1].end()
        await hang()

    async def slow() -> Settled:
        await asyncio.sleep(1)
        return Settled("available")

    shares.answers = lambda name, _n: kill() if name == "killer" else slow()
    shares.deletes = lambda _id, _n: kill()
    while "killer" not in {name for name, *_ in shares.written}:
        assert len(lives) < 25
        life = await world.start(svc, max_attempts=3, reconciliation_interval_s=60)
        lives.append(life)
        done = asyncio.ensure_future(life.over.wait())
        settled = asyncio.ensure_future(
            world.until(lambda: len(shares.written) == 6, within_s=100_000)
        )
        await asyncio.wait({done, settled}, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        settled.cancel()

    failed = "error" if rule == "probe" else "error_deleting"
    assert shares.rows["killer"].status == failed
    assert {shares.rows[name].status for name in others} == {"available"}
    (told,) = lives[-1].told("resource.failed")
    assert told["reason"].startswith("attempts: ")
    assert 3 <= len(lives) - 1 <= 12


async def with_a_suspect_that_waits(world: World, svc: Service, shares: Shares) -> Life:
    """A life whose first pass is under way: its resource has met three crashes, and waits."""
    shares.add("a")
    shares.answers = lambda _id, _n: hang()
    life = await world.start(svc)
    for n in range(1, 4):
        await world.until(lambda n=n: len(shares.asked) == n)
        await life.crash()
        life = await world.start(svc)
    await asyncio.sleep(WAIT_S + LOOKS_S + GATHER_S / 2)
    return life


async def test_a_suspect_that_has_not_begun_may_be_let_go_twice(world: World, svc: Service):
    """A drain that insists pauses recovery again, perhaps before the wait has ended."""
    life = await with_a_suspect_that_waits(world, svc, Shares(world, svc))
    reconciler = life.runtime.wired.reconciler  # type: ignore[union-attr]  # it lives

    async def pause_twice() -> None:
        reconciler.pause()
        await asyncio.sleep(0)
        reconciler.pause()

    await world.run_as(life, pause_twice())


async def test_a_drain_does_not_wait_for_a_suspect_that_has_not_begun(world: World, svc: Service):
    """Its turn to be alone, which it waits for, never comes."""
    shares = Shares(world, svc)
    life = await with_a_suspect_that_waits(world, svc, shares)
    begun = now()

    await life.drain()

    assert now() - begun < 1
    assert shares.statuses() == {"a": "creating"}
    life = await world.start(svc)
    await world.until(lambda: bool(shares.written))
    assert shares.written == [("a", "creating", "error")]


async def test_a_lost_answer_of_the_store_is_made_good(world: World, svc: Service):
    """A commit of unknown end is no second end, and its lease is given back."""
    world.expects_faults = True
    for fault in (Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.REFUSED):
        for point in (Point.RULE, Point.RESOURCE_SETTLED, Point.FINDING):
            service = Service("compute")
            shares = Shares(world, service)
            shares.add(f"{fault.name} {point.value}")
            shares.answers = lambda _id, n: Wait(1) if n == 1 else Settled("available")
            # What a rule has not begun is left for the next pass, all else is on record.
            is_begun = point is not Point.RULE or fault is Fault.LOST_AFTER
            every_s = 0 if is_begun else 30
            life = await world.start(service, reconciliation_interval_s=every_s)
            life.plan(point, fault)
            await world.until(lambda shares=shares: bool(shares.written), within_s=300)  # type: ignore[misc]
            await asyncio.sleep(60)
            assert len(shares.written) == 1
            held = world.rows("SELECT * FROM lease WHERE owner IS NOT NULL")
            assert held == [], (fault, point)
            assert world.rows("SELECT * FROM finding") == [], (fault, point)
            await life.drain()


async def test_a_stop_in_a_rule_gives_its_resource_back(world: World, svc: Service):
    """A drain that is forced does not wait for the rule: the next start asks again."""
    world.expects_faults = True
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, n: hang() if n == 1 else Settled("available")
    life = await world.start(svc)
    await world.until(lambda: bool(shares.asked))
    life.ask_to_stop()
    await asyncio.sleep(1)
    life.runtime.wired.coordinator.force()
    await life.wait_end()

    life = await world.start(svc)
    await world.until(lambda: bool(shares.written))

    assert shares.asks() == ["a", "a"]
    assert [asked.token for asked in shares.asked] == [1, 2]


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
async def test_a_clock_that_is_set_neither_hurries_nor_delays(
    world: World, svc: Service, jump_s: float
):
    """What waits keeps its own length. The application's `since` is its own, and is not moved."""
    shares = Shares(world, svc, max_wait="10m")
    shares.add("a", age_s=None)
    shares.answers = lambda _id, n: Wait("5m") if n == 1 else Settled("available")
    life = await world.start(svc, reconciliation_interval_s=0)
    await first_pass(life)
    begun = now()
    await asyncio.sleep(60)
    world.clock.shift_s += jump_s
    await world.until(lambda: bool(shares.written), within_s=20_000)

    assert 295 <= now() - begun < 340
    assert shares.asks() == ["a", "a"]


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
async def test_passes_go_on_at_their_interval_when_the_clock_is_set(
    world: World, svc: Service, jump_s: float
):
    """Back and forth: within a run the interval is counted by the time that passes."""
    Shares(world, svc)
    life = await world.start(svc, reconciliation_interval_s=300)
    await first_pass(life)
    begun = now()
    world.clock.shift_s += jump_s

    await life.hears("reconciliation.finished", 2)

    assert 290 <= now() - begun < 340


async def test_what_was_first_seen_keeps_its_age_when_the_clock_is_set(world: World, svc: Service):
    """Without `since`, the row of the store says since when; it moves with the clock."""
    shares = Shares(world, svc, stuck_after="10m")
    life = await world.start(svc, reconciliation_interval_s=60)
    await first_pass(life)
    shares.add("a", age_s=None)
    added = now()
    await world.until(lambda: shares.finding("a") is not None)
    world.clock.shift_s += 7200
    await asyncio.sleep(300)
    world.clock.shift_s -= 10_000

    await world.until(lambda: bool(shares.written), within_s=20_000)

    assert 600 <= now() - added < 800


async def test_findings_have_no_row_when_nothing_waits(world: World, svc: Service):
    """What was found and is settled, left or young leaves none; only its first sight, if it has
    to.
    """
    shares = Shares(world, svc)
    shares.add("a")
    shares.add("busy", busy=True)
    shares.add("m", status="migrating")
    life = await world.start(svc, reconciliation_interval_s=60)
    await first_pass(life)
    assert world.rows("SELECT name FROM finding") == []
    shares.add("young", age_s=0)
    shares.add("dateless", age_s=None)

    await life.hears("reconciliation.finished", 2)

    assert world.rows("SELECT name FROM finding") == [{"name": "dateless"}]
    shares.rows["dateless"].status = "available"
    await life.hears("reconciliation.finished", 3)
    assert world.rows("SELECT name FROM finding") == []
    assert world.incidents("resource_moved_on") == []  # no rule had begun


async def test_a_young_resource_of_a_killed_rule_is_asked_again_by_a_pass_by_hand(
    world: World, svc: Service
):
    """The hand is not refused because its last process has died, once that has settled."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add("a")
    shares.answers = lambda _id, n: hang() if n == 1 else Settled("available")
    life = await world.start(svc)
    await world.until(lambda: bool(shares.asked))
    await life.crash()
    options: dict[str, Any] = {"startup_reconciliation_enabled": False}
    life = await world.start(svc, **options)
    await asyncio.sleep(15)

    assert results(await settle(life))["a"].written == "available"
