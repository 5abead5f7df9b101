"""An operator's orders, in runs that live: cancel, fail and retry, and what they meet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, Done, GracekitError, Retry, Service
from gracekit.errors import ConflictError, TaskCancelledError, TaskInterruptedError
from gracekit.journal.order_rows import add_order, incident_of, refusal_of, state_of, target_named
from gracekit.journal.outbox import News
from gracekit.process import Point
from gracekit.request.outcomes import ordered
from gracekit.store.batch import Batch
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.tracker.task import _NEXT, ENDS, Lane, Order, Verb
from tests.played import PlayedProcess
from tests.service.kit import Doors, Fault, Life, World

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


async def order(world: World, life: Life, verb: str, task_id: str, **more: Any) -> Any:
    words = {"by": "ann@desk", "reason": "wrong host"} | more
    return await world.verb(life, verb, task_id=task_id, **words)


async def engine_of(world: World) -> MemoryEngine:
    """The disk, as another process opens it."""
    migrations, process = load_migrations(MIGRATIONS), PlayedProcess(set(), 1)
    engine = MemoryEngine(migrations, process=process, connection=world.disk)
    await engine.start()
    return engine


async def order_on_disk(world: World, verb: Verb, request_id: str, *, dead: bool = False) -> None:
    """What the command line does with a row that no living run owns."""
    engine = await engine_of(world)
    case = await target_named(engine, request_id, "")
    assert case is not None
    word = Order(verb=verb, by="ann@desk", reason="wrong host")
    state = case.state if not dead else next(iter(ENDS[Verb.RETRY]))
    outcome = None if verb is Verb.RETRY else ordered(str(case), word, state)
    at = world.clock.wall()
    mark = incident_of(word, case.request_id, case.method, state_of(case), at=at, run="operator")
    batch = Batch(Point.SETTLE)
    add_order(batch, case, outcome, mark, News.of(world.clock, sender=None), dead=dead)
    await engine.commit(batch)


# -- at work -----------------------------------------------------------------------------------


async def test_a_cancelled_handler_keeps_its_row_until_it_has_returned(world: World, svc: Service):
    """The caller hears at once; row, place and lease stay until the clean-up is over; then
    CANCELLED.
    """
    entered = asyncio.Event()

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def resize(ctx: Context, vm: str) -> None:
        async with ctx.lease("volume", "v1"):
            entered.set()
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(5)

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="r").call(resize, vm="a"))
    await entered.wait()

    answer = await order(world, life, "cancel", "r")
    with pytest.raises(TaskCancelledError, match="was cancelled by an operator: wrong host"):
        await call
    assert (answer["asked"], world.state("r"), now() < 5) == (True, "running", True)
    await life.hears("task.finished")

    row = world.task("r")
    assert (row["state"], row["reason"], row["detail"]) == (
        "cancelled", "operator", "ann@desk: wrong host",
    )  # fmt: skip
    assert now() >= 5
    assert {lease["owner"] for lease in world.rows("SELECT * FROM lease")} == {None}
    (note,) = world.incidents("operator_cancel")
    assert (note["request_id"], note["detail"]) == ("r", "ann@desk: wrong host (it was running)")
    assert world.tally()["operator_cancel"] == 1
    assert life.told("task.ordered")[0]["by"] == "ann@desk"
    await world.settle()
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])


async def test_a_thread_is_asked_and_ends_by_itself(world: World, svc: Service):
    """Nobody can stop a thread: it looks at `ctx.cancelled`, and its row waits for it."""

    @svc.rpc
    def grind(ctx: Context) -> None:
        while not ctx.cancelled:
            pass
        raise asyncio.CancelledError

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="t").cast(grind)
    await life.hears("task.started")
    await order(world, life, "cancel", "t")
    await life.hears("task.finished")

    assert world.state("t") == "cancelled"


async def test_what_a_handler_returns_all_the_same_counts(world: World, svc: Service):
    """A cancel that meets the finish changes nothing: the work was done, and the row says so."""
    entered = asyncio.Event()

    @svc.rpc
    async def stubborn(ctx: Context) -> str:
        entered.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            return "done after all"
        return "never"

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="s").cast(stubborn)
    await entered.wait()
    await order(world, life, "cancel", "s")
    await life.hears("task.finished")

    assert (world.state("s"), world.task("s")["result"]) == ("succeeded", '"done after all"')


async def test_a_second_order_does_not_cut_the_clean_up(world: World, svc: Service):
    """Asked twice is asked once; another verb is refused. What changes nothing is not on record."""
    cuts = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                cuts.append(now())

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await asyncio.sleep(1)
    await order(world, life, "cancel", "w")
    again = await order(world, life, "cancel", "w", by="bob")
    with pytest.raises(GracekitError, match="has an order already, cancel by ann@desk"):
        await order(world, life, "fail", "w")
    await life.hears("task.finished")

    assert (again["asked"], cuts) == (True, [])
    assert world.task("w")["detail"] == "ann@desk: wrong host"
    assert len(world.incidents("operator_cancel")) == 1
    assert world.incidents("operator_fail") == []


async def test_of_two_orders_of_one_moment_the_refused_one_is_not_on_record(
    world: World, svc: Service
):
    """Both find the task at work; the second waits until the first is on record, and is refused."""

    @svc.rpc
    async def work(ctx: Context) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(5)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await life.hears("task.started")
    answers = await asyncio.gather(
        *(order(world, life, verb, "w") for verb in ("fail", "cancel")), return_exceptions=True
    )
    await life.hears("task.finished")

    assert [isinstance(answer, GracekitError) for answer in answers] == [False, True]
    assert len(world.incidents("operator_fail")) == 1
    assert world.incidents("operator_cancel") == []
    assert len(life.told("task.ordered")) == 1


async def test_fail_marks_a_running_task_failed_and_a_waiting_one_errored(
    world: World, svc: Service
):
    """FAILED is for a task that was at work, ERRORED for one that was not; its hook is called."""
    doors, told = Doors(), []

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(ctx.request_id)

    @work.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        told.append((ctx.request_id, reason))

    life = await world.start(svc)
    client = await world.client(svc)
    first = asyncio.create_task(client.prepare(request_id="a").call(work, vm="v"))
    await doors.wait(1)
    second = asyncio.create_task(client.prepare(request_id="b").call(work, vm="v"))
    await world.until(lambda: world.state("b") == "accepted")
    begun = now()
    await order(world, life, "fail", "b")
    with pytest.raises(TaskInterruptedError, match="failed by an operator: wrong host"):
        await second
    await order(world, life, "fail", "a")
    with pytest.raises(TaskCancelledError, match="failed by an operator"):
        await first
    await world.until(lambda: bool(told))

    assert world.states() == {"a": "failed", "b": "errored"}
    assert world.task("b")["reason"] == "operator"
    assert told == [("b", "operator")]
    assert now() - begun < 2
    assert doors.entered == ["a"]


# -- not at work -------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_elsewhere", [False, True], ids=["in line", "lease elsewhere"])
async def test_a_task_in_line_is_cancelled_before_it_starts(
    world: World, svc: Service, lease_elsewhere: bool
):
    """It never runs, its caller is told, and who stands behind it goes on."""
    doors = Doors()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> str:
        await doors.pass_(ctx.request_id)
        return ctx.request_id

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="first").cast(work, vm="v")
    await doors.wait(1)
    if lease_elsewhere:
        await life.runtime.wired.servers[Lane.REQUESTS].close_intake()
        life = await world.start(svc, instance="other")
    calls = [
        asyncio.create_task(client.prepare(request_id=name).call(work, vm="v"))
        for name in ("x", "next")
    ]
    await world.until(
        lambda: (
            world.states() == dict.fromkeys(world.states(), "accepted") | {"first": "running"}
            and len(world.states()) == 3
        )
    )
    await asyncio.sleep(0.3)

    await order(world, life, "cancel", "x")
    with pytest.raises(TaskCancelledError, match="cancelled by an operator"):
        await calls[0]
    doors.open("first", "next")
    assert await calls[1] == "next"

    assert world.task("x")["attempts"] == 0
    assert world.state("x") == "cancelled"
    assert doors.entered == ["first", "next"]


@pytest.mark.parametrize("waits", [False, True], ids=["running", "in line"])
async def test_a_task_without_a_row_is_cancelled_and_acked(world: World, svc: Service, waits: bool):
    """A `requeue` task, at work or in line, is answered and does not come again."""
    doors = Doors()

    @svc.rpc(on_interrupt="requeue", max_running=1)
    async def read(ctx: Context) -> None:
        await doors.pass_(ctx.request_id)

    life = await world.start(svc)
    client = await world.client(svc)
    calls = [
        asyncio.create_task(client.prepare(request_id=name).call(read))
        for name in ("a", "b")[: 1 + waits]
    ]
    await doors.wait(1)
    await world.settle()
    which = "b" if waits else "a"

    await order(world, life, "cancel", which)
    with pytest.raises(TaskCancelledError):
        await calls[-1]
    if waits:
        with pytest.raises(GracekitError, match="is running and cannot be retried"):
            await order(world, life, "retry", "a")
    doors.open("a")
    report = await life.drain()

    assert (report.exit_code, report.given_back, world.broker.waiting("compute")) == (0, 0, 0)
    assert doors.entered == ["a"]
    assert [note["request_id"] for note in world.incidents("operator_cancel")] == [which]


# -- in a drain --------------------------------------------------------------------------------


async def test_a_cancel_in_a_drain_lets_the_host_go(world: World, svc: Service):
    """The ops topic answers until the last task ends; cancelled, nothing is left to hand over."""

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        await asyncio.sleep(1000)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work, vm="a")
    await life.hears("task.started")
    begun = now()
    life.ask_to_stop()
    await life.hears("intake.closed")
    await order(world, life, "cancel", "w")
    report = await life.wait_end()

    assert (report.exit_code, report.handed_over, report.leases_kept) == (0, [], 0)
    assert now() - begun < 1
    assert world.state("w") == "cancelled"


async def test_a_hold_outlives_the_cancel_of_the_task_that_opened_it(world: World, svc: Service):
    """A hold belongs to the operation: it ends by `end_hold` or its lapse, and keeps the drain."""

    @svc.rpc
    async def receive(ctx: Context) -> None:
        await ctx.hold("migration", "a", at_most="1h")
        await asyncio.sleep(1000)

    @svc.ops
    async def received(ctx: Context) -> bool:
        return await ctx.end_hold("migration", "a")

    life = await world.start(svc, drain_timeout_s=600)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(receive)
    await world.until(lambda: bool(world.rows("SELECT * FROM hold")))
    await order(world, life, "cancel", "w")
    await life.hears("task.finished")
    life.ask_to_stop()
    await asyncio.sleep(60)
    assert life.report is None
    assert await client.call(received) is True
    report = await life.wait_end()

    assert (report.exit_code, report.open_holds, world.state("w")) == (0, 0, "cancelled")


async def test_a_task_that_the_drain_has_cut_is_not_cancelled_again(world: World, svc: Service):
    """At the deadline the drain owns it: the order is refused with the cause."""

    @svc.rpc
    async def slow_to_leave(ctx: Context) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)

    life = await world.start(svc, drain_timeout_s=5)
    await (await world.client(svc)).prepare(request_id="w").cast(slow_to_leave)
    await life.hears("task.started")
    life.ask_to_stop()
    await asyncio.sleep(5.5)
    task = life.runtime.wired.tracker.get("w")
    assert task is not None
    word = Order(verb=Verb.CANCEL, by="ann", reason="")
    with pytest.raises(GracekitError, match=r"being cancelled already \(drain deadline\)"):
        await life.runtime.wired.control.orders.carry_out("w", "", word)
    await life.wait_end()

    assert world.state("w") == "handed_over"


# -- refused -----------------------------------------------------------------------------------


async def test_what_cannot_be_ordered_is_refused_with_the_reason(world: World, svc: Service):
    """An ended task with how it ended, a running one to be retried, work beside requests,
    nothing.
    """
    doors = Doors()

    @svc.rpc
    async def boom(ctx: Context) -> None:
        raise LookupError("no such disk")

    @svc.rpc
    async def work(ctx: Context) -> None:
        async with ctx.track("copying"):
            await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="b").cast(boom)
    await client.prepare(request_id="w").cast(work)
    await life.hears("task.finished")
    await doors.wait(1)

    for verb in ("cancel", "fail"):
        with pytest.raises(GracekitError, match=r"has ended and cannot .*failed.*no such disk"):
            await order(world, life, verb, "b")
    with pytest.raises(GracekitError, match=r"w .* is running and cannot be retried: only a task"):
        await order(world, life, "retry", "w")
    (beside,) = [t for t in life.runtime.wired.tracker if t.lane.value == "background"]
    with pytest.raises(GracekitError, match="is background work and no request"):
        await order(world, life, "cancel", beside.request_id)
    with pytest.raises(TypeError, match="needs task_id"):
        await world.verb(life, "cancel")
    assert (await order(world, life, "cancel", "nowhere"))["moved"] is True
    assert world.incidents("operator_retry") == []
    doors.open("work")


def test_every_end_follows_by_the_table_of_states():
    """No order takes a step that the drawing of states does not have."""
    wrong = [
        (verb, before, after)
        for verb, ends in ENDS.items()
        for before, after in ends.items()
        if after not in _NEXT[before]
    ]

    assert wrong == []


# -- what has ended ----------------------------------------------------------------------------


def failing(svc: Service, seen: list[Any]) -> Any:
    """A method whose first two attempts fail, each at its third item."""

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def copy(ctx: Context, vm: str) -> str:
        async for item in ctx.steps(range(6)):
            seen.append((ctx.attempt, item, ctx.fence, ctx["user"]))
            if item == 2 and ctx.attempt < 3:
                raise LookupError(f"no disk in {vm}")
        return vm

    return copy


@pytest.mark.parametrize("on_disk", [False, True])
async def test_what_has_failed_runs_again_as_a_new_attempt_of_the_same_id(
    world: World, svc: Service, on_disk: bool
):
    """With its arguments and context, from its cursor, under a higher token; who and why is on
    record. Its caller, who was answered, is not answered again; whoever asks later gets the new
    end.
    """
    seen: list[Any] = []
    copy = failing(svc, seen)
    life = await world.start(svc)
    client = await world.client(svc)
    view = client.prepare(request_id="c", context={"user": "ann"}, timeout=60)
    with pytest.raises(LookupError):
        await view.call(copy, vm="v")
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])

    for attempt in (2, 3):
        if on_disk:
            await life.drain()
            await order_on_disk(world, Verb.RETRY, "c")
            assert (world.task("c")["state"], world.task("c")["finished_at"]) == ("accepted", None)
            world.check_accounts()
            life = await world.start(svc)
        else:
            assert (await order(world, life, "retry", "c"))["state"] == "accepted"
        await world.until(lambda n=attempt: world.task("c")["attempts"] == n)
        await world.until(lambda: world.task("c")["finished_at"] is not None)

    row = world.task("c")
    assert (row["state"], row["attempts"], row["failure"]) == ("succeeded", 3, None)
    assert (row["args"], row["context"]) == (None, None)
    assert next(item for run, item, *_ in seen if run == 2) == 2
    fences = [fence for *_, fence, _ in seen]
    assert (fences, len(set(fences))) == (sorted(fences), 3)
    assert {user for *_, user in seen} == {"ann"}
    told = [found["detail"] for found in world.incidents("operator_retry")]
    assert told == [
        f"ann@desk: wrong host (it was failed, attempt {n}: LookupError: no disk in v)"
        for n in (1, 2)
    ]
    assert client._replies.ignored == 0
    assert await view.call(copy, vm="v") == "v"
    world.check_accounts()


async def test_an_errored_task_is_retried_and_its_crashes_are_forgotten(world: World, svc: Service):
    """After its hook was called; it gets its attempts anew, and a caller's patience counts no
    more.
    """
    told: list[str] = []
    kills, begun = asyncio.Event(), asyncio.Event()
    kills.set()

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0, max_attempts=1)
    async def copy(ctx: Context, vm: str) -> str:
        if kills.is_set():
            begun.set()
            await asyncio.sleep(1000)
        return vm

    @copy.errored
    async def _(ctx: Context, vm: str, reason: str) -> None:
        told.append(reason)

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="c", timeout=5).call(copy, vm="v"))
    for number in (1, 2):
        while len(told) < number:
            await world.until(lambda n=number: begun.is_set() or len(told) == n)
            if begun.is_set():
                begun.clear()
                await life.crash()
                life = await world.start(svc)
        await world.until(lambda: not world.task("c")["errored_due"])
        await world.until(lambda: world.rows("SELECT * FROM reply") == [])
        if number == 2:
            kills.clear()
        assert (await order(world, life, "retry", "c"))["state"] == "accepted"
        assert (world.task("c")["crashes"], world.task("c")["reason"]) == (0, None)

    await world.until(lambda: world.state("c") == "succeeded")
    assert told == ["attempts"] * 2
    assert world.incidents("operator_retry")[0]["detail"].endswith(
        "(it was errored (attempts), attempt 2)"
    )
    world.check_accounts()
    await asyncio.gather(call, return_exceptions=True)


async def test_an_expired_task_that_is_retried_does_not_expire_again(world: World, svc: Service):
    """The operator wants it done, whoever waited for it."""
    doors = Doors()

    @svc.rpc(max_running=1)
    async def slow(ctx: Context, n: int) -> int:
        await doors.pass_(n)
        return n

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(slow, n=1)
    await doors.wait(1)
    call = client.prepare(request_id="late", timeout=5).call(slow, n=2)
    await asyncio.gather(call, return_exceptions=True)
    doors.open(1, 2)
    await world.until(lambda: world.state("late") == "errored")
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])

    await order(world, life, "retry", "late")

    await world.until(lambda: world.state("late") == "succeeded")


async def test_what_cannot_be_run_again_is_refused_with_the_remedy(world: World, svc: Service):
    """A task whose hook has still to be called, one without arguments, one that succeeded."""
    doors = Doors()

    @svc.rpc
    async def boom(ctx: Context) -> None:
        raise LookupError("no such disk")

    @svc.rpc
    async def hooked(ctx: Context) -> None:
        await asyncio.sleep(1000)

    @hooked.errored
    async def _(ctx: Context, reason: str) -> None:
        await doors.pass_("hook")

    @svc.rpc
    async def fine(ctx: Context) -> None:
        pass

    life = await world.start(svc, keep_failed_arguments=False)
    client = await world.client(svc)
    for name, method in {"b": boom, "s": fine, "h": hooked}.items():
        await client.prepare(request_id=name).cast(method)
    await life.hears("task.started", 3)
    await world.until(lambda: world.state("b") == "failed" and world.state("s") == "succeeded")
    await life.crash()
    life = await world.start(svc, keep_failed_arguments=False)
    await doors.wait(1)

    assert world.task("b")["args"] is None
    with pytest.raises(GracekitError, match=r"arguments are not kept: send it again under a new"):
        await order(world, life, "retry", "b")
    with pytest.raises(GracekitError, match=r"s .* has ended and cannot be retried"):
        await order(world, life, "retry", "s")
    with pytest.raises(GracekitError, match=r"its errored hook runs now: retry it"):
        await order(world, life, "retry", "h")
    doors.open("hook")
    await world.until(lambda: not world.task("h")["errored_due"])
    assert world.task("h")["args"] is None
    assert world.incidents("operator_retry") == []


async def test_what_owes_its_caller_an_answer_is_not_run_again(world: World, svc: Service):
    """A retry would take back the failure that the caller still has to be told: it waits, and one
    that was decided before the failure was on record changes nothing.
    """
    copy = failing(svc, [])
    life = await world.start(svc)
    view = (await world.client(svc)).prepare(request_id="c", context={"user": "ann"}, timeout=600)
    life.crash_at(Point.REPLY, "before")
    call = asyncio.create_task(view.call(copy, vm="v"))
    await life.over.wait()

    case = await target_named(await engine_of(world), "c", "")
    assert case is not None
    assert "its caller has still to be answered: retry it after" in str(
        refusal_of(case, Verb.RETRY)
    )
    with pytest.raises(ConflictError):
        await order_on_disk(world, Verb.RETRY, "c")
    life = await world.start(svc)
    with pytest.raises(LookupError):
        await call
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    await order(world, life, "retry", "c")
    await world.until(lambda: world.task("c")["attempts"] == 2)


# -- under recovery ----------------------------------------------------------------------------


def probed(svc: Service, doors: Doors) -> Any:
    """A method whose probe waits at a door."""

    @svc.rpc(resource="vm", on_interrupt="probe", settle=0)
    async def move(ctx: Context, vm: str) -> str:
        if ctx.request_id == "m" and ctx.attempt == 1:
            await asyncio.sleep(1000)
        return "moved"

    @move.probe
    async def _(ctx: Context, vm: str) -> Done | Retry:
        await doors.pass_("probe")
        return Done("as it was")

    return move


async def crash_at_work(world: World, svc: Service, method: Any, request_id: str) -> None:
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id=request_id).cast(method, vm="a")
    await life.hears("task.started")
    await life.crash()


@pytest.mark.parametrize("fault", [None, Fault.LOST_BEFORE, Fault.LOST_AFTER])
async def test_a_row_under_a_probe_ends_as_ordered(world: World, svc: Service, fault: Fault | None):
    """The probe's answer comes too late to count, also when the commit of the order was in
    doubt.
    """
    doors = Doors()
    move = probed(svc, doors)
    await crash_at_work(world, svc, move, "m")
    life = await world.start(svc)
    await doors.wait(1)
    with pytest.raises(GracekitError, match="its probe is running"):
        await order(world, life, "retry", "m")
    if fault is not None:
        life.plan(Point.SETTLE, fault)
    answer = await order(world, life, "cancel", "m")
    assert (answer["state"], world.state("m")) == ("cancelled", "cancelled")
    doors.open("probe")
    client = await world.client(svc)

    assert await client.prepare(timeout=60).call(move, vm="a") == "moved"
    assert world.state("m") == "cancelled"
    assert len(world.incidents("operator_cancel")) == 1


async def test_an_order_that_cannot_be_recorded_is_not_carried_out(world: World, svc: Service):
    """First the record, then the act: refused by the store, the task runs on."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> str:
        await doors.pass_("work")
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="w").call(work))
    await doors.wait(1)
    life.plan(Point.TALLY, Fault.REFUSED)
    with pytest.raises(GracekitError, match="nothing was committed"):
        await order(world, life, "cancel", "w")
    doors.open("work")

    assert await call == "done"
    assert world.incidents("operator_cancel") == []


