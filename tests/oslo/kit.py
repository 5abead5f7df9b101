"""oslo.messaging as a peer: processes of their own, driven from a test.

    async with oslo_server(url, "stock") as server, oslo_client(url, "stock") as client:
        answer = await client.prepare(timeout=5).call({"user": "ann"}, "echo", item="lamp")
        (told,) = await server.begun()

Exchange flags stick, fanout exchanges are global by topic, and reply queues stay for half an hour:
each test takes a virtual host of its own, and all peers of one test the same profile.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from asyncio.subprocess import Process as Subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tools import dev

PATIENCE_S: Final = 300.0
ROOT: Final = Path(__file__).resolve().parents[2]

PROFILES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "default": {},
        "durable": {"amqp_durable_queues": True},
        "quorum": {"rabbit_quorum_queue": True},
        "all_quorum": {"rabbit_quorum_queue": True, "rabbit_transient_quorum_queue": True},
    }
)
"""By name the options with which oslo declares exchanges and queues."""


def oslo_python() -> Path:
    """The Python in which oslo.messaging is installed, and gracekit can be imported."""
    return dev.python(dev.OSLO_LOCK)


class OsloError(Exception):
    """What an oslo client raised, as data.

    Attributes:
        kind: Class name.
        module: Its module.
        message: `str()` of it.
        arguments: Its `args`; what is no JSON as text.
        attributes: Its instance's dictionary, likewise.
        bases: Names of the classes that it descends from, the nearest first.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__(f"{told['module']}.{told['class']}: {told['message']}")
        self.kind: str = told["class"]
        self.module: str = told["module"]
        self.message: str = told["message"]
        self.arguments: list[Any] = told["args"]
        self.attributes: dict[str, Any] = told["attributes"]
        self.bases: list[str] = told["bases"]


# -- one process ------------------------------------------------------------------------


