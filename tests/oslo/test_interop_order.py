"""Who comes first, and who stands beside: oslo's and our processes on one broker, each profile."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracekit import CallTimeoutError, RpcClient, Undeliverable
from tests.oslo.kit import OsloClient, OsloError, OsloServer, Peer
from tests.oslo.meeting import (
    HOST,
    NATIVE,
    OSLO,
    Stock,
    a_service,
    check_ways,
    meet,
    our_url,
    serving,
    widened_peer,
)
from tests.process.helpers import until
from tests.rabbit.broker import Broker

pytestmark = pytest.mark.process

FULL = ("durable", "oslo-transient")
SMOKE = ("quorum", "oslo-quorum", "oslo-quorum-all")
PLAIN: dict[str, dict[str, Any]] = {"endpoint": {}}


def oslo_client(peer: Peer, topic: str) -> OsloClient:
    return OsloClient(peer, {"topic": topic, "exchange": None}, {"timeout": 10})


@pytest.mark.parametrize("profile", SMOKE)
async def test_each_profile_has_its_match(rabbit_url: str, tmp_path: Path, profile: str):
    """Calls, casts, fanouts and errors, each client to each server."""
    async with meet(rabbit_url, profile, tmp_path, in_full=False) as meeting:
        await check_ways(meeting)


# -- one topic ----------------------------------------------------------------------------

BOTH = "shop-both"
EACH = 8


@pytest.mark.parametrize(
    ("profile", "first"),
    [
        ("oslo-durable", "oslo"),
        ("oslo-durable", "gracekit"),
        ("oslo-transient", "oslo"),
        ("oslo-transient", "gracekit"),
        ("oslo-quorum", "oslo"),
        ("oslo-quorum-all", "gracekit"),
    ],
)
async def test_both_kinds_of_servers_share_a_topic(
    rabbit_url: str,
    rabbit_vhost: str,
    shared_broker: Broker,
    tmp_path: Path,
    profile: str,
    first: str,
):
    """Whichever declares its queues first: each gets every fanout once, what is directed to it, and
    a part of the rest.
    """
    ours = our_url(rabbit_url, profile)
    svc, stocks = a_service(BOTH, ours, PLAIN)
    stock = stocks["endpoint"]
    async with (
        widened_peer(rabbit_url, profile) as peer,
        RpcClient(ours, BOTH) as us,
        contextlib.AsyncExitStack() as stack,
    ):
        server, oslo = OsloServer(peer, "node-o"), oslo_client(peer, BOTH)
        for kind in ("oslo", "gracekit") if first == "oslo" else ("gracekit", "oslo"):
            if kind == "oslo":
                await peer.ask("serve", server="node-o", topic=BOTH, endpoints=PLAIN)
            else:
                settings = {"host": "node-g", "accept_unshared_store": True}
                await stack.enter_async_context(serving(svc, ours, tmp_path / "native", **settings))

        await asyncio.gather(
            *(oslo.fanout({}, "echo", fanout=f"o{n}") for n in range(EACH)),
            *(us.fanout("echo", fanout=f"u{n}") for n in range(EACH)),
            *(oslo.cast({}, "echo", cast=f"o{n}") for n in range(EACH)),
            *(us.cast("echo", cast=f"u{n}") for n in range(EACH)),
            *(oslo.prepare(server=f"node-{to}").cast({}, "echo", to=to, by="o") for to in "og"),
            *(us.prepare(host=f"node-{to}").cast("echo", to=to, by="u") for to in "og"),
        )
        seen = {"node-o": lambda: begun_by_oslo(server), "node-g": lambda: stock.begun}
        await until(lambda: sum(len(begun()) for begun in seen.values()) >= 6 * EACH + 4, "all")
        await asyncio.gather(oslo.fanout({}, "echo", last="o"), us.fanout("echo", last="u"))
        await until(lambda: sum(len(begun()) for begun in seen.values()) >= 6 * EACH + 8, "last")
        await until(lambda: not held(shared_broker, rabbit_vhost), "the acknowledgements")
        check_shares({host: begun() for host, begun in seen.items()})


def held(broker: Broker, vhost: str) -> list[str]:
    """Queues of the topic that are not empty."""
    queues = broker.queues(vhost).items()
    return [name for name, queue in queues if BOTH in name and (queue.ready or queue.unacked)]


Begun = list[tuple[str, dict[str, Any]]]


def begun_by_oslo(server: OsloServer) -> Begun:
    """The same for oslo's server as `Stock.begun`."""
    events = [event for event in server.peer.events if event["event"] == "begun"]
    return [(event["message"]["method"], event["message"]["args"]) for event in events]


def check_shares(seen: dict[str, Begun]) -> None:
    fanouts = {f"{client}{n}" for client in "ou" for n in range(EACH)}
    shared: Counter[str] = Counter()
    for host, begun in seen.items():
        args = [args for _, args in begun]
        assert Counter(each["fanout"] for each in args if "fanout" in each) == Counter(fanouts)
        assert sorted(each["by"] for each in args if "to" in each) == ["o", "u"]
        assert {each["to"] for each in args if "to" in each} == {host[-1]}
        share = [each["cast"] for each in args if "cast" in each]
        assert share, host
        shared.update(share)
    assert shared == Counter(fanouts)


# -- first and last -----------------------------------------------------------------------


