"""Replies on their way, and the stop of who sends them."""

from __future__ import annotations

import asyncio
from typing import Any

from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.request.answers import Answers
from gracekit.telemetry import Telemetry
from gracekit.tracker.journal import Address

ADDRESS = Address(queue="reply_1", msg_id="m", expires_at=None)


class Slow:
    """A transport that takes its time to break off."""

    def __init__(self) -> None:
        self.broken_off = asyncio.Event()
        self.go_on = asyncio.Event()

    async def publish(self, *_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.broken_off.set()
            await self.go_on.wait()


async def test_a_stop_may_come_while_a_try_breaks_off(looptime):
    """
    Its time was up a moment ago, and a rollback takes another: the stop is none of its business.
    """
    slow = Slow()
    answers = Answers(slow, None, Process(), Telemetry(), Clock())
    trying = asyncio.create_task(answers.beat(ADDRESS, within_s=60))
    await slow.broken_off.wait()
    answers.stop()
    slow.go_on.set()

    assert not await trying
