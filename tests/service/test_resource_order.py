"""In which order resources are settled: kinds behind kinds, needs, pages, so many at a time."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections import deque
from collections.abc import Mapping

import pytest

from gracekit import Context, DeclarationError, Found, Service, Settled
from tests.scale import scale
from tests.service.kit import World, now
from tests.service.shares import Shares, absent, first_pass, results, settle, why_left

pytestmark = pytest.mark.looptime


async def in_order(seen: list[str], name: str) -> Settled:
    seen.append(f"{name} begins")
    await asyncio.sleep(1)
    seen.append(f"{name} ends")
    return Settled("available")


async def test_kinds_are_settled_behind_those_that_they_come_after(world: World, svc: Service):
    """Kinds that do not depend on each other are settled side by side."""
    seen: list[str] = []
    server = Shares(world, svc, "server")
    share = Shares(world, svc, "share", after=server.kind)
    backup = Shares(world, svc, "backup", after="share")
    other = Shares(world, svc, "other")
    for shares in (server, share, backup, other):
        shares.add(shares.name)
        shares.answers = lambda name, _n: in_order(seen, name)

    await first_pass(await world.start(svc))

    alone = [one for one in seen if not one.startswith("other")]
    assert alone == [
        f"{name} {what}" for name in ("server", "share", "backup") for what in ("begins", "ends")
    ]
    assert set(seen[:2]) == {"server begins", "other begins"}


async def test_what_needs_a_failed_resource_is_failed_without_a_question(
    world: World, svc: Service
):
    """Also where it needs one that was found in a failed status; what needs another one is
    asked.
    """
    server = Shares(world, svc, "share_server")
    share = Shares(world, svc, after=server.kind)
    server.add("srv-7", "srv-8", "srv-9")
    server.rows["srv-9"].status = "error"
    server.shows = {"error"}
    server.answers = lambda name, n: absent(name, n) if name == "srv-7" else Settled("active")
    share.add("sh-7", needs=(server.kind.of("srv-7"),))
    share.add("sh-8", needs=(server.kind.of("srv-8"),))
    share.add("sh-9", needs=(server.kind.of("srv-8"), server.kind.of("srv-9")))
    share.add("d-7", status="deleting", needs=(server.kind.of("srv-7"),))
    share.add("m-7", status="restoring", needs=(server.kind.of("srv-7"),))
    life = await world.start(svc)

    await first_pass(life)

    assert share.statuses() == {
        "sh-7": "error",
        "sh-8": "available",
        "sh-9": "error",
        "d-7": "error_deleting",
        "m-7": "error",
    }
    assert (share.asks(), share.deleted) == (["sh-8"], [])
    reasons = {told["resource"][1]: told["reason"] for told in life.told("resource.failed")}
    assert reasons["sh-7"] == "dependency share_server:srv-7"
    assert reasons["sh-9"] == "dependency share_server:srv-9"
    assert {"d-7", "m-7"} <= reasons.keys()
    details = [row["detail"] for row in world.incidents("resource_failed")]
    assert any("dependency share_server:srv-7" in detail for detail in details)


async def test_what_has_its_end_is_not_left(world: World, svc: Service):
    """`find` shows the failed ones for what needs them: they wait for nothing, and their number
    would look like that of stuck records. What has an unknown status is left.
    """
    server = Shares(world, svc, "share_server")
    share = Shares(world, svc, after=server.kind)
    server.add("srv-6", status="error")
    server.add("srv-7", status="deleted")
    server.add("srv-8", status="odd")
    server.shows = {"error", "deleted", "odd"}
    share.add("sh-6", needs=(server.kind.of("srv-6"),))
    life = await world.start(svc)

    told = await first_pass(life)

    assert share.statuses() == {"sh-6": "error"}
    assert (told["failed"], told["left"]) == (1, 1)
    assert [one["status"] for one in life.told("resource.unruled")] == ["odd"]
    assert why_left(await settle(life)) == {"srv-8": "status 'odd' has no rule"}


async def test_what_needs_an_unsettled_resource_waits_for_it(world: World, svc: Service):
    """It is left, and settled in the pass after the need has come to its end."""
    server = Shares(world, svc, "share_server")
    share = Shares(world, svc, after=server.kind)
    server.add("srv-7")
    server.add("srv-8", busy=True)
    server.answers = lambda _id, n: OSError("away") if n == 1 else Settled("active")
    share.add("sh-7", needs=(server.kind.of("srv-7"),))
    share.add("sh-8", needs=(server.kind.of("srv-8"),))
    life = await world.start(svc)

    left = why_left(await settle(life))

    assert left["sh-7"] == "waits for share_server:srv-7"
    assert left["sh-8"] == "waits for share_server:srv-8"
    await world.until(lambda: server.statuses()["srv-7"] == "active")
    await settle(life)
    assert share.written == [("sh-7", "creating", "available")]
    assert share.asks() == ["sh-7"]


async def test_the_need_of_a_kind_that_is_not_before_leaves_that_record_alone(
    world: World, svc: Service
):
    """That kind may be settled later. The reason says what to write, and so does the log, once a
    pass; the records behind it are settled.
    """
    server = Shares(world, svc, "server")
    share = Shares(world, svc)
    share.add("sh-1", "sh-2", needs=(server.kind.of("srv-1"),))
    share.add("sh-3", needs=(("vm", "v"),))
    share.add("sh-4")
    life = await world.start(svc)

    report = await settle(life)

    why = "and kind share does not come after {0}: svc.kind('share', after=[...])"
    assert report.broken == {}
    assert why_left(report) == {
        "sh-1": f"it needs a server, {why.format('server')}",
        "sh-2": f"it needs a server, {why.format('server')}",
        "sh-3": f"it needs a vm, {why.format('vm')}",
    }
    assert share.written == [("sh-4", "creating", "available")]
    (told,) = life.told("hook.failed")
    assert told["hook"] == "share.find"
    assert str(told["error"]).startswith("'sh-1' is left: it needs a server")


async def test_a_delete_may_be_called_although_what_it_needs_has_failed(world: World, svc: Service):
    """A share whose server is gone is deleted all the same, if its rule says so; while the server
    is not settled it waits.
    """
    server = Shares(world, svc, "server")
    share = Shares(world, svc, bare=True, after=server.kind)
    share.kind.delete("deleting", done="deleted", failed="error", needs_failed="call")(
        share.delete_again
    )
    server.add("srv-1", "srv-2")
    server.answers = lambda name, n: absent(name, n) if name == "srv-1" else OSError("away")
    for n in (1, 2):
        share.add(f"sh-{n}", status="deleting", needs=(server.kind.of(f"srv-{n}"),))
    life = await world.start(svc)

    report = await settle(life)

    assert share.written == [("sh-1", "deleting", "deleted")]
    assert why_left(report) == {"sh-2": "waits for server:srv-2"}
    with pytest.raises(DeclarationError, match="needs_failed='calls' is none of fail, call"):
        share.kind.delete("x", done="d", failed="f", needs_failed="calls")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["raises", "hangs"])
async def test_a_kind_that_cannot_be_read_stops_those_behind_it(
    world: World, svc: Service, what: str
):
    """They are not begun in this pass; others go on, and the next pass makes it all again."""
    server = Shares(world, svc, "server")
    share = Shares(world, svc, after=server.kind)
    other = Shares(world, svc, "other")
    for shares in (server, share, other):
        shares.add(f"{shares.name} 1")
    trouble = OSError("the database is away") if what == "raises" else asyncio.sleep(1000)
    server.finds = lambda n: trouble if n == 1 else None
    life = await world.start(svc, reconciliation_interval_s=60)

    told = await first_pass(life)

    assert told["broken"] == ["server", "share"]
    assert (server.asks(), share.pages, other.asks()) == ([], [], ["other 1"])
    reasons = {one["kind"]: one["reason"] for one in life.told("reconciliation.broken")}
    said = "the database is away" if what == "raises" else "no answer within 30 s"
    assert reasons["server"].startswith("server.find, find(): ")
    assert said in reasons["server"]
    assert reasons["share"].startswith("waits for server: ")
    await life.hears("reconciliation.finished", 2)
    assert (server.asks(), share.asks()) == (["server 1"], ["share 1"])


async def test_a_broken_pass_is_made_again_after_pauses_that_grow(world: World, svc: Service):
    """Up to the interval: a database that is down is not asked in a loop. What is found when it is
    back is settled as by a first pass.
    """
    shares = Shares(world, svc, stuck_after="1h")
    shares.add("a", age_s=60)
    times: list[float] = []

    def away(_n: int) -> OSError | None:
        times.append(now())
        return OSError("the database is away") if len(times) < 10 else None

    shares.finds = away
    life = await world.start(svc, reconciliation_interval_s=100)
    await world.until(lambda: bool(shares.written), within_s=2000)

    pauses = [later - earlier for earlier, later in itertools.pairwise(times[:10])]
    assert pauses[0] < 10
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(pauses[:4]))
    assert max(pauses) < 120
    assert len(life.told("reconciliation.broken")) == 9


async def test_1200_resources_are_read_in_pages_and_settled_16_at_a_time(
    world: World, svc: Service
):
    """Each is asked about once, and each page begins behind the last id of the one before."""
    shares = Shares(world, svc)
    shares.add(*(f"s{n:04}" for n in range(1200)))

    async def soon(_name: str) -> Settled:
        await asyncio.sleep(0.1)
        return Settled("available")

    shares.answers = lambda name, _n: soon(name)
    life = await world.start(svc)

    told = await first_pass(life)

    assert told["settled"] == 1200
    assert sorted(shares.asks()) == sorted(shares.rows)
    assert {limit for _, limit in shares.pages} == {500, 32}  # read, and looked at again
    assert [after for after, limit in shares.pages if limit == 500] == [
        *(None, "s0499", "s0999", "s1199")
    ]
    assert {after for after, _ in shares.pages} == {None, "s0499", "s0999", "s1199"}
    assert shares.at_once == [0, 16]


async def test_what_a_short_page_does_not_show_is_looked_for_in_the_whole_one(
    world: World, svc: Service
):
    """Where much before it is left alone, or `find` returns fewer than it could."""
    shares = Shares(world, svc)
    shares.add(*(f"busy-{n:03}" for n in range(100)), busy=True)
    shares.add(*(f"sh-{n:03}" for n in range(100)))
    other = Shares(world, svc, "other")
    other.add("sh-1")
    other.finds = lambda _n: [] if other.pages[-1][1] < 500 else None

    told = await first_pass(await world.start(svc))

    assert told["settled"] == 101
    assert shares.pages.count((None, 32)) == 1  # once was enough to learn it
    assert other.statuses() == {"sh-1": "available"}


async def test_what_the_whole_page_does_not_show_has_moved_on(world: World, svc: Service):
    """No backend is asked about it."""
    shares = Shares(world, svc)
    shares.add("sh-1", "sh-2")

    def move_on(n: int) -> None:
        if n > 1:
            shares.rows["sh-1"].status = "available"

    shares.finds = move_on

    report = await settle(await world.start(svc))

    assert results(report)["sh-1"].outcome.value == "moved_on"
    assert shares.asks() == ["sh-2"]
    assert (None, 500) in shares.pages[1:]


@pytest.mark.parametrize("number", [1, 3])
async def test_reconcile_at_once_is_the_number(world: World, svc: Service, number: int):
    """Of resources of one kind that are settled at one time."""
    shares = Shares(world, svc)
    shares.add(*"abcdefgh")

    async def soon(_name: str) -> Settled:
        await asyncio.sleep(1)
        return Settled("available")

    shares.answers = lambda name, _n: soon(name)
    await first_pass(await world.start(svc, reconcile_at_once=number))

    assert shares.at_once == [0, number]


async def test_one_rule_that_raises_harms_its_resource_alone(world: World, svc: Service):
    """The others of its page are settled."""
    shares = Shares(world, svc)
    shares.add("a", "b", "c")
    shares.answers = lambda name, _n: ValueError("?") if name == "b" else Settled("available")

    await first_pass(await world.start(svc))

    assert shares.statuses() == {"a": "available", "b": "creating", "c": "available"}


# -- memory -------------------------------------------------------------------------------------

FEW, MANY = 2_000, scale(20_000, 100_000)
ALLOWED_KIB = 2_048
"""What garbage and the caches of Python may differ by."""


async def _peak_kib(world: World, number: int) -> float:
    """Peak above idle of a pass over so many resources, whose records are nowhere in memory."""
    svc = Service("compute")
    kind = svc.kind("share")
    settled = [0]

    @kind.find
    async def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        first = 0 if after is None else int(after) + 1
        return [
            Found(f"{n:06}", "creating", since=1.0)
            for n in range(first, min(first + limit, number))
        ]

    @kind.write
    async def write(ctx: Context, found: Found, status: str, facts: Mapping[str, object]) -> bool:
        settled[0] += 1
        return True

    kind.mark(creating="error")
    life = await world.start(svc)
    life.events = deque(maxlen=1)  # type: ignore[assignment]  # the test's own list would grow
    tracemalloc.start()
    try:
        base, _ = tracemalloc.get_traced_memory()
        await world.until(lambda: settled[0] >= number, within_s=7200)
        return (tracemalloc.get_traced_memory()[1] - base) / 1024
    finally:
        tracemalloc.stop()
        await life.crash()


@pytest.mark.timeout(scale(120, 1200))
async def test_memory_does_not_grow_with_the_number_of_resources(world: World):
    """A pass holds a page of each kind and what acts, however many resources there are."""
    few = await _peak_kib(world, FEW)
    many = await _peak_kib(world, MANY)

    assert many < few + ALLOWED_KIB
