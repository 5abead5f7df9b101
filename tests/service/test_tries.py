"""Due later: attempts that failed and are tried again, and casts that may not begin yet."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt

import pytest

from gracekit import (
    CallTimeoutError,
    ConfigError,
    Context,
    DeclarationError,
    InvalidArgumentsError,
    NoAnswerError,
    NoCapacity,
    RemoteError,
    Service,
    TryAgain,
)
from gracekit.errors import MethodTimeoutError, TaskCancelledError
from gracekit.journal.order_rows import refusal_of, target_named
from gracekit.process import Point
from gracekit.request.row_orders import RowOrders
from gracekit.testing.faults import Fault
from gracekit.tracker.task import Order, Verb
from tests.service.kit import Doors, Life, World, now

pytestmark = pytest.mark.looptime


class Flaky:
    """A method that fails a number of times, and when each attempt began."""

    def __init__(
        self, svc: Service, *, fails: int, error: BaseException, **options: object
    ) -> None:
        self.begun: list[float] = []
        self.fails = fails

        @svc.rpc(**({"retry_on": (TimeoutError,), "backoff": "10s"} | options))  # type: ignore[arg-type]
        async def fetch(ctx: Context, vm: str = "v") -> int:
            self.begun.append(round(now(), 1))
            if len(self.begun) <= self.fails:
                raise error
            return ctx.attempt

        self.method = fetch

    def pauses(self) -> list[float]:
        return [round(b - a, 1) for a, b in zip(self.begun, self.begun[1:], strict=False)]


# -- failures ----------------------------------------------------------------------------------


async def test_a_failed_attempt_is_tried_again_with_growing_pauses(world: World, svc: Service):
    """The caller gets the last outcome, once; between the tries no run owns the task."""
    flaky = Flaky(svc, fails=3, error=TimeoutError("slow"), backoff_max="25s")
    life = await world.start(svc)
    client = await world.client(svc)

    call = asyncio.create_task(client.prepare(request_id="t", timeout=300).call(flaky.method))
    await world.until(lambda: world.tally().get("tried_again") == 1)
    row = world.task("t")
    await world.settle()

    assert (row["state"], row["owner"], row["failures"], row["crashes"]) == ("accepted", None, 1, 0)
    assert row["due_at"] == pytest.approx(world.clock.wall() + 10, abs=1)
    assert len(life.runtime.ground.tracker) == 0
    assert await call == 4
    assert flaky.pauses() == [10, 20, 25]
    assert [e["again_s"] for e in life.told("task.retried")] == [10, 20, 25]
    assert [i["detail"] for i in world.incidents("failed_attempt")] == [
        f"attempt {n}: slow" for n in (1, 2, 3)
    ]
    assert world.task("t")["due_at"] is None


async def test_a_task_that_fails_too_often_has_failed(world: World, svc: Service):
    flaky = Flaky(svc, fails=9, error=TimeoutError("slow"), retries=2)
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(TimeoutError, match="slow"):
        await client.prepare(request_id="t", timeout=300).call(flaky.method)

    assert len(flaky.begun) == 3
    assert (world.state("t"), world.task("t")["failures"]) == ("failed", 2)


async def test_what_is_not_named_is_not_tried_again(world: World, svc: Service):
    flaky = Flaky(svc, fails=1, error=ValueError("bad"))
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(ValueError, match="bad"):
        await client.call(flaky.method)

    assert len(flaky.begun) == 1


async def test_a_handler_can_ask_to_be_tried_again(world: World, svc: Service):
    """Without `retry_on`; it says when, and that counts in `retries` too."""
    flaky = Flaky(svc, fails=9, error=TryAgain("not yet", after="7s"), retry_on=(), retries=2)
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises((TryAgain, RemoteError), match="not yet"):
        await client.prepare(timeout=300).call(flaky.method)

    assert flaky.pauses() == [7, 7]


async def test_a_try_again_of_a_service_that_was_called_does_not_count(world: World, svc: Service):
    flaky = Flaky(svc, fails=9, error=TryAgain("not yet", after="7s"), retries=1)

    @svc.rpc
    async def outer(ctx: Context) -> None:
        await client.prepare(timeout=300).call(flaky.method)

    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises((TryAgain, RemoteError)):
        await client.prepare(timeout=600, request_id="o").call(outer)

    assert world.task("o")["attempts"] == 1


async def test_a_wrong_after_fails_the_task_with_the_rule(world: World, svc: Service):
    flaky = Flaky(svc, fails=9, error=TryAgain("not yet", after="soon"))
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises((ConfigError, RemoteError), match="'soon' is not a duration"):
        await client.call(flaky.method)


async def test_the_methods_timeout_is_never_tried_again(world: World, svc: Service):
    """The caller was answered when it came."""
    begun = []

    @svc.rpc(retry_on=Exception, timeout="5s")
    async def slow(ctx: Context) -> None:
        begun.append(now())
        await asyncio.sleep(60)

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(MethodTimeoutError):
        await client.prepare(request_id="t").call(slow)
    await asyncio.sleep(60)

    assert (world.state("t"), len(begun)) == ("failed", 1)


async def test_no_capacity_parks_and_is_no_failure(world: World, svc: Service):
    flaky = Flaky(svc, fails=9, error=NoCapacity("full"), retry_on=Exception)
    await world.start(svc, use_pending_state=True)
    client = await world.client(svc)

    await client.prepare(request_id="t").cast(flaky.method)
    await world.until(lambda: world.state("t") == "pending")

    assert world.task("t")["failures"] == 0


def test_a_requeue_method_cannot_be_tried_again(svc: Service):
    with pytest.raises(DeclarationError, match="leave retry_on out, or use on_interrupt='retry'"):

        @svc.rpc(on_interrupt="requeue", retry_on=TimeoutError)
        async def read(ctx: Context) -> None: ...


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"retry_on": "TimeoutError"}, "no subclass of Exception"),
        ({"retry_on": (asyncio.CancelledError,)}, "no subclass of Exception"),
        ({"retries": 0}, "whole number from 1"),
        ({"backoff": "soon"}, "backoff='soon' is not a duration"),
    ],
)
def test_wrong_options_are_refused_with_the_rule(
    svc: Service, options: dict[str, object], rule: str
):
    with pytest.raises(DeclarationError, match=rule):

        @svc.rpc(**options)  # type: ignore[arg-type]
        async def fetch(ctx: Context) -> None: ...


async def test_a_caller_whose_time_ends_does_not_end_the_tries(world: World, svc: Service):
    flaky = Flaky(svc, fails=2, error=TimeoutError("slow"))
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(CallTimeoutError, match="no reply"):
        await client.prepare(request_id="t", timeout=5).call(flaky.method)
    await world.until(lambda: world.state("t") == "succeeded", within_s=100)

    assert flaky.pauses() == [10, 20]


async def test_lease_and_line_are_free_between_tries(world: World, svc: Service):
    flaky = Flaky(svc, fails=1, error=TimeoutError("slow"), resource="vm", backoff="60s")

    @svc.rpc(resource="vm")
    async def other(ctx: Context, vm: str) -> float:
        return now()

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="t").cast(flaky.method, vm="v")
    await world.until(lambda: world.tally().get("tried_again") == 1)
    began = now()

    assert await client.call(other, vm="v") - began < 1
    await world.until(lambda: world.state("t") == "succeeded", within_s=100)
    assert flaky.pauses() == [60]


async def test_crashes_and_failures_are_two_budgets(world: World, svc: Service):
    """A crash between two failures does not use up a try, nor a failure a crash."""
    doors, begun = Doors(), list[int]()

    @svc.rpc(retry_on=TimeoutError, retries=2, backoff="10s", on_interrupt="retry", settle="1s")
    async def fetch(ctx: Context) -> str:
        begun.append(ctx.attempt)
        if ctx.attempt in {1, 3}:
            raise TimeoutError("slow")
        if ctx.attempt in {2, 4}:
            await doors.pass_("x")
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="t").cast(fetch)
    for number in (1, 2):
        await doors.wait(number)
        await life.crash()
        life = await world.start(svc)
    await world.until(lambda: world.state("t") == "succeeded", within_s=200)

    row = world.task("t")
    assert (begun, row["failures"], row["crashes"]) == ([1, 2, 3, 4, 5], 2, 2)


async def test_a_task_that_waits_for_its_next_try_is_not_left_over(world: World, svc: Service):
    """A drain ends with 0, and the next start does what is due."""
    flaky = Flaky(svc, fails=1, error=TimeoutError("slow"), backoff="100s")
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="t").cast(flaky.method)
    await world.until(lambda: world.tally().get("tried_again") == 1)

    assert (await life.drain()).exit_code == 0
    await world.start(svc)
    await world.until(lambda: world.state("t") == "succeeded", within_s=200)

    assert flaky.pauses() == [100]


@pytest.mark.parametrize(("verb", "tries"), [(Verb.CANCEL, 1), (Verb.RETRY, 2)])
async def test_an_operator_can_end_the_wait_for_the_next_try(
    world: World, svc: Service, verb: Verb, tries: int
):
    """`gracekit tasks cancel` ends the task, and `gracekit tasks retry` lets it begin now."""
    flaky = Flaky(svc, fails=1, error=TimeoutError("slow"), backoff="1000s")
    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="t", timeout=300).call(flaky.method))
    await world.until(lambda: world.tally().get("tried_again") == 1)
    engine = life.runtime.wired.dispatcher._journal.engine
    target = await target_named(engine, "t", "")
    assert target is not None
    assert refusal_of(target, verb) is None

    orders = RowOrders(engine, world.clock, "operator", engine.submit)
    await orders.carry_out(target, Order(verb=verb, by="ann@desk", reason="no more"))

    if verb is Verb.CANCEL:
        with pytest.raises(TaskCancelledError, match="no more"):
            await call
    else:
        assert await call == 2
    assert len(flaky.begun) == tries


async def test_a_cancel_beside_a_late_answer_to_a_failure_is_not_lost(world: World, svc: Service):
    """The failure is on record, and the task was claimed anew, but its attempt is not over here."""
    begun = []

    @svc.rpc
    async def fetch(ctx: Context, after: str) -> None:
        begun.append(ctx.request_id)
        if ctx.attempt == 1:
            raise TryAgain(after=after)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="other").cast(fetch, after="7s")
    await life.hears("task.retried")
    life.faults.delay_s = 5
    life.plan(Point.TRY_LATER, Fault.DELAY, times=2)  # of the commit, and then of its answer
    await client.prepare(request_id="t").cast(fetch, after="1s")
    await asyncio.sleep(9.5)
    assert (world.state("t"), world.task("t")["owner"]) == ("accepted", life.runtime.run_id)

    answer = await world.verb(life, "cancel", task_id="t", by="me", reason="no more")

    await asyncio.sleep(10)
    assert answer["asked"]
    assert begun == ["other", "t", "other"]
    assert world.state("t") == "cancelled"
    world.check_accounts()


async def test_a_cursor_is_kept_between_tries(world: World, svc: Service):
    done: list[int] = []

    @svc.rpc(retry_on=TimeoutError, backoff="10s")
    async def copy(ctx: Context) -> None:
        async for one in ctx.steps([1, 2, 3, 4]):
            if one == 3 and ctx.attempt == 1:
                raise TimeoutError
            done.append(one)

    await world.start(svc)
    client = await world.client(svc)
    await client.prepare(timeout=100).call(copy)

    assert done == [1, 2, 3, 4]


# -- delays ------------------------------------------------------------------------------------


@pytest.fixture
async def delayed(world: World, svc: Service) -> tuple[Life, Flaky]:
    flaky = Flaky(svc, fails=0, error=ValueError())
    return await world.start(svc), flaky


async def test_a_delayed_cast_is_accepted_at_once_and_begins_later(
    world: World, svc: Service, delayed: tuple[Life, Flaky]
):
    _, flaky = delayed
    client = await world.client(svc)
    began = now()

    await client.prepare(request_id="d", delay="10m").cast(flaky.method)
    await world.until(lambda: world.state("d") == "accepted", within_s=1)
    row = world.task("d")
    await world.until(lambda: world.state("d") == "succeeded", within_s=700)

    assert (row["owner"], row["attempts"]) == (None, 0)
    assert flaky.begun[0] - began == pytest.approx(600, abs=1)


async def test_a_moment_may_be_named_and_one_in_the_past_is_now(
    world: World, svc: Service, delayed: tuple[Life, Flaky]
):
    _, flaky = delayed
    client = await world.client(svc)
    began, wall = now(), dt.datetime.fromtimestamp(world.clock.wall(), dt.UTC)

    await client.prepare(at=wall + dt.timedelta(hours=1)).cast(flaky.method)
    await client.prepare(at=wall - dt.timedelta(hours=1)).cast(flaky.method)
    await world.until(lambda: len(flaky.begun) == 2, within_s=4000)

    assert [round(at - began) for at in flaky.begun] == [0, 3600]


async def test_a_delayed_cast_survives_restarts(
    world: World, svc: Service, delayed: tuple[Life, Flaky]
):
    life, flaky = delayed
    client = await world.client(svc)
    began = now()
    await client.prepare(request_id="d", delay="100s").cast(flaky.method)
    await world.until(lambda: world.state("d") == "accepted", within_s=1)

    await life.crash()
    life = await world.start(svc)
    assert (await life.drain()).exit_code == 0
    await world.start(svc)
    await world.until(lambda: world.state("d") == "succeeded", within_s=200)

    assert flaky.begun[0] - began == pytest.approx(100, abs=1)


async def test_the_same_id_twice_begins_once(
    world: World, svc: Service, delayed: tuple[Life, Flaky]
):
    _, flaky = delayed
    client = await world.client(svc)

    for _ in range(2):
        await client.prepare(request_id="d", delay="100s").cast(flaky.method)
    await asyncio.sleep(300)

    assert len(flaky.begun) == 1


async def test_a_delay_of_a_requeue_method_gets_a_row(world: World, svc: Service):
    begun = []

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> None:
        begun.append(now())

    await world.start(svc)
    client = await world.client(svc)
    began = now()
    await client.prepare(delay="100s").cast(read)
    await world.until(lambda: bool(begun), within_s=200)

    assert begun[0] - began == pytest.approx(100, abs=1)


@pytest.mark.parametrize("by_s", [-300.0, 300.0])
async def test_a_delay_follows_the_clock_and_a_moment_does_not(
    world: World, svc: Service, delayed: tuple[Life, Flaky], by_s: float
):
    _, flaky = delayed
    client = await world.client(svc)
    began, wall = now(), dt.datetime.fromtimestamp(world.clock.wall(), dt.UTC)
    await client.prepare(request_id="delay", delay="1000s").cast(flaky.method)
    await client.prepare(request_id="at", at=wall + dt.timedelta(seconds=1000)).cast(flaky.method)
    await world.until(lambda: world.state("at") == "accepted", within_s=1)

    await asyncio.sleep(100)
    world.clock.shift_s += by_s
    await world.until(lambda: len(flaky.begun) == 2, within_s=2000)

    moments = sorted((1000.0, 1000.0 - by_s))
    assert [at - began for at in flaky.begun] == pytest.approx(moments, abs=40)


async def test_only_casts_can_wait(world: World, svc: Service, delayed: tuple[Life, Flaky]):
    _, flaky = delayed
    client = (await world.client(svc)).prepare(delay="1s")

    with pytest.raises(InvalidArgumentsError, match="for cast"):
        await client.call(flaky.method)
    with pytest.raises(InvalidArgumentsError, match="for cast"):
        await client.fanout(flaky.method)


async def test_without_a_service_that_knows_of_delays_nothing_is_sent(world: World, svc: Service):
    flaky = Flaky(svc, fails=0, error=ValueError())
    life = await world.start(svc)
    client = await world.client(svc)
    await life.drain()

    with pytest.raises(NoAnswerError, match="nothing was sent"):
        await client.prepare(delay="1s").cast(flaky.method)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"delay": "soon"}, "is not a duration"),
        ({"at": dt.datetime(2026, 1, 1)}, "no datetime with a time zone"),  # noqa: DTZ001 - on purpose
        ({"at": 12}, "no datetime with a time zone"),
        ({"at": dt.datetime.now(dt.UTC), "delay": 1}, "leave one out"),
    ],
)
async def test_wrong_moments_are_refused(
    world: World, svc: Service, options: dict[str, object], rule: str
):
    client = await world.client(svc)
    with pytest.raises(ConfigError, match=rule):
        client.prepare(**options)  # type: ignore[arg-type]


async def test_callers_hear_heartbeats_between_tries(world: World, svc: Service):
    """From the run that tried it, and from the next one if that has gone."""
    flaky = Flaky(svc, fails=1, error=TimeoutError("slow"), backoff="100s")
    life = await world.start(svc)
    client = await world.client(svc)
    view = client.prepare(request_id="t", timeout=300, monitor_timeout=10)
    call = asyncio.create_task(view.call(flaky.method))
    await world.until(lambda: world.tally().get("tried_again") == 1)
    await asyncio.sleep(40)
    await life.crash()
    await world.start(svc)

    assert await call == 2
    assert flaky.pauses() == [100]
    with contextlib.suppress(asyncio.CancelledError):
        call.cancel()
