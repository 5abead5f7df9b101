"""How many functions one ordinary request calls: nobody makes it heavier without deciding it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import FrameType
from typing import Any, Final

import pytest

from gracekit import Context, Service
from tests.docs.pages import ROOT
from tests.service.kit import World

pytestmark = pytest.mark.looptime

PACKAGE: Final = f"{ROOT}/gracekit/"
TIMES: Final = 6

# Calls of gracekit's functions from the client's to the reply, or to the end of the record. A
# change may raise one, and its commit says why; one that lowers one writes the new number here.
CALLS: Final = {
    ("cast", "retry"): 261,
    ("call", "retry"): 357,
    ("cast", "requeue"): 195,
    ("call", "requeue"): 259,
}


@pytest.mark.parametrize(("way", "policy"), CALLS, ids=map(" ".join, CALLS))
async def test_an_ordinary_request_calls_as_many_functions_as_are_recorded(way: str, policy: Any):
    """Each by itself, on memory://, once all that is kept is in place; without the test kit."""
    world, svc = World(), Service("compute")

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context, vm: str) -> str:
        return vm

    await world.start(svc)
    send = getattr(await world.client(svc), way)

    async def calls_of_one() -> Counter[str]:
        called: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            place = code.co_filename.removeprefix(PACKAGE)
            is_ours = place != code.co_filename and not place.startswith("testing/")
            if event == "call" and is_ours and not code.co_name.startswith("<"):
                called[f"{place}: {code.co_qualname}"] += 1

        sys.setprofile(note)
        try:
            await send(work, vm="vm-1")
            await asyncio.sleep(0.1)
        finally:
            sys.setprofile(None)
        return called

    counts = [await calls_of_one() for _ in range(TIMES)]
    least = min(counts, key=Counter.total)  # others may have met a timer

    assert least.total() == CALLS[way, policy], dict(least.most_common())
    await world.close()
