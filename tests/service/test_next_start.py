"""What the next start makes of the unfinished: after a crash, and after a drain, by policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    Done,
    Fail,
    GracekitError,
    Retry,
    RpcClient,
    Service,
    Wait,
)
from gracekit.errors import (
    AlreadyRunningError,
    TaskInterruptedError,
    UnknownCommitError,
    UnserialisableError,
)
from gracekit.phase import ServiceState
from gracekit.process import Point
from gracekit.runtime import MIGRATIONS
from gracekit.store.migrate import load_migrations
from gracekit.testing.ports import EPOCH_S
from gracekit.tracker.task import TERMINAL, TaskState
from tests.service.kit import Fault, Life, World

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


class Job:
    """One method, started once and cut: what every test here begins with.

    The first attempt sleeps for ever; later ones return their number.
    """

    def __init__(self, world: World, svc: Service, **options: Any) -> None:
        self.world = world
        self.svc = svc
        self.attempts: list[tuple[int, float]] = []
        self.tokens: list[int | None] = []
        self.asked: list[float] = []
        self.told: list[str] = []
        self.probe_answers: Callable[[int], Any] = lambda n: Retry()
        self._begun = asyncio.Event()

        @svc.rpc(resource="vm", **options)
        async def work(ctx: Context, vm: str) -> int:
            self.attempts.append((ctx.attempt, now()))
            self.tokens.append(ctx.fence)
            self._begun.set()
            if ctx.attempt == 1:
                await asyncio.sleep(100_000)
            return ctx.attempt

        self.work = work

    def with_probe(self) -> None:
        @self.work.probe
        async def probe(ctx: Context, vm: str) -> Any:
            self.asked.append(now())
            answer = self.probe_answers(len(self.asked))
            return await answer if asyncio.iscoroutine(answer) else answer

    def with_errored(self) -> None:
        @self.work.errored
        async def errored(ctx: Context, vm: str, reason: str) -> None:
            self.told.append(f"{vm}: {reason}")

    async def begin(self, **settings: Any) -> tuple[Life, asyncio.Task[int]]:
        """A life in which the first attempt runs, and the call that waits for it."""
        life = await self.world.start(self.svc, **settings)
        client = await self.world.client(self.svc)
        view = client.prepare(request_id="w", timeout=50_000)
        call = asyncio.create_task(view.call(self.work, vm="v"))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        await self._begun.wait()
        return life, call

    def row(self) -> dict[str, Any]:
        return self.world.task("w")


async def end(life: Life, how: str) -> None:
    await (life.crash() if how == "crash" else life.drain())


BOTH = pytest.mark.parametrize("how", ["crash", "drain"])


@pytest.mark.parametrize("policy", ["error", "retry", "probe", "hold"])
async def test_a_run_that_leaves_rows_of_an_earlier_one_hands_over(
    world: World, svc: Service, policy: str
):
    """
    In their settle time they are not touched, and the end is 75: drained means that nothing is
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
    """
    Nobody has taken them over yet, and who proves that their owner is dead could settle them.
    """
    job = Job(world, svc, on_interrupt="retry")
    first, _ = await job.begin()
    sibling = await world.start(svc)
    await first.crash()

    report = await sibling.drain()

    assert job.row()["owner"] == first.runtime.run_id
    assert (report.unfinished, report.exit_code) == (1, 75)


# -- each policy ---------------------------------------------------------------------------


@BOTH
async def test_error_is_never_started_a_second_time(world: World, svc: Service, how: str):
    """
    ERRORED(interrupted) at once, the hook told, the caller answered, the lease free in the end.
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
    """
    Same request id, next attempt; after a crash not before the settle time, after a clean
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
    """
    Done ends it with its result, Retry starts it again, Fail ends it with its words.
    """
    job = Job(world, svc, on_interrupt="probe")
    job.with_probe()
    job.probe_answers = lambda n: answer
    life, call = await job.begin()
    await end(life, how)
    await world.start(svc)
    result = await asyncio.gather(call, return_exceptions=True)

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
    """
    As a handler's: the work is done, and whoever waits for the result is told so.
    """
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
    """
    The old owner's last request may be in flight: 10 s by default, in virtual time to the tick;
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


async def test_a_resource_settles_even_where_its_task_is_judged_at_once(world: World, svc: Service):
    """
    The verdict of `error` need not wait, but the resource does, in a living sibling too.
    """
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
    """
    Crash, a life of 4 s, crash, a life: still not asked before the settle time of the first.
    """
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
    """
    Wait(seconds) is honoured; in all at most max_wait, then ERRORED(gave_up).
    """
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
    """
    It is told, asked again after growing pauses, and its next good answer counts.
    """

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
    """
    NotImplementedError, or no probe at all: as `error`.
    """
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
    """
    Crashes since the last progress are capped: ERRORED(attempts).
    """
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
    """
    A `requeue` request has no row at first; redelivered it gets one, and its attempts are capped.
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
    """
    Ten drains, and crashes with progress between them: the task still ends well.
    """
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


