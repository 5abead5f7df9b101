"""What the proxy does to the connections that go through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import aio_pika
import aiormq
import pytest
from aio_pika.exceptions import AMQPConnectionError

from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rabbit.machine import HOST
from tests.rabbit.proxy import Proxy, Way

PATIENCE_S = 300.0


class Wire:
    """A client's end of a connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def echo(self, text: bytes) -> bytes:
        """Send *text* and wait for as much."""
        self.writer.write(text)
        return await self.take(len(text))

    async def take(self, number: int) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readexactly(number)

    async def ends(self) -> bytes:
        """What still comes until the end."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def wire(proxy: Proxy) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """Before a server that sends back what it gets."""
    echoes: set[asyncio.Task[None] | None] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        echoes.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            while piece := await reader.read(1000):
                writer.write(piece)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        echoes.discard(asyncio.current_task())

    server = await asyncio.start_server(echo, HOST, 0)
    async with server:
        with Proxy(server.sockets[0].getsockname()[1]) as made:
            yield made
        await until(lambda: not echoes, "no connection left")


@pytest.fixture
def broker_proxy(shared_broker: Broker) -> Iterator[Proxy]:
    """Before the shared node."""
    with Proxy(shared_broker.port) as made:
        yield made


async def test_bytes_pass_and_are_counted(proxy: Proxy):
    """Both ways, and an end of the one side is an end of the other."""
    async with wire(proxy) as one:
        assert await one.echo(b"x" * 200_000) == b"x" * 200_000
        assert proxy.links == 1
        all_of_it = {Way.UP: 200_000, Way.DOWN: 200_000}
        await until(lambda: proxy.counts.passed == all_of_it, "all bytes counted")

    await until(lambda: proxy.links == 0, "the link gone")
    assert (proxy.counts.accepted, proxy.counts.cut) == (1, 0)


async def test_a_cut_resets_all_connections(proxy: Proxy):
    """At once, and new ones pass."""
    async with wire(proxy) as one, wire(proxy) as other:
        await one.echo(b"1")
        await other.echo(b"2")

        assert proxy.cut() == 2

        for each in (one, other):
            with pytest.raises(ConnectionResetError):
                await each.ends()
    async with wire(proxy) as new:
        assert await new.echo(b"3") == b"3"
    assert proxy.counts.cut == 2


async def test_a_plain_cut_looks_like_a_peer_that_closes(proxy: Proxy):
    """A client sees the end of the stream and no error."""
    async with wire(proxy) as one:
        await one.echo(b"1")

        assert proxy.cut(reset=False) == 1

        assert await one.ends() == b""


@pytest.mark.parametrize("way", Way)
async def test_a_connection_can_be_cut_after_an_exact_number_of_bytes(proxy: Proxy, way: Way):
    """In the midst of a frame, say: so many have arrived, and no more."""
    proxy.cut_after(5, way)
    async with wire(proxy) as one:
        one.writer.write(b"abcdefghij")

        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await one.take(10)

        assert proxy.counts.passed[way] == 5
    proxy.heal()
    async with wire(proxy) as new:
        assert await new.echo(b"abcdefghij") == b"abcdefghij"


async def test_random_cuts_are_the_same_for_the_same_seed(proxy: Proxy):
    """So that a failure can be played again; each connection dies at a place of its own."""

    async def places() -> list[int]:
        proxy.cut_at_random(7, most=1000)
        found = []
        for _ in range(5):
            before = dict(proxy.counts.passed)
            async with wire(proxy) as one:
                one.writer.write(b"x" * 3000)
                with contextlib.suppress(OSError):
                    await one.ends()
            await until(lambda: proxy.links == 0, "the link gone")
            passed = {way: proxy.counts.passed[way] - before[way] for way in Way}
            found.append(min(passed.values()) or max(passed.values()))
        return found

    first = await places()

    assert await places() == first
    assert len(set(first)) > 2
    assert max(first) <= 1000


async def test_a_black_hole_takes_everything_and_answers_nothing(proxy: Proxy):
    """Old connections and new ones; who lost bytes is cut off when it ends, who lost none lives
    on.
    """
    async with wire(proxy) as busy, wire(proxy) as idle:
        await busy.echo(b"1")
        await idle.echo(b"2")
        proxy.swallow()
        async with wire(proxy) as new:
            busy.writer.write(b"lost")
            new.writer.write(b"lost")
            await until(lambda: proxy.counts.swallowed == 8, "both swallowed")
            assert proxy.links == 3

            proxy.heal()

            for each in (busy, new):
                with pytest.raises(ConnectionResetError):
                    await each.ends()
        assert await idle.echo(b"3") == b"3"


async def test_a_stalled_wire_loses_nothing(proxy: Proxy):
    """What was held back arrives, in its order."""
    async with wire(proxy) as one:
        await one.echo(b"1")
        proxy.stall()
        one.writer.write(b"abc")
        asked = asyncio.ensure_future(one.take(3))
        await until(lambda: proxy.counts.held == 3, "the first bytes held")
        async with wire(proxy) as other:
            other.writer.write(b"d")
            await until(lambda: proxy.counts.held == 4, "those of a new connection too")
        assert not asked.done()
        assert proxy.counts.passed[Way.UP] == 1

        proxy.heal()

        assert await asked == b"abc"


async def test_a_refusing_proxy_lets_the_open_ones_live(proxy: Proxy):
    """And listens on the same port again when it is healed."""
    async with wire(proxy) as one:
        await one.echo(b"1")
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, proxy.port)
        assert await one.echo(b"2") == b"2"

        proxy.heal()

        async with wire(proxy) as new:
            assert await new.echo(b"3") == b"3"


async def test_a_slow_wire_takes_its_time(proxy: Proxy):
    """No more bytes in a second than were asked for."""
    proxy.slow(5000)
    async with wire(proxy) as one:
        begun = time.monotonic()

        assert await one.echo(b"x" * 1000) == b"x" * 1000

        assert time.monotonic() - begun >= 0.2


async def test_an_ended_proxy_leaves_no_connection_and_no_thread(proxy: Proxy):
    """Nothing is left that a later test would warn of."""
    with Proxy(proxy.port) as before:
        async with wire(before) as one:
            await one.echo(b"1")
            threads = threading.active_count()
            before.__exit__()

            assert threading.active_count() == threads - 1
            with pytest.raises(ConnectionResetError):
                await one.ends()
    with socket.socket() as trial:
        assert trial.connect_ex((HOST, before.port)) != 0


async def test_a_client_of_the_node_notices_a_cut_and_comes_back(
    shared_broker: Broker, broker_proxy: Proxy, rabbit_vhost: str
):
    """The node sees it too: it has no connection left."""
    url = shared_broker.url_of(rabbit_vhost, port=broker_proxy.port)
    connection = await aio_pika.connect(url)
    ended = asyncio.Event()
    connection.close_callbacks.add(lambda *_: ended.set())

    broker_proxy.cut()

    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    await until(lambda: shared_broker.connections() == 0, "the node without connection")
    async with await aio_pika.connect(url):
        await until(lambda: shared_broker.connections() == 1, "one again")


async def test_a_handshake_that_is_cut_fails(
    shared_broker: Broker, broker_proxy: Proxy, rabbit_vhost: str
):
    """Wherever it is cut."""
    broker_proxy.cut_at_random(1, most=300)
    for _ in range(10):
        with pytest.raises((AMQPConnectionError, OSError)):
            await aiormq.connect(shared_broker.url_of(rabbit_vhost, port=broker_proxy.port))
    assert broker_proxy.counts.cut == 10
