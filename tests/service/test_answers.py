"""Replies on their way, and the stop of who sends them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gracekit import Context, Service
from gracekit.clock import Clock
from gracekit.journal.rows import Address
from gracekit.process import Process
from gracekit.request.answers import Answers, SendResult
from gracekit.request.unjournaled import REMEMBERED, EndedRequests
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.oslo_wire import decode_reply
from gracekit.rpc.transport import Delivery, Queue, QueueKind, reply_queue, shared_queue
from gracekit.telemetry.telemetry import Telemetry
from tests.rpc.kit import Inbox
from tests.service.kit import World

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
    """Its time was up a moment ago, and a rollback takes another: the stop is none of its
    business.
    """
    slow = Slow()
    answers = Answers(slow, None, Process(), Telemetry(), Clock())
    trying = asyncio.create_task(answers.beat(ADDRESS, within_s=60))
    await slow.broken_off.wait()
    answers.stop()
    slow.go_on.set()

    assert await trying is SendResult.NOT_YET


# -- where they may go ---------------------------------------------------------------------


async def listener(world: World, queue: Queue) -> tuple[MemoryTransport, Inbox]:
    """Somebody who reads *queue*."""
    transport, inbox = MemoryTransport(world.broker, Process()), Inbox()
    await transport.start()
    await transport.consume([queue], inbox.put, prefetch=100)
    return transport, inbox


def call(queue: str, **keys: Any) -> bytes:
    """A call whose answer, and a heartbeat a second, are to go to *queue*."""
    request = {"method": "work", "args": {}, "_msg_id": "m", "_reply_q": queue, "_timeout": 2}
    return json.dumps(request | keys).encode()


@pytest.fixture
def worked(svc: Service) -> list[str]:
    """The requests that `work` was run for; it takes 10 s."""
    done: list[str] = []

    @svc.rpc
    async def work(ctx: Context) -> str:
        done.append(ctx.request_id)
        await asyncio.sleep(10)
        return "done"

    return done


@pytest.mark.looptime
@pytest.mark.parametrize("lane", ["compute", "compute-ops"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"method": "wrok"}, {"args": [1]}, {"method": "state", "namespace": "gracekit"}],
    ids=["a request", "an unknown method", "an unreadable one", "a question"],
)
async def test_nothing_is_sent_to_a_queue_that_is_not_for_replies(
    world: World, svc: Service, worked: list[str], keys: dict[str, Any], lane: str
):
    """Whoever may send to one service must not make it send to another: not an answer, not a
    heartbeat, not an error. The request is refused, on record, and kept aside.
    """
    transport, inbox = await listener(world, Queue("billing", QueueKind.SHARED, "billing"))
    life = await world.start(svc)

    await world.deliver(lane, call("billing", **keys))
    await asyncio.sleep(60)

    assert (worked, inbox.all, life.told("heartbeat.lost")) == ([], [], [])
    (row,) = world.rows("SELECT reason, detail FROM task WHERE state = 'rejected'")
    assert row["reason"] == "unreadable"
    if "args" not in keys:
        assert "_reply_q 'billing' is no reply queue (reply_...)" in row["detail"]
    assert len(world.broker.dead_letters) == 1
    await transport.stop()


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (f"reply_{'0a' * 16}", {}),
        ("reply_node-1.example.org:nova-compute:7", {}),
        ("answers.billing.1", {"reply_queues": "amq.gen-*, answers.*"}),
    ],
    ids=["ours and oslo's", "oslo's queue manager", "a setting"],
)
async def test_answers_go_to_reply_queues(
    world: World, svc: Service, worked: list[str], name: str, settings: dict[str, Any]
):
    """Those of gracekit's and oslo.messaging's clients, and those that an operator names."""
    transport, inbox = await listener(world, reply_queue(name))
    await world.start(svc, **settings)

    await world.deliver("compute", call(name))
    await world.until(lambda: inbox.all != [] and decode_reply(inbox.all[-1].body).ending)

    assert len(worked) == 1
    assert len(inbox.all) >= 10  # heartbeats before it
    await transport.stop()


@pytest.mark.looptime  # its loop shows its timers
async def test_a_stop_leaves_no_timer():
    """Each try that is under way has its own end then; an embedding program's loop is left
    alone.
    """
    slow, loop = Slow(), asyncio.get_running_loop()
    answers = Answers(slow, None, Process(), Telemetry(), Clock())
    trying = asyncio.create_task(answers.beat(ADDRESS, within_s=60))
    await asyncio.sleep(0)
    answers.stop()
    slow.go_on.set()
    await trying

    assert [timer for timer in loop._scheduled if not timer.cancelled()] == []


def test_what_has_ended_is_remembered_within_bounds():
    """The oldest are forgotten first."""
    ended = EndedRequests()
    for n in range(REMEMBERED + 1):
        ended.add(f"r{n}", delivery(b"body"))

    assert not ended.knows("r0", delivery(b"body"))
    assert ended.knows("r1", delivery(b"body"))
    assert not ended.knows("r1", delivery(b"of another caller"))


def delivery(body: bytes) -> Delivery:
    return Delivery(
        body=body,
        queue=shared_queue("compute"),
        redelivered=False,
        expires_in_s=None,
        headers={},
        process=Process(),
        settle=lambda *_: asyncio.sleep(0),
    )
