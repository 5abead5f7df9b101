"""RunLeases: who has one, with which token, and what gives it back."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gracekit.errors import ConflictError, StoreError, UnknownCommitError
from gracekit.leases.epoch import Epoch
from gracekit.leases.leases import Guard, LeaseRow, RunLeases
from gracekit.leases.leases_sql import PATIENCE_S
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.older import EPOCH_BITS, FILE, read_mark
from gracekit.telemetry.telemetry import Telemetry
from gracekit.testing.faults import Fault, PlannedFaults
from tests.played import PlayedEngine, PlayedProcess
from tests.service.kit import World

pytestmark = pytest.mark.looptime

VM = ("vm", "v1")
DISK = ("volume", "v1")


class Desk:
    """The leases of one run, on a disk that several share."""

    def __init__(self, world: World, run_id: str) -> None:
        self.world = world
        self.clock = world.clock
        self.faults = PlannedFaults()
        self.engine = PlayedEngine(world.disk, PlayedProcess(set(), 1), self.faults)
        self.leases = RunLeases(self.engine, world.clock, run_id=run_id)

    async def take(self, resource: tuple[str, str] = VM, request_id: str = "r1") -> Guard | None:
        return await self.leases.take(resource, request_id)

    async def take_for_row(self, request_id: str, row_id: int) -> None:
        batch = Batch(Point.BEGIN)
        self.leases.add_take(batch, VM, request_id, row_id)
        await self.engine.commit(batch)

    async def must_take(self, resource: tuple[str, str] = VM, request_id: str = "r1") -> Guard:
        guard = await self.take(resource, request_id)
        assert guard is not None
        return guard

    async def owner(self, resource: tuple[str, str] = VM) -> str | None:
        row = await self.leases.look(resource)
        assert row is not None
        return row.owner

    async def release(self, guard: Guard) -> None:
        await self.leases.release(guard, reason="clean")

    async def take_away(self, dead_run: str) -> None:
        batch = Batch(Point.ADOPT)
        self.leases.add_take_away(batch, dead_run, acted_until=self.leases._clock.wall())
        await self.engine.commit(batch)

    async def take_away_one(self, dead_run: str, request_id: str, settle_s: float) -> None:
        batch = Batch(Point.SETTLE)
        self.leases.add_take_away_one(batch, dead_run, request_id, settle_s=settle_s)
        await self.engine.commit(batch)

    def put(self, request_id: str, **columns: object) -> None:
        """A task's row: cut unclean and left to anybody, unless *columns* say otherwise."""
        known: dict[str, object] = {
            "request_id": request_id,
            "recipient": "",
            "service": "compute",
            "lane": "requests",
            "queue": "compute",
            "route": "shared",
            "target": "",
            "method": "resize",
            "version": "1.0",
            "content_hash": "",
            "on_interrupt": "probe",
            "settle_s": 10.0,
            "resource_kind": "vm",
            "resource_id": "v1",
            "state": "handed_over",
            "cut": "unclean",
            "accepted_at": 0.0,
        }
        row = known | columns
        marks = ", ".join("?" for _ in row)
        self.world.disk.execute(
            f"INSERT INTO task ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
        )

    def begin_run(self, run_id: str, service: str = "compute") -> None:
        """The row of a run; of it a lease reads the service."""
        self.world.disk.execute(
            "INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, "
            "pid_ns, pid, start_ticks, lock_path, phase, topic, ops_topic, transport, started_at, "
            "beat_at, methods, kinds, schema) "
            "VALUES (?, ?, 'h', ?, 1, '', '', 0, 1, 1, '', '', '', '', '', 0, 0, '[]', '[]', 1)",
            (run_id, service, run_id),
        )


@pytest.fixture
async def desks() -> AsyncIterator[tuple[Desk, Desk]]:
    """Two runs of one store."""
    world = World()
    made = Desk(world, "run-1"), Desk(world, "run-2")
    for desk in made:
        await desk.engine.start()
    yield made
    for desk in made:
        await desk.engine.stop()


