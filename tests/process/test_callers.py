"""Must-hold 4: callers get their answers, through a drain and through a crash."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import CallTimeoutError, RpcClient
from tests.process import served
from tests.process.helpers import Site, until


@pytest.mark.parametrize("way", ["python served.py", "gracekit run"])
async def test_call_in_flight_is_answered_during_the_drain(
    site: Site, client: RpcClient, way: str
) -> None:
    """A call that runs when the stop comes gets its reply from the draining process, however that
    was started.
    """
    service = site.start_cli() if way == "gracekit run" else site.start()
    await service.serving()
    call = asyncio.create_task(client.call(served.through_drain, key="c1", s=0.3))
    await site.effect("start", "c1")

    code = await service.stop()

    assert await call == "c1"
    assert code == 0
    assert not site.transient()


async def test_ops_calls_are_answered_until_the_last_task_ends(
    site: Site, client: RpcClient
) -> None:
    """While a task holds the drain every ops call is answered, by the draining process."""
    service = await site.start(drain_timeout="60s").serving()
    call = asyncio.create_task(client.call(served.held, key="c1", vm="v"))
    await site.effect("start", "c1")
    service.terminate()
    await service.wait_log("intake.closed")

    for _ in range(5):
        assert await client.prepare(timeout=20).call(served.ping) == service.pid
    assert not call.done()
    site.go()

    assert await call == "c1"
    assert await service.exit_code() == 0


async def test_closed_topic_keeps_casts_for_the_restart_and_lets_calls_time_out(
    site: Site, client: RpcClient
) -> None:
    """During a drain a call to the new-request topic waits and times out unserved; a cast waits
    and runs after the restart.
    """
    service = await site.start(drain_timeout="60s").serving()
    call = asyncio.create_task(client.call(served.held, key="c1", vm="v"))
    await site.effect("start", "c1")
    service.terminate()
    await service.wait_log("intake.closed")

    cast = await client.cast(served.slow, key="later", s=0.0)
    with pytest.raises(CallTimeoutError):
        await client.prepare(timeout=0.3).call(served.slow, key="never", s=0.0)
    site.go()
    assert await call == "c1"
    assert await service.exit_code() == 0
    assert site.state(cast) is None, "the drain took in nothing new"
    assert site.queued() >= 1

    again = await site.start().serving()
    await site.in_state(cast, "succeeded")
    assert await client.call(served.slow, key="behind", s=0.0) == "behind"
    assert await again.stop() == 0
    assert not site.seen("start", "never"), "nobody waits for it any more"


@pytest.mark.parametrize("point", ["finish.after", "reply.before", "reply_sent.before"])
async def test_call_is_answered_by_the_next_start_after_a_crash_behind_the_outcome(
    site: Site, client: RpcClient, point: str
) -> None:
    """Killed between the recorded outcome and the forgotten reply, the service answers the waiting
    caller from the record when it is back, and does not run the handler again.
    """
    first = await site.start(failpoint=point).serving()
    call = asyncio.create_task(client.call(served.slow, key="c1", s=0.0))
    assert await first.exit_code() == -9

    again = await site.start().serving()

    assert await call == "c1"
    assert len(site.seen("start", "c1")) == 1
    await until(lambda: not site.rows("SELECT 1 FROM reply"), "the reply forgotten")
    assert await again.stop() == 0


async def test_call_cut_by_a_crash_is_answered_with_the_verdict(
    site: Site, client: RpcClient
) -> None:
    """A caller whose `retry` task was cut gets the second attempt's result; of an `error` one, the
    reason why it will not be run again.
    """
    first = await site.start().serving()
    retried = asyncio.create_task(client.call(served.retried, key="r1", vm="v", s=300, again_s=0))
    errored = asyncio.create_task(client.call(served.slow, key="e1", s=300))
    await site.effect("start", "r1")
    await site.effect("start", "e1")
    first.kill()

    again = await site.start().serving()

    assert await retried == "r1"
    with pytest.raises(Exception, match=r"ERRORED\(interrupted\)"):
        await errored
    assert [e.more[0] for e in site.seen("start", "r1")] == ["1", "2"]
    assert len(site.seen("start", "e1")) == 1
    assert await again.stop() == 0
