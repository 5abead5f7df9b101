"""Must-hold 5, and what a drain waits for: holds, threads, safe points, but no turns."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

from gracekit import Method, RpcClient
from tests.loops import LOOPS
from tests.process import served
from tests.process.helpers import Site, until


async def test_open_hold_keeps_the_drain_until_a_later_request_ends_it(
    site: Site, client: RpcClient
) -> None:
    """With nothing running, an open hold keeps the host in its drain and its ops server answering;
    the request that ends the hold lets it go.
    """
    service = await site.start(progress_every="0.1s").serving()
    await client.call(served.receive, key="t1", at_most=300)
    service.terminate()
    await service.wait_log("drain.progress in_flight=0 running=0 open_holds=1", times=2)
    for _ in range(3):
        assert await client.call(served.ping) == service.pid
    assert not service.ended

    assert await client.call(served.received, key="t1") is True

    assert await service.exit_code() == 0
    (hold,) = site.rows("SELECT * FROM hold")
    assert hold["end_reason"] == "ended"


async def test_lapsed_hold_lets_the_host_go(site: Site, client: RpcClient) -> None:
    """A hold whose end never comes is over when it lapses, long before the drain's deadline."""
    service = await site.start(drain_timeout="60s").serving()
    await client.call(served.receive, key="t1", at_most=2)

    assert await service.stop() == 0

    (hold,) = site.rows("SELECT * FROM hold")
    run = service.run
    assert hold["lapses_at"] < run["ended_at"] < run["stop_at"] + 30


async def test_hold_left_over_by_a_crash_is_ended_by_the_next_start(
    site: Site, client: RpcClient
) -> None:
    """A hold of a killed run does not keep the next one: recovery ends it."""
    first = await site.start().serving()
    await client.call(served.receive, key="t1", at_most=300)
    first.kill()

    again = await site.start().serving()
    ended = "SELECT 1 FROM hold WHERE ended_at NOT NULL AND NOT errored_due"  # else it ends with 75
    await until(lambda: site.rows(ended), "its end")

    assert await again.stop() == 0
    (hold,) = site.rows("SELECT * FROM hold")
    assert hold["end_reason"] == "no_probe"


@pytest.mark.parametrize("max_running", [1, 100], ids=["for a slot", "for its resource"])
async def test_task_that_waits_for_its_turn_does_not_keep_the_drain(
    site: Site, client: RpcClient, max_running: int
) -> None:
    """A task that waits behind another is not waited for: it is listed as not started, and the next
    start runs it.
    """
    service = await site.start(drain_timeout="60s", max_running=max_running).serving()
    running = await client.cast(served.held, key="a", vm="v")
    await site.effect("start", "a")
    waiting = await client.cast(served.held, key="b", vm="v")
    await site.in_state(waiting, "accepted")

    service.terminate()
    await service.wait_log("intake.closed")
    site.go()
    code = await service.exit_code()

    report = json.loads(service.run["report"])
    assert code == 75
    assert report["not_started"] == [waiting]
    assert report["waited_s"] < 30
    assert site.state(running) == "succeeded"
    row = site.task(waiting)
    assert (row["state"], row["owner"], row["attempts"]) == ("accepted", None, 0)

    again = await site.start().serving()
    await site.in_state(waiting, "succeeded")
    assert await again.stop() == 0


async def test_an_ops_task_in_a_thread_is_drained(site: Site, client: RpcClient) -> None:
    """Also if it takes longer than ops requests have to come, and its caller is answered."""
    service = await site.start(
        drain_timeout="60s", ops_quiet_timeout="100ms", progress_every="500ms"
    ).serving()
    call = asyncio.create_task(client.call(served.resized, key="t"))
    await site.effect("start", "t")
    service.terminate()
    await service.wait_log("drain.progress", times=1)
    assert await client.call(served.ping) == service.pid
    site.go()

    assert await call == "t"
    assert await service.exit_code() == 0


