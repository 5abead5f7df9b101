"""Who begins next: recovered rows and new requests in one line, and threads before attempts."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gracekit import Context, Service
from tests.service.kit import Doors, World

NOTHING_TO_SETTLE = {"startup_reconciliation_wait_seconds": 0.0}


def bound(older: int, max_running: int) -> int:
    """Grants of its lane within which a recovered row begins that waits only for this lane.

    *older* rows were recovered before it. The two queues of the line take turns: 2 * (older + 1).
    Recovery claims up to 32 rows in one commit, and at most twice *max_running* requests begin
    during that commit: the rest. See docs/decisions/custody.md#0010.
    """
    return 2 * (older + 1) + 2 * max_running + 2 * max_running * older // min(max_running, 32)


@pytest.mark.looptime
@pytest.mark.parametrize("max_running", [1, 3, 8])
@pytest.mark.parametrize("policy", ["error", "retry"])
async def test_recovered_rows_begin_beside_a_queue_that_never_empties(
    world: World, svc: Service, max_running: int, policy: str
):
    """While new requests never stop coming, each left-over row begins within the stated number of
    grants, the oldest first; and the new ones keep their half.
    """
    begun: list[str] = []
    crashed = False

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context) -> None:
        if not crashed:
            await asyncio.sleep(100_000)
        begun.append(ctx.request_id)
        await asyncio.sleep(0.1)

    limits = {"max_running": max_running, "max_accepted": 2 * max_running, "prefetch": 4}
    roomy = {"max_accepted": 100, "prefetch": 100}
    life = await world.start(svc, **limits | roomy, **NOTHING_TO_SETTLE)
    client = await world.client(svc)
    old = [await client.prepare(request_id=f"old{n:02}").cast(work) for n in range(20)]
    await world.until(lambda: len(world.states()) == len(old))
    await life.crash()
    crashed = True
    new = [await client.prepare(request_id=f"new{n:03}").cast(work) for n in range(300)]
    await world.start(svc, **limits, **NOTHING_TO_SETTLE)
    await world.until(lambda: len(begun) >= len(new))

    left = old if policy == "retry" else old[max_running:]
    at = [begun.index(one) for one in left]
    assert [place for k, place in enumerate(at) if place > bound(k, max_running)] == []
    if policy == "error":
        assert at == sorted(at)
    among = begun[at[0] : at[-1]]
    assert sum(one.startswith("new") for one in among) >= len(among) // 2 - 2 * max_running


@pytest.mark.looptime
async def test_recovered_rows_of_one_method_are_not_kept_out_by_new_ones(
    world: World, svc: Service
):
    """In the line of a method that runs one at a time they are served in turns as well."""
    begun: list[str] = []
    crashed = False

    @svc.rpc(max_running=1)
    async def work(ctx: Context) -> None:
        if not crashed:
            await asyncio.sleep(100_000)
        begun.append(ctx.request_id)
        await asyncio.sleep(0.1)

    life = await world.start(svc)
    client = await world.client(svc)
    for n in range(4):
        await client.prepare(request_id=f"old{n}").cast(work)
    await world.until(lambda: len(world.states()) == 4)
    await life.crash()
    crashed = True
    for n in range(100):
        await client.prepare(request_id=f"new{n}").cast(work)
    await world.start(svc)
    await world.until(lambda: len(begun) >= 100)

    assert [begun.index(f"old{n}") < 2 * n + 2 for n in (1, 2, 3)] == [True, True, True]


@pytest.mark.looptime
async def test_new_requests_begin_beside_many_recovering_rows(world: World, svc: Service):
    """A call behind which hundreds of rows are being recovered begins with the second grant."""
    crashed = False

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(1.0 if crashed else 100_000)

    @svc.rpc
    async def ask(ctx: Context) -> str:
        return "here"

    life = await world.start(svc, max_running=2, prefetch=1000)
    client = await world.client(svc)
    for _ in range(300):
        await client.cast(work)
    await world.until(lambda: len(world.states()) == 300)
    await life.crash()
    crashed = True
    await world.start(svc, max_running=2)
    await asyncio.sleep(3.5)
    asked_at = asyncio.get_running_loop().time()

    assert await client.prepare(timeout=10).call(ask) == "here"
    assert asyncio.get_running_loop().time() - asked_at <= 2.0


@pytest.mark.looptime
async def test_no_more_rows_are_claimed_than_may_soon_begin(world: World, svc: Service):
    """What waits for its turn here could run in a sibling."""

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    life = await world.start(svc, max_running=2)
    client = await world.client(svc)
    for _ in range(50):
        await client.cast(work)
    await world.until(lambda: len(world.states()) == 50)
    await life.crash()
    again = await world.start(svc, max_running=3)
    await asyncio.sleep(1)
    owned = "SELECT count(*) AS n FROM task WHERE state = ? AND owner = ?"
    run_id = again.runtime.run_id

    assert world.rows(owned, "running", run_id) == [{"n": 3}]
    assert world.rows(owned, "accepted", run_id) == [{"n": 3}]


@pytest.mark.looptime
async def test_rows_of_a_busy_resource_do_not_hold_up_other_rows(world: World, svc: Service):
    """However many of them are older, and however few may run."""
    began: list[str] = []
    crashed = False

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str) -> None:
        began.append(vm)
        await asyncio.sleep(100_000 if vm == "busy" or not crashed else 0)

    life = await world.start(svc, max_running=1)
    client = await world.client(svc)
    for vm in ["first", *["busy"] * 10, "other"]:
        await client.cast(change, vm=vm)
    await world.until(lambda: len(world.states()) == 12)
    await life.crash()
    crashed = True
    await world.start(svc, max_running=2)
    await asyncio.sleep(5)

    assert began == ["first", "busy", "other"]


# -- threads ------------------------------------------------------------------------------------


async def test_a_plain_handler_is_not_on_record_before_it_has_a_thread(world: World, svc: Service):
    """With one thread one is RUNNING; the others wait accepted, and after a drain has begun none of
    them begins.
    """
    go, begun = threading.Event(), []

    @svc.rpc
    def work(ctx: Context, n: int) -> None:
        begun.append(n)
        go.wait(30)

    life = await world.start(
        svc, threads=1, drain_timeout_s=0.3, handover_grace_s=0.2, handover_flush_s=0.2
    )
    client = await world.client(svc)
    ids = [await client.prepare(request_id=f"r{n}").cast(work, n=n) for n in range(3)]
    await life.hears("task.started")
    await asyncio.sleep(0.1)
    assert list(world.states().values()) == ["running", "accepted", "accepted"]

    life.ask_to_stop()
    await life.hears("intake.closed")
    go.set()
    report = await life.wait_end()

    assert begun == [0]
    assert [world.state(one) for one in ids] == ["succeeded", "accepted", "accepted"]
    assert sorted(report.not_started) == ids[1:]


async def test_a_plain_probe_does_not_take_a_thread_from_a_handler(world: World, svc: Service):
    """Recovery's hooks have threads of their own: whoever is RUNNING has one."""
    go, asked, begun = threading.Event(), threading.Event(), threading.Event()

    @svc.rpc(on_interrupt="probe")
    async def cut(ctx: Context) -> None:
        await asyncio.sleep(100)

    @cut.probe
    def _(ctx: Context) -> None:
        asked.set()
        go.wait(30)

    @svc.rpc
    def work(ctx: Context) -> None:
        begun.set()

    life = await world.start(svc, threads=1, **NOTHING_TO_SETTLE)
    client = await world.client(svc)
    await client.cast(cut)
    await life.hears("task.started")
    await life.crash()
    again = await world.start(svc, threads=1, **NOTHING_TO_SETTLE)
    await world.until(asked.is_set)

    await client.prepare(timeout=10).call(work)
    assert begun.is_set()
    go.set()
    await again.drain()


