"""One channel of messages, by frames of our own, beside the broker's own answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pamqp.frame
import pytest
from aiormq.exceptions import ChannelClosed
from pamqp.commands import Basic

from gracekit.clock import Clock
from gracekit.rpc.amqp import link as amqp_link
from gracekit.rpc.amqp.channels import FramedChannel, NackedError, PlainChannel, ReturnedError
from gracekit.rpc.amqp.link import KNOWN_AIORMQ, Link
from gracekit.rpc.amqp.url import read_url
from gracekit.telemetry import Telemetry
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
async def channel(link: Link) -> FramedChannel:
    made = await link.messages(confirms=True)
    assert isinstance(made, FramedChannel)
    return made


def hear(channel: FramedChannel, frame: Any) -> None:
    """As if the broker had sent it."""
    data = pamqp.frame.marshal(frame, channel.amqp.number)
    assert channel.take(data[0], data, 7, len(data) - 1)


def send(channel: FramedChannel, key: str, text: str) -> asyncio.Future[Any]:
    return channel.publish("", key, message(text), mandatory=True)


@pytest.mark.parametrize(
    ("frame", "ended"),
    [(Basic.Ack(2, False), {2}), (Basic.Ack(2, True), {1, 2}), (Basic.Ack(0, False), set())],
    ids=["one", "many", "none of ours"],
)
async def test_a_confirm_ends_what_it_names_and_no_more(channel, frame, ended):
    """
    Taken for confirmed too early, a message that the broker then drops would be lost.
    """
    await channel.amqp.queue_declare("q")
    sent = [send(channel, "q", str(n)) for n in range(3)]
    hear(channel, frame)

    assert {number for number, one in enumerate(sent, 1) if one.done()} == ended
    await asyncio.wait_for(asyncio.gather(*sent), 10)  # the broker's own


async def test_a_nack_says_that_the_broker_did_not_take_it(channel):
    """
    It is sent again; a success it is not.
    """
    await channel.amqp.queue_declare("q")
    sent = [send(channel, "q", str(n)) for n in range(2)]
    hear(channel, Basic.Nack(1, False))

    with pytest.raises(NackedError):
        await sent[0]
    await asyncio.wait_for(sent[1], 10)


async def test_a_return_ends_the_message_that_came_back(channel):
    """
    Among others of the same key, and with others under way: by its key and body.
    """
    await channel.amqp.queue_declare("q")
    good = [send(channel, "q", str(n)) for n in range(3)]
    lost = [send(channel, "nowhere", text) for text in ("a", "b", "a")]

    found = await asyncio.wait_for(asyncio.gather(*good, *lost, return_exceptions=True), 10)

    assert [type(one) for one in found] == [type(None)] * 3 + [ReturnedError] * 3


async def test_a_channel_that_the_broker_closes_ends_what_waits(channel):
    """
    An exchange that is missing closes the channel: whoever waits for a confirm hears why.
    """
    sent = channel.publish("missing", "q", message("a"), mandatory=True)

    with pytest.raises(Exception, match="no exchange 'missing'"):
        await asyncio.wait_for(sent, 10)
    assert not channel.is_open


async def test_a_lost_connection_ends_what_waits(channel, link):
    """
    Whether the broker has it is not known; the wait ends at once all the same.
    """
    await channel.amqp.queue_declare("q")
    sent = send(channel, "q", "a")
    await link.stop()
    late = send(channel, "q", "b")

    for one in (sent, late):
        done, _ = await asyncio.wait({one}, timeout=10)
        assert done
    assert late.exception() is not None


async def test_a_channel_that_is_abandoned_keeps_nobody(own_broker, own_vhost):
    """
    A broker that confirms nothing may not answer the close of the channel either.
    """
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


async def test_with_an_aiormq_that_was_not_tested_messages_go_through_it(rabbit_url, monkeypatch):
    """
    Its frames may be others tomorrow; slower is better than wrong.
    """
    monkeypatch.setattr(amqp_link, "KNOWN_AIORMQ", frozenset({"0.0.0"}))
    made = link_to(rabbit_url)
    await made.start()
    try:
        channel = await made.messages(confirms=True)
        await channel.amqp.queue_declare("q")
        await asyncio.wait_for(channel.publish("", "q", message("a"), mandatory=True), 10)
    finally:
        await made.stop()

    assert isinstance(channel, PlainChannel)


def test_the_pinned_aiormq_is_one_that_was_tested():
    """
    Else every test of frames of our own would quietly test aiormq's.
    """
    lock = (ROOT / "requirements" / "runtime.lock").read_text()

    assert any(f"aiormq=={version} " in lock for version in KNOWN_AIORMQ)
