"""Whether a service is ready: one that cannot read its queues is not, and says why."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from gracekit import Context, Service, Settings
from gracekit.journal.retention import Retention
from gracekit.periodic import PeriodicJobs
from gracekit.process import Point
from gracekit.recovery.reconciler import Reconciler
from gracekit.runs.members import Members
from tests.service.kit import Doors, Fault, Life, Systemd, World, now

pytestmark = pytest.mark.looptime


@pytest.fixture
def doors() -> Doors:
    return Doors()


@pytest.fixture
def svc(doors: Doors) -> Service:
    made = Service("compute")

    @made.rpc
    async def work(ctx: Context) -> str:
        await doors.pass_("work")
        return "done"

    return made


async def state(world: World, svc: Service) -> Any:
    client = await world.client(svc)
    return await client.prepare(namespace="gracekit", ops=True, timeout=5).call("state")


async def pause_intake(world: World, svc: Service, doors: Doors) -> Life:
    """A service that has paused for want of a place, and gets one when the door is opened."""
    life = await world.start(svc, max_accepted=1)
    client = await world.client(svc)
    for _ in range(2):
        await client.cast("work")
    await doors.wait(1)
    await asyncio.sleep(31)
    return life


async def test_a_service_that_cannot_read_for_five_seconds_is_not_ready_and_says_why(
    world: World, svc: Service, doors: Doors
):
    """Its state tells it, its operators are told once; once it reads again it is ready."""
    life = await pause_intake(world, svc, doors)
    life.plan("consume", Fault.REFUSED, times=40)
    doors.open("work")
    await asyncio.sleep(4)
    assert (await state(world, svc))["ready"]
    assert life.runtime.not_ready is None

    await life.hears("service.deaf")

    told = await state(world, svc)
    assert (told["state"], told["ready"]) == ("serving", False)
    why = "requests cannot be read: the transport's file stayed locked; nothing was done"
    assert life.runtime.not_ready == why
    assert (await world.verb(life, "status"))["not_ready"] == why

    await life.hears("service.hears")
    assert life.runtime.not_ready is None
    assert (await state(world, svc))["ready"]
    assert life.names().count("service.deaf") == 1


async def test_a_lane_without_places_is_ready(world: World, svc: Service, doors: Doors):
    """Pausing for want of places is no failure to read."""
    life = await pause_intake(world, svc, doors)
    await asyncio.sleep(60)

    assert life.runtime.not_ready is None
    doors.open("work")


async def test_systemd_s_watchdog_is_fed_while_the_store_is_slow(
    world: World, svc: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It watches the loop, which turns: a disk that hangs for a minute is no reason to be
    killed.
    """
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.setblocking(False)
    systemd.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    life = await world.start(svc)
    life.faults.delay_s = 60.0
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.DELAY)
    client = await world.client(svc)
    await client.cast("work")

    for _ in range(5):
        heard = []
        await asyncio.sleep(10)
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.append(systemd.recv(4096))
        assert b"WATCHDOG=1" in heard
    systemd.close()


async def test_systemd_s_watchdog_is_not_fed_before_the_service_is_ready(
    world: World, svc: Service, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
):
    """The first message sets it off, and a hook that blocks the loop in a start is no reason to be
    killed.
    """
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")

    @svc.on_start
    async def warm_up() -> None:
        await asyncio.sleep(4)

    systemd.listen()
    await world.start(svc)
    await asyncio.sleep(2)

    assert [text for _, text in systemd.told][:2] == ["READY=1\nSTATUS=serving", "WATCHDOG=1"]


async def test_systemd_s_watchdog_is_fed_until_the_end_of_a_drain(
    world: World, svc: Service, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
):
    """A slow `on_stop` and a disk that hangs in the last steps are no reasons to be killed
    either.
    """
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    systemd.listen()
    world.expects_faults = True

    @svc.on_stop
    async def slow() -> None:
        await asyncio.sleep(4)

    life = await world.start(svc)
    life.faults.delay_s = 60.0
    life.plan(Point.STOP_RECORD, Fault.DELAY)
    began_at = now()

    await life.drain()

    ended_at = now()
    await asyncio.sleep(1)
    assert ended_at - began_at > 4
    assert systemd.longest_gap(since=began_at, until=ended_at) < 2


