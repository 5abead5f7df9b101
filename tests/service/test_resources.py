"""When resources are settled: after a start, now and then, by hand; not in a drain or a quiet."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, GracekitError, Service, Settled
from gracekit.process import Point
from gracekit.testing.faults import Fault
from tests.service.kit import Doors, Life, World, now
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


class Held:
    """Answers of a probe that waits at a door named by its id."""

    def __init__(self, shares: Shares) -> None:
        self.doors = Doors()
        shares.answers = lambda name, _n: self.answer(name)

    async def answer(self, name: str) -> Settled:
        await self.doors.pass_(name)
        return Settled("available")


async def quiet(world: World, life: Life) -> None:
    await world.run_as(life, life.runtime.wired.coordinator.quiet())


async def resume(world: World, life: Life) -> None:
    await world.run_as(life, life.runtime.wired.coordinator.resume())


async def test_the_first_pass_begins_after_the_wait(world: World, svc: Service):
    """Not before `startup_reconciliation_wait_seconds` after ready, and soon then."""
    shares = Shares(world, svc)
    shares.add("a")
    life = await world.start(svc, startup_reconciliation_wait_seconds=40)
    ready = now()

    await first_pass(life)

    assert 40 + LOOKS_S <= shares.asked[0].at - ready < 40 + LOOKS_S + 1
    assert shares.statuses() == {"a": "available"}
    assert shares.rows["a"].token == shares.asked[0].token == 1


async def test_later_passes_come_at_their_interval(world: World, svc: Service):
    """Counted from the end of the pass before."""
    shares = Shares(world, svc)
    life = await world.start(svc, reconciliation_interval_s=300)
    await first_pass(life)
    ended = now()
    shares.add("a")

    await life.hears("reconciliation.finished", 2)

    assert 300 <= shares.asked[0].at - ended < 310


async def test_a_pass_by_hand_does_not_take_the_place_of_the_start_s(world: World, svc: Service):
    """It came too early for the resource of a killed process, and no later pass is due."""
    shares = Shares(world, svc)

    @svc.rpc(resource="share")
    async def create(ctx: Context, share: str) -> None:
        shares.add(share)
        await hang()

    life = await world.start(svc, reconciliation_interval_s=0)
    await (await world.client(svc)).cast(create, share="a")
    await world.until(lambda: bool(shares.rows))
    await life.crash()
    lives = [await world.start(svc, reconciliation_interval_s=0, instance=f"i{n}") for n in (0, 1)]
    assert "a" in why_left(await settle(lives[0]))

    await world.until(lambda: bool(shares.written), within_s=60)

    assert shares.written == [("a", "creating", "available")]


async def test_a_pass_by_hand_does_not_hide_the_one_that_was_due(world: World, svc: Service):
    """A sibling that looks only afterwards still sees that the due pass was made, and makes no
    other.
    """
    Shares(world, svc)
    lives = [await world.start(svc, reconciliation_interval_s=0, instance=f"i{n}") for n in (0, 1)]
    looking = [asyncio.ensure_future(first_pass(life)) for life in lives]
    await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
    made = [life for life, look in zip(lives, looking, strict=True) if look.done()]
    await settle(made[0])

    await asyncio.wait(looking, timeout=600)

    assert len(made) == 1
    assert sorted(len(life.told("reconciliation.started")) for life in lives) == [0, 2]
    for look in looking:
        look.cancel()


async def test_an_interval_of_0_means_at_starts_alone(world: World, svc: Service):
    """What turns up later waits for the next start."""
    shares = Shares(world, svc)
    life = await world.start(svc, reconciliation_interval_s=0)
    await first_pass(life)
    shares.add("a")
    await asyncio.sleep(1200)
    assert len(life.told("reconciliation.started")) == 1

    await life.drain()
    await first_pass(await world.start(svc, reconciliation_interval_s=0))

    assert shares.asks() == ["a"]


async def test_each_start_makes_a_pass_and_touches_what_is_old_enough(world: World, svc: Service):
    """A first pass does not wait for `stuck_after`; a later one does."""
    shares = Shares(world, svc)
    shares.add("a", age_s=1)
    life = await world.start(svc)
    await first_pass(life)
    shares.add("b", age_s=300)

    await life.hears("reconciliation.finished", 2)

    # The second pass has found it when it had had its status for longer than ten minutes.
    assert [(name, round(at) > 600) for name, at, _ in shares.asked] == [("a", False), ("b", True)]


async def test_a_drain_waits_for_what_acts_and_begins_nothing(world: World, svc: Service):
    """The next start makes the pass again and settles the rest."""
    shares = Shares(world, svc)
    shares.add("a", "b")
    held = Held(shares)
    life = await world.start(svc, reconcile_at_once=1)
    await held.doors.wait(1)
    life.ask_to_stop()
    await asyncio.sleep(5)
    held.doors.open("a", "b")

    report = await life.wait_end()

    assert report.exit_code == 0
    assert shares.statuses() == {"a": "available", "b": "creating"}
    assert life.told("reconciliation.finished")[0]["interrupted"] is True
    assert world.rows("SELECT owner FROM lease WHERE owner IS NOT NULL") == []
    second = await world.start(svc)
    await first_pass(second)
    assert shares.asks() == ["a", "b"]


async def test_a_drain_ends_the_wait_for_the_queues(world: World, svc: Service):
    """A pass that only waits does not keep the process."""
    shares = Shares(world, svc)
    shares.add("a")
    life = await world.start(svc)
    await life.hears("reconciliation.started")
    asked = now()

    await life.drain()

    assert now() - asked < 1
    assert (shares.asked, shares.pages) == ([], [])


async def test_nothing_begins_in_a_quiet_and_the_pass_is_made_after_it(world: World, svc: Service):
    """Also where the quiet came in the middle of one."""
    shares = Shares(world, svc)
    shares.add("a", "b", "c")
    held = Held(shares)
    life = await world.start(svc, reconcile_at_once=1)
    await held.doors.wait(1)
    held.doors.open("a", "b", "c")
    await quiet(world, life)
    assert shares.asks() == ["a"]
    await asyncio.sleep(1200)
    assert shares.asks() == ["a"]
    with pytest.raises(GracekitError, match="the service is quiet, and settles nothing before"):
        await settle(life)
    with pytest.raises(GracekitError, match="the service is quiet, and looks at no resources bef"):
        await settle(life, dry_run=True)

    await resume(world, life)
    await life.hears("reconciliation.finished", 2)

    assert shares.asks() == ["a", "b", "c"]
    assert [told["interrupted"] for told in life.told("reconciliation.finished")] == [True, False]


async def test_what_waits_is_not_asked_again_in_a_quiet(world: World, svc: Service):
    """Its time may come meanwhile: it is asked when the service takes requests again."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add("a")
    shares.answers = lambda _id, n: OSError("away") if n == 1 else Settled("available")
    life = await world.start(svc)
    await first_pass(life)
    await quiet(world, life)
    await asyncio.sleep(600)
    assert shares.asks() == ["a"]

    await resume(world, life)
    await world.until(lambda: shares.statuses() == {"a": "available"}, within_s=60)


