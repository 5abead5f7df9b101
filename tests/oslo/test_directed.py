"""The layout of Nova's hosts: a store each, one topic, and oslo clients that name the host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gracekit import Context, Runtime, Service, Settings
from tests.oslo.kit import oslo_client

pytestmark = pytest.mark.process


async def test_hosts_of_one_topic_with_a_store_each_serve_oslo_clients(
    rabbit_url: str, tmp_path: Path
) -> None:
    """Methods that must not run twice or name a resource need no setting for that: calls and casts
    to `server=host` run on that host, and both starts find no foreign reader.
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


async def test_a_resize_on_the_ops_topic_ends_in_a_drain_and_answers_its_oslo_client(
    rabbit_url: str, tmp_path: Path
) -> None:
    """The client calls the second topic, as Nova's does, and gets its answer from a host that
    leaves.
    """
    tmp_path.chmod(0o700)
    begun, go_on = asyncio.Event(), asyncio.Event()
    svc = Service("compute", queues="directed")

    @svc.ops(resource="vm")
    async def resize(ctx: Context, vm: str) -> str:
        begun.set()
        await go_on.wait()
        return vm

    runtime = Runtime(
        svc,
        Settings(
            transport_url=rabbit_url,
            store_url=f"sqlite:///{tmp_path}/one.db",
            host="one",
            exchange="nova",
            declare_profile="oslo-durable",
            ops_topic="compute-alt",
            ops_quiet_timeout_s=0.1,
        ),
    )
    closed = asyncio.Event()
    runtime.ground.telemetry.subscribe(lambda event, _: event == "intake.closed" and closed.set())
    async with (
        oslo_client(rabbit_url, "compute-alt", exchange="nova", profile="durable") as client,
        runtime,
    ):
        view = client.prepare(server="one", timeout=30)
        call = asyncio.create_task(view.call({}, "resize", vm="vm-1"))
        await begun.wait()
        runtime.request_stop()
        leaving = asyncio.create_task(runtime.serve())
        await closed.wait()
        go_on.set()
        assert await call == "vm-1"
        assert (await leaving).exit_code == 0
