"""One channel of messages, beside the broker's own answers."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pamqp.frame
import pytest
from aiormq.connection import TCPTransportFactory
from aiormq.exceptions import ChannelClosed
from packaging.requirements import Requirement
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, UnconfirmedError
from gracekit.rpc.amqp import outlet as amqp_outlet
from gracekit.rpc.amqp.bounds import close_channel
from gracekit.rpc.amqp.channels import MessageChannel, NackedError, ReturnedError
from gracekit.rpc.amqp.frames import Delivered
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.profiles import PROFILES, Topology
from gracekit.rpc.amqp.publisher import Publisher
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.amqp.wire import WireFactory
from gracekit.rpc.transport import Queue, QueueKind
from gracekit.telemetry.telemetry import Telemetry
from tests.rabbit.broker import Broker
from tests.rpc.kit import message

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def link(rabbit_url: str) -> AsyncIterator[Link]:
    made = link_to(rabbit_url)
    await made.start()
    yield made
    await made.stop()


def link_to(url: str) -> Link:
    broker = read_url(url, exchange="gracekit", profile="durable")
    return Link(broker, purpose="test", label="test", clock=Clock(), telemetry=Telemetry())


@pytest.fixture
async def channel(link: Link) -> MessageChannel:
    return await link.messages(confirms=True)


def hear(channel: MessageChannel, frame: Any) -> None:
    """As if the broker had sent it."""
    data = pamqp.frame.marshal(frame, channel.amqp.number)
    assert channel._contents.take(data[0], data, 7, len(data) - 1)


def send(channel: MessageChannel, key: str, text: str) -> asyncio.Future[Any]:
    return channel.publish("", key, message(text), mandatory=True)


@pytest.mark.parametrize(
    ("frame", "ended"),
    [(Basic.Ack(2, False), {2}), (Basic.Ack(2, True), {1, 2}), (Basic.Ack(0, False), set())],
    ids=["one", "many", "none of ours"],
)
async def test_a_confirm_ends_what_it_names_and_no_more(channel, frame, ended):
    """Taken for confirmed too early, a message that the broker then drops would be lost."""
    await channel.amqp.queue_declare("q")
    sent = [send(channel, "q", str(n)) for n in range(3)]
    hear(channel, frame)

    assert {number for number, one in enumerate(sent, 1) if one.done()} == ended
    await asyncio.wait_for(asyncio.gather(*sent), 10)  # the broker's own


async def test_a_nack_says_that_the_broker_did_not_take_it(channel):
    """It is sent again; a success it is not."""
    await channel.amqp.queue_declare("q")
    sent = [send(channel, "q", str(n)) for n in range(2)]
    hear(channel, Basic.Nack(1, False))

    with pytest.raises(NackedError):
        await sent[0]
    await asyncio.wait_for(sent[1], 10)


async def test_a_return_ends_the_message_that_came_back(channel):
    """Among others of the same key, and with others under way: by its key and body."""
    await channel.amqp.queue_declare("q")
    good = [send(channel, "q", str(n)) for n in range(3)]
    lost = [send(channel, "nowhere", text) for text in ("a", "b", "a")]

    found = await asyncio.wait_for(asyncio.gather(*good, *lost, return_exceptions=True), 10)

    assert [type(one) for one in found] == [type(None)] * 3 + [ReturnedError] * 3


async def test_a_return_is_of_the_first_of_those_that_are_alike(channel):
    """Its sender may have stopped to wait: who sent the same again has not had it back yet."""
    await channel.amqp.queue_declare("q")
    first, again = (send(channel, "q", "a") for _ in range(2))
    first.cancel()
    for frame in (
        Basic.Return(312, "NO_ROUTE", "", "q"),
        ContentHeader(body_size=1),
        ContentBody(b"a"),
    ):
        hear(channel, frame)

    assert not again.done()
    await asyncio.wait_for(again, 10)  # it is in the queue


async def test_a_channel_that_the_broker_closes_ends_what_waits(channel):
    """An exchange that is missing closes the channel: whoever waits for a confirm hears why."""
    sent = channel.publish("missing", "q", message("a"), mandatory=True)

    with pytest.raises(Exception, match="no exchange 'missing'"):
        await asyncio.wait_for(sent, 10)
    assert not channel.is_open


async def test_a_lost_connection_ends_what_waits(channel, link):
    """Whether the broker has it is not known; the wait ends at once all the same."""
    await channel.amqp.queue_declare("q")
    sent = send(channel, "q", "a")
    await link.stop()
    late = send(channel, "q", "b")

    for one in (sent, late):
        done, _ = await asyncio.wait({one}, timeout=10)
        assert done
    assert late.exception() is not None


async def test_a_channel_that_is_abandoned_keeps_nobody(own_broker, own_vhost):
    """A broker that confirms nothing may not answer the close of the channel either."""
    made = link_to(own_broker.url_of(own_vhost))
    await made.start()
    channel = await made.messages(confirms=True)
    await channel.amqp.queue_declare("q")
    own_broker.freeze()
    try:
        sent = channel.publish("", "q", message("a"), mandatory=True)
        abandoning = asyncio.create_task(channel.abandon(ChannelClosed(None, "no confirm")))
        with pytest.raises(ChannelClosed, match="no confirm"):
            await asyncio.wait_for(sent, 1)
        await asyncio.wait_for(abandoning, 10)
        assert not channel.is_open
    finally:
        own_broker.thaw()
        await made.stop()


async def test_a_broker_that_does_not_bound_its_frames_gets_whole_messages(link):
    """It says so by a bound of 0; without its bodies the broker would wait for them for ever."""
    assert link._connection is not None
    link._connection.amqp.connection_tune.frame_max = 0
    channel = await link.messages(confirms=True)
    await channel.amqp.queue_declare("q")
    for text in ("", "a", "a" * 300_000):
        sent = channel.publish("", "q", message(text), mandatory=True)
        await asyncio.wait_for(sent, 10)


async def test_nothing_follows_a_close_of_ours(own_broker: Broker, own_vhost: str):
    """The broker may have closed the channel already: it would then close the whole connection."""
    link = link_to(own_broker.url_of(own_vhost))
    await link.start()
    channel = await link.messages(confirms=True)
    heard: list[Delivered] = []
    channel.deliver_to(lambda delivered, _properties, _body: heard.append(delivered))
    channel._contents.consumers.add("1")
    own_broker.freeze()  # it confirms no close
    try:
        consuming = asyncio.ensure_future(channel.amqp.basic_consume("q", print))
        await turns()
        assert channel.is_open
        consuming.cancel()  # upon which aiormq closes the channel
        await turns()
        late = channel.publish("", "q", message("a"), mandatory=True)
        for frame in (Basic.Deliver("1", 1, False, "", "q"), ContentHeader(body_size=0)):
            hear(channel, frame)

        assert not channel.is_open
        assert isinstance(late.exception(), DependencyError)
        assert heard == []  # it will be another's
    finally:
        own_broker.thaw()
        await link.stop()


async def test_a_close_that_is_answered_late_costs_a_channel_alone(rabbit_url: str):
    """aiormq sends it again after a heartbeat's time; the broker would close the whole
    connection.
    """
    link = link_to(f"{rabbit_url}?heartbeat=1s")
    await link.start()
    try:
        channel, other = await link.messages(), await link.messages()
        other.pause()
        await close_channel(channel.amqp, 1.5)
        other.resume()

        assert await link.channel()
        await other.amqp.queue_declare("q")
    finally:
        await link.stop()


def publisher_to(
    link: Link,
    timeout_s: float = 30,
    telemetry: Telemetry | None = None,
    profile: str = "durable",
) -> Publisher:
    return Publisher(
        link,
        Topology(PROFILES[profile], "gracekit"),
        timeout_s=timeout_s,
        clock=Clock(),
        telemetry=telemetry or Telemetry(),
    )


async def turns() -> None:
    """Let all go on that need not wait for the broker."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_who_waits_for_the_end_of_an_alarm_does_not_outwait_the_connection(
    own_broker: Broker, own_vhost: str
):
    """The next one may be free of it; of one that is lost no end of the alarm is told."""
    link = link_to(own_broker.url_of(own_vhost))
    await link.start()
    channel = await link.messages(confirms=True)
    await channel.amqp.queue_declare("q")
    await asyncio.to_thread(own_broker.set_alarm)
    sent = send(channel, "q", "a")
    async with asyncio.timeout(10):
        while channel.takes_now:  # it is told when the broker has read something
            await asyncio.sleep(0.01)
    waiting = asyncio.create_task(link.wait_unblocked())
    await turns()
    assert not waiting.done()
    await asyncio.to_thread(own_broker.kill)
    try:
        await asyncio.wait_for(waiting, 5)
        assert isinstance((await asyncio.gather(sent, return_exceptions=True))[0], Exception)
    finally:
        await link.stop()


