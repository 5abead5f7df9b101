"""A process that serves for long holds no more than one that has just begun.

`python -m tests.process.test_over_time SECONDS [sqlite|rabbitmq]` prints what grew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gracekit import RpcClient
from gracekit.clock import Clock
from gracekit.errors import GracekitError
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Message, shared_queue
from tests.process.helpers import Site, until
from tests.rabbit.broker import Broker
from tests.rabbit.proxy import Proxy
from tests.rabbit.site import RabbitSite
from tests.scale import scale

SECONDS = scale(8, 300)
CALLERS = 16
SETTINGS = {"retention": "2s", "retention_after": "1s", "reconcile_every": "0.5s"}
FIXED = ("descriptors", "threads", "tasks")
Measured = dict[str, int]


class Traffic:
    """Callers that send every kind of request in turn, and how many they have sent."""

    def __init__(self, client: RpcClient, put: Callable[[bytes], Awaitable[None]]) -> None:
        self._client = client
        self._put = put
        self._numbers = itertools.count()
        self.sent = 0
        self.is_over = False

    async def go_on(self) -> None:
        """One caller, until it is over."""
        while not self.is_over:
            n = next(self._numbers)
            with contextlib.suppress(GracekitError, LookupError, TypeError, TimeoutError):
                await self._send(n)
            self.sent += 1

    async def _send(self, n: int) -> None:
        client, name = self._client.prepare(timeout=20), f"r{n}"
        kinds: list[Callable[[], Awaitable[object]]] = [
            lambda: client.call("read", text="x" * (n % 5000)),
            lambda: client.cast("read"),
            lambda: client.prepare(request_id=name, monitor_timeout=5).call("leased", vm=f"v{n}"),
            lambda: client.prepare(request_id=f"r{n - 20}").cast("leased", vm=f"v{n - 20}"),
            lambda: client.prepare(request_id=f"r{n - 20}").cast("leased", vm="another"),
            lambda: client.call("leased", vm="the same"),
            lambda: client.call("probed"),
            lambda: client.cast("stepped", items=5),
            lambda: client.call("boom", text=name),
            lambda: client.call("late"),
            lambda: client.call("plain"),
            lambda: client.call("held", key=name),
            lambda: client.prepare(ops=True).call("release", key=f"r{n - 21}"),
            lambda: client.fanout("everywhere"),
            lambda: client.call(f"unknown_{n}"),
            lambda: client.call("read", **{f"wrong_{n}": n}),
            lambda: client.prepare(timeout=0.001).call("stepped", items=3),
            lambda: self._put(b"\xff no message %d" % n),
            lambda: self._put(json.dumps({"method": "read", "args": {}, "_msg_id": name}).encode()),
            lambda: self._put(b'{"method": "read", "args": {"text": "%s"}}' % (b"x" * 2_000_000)),
        ]
        await kinds[n % len(kinds)]()


async def measure_over(
    site: Site, seconds: float, disturb: Callable[[], object]
) -> list[tuple[int, Measured]]:
    """Requests sent, and what the process held then: after a fifth, and at four more moments."""
    process = await site.start_program("varied", **SETTINGS).serving()
    found = []
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(RpcClient(site.url, "varied"))
        transport = open_transport(site.url, process=Process(), clock=Clock())
        await transport.start()
        stack.push_async_callback(transport.stop)
        queue = shared_queue("varied")
        traffic = Traffic(client, lambda body: transport.publish(queue, Message(body=body)))
        for _ in range(5):
            traffic.is_over = False
            callers = [asyncio.create_task(traffic.go_on()) for _ in range(CALLERS)]
            await asyncio.sleep(seconds / 10)
            disturb()
            await asyncio.sleep(seconds / 10)
            traffic.is_over = True
            await asyncio.gather(*callers)
            await _wait_quiet(site)
            found.append((traffic.sent, await _measure(client)))
    _check_accounts(site)
    assert await process.stop() == 0, process.log[-3000:]
    return found


async def _measure(client: RpcClient) -> Measured:
    """The least of three looks: a pass of recovery has tasks of its own, for a moment."""
    ops = client.prepare(ops=True, timeout=60)
    looks: list[Measured] = [await ops.call("measure") for _ in range(3)]
    return {name: min(look[name] for look in looks) for name in looks[0]}


async def _wait_quiet(site: Site) -> None:
    """Until every request has ended and retention has removed it."""

    def is_quiet() -> bool:
        return not site.rows("SELECT 1 FROM task WHERE method <> 'measure' LIMIT 1")

    await until(is_quiet, "all rows removed", within_s=120)


def _check_accounts(site: Site) -> None:
    tally = {str(row["what"]): row["n"] for row in site.rows("SELECT what, n FROM tally")}
    (left,) = site.rows("SELECT count(*) AS n FROM task WHERE state <> 'rejected'")
    assert tally["accepted"] == left["n"] + tally["removed"]


def grown(found: list[tuple[int, Measured]]) -> dict[str, float]:
    """By how much what is held grew from the first measurement to the last, for a million."""
    (sent, first), (in_all, last) = found[0], found[-1]
    return {name: (last[name] - first[name]) / (in_all - sent) * 1e6 for name in first}


@pytest.fixture(params=["sqlite", "rabbitmq"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Site, Callable[[], object]]]:
    """A site, and what disturbs it: on RabbitMQ its connections are cut."""
    if request.param == "sqlite":
        site = Site(tmp_path)
        yield site, lambda: None
        site.close()
        return
    broker: Broker = request.getfixturevalue("shared_broker")
    vhost: str = request.getfixturevalue("rabbit_vhost")
    with Proxy(broker.port) as proxy:
        site = RabbitSite(tmp_path, broker, vhost, port=proxy.port)
        yield site, proxy.cut
        site.close()


@pytest.mark.timeout(SECONDS * 3 + 240)
async def test_what_a_process_holds_does_not_grow_with_what_it_has_served(place) -> None:
    """Objects, descriptors, threads, tasks and rows, beside every kind of request, good and bad."""
    site, disturb = place

    found = await measure_over(site, SECONDS, disturb)

    served = found[-1][0] - found[0][0]
    held = {name: [measured[name] for _, measured in found] for name in found[0][1]}
    assert served > SECONDS, found
    for name in FIXED:
        assert held[name][-1] <= held[name][0] + 2, held
    assert held["objects"][-1] - held["objects"][0] < 1500 + served / 50, held


async def _main() -> None:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        root = Path(directory)
        root.chmod(0o700)
        site, disturb = Site(root), lambda: None
        stack.callback(site.close)
        found = await measure_over(site, float(sys.argv[1]), disturb)
    million = {name: round(value) for name, value in grown(found).items()}
    for line in (*found, ("growth for a million", million)):
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    asyncio.run(_main())