def row_of(desk: Desk, resource: tuple[str, str] = VM) -> dict[str, object]:
    (row,) = desk.world.rows("SELECT * FROM lease WHERE kind = ? AND id = ?", *resource)
    return row


async def test_a_token_rises_with_each_grant_whoever_gets_it(desks: tuple[Desk, Desk]):
    """It survives a release: a write that carries an older one can be told from the owner's."""
    one, two = desks
    tokens = []
    for desk in (one, two, two, one):
        guard = await desk.must_take()
        tokens.append(guard.token)
        await desk.release(guard)

    assert tokens == [1, 2, 3, 4]
    assert (await one.must_take(DISK)).token == 1


async def test_a_held_lease_is_granted_to_nobody(desks: tuple[Desk, Desk]):
    """Neither to another run, nor to the same one, nor to the same task again."""
    one, two = desks
    await one.must_take()
    before = row_of(one)

    assert await two.take() is None
    assert await one.take(request_id="r2") is None
    assert await one.take() is None
    assert row_of(one) == before


async def test_a_lease_tells_who_took_it_and_how_it_was_given_back(desks: tuple[Desk, Desk]):
    """What an operator reads: owner and moment of the grant, then moment and reason of the
    release.
    """
    one, two = desks
    guard = await one.must_take()
    taken_at = one.clock.wall()
    await asyncio.sleep(5)
    await one.leases.release(guard, reason="handoff")

    row = row_of(one)
    assert (row["request_id"], row["acquired_at"]) == ("r1", taken_at)
    assert (row["released_at"], row["release_reason"]) == (taken_at + 5, "handoff")

    await two.must_take(request_id="r2")
    row = row_of(one)
    assert (row["owner"], row["request_id"], row["acquired_at"]) == ("run-2", "r2", taken_at + 5)
    assert (row["released_at"], row["release_reason"]) == (None, None)


async def test_a_look_takes_nothing(desks: tuple[Desk, Desk]):
    """It shows the lease as stored, held or free, and None for one that was never granted."""
    one, two = desks
    assert await two.leases.look(VM) is None
    guard = await one.must_take()

    held = LeaseRow(resource=VM, token=1, owner="run-1", request_id="r1", not_before=0.0)
    assert await two.leases.look(VM) == held
    await one.release(guard)
    free = LeaseRow(resource=VM, token=1, owner=None, request_id="r1", not_before=0.0)
    assert await two.leases.look(VM) == free
    assert await two.leases.look(DISK) is None


async def test_a_release_is_for_one_grant_alone(desks: tuple[Desk, Desk]):
    """A late one, of an older token, another run or another resource, leaves the present owner
    alone.
    """
    one, two = desks
    old = await one.must_take()
    await one.release(old)
    new = await one.must_take()
    await one.must_take(DISK)

    await one.release(old)
    await two.release(new)
    await one.release(Guard(resource=("vm", "v2"), token=new.token))
    await one.release(Guard(resource=("host", "v1"), token=new.token))
    assert (await one.owner(), await one.owner(DISK)) == ("run-1", "run-1")

    await one.release(new)
    assert (await one.owner(), await one.owner(DISK)) == (None, "run-1")


async def test_a_drop_is_for_one_task_of_one_run_alone(desks: tuple[Desk, Desk]):
    """It names no token, because nobody knows it; all else must match."""
    one, two = desks
    await one.must_take()
    await one.must_take(DISK)

    async def drop(desk: Desk, resource: tuple[str, str], request_id: str) -> None:
        batch = Batch(Point.RELEASE_LEASE)
        desk.leases.add_drop(batch, resource, request_id)
        await desk.engine.commit(batch)

    await drop(two, VM, "r1")
    await drop(one, VM, "r2")
    await drop(one, ("vm", "v2"), "r1")
    await drop(one, ("host", "v1"), "r1")
    assert (await one.owner(), await one.owner(DISK)) == ("run-1", "run-1")

    await asyncio.sleep(5)
    await drop(one, VM, "r1")
    assert (await one.owner(), await one.owner(DISK)) == (None, "run-1")
    row = row_of(one)
    assert (row["released_at"], row["release_reason"]) == (one.clock.wall(), "clean")