# -- rows that nobody owns ---------------------------------------------------------------------


async def test_a_row_ended_on_disk_is_answered_by_the_next_run(world: World, svc: Service):
    """The stopped service's caller gets the answer, and the errored hook is called."""
    told = []

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> str:
        if ctx.attempt == 1:
            await asyncio.sleep(1000)
        return "done"

    @work.errored
    async def _(ctx: Context, reason: str) -> None:
        told.append(reason)

    life = await world.start(svc, drain_timeout_s=1)
    client = await world.client(svc)
    calls = {
        name: asyncio.create_task(client.prepare(request_id=name, timeout=900).call(work))
        for name in ("c", "f", "r")
    }
    await life.hears("task.started", 3)
    await life.drain()
    await order_on_disk(world, Verb.CANCEL, "c")
    await order_on_disk(world, Verb.FAIL, "f")
    await order_on_disk(world, Verb.RETRY, "r")
    assert world.states() == {"c": "cancelled", "f": "errored", "r": "accepted"}
    world.check_accounts()
    again = await world.start(svc)

    with pytest.raises(TaskCancelledError, match="by an operator: wrong host"):
        await calls["c"]
    with pytest.raises(TaskInterruptedError, match="failed by an operator: wrong host"):
        await calls["f"]
    assert await calls["r"] == "done"
    await world.until(lambda: bool(told))
    assert told == ["operator"]
    await again.drain()
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])
    kept = {name: world.task(name)["args"] for name in "cfr"}
    assert kept == {"c": None, "f": "{}", "r": None}


