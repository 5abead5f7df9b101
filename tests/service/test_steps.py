"""Loops over ctx.steps(): one in each task."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.errors import (
    DeclarationError,
)
from tests.service.kit import World

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
async def test_a_second_loop_over_steps_is_refused(world: World, svc: Service, at_once: bool):
    """
    A task has one cursor: a second loop would pass its items over, without a word.
    """
    done: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> None:
        async def steps() -> None:
            async for item in ctx.steps(range(3)):
                await asyncio.sleep(1)
                done.append(item)

        if at_once:
            await asyncio.gather(steps(), steps())
        else:
            await steps()
            await steps()

    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(DeclarationError, match=r"two loops over ctx\.steps"):
        await client.prepare(timeout=60).call(copy)


async def test_a_safe_point_by_hand_before_a_loop_over_a_sequence_is_refused(
    world: World, svc: Service
):
    """
    The loop would begin behind that cursor, as if it were an index.
    """

    @svc.rpc
    async def copy(ctx: Context) -> None:
        await ctx.safe_point(1)
        async for _ in ctx.steps(range(3)):
            await asyncio.sleep(1)

    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(DeclarationError, match=r"give ctx\.steps\(\) a callable"):
        await client.prepare(timeout=60).call(copy)


async def test_a_loop_over_steps_that_was_left_may_be_begun_again(world: World, svc: Service):
    """
    It goes on behind its last safe point.
    """
    done: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> None:
        for n in range(2):
            async for item in ctx.steps(range(3)):
                if item == 1 and n == 0:
                    break
                done.append(item)

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(timeout=60).call(copy)

    assert done == [0, 1, 2]
