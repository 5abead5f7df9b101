"""A start with a wrong declare profile: refused, and the broker is as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import aiormq
import pytest

from gracekit import Context, Runtime, Service, Settings
from gracekit.errors import ConfigError
from gracekit.rpc.amqp.profiles import PROFILES, Topology
from gracekit.rpc.transport import QueueKind, directed_queue, fanout_queue, shared_queue
from tests.rabbit.broker import Broker

PEER = [shared_queue("disks"), directed_queue("disks", "node-1"), fanout_queue("disks", "peer")]
"""What a worker of oslo.messaging declares for its topic."""


@pytest.fixture
def svc() -> Service:
    made = Service("disks")

    @made.rpc
    async def create(ctx: Context, disk: str) -> str:
        return disk

    return made


@pytest.fixture
def settings(tmp_path: Path, rabbit_url: str) -> Settings:
    tmp_path.chmod(0o700)
    return Settings(transport_url=rabbit_url, store_url=f"sqlite:///{tmp_path}/s.db", host="node-1")


async def declare(url: str, profile: str, exchange: str) -> None:
    """Declare what a peer with *profile* declares, and leave it there."""
    topology = Topology(PROFILES[profile], exchange)
    async with aiormq.Connection(url) as connection:
        channel = await connection.channel()
        for queue in PEER:
            if queue.kind is not QueueKind.FANOUT:
                await topology.declare_queue(channel, queue)


def everything(broker: Broker, vhost: str) -> str:
    """Queues, exchanges and bindings of *vhost*."""
    name = f'<<"{vhost}">>'
    return broker.eval(
        f"{{lists:sort([amqqueue:get_name(Q) || Q <- rabbit_amqqueue:list({name})]),"
        f" lists:sort([element(2, X) || X <- rabbit_exchange:list({name})]),"
        f" lists:sort(rabbit_binding:list({name}))}}"
    )


@pytest.mark.parametrize(
    ("peer", "wrong", "exchange"),
    [
        ("oslo-transient", "durable", "openstack"),
        ("oslo-durable", "durable", "gracekit"),
        ("quorum", "durable", "gracekit"),
        ("oslo-durable", "oslo-quorum", "openstack"),
    ],
)
async def test_a_refused_start_leaves_nothing_and_the_right_one_follows(
    svc, settings, shared_broker, rabbit_vhost, peer: str, wrong: str, exchange: str
):
    """What exists is compared before anything is declared, so the refusal blocks no later start."""
    settings = replace(settings, exchange=exchange)
    await declare(settings.transport_url, peer, exchange)
    before = everything(shared_broker, rabbit_vhost)

    with pytest.raises(ConfigError):
        async with Runtime(svc, replace(settings, declare_profile=wrong)):
            pass

    assert everything(shared_broker, rabbit_vhost) == before
    async with Runtime(svc, replace(settings, declare_profile=peer)):
        pass


async def test_a_refusal_names_everything_that_blocks_the_start(svc, settings):
    """Each queue and exchange with other flags is named, and none that fits."""
    settings = replace(settings, exchange="openstack")
    await declare(settings.transport_url, "oslo-transient", "openstack")

    with pytest.raises(ConfigError) as refused:
        async with Runtime(svc, settings):
            pass

    assert str(refused.value).startswith(
        "exchange 'openstack', queue 'disks' and queue 'disks.node-1' exist with other flags than "
        "profile 'durable' declares: PRECONDITION_FAILED - inequivalent arg 'durable' for exchange "
        "'openstack'"
    )
    assert "nothing was declared" in str(refused.value)


async def test_an_old_queue_that_counts_readers_is_named_and_left_beside_a_living_peer(
    svc, settings, shared_broker, rabbit_vhost
):
    """The error is about what blocks the start, and not about the peer that reads the topic."""
    settings = replace(settings, exchange="openstack", declare_profile="oslo-transient")
    await declare(settings.transport_url, "oslo-transient", "openstack")
    async with aiormq.Connection(settings.transport_url) as connection:
        channel = await connection.channel()
        await channel.queue_declare("disks_readers", durable=True)
        await channel.basic_consume("disks", lambda message: None)
        before = everything(shared_broker, rabbit_vhost)

        with pytest.raises(ConfigError, match=r"^queue 'disks_readers' exists with other flags"):
            async with Runtime(svc, settings):
                pass

        assert everything(shared_broker, rabbit_vhost) == before
