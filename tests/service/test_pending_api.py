"""`gracekit.tasks`: what it shows, arguments of a retry, and where it runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from gracekit import Context, GracekitError, NoCapacity, Service
from gracekit.errors import InvalidArgumentsError, StaleVersionError, UnsupportedVersionError
from gracekit.process import Point
from tests.service.kit import Doors, Fault, World, now
from tests.service.parked import Builds, Site

pytestmark = pytest.mark.looptime

BAD_ARGUMENTS = (InvalidArgumentsError, TypeError)  # the second is what goes over the wire


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


# -- what is shown, and to whom ----------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", None])
async def test_a_resolver_need_not_ask_for_version_1_1(
    world: World, svc: Service, version: str | None
):
    """The methods answer requests for 1.0 too, which is what a request without version means."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)
    client = await builds.client()
    tasks = client.prepare(ops=True, namespace="gracekit.tasks", version=version, timeout=60)

    assert (await tasks.call("get", task_id="t"))["state"] == "pending"
    assert len((await tasks.call("list_pending"))["tasks"]) == 1
    await tasks.call("cancel", task_id="t", version=1)
    await builds.ends("cancelled")


@pytest.mark.parametrize(
    ("details", "detail"), [("full", "LookupError"), ("message", "LookupError"), ("none", None)]
)
async def test_a_resolver_sees_the_class_of_what_a_retried_handler_raised(
    world: World, svc: Service, details: str, detail: str | None
):
    """The text is its caller's; and the class too, where not even callers are shown it."""
    builds = Builds(world, svc)

    @svc.rpc(on_interrupt="retry")
    async def format_disk(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise NoCapacity("full")
        raise LookupError("no disk canary-7")

    await builds.start(error_details=details)
    await (await builds.client()).prepare(request_id="t").cast(format_disk)
    await builds.ends("pending")
    assert (await builds.api("get", task_id="t"))["detail"] == "full"
    await builds.order("retry")
    await builds.ends("failed")

    shown = await builds.api("get", task_id="t")
    assert (shown["state"], shown["reason"], shown["detail"]) == ("failed", None, detail)
    assert "canary" not in str(shown)
    assert "failure" not in shown


async def test_without_task_api_there_is_no_such_namespace(world: World):
    """Whoever may send to the ops topic could move tasks: a service asks for it."""
    builds = Builds(world, Service("compute"))
    await builds.start()
    await builds.park(memory_mb=5)

    with pytest.raises(UnsupportedVersionError, match="is not served"):
        await builds.order("cancel")
    assert builds.state() == "pending"


async def test_list_pending_pages_through_all_of_them(world: World, svc: Service):
    """A resolver rebuilds its picture by it alone: in order, each once, and nothing secret."""
    builds = Builds(world, svc)
    await builds.start()
    for number in range(7):
        await builds.park(f"v{number}", f"t{number}", memory_mb=5)
    await builds.order("cancel", "t3")
    seen, after = [], 0
    while after is not None:
        page = await builds.api("list_pending", after=after, limit=2)
        seen += page["tasks"]
        after = page["next"]

    assert [one["task_id"] for one in seen] == ["t0", "t1", "t2", "t4", "t5", "t6"]
    first = seen[0]
    assert (first["resource"], first["requested"], first["version"]) == (
        "vm:v0",
        {"memory_mb": 5},
        1,
    )
    assert not {"args", "context", "failure"} & first.keys()
    for bad in ({"limit": 0}, {"limit": 501}, {"after": -1}, {"limit": "x"}):
        with pytest.raises(BAD_ARGUMENTS):
            await builds.api("list_pending", **bad)


@pytest.mark.parametrize(
    "requested",
    [
        {f"k{number}": number for number in range(300)},
        {"x": "\x01" * 680},
        {"x": '"\\' * 1000},
        {"x": "\U0001f600" * 1000},
        {"x": ":" * 4000},
    ],
    ids=["keys", "control characters", "quotes", "emoji", "colons"],
)
async def test_a_page_is_no_larger_than_a_message(
    world: World, svc: Service, requested: dict[str, Any]
):
    """With the largest `requested`, fewer are on a page than were asked for, and none is left
    out.
    """
    site = Site(world, svc)

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full", requested=requested)

    await site.start()
    for number in range(120):
        await (await site.client()).prepare(request_id=f"t{number}").cast(build)
    await site.ends("pending", "t119")
    seen, after, pages = [], 0, 0
    while after is not None:
        page = await site.api("list_pending", after=after, limit=500)
        seen += [task["task_id"] for task in page["tasks"]]
        assert page["tasks"][0]["requested"] == requested
        after, pages = page["next"], pages + 1

    assert seen == [f"t{number}" for number in range(120)]
    assert 1 < pages <= 60


# -- retry with other arguments ----------------------------------------------------------------


async def test_a_retry_may_replace_arguments(world: World, svc: Service):
    """Checked against the signature; the id keeps its first content, so that a duplicate of the
    request as it was sent is still one.
    """
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)
    hashed = builds.row()["content_hash"]
    builds.free = 4

    await builds.order("retry", args={"memory_mb": 4})
    await builds.ends("succeeded")

    assert builds.row()["content_hash"] == hashed
    assert await builds.call(memory_mb=5) == "v with 4"
    assert len(builds.begun) == 2
    with pytest.raises(GracekitError, match="other content"):
        await builds.call(memory_mb=4)


