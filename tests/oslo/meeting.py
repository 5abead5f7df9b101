"""Both kinds of servers and of clients on one virtual host, and one way to say what a client met.

    async with meet(url, "durable", tmp_path) as meeting:
        theirs = await meeting.asked_by_oslo(OSLO, "fail", {"fault": "key"})
        assert await meeting.asked_by_oslo(NATIVE, "fail", {"fault": "key"}) == theirs

Three servers serve the same methods, each on its topic: oslo's own, gracekit in this process, and
gracekit with oslo's endpoint objects. Two clients ask them. What a client meets is plain data, from
which everything is taken that must differ (ids, the topic, the frames of a traceback), so that `==`
is the judge.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import os
import re
import tempfile
from asyncio.subprocess import PIPE
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gracekit import Context, RpcClient, Runtime, Service, Settings, rpc_method
from gracekit.rpc.client import ClientView
from tests.oslo import faults
from tests.oslo.kit import (
    PATIENCE_S,
    PROFILES,
    ROOT,
    OsloClient,
    OsloError,
    OsloServer,
    Peer,
    oslo_python,
)
from tests.oslo.values import VALUES

OSLO: Final = "shop-oslo"
NATIVE: Final = "shop-native"
ADAPTED: Final = "shop-adapted"
SERVERS: Final = (OSLO, NATIVE, ADAPTED)
OSLO_TRUSTING: Final = "shop-trusting"
DISPATCHER: Final = "oslo_messaging.rpc.dispatcher"
HOST: Final = "node-1"

Data = Mapping[str, Any]
NOTHING: Final[Data] = MappingProxyType({})

OSLO_PROFILES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "durable": "durable",
        "quorum": "quorum",
        "oslo-transient": "default",
        "oslo-durable": "durable",
        "oslo-quorum": "quorum",
        "oslo-quorum-all": "all_quorum",
    }
)
"""By our profile the one of `kit.PROFILES` that declares the same exchange."""

PLACES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "newer": {"version": "1.5"},
        "next": {"version": "2.1"},
        "ops": {"namespace": "ops", "version": "1.2.3"},
        "moved": {"namespace": "new", "legacy_namespaces": ["old"], "version": "1.0"},
    }
)
"""Where the endpoints are served, as oslo's Target has it."""

EXCEPTIONS: Final[Mapping[str, type[Exception]]] = MappingProxyType(
    {f"{faults.__name__}.{kind.__name__}": kind for kind in (faults.NotFound, faults.TooMany)}
)


def our_url(url: str, profile: str) -> str:
    """The same broker for us, with the exchange of oslo."""
    return f"{url}?profile={profile}&exchange=openstack"


# -- gracekit's side ----------------------------------------------------------------------