async def test_a_killed_run_s_task_is_retried_although_its_policy_says_error(
    world: World, svc: Service
):
    """Before the next start the operator decides: what was running when the process died runs
    again.
    """
    seen = []

    @svc.rpc
    async def work(ctx: Context, vm: str) -> None:
        seen.append(ctx.attempt)
        if ctx.attempt == 1:
            await asyncio.sleep(1000)

    await crash_at_work(world, svc, work, "w")
    await order_on_disk(world, Verb.RETRY, "w", dead=True)
    row = world.task("w")
    assert (row["state"], row["owner"], row["crashes"], row["cut"]) == ("accepted", None, 0, None)
    life = await world.start(svc)
    await life.hears("task.finished")

    assert (seen, world.state("w")) == ([1, 2], "succeeded")


async def test_a_start_that_adopts_meanwhile_wins_or_finds_it_ended(world: World, svc: Service):
    """Compare and set: the row that a start has taken over is not touched, and the other way
    round.
    """

    @svc.rpc(on_interrupt="retry", settle=3600)
    async def work(ctx: Context, vm: str) -> None:
        await asyncio.sleep(1000)

    await crash_at_work(world, svc, work, "w")
    engine = await engine_of(world)
    before = await target_named(engine, "w", "")
    life = await world.start(svc)
    assert before is not None
    word = Order(verb=Verb.CANCEL, by="ann", reason="")
    mark = incident_of(word, "w", "work", "running", at=1.0, run="operator")
    batch = Batch(Point.SETTLE)
    news = News.of(world.clock, sender=None)
    add_order(batch, before, ordered("w", word, before.state), mark, news, dead=True)
    with pytest.raises(GracekitError):
        await engine.commit(batch)
    assert (world.state("w"), await mark.stands(engine)) == ("handed_over", False)

    await order_on_disk(world, Verb.CANCEL, "w")
    await life.drain()
    assert world.state("w") == "cancelled"
