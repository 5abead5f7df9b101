"""A drain by command whose deadline is moved later while it goes on."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, GracekitError, Service
from gracekit.process import Point
from tests.service.kit import Doors, Fault, Systemd, World, now, start_with_work

pytestmark = pytest.mark.looptime


async def test_a_handler_gets_the_time_and_everything_after_it_moves_along(
    world: World, svc: Service
):
    """`ctx.deadline` shows the later deadline; grace, hard limit and alarm follow; who asked for
    it, and why, is on record.
    """
    seen: list[float] = []
    begun = asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        begun.set()
        while True:
            seen.append(round(ctx.time_left or 0))
            await asyncio.sleep(10)

    life = await world.start(svc, signals=True)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await begun.wait()
    await world.verb(life, "drain", timeout="30s")
    asked_at = now()
    await asyncio.sleep(5)
    seen.clear()
    answer = await world.verb(life, "extend", more="1m", by="ann", reason="nearly done")
    status = await world.verb(life, "status")
    report = await life.wait_end()

    assert answer["drain_left_s"] == pytest.approx(85, abs=0.5)
    assert (answer["phase"], status["drain_timeout_s"]) == ("draining", pytest.approx(90, abs=0.1))
    assert now() - asked_at == pytest.approx(90, abs=0.5)
    assert report.handed_over == ["w"]
    assert max(seen) > 75
    armed = [seconds for seconds in life.process.alarms if seconds is not None]
    assert armed == [pytest.approx(30 + 4.5, abs=0.2), pytest.approx(85 + 4.5, abs=0.2)]
    (extended,) = life.told("drain.extended")
    assert (extended["more_s"], extended["left_s"]) == (60.0, pytest.approx(85, abs=0.5))
    (incident,) = world.incidents("operator_extend")
    assert incident["detail"] == "ann: nearly done (1m more)"


async def test_the_ops_lane_has_the_new_time_too(world: World, svc: Service):
    """A drain that already waits for its last ops request waits until the new deadline."""
    doors = Doors()

    @svc.ops
    async def ask(ctx: Context) -> str:
        await doors.pass_("ask")
        return "answered"

    life = await world.start(svc, ops_quiet_timeout_s=60.0)
    client = await world.client(svc)
    asking = asyncio.create_task(client.prepare(timeout=100).call(ask))
    await doors.wait(1)
    await world.verb(life, "drain", timeout="10s")
    await asyncio.sleep(5)
    await world.verb(life, "extend", more="30s")
    await asyncio.sleep(20)
    doors.open("ask")

    assert await asking == "answered"
    assert (await life.wait_end()).exit_code == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("0", "a deadline only moves later; write --by 5m"),
        ("soon", "not a duration"),
        ("31s", r"kill_after = 1m leaves 30s more at most: --by 30s"),
    ],
)
async def test_what_cannot_be_given_is_refused_with_what_can(
    world: World, svc: Service, more: str, said: str
):
    """The whole drain, not its deadline alone, stays below `kill_after`, which counts from the
    order.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc, kill_after_s=60.0)  # the hard limit is 29 s
    await (await world.client(svc)).cast(work)
    await doors.wait(1)
    await world.verb(life, "drain")
    await asyncio.sleep(10)
    with pytest.raises(GracekitError, match=said):
        await world.verb(life, "extend", more=more)
    answer = await world.verb(life, "extend", more="30s")
    with pytest.raises(GracekitError, match="kill_after = 1m leaves no more"):
        await world.verb(life, "extend", more="1s")
    doors.open("work")
    await life.wait_end()

    assert answer["drain_left_s"] == pytest.approx(45, abs=0.5)
    assert [fields["more_s"] for fields in life.told("drain.extended")] == [30.0]


async def test_only_a_drain_by_command_is_extended_and_only_while_it_waits(
    world: World, svc: Service
):
    """Refused are a service that serves, a drain that a signal asked for or made final, and a drain
    that already hands over.
    """
    doors, cut = Doors(), asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        try:
            await doors.pass_("work")
        except asyncio.CancelledError:
            cut.set()
            await asyncio.sleep(1)
            raise

    life = await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(GracekitError, match="is serving, and no drain is under way"):
        await world.verb(life, "extend", more="5m")
    with pytest.raises(TypeError, match="needs more, a duration"):
        await world.verb(life, "extend")
    await client.cast(work)
    await doors.wait(1)
    await world.verb(life, "drain", timeout="1h")
    life.ask_to_stop()
    await life.hears("intake.closed")
    with pytest.raises(GracekitError, match="the drain is final: signal test asked for it"):
        await world.verb(life, "extend", more="5m")
    await life.wait_end()

    life = await world.start(svc)
    cut.clear()
    await client.cast(work)
    await doors.wait(2)
    await world.verb(life, "drain", timeout="5s")
    await cut.wait()
    with pytest.raises(GracekitError, match="waits for nothing any more"):
        life.runtime.wired.coordinator.extend(60.0)
    await life.wait_end()


async def test_a_second_drain_changes_nothing(world: World, svc: Service):
    """The first deadline stands, whatever the second asks for. Only the first is an incident."""
    life, doors = await start_with_work(world, svc)
    life.faults.delay_s = 0.5
    life.plan(Point.STOP_INTENT, Fault.DELAY)
    life.ask_to_stop(source="operator", final=False)
    for _ in range(2):  # before its first step has ended, and after it
        assert (await world.verb(life, "drain", timeout="5m"))["phase"] == "draining"
        assert (await world.verb(life, "drain", by="ann"))["phase"] == "draining"
        await asyncio.sleep(1)
    status = await world.verb(life, "status")
    doors.open("work")
    await life.wait_end()

    assert status["drain_timeout_s"] == 25
    assert world.incidents("operator_drain") == []


async def test_a_signal_takes_an_extension_back(world: World, svc: Service):
    """The sender waits for `drain_timeout`, whatever a command was granted before."""
    life, _ = await start_with_work(world, svc)
    await world.verb(life, "drain")
    await world.verb(life, "extend", more="1h")
    await asyncio.sleep(600)
    life.ask_to_stop()
    asked_at = now()
    await life.wait_end()

    assert now() - asked_at == pytest.approx(25, abs=0.5)


async def test_systemd_is_asked_for_time_up_to_the_new_hard_limit(
    world: World, svc: Service, systemd: Systemd
):
    """The status line is updated, and progress asks for time also after the old hard limit."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    systemd.listen()
    life = await world.start(svc)
    client = await world.client(svc)
    for n in range(2):
        await client.cast(work, n=n)
    await doors.wait(2)
    await world.verb(life, "drain")
    await world.verb(life, "extend", more="1m")
    await asyncio.sleep(50)
    doors.open(0)
    await asyncio.sleep(2)

    assert systemd.told[-1][1].startswith("STATUS=draining: 1 running")
    assert any("EXTEND_TIMEOUT_USEC=15000000" in text for _, text in systemd.told[-2:])
    doors.open(1)
    assert (await life.wait_end()).exit_code == 0