# -- rows of every kind -----------------------------------------------------------------------


async def test_what_was_accepted_and_not_started_is_simply_run(world: World, svc: Service):
    """
    Under every policy, after a crash too: nobody has begun it.
    """
    entered = []

    @svc.rpc(max_running=1)
    async def work(ctx: Context, n: int) -> int:
        entered.append(n)
        if len(entered) == 1:
            await asyncio.sleep(100_000)
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r0").cast(work, n=0)
    call = asyncio.create_task(client.prepare(request_id="r1").call(work, n=1))
    await world.until(lambda: world.state("r1") == "accepted")
    await life.crash()
    await world.start(svc)

    assert await call == 1
    assert entered == [0, 1]
    await world.until(lambda: world.state("r0") == "errored")


async def test_an_accepted_call_whose_caller_has_left_expires(world: World, svc: Service):
    """
    ERRORED(expired), no handler, the hook told; a cast of the same age is run.
    """
    entered, told = [], []

    @svc.rpc(max_running=1)
    async def work(ctx: Context, n: int) -> None:
        entered.append(n)
        if len(entered) == 1:
            await asyncio.sleep(100_000)

    @work.errored
    async def _(ctx: Context, n: int, reason: str) -> None:
        told.append((n, reason))

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="r0").cast(work, n=0)
    call = asyncio.create_task(client.prepare(request_id="r1", timeout=20).call(work, n=1))
    await client.prepare(request_id="r2").cast(work, n=2)
    await asyncio.sleep(1)
    await life.crash()
    with pytest.raises(CallTimeoutError):
        await call
    await asyncio.sleep(20)
    await world.start(svc)
    await world.until(lambda: world.state("r2") == "succeeded")

    assert entered == [0, 2]
    assert (world.task("r1")["state"], world.task("r1")["reason"]) == ("errored", "expired")
    await world.until(lambda: len(told) == 2)
    assert (1, "expired") in told


async def test_a_method_that_is_gone_ends_its_tasks(world: World):
    """
    Accepted or started: ERRORED(method_gone), and the caller hears.
    """
    old, new = Service("compute"), Service("compute")
    entered = []

    @old.rpc(max_running=1, on_interrupt="retry")
    async def removed(ctx: Context) -> None:
        entered.append(1)
        await asyncio.sleep(100_000)

    @new.rpc
    async def other(ctx: Context) -> None: ...

    life = await world.start(old)
    client = await world.client(old)
    calls = [
        asyncio.create_task(client.prepare(request_id=f"r{n}").call(removed)) for n in range(2)
    ]
    await world.until(lambda: world.state("r1") == "accepted")
    await life.crash()
    await world.start(new)
    ends = await asyncio.gather(*calls, return_exceptions=True)

    assert all("method_gone" in str(one) for one in ends)
    assert entered == [1]
    assert world.rows("SELECT DISTINCT reason FROM task") == [{"reason": "method_gone"}]


async def test_replies_that_a_dead_run_owed_are_sent_once(world: World, svc: Service):
    """
    The outcome was committed, the answer was not sent: the next start sends it.
    """

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 42

    life = await world.start(svc)
    client = await world.client(svc)
    life.crash_at(Point.REPLY, "before")
    call = asyncio.create_task(client.prepare(request_id="w").call(work))
    await life.over.wait()
    assert world.state("w") == "succeeded"
    await world.start(svc)

    assert await call == 42
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    assert client.ignored_replies == 0


async def test_replies_that_nobody_waits_for_any_more_are_given_up(world: World, svc: Service):
    """
    Older than the call's timeout: counted and listed, not sent.
    """

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 42

    life = await world.start(svc)
    client = await world.client(svc)
    life.crash_at(Point.REPLY, "before")
    with pytest.raises(CallTimeoutError):
        await client.prepare(request_id="w", timeout=30).call(work)
    await asyncio.sleep(5)
    await world.start(svc)
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])

    assert world.tally()["reply_given_up"] == 1


async def test_the_errored_hook_is_called_at_least_once(world: World, svc: Service):
    """
    A crash between the verdict and the hook, or in the hook: the next start calls it.
    """
    job = Job(world, svc)
    job.with_errored()
    life, _ = await job.begin()
    await life.crash()
    second = world.life(svc)
    second.crash_at(Point.ERRORED_DONE, "before")
    await second.start()
    await second.over.wait()
    assert job.told == ["v: interrupted"]
    assert job.row()["args"] is not None
    await world.start(svc)
    await world.until(lambda: job.row()["errored_due"] == 0)

    assert job.told == ["v: interrupted"] * 2


