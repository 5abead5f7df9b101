"""Claims: what is taken from the dead, who may claim what and when, and what is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gracekit.errors import ConflictError, StoreError
from gracekit.journal.claims import Claims
from gracekit.journal.rows import Address, TaskRow
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.tracker.task import Interruption, Lane, TaskState
from tests.journal.test_tasks import CALLER, Book
from tests.service.kit import World

pytestmark = pytest.mark.looptime

Add = Callable[[Claims, Batch, TaskRow], None]


class Run(Book):
    """A journal, and what its run may take over."""

    def __init__(self, world: World, run_id: str) -> None:
        super().__init__(world, run_id)
        self.damage: list[StoreError] = []
        self.claims = Claims(
            self.journal, host="host-a", instance="host-a-0", on_damage=self.damage.append
        )

    async def adopt(self, dead_run: str, *, crashed: bool = True) -> int:
        batch = Batch(Point.ADOPT)
        index = self.claims.add_adopt(
            batch,
            dead_run,
            crashed=crashed,
            charged=True,
            acted_until=self.claims._journal.clock.wall(),
        )
        return len((await self.journal.commit(batch))[index])

    async def do(self, add: Add, row: TaskRow) -> None:
        batch = Batch(Point.SETTLE)
        add(self.claims, batch, row)
        await self.journal.commit(batch)

    async def read(self, request_id: str) -> TaskRow:
        row = await self.journal.known(request_id, "")
        assert row is not None
        return row

    async def left(self, request_id: str, **more: Any) -> None:
        """A row that was started, and that nobody owns."""
        task = await self.running(request_id, **more)
        await self.hand_over(task, Interruption.CANCELLED)

    async def claim_ids(self, state: TaskState, **more: Any) -> list[str]:
        rows = await self.claims.claim(state, **{"limit": 10} | more)
        return [row.request_id for row in rows]


@pytest.fixture
async def runs() -> AsyncIterator[tuple[Run, Run, Run]]:
    """One that dies, its heir, and a sibling that lives."""
    world = World()
    made = Run(world, "run-1"), Run(world, "run-2"), Run(world, "run-3")
    for run in made:
        await run.engine.start()
    yield made
    world.check_accounts()
    for run in made:
        await run.engine.stop()


def of(run: Book, request_id: str, *names: str) -> tuple[Any, ...]:
    row = run.world.task(request_id)
    return tuple(row[name] for name in names)


def change(run: Book, request_id: str, **columns: Any) -> None:
    names = ", ".join(f"{name} = ?" for name in columns)
    run.world.disk.execute(
        f"UPDATE task SET {names} WHERE request_id = ?", (*columns.values(), request_id)
    )


# -- adoption -----------------------------------------------------------------------------


async def test_adoption_takes_the_tasks_of_the_dead_run_and_no_others(
    runs: tuple[Run, Run, Run],
):
    """What ran is cut unclean, counts a crash and waits to settle; what had not begun is simply
    free.
    """
    dead, heir, sibling = runs
    for run, prefix in ((dead, "dead"), (sibling, "live")):
        await run.running(f"{prefix}-running")
        await run.accept(f"{prefix}-accepted")
        unclean = await run.running(f"{prefix}-unclean")
        await run.hand_over(unclean, Interruption.UNCLEAN, returned=False)
    live = [dict(dead.world.task(f"live-{what}")) for what in ("running", "accepted", "unclean")]
    await asyncio.sleep(5)
    now = heir.clock.wall()

    assert await heir.adopt("run-1") == 2

    columns = ("state", "owner", "cut", "crashes", "not_before")
    assert of(dead, "dead-running", *columns) == ("handed_over", None, "unclean", 1, now + 10)
    assert of(dead, "dead-unclean", *columns) == ("handed_over", None, "unclean", 0, now + 10)
    assert of(dead, "dead-accepted", *columns) == ("accepted", None, None, 0, None)
    assert live == [
        dict(dead.world.task(f"live-{what}")) for what in ("running", "accepted", "unclean")
    ]
    notes = {note["request_id"]: note for note in heir.world.incidents("adopted")}
    assert set(notes) == {"dead-running", "dead-accepted", "dead-unclean"}
    note = notes["dead-running"]
    assert (note["at"], note["run_id"], note["method"]) == (now, "run-2", "migrate")
    assert note["detail"] == "running of run run-1"
    assert heir.world.tally()["adopted_runs"] == 1


@pytest.mark.parametrize("crashed", [True, False])
async def test_a_row_that_the_dead_run_had_only_claimed_keeps_its_cut(
    runs: tuple[Run, Run, Run], crashed: bool
):
    """Only a probe that was under way in a crash counts as one; a safe point is no interruption."""
    dead, heir, _ = runs
    for request_id in ("claimed", "probed"):
        await dead.hand_over(await dead.running(request_id), Interruption.SAFE_POINT)
        change(dead, request_id, owner="run-1")
    change(dead, "probed", probing=1)

    await heir.adopt("run-1", crashed=crashed)

    columns = ("owner", "cut", "crashes", "probing", "not_before")
    assert of(dead, "claimed", *columns) == (None, "safe_point", 0, 0, None)
    assert of(dead, "probed", *columns) == (None, "safe_point", int(crashed), 0, None)


async def test_adoption_takes_what_the_dead_run_still_owed(runs: tuple[Run, Run, Run]):
    """Replies and errored hooks that are due become ours; what owes nothing keeps its owner."""
    dead, heir, sibling = runs
    for run, prefix in ((dead, "dead"), (sibling, "live")):
        for what, reply in (("reply", CALLER), ("hook", None), ("done", None)):
            task = await run.running(f"{prefix}-{what}", reply=reply)
            await run.finish(task.row_id or 0)
        change(run, f"{prefix}-hook", errored_due=1)
    await dead.running("waiting", reply=CALLER)

    await heir.adopt("run-1")

    owners = {row["request_id"]: row["owner"] for row in heir.world.rows("SELECT * FROM task")}
    assert owners == {
        "dead-reply": "run-2",
        "dead-hook": "run-2",
        "dead-done": "run-1",
        "live-reply": "run-3",
        "live-hook": "run-3",
        "live-done": "run-3",
        "waiting": None,
    }


async def test_adoption_leaves_the_open_holds_of_the_dead_run_over(runs: tuple[Run, Run, Run]):
    """Ended ones are history, and those of others keep their host."""
    dead, heir, _ = runs
    for key, owner, ended in (
        ("open", "run-1", None),
        ("over", "run-1", 1),
        ("live", "run-3", None),
    ):
        dead.world.disk.execute(
            "INSERT INTO hold (service, name, key, owner, target, method, version, opened_at, "
            "lapses_at, ended_at) VALUES ('compute', 'move', ?, ?, 'h', 'move', '1.0', 0, 0, ?)",
            (key, owner, ended),
        )

    await heir.adopt("run-1")

    owners = {row["key"]: row["owner"] for row in dead.world.rows("SELECT * FROM hold")}
    assert owners == {"open": None, "over": "run-1", "live": "run-3"}


# -- who may claim what, and when ---------------------------------------------------------


async def test_a_claim_takes_the_oldest_of_one_state_and_at_most_so_many(
    runs: tuple[Run, Run, Run],
):
    """Claimed is claimed: the next claim, by whomever, finds the rest."""
    dead, heir, sibling = runs
    for request_id in ("c", "a", "b"):
        await dead.left(request_id)
    await dead.accept("fresh")
    change(dead, "fresh", owner=None)
    await dead.running("busy")

    assert await heir.claim_ids(TaskState.HANDED_OVER, limit=2) == ["c", "a"]
    assert await sibling.claim_ids(TaskState.HANDED_OVER) == ["b"]
    assert await heir.claim_ids(TaskState.HANDED_OVER) == []
    assert await sibling.claim_ids(TaskState.ACCEPTED) == ["fresh"]
    assert [of(dead, name, "owner") for name in ("c", "b", "busy", "fresh")] == [
        ("run-2",),
        ("run-3",),
        ("run-1",),
        ("run-3",),
    ]


async def test_a_claim_is_for_this_service_and_this_place(runs: tuple[Run, Run, Run]):
    """A row for another host or instance waits for that one, another service's for its own runs."""
    dead, heir, _ = runs
    for target in ("", "host-a", "host-a-0", "host-b", "host-b-0"):
        await dead.left(f"for-{target}", target=target, resource=None)
    await dead.left("other-service")
    change(dead, "other-service", service="network")

    assert await heir.claim_ids(TaskState.HANDED_OVER) == ["for-", "for-host-a", "for-host-a-0"]


