"""Orders about parked tasks: each state with each order, each version, twice, and side by side."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, Gone, GracekitError, NoCapacity, Service, StaleVersionError
from gracekit.errors import (
    InvalidArgumentsError,
    UnknownTaskError,
)
from tests.service.kit import Doors, Life, World
from tests.service.parked import TIMEOUT_S, Builds, Site

pytestmark = pytest.mark.looptime

BAD_ARGUMENTS = (InvalidArgumentsError, TypeError)  # the second is what goes over the wire
ORDERS = ("retry", "give_up", "cancel")
ENDS = {
    "retry": ("succeeded", None, []),
    "give_up": ("errored", "gave_up", [("v", "gave_up")]),
    "cancel": ("cancelled", "resolver", []),
}


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


async def by_control(world: World, life: Life, verb: str, task_id: str = "t") -> Any:
    """An operator's control verb."""
    return await world.verb(life, verb, task_id=task_id, by="ann@desk", reason="wrong host")


# -- each way out ------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ORDERS)
async def test_a_resolver_gets_a_task_out(world: World, svc: Service, verb: str):
    """Retry runs it, give up calls the errored hook, cancel ends it; each is on record and
    notified.
    """
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)
    builds.free = 5

    answer = await builds.order(verb, reason="no need")
    state, reason, hooks = ENDS[verb]
    await builds.ends(state)
    await world.until(lambda: builds.hooks == hooks)

    first = {"retry": "accepted"}.get(verb, state)
    assert answer == {"task_id": "t", "state": first, "version": 1, "changed": True}
    assert builds.row()["reason"] == reason
    (note,) = world.incidents(f"operator_{verb}")
    assert "a caller of gracekit.tasks: no need (it was pending" in note["detail"]
    assert len(builds.begun) == (2 if verb == "retry" else 1)
    assert await builds.steps() == [
        "running>pending no_capacity 1",
        f"pending>{first} {reason or ''} 1",
        *(["running>succeeded  1"] if verb == "retry" else []),
    ]


@pytest.mark.parametrize("verb", ["retry", "fail", "cancel", "give_up"])
async def test_an_operator_gets_a_task_out(world: World, svc: Service, verb: str):
    """The control verbs of any run of the service do it, and are notified at once."""
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    assert len(await builds.read()) == 2
    builds.free = 5

    answer = await by_control(world, life, verb)
    by_operator: dict[str, tuple[str, str | None, list[tuple[str, str]]]] = {
        "fail": ("errored", "operator", [("v", "operator")]),
        "cancel": ("cancelled", "operator", []),
    }
    state, reason, hooks = (ENDS | by_operator)[verb]
    await builds.ends(state)
    await world.until(lambda: builds.hooks == hooks)

    first = {"retry": "accepted"}.get(verb, state)
    assert answer["state"] == first
    assert builds.row()["reason"] == reason
    first, *end = await builds.steps()
    assert first == f"pending>{answer['state']} {reason or ''} 1"
    assert end == (["running>succeeded  1"] if verb == "retry" else [])


async def test_a_handler_takes_its_resource_s_parked_tasks_along(world: World, svc: Service):
    """`ctx.cancel_pending` cancels those of that resource alone, and says how many."""
    builds = Builds(world, svc)
    await builds.start()
    for task_id, vm in (("a", "v"), ("b", "v"), ("c", "w")):
        await builds.park(vm, task_id, memory_mb=5)

    client = await builds.client()
    number = await client.call(builds.delete, vm="v")

    assert number == 2
    assert await client.call(builds.delete, vm="v") == 0
    assert [builds.state(one) for one in "abc"] == ["cancelled", "cancelled", "pending"]
    assert builds.row("a")["args"] is None
    assert [note["request_id"] for note in world.incidents("operator_cancel")] == ["a", "b"]


