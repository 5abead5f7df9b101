"""From a URL to a transport."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from gracekit.clock import Clock
from gracekit.config.urls import (
    TRANSPORT,
    TRANSPORTS,
    UrlKind,
    absolute,
    file_of,
    file_url,
    kind_of,
    shown_url,
)
from gracekit.config.values import DECLARE_PROFILE, EXCHANGE, did_you_mean
from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.oslo_wire import MAX_BODY_BYTES
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Transport
from gracekit.telemetry.telemetry import Telemetry


def open_transport(
    url: str,
    *,
    process: Process,
    clock: Clock,
    broker: MemoryBroker | None = None,
    exchange: str = EXCHANGE,
    profile: str = DECLARE_PROFILE,
    max_body_bytes: int = MAX_BODY_BYTES,
    telemetry: Telemetry | None = None,
    creates: bool = True,
) -> Transport:
    """Build the transport that *url* names; it is not started.

    Args:
        url: `sqlite:///relative.db` (to the working directory),
            `sqlite:////absolute.db`, `memory://`, or a RabbitMQ broker's: `amqp://`,
            `amqps://` or oslo.messaging's `rabbit://`.
        process: This process.
        clock: Wall time and ids.
        broker: The broker of `memory://`.
        exchange: RabbitMQ's control exchange, if the URL names none.
        profile: RabbitMQ's declare profile, if the URL names none.
        max_body_bytes: Largest body that is read; the RabbitMQ transport drops larger ones
            while they arrive.
        telemetry: Receives events about lost connections and faults; None to only log them.
        creates: Whether to create a missing file; clients do not.

    Raises:
        ConfigError: the URL is wrong; the message does not show its password.
    """
    match kind_of(url):
        case UrlKind.FILE:
            return SqliteTransport(
                file_of(url), process=process, clock=clock, telemetry=telemetry, creates=creates
            )
        case UrlKind.MEMORY:
            return _memory(url, process, broker)
        case UrlKind.BROKER:
            # Imported here: the AMQP client takes 0.1 s to load, and most programs do not need it.
            from gracekit.rpc.amqp.amqp_transport import AmqpTransport  # noqa: PLC0415
            from gracekit.rpc.amqp.url import read_url  # noqa: PLC0415

            return AmqpTransport(
                read_url(url, exchange=exchange, profile=profile),
                process=process,
                clock=clock,
                telemetry=telemetry or Telemetry(),
                keep=max_body_bytes,
            )
        case UrlKind.DATABASE | None:
            raise ConfigError(
                f"transport {shown_url(url)!r}: its scheme is none of {', '.join(TRANSPORTS)}"
                f"{did_you_mean(url.partition(':')[0], TRANSPORTS)}"
            )


def given_or_opened(
    transport: Transport | str,
    *,
    process: Process | None,
    clock: Clock,
    exchange: str,
    profile: str,
    max_body_bytes: int,
) -> Transport:
    """The transport of a client or listener, which never creates the file of queues.

    Args:
        transport: A transport, returned unchanged, or a URL; see `open_transport`.
        process: Stands for another process in tests; None for this one.
        clock: Wall time and ids.
        exchange: See `open_transport`.
        profile: See `open_transport`.
        max_body_bytes: See `open_transport`.

    Raises:
        ConfigError: the URL is wrong, or *transport* is neither a URL nor a transport.
    """
    if isinstance(transport, str):
        return open_transport(
            transport,
            process=process or Process(),
            clock=clock,
            exchange=exchange,
            profile=profile,
            creates=False,
            max_body_bytes=max_body_bytes,
        )
    if not isinstance(transport, Transport):
        raise ConfigError(
            f"transport={transport!r} is neither a URL nor a transport; write it as "
            f"{TRANSPORT!r} or 'amqp://user@host/vhost'"
        )
    return transport


def queue_file(url: str) -> Path | None:
    """The file that a transport URL names, as an absolute path; None for memory or a broker.

    Raises:
        ConfigError: it is a `sqlite:` URL without a valid path.
    """
    return absolute(file_of(url)) if kind_of(url) is UrlKind.FILE else None


def written_url(url: str) -> str:
    """A transport URL for records: without secrets, and with an absolute path of a file."""
    path = queue_file(url)
    return shown_url(url) if path is None else file_url(path)


def _memory(url: str, process: Process, broker: MemoryBroker | None) -> MemoryTransport:
    if broker is None:
        raise ConfigError(
            "memory:// needs the MemoryBroker that its users share: pass broker=, "
            f"or use {TRANSPORT}, which processes share by name"
        )
    if urlsplit(url).netloc or urlsplit(url).path.strip("/"):
        raise ConfigError(f"{shown_url(url)!r}: memory:// takes no host and no path")
    return MemoryTransport(broker, process)
