"""Workloads as resources: an act for what was found, looks more often, room before it is used."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from gracekit import Absent, Broken, Context, DeclarationError, Found, Service, Settled, Wait
from gracekit.errors import InvalidArgumentsError
from gracekit.journal.findings_sql import PAUSE
from gracekit.process import Point
from gracekit.recovery.resources.schedule import Resources
from gracekit.store.batch import Batch
from tests.service.kit import Doors, Life, World, now
from tests.service.shares import Shares, first_pass, settle

pytestmark = pytest.mark.looptime


class Vms(Shares):
    """Virtual machines: `up/crashed` is started again, `up/stopped` marked down."""

    def __init__(self, world: World, svc: Service, **options: Any) -> None:
        super().__init__(world, svc, "vm", bare=True, **options)
        self.started: list[tuple[str, float]] = []
        self.cleaned: list[tuple[str, float]] = []
        self.starts: Any = lambda _id: None
        self.cleans: Any = lambda _id: None
        self.kind.act("up/crashed", done="up/running", failed="error")(self.start)
        self.kind.act("up/stopped", done="down/clean", failed="error", before_use=True)(self.clean)

    async def start(self, ctx: Context, found: Found) -> Any:
        self.started.append((found.id, now()))
        return await _answer(self.starts(found.id))

    async def clean(self, ctx: Context, found: Found) -> Any:
        self.cleaned.append((found.id, now()))
        return await _answer(self.cleans(found.id))


async def _answer(answer: Any) -> Any:
    answer = await answer if asyncio.iscoroutine(answer) else answer
    if isinstance(answer, Exception):
        raise answer
    return answer


# -- act ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (None, "up/running"),
        (Settled("down/clean", code=3), "down/clean"),
        (Absent("no such vm"), "error"),
        (Broken("its disk is gone"), "error"),
        (OSError("no room"), "error"),
    ],
)
async def test_an_act_is_done_by_none_and_its_other_answers_are_those_of_a_probe(
    world: World, svc: Service, answer: Any, status: str
):
    vms = Vms(world, svc)
    vms.add("a", status="up/crashed")
    vms.starts = lambda _id: answer
    await settle(await world.start(svc))

    assert vms.statuses() == {"a": status}


async def test_an_act_that_waits_is_called_again_and_fails_after_max_wait(
    world: World, svc: Service
):
    vms = Vms(world, svc, max_wait="60s")
    vms.add("a", status="up/crashed")
    vms.starts = lambda _id: Wait("10s")
    life = await world.start(svc)
    await first_pass(life)
    await asyncio.sleep(120)

    assert len(vms.started) == 7
    assert vms.statuses() == {"a": "error"}


async def test_an_act_that_answers_nonsense_is_called_again(world: World, svc: Service):
    """As a probe's: it may be a fault of a new version, which the next one mends."""
    vms = Vms(world, svc)
    vms.add("a", status="up/crashed")
    answers = iter([True, None])
    vms.starts = lambda _id: next(answers)
    life = await world.start(svc)
    await first_pass(life)
    await asyncio.sleep(60)

    assert vms.statuses() == {"a": "up/running"}
    assert "an act returns nothing when it is done" in life.told("hook.failed")[0]["error"]


@pytest.mark.parametrize("names", [{"done": "up"}, {"failed": "error"}, {}])
def test_an_act_needs_both_its_ends(svc: Service, names: dict[str, str]):
    kind = svc.kind("vm")

    with pytest.raises(DeclarationError, match=r"needs (done|failed)=, the status that is written"):
        kind.act("up/crashed", **names)


# -- more often ---------------------------------------------------------------------------


async def test_a_kind_with_every_is_looked_at_more_often(world: World, svc: Service):
    """Within its interval, where a pass over all kinds comes each ten minutes."""
    vms, shares = Vms(world, svc, every="60s", stuck_after="0s"), Shares(world, svc)
    life = await world.start(svc)
    await first_pass(life)
    began = now()
    for n in range(3):
        vms.add(f"vm-{n}", status="up/crashed", age_s=0)
        shares.add(f"share-{n}", age_s=3600)
        await asyncio.sleep(70)

    assert [name for name, _ in vms.started] == ["vm-0", "vm-1", "vm-2"]
    assert all(at - began < 70 * (n + 1) for n, (_, at) in enumerate(vms.started))
    assert shares.asked == []