@pytest.mark.parametrize("odd", [None, "", "\ud800", ["v"], "x" * 256, 1.0, True])
async def test_cancel_pending_refuses_what_is_no_id(world: World, svc: Service, odd: object):
    """It would cancel nothing, and say so as if nothing waited."""
    site = Site(world, svc)

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def build(ctx: Context, vm: str) -> None: ...

    @svc.rpc
    async def delete(ctx: Context) -> str:
        with pytest.raises(InvalidArgumentsError) as refused:
            await ctx.cancel_pending("vm", odd)  # type: ignore[arg-type]
        return str(refused.value)

    await site.start()

    assert "the id of a vm is text or a whole number" in await (await site.client()).call(delete)


async def test_cancel_pending_touches_neither_another_service_nor_what_runs(
    world: World, svc: Service
):
    """Kinds and ids of resources are one service's own; a task that runs again is at work."""
    other = Service("network")
    builds, others = Builds(world, svc), Builds(world, other)
    await builds.start()
    await world.start(other, use_pending_state=True)
    await others.park(task_id="o", memory_mb=5)
    await builds.park(memory_mb=5)
    builds.free = 5
    await builds.order("retry")
    await builds.ends("succeeded")

    assert await (await builds.client()).call(builds.delete, vm="v") == 0
    assert (builds.state(), builds.state("o")) == ("succeeded", "pending")


# -- each state with each order ----------------------------------------------------------------


class Stages:
    """One task, brought into any state; it was parked before at version 1, unless it cannot be."""

    def __init__(self, world: World, svc: Service) -> None:
        self.world = world
        self.doors = doors = Doors()

        @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
        async def build(ctx: Context, vm: str, then: str) -> None:
            if ctx.attempt == 1 and then != "never":
                raise NoCapacity("full")
            match then:
                case "failed":
                    raise LookupError("no disk")
                case "running" | "never" | "handed_over":
                    await doors.pass_("at work")

        self.build = build
        self.site = Site(world, svc)

    async def bring(self, state: str) -> Life:
        """A run, and task `t` in *state*."""
        site = self.site
        life = await site.start(max_running=1, drain_timeout_s=1, handover_grace_s=1)
        client = await site.client()
        then = {"rejected": "x", "unparked": "never"}.get(state, state)
        if state == "rejected":
            await client.prepare(request_id="t").cast("no_such_method")
            await site.ends("rejected")
            return life
        await client.prepare(request_id="t").cast(self.build, vm="v", then=then)
        if state == "unparked":
            await site.ends("running")
            return life
        await site.ends("pending")
        if state == "cancelled":
            await site.order("cancel", reason="first")
        elif state == "errored":
            await site.order("give_up", reason="first")
        elif state == "accepted":  # the only place is taken
            await client.prepare(request_id="b").cast(self.build, vm="w", then="never")
            await self.doors.wait(1)
            await site.order("retry")
            await self.world.until(lambda: self.world.task("t")["owner"] is not None)
        elif state != "pending":
            await site.order("retry")
            await site.ends({"handed_over": "running"}.get(state, state))
        if state == "handed_over":
            await life.drain()
            life = await site.start(startup_reconciliation_enabled=False)
        assert site.state() == {"unparked": "running"}.get(state, state)
        return life


def rows_of(world: World) -> list[dict[str, Any]]:
    return world.rows("SELECT * FROM task WHERE request_id = 't'")


CHANGED, SAME, STALE, GONE, UNKNOWN = "changed", "same", "stale", "gone", "unknown"
TABLE = {
    # state: retry, give up, cancel; each at version 1
    "pending": (CHANGED, CHANGED, CHANGED),
    "accepted": (SAME, STALE, STALE),
    "running": (SAME, STALE, STALE),
    "handed_over": (SAME, STALE, STALE),
    "succeeded": (GONE, GONE, GONE),
    "failed": (GONE, GONE, GONE),
    "cancelled": (GONE, GONE, SAME),
    "errored": (GONE, SAME, GONE),
    "unparked": (STALE, STALE, STALE),
    "rejected": (UNKNOWN, UNKNOWN, UNKNOWN),  # it was never a task
}


