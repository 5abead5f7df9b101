"""A service with all that operators look at switched on, and who scrapes it."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opentelemetry import trace

from gracekit.runtime.face import Runtime

ADMIN: Final = "127.0.0.1:0"
SAMPLED: Final = 0.01
SCRAPE_EVERY_S: Final = 1.0
_PATIENCE_S: Final = 5.0
"""For an answer of a worker that is stopped while messages are queued for it."""


def sample_traces() -> None:
    """Trace a share of all requests, into nothing: what exporting costs is the exporter's."""
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - only this side loads it
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio  # noqa: PLC0415

    trace.set_tracer_provider(TracerProvider(sampler=ParentBasedTraceIdRatio(SAMPLED)))


def port_of(runtime: Runtime) -> int:
    """Where its endpoint listens: the one TCP socket of this process that does."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").rstrip("]"))
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:  # LISTEN
            return int(words[1].rpartition(":")[2], 16)
    raise RuntimeError(f"{runtime.instance} does not listen")


def port_file(directory: Path, name: str) -> Path:
    """Where the worker *name* writes its port."""
    return directory / f"{name}.port"


@contextlib.contextmanager
def scraped(file: Path) -> Iterator[None]:
    """Scrape the metrics of the worker whose port stands in *file*; nothing if there is none."""
    if not file.exists():
        yield
        return
    over = threading.Event()
    connection = http.client.HTTPConnection(f"127.0.0.1:{file.read_text()}", timeout=_PATIENCE_S)

    def scrape() -> None:
        while not over.wait(SCRAPE_EVERY_S):
            try:
                connection.request("GET", "/metrics")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):  # stopped, or already gone
                connection.close()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()
