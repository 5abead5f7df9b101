"""Whose a found resource is: what somebody works on, or may still work on, is left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, Retry, Service, Settled, Wait
from gracekit.rpc.methods import Method
from tests.service.kit import Doors, World, now
from tests.service.shares import Shares, first_pass, results, settle, why_left

pytestmark = pytest.mark.looptime


class Works:
    """A method on the shares, whose handlers wait at the door of their share."""

    def __init__(self, svc: Service, **options: Any) -> None:
        self.doors = Doors()
        self.probed: Any = Wait(1000)

        @svc.rpc(resource="share", **options)
        async def build(ctx: Context, share: str) -> None:
            await self.doors.pass_(share)

        self.method: Method[Any, Any] = build

    def with_probe(self) -> None:
        @self.method.probe
        async def probe(ctx: Context, share: str) -> Any:
            return self.probed

    async def cast(self, world: World, svc: Service, share: str, **options: Any) -> None:
        client = await world.client(svc)
        await client.prepare(**options).cast(self.method, share=share)


async def test_what_is_busy_or_left_by_rule_is_not_touched(world: World, svc: Service):
    """It is looked at again in the next pass; the reason is the rule's own."""
    shares = Shares(world, svc)
    shares.add("b", busy=True)
    shares.add("m", status="migrating")
    life = await world.start(svc)

    assert why_left(await settle(life)) == {
        "b": "it is busy",
        "m": "its continue task goes on with it",
    }
    shares.rows["b"].busy = False
    assert results(await settle(life))["b"].written == "available"


async def test_what_has_no_rule_is_told_once_a_pass(world: World, svc: Service):
    """With the number of each status; it is touched by nobody."""
    shares = Shares(world, svc)
    shares.add(*(f"s{n:04}" for n in range(700)), status="ensuring")
    shares.add("x", status="weird")
    shares.shows = {"ensuring", "weird"}
    life = await world.start(svc)

    await first_pass(life)

    told = {one["status"]: one["number"] for one in life.told("resource.unruled")}
    assert told == {"ensuring": 700, "weird": 1}
    assert shares.written == []
    await settle(life)
    assert len(life.told("resource.unruled")) == 4


async def test_what_a_handler_works_on_is_left_however_old_it_is(world: World, svc: Service):
    """In the same run, in a sibling, and in one that drains: slow is not stuck."""
    shares = Shares(world, svc, stuck_after=1)
    works = Works(svc)
    first = await world.start(svc, instance="i1", drain_timeout_s=5000, reconciliation_interval_s=0)
    await works.cast(world, svc, "a", request_id="9f31c2")
    await works.doors.wait(1)
    second = await world.start(svc, instance="i2", reconciliation_interval_s=30)
    shares.add("a", age_s=100_000)
    running = "request 9f31c2 (build) runs on i1"

    assert why_left(await settle(first)) == {"a": "a request for it is at work here"}
    assert why_left(await settle(second)) == {"a": running}
    first.ask_to_stop()
    await asyncio.sleep(600)
    assert why_left(await settle(second)) == {"a": running}
    assert (shares.asked, shares.written) == ([], [])

    works.doors.open("a")
    await first.wait_end()
    assert results(await settle(second))["a"].written == "available"


async def test_what_an_accepted_request_names_is_left(world: World, svc: Service):
    """It may wait for a slot for hours."""
    shares = Shares(world, svc)
    works = Works(svc)
    first = await world.start(svc, instance="i1", max_running=1)
    await works.cast(world, svc, "other")
    await works.doors.wait(1)
    await works.cast(world, svc, "a", request_id="w")
    await world.until(lambda: world.state("w") == "accepted")
    second = await world.start(svc, instance="i2", max_running=1)
    shares.add("a")

    assert why_left(await settle(second)) == {"a": "request w (build) waits on i1"}
    works.doors.open("a", "other")
    await world.until(lambda: world.state("w") == "succeeded")
    assert results(await settle(first))["a"].written == "available"


@pytest.mark.parametrize("how", ["crash", "drain"])
async def test_the_probe_of_an_unfinished_task_decides_first(world: World, svc: Service, how: str):
    """As long as it says Wait, the resource is left; then the rule is asked, under a higher
    token.
    """
    shares = Shares(world, svc)
    works = Works(svc, on_interrupt="probe", settle=3, max_wait="1d")
    works.with_probe()
    life = await world.start(svc, drain_timeout_s=1)
    await works.cast(world, svc, "a", request_id="w")
    await works.doors.wait(1)
    shares.add("a")
    await (life.crash() if how == "crash" else life.drain())
    life = await world.start(svc)
    await first_pass(life)
    assert shares.asked == []
    assert why_left(await settle(life))["a"].startswith(("request w (build) is unf", "a request"))

    works.probed = Retry()
    works.doors.open("a")
    await world.until(lambda: world.state("w") == "succeeded", within_s=4000)
    await settle(life)

    assert shares.asks() == ["a"]
    assert (shares.asked[0].token or 0) >= 3


async def test_what_an_unclean_end_left_settles_first(world: World, svc: Service):
    """A killed handler's last request may be under way: for `settle` nobody touches its
    resource.
    """
    shares = Shares(world, svc)
    works = Works(svc, settle=60)  # an interrupted one is an error
    life = await world.start(svc)
    await works.cast(world, svc, "a", request_id="w")
    await works.doors.wait(1)
    shares.add("a")
    await life.crash()
    killed = now()
    life = await world.start(svc)
    await world.until(lambda: world.state("w") == "errored")

    left = why_left(await settle(life))

    assert (
        left["a"] == "a process that worked on it has died, and its last request may be under way"
    )
    await asyncio.sleep(killed + 61 - now())
    assert results(await settle(life))["a"].written == "available"