async def test_a_claim_can_be_for_one_lane(runs: tuple[Run, Run, Run]):
    """Each lane has places of its own; without a word it is for both."""
    dead, heir, sibling = runs
    await dead.left("r1")
    await dead.left("o1", lane=Lane.OPS)
    assert await heir.claim_ids(TaskState.HANDED_OVER, lane=Lane.OPS) == ["o1"]
    assert await heir.claim_ids(TaskState.HANDED_OVER, lane=Lane.REQUESTS) == ["r1"]
    await dead.left("r2")
    await dead.left("o2", lane=Lane.OPS)
    assert await sibling.claim_ids(TaskState.HANDED_OVER) == ["r2", "o2"]


async def test_a_claim_waits_for_the_settle_time_and_the_next_check(runs: tuple[Run, Run, Run]):
    """To the moment; a row that is only judged asks no backend, and need not settle."""
    dead, heir, _ = runs
    now = heir.clock.wall()
    await dead.left("settles", on_interrupt="probe")
    change(dead, "settles", not_before=now + 10)
    await dead.left("checked", on_interrupt="probe")
    change(dead, "checked", next_check=now + 20)
    await dead.left("both", on_interrupt="retry")
    change(dead, "both", not_before=now + 40, next_check=now + 30)
    await dead.left("judged")
    change(dead, "judged", not_before=now + 50)

    seen: list[tuple[float | None, list[str]]] = []
    for _ in range(5):
        look = await heir.claims.next_look()
        at = None if look is None else max(0.0, look - now)
        seen.append((at, await heir.claim_ids(TaskState.HANDED_OVER)))
        await asyncio.sleep(10)

    assert seen == [
        (0.0, ["judged"]),
        (10.0, ["settles"]),
        (20.0, ["checked"]),
        (40.0, []),
        (40.0, ["both"]),
    ]
    assert await heir.claims.next_look() is None


