"""Must-hold 3: whatever hangs, the process is gone by the hard limit, and the record is right.

In each test a second process waits for the resource that the hanging task holds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import Any

import pytest

from gracekit import Method, RpcClient
from tests.process import served
from tests.process.helpers import SLACK_S, Site, until

DRAIN_S, GRACE_S, FLUSH_S, MARGIN_S, ALARM_S = 0.5, 0.4, 0.3, 0.5, 0.5
HARD_LIMIT_S = DRAIN_S + GRACE_S + FLUSH_S + MARGIN_S
TIMES = {
    "drain_timeout": f"{DRAIN_S}s",
    "handover_grace": f"{GRACE_S}s",
    "handover_flush": f"{FLUSH_S}s",
    "exit_margin": f"{MARGIN_S}s",
    "reconcile_every": "0.3s",
}
BY_ALARM = -signal.SIGALRM


@pytest.mark.parametrize(
    ("method", "code", "loop"),
    [
        (served.swallow, 75, "asyncio"),
        (served.never_ends, 75, "asyncio"),
        (served.block_loop, BY_ALARM, "asyncio"),
        (served.compute, BY_ALARM, "asyncio"),
        (served.compute, BY_ALARM, "uvloop"),
        (served.hold_interpreter, BY_ALARM, "asyncio"),
        (served.hold_interpreter, BY_ALARM, "uvloop"),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else str(value),
)
async def test_hanging_task_ends_with_its_process_and_only_then_frees_its_resource(
    site: Site, client: RpcClient, method: Method[..., Any], code: int, loop: str
) -> None:
    """A process whose handler hangs is gone by the hard limit, its task is in the record, and the
    next owner of the resource starts when that process is dead, not before.
    """
    first = await site.start(host="node-a", loop=loop, **TIMES).serving()
    hung = await client.cast(method, disk="d1")
    (start,) = await site.effect("start", "d1")
    second = await site.start(host="node-b", **TIMES).serving()
    waits = client.prepare(host="node-b", timeout=60).call(
        served.take_over, disk="d1", pid=first.pid
    )
    waiting = asyncio.create_task(waits)
    await until(lambda: site.rows("SELECT 1 FROM task WHERE method = 'take_over'"), "acceptance")

    asked_at = time.monotonic()
    first.terminate()
    found = await first.exit_code(HARD_LIMIT_S + ALARM_S + SLACK_S)
    gone_at = time.monotonic()

    assert found == code, first.log
    assert gone_at - asked_at < HARD_LIMIT_S + ALARM_S + SLACK_S
    assert first.run["stop_by"] == "SIGTERM", "the signal is on record although something hung"
    assert await waiting is False, "the resource was given away while its holder lived"
    (taken,) = site.seen("taken", "d1")
    assert taken.pid == second.pid
    assert int(taken.more[1]) > int(start.more[1]), "the token rises"
    last = [effect for effect in site.effects if effect.pid == first.pid][-1]
    assert last.at < taken.at, "the two never acted at the same time"
    task = site.task(hung)
    assert (task["state"], task["reason"], task["attempts"]) == ("errored", "interrupted", 1)
    if code == BY_ALARM:
        assert (first.run["report"], first.run["verdict"]) == (None, "stop_timeout")
    else:
        assert json.loads(first.run["report"])["unclean"] == [hung]
        assert first.run["verdict"] == "handed_over"
    assert await second.stop() == 0


async def test_inherited_deafness_to_the_alarm_does_not_keep_a_blocked_process(
    site: Site, client: RpcClient
) -> None:
    """Ignored and blocked signals outlive an exec; the alarm ends a blocked loop all the same."""
    first = await site.start_deaf_to_alarm(**TIMES).serving()
    await client.cast(served.block_loop, disk="d1")
    await site.effect("start", "d1")

    first.terminate()

    assert await first.exit_code(HARD_LIMIT_S + ALARM_S + SLACK_S) == BY_ALARM, first.log


async def test_a_handler_that_took_the_alarm_does_not_keep_a_blocked_process(
    site: Site, client: RpcClient
) -> None:
    """The kernel ends the process by the hard limit although the application handles SIGALRM."""
    first = await site.start(**TIMES).serving()
    await client.cast(served.block_loop_with_alarm_of_its_own, disk="d1")
    await site.effect("start", "d1")

    first.terminate()

    assert await first.exit_code(HARD_LIMIT_S + ALARM_S + SLACK_S) == BY_ALARM, first.log
    assert not site.seen("alarm")


@pytest.mark.parametrize(
    "method",
    [served.block_loop, served.block_loop_with_alarm_of_its_own, served.hold_interpreter],
)
async def test_the_alarm_ends_a_blocked_process_that_is_pid_1(
    site: Site, client: RpcClient, method: Method[..., Any]
) -> None:
    """The kernel drops SIGALRM's default action there: the process leaves by itself, with code
    14.
    """
    first = await (await site.start_as_pid_1(**TIMES)).serving()
    await client.cast(method, disk="d1")
    (start,) = await site.effect("start", "d1")
    assert start.pid == 1

    first.terminate()

    assert await first.exit_code(HARD_LIMIT_S + ALARM_S + SLACK_S) == signal.SIGALRM, first.log


async def test_a_process_that_is_pid_1_drains_as_any_other(site: Site, client: RpcClient) -> None:
    """Its signals arrive, and its exit code is the drain's."""
    first = await (await site.start_as_pid_1(**TIMES)).serving()
    assert await client.prepare(timeout=30).call(served.slow, key="k", s=0.0) == "k"

    first.terminate()

    assert await first.exit_code(HARD_LIMIT_S + SLACK_S) == 0, first.log


async def test_hanging_task_is_errored_by_the_next_start_of_its_host(
    site: Site, client: RpcClient
) -> None:
    """The record of a task that hung becomes ERRORED(interrupted) when its host is back."""
    first = await site.start(**TIMES).serving()
    hung = await client.cast(served.swallow, disk="d1")
    await site.effect("start", "d1")
    assert await first.stop() == 75

    again = await site.start(**TIMES).serving()

    await site.in_state(hung, "errored")
    assert site.task(hung)["reason"] == "interrupted"
    assert len(site.seen("start", "d1")) == 1
    assert await again.stop() == 0
