"""The hooks of a service: no hook keeps it from starting in order, or from ending."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gracekit import GracekitError, Runtime, Service, Settings
from gracekit.rpc.memory import MemoryBroker
from tests.service.kit import World

pytestmark = pytest.mark.looptime


async def ignore_cancellation() -> None:
    """What a hook does that waits for something in a loop of its own; the end of a test ends it."""
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10_000)


async def test_a_stop_hook_that_raises_a_cancellation_is_called_once(world: World, svc: Service):
    """It cancels a task of its own and awaits it, which raises CancelledError: that is logged."""
    called = []

    @svc.on_stop
    async def stop() -> None:
        called.append("stop")
        mine = asyncio.create_task(asyncio.sleep(3600))
        mine.cancel()
        await mine

    @svc.on_stop
    async def after() -> None:
        called.append("after")

    life = await world.start(svc)
    report = await life.drain()

    assert (report.exit_code, report.must_die) == (0, False)
    assert called == ["stop", "after"]
    assert life.names().count("hook.failed") == 1


async def test_a_stop_hook_that_ignores_its_cancellation_is_left_to_itself(
    world: World, svc: Service
):
    """The drain ends in time, and the next hook is called; the log names the one that went on."""
    called = []
    svc.on_stop(ignore_cancellation)

    @svc.on_stop
    async def after() -> None:
        called.append("after")

    life = await world.start(svc)
    async with asyncio.timeout(life.runtime.settings.hard_limit_s):
        report = await life.drain()

    assert called == ["after"]
    assert (report.hooks_left, report.must_die, report.can_still_act) == (1, True, False)
    (failed,) = life.told("hook.failed")
    assert failed["hook"] == "ignore_cancellation"
    assert "took over" in str(failed["error"])


async def test_a_start_hook_that_ignores_its_cancellation_fails_the_start(
    world: World, svc: Service
):
    """After `start_timeout`, and a moment for its end; what was started before is stopped."""
    svc.on_start(ignore_cancellation)
    life = world.life(svc)

    with pytest.raises(GracekitError, match="GRACEKIT_START_TIMEOUT"):
        async with asyncio.timeout(
            life.runtime.settings.start_timeout_s + life.runtime.settings.hard_limit_s
        ):
            await life.start()

    (failed,) = life.told("service.start_failed")
    assert "GRACEKIT_START_TIMEOUT" in failed["error"]  # a log pipeline sees more than a drain


async def test_a_stop_ends_a_start_whose_hook_ignores_its_cancellation(world: World, svc: Service):
    """The drain does not wait for it, and ends in time."""
    svc.on_start(ignore_cancellation)
    life = world.life(svc)
    starting = asyncio.create_task(life.start())
    await asyncio.sleep(1)

    life.runtime.request_stop(reason="no longer needed")
    async with asyncio.timeout(life.runtime.settings.hard_limit_s):
        await asyncio.wait({starting})
        report = await life.runtime.serve()

    assert (report.hooks_left, report.must_die) == (1, True)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_runtime_is_opened_once(ended: bool):
    """It is one run of its service, open or over: to open it again is refused, and changes
    nothing.
    """
    settings = Settings(transport_url="memory://", store_url="memory://", host="h")
    runtime = Runtime(Service("compute"), settings, broker=MemoryBroker())
    async with runtime:
        if not ended:
            with pytest.raises(GracekitError, match="make another Runtime"):
                await runtime.open()
            assert runtime.not_ready is None
    if ended:
        with pytest.raises(GracekitError, match="make another Runtime"):
            await runtime.open()
    assert runtime.report is not None
    assert runtime.report.exit_code == 0
