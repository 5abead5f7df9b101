"""The share manager of examples/shares: its rules, its records, its driver."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from examples.shares import manager
from examples.shares.database import TRANSIENT, Database, Record
from examples.shares.driver import BackendError, Driver, DummyDriver, Fault, Thing
from gracekit import Absent, DeclarationError, Found, ResourceKind, Service, Settled, Wait
from gracekit.recovery.resources.kinds import How
from tests.examples.shares_site import ASKED, DELETED, ROWS, Row, kind_of, log_of, record

# -- the table --------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_each_status_has_the_rule_and_the_failed_status_of_the_table(row: Row) -> None:
    """How a status is settled, and which status is written if that does not go well."""
    rule = kind_of(row.kind).rules[row.status]

    assert (rule.how, rule.failed) == (row.how, row.failed)
    assert rule.done == ("deleted" if row.how is How.DELETE else "")
    assert bool(rule.why) == (row.how is How.LEAVE)


def test_no_status_is_in_the_table_alone_or_in_the_database_alone() -> None:
    """The two name the same statuses, and `available` and `ensuring` are not among them."""
    by_kind = {kind: {r.status for r in ROWS if r.kind == kind} for kind in TRANSIENT}

    assert by_kind == TRANSIENT
    assert not {"available", "ensuring"} & set().union(*TRANSIENT.values())


def test_a_status_that_the_database_gets_later_is_refused_without_a_rule() -> None:
    """Whoever adds a transient status has to say how it is settled."""
    svc = Service("share-manager")
    kind = svc.kind("backup", statuses=TRANSIENT["backup"] | {"verifying"})
    kind.find(lambda _ctx, *, after, limit: [])
    kind.write(lambda _ctx, found, status, facts: True)
    for status, rule in kind_of("backup").rules.items():
        kind.leave(status, why=rule.name)

    with pytest.raises(DeclarationError, match="no rule for status 'verifying'"):
        svc.check()


def test_kinds_are_settled_in_the_order_of_the_table() -> None:
    """Share servers first, backups last; the declaration as a whole can be served."""
    manager.svc.check()

    assert [kind.name for kind in manager.svc.kinds.in_order()] == [
        "share_server",
        "share",
        "replica",
        "snapshot",
        "share_group",
        "share_group_snapshot",
        "backup",
    ]


# -- the rules, called one by one ---------------------------------------------------------


async def settle(row: Row, id_: str = "x-1", *, fence: int = 1) -> Any:
    """What the rule of a row returns when it is called by itself."""
    hook = kind_of(row.kind).rules[row.status].hook
    assert hook is not None
    assert hook.target is not None
    return await hook.target(SimpleNamespace(fence=fence), Found(id_, row.status))


@pytest.mark.parametrize("row", ASKED, ids=str)
async def test_a_probe_says_what_the_backend_says(row: Row, backend: DummyDriver) -> None:
    """Ready is available, with the facts that the status is about; broken and absent are not."""
    facts: dict[str, object] = {}
    if row.kind == "share":
        creating = row.status.startswith("creating")
        facts = {"export_locations": ["nas:/x"]} if creating else {"size": 7}
    backend.put(row.kind, "ready", Thing(size=7, export_locations=["nas:/x"]))
    backend.put(row.kind, "working", Thing(state="working"))
    backend.put(row.kind, "broken", Thing(state="broken"))
    backend.put(row.kind, "deleted", Thing(state="gone"))

    assert await settle(row, "ready") == Settled("available", **facts)
    assert await settle(row, "working") == Wait("1s")
    assert await settle(row, "broken") == Absent("the backend says that it is broken")
    assert await settle(row, "deleted") == Absent()
    assert await settle(row, "never there") == Absent()
    assert log_of(backend, "ready") == [row.call]


@pytest.mark.parametrize("row", ASKED, ids=str)
async def test_a_probe_of_a_driver_that_cannot_say_is_not_implemented(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every question is optional in a driver."""
    monkeypatch.setattr(manager, "driver", Driver())

    with pytest.raises(NotImplementedError):
        await settle(row)