async def test_an_errored_hook_that_fails_is_told_and_not_repeated(world: World, svc: Service):
    """
    It was called; what it did is its own affair; the service goes on.
    """
    job = Job(world, svc)

    @job.work.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        job.told.append(vm)
        raise SystemExit(1)

    life, _ = await job.begin()
    await life.crash()
    second = await world.start(svc)
    await second.hears("hook.failed")
    await asyncio.sleep(120)

    assert job.told == ["v"]
    assert job.row()["errored_due"] == 0
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=99).call(job.work, vm="x"))
    await world.until(lambda: len(job.attempts) == 2)
    call.cancel()


@pytest.mark.parametrize("at", [Point.CLAIM, Point.SETTLE])
@pytest.mark.parametrize("phase", ["before", "after"])
async def test_a_crash_of_recovery_itself_changes_no_verdict(
    world: World, svc: Service, at: Point, phase: Any
):
    """
    A task that had stopped at a safe point goes on from there, whoever died since.
    """
    seen: list[int] = []

    @svc.rpc
    async def copy(ctx: Context) -> int:
        async for block in ctx.steps(range(6)):
            seen.append(block)
            await asyncio.sleep(1)
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=500).call(copy))
    await asyncio.sleep(2.5)
    await life.drain()
    second = world.life(svc)
    second.crash_at(at, phase)
    await second.start()
    await second.over.wait()
    await world.start(svc)

    assert await call == 2
    assert seen == list(range(6))


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
@pytest.mark.parametrize("point", [Point.CLAIM, Point.SETTLE, Point.TAKE_LEASE])
@pytest.mark.parametrize("policy", ["error", "retry", "probe"])
async def test_recovery_survives_a_store_that_hesitates(
    world: World, svc: Service, policy: str, point: Point, fault: Fault
):
    """
    One commit of recovery fails, in any way: the row is settled all the same, without a restart.
    """
    job = Job(world, svc, on_interrupt=policy, settle=0)
    job.with_probe()
    life, call = await job.begin()
    await life.crash()
    second = world.life(svc)
    second.plan(point, fault)
    await second.start()
    await asyncio.gather(call, return_exceptions=True)

    assert job.row()["state"] == ("errored" if policy == "error" else "succeeded")
    await asyncio.sleep(100)
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]
    assert world.rows("SELECT * FROM reply") == []
    report = await second.drain()
    assert report.exit_code == 0


async def test_a_row_that_could_not_be_put_down_is_taken_up_at_once(world: World, svc: Service):
    """
    Neither its verdict nor its giving up was committed: it is ours, and nobody works on it;
    until it is found, its lease keeps everyone from the resource.
    """
    world.expects_faults = True
    job = Job(world, svc, on_interrupt="probe", settle=0)
    job.with_probe()
    life, call = await job.begin()
    await life.crash()
    second = world.life(svc)
    second.plan(Point.SETTLE, Fault.REFUSED)
    second.plan(Point.NOT_STARTED, Fault.REFUSED)
    begun = now()
    await second.start()
    client = await world.client(svc)
    await client.cast(job.work, vm="v")

    assert await call == 2
    await world.until(lambda: len(job.attempts) == 3)
    assert now() - begun < 5
    assert second.faults.left() == []
    assert len(job.asked) == 2


async def test_a_task_whose_record_is_damaged_ends(world: World, svc: Service):
    """
    What is on record of its caller cannot be read: that fails its attempt, as a handler would,
    and does not start it again and again.
    """
    starts = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)
        await asyncio.sleep(100_000)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await world.until(lambda: starts == [1])
    await life.crash()
    world.disk.execute("UPDATE task SET context = '[1]'")
    await world.start(svc)
    await world.until(lambda: world.state("w") == "failed", within_s=100)

    assert starts == [1]
    assert world.task("w")["attempts"] == 2


PERIOD_S = 30.0
"""`reconcile_every_s`, after which recovery looks for rows that nobody works on."""


def lose(world: World, life: Life, request_id: str) -> None:
    """Leave an ended request as a commit of unknown end would: open, and known to nobody."""
    world.disk.execute(
        "UPDATE task SET state = 'accepted', finished_at = NULL, args = ?, owner = ? "
        "WHERE request_id = ?",
        ('{"seconds":0}', life.runtime.run_id, request_id),
    )


def asked_again(svc: Service, *waits_s: float) -> Any:
    """A method whose probe answers Wait with these seconds, and then Done: each answer rings."""
    waits = iter(waits_s)

    @svc.rpc(on_interrupt="probe", settle=0)
    async def work(ctx: Context, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @work.probe
    async def _(ctx: Context, seconds: float) -> Done | Wait:
        wait_s = next(waits, None)
        return Done(None) if wait_s is None else Wait(wait_s)

    return work


async def with_a_left_over(world: World, svc: Service, work: Any) -> Life:
    """A run that has `lost` on record, ended, and recovers a row that is asked about."""
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="lost").call(work, seconds=0)
    await client.cast(work, seconds=100_000)
    await life.hears("task.started", 2)
    await life.crash()
    return await world.start(svc)


