"""Ids of OpenStack: what oslo.messaging's own client sends in the context is on every line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from gracekit import Context, Service
from gracekit.listings.store_view import StoreView
from gracekit.listings.task_list import TaskQuery, list_tasks
from gracekit.telemetry import RequestFilter
from tests.oslo.kit import PATIENCE_S, oslo_client
from tests.oslo.meeting import serving
from tests.rabbit.broker import Broker

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# As oslo.context writes it, in part.
CALLER: Final[Mapping[str, Any]] = {
    "request_id": "req-5f3d1c8e-2b64-4f0b-9d6a-0c4b8f1e7a25",
    "global_request_id": None,
    "user_id": "c0ffee",
    "project_id": "decade",
    "user_identity": "c0ffee decade - - -",
    "auth_token": "canary",
    "is_admin": False,
    "roles": ["member"],
}
KEYS: Final = ("request_id", "global_request_id", "user_id", "project_id")
IDS: Final = {key: CALLER[key] for key in KEYS if CALLER[key] is not None}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, with the request on the lines of the application."""
    caplog.set_level(logging.DEBUG, "gracekit")
    with caplog.filtering(RequestFilter()):
        yield caplog


async def test_the_ids_of_an_oslo_client_are_on_row_events_and_lines(
    shared_broker: Broker, rabbit_vhost: str, tmp_path: Path, lines: pytest.LogCaptureFixture
):
    """Over RabbitMQ, of a call to an ops method and of a cast; nothing else of the context is
    shown.
    """
    svc, ended = Service("shop", context_keys=KEYS), asyncio.Event()

    @svc.ops(resource="vm")
    async def look(ctx: Context, vm: str) -> dict[str, str]:
        logging.getLogger("app").warning("inside")
        return dict(ctx.shown_context or {})

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        ended.set()

    url = shared_broker.url_of(rabbit_vhost)
    ours = f"{url}?profile=oslo-durable&exchange=openstack"
    async with (
        serving(svc, ours, tmp_path) as runtime,
        oslo_client(url, "shop-ops", profile="durable") as ops,
        oslo_client(url, "shop", profile="durable") as client,
    ):
        assert await ops.call(CALLER, "look", vm="1") == IDS
        await client.cast(CALLER, "work", vm="1")
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        ground = runtime.ground
        view = StoreView(ground.engine, ground.process, None, ground.clock)
        found = await list_tasks(view, {}, TaskQuery(resource="vm:1", states=("all",)))

    listed = {task.columns["method"]: task.columns["shown_context"] for task in found.tasks}
    assert listed == {"look": IDS, "work": IDS}
    events = [vars(record) for record in lines.records if hasattr(record, "task_id")]
    assert len(events) >= 4
    assert all(IDS.items() <= fields.items() for fields in events)
    (line,) = (vars(record) for record in lines.records if record.name == "app")
    assert IDS.items() <= line.items()
    assert "canary" not in lines.text