async def test_tasks_of_a_dead_run_settle_together_but_wait_for_none_that_is_only_judged(
    runs: tuple[Run, Run, Run],
):
    """Else one that is innocent could begin first, and the guilty one beside it; an `error` task
    begins no more, however long its settle time is.
    """
    dead, heir, _ = runs
    now = heir.clock.wall()
    await dead.running("short", on_interrupt="retry", settle_s=1.0)
    await dead.running("longer", on_interrupt="probe", settle_s=6.0)
    await dead.running("judged", on_interrupt="error", settle_s=60.0)

    await heir.adopt("run-1")

    assert of(heir, "short", "not_before") == of(heir, "longer", "not_before") == (now + 6,)
    assert await heir.claim_ids(TaskState.HANDED_OVER) == ["judged"]


async def test_the_next_look_is_for_rows_that_this_run_may_claim(runs: tuple[Run, Run, Run]):
    """What is owned, for another place, of another service, or not started wakes nobody here."""
    dead, heir, _ = runs
    await dead.left("elsewhere", target="host-b")
    await dead.left("other-service")
    change(dead, "other-service", service="network")
    await dead.hand_over(await dead.running("owned"), Interruption.UNCLEAN, returned=False)
    await dead.accept("fresh")
    change(dead, "fresh", owner=None)

    assert await heir.claims.next_look() is None

    await dead.left("here", target="host-a-0")
    assert await heir.claims.next_look() == 0.0