@pytest.mark.parametrize("lives", [2, 3])
async def test_one_run_settles_the_resources_of_its_host(world: World, svc: Service, lives: int):
    """The others see that it is done, and make no pass of their own."""
    shares = Shares(world, svc)
    shares.add(*(f"s{n}" for n in range(100)))
    runs = [await world.start(svc, instance=f"i{n}") for n in range(lives)]
    await world.until(lambda: any(run.told("reconciliation.finished") for run in runs))
    await asyncio.sleep(60)

    assert sorted(shares.asks()) == sorted(shares.rows)
    assert sum(len(run.told("reconciliation.started")) for run in runs) <= lives
    assert set(shares.statuses().values()) == {"available"}
    (record,) = world.rows("SELECT * FROM resource_pass")
    assert record["settled"] in {0, 100}


async def test_each_host_settles_its_own(world: World, svc: Service):
    """`find` returns those of its host, and each host has a pass."""
    Shares(world, svc)
    runs = [await world.start(svc, host=f"node-{n}") for n in (1, 2)]
    for run in runs:
        await first_pass(run)

    hosts = world.rows("SELECT host FROM resource_pass ORDER BY host")
    assert hosts == [{"host": "node-1"}, {"host": "node-2"}]


async def test_a_pass_whose_run_was_killed_is_made_by_its_sibling(world: World, svc: Service):
    """The sibling proves the death, takes the lease over, and settles the rest, each once."""
    shares = Shares(world, svc)
    shares.add("a", "b")
    held = Held(shares)
    first = await world.start(svc, reconcile_at_once=1, instance="i1")
    second = await world.start(svc, reconcile_at_once=1, instance="i2")
    await held.doors.wait(1)
    held.doors.open("a", "b")
    await (first if first.told("reconciliation.started") else second).crash()

    await world.until(lambda: set(shares.statuses().values()) == {"available"})

    assert shares.asks().count("b") == 1
    assert {row["owner"] for row in world.rows("SELECT owner FROM lease")} <= {None}


