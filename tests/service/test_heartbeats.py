"""Heartbeats: who asked for them hears from a living service until the answer is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    HeartbeatTimeoutError,
    MethodTimeoutError,
    NoSuchMethodError,
    Service,
    TaskCancelledError,
)
from gracekit.process import Point
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.message import Reply
from gracekit.rpc.oslo_wire import decode_reply
from gracekit.rpc.transport import Delivery, Message, directed_queue, reply_queue, shared_queue
from tests.played import PlayedProcess
from tests.service.kit import Doors, Fault, Life, World

pytestmark = pytest.mark.looptime

QUEUE = "reply_peer"


class Peer:
    """An oslo client as far as the wire goes: raw requests out, raw replies in, with times."""

    def __init__(self, world: World) -> None:
        self._transport = MemoryTransport(world.broker, PlayedProcess(set(), 3))
        self._loop = asyncio.get_running_loop()
        self._settling: set[asyncio.Task[None]] = set()
        self._sent = 0
        self.heard: list[tuple[float, Reply]] = []

    async def start(self) -> Peer:
        await self._transport.start()
        await self._transport.consume([reply_queue(QUEUE)], self._on_delivery, prefetch=100)
        return self

    async def leave(self) -> None:
        """Its reply queue goes with it."""
        await self._transport.stop()

    def _on_delivery(self, delivery: Delivery) -> None:
        self.heard.append((self._loop.time(), decode_reply(delivery.body)))
        task = self._loop.create_task(delivery.ack())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def call(
        self,
        method: str,
        timeout: object,
        *,
        to: str = "compute",
        expires_in_s: float | None = 3600.0,
        **more: Any,
    ) -> None:
        """Send a call with that `_timeout`; `more` goes beside the keys of a call."""
        self._sent += 1
        inner = {
            "method": method,
            "args": {},
            "_unique_id": f"u{self._sent}",
            "_msg_id": f"m{self._sent}",
            "_reply_q": QUEUE,
            "_timeout": timeout,
        } | more
        body = json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(inner)}).encode()
        topic, _, host = to.partition(".")
        queue = directed_queue(topic, host) if host else shared_queue(topic)
        await self._transport.publish(queue, Message(body=body, expires_in_s=expires_in_s))

    def beats(self, msg_id: str = "m1") -> list[float]:
        """When it heard that the service lives, in whole tenths."""
        return [round(at, 1) for at, r in self.heard if r.msg_id == msg_id and not r.ending]

    def answers(self, msg_id: str = "m1") -> list[Reply]:
        return [reply for _, reply in self.heard if reply.msg_id == msg_id and reply.ending]


@pytest.fixture
async def peer(world: World) -> AsyncIterator[Peer]:
    """What is over has left nothing behind."""
    yield await Peer(world).start()
    for life in world.lives:
        if life.process.lives and not len(life.runtime.wired.tracker):
            assert life.runtime.wired.dispatcher.heartbeats._beats == {}


def sleeper(svc: Service, **options: Any) -> None:
    """A method `work` that takes 65 s."""

    @svc.rpc(**options)
    async def work(ctx: Context) -> str:
        await asyncio.sleep(65)
        return "done"


# -- who gets them, and when ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["error", "requeue"])
async def test_a_caller_that_asked_hears_from_its_call_every_half_of_its_patience(
    world: World, svc: Service, peer: Peer, policy: Any
):
    """As an oslo server does, until the answer is sent; with a row and without one."""
    sleeper(svc, on_interrupt=policy)
    await world.start(svc)
    began = round(asyncio.get_running_loop().time(), 1)

    await peer.call("work", 20)
    await asyncio.sleep(200)

    assert [at - began for at in peer.beats()] == [10, 20, 30, 40, 50, 60]
    assert [reply.result for reply in peer.answers()] == ["done"]


@pytest.mark.parametrize("policy", ["error", "requeue"])
async def test_a_call_that_is_delivered_twice_has_them_once(
    world: World, svc: Service, peer: Peer, policy: Any
):
    """A transport may deliver again what it was told to forget; the caller is the same."""
    sleeper(svc, on_interrupt=policy)
    await world.start(svc)

    await peer.call("work", 20)
    await asyncio.sleep(3)
    await peer.call("work", 20, _unique_id="u1", _msg_id="m1")
    await asyncio.sleep(200)

    assert [round(at) for at in peer.beats()] == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("policy", ["error", "requeue"])
@pytest.mark.parametrize("timeout", [None, 0, -5, 0.5, 1, 1.9])
async def test_a_caller_that_did_not_ask_never_gets_one(
    world: World, svc: Service, peer: Peer, policy: Any, timeout: object
):
    """An oslo client that sent null crashes on a heartbeat; below 2 s oslo sends none either."""
    sleeper(svc, on_interrupt=policy)
    await world.start(svc)

    await peer.call("work", timeout)
    await asyncio.sleep(200)

    assert [reply.ending for _, reply in peer.heard] == [True]


@pytest.mark.parametrize(("timeout", "every"), [(2, 1.0), (3, 1.5), (3.9, 1.5), (120, 60.0)])
async def test_the_pause_is_half_of_the_whole_seconds(
    world: World, svc: Service, peer: Peer, timeout: float, every: float
):
    """oslo counts in integers; ours must not be slower than what its client expects."""

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(3 * every + 0.1)

    await world.start(svc)
    began = round(asyncio.get_running_loop().time(), 1)

    await peer.call("work", timeout)
    await asyncio.sleep(600)

    assert [round(at - began, 1) for at in peer.beats()] == [every, 2 * every, 3 * every]


async def test_an_absurd_patience_is_none(world: World, svc: Service, peer: Peer):
    """Anybody may send an integer that no timer takes."""
    sleeper(svc)
    await world.start(svc)

    await peer.call("work", 10**400)
    await asyncio.sleep(200)

    assert [reply.result for _, reply in peer.heard] == ["done"]


async def test_a_heartbeat_is_what_oslo_understands(world: World, svc: Service, peer: Peer):
    """No result, no failure, not the ending, and an id of its own."""
    sleeper(svc)
    await world.start(svc)

    await peer.call("work", 20)
    await asyncio.sleep(200)

    beats = [reply for _, reply in peer.heard if not reply.ending]
    assert {(one.result, one.failure, one.msg_id) for one in beats} == {(None, None, "m1")}
    assert len({one.reply_id for one in beats} - {""}) == 6


async def test_a_context_is_what_was_sent(world: World, svc: Service, peer: Peer):
    """oslo loses `msg_id` and `reply_q` and adds `client_timeout`; here nothing goes or comes."""

    @svc.rpc
    async def work(ctx: Context) -> dict[str, Any]:
        return dict(ctx)

    await world.start(svc)
    sent = {"msg_id": "theirs", "reply_q": "theirs", "request_id": "req-7"}

    await peer.call("work", 20, **{f"_context_{key}": value for key, value in sent.items()})
    await asyncio.sleep(1)

    assert [reply.result for reply in peer.answers()] == [sent]


async def test_a_call_in_line_has_heartbeats_too(world: World, svc: Service, peer: Peer):
    """It is accepted, and its turn comes: its caller must not take that for death."""
    doors = Doors()

    @svc.rpc(max_running=1)
    async def work(ctx: Context) -> None:
        await doors.pass_(ctx.request_id)

    await world.start(svc)
    await peer.call("work", None)
    await peer.call("work", 10)
    await asyncio.sleep(21)

    assert doors.entered == ["u1"]
    assert peer.beats("m1") == []
    assert len(peer.beats("m2")) == 4
    doors.open("u1", "u2")
    await world.until(lambda: len(peer.answers("m2")) == 1)


async def test_a_second_caller_of_one_task_has_its_own(world: World, svc: Service, peer: Peer):
    """A repeated call waits for the same answer, each with its own patience or none."""
    sleeper(svc)
    await world.start(svc)
    await peer.call("work", None, _unique_id="one")
    await peer.call("work", 20, _unique_id="one")
    await peer.call("work", 40, _unique_id="one")
    await asyncio.sleep(200)

    assert [len(peer.beats(f"m{n}")) for n in (1, 2, 3)] == [0, 6, 3]
    assert [len(peer.answers(f"m{n}")) for n in (1, 2, 3)] == [1, 1, 1]


async def test_a_second_copy_of_a_requeue_call_has_its_own(world: World, svc: Service, peer: Peer):
    """Without a row both callers are known to this process alone."""
    sleeper(svc, on_interrupt="requeue")
    await world.start(svc)
    await peer.call("work", None, _unique_id="one")
    await peer.call("work", 20, _unique_id="one")
    await asyncio.sleep(200)

    assert [len(peer.beats(f"m{n}")) for n in (1, 2)] == [0, 6]
    assert [len(peer.answers(f"m{n}")) for n in (1, 2)] == [1, 1]


# -- how they end --------------------------------------------------------------------------


async def quiet_after(peer: Peer, msg_id: str = "m1") -> None:
    """None comes any more, from the ending on or from now on."""
    endings = [n for n, (_, r) in enumerate(peer.heard) if r.msg_id == msg_id and r.ending]
    heard = len(peer.heard)
    await asyncio.sleep(100)
    late = peer.heard[endings[0] + 1 if endings else heard :]
    assert [reply for _, reply in late if reply.msg_id == msg_id] == []


@pytest.mark.parametrize("policy", ["error", "requeue"])
async def test_none_is_begun_once_the_answer_is_on_its_way(
    world: World, svc: Service, peer: Peer, policy: Any
):
    """The transport may take its time for the answer."""

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context) -> None:
        await asyncio.sleep(2.5)

    life = await world.start(svc)
    life.faults.delay_s = 4.0
    await peer.call("work", 2)
    await asyncio.sleep(2.2)
    life.plan("publish", Fault.DELAY)
    await asyncio.sleep(20)

    assert [round(at) for at in peer.beats()] == [1, 2]
    assert len(peer.answers()) == 1


async def test_one_that_hangs_while_the_task_ends_is_the_last(
    world: World, svc: Service, peer: Peer
):
    """It was begun before the answer; no further one is."""

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(11)

    life = await world.start(svc)
    life.faults.delay_s = 3.0
    await peer.call("work", 20)
    await asyncio.sleep(9)
    life.plan("publish", Fault.DELAY)
    await asyncio.sleep(200)

    assert [round(at) for at in peer.beats()] == [13]
    assert len(peer.answers()) == 1


async def test_a_slow_commit_delays_none(world: World, svc: Service, peer: Peer):
    """Who bears 2 s of silence hears of a request in its first second, whatever the disk does."""
    sleeper(svc)
    life = await world.start(svc)
    life.faults.delay_s = 1.9
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.DELAY)
    began = round(asyncio.get_running_loop().time(), 1)

    await peer.call("work", 2)
    await asyncio.sleep(4)

    assert [at - began for at in peer.beats()] == [1, 2, 3]


async def test_none_follows_a_refusal(world: World, svc: Service, peer: Peer):
    """oslo's own server beats for ever after a method that it does not have."""
    sleeper(svc)
    await world.start(svc)

    await peer.call("wrk", 2)
    await asyncio.sleep(1)

    (answer,) = peer.answers()
    assert answer.failure is not None
    await quiet_after(peer)
    assert peer.beats() == []


