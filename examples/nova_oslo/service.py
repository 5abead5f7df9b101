"""How a service reads its files and starts: what `nova.config` and `nova.service` are in Nova."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

import oslo_messaging
from oslo_config import cfg
from oslo_context.context import RequestContext
from oslo_log import log
from oslo_messaging import opts
from oslo_service import loopingcall
from oslo_service import service as launcher

from examples.nova_oslo import objects

CONF = cfg.CONF


def parse_args(arguments: Sequence[str]) -> None:
    """Read the files of oslo.config, and set up oslo.log."""
    log.register_options(CONF)
    CONF.register_opts([cfg.StrOpt("host", default=socket.gethostname())])
    for group, options in (*opts.list_opts(), *launcher.list_opts()):
        CONF.register_opts(options, group)
    CONF(arguments, project="nova")
    log.setup(CONF, "nova")


def run_periodic_tasks(manager: Any) -> None:
    """Run those periodic tasks of a manager that are due."""
    manager.run_periodic_tasks(RequestContext(is_admin=True))


def serve(manager: Any, topic: str) -> None:
    """Serve the methods of a manager and run its periodic tasks, until a signal comes."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    server = oslo_messaging.get_rpc_server(
        oslo_messaging.get_rpc_transport(CONF),
        oslo_messaging.Target(topic=topic, server=CONF.host),
        [manager],
        executor="threading",
        serializer=objects.RequestContextSerializer(),
    )
    server.start()
    timer = loopingcall.FixedIntervalLoopingCall(run_periodic_tasks, manager)
    timer.start(interval=1)
    log.getLogger(__name__).info("serving")
    stopping.wait()
    timer.stop()
    server.stop()
    server.wait()
