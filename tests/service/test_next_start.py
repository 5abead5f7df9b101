"""What the next start makes of the unfinished: after a crash, and after a drain, by policy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import (
    Context,
    Done,
    Fail,
    GracekitError,
    Retry,
    Service,
    Wait,
)
from gracekit.errors import (
    TaskInterruptedError,
    UnserialisableError,
)
from tests.service.kit import World, now
from tests.service.left_over import BOTH, Job, end

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize("policy", ["error", "retry", "probe", "hold"])
async def test_a_run_that_leaves_rows_of_an_earlier_one_hands_over(
    world: World, svc: Service, policy: str
):
    """In their settle time they are not touched, and the end is 75: drained means that nothing is
    left. What a living sibling owns does not count, nor does another service's.
    """
    job = Job(world, svc, on_interrupt="retry" if policy == "hold" else policy)
    if policy == "probe":
        job.with_probe()
        job.probe_answers = lambda _: Wait(500)

    @svc.rpc
    async def migrate(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="10m")

    first, _ = await job.begin()
    if policy == "hold":
        await (await world.client(svc)).call(migrate, vm="v")
        await world.verb(first, "cancel", task_id="w")
        await world.until(lambda: world.state("w") == "cancelled")
    sibling = await world.start(svc)
    assert (await sibling.drain()).exit_code == 0
    await first.crash()

    report = await (await world.start(svc, startup_reconciliation_enabled=False)).drain()

    assert (report.unfinished, report.exit_code) == (1, 75)
    other = await world.start(Service("other"))
    assert (await other.drain()).exit_code == 0


async def test_a_run_that_leaves_rows_of_one_that_has_just_died_hands_over(
    world: World, svc: Service
):
    """Nobody has taken them over yet, and who proves that their owner is dead could settle them."""
    job = Job(world, svc, on_interrupt="retry")
    first, _ = await job.begin()
    sibling = await world.start(svc)
    await first.crash()

    report = await sibling.drain()

    assert job.row()["owner"] == first.runtime.run_id
    assert (report.unfinished, report.exit_code) == (1, 75)


@BOTH
async def test_error_is_never_started_a_second_time(world: World, svc: Service, how: str):
    """ERRORED(interrupted) at once, the hook told, the caller answered, the lease free in the
    end.
    """
    job = Job(world, svc)
    job.with_errored()
    life, call = await job.begin()
    await end(life, how)
    begun = now()
    await world.start(svc)

    with pytest.raises(TaskInterruptedError, match=r"ERRORED\(interrupted\)"):
        await call
    assert now() - begun < 1
    await world.until(lambda: job.told == ["v: interrupted"])
    await world.until(lambda: not job.row()["errored_due"])
    assert len(job.attempts) == 1
    row = job.row()
    assert (row["state"], row["reason"], row["args"], row["errored_due"]) == (
        "errored",
        "interrupted",
        '{"vm":"v"}',  # for an operator's retry
        0,
    )
    await asyncio.sleep(20)
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]


@BOTH
async def test_retry_runs_again_with_a_higher_token(world: World, svc: Service, how: str):
    """Same request id, next attempt; after a crash not before the settle time, after a clean
    hand-over at once.
    """
    job = Job(world, svc, on_interrupt="retry", settle="7s")
    life, call = await job.begin()
    await end(life, how)
    begun = now()
    await world.start(svc)

    assert await call == 2
    assert [attempt for attempt, _ in job.attempts] == [1, 2]
    assert job.tokens == [1, 2]
    waited = job.attempts[1][1] - begun
    assert waited == pytest.approx(7 if how == "crash" else 0, abs=1.2)


@BOTH
@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (Done({"host": "n2"}), "succeeded", None),
        (Retry(), "succeeded", None),
        (Fail("the disk is gone"), "failed", None),
    ],
)
async def test_a_probe_decides(
    world: World, svc: Service, how: str, answer: Any, state: str, reason: str | None
):
    """Done ends it with its result, Retry starts it again, Fail ends it with its words."""
    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()
    job.probe_answers = lambda n: answer
    life, call = await job.begin()
    await end(life, how)
    second = await world.start(svc)
    result = await asyncio.gather(call, return_exceptions=True)

    noted = [one["detail"] for one in world.incidents("probe_answered")]
    (settled,) = second.told("task.settled")
    is_retry = isinstance(answer, Retry)
    assert noted == (["Retry, after attempt 1"] if is_retry else [])
    assert (settled["reason"] == "its probe answered Retry") == is_retry
    assert (job.row()["state"], job.row()["reason"]) == (state, reason)
    match answer:
        case Done(value):
            assert result == [value]
        case Retry():
            assert result == [2]
        case _:
            assert "the disk is gone" in str(result[0])
    assert len(job.asked) == 1
    assert len(job.attempts) == (2 if isinstance(answer, Retry) else 1)
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]


async def test_a_probe_s_result_that_cannot_be_sent_is_left_out(world: World, svc: Service):
    """As a handler's: the work is done, and whoever waits for the result is told so."""
    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()
    job.probe_answers = lambda n: Done(object())
    life, call = await job.begin()
    await life.crash()
    await world.start(svc)

    with pytest.raises(UnserialisableError, match="has succeeded, but its result is left out"):
        await call
    assert (job.row()["state"], job.row()["result"]) == ("succeeded", None)


