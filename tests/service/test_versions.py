"""Two versions of a service on one store and one queue: what only one of them can serve."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gracekit import Context, Done, RemoteError, Service, backoff
from gracekit.errors import GracekitError
from gracekit.life import Alive, Liveness
from gracekit.life import RecordedLife as Recorded
from gracekit.request.refusals import PASS_ON_FOR_S, Detour
from gracekit.rpc.message import Request
from gracekit.rpc.transport import Delivery
from gracekit.runs.members import BACK_WITHIN_S
from tests.service.kit import Life, World

pytestmark = pytest.mark.looptime


def version(*names: str, **options: Any) -> Service:
    """A service with methods of these names, each with an argument `vm`."""
    svc = Service("compute")
    for name in names:

        async def work(ctx: Context, vm: str) -> str:
            return f"{ctx.request_id} {ctx.attempt}"

        work.__name__ = name
        svc.rpc(**options)(work)
    return svc


def widened(name: str, done: list[str] | None = None, **options: Any) -> Service:
    """A service whose method *name* also takes `dest`, and must have it."""
    svc = Service("compute")

    async def work(ctx: Context, vm: str, dest: str) -> None:
        if done is not None:
            done.append(ctx.request_id)

    work.__name__ = name
    svc.rpc(**options)(work)
    return svc


async def leave_begun(world: World, name: str, **options: Any) -> None:
    """A task `w` of method *name* on resource vm:v, begun by a process that is gone."""
    svc = Service("compute")

    async def work(ctx: Context, vm: str) -> None:
        await asyncio.sleep(100_000)

    work.__name__ = name
    svc.rpc(anywhere=True, **options)(work)
    life = await world.start(svc, host="gone")
    client = await world.client(svc)
    await client.prepare(request_id="w", host="gone").cast(name, vm="v")
    await life.hears("task.started")
    await life.crash()


# -- rows ------------------------------------------------------------------------------------


async def test_a_method_that_nobody_serves_any_more_ends_though_siblings_live(world: World):
    """Two workers know that neither has it: when the run that had it is not expected back any more,
    its row ends, and its resource is free for others.
    """
    await leave_begun(world, "removed", resource="vm", on_interrupt="retry", settle=0)
    svc = version("other", resource="vm", on_interrupt="retry", settle=0)
    await world.start(svc, instance="a")
    await world.start(svc, instance="b")
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=600).call("other", vm="v"))

    await world.until(lambda: world.state("w") == "errored", within_s=BACK_WITHIN_S + 90)
    assert world.task("w")["reason"] == "method_gone"
    await call


async def test_a_run_that_beats_no_more_keeps_nothing_for_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Nobody can prove that it is dead, but rows and leases must not wait for it for ever."""
    silent = await world.start(version("work", "removed"), instance="silent")
    await leave_begun(world, "removed", resource="vm", on_interrupt="retry", settle=0)
    await silent.crash()
    _prove_nothing_of(silent, monkeypatch)
    svc = version("work")
    await world.start(svc, instance="a")
    await world.until(lambda: world.state("w") == "errored", within_s=BACK_WITHIN_S + 90)

    assert world.task("w")["reason"] == "method_gone"
    client = await world.client(svc)
    with pytest.raises((RemoteError, GracekitError)):
        await client.prepare(timeout=30).call("removed", vm="v")