async def test_such_a_pass_waits_for_the_queue_at_most_one_interval(world: World, svc: Service):
    """Then it leaves only what is younger than its wait; the request for that may be queued."""
    doors, vms = Doors(), Vms(world, svc, every="60s", stuck_after="0s")

    @svc.rpc
    async def work(ctx: Context, name: str) -> None:
        await doors.pass_(name)

    life = await world.start(svc, max_running=1, max_accepted=1)
    await first_pass(life)
    client = await world.client(svc)
    for n in range(5):
        await client.cast(work, name=str(n))
    await doors.wait(1)
    began = now()
    vms.add("old", status="up/crashed", age_s=0)
    await asyncio.sleep(65)
    vms.add("young", status="up/crashed", age_s=0)
    while len(vms.started) < 2:
        await asyncio.sleep(1)
    took = {name: at - began for name, at in vms.started}
    doors.open(*map(str, range(5)))

    assert took["old"] < 130
    assert took["old"] < took["young"] < 260


@pytest.mark.parametrize("kind", ["vm", "share"])
async def test_a_slow_rule_does_not_hide_a_crash(world: World, svc: Service, kind: str):
    """Of the same kind, or of one that a pass over all kinds has begun."""
    vms, shares = Vms(world, svc, every="10s", stuck_after="0s"), Shares(world, svc)
    vms.starts = lambda name: asyncio.sleep(500 if name == "slow" else 0)
    shares.deletes = lambda _id, _n: asyncio.sleep(500)
    if kind == "vm":
        vms.add("slow", status="up/crashed")
    else:
        shares.add("slow", status="deleting")
    life = await world.start(svc)
    await asyncio.sleep(60)
    began = now()
    vms.add("new", status="up/crashed", age_s=0)
    await asyncio.sleep(600)

    assert dict(vms.started)["new"] - began < 40
    assert {*vms.statuses().values(), *shares.statuses().values()} <= {"up/running", "deleted"}
    assert life.told("resource.stuck") == []


async def test_a_backlog_does_not_hide_a_crash(world: World, svc: Service):
    """After a restart into it, and while the pass over all kinds is due."""
    vms, doors = Vms(world, svc, every="10s", stuck_after="0s"), Doors()

    @svc.rpc
    async def work(ctx: Context, name: str) -> None:
        await doors.pass_(name)

    await world.start(svc, max_running=1, max_accepted=1)
    client = await world.client(svc)
    for n in range(5):
        await client.cast(work, name=str(n))
    for name in ("early", "late"):
        vms.add(name, status="up/crashed", age_s=0)
        await asyncio.sleep(800)
    began = dict(vms.started)
    doors.open(*map(str, range(5)))

    assert began["early"] < 60
    assert began["late"] - 800 < 60


@pytest.mark.parametrize("every", ["500ms", "1s", "3s"])
async def test_a_short_interval_is_longer_than_the_looks_at_an_empty_queue(
    world: World, svc: Service, every: str
):
    """Otherwise no pass would count as one that has read the queues; also without a `since`."""
    vms = Vms(world, svc, every=every, stuck_after="0s")
    life = await world.start(svc)
    await asyncio.sleep(30)
    vms.add("new", status="up/crashed", age_s=None)
    began = now()
    await asyncio.sleep(30)

    assert dict(vms.started)["new"] - began < 15
    assert life.told("reconciliation.finished")[0]["interrupted"] is False


def test_a_kind_is_not_looked_at_all_the_time(svc: Service):
    with pytest.raises(DeclarationError, match=r"every='0s' is no time between two passes"):
        svc.kind("vm", every="0s")


# -- a pause ------------------------------------------------------------------------------


async def pause(world: World, life: Life, seconds: float) -> None:
    until, batch = world.clock.wall() + seconds, Batch(Point.FINDING)
    batch.add(PAUSE, life.runtime.service.topic, until, "uid 0", "storage is moved")
    await world.run_as(life, life.runtime.ground.engine.commit(batch))


async def test_during_a_pause_no_pass_begins_unasked(world: World, svc: Service):
    """One that an operator asks for, and room that a handler needs, are made."""
    vms = Vms(world, svc, every="60s", stuck_after="0s")
    life = await world.start(svc)
    await first_pass(life)
    await pause(world, life, 3600)
    vms.add("a", status="up/crashed")
    await asyncio.sleep(1800)
    during = list(vms.started)
    await settle(life)
    by_hand = list(vms.started)
    vms.add("b", status="up/crashed")
    await asyncio.sleep(1900)

    assert during == []
    assert [name for name, _ in by_hand] == ["a"]
    assert [name for name, _ in vms.started] == ["a", "b"]


# -- room before it is used ---------------------------------------------------------------