@pytest.mark.parametrize("row", DELETED, ids=str)
async def test_a_delete_is_done_again_and_what_is_gone_is_no_error(
    row: Row, backend: DummyDriver
) -> None:
    """Under the token of the rule: a later owner's thing is not deleted."""
    backend.put(row.kind, "x-1", Thing(size=1))
    backend.put(row.kind, "x-2", Thing(size=1, fence=5))

    for _ in range(2):
        await settle(row, "x-1", fence=4)
    with pytest.raises(BackendError, match="token 4 is stale, 5 has been here"):
        await settle(row, "x-2", fence=4)

    assert not backend.has(row.kind, "x-1")
    assert backend.has(row.kind, "x-2")
    assert log_of(backend, "x-1") == [row.call, row.call]


# -- the records --------------------------------------------------------------------------


def found_in(kind: str, *, limit: int) -> list[Found]:
    """All pages, as a pass reads them."""
    find = kind_of(kind).hook("find").target
    assert find is not None
    found: list[Found] = []
    while page := find(SimpleNamespace(), after=found[-1].id if found else None, limit=limit):
        assert len(page) <= limit
        found += page
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize("kind", TRANSIENT)
def test_find_returns_the_transient_records_of_this_host_in_the_order_of_ids(
    database: Database, kind: str, limit: int
) -> None:
    """In pages of any size: none twice, none left out, and nothing that is settled, or
    elsewhere.
    """
    settled = {"available", "ensuring", "deleted", "error", "error_deleting", "manage_error"}
    transient = sorted(TRANSIENT[kind])
    wanted = {f"x:{len(transient) - n}\n": status for n, status in enumerate(transient)}
    for id_, status in wanted.items():
        database.insert(record(id_, status, kind=kind, updated_at=5.0))
    for status in settled - shown_when_failed(kind):
        database.insert(record(f"x:2{status}", status, kind=kind))
    for other in TRANSIENT.keys() - {kind}:
        database.insert(record("x:3", "creating", kind=other))
    database.insert(Record(kind=kind, id="x:4", host="vm-1", status="creating"))

    found = found_in(kind, limit=limit)

    assert [one.id for one in found] == sorted(wanted)
    assert {one.id: one.status for one in found} == wanted
    assert {(one.since, one.busy) for one in found} == {(5.0, False)}


def shown_when_failed(kind: str) -> frozenset[str]:
    """Failed statuses of a kind that others need."""
    needed = kind in {"share_server", "share", "share_group"}
    return kind_of(kind).failed_statuses if needed else frozenset()


@pytest.mark.parametrize("kind", TRANSIENT)
def test_find_returns_what_has_failed_if_others_need_it(database: Database, kind: str) -> None:
    """However long ago, so that what needs it fails as well, in any later pass."""
    for status in kind_of(kind).failed_statuses:
        database.insert(record(status, status, kind=kind))

    assert {one.status for one in found_in(kind, limit=2)} == shown_when_failed(kind)


def test_a_record_with_a_task_state_is_busy(database: Database) -> None:
    """Somebody carries its migration on, so it is left alone, whatever its status."""
    database.insert(record("sh-1", "extending", task_state="migration_driver_in_progress"))
    database.insert(record("sh-2", "extending"))

    assert [one.busy for one in found_in("share", limit=10)] == [True, False]


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("share_server", None),
        ("share", "share_server"),
        ("replica", "share"),
        ("snapshot", "share"),
        ("share_group", "share_server"),
        ("share_group_snapshot", "share_group"),
        ("backup", "share"),
    ],
)
def test_a_record_needs_its_parent(database: Database, kind: str, needed: str | None) -> None:
    """A share its server, a snapshot its share; one without a parent needs nothing."""
    database.insert(record("x-1", "deleting", kind=kind, parent="p-1"))
    database.insert(record("x-2", "deleting", kind=kind))

    needs = [one.needs for one in found_in(kind, limit=10)]

    assert needs == [((needed, "p-1"),) if needed else (), ()]
    if needed:
        assert needed in {kind.name for kind in kinds_before(kind)}


