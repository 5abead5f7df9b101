"""oslo.messaging: an RPC server on real threads, 64 of them, which is its default.

- It acks before it runs the handler, which is its only way: a crash loses what runs.
- Durable queues and a prefetch are options of its own; the default is transient queues without a
  limit. Its own client has neither, and calls from threads.
- Casts and calls come in its own envelope, which gracekit's workers read too.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import warnings
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)  # else oslo_messaging wants eventlet
with warnings.catch_warnings(action="ignore"):
    import oslo_messaging
from oslo_config import cfg  # noqa: E402 - after the choice of threads

from benchmarks.child import Measure, Prepare  # noqa: E402 - likewise
from benchmarks.measure import calling  # noqa: E402 - likewise
from benchmarks.plain import ARGS, Tally, called_by, url_of  # noqa: E402 - likewise

KIND: Final = "oslo.messaging"
CALLERS: Final = 32
"""Threads in which its own client waits for replies."""


class _Endpoint:
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def work(self, ctxt: dict[str, Any], vm: str, note: str) -> None:  # noqa: ARG002 - as sent
        self._tally.one()


@contextlib.asynccontextmanager
async def _worker(prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    tally = Tally()
    server = oslo_messaging.get_rpc_server(
        oslo_messaging.get_rpc_transport(_configuration(prefetch, directory)),
        oslo_messaging.Target(topic=KIND, server="bench"),
        [_Endpoint(tally)],
    )
    server.start()
    yield tally.more
    server.stop()
    server.wait()


@contextlib.asynccontextmanager
async def _client(_size: int, directory: Path) -> AsyncIterator[Measure]:
    transport = oslo_messaging.get_rpc_transport(_configuration(0, directory))
    client = oslo_messaging.get_rpc_client(transport, oslo_messaging.Target(topic=KIND))
    loop = asyncio.get_running_loop()
    call = partial(client.call, {}, "work", **ARGS)
    with ThreadPoolExecutor(CALLERS) as pool:
        yield calling(lambda: loop.run_in_executor(pool, call))
    transport.cleanup()


def _configuration(prefetch: int, directory: Path) -> Any:
    file = configparser.ConfigParser(interpolation=None)
    file["DEFAULT"] = {"transport_url": url_of(directory).replace("amqp://", "rabbit://", 1)}
    file["oslo_messaging_rabbit"] = {
        "amqp_durable_queues": "true",
        "rabbit_qos_prefetch_count": str(prefetch),
    }
    path = directory / f"oslo-{prefetch}.conf"
    path.touch(0o600)
    with path.open("w") as out:
        file.write(out)
    cfg.CONF([], project="bench", default_config_files=[str(path)])
    return cfg.CONF


PREPARE: Final[dict[str, Prepare]] = {KIND: _worker, called_by(KIND): _client}
