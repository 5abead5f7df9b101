"""From a URL to a transport."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from gracekit.clock import Clock
from gracekit.config import did_you_mean, redact_url, sqlite_path
from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.sqlite import SqliteTransport
from gracekit.rpc.transport import Transport

SCHEMES: Final = ("sqlite", "memory")


def open_transport(
    url: str, *, process: Process, clock: Clock, broker: MemoryBroker | None = None
) -> Transport:
    """Build the transport that *url* names; it is not started.

    Args:
        url: `sqlite:///relative.db` (to the working directory),
            `sqlite:////absolute.db`, or `memory://`.
        process: Who this is.
        clock: Wall time and ids.
        broker: The machine behind `memory://`.

    Raises:
        ConfigError: the URL is wrong; its password is not shown.
    """
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        return SqliteTransport(sqlite_path(url), process=process, clock=clock)
    if scheme == "memory":
        return _memory(url, process, broker)
    raise ConfigError(
        f"transport {redact_url(url)!r}: scheme {scheme!r} is none of {', '.join(SCHEMES)}"
        f"{did_you_mean(scheme, SCHEMES)}"
    )


def _memory(url: str, process: Process, broker: MemoryBroker | None) -> MemoryTransport:
    if broker is None:
        raise ConfigError(
            "memory:// needs the MemoryBroker that its users share: pass broker=, "
            "or use sqlite:///gracekit.db, which processes share by name"
        )
    if urlsplit(url).netloc or urlsplit(url).path.strip("/"):
        raise ConfigError(f"{redact_url(url)!r}: memory:// takes no host and no path")
    return MemoryTransport(broker, process)