@pytest.mark.parametrize(
    ("allowed_s", "look_every_s", "every_s"), [(2, 5, 1), (1, 1, 0.5), (0.3, 1, 0.15), (30, 1, 1)]
)
async def test_systemd_s_watchdog_is_fed_at_half_of_its_time_and_at_each_beat(
    world: World,
    svc: Service,
    systemd: Systemd,
    monkeypatch: pytest.MonkeyPatch,
    allowed_s: float,
    look_every_s: float,
    every_s: float,
):
    """The shorter of both, whatever a beat is set to."""
    monkeypatch.setenv("WATCHDOG_USEC", str(int(allowed_s * 1_000_000)))
    systemd.listen()
    await world.start(svc, look_every_s=look_every_s)
    began_at = now()
    await asyncio.sleep(30)

    longest = systemd.longest_gap(since=began_at, until=now())
    assert longest == pytest.approx(every_s, abs=2 * systemd.EVERY_S)


@pytest.mark.parametrize("allowed_s", [0.15, 0.000001])
async def test_a_watchdog_that_allows_too_little_time_is_fed_ten_times_a_second(
    world: World,
    svc: Service,
    systemd: Systemd,
    monkeypatch: pytest.MonkeyPatch,
    allowed_s: float,
):
    """And no more often; `gracekit doctor` says that it may kill a healthy service."""
    monkeypatch.setenv("WATCHDOG_USEC", str(round(allowed_s * 1_000_000)))
    systemd.listen()
    await world.start(svc)
    began_at = now()
    await asyncio.sleep(5)

    assert systemd.longest_gap(since=began_at, until=now()) < 0.2
    assert len(systemd.texts("WATCHDOG=1")) < 60


async def test_a_long_start_asks_systemd_for_more_time_until_it_is_ready(
    world: World, svc: Service, systemd: Systemd
):
    """Every five seconds, whether the store is slow or a hook; what it waits for is shown."""

    @svc.on_start
    async def warm_up() -> None:
        await asyncio.sleep(12)

    systemd.listen()
    life = world.life(svc)
    life.faults.delay_s = 6
    life.plan(Point.JOIN, Fault.DELAY)
    await life.start()
    await asyncio.sleep(2)

    asked = systemd.texts("EXTEND_TIMEOUT_USEC=15000000")
    shown = ["record", "hooks", "hooks"]
    assert systemd.statuses() == [*(f"starting: {what}" for what in shown), "serving"]
    assert asked == systemd.texts("STATUS=starting")
    assert systemd.told[-1][1] == "READY=1\nSTATUS=serving"


async def test_a_start_asks_for_time_long_before_its_progress_would_be_logged(
    world: World, svc: Service, systemd: Systemd
):
    """systemd's own time for a start is 90 seconds, and `progress_every` may be longer."""

    @svc.on_start
    async def warm_up() -> None:
        await asyncio.sleep(52)

    systemd.listen()
    await world.start(svc, progress_every_s=120.0)
    asked_at = [at for at, text in systemd.told if "EXTEND_TIMEOUT_USEC=15000000" in text]

    assert [round(at) for at in asked_at] == list(range(5, 52, 5))


async def test_a_hangup_in_a_start_does_not_say_that_it_is_ready(
    world: World, svc: Service, systemd: Systemd
):
    """systemd would take it for ready, and start units that wait for it."""

    @svc.on_start
    async def warm_up() -> None:
        await asyncio.sleep(2)

    systemd.listen()
    life = world.life(svc, signals=True)
    starting = asyncio.ensure_future(life.start())
    await asyncio.sleep(1)
    assert life.runtime.ground.signals is not None
    life.runtime.ground.signals.came(signal.SIGHUP, now())
    await asyncio.sleep(0.5)
    in_start = systemd.texts("READY=1")
    await starting
    life.runtime.ground.signals.came(signal.SIGHUP, now())
    await asyncio.sleep(0.5)

    assert in_start == []
    assert len(life.told("signal.hint")) == 2
    told = [text.splitlines()[0] for _, text in systemd.told if "STATUS=starting" not in text]
    assert told == ["READY=1", "RELOADING=1", "READY=1"]