def kinds_before(name: str) -> list[ResourceKind]:
    in_order = manager.svc.kinds.in_order()
    return in_order[: in_order.index(kind_of(name))]


@pytest.mark.parametrize("kind", TRANSIENT)
def test_write_compares_the_status_and_the_token(database: Database, kind: str) -> None:
    """A record that has moved on, or has seen a higher token, is not written."""
    write = kind_of(kind).hook("write").target
    assert write is not None
    facts = {"size": 9, "export_locations": ["nas:/x"]}
    database.insert(record("x-1", "deleting", kind=kind, fence=5, size=3, updated_at=5.0))

    def written(fence: int, seen: str, status: str) -> bool:
        return write(SimpleNamespace(fence=fence), Found("x-1", seen), status, facts)

    assert not written(4, "deleting", "error")
    assert not written(6, "creating", "error")
    assert database.get(kind, "x-1") == record(
        "x-1", "deleting", kind=kind, fence=5, size=3, updated_at=5.0
    )
    assert written(6, "deleting", "available")
    assert not written(6, "deleting", "error")
    after = database.get(kind, "x-1")
    assert after is not None
    assert (after.status, after.fence) == ("available", 6)
    assert (after.size, after.export_locations) == (9, ("nas:/x",))
    assert after.updated_at > 5.0


def test_a_claim_writes_the_token_and_not_the_time(database: Database) -> None:
    """`updated_at` is when the status changed, so that a slow task is not taken for a new one."""
    database.insert(record("sh-1", updated_at=5.0, size=3))

    assert database.write("share", "sh-1", seen="creating", status="creating", fence=2)
    assert not database.write("share", "sh-1", seen="creating", status="error", fence=1)

    assert database.get("share", "sh-1") == record("sh-1", updated_at=5.0, size=3, fence=2)


# -- the driver -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "raised"), [("raise", BackendError), ("not implemented", NotImplementedError)]
)
async def test_a_planted_fault_meets_the_calls_about_one_thing(
    backend: DummyDriver, fault: Fault, raised: type[Exception]
) -> None:
    """Until it is mended; every call is in the log, however it ends."""
    backend.plant("sh-1", fault)

    with pytest.raises(raised):
        await backend.get_share_status("sh-1")
    assert await backend.get_share_status("sh-2") is None
    backend.mend("sh-1")
    assert await backend.get_share_status("sh-1") is None
    assert log_of(backend, "sh-1") == ["get_share_status"] * 2


async def test_a_call_that_hangs_is_answered_when_it_is_mended(backend: DummyDriver) -> None:
    """Before that it can only be cancelled."""
    backend.plant("sh-1", "hang")
    asked = asyncio.create_task(backend.get_share_status("sh-1"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.get_share_status("sh-1"), 0.05)
    assert not asked.done()

    backend.mend("sh-1")

    assert await asyncio.wait_for(asked, 30) is None


async def test_the_backend_refuses_a_stale_token_also_for_what_is_gone(
    backend: DummyDriver,
) -> None:
    """A create that was on its way when a later owner has deleted the share makes nothing."""
    await backend.delete("share", "sh-1", fence=7)

    with pytest.raises(BackendError, match="token 6 is stale"):
        await backend.create_share("sh-1", 1, fence=6)
    made = await backend.create_share("sh-1", 1, fence=8)
    again = await backend.create_share("sh-1", 2, fence=8)
    with pytest.raises(BackendError, match="token 7 is stale"):
        await backend.resize_share("sh-1", 5, fence=7)

    assert (made.size, again.size) == (1, 1)
    assert await backend.get_share_status("sh-1") == Thing(
        size=1, export_locations=["nas-1:/sh-1", "nas-2:/sh-1"], fence=8
    )
