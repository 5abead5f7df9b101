"""Probes: whether a run is alive, is ready, and has started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, GracekitError, Service
from gracekit.control.health import Probe
from gracekit.control.verbs import INTAKE_ANSWER_S
from gracekit.errors import InvalidArgumentsError
from gracekit.process import Point
from gracekit.testing.faults import Fault
from tests.service.kit import Doors, Life, World, now

pytestmark = pytest.mark.looptime


@pytest.fixture
def doors() -> Doors:
    return Doors()


@pytest.fixture
def svc(doors: Doors) -> Service:
    made = Service("compute")

    @made.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> str:
        await doors.pass_("work")
        return "done"

    return made


async def probe(life: Life, which: str) -> tuple[str, list[str]]:
    """Status and reasons, as the door and the HTTP endpoint give them."""
    answer = await life.runtime.wired.control.carry_out(
        "health", life.runtime.run_id, {"probe": which}
    )
    assert answer["phase"] == life.runtime.state.value
    return answer["status"], answer["why"]


async def every(life: Life) -> dict[str, Any]:
    return {which: (await probe(life, which))[0] for which in ("live", "ready", "started")}


async def test_a_service_that_serves_passes_every_probe(world: World, svc: Service):
    """Nothing is wrong, so there is no reason to give."""
    life = await world.start(svc)

    assert await every(life) == dict.fromkeys(("live", "ready", "started"), "pass")
    assert await probe(life, "ready") == ("pass", [])


async def test_a_service_is_neither_started_nor_ready_before_its_hooks_are_done(
    world: World, svc: Service
):
    """It is alive meanwhile: a long start is no reason for a restart."""

    @svc.on_start
    async def warm_up() -> None:
        await asyncio.sleep(12)

    life = world.life(svc)
    starting = asyncio.create_task(life.start())
    await asyncio.sleep(6)

    assert await every(life) == {"live": "pass", "ready": "fail", "started": "fail"}
    assert await probe(life, "ready") == ("fail", ["it is starting"])

    await starting
    assert await every(life) == dict.fromkeys(("live", "ready", "started"), "pass")


async def test_a_drain_is_not_ready_from_its_first_moment_and_says_what_is_left(
    world: World, svc: Service, doors: Doors
):
    """This holds while the stop is still being recorded, too; it stays alive and started."""
    life = await world.start(svc, signals=True, drain_timeout_s=20)
    await (await world.client(svc)).cast("work")
    await doors.wait(1)
    life.faults.delay_s = 1.0
    life.plan("stop_intent", Fault.DELAY)

    life.runtime.request_stop(source="signal", by="SIGTERM")
    assert await probe(life, "ready") == ("fail", ["drain by SIGTERM"])
    await asyncio.sleep(5)

    assert await every(life) == {"live": "pass", "ready": "fail", "started": "pass"}
    assert await probe(life, "ready") == ("fail", ["drain by SIGTERM, 15s left"])
    doors.open("work")


async def test_who_asked_for_a_drain_is_not_told_to_a_probe(
    world: World, svc: Service, doors: Doors
):
    """A probe needs no token, so it says `operator` and names no person."""
    life = await world.start(svc)
    await (await world.client(svc)).cast("work")
    await doors.wait(1)

    await world.verb(life, "drain", by="uid 1000 (alice)@host", reason="secret plan")

    status, (why,) = await probe(life, "ready")
    assert status == "fail"
    assert why.startswith("drain by operator")
    doors.open("work")


async def test_a_quiet_service_is_not_ready_until_it_is_resumed(world: World, svc: Service):
    """Its intake is closed on purpose, and it is alive."""
    life = await world.start(svc)

    await world.verb(life, "quiet")
    assert await every(life) == {"live": "pass", "ready": "fail", "started": "pass"}
    assert await probe(life, "ready") == ("fail", ["it is quiet"])

    await world.verb(life, "resume")
    assert await probe(life, "ready") == ("pass", [])


async def test_a_store_that_is_away_is_seen_by_readiness_alone(world: World, svc: Service):
    """Liveness passes, as a restart would not help; it is ready again within 5 s of the store."""
    world.expects_faults = True
    life = await world.start(svc)

    life.engine.disconnect()
    await life.hears("store.unreachable")
    assert await every(life) == {"live": "pass", "ready": "fail", "started": "pass"}
    assert (await probe(life, "ready"))[1][0] == "the store cannot be reached"

    life.engine.reconnect()
    await life.hears("store.reachable")
    await asyncio.sleep(5)
    assert await probe(life, "ready") == ("pass", [])


async def test_a_request_that_is_unfinished_for_hours_is_worth_a_look(
    world: World, svc: Service, doors: Doors
):
    """The probe passes with a warning, because other requests are served."""
    life = await world.start(svc)
    await (await world.client(svc)).cast("work")
    await doors.wait(1)
    assert await probe(life, "ready") == ("pass", [])

    await asyncio.sleep(2 * 3600)

    assert await probe(life, "ready") == ("warn", ["the oldest unfinished request is 2h old"])
    doors.open("work")


async def test_a_program_that_outlives_its_run_is_not_alive_for_long(world: World, svc: Service):
    """An operator's drain ends the run and not the program around it: a new process may help."""
    life = await world.start(svc)
    report = await life.drain()
    check = life.runtime.wired.control._health

    async def alive() -> tuple[str, tuple[str, ...]]:
        health = await check.ask(Probe.LIVE)
        return health.status, health.why

    assert report.exit_code == 0
    assert await alive() == ("pass", ())  # a process that ends with its run is gone soon
    await asyncio.sleep(9)
    assert await alive() == ("pass", ())
    await asyncio.sleep(2)
    assert await alive() == ("fail", ("the run has ended, and its process goes on",))