async def test_none_follows_a_timed_out_method(world: World, svc: Service, peer: Peer):
    """The caller is answered at once, also when the handler does not return for long."""

    @svc.rpc(timeout=5)
    async def work(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)
            raise

    await world.start(svc)
    await peer.call("work", 4)
    await world.until(lambda: bool(peer.answers()))

    assert [reply.failure and reply.failure.exc_class for reply in peer.answers()] == [
        MethodTimeoutError.__name__
    ]
    assert len(peer.beats()) == 2
    await quiet_after(peer)


async def test_a_second_caller_of_a_timed_out_method_has_them_to_the_end(
    world: World, svc: Service, peer: Peer
):
    """Only the first is told at once; the other waits until the handler has returned."""

    @svc.rpc(timeout=5)
    async def work(ctx: Context) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(10.5)
            raise

    await world.start(svc)
    for _ in range(2):
        await peer.call("work", 4, _unique_id="one")
    await asyncio.sleep(60)

    assert [len(peer.beats(f"m{n}")) for n in (1, 2)] == [2, 7]
    assert [len(peer.answers(f"m{n}")) for n in (1, 2)] == [1, 1]


async def test_none_follows_a_cancelled_task(world: World, svc: Service, peer: Peer):
    """An operator's cancel answers the caller."""
    sleeper(svc)
    life = await world.start(svc)
    await peer.call("work", 4)
    await asyncio.sleep(5)

    await world.verb(life, "cancel", task_id="u1")
    await asyncio.sleep(1)

    (answer,) = peer.answers()
    assert answer.failure is not None
    assert answer.failure.exc_class == TaskCancelledError.__name__
    await quiet_after(peer)


