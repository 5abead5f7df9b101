"""One endpoint as a worker of oslo.messaging, and as one of gracekit: what a rolling move replaces.

    python -m tests.oslo.worker rabbit://… TOPIC NAME
    gracekit run tests.oslo.worker:svc

What a request does to the world is a line in the effects file: word, key, kind of worker.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from typing import Any, Final

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)

import oslo_messaging  # noqa: E402
from oslo_config import cfg  # noqa: E402

from gracekit import Service  # noqa: E402
from gracekit.rpc.oslo_adapter import include_endpoints  # noqa: E402

PATIENCE_S: Final = 300
"""As oslo.service has it: `graceful_shutdown_timeout`, then SIGALRM ends the process."""


def effect(word: str, key: str) -> None:
    """Append one line, by one `write`."""
    fd = os.open(os.environ["ROLLING_EFFECTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, f"{word} {key} {os.environ['ROLLING_KIND']}\n".encode())
    finally:
        os.close(fd)


class Endpoint:
    """What both serve; by gracekit it is never run twice."""

    def work(self, ctxt: Any, key: str, s: float) -> str:
        effect("start", key)
        time.sleep(s)
        effect("done", key)
        return key


svc = Service("rolling")
include_endpoints(svc, [Endpoint()])


def main(url: str, topic: str, name: str) -> None:
    """Serve until a signal comes, as oslo.messaging's documentation shows it.

    SIGTERM is blocked in all threads and waited for: a handler runs only when the main thread runs
    Python again. SIGALRM ends the process even if the parent ignored or blocked it.
    """
    faulthandler.enable()  # SIGABRT shows where a process hangs
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    cfg.CONF([], project="rolling", default_config_files=[])
    transport = oslo_messaging.get_rpc_transport(cfg.CONF, url)
    target = oslo_messaging.Target(topic=topic, server=name)
    server = oslo_messaging.get_rpc_server(transport, target, [Endpoint()])
    server.start()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM})
    signal.alarm(PATIENCE_S)
    sys.stdout.write("stopping\n")
    sys.stdout.flush()
    server.stop()
    server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # it has said all; the interpreter's own end would wait for idle threads
