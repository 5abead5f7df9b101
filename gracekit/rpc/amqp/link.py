"""One connection to the broker, made again whenever it is lost.

A plain connection, no robust one: whether to read again after a loss is a
decision of ours (in a drain it is no), so this link only connects, and who uses
it opens channels anew. Each connection is a generation; what belonged to an
earlier one is void.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Final

import aio_pika.connection
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ProbableAuthenticationError,
)

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.rpc.amqp.bounds import bounded, said
from gracekit.rpc.amqp.channels import FramedChannel, MessageChannel, PlainChannel
from gracekit.rpc.amqp.connection import CLOSE_TIMEOUT_S, CUT_AFTER_S, Connection
from gracekit.rpc.amqp.url import Broker, Host
from gracekit.rpc.amqp.wire import CloseReason, Wire
from gracekit.telemetry.telemetry import Telemetry

# At DEBUG they log every frame, and at ERROR a message that was returned too late, with the
# arguments and contexts of requests; of a lost connection they tell users and stacks, where an
# event of ours says enough.
for _name, _level in (
    ("aiormq", logging.CRITICAL),
    ("aio_pika", logging.INFO),
):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(_level)

NOT_ALLOWED: Final = 530
KNOWN_AIORMQ: Final = frozenset({"7.2.4"})
"""With which our frames were tested; with any other all messages go through aiormq."""

READY_S: Final = 0.05
SILENT_S: Final = 1.0
"""The shortest wait in which a broker that sends nothing counts as silent."""
CUT_SILENT_AFTER_S: Final = 0.25
"""As `CUT_AFTER_S`, of a broker that was silent on another connection."""


def is_told(tries: int) -> bool:
    """Whether a failed try is worth a line: the 1st, 2nd, 4th, 8th, ... and not one every 3 s."""
    return tries & (tries - 1) == 0


class Link:
    """A connection that is there again after each loss.

    Args:
        broker: Where to connect.
        purpose: What for; operators see it in the broker's list of connections.
        label: Who connects, likewise.
    """

    def __init__(
        self, broker: Broker, *, purpose: str, label: str, clock: Clock, telemetry: Telemetry
    ) -> None:
        self._broker = broker
        self._purpose = purpose
        self._label = label
        self._clock = clock
        self._telemetry = telemetry
        self._tls = broker.tls.context() if broker.tls is not None else None
        self._own_frames = broker.own_frames and version("aiormq") in KNOWN_AIORMQ
        self._connection: Connection | None = None
        self._up = asyncio.Event()
        self._changing = asyncio.Lock()  # two first users start one connection
        self._is_started = False
        self._keeper: asyncio.Task[None] | None = None
        self._next = 0  # the host that is tried first
        self._silent = False  # and so cut; until there is another connection

    async def start(self) -> None:
        """Connect; each host is tried once.

        Raises:
            ConfigError: the broker refuses us, or does not prove who it is.
            DependencyError: no host can be reached.
        """
        async with self._changing:
            if self._is_started:
                return
            await self._end(CUT_AFTER_S)  # what a stop that was cancelled has left
            self._take(await self._connect())
            self._keeper = background.start(
                self._keep,
                f"amqp-{self._purpose}",
                telemetry=self._telemetry,
                clock=self._clock,
            )
            self._is_started = True

    async def stop(self, *, cut_after_s: float = CUT_AFTER_S) -> None:
        """Disconnect, and stay so.

        Args:
            cut_after_s: Seconds that the broker has for its goodbye.
        """
        async with self._changing:
            self._is_started = False
            await self._end(cut_after_s)

    async def _end(self, cut_after_s: float) -> None:
        """Each is forgotten when it has ended: a stop that is cancelled is taken up by the next."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=CLOSE_TIMEOUT_S)
            self._keeper = None
        await self._drop(cut_after_s)

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Cut the connection if the block waits in vain for an answer, and nothing else comes.

        Whoever else waits on this connection then hears at once that it is lost. Otherwise each
        would wait for as long again: heartbeats need three times their period to tell.
        """
        wire, asked_at = self._wire, self._clock.loop()
        try:
            yield
        finally:
            if wire is not None and not wire.is_lost and wire.heard_at < asked_at:
                self._cut_silent(wire, what, self._clock.loop() - asked_at)

    def _cut_silent(self, wire: Wire, what: str, waited_s: float) -> None:
        if waited_s >= SILENT_S:
            self._silent = True
            self._telemetry.emit(
                "broker.silent", purpose=self._purpose, what=what, waited_s=round(waited_s, 1)
            )
            wire.abort()

    async def channel(self) -> Channel:
        """A new channel for exchanges with the broker, as soon as there is a connection.

        Raises:
            DependencyError: the connection was lost meanwhile.
        """
        await self._up.wait()
        return await self._open_channel()

    async def messages(self, *, confirms: bool = False) -> MessageChannel:
        """A new channel for messages; see `channel`."""
        await self._up.wait()
        wire = self._wire
        channel = await self._open_channel(confirms=confirms)
        assert wire is not None
        return (FramedChannel if self._own_frames else PlainChannel)(channel, wire)

    async def _open_channel(self, *, confirms: bool = False) -> Channel:
        if self._connection is None:
            raise DependencyError("the connection to the broker was lost")
        opening = self._connection.amqp.channel(publisher_confirms=confirms, on_return_raises=True)
        try:
            channel = await bounded(opening, self._broker.connect_timeout_s, "no channel")
        except AMQPError as error:
            raise DependencyError(f"no channel: {said(error)}") from error
        assert isinstance(channel, Channel)
        return channel

    async def is_blocked(self) -> bool:
        """Whether the broker takes no messages for now: an alarm for want of memory or disk."""
        if self._connection is None:
            return False
        ready = asyncio.ensure_future(self._connection.amqp.ready())
        try:
            done, _ = await asyncio.wait({ready}, timeout=READY_S)
        finally:
            ready.cancel()
        return not done

    async def wait_unblocked(self) -> None:
        """Wait while the broker takes no messages; no longer than there is a connection."""
        if self._connection is None:
            return
        ready = asyncio.ensure_future(self._connection.amqp.ready())
        closing = self._connection.amqp.closing  # of one that is lost ready() never ends
        try:
            await asyncio.wait({ready, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            closing.cancel()

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, as far as we know."""
        return self._up.is_set()

    @property
    def is_silent(self) -> bool:
        """Whether the last connection was cut because the broker sent nothing any more."""
        return self._silent

    @property
    def server(self) -> Mapping[str, object]:
        """What the broker says of itself: `{"product": "RabbitMQ", "version": "3.10.8", …}`.

        Nothing while there is no connection.
        """
        connection = self._connection if self.is_up else None
        return {} if connection is None else connection.amqp.server_properties

    # -- the connection ------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            if self._connection is not None:  # else a fault came between loss and reconnection
                error = self._said(await self._lost())
                self._up.clear()
                self._telemetry.emit("broker.lost", purpose=self._purpose, error=error)
                await self._drop()
            self._take(await self._reconnect())

    async def _lost(self) -> BaseException:
        """Wait until the connection ends; returns why."""
        assert self._connection is not None
        closing = self._connection.amqp.closing
        await asyncio.wait({closing})
        return (not closing.cancelled() and closing.exception()) or ConnectionError("closed")

    def _said(self, error: BaseException) -> str:
        """Why the connection ended; aiormq cancels its reader when no heartbeat comes."""
        wire = self._wire
        silent_s = 0.0 if wire is None else self._clock.loop() - wire.heard_at
        if isinstance(error, asyncio.CancelledError) and silent_s > self._broker.heartbeat_s:
            return f"no heartbeat for {silent_s:.0f} s"
        if isinstance(error, asyncio.CancelledError):
            return "closed"
        return said(error)

    @property
    def _wire(self) -> Wire | None:
        """The present connection's."""
        connection = self._connection
        return None if connection is None else connection.wires.wire

    def _take(self, connection: Connection) -> None:
        self._connection = connection
        self._silent = False
        self._up.set()

    async def _drop(self, cut_after_s: float = CUT_AFTER_S) -> None:
        self._up.clear()
        if self._connection is not None:
            await self._connection.close(cut_after_s)
            self._connection = None

    async def _reconnect(self) -> Connection:
        pauses, tries = backoff.CONNECTION.pauses(self._clock), 0
        while True:
            await asyncio.sleep(next(pauses))
            tries += 1
            try:
                connection = await self._connect()
            except Exception as error:  # noqa: BLE001 - whatever it was, nobody else would try again
                if is_told(tries):
                    self._telemetry.emit(
                        "broker.unreachable", purpose=self._purpose, tries=tries, error=str(error)
                    )
            else:
                self._telemetry.emit("broker.connected", purpose=self._purpose, tries=tries)
                return connection

    async def _connect(self) -> Connection:
        """Try each host once, beginning with the one after the last that failed."""
        hosts = self._broker.hosts
        failures: list[str] = []
        refusal: ConfigError | None = None
        for _ in hosts:
            host = hosts[self._next % len(hosts)]
            try:
                return await self._connect_to(host)
            except ConfigError as error:
                refusal = error
                failures.append(str(error))
            except DependencyError as error:
                failures.append(str(error))
            self._next += 1
        if refusal is not None and len(hosts) == 1:
            raise refusal
        raise DependencyError("; ".join(failures))

    async def _connect_to(self, host: Host) -> Connection:
        connection = Connection(
            aio_pika.connection.make_url(
                host=host.host,
                port=host.port,
                login=host.user,
                password=host.password,
                virtualhost=self._broker.vhost,
                ssl=self._tls is not None,
                heartbeat=int(self._broker.heartbeat_s),
            ),
            tls=self._tls,
            name=f"{self._label} {self._purpose}",
        )
        try:
            await bounded(connection.open(), self._broker.connect_timeout_s, f"broker {host}")
        except AMQPError as error:
            raise self._explained(host, error, connection.wires.goodbye) from None
        return connection

    def _explained(
        self, host: Host, error: AMQPError, goodbye: CloseReason | None
    ) -> GracekitError:
        """What is wrong, and whether time can mend it; the login is in no text."""
        cause = error.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError(
                f"broker {host} does not prove who it is: {cause.verify_message}; its certificate "
                f"must be valid now, name {host.host!r}, and come from an authority in "
                f"cafile={self._trusted()}"
            )
        if isinstance(cause, ssl.SSLError):
            return ConfigError(
                f"broker {host} does not speak TLS as we do: {said(cause)}; amqps:// needs the "
                "broker's TLS port (5671 by default)"
            )
        if isinstance(error, AuthenticationError | ProbableAuthenticationError):
            return ConfigError(
                f"broker {host} refused the login; check user and password in the transport URL, "
                "and the user's permissions on the vhost"
            )
        if goodbye is not None:
            return self._refusal(host, goodbye)
        return DependencyError(f"broker {host} cannot be reached: {said(error)}")

    def _refusal(self, host: Host, goodbye: CloseReason) -> GracekitError:
        """The broker closed the connection when it heard the vhost, and said why."""
        why = goodbye.text.replace(f" for user '{host.user}'", "")
        # A limit of the vhost, the user or the node is told by the same code as a missing vhost.
        if goodbye.code != NOT_ALLOWED or why.endswith("is reached"):
            return DependencyError(
                f"broker {host} lets nobody into vhost {self._broker.vhost!r} now: {why}"
            )
        return ConfigError(
            f"broker {host} refused vhost {self._broker.vhost!r}: {why}; make it (rabbitmqctl "
            "add_vhost), let the user in (rabbitmqctl set_permissions), or mend the "
            "transport URL"
        )

    def _trusted(self) -> str:
        tls = self._broker.tls
        return (tls and tls.cafile) or "the system's own"