# -- a commit in doubt ----------------------------------------------------------------------


async def test_a_grant_that_nobody_heard_of_is_given_back(desks: tuple[Desk, Desk]):
    """The commit may have landed: the lease is owed, for that task and resource alone."""
    one, _ = desks
    await one.must_take(DISK)
    await one.must_take(("vm", "v2"), "r2")
    one.faults.plan("store", Point.TAKE_LEASE.value, Fault.LOST_AFTER)
    with pytest.raises(UnknownCommitError):
        await one.take()
    assert await one.owner() == "run-1"

    await one.leases.give_back_owed()

    assert await one.owner() is None
    assert (await one.owner(DISK), await one.owner(("vm", "v2"))) == ("run-1", "run-1")


async def test_a_doubt_outlives_a_second_take_that_finds_the_lease_held(desks: tuple[Desk, Desk]):
    """It may be our own grant that holds it: dropped now, the doubt would leave it held for
    ever.
    """
    one, _ = desks
    one.faults.plan("store", Point.TAKE_LEASE.value, Fault.LOST_AFTER)
    with pytest.raises(UnknownCommitError):
        await one.take()
    assert await one.take() is None

    await one.leases.give_back_owed()

    assert await one.owner() is None


async def test_a_refused_take_of_what_the_task_holds_takes_nothing_from_it(
    desks: tuple[Desk, Desk],
):
    """Nothing was in doubt, so nothing is owed: the block that has the lease keeps it."""
    one, _ = desks
    await one.must_take()
    assert await one.take() is None

    await one.leases.give_back_owed()

    assert await one.owner() == "run-1"


async def test_a_grant_ends_the_doubt_about_its_own_resource_alone(desks: tuple[Desk, Desk]):
    """What else is in doubt is still given back, and what was granted since is kept."""
    one, _ = desks
    one.faults.plan("store", Point.TAKE_LEASE.value, Fault.LOST_BEFORE)
    one.faults.plan("store", Point.TAKE_LEASE.value, Fault.LOST_AFTER, times=2)
    for resource, request_id in ((VM, "r1"), (DISK, "r1"), (("vm", "v2"), "r2")):
        with pytest.raises(UnknownCommitError):
            await one.take(resource, request_id)

    assert await one.take() is not None
    await one.leases.give_back_owed()

    assert await one.owner() == "run-1"
    assert (await one.owner(DISK), await one.owner(("vm", "v2"))) == (None, None)


async def test_what_is_owed_by_token_is_no_later_grant(desks: tuple[Desk, Desk]):
    """A release that failed may have landed, and the same task may have the lease again since."""
    one, _ = desks
    owed = await one.must_take()
    await one.release(owed)
    await one.must_take()
    one.leases.owe(owed, "r1")

    await one.leases.give_back_owed()

    assert await one.owner() == "run-1"


async def test_what_is_owed_stays_owed_until_it_is_given_back(desks: tuple[Desk, Desk]):
    """A commit that fails keeps the debt, and what comes meanwhile is added to it."""
    one, _ = desks
    one.leases.owe(await one.must_take(), "r1")
    late = await one.must_take(DISK)
    one.faults.plan("store", Point.RELEASE_LEASE.value, Fault.REFUSED)
    with pytest.raises(StoreError):
        await one.leases.give_back_owed()
    assert await one.owner() == "run-1"

    paying = asyncio.create_task(one.leases.give_back_owed())
    await asyncio.sleep(0)
    one.leases.owe(late, "r1")
    await paying
    assert (await one.owner(), await one.owner(DISK)) == (None, "run-1")

    await one.leases.give_back_owed()
    assert await one.owner(DISK) is None
    assert row_of(one)["release_reason"] == "clean"


