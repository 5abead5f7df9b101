"""Parked tasks by HTTP: how they are shown, how they are ended, and what probes say of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from gracekit import Context, NoCapacity, RpcClient, Service
from gracekit.telemetry.readings import StoreNumbers
from tests.admin.kit import ALICE, PATIENCE_S, Site, write_tokens

pytestmark = pytest.mark.process


def service() -> Service:
    svc = Service("scheduler")

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def build(ctx: Context, vm: str, memory_mb: int = 8192) -> str:
        if memory_mb > 4096:
            raise NoCapacity("no host is free", requested={"memory_mb": memory_mb})
        return vm

    return svc


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    tokens = str(write_tokens(tmp_path))
    settings = {"admin_token_file": tokens, "use_pending_state": True}
    async with Site(tmp_path, service(), **settings) as opened:
        yield opened


async def park(site: Site, *task_ids: str) -> None:
    async with RpcClient(site.runtime.ground.transport, "scheduler") as client:
        for task_id in task_ids:
            with pytest.raises(NoCapacity):
                await client.prepare(request_id=task_id).call("build", vm=task_id)


async def shown(site: Site, query: str = "") -> list[tuple[str, str]]:
    answer = await site.ask(f"/api/v1/tasks{query}", **ALICE)
    assert answer.status == 200, answer.body
    return [(task["request_id"], task["state"]) for task in answer.json["tasks"]]


async def test_a_parked_task_is_pending_in_every_listing(site: Site):
    await park(site, "order-1")

    for query in ("", "?state=pending", "?state=all"):
        assert await shown(site, query) == [("order-1", "pending")]
    assert await shown(site, "?state=errored") == []
    one = (await site.ask("/api/v1/tasks/order-1", **ALICE)).json
    assert (one["api_version"], one["task"]["state"]) == ("1.0", "pending")
    assert one["task"]["reason"] == "no_capacity"


async def test_parked_tasks_are_listed_for_who_may_look(site: Site):
    """Without a token they are not."""
    await park(site, "order-1", "order-2")

    listed = (await site.ask("/api/v1/pending", **ALICE)).json
    cut = (await site.ask("/api/v1/pending?limit=1&service=scheduler", **ALICE)).json
    other = (await site.ask("/api/v1/pending?service=other", **ALICE)).json
    nobody = await site.ask("/api/v1/pending")
    status = (await site.ask("/api/v1/status", **ALICE)).json

    assert listed["api_version"] == "1.0"
    assert [task["task_id"] for task in listed["tasks"]] == ["order-1", "order-2"]
    assert listed["tasks"][0]["requested"] == {"memory_mb": 8192}
    assert ([task["task_id"] for task in cut["tasks"]], cut["more"]) == (["order-1"], True)
    assert other["tasks"] == []
    assert nobody.status == 401
    assert [one["parked"] for one in status["pending"]] == [2]
    assert status["ownerless"] == {}
    assert not (await site.ask("/api/v1/status?limit=1", **ALICE)).json["more"]


async def test_any_run_ends_a_parked_task_and_lets_one_run_again(tmp_path: Path):
    """Also one that another run has parked. What has ended is refused with how it ended."""
    tokens = str(write_tokens(tmp_path))
    parker: dict[str, Any] = {"use_pending_state": True, "instance": "a", "admin": "off"}
    async with Site(tmp_path, service(), **parker) as first:
        await park(first, "large", "again", "gone", "wrong")
        second = {"use_pending_state": True, "instance": "b", "admin_token_file": tokens}
        async with Site(tmp_path, service(), **second) as site:
            path = "/api/v1/tasks"
            unexplained = await site.act(f"{path}/large/give_up")
            given_up = await site.act(f"{path}/larg/give_up", reason="too large")
            late = await site.act(f"{path}/large/give_up", reason="twice")
            retried = await site.act(f"{path}/again/retry")
            cancelled = await site.act(f"{path}/gone/cancel", reason="deleted")
            failed = await site.act(f"{path}/wrong/fail", reason="wrong")
            orders = (await site.ask("/api/v1/incidents?what=operator", **ALICE)).json["incidents"]
            state = (await site.ask(f"{path}/large", **ALICE)).json["task"]

    assert (unexplained.status, "needs a reason" in unexplained.why) == (400, True)
    states = [answer.json["state"] for answer in (given_up, retried, cancelled, failed)]
    assert states == ["errored", "accepted", "cancelled", "errored"]
    assert (late.status, "it is errored (gave_up)" in late.why) == (409, True)
    assert (state["state"], state["reason"]) == ("errored", "gave_up")
    assert sorted(one["what"] for one in orders) == [
        *("operator_cancel", "operator_fail", "operator_give_up", "operator_retry")
    ]
    assert all("token alice" in one["detail"] for one in orders)


async def test_a_task_that_is_not_parked_is_not_given_up(site: Site):
    """The answer says what it is, and what ends it."""
    async with RpcClient(site.runtime.ground.transport, "scheduler") as client:
        await client.prepare(request_id="order-1").call("build", vm="v", memory_mb=1)

    answer = await site.act("/api/v1/tasks/order-1/give_up", reason="too large")

    assert (answer.status, "it is succeeded" in answer.why) == (409, True)


async def test_a_task_that_waits_long_for_capacity_worries_neither_probe_nor_gauge(
    site: Site, tmp_path: Path
):
    """It is counted, and has a deadline of its own, so its age is nobody's alarm."""
    await park(site, "order-1")
    connection = apsw.Connection(str(tmp_path / "store.db"))
    connection.set_busy_timeout(int(PATIENCE_S * 1000))
    connection.execute("UPDATE task SET accepted_at = accepted_at - 9e4")
    connection.close()

    ready = (await site.ask("/readyz")).json
    while site.runtime.readings().store == StoreNumbers():
        await asyncio.sleep(0.01)
    store = site.runtime.readings().store

    assert (ready["status"], ready["why"]) == ("pass", [])
    assert store.unfinished == {"pending": 1}
    assert store.oldest_unfinished_s == 0.0
    assert store.notifications_due is not None