async def test_a_lost_row_is_found_in_time_however_often_recovery_is_rung(
    world: World, svc: Service
):
    """
    Each row that was looked at rings recovery, which then looks at a part only; a period passes
    all the same.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, *[1.0] * 200))
    await asyncio.sleep(PERIOD_S + 10)
    lose(world, life, "lost")
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun <= PERIOD_S


async def rung_late(world: World, svc: Service, *, at_s: float) -> Life:
    """
    A run that has lost a row half a period ago, and is rung *at_s* after its start and then no
    more: by the row that it asks about.
    """
    life = await with_a_left_over(world, svc, asked_again(svc, at_s))
    await asyncio.sleep(1.5 * PERIOD_S - 1)
    lose(world, life, "lost")
    return life


async def test_a_lost_row_is_found_in_time_after_a_last_ring(world: World, svc: Service):
    """
    Rung just before it would have looked, recovery does not wait for another whole period.
    """
    life = await rung_late(world, svc, at_s=2 * PERIOD_S - 0.5)
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun <= PERIOD_S


async def test_a_pass_that_failed_does_not_count_as_a_look(world: World, svc: Service):
    """
    It had begun to look for lost rows, and the next one, whoever rings it, does so again.
    """
    life = await rung_late(world, svc, at_s=2 * PERIOD_S + 1)
    life.plan(Point.ADOPT, Fault.REFUSED)
    await life.hears("store.error")
    begun = now()
    await life.hears("task.adopted")

    assert now() - begun < 2


async def test_without_reconciliation_nothing_started_is_judged(world: World, svc: Service):
    """
    startup_reconciliation_enabled=false: what was started stays, what was not is run, new work
    is taken; and the service does not spin.
    """
    job = Job(world, svc, on_interrupt="retry", settle=0)
    life, call = await job.begin()
    await life.crash()
    second = await world.start(svc, startup_reconciliation_enabled=False)
    before = world.rows("SELECT count(*) AS n FROM incident")
    await asyncio.sleep(600)

    row = job.row()
    assert (row["state"], row["owner"], len(job.attempts)) == ("handed_over", None, 1)
    assert world.rows("SELECT count(*) AS n FROM incident") == before
    await second.drain()
    await world.start(svc)
    assert await call == 2


async def test_rows_of_a_living_sibling_are_never_touched(world: World, svc: Service):
    """
    A start beside a living run leaves its tasks alone, for good.
    """
    job = Job(world, svc, on_interrupt="retry", settle=0)
    life, call = await job.begin(instance="a")
    second = await world.start(svc, instance="b")
    await asyncio.sleep(1800)
    assert (job.row()["state"], job.row()["owner"]) == ("running", life.runtime.run_id)

    await life.crash()
    assert await call == 2
    assert job.row()["owner"] == second.runtime.run_id


async def test_a_run_that_has_left_is_taken_over_while_its_process_lives(
    world: World, svc: Service
):
    """
    By its stop record nothing of it can act any more: a reply that no broker took need not wait
    for the end of the program around it.
    """

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 7

    life = await world.start(svc, instance="a")
    life.plan("publish", Fault.REFUSED, times=100)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="w", timeout=600).call(work))
    await life.hears("task.finished")
    sibling = await world.start(svc, instance="b")
    life.ask_to_stop()
    await life.hears("drain.finished")

    assert await call == 7
    assert life.process.lives
    assert world.task("w")["owner"] == sibling.runtime.run_id


async def test_of_two_siblings_exactly_one_takes_over(world: World, svc: Service):
    """
    Both see the dead run; one adopts it, each task is settled once.
    """
    attempts: list[str] = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context, n: int) -> None:
        attempts.append(ctx.request_id)
        if ctx.attempt == 1:
            await asyncio.sleep(100_000)

    life = await world.start(svc, instance="a")
    client = await world.client(svc)
    for n in range(20):
        await client.prepare(request_id=f"r{n:02}").cast(work, n=n)
    await world.until(lambda: len(attempts) == 20)
    for name in ("b", "c"):
        await world.start(svc, instance=name)
    await life.crash()
    await world.until(lambda: set(world.states().values()) == {"succeeded"})

    assert sorted(attempts[20:]) == sorted(set(attempts[:20]))
    assert world.tally()["adopted_runs"] == 1


async def test_a_second_run_of_an_instance_is_refused(world: World, svc: Service):
    """
    One process, one instance, one run.
    """
    life = await world.start(svc, instance="a")
    second = world.life(svc, instance="a")
    second.process.identity = life.process.identity

    with pytest.raises(AlreadyRunningError, match="instance 'a' of service 'compute' is running"):
        await second.runtime.open()
    world.living.add(life.process.identity)


# -- directed, fanout, holds ---------------------------------------------------------------------


async def test_a_directed_task_waits_for_its_host_unless_any_may_run_it(world: World, svc: Service):
    """
    Another host leaves it alone; `anywhere=True` lets it go.
    """
    ran: list[tuple[str, int]] = []

    def declare(name: str, **options: Any) -> Any:
        async def handler(ctx: Context) -> None:
            ran.append((name, ctx.attempt))
            if ctx.attempt == 1:
                await asyncio.sleep(100_000)

        handler.__name__ = name
        return svc.rpc(on_interrupt="retry", settle=0, **options)(handler)

    tied, free = declare("tied"), declare("free", anywhere=True)
    life = await world.start(svc, host="node-1")
    client = (await world.client(svc)).prepare(host="node-1")
    await client.prepare(request_id="tied").cast(tied)
    await client.prepare(request_id="free").cast(free)
    await world.until(lambda: len(ran) == 2)
    await life.crash()
    await world.start(svc, host="node-2")
    await asyncio.sleep(3600)
    assert world.states() == {"tied": "handed_over", "free": "succeeded"}

    await world.start(svc, host="node-1")
    await world.until(lambda: world.state("tied") == "succeeded")


async def test_a_host_that_does_not_come_back_is_given_up(world: World, svc: Service):
    """
    After host_gone_after any live run of the store marks its rows ERRORED(gave_up).
    """
    ran, told = [], []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def tied(ctx: Context) -> None:
        ran.append(1)
        await asyncio.sleep(100_000)

    @tied.errored
    async def _(ctx: Context, reason: str) -> None:
        told.append(reason)

    life = await world.start(svc, host="node-1")
    client = await world.client(svc)
    await client.prepare(host="node-1", request_id="t").cast(tied)
    await world.until(lambda: ran == [1])
    await life.crash()
    await world.start(svc, host="node-2", host_gone_after_s=3600.0)
    await asyncio.sleep(3500)
    assert world.state("t") == "handed_over"
    await world.until(lambda: world.state("t") == "errored", within_s=300)

    assert world.task("t")["reason"] == "gave_up"
    await world.until(lambda: told == ["gave_up"])


async def test_a_fanout_of_an_instance_that_is_gone_is_cancelled(world: World, svc: Service):
    """
    Accepted and never started, for one instance alone: CANCELLED after 60 s; other instances
    do not run it.
    """
    entered = []

    @svc.rpc(max_running=1)
    async def refresh(ctx: Context, n: int) -> None:
        entered.append(n)
        if n == 0:
            await asyncio.sleep(100_000)

    life = await world.start(svc, host="a", instance="a")
    client = await world.client(svc)
    for n in range(2):
        await client.prepare(request_id=f"f{n}").fanout(refresh, n=n)
    await world.until(lambda: world.state("f1") == "accepted")
    await life.crash()
    await world.start(svc, host="b", instance="b")
    begun = now()
    await world.until(lambda: world.state("f1") == "cancelled", within_s=200)

    assert 55 <= now() - begun <= 130
    assert entered == [0]
    assert world.state("f0") == "errored"


async def left_over_hold(
    world: World, svc: Service, answer: Any, *, probe: bool = True
) -> tuple[list[float], list[str]]:
    """A hold of 10 minutes whose run has died, and a next start; when asked, and what was told."""
    asked: list[float] = []
    told: list[str] = []

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="10m")

    if probe:

        @prepare_host.probe
        async def _(ctx: Context, vm: str) -> Any:
            asked.append(now())
            return answer

    @prepare_host.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        told.append(f"{vm}: {reason}")

    life = await world.start(svc)
    client: RpcClient = await world.client(svc)
    await client.call(prepare_host, vm="v")
    await life.crash()
    await world.start(svc)
    return asked, told


@pytest.mark.parametrize(
    ("answer", "reason", "told"),
    [
        (Done(), "done", []),
        (Fail("no"), "failed", ["v: hold"]),
        (Retry(), "failed", ["v: hold"]),
    ],
)
async def test_a_left_over_hold_is_settled_by_the_probe_of_its_method(
    world: World, svc: Service, answer: Any, reason: str, told: list[str]
):
    """
    Done ends it; Fail and Retry end it and tell the hook.
    """
    asked, heard = await left_over_hold(world, svc, answer)
    await world.until(lambda: world.rows("SELECT end_reason FROM hold")[0]["end_reason"] == reason)
    await asyncio.sleep(60)

    assert heard == told
    (line,) = world.lives[-1].told("hold.ended")
    assert line == {"hold": "migration", "key": "v", "method": "prepare_host", "reason": reason}
    assert len(asked) == 1
    assert world.rows("SELECT args, errored_due FROM hold") == [{"args": None, "errored_due": 0}]


async def test_a_left_over_hold_that_waits_lapses_in_its_time(world: World, svc: Service):
    """
    Wait keeps it until at_most.
    """
    begun = now()
    asked, heard = await left_over_hold(world, svc, Wait(45))
    await world.until(
        lambda: world.rows("SELECT end_reason FROM hold")[0]["end_reason"] == "lapsed",
        within_s=700,
    )

    assert now() - begun == pytest.approx(600, abs=31)
    assert len(asked) > 5
    assert heard == []


async def test_a_left_over_hold_that_waits_keeps_the_next_run(world: World, svc: Service):
    """
    Its operation goes on: a drain waits for a later request that ends it, as for a hold of its own.
    """

    @svc.ops
    async def arrived(ctx: Context, vm: str) -> bool:
        return await ctx.end_hold("migration", vm)

    await left_over_hold(world, svc, Wait(45))
    life = world.lives[-1]
    await world.until(lambda: world.rows("SELECT owner FROM hold")[0]["owner"] is not None)
    client: RpcClient = await world.client(svc)

    life.ask_to_stop()
    await asyncio.sleep(12)
    assert life.runtime.phase.state is ServiceState.DRAINING
    assert await client.call(arrived, vm="v") is True
    report = await life.wait_end()

    assert report.waited_s == pytest.approx(12, abs=0.6)
    assert (report.exit_code, report.open_holds) == (0, 0)


async def test_a_left_over_hold_is_asked_about_at_each_start(world: World, svc: Service):
    """
    A long Wait was the last run's; the next must know whether the hold keeps it too.
    """
    asked, _ = await left_over_hold(world, svc, Wait(500))
    await world.until(lambda: len(asked) == 1)
    await world.until(lambda: world.rows("SELECT owner FROM hold")[0]["owner"] is not None)
    await world.lives[-1].crash()
    await world.start(svc)
    await world.until(lambda: len(asked) == 2, within_s=40)

    await world.until(
        lambda: world.rows("SELECT end_reason FROM hold")[0]["end_reason"] == "lapsed",
        within_s=700,
    )
    assert len(asked) <= 3


async def test_a_left_over_hold_without_probe_is_ended_and_told(world: World, svc: Service):
    """
    Nobody can be asked.
    """
    asked, heard = await left_over_hold(world, svc, None, probe=False)
    await world.until(lambda: heard == ["v: hold"])

    assert asked == []
    assert world.rows("SELECT end_reason FROM hold") == [{"end_reason": "no_probe"}]
    assert [line["reason"] for line in world.lives[-1].told("hold.ended")] == ["no_probe"]


async def test_the_hook_of_a_hold_is_called_by_one_of_two_siblings(world: World, svc: Service):
    """
    A slow probe of another hold comes after it: a sibling that starts meanwhile finds it done.
    """
    told = []

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="10m")

    @prepare_host.probe
    async def _(ctx: Context, vm: str) -> Any:
        if vm == "failed":
            return Fail("no")
        await asyncio.sleep(20)
        return Wait(1)

    @prepare_host.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        told.append(vm)

    life = await world.start(svc)
    client: RpcClient = await world.client(svc)
    for vm in ("slow", "failed"):
        await client.call(prepare_host, vm=vm)
    await life.crash()
    second = world.life(svc)
    second.crash_at(Point.ERRORED_DONE, "before")
    await second.start()
    await second.over.wait()
    assert told == ["failed"]
    await asyncio.sleep(2)  # the slow one is due again
    for name in ("a", "b"):
        await world.start(svc, instance=name)
        await asyncio.sleep(5)
    await asyncio.sleep(60)

    assert told == ["failed", "failed"]


# -- what is on record -----------------------------------------------------------------------------


async def test_how_each_run_ended_is_told_apart_once(world: World, svc: Service):
    """
    Drained, handed over, killed, and a stop begun but not ended: by evidence, not by a clock.
    """

    @svc.rpc
    async def work(ctx: Context, seconds: float) -> None:
        await asyncio.sleep(seconds)

    client = await world.client(svc)
    life = await world.start(svc)
    await life.drain()
    life = await world.start(svc)
    await client.cast(work, seconds=9999)
    await asyncio.sleep(1)
    await life.drain()
    life = await world.start(svc)
    await life.crash()
    life = await world.start(svc)
    await client.cast(work, seconds=9999)
    await asyncio.sleep(1)
    life.ask_to_stop()
    await asyncio.sleep(5)
    await life.crash()
    life = await world.start(svc)

    verdicts = [row["verdict"] for row in world.rows("SELECT verdict FROM run ORDER BY started_at")]
    assert verdicts == ["drained", "handed_over", "killed", "stop_timeout", None]
    assert world.tally()["adopted_runs"] == 4


async def test_wall_time_that_steps_back_costs_a_delay_at_most(world: World, svc: Service):
    """
    Liveness and ownership ask no clock: an hour back, and the task is still settled in the end.
    """
    job = Job(world, svc, on_interrupt="retry", settle=5)
    life, call = await job.begin()
    await life.crash()
    world.clock.shift_s = -3600
    await world.start(svc)
    assert await call == 2
    assert world.clock.wall() > EPOCH_S - 3600


async def test_a_clock_set_back_while_a_task_settles_lengthens_nothing(world: World, svc: Service):
    """
    What is left of a settle time, of the task and of its lease, is at most its own length.
    """
    job = Job(world, svc, on_interrupt="retry", settle=20)
    life, call = await job.begin()
    await life.crash()
    await world.start(svc)
    await asyncio.sleep(2)
    began_at = now()
    world.clock.shift_s = -3600

    assert await call == 2
    assert 18 <= now() - began_at < 60


@pytest.mark.parametrize("shift_s", [-3600, 3600])
async def test_a_wait_of_a_probe_is_counted_by_time_that_passes(
    world: World, svc: Service, shift_s: float
):
    """
    A wall clock that is set meanwhile neither ends the wait nor prolongs it.
    """
    job = Job(world, svc, on_interrupt="probe", settle=0, max_wait="5m")
    job.with_probe()
    job.probe_answers = lambda n: Wait(20) if n < 3 else Done("it was done")
    life, call = await job.begin()
    await life.crash()
    await world.start(svc)
    await world.until(lambda: len(job.asked) == 1)
    await asyncio.sleep(1)
    began_at = now()
    world.clock.shift_s = shift_s

    assert await call == "it was done"
    assert now() - began_at < 80


async def test_a_clock_set_meanwhile_changes_no_wait_for_a_hold(world: World, svc: Service):
    """
    A hold keeps its host as long as it was to, whichever way the wall clock is set.
    """

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most=100)

    life = await world.start(svc, drain_timeout_s=1000.0)
    await (await world.client(svc)).call(prepare_host, vm="v")
    for shift_s in (-3600, 3600):
        world.clock.shift_s = shift_s
        await asyncio.sleep(10)
    report = await life.drain()

    assert report.waited_s == pytest.approx(80, abs=3)
    assert report.open_holds == 0


async def test_retention_removes_only_after_this_run_has_served_long_enough(
    world: World, svc: Service
):
    """
    A restart after a long pause must not forget ids whose duplicates are still in the queue.
    """

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 1

    client = await world.client(svc)
    life = await world.start(svc, retention_s=100.0)
    await client.prepare(request_id="old").call(work)
    await life.drain()
    await asyncio.sleep(1000)
    await world.start(svc, retention_s=100.0)
    await asyncio.sleep(500)
    assert world.states() == {"old": "succeeded"}
    await world.until(lambda: world.states() == {}, within_s=200)

    assert world.tally() == {"accepted": 1, "removed": 1, "adopted_runs": 1}


async def test_retention_counts_the_time_of_runs_that_were_short(world: World, svc: Service):
    """
    A service that restarts every five minutes removes what is old, in its third life at last.
    """

    @svc.rpc
    async def work(ctx: Context) -> int:
        return 1

    client = await world.client(svc)
    life = await world.start(svc, retention_s=100.0)
    await client.prepare(request_id="old").call(work)
    await life.drain()
    await asyncio.sleep(1000)
    for _ in range(2):
        life = await world.start(svc, retention_s=100.0)
        await asyncio.sleep(290)
        assert world.states() == {"old": "succeeded"}
        await life.drain()
        await asyncio.sleep(1000)
    await world.start(svc, retention_s=100.0)
    await world.until(lambda: world.states() == {}, within_s=200)


async def test_a_run_that_left_a_record_of_its_failure_has_failed(world: World, svc: Service):
    """
    It began a stop and ended it, only not in order: that is no stop that ran out of time.
    """

    @svc.on_start
    async def broken() -> None:
        if len(world.lives) == 1:
            raise RuntimeError("no backend")

    with pytest.raises(Exception, match="no backend"):
        await world.start(svc)
    await world.start(svc)

    (first, _) = world.rows("SELECT exit_code, verdict FROM run ORDER BY generation")
    assert first == {"exit_code": 70, "verdict": "failed"}


async def test_what_a_lost_take_may_have_brought_is_not_given_back_from_under_the_next(
    world: World, svc: Service
):
    """
    The same task takes again and has it: what was in doubt before is in doubt no more.
    """
    life = await world.start(svc)
    leases = life.runtime.reconciler._leases
    life.plan(Point.TAKE_LEASE, Fault.LOST_BEFORE)
    with pytest.raises(UnknownCommitError):
        await world.run_as(life, leases.take(("vm", "v"), "task"))
    guard = await world.run_as(life, leases.take(("vm", "v"), "task"))
    await world.run_as(life, leases.give_back_owed())

    assert guard is not None
    assert world.rows("SELECT owner FROM lease") == [{"owner": life.runtime.run_id}]


# -- an older store ------------------------------------------------------------------------------

OLD_RUN = "a" * 32
_RUN_OF_OLD = f"""
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, pid,
    start_ticks, lock_path, phase, topic, ops_topic, transport, started_at, beat_at)
