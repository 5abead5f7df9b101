"""Work in the background: it begins again after each failure, and ends when it is told to."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from gracekit import background
from gracekit.clock import Clock
from gracekit.telemetry.telemetry import Telemetry

pytestmark = pytest.mark.looptime


class SteadyClock(Clock):
    def jitter(self, seconds: float) -> float:
        return seconds


class Site:
    """Work that does what it is told, in turn, and then goes on for ever."""

    def __init__(self, *ends: BaseException | float) -> None:
        self.ends = list(ends)
        self.began_at: list[float] = []
        self.heard: list[dict[str, Any]] = []
        self.telemetry = Telemetry()
        self.telemetry.subscribe(lambda event, fields: self.heard.append({"": event, **fields}))

    async def work(self) -> None:
        self.began_at.append(asyncio.get_running_loop().time())
        if not self.ends:
            await asyncio.Event().wait()
        end = self.ends.pop(0)
        await asyncio.sleep(end if isinstance(end, float) else 0.0)
        raise end if isinstance(end, BaseException) else RuntimeError("after a while")

    def start(self) -> asyncio.Task[None]:
        return background.start(
            self.work, "poll of x", telemetry=self.telemetry, clock=SteadyClock()
        )


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def test_work_that_fails_begins_again_ever_later_and_says_why(caplog):
    """Each failure is logged with its traceback; the pause doubles, up to its longest."""
    site = Site(*(OSError(24, "Too many open files") for _ in range(9)))
    with caplog.at_level(logging.ERROR, "gracekit"):
        task = site.start()
        await asyncio.sleep(100)

    pauses = [round(b - a, 3) for a, b in zip(site.began_at, site.began_at[1:], strict=False)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert [told[""] for told in site.heard] == ["background.failed"] * 9
    assert site.heard[0]["work"] == "poll of x"
    assert "Too many open files" in site.heard[0]["error"]
    assert "in work\n" in caplog.text
    await end(task)


async def test_work_that_went_on_for_a_while_begins_again_soon():
    """A failure once an hour is not one that gets worse."""
    site = Site(OSError(), OSError(), OSError(), 3600.0)
    task = site.start()
    await asyncio.sleep(4000)

    assert site.began_at[-1] - site.began_at[-2] == pytest.approx(3600.1)
    await end(task)


async def test_a_cancellation_that_nobody_sent_does_not_end_it():
    """A library raises CancelledError for a lost connection: that is a failure like any other."""
    site = Site(asyncio.CancelledError())
    task = site.start()
    await asyncio.sleep(1)

    assert len(site.began_at) == 2
    await end(task)


@pytest.mark.parametrize("raised", [None, RuntimeError("while closing")])
async def test_a_cancellation_ends_it_whatever_is_raised_in_its_place(raised):
    """Who cancels it is not answered by another beginning."""
    began = 0

    async def work() -> None:
        nonlocal began
        began += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if raised is not None:
                raise raised from None
            raise

    telemetry = Telemetry()
    task = background.start(work, "x", telemetry=telemetry, clock=SteadyClock())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})

    assert (task.cancelled(), began) == (True, 1)


async def test_work_that_returns_is_over():
    """What ends by itself is not begun again."""
    site = Site()

    async def work() -> None:
        site.began_at.append(0.0)

    await background.start(work, "x", telemetry=site.telemetry, clock=SteadyClock())

    assert (len(site.began_at), site.heard) == (1, [])