async def test_a_tracked_thread_is_drained(site: Site, client: RpcClient) -> None:
    """Its task is open, the drain waits for the thread, and then the caller is answered."""
    service = await site.start(drain_timeout="60s").serving()
    call = asyncio.create_task(client.call(served.spawned, key="t"))
    await site.effect("start", "t")
    service.terminate()
    await service.wait_log("intake.closed")
    assert await client.call(served.ping) == service.pid
    site.go()

    assert await call == "t"
    assert await service.exit_code() == 0
    await site.effect("done", "t")


async def test_a_tracked_thread_that_outlives_the_deadline_ends_with_its_process(
    site: Site, client: RpcClient
) -> None:
    """Its task is unclean, the exit code is 75, and the next start runs it again."""
    service = await site.start(drain_timeout="200ms", handover_grace="200ms").serving()
    request_id = await client.cast(served.spawned, key="t")
    await site.effect("start", "t")

    assert await service.stop() == 75
    row = site.task(request_id)
    assert (row["state"], row["cut"]) == ("handed_over", "unclean")
    site.go()
    again = await site.start(startup_reconciliation_wait_seconds="100ms").serving()
    await site.in_state(request_id, "succeeded")
    assert await again.stop() == 0


async def test_what_nothing_tracks_is_named_at_the_end(site: Site, client: RpcClient) -> None:
    """A thread and an asyncio task that a handler has left; an idle thread of a pool is no work."""
    service = await site.start(exit_margin="200ms").serving()
    await client.call(served.untracked, key="t")
    await site.effect("start", "t")

    assert await service.stop() == 0
    assert (
        'work.untracked number=2 work="asyncio task untracked.<locals>.lost, thread builder"'
        in service.log
    )


async def test_thread_handler_is_drained(site: Site, client: RpcClient) -> None:
    """A plain `def` handler that runs when the stop comes ends by itself and is answered."""
    service = await site.start().serving()
    call = asyncio.create_task(client.call(served.in_thread, key="t", s=0.3))
    await site.effect("start", "t")

    assert await service.stop() == 0
    assert await call == "t"


@pytest.mark.parametrize("method", [served.count, served.count_in_thread], ids=["async", "thread"])
async def test_task_stops_at_a_safe_point_and_goes_on_from_its_cursor(
    site: Site, client: RpcClient, method: Method[..., Any]
) -> None:
    """A task with safe points stops at the next one in a drain and is run on after the restart:
    no item twice, none left out, although it is an `error` method.
    """
    first = await site.start().serving()
    cast = await client.cast(method, key="s")
    await site.effect("step", "s", times=5)
    code = await first.stop()
    assert code == 75
    done = len(site.seen("step", "s"))
    row = site.task(cast)
    assert (row["state"], row["cut"], row["owner"]) == ("handed_over", "safe_point", None)
    assert json.loads(row["cursor"]) == done - 1

    again = await site.start().serving()
    await site.effect("step", "s", times=done + 5)
    site.go()
    await site.in_state(cast, "succeeded")

    steps = [(int(e.more[0]), e.more[1]) for e in site.seen("step", "s")]
    assert [i for i, _ in steps] == list(range(len(steps)))
    assert [attempt for _, attempt in steps] == ["1"] * done + ["2"] * (len(steps) - done)
    assert await again.stop() == 0


@pytest.mark.parametrize("point", ["claim.after", "settle.before", "settle.after"])
async def test_stop_at_a_safe_point_stays_one_when_the_next_start_is_killed(
    site: Site, client: RpcClient, point: str
) -> None:
    """A task that stopped at a safe point goes on from its cursor also if the process that had
    taken it up again is killed before its handler starts.
    """
    first = await site.start().serving()
    cast = await client.cast(served.count, key="s")
    await site.effect("step", "s", times=5)
    assert await first.stop() == 75
    assert await site.start(failpoint=point).exit_code() == -signal.SIGKILL

    done = len(site.seen("step", "s"))

    again = await site.start().serving()
    await until(lambda: not site.transient() or len(site.seen("step", "s")) > done, "its end")
    site.go()
    await until(lambda: not site.transient(), "its end")

    assert site.state(cast) == "succeeded"
    steps = [int(e.more[0]) for e in site.seen("step", "s")]
    assert steps == list(range(len(steps)))
    assert len(steps) > done
    assert await again.stop() == 0


