"""Services whose new requests all name a host: `Service(..., queues="directed")`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gracekit import Context, RpcClient, Runtime, Service, Settings, Undeliverable
from gracekit.config.choices import ServiceQueues
from gracekit.errors import ConfigError
from gracekit.rpc.transport import directed_queue, shared_queue


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture(params=["file", "broker"])
def url(request: pytest.FixtureRequest, place: Path) -> str:
    """Of queues in a file, and on RabbitMQ."""
    if request.param == "file":
        return f"sqlite:///{place}/queues.db"
    return str(request.getfixturevalue("rabbit_url"))


class Host:
    """A host with a store of its own."""

    def __init__(
        self, url: str, place: Path, name: str, *, store: str = "", queues: ServiceQueues
    ) -> None:
        store_url = f"sqlite:///{place}/{store or name}.db"
        self.svc = svc = Service("compute", queues=queues)
        self.fanned: list[str] = []
        self.seen: list[str] = []

        @svc.rpc(resource="vm", on_interrupt="error")
        async def boot(ctx: Context, vm: str) -> str:
            return f"{vm} on {name}"

        @svc.rpc
        async def refresh(ctx: Context) -> None:
            self.fanned.append(name)

        self.settings = Settings(transport_url=url, store_url=store_url, host=name)
        self.runtime = Runtime(svc, self.settings)
        self.runtime.ground.telemetry.subscribe(lambda event, _: self.seen.append(event))


async def test_hosts_with_a_store_each_serve_what_is_sent_to_them(url: str, place: Path) -> None:
    """Nobody reads another host's requests, so no start is refused, and no reader is foreign."""
    one, two = (Host(url, place, name, queues="directed") for name in ("one", "two"))
    async with one.runtime, two.runtime, one.svc.client(url) as client:
        answers = [
            await client.prepare(host=name, fail_fast=True).call("boot", vm="vm-1")
            for name in ("one", "two")
        ]
        await client.fanout("refresh")
        for host in (one, two):
            await client.prepare(host=host.settings.host).call("boot", vm="vm-2")
            while not host.fanned:
                await client.prepare(host=host.settings.host).call("boot", vm="vm-3")

    assert answers == ["vm-1 on one", "vm-1 on two"]
    assert "reader.foreign" not in one.seen + two.seen


async def test_a_request_without_a_host_is_undeliverable(url: str, place: Path) -> None:
    """At once, also if the service read the shared queue before and left it behind."""
    before = Host(url, place, "one", queues="all")
    async with before.runtime, before.svc.client(url) as client:
        assert await client.call("boot", vm="vm-1") == "vm-1 on one"
    host = Host(url, place, "one", queues="directed")
    async with host.runtime, host.svc.client(url) as client:
        await check_undeliverable(client, fail_fast=True)
        await check_undeliverable(client, fail_fast=False)
        depth = await host.runtime.ground.transport.depth([shared_queue("compute")])

    assert depth == 0


async def check_undeliverable(client: RpcClient, *, fail_fast: bool) -> None:
    view = client.prepare(timeout=60, fail_fast=fail_fast)
    with pytest.raises(Undeliverable, match=r"queues='directed'\) say prepare\(host="):
        await view.call("boot", vm="vm-2")
    with pytest.raises(Undeliverable):
        await view.cast("boot", vm="vm-2")


async def test_a_queue_in_which_requests_wait_is_left(place: Path) -> None:
    """A start loses no request: what was sent before waits for a service that reads it."""
    url = f"sqlite:///{place}/queues.db"
    before = Host(url, place, "one", queues="all")
    async with before.runtime:
        pass
    async with before.svc.client(url) as client:
        await client.cast("boot", vm="vm-1")
    host = Host(url, place, "one", queues="directed")
    async with host.runtime:
        assert await host.runtime.ground.transport.depth([shared_queue("compute")]) == 1


@pytest.mark.parametrize(
    ("names", "queues", "queue"),
    [
        (["one", "one"], ("directed", "directed"), "compute.one"),
        (["one", "two"], ("all", "all"), "compute"),
    ],
)
async def test_two_stores_that_read_one_queue_are_refused_still(
    url: str, place: Path, names: Sequence[str], queues: Sequence[ServiceQueues], queue: str
) -> None:
    """Two stores of one host would share its requests; the remedy for several hosts is named."""
    first, second = (
        Host(url, place, name, store=f"store-{number}", queues=word)
        for number, (name, word) in enumerate(zip(names, queues, strict=True))
    )
    async with first.runtime:
        with pytest.raises(ConfigError, match=rf"read queue {queue}[ :]") as caught:
            await second.runtime.__aenter__()

    assert "say Service(..., queues='directed')" in str(caught.value)


async def test_processes_of_one_host_and_store_start_beside_each_other(
    url: str, place: Path
) -> None:
    """They share the queue of their host, and their store."""
    one, two = (Host(url, place, "one", queues="directed") for _ in range(2))
    async with one.runtime, two.runtime, one.svc.client(url) as client:
        assert await client.prepare(host="one").call("boot", vm="vm-1") == "vm-1 on one"
        queues = [server.queues[0] for server in one.runtime.wired.servers.values()]

    assert queues == [directed_queue("compute", "one"), shared_queue("compute-ops")]


async def test_an_ops_request_without_a_host_runs_only_what_may_run_anywhere(
    url: str, place: Path
) -> None:
    """Each host has a record of its own, so what must not run twice needs the name of one."""
    host = Host(url, place, "one", queues="directed")

    @host.svc.ops
    async def charge(ctx: Context) -> str:
        return "charged"

    @host.svc.ops(on_interrupt="requeue")
    async def ping(ctx: Context) -> str:
        return "pong"

    async with host.runtime, host.svc.client(url) as client:
        assert await client.call(ping) == "pong"
        assert await client.prepare(host="one").call(charge) == "charged"
        for method, args in (("charge", {}), ("boot", {"vm": "vm-1"})):
            with pytest.raises(TypeError, match=r"say prepare\(host=\.\.\.\)"):
                await client.prepare(ops=True).call(method, **args)