async def test_a_retry_with_arguments_of_its_own_is_not_taken_for_the_other_s(
    world: World, svc: Service
):
    """The task runs again with what another resolver has given, and the answer says so."""
    builds = Builds(world, svc)
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def grow(ctx: Context, size: int) -> None:
        if size > 2:
            raise NoCapacity("full")
        await doors.pass_("b")

    await builds.start()
    await (await builds.client()).prepare(request_id="t").cast(grow, size=5)
    await builds.ends("pending")
    await builds.order("retry", args={"size": 2})
    await doors.wait(1)

    with pytest.raises(StaleVersionError, match="with other arguments"):
        await builds.order("retry", args={"size": 1})
    assert (await builds.order("retry", args={"size": 2}))["changed"] is False
    assert (await builds.order("retry"))["changed"] is False


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"memory": 4}, "memory"),
        ({"vm": "w"}, "a retry keeps its resource"),
        ([1], "must be an object"),
        ("x", "must be an object"),
    ],
)
async def test_a_retry_with_arguments_that_do_not_fit_changes_nothing(
    world: World, svc: Service, args: Any, text: str
):
    """Another name, another resource, no object: refused, and it goes on to wait."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)
    before = builds.row()

    with pytest.raises(BAD_ARGUMENTS, match=text):
        await builds.order("retry", args=args)

    assert builds.row() == before


# -- where nothing may run ---------------------------------------------------------------------


async def test_a_retry_with_nobody_to_run_it_waits_for_a_run(world: World, svc: Service):
    """In a drain it is accepted and claimed by nobody; the next start, or a sibling, has it."""
    doors = Doors()
    builds = Builds(world, svc)

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("w")

    life = await builds.start()
    await builds.park(memory_mb=5)
    await (await builds.client()).cast(work)
    await doors.wait(1)
    life.ask_to_stop()
    await asyncio.sleep(1)
    builds.free = 5
    assert (await builds.order("retry"))["changed"]
    await asyncio.sleep(5)
    assert (builds.state(), len(builds.begun)) == ("accepted", 1)
    assert builds.row()["owner"] is None
    doors.open("w")
    assert (await life.wait_end()).exit_code == 75

    await builds.start()
    await builds.ends("succeeded")


async def test_a_retry_is_claimed_in_its_own_commit(world: World, svc: Service):
    """By the run that carries the order out: no other commit comes before its attempt."""
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    builds.free = 5
    life.crash_at(Point.CLAIM, "before")

    await builds.order("retry")

    await builds.ends("succeeded", within_s=1)
    await asyncio.sleep(60)
    assert not life.over.is_set()


async def test_a_retry_without_a_place_here_is_left_to_whichever_run_has_one(
    world: World, svc: Service
):
    """It waits in the store, and not in a run that is full."""
    doors = Doors()
    builds = Builds(world, svc)

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("w")

    life = await builds.start(max_running=1)
    for name in "ab":
        await builds.park(vm=name, task_id=name, memory_mb=5)
    await (await builds.client()).cast(work)
    await doors.wait(1)
    builds.free = 5
    for name in "ab":
        await builds.order("retry", name)
    await asyncio.sleep(5)

    assert [builds.row(name)["owner"] for name in "ab"] == [life.runtime.run_id, None]

    await builds.start(host="other")
    await builds.ends("succeeded", "b")
    assert builds.state("a") == "accepted"
    doors.open("w")
    await builds.ends("succeeded", "a")


async def test_a_full_run_leaves_a_retry_to_a_sibling_that_has_a_slot(world: World, svc: Service):
    """It would wait there as long as what runs; its deadline would not end it any more."""
    doors = Doors()
    builds = Builds(world, svc)

    @svc.rpc
    async def work(ctx: Context, number: int) -> None:
        await doors.pass_(number)

    await builds.start(max_running=4)
    names = "abcdefgh"
    for name in names:
        await builds.park(vm=name, task_id=name, memory_mb=5)
    for number in range(4):
        await (await builds.client()).cast(work, number=number)
    await doors.wait(4)
    await builds.start(host="other", max_running=4)
    builds.free = 5
    for name in names:
        await builds.order("retry", name)

    await asyncio.sleep(5)
    states = [builds.state(name) for name in names]
    assert states.count("succeeded") >= 4, states
    doors.open(*range(4))
    for name in names:
        await builds.ends("succeeded", name)


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
async def test_a_retry_whose_commit_is_in_doubt_runs_once(world: World, svc: Service, fault: Fault):
    """The row may be ours, and this run does not know it: it is found, and runs."""
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    builds.free = 5
    life.plan(Point.UNPARK, fault)

    with contextlib.suppress(GracekitError):
        await builds.order("retry")
    if builds.state() == "pending":
        await builds.order("retry")

    await builds.ends("succeeded", within_s=5)
    assert builds.begun == [("v", 1), ("v", 2)]


async def test_a_retry_of_a_method_that_is_gone_is_errored(world: World, svc: Service):
    """As any row: there is no sibling that serves it."""
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    await life.drain()
    builds.svc = later = Service("compute", task_api=True)

    @later.rpc
    async def other(ctx: Context) -> None:
        pass

    await builds.start()
    await builds.order("retry")

    await builds.ends("errored")
    assert builds.row()["reason"] == "method_gone"


async def test_a_retry_of_a_method_that_only_a_sibling_has_is_left_to_it(
    world: World, svc: Service
):
    """A rolling upgrade: the newer run carries the order out, the older one runs the task."""
    builds = Builds(world, svc)
    await builds.start(host="old")
    await builds.park(memory_mb=5)
    later = Service("compute", task_api=True)
    await world.start(later, use_pending_state=True, host="new")
    builds.free = 5
    begun = now()
    for _ in range(2):
        await builds.order("retry")

    await builds.ends("succeeded")
    assert now() - begun < 65
