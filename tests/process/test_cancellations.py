"""Code that ends more than itself: no request in flight is lost or marked as failed by it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator

import pytest

from gracekit import RpcClient
from tests.loops import LOOP_VARIABLE
from tests.process import wild
from tests.process.helpers import SLACK_S, ServiceProcess, Site

LEAVING = {  # with what becomes of the task itself
    wild.exit_in_child: "succeeded",
    wild.exit_in_group: "failed",
    wild.exit_in_gather: "failed",
    wild.exit_in_callback: "succeeded",
    wild.exit_in_job: "succeeded",
    wild.interrupt_in_callback: "succeeded",
    wild.stop_loop: "succeeded",
}


def start(site: Site, way: str | None = None, **settings: object) -> ServiceProcess:
    """The wild service, alone or in a program that ends around it in that *way*."""
    return site.start_program("wild", *([way] if way else []), **settings)


@pytest.fixture
async def client(site: Site) -> AsyncIterator[RpcClient]:
    """A caller in this process."""
    async with wild.svc.client(site.url) as made:
        yield made


async def in_flight(site: Site, client: RpcClient) -> tuple[str, str, str]:
    """A retried task, one in a thread, and one without a row, all at work."""
    retried = await client.cast(wild.retried, key="a", vm="v")
    fetched = await client.cast(wild.fetched, key="b")
    threaded = await client.cast(wild.in_thread, key="c", disk="d")
    for key in "abc":
        await site.effect("start", key)
    return retried, fetched, threaded


@pytest.mark.parametrize(
    ("method", "loop"),
    [*((method, "asyncio") for method in LEAVING), (wild.exit_in_callback, "uvloop")],
    ids=lambda value: getattr(value, "name", value),
)
async def test_what_leaves_the_loop_asks_for_a_drain(
    site: Site, client: RpcClient, method, loop: str
) -> None:
    """SystemExit or KeyboardInterrupt beside the handlers, or a stopped loop: all in flight ends by
    itself, 70 is on record, and a handler to which its child's SystemExit comes back is FAILED.
    """
    end = LEAVING[method]
    process = await start(site, loop=loop).serving()
    retried, _, threaded = await in_flight(site, client)

    culprit = await client.cast(method)
    await process.wait_log("drain.started")
    site.go()

    assert await process.exit_code() == 70
    row = site.task(culprit)
    assert (row["state"], row["attempts"], row["cut"]) == (end, 1, None)
    assert ("SystemExit" in str(row["failure"])) == (end == "failed")
    assert (site.state(retried), site.state(threaded)) == ("succeeded", "succeeded")
    assert [len(site.seen("done", key)) for key in "abc"] == [1, 1, 1]
    assert site.queued() == 0
    assert (process.run["stop_source"], process.run["exit_code"]) == ("error", 70)
    assert "loop.left" in process.log
    assert "Traceback" in process.log


async def test_a_handler_that_cancels_every_task_ends_the_service_in_order(
    site: Site, client: RpcClient
) -> None:
    """Exit 70 and a stop record; what it interrupted is run again by the next start, what was in a
    thread stays with the process until that is dead, and what has no row is back in the queue.
    """
    process = await start(site, drain_timeout="2s").serving()
    retried, fetched, threaded = await in_flight(site, client)

    await client.cast(wild.cancel_everything)

    assert await process.exit_code() == 70
    assert process.run["exit_code"] == 70
    assert process.run["ended_at"] is not None
    assert site.task(retried)["state"] == "handed_over"
    assert (site.task(threaded)["state"], site.task(threaded)["cut"]) == ("handed_over", "unclean")
    assert site.state(fetched) in {None, "accepted", "handed_over", "running"}
    site.go()
    again = await start(site).serving()
    for request_id in (retried, threaded, fetched):
        await site.in_state(request_id, "succeeded")
    assert await again.stop() == 0


@pytest.mark.parametrize(
    "method",
    [wild.leave_a_task_that_stays, wild.leave_a_task_that_blocks, wild.leave_a_hook_that_blocks],
    ids=lambda method: method.name,
)
async def test_the_exit_code_is_the_one_on_record_whatever_stays_behind(
    site: Site, client: RpcClient, method
) -> None:
    """A task of the application that swallows its cancellation, or blocks the loop or the end of
    the interpreter, does not keep the process.
    """
    process = await start(site).serving()
    await client.call(method)

    assert await process.stop() == 0
    assert process.run["exit_code"] == 0
    assert site.seen("swallowed")


@pytest.mark.parametrize(
    "method",
    [wild.leave_a_hook_that_keeps_the_interpreter, wild.leave_a_hook_in_c_that_hangs],
    ids=lambda method: method.name,
)
async def test_code_in_c_that_hangs_at_the_end_has_the_last_steps_only(
    site: Site, client: RpcClient, method
) -> None:
    """No thread of Python's can end the process then; the kernel does, soon after the stop
    record.
    """
    process = await start(site).serving()  # its alarm would be due after half a minute
    await client.call(method)

    process.terminate()

    assert await process.exit_code(4 + SLACK_S) == -signal.SIGALRM
    assert site.seen("kept")
    assert process.run["exit_code"] == 0


@pytest.mark.parametrize(
    "method", [wild.close_every_file, wild.close_every_file_in_thread], ids=lambda m: m.name
)
async def test_a_service_whose_files_were_closed_leaves_at_once(
    site: Site, client: RpcClient, method
) -> None:
    """Its loop can run nothing and no signal reaches it: it says so and exits, or libuv aborts it,
    and the next start settles what was in flight.
    """
    code, words = 70, "the event loop cannot run"
    if os.environ.get(LOOP_VARIABLE) == "uvloop":
        code, words = -signal.SIGABRT, ""
    process = await start(site).serving()
    retried, _, _ = await in_flight(site, client)

    closer = await client.cast(method)

    assert await process.exit_code(10 + SLACK_S) == code
    assert words in process.log
    site.go()
    again = await start(site).serving()
    await site.in_state(retried, "succeeded")
    await site.in_state(closer, "errored")
    assert await again.stop() == 0


# -- programs that end around it ------------------------------------------------------------------


@pytest.mark.parametrize("way", ["main_returns", "scope_is_cancelled", "sibling_fails"])
async def test_a_program_that_ends_around_its_service_lets_it_drain(
    site: Site, client: RpcClient, way: str
) -> None:
    """What is in flight ends by itself, or is handed over: nothing has failed, nothing is lost, and
    the run has a stop record.
    """
    program = await start(site, way).serving()
    retried, _, threaded = await in_flight(site, client)

    (site.root / "end").touch()
    await program.wait_log("drain.started")
    site.go()
    await program.exit_code()

    assert program.run["ended_at"] is not None
    assert site.state(threaded) == "succeeded"
    assert site.state(retried) in {"succeeded", "handed_over"}
    if way != "main_returns":  # there the loop itself was torn down, and every handler cancelled
        assert site.state(retried) == "succeeded"
        assert program.run["exit_code"] == 0
    await start(site).serving()
    await site.in_state(retried, "succeeded")
    await site.effect("done", "b")
    assert all(row["state"] != "failed" for row in site.rows("SELECT state FROM task"))


async def test_a_thread_keeps_its_resource_when_the_program_ends_around_it(
    site: Site, client: RpcClient
) -> None:
    """Nobody else gets the resource while the thread may act, and its row is neither FAILED nor
    free.
    """
    program = await start(site, "main_returns", drain_timeout="1s").serving()
    threaded = await client.cast(wild.in_thread, key="c", disk="d")
    await site.effect("start", "c")
    sibling = await start(site).serving()

    (site.root / "end").touch()
    await program.exit_code()
    await site.effect("start", "c", times=2)
    site.go()
    await site.in_state(threaded, "succeeded")

    first, second = site.seen("start", "c")
    beats = [beat.at for beat in site.seen("beat", "c") if beat.pid == first.pid]
    assert max(beats) < second.at
    assert await sibling.stop() == 0


async def test_a_second_ctrl_c_hands_over_at_once(site: Site, client: RpcClient) -> None:
    """The first one that the program gets drains, the second hands over; nothing has failed.

    asyncio raises the second wherever the main thread is, in the handler too: so it comes while the
    loop waits.
    """
    program = await start(site, "interrupted", drain_timeout="60s").serving()
    retried = await client.cast(wild.retried, key="a", vm="v")
    await site.effect("start", "a")

    program.signal(signal.SIGINT)
    await program.wait_log("intake.closed")
    await program.wait_asleep()
    program.signal(signal.SIGINT)
    await program.exit_code()

    row = site.task(retried)
    assert (row["state"], program.run["ended_at"] is not None) == ("handed_over", True)
    assert json.loads(program.run["report"])["forced"]


async def test_a_service_that_nobody_awaits_drains_on_a_signal(
    site: Site, client: RpcClient
) -> None:
    """SIGTERM drains it, whoever awaits `serve()` or not; its block can be left at any time."""
    program = await start(site, "nobody_serves").serving()
    retried = await client.cast(wild.retried, key="a", vm="v")
    await site.effect("start", "a")

    program.terminate()
    await program.wait_log("drain.started")
    site.go()
    (report,) = await site.effect("report")

    assert await program.exit_code() == 0
    assert (report.more, site.state(retried)) == (("0", "1"), "succeeded")
    assert program.run["exit_code"] == 0