async def test_crash_repeats_only_items_since_the_last_committed_cursor(
    site: Site, client: RpcClient
) -> None:
    """After a kill a task with safe points is no exception to its policy, and its record says how
    far it came.
    """
    first = await site.start().serving()
    cast = await client.cast(served.count, key="s")
    await until(lambda: site.state(cast) and site.task(cast)["cursor"], "a committed cursor")
    first.kill()
    cursor = json.loads(site.task(cast)["cursor"])
    assert cursor <= int(site.seen("step", "s")[-1].more[0])

    again = await site.start().serving()
    await site.in_state(cast, "errored")
    assert await again.stop() == 0


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
async def test_second_int_or_quit_hands_over_at_once(
    site: Site, client: RpcClient, number: signal.Signals, loop: str
) -> None:
    """A second INT, or a QUIT, goes to the deadline step: the task is in the journal, the exit
    is 75.
    """
    service = await site.start(loop=loop, drain_timeout="60s").serving()
    cast = await client.cast(served.slow, key="s", s=300)
    await site.effect("start", "s")
    if number is signal.SIGINT:
        service.signal(number)
        await service.wait_log("drain.started")
        assert not service.ended
    service.signal(number)

    assert await service.exit_code() == 75
    row = site.task(cast)
    assert (row["state"], row["cut"]) == ("handed_over", "cancelled")
    report = json.loads(service.run["report"])
    assert report["forced"]
    assert report["waited_s"] < 30


async def test_repeated_term_changes_nothing(site: Site, client: RpcClient) -> None:
    """Five more TERMs in a drain neither hurry it nor cut a task."""
    service = await site.start(drain_timeout="60s").serving()
    call = asyncio.create_task(client.call(served.held, key="c", vm="v"))
    await site.effect("start", "c")
    service.terminate()
    await service.wait_log("signal.received signal=SIGTERM")  # two that wait would become one
    for n in range(2, 7):
        service.terminate()
        await service.wait_log("signal.received signal=SIGTERM", times=n)
    assert not call.done()
    site.go()

    assert await call == "c"
    assert await service.exit_code() == 0
    assert len(site.rows("SELECT 1 FROM run WHERE stop_by = 'SIGTERM'")) == 1


@pytest.mark.parametrize("code", [0, 75])
async def test_terms_until_the_very_end_do_not_change_the_exit_code(
    site: Site, client: RpcClient, code: int
) -> None:
    """Supervisors repeat TERM: one that comes while the interpreter closes does not kill it."""
    service = await site.start(drain_timeout="0.3s", handover_grace="0.3s").serving()
    if code:
        await client.cast(served.slow, key="s", s=60)
        await site.effect("start", "s")

    while not service.ended:
        service.terminate()
        await asyncio.sleep(0.001)

    assert await service.exit_code() == code


async def test_thread_that_a_cancelled_handler_left_does_not_keep_the_process(
    site: Site, client: RpcClient
) -> None:
    """A handler that was cancelled while it waited for a thread of its own is handed over, and the
    process leaves with the code on record, without waiting for that thread.
    """
    service = await site.start(drain_timeout="0.3s", handover_grace="0.3s").serving()
    await client.cast(served.leaves_a_thread, key="t")
    await site.effect("start", "t")

    assert await service.stop() == 75
    assert service.run["exit_code"] == 75


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_requeue_task_goes_back_to_the_transport_and_runs_again(
    site: Site, client: RpcClient, how: signal.Signals
) -> None:
    """A cut `requeue` request has no row: it is in the transport until the next start ends it."""
    first = await site.start(drain_timeout="0.3s", handover_grace="0.3s").serving()
    call = asyncio.create_task(client.call(served.fetched, key="f"))
    await site.effect("start", "f")
    assert not site.rows("SELECT 1 FROM task")
    first.signal(how)
    assert await first.exit_code() == (0 if how is signal.SIGTERM else -signal.SIGKILL)
    assert site.queued() == 1

    again = await site.start().serving()
    await site.effect("start", "f", times=2)
    site.go()

    assert await call == "f"
    assert len(site.seen("start", "f")) == 2
    assert site.queued() == 0
    assert await again.stop() == 0