async def test_where_nothing_is_settled_unasked_a_pass_by_hand_does_it(world: World, svc: Service):
    """With startup_reconciliation_enabled=false no rule is called, at starts or later."""
    shares = Shares(world, svc)
    shares.add("a")
    life = await world.start(svc, startup_reconciliation_enabled=False)
    await asyncio.sleep(1200)
    assert (shares.asked, shares.statuses()) == ([], {"a": "creating"})
    assert life.told("reconciliation.started")[0] == {"by_hand": False, "dry_run": True}
    only_found = life.told("reconciliation.finished")[0]
    assert (only_found["dry_run"], only_found["settled"], only_found["waiting"]) == (True, 0, 1)

    report = await settle(life)

    assert results(report)["a"].written == "available"
    by_hand = life.told("reconciliation.finished")[-1]
    assert (by_hand["dry_run"], by_hand["settled"], by_hand["waiting"]) == (False, 1, 0)


async def test_a_pass_by_hand_is_refused_while_a_sibling_makes_one(world: World, svc: Service):
    """The message names the run."""
    shares = Shares(world, svc)
    shares.add("a")
    held = Held(shares)
    first = await world.start(svc, instance="i1")
    await held.doors.wait(1)
    second = await world.start(svc, instance="i2")

    with pytest.raises(GracekitError, match=f"run {first.runtime.run_id} of this host settles"):
        await settle(second)
    held.doors.open("a")


async def test_a_pass_by_hand_waits_for_the_one_under_way(world: World, svc: Service):
    """It is a pass of its own."""
    shares = Shares(world, svc)
    shares.add("a")
    held = Held(shares)
    life = await world.start(svc)
    await held.doors.wait(1)
    by_hand = asyncio.ensure_future(settle(life))
    await asyncio.sleep(20)  # a probe may take longer
    assert not by_hand.done()
    held.doors.open("a")

    assert (await by_hand).results == []


async def test_passes_are_told(world: World, svc: Service):
    """Events at its beginning, in its course and at its end; the store has the last one."""
    shares = Shares(world, svc)
    shares.add("a", "b")
    shares.add("m", status="migrating")
    shares.answers = lambda name, _n: OSError("away") if name == "b" else Settled("available")
    life = await world.start(svc, progress_every_s=1)

    told = await first_pass(life)

    numbers = {name: told[name] for name in ("settled", "failed", "waiting", "left")}
    assert numbers == {"settled": 1, "failed": 0, "waiting": 1, "left": 1}
    assert told["dry_run"] is False
    assert life.told("reconciliation.started") == [{"by_hand": False, "dry_run": False}]
    assert life.told("reconciliation.progress")
    (settled,) = life.told("resource.settled")
    assert settled["resource"] == ("share", "a")
    assert (settled["status"], settled["written"]) == ("creating", "available")
    outcomes = [one["outcome"] for one in life.told("resource.reconciled")]
    assert sorted(outcomes) == ["left", "settled", "waiting"]
    (record,) = world.rows("SELECT * FROM resource_pass")
    assert (record["settled"], record["waiting"], record["left_alone"]) == (1, 1, 1)


async def test_a_service_without_kinds_does_nothing_of_all_this(world: World, svc: Service):
    """No pass, no row."""
    life = await world.start(svc)
    await asyncio.sleep(1200)

    assert life.told("reconciliation.started") == []
    assert world.rows("SELECT * FROM resource_pass") == []


@pytest.mark.parametrize("point", [Point.TAKE_LEASE, Point.FINDING])
async def test_a_store_that_refuses_once_puts_a_pass_off(world: World, svc: Service, point: Point):
    """It is made again some seconds later."""
    world.expects_faults = True
    shares = Shares(world, svc)
    shares.add("a")
    life = await world.start(svc)
    life.plan(point, Fault.REFUSED)

    await world.until(lambda: shares.statuses() == {"a": "available"}, within_s=WAIT_S + 30)
    await first_pass(life)