VALUES ('{OLD_RUN}', 'compute', 'node-1', 'node-1-0', 1, '0.1', 'boot', 1, 7, 7, '', 'serving',
    'compute', 'compute.ops', 'memory://', ?1, ?1)"""
_TASK_OF_OLD = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version, args,
    context, content_hash, on_interrupt, settle_s, resource_kind, resource_id, state, owner, cut,
    attempts, token, accepted_at, finished_at)
VALUES (?1, '', 'compute', 'requests', 'compute', 'shared', '', 'work', '1.0', '{"vm":"v"}', '{}',
    '', 'retry', 0, 'vm', 'v', ?1, ?2, ?3, ?4, ?5, ?6, ?7)"""
_REST_OF_OLD = f"""
INSERT INTO tally VALUES ('accepted', 8), ('rejected', 1), ('holds', 1);
INSERT INTO lease (kind, id, lver, owner, request_id, acquired_at)
    VALUES ('vm', 'v', 7, '{OLD_RUN}', 'running', 0);
INSERT INTO hold (service, name, key, owner, target, method, version, args, opened_at, lapses_at)
    VALUES ('compute', 'migration', 'v', '{OLD_RUN}', 'node-1', 'work', '1.0', '{{"vm":"v"}}', 0,
        9e9);
INSERT INTO incident (at, run_id, what) VALUES (0, '{OLD_RUN}', 'rejected');"""