async def test_a_request_waits_while_a_rule_acts_on_its_resource(world: World, svc: Service):
    """Its handler begins when the rule has ended, with a higher token."""
    shares = Shares(world, svc)
    held = Doors()

    async def answer() -> Settled:
        await held.pass_("a")
        return Settled("available")

    shares.answers = lambda _id, _n: answer()
    shares.add("a")
    works = Works(svc)
    await world.start(svc)
    await held.wait(1)
    await works.cast(world, svc, "a", request_id="w")
    await asyncio.sleep(10)
    assert works.doors.entered == []

    held.open("a")
    await works.doors.wait(1)

    assert shares.statuses() == {"a": "available"}
    (lease,) = world.rows("SELECT lver FROM lease WHERE kind = 'share'")
    assert lease["lver"] == 2
    works.doors.open("a")


# -- what is young ------------------------------------------------------------------------------


async def test_a_periodic_pass_touches_only_what_is_stuck(world: World, svc: Service):
    """With `since`: `stuck_after` since then."""
    shares = Shares(world, svc, stuck_after="1m")
    life = await world.start(svc, reconciliation_interval_s=30)
    await first_pass(life)
    shares.add("a", age_s=0)
    added = now()

    await world.until(lambda: bool(shares.asked))

    assert 60 <= now() - added < 60 + 40


async def test_without_since_it_is_stuck_after_it_was_first_seen(world: World, svc: Service):
    """The first sight is on record, also across a restart; another status begins anew."""
    shares = Shares(world, svc, stuck_after="5m")
    shares.kind.mark(extending="extending_error")
    life = await world.start(svc, reconciliation_interval_s=30)
    await first_pass(life)
    shares.add("a", age_s=None)
    added = now()
    await asyncio.sleep(200)
    shares.rows["a"].status = "extending"
    await asyncio.sleep(200)
    assert shares.written == []

    await world.until(lambda: bool(shares.written))

    assert 500 <= now() - added < 200 + 300 + 70
    assert shares.written == [("a", "extending", "extending_error")]


async def test_without_since_the_first_pass_settles_at_once(world: World, svc: Service):
    """What is found after a start has waited since before it."""
    shares = Shares(world, svc)
    shares.add("a", age_s=None)

    await first_pass(await world.start(svc))

    assert shares.statuses() == {"a": "available"}


async def test_drift_is_settled_and_what_is_at_work_is_not(world: World, svc: Service):
    """Fifty records changed by hand while the service runs, beside fifty slow ones."""
    shares = Shares(world, svc, stuck_after="2m")
    works = Works(svc)
    slow = [f"slow{n}" for n in range(50)]
    drift = [f"drift{n}" for n in range(50)]
    life = await world.start(svc, reconciliation_interval_s=60, max_running=100)
    await first_pass(life)
    shares.add(*slow, *drift, age_s=0)
    for share in slow:
        await works.cast(world, svc, share)
    await works.doors.wait(50)

    await world.until(lambda: len(shares.written) >= 50)
    await asyncio.sleep(600)

    assert sorted(shares.asks()) == sorted(drift)
    assert {shares.rows[one].status for one in slow} == {"creating"}
    works.doors.open(*slow)


# -- the queue ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 200])
async def test_what_stood_in_the_queue_is_taken_before_anything_is_judged(
    world: World, svc: Service, number: int
):
    """The application wrote `creating`, then sent; a start that finds both runs the requests."""
    shares = Shares(world, svc)
    built: list[str] = []

    @svc.rpc(resource="share")
    async def build(ctx: Context, share: str) -> None:
        await asyncio.sleep(20)
        shares.rows[share].status = "available"
        built.append(share)

    await (await world.start(svc)).drain()  # the queue is there now
    names = [f"s{n}" for n in range(number)]
    shares.add(*names, "forgotten")
    client = await world.client(svc)
    for name in names:
        await client.cast(build, share=name)

    life = await world.start(svc, max_accepted=20, max_running=10, prefetch=5, progress_every_s=5)
    await first_pass(life)

    await world.until(lambda: len(built) == number)
    assert shares.asks() == ["forgotten"]
    if number == 200:
        assert max(told["waits_for"] for told in life.told("reconciliation.progress")) > 100


async def test_each_queue_is_read_to_its_own_mark(world: World, svc: Service):
    """What comes by the shared queue meanwhile does not stand for what waits in the host's own
    one.
    """
    shares = Shares(world, svc)

    @svc.rpc(resource="share")
    async def build(ctx: Context, share: str) -> None:
        shares.rows[share].status = "available"

    @svc.rpc(on_interrupt="requeue")
    async def hog(ctx: Context) -> None:
        await asyncio.sleep(5)  # its delivery takes the one place of the prefetch

    await (await world.start(svc)).drain()  # the queues are there now
    client = await world.client(svc)
    names = [f"s{n}" for n in range(5)]
    shares.add(*names, "forgotten")
    for _ in range(5):
        await client.cast(hog)
    for name in names:
        await client.prepare(host="node-1").cast(build, share=name)

    life = await world.start(svc, prefetch=1)
    await life.hears("reconciliation.started")
    await asyncio.sleep(1)
    for _ in range(30):
        await client.cast(hog)
    await first_pass(life)

    assert shares.asks() == ["forgotten"]
    assert {shares.rows[name].status for name in names} == {"available"}