async def test_what_frees_room_ends_before_other_rules_begin(world: World, svc: Service):
    """In each pass, though the kind that needs it is declared first."""
    vms = Vms(world, svc)
    vms.add("a", "c", status="up/crashed")
    vms.add("b", "d", status="up/stopped")
    vms.cleans = lambda _id: asyncio.sleep(5)
    await settle(await world.start(svc))

    assert max(at for _, at in vms.cleaned) + 5 <= min(at for _, at in vms.started)
    assert set(vms.statuses().values()) == {"up/running", "down/clean"}


def creates(svc: Service, seen: list[Any], *, within: str = "20s") -> None:
    @svc.rpc(resource="vm")
    async def create(ctx: Context, vm: str) -> None:
        began = now()
        results = await ctx.settle("vm", within=within)
        ended = {one.resource[1]: one.outcome.value for one in results}
        seen.append((ended, now() - began))


async def test_a_create_cleans_up_first_and_at_once(world: World, svc: Service):
    """Neither age, pause nor the first pass is waited for; other rules are not called."""
    vms, seen = Vms(world, svc), list[Any]()
    creates(svc, seen)
    vms.add("dead", status="up/stopped", age_s=0)
    vms.add("crashed", status="up/crashed", age_s=0)
    life = await world.start(svc)
    await pause(world, life, 3600)
    await (await world.client(svc)).call("create", vm="new")

    assert seen[0][0] == {"dead": "settled"}
    assert seen[0][1] < 1
    assert vms.started == []


async def test_it_returns_in_time_and_what_acts_goes_on(world: World, svc: Service):
    vms, seen = Vms(world, svc), list[Any]()
    creates(svc, seen, within="3s")
    vms.add("slow", status="up/stopped")
    vms.cleans = lambda _id: asyncio.sleep(60)
    await world.start(svc)
    await (await world.client(svc)).call("create", vm="new")
    await asyncio.sleep(100)

    assert seen == [({}, 3)]
    assert vms.statuses() == {"slow": "down/clean"}


async def test_it_joins_a_rule_that_is_under_way(world: World, svc: Service):
    """Two creates, and the first pass: each dead one is cleaned once."""
    vms, seen = Vms(world, svc), list[Any]()
    creates(svc, seen)
    vms.add("dead", status="up/stopped")
    vms.cleans = lambda _id: asyncio.sleep(5)
    await world.start(svc)
    client = await world.client(svc)
    await asyncio.gather(*(client.call("create", vm=f"new-{n}") for n in range(3)))

    assert len(vms.cleaned) == 1
    assert all(took >= 5 and ended == {"dead": "settled"} for ended, took in seen)


async def test_its_own_resource_and_held_ones_are_left_alone(world: World, svc: Service):
    """A handler at work on another vm has its lease."""
    vms, seen, doors = Vms(world, svc), list[Any](), Doors()
    creates(svc, seen)

    @svc.rpc(resource="vm")
    async def migrate(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)

    vms.add("own", "moving", status="up/stopped")
    await world.start(svc)
    client = await world.client(svc)
    await client.cast("migrate", vm="moving")
    await doors.wait(1)
    await client.call("create", vm="own")
    doors.open("moving")

    assert seen[0][0] == {"moving": "left"}
    assert vms.cleaned == []


async def test_full_lanes_do_not_keep_a_rule_from_making_room(world: World, svc: Service):
    """The rule has neither place nor slot: all of them are taken by those that wait for it."""
    vms, seen = Vms(world, svc), list[Any]()
    creates(svc, seen)
    vms.add("dead", status="up/stopped")
    vms.cleans = lambda _id: asyncio.sleep(1)
    await world.start(svc, max_running=2, max_accepted=2)
    client = await world.client(svc)
    await asyncio.gather(*(client.call("create", vm=f"new-{n}") for n in range(6)))

    assert len(seen) == 6
    assert max(took for _, took in seen) < 3


async def test_it_works_while_a_drain_waits_for_the_task(world: World, svc: Service):
    """Otherwise the create would fail for want of room, in each drain."""
    vms, seen, doors = Vms(world, svc), list[Any](), Doors()
    creates(svc, seen)

    @svc.rpc
    async def late(ctx: Context) -> None:
        await doors.pass_("late")
        seen.append([one.outcome.value for one in await ctx.settle("vm")])

    life = await world.start(svc)
    await (await world.client(svc)).cast("late")
    await doors.wait(1)
    vms.add("dead", status="up/stopped")
    draining = asyncio.create_task(life.drain())
    await asyncio.sleep(1)
    doors.open("late")
    await draining

    assert seen == [["settled"]]
    assert vms.statuses() == {"dead": "down/clean"}