# -- an older task's truth ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("older", "waits"),
    [
        ({}, True),
        ({"cut": "cancelled"}, True),
        ({"cut": "safe_point"}, False),
        ({"state": "accepted"}, False),
        ({"state": "succeeded"}, False),
        ({"resource_kind": "host"}, False),
        ({"resource_id": "v2"}, False),
        ({"service": "network"}, False),
        ({"target": "host-b"}, False),
        ({"target": "host-b", "owner": "run-3"}, True),
        ({"owner": "run-3"}, True),
    ],
)
async def test_a_resource_waits_until_an_older_task_is_settled(
    desks: tuple[Desk, Desk], older: dict[str, object], waits: bool
):
    """What the older one did to it is not known; but not for one that only an absent host may
    settle, one that stopped at a safe point, and one that concerns another resource or service.
    """
    one, _ = desks
    one.begin_run("run-1")
    await one.release(await one.must_take())
    one.put("older", **older)
    one.put("r1", state="accepted", cut=None)

    assert (await one.take() is None) is waits
    # A job beside the requests has no row, and is younger than all that have one.
    if waits:
        assert await one.take(request_id="job") is None


async def test_a_resource_does_not_wait_for_a_younger_task_nor_for_the_same(
    desks: tuple[Desk, Desk],
):
    """Of two that are unfinished the older goes first: waiting for each other they would wait
    forever.
    """
    one, _ = desks
    one.begin_run("run-1")
    await one.release(await one.must_take())
    one.put("r1")
    one.put("younger")

    await one.release(await one.must_take())
    assert await one.take(request_id="younger") is None


async def test_a_task_is_as_young_as_the_last_of_its_copies(desks: tuple[Desk, Desk]):
    """Copies of a fanout share an id, and it is not known which of them asks; they do not wait for
    each other.
    """
    one, _ = desks
    one.begin_run("run-1")
    await one.release(await one.must_take())
    one.put("r1", recipient="node-1-0")
    one.put("r1", recipient="node-2-0", state="accepted", cut=None)
    await one.release(await one.must_take())

    one.put("between")
    one.put("r1", recipient="node-3-0", state="accepted", cut=None)
    assert await one.take() is None


# -- the dead ---------------------------------------------------------------------------------


async def test_the_leases_of_a_dead_run_are_freed_and_no_others(desks: tuple[Desk, Desk]):
    """Without a task that may have acted there is nothing to settle: anybody gets them at once."""
    one, two = desks
    await one.must_take()
    await two.must_take(DISK)
    await asyncio.sleep(5)

    await two.take_away("run-1")

    row = row_of(two)
    assert (row["owner"], row["release_reason"], row["released_at"]) == (
        None,
        "taken",
        two.clock.wall(),
    )
    assert await two.owner(DISK) == "run-2"
    assert (await two.must_take()).token == 2


@pytest.mark.parametrize(
    ("acted", "settle_s"),
    [
        ({}, 10),
        ({"state": "running", "cut": None}, 10),
        ({"state": "succeeded"}, 0),
        ({"state": "accepted", "cut": None}, 0),
        ({"owner": "run-2"}, 0),
        ({"request_id": "r2"}, 10),
        ({"request_id": "r2", "resource_id": "v2"}, 0),
        ({"request_id": "r2", "resource_kind": "host"}, 0),
        ({"resource_kind": None, "resource_id": None}, 10),
        ({"settle_s": 0.0}, 0),
    ],
)
async def test_a_dead_runs_resource_waits_for_those_that_may_have_acted_on_it(
    desks: tuple[Desk, Desk], acted: dict[str, object], settle_s: float
):
    """The task that has the lease, and others that name the resource, as long as the longest
    takes.
    """
    one, two = desks
    await one.must_take()
    one.put(**{"request_id": "r1", "owner": "run-1"} | acted)
    one.put("short", owner="run-1", resource_id="v1" if settle_s else "v2", settle_s=1.0)
    now = two.clock.wall()

    await two.take_away("run-1")

    assert row_of(two)["not_before"] == now + settle_s


