"""Probes by HTTP, from the start of a service to the end of its drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from gracekit import Context, Runtime, Service, Settings
from gracekit.control import facts
from gracekit.listings import listings_sql
from gracekit.rpc.memory import MemoryBroker
from gracekit.web import application
from tests.admin.kit import TOKEN, Site, write_tokens

PROBES = ("/livez", "/readyz", "/startupz")


async def statuses(site: Site) -> list[int]:
    return [(await site.ask(path)).status for path in PROBES]


async def test_probes_follow_a_service_through_its_life(tmp_path: Path):
    """It is always alive, has started when its hooks are done, and is ready while it serves."""
    svc, warm, done = Service("s"), asyncio.Event(), asyncio.Event()

    @svc.on_start
    async def warm_up() -> None:
        await warm.wait()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await done.wait()

    site = Site(tmp_path, svc)
    opening = asyncio.create_task(site.runtime.__aenter__())
    while not site.told("service.starting"):
        await asyncio.sleep(0.01)
    starting = await statuses(site)
    warm.set()
    await opening
    serving = await statuses(site)

    client_of = site.runtime
    async with asyncio.timeout(20):
        from gracekit import RpcClient

        async with RpcClient(client_of.ground.transport, "s") as client:
            await client.cast("work")
            while not client_of.readings().in_flight:
                await asyncio.sleep(0.01)
            site.runtime.request_stop(source="signal", by="SIGTERM")
            draining = await statuses(site)
            ready = await site.ask("/readyz")
            done.set()
        await site.runtime.serve()

    assert starting == [200, 503, 503]
    assert serving == [200, 200, 200]
    assert draining == [200, 503, 200]
    assert ready.json["status"] == "fail"
    assert ready.json["why"][0].startswith("drain by SIGTERM")


async def test_a_probe_answers_numbers_and_phases_alone(tmp_path: Path):
    """It needs no token, so it shows nothing that a stranger must not know, and is not cached."""
    async with Site(tmp_path, Service("s")) as site:
        answer = await site.ask("/readyz")

    assert answer.json == {"status": "pass", "phase": "serving", "why": []}
    assert answer.headers["cache-control"] == "no-store"


async def test_without_the_setting_nothing_listens(tmp_path: Path):
    """The endpoint is off by default."""
    async with Site(tmp_path, Service("s"), admin="off") as site:
        assert site.told("admin.opened") == []


async def test_an_embedded_application_answers_before_its_runtime_is_open(tmp_path: Path):
    """The application is made before the run is open, and answers while it is and when it is
    over.
    """
    from starlette.applications import Starlette
    from starlette.routing import Mount

    runtime = embedded(tmp_path, admin_token_file=str(write_tokens(tmp_path)))
    app = Starlette(routes=[Mount("/ops", application(runtime))])

    assert [await asgi(app, f"/ops{path}") for path in PROBES] == [200, 503, 503]
    assert await asgi(app, "/ops/api/v1/status", token=TOKEN) == 503
    async with runtime:
        assert [await asgi(app, f"/ops{path}") for path in PROBES] == [200, 200, 200]
        assert await asgi(app, "/ops/api/v1/accounts", token=TOKEN) == 200
        assert await asgi(app, "/ops/api/v1/accounts") == 401
    assert [await asgi(app, f"/ops{path}") for path in PROBES] == [200, 503, 200]


async def test_without_tokens_an_embedded_application_answers_probes_alone(tmp_path: Path):
    """Each client of the program reaches what is mounted, and stacks are not for strangers."""
    runtime = embedded(tmp_path)
    app = application(runtime)

    async with runtime:
        for path in (*PROBES, "/metrics"):
            assert await asgi(app, path) == 200
        for path in ("status", "tasks", "dump", "config", "events", "openapi.json", "action-key"):
            assert await asgi(app, f"/api/v1/{path}") == 403


def embedded(place: Path, **settings: Any) -> Runtime:
    """A Runtime without an endpoint of its own."""
    place.chmod(0o700)
    given = Settings(transport_url="memory://", store_url=f"sqlite:///{place}/s.db", **settings)
    return Runtime(Service("s"), given, broker=MemoryBroker())


async def asgi(app, path: str, *, token: str = "none") -> int:
    """The status of one GET, without a server."""
    sent = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {token}".encode())],
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize("what", ["raise", "hang"])
async def test_a_server_that_fails_keeps_neither_the_service_nor_its_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """One line is logged; the service goes on without an endpoint."""
    from gracekit.admin import endpoint

    async def fail(_: object, **__: object) -> None:
        if what == "hang":
            await asyncio.Event().wait()
        raise RuntimeError("no more")

    monkeypatch.setattr(endpoint._Server, "shutdown" if what == "hang" else "main_loop", fail)
    site = Site(tmp_path, Service("s"))
    async with asyncio.timeout(10), site:
        await asyncio.sleep(0)
        assert site.runtime.not_ready is None

    assert site.runtime.report is not None
    assert site.runtime.report.exit_code == 0
    assert len(site.told("admin.failed")) == (1 if what == "raise" else 0)


ENDLESS: Final = """
WITH RECURSIVE counter(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counter)
SELECT 'tally', 'accepted', max(n) FROM counter"""


async def test_a_count_of_the_accounts_that_takes_long_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The accounts of a large store are counted for minutes: probes, metrics and status answer
    meanwhile, and the service stops at once.
    """
    monkeypatch.setattr(listings_sql, "ACCOUNTS", ENDLESS)
    monkeypatch.setattr(facts, "FRESH_S", 0.0)  # each probe reads the store
    async with Site(tmp_path, Service("s")) as site:
        first = await site.ask("/metrics")
        ready = await site.ask("/readyz")
        status = await site.ask("/api/v1/status")
        ending_at = asyncio.get_running_loop().time()
    took_s = asyncio.get_running_loop().time() - ending_at

    assert (first.status, ready.json) == (200, {"status": "pass", "phase": "serving", "why": []})
    assert (status.status, status.json["accounts"]) == (200, None)
    assert took_s < 5
