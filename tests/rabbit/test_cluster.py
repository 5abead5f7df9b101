"""What a cluster of private nodes promises to the tests that use it; in a soak only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel

from tests.process.helpers import until
from tests.rabbit.cluster import Cluster, seen
from tests.rabbit.machine import process
from tests.scale import scale

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(scale(True, False), reason="three nodes need much: in a soak only"),
    pytest.mark.timeout(600),
]

QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(tmp_path)) as made:
        made.start()
        yield made


async def publish(channel: AbstractChannel, queue: str, count: int) -> None:
    message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await asyncio.gather(*(channel.default_exchange.publish(message, queue) for _ in range(count)))


async def test_a_quorum_queue_outlives_its_leader(cluster: Cluster):
    """With every confirmed message; the dead node comes back and is one of three again."""
    async with await aio_pika.connect(cluster.nodes[0].url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True, arguments=QUORUM)
        await publish(channel, "q", 200)
    leader = cluster.leader_of("q")

    leader.kill()

    await asyncio.to_thread(cluster.await_running, 2)
    survivor, other = cluster.others(leader)
    await until(lambda: survivor.home_of("q") != leader.name, "a new leader")
    assert survivor.queues()["q"].ready == 200
    async with await aio_pika.connect(other.url) as connection:
        await publish(await connection.channel(), "q", 1)
    await asyncio.to_thread(leader.start)
    await asyncio.to_thread(cluster.await_running, 3)
    assert leader.queues()["q"].ready == 201


async def test_nodes_are_members_of_one_cluster_and_leave_nothing(tmp_path: Path):
    """They share users and queues, one epmd, and an end."""
    cluster = Cluster(tmp_path)
    with contextlib.closing(cluster):
        await asyncio.to_thread(cluster.start)
        started = [process(pid) for node in cluster.nodes for pid in node.pids]
        async with await aio_pika.connect(cluster.nodes[1].url) as connection:
            await (await connection.channel()).declare_queue("q", durable=True)
        assert all(child.lives for child in started)
        assert [seen(node) for node in cluster.nodes] == [3, 3, 3]
        assert [set(node.queues()) for node in cluster.nodes] == [{"q"}] * 3

    assert not [child for child in started if child.lives]
