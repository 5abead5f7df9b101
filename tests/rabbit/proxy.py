"""A wire between client and node that can be cut, stopped up, slowed and taken away.

It lives in a thread with a loop of its own: a network goes on while a client's loop is blocked,
be it by the code under test or by a test that gives the node an order.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from tests.rabbit.machine import HOST, free_ports
from tests.rabbit.mutations import ChangeFrame, Splitter

T = TypeVar("T")

_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: RST instead of FIN
_PIECE: Final = 65_536
_SLOW_PIECE: Final = 512
_ANSWER_S: Final = 30.0
_FAREWELL_S: Final = 1.0  # a frozen peer does not hold up the end


class Way(enum.Enum):
    """Where bytes go."""

    UP = "up"  # from client to node
    DOWN = "down"


@dataclass(slots=True)
class Counts:
    """What has happened so far."""

    accepted: int = 0
    cut: int = 0  # by the proxy; a connection that a peer closed is none
    held: int = 0  # bytes that had to wait
    swallowed: int = 0  # bytes
    passed: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))  # bytes


class _Link:
    """A client's connection and the one to the node that was opened for it."""

    def __init__(self, task: asyncio.Task[Any], left: dict[Way, int]) -> None:
        self.task = task
        self.left = left
        self.lost = False
        self.splitter: Splitter | None = None
        self._writers: list[asyncio.StreamWriter] = []

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)

    def reset(self) -> None:
        """Close at once, by RST."""
        for writer in self._writers:
            wire: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def close(self) -> None:
        """Let the bytes arrive that are on their way, and close."""
        try:
            async with asyncio.timeout(_FAREWELL_S):
                for writer in self._writers:
                    writer.close()
                for writer in self._writers:
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except TimeoutError:
            self.reset()


class Proxy:
    """A port of its own before the port of a node.

    Args:
        behind: The node's port.
    """

    def __init__(self, behind: int) -> None:
        self.counts = Counts()
        (self.port,) = free_ports(1)
        self._behind = behind
        self._swallows = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._bytes_per_s: float | None = None
        self._fate: Callable[[], dict[Way, int]] = dict
        self._change: ChangeFrame | None = None
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop.is_closed():
            return
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def links(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    # -- orders --------------------------------------------------------------------

    def cut(self, *, reset: bool = True) -> int:
        """Cut all connections now, by RST or as if the peer had closed; returns how many."""
        return self._do(self._cut_all(self._links, reset=reset))

    def cut_after(self, number: int, way: Way) -> None:
        """Reset each new connection when exactly so many bytes have gone that way."""
        self._fate = lambda: {way: number}

    def cut_at_random(self, seed: int, *, most: int) -> None:
        """Reset each new connection after up to *most* bytes, one way or the other."""
        dice = random.Random(seed)
        self._fate = lambda: {dice.choice(list(Way)): dice.randint(1, most)}

    def lead_to(self, behind: int) -> None:
        """Have new connections lead to another port."""
        self._behind = behind

    def stall(self) -> None:
        """Hold back all bytes, as a network does that comes back."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def swallow(self) -> None:
        """Be a black hole: take everything, pass nothing, close nothing."""
        self._swallows = True

    def slow(self, bytes_per_s: float) -> None:
        """Pass no more than that, each way of each connection."""
        self._bytes_per_s = bytes_per_s

    def change_frames(self, change: ChangeFrame) -> None:
        """Have each whole frame that comes down changed, on all connections made from now on."""
        self._change = change

    def refuse(self) -> None:
        """Refuse new connections; those that are open live on."""
        self._do(self._refuse())

    def heal(self) -> None:
        """Pass everything; who lost bytes is cut off, as nothing sensible could follow."""
        self._fate = dict
        self._bytes_per_s = None
        self._swallows = False
        self._loop.call_soon_threadsafe(self._flows.set)
        self._do(self._cut_all({link for link in self._links if link.lost}, reset=True))
        self._do(self._listen())

    def _do(self, order: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(order, self._loop).result(_ANSWER_S)

    # -- in the thread -------------------------------------------------------------

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _close(self) -> None:
        await self._refuse()
        await self._cut_all(self._links, reset=True)

    async def _cut_all(self, links: set[_Link], *, reset: bool) -> int:
        tasks = [self._cut(link, reset=reset) for link in links]
        if tasks:
            await asyncio.wait(tasks)
        return len(tasks)

    def _cut(self, link: _Link, *, reset: bool) -> asyncio.Task[Any]:
        self.counts.cut += 1
        if reset:
            link.reset()
        link.task.cancel()
        return link.task

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.counts.accepted += 1
        link = _Link(task, self._fate())
        if self._change is not None:
            link.splitter = Splitter(self._change)
        link.add(writer)
        self._links.add(link)
        try:
            await self._serve(link, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # a peer that has gone, or a cut: nothing awaits this task but a cut
        finally:
            await link.close()
            self._links.discard(link)

    async def _serve(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._swallows:
            link.lost = True
            await self._pump(link, Way.UP, reader, writer)  # which nothing reaches
            return
        below, above = await asyncio.open_connection(HOST, self._behind)
        link.add(above)
        pumps = (
            asyncio.ensure_future(self._pump(link, Way.UP, reader, above)),
            asyncio.ensure_future(self._pump(link, Way.DOWN, below, writer)),
        )
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, link: _Link, way: Way, reader: asyncio.StreamReader, to: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(_SLOW_PIECE if self._bytes_per_s else _PIECE):
            if not self._flows.is_set():
                self.counts.held += len(piece)
                await self._flows.wait()
            if self._bytes_per_s:
                await asyncio.sleep(len(piece) / self._bytes_per_s)
            if self._swallows or link.lost:
                link.lost = True
                self.counts.swallowed += len(piece)
                continue
            if link.splitter is not None and way is Way.DOWN:
                piece = link.splitter.feed(piece)
            piece = piece[: link.left.get(way)]
            to.write(piece)
            await to.drain()
            self.counts.passed[way] += len(piece)
            if way in link.left:
                link.left[way] -= len(piece)
                if not link.left[way]:
                    self._cut(link, reset=True)
                    return
