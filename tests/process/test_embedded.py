"""A program that lends its signals to an embedded service, and has them back at the end."""

from __future__ import annotations

import signal

import pytest

from gracekit import RpcClient
from tests.loops import LOOPS
from tests.process import served
from tests.process.helpers import Site


@pytest.mark.parametrize("loop", LOOPS)
async def test_term_drains_an_embedded_service_and_the_old_handler_is_back(
    site: Site, client: RpcClient, loop: str
) -> None:
    """The first SIGTERM is the Runtime's: what runs ends, the report says 0, and the kernel's alarm
    is withdrawn; the next one calls the program's own handler. The program chooses the loop.
    """
    program = await site.start_program("embedded", test_loop=loop).serving()
    assert f" loop={loop} " in program.log
    request_id = await client.cast(served.through_drain, key="a", s=0.1)
    await site.effect("start", "a")

    program.terminate()
    await site.effect("after")

    assert site.seen("report")[0].more == ("0", "1")
    assert site.seen("after")[0].more == ("restored", "0.0")
    assert site.seen("mine") == []
    assert site.state(request_id) == "succeeded"
    assert (program.run["stop_source"], program.run["stop_by"]) == ("signal", "SIGTERM")
    program.terminate()
    await site.effect("mine")
    assert await program.exit_code() == 3


async def test_quit_hands_over_at_once_in_an_embedded_service(
    site: Site, client: RpcClient
) -> None:
    """All stop signals are the Runtime's, as in a process of its own."""
    program = await site.start_program("embedded", drain_timeout="60s").serving()
    await client.cast(served.retried, key="a", vm="v", s=60)
    await site.effect("start", "a")

    program.signal(signal.SIGQUIT)
    await site.effect("after")

    assert site.seen("report")[0].more == ("75", "0")
    program.terminate()
    assert await program.exit_code() == 3


async def test_term_during_the_start_of_an_embedded_service_ends_the_start(site: Site) -> None:
    """`on_start` is cancelled, nothing was served, and the end is in order."""
    program = site.start_program("embedded", test_start="slow")
    await site.effect("on_start")

    program.terminate()
    await site.effect("after")

    assert "service.serving" not in program.log
    assert site.seen("report")[0].more == ("0", "0")
    assert site.seen("after")[0].more == ("restored", "0.0")
    program.terminate()
    assert await program.exit_code() == 3


async def test_the_old_handler_is_back_after_a_failed_start(site: Site) -> None:
    """The error comes out of the block, and the program's handlers are its own again."""
    program = site.start_program("embedded", test_start="fail")
    await site.effect("after")

    assert site.seen("failed")[0].more[-1] == "there"
    assert site.seen("after")[0].more == ("restored", "0.0")
    program.terminate()
    await site.effect("mine")
    assert await program.exit_code() == 3


async def test_an_embedded_service_takes_no_signals_unless_it_is_given_them(site: Site) -> None:
    """By default SIGTERM is the program's, and the service goes on."""
    program = await site.start_program("embedded", test_lend="no").serving()

    program.terminate()
    await site.effect("mine")

    assert "signal.received" not in program.log
    assert "drain.started" not in program.log
    program.kill()