async def test_none_follows_a_hand_over(world: World, svc: Service, peer: Peer):
    """The drain's end is silence: the next run speaks for the task, once it has it."""
    sleeper(svc, on_interrupt="retry")
    life = await world.start(svc, drain_timeout_s=10)
    await peer.call("work", 4)
    await asyncio.sleep(5)

    report = await life.drain()

    assert report.handed_over == ["u1"]
    assert peer.answers() == []
    await quiet_after(peer)


async def test_none_comes_from_a_handler_that_the_drain_left_behind(
    world: World, svc: Service, peer: Peer
):
    """It is recorded as unclean, and the process is about to end: nobody speaks for it."""
    may_return = asyncio.Event()
    stopping: list[int] = []

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> None:
        while not may_return.is_set():
            try:
                await may_return.wait()
            except asyncio.CancelledError:
                pass

    @svc.on_stop
    async def slowly() -> None:
        stopping.append(len(peer.heard))
        await asyncio.sleep(4)
        stopping.append(len(peer.heard))

    life = await world.start(svc, drain_timeout_s=10, exit_margin_s=10)
    await peer.call("work", 2)
    await asyncio.sleep(5)
    life.ask_to_stop()
    report = await life.runtime.serve()
    may_return.set()

    assert report.unclean == ["u1"]
    assert stopping[0] == stopping[1] > 10


