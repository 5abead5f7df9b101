"""One connection of aiormq, on our own socket, from its opening to its end.

aiormq's tasks for reading, writing and heartbeats run until their connection is closed. So this
module also closes a connection whose opening failed or was cancelled. `aio_pika.Connection` does
not: if it is cancelled right after the broker's last answer, it forgets an open connection, which
heartbeats then keep alive for ever.
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

from gracekit.errors import ConfigError
from gracekit.rpc.amqp.bounds import bounded, finished
from gracekit.rpc.amqp.wire import WireFactory

CLOSE_TIMEOUT_S: Final = 3.0
"""Seconds to wait for a close: a broker that does not answer must not delay a process's end."""
CUT_AFTER_S: Final = 2.0
"""Seconds for aiormq to close the connection in good order; then its socket is aborted."""


class Connection:
    """One connection; see the module.

    Attributes:
        wires: Makes and holds its socket.
        amqp: The connection of aiormq, which makes channels once it is open.
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
        """Connect; if that fails or is cancelled, everything opened so far is closed.

        Raises:
            AMQPError: the broker refuses the connection, or cannot be reached.
            ConfigError: this version of aiormq does not use the socket that it is given.
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
        if self.wires.wire is None:  # it would take all messages, and we none
            raise ConfigError(
                "the installed aiormq opened a socket of its own, and gracekit cannot use that: "
                "install a version that gracekit supports (`pip check` names it)"
            )

    async def _abandon(self, opening: asyncio.Task[None]) -> None:
        self.wires.abort()  # an orderly close would wait for a broker that may be frozen
        opening.cancel()  # there may be no socket yet
        await asyncio.wait({opening}, timeout=CLOSE_TIMEOUT_S)
        await self.close()

    async def close(self, cut_after_s: float = CUT_AFTER_S) -> None:
        """Close, and wait for the end; may be called again, and by several tasks at once.

        If this wait is cancelled, the close goes on; it is bounded.

        Args:
            cut_after_s: Seconds for the broker to answer; then the socket is aborted.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        with self._cut_after(cut_after_s):
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Errors of a close are ignored: the socket is aborted in any case.
        with self._cut_after(CUT_AFTER_S), contextlib.suppress(Exception):
            await bounded(self.amqp.close(ConnectionClosed), CLOSE_TIMEOUT_S, "close")

    @contextlib.contextmanager
    def _cut_after(self, seconds: float) -> Iterator[None]:
        """Abort the socket after *seconds*: a frozen peer makes aiormq wait, even if cancelled."""
        cut = asyncio.get_running_loop().call_later(seconds, self.wires.abort)
        try:
            yield
        finally:
            cut.cancel()