async def check_calls(oslo: Peer, us: dict[str, RpcClient]) -> None:
    """Both clients are answered by both servers."""
    for topic in (OSLO, NATIVE):
        for client in ({}, {"server": HOST}):
            assert await oslo_client(oslo, topic).prepare(**client).call({}, "who") == "endpoint"
        for options in ({}, {"host": HOST}):
            assert await us[topic].prepare(timeout=10, **options).call("who") == "endpoint"


@contextlib.asynccontextmanager
async def our_clients(url: str):
    """One for each server."""
    async with RpcClient(url, OSLO) as theirs, RpcClient(url, NATIVE) as ours:
        yield {OSLO: theirs, NATIVE: ours}


@contextlib.asynccontextmanager
async def both_servers(url: str, profile: str, folder: Path):
    """oslo's and ours, each on its topic, without any state but the store."""
    ours = our_url(url, profile)
    svc, stocks = a_service(NATIVE, ours, PLAIN)
    async with widened_peer(url, profile) as peer, serving(svc, ours, folder / "native"):
        await peer.ask("serve", server=HOST, topic=OSLO, endpoints=PLAIN)
        yield OsloServer(peer, HOST), stocks["endpoint"]


@pytest.mark.parametrize("profile", FULL)
@pytest.mark.parametrize("first", ["oslo", "gracekit"])
async def test_clients_may_come_first(rabbit_url: str, tmp_path: Path, profile: str, first: str):
    """The one that is first declares the exchange; its peer, and the servers, find it as they
    want it.
    """
    ours = our_url(rabbit_url, profile)
    async with widened_peer(rabbit_url, profile) as oslo, our_clients(ours) as us:
        for kind in ("oslo", "gracekit") if first == "oslo" else ("gracekit", "oslo"):
            for topic in (OSLO, NATIVE):
                if kind == "oslo":
                    await oslo_client(oslo, topic).cast({}, "echo")
                else:
                    with pytest.raises(Undeliverable):
                        await us[topic].cast("echo")
        async with both_servers(rabbit_url, profile, tmp_path):
            await check_calls(oslo, us)


@pytest.mark.parametrize(
    ("topic", "host"),
    [("ironic.conductor_manager", "node-1.example.org"), ("cinder-volume", "host1@lvm#pool")],
)
async def test_names_that_oslo_serves_are_served(
    rabbit_url: str, tmp_path: Path, topic: str, host: str
):
    """Topics and hosts as services of OpenStack have them, to any host, to one, and to all."""
    ours = our_url(rabbit_url, "oslo-durable")
    svc, stocks = a_service(topic, ours, PLAIN)
    async with (
        serving(svc, ours, tmp_path / "store", host=host),
        widened_peer(rabbit_url, "oslo-durable") as peer,
        RpcClient(ours, topic) as us,
    ):
        oslo = oslo_client(peer, topic)
        assert await oslo.call({}, "echo", by="oslo") == {"by": "oslo"}
        assert await oslo.prepare(server=host).call({}, "echo", to=host) == {"to": host}
        assert await us.prepare(host=host).call("echo", by="us") == {"by": "us"}
        await oslo.fanout({}, "echo", way="fanout")
        await stocks["endpoint"].wait_begun("echo", way="fanout")


@pytest.mark.parametrize("profile", FULL)
async def test_either_side_may_restart(rabbit_url: str, tmp_path: Path, profile: str):
    """Servers go and come: what was cast meanwhile is done once, what was called has expired, and
    the old clients go on. Clients go and come: they find the servers.
    """
    ours = our_url(rabbit_url, profile)
    async with widened_peer(rabbit_url, profile) as oslo, our_clients(ours) as us:
        async with both_servers(rabbit_url, profile, tmp_path):
            await check_calls(oslo, us)

        for topic in (OSLO, NATIVE):
            await oslo_client(oslo, topic).cast({}, "echo", way="cast", by="oslo")
            await us[topic].cast("echo", way="cast", by="us")
        await asyncio.gather(*(expire(oslo_client(oslo, t), us[t]) for t in (OSLO, NATIVE)))

        async with both_servers(rabbit_url, profile, tmp_path) as (server, stock):
            await check_calls(oslo, us)
            await check_casts(server, stock)
            async with widened_peer(rabbit_url, profile) as other, our_clients(ours) as others:
                await check_calls(other, others)


async def expire(oslo: OsloClient, us: RpcClient) -> None:
    """Calls that nobody takes in their time."""
    theirs = oslo.prepare(timeout=1).begin("call", {}, "echo", way="call", by="oslo")
    with pytest.raises(CallTimeoutError):
        await us.prepare(timeout=1).call("echo", way="call", by="us")
    with pytest.raises(OsloError, match="Timed out"):
        await theirs


async def check_casts(server: OsloServer, stock: Stock) -> None:
    seen: list[Callable[[], Begun]] = [lambda: begun_by_oslo(server), lambda: stock.begun]
    for begun in seen:
        echoes: Callable[[], list[Any]] = lambda begun=begun: [  # noqa: E731
            args for method, args in begun() if method == "echo"
        ]
        await until(lambda echoes=echoes: len(echoes()) >= 2, "both casts")
        assert sorted(each["by"] for each in echoes()) == ["oslo", "us"]
        assert {each["way"] for each in echoes()} == {"cast"}