class Stock:
    """The methods of `peer.Endpoint` and `widened.Endpoint`, as one writes them for gracekit."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.begun: list[tuple[str, dict[str, Any]]] = []
        self._url = url
        self._news = asyncio.Event()
        self._gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def open(self, gate: str) -> None:
        """Let those on that wait at a gate, and those that will."""
        self._gates[gate].set()

    async def wait_begun(self, method: str, number: int = 1, **args: Any) -> None:
        """Wait until it has begun so many requests with these arguments."""
        async with asyncio.timeout(PATIENCE_S):
            while self.begun.count((method, args)) < number:
                self._news.clear()
                await self._news.wait()

    def _begin(self, method: str, **args: Any) -> None:
        self.begun.append((method, args))
        self._news.set()

    @rpc_method
    async def echo(self, ctx: Context, **args: Any) -> dict[str, Any]:
        self._begin("echo", **args)
        return args

    @rpc_method
    def shape(self, ctx: Context, first: Any, second: Any = None) -> list[Any]:
        return [first, second]

    @rpc_method(on_interrupt="requeue")
    async def who(self, ctx: Context) -> str:
        self._begin("who")
        return self.name

    @rpc_method
    async def context(self, ctx: Context) -> dict[str, Any]:
        return dict(ctx)

    @rpc_method
    async def fail(self, ctx: Context, fault: str) -> None:
        raise faults.fault(fault)

    @rpc_method(on_interrupt="requeue")
    def fail_as_expected(self, ctx: Context, fault: str = "app_with_kwargs") -> None:
        raise faults.fault(fault)

    @rpc_method
    def odd_result(self, ctx: Context) -> object:
        return object()

    @rpc_method
    def give(self, ctx: Context, value: str) -> Any:
        return VALUES[value]

    @rpc_method
    def fail_as(self, ctx: Context, name: str, args: list[Any]) -> None:
        raise getattr(builtins, name)(*args)

    @rpc_method
    async def block(self, ctx: Context, gate: str) -> str:
        self._begin("block", gate=gate)
        await self._gates[gate].wait()
        return f"through {gate}"

    @rpc_method
    async def forward(self, ctx: Context, topic: str, name: str, arguments: dict[str, Any]) -> Any:
        known = {} if self.name == "ops" else EXCEPTIONS
        async with RpcClient(self._url, topic, exceptions=known) as client:
            view = client.prepare(timeout=5, context=dict(ctx))
            return await view.call(name, **arguments)

    def _private(self, ctx: Context) -> str:
        return "private"

    not_callable = "an attribute"


def a_service(
    topic: str, url: str, places: Mapping[str, Mapping[str, Any]] = PLACES
) -> tuple[Service, dict[str, Stock]]:
    """A service of one `Stock` at each place, and these by name."""
    svc = Service(topic)
    stocks = {name: Stock(name, url) for name in places}
    for name, place in places.items():
        for namespace in (place.get("namespace"), *place.get("legacy_namespaces", ())):
            svc.include(stocks[name], namespace=namespace, version=place.get("version"))
    return svc, stocks


def private(folder: Path) -> Path:
    """A folder that a store may be in."""
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def settings_of(url: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Of a service with a store of its own."""
    return {
        "transport_url": url,
        "store_url": f"sqlite:///{folder}/gracekit-store.db",
        "host": HOST,
        "drain_timeout_s": 1.0,
        "ops_quiet_timeout_s": 0.1,
        "rpc_ping_enabled": True,
        **more,
    }


@contextlib.asynccontextmanager
async def serving(svc: Service, url: str, folder: Path, **settings: Any) -> AsyncIterator[Runtime]:
    """It, in this process; it drains in the end."""
    chosen = Settings(**settings_of(url, private(folder), **settings))
    async with Runtime(svc, chosen) as runtime:
        yield runtime


# -- oslo's side --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def widened_peer(
    url: str,
    profile: str,
    *,
    exception_modules: tuple[str, ...] = (),
    spans: bool = False,
) -> AsyncIterator[Peer]:
    """`kit.oslo_peer` for `widened.py`; the profile is named as ours is."""
    rabbit = PROFILES[OSLO_PROFILES[profile]]
    options = {
        "DEFAULT__TRANSPORT_URL": url.replace("amqp://", "rabbit://", 1),
        "DEFAULT__PEER_EXCEPTION_MODULES": ",".join(exception_modules),
        "DEFAULT__PEER_SPANS": spans,
        "DEFAULT__RPC_PING_ENABLED": True,
        "OSLO_MESSAGING_TRACING__TRACING_ENABLED": spans,
        **{f"OSLO_MESSAGING_RABBIT__{name.upper()}": value for name, value in rabbit.items()},
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "peer.log")
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                oslo_python(), "-m", "tests.oslo.widened",
                cwd=ROOT, env=kept | {f"OS_{key}": str(value) for key, value in options.items()},
                stdin=PIPE, stdout=PIPE, stderr=stderr, limit=1 << 24,
            )  # fmt: skip
        peer = Peer(process, log)
        try:
            await peer.event("ready")
            yield peer
        finally:
            await peer.kill()


# -- all together -------------------------------------------------------------------------