async def test_unfinished_resources_are_those_that_this_run_may_settle(
    runs: tuple[Run, Run, Run],
):
    """Of started rows without an owner, oldest first."""
    dead, heir, _ = runs
    vm, disk = ("vm", "v1"), ("volume", "v1")
    for request_id, more in {
        "second": {"resource": disk},
        "first": {"resource": vm, "target": "host-a"},
        "none": {},
        "elsewhere": {"resource": vm, "target": "host-b"},
        "other-service": {"resource": vm},
        "owned": {"resource": vm},
        "fresh": {"resource": vm},
    }.items():
        row_id = await dead.accept(request_id, **more)
        owner = "run-1" if request_id == "owned" else None
        state = "accepted" if request_id == "fresh" else "handed_over"
        dead.world.disk.execute(
            "UPDATE task SET owner = ?, state = ? WHERE id = ?", (owner, state, row_id)
        )
    change(dead, "other-service", service="network")

    found = await heir.claims.unfinished_resources()

    assert [resource for _, resource in found] == [disk, vm]
    assert [row_id for row_id, _ in found] == [(await heir.read(n)).id for n in ("second", "first")]


# -- what becomes of a claimed row --------------------------------------------------------


def again(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_run_again(batch, row)


def probing(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_probing(batch, row)


def wait(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_wait(batch, row, next_check=77.0, counts=True)


def postpone(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_postpone(batch, row, next_check=77.0)


def let_go(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_let_go(batch, row)


def disown(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_disown(batch, row)


def take_over(claims: Claims, batch: Batch, row: TaskRow) -> None:
    claims.add_take_over(batch, row)


STATES = ("accepted", "running", "handed_over", "succeeded")


@pytest.mark.parametrize(
    ("add", "states", "strict"),
    [
        (again, {"handed_over"}, True),
        (probing, {"handed_over"}, True),
        (wait, {"handed_over"}, True),
        (postpone, {"accepted", "handed_over"}, False),
        (let_go, {"accepted", "handed_over"}, False),
    ],
)
async def test_a_claimed_row_is_changed_only_while_it_is_ours_and_open(
    runs: tuple[Run, Run, Run], add: Add, states: set[str], strict: bool
):
    """One that was taken from us, began, ended, or is another's is left as it is."""
    _, heir, _ = runs
    await heir.left("other")
    change(heir, "other", owner="run-2")
    await heir.left("r1")
    row = await heir.read("r1")
    for owner in ("run-2", "run-3", None):
        for state in STATES:
            change(heir, "r1", owner=owner, state=state, next_check=5.0)
            before = heir.world.task("r1")
            changes = owner == "run-2" and state in states
            if strict and not changes:
                with pytest.raises(ConflictError):
                    await heir.do(add, row)
            else:
                await heir.do(add, row)
            assert (heir.world.task("r1") != before) is changes
            assert of(heir, "other", "owner", "state", "next_check") == (
                "run-2",
                "handed_over",
                None,
            )


async def test_a_row_that_was_let_go_is_not_being_asked_about(runs: tuple[Run, Run, Run]):
    """Its probe has ended: a crash of the next run that claims it is not its fault."""
    _, heir, _ = runs
    await heir.left("r1")
    change(heir, "r1", owner="run-2", probing=1)

    await heir.do(let_go, await heir.read("r1"))

    assert of(heir, "r1", "owner", "probing") == (None, 0)


async def test_a_row_that_is_run_again_is_accepted_anew_and_ours(runs: tuple[Run, Run, Run]):
    """Nothing of its cut, its waits or its probe is left; its cursor and its counts are."""
    _, heir, _ = runs
    await heir.left("r1")
    change(heir, "r1", owner="run-2", cursor="7", crashes=2, not_before=9.0, next_check=9.0)
    change(heir, "r1", waiting_since=9.0, probing=1)
    row = await heir.read("r1")

    await heir.do(again, row)

    now = of(heir, "r1", "state", "owner", "cut", "not_before", "next_check", "waiting_since")
    assert now == ("accepted", "run-2", None, None, None, None)
    assert of(heir, "r1", "probing", "cursor", "crashes", "attempts") == (0, "7", 2, 1)
    known = heir.claims.accepted(row)
    assert (known.state, known.cut, known.next_check) == (TaskState.ACCEPTED, None, None)


@pytest.mark.parametrize("counts", [True, False])
async def test_waiting_counts_from_the_first_wait_that_was_asked_for(
    runs: tuple[Run, Run, Run], counts: bool
):
    """The row is free until its next check, and no probe is under way any more."""
    _, heir, _ = runs
    await heir.left("r1")
    now = heir.clock.wall()
    for at in (0, 1):
        change(heir, "r1", owner="run-2", probing=1)
        batch = Batch(Point.SETTLE)
        heir.claims.add_wait(batch, await heir.read("r1"), next_check=77.0 + at, counts=counts)
        await heir.journal.commit(batch)
        assert of(heir, "r1", "state", "owner", "probing") == ("handed_over", None, 0)
        await asyncio.sleep(5)

    assert of(heir, "r1", "next_check", "waiting_since") == (78.0, now if counts else None)


async def test_a_probe_that_begins_is_on_record(runs: tuple[Run, Run, Run]):
    """If the process dies of it, that is known; postponed, it is over."""
    _, heir, _ = runs
    await heir.left("r1")
    change(heir, "r1", owner="run-2")
    row = await heir.read("r1")

    await heir.do(probing, row)
    assert of(heir, "r1", "probing", "owner") == (1, "run-2")
    await heir.do(postpone, row)
    assert of(heir, "r1", "probing", "owner", "next_check") == (0, None, 77.0)


async def test_a_row_that_nobody_here_works_on_is_settled_like_a_dead_runs(
    runs: tuple[Run, Run, Run],
):
    """What may have begun is cut unclean; the rest is let go as it is; others' rows are not
    ours.
    """
    _, heir, sibling = runs
    await heir.running("ran")
    await heir.accept("fresh")
    await heir.running("other")
    await sibling.running("theirs")
    for request_id in ("ran", "fresh"):
        await heir.do(disown, await heir.read(request_id))

    assert of(heir, "ran", "state", "owner", "cut") == ("handed_over", None, "unclean")
    assert of(heir, "fresh", "state", "owner", "cut") == ("accepted", None, None)
    assert of(heir, "other", "state", "owner") == ("running", "run-2")
    with pytest.raises(ConflictError):
        await heir.do(disown, await heir.read("theirs"))
    stale = await heir.read("other")
    await heir.finish(stale.id)
    with pytest.raises(ConflictError):
        await heir.do(disown, stale)


async def test_an_ownerless_row_is_taken_over_as_it_was_read(runs: tuple[Run, Run, Run]):
    """Whomever it was for; but not one that has an owner, or has moved on."""
    _, heir, sibling = runs
    await heir.left("r1", target="host-b")
    await heir.left("other")
    row = await heir.read("r1")
    change(heir, "r1", state="accepted")
    with pytest.raises(ConflictError):
        await heir.do(take_over, row)
    change(heir, "r1", state="handed_over")

    await heir.do(take_over, row)

    assert (of(heir, "r1", "owner"), of(heir, "other", "owner")) == (("run-2",), (None,))
    with pytest.raises(ConflictError):
        await sibling.do(take_over, row)


# -- what ended rows still owe ------------------------------------------------------------


async def test_what_ended_rows_without_an_owner_owe_becomes_ours(runs: tuple[Run, Run, Run]):
    """Of this service, and only where something is due."""
    _, heir, sibling = runs
    for request_id, reply, more in (
        ("reply", CALLER, {}),
        ("hook", None, {"errored_due": 1}),
        ("nothing", None, {}),
        ("other-service", CALLER, {"service": "network"}),
        ("owned", CALLER, {"owner": "run-3"}),
    ):
        task = await sibling.running(request_id, reply=reply)
        await sibling.finish(task.row_id or 0)
        change(sibling, request_id, **{"owner": None} | more)
    await sibling.left("open", reply=CALLER)

    await heir.claims.take_duties()

    owners = {row["request_id"]: row["owner"] for row in heir.world.rows("SELECT * FROM task")}
    assert owners == {
        "reply": "run-2",
        "hook": "run-2",
        "nothing": None,
        "other-service": None,
        "owned": "run-3",
        "open": None,
    }


@pytest.mark.parametrize("debt", ["reply", "hook"])
async def test_one_debt_of_either_kind_is_enough(runs: tuple[Run, Run, Run], debt: str):
    """The look that mostly finds nothing must not overlook it: nobody else would ever answer."""
    _, heir, sibling = runs
    task = await sibling.running("ended", reply=CALLER if debt == "reply" else None)
    await sibling.finish(task.row_id or 0)
    change(sibling, "ended", owner=None, errored_due=int(debt == "hook"))

    await heir.claims.take_duties()

    assert of(heir, "ended", "owner") == ("run-2",)


async def test_due_replies_are_those_of_this_runs_ended_tasks(runs: tuple[Run, Run, Run]):
    """With their address, and when the request came."""
    _, heir, sibling = runs
    came = heir.clock.wall()
    address = Address(queue="reply_1", msg_id="m1", expires_at=came + 60)
    task = await heir.running("ended", reply=address)
    await heir.running("open", reply=CALLER)
    other = await sibling.running("theirs", reply=CALLER)
    await asyncio.sleep(5)
    await heir.finish(task.row_id or 0)
    await sibling.finish(other.row_id or 0)

    assert await heir.claims.due_replies() == [(task.row_id, address, came)]


async def test_a_reply_that_was_sent_is_due_no_more_while_its_removal_waits(
    runs: tuple[Run, Run, Run],
):
    """Else this run would send it twice; another run, that only has the rows, may."""
    _, heir, _ = runs
    task = await heir.running("ended", reply=CALLER)
    await heir.finish(task.row_id or 0)

    heir.journal.forget_reply(task.row_id or 0, CALLER, sent=True)

    assert len(heir.world.rows("SELECT * FROM reply")) == 1
    assert await heir.claims.due_replies() == []
    await heir.journal.tally("anything")  # written with the next commit
    assert heir.world.rows("SELECT * FROM reply") == []
    assert heir.journal.answered == set()


async def test_errored_hooks_are_due_until_they_were_called(runs: tuple[Run, Run, Run]):
    """Oldest first and so many at once; what was kept for them goes with the debt, of that row
    alone.
    """
    _, heir, sibling = runs
    for run, names in ((heir, ("c", "a", "b", "fine")), (sibling, ("theirs",))):
        for request_id in names:
            await run.left(request_id)
            change(run, request_id, owner=run.journal.run_id, errored_due=int(request_id != "fine"))

    due = await heir.claims.errored_due(after=0, limit=2)
    assert [row.request_id for row in due] == ["c", "a"]
    (second,) = await heir.claims.errored_due(after=due[0].id, limit=1)
    assert second.request_id == "a"
    heir.journal.keep_failed = False  # else an operator's retry needs them
    await heir.claims.errored_done(due[0])

    assert [row.request_id for row in await heir.claims.errored_due(after=0)] == ["a", "b"]
    assert of(heir, "c", "errored_due", "args", "context") == (0, None, None)
    assert of(heir, "a", "errored_due", "args", "context") == (1, '{"vm":"v1"}', '{"user":"ann"}')


# -- what we do not know of ---------------------------------------------------------------


async def test_a_missing_row_is_open_ours_and_unknown(runs: tuple[Run, Run, Run]):
    """A commit whose end was never seen may have left one; all else is accounted for."""
    _, heir, sibling = runs
    known = await heir.accept("known")
    for request_id in ("accepted", "running", "handed_over", "succeeded"):
        await heir.accept(request_id)
        change(heir, request_id, state=request_id)
    await sibling.accept("theirs")

    missing = await heir.claims.missing(frozenset({known}))

    assert {row.request_id for row in missing} == {"accepted", "running", "handed_over"}
    assert await heir.claims.missing(frozenset({known, *(row.id for row in missing)})) == []


async def test_a_damaged_row_is_told_and_stops_no_other(runs: tuple[Run, Run, Run]):
    """It stays claimed, and what can be read is worked on."""
    dead, heir, _ = runs
    for request_id in ("broken", "whole"):
        await dead.left(request_id)
    dead.world.disk.execute(
        "UPDATE content SET args = '{' WHERE row_id = ?", of(dead, "broken", "id")
    )

    assert await heir.claim_ids(TaskState.HANDED_OVER) == ["whole"]
    (error,) = heir.damage
    assert "is damaged" in str(error)