async def test_one_task_of_a_dead_run_is_waited_for_as_long_as_it_settles(
    desks: tuple[Desk, Desk],
):
    """Its last request to a backend may be in flight; other tasks and runs keep what they have."""
    one, two = desks
    await one.must_take()
    await one.must_take(DISK, "r2")
    await two.must_take(("vm", "v2"))
    await asyncio.sleep(5)
    now = two.clock.wall()

    await two.take_away_one("run-1", "r1", 30.0)

    row = row_of(two)
    assert (row["owner"], row["release_reason"], row["released_at"], row["not_before"]) == (
        None,
        "taken",
        now,
        now + 30,
    )
    assert (await two.owner(DISK), await two.owner(("vm", "v2"))) == ("run-1", "run-2")
    looked = await two.leases.look(VM)
    assert looked is not None
    assert looked.not_before == now + 30


async def test_nobody_gets_a_resource_before_it_has_settled(desks: tuple[Desk, Desk]):
    """A second death that settles sooner does not shorten the wait for the first."""
    one, two = desks
    await one.must_take()
    await two.take_away_one("run-1", "r1", 30.0)
    two.world.disk.execute("UPDATE lease SET owner = 'run-1'")
    await two.take_away_one("run-1", "r1", 10.0)

    await asyncio.sleep(29)
    assert await two.take() is None
    await asyncio.sleep(1)
    assert (await two.must_take()).token == 2


async def test_tokens_are_above_the_floor_and_rise_from_there(desks: tuple[Desk, Desk]):
    """A store that is an older one gives no token twice, for old and new resources alike."""
    desk, other = desks
    await desk.release(await desk.must_take(VM))

    desk.world.disk.execute("UPDATE epoch SET floor = ?", (1 << 40,))

    first = await desk.must_take(VM)
    assert (first.token, (await desk.must_take(DISK)).token) == ((1 << 40) + 1, (1 << 40) + 1)
    await desk.release(first)
    second = await other.must_take(VM)
    assert second.token == (1 << 40) + 2
    await other.release(second)
    assert (await desk.must_take(VM)).token == (1 << 40) + 3


async def test_a_row_that_was_free_for_long_goes_and_its_tokens_rise_all_the_same(
    desks: tuple[Desk, Desk],
):
    """Whoever takes the resource again gets a token above each that was ever given for it."""
    one, two = desks
    for _ in range(3):
        guard = await one.must_take()
        await one.release(guard)
    await one.must_take(DISK)
    await asyncio.sleep(100)
    young = await one.must_take(("vm", "v2"))
    await one.release(young)

    await two.leases.remove_old(two.clock.wall() - 50)

    left = [
        tuple(row.values()) for row in one.world.rows("SELECT id, lver FROM lease ORDER BY 1, 2")
    ]
    assert left == [("v1", 1), ("v2", 1)]
    assert (await two.must_take()).token == 4
    assert (await one.must_take(("vm", "v3"))).token == 4
    assert (await two.must_take(("vm", "v2"))).token == 4


@pytest.mark.parametrize("keeper", ["open task", "settling"])
async def test_a_free_row_stays_while_it_means_more_than_its_token(
    desks: tuple[Desk, Desk], keeper: str
):
    """An open task of its resource, or a settle time that goes on."""
    one, _ = desks
    await one.release(await one.must_take())
    if keeper == "open task":
        one.put("r2")
    else:
        one.world.disk.execute("UPDATE lease SET not_before = ?", (one.clock.wall() + 200,))
    await asyncio.sleep(100)

    await one.leases.remove_old(one.clock.wall() - 50)
    assert row_of(one)
    await asyncio.sleep(200)
    one.world.disk.execute("DELETE FROM task")
    await one.leases.remove_old(one.clock.wall() - 50)

    assert one.world.rows("SELECT * FROM lease") == []


