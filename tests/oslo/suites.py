"""oslo.messaging's own RPC tests, their bodies as they are, with gracekit as server or as client.

    python -m tests.oslo.suites {oslo,server,client} {server,functional} FOLDER < URLS

Runs where `requirements/oslo.lock` is installed, whose oslo.messaging brings its tests along. What
the tests ask for by `get_rpc_server` or `get_rpc_client` is replaced by gracekit, in the manner of
the library: a server in a thread, a client that blocks. `oslo` replaces nothing. What is written
for `fake:` runs over RabbitMQ, each test at the next of the URLs. Says as JSON how each test ended;
`test_suites.py` knows what may differ, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import types
import unittest
import warnings
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from oslo_service import backend

backend.init_backend(backend.BackendType.THREADING)

with warnings.catch_warnings(action="ignore"):
    import oslo_messaging
    import oslo_utils.eventletutils  # noqa: F401 - before there seems to be an eventlet

from gracekit import (  # noqa: E402
    CallTimeoutError,
    RemoteError,
    RpcClient,
    Runtime,
    Service,
    Settings,
    Undeliverable,
)
from gracekit.rpc.oslo_adapter import include_endpoints  # noqa: E402

SUITES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    # TestServerLocking is about the library's own server object alone.
    "server": (
        "oslo_messaging.tests.rpc.test_server",
        ("TestRPCServer", "TestMultipleServers", "TestRPCExposeDecorator"),
    ),
    "functional": (
        "oslo_messaging.tests.functional.test_functional",
        ("CallTestCase", "CastTestCase"),
    ),
}
PATIENCE_S: Final = 30.0
LONGEST_S: Final = 60
"""For one test."""


def stand_in_for_eventlet() -> None:
    """Their tests patch by it, which real threads do without."""
    stand_in = types.ModuleType("eventlet")
    stand_in.monkey_patch = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.modules["eventlet"] = stand_in


class TooLongError(Exception):
    """A test has not ended by itself."""


class Site:
    """Where both kinds meet.

    Attributes:
        url: Of the broker and of a virtual host for one test, as we write it.
        folder: For stores.
        in_order: Whether our servers take one request at a time, as `fake:` does.
    """

    def __init__(self, folder: Path, *, in_order: bool) -> None:
        self.url = ""
        self.folder = folder
        self.in_order = in_order

    def transport_of(self, target: Any) -> str:
        return f"{self.url}?profile=oslo-transient&exchange={target.exchange or 'openstack'}"

    def settings(self, target: Any) -> Settings:
        where = self.url.rpartition("/")[2]
        place = self.folder / f"{where}-{target.exchange}-{target.topic}"
        place.mkdir(mode=0o700, exist_ok=True)
        return Settings(
            transport_url=self.transport_of(target),
            store_url=f"sqlite:///{place}/gracekit-store.db",
            accept_unshared_store=True,
            drain_timeout_s=5.0,
            ops_quiet_timeout_s=0.1,
            **({"host": target.server} if target.server else {}),
            **({"max_running": 1, "threads": 1} if self.in_order else {}),  # type: ignore[arg-type]
        )


# -- our server in the library's manner -------------------------------------------------


class OurServer:
    """`start`, `stop` and `wait` of a service in a thread; each may be called again."""

    def __init__(self, site: Site, target: Any, endpoints: Any, options: Mapping[str, Any]) -> None:
        self._site, self._target = site, target
        self._endpoints, self._options = endpoints, options
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], None] = lambda: None
        self._failure: BaseException | None = None
        if endpoints:  # before `start`, as the library
            include_endpoints(Service("checked"), endpoints, **options)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            assert self._ready.wait(PATIENCE_S)
            if self._failure is not None:
                raise self._failure

    def stop(self) -> None:
        self._stop()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        svc = Service(self._target.topic)
        include_endpoints(svc, self._endpoints, **self._options)
        async with Runtime(svc, self._site.settings(self._target)) as runtime:
            loop = asyncio.get_running_loop()

            def stop() -> None:
                with contextlib.suppress(RuntimeError):  # it has ended
                    loop.call_soon_threadsafe(runtime.request_stop)

            self._stop = stop
            self._ready.set()
            await runtime.serve()


# -- our client in the library's manner -------------------------------------------------


class Loop:
    """An event loop in a thread, for clients that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._clients: dict[tuple[str, str], asyncio.Task[RpcClient]] = {}
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def client(self, url: str, topic: str) -> RpcClient:
        """One for all calls, as a program has it: late answers find its queue."""
        if (url, topic) not in self._clients:
            self._clients[url, topic] = asyncio.create_task(self._start(url, topic))
        return await self._clients[url, topic]

    async def _start(self, url: str, topic: str) -> RpcClient:
        client = RpcClient(url, topic)
        await client.start()
        return client

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