# -- leases of other processes --------------------------------------------------------------------


@pytest.mark.looptime
async def test_who_waits_for_a_lease_is_passed_by_no_younger_request(world: World, svc: Service):
    """Beside a process that always has another request for the resource, the oldest comes first."""
    began: list[str] = []

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str) -> None:
        began.append(ctx.request_id)
        await asyncio.sleep(0.3)

    await world.start(svc, instance="a", host="a")
    await world.start(svc, instance="b", host="b")
    client = await world.client(svc)

    async def send_on() -> None:
        for n in range(100):
            await client.prepare(host="a", request_id=f"a{n:03}").cast(change, vm="v")
            await asyncio.sleep(0.2)

    sending = asyncio.create_task(send_on())
    await asyncio.sleep(2.05)
    ahead = len(world.states())
    for n in range(3):
        await client.prepare(host="b", request_id=f"b{n}").cast(change, vm="v")
        await asyncio.sleep(0.01)
    await world.until(lambda: "b2" in began)

    sending.cancel()

    first, _, last = (began.index(f"b{n}") for n in range(3))
    assert first <= ahead + 1
    assert last <= ahead + 5


@pytest.mark.looptime
async def test_who_meets_a_lease_of_a_dead_run_has_it_taken_over_at_once(
    world: World, svc: Service
):
    """Also where the run lived when its lease was met first: a beat, not a period of recovery."""
    doors = Doors()

    @svc.rpc(resource="vm", on_interrupt="error")
    async def change(ctx: Context, vm: str, who: str) -> None:
        await doors.pass_(who)

    first = await world.start(svc, instance="a", host="a", **NOTHING_TO_SETTLE)
    second = await world.start(svc, instance="b", host="b", **NOTHING_TO_SETTLE)
    client = await world.client(svc)
    quick = client.prepare(host="a")
    await quick.cast(change, vm="v", who="a")
    await doors.wait(1)
    await client.prepare(host="b").cast(change, vm="v", who="b")
    await asyncio.sleep(3)
    looks = len(second.told("run.classified"))
    await first.crash()
    killed_at = asyncio.get_running_loop().time()
    await doors.wait(2)

    assert looks == 0
    assert doors.entered == ["a", "b"]
    assert asyncio.get_running_loop().time() - killed_at < 3.0
    doors.open("b")