async def test_old_rows_are_looked_at_page_by_page(desks: tuple[Desk, Desk]):
    """A million held resources cost no pass more than a page, and the last one is reached."""
    one, _ = desks
    for n in range(1200):
        guard = await one.must_take(("vm", f"v{n:04}"))
        if n % 2:
            await one.release(guard)
    await asyncio.sleep(100)

    counts = []
    for _ in range(4):
        await one.leases.remove_old(one.clock.wall() - 50)
        counts.append(len(one.world.rows("SELECT id FROM lease")))

    assert counts == [950, 700, 600, 600]


def epoch_of(desk: Desk, directory: Path, kept: list[int], heard: list[str]) -> Epoch:
    """The epoch as that run begins it; the queue has *kept* the marks of the store."""

    async def keep(name: str, mark: int) -> int:
        kept.append(mark)
        return max(kept)

    telemetry = Telemetry()
    telemetry.subscribe(lambda event, fields: heard.append(event))
    path = directory / "store.db"
    return Epoch(desk.engine, str(path), directory, keep, telemetry, desk.clock)


async def test_the_mark_is_closed_to_others(desks: tuple[Desk, Desk], tmp_path: Path):
    """As all files of a store are, whatever the umask of the service."""
    before = os.umask(0o022)
    try:
        await epoch_of(desks[0], tmp_path, [], []).rise()
    finally:
        os.umask(before)

    assert read_mark(tmp_path) > 0
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("slower", [0, 1, None], ids=["the first", "the second", "neither"])
async def test_two_runs_that_find_their_store_older_at_once_both_rise_above_it(
    desks: tuple[Desk, Desk], tmp_path: Path, slower: int | None
):
    """Each has looked before the other has raised the epoch, and one commits before the other or
    not: whoever grants the next token, it is above all that were given, and it is said.
    """
    given = 3 << EPOCH_BITS | 7
    kept = [given]
    heard: list[str] = []
    epochs = [epoch_of(desk, tmp_path, kept, heard) for desk in desks]
    if slower is not None:
        desks[slower].faults.plan("store", Point.JOIN.value, Fault.DELAY, times=3)

    await asyncio.gather(*(epoch.begin() for epoch in epochs))

    assert heard == ["store.older", "store.older"]
    tokens = []
    for desk in (*desks, *reversed(desks)):
        guard = await desk.must_take()
        tokens.append(guard.token)
        await desk.release(guard)
    assert tokens[0] > given
    assert tokens == sorted(set(tokens))
    assert read_mark(tmp_path) == max(kept)
    third = epoch_of(desks[0], tmp_path, kept, heard)
    await third.begin()
    assert heard == ["store.older", "store.older"]


async def test_a_run_that_lived_on_since_the_copy_keeps_its_accepted_requests(
    desks: tuple[Desk, Desk], tmp_path: Path
):
    """A server that took over is a copy under runs that live: they know what they have begun."""
    desk, _ = desks
    for run_id in ("lives", "silent"):
        desk.begin_run(run_id)
        desk.put(run_id, state="accepted", cut=None, owner=run_id)
    desk.world.disk.execute("UPDATE epoch SET copied_at = 100")
    desk.world.disk.execute("UPDATE run SET beat_at = 101 WHERE run_id = 'lives'")

    await epoch_of(desk, tmp_path, [0], []).begin()

    states = desk.world.rows("SELECT request_id, state FROM task ORDER BY id")
    assert [tuple(row.values()) for row in states] == [
        ("lives", "accepted"),
        ("silent", "handed_over"),
    ]


