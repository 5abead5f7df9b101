"""Rules that do not end although they were cancelled at their limit, as a thread that hangs."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gracekit import Context, Found, Service, Settled, Wait
from gracekit.process import Point
from gracekit.recovery.resources.results import PassReport, ResourceOutcome
from tests.service.kit import Doors, Fault, Life, World, now
from tests.service.shares import Shares, first_pass, hang, results, settle, why_left

pytestmark = pytest.mark.looptime

LIMIT_S = 50.0
"""`max_wait` of the kind, which is the limit of a delete."""
PROBE_S = 30.0
"""`probe_timeout`, which is the limit of a write."""


class Stubborn:
    """Calls that swallow their cancellation until they are let go.

    Attributes:
        begun: Ids of those that have begun, in order.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._go = asyncio.Event()

    async def hang(self, name: str, end: object = None) -> object:
        self.begun.append(name)
        while not self._go.is_set():
            try:
                await self._go.wait()
            except asyncio.CancelledError:
                continue
        return end

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def stubborn(world: World) -> Iterator[Stubborn]:
    one = Stubborn()
    yield one
    one.let_go()


def owners(world: World, name: str) -> list[object]:
    return [row["owner"] for row in world.rows("SELECT owner FROM lease WHERE id = ?", name)]


async def settle_soon(life: Life, **options: Any) -> PassReport:
    """A pass by hand, which does not wait for a call that has no end."""
    making = asyncio.ensure_future(settle(life, **options))
    done, _ = await asyncio.wait({making}, timeout=3 * LIMIT_S)
    assert done
    return making.result()


async def test_a_delete_that_does_not_end_holds_up_its_resource_alone(
    world: World, svc: Service, stubborn: Stubborn
):
    """The pass waits for its limit, reports it as waiting, settles the others and ends; the lease
    stays with the rule.
    """
    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add("a", status="deleting")
    shares.add("b", "c")
    shares.deletes = lambda name, _n: stubborn.hang(name)
    life = await world.start(svc, reconcile_at_once=1)
    began = now()

    report = await settle_soon(life)

    assert now() - began < LIMIT_S + 10
    result = results(report)["a"]
    assert (result.outcome, result.written) == (ResourceOutcome.WAITING, None)
    assert result.reason == "delete_again has not ended: no answer within 50 s (max_wait)"
    assert shares.statuses() == {"a": "deleting", "b": "available", "c": "available"}
    assert owners(world, "a") == [life.runtime.run_id]
    (told,) = life.told("resource.stuck")
    assert (told["resource"], told["rule"]) == (("share", "a"), "delete_again")


async def test_what_it_does_at_last_is_recorded_as_ever(
    world: World, svc: Service, stubborn: Stubborn
):
    """A delete that returns behind its limit has failed: written, told, and its lease is free."""
    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add("a", status="deleting")
    shares.deletes = lambda name, _n: stubborn.hang(name)
    life = await world.start(svc)
    await settle_soon(life)

    stubborn.let_go()
    await world.until(lambda: bool(shares.written))
    await life.hears("resource.failed")

    assert shares.written == [("a", "deleting", "error_deleting")]
    assert {"kind": "share", "outcome": "failed"} in life.told("resource.reconciled")
    (incident,) = world.incidents("resource_failed")
    assert "no answer within 50 s" in incident["detail"]
    assert shares.finding("a") is None
    assert owners(world, "a") == [None]


@pytest.mark.parametrize("end", [True, None])
async def test_a_write_that_does_not_end_keeps_its_resource_too(
    world: World, svc: Service, stubborn: Stubborn, end: bool | None
):
    """Its late True settles the resource; without an answer the rule is asked again soon."""
    shares = Shares(world, svc)
    shares.add("a", "b")
    hangs = ["a"]

    def write(found: object, status: str) -> object:
        name = found.id  # type: ignore[attr-defined]  # Found
        shares.rows[name].status = status
        if name in hangs:
            hangs.remove(name)
            shares.rows[name].status = status if end else "creating"
            return stubborn.hang(name, end)
        return True

    shares.writes = write
    life = await world.start(svc)
    began = now()
    report = await settle_soon(life)
    assert now() - began < PROBE_S + 10
    assert (
        results(report)["a"].reason == "write has not ended: no answer within 30 s (probe_timeout)"
    )
    assert results(report)["b"].outcome is ResourceOutcome.SETTLED

    stubborn.let_go()
    await life.hears("resource.settled", 2)

    assert shares.statuses() == {"a": "available", "b": "available"}
    assert shares.asks().count("a") == (1 if end else 2)
    assert owners(world, "a") == [None]


