"""One connection of aiormq, on our own socket, from its opening to its end.

aiormq's tasks for reading, writing and heartbeats live until somebody closes their connection. So
an opening that fails or is cancelled is closed here too. `aio_pika.Connection` does not do that:
cancelled between the last answer of the broker and its own next step, it loses a connection that
is open, and heartbeats keep that one alive for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from typing import Final

import aiormq
from aiormq.exceptions import ConnectionClosed
from yarl import URL

from gracekit.rpc.amqp.bounds import bounded, finished
from gracekit.rpc.amqp.wire import WireFactory

CLOSE_TIMEOUT_S: Final = 3.0
"""A broker that does not answer must not hold the end of a process."""
CUT_AFTER_S: Final = 2.0
"""For aiormq to say goodbye; then its socket is cut."""


class Connection:
    """See the module.

    Attributes:
        wires: Its socket.
        amqp: What makes channels, once it is open.
    """

    def __init__(self, url: URL, *, tls: ssl.SSLContext | None, name: str) -> None:
        self.wires: Final = WireFactory()
        self.amqp: Final = aiormq.Connection(
            url,
            context=tls,
            transport_factory=self.wires,
            client_properties={"connection_name": name},
        )
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect; where that fails or is cancelled, nothing is left of it.

        Raises:
            AMQPError: the broker refuses it, or cannot be reached.
        """
        opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.shield(opening)
        except BaseException:
            await finished(self._abandon(opening))
            raise

    async def _open(self) -> None:
        await self.amqp.connect()
        await self.amqp.ready()

    async def _abandon(self, opening: asyncio.Task[None]) -> None:
        self.wires.abort()  # aiormq's goodbye would wait for a broker that may be frozen
        opening.cancel()  # there may be no socket yet
        await asyncio.wait({opening}, timeout=CLOSE_TIMEOUT_S)
        await self.close()

    async def close(self, cut_after_s: float = CUT_AFTER_S) -> None:
        """Say goodbye, and wait for the end; may be called again, and by several at once.

        If this wait is cancelled, the closing goes on; it is bounded.

        Args:
            cut_after_s: Seconds that the broker has for its goodbye.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        with self._cut_after(cut_after_s):
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Whatever fails while closing, the socket is cut: there is nothing left to report.
        with self._cut_after(CUT_AFTER_S), contextlib.suppress(Exception):
            await bounded(self.amqp.close(ConnectionClosed), CLOSE_TIMEOUT_S, "close")

    @contextlib.contextmanager
    def _cut_after(self, seconds: float) -> Iterator[None]:
        """Cut the socket: aiormq waits, deaf to a cancellation, for a peer that is frozen."""
        cut = asyncio.get_running_loop().call_later(seconds, self.wires.abort)
        try:
            yield
        finally:
            cut.cancel()
