"""The layout of Nova's hosts: a store each, one topic, and oslo clients that name the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit import Context, Runtime, Service, Settings
from tests.oslo.kit import oslo_client

pytestmark = pytest.mark.process


async def test_hosts_of_one_topic_with_a_store_each_serve_oslo_clients(
    rabbit_url: str, tmp_path: Path
) -> None:
    """
    Methods that must not run twice or name a resource need no setting for that: calls and casts to
    `server=host` run on that host, and both starts find no foreign reader.
    """
    tmp_path.chmod(0o700)
    ran: list[tuple[str, str]] = []
    seen: list[str] = []

    def host(name: str) -> Runtime:
        svc = Service("compute", queues="directed")

        @svc.rpc(on_interrupt="error")
        def reserve(ctx: Context, vm: str) -> str:
            ran.append((name, vm))
            return name

        @svc.rpc(resource="vm", on_interrupt="retry")
        async def boot(ctx: Context, vm: str) -> str:
            ran.append((name, vm))
            return name

        made = Runtime(
            svc,
            Settings(
                transport_url=rabbit_url,
                store_url=f"sqlite:///{tmp_path}/{name}.db",
                host=name,
                exchange="nova",
                declare_profile="oslo-durable",
            ),
        )
        made.ground.telemetry.subscribe(lambda event, _: seen.append(event))
        return made

    async with (
        host("one"),
        host("two"),
        oslo_client(rabbit_url, "compute", exchange="nova", profile="durable") as client,
    ):
        for name in ("one", "two"):
            view = client.prepare(server=name, timeout=20)
            await view.cast({}, "reserve", vm=f"cast-{name}")
            assert await view.call({}, "reserve", vm="vm") == name
            assert await view.call({}, "boot", vm="vm") == name

    assert "reader.foreign" not in seen
    assert sorted(ran) == sorted(
        (name, vm) for name in ("one", "two") for vm in (f"cast-{name}", "vm", "vm")
    )