async def test_later_passes_leave_such_a_resource_and_say_for_how_long(
    world: World, svc: Service, stubborn: Stubborn
):
    """Periodic ones, by hand and dry ones, also those of another run; it is called once."""
    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add("a", status="deleting")
    shares.deletes = lambda name, _n: stubborn.hang(name)
    life = await world.start(svc, reconciliation_interval_s=60, instance="i1")
    await first_pass(life)
    sibling = await world.start(svc, instance="i2")
    await life.hears("reconciliation.finished", 5)
    await asyncio.sleep(600)

    for dry_run in (False, True):
        (reason,) = why_left(await settle_soon(life, dry_run=dry_run)).values()
        assert re.fullmatch(r"its rule has not ended for 1\dm\d\ds", reason)
    held = f"its lease is held by delete_again of run {life.runtime.run_id}"
    assert why_left(await settle_soon(sibling)) == {"a": held}
    assert stubborn.begun == ["a"]


async def test_a_request_waits_for_a_rule_that_does_not_end(
    world: World, svc: Service, stubborn: Stubborn
):
    """Two never act on a resource at once."""
    begun: list[str] = []

    @svc.rpc(resource="share")
    async def extend(ctx: Context, share: str) -> None:
        begun.append(share)

    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add("a", status="deleting")
    shares.deletes = lambda name, _n: stubborn.hang(name)
    await settle_soon(await world.start(svc))
    client = await world.client(svc)
    call = asyncio.ensure_future(client.prepare(timeout=3600).call(extend, share="a"))
    await asyncio.sleep(300)
    assert begun == []

    stubborn.let_go()
    await call

    assert begun == ["a"]


async def test_a_drain_waits_for_it_to_its_deadline_and_keeps_its_lease(
    world: World, svc: Service, stubborn: Stubborn
):
    """As for any work that does not end: its resource is free when this process is dead, and the
    next start deletes it again.
    """
    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add("a", status="deleting")
    shares.deletes = lambda name, n: stubborn.hang(name) if n == 1 else None
    life = await world.start(svc, drain_timeout_s=100)
    await settle_soon(life)
    began = now()

    report = await life.drain()

    assert 100 <= now() - began < 110
    assert report.leases_kept == 1
    assert report.must_die
    assert owners(world, "a") == [life.runtime.run_id]
    await world.start(svc)
    await world.until(lambda: shares.statuses() == {"a": "deleted"})
    assert len(shares.deleted) == 2


async def test_a_stop_does_not_wait_for_it(world: World, svc: Service, stubborn: Stubborn):
    """Nothing of it is left when recovery has stopped; its lease is free with the end of the
    process.
    """
    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add("a", status="deleting")
    shares.deletes = lambda name, _n: stubborn.hang(name)
    life = await world.start(svc)
    await settle_soon(life)
    reconciler = life.runtime.wired.reconciler  # type: ignore[union-attr]  # it lives
    assert len(reconciler.resources.tasks) == 1

    await world.run_as(life, reconciler.stop())

    assert reconciler.resources.tasks == []
    assert owners(world, "a") == [life.runtime.run_id]