@pytest.mark.parametrize(
    ("waits", "granted"),
    [
        ({}, False),
        ({"waiting_since": None}, True),
        ({"owner": None}, True),
        ({"owner": "run-1"}, True),
        ({"state": "running"}, True),
        ({"finished_at": 1.0, "state": "cancelled"}, True),
        ({"resource_id": "v2"}, True),
    ],
    ids=["waits", "has not asked", "nobody's", "ours", "has begun", "has ended", "elsewhere"],
)
async def test_a_lease_goes_to_the_oldest_request_of_another_run_that_waits(
    desks: tuple[Desk, Desk], waits: dict[str, object], granted: bool
):
    """A younger one is refused, the waiting one is not; a row that does not wait keeps nobody
    out.
    """
    one, other = desks
    for desk, run_id in zip(desks, ("run-1", "run-2"), strict=True):
        desk.begin_run(run_id)
    await one.release(await one.must_take())
    now = one.clock.wall()
    waiting = {"state": "accepted", "cut": None, "owner": "run-2", "waiting_since": now}
    one.put("older", **waiting | waits)
    one.put("younger", state="accepted", cut=None, owner="run-1")

    guard = await one.take(request_id="younger")
    assert (guard is not None) is granted
    if guard is None:
        rivals = await one.leases.rivals(VM)
        assert (rivals.holder, rivals.is_free, rivals.following) == (None, True, "run-2")
        assert await other.take(request_id="older") is not None


async def test_who_has_not_asked_for_a_while_keeps_nobody_from_a_lease(desks: tuple[Desk, Desk]):
    """Its process may be dead or frozen; the same where the wall clock has stepped back."""
    one, _ = desks
    one.begin_run("run-1")
    await one.release(await one.must_take())
    row = {"state": "accepted", "cut": None, "owner": "run-2", "waiting_since": one.clock.wall()}
    one.put("older", **row)
    one.put("from the future", **row | {"waiting_since": one.clock.wall() + 1000})
    one.put("younger", state="accepted", cut=None, owner="run-1")
    await asyncio.sleep(PATIENCE_S - 0.1)
    assert await one.take(request_id="younger") is None
    await asyncio.sleep(0.2)

    assert await one.take(request_id="younger") is not None


async def test_a_drop_leaves_the_lease_of_an_attempt_that_runs(desks: tuple[Desk, Desk]):
    """Recovery drops what it may have taken for a row. If the row runs here meanwhile, by an
    operator's retry, the lease is its attempt's.
    """
    desk, _ = desks
    desk.put("r1", state="running", cut=None, owner="run-1")
    guard = await desk.must_take(VM, "r1")

    batch = Batch(Point.SETTLE)
    desk.leases.add_drop(batch, VM, "r1")
    await desk.engine.commit(batch)

    assert await desk.owner() == "run-1"
    desk.world.disk.execute("UPDATE task SET state = 'handed_over' WHERE request_id = 'r1'")
    batch = Batch(Point.SETTLE)
    desk.leases.add_drop(batch, VM, "r1")
    await desk.engine.commit(batch)
    assert (await desk.owner(), row_of(desk)["lver"]) == (None, guard.token)


async def test_copies_of_a_fanout_do_not_let_each_other_pass_for_ever(desks: tuple[Desk, Desk]):
    """They share a request id; who is older is a matter of their rows."""
    one, other = desks
    for desk, run_id in zip(desks, ("run-1", "run-2"), strict=True):
        desk.begin_run(run_id)
    await one.release(await one.must_take())
    waits = {"state": "accepted", "cut": None, "waiting_since": one.clock.wall()}
    one.put("fanout", recipient="one", owner="run-1", **waits)
    one.put("between", owner="run-2", **waits)
    one.put("fanout", recipient="other", owner="run-2", **waits)

    with pytest.raises(ConflictError):
        await other.take_for_row("between", 2)
    await one.take_for_row("fanout", 1)
    assert await one.owner() == "run-1"
