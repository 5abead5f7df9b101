"""A parked task whose process is killed, or whose store answers nothing: built once, answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

import pytest

from gracekit import Gone, NoCapacity, Notification, Parked, Service
from gracekit.errors import CallTimeoutError, StoreBrokenError, StoreError
from gracekit.process import Point, Side
from tests.service.kit import Fault, Life, World
from tests.service.parked import Builds, step_of

pytestmark = pytest.mark.looptime

PARKING = (Point.PARK, Point.NOTIFY, Point.OUTBOX_SENT, Point.REPLY, Point.REPLY_SENT)
MOVING = (Point.UNPARK, Point.NOTIFY, Point.OUTBOX_SENT, Point.REPLY)
SIDES: tuple[Side, ...] = ("before", "after")
PARKED = "running>pending no_capacity 1"


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


def steps_of(news: Sequence[Notification]) -> Counter[str]:
    """How many different notifications of each step there were; a repetition has the same id."""
    by_id = {one.message_id: step_of(one.payload) for one in news if one.priority == "INFO"}
    return Counter(by_id.values())


def check_news(news: Sequence[Notification], *, parkings: int = 1) -> None:
    """Each step was reported, and under one message id; so was each want of capacity."""
    assert set(steps_of(news).values()) == {1}
    wants = {one.message_id for one in news if one.event_type == "task.no_capacity"}
    assert len(wants) == parkings


async def life_after_life(world: World, builds: Builds, life: Life) -> Life:
    """The next run, as soon as *life* has died."""
    async with asyncio.timeout(600):
        await life.over.wait()
    return await builds.start()


async def has_settled(world: World, builds: Builds) -> None:
    """Until no run has anything left to do for the task."""
    await world.until(lambda: not builds.unsent() and not world.rows("SELECT * FROM reply"))
    await asyncio.sleep(30)
    world.check_accounts()
    assert world.rows("SELECT * FROM lease WHERE owner IS NOT NULL") == []


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("point", PARKING)
async def test_a_crash_while_it_is_parked(world: World, svc: Service, point: Point, side: Side):
    """The attempt counts as it is on record; its caller is answered, each step reported."""
    builds = Builds(world, svc, settle=0)
    life = await builds.start()
    life.crash_at(point, side)
    call = asyncio.create_task(builds.call(memory_mb=5))
    await life_after_life(world, builds, life)
    await builds.ends("pending")

    with pytest.raises(Parked) as parked:
        await call
    assert parked.value.version == 1
    await has_settled(world, builds)
    news = await builds.read()
    check_news(news)
    assert steps_of(news) == {PARKED: 1}
    again = point is Point.PARK and side == "before"
    assert len(builds.begun) == 1 + again
    assert builds.row()["parkings"] == 1


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("point", MOVING)
@pytest.mark.parametrize("verb", ["retry", "give_up", "cancel"])
async def test_a_crash_while_it_is_moved(
    world: World, svc: Service, point: Point, side: Side, verb: str
):
    """The resolver orders again if it has heard nothing: the order was done, or is done now, once.
    What runs again may have begun before the notification is sent.
    """
    builds = Builds(world, svc, settle=0)
    life = await builds.start()
    await builds.park(memory_mb=5)
    await has_settled(world, builds)
    builds.free = 5
    life.crash_at(point, side)
    order = asyncio.create_task(builds.order(verb))
    await life_after_life(world, builds, life)
    await asyncio.gather(order, return_exceptions=True)
    if verb == "retry" and builds.state() == "succeeded":
        with pytest.raises(Gone):
            await builds.order(verb)
    else:
        await builds.order(verb)
        assert not (await builds.order(verb))["changed"] or verb == "retry"
    state = {"retry": "succeeded", "give_up": "errored", "cancel": "cancelled"}[verb]
    await builds.ends(state)

    await has_settled(world, builds)
    news = await builds.read()
    check_news(news)
    assert sum(steps_of(news).values()) == 2 + (verb == "retry")
    assert len(world.incidents(f"operator_{verb}")) == 1
    most = 1 if verb != "retry" else 2 if point is Point.UNPARK else 3
    assert len(builds.begun) == builds.row()["attempts"] <= most
    assert builds.hooks == ([("v", "gave_up")] if verb == "give_up" else [])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("there", [True, False])
async def test_a_crash_while_it_expires(world: World, svc: Service, side: Side, there: bool):
    """In the sweep of a run, and in that of a start: one end, one hook, one report."""
    builds = Builds(world, svc)
    life = await builds.start(pending_timeout_s=60)
    await builds.park(memory_mb=5)
    if not there:
        await life.drain()
        await asyncio.sleep(100)
        life = world.life(svc, use_pending_state=True)
        life.crash_at(Point.UNPARK, side)
        starting = asyncio.create_task(life.start())
        await life_after_life(world, builds, life)
        await asyncio.gather(starting, return_exceptions=True)
    else:
        life.crash_at(Point.UNPARK, side)
        await life_after_life(world, builds, life)
    await builds.ends("errored")

    await has_settled(world, builds)
    check_news(await builds.read())
    assert builds.hooks == [("v", "expired")]
    assert len(world.incidents("pending_expired")) == 1


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (Fault.LOST_AFTER, 1),
        *((one, n) for one in (Fault.LOST_BEFORE, Fault.REFUSED) for n in (1, 5)),
    ],
)
@pytest.mark.parametrize("point", [Point.PARK, Point.UNPARK, Point.OUTBOX_SENT])
async def test_a_commit_of_unknown_end_is_made_good(
    world: World, svc: Service, point: Point, fault: Fault, times: int
):
    """Parked once, moved once, and reported at least once under one id."""
    world.expects_faults = True
    builds = Builds(world, svc)
    life = await builds.start()
    life.plan(point, fault, times=times)
    await builds.park(memory_mb=5)
    builds.free = 5
    for _ in range(times + 1):  # a resolver that is told of an error asks again
        with contextlib.suppress(StoreError):
            await builds.order("retry")
            break
    await builds.ends("succeeded")

    await has_settled(world, builds)
    news = await builds.read()
    check_news(news)
    assert steps_of(news) == {PARKED: 1, "pending>accepted  1": 1, "running>succeeded  1": 1}
    assert len(builds.begun) == 2
    assert len(world.incidents("operator_retry")) == 1
    assert world.tally()["parked"] == 1
    assert life.faults.left() == []


@pytest.mark.parametrize("point", [Point.PARK, Point.UNPARK, Point.OUTBOX_SENT])
async def test_a_broken_store_ends_the_run_and_the_next_one_goes_on(
    world: World, svc: Service, point: Point
):
    """Exit 70; what was not committed is done again, and nobody is built twice."""
    world.expects_faults = True
    builds = Builds(world, svc, settle=0)
    life = await builds.start()
    life.plan(point, Fault.BROKEN)
    call = asyncio.create_task(builds.call(memory_mb=5))
    if point is Point.UNPARK:
        await builds.ends("pending")
        builds.free = 5
        order = asyncio.create_task(builds.order("retry"))
    report = await asyncio.gather(life.wait_end(), return_exceptions=True)
    assert getattr(report[0], "exit_code", 70) == 70
    await builds.start()
    if point is Point.UNPARK:
        await asyncio.gather(order, return_exceptions=True)
        await builds.order("retry")
        await builds.ends("succeeded")
    else:
        await builds.ends("pending")

    answers = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(answers[0], Parked | NoCapacity | CallTimeoutError | StoreBrokenError)
    await has_settled(world, builds)
    check_news(await builds.read())
    assert builds.row()["parkings"] == 1