async def test_a_stop_ends_a_rule_that_is_asked_again(world: World, svc: Service):
    """It does not wait until the limit of that rule."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, n: Wait(1) if n == 1 else hang()
    life = await world.start(svc)
    await world.until(lambda: len(shares.asked) == 2)
    began = now()

    await world.run_as(life, life.runtime.wired.reconciler.stop())  # type: ignore[union-attr]

    assert now() - began < 5


async def test_a_rule_that_hangs_keeps_the_row_that_its_last_try_could_not_give_back(
    world: World, svc: Service, stubborn: Stubborn
):
    """The commit of its end fails, and it begins again in a pass that has found it before: the row
    that was owed for its first end is that of the second try now.
    """
    first, doors = Stubborn(), Doors()
    hangs = [first, stubborn]
    shares = Shares(world, svc)
    shares.add("b")

    def write(found: Found, status: str) -> object:
        if found.id == "b":
            return hangs.pop(0).hang("b", True)
        shares.rows[found.id].status = status
        return True

    async def held() -> Settled:
        await doors.pass_("a")
        return Settled("available")

    shares.writes = write
    life = await world.start(svc, reconcile_at_once=1)
    await settle_soon(life)
    shares.add("a")
    shares.answers = lambda name, _n: held() if name == "a" else Settled("available")
    passing = asyncio.ensure_future(settle(life))
    await doors.wait(1)
    life.plan(Point.RESOURCE_SETTLED, Fault.LOST_BEFORE)
    first.let_go()
    await life.hears("store.error")
    life.runtime.wired.trigger.poke()  # type: ignore[union-attr]  # gives the lease back
    await asyncio.sleep(1)
    doors.open("a")
    await passing
    assert stubborn.begun == ["b"]

    await asyncio.sleep(60)

    row = shares.finding("b")
    assert row is not None
    assert row["owner"] == life.runtime.run_id
    stubborn.let_go()
    await life.hears("resource.settled", 2)


async def test_a_rule_that_is_called_between_passes_holds_nothing_up_either(
    world: World, svc: Service, stubborn: Stubborn
):
    """The rule is asked again as its time has come, and its write hangs: passes go on."""
    shares = Shares(world, svc)
    shares.add("a")

    async def away_first(n: int) -> Settled:
        if n == 1:
            raise OSError("away")
        return Settled("available")

    shares.answers = lambda _id, n: away_first(n)
    shares.writes = lambda found, _status: stubborn.hang(found.id)
    life = await world.start(svc, reconciliation_interval_s=60)
    await first_pass(life)
    await world.until(lambda: stubborn.begun == ["a"])
    passes = len(life.told("reconciliation.finished"))

    await life.hears("reconciliation.finished", passes + 2)

    assert stubborn.begun == ["a"]


async def test_many_rules_that_do_not_end_leave_threads_for_others(
    world: World, svc: Service, stubborn: Stubborn
):
    """With half as many of them as there are threads, no further rule begins."""
    shares = Shares(world, svc, max_wait=LIMIT_S)
    shares.add(*(f"s{n}" for n in range(9)), status="deleting")
    shares.deletes = lambda name, _n: stubborn.hang(name)
    life = await world.start(svc, threads=4, reconcile_at_once=1)

    await settle_soon(life)
    report = await settle_soon(life)

    assert stubborn.begun == ["s0", "s1"]
    assert list(why_left(report).values())[2:] == 7 * [
        "2 rules have not ended, so no other one begins"
    ]
    stubborn.let_go()
    await life.hears("resource.failed", 2)
    shares.deletes = lambda _id, _n: None
    assert len(results(await settle_soon(life))) == 7


async def test_what_ends_in_the_middle_of_a_pass_is_not_taken_for_gone(
    world: World, svc: Service, stubborn: Stubborn
):
    """The pass has found it while its rule was at work, and asks about it again."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.writes = lambda found, _status: stubborn.hang(found.id)
    life = await world.start(svc)
    await settle_soon(life)
    shares.add("b")
    doors = Doors()

    async def held(name: str) -> Settled:
        await doors.pass_(name)
        return Settled("available")

    shares.answers = lambda name, _n: held(name)
    shares.writes = None
    passing = asyncio.ensure_future(settle(life))
    await doors.wait(1)
    stubborn.let_go()
    await life.hears("resource.left")
    doors.open("a", "b")
    await passing

    assert world.incidents("resource_moved_on") == []
    await world.until(lambda: shares.statuses() == {"a": "available", "b": "available"})


# -- plain functions, in threads ----------------------------------------------------------------


class Blocked:
    """Plain functions that hang in their threads until the end of the test.

    Attributes:
        called: Ids of the resources for which one was called.
    """

    def __init__(self) -> None:
        self.called: list[str] = []
        self._go = threading.Event()

    def hang(self, ctx: Context, found: Found, *_: object) -> Any:
        self.called.append(found.id)
        self._go.wait(60)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def blocked(world: World) -> Iterator[Blocked]:
    one = Blocked()
    yield one
    one.let_go()


def of_plain(shares: Shares, **functions: Any) -> Shares:
    """A kind with the plain functions `probe`, `delete` and `find`, or those of *shares*."""
    kind = shares.kind
    kind.probe("creating", failed="error")(functions.get("probe", shares.was_it_created))
    deletes = kind.delete("deleting", done="deleted", failed="error_deleting")
    deletes(functions.get("delete", shares.delete_again))
    return shares


