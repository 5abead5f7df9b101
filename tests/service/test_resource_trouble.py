"""Resources where something goes wrong beside their rule: clocks, siblings, faults."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service, Settled, Wait
from gracekit.listings.resources import ResourceStatus, list_resources
from tests.service.kit import Doors, Life, World, now
from tests.service.shares import Shares, first_pass, results, settle, why_left

pytestmark = pytest.mark.looptime


async def test_what_waits_is_failed_when_its_need_fails(world: World, svc: Service):
    """It is not its time to be asked, and its backend is not asked any more."""
    server = Shares(world, svc, "share_server")
    share = Shares(world, svc, after=server.kind, max_wait="10h")
    share.add("sh-7", needs=(server.kind.of("srv-7"),))
    share.answers = lambda _id, _n: Wait("5h")
    life = await world.start(svc)
    await first_pass(life)
    server.add("srv-7", status="restoring")

    await world.until(lambda: server.statuses()["srv-7"] == "error", within_s=3600)
    await world.until(lambda: bool(share.written), within_s=60)

    assert share.written == [("sh-7", "creating", "error")]
    assert share.asks() == ["sh-7"]


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
async def test_a_clock_that_is_set_moves_a_finding_once_however_many_runs_there_are(
    world: World, svc: Service, jump_s: float
):
    """Each run of the host sees the jump; a wait is neither given up nor prolonged by it."""
    shares = Shares(world, svc, max_wait="10m")
    shares.add("a", age_s=None)
    shares.answers = lambda _id, n: Wait("2m") if n < 4 else Settled("available")
    lives = [await world.start(svc, instance=f"i{n}") for n in range(3)]
    await world.until(lambda: bool(shares.asked))
    assert len(lives) == 3
    begun = now()
    await asyncio.sleep(60)
    world.clock.shift_s += jump_s
    await world.until(lambda: bool(shares.written), within_s=20_000)

    assert shares.written == [("a", "creating", "available")]
    assert 350 <= now() - begun < 450


async def test_a_kind_that_stays_broken_keeps_no_other_in_its_first_pass(
    world: World, svc: Service
):
    """Once it was read, a kind leaves what has had its status for less than `stuck_after`."""
    good = Shares(world, svc, "good", stuck_after="1h")
    bad = Shares(world, svc, "bad")
    bad.finds = lambda _n: OSError("away")
    life = await world.start(svc, reconciliation_interval_s=60)
    await life.hears("reconciliation.finished")
    good.add("young", age_s=120)
    await life.hears("reconciliation.finished", 5)

    assert good.statuses() == {"young": "creating"}
    assert len(life.told("reconciliation.broken")) >= 5


async def test_a_rule_that_a_fault_ends_leaves_its_resource_free(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """Whatever raises beside the rule: lease and row are given back, and the next pass settles
    it.
    """
    shares = Shares(world, svc)
    shares.add("a")
    life = await world.start(svc, reconciliation_interval_s=60)
    acting = life.runtime.wired.reconciler.resources._acting  # type: ignore[union-attr]  # alive
    answers = acting._answers
    probe = answers._probe
    faults = [RuntimeError("a fault of our own")]

    async def fail_once(begun: object) -> object:
        if faults:
            raise faults.pop()
        return await probe(begun)  # type: ignore[arg-type]  # it is passed on

    monkeypatch.setattr(answers, "_probe", fail_once)
    await world.until(lambda: bool(shares.written), within_s=3600)

    assert shares.statuses() == {"a": "available"}
    assert shares.finding("a") is None
    assert [row["owner"] for row in world.rows("SELECT owner FROM lease WHERE id = 'a'")] == [None]


async def test_a_request_is_not_refused_for_a_task_that_somebody_settles(
    world: World, svc: Service
):
    """Only one that nobody settles keeps a resource from requests, where nothing is settled
    unasked.
    """
    begun = asyncio.Event()

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def build(ctx: Context, vm: str) -> str:
        begun.set()
        await asyncio.sleep(5)
        return vm

    off = {"startup_reconciliation_enabled": False, "startup_reconciliation_wait_seconds": 1.0}
    killed = await world.start(svc, **off)
    client = await world.client(svc)
    await client.cast("build", vm="v")
    await begun.wait()
    await killed.crash()
    life = await world.start(svc, **off)
    await asyncio.sleep(5)
    with pytest.raises(Exception, match="nothing settles that by itself"):
        await client.call("build", vm="v")

    await settle(life)

    assert await client.call("build", vm="v") == "v"


async def test_a_dry_run_ends_with_a_drain(world: World, svc: Service):
    """It finds nothing more once the service takes no requests."""
    shares = Shares(world, svc)
    shares.add(*(f"s{n:04}" for n in range(1200)))
    looks: list[int] = []

    async def slow(number: int) -> None:
        looks.append(number)
        await asyncio.sleep(5)

    life = await world.start(svc, startup_reconciliation_wait_seconds=3600)
    shares.finds = slow
    seeing = asyncio.create_task(settle(life, dry_run=True))
    await asyncio.sleep(1)
    await life.drain()

    assert len(looks) == 1
    assert results(await seeing) == {}


async def test_what_a_sibling_asks_about_in_the_middle_of_a_pass_is_not_taken_for_gone(
    world: World, svc: Service
):
    """The pass has found it while the rule of the sibling was at work, which has no end yet."""
    shares = Shares(world, svc, max_wait="10h")
    shares.add("a", "b")
    doors = Doors()

    async def answer(name: str, n: int) -> object:
        if (name, n) == ("a", 1):
            return Wait(60)
        if name == "a" or n > 1:
            await doors.pass_(name)
        return Wait("1h")

    shares.answers = answer
    lives = [await world.start(svc, reconciliation_interval_s=0, instance=f"i{n}") for n in (0, 1)]
    await doors.wait(1)
    (asks,) = world.rows("SELECT owner FROM finding WHERE name = 'a'")
    (sibling,) = [life for life in lives if life.runtime.run_id != asks["owner"]]
    await asyncio.sleep(1)
    passing = asyncio.ensure_future(settle(sibling))
    await doors.wait(2)
    doors.open("a")
    await world.until(lambda: world.rows("SELECT owner FROM finding WHERE name = 'a'") != [asks])
    doors.open("b")
    await passing

    assert doors.entered == ["a", "b"]
    assert world.incidents("resource_moved_on") == []
    assert shares.finding("a") is not None


async def test_a_kind_that_cannot_be_listed_is_on_record_until_it_can(world: World, svc: Service):
    """With the reason of the last pass and the time of the first one; what comes after it, too.
    Only its beginning is an incident, and a sibling still makes the pass that is due.
    """
    shares, later = Shares(world, svc), Shares(world, svc, "later", after=["share"])
    other = Shares(world, svc, "other")
    life = await world.start(svc, reconciliation_interval_s=60)
    await first_pass(life)
    (good,) = await listed(world)
    shares.finds = lambda n: OSError(f"away {n}")
    other.add("a")
    began_at = world.clock.wall()
    await life.hears("reconciliation.finished", 6)

    (bad,) = await listed(world)
    said = {one["kind"]: one["why"] for one in bad.broken}
    assert good.broken == []
    assert list(said) == ["later", "share"]
    assert said["later"].startswith("waits for share: share.find, find(): ")
    assert f"away {len(shares.pages)}" in said["share"]
    assert {began_at <= one["since"] < began_at + 70 for one in bad.broken} == {True}
    assert bad.last_pass is not None
    assert bad.last_pass["finished_at"] > began_at
    assert other.statuses() == {"a": "available"}
    assert [one["method"] for one in world.incidents("resource_kind_broken")] == ["share", "later"]
    ((seen, _), _) = list(bad.troubles(began_at + 7200))[:2]
    assert seen.startswith("kind later of compute on ")

    shares.finds = lambda _n: None
    await world.until(lambda: not world.rows("SELECT * FROM broken_kind"), within_s=200)
    assert later.pages[-1][0] is None


async def test_a_pass_by_hand_that_breaks_is_for_its_operator_to_read(world: World, svc: Service):
    """On record it would stay until the next pass, which may be minutes away; a good one ends
    it.
    """
    shares = Shares(world, svc)
    life = await world.start(svc)
    await first_pass(life)
    shares.finds = lambda _n: OSError("away")
    report = await settle(life)
    (entry,) = await listed(world)

    assert "away" in report.broken["share"]
    assert entry.broken == []


async def test_a_broken_pass_of_a_sibling_is_not_taken_for_the_one_that_is_due(
    world: World, svc: Service
):
    """It is on record, but what it could not list is still to be settled by whoever can."""
    shares = Shares(world, svc)
    shares.finds = lambda n: OSError("away") if n == 1 else None
    shares.add("a", age_s=60)
    for n in range(2):
        await world.start(svc, reconciliation_interval_s=600, instance=f"i{n}")
    await world.until(lambda: bool(shares.written), within_s=60)

    assert shares.statuses() == {"a": "available"}
    assert world.rows("SELECT * FROM broken_kind") == []


async def test_what_waits_of_a_removed_kind_is_named_and_dropped_by_hand(world: World):
    """It would wait for ever, as no pass reads its kind. A dry run drops nothing, and neither does
    what asks again between passes: a newer version beside this one may have the kind.
    """
    old, new = Service("compute"), Service("compute")
    shares, other = Shares(world, old, max_wait="10h"), Shares(world, new, "other", max_wait="10h")
    shares.add("a", "b")
    shares.answers = lambda name, _n: Wait("5m")
    await (await first_life(world, old)).drain()
    life = await world.start(new, startup_reconciliation_wait_seconds=1)
    other.add("o")
    other.answers = lambda name, _n: Wait("1h")
    await world.until(lambda: bool(other.asked), within_s=60)
    await asyncio.sleep(3000)

    (named,) = await listed(world)
    assert named.waiting == 3
    assert named.undeclared == [{"kind": "share", "id": "a", "number": 2}]
    ((seen, remedy),) = named.troubles(0)
    assert seen.startswith("share:a (1 of 2) of compute on ")
    assert "`gracekit reconcile` drops" in remedy
    foreseen = why_left(await settle(life, dry_run=True))
    assert foreseen["a"].endswith("what is on record of it would be dropped")
    assert (await listed(world))[0].waiting == 3
    dropped = why_left(await settle(life))
    assert dropped["b"] == "no kind share is declared: what is on record of it is dropped"
    (after,) = await listed(world)
    assert (after.waiting, after.undeclared) == (1, [])
    details = [one["detail"] for one in world.incidents("resource_left")]
    assert [detail.split(" ")[0] for detail in details] == ["share:a:", "share:b:"]


async def test_a_service_without_kinds_drops_what_waits_of_its_former_ones(world: World):
    """It makes no pass by itself, so nothing else would."""
    old = Service("compute")
    shares = Shares(world, old, max_wait="10h")
    shares.add("a")
    shares.answers = lambda _id, _n: Wait("5m")
    await (await first_life(world, old)).drain()
    life = await world.start(Service("compute"))

    assert (await listed(world))[0].undeclared == [{"kind": "share", "id": "a", "number": 1}]
    assert list(why_left(await settle(life))) == ["a"]
    assert (await listed(world))[0].waiting == 0


async def test_a_second_host_without_kinds_hides_nothing_of_the_first(world: World, svc: Service):
    """What waits there has its rule, and what is broken stays named. If no run of the host is on
    record, it is not known which kinds it declares.
    """
    bad, shares = Shares(world, svc, "bad"), Shares(world, svc, max_wait="10h")
    bad.finds = lambda _n: OSError("away")
    shares.add("a")
    shares.answers = lambda _id, _n: Wait("5m")
    life = await world.start(svc, host="a", instance="a", reconciliation_interval_s=60)
    await life.hears("reconciliation.finished", 2)
    await world.start(Service("compute"), host="b", instance="b")
    (beside,) = await listed(world)
    world.disk.execute("UPDATE run SET host = 'b' WHERE host = 'a'")
    (unknown,) = await listed(world)

    for one in (beside, unknown):
        assert (one.host, one.waiting, one.undeclared) == ("a", 1, [])
        assert [broken["kind"] for broken in one.broken] == ["bad"]


async def test_the_incident_of_a_record_that_has_moved_on_names_it(world: World, svc: Service):
    """The line of `gracekit incidents` shows the detail alone."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, _n: Wait("1m")
    life = await world.start(svc)
    await first_pass(life)
    shares.rows["a"].status = "available"
    await world.until(lambda: bool(world.incidents("resource_moved_on")), within_s=600)

    (moved,) = world.incidents("resource_moved_on")
    assert moved["detail"] == "share:a: it is not creating any more"


async def listed(world: World) -> list[ResourceStatus]:
    """As status, HTTP and doctor show them."""
    return await list_resources(world.lives[-1].runtime.wired.journal.engine)  # type: ignore[union-attr]


async def first_life(world: World, svc: Service) -> Life:
    """A run that has made its first pass."""
    life = await world.start(svc)
    await first_pass(life)
    return life