def write_old_store(world: World) -> None:
    """What a run of the first schema left when it was killed: a task in each state."""
    first, *_ = load_migrations(MIGRATIONS)
    world.disk.execute(first)
    world.disk.execute("PRAGMA user_version = 1")
    wall = world.clock.wall()
    world.disk.execute(_RUN_OF_OLD, (wall,))
    for state in TaskState:
        begun = state not in {TaskState.PENDING, TaskState.ACCEPTED, TaskState.REJECTED}
        world.disk.execute(
            _TASK_OF_OLD,
            (
                state.value,
                OLD_RUN if state in {TaskState.ACCEPTED, TaskState.RUNNING} else None,
                "cancelled" if state is TaskState.HANDED_OVER else None,
                int(begun),
                7 if begun else None,
                wall,
                wall if state in TERMINAL else None,
            ),
        )
    world.disk.execute(_REST_OF_OLD)


@pytest.mark.parametrize("vm", ['"' + "v" * 1000 + '"', '{"id":1}'], ids=["long", "an object"])
async def test_a_row_runs_whose_resource_would_be_refused_today(
    world: World, svc: Service, vm: str
):
    """
    It was accepted by a version that took any value, and keeps the resource that it named then.
    """
    ran: list[str] = []

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: object) -> None:
        ran.append(ctx.request_id)

    write_old_store(world)
    world.disk.execute("UPDATE task SET args = json_object('vm', json(?))", (vm,))
    await world.start(svc)
    await world.until(lambda: world.state("accepted") == "succeeded")

    assert "accepted" in ran