async def test_plain_deletes_that_hang_leave_half_of_the_threads(
    world: World, svc: Service, blocked: Blocked
):
    """However many begin together. The others are left: none has failed that was never called, and
    the plain `find` of another kind has a thread.
    """
    shares = of_plain(Shares(world, svc, bare=True, max_wait=LIMIT_S), delete=blocked.hang)
    shares.add(*(f"s{n}" for n in range(9)), status="deleting")
    other = svc.kind("other")
    other.find(lambda ctx, *, after, limit: [Found("o", "restoring")] if after is None else [])
    other.write(lambda ctx, found, status, facts: True)
    other.mark(restoring="error")
    life = await world.start(svc, threads=4, reconcile_at_once=16)

    report = await settle_soon(life, kind="share")
    again = await settle_soon(life)

    assert sorted(blocked.called) == ["s0", "s1"]
    assert set(shares.statuses().values()) == {"deleting"}
    assert list(why_left(report).values()) == 7 * ["2 rules have not ended, so no other one begins"]
    assert again.broken == {}


async def test_a_drain_does_not_begin_what_waits_for_a_thread(
    world: World, svc: Service, blocked: Blocked
):
    """While others are at work that hang: their limit is far, and the drain's comes first."""
    shares = of_plain(Shares(world, svc, bare=True, max_wait="1h"), delete=blocked.hang)
    shares.add(*(f"s{n}" for n in range(9)), status="deleting")
    life = await world.start(svc, threads=4, reconcile_at_once=16, drain_timeout_s=30)
    await world.until(lambda: len(blocked.called) == 2, within_s=60)
    began = now()

    report = await life.drain()

    assert 29 <= now() - began < 45
    assert report.leases_kept == 2
    assert life.told("drain.step_failed") == []
    assert set(shares.statuses().values()) == {"deleting"}


async def test_plain_writes_that_hang_count_too(world: World, svc: Service, blocked: Blocked):
    """Whatever the rule is, it ends in a `write`."""
    kind = svc.kind("share")
    rows = [Found(f"s{n}", "restoring") for n in range(9)]

    @kind.find
    async def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        return [one for one in rows if after is None or one.id > after][:limit]

    kind.write(blocked.hang)
    kind.mark(restoring="error")
    life = await world.start(svc, threads=4, reconcile_at_once=16)

    report = await settle_soon(life)

    assert sorted(blocked.called) == ["s0", "s1"]
    assert len(why_left(report)) == 7


async def test_more_plain_rules_than_half_of_the_threads_wait_for_each_other(
    world: World, svc: Service
):
    """Those that end in time hold nothing up: one pass settles all of them."""
    at_work: list[str] = []
    most: list[int] = []

    def delete(ctx: Context, found: Found) -> None:
        at_work.append(found.id)
        most.append(len(at_work))
        time.sleep(0.02)  # real: until others would have begun
        at_work.remove(found.id)

    shares = of_plain(Shares(world, svc, bare=True), delete=delete)
    shares.add(*(f"s{n}" for n in range(9)), status="deleting")
    life = await world.start(svc, threads=4, reconcile_at_once=16)

    await settle_soon(life)

    assert set(shares.statuses().values()) == {"deleted"}
    assert max(most) <= 2


async def test_a_delete_that_has_no_thread_is_put_off_and_has_not_failed(
    world: World, svc: Service, blocked: Blocked
):
    """Probes hang in all threads. It was never called, so nothing is known of its resource."""
    deleted: list[str] = []
    shares = of_plain(
        Shares(world, svc, bare=True, max_wait=LIMIT_S),
        probe=blocked.hang,
        delete=lambda ctx, found: deleted.append(found.id),
    )
    shares.add("p0", "p1")
    shares.add("z", status="deleting")
    life = await world.start(svc, threads=2, reconcile_at_once=2)

    result = results(await settle_soon(life))["z"]

    assert (result.outcome, deleted) == (ResourceOutcome.WAITING, [])
    said = "no thread was free within 50 s (max_wait), so it was not called"
    assert result.reason == f"<lambda>: {said}"
    blocked.let_go()
    await world.until(lambda: shares.rows["z"].status == "deleted")


async def test_a_probe_that_has_no_thread_is_not_given_up(
    world: World, svc: Service, blocked: Blocked
):
    """`max_wait` is for backends that do not answer, and this one was not asked."""

    def probe(ctx: Context, found: Found) -> Settled:
        if found.id == "a":
            blocked.hang(ctx, found)
        return Settled("available")

    shares = of_plain(Shares(world, svc, bare=True, max_wait=LIMIT_S), probe=probe)
    shares.add("a", "b")
    life = await world.start(svc, threads=1, reconcile_at_once=1)
    await settle_soon(life)

    await asyncio.sleep(2 * LIMIT_S)

    assert shares.rows["b"].status == "creating"
    blocked.let_go()
    await world.until(lambda: shares.rows["b"].status == "available")