async def test_none_follows_a_requeue_call_that_is_given_back(
    world: World, svc: Service, peer: Peer
):
    """Nobody has it until it is delivered again."""
    sleeper(svc, on_interrupt="requeue")
    life = await world.start(svc, drain_timeout_s=3)
    await peer.call("work", 2)

    await life.drain()

    assert world.broker.waiting("compute") == 1
    await quiet_after(peer)


async def test_none_follows_a_fault_of_the_dispatch(world: World, svc: Service, peer: Peer):
    """Whatever ends the life of a request ends its heartbeats."""
    world.expects_faults = True
    sleeper(svc)
    life = await world.start(svc)
    await peer.call("work", 4)
    await asyncio.sleep(5)
    assert len(peer.beats()) == 2

    def raises(*_: object) -> None:
        raise RuntimeError("planted")

    life.runtime.wired.dispatcher._scheduler.leave = raises
    await world.until(lambda: bool(life.told("dispatch.failed")))
    await world.settle()
    heard = len(peer.beats())
    await asyncio.sleep(50)

    assert len(peer.beats()) == heard


async def test_a_fault_in_a_heartbeat_does_not_end_those_to_come(
    world: World, svc: Service, peer: Peer
):
    """It is logged, and sent again; else the caller would give its call up."""
    world.expects_faults = True
    sleeper(svc)
    life = await world.start(svc)
    answers = life.runtime.wired.answers
    real, met = answers.beat, []

    async def fails_once(*args: object, **kwargs: object) -> bool:
        if not met:
            met.append("fault")
            raise ZeroDivisionError("nobody foresaw this")
        return await real(*args, **kwargs)  # type: ignore[arg-type]

    answers.beat = fails_once  # type: ignore[method-assign]
    await peer.call("work", 4)
    await asyncio.sleep(9)

    assert len(peer.beats()) >= 4
    (told,) = life.told("background.failed")
    assert "ZeroDivisionError" in told["error"]