async def test_a_loss_does_not_lengthen_the_time_of_a_publish(own_broker: Broker, own_vhost: str):
    """It is sent again within the time that was promised, and not within as much again."""
    link = link_to(own_broker.url_of(own_vhost))
    await link.start()
    publisher = publisher_to(link, timeout_s=3.0)
    queue = Queue("reply_1", QueueKind.REPLY)
    await (await link.channel()).queue_declare(queue.name)
    await publisher.publish(queue, message("a"))
    own_broker.freeze()
    begun = time.monotonic()
    publishing = asyncio.create_task(publisher.publish(queue, message("b")))
    await asyncio.sleep(2)
    await asyncio.to_thread(own_broker.kill)
    try:
        with pytest.raises(UnconfirmedError):
            await publishing
        assert time.monotonic() - begun < 4
    finally:
        publisher.stop()
        await link.stop()


class Mute(asyncio.Protocol):
    """A broker that freezes at the first word."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.pause_reading()


async def test_a_frozen_broker_costs_no_more_than_the_time_to_connect(certificates):
    """The end of TLS would wait half a minute for its answer, and the next host with it."""
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(certificates.good.certificate, certificates.good.key)
    loop = asyncio.get_running_loop()
    mute = Mute()
    server = await loop.create_server(lambda: mute, "127.0.0.1", 0, ssl=shown)
    port = server.sockets[0].getsockname()[1]
    link = link_to(f"amqps://a:b@127.0.0.1:{port}/?verify=none&connect_timeout=0.5s")
    async with server:
        with pytest.raises(DependencyError, match=r"did not answer in 0\.5 s"):
            await asyncio.wait_for(link.start(), 10)
        mute.transport.abort()
        await turns()


async def test_an_opening_that_is_cancelled_behind_the_broker_s_last_answer_leaves_nothing(
    rabbit_url,
):
    """aiormq's tasks work by then, and would keep a connection that nobody has."""
    before, made = asyncio.all_tasks(), link_to(rabbit_url)
    opening = asyncio.create_task(made.start())
    async with asyncio.timeout(30):
        while not any("__reader" in repr(task.get_coro()) for task in asyncio.all_tasks()):
            await asyncio.sleep(0)

    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await turns()

    assert asyncio.all_tasks() <= before


