"""Casts of oslo.messaging's own client to a gracekit service that is stopped and killed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oslo.kit import OsloClient, oslo_client, oslo_server
from tests.process.helpers import SLACK_S, ServiceProcess, until
from tests.process.judge import rows
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(240, 3600))]

CASTS = scale(300, 2000)
PER_SECOND = 25.0
INTERRUPTIONS = 5
HERE = "node-a"
SETTINGS = {
    "max_running": 3,
    "max_attempts": 10,
    "drain_timeout": "0.3s",
    "handover_grace": "0.3s",
    "handover_flush": "3s",
    "exit_margin": "3s",
}


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


async def cast_all(client: OsloClient) -> set[str]:
    """Half of them may be repeated and half must not; returns their keys."""
    loop, begin, keys = asyncio.get_running_loop(), asyncio.get_running_loop().time(), set()
    for n in range(CASTS):
        await asyncio.sleep(begin + n / PER_SECOND - loop.time())
        method = ("retried", "slow")[n % 2]
        key = f"{method}-{n}"
        args = {"vm": f"vm-{n % 12}"} if method == "retried" else {}
        await client.cast({}, method, key=key, s=0.4 if n % 7 == 0 else 0.04, **args)
        keys.add(key)
    return keys


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_every_cast_of_an_oslo_client_takes_effect(
    site: RabbitSite, how: signal.Signals
) -> None:
    """Of 300 to a directed topic, while the service is stopped or killed five times: all that may
    be repeated take effect, and none of the others is started twice.
    """
    service = await site.start(**SETTINGS).serving()
    async with oslo_client(site.url, "shop", exchange="gracekit", profile="durable") as client:
        casting = asyncio.create_task(cast_all(client.prepare(server=HERE)))
        for n in range(INTERRUPTIONS):
            await site.effect("done", times=(n + 1) * 20)
            service = await again(site, service, how)
        keys = await casting
    await until(lambda: len(rows(site)) >= CASTS and not site.transient(), "the end", 180)
    code = await service.stop()

    assert code == 0
    check(site, keys)


async def again(site: RabbitSite, service: ServiceProcess, how: signal.Signals) -> ServiceProcess:
    """End it in that way, and start the next."""
    service.signal(how)
    assert await service.exit_code() in ({-9} if how is signal.SIGKILL else {0, 75})
    return await site.start(**SETTINGS).serving()


def check(site: RabbitSite, keys: set[str]) -> None:
    done = Counter(effect.key for effect in site.seen("done"))
    started = Counter(effect.key for effect in site.seen("start"))
    assert len(rows(site)) == CASTS
    assert site.queued() == 0
    assert {key for key in keys if key.startswith("retried")} <= done.keys()
    assert max(n for key, n in started.items() if key.startswith("slow")) == 1
    for row in rows(site).values():
        interrupted = (row["method"], row["reason"]) == ("slow", "interrupted")
        assert row["state"] == "succeeded" or interrupted, row


def _held(site: RabbitSite) -> tuple[int, int]:
    """How many messages of the topic are delivered and not acked, and how many read it."""
    queue = site.broker.queues(site.vhost)["shop"]
    return queue.unacked, queue.consumers


async def test_an_oslo_worker_beside_gets_everything_new_when_a_drain_begins(
    site: RabbitSite,
) -> None:
    """Within a second of the drain's start; the broker holds nothing for us but what runs."""
    url = site.url
    site.url = f"{url}?profile=oslo-durable&exchange=openstack"
    service = await site.start(accept_unshared_store="true", drain_timeout="20s").serving()
    async with (
        oslo_server(url, "shop", server="node-b", profile="durable") as worker,
        oslo_client(url, "shop", profile="durable") as client,
    ):
        for n in range(20):  # some of them come to us
            await client.cast({}, "through_drain", key=f"k{n}", s=6)
        await site.effect("start")
        service.terminate()
        began = time.monotonic()
        await service.wait_log("intake.closed")
        for n in range(20):
            await client.cast({}, "echo", n=n)
        for n in range(20):
            await worker.begun(1, message={"method": "echo", "args": {"n": n}})
        took_s = time.monotonic() - began
        # Not at once: the oslo worker acks what it has, one after the other, too.
        await until(lambda: _held(site) == (0, 1), "nothing held, and one reader left")
        done = site.seen("done")
        code = await service.exit_code()

    assert code == 0
    assert took_s < 1 + SLACK_S, "a second, on a machine that is not busy"
    print(f"\neverything new within {took_s:.2f} s")  # noqa: T201 - for `pytest -s`
    assert done == [], "what ran had ended before the broker was asked"
    assert len(site.seen("done")) == len(site.seen("start"))
