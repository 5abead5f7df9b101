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
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

import aio_pika
from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ConnectionClosed,
    ConnectionNotAllowed,
    ProbableAuthenticationError,
)
from pamqp.commands import Connection

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.rpc.amqp.url import Broker, Host
from gracekit.telemetry import Telemetry

T = TypeVar("T")

# At DEBUG they log every frame, and at ERROR a message that was returned too late, with the
# arguments and contexts of requests; of a lost connection they tell users and stacks, where an
# event of ours says enough.
for _name, _level in (
    ("aiormq", logging.CRITICAL),
    ("aio_pika", logging.INFO),
):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(_level)

# A broker refuses a vhost by closing the connection. aiormq 7 reads that answer only where this
# table of the protocol has it; else it drops code and reason, and tells of an unexpected frame.
if Connection.Close.name not in Connection.Open.valid_responses:
    Connection.Open.valid_responses.append(Connection.Close.name)

NOT_ALLOWED: Final = 530

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0
READY_S: Final = 0.05
CLOSE_TIMEOUT_S: Final = 3.0
"""A broker that does not answer must not hold the end of a process."""

TROUBLE: Final = (AMQPError, DependencyError)
"""What `bounded` raises."""


async def bounded(exchange: Awaitable[T], timeout_s: float, what: str) -> T:
    """One exchange with the broker.

    Args:
        exchange: Of aio-pika or aiormq, without a timeout of theirs: they bound by `wait_for`,
            which before Python 3.12 now and then keeps the end of a connection from who waits.
        timeout_s: Its bound, in seconds.
        what: Names it in the error.

    Raises:
        DependencyError: the connection was lost, or the time is up; whether it was carried
            out is not known. AMQP errors that say more are raised as they are.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        async with asyncio.timeout(timeout_s):
            return await exchange
    except TimeoutError:
        raise DependencyError(f"{what}: the broker did not answer in {timeout_s:g} s") from None
    except BaseException as error:
        if task is not None and task.cancelling() > cancels:
            # aiormq may raise an error of its own in the place of our cancellation.
            raise asyncio.CancelledError from error
        if isinstance(error, AMQPError):
            raise
        # aiormq cancels who waits when a connection dies under them, or throws a bare Exception; a
        # closed channel or connection is a RuntimeError.
        if isinstance(error, asyncio.CancelledError) or type(error) is Exception:
            raise DependencyError(f"{what}: the connection to the broker was lost") from error
        if isinstance(error, OSError | RuntimeError):
            raise DependencyError(f"{what}: {said(error)}") from error
        raise


async def close_channel(channel: Channel, timeout_s: float) -> None:
    """Close a channel; one that the broker does not confirm in time goes with its connection.

    In a task of its own: a close that is cancelled would be sent twice, for which the broker
    closes the whole connection.
    """
    closing = asyncio.ensure_future(channel.close())
    closing.add_done_callback(_ignore_end)
    await asyncio.wait({closing}, timeout=timeout_s)


def _ignore_end(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # seen: what a close meets is of no interest


def said(error: BaseException) -> str:
    """What an error of the broker or the network says, in one line."""
    return (str(error) or type(error).__name__).replace("\n", " ")


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
        self._connection: aio_pika.abc.AbstractConnection | None = None
        self._up = asyncio.Event()
        self._changing = asyncio.Lock()  # two first users start one connection
        self._keeper: asyncio.Task[None] | None = None
        self._next = 0  # the host that is tried first

    async def start(self) -> None:
        """Connect; each host is tried once.

        Raises:
            ConfigError: the broker refuses us, or does not prove who it is.
            DependencyError: no host can be reached.
        """
        async with self._changing:
            if self._keeper is None:
                self._take(await self._connect())
                self._keeper = asyncio.create_task(self._keep(), name=f"amqp-{self._purpose}")

    async def stop(self) -> None:
        """Disconnect, and stay so."""
        async with self._changing:
            keeper, self._keeper = self._keeper, None
            if keeper is not None:
                keeper.cancel()
                await asyncio.wait({keeper}, timeout=CLOSE_TIMEOUT_S)
            await self._drop()

    async def channel(self, *, confirms: bool = False) -> Channel:
        """A new channel, as soon as there is a connection.

        Raises:
            DependencyError: the connection was lost meanwhile.
        """
        await self._up.wait()
        assert self._connection is not None
        transport = self._connection.transport
        if transport is None:
            raise DependencyError("the connection to the broker was lost")
        opening = transport.connection.channel(publisher_confirms=confirms, on_return_raises=True)
        try:
            channel = await bounded(opening, self._broker.connect_timeout_s, "no channel")
        except AMQPError as error:
            raise DependencyError(f"no channel: {said(error)}") from error
        assert isinstance(channel, Channel)
        return channel

    async def is_blocked(self) -> bool:
        """Whether the broker takes no messages for now: an alarm for want of memory or disk."""
        transport = self._connection.transport if self._connection is not None else None
        if transport is None:
            return False
        ready = asyncio.ensure_future(transport.connection.ready())
        try:
            done, _ = await asyncio.wait({ready}, timeout=READY_S)
        finally:
            ready.cancel()
        return not done

    async def wait_unblocked(self) -> None:
        """Wait while the broker takes no messages; at once where there is no connection."""
        transport = self._connection.transport if self._connection is not None else None
        if transport is not None:
            await transport.connection.ready()

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, as far as we know."""
        return self._up.is_set()

    @property
    def server(self) -> Mapping[str, object]:
        """What the broker says of itself: `{"product": "RabbitMQ", "version": "3.10.8", …}`.

        Nothing while there is no connection.
        """
        transport = self._connection.transport if self._connection is not None else None
        return {} if transport is None else transport.connection.server_properties

    # -- the connection ------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            error = await self._lost()
            self._up.clear()
            self._telemetry.emit("broker.lost", purpose=self._purpose, error=said(error))
            await self._drop()
            self._take(await self._reconnect())

    async def _lost(self) -> BaseException:
        """Wait until the connection ends; returns why."""
        assert self._connection is not None
        transport = self._connection.transport
        if transport is None:
            return ConnectionError("closed")
        closing = transport.connection.closing
        await asyncio.wait({closing})
        return (not closing.cancelled() and closing.exception()) or ConnectionError("closed")

    def _take(self, connection: aio_pika.abc.AbstractConnection) -> None:
        self._connection = connection
        self._up.set()

    async def _drop(self) -> None:
        self._up.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*TROUBLE):
                await bounded(connection.close(), CLOSE_TIMEOUT_S, "close")

    async def _reconnect(self) -> aio_pika.abc.AbstractConnection:
        pause_s, tries = FIRST_PAUSE_S, 0
        while True:
            await asyncio.sleep(self._clock.jitter(pause_s))
            tries += 1
            try:
                connection = await self._connect()
            except Exception as error:  # noqa: BLE001 - whatever it was, nobody else would try again
                if is_told(tries):
                    self._telemetry.emit(
                        "broker.unreachable", purpose=self._purpose, tries=tries, error=str(error)
                    )
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                self._telemetry.emit("broker.connected", purpose=self._purpose, tries=tries)
                return connection

    async def _connect(self) -> aio_pika.abc.AbstractConnection:
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

    async def _connect_to(self, host: Host) -> aio_pika.abc.AbstractConnection:
        attempt = aio_pika.connect(
            host=host.host,
            port=host.port,
            login=host.user,
            password=host.password,
            virtualhost=self._broker.vhost,
            ssl=self._tls is not None,
            ssl_context=self._tls,
            heartbeat=int(self._broker.heartbeat_s),
            client_properties={"connection_name": f"{self._label} {self._purpose}"},
        )
        try:
            return await bounded(attempt, self._broker.connect_timeout_s, f"broker {host}")
        except AMQPError as error:
            raise self._explained(host, error) from None

    def _explained(self, host: Host, error: AMQPError) -> GracekitError:
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
        if isinstance(error, ConnectionClosed):
            return self._refusal(host, error)
        return DependencyError(f"broker {host} cannot be reached: {said(error)}")

    def _refusal(self, host: Host, error: ConnectionClosed) -> GracekitError:
        """The broker closed the connection when it heard the vhost, and said why."""
        why = str(error.args[-1]).replace(f" for user '{host.user}'", "")
        forbidden = isinstance(error, ConnectionNotAllowed) or error.args[0] == NOT_ALLOWED
        # A limit of the vhost, the user or the node is told by the same code as a missing vhost.
        if not forbidden or why.endswith("is reached"):
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