def _prove_nothing_of(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(life.process)
    judge = kind.judge

    def judge_others(
        self: Any, other: Recorded, directory: Path | None, *, is_shared: bool
    ) -> Liveness:
        if other.identity == life.process.identity:
            return Liveness(Alive.NOT_PROVEN, "its lock file is gone")
        return judge(self, other, directory, is_shared=is_shared)

    monkeypatch.setattr(kind, "judge", judge_others)


async def test_a_row_goes_to_the_sibling_whose_version_serves_it(world: World):
    """Whoever claims it first; one that does not serve it puts it down again."""
    old = await world.start(version("other"), instance="old")
    await world.start(version("other", "added", on_interrupt="retry"), instance="new")
    await leave_begun(world, "added", on_interrupt="retry", settle=0)
    await world.until(lambda: world.state("w") == "succeeded")

    assert [fields["task_id"] for fields in old.told("task.started")] == []


async def test_rows_whose_arguments_no_longer_fit_end_as_if_their_method_were_gone(world: World):
    """They are not called with arguments that they do not take; a sibling that takes them gets
    them.
    """
    await leave_begun(world, "work", on_interrupt="retry", settle=0)
    done: list[str] = []
    await world.start(widened("work", done, on_interrupt="retry"))
    await world.until(lambda: world.state("w") == "errored")

    row = world.task("w")
    assert (row["reason"], done) == ("method_gone", [])
    assert "dest" in row["detail"]


async def test_arguments_that_a_sibling_takes_are_left_to_it(world: World):
    """In a rolling upgrade the older version finishes what it can."""
    await world.start(widened("work", on_interrupt="retry"), instance="new")
    await world.start(version("work", on_interrupt="retry"), instance="old")
    await leave_begun(world, "work", on_interrupt="retry", settle=0)
    await world.until(lambda: world.state("w") == "succeeded")


@pytest.mark.parametrize(
    ("then", "now", "end"),
    [
        ("retry", "error", ("errored", "interrupted")),
        ("error", "retry", ("errored", "interrupted")),
        ("retry", "probe", ("succeeded", None)),
        ("error", "probe", ("succeeded", None)),
        ("probe", "retry", ("errored", "interrupted")),
        ("probe", "error", ("errored", "interrupted")),
        ("retry", "requeue", ("succeeded", None)),
    ],
)
async def test_a_changed_policy_is_the_new_one_but_a_rerun_needs_both(
    world: World, then: Any, now: Any, end: tuple[str, str | None]
):
    """The version that recovers knows best; only to run again blindly, the one that began must
    agree.
    """
    svc = Service("compute")
    starts, asked = [], []

    @svc.rpc(on_interrupt=now, settle=0)
    async def work(ctx: Context, vm: str) -> None:
        starts.append(ctx.attempt)

    if now == "probe":

        @work.probe
        async def _(ctx: Context, vm: str) -> Done:
            asked.append(1)
            return Done()

    await leave_begun(world, "work", on_interrupt=then, settle=0)
    await world.start(svc)
    await world.until(lambda: world.task("w")["finished_at"] is not None)

    assert (world.state("w"), world.task("w")["reason"]) == end
    assert len(starts) == int(end[0] == "succeeded" and now != "probe")
    assert len(asked) == int(now == "probe")


# -- deliveries ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["name", "arguments"])
async def test_what_a_sibling_serves_goes_back_for_it(world: World, change: str):
    """Of casts that only the newer version can serve none is refused, whoever takes it first."""
    old = version("work") if change == "name" else version("work", "added")
    new = version("work", "added") if change == "name" else widened("added")
    args = {"vm": "v"} if change == "name" else {"vm": "v", "dest": "d"}
    await world.start(old, instance="a")
    await world.start(old, instance="b")
    await world.start(new, instance="new")
    client = await world.client(new)
    for n in range(15):
        await client.prepare(request_id=f"w{n}").cast("added", **args)
    await world.until(lambda: list(world.states().values()) == ["succeeded"] * 15)

    assert world.tally().get("rejected", 0) == 0


async def test_what_waits_to_go_back_does_not_keep_others_from_being_read(world: World):
    """Its bytes do not count while it waits, however large it is."""
    new = await world.start(version("work", "added"), instance="new")
    await world.verb(new, "quiet")
    old = await world.start(version("work"), instance="old", prefetch_bytes=1000)
    client = await world.client(new.runtime.service)
    await client.cast("added", vm="v" * 2000)
    begun = asyncio.get_running_loop().time()

    await client.prepare(timeout=30).call("work", vm="v")
    assert asyncio.get_running_loop().time() - begun < backoff.SIBLING.first_s / 2
    await old.drain()


async def test_what_a_sibling_served_a_moment_ago_waits_for_its_return(world: World):
    """In a rolling upgrade it is starting again; neither delivery nor row is ended meanwhile."""
    new = version("work", "added", on_interrupt="retry", settle=0)
    second = await world.start(new, instance="b")
    await leave_begun(world, "added", on_interrupt="retry", settle=0)
    client = await world.client(new)
    await second.drain()
    await world.start(version("work"), instance="a")
    await client.prepare(request_id="d").cast("added", vm="v")
    await asyncio.sleep(20)

    assert world.tally().get("rejected", 0) == 0
    await world.start(new, instance="b")
    await world.until(lambda: world.states() == {"w": "succeeded", "d": "succeeded"})


async def test_a_method_that_the_next_version_of_an_instance_lacks_is_refused_at_once(
    world: World,
):
    """Its instance has a run, so no run that served the method is expected back."""
    former = await world.start(version("work", "removed"), instance="a")
    await former.drain()
    await world.start(version("work"), instance="a")
    client = await world.client(version("work", "removed"))
    begun = asyncio.get_running_loop().time()

    with pytest.raises((RemoteError, GracekitError)):
        await client.prepare(timeout=30).call("removed", vm="v")
    assert asyncio.get_running_loop().time() - begun < 1


@pytest.mark.parametrize("back", [False, True], ids=["gone for good", "back as the new version"])
async def test_casts_of_a_removed_method_are_kept_in_the_dead_letters(world: World, back: bool):
    """No caller waits for the answer to a cast, so its body is kept, whenever in the upgrade it
    came.
    """
    former = await world.start(version("work", "removed"), instance="a")
    client = await world.client(version("work", "removed"))
    await former.drain()
    await world.start(version("work"), instance="b")
    await client.prepare(request_id="during").cast("removed", vm="v")
    await asyncio.sleep(6)
    if back:
        await world.start(version("work"), instance="a")
    within_s = BACK_WITHIN_S + backoff.SIBLING.most_s  # one of us may hold it for so long
    await world.until(lambda: world.tally().get("rejected") == 1, within_s=within_s)
    await asyncio.sleep(BACK_WITHIN_S)
    await client.prepare(request_id="after").cast("removed", vm="v")
    await world.until(lambda: world.tally().get("rejected") == 2)
    await client.prepare(request_id="never").cast("nonsense", vm="v")
    await world.until(lambda: world.tally().get("rejected") == 3)

    kept = [body for letter in world.broker.dead_letters if b"removed" in (body := letter.body)]
    assert len(kept) == 2
    assert len(world.broker.dead_letters) == 2, "what no version has ever served is not kept"


async def test_what_no_sibling_serves_is_refused_at_once(world: World):
    """A wrong name or wrong arguments are told to their caller, as without siblings."""
    svc = version("work")
    await world.start(svc, instance="a")
    await world.start(svc, instance="b")
    client = await world.client(svc)
    begun = asyncio.get_running_loop().time()

    with pytest.raises((RemoteError, GracekitError)):
        await client.prepare(timeout=30).call("wrok", vm="v")
    with pytest.raises((RemoteError, GracekitError, TypeError)):
        await client.prepare(timeout=30).call("work", mv="v")
    assert asyncio.get_running_loop().time() - begun < 1


async def test_what_a_sibling_serves_and_never_takes_is_refused_in_the_end(world: World):
    """A sibling that stands still does not keep a message going round: its body is kept."""
    new = await world.start(version("work", "added"), instance="new", max_accepted=1, max_running=1)
    await world.start(version("work"), instance="old")
    client = await world.client(new.runtime.service)
    await world.verb(new, "quiet")
    await client.prepare(request_id="w").cast("added", vm="v")
    await world.until(lambda: world.tally().get("rejected") == 1, within_s=3 * PASS_ON_FOR_S)

    (kept,) = world.broker.dead_letters
    assert b"added" in kept.body


async def test_a_message_goes_back_less_often_than_a_quorum_queue_delivers_it(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """RabbitMQ 4 gives a message up after 20 deliveries, and other trouble may need some of
    them.
    """
    went_back = []
    pause_s = Detour.pause_s

    async def noted(self: Detour, request: Request, delivery: Delivery) -> float | None:
        pause = await pause_s(self, request, delivery)
        went_back.append(pause)
        return pause

    monkeypatch.setattr(Detour, "pause_s", noted)
    new = await world.start(version("work", "added"), instance="new", max_accepted=1, max_running=1)
    for name in ("a", "b", "c"):
        await world.start(version("work"), instance=name)
    client = await world.client(new.runtime.service)
    await world.verb(new, "quiet")
    await client.prepare(request_id="w").cast("added", vm="v")
    await world.until(lambda: world.tally().get("rejected") == 1, within_s=3 * PASS_ON_FOR_S)

    assert len([pause for pause in went_back if pause]) <= 15


async def test_requests_that_go_back_for_a_sibling_are_logged_once_a_minute(world: World):
    """Meanwhile they are in no list: the line says which method waits for whom, and until when."""
    new = await world.start(version("work", "added", "more"), instance="new", max_accepted=1)
    old = await world.start(version("work"), instance="old")
    client = await world.client(new.runtime.service)
    await world.verb(new, "quiet")
    for name in ("added", "added", "more"):
        await client.cast(name, vm="v")
    await asyncio.sleep(70)
    seen = list(old.told("task.passed_on"))
    await world.until(lambda: world.tally().get("rejected") == 3, within_s=3 * PASS_ON_FOR_S)

    first, second, later, *_ = seen
    assert {first["method"], second["method"]} == {"added", "more"}
    assert (first["queue"], first["siblings"], first["waited_s"]) == ("compute", "new", 0)
    assert first["left_s"] == PASS_ON_FOR_S
    assert later["waited_s"] + later["left_s"] == PASS_ON_FOR_S
    assert later["waited_s"] >= 60
    assert len(seen) <= 4
    assert len(old.told("task.passed_on")) <= 2 * (PASS_ON_FOR_S / 60 + 1)


async def test_a_directed_request_goes_back_only_for_its_own_host(world: World):
    """No other host reads that queue."""
    await world.start(version("work"), host="node-1")
    await world.start(version("work", "added"), host="node-2")
    client = await world.client(version("work", "added"))

    with pytest.raises((RemoteError, GracekitError)):
        await client.prepare(host="node-1", timeout=30).call("added", vm="v")
