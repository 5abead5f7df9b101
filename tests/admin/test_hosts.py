"""The hosts of a store, by HTTP and for the program itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gracekit import Context, HostState, RpcClient, Service
from gracekit.version import VERSION
from tests.admin.kit import ALICE, Site, write_tokens

pytestmark = pytest.mark.process


def service(name: str = "api") -> Service:
    svc = Service(name)
    svc.has_begun = asyncio.Event()  # type: ignore[attr-defined]

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        svc.has_begun.set()  # type: ignore[attr-defined]
        await asyncio.sleep(3600)

    return svc


async def test_hosts_are_the_same_by_http_and_in_the_program(tmp_path: Path) -> None:
    """With what each owns; without a token nobody may look."""
    settings: dict[str, Any] = {"admin_token_file": str(write_tokens(tmp_path))}
    settings |= {"drain_timeout_s": 0.1, "instance": "first"}
    svc = service()
    async with (
        Site(tmp_path, svc, **settings) as site,
        RpcClient(site.runtime.ground.transport, "api") as client,
    ):
        await client.cast("work", vm="v")
        await svc.has_begun.wait()  # type: ignore[attr-defined]
        nobody = await site.ask("/api/v1/hosts")
        answer = (await site.ask("/api/v1/hosts", **ALICE)).json
        (told,) = await site.runtime.leases.hosts()

    assert nobody.status == 401
    assert answer == {"hosts": [told.as_json()]}
    assert told == HostState(
        host="h",
        instance="first",
        service="api",
        run_id=site.runtime.run_id,
        generation=1,
        state="LIVE",
        why="its lock is held",
        trust_left_s=None,
        tasks=1,
        leases=1,
        draining=False,
        version=VERSION,
        since=told.since,
    )


async def test_leases_are_declared_shown_and_removed_by_http(tmp_path: Path) -> None:
    """As by a command; a second time the answer says what is there."""
    settings: dict[str, Any] = {"admin_token_file": str(write_tokens(tmp_path))}
    async with Site(tmp_path, service(), **settings) as site:
        lease = {"kind": "vm", "id": "vm-1"}
        made = await site.act("/api/v1/leases/create", **lease, payload="on node 7")
        again = await site.act("/api/v1/leases/create", **lease)
        (listed,) = (await site.ask("/api/v1/leases", **ALICE)).json["leases"]
        (one,) = (await site.ask("/api/v1/leases?kind=vm&id=vm-2", **ALICE)).json["leases"]
        gone = await site.act("/api/v1/leases/delete", **lease)
        missing = await site.act("/api/v1/leases/delete", **lease)

    assert (made.status, made.json["payload"], listed) == (200, "on node 7", made.json)
    assert (again.status, again.json["error"]["class"]) == (409, "LeaseExists")
    assert (one["state"], one["declared"], one["token"]) == ("FREE", False, 0)
    assert (gone.status, gone.json["declared"]) == (200, False)
    assert (missing.status, missing.json["error"]["class"]) == (404, "NoSuchLease")