class OurClient:
    """`prepare`, `call` and `cast` with the library's options and exceptions."""

    def __init__(self, site: Site, loop: Loop, target: Any, options: Mapping[str, Any]) -> None:
        self._site, self._loop = site, loop
        self._target, self._options = target, dict(options)
        self._serializer = self._options.pop("serializer", None)
        self._serializer = self._serializer or oslo_messaging.NoOpSerializer()

    def prepare(self, **changes: Any) -> OurClient:
        places = ("exchange", "topic", "namespace", "version", "server", "fanout")
        place = {key: changes.pop(key) for key in places if key in changes}
        options = {**self._options, **changes, "serializer": self._serializer}
        return OurClient(self._site, self._loop, self._target(**place), options)

    def call(self, ctxt: Any, method: str, **args: Any) -> Any:
        answer = self._loop.run(self._send("call", ctxt, method, args))
        return self._serializer.deserialize_entity(ctxt, answer)

    def cast(self, ctxt: Any, method: str, **args: Any) -> None:
        way = "fanout" if self._target.fanout else "cast"
        self._loop.run(self._send(way, ctxt, method, args))

    async def _send(self, way: str, ctxt: Any, method: str, args: Mapping[str, Any]) -> Any:
        written = {key: self._serializer.serialize_entity(ctxt, arg) for key, arg in args.items()}
        target, options = self._target, self._options
        prepared = {
            "context": self._serializer.serialize_context(ctxt),
            "host": target.server if way != "fanout" else None,
            "timeout": options.get("timeout"),
            "monitor_timeout": options.get("call_monitor_timeout"),
            "version": target.version,
            "namespace": target.namespace,
        }
        client = await self._loop.client(self._site.transport_of(target), target.topic)
        view = client.prepare(**{k: v for k, v in prepared.items() if v is not None})
        try:
            return await getattr(view, way)(method, **written)
        except CallTimeoutError as error:
            raise oslo_messaging.MessagingTimeout(str(error)) from error
        except Undeliverable as error:
            raise oslo_messaging.MessageUndeliverable(error, None, target.topic, None) from error
        except RemoteError as error:
            kind, text = error.exc_class, str(error)
            raise oslo_messaging.RemoteError(kind, text, error.traceback) from error


# -- all together -----------------------------------------------------------------------


def replace(what: str, site: Site) -> None:
    """Have their tests get *what* from us, all over the broker."""
    transport, server = oslo_messaging.get_rpc_transport, oslo_messaging.get_rpc_server
    loop = Loop()

    def get_rpc_transport(conf: Any, url: Any = None, **more: Any) -> Any:
        url = theirs(site.url) if str(url).startswith("fake:") else url
        return transport(conf, url=url, **more)

    def get_rpc_server(
        transport: Any, target: Any, endpoints: Any, executor: Any = None, **options: Any
    ) -> Any:
        if what == "server":
            return OurServer(site, target, endpoints, options)
        if executor != "eventlet":  # which is not there
            options["executor"] = executor
        return server(transport, target, endpoints, **options)

    def get_rpc_client(transport: Any, target: Any, **options: Any) -> Any:
        options.pop("transport_options", None)  # ours always tells what nobody takes
        return OurClient(site, loop, target, options)

    oslo_messaging.get_rpc_transport = get_rpc_transport
    oslo_messaging.get_rpc_server = get_rpc_server
    if what == "client":
        oslo_messaging.get_rpc_client = get_rpc_client


def theirs(url: str) -> str:
    return url.replace("amqp://", "rabbit://", 1)


def without_timeouts(serializer: Any) -> None:
    """Theirs adds text to each value of a context, and over RabbitMQ `client_timeout` is one."""
    deserialize = serializer.deserialize_context

    def deserialize_context(self: Any, ctxt: Mapping[str, Any]) -> Any:
        told = {key: value for key, value in ctxt.items() if key != "client_timeout"}
        return deserialize(self, told)

    serializer.deserialize_context = deserialize_context


class Ends(unittest.TestResult):
    """How each test ended: empty where it passed, else the last line of its failure."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}

    def startTest(self, test: Any) -> None:  # noqa: N802 - of unittest
        super().startTest(test)
        sys.stderr.write(f"== {name_of(test)}\n")

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self.of[name_of(test)] = ""

    def addError(self, test: Any, error: Any = None, details: Any = None) -> None:  # noqa: N802
        self._end(test, error, details)

    def addFailure(self, test: Any, error: Any = None, details: Any = None) -> None:  # noqa: N802
        self._end(test, error, details)

    def addSkip(self, test: Any, reason: Any = None, details: Any = None) -> None:  # noqa: N802
        self.of[name_of(test)] = f"skipped: {reason}"

    def _end(self, test: Any, error: Any, details: Any) -> None:
        shown = [value.as_text() for key, value in (details or {}).items() if "trace" in key]
        text = "\n".join(shown) or str(error and error[1])
        sys.stderr.write(f"{text}\n")
        self.of[name_of(test)] = text.strip().splitlines()[-1][:300]


def name_of(test: Any) -> str:
    """`Class.test`, with its scenario."""
    return str(test.id()).split("test_server.")[-1].split("test_functional.")[-1]


def main(what: str, suite: str, folder: str) -> None:
    stand_in_for_eventlet()
    site = Site(Path(folder), in_order=suite == "server")
    replace(what, site)
    signal.signal(signal.SIGALRM, _too_long)
    name, classes = SUITES[suite]
    with warnings.catch_warnings(action="ignore"):
        module = importlib.import_module(name)
    if suite == "server":
        without_timeouts(module.ServerSetupMixin.TestSerializer)
    ends = Ends()
    # Scenarios are multiplied by the module's own `load_tests`.
    for test in _flat(unittest.TestLoader().loadTestsFromModule(module)):
        if type(test).__name__ in classes:
            site.url = sys.stdin.readline().strip()
            os.environ["RPC_TRANSPORT_URL"] = theirs(site.url)
            signal.alarm(LONGEST_S)
            try:
                test.run(ends)
            except TooLongError:
                ends.of[name_of(test)] = f"not ended after {LONGEST_S} s"
            signal.alarm(0)
    sys.stdout.write(json.dumps(ends.of))
    sys.stdout.flush()


def _too_long(*_: object) -> None:
    raise TooLongError


def _flat(suite: Any) -> Any:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads of the library may linger