@dataclass
class Meeting:
    """Servers and clients of both kinds.

    Attributes:
        url: Of the broker.
        profile: As we call it.
        ours: The URL with our options.
        peer: oslo's server, and what else it was asked for.
        server: oslo's server on the topic `OSLO`.
        stock: What gracekit serves on `NATIVE` in the default namespace.
    """

    url: str
    profile: str
    ours: str
    peer: Peer
    server: OsloServer
    stock: Stock
    _stack: contextlib.AsyncExitStack
    _peers: dict[bool, Peer]
    _clients: dict[tuple[str, bool], RpcClient] = field(default_factory=dict)

    def oslo_client(self, topic: str, *, trusting: bool = False) -> OsloClient:
        """oslo's client of a server; a trusting one may import the application's exceptions."""
        target = {"topic": topic, "exchange": None}
        return OsloClient(self._peers[trusting], target, {"timeout": 10})

    async def our_client(self, topic: str, *, trusting: bool = False) -> ClientView:
        """Our client of a server; a trusting one has them registered."""
        if (topic, trusting) not in self._clients:
            exceptions = EXCEPTIONS if trusting else {}
            client = RpcClient(self.ours, topic, exceptions=exceptions)
            self._clients[topic, trusting] = await self._stack.enter_async_context(client)
        return self._clients[topic, trusting].prepare(timeout=10)

    async def wait_begun(self, topic: str, **args: Any) -> None:
        """Wait until the server of *topic* has begun an `echo` with these arguments."""
        if topic == OSLO:
            await self.server.begun(message={"method": "echo", "args": args})
        else:
            await self.stock.wait_begun("echo", **args)

    async def asked_by_oslo(
        self, topic: str, method: str, args: Data = NOTHING, ctxt: Data = NOTHING, *,
        trusting: bool = False, **options: Any,
    ) -> Met:  # fmt: skip
        """What oslo's client meets when it calls."""
        client = self.oslo_client(topic, trusting=trusting).prepare(**options)
        return await told_to_oslo(client.call(ctxt, method, **args), topic)

    async def asked_by_us(
        self, topic: str, method: str, args: Data = NOTHING, ctxt: Data = NOTHING, *,
        trusting: bool = False, **options: Any,
    ) -> Met:  # fmt: skip
        """What our client meets when it calls."""
        client = await self.our_client(topic, trusting=trusting)
        view = client.prepare(context=ctxt, **options)
        return await told_to_us(view.call(method, **args), topic)


@contextlib.asynccontextmanager
async def meet(
    url: str, profile: str, folder: Path, *, in_full: bool = True, spans: bool = False
) -> AsyncIterator[Meeting]:
    """oslo's server and ours, serving, and their clients; in full also the adapted one.

    Args:
        url: Of the broker.
        profile: As we call it.
        folder: For the stores.
        in_full: Also the adapted server, and a client that may import exceptions.
        spans: Whether oslo's server and client trace.
    """
    ours = our_url(url, profile)
    svc, stocks = a_service(NATIVE, ours)
    places = {name: dict(place) for name, place in PLACES.items()}
    async with contextlib.AsyncExitStack() as stack:
        peer = await stack.enter_async_context(widened_peer(url, profile, spans=spans))
        peers = {False: peer}
        await peer.ask("serve", server=HOST, topic=OSLO, endpoints=places)
        if in_full:
            modules = (faults.__name__, DISPATCHER)
            trusting = widened_peer(url, profile, exception_modules=modules)
            peers[True] = await stack.enter_async_context(trusting)
            await peers[True].ask("serve", server=HOST, topic=OSLO_TRUSTING)
            settings = settings_of(ours, private(folder / "adapted"))
            await peer.ask("adapt", topic=ADAPTED, endpoints=places, settings=settings)
        await stack.enter_async_context(serving(svc, ours, folder / "native"))
        server, stock = OsloServer(peer, HOST), stocks["newer"]
        yield Meeting(url, profile, ours, peer, server, stock, stack, peers)


# -- questions ----------------------------------------------------------------------------

WAYS: Final = ("call", "directed call", "cast", "directed cast", "fanout")


async def by_oslo(
    meeting: Meeting, method: str, args: Data = NOTHING, ctxt: Data = NOTHING, **options: Any
) -> tuple[Met, ...]:
    """What oslo's client meets at each server, oslo's own first."""
    asked = (meeting.asked_by_oslo(topic, method, args, ctxt, **options) for topic in SERVERS)
    return tuple(await asyncio.gather(*asked))


