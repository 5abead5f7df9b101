"""Periodic jobs: what they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import Context, Service
from gracekit.errors import DeclarationError
from tests.service.kit import World

pytestmark = pytest.mark.looptime


def asks(what: str) -> Callable[[Context], Any]:
    return lambda ctx: getattr(ctx, what)


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("request_id", asks("request_id")),
        ("attempt", asks("attempt")),
        ("hold()", lambda ctx: ctx.hold("migration", "vm-1", at_most="1m")),
    ],
)
async def test_a_job_that_asks_for_a_request_is_told_that_it_has_none(
    world: World, svc: Service, what: str, ask: Callable[[Context], Any]
):
    """
    The error names the job, what it has asked for, and what to do instead.
    """
    raised: list[DeclarationError] = []

    @svc.periodic(every="10s")
    async def sweep(ctx: Context) -> None:
        try:
            if (answer := ask(ctx)) is not None:
                await answer
        except DeclarationError as error:
            raised.append(error)

    life = await world.start(svc)
    await asyncio.sleep(11)

    assert str(raised[0]).startswith(
        f"sweep() is a periodic job and answers no request, so it has no ctx.{what}: "
    )
    await life.drain()


async def test_a_job_has_what_any_work_has(world: World, svc: Service):
    """
    Its fence, its time in a drain, a lease of its own; the mapping of the caller is empty.
    """
    seen: list[Any] = []

    @svc.periodic(every="10s", singleton=True)
    async def sweep(ctx: Context) -> None:
        async with ctx.lease("vm", "1") as guard:
            seen.extend([ctx.fence, guard.token, ctx.method, dict(ctx), ctx.deadline])
        seen.extend([ctx.draining, ctx.cancelled, Context.current() is ctx])

    life = await world.start(svc)
    await asyncio.sleep(11)

    fence, token, *rest = seen
    assert fence is not None
    assert token is not None
    assert rest == ["sweep", {}, None, False, False, True]
    await life.drain()