async def test_none_comes_once_the_caller_cannot_be_waiting(world: World, svc: Service, peer: Peer):
    """The message's expiry is the caller's total time-out: then it has left."""
    sleeper(svc)
    await world.start(svc)

    await peer.call("work", 4, expires_in_s=9.0)
    await asyncio.sleep(100)

    assert len(peer.beats()) == 4


# -- when they find no way -----------------------------------------------------------------


async def test_a_caller_that_left_is_given_up_and_the_task_goes_on(
    world: World, svc: Service, peer: Peer
):
    """Its queue has gone with it, so the first heartbeat that is lost is the last, however patient
    it was.
    """
    sleeper(svc)
    life = await world.start(svc)
    await peer.call("work", 6)
    await asyncio.sleep(4)

    await peer.leave()
    await world.until(lambda: world.state("u1") == "succeeded")

    assert [event["queue"] for event in life.told("heartbeat.lost")] == [QUEUE]
    assert len(life.told("reply.given_up")) == 1


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.REFUSED])
async def test_one_that_hangs_or_fails_hurts_nothing(
    world: World, svc: Service, peer: Peer, fault: Fault
):
    """It is bounded; the next one comes in time, and the answer too."""
    sleeper(svc)
    life = await world.start(svc)
    life.faults.delay_s = 100.0
    await peer.call("work", 20)
    await asyncio.sleep(1)
    life.plan("publish", fault)

    await asyncio.sleep(200)

    assert len(life.told("heartbeat.lost")) == 1
    assert [round(at) for at in peer.beats()] == [20, 30, 40, 50, 60]
    assert [reply.result for reply in peer.answers()] == ["done"]


# -- a restart -----------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["drain", "crash"])
async def test_they_go_on_after_a_restart(world: World, svc: Service, peer: Peer, ends: str):
    """The record keeps each caller's patience; the first comes at once, because it has waited."""
    sleeper(svc, on_interrupt="retry", settle=1)
    life = await world.start(svc, drain_timeout_s=5)
    await peer.call("work", 40, _unique_id="one")
    await peer.call("work", 24, _unique_id="one")
    await peer.call("work", None)
    await asyncio.sleep(5)
    await (life.drain() if ends == "drain" else life.crash())

    second = await world.start(svc)
    started = asyncio.get_running_loop().time()
    await asyncio.sleep(200)

    assert second.told("store.error") == []
    first, *others = (at for at in peer.beats("m1") if at >= started)
    assert first - started < 2
    assert [round(at - first) for at in others] == [20, 40, 60]
    again = [round(at - first) for at in peer.beats("m2") if at >= started]
    assert again == [0, 12, 24, 36, 48, 60]
    assert peer.beats("m3") == []
    assert [[r.result for r in peer.answers(f"m{n}")] for n in (1, 2, 3)] == [["done"]] * 3


async def test_a_restart_after_the_callers_time_beats_for_nobody(
    world: World, svc: Service, peer: Peer
):
    """Its total time-out has passed."""
    sleeper(svc, on_interrupt="retry", settle=1)
    life = await world.start(svc)
    await peer.call("work", 4, expires_in_s=10.0)
    await asyncio.sleep(3)
    await life.crash()
    await asyncio.sleep(20)
    heard = len(peer.beats())

    await world.start(svc)
    await world.until(lambda: world.state("u1") == "succeeded")

    assert len(peer.beats()) == heard


