"""Hosts that die, stand still, or are cut off: their work goes on elsewhere, and never twice."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gracekit import RpcClient
from gracekit.errors import TaskInterruptedError
from tests.postgres.fleet import DEAD_S, HARD_S, Fleet, now
from tests.postgres.test_postgres_hosts import check_accounts
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]


async def test_the_task_of_a_killed_host_ends_on_another_one(fleet: Fleet) -> None:
    """Once, when its beats have stopped for long enough; its caller gets the answer from there."""
    first = await fleet.host("one").start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("retried", key="a", vm="v", s=60, again_s=0.1))
        await fleet.effect("start", "a")
        second = await fleet.host("two").start().serving()
        run_id = str(first.run["run_id"])
        first.kill()
        killed_at = now()
        answer = await call

    (_, again) = fleet.seen("start", "a")
    row = await fleet.gone(run_id)
    assert answer == "a"
    assert again.pid == second.pid
    assert again.at - killed_at >= DEAD_S - 2.0
    assert int(again.more[1]) > int(fleet.seen("start", "a")[0].more[1])
    assert "no beat for 11 s" in row["gone_reason"]
    assert await second.stop() == 0
    check_accounts(fleet)


async def test_on_the_same_host_work_goes_on_at_once(fleet: Fleet) -> None:
    """The death of a process is proven there."""
    host = fleet.host("one")
    first = await host.start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("retried", key="a", vm="v", s=60, again_s=0.1))
        await fleet.effect("start", "a")
        first.kill()
        second = await host.start().serving()
        answer = await call

    assert answer == "a"
    (gone,) = fleet.declared()
    assert "its process has ended" in gone["gone_reason"]
    assert await second.stop() == 0
    check_accounts(fleet)


@pytest.mark.parametrize("_", range(scale(1, 10)))
async def test_a_stopped_process_is_gone_before_others_may_act(fleet: Fleet, _: int) -> None:
    """The kernel ends it, also while it is stopped. An `error` task does not run again."""
    first = await fleet.host("one").start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        call = asyncio.create_task(client.prepare(timeout="120s").call("slow", key="a", s=60))
        await fleet.effect("start", "a")
        second = await fleet.host("two").start().serving()
        run_id = str(first.run["run_id"])
        first.signal(signal.SIGSTOP)
        stopped_at = now()
        code = await first.exit_code(within_s=60)
        ended_at = now()
        declared_before = fleet.rows("SELECT 1 FROM run WHERE gone_at IS NOT NULL")
        with pytest.raises(TaskInterruptedError):
            await call

    assert code == -signal.SIGKILL
    assert ended_at - stopped_at >= HARD_S - 2.0
    assert declared_before == []
    await fleet.gone(run_id)
    assert len(fleet.seen("start", "a")) == 1
    assert await second.stop() == 0
    check_accounts(fleet)


async def test_a_host_cut_off_from_the_store_alone_stops_what_it_does(fleet: Fleet) -> None:
    """Its handler is cancelled before its task may run elsewhere, and it waits for its store."""
    host = fleet.host("one")
    first = await host.start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("retried", key="a", vm="v", s=60, again_s=0.1))
        await fleet.effect("start", "a")
        second = await fleet.host("two").start().serving()
        host.store.swallow()
        await first.wait_log("beats.missed")
        await first.wait_log("store.unreachable")
        answer = await call
        host.store.heal()
        code = await first.exit_code(within_s=60)

    assert answer == "a"
    assert fleet.seen("start", "a")[1].pid == second.pid
    assert code == 70
    assert "store.fenced" in first.log
    assert await second.stop() == 0
    check_accounts(fleet)
