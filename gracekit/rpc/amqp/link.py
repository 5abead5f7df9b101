"""One connection to the broker, opened again whenever it is lost.

It is not aio-pika's robust connection, which restores consumers after a loss. Whether to
read again is gracekit's decision (during a drain it does not), so the link only
reconnects, and its users open new channels. Channels and delivery tags of an earlier
connection are void.

aiormq's tasks for reading, writing and heartbeats run until their connection is closed. So this
module also closes a connection whose opening failed or was cancelled. `aio_pika.Connection` does
not: if it is cancelled right after the broker's last answer, it forgets an open connection, which
heartbeats then keep alive for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator, Mapping
from typing import Final

import aio_pika.connection
import aiormq
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ConnectionClosed,
    ProbableAuthenticationError,
)
from yarl import URL

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.rpc.amqp.bounds import bounded, finished, said
from gracekit.rpc.amqp.channels import MessageChannel
from gracekit.rpc.amqp.url import Broker, Host
from gracekit.rpc.amqp.wire import CloseReason, Wire, WireFactory
from gracekit.telemetry.telemetry import Telemetry

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


# aiormq's logger would leak requests: at DEBUG it logs every frame, and at ERROR each message that
# is returned too late, with its arguments and context. For a lost connection it logs users and
# stack traces, where our own events say enough.
if logging.getLogger("aiormq").level == logging.NOTSET:
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)

NOT_ALLOWED: Final = 530
READY_S: Final = 0.05
SILENT_S: Final = 1.0
"""Seconds without an answer or any other byte after which a broker counts as silent."""
CUT_SILENT_AFTER_S: Final = 0.25
"""Used instead of `CUT_AFTER_S` if the broker was silent on another connection."""


def is_told(tries: int) -> bool:
    """Whether to log a failed try: only the 1st, 2nd, 4th, 8th, ..., not one every 3 s."""
    return tries & (tries - 1) == 0


class Link:
    """A connection that is opened again after each loss.

    Args:
        broker: The broker to connect to.
        purpose: What the connection is for, `consume` or `publish`.
        label: Names this process. Operators see label and purpose in the broker's list of
            connections.
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
        self._connection: Connection | None = None
        self._up = asyncio.Event()
        self._changing = asyncio.Lock()  # lets concurrent first uses share one connection
        self._is_started = False
        self._keeper: asyncio.Task[None] | None = None
        self._next = 0  # index of the host to try first
        self._silent = False  # the last connection was cut for silence, and there is no new one

    async def start(self) -> None:
        """Connect; try each host once.

        Raises:
            ConfigError: the broker refuses the login or vhost, or its certificate is not trusted.
            DependencyError: no host can be reached.
        """
        async with self._changing:
            if self._is_started:
                return
            await self._end(CUT_AFTER_S)  # clean up after a stop that was cancelled
            self._take(await self._connect())
            self._keeper = background.start(
                self._keep,
                f"amqp-{self._purpose}",
                telemetry=self._telemetry,
                clock=self._clock,
            )
            self._is_started = True

    async def stop(self, *, cut_after_s: float = CUT_AFTER_S) -> None:
        """Disconnect, and do not reconnect.

        Args:
            cut_after_s: Seconds for the broker to confirm the close; then the socket is aborted.
        """
        async with self._changing:
            self._is_started = False
            await self._end(cut_after_s)

    async def _end(self, cut_after_s: float) -> None:
        """End the keeper and the connection.

        Each is forgotten only once it has ended. So if this call is cancelled, the next call ends
        what is left.
        """
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=CLOSE_TIMEOUT_S)
            self._keeper = None
        await self._drop(cut_after_s)

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Abort the connection if no byte at all came while the block waited for an answer.

        All other waits on this connection then fail at once. Otherwise each would run into its
        own timeout: heartbeats detect a dead broker only after three periods.

        Args:
            what: The question, for the event.
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
        """Open a channel for declarations and queries; wait for a connection first.

        Raises:
            DependencyError: the channel could not be opened.
        """
        await self._up.wait()
        return await self._open_channel()

    async def messages(self, *, confirms: bool = False) -> MessageChannel:
        """Open a channel for messages; see `channel`."""
        await self._up.wait()
        wire = self._wire
        channel = await self._open_channel(confirms=confirms)
        assert wire is not None
        return MessageChannel(channel, wire)

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
        """Whether the broker blocks publishers, because of its memory or disk alarm."""
        if self._connection is None:
            return False
        ready = asyncio.ensure_future(self._connection.amqp.ready())
        try:
            done, _ = await asyncio.wait({ready}, timeout=READY_S)
        finally:
            ready.cancel()
        return not done

    async def wait_unblocked(self) -> None:
        """Wait until the broker no longer blocks publishers, or the connection is lost."""
        if self._connection is None:
            return
        ready = asyncio.ensure_future(self._connection.amqp.ready())
        closing = self._connection.amqp.closing  # after a loss ready() never ends
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
        """Whether the last connection was aborted because the broker sent nothing."""
        return self._silent

    @property
    def server(self) -> Mapping[str, object]:
        """The broker's server properties: `{"product": "RabbitMQ", "version": "3.10.8", …}`.

        Empty while there is no connection.
        """
        connection = self._connection if self.is_up else None
        return {} if connection is None else connection.amqp.server_properties

    # -- the connection ------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            if self._connection is not None:  # None: it failed before it had reconnected
                error = self._said(await self._lost())
                self._up.clear()
                self._telemetry.emit("broker.lost", purpose=self._purpose, error=error)
                await self._drop()
            self._take(await self._reconnect())

    async def _lost(self) -> BaseException:
        """Wait until the connection ends; return why."""
        assert self._connection is not None
        closing = self._connection.amqp.closing
        await asyncio.wait({closing})
        return (not closing.cancelled() and closing.exception()) or ConnectionError("closed")

    def _said(self, error: BaseException) -> str:
        """Why the connection ended, as text.

        If no heartbeat comes, aiormq only cancels its reader, so that case is recognised by time.
        """
        wire = self._wire
        silent_s = 0.0 if wire is None else self._clock.loop() - wire.heard_at
        if isinstance(error, asyncio.CancelledError) and silent_s > self._broker.heartbeat_s:
            return f"no heartbeat for {silent_s:.0f} s"
        if isinstance(error, asyncio.CancelledError):
            return "closed"
        return said(error)

    @property
    def _wire(self) -> Wire | None:
        """The socket of the present connection."""
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
            except Exception as error:  # noqa: BLE001 - no other task would try again
                if is_told(tries):
                    self._telemetry.emit(
                        "broker.unreachable", purpose=self._purpose, tries=tries, error=str(error)
                    )
            else:
                self._telemetry.emit("broker.connected", purpose=self._purpose, tries=tries)
                return connection

    async def _connect(self) -> Connection:
        """Try each host once, starting after the last one that failed."""
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
            if connection.wires.is_foreign:
                raise self._foreign(host) from None
            raise self._explained(host, error, connection.wires.goodbye) from None
        return connection

    def _explained(
        self, host: Host, error: AMQPError, goodbye: CloseReason | None
    ) -> GracekitError:
        """Convert *error*: DependencyError if waiting may help, otherwise ConfigError.

        No text contains user or password.
        """
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
            if host.user == "guest":
                return ConfigError(
                    f"broker {host} refused the login guest, which a URL without a login means; "
                    "write user and password into the transport URL: amqp://user:password@host"
                )
            return ConfigError(
                f"broker {host} refused the login; check user and password in the transport URL, "
                "and the user's permissions on the vhost"
            )
        if goodbye is not None:
            return self._refusal(host, goodbye)
        return DependencyError(f"broker {host} cannot be reached: {said(error)}")

    def _foreign(self, host: Host) -> DependencyError:
        return DependencyError(
            f"what answers at {host} does not speak AMQP 0-9-1: check host and port of the "
            f"transport URL ({'5671' if self._tls else '5672'} by default; RabbitMQ's ports for "
            "HTTP, such as 15672, are others)"
        )

    def _refusal(self, host: Host, goodbye: CloseReason) -> GracekitError:
        """Convert the reason that the broker gave when it refused the vhost."""
        why = goodbye.text.replace(f" for user '{host.user}'", "")
        # RabbitMQ uses one code for a missing vhost and for a limit of vhost, user or node.
        if goodbye.code != NOT_ALLOWED or why.endswith("is reached"):
            return DependencyError(
                f"broker {host} accepts no connection to vhost {self._broker.vhost!r} now: {why}"
            )
        return ConfigError(
            f"broker {host} refused vhost {self._broker.vhost!r}: {why}; make it (rabbitmqctl "
            "add_vhost), let the user in (rabbitmqctl set_permissions), or mend the "
            "transport URL"
        )

    def _trusted(self) -> str:
        tls = self._broker.tls
        return (tls and tls.cafile) or "the system's own"
