"""A `write` of a kind that returns after its time: what it says still counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import pytest

from gracekit import Context, Found, Service
from gracekit.testing import InMemoryService, run


@pytest.mark.parametrize("answer", [True, False])
def test_a_write_that_returns_too_late_has_written(answer: bool) -> None:
    """The record has the new status, so the end is reported and on record, and nothing is done
    twice.
    """
    svc = Service("things")
    kind = svc.kind("thing", stuck_after="1m")
    statuses = {"t-1": "creating"}
    written: list[str] = []

    @kind.find
    async def find(_ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        found = [Found(id_, status) for id_, status in statuses.items() if status == "creating"]
        return [] if after else found

    @kind.write
    async def write(
        _ctx: Context,
        found: Found,
        status: str,
        facts: Mapping[str, object],
    ) -> bool:
        written.append(status)
        statuses[found.id] = status
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return answer

    kind.mark(creating="error")

    async def main() -> None:
        async with InMemoryService(svc) as one:
            one.expect("hook.failed")
            await one.pass_time(3600)
            if answer:
                (settled,) = one.told("resource.settled")
                assert settled["written"] == "error"
                assert one.told("resource.left") == []
            else:
                (left,) = one.told("resource.left")
                assert left["outcome"] == "moved_on"

    run(main())

    assert written == ["error"]
