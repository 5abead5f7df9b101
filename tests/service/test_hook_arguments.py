"""What probes and `errored` hooks get as arguments when the request has left some out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, Done, Fail, Service, ops_method, rpc_method
from gracekit.errors import DeclarationError
from tests.service.kit import World

pytestmark = pytest.mark.looptime


async def cut_once(world: World, svc: Service, **args: Any) -> None:
    """Send `create`, kill its process while it runs, and let the next start settle it."""
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast("create", **args)
    await life.hears("task.started")
    await life.crash()
    await world.start(svc)
    await world.until(lambda: world.state("w") in {"succeeded", "failed", "errored"})


async def test_a_probe_gets_the_defaults_of_its_method(world: World, svc: Service):
    """A probe that is written with the same names, and no defaults, sees what the handler has
    seen.
    """
    seen = []

    @svc.rpc(on_interrupt="probe", settle=0)
    async def create(ctx: Context, vm: str, size: int = 10, tags: tuple[str, ...] = ()) -> None:
        await asyncio.sleep(100_000)

    @create.probe
    async def _(ctx: Context, vm: str, size: int, tags: tuple[str, ...]) -> Done:
        seen.append((vm, size, tags))
        return Done(None)

    await cut_once(world, svc, vm="v1")

    assert (world.state("w"), seen) == ("succeeded", [("v1", 10, ())])


async def test_a_value_that_was_sent_and_a_default_of_the_hook_go_first(world: World, svc: Service):
    """A hook may say by a default of its own what it gets for an argument that was left out."""
    seen = []

    @svc.rpc(on_interrupt="probe", settle=0)
    async def create(ctx: Context, vm: str, size: int = 10, zone: str = "a") -> None:
        await asyncio.sleep(100_000)

    @create.probe
    async def _(ctx: Context, vm: str, size: int, zone: str | None = None) -> Fail:
        seen.append((vm, size, zone))
        return Fail("lost")

    await cut_once(world, svc, vm="v1", size=3)

    assert (world.state("w"), seen) == ("failed", [("v1", 3, None)])


async def test_an_errored_hook_with_any_arguments_gets_the_defaults_too(world: World, svc: Service):
    """Also the hook of a class, and one that takes all arguments by `**`."""
    seen = []

    class Volumes:
        @rpc_method
        async def create(self, ctx: Context, vm: str, size: int = 10) -> None:
            await asyncio.sleep(100_000)

        @create.errored
        async def told(self, ctx: Context, reason: str, **args: Any) -> None:
            seen.append((reason, args))

    svc.include(Volumes())
    await cut_once(world, svc, vm="v1")
    await world.until(lambda: bool(seen))

    assert seen == [("interrupted", {"vm": "v1", "size": 10})]


def test_a_hook_with_an_argument_that_its_method_lacks_is_refused(svc: Service):
    """Nobody would give it a value, so each call of the hook would fail."""

    @svc.rpc(on_interrupt="probe")
    async def create(ctx: Context, vm: str) -> None: ...

    with pytest.raises(
        DeclarationError, match=r"the probe hook of create needs 'host', .* has no such argument"
    ):

        @create.probe
        async def _(ctx: Context, vm: str, host: str) -> Done:
            return Done(host)

    class Volumes:
        @ops_method
        async def resize(self, ctx: Context, vm: str) -> None: ...

        @resize.errored  # what has a default, and `reason`, are no such arguments
        async def told(self, ctx: Context, vm: str, reason: str, retry: bool = False) -> None: ...

    svc.include(Volumes())
