"""Three nodes that are one broker: the leader of a quorum queue dies while requests pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.helpers import until
from tests.process.judge import rows
from tests.rabbit.cluster import Cluster
from tests.rabbit.site import RabbitSite
from tests.rabbit.test_trouble import told
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CASTS = 2000
PER_SECOND = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.skipif(not scale(0, 1), reason="three nodes are for the soak")
async def test_a_quorum_queue_that_loses_its_leader_loses_no_request(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Each confirmed cast takes effect once, whichever node dies: the leader, twice."""
    site = RabbitSite(tmp_path, cluster.nodes[0], "/")
    hosts = ",".join(f"tests:{node.password}@127.0.0.1:{node.port}" for node in cluster.nodes)
    site.url = f"amqp://{hosts}/?profile=quorum"
    try:
        service = await site.start().serving()
        caster = site.caster("client", CASTS, per_second=PER_SECOND)
        await site.effect("done", times=100)
        gaps = []
        for _ in range(2):
            await asyncio.sleep(2)  # a young quorum queue has nothing on disk yet
            leader = await asyncio.to_thread(cluster.leader_of, "shop")
            done = len(site.seen("done"))
            await asyncio.to_thread(leader.kill)
            began = time.monotonic()
            await site.effect("done", times=done + 20)
            gaps.append(time.monotonic() - began)
            await asyncio.to_thread(leader.start)
            await asyncio.to_thread(cluster.await_running, len(cluster.nodes))
        await until(lambda: caster.poll() is not None, "the client", 120)
        ids = set(site.confirmed("client"))
        await until(lambda: len(rows(site)) >= len(ids) and not site.transient(), "the end", 120)
        code = await service.stop()
    finally:
        site.close()

    print(f"\n{len(ids)} confirmed, gaps {gaps}; {told(service)}")  # noqa: T201 - for `pytest -s`
    assert (caster.returncode, code) == (0, 0)
    assert len(ids) == CASTS
    assert ids == rows(site).keys()
    assert {row["state"] for row in rows(site).values()} == {"succeeded"}
    assert len(site.seen("start")) == CASTS