async def test_a_drain_that_a_signal_has_made_final_says_so(
    world: World, svc: Service, doors: Doors
):
    """It can be neither resumed nor extended any more."""
    life = await world.start(svc)
    await (await world.client(svc)).cast("work")
    await doors.wait(1)
    await world.verb(life, "drain", timeout="20s")
    await life.hears("intake.closed")
    assert await probe(life, "ready") == ("fail", ["drain by operator, 20s left"])
    life.ask_to_stop()
    assert await probe(life, "ready") == (
        *("fail", ["drain by operator, final by a signal, 20s left"]),
    )
    with pytest.raises(GracekitError, match="signal"):
        await world.verb(life, "extend", more="5m")
    with pytest.raises(GracekitError, match="signal"):
        await world.verb(life, "resume")
    doors.open("work")
    await life.wait_end()


async def test_a_store_that_has_become_slow_is_worth_a_look(
    world: World, svc: Service, doors: Doors
):
    """The warning lasts while a commit takes seconds, and for some seconds after. While one takes
    more than 5 seconds, nothing can be accepted.
    """
    life = await world.start(svc)
    life.faults.delay_s = 8.0
    life.plan(Point.FINISH, Fault.DELAY)
    await (await world.client(svc)).cast("work")
    doors.open("work")
    await asyncio.sleep(4)

    assert await probe(life, "ready") == ("warn", ["a commit takes 4s"])
    await asyncio.sleep(3)
    assert await probe(life, "ready") == ("fail", ["the store takes no writes for 7s"])
    assert (await world.verb(life, "status"))["not_ready"] == "the store takes no writes for 7s"
    assert life.runtime.not_ready is not None  # the gauge gracekit_ready reads the same
    await asyncio.sleep(2)
    assert await probe(life, "ready") == ("warn", ["a commit takes 8s"])

    await asyncio.sleep(30)
    assert await probe(life, "ready") == ("pass", [])


async def test_a_queue_that_cannot_be_read_is_worth_a_look_and_then_a_failure(
    world: World, svc: Service, doors: Doors
):
    """If the connection comes back within seconds, requests need not be sent elsewhere."""
    life = await world.start(svc, max_accepted=1)
    client = await world.client(svc)
    for _ in range(2):
        await client.cast("work")
    await doors.wait(1)
    await asyncio.sleep(31)
    life.plan("consume", Fault.REFUSED, times=40)
    doors.open("work")
    await asyncio.sleep(3)

    status, (why,) = await probe(life, "ready")
    assert (status, why.startswith("requests cannot be read for ")) == ("warn", True)
    await asyncio.sleep(4)
    assert await probe(life, "ready") == ("fail", ["requests cannot be read"])
    assert (await probe(life, "live"))[0] == "pass"

    await life.hears("service.hears")
    assert await probe(life, "ready") == ("pass", [])


async def test_a_service_that_is_resumed_while_the_broker_is_away_says_so(
    world: World, svc: Service
):
    """The command is answered before its patience ends, and the queue counts as not read from the
    moment at which the intake was opened.
    """
    life = await world.start(svc)
    await world.verb(life, "quiet")
    life.faults.delay_s = 20
    life.plan("consume", Fault.DELAY)
    asked_at = now()

    assert (await world.verb(life, "resume"))["phase"] == "serving"
    assert now() - asked_at < INTAKE_ANSWER_S + 1
    assert [one["detail"] for one in world.incidents("operator_resume")]
    assert await probe(life, "ready") == ("warn", ["requests cannot be read for 3s"])
    await asyncio.sleep(4)
    assert await probe(life, "ready") == ("fail", ["requests cannot be read"])
    assert life.told("service.deaf")[0]["error"] == "it is not read yet"

    await life.hears("service.hears")
    assert await probe(life, "ready") == ("pass", [])


async def test_a_probe_that_does_not_exist_is_refused_with_those_that_do(
    world: World, svc: Service
):
    """The message names the nearest one."""
    life = await world.start(svc)

    with pytest.raises(InvalidArgumentsError, match="did you mean ready"):
        await probe(life, "reday")
