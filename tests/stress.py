"""Starts and stops a part many times at once, and cancels some of it: nothing may be left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from typing import Any, Final

from gracekit.parts import Part
from tests.scale import scale

TASKS: Final = 10
LONGEST_S: Final = 120.0
"""Of one last stop."""


async def stress(part: Part, *, seed: int = 0) -> None:
    """Start and stop *part* from ten tasks at once, 50 times each; then stop it for good.

    A third of the steps are cancelled at a random moment. None may raise anything else, and
    afterwards no task and no thread may be left that was not there before.
    """
    draw = random.Random(seed)
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())

    async def start_and_stop() -> None:
        for _ in range(scale(50, 200)):
            await _take(part.start(), draw)
            await _take(part.stop(), draw)

    await asyncio.gather(*(start_and_stop() for _ in range(TASKS)))
    async with asyncio.timeout(LONGEST_S):
        await part.stop()
        await part.stop()
    for _ in range(500):  # what was cancelled ends, if need be by an answer of the broker
        if asyncio.all_tasks() <= tasks:
            break
        await asyncio.sleep(0.01)
    for thread in set(threading.enumerate()) - threads:
        thread.join(5.0)  # it has nothing to do any more, and may wait for the interpreter
    left = [*(asyncio.all_tasks() - tasks), *(set(threading.enumerate()) - threads)]
    assert not left, left


async def _take(step: Coroutine[Any, Any, None], draw: random.Random) -> None:
    """Take one step; perhaps cancel it after a few iterations of the loop."""
    taken = asyncio.ensure_future(step)
    if draw.random() < 1 / 3:
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)
        taken.cancel()
    await asyncio.wait({taken})
    if not taken.cancelled():
        taken.result()
