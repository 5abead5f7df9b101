"""Standard output and error that nobody reads: neither the service nor its drain waits for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

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
    """Requests are answered, and SIGTERM ends in a drain with exit code 0, long before the
    alarm.
    """
    service = site.start_unread(cli=cli)
    await serving(site)
    assert await client.prepare(timeout=30).call("slow", key="k", s=0.0) == "k"

    service.terminate()

    assert await service.exit_code(10 + SLACK_S) == 0
    (run,) = site.rows("SELECT exit_code FROM run")
    assert run["exit_code"] == 0


def closed_pipe() -> int:
    """A pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    "output", [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "full"]
)
async def test_what_cannot_be_written_at_the_end_does_not_change_the_exit_code(
    site: Site, client: RpcClient, output: Callable[[], int]
) -> None:
    """A handler has printed, and nobody takes it: the drain's exit code is the process's."""
    out = output()
    try:
        service = site.start_printing_to(out)
    finally:
        os.close(out)
    await serving(site)
    printed = await client.cast(served.prints)
    await site.in_state(printed, "failed")  # each line is written at once, and that fails

    assert await service.stop() == 0
    assert service.run["exit_code"] == 0


async def test_a_full_output_does_not_keep_a_process_that_must_leave(
    site: Site, client: RpcClient
) -> None:
    """A handler that hangs is left by os._exit with the code on record, not by the alarm."""
    service = site.start_unread(drain_timeout="1s", handover_grace="0.5s")
    await serving(site)
    await client.cast(served.never_ends, disk="d1")
    await site.effect("start", "d1")

    service.signal(signal.SIGTERM)

    assert await service.exit_code(10 + SLACK_S) == 75


async def test_a_full_output_does_not_keep_a_start_that_is_refused(site: Site) -> None:
    """What is wrong cannot be said; the exit code says it."""
    service = site.start_unread(cli=False, drain_timeout="nonsense")

    assert await service.exit_code(10 + SLACK_S) == 78
