"""A Runtime inside a larger program: stops that come early, and what the program may ask."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gracekit import Context, DrainReport, GracekitError, Runtime, Service, ServiceState, Settings
from gracekit.errors import ConfigError, DeclarationError
from gracekit.rpc.memory import MemoryBroker
from gracekit.runtime.process_life import COLLECT_AFTER, calm_collector
from gracekit.signals import STOP_SIGNALS
from tests.service.kit import World

pytestmark = pytest.mark.looptime


def embedded(svc: Service) -> Runtime:
    """A Runtime in memory, not open yet."""
    settings = Settings(transport_url="memory://", store_url="memory://", host="h")
    return Runtime(svc, settings, broker=MemoryBroker())


def test_a_printed_report_says_first_what_the_program_must_do():
    """The exit code for a failure is not shown where nothing failed."""
    good, bad = DrainReport(), DrainReport(failure="the store broke", hooks_left=1)

    assert repr(good).startswith("DrainReport(exit_code=0, must_die=False, ")
    assert "failed_as" not in repr(good)
    assert repr(bad).startswith("DrainReport(exit_code=70, must_die=True, ")
    assert "failure='the store broke', failed_as=<ExitCode.INTERNAL: 70>" in repr(bad)


# -- stops that come early -------------------------------------------------------------------


async def test_a_stop_asked_for_before_the_start_is_honoured(world: World, svc: Service):
    """The request is kept: the service opens, starts nothing, and ends in order, on record."""
    hooks = []

    @svc.on_start
    async def start() -> None:
        hooks.append("start")

    @svc.on_stop
    async def stop() -> None:
        hooks.append("stop")

    life = world.life(svc)

    life.runtime.request_stop(reason="the program was told to stop")
    await life.start()
    report = await life.wait_end()

    assert report.exit_code == 0
    assert "service.serving" not in life.names()
    assert hooks == ["stop"]
    (row,) = world.rows("SELECT stop_source, stop_by, stop_reason, exit_code FROM run")
    assert tuple(row.values()) == ("user", "program", "the program was told to stop", 0)


async def test_a_stop_asked_for_while_it_opens_is_honoured(world: World, svc: Service):
    """A handler of the program's own may ask, and wait for the end, at any moment of the start."""
    life = world.life(svc)
    opening = world.spawn_as(life, life.runtime.__aenter__())
    await asyncio.sleep(0)
    assert life.runtime.wired is None

    life.runtime.request_stop()
    report = await world.run_as(life, life.runtime.serve())
    await opening
    life.end()

    assert report.exit_code == 0
    assert "service.serving" not in life.names()


async def test_the_first_stop_stands_also_before_the_start(world: World, svc: Service):
    """Early requests are honoured in the order in which they came."""
    life = world.life(svc)

    life.runtime.request_stop(by="first")
    life.runtime.request_stop(by="second")
    await life.start()
    await life.wait_end()

    assert [row["stop_by"] for row in world.rows("SELECT stop_by FROM run")] == ["first"]


async def test_an_early_stop_has_its_whole_time(world: World, svc: Service):
    """Its deadline counts from the opening: a stop asked for long before is not already over."""
    life = world.life(svc, signals=True)

    life.runtime.request_stop()
    await asyncio.sleep(3600)
    await life.start()
    report = await life.wait_end()

    assert report.exit_code == 0
    assert life.process.alarms[0] == pytest.approx(29.5, abs=0.2)


async def test_a_stop_during_on_start_ends_an_embedded_start(svc: Service):
    """The hook is cancelled, the block is entered without service, and its end is in order."""
    entered, cancelled = asyncio.Event(), []
    runtime = embedded(svc)

    @svc.on_start
    async def hangs() -> None:
        entered.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def stop() -> None:
        await entered.wait()
        runtime.request_stop()

    stopping = asyncio.create_task(stop())
    async with runtime:
        assert runtime.state is ServiceState.STARTING
        report = await runtime.serve()
    await stopping

    assert cancelled == [1]
    assert (report.exit_code, runtime.state) == (0, ServiceState.STOPPED)


