"""What HTTP shows of a caller's context, and of a resource that an ops method names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit import Context, RpcClient, Service
from tests.admin.kit import ALICE, Site, write_tokens

pytestmark = pytest.mark.process


async def test_http_shows_the_callers_ids_and_what_an_ops_method_is_about(tmp_path: Path):
    """In the list, by its resource, and for one task."""
    svc = Service("compute", context_keys=("request_id",))

    @svc.ops(resource="vm")
    async def look(ctx: Context, vm: str) -> None: ...

    async with Site(tmp_path, svc, admin_token_file=str(write_tokens(tmp_path))) as site:
        async with RpcClient(site.runtime.ground.transport, "compute") as client:
            view = client.prepare(ops=True, request_id="look-1", context={"request_id": "req-1"})
            await view.call("look", vm="1")
        listed = await site.ask("/api/v1/tasks?state=all&resource=vm:1", **ALICE)
        one = await site.ask("/api/v1/tasks/look-1", **ALICE)

    (task,) = listed.json["tasks"]
    assert (task["resource"], task["shown_context"]) == ("vm:1", {"request_id": "req-1"})
    assert one.json["task"]["shown_context"] == {"request_id": "req-1"}