class Peer:
    """A process that runs `peer.py`.

    Attributes:
        events: What happened on its servers so far, the oldest first.
    """

    def __init__(self, process: Subprocess, log: Path) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._log = log
        self._news = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._sent = 0
        self._reader = asyncio.create_task(self._read())

    @property
    def log(self) -> str:
        """What it has written on standard error so far."""
        return self._log.read_text()

    async def ask(self, do: str, **arguments: Any) -> Any:
        """Have it carry out a command; its answer.

        Raises:
            OsloError: the library raised.
        """
        return await self.begin(do, **arguments)

    def begin(self, do: str, **arguments: Any) -> asyncio.Future[Any]:
        """The same without waiting: sent when this returns."""
        assert self.process.stdin is not None
        self._sent += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._sent] = answer
        line = json.dumps({"id": self._sent, "do": do, **arguments})
        self.process.stdin.write(line.encode() + b"\n")
        return answer

    async def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event of this name with these fields; the first if there are several."""
        return (await self.events_of(name, number=1, **fields))[0]

    async def events_of(self, name: str, *, number: int, **fields: Any) -> list[dict[str, Any]]:
        """Wait for so many."""
        wanted = {"event": name, **fields}

        def found() -> list[dict[str, Any]]:
            return [event for event in self.events if wanted.items() <= event.items()]

        async with asyncio.timeout(PATIENCE_S):
            while len(found()) < number:
                assert not self._reader.done(), f"the peer has ended:\n{self.log}"
                self._news.clear()
                await self._news.wait()
        return found()

    async def kill(self) -> None:
        """SIGKILL; what it had said until then is still read."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reader

    async def close(self) -> None:
        """Let it stop its servers and leave, which takes the library some seconds."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(PATIENCE_S):
            await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            told = json.loads(line)
            if "event" in told:
                self.events.append(told)
                self._news.set()
            elif not (answer := self._answers.pop(told["id"])).done():
                if "error" in told:
                    answer.set_exception(OsloError(told["error"]))
                else:
                    answer.set_result(told["ok"])
        self._news.set()
        for answer in self._answers.values():
            answer.cancel()


@contextlib.asynccontextmanager
async def oslo_peer(
    url: str,
    *,
    profile: str = "default",
    exception_modules: tuple[str, ...] = (),
    serializer: str = "none",
    spans: bool = False,
    rabbit: Mapping[str, Any] = MappingProxyType({}),
    default: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[Peer]:
    """A process with a transport, and nothing on it yet; killed at the end, unless it is closed.

    Args:
        url: `amqp://…` or `rabbit://…`.
        profile: One of `PROFILES`.
        exception_modules: `allowed_remote_exmods` of its clients.
        serializer: `none`; `labels`, which shows its steps in the data; or `objects`, with which
            `{"an_instance": {...}}` as an argument is an object of `objects.py`.
        spans: Trace, and keep the spans for `ask("spans")`.
        rabbit: Further options of the group oslo_messaging_rabbit.
        default: Further options of the group DEFAULT.
    """
    conf = configparser.ConfigParser(interpolation=None)
    conf["DEFAULT"] = {
        "transport_url": url.replace("amqp://", "rabbit://", 1),
        "peer_exception_modules": ",".join(exception_modules),
        "peer_serializer": serializer,
        "peer_spans": str(spans),
        **{key: str(value) for key, value in default.items()},
    }
    conf["oslo_messaging_rabbit"] = {
        key: str(value) for key, value in {**PROFILES[profile], **rabbit}.items()
    }
    conf["oslo_messaging_tracing"] = {"tracing_enabled": str(spans)}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "peer.conf"), Path(folder, "peer.log")
        with path.open("w") as file:
            conf.write(file)
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                oslo_python(), "-m", "tests.oslo.peer", "--config-file", path,
                cwd=ROOT, env=_environment(), stdin=PIPE, stdout=PIPE, stderr=stderr, limit=1 << 24,
            )  # fmt: skip
        peer = Peer(process, log)
        try:
            await peer.event("ready")
            yield peer
        finally:
            await peer.kill()


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


# -- a server ---------------------------------------------------------------------------


@dataclass
class OsloServer:
    """A server in a process of its own, or beside others in one.

    Attributes:
        peer: The process; its events tell what the server begins and ends.
        name: As `prepare(server=…)` names it.
    """

    peer: Peer
    name: str

    async def begun(self, number: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Wait until it has begun so many requests: ids, context and message of each."""
        return await self.peer.events_of("begun", number=number, server=self.name, **fields)

    async def ended(self, number: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Wait until it has ended so many."""
        return await self.peer.events_of("ended", number=number, server=self.name, **fields)

    async def open(self, gate: str) -> None:
        """Let those on that wait in `block(gate=…)`."""
        await self.peer.ask("open", gate=gate)

    async def stop(self) -> None:
        """The library's `stop()`."""
        await self.peer.ask("stop", server=self.name)

    async def wait(self) -> None:
        """The library's `wait()`."""
        await self.peer.ask("wait", server=self.name)


@contextlib.asynccontextmanager
async def oslo_server(
    url: str,
    topic: str,
    *,
    server: str = "node-1",
    exchange: str | None = None,
    endpoints: Mapping[str, Mapping[str, Any]] = MappingProxyType({"endpoint": {}}),
    policy: str | None = None,
    **options: Any,
) -> AsyncIterator[OsloServer]:
    """A server that reads its queues.

    Args:
        url: As for `oslo_peer`.
        topic: Its topic.
        server: Its name.
        exchange: Control exchange; None for oslo's own, `openstack`.
        endpoints: By name the place of each, `{"namespace": …, "version": …}`; an empty place
            is an endpoint without Target. All have the methods of `peer.Endpoint`.
        policy: `legacy`, `default` or `explicit`; None for oslo's own choice.
        options: Of `oslo_peer`.
    """
    async with oslo_peer(url, **options) as peer:
        await peer.ask(
            "serve",
            server=server,
            topic=topic,
            exchange=exchange,
            endpoints={name: dict(place) for name, place in endpoints.items()},
            policy=policy,
        )
        yield OsloServer(peer, server)


# -- a client ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OsloClient:
    """A client with options set; `prepare` makes a further one, as in the library."""

    peer: Peer
    target: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, **options: Any) -> OsloClient:
        """Options of the library's `prepare`, and `at_least_once`."""
        return replace(self, options={**self.options, **options})

    async def call(self, ctxt: Mapping[str, Any], method: str, /, **args: Any) -> Any:
        """The library's `call`.

        Raises:
            OsloError: it raised.
        """
        return await self.begin("call", ctxt, method, **args)

    async def cast(self, ctxt: Mapping[str, Any], method: str, /, **args: Any) -> None:
        """The library's `cast`."""
        await self.begin("cast", ctxt, method, **args)

    async def fanout(self, ctxt: Mapping[str, Any], method: str, /, **args: Any) -> None:
        """A cast to all servers."""
        await self.prepare(fanout=True).cast(ctxt, method, **args)

    async def can_send(self, version: str) -> bool:
        """The library's `can_send_version`."""
        answer: bool = await self.peer.ask("can_send", version=version, **self._send())
        return answer

    def begin(
        self, way: str, ctxt: Mapping[str, Any], method: str, /, **args: Any
    ) -> asyncio.Future[Any]:
        """A `call` or `cast` that is not waited for."""
        return self.peer.begin(way, ctxt=dict(ctxt), method=method, args=args, **self._send())

    def _send(self) -> dict[str, Any]:
        return {"target": dict(self.target), "options": dict(self.options)}


@contextlib.asynccontextmanager
async def oslo_client(
    url: str, topic: str, *, exchange: str | None = None, **options: Any
) -> AsyncIterator[OsloClient]:
    """A client; it connects with its first request.

    Args:
        url: As for `oslo_peer`.
        topic: Where it sends to.
        exchange: Control exchange; None for oslo's own, `openstack`.
        options: Of `oslo_peer`.
    """
    async with oslo_peer(url, **options) as peer:
        yield OsloClient(peer, {"topic": topic, "exchange": exchange})


# -- an example as a process -------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(
    directory: Path,
    *command: str | Path,
    until: str,
    end: tuple[signal.Signals, int],
    said: list[str] | None = None,
    **environment: str,
) -> AsyncIterator[None]:
    """The example as a process; it leaves after a signal, with this exit code.

    What it writes is added to *said*.
    """
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
    process = await asyncio.create_subprocess_exec(
        oslo_python(), *command,
        cwd=directory, env=ours | environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    said = [] if said is None else said
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert process.stdout is not None
            while until not in "".join(said[-1:]):
                said.append((await process.stdout.readline()).decode())
                assert said[-1], said
            yield
            process.send_signal(end[0])
            said.append((await process.stdout.read()).decode())
            assert await process.wait() == end[1], said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
