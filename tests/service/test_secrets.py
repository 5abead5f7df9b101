"""What callers send stays out of logs and events: arguments, contexts, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from gracekit import Context, Fail, RemoteError, RpcError, Service
from gracekit.errors import (
    DependencyError,
    GracekitError,
    MethodTimeoutError,
    TaskCancelledError,
    UnserialisableError,
)
from gracekit.telemetry.catalogue import LOGGER
from tests.service.kit import World

pytestmark = pytest.mark.looptime

CANARY = "canary-51c9"


@pytest.fixture
def svc() -> Service:
    made = Service("compute")

    @made.rpc(on_interrupt="retry", settle=1)
    async def work(ctx: Context, token: str, seconds: float = 0) -> str:
        await asyncio.sleep(seconds)
        return token

    @made.rpc
    async def bad(ctx: Context, token: str) -> None:
        raise ValueError(f"{token} is wrong, says {ctx['user']}")

    return made


def raw(**keys: Any) -> bytes:
    return json.dumps({"method": "work", "args": {"token": CANARY}} | keys).encode()


@pytest.fixture
def failing() -> Service:
    """Its hooks and handlers fail, and say what they were given."""
    made = Service("compute")

    @made.rpc(on_interrupt="probe", settle=0, resource="vm")
    async def probed(ctx: Context, token: str, vm: str) -> None:
        await asyncio.sleep(60)

    asked = []

    @probed.probe
    async def _(ctx: Context, token: str, vm: str) -> Fail:
        asked.append(token)
        if len(asked) == 1:
            raise ValueError(f"{token} of {ctx['user']} on {vm}")
        return Fail(f"{token} of {ctx['user']} on {vm}")

    @made.rpc
    async def errs(ctx: Context, token: str) -> None:
        await asyncio.sleep(60)

    @errs.errored
    async def _(ctx: Context, token: str, reason: str) -> None:
        raise ValueError(token)

    @made.rpc
    async def interrupted(ctx: Context, token: str) -> None:
        raise asyncio.CancelledError(token)

    return made


async def test_no_secret_of_a_hook_that_fails_reaches_a_log(
    world: World, failing: Service, caplog: pytest.LogCaptureFixture
):
    """What probes, errored hooks and interrupted handlers say is told without what was sent, and
    the tracebacks of hooks too.
    """
    caplog.set_level(logging.DEBUG)
    life = await world.start(failing, drain_timeout_s=1, log_failures="traceback")
    client = (await world.client(failing)).prepare(context={"user": CANARY})
    await client.cast("probed", token=CANARY, vm="vm-1")
    await client.cast("errs", token=CANARY)
    await client.cast("interrupted", token=CANARY)
    await life.hears("task.interrupted")
    await life.drain()
    second = await world.start(failing)
    failed = await second.hears("task.failed")
    await second.hears("hook.failed", 2)

    assert failed["error"].endswith("<token> of <token> on vm-1")
    assert {fields["hook"] for fields in second.told("hook.failed")} == {
        "probed.probe",
        "errs.errored",
    }
    assert caplog.text.count("Traceback (most recent call last)") == 2
    assert "raise ValueError(token)" in caplog.text  # the line of the hook that did
    assert CANARY not in caplog.text
    assert CANARY not in repr([one.events for one in (life, second)])


ODD = {
    "an argument too many": raw(args={"token": CANARY, "more": CANARY}),
    "no such method": raw(method="wrk", _context_token=CANARY),
    "arguments in a list": raw(args=[CANARY]),
    "arguments as text": raw(args=CANARY),
    "half a message": raw()[:-1],
    "NaN beside it": raw(args={"token": CANARY, "seconds": float("nan")}),
    "a caller that is gone": raw(
        _msg_id="m", _reply_q="reply_gone", _timeout=2, _context_token=CANARY
    ),
    "trace keys": raw(_context_traceparent=CANARY, _context_baggage=f"{CANARY}={CANARY},"),
    "a lease": raw(_context_gracekit_lease={"kind": CANARY, "id": 1, "token": CANARY}),
}


async def test_no_secret_reaches_a_log_or_an_event(
    world: World, svc: Service, caplog: pytest.LogCaptureFixture
):
    """On every way through: served, failed, refused, repeated, lost, handed over, recovered."""
    caplog.set_level(logging.DEBUG)
    life = await world.start(svc, drain_timeout_s=1)
    client = (await world.client(svc)).prepare(context={"user": CANARY, "auth_token": CANARY})

    await client.prepare(request_id="one").call("work", token=CANARY)
    await client.prepare(request_id="one").call("work", token=CANARY)
    with pytest.raises(RpcError):
        await client.prepare(request_id="one").call("work", token=CANARY * 2)
    with pytest.raises(ValueError, match=CANARY):
        await client.call("bad", token=CANARY)
    for queue in ("compute", "compute-ops"):
        for body in ODD.values():
            await world.deliver(queue, body)
    await client.prepare(timeout=100, monitor_timeout=90).cast("work", token=CANARY, seconds=60)
    gone = {"_msg_id": "m2", "_reply_q": "reply_gone", "_timeout": 4}
    await world.deliver("compute", raw(args={"token": CANARY, "seconds": 20}, **gone))
    await world.until(lambda: bool(life.told("heartbeat.lost")))
    await life.drain()
    second = await world.start(svc)
    await second.hears("task.finished", 2)

    told = {name for one in (life, second) for name, _ in one.events}
    assert {"task.rejected", "reply.given_up", "heartbeat.lost", "task.handed_over"} <= told
    assert len([r for r in caplog.records if r.name == LOGGER]) > 30
    assert CANARY not in caplog.text
    assert CANARY not in repr([one.events for one in (life, second)])


@pytest.mark.parametrize("details", ["full", "message", "none"])
async def test_callers_are_shown_of_a_failure_what_the_setting_says(
    world: World, svc: Service, details: str
):
    """All of it, class and message, or nothing; the record keeps all, and a refusal says its
    rule.
    """
    await world.start(svc, error_details=details)
    client = (await world.client(svc)).prepare(context={"user": CANARY}, request_id="r1")

    shown = []
    for _ in range(2):  # the second time from the record
        with pytest.raises((ValueError, RemoteError)) as failed:
            await client.call("bad", token=CANARY)
        shown.append("\n".join([str(failed.value), *getattr(failed.value, "__notes__", ())]))
    with pytest.raises(RpcError, match="method 'wrk' is not served"):
        await client.prepare(request_id="r2").call("wrk")

    for text in shown:
        assert (CANARY in text) is (details != "none")
        assert ("remote traceback" in text) is (details == "full")
        assert ("keeps the reason under the request id" in text) is (details == "none")
    assert isinstance(failed.value, RemoteError if details == "none" else ValueError)
    assert "Traceback" in str(world.task("r1")["failure"])


@pytest.fixture
def own_classes() -> Service:
    """Ends in gracekit's own classes, with texts that are not gracekit's."""
    made = Service("compute")

    @made.rpc
    async def raises(ctx: Context, token: str) -> None:
        raise DependencyError(token)

    @made.rpc
    async def times_out(ctx: Context, token: str) -> None:
        raise MethodTimeoutError(token)

    @made.rpc
    async def returns(ctx: Context, token: str) -> object:
        class Odd(dict[str, str]):
            def items(self) -> Any:
                raise ValueError(token)

        return Odd(a="b")

    @made.rpc(timeout=1)
    async def slow(ctx: Context, token: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError(token)

    @made.rpc
    async def waits(ctx: Context, token: str) -> None:
        await asyncio.sleep(60)

    return made


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        ("raises", RemoteError),
        ("times_out", RemoteError),
        ("slow", RemoteError),
        ("returns", UnserialisableError),
    ],
)
async def test_no_class_of_gracekit_brings_a_withheld_text_out(
    world: World, own_classes: Service, method: str, shown: type[Exception]
):
    """Who ended the task decides, not the class: applications raise and pass on ours too."""
    await world.start(own_classes, error_details="none")
    client = await world.client(own_classes)

    with pytest.raises(GracekitError) as failed:
        await client.call(method, token=CANARY)

    assert type(failed.value) is shown
    assert CANARY not in repr(failed.value)
    assert "keeps the reason under the request id" in str(failed.value)


@pytest.mark.parametrize(
    ("verb", "shown", "words"),
    [
        ("cancel", TaskCancelledError, "was cancelled"),
        ("fail", TaskCancelledError, "was failed by an operator"),
    ],
)
async def test_an_operators_reason_is_withheld(
    world: World, own_classes: Service, verb: str, shown: type[Exception], words: str
):
    """What gracekit itself has ended keeps its class, which says how to go on."""
    life = await world.start(own_classes, error_details="none")
    client = (await world.client(own_classes)).prepare(request_id="r")
    call = asyncio.ensure_future(client.call("waits", token="x"))
    await life.hears("task.started")

    await world.verb(life, verb, task_id="r", reason=CANARY)
    with pytest.raises(shown, match=words) as failed:
        await call

    assert CANARY not in repr(failed.value)