async def test_an_unclean_task_is_not_probed_before_it_has_settled(world: World, svc: Service):
    """The old owner's last request may be in flight: 10 s by default, in virtual time to the tick;
    new requests for the resource wait as long, others do not.
    """
    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()
    job.probe_answers = lambda n: Done(1)
    life, call = await job.begin()
    await life.crash()
    begun = now()
    await world.start(svc)
    client = await world.client(svc)

    other = asyncio.create_task(client.prepare(timeout=40).call(job.work, vm="other"))
    same = asyncio.create_task(client.prepare(timeout=40).call(job.work, vm="v"))
    assert await call == 1
    assert job.asked == [pytest.approx(begun + 10, abs=1.2)]
    await world.until(lambda: len(job.attempts) == 3)
    assert job.attempts[1][1] - begun < 1
    assert job.attempts[2][1] - begun >= 10
    for one in (other, same):
        one.cancel()


@pytest.mark.parametrize("owns_process", [True, False], ids=["alarm", "embedded"])
async def test_a_settle_time_counts_from_the_end_of_a_process_that_had_an_alarm(
    world: World, svc: Service, owns_process: bool
):
    """The alarm ends a process whose handler did not return, so its last request is older than
    that. Nobody knows when a program without an alarm has ended: it counts from when that is found.
    """
    attempts = []

    @svc.rpc(on_interrupt="retry", settle=10, resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        attempts.append(now())
        while ctx.attempt == 1:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError as error:
                if not error.args:
                    raise

    life = await world.start(svc, signals=owns_process, drain_timeout_s=5)
    await (await world.client(svc)).prepare(request_id="w").cast(work, vm="v")
    await life.hears("task.started")
    report = await life.drain()
    ended = now()
    assert report.unclean == ["w"]
    await asyncio.sleep(4)
    adopted = now()
    await world.start(svc)
    await world.until(lambda: world.state("w") == "succeeded", within_s=60)

    waited_s = attempts[1] - ended
    if owns_process:
        assert 10 <= waited_s <= 10 + 3
    else:
        assert waited_s >= adopted - ended + 10


async def test_a_resource_settles_even_where_its_task_is_judged_at_once(world: World, svc: Service):
    """The verdict of `error` need not wait, but the resource does, in a living sibling too."""
    job = Job(world, svc)
    life, call = await job.begin(instance="a")
    await world.start(svc, instance="b")
    await life.crash()
    await asyncio.gather(call, return_exceptions=True)
    judged = now()
    client = await world.client(svc)
    await client.cast(job.work, vm="v")
    await world.until(lambda: len(job.attempts) == 2)

    assert job.attempts[1][1] - judged >= 9
    assert job.tokens == [1, 2]


async def test_the_mark_of_an_unclean_end_survives_a_restart(world: World, svc: Service):
    """Crash, a life of 4 s, crash, a life: still not asked before the settle time of the first."""
    job = Job(world, svc, on_interrupt="probe", settle=30)
    job.with_probe()
    job.probe_answers = lambda n: Done(1)
    life, call = await job.begin()
    await life.crash()
    begun = now()
    second = await world.start(svc)
    await asyncio.sleep(4)
    await second.crash()
    await world.start(svc)
    await call

    assert job.asked[0] - begun >= 30


async def test_wait_asks_again_and_gives_up_in_the_end(world: World, svc: Service):
    """Wait(seconds) is honoured; in all at most max_wait, then ERRORED(gave_up)."""
    job = Job(world, svc, on_interrupt="probe", settle=0, max_wait="5m")
    job.with_probe()
    job.with_errored()
    job.probe_answers = lambda n: Wait(60)
    life, call = await job.begin()
    await life.crash()
    begun = now()
    await world.start(svc)

    with pytest.raises(GracekitError, match="gave_up"):
        await call
    assert now() - begun == pytest.approx(300, abs=3)
    assert [round(at - begun) for at in job.asked] == [0, 60, 120, 180, 240, 300]
    await world.until(lambda: job.told == ["v: gave_up"])
    assert len(job.attempts) == 1


@pytest.mark.parametrize("trouble", ["raises", "slow", "odd", "exits", "cancelled"])
async def test_a_probe_in_trouble_counts_as_wait_with_back_off(
    world: World, svc: Service, trouble: str
):
    """It is told, asked again after growing pauses, and its next good answer counts."""

    async def bad() -> Any:
        match trouble:
            case "raises":
                raise OSError("backend away")
            case "slow":
                await asyncio.sleep(1000)
            case "exits":
                raise SystemExit(1)
            case "cancelled":
                raise asyncio.CancelledError
        return "what?"

    job = Job(world, svc, on_interrupt="probe", settle=0, probe_timeout=3)
    job.with_probe()
    job.probe_answers = lambda n: bad() if n <= 4 else Done("found")
    life, call = await job.begin()
    await life.crash()
    second = await world.start(svc)

    assert await call == "found"
    gaps = [b - a for a, b in zip(job.asked, job.asked[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 1
    assert len(second.told("hook.failed")) == 4


@pytest.mark.parametrize("kind", ["not implemented", "none"])
async def test_a_probe_that_is_not_written_means_error(world: World, svc: Service, kind: str):
    """NotImplementedError, or no probe at all: as `error`."""
    job = Job(world, svc, on_interrupt="probe", settle=0)
    if kind != "none":
        job.with_probe()

        async def missing() -> Any:
            raise NotImplementedError

        job.probe_answers = lambda n: missing()
    life, call = await job.begin()
    await life.crash()
    await world.start(svc)

    with pytest.raises(TaskInterruptedError, match="interrupted"):
        await call
    assert len(job.attempts) == 1


async def test_a_killer_message_ends(world: World, svc: Service):
    """Crashes since the last progress are capped: ERRORED(attempts)."""
    starts = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def killer(ctx: Context) -> None:
        starts.append(ctx.attempt)
        await asyncio.sleep(100_000)

    client = await world.client(svc)
    life = await world.start(svc)
    await client.prepare(request_id="k").cast(killer)
    for number in range(1, 4):
        await world.until(lambda number=number: len(starts) == number)
        await life.crash()
        life = await world.start(svc)
    await world.until(lambda: world.state("k") == "errored")

    assert starts == [1, 2, 3]
    assert world.task("k")["reason"] == "attempts"


async def test_a_killer_of_the_transports_own_ends_too(world: World, svc: Service):
    """A `requeue` request has no row at first; redelivered it gets one, and its attempts are
    capped.
    """
    starts = []

    @svc.rpc(on_interrupt="requeue", settle=0)
    async def killer(ctx: Context) -> None:
        starts.append(ctx.attempt)
        await asyncio.sleep(100_000)

    client = await world.client(svc)
    life = await world.start(svc)
    await client.prepare(request_id="k").cast(killer)
    for number in range(1, 5):
        await world.until(lambda number=number: len(starts) == number)
        await life.crash()
        life = await world.start(svc)
    await world.until(lambda: world.state("k") == "errored")

    assert starts == [1, 1, 2, 3]


async def test_hand_overs_and_progress_cost_no_attempt(world: World, svc: Service):
    """Ten drains, and crashes with progress between them: the task still ends well."""
    seen: list[int] = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def copy(ctx: Context) -> int:
        async for block in ctx.steps(range(24)):
            seen.append(block)
            await asyncio.sleep(2)
        return ctx.attempt

    client = await world.client(svc)
    life = await world.start(svc)
    call = asyncio.create_task(client.prepare(timeout=5000).call(copy))
    for n in range(10):
        await asyncio.sleep(4.5)
        await end(life, "crash" if n % 2 else "drain")
        life = await world.start(svc)

    assert await call == 11
    assert set(seen) == set(range(24))
    assert len(seen) - 24 <= 20  # the item under way, and what was done in the last second