def test_the_pinned_aiormq_is_in_the_range_of_the_project():
    """Otherwise the tests would say nothing about what pip installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {one.name: one for one in map(Requirement, project["dependencies"])}
    lock = (ROOT / "requirements" / "runtime.lock").read_text()
    pinned = re.search(r"^aiormq==(\S+)", lock, re.MULTILINE)

    assert pinned is not None
    assert needed["aiormq"].specifier.contains(pinned[1])


async def test_an_aiormq_that_opens_a_socket_of_its_own_is_refused(rabbit_url, monkeypatch):
    """It would take all messages, and nobody would read them."""
    monkeypatch.setattr(WireFactory, "create", TCPTransportFactory().create)
    before, made = asyncio.all_tasks(), link_to(rabbit_url)

    with pytest.raises(ConfigError, match=r"opened a socket of its own.*pip check"):
        await made.start()
    await turns()

    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("profile", ["durable", "quorum"])
async def test_a_queue_that_only_nacks_counts_as_full_after_a_new_channel(
    link, monkeypatch, profile: str
):
    """Whatever the sender's own profile is, as the queue may be a quorum queue of its service.

    The broker's channel may have lost sight of a queue whose leader died, for good, beside others
    that are well. Where it is the queue that is full, a new channel does no harm, and the messages
    to others are confirmed where they are.
    """
    monkeypatch.setattr(amqp_outlet, "CONFIRM_S", 0.5)
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    other = await link.channel()
    await other.queue_declare("full", arguments=full)
    await other.queue_declare("well")
    repeated: list[str] = []
    telemetry = Telemetry()
    telemetry.subscribe(
        lambda event, fields: (
            repeated.append(fields["queue"]) if event == "publish.repeated" else None
        )
    )
    publisher = publisher_to(link, telemetry=telemetry, profile=profile)
    opened: list[MessageChannel] = []
    messages = link.messages

    async def noted(**given: Any) -> MessageChannel:
        opened.append(await messages(**given))
        return opened[-1]

    monkeypatch.setattr(link, "messages", noted)
    queue, well = Queue("full", QueueKind.REPLY), Queue("well", QueueKind.REPLY)
    await publisher.publish(queue, message("a"))
    sending = [asyncio.create_task(publisher.publish(queue, message(str(n)))) for n in range(5)]
    while not all(one.done() for one in sending):
        await publisher.publish(well, message("b"))
        await asyncio.sleep(0.01)
    ends = [one.exception() for one in sending]
    refused = [end for end in ends if end is not None]
    channels = len(opened)

    await other.queue_purge("full")
    await publisher.publish(queue, message("c"))
    publisher.stop()

    assert len(refused) >= len(sending) - 1  # a limit of one may be late for the second message
    assert {type(end) for end in refused} == {DependencyError}
    assert set(repeated) == {"full"}
    assert 2 <= channels <= 4  # one a second at most


async def test_a_nack_of_long_ago_does_not_make_a_queue_full(link, monkeypatch):
    """Neither is it remembered for ever, as there may be any number of queues that nacked once."""
    monkeypatch.setattr(amqp_outlet, "NACKED_FOR_S", 0.3)
    monkeypatch.setattr(amqp_outlet, "FIRST_NACK_S", 0.6, raising=False)
    other = await link.channel()
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for name in ("a", "b"):
        await other.queue_declare(name, arguments=full)
    repeated: list[str] = []
    telemetry = Telemetry()
    telemetry.subscribe(
        lambda event, fields: (
            repeated.append(fields["queue"]) if event == "publish.repeated" else None
        )
    )
    publisher = publisher_to(link, telemetry=telemetry, profile="quorum")

    async def fill(name: str) -> None:
        sent = [publisher.publish(Queue(name, QueueKind.REPLY), message(str(n))) for n in range(5)]
        ends = await asyncio.gather(*sent, return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), DependencyError}
        assert any(ends)

    await fill("a")
    await asyncio.sleep(0.7)
    before = len(repeated)
    await fill("a")
    again = repeated[before:]
    await asyncio.sleep(0.7)
    await fill("b")
    kept = list(publisher._outlets[""]._nacks)
    publisher.stop()

    assert "a" in again
    assert kept == ["b"]


async def test_a_channel_that_confirms_nothing_is_left_however_short_the_waits(link, monkeypatch):
    """Whoever gives up before the channel is judged leaves word of it; one confirm takes it
    back.
    """
    monkeypatch.setattr(amqp_outlet, "CONFIRM_S", 0.3)
    monkeypatch.setattr(amqp_outlet, "LOOK_EVERY_S", 0.1)
    await (await link.channel()).queue_declare("q")
    publisher, queue = publisher_to(link), Queue("q", QueueKind.REPLY)
    await publisher.publish(queue, message("a"))
    mute = publisher._outlets[""]._channel
    assert mute is not None
    monkeypatch.setattr(mute._contents, "on_confirm", lambda *_: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(publisher.publish(queue, message("b")), 0.1)
    async with asyncio.timeout(10):
        while mute.is_open:
            await asyncio.sleep(0.01)
    await asyncio.wait_for(publisher.publish(queue, message("c")), 10)
    publisher.stop()


async def test_a_watch_over_confirms_that_fails_begins_again(link, monkeypatch):
    """Without it nobody would leave a channel that confirms nothing, and send the messages
    again.
    """
    monkeypatch.setattr(amqp_outlet, "CONFIRM_S", 0.3)
    monkeypatch.setattr(amqp_outlet, "LOOK_EVERY_S", 0.1)
    await (await link.channel()).queue_declare("q")
    failed: list[str] = []
    telemetry = Telemetry()
    telemetry.subscribe(
        lambda event, fields: (
            failed.append(fields["error"]) if event == "background.failed" else None
        )
    )
    publisher, queue = publisher_to(link, telemetry=telemetry), Queue("q", QueueKind.REPLY)
    is_blocked = link.is_blocked

    async def fail_once() -> bool:
        monkeypatch.setattr(link, "is_blocked", is_blocked)
        raise RuntimeError("unforeseen")

    await publisher.publish(queue, message("a"))
    mute = publisher._outlets[""]._channel
    assert mute is not None
    monkeypatch.setattr(mute._contents, "on_confirm", lambda *_: None)
    monkeypatch.setattr(link, "is_blocked", fail_once)
    await asyncio.wait_for(publisher.publish(queue, message("b")), 10)

    assert not mute.is_open
    assert failed == ["RuntimeError('unforeseen')"]
    publisher.stop()


async def test_a_silent_queue_does_not_hold_up_those_who_go_one_by_one(link, monkeypatch):
    """A refusal comes at once: who hears nothing is no longer waited for, and still hears its
    confirm.
    """
    monkeypatch.setattr(amqp_outlet, "REFUSED_WITHIN_S", 0.1)
    await (await link.channel()).queue_declare("q")
    publisher = publisher_to(link)
    apart = publisher._to_queues.apart
    channel = await apart.channel()
    silent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    await asyncio.wait_for(apart.wait_word(channel, silent), 5)
    next_channel = await apart.channel()
    confirm = asyncio.create_task(apart.wait_confirm(silent, "q"))
    await turns()
    silent.set_result(None)
    await asyncio.wait_for(confirm, 5)
    publisher.stop()

    assert next_channel is not channel
    assert channel.is_open
