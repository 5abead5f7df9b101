"""Loops over ctx.steps(): one in each task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from gracekit import Context, Service
from gracekit.errors import (
    DeclarationError,
    UnserialisableError,
)
from tests.service.kit import World

pytestmark = pytest.mark.looptime

NAMES = ("ada", "bob", "cyd", "dan", "eve")


def pairs_behind(cursor: str | None) -> Iterator[tuple[str, str]]:
    return ((name, name.upper()) for name in NAMES if cursor is None or name > cursor)


def names_behind(cursor: str | None) -> list[str]:
    return [name for name, _ in pairs_behind(cursor)]


async def pairs_read_one_by_one(cursor: str | None) -> AsyncIterator[tuple[str, str]]:
    for pair in pairs_behind(cursor):
        await asyncio.sleep(0.1)
        yield pair


async def pairs_read_at_once(cursor: str | None) -> list[tuple[str, str]]:
    await asyncio.sleep(0.1)
    return list(pairs_behind(cursor))


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
async def test_a_second_loop_over_steps_is_refused(world: World, svc: Service, at_once: bool):
    """A task has one cursor: a second loop would pass its items over, without a word."""
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
    """The loop would begin behind that cursor, as if it were an index."""

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
    """It goes on behind its last safe point."""
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


@pytest.mark.parametrize(
    "source", [pairs_behind, names_behind, pairs_read_one_by_one, pairs_read_at_once]
)
async def test_a_callable_is_asked_for_what_is_behind_the_cursor(
    world: World, svc: Service, source: Any
):
    """After a stop at a safe point no item comes twice, and none is left out."""
    done: list[str] = []
    second = asyncio.Event()

    @svc.rpc
    async def copy(ctx: Context) -> int:
        async for item in ctx.steps(source):
            done.append(item.lower())
            if item.lower() == "bob":
                second.set()
            await asyncio.sleep(1)
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="c", timeout=60).call(copy))
    await second.wait()
    await life.drain()

    assert (world.task("c")["cut"], world.task("c")["cursor"]) == ("safe_point", '"bob"')
    await world.start(svc)
    assert await call == 2
    assert done == list(NAMES)


@pytest.mark.parametrize("source", [pairs_behind, names_behind])
async def test_a_plain_handler_loops_over_a_callable_too(world: World, svc: Service, source: Any):
    """In its thread it gets the same items."""

    @svc.rpc
    def copy(ctx: Context) -> list[str]:
        return [item.lower() for item in ctx.steps(source)]

    await world.start(svc)
    client = await world.client(svc)

    assert await client.prepare(timeout=1e6).call(copy) == list(NAMES)


@pytest.mark.parametrize("source", [iter(NAMES), (name for name in NAMES), "ada", 5])
async def test_what_could_not_be_resumed_is_refused(world: World, svc: Service, source: Any):
    """The error says what to pass in its place."""

    @svc.rpc
    async def copy(ctx: Context) -> str:
        with pytest.raises(TypeError, match="pass the function that makes it"):
            ctx.steps(source)
        return "refused"

    await world.start(svc)
    client = await world.client(svc)

    assert await client.call(copy) == "refused"


@pytest.mark.parametrize(
    "data", ["x" * 300_000, [[n] for n in range(50_000)]], ids=["text", "lists"]
)
async def test_a_large_cursor_is_refused_and_stores_nothing(world: World, svc: Service, data: Any):
    """It would be written at each safe point."""

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> None:
        await ctx.safe_point("small")
        await ctx.safe_point(data)

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(UnserialisableError, match=r"^cursor has more than"):
        await client.prepare(request_id="c").call(work)

    assert world.task("c")["cursor"] == '"small"'