@pytest.mark.parametrize("trouble", [OSError("no driver"), Wait("10s")])
async def test_a_rule_in_trouble_raises_nothing(world: World, svc: Service, trouble: Any):
    vms, seen = Vms(world, svc), list[Any]()
    creates(svc, seen)
    vms.add("dead", status="up/stopped")
    vms.cleans = lambda _id: trouble
    await world.start(svc)
    await (await world.client(svc)).call("create", vm="new")

    assert seen[0][0]["dead"] in {"failed", "waiting"}


async def test_a_kind_that_there_is_not_is_said_with_the_nearest(world: World, svc: Service):
    Vms(world, svc)
    said: list[str] = []

    @svc.rpc
    async def create(ctx: Context) -> None:
        with pytest.raises(InvalidArgumentsError) as refusal:
            await ctx.settle("vms")
        said.append(str(refusal.value))

    await world.start(svc)
    await (await world.client(svc)).call("create")

    assert said == ["no kind 'vms' is declared; did you mean vm?"]


async def create_at_random(world: World, svc: Service, dice: Random) -> Vms:
    """Creates that hold vms, dead vms, and slow rules, on lanes that are full; then all ends."""
    vms, seen, at_work = Vms(world, svc), list[Any](), set[str]()
    creates(svc, seen, within="5s")

    async def clean_slowly(name: str) -> None:
        assert name not in at_work, f"{name} is acted on twice at a time"
        at_work.add(name)
        await asyncio.sleep(dice.choice([0, dice.uniform(0, 30)]))
        at_work.discard(name)

    vms.cleans = clean_slowly
    places = dice.randint(1, 4)
    life = await world.start(svc, max_running=places, max_accepted=places)
    client = await world.client(svc)
    for n in range(40):
        vms.add(f"vm-{n % 12}", status="up/stopped", age_s=0)
        await client.cast("create", vm=f"vm-{dice.randrange(12)}")
        await asyncio.sleep(dice.choice([0, dice.uniform(0, 3)]))
    while len(seen) < 40:
        await asyncio.sleep(1)
    await asyncio.sleep(60)  # what acts has ended
    await settle(life)
    assert max(took for _, took in seen) <= 5.01, "a create has waited for longer than it said"
    assert set(vms.statuses().values()) == {"down/clean"}
    return vms


@pytest.mark.parametrize("seed", range(25))
async def test_at_random_no_create_waits_for_ever(world: World, svc: Service, seed: int):
    """Whatever holds what: each returns in time, each dead vm is cleaned, none twice at a time."""
    vms = await create_at_random(world, svc, Random(seed))

    assert {name for name, _ in vms.cleaned} == {f"vm-{n}" for n in range(12)}


async def test_a_create_that_waits_for_ever_would_be_found(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    settle_within = Resources.settle

    async def settle_for_ever(self: Resources, kind: str, _: float, but: Any) -> Any:
        return await settle_within(self, kind, 1e6, but)

    monkeypatch.setattr(Resources, "settle", settle_for_ever)
    with pytest.raises(AssertionError, match="waited for longer than it said"):
        await create_at_random(world, svc, Random(0))


# -- scope --------------------------------------------------------------------------------


async def test_two_backends_of_one_host_have_a_pass_each(world: World):
    """Without a scope one of them would make the pass for both, and find only its own."""
    lives = []
    for scope in ("rack-1", "rack-2"):
        svc = Service("compute", scope=lambda scope=scope: scope)
        vms = Vms(world, svc)
        vms.add(f"vm-{scope}", status="up/crashed")
        lives.append((vms, await world.start(svc)))
    for _, life in lives:
        await first_pass(life)

    assert [vms.statuses() for vms, _ in lives] == [
        {"vm-rack-1": "up/running"},
        {"vm-rack-2": "up/running"},
    ]
    hosts = {row["host"] for row in world.rows("SELECT host FROM resource_pass")}
    assert {host.partition("/")[2] for host in hosts} == {"rack-1", "rack-2"}


@pytest.mark.parametrize("name", ["", "rack/1", None, "x" * 101])
async def test_a_scope_that_is_no_name_is_refused_at_the_start(world: World, name: Any):
    svc = Service("compute", scope=lambda: name)
    Vms(world, svc)

    with pytest.raises(DeclarationError, match="it names a part of the host by letters"):
        await world.start(svc)
