"""`/metrics` over HTTP: what Prometheus gets, with its package and without."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gracekit import Context, RpcClient, Service
from gracekit.control import accounts
from gracekit.listings import listings_sql
from tests.admin.kit import PATIENCE_S, Site


async def scraped(site: Site) -> dict[tuple[str, tuple[str, ...]], float]:
    answer = await site.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


async def test_a_drain_is_told_by_what_prometheus_scrapes(tmp_path: Path):
    """It shows the phase, tasks in flight, the time left, and unfinished tasks on record."""
    svc, done = Service("s"), asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await done.wait()

    async with Site(tmp_path, svc) as site:
        async with RpcClient(site.runtime.ground.transport, "s") as client:
            await client.cast("work")
        while (serving := await scraped(site)).get(("gracekit_unfinished", ("running",))) != 1:
            await asyncio.sleep(0.01)
        site.runtime.request_stop(source="signal", by="SIGTERM")
        while site.runtime.readings().drain_left_s is None:
            await asyncio.sleep(0.01)
        draining = await scraped(site)
        done.set()

    assert serving["gracekit_phase", ("serving",)] == 1
    assert draining["gracekit_phase", ("draining",)] == 1
    assert draining["gracekit_tasks_in_flight", ("requests", "work")] == 1
    assert serving["gracekit_accounts_off_by", ()] == 0
    assert 0 < draining["gracekit_drain_left_seconds", ()] <= 25
    assert (serving["gracekit_ready", ()], draining["gracekit_ready", ()]) == (1, 0)


async def test_requests_that_nobody_has_accepted_are_seen_by_http(tmp_path: Path):
    """A service that is full leaves them in its queue. Metrics and status show how many there are
    in each topic, and for how long the oldest one waits.
    """
    svc, done = Service("s"), asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await done.wait()

    queue = f"sqlite:///{tmp_path}/queue.db"
    async with Site(tmp_path, svc, transport_url=queue, max_accepted=1, max_running=1) as site:
        idle = await scraped(site)
        async with RpcClient(site.runtime.ground.transport, "s") as client:
            for _ in range(6):
                await client.cast("work")
        async with asyncio.timeout(PATIENCE_S):
            while (full := await scraped(site))["gracekit_requests_waiting", ("requests",)] != 5:
                await asyncio.sleep(0.01)
        (run,) = (await site.ask("/api/v1/status")).json["runs"]
        done.set()

    names = ("gracekit_requests_waiting", "gracekit_oldest_waiting_seconds")
    assert [idle[name, ("requests",)] for name in names] == [0, 0]
    assert full["gracekit_oldest_waiting_seconds", ("requests",)] > 0
    assert full["gracekit_requests_waiting", ("ops",)] == 0
    shown = run["status"]["queues"]["requests"]
    assert (shown["topic"], shown["waiting"], shown["oldest_s"] > 0) == ("s", 5, True)


@pytest.mark.parametrize(
    "accept", ["text/plain; version=1.x", "application/openmetrics-text; version=foo"]
)
async def test_an_accept_header_that_cannot_be_read_gets_the_plain_text(
    tmp_path: Path, accept: str
):
    """No stranger causes a fault, and a line in the log, with a header."""
    async with Site(tmp_path, Service("s")) as site:
        answer = await site.ask("/metrics", Accept=accept)

    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert site.told("admin.failed") == []


LONG: Final = """
WITH RECURSIVE counter(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counter WHERE n < 300000)
SELECT 'tally', 'accepted', max(n) FROM counter"""


async def test_a_count_that_outlasts_its_scrape_is_in_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The accounts of a large store take longer than a scrape waits, and yet become a sample."""
    monkeypatch.setattr(listings_sql, "ACCOUNTS", LONG)
    monkeypatch.setattr(accounts, "COUNT_WAIT_S", 0.0)
    name = ("gracekit_accounts_off_by", ())
    async with Site(tmp_path, Service("s")) as site, asyncio.timeout(20):
        first = await scraped(site)
        while name not in (later := await scraped(site)):
            await asyncio.sleep(0.01)

    assert name not in first
    assert later[name] == 300_000


async def test_without_its_package_metrics_say_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Probes and listings do not need the package, so the endpoint starts without it."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "prometheus_client" else real(name, *more),
    )
    async with Site(tmp_path, Service("s")) as site:
        answer = await site.ask("/metrics")

    assert answer.status == 501
    assert "pip install 'gracekit[prometheus]'" in answer.why