async def by_us(
    meeting: Meeting, method: str, args: Data = NOTHING, ctxt: Data = NOTHING, **options: Any
) -> tuple[Met, ...]:
    """What our client meets at each."""
    asked = (meeting.asked_by_us(topic, method, args, ctxt, **options) for topic in SERVERS)
    return tuple(await asyncio.gather(*asked))


async def check_ways(meeting: Meeting) -> None:
    """Each client sends to oslo's server and to ours in each way, and gets results and errors."""
    for topic in (OSLO, NATIVE):
        theirs, ours = meeting.oslo_client(topic), await meeting.our_client(topic)
        at_host, here = theirs.prepare(server=HOST), ours.prepare(host=HOST)
        await asyncio.gather(
            theirs.call({}, "echo", by="oslo", way="call"),
            at_host.call({}, "echo", by="oslo", way="directed call"),
            theirs.cast({}, "echo", by="oslo", way="cast"),
            at_host.cast({}, "echo", by="oslo", way="directed cast"),
            theirs.fanout({}, "echo", by="oslo", way="fanout"),
            ours.call("echo", by="us", way="call"),
            here.call("echo", by="us", way="directed call"),
            ours.cast("echo", by="us", way="cast"),
            here.cast("echo", by="us", way="directed cast"),
            ours.fanout("echo", by="us", way="fanout"),
        )
        for way in WAYS:
            await meeting.wait_begun(topic, by="oslo", way=way)
            await meeting.wait_begun(topic, by="us", way=way)

    for asked in (meeting.asked_by_oslo, meeting.asked_by_us):
        for method, args in (("echo", {"item": "lamp"}), ("fail", {"fault": "builtin"})):
            theirs_met, ours_met = [await asked(topic, method, args) for topic in (OSLO, NATIVE)]
            assert isinstance(ours_met, Raised) == (method == "fail")
            assert ours_met == theirs_met


# -- what a client meets ------------------------------------------------------------------


@dataclass(frozen=True)
class Returned:
    """A result as JSON text, so that 1, 1.0 and true are three things."""

    text: str


@dataclass(frozen=True)
class Raised:
    """An exception as data.

    Attributes:
        kind: Its class, with the module.
        text: Its words, line by line, and those of its traceback without the frames.
        more: Whatever else it carries.
    """

    kind: str
    text: tuple[str, ...]
    more: Data


Met = Returned | Raised


async def told_to_oslo(request: Awaitable[Any], topic: str) -> Met:
    """What a call of oslo's client returns, or raises; a class with its bases."""
    try:
        return Returned(json.dumps(await request))
    except OsloError as error:
        text, args = error.message, error.arguments
        more = {"bases": error.bases, "args": args, **error.attributes}
        if error.kind == "RemoteError":  # its text holds the `repr` of a list that is there too
            text, more["args"] = text.partition("\n[")[0], None
        elif text in {repr(tuple(args)), *map(repr, args[:1])}:
            text = ""  # as of a builtin with several arguments
        return Raised(f"{error.module}.{error.kind}", words(text), _comparable(more, topic))


async def told_to_us(request: Awaitable[Any], topic: str) -> Met:
    """What a call of our client returns, or raises; a class with notes and attributes."""
    try:
        return Returned(json.dumps(await request))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        kind = f"{type(error).__module__}.{type(error).__name__}"
        more = {"args": error.args, **vars(error)}
        return Raised(kind, words(str(error), topic), _comparable(more, topic))


_ID: Final = re.compile(r"[0-9a-f]{32}")


def words(text: str, topic: str = "<topic>") -> tuple[str, ...]:
    """The lines of a text that may hold a traceback: without frames, ids and the topic."""
    lines = _ID.sub("<id>", text.replace(topic, "<topic>")).splitlines()
    return tuple(line for line in lines if line and not line.startswith("  "))


def _comparable(value: Any, topic: str) -> Any:
    """The same with every text as its words."""
    match value:
        case str():
            return words(value, topic)
        case list() | tuple():
            return [_comparable(item, topic) for item in value]
        case Mapping() if isinstance(value.get("traceback"), list):  # lines, or several in one
            joined = {**value, "traceback": "\n".join(value["traceback"])}
            return _comparable(joined, topic)
        case Mapping():
            return {key: _comparable(item, topic) for key, item in value.items()}
    return value
