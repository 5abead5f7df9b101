"""What the tests of recovery begin with: a method that was started once and cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import (
    Context,
    Retry,
    Service,
)
from tests.service.kit import Life, World, now

BOTH = pytest.mark.parametrize("how", ["crash", "drain"])


class Job:
    """One method, started once and cut: what every test here begins with.

    The first attempt sleeps for ever; later ones return their number.
    """

    def __init__(self, world: World, svc: Service, **options: Any) -> None:
        self.world = world
        self.svc = svc
        self.attempts: list[tuple[int, float]] = []
        self.tokens: list[int | None] = []
        self.asked: list[float] = []
        self.told: list[str] = []
        self.probe_answers: Callable[[int], Any] = lambda n: Retry()
        self._begun = asyncio.Event()

        @svc.rpc(resource="vm", **options)
        async def work(ctx: Context, vm: str) -> Any:
            self.attempts.append((ctx.attempt, now()))
            self.tokens.append(ctx.fence)
            self._begun.set()
            if ctx.attempt == 1:
                await asyncio.sleep(100_000)
            return ctx.attempt

        self.work = work

    def with_probe(self) -> None:
        @self.work.probe
        async def probe(ctx: Context, vm: str) -> Any:
            self.asked.append(now())
            answer = self.probe_answers(len(self.asked))
            return await answer if asyncio.iscoroutine(answer) else answer

    def with_errored(self) -> None:
        @self.work.errored
        async def errored(ctx: Context, vm: str, reason: str) -> None:
            self.told.append(f"{vm}: {reason}")

    async def begin(self, **settings: Any) -> tuple[Life, asyncio.Task[int]]:
        """A life in which the first attempt runs, and the call that waits for it."""
        life = await self.world.start(self.svc, **settings)
        client = await self.world.client(self.svc)
        view = client.prepare(request_id="w", timeout=50_000)
        call = asyncio.create_task(view.call(self.work, vm="v"))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        await self._begun.wait()
        return life, call

    def row(self) -> dict[str, Any]:
        return self.world.task("w")


async def end(life: Life, how: str) -> None:
    await (life.crash() if how == "crash" else life.drain())