@pytest.mark.parametrize("verb", ORDERS)
@pytest.mark.parametrize("state", TABLE)
async def test_an_order_of_a_resolver_in_each_state(
    world: World, svc: Service, state: str, verb: str
):
    """Only what is PENDING moves; else the answer says why not, or that this very order was
    done.
    """
    stages = Stages(world, svc)
    await stages.bring(state)
    await asyncio.sleep(1)  # what it owes after its end is done
    before = rows_of(world)

    try:
        answer = await stages.site.order(verb)
        found = CHANGED if answer["changed"] else SAME
    except Gone:
        found = GONE
    except StaleVersionError:
        found = STALE
    except UnknownTaskError:
        found = UNKNOWN

    assert found == TABLE[state][ORDERS.index(verb)]
    if found is not CHANGED:
        assert rows_of(world) == before


@pytest.mark.parametrize("verb", ["retry", "fail", "cancel", "give_up"])
@pytest.mark.parametrize("state", ["accepted", "running", "succeeded", "cancelled"])
async def test_give_up_is_for_parked_tasks_alone(world: World, svc: Service, state: str, verb: str):
    """By a control verb: other orders keep their meaning in other states, this one is refused
    there.
    """
    stages = Stages(world, svc)
    life = await stages.bring(state)
    before = world.task("t")
    may = state in {"accepted", "running"} and verb in {"fail", "cancel"}

    if may:
        await by_control(world, life, verb)
        await world.until(lambda: world.task("t") != before)
    else:
        with pytest.raises(GracekitError):
            await by_control(world, life, verb)
        assert world.task("t") == before
    stages.doors.open("at work")


async def test_gone_says_how_it_ended(world: World, svc: Service):
    """State, reason and words, so that a resolver that is late knows all it needs."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)
    await builds.order("give_up", reason="too large for this site")

    with pytest.raises(Gone, match=r"it is errored \(gave_up\).*too large for this site"):
        await builds.order("retry")


# -- versions ----------------------------------------------------------------------------------


async def test_parked_again_it_keeps_its_deadline_and_has_the_next_version(
    world: World, svc: Service
):
    """A task may be parked again and again, and not longer than it might wait at first; an order
    that was decided on an earlier picture changes nothing.
    """
    builds = Builds(world, svc)
    await builds.start()
    first = await builds.park(memory_mb=5)
    await asyncio.sleep(100)
    await builds.order("retry", version=1)
    await world.until(lambda: builds.row()["parkings"] == 2)
    again = await builds.park(memory_mb=5)

    assert (first.version, again.version) == (1, 2)
    assert again.deadline == first.deadline
    assert builds.row()["parked_at"] >= first.deadline - TIMEOUT_S + 100
    for verb in ORDERS:
        with pytest.raises(StaleVersionError, match="at version 2, and the order names version 1"):
            await builds.order(verb, version=1)
        with pytest.raises(StaleVersionError, match="at version 2, and the order names version 3"):
            await builds.order(verb, version=3)
    assert (builds.state(), len(builds.begun)) == ("pending", 2)
    assert (await builds.order("give_up", version=2))["version"] == 2


@pytest.mark.parametrize("version", [0, -1, True, 1.5, "1", None, 2**70])
async def test_a_version_that_cannot_be_is_refused(world: World, svc: Service, version: Any):
    """A whole number from 1 is; nothing is done."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.park(memory_mb=5)

    with pytest.raises((*BAD_ARGUMENTS, StaleVersionError)):
        await builds.order("retry", version=version)

    assert builds.state() == "pending"


async def test_a_task_id_of_nobody_is_unknown(world: World, svc: Service):
    """Also one of another service in the same store."""
    other = Service("network")
    builds, others = Builds(world, svc), Builds(world, other)
    await builds.start()
    await world.start(other, use_pending_state=True)
    await others.park(task_id="o", memory_mb=5)

    for task_id in ("nobody", "o", "", "x" * 5000, "a\0b"):
        for verb in ORDERS:
            with pytest.raises(UnknownTaskError):
                await builds.order(verb, task_id)
        with pytest.raises(UnknownTaskError):
            await builds.api("get", task_id=task_id)
    assert others.state("o") == "pending"