async def test_a_start_that_is_cancelled_is_undone(world: World, svc: Service):
    """Whoever cancels `async with` in the middle of the start finds nothing left open."""
    entered = asyncio.Event()

    @svc.on_start
    async def hangs() -> None:
        entered.set()
        await asyncio.sleep(3600)

    life = world.life(svc)
    starting = world.spawn_as(life, life.runtime.__aenter__())
    await entered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    life.end()

    (row,) = world.rows("SELECT exit_code, stop_source FROM run")
    assert tuple(row.values()) == (70, "error")


async def test_an_opening_that_is_cancelled_leaves_no_run_that_seems_to_begin(
    world: World, svc: Service
):
    """The commit that writes the run down may land all the same: its end is on record then."""
    await (await world.start(svc)).drain()
    mine = "SELECT * FROM run WHERE instance = 'one'"
    for turns in range(40):
        life = world.life(svc, instance="one")
        opening = world.spawn_as(life, life.runtime.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            break
        for row in world.rows(mine):
            assert (row["phase"], row["exit_code"]) == ("stopped", 70)
    assert world.rows(mine), "no cancellation met the commit"


async def test_a_start_that_cancels_itself_has_failed(svc: Service):
    """A hook that raises CancelledError is no stop: the error says so, and nobody waits for
    ever.
    """

    @svc.on_start
    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(GracekitError, match="an on_start hook raised CancelledError"):
        async with embedded(svc):
            pass


async def test_serve_before_open_says_what_to_do(svc: Service):
    """Nothing would ever serve: the error names the block that opens."""
    with pytest.raises(GracekitError, match=r"is not open: .*async with runtime"):
        await embedded(svc).serve()


async def test_serve_of_a_runtime_that_did_not_open_ends(world: World, svc: Service):
    """Who waits for the end of a service whose opening fails is told, and not left waiting."""
    await world.start(svc, instance="one")
    life = world.life(svc, instance="one")
    opening = world.spawn_as(life, life.runtime.open())
    await asyncio.sleep(0)
    serving = world.spawn_as(life, life.runtime.serve())
    opening.cancel()

    with pytest.raises(GracekitError, match="did not open"):
        await serving
    life.end()


async def test_a_drain_goes_on_when_who_waits_for_it_is_cancelled(svc: Service):
    """`serve()` with a time limit gives up waiting, not the drain; the block's end waits for it."""
    runtime, ended = embedded(svc), []

    @svc.periodic(every=1)
    async def job(ctx: Context) -> None:
        runtime.request_stop()
        await asyncio.sleep(5)
        ended.append(1)

    async with runtime:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(runtime.serve(), 3)
        assert runtime.state is ServiceState.DRAINING

    assert ended == [1]
    assert (await runtime.serve()).exit_code == 0


# -- signals ---------------------------------------------------------------------------------


async def test_a_runtime_drains_when_it_is_asked_to_though_nobody_awaits_it(svc: Service):
    """`request_stop` is enough; the report is there for whoever looks later, in or out of the
    block.
    """
    runtime = embedded(svc)

    async with runtime:
        runtime.request_stop(reason="enough")
        async with asyncio.timeout(10):
            while runtime.report is None:
                await asyncio.sleep(0.1)
        assert runtime.state is ServiceState.STOPPED
    assert runtime.report.exit_code == 0
    assert (await runtime.serve()) is runtime.report


async def test_an_opening_that_fails_leaves_the_handlers_as_they_were(tmp_path: Path):
    """A store that cannot be opened is no reason to keep the program's signals."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    file = tmp_path / "file"
    file.touch()
    settings = Settings(transport_url="memory://", store_url=f"sqlite:///{file}/store.db", host="h")

    with pytest.raises(ConfigError):
        async with Runtime(Service("s"), settings, signals=True, broker=MemoryBroker()):
            pass

    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_runtime_needs_the_loop_of_asyncio(tmp_path: Path, svc: Service):
    """Under trio nothing of it could work: it says so before anything is made."""
    store, queue = f"sqlite:///{tmp_path}/s.db", f"sqlite:///{tmp_path}/q.db"
    opening = Runtime(svc, Settings(store_url=store, transport_url=queue, host="h")).open()

    with pytest.raises(ConfigError, match=r"no event loop of asyncio runs here.*trio"):
        opening.send(None)
    assert list(tmp_path.iterdir()) == []


def test_signals_are_refused_outside_of_the_main_thread(svc: Service):
    """Only the main thread can own them: the error says so before anything is opened."""
    settings = Settings(transport_url="memory://", store_url="memory://", host="h")

    async def embed() -> None:
        async with Runtime(svc, settings, signals=True, broker=MemoryBroker()):
            pass

    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(DeclarationError, match="signals reach the main thread only"),
    ):
        pool.submit(asyncio.run, embed()).result()


async def test_signals_are_refused_to_a_second_runtime_while_the_first_has_them(svc: Service):
    """SIGTERM would drain the later one only; the first goes on and drains by it."""
    settings = Settings(transport_url="memory://", store_url="memory://", host="h")

    async with Runtime(svc, settings, signals=True, broker=MemoryBroker()) as first:
        second = Runtime(Service("other"), settings, signals=True, broker=MemoryBroker())
        with pytest.raises(DeclarationError, match="another Runtime of this process"):
            await second.open()
        os.kill(os.getpid(), signal.SIGTERM)
        report = await first.serve()

    assert report.exit_code == 0
    async with Runtime(Service("next"), settings, signals=True, broker=MemoryBroker()) as third:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await third.serve()).exit_code == 0


# -- who asked -------------------------------------------------------------------------------


async def test_an_unknown_source_of_a_stop_is_refused_with_a_hint(svc: Service):
    """The record tells stops apart by source, so a misspelt one must not get there."""
    runtime = embedded(svc)

    with pytest.raises(ConfigError, match=r"source='operater'.*did you mean operator\?"):
        runtime.request_stop(source="operater")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"source=5 is none of signal"):
        runtime.request_stop(source=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"reason=7 is no text"):
        runtime.request_stop(reason=7)  # type: ignore[arg-type]

    async with runtime:
        assert not runtime.wired.coordinator.stop_requested


# -- what the program may ask ----------------------------------------------------------------


async def test_a_runtime_tells_its_state(svc: Service):
    """STARTING before, SERVING inside, DRAINING while it waits, STOPPED after."""
    seen = []
    runtime = embedded(svc)

    @svc.periodic(every=1)
    async def job(ctx: Context) -> None:
        runtime.request_stop()
        await asyncio.sleep(1)
        seen.append(runtime.state)

    seen.append(runtime.state)
    async with runtime:
        seen.append(runtime.state)
        await runtime.serve()

    states = (ServiceState.STARTING, ServiceState.SERVING, ServiceState.DRAINING)
    assert (*seen, runtime.state) == (*states, ServiceState.STOPPED)


# -- the collector ---------------------------------------------------------------------------


async def test_only_a_process_of_our_own_has_its_collector_calmed(collector, svc: Service):
    """The thresholds are the whole program's: what is around an embedded Runtime has its say."""
    async with embedded(svc):
        assert gc.get_threshold() == (700, 10, 10)

    calm_collector()
    assert gc.get_threshold() == COLLECT_AFTER

    gc.set_threshold(100_000, 3, 3)  # by who knows the program better
    calm_collector()
    assert gc.get_threshold() == (100_000, 3, 3)


@pytest.fixture
def collector() -> Iterator[None]:
    """Set as Python sets it, and in the end as it was."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
