"""Standard output and error that nobody reads: neither the service nor its drain waits for them."""

from __future__ import annotations

import signal

import pytest

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import SLACK_S, Site


async def serving(site: Site) -> None:
    """A run is on record that takes requests; its log cannot be read."""
    await site.found("SELECT 1 FROM run WHERE phase = 'serving'")


@pytest.mark.parametrize("cli", [True, False])
async def test_a_full_output_that_nobody_reads_stops_neither_service_nor_drain(
    site: Site, client: RpcClient, cli: bool
) -> None:
    """
    Requests are answered, and SIGTERM ends in a drain with exit code 0, long before the alarm.
    """
    service = site.start_unread(cli=cli)
    await serving(site)
    assert await client.prepare(timeout=30).call("slow", key="k", s=0.0) == "k"

    service.terminate()

    assert await service.exit_code(10 + SLACK_S) == 0
    (run,) = site.rows("SELECT exit_code FROM run")
    assert run["exit_code"] == 0


async def test_a_full_output_does_not_keep_a_process_that_must_leave(
    site: Site, client: RpcClient
) -> None:
    """
    A handler that hangs is left by os._exit with the code on record, not by the alarm.
    """
    service = site.start_unread(drain_timeout="1s", handover_grace="0.5s")
    await serving(site)
    await client.cast(served.never_ends, disk="d1")
    await site.effect("start", "d1")

    service.signal(signal.SIGTERM)

    assert await service.exit_code(10 + SLACK_S) == 75


async def test_a_full_output_does_not_keep_a_start_that_is_refused(site: Site) -> None:
    """
    What is wrong cannot be said; the exit code says it.
    """
    service = site.start_unread(cli=False, drain_timeout="nonsense")

    assert await service.exit_code(10 + SLACK_S) == 78
