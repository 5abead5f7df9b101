"""oslo.messaging: an RPC server on real threads, 64 of them, which is its default.

- It acks before it runs the handler, which is its only way: a crash loses what runs.
- Durable queues and a prefetch are options of its own; the default is transient queues without a
  limit.
- Casts and calls come in its own envelope, which gracekit's workers read too.
"""

from __future__ import annotations

import configparser
import contextlib
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)  # else oslo_messaging wants eventlet
with warnings.catch_warnings(action="ignore"):
    import oslo_messaging
from oslo_config import cfg  # noqa: E402 - after the choice of threads

from benchmarks.child import Measure, Prepare  # noqa: E402 - likewise
from benchmarks.plain import Tally, url_of  # noqa: E402 - likewise

KIND: Final = "oslo.messaging"


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


def _configuration(prefetch: int, directory: Path) -> Any:
    file = configparser.ConfigParser(interpolation=None)
    file["DEFAULT"] = {"transport_url": url_of(directory).replace("amqp://", "rabbit://", 1)}
    file["oslo_messaging_rabbit"] = {
        "amqp_durable_queues": "true",
        "rabbit_qos_prefetch_count": str(prefetch),
    }
    path = directory / "oslo.conf"
    path.touch(0o600)
    with path.open("w") as out:
        file.write(out)
    cfg.CONF([], project="bench", default_config_files=[str(path)])
    return cfg.CONF


PREPARE: Final[dict[str, Prepare]] = {KIND: _worker}
