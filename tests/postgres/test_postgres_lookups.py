"""Hosts that share a store: each answers for what another one runs, and cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import RpcClient, TaskCancelledError, UnknownTaskError
from tests.postgres.site import PostgresSite
from tests.process.helpers import ServiceProcess, until
from tests.rabbit.broker import Broker
from tests.scale import scale
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]


@pytest.fixture
def site(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, postgres: Postgres, schema: str
) -> Iterator[PostgresSite]:
    made = PostgresSite(tmp_path, shared_broker, rabbit_vhost, postgres, schema)
    yield made
    made.close()


def start(site: PostgresSite, host: str) -> ServiceProcess:
    directory = site.root / f"runs-{host}"
    return site.start_program("copier", host=host, run_directory=directory)


async def test_a_host_answers_for_what_another_one_runs_and_cancels_it(site: PostgresSite) -> None:
    """A wait at one host ends when the other has ended the task; a cancel reaches its handler."""
    hosts = [await start(site, name).serving() for name in ("one", "two")]
    async with RpcClient(site.url, "copies") as client:
        ada = client.prepare(context={"user_id": "ada"})
        here, there = ada.prepare(host="one"), ada.prepare(host="two")
        kept = await there.cast("copy", key="kept")
        cut = await there.cast("copy", key="cut")
        for key in ("kept", "cut"):
            await site.effect("start", key)
        assert (await here.state(kept)).state == "running"
        waiting = asyncio.create_task(here.result(kept, wait="60s"))
        with pytest.raises(UnknownTaskError):
            await here.prepare(context={"user_id": "eve"}).cancel(cut)
        await here.cancel(cut, reason="a mistake")
        with pytest.raises(TaskCancelledError, match="user ada: a mistake"):
            await here.result(cut, wait="60s")
        assert not waiting.done()
        (site.root / "kept").touch()

        assert await waiting == "kept on two"
        assert (await here.cancel(kept)).state == "succeeded"

    assert [effect.key for effect in site.seen("done")] == ["kept"]
    assert len(site.seen("start")) == 2
    assert [await host.stop() for host in hosts] == [0, 0]


async def test_a_cancel_outlives_the_host_that_was_to_carry_it_out(site: PostgresSite) -> None:
    """It is on record for a handler of a host that has died: who takes the task over ends it."""
    hosts = {name: await start(site, name).serving() for name in ("one", "two")}
    async with RpcClient(site.url, "copies") as client:
        ada = client.prepare(context={"user_id": "ada"})
        task = await ada.prepare(host="two").cast("copy", key="cut")
        await site.effect("start", "cut")
        hosts["two"].kill()
        await ada.prepare(host="one").cancel(task)
        with pytest.raises(TaskCancelledError):
            await ada.prepare(host="one").result(task, wait="120s")

    assert await hosts["one"].stop() == 0
    await until(lambda: site.state(task) == "cancelled", "the end on record")
    assert len(site.seen("start")) == 1
    assert not site.seen("done")
