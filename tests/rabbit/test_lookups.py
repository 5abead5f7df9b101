"""Callers wait for a result while their connection to the broker breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import Context, NoAnswerError, RpcClient, Runtime, Service, Settings
from tests.rabbit.broker import Broker
from tests.rabbit.proxy import Proxy

pytestmark = pytest.mark.process


@pytest.fixture
def wire(shared_broker: Broker) -> Iterator[Proxy]:
    """The caller's way to the node."""
    with Proxy(shared_broker.port) as proxy:
        yield proxy


async def test_a_broken_connection_is_no_answer_and_a_wait_goes_on(
    wire: Proxy, shared_broker: Broker, rabbit_vhost: str, tmp_path: Path
) -> None:
    """Nothing is known while the broker cannot be reached; a caller that waits asks again."""
    svc = Service("copies", task_api="callers")
    may_end = asyncio.Event()

    @svc.rpc(on_interrupt="retry")
    async def copy(ctx: Context) -> str:
        await may_end.wait()
        return "copied"

    tmp_path.chmod(0o700)
    url = shared_broker.url_of(rabbit_vhost)
    settings = Settings(transport_url=url, store_url=f"sqlite:///{tmp_path}/store.db", host="one")
    through = shared_broker.url_of(rabbit_vhost, port=wire.port)
    async with Runtime(svc, settings), RpcClient(through, "copies") as client:
        task = await client.cast("copy")
        while (await client.state(task)).state != "running":
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(client.result(task, wait="60s"))
        wire.refuse()
        wire.cut()
        with pytest.raises(NoAnswerError):
            await client.state(task)
        with pytest.raises(NoAnswerError):
            await client.cancel(task)
        assert not waiting.done()
        wire.heal()
        may_end.set()

        assert await waiting == "copied"