async def test_a_record_that_cannot_be_read_costs_the_heartbeats_only(
    world: World, svc: Service, peer: Peer
):
    """The task is run again all the same."""
    sleeper(svc, on_interrupt="retry", settle=1)
    life = await world.start(svc)
    await peer.call("work", 40)
    await asyncio.sleep(3)
    await life.crash()
    second = world.life(svc)
    asked_for_callers(second, Fault.REFUSED)
    await second.start()
    await world.until(lambda: world.state("u1") == "succeeded")

    assert [event["what"] for event in second.told("store.error")] == ["heartbeats"]
    assert [reply.result for reply in peer.answers()] == ["done"]


async def test_only_a_call_with_time_left_is_asked_for_its_callers(
    world: World, svc: Service, peer: Peer
):
    """A cast and a call of yesterday cost a start no query."""
    sleeper(svc, on_interrupt="retry", settle=1)
    life = await world.start(svc)
    await peer.call("work", None, expires_in_s=None)
    await peer.call("work", None, expires_in_s=5.0)
    await peer.call("work", None)
    await life.hears("task.started", 3)
    await life.crash()
    await asyncio.sleep(10)
    second = world.life(svc)
    asked = asked_for_callers(second)
    await second.start()
    await second.hears("task.started", 3)

    assert len(asked) == 1


def asked_for_callers(life: Life, fault: Fault | None = None) -> list[str]:
    """The queries for monitored callers, as they come; each meets *fault*."""
    read, asked = life.engine.query, []

    async def query(sql: str, *params: Any) -> Any:
        if "monitor_s IS NOT NULL" in sql:
            asked.append(sql)
            if fault is not None:
                life.faults.plan("store", "query", fault)
        return await read(sql, *params)

    life.engine.query = query
    return asked


# -- with our own client -------------------------------------------------------------------


async def test_a_monitored_call_outlives_its_monitor_while_the_service_lives(
    world: World, svc: Service
):
    """Ten times the monitor's time, with a heartbeat in each half of it."""

    @svc.rpc
    async def work(ctx: Context) -> str:
        await asyncio.sleep(40)
        return "done"

    await world.start(svc)
    client = await world.client(svc)

    assert await client.prepare(monitor_timeout=4).call(work) == "done"
    assert client._replies.ignored == 0


async def test_a_monitored_call_ends_soon_after_the_death_of_its_service(
    world: World, svc: Service
):
    """Not after the total time-out of an hour."""
    sleeper(svc)
    life = await world.start(svc)
    client = await world.client(svc)
    loop = asyncio.get_running_loop()
    calling = asyncio.create_task(client.prepare(timeout="1h", monitor_timeout="10s").call("work"))
    await asyncio.sleep(17)
    died_at = loop.time()

    await life.crash()
    with pytest.raises(HeartbeatTimeoutError, match="no heartbeat from 'compute' about work"):
        await calling

    assert 5 <= loop.time() - died_at <= 10


async def test_an_unread_monitored_call_ends_with_its_monitor(world: World, svc: Service):
    """Nobody has accepted it, so nobody speaks for it; it is a time-out like any other."""
    sleeper(svc)
    await (await world.start(svc)).drain()
    client = await world.client(svc)

    with pytest.raises(CallTimeoutError, match="the time-out of 60 s is not over"):
        await client.prepare(monitor_timeout=10).call("work")

    assert world.broker.waiting("compute") == 1


async def test_a_refusal_is_told_to_a_monitored_call(world: World, svc: Service):
    """A failure that comes before any heartbeat is the answer."""
    sleeper(svc)
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(NoSuchMethodError):
        await client.prepare(monitor_timeout=10).call("wrk")


async def test_a_crash_at_a_heartbeat_loses_nothing(world: World, svc: Service, peer: Peer):
    """It is a publish like a reply's, and the row is as it was."""
    sleeper(svc, on_interrupt="retry", settle=1)
    life = await world.start(svc)
    await peer.call("work", 20)
    await asyncio.sleep(1)
    life.crash_at(Point.REPLY, "before")
    await life.over.wait()
    assert world.state("u1") == "running"

    await world.start(svc)
    await world.until(lambda: bool(peer.answers()))

    assert [reply.result for reply in peer.answers()] == ["done"]