async def test_a_store_of_the_first_schema_is_taken_over_whole(world: World, svc: Service):
    """
    An upgrade meets unfinished work: nothing on record is lost, and what was open is found by
    the new indexes as it was by the old.
    """
    ran: list[tuple[str, int, int | None]] = []

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: str) -> None:
        ran.append((ctx.request_id, ctx.attempt, ctx.fence))

    @work.probe
    async def _(ctx: Context, vm: str) -> Done:
        return Done()

    write_old_store(world)
    columns = ", ".join(row["name"] for row in world.rows("PRAGMA table_info(task)"))
    ended = "SELECT {} FROM task WHERE request_id IN ({}) ORDER BY id".format(
        columns, ", ".join(f"'{state.value}'" for state in (TERMINAL | {TaskState.PENDING}))
    )
    before = world.rows(ended), world.rows("SELECT * FROM incident")
    await world.start(svc)
    opened = {"accepted", "running", "handed_over"}
    await world.until(lambda: {world.state(one) for one in opened} == {"succeeded"})
    await world.until(lambda: world.rows("SELECT end_reason FROM hold") == [{"end_reason": "done"}])

    schema = "SELECT name, sql FROM sqlite_schema ORDER BY name"
    fresh = World()
    engine = fresh.life(svc).engine
    await engine.start()
    assert world.rows("PRAGMA user_version") == fresh.rows("PRAGMA user_version")
    assert world.rows("PRAGMA user_version") != [{"user_version": 1}]
    assert world.rows(schema) == fresh.rows(schema)
    await engine.stop()
    assert world.rows(ended) == before[0]
    assert world.rows("SELECT * FROM incident WHERE what = 'rejected'") == before[1]
    assert {name: attempt for name, attempt, _ in ran} == {
        "accepted": 1,
        "running": 2,
        "handed_over": 2,
    }
    assert sorted(fence or 0 for _, _, fence in ran) == [8, 9, 10]
    assert world.rows("SELECT verdict FROM run WHERE run_id = ?", OLD_RUN) == [
        {"verdict": "killed"}
    ]
    assert world.tally() == {"accepted": 8, "rejected": 1, "holds": 1, "adopted_runs": 1}