@pytest.mark.parametrize("verb", ORDERS)
async def test_the_same_order_twice_is_one(world: World, svc: Service, verb: str):
    """At one moment, or one after the other: one start, one hook, one notification, one record."""
    doors = Doors()
    builds = Builds(world, svc)

    @svc.rpc(on_interrupt="retry")
    async def slow(ctx: Context) -> None:
        if ctx.attempt == 1:
            raise NoCapacity("full")
        await doors.pass_("slow")

    await builds.start()
    await builds.start(host="node-2")
    await (await builds.client()).prepare(request_id="t").cast(slow)
    await builds.ends("pending")

    answers = await asyncio.gather(*(builds.order(verb) for _ in range(4)))
    again = await builds.order(verb)
    doors.open("slow")
    await builds.ends(ENDS[verb][0])

    assert sorted(answer["changed"] for answer in answers) == [False, False, False, True]
    assert not again["changed"]
    assert len(doors.entered) == (1 if verb == "retry" else 0)
    assert len(world.incidents(f"operator_{verb}")) == 1
    assert len(await builds.steps()) == 2 + (verb == "retry")


async def test_of_different_orders_at_one_moment_one_is_done(world: World, svc: Service):
    """The others are told what became of it."""
    builds = Builds(world, svc)
    await builds.start()
    await builds.start(host="node-2")
    for number in range(6):
        task_id = f"t{number}"
        await builds.park(task_id, task_id, memory_mb=5)
        verbs = ORDERS[number % 3 :] + ORDERS[: number % 3]
        answers = await asyncio.gather(
            *(builds.order(verb, task_id) for verb in verbs), return_exceptions=True
        )
        done = [one for one in answers if isinstance(one, dict)]
        refused = [one for one in answers if isinstance(one, Gone | StaleVersionError)]
        assert (len(done), len(refused)) == (1, 2), answers
        assert len(world.incidents("parked")) >= number + 1


# -- arguments that an operator replaces -------------------------------------------------------


async def test_an_operator_replaces_arguments_of_a_parked_task_alone(world: World, svc: Service):
    """The record names them. A task that is not parked any more is not touched."""
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    builds.free = 2

    for verb, args in (("cancel", {"memory_mb": 1}), ("retry", [1])):
        with pytest.raises(BAD_ARGUMENTS, match="args must be an object, and are for the verb"):
            await world.verb(life, verb, task_id="t", args=args)
    answers = [
        await world.verb(life, "retry", task_id=task_id, args={"memory_mb": 2})
        for task_id in ("t", "t", "nowhere")
    ]
    await builds.ends("succeeded")

    assert [answer["state"] for answer in answers if "moved" not in answer] == ["accepted"]
    assert [answer["task_id"] for answer in answers if "moved" in answer] == ["t", "nowhere"]
    assert len(builds.begun) == 2
    (note,) = world.incidents("operator_retry")
    assert note["detail"].endswith("(it was pending (no_capacity); --set memory_mb)")


async def test_arguments_in_which_a_serializer_finds_the_resource_stay(world: World, svc: Service):
    """They are texts that it makes objects of, so nobody can compare the resource."""
    builds = Builds(world, svc)
    builds.build.reads_early = lambda _, args: ("vm", args["vm"])
    life = await builds.start()
    await builds.park(memory_mb=5)

    with pytest.raises(BAD_ARGUMENTS, match="acts on vm:v, which a serializer has found"):
        await world.verb(life, "retry", task_id="t", args={"memory_mb": 2})
    with pytest.raises(BAD_ARGUMENTS, match="cannot be replaced; send a new request"):
        await builds.order("retry", args={"memory_mb": 2})
    assert builds.state() == "pending"