async def test_a_reload_that_fails_in_any_way_ends_and_is_logged(
    world: World, svc: Service, systemd: Systemd
):
    """systemd waits for READY after RELOADING; the parser of a settings file may raise anything."""

    def read() -> Settings:
        raise RecursionError("nested too deeply")

    systemd.listen()
    life = await world.start(svc, signals=True)
    life.runtime.ground.live.read = read
    assert life.runtime.ground.signals is not None
    for number in (1, 2):  # the settings are read in a thread, which virtual time does not know
        life.runtime.ground.signals.came(signal.SIGHUP, now())
        await life.hears("service.reload_failed", number)
        await asyncio.sleep(2)

    failed = [told["error"] for told in life.told("service.reload_failed")]
    assert failed == ["RecursionError('nested too deeply')"] * 2
    told = [text.splitlines()[0] for _, text in systemd.told if "RE" in text.splitlines()[0]]
    assert told == ["READY=1", *["RELOADING=1", "READY=1"] * 2]


async def test_a_start_that_is_cut_or_fails_asks_systemd_for_no_more_time(
    world: World, svc: Service, systemd: Systemd
):
    """A stop that comes meanwhile begins a drain, which asks for its own."""

    @svc.on_start
    async def warm_up() -> None:
        await asyncio.sleep(12)
        raise ZeroDivisionError("not warm")

    systemd.listen()
    cut = world.life(svc)
    starting = asyncio.ensure_future(cut.start())
    await asyncio.sleep(7)
    cut.ask_to_stop()
    await starting
    await cut.wait_end()
    await asyncio.sleep(1)
    assert systemd.statuses() == ["starting: hooks", "draining: 0 running"]

    with pytest.raises(ZeroDivisionError):
        await world.life(svc).start()
    failed_at = len(systemd.texts("STATUS=starting"))
    await asyncio.sleep(20)
    assert failed_at == len(systemd.texts("STATUS=starting")) == 3


async def test_a_service_that_starts_or_stops_is_not_ready(
    world: World, svc: Service, doors: Doors
):
    """Ready means that new requests are taken."""
    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast("work")
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("drain.started")

    assert life.runtime.not_ready == "it is draining"
    assert not (await state(world, svc))["ready"]
    doors.open("work")
    await life.wait_end()
    assert life.runtime.not_ready == "it is stopped"


async def test_an_idle_service_writes_next_to_nothing(world: World, svc: Service):
    """Its lock proves that it lives. Its phase is on record at once, and for listings a sign of
    life of the last 15 s.
    """
    life = await world.start(svc)
    await asyncio.sleep(60)
    before = world.disk.total_changes()
    for _ in range(600):
        await asyncio.sleep(1)
        (run,) = world.rows("SELECT beat_at, phase FROM run")
        assert world.clock.wall() - run["beat_at"] <= 16
    written = world.disk.total_changes() - before
    await asyncio.sleep(5)  # the next sign of life is not due within a second
    await life.runtime.wired.coordinator.quiet()
    await asyncio.sleep(1.001)  # a beat

    assert written <= 600 / 15 + 600 / 30 + 5  # signs of life, looks of recovery
    assert world.rows("SELECT phase FROM run") == [{"phase": "quiet"}]


async def test_an_idle_service_wakes_up_once_a_second(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """Its beats, its looks, its passes of recovery and its tidying begin at the same moments."""
    shares = itertools.cycle([0.87, 1.09])
    monkeypatch.setattr(world.clock, "jitter", lambda seconds: seconds * next(shares))
    await world.start(svc)
    await asyncio.sleep(60)
    event_loop, wakes = asyncio.get_running_loop(), set[float]()
    turn = event_loop._run_once

    def noted() -> None:
        turn()
        wakes.add(event_loop.time())

    monkeypatch.setattr(event_loop, "_run_once", noted)
    await asyncio.sleep(300)

    assert 299 <= len(wakes) <= 301


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Members, "beat"),
        (Retention, "abandoned"),
        (Reconciler, "_next_pass"),
        (PeriodicJobs, "_run_told"),
    ],
)
async def test_work_beside_requests_goes_on_after_a_fault(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch, kind: type, step: str
):
    """What nobody foresaw ends one round of it, is logged, and the next round comes."""
    rounds = []
    world.expects_faults = True

    @svc.periodic(every="10s")
    async def refresh(ctx: Context) -> None:
        """Declared so that there is a job."""

    life = await world.start(svc)
    real = getattr(kind, step)

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        rounds.append(step)
        if len(rounds) == 1:
            raise ZeroDivisionError("nobody foresaw this")
        return real(*args, **kwargs)

    monkeypatch.setattr(kind, step, fails_once)
    await asyncio.sleep(200)

    (told,) = life.told("background.failed")
    assert "ZeroDivisionError" in told["error"]
    assert len(rounds) > 2
