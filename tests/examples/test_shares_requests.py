"""The share manager of examples/shares: its requests, and its pass of available shares."""

from __future__ import annotations

from typing import Any

import pytest

from examples.shares import manager
from examples.shares.api import Api, RefusedError
from examples.shares.database import Database, Record
from examples.shares.driver import DummyDriver, Thing
from gracekit import RemoteError
from gracekit.testing import InMemoryService, TaskState, run
from tests.examples.shares_site import HOST, log_of, record

# -- requests -------------------------------------------------------------------------------


class Site:
    """The service in memory, its records and its backend."""

    def __init__(self, one: InMemoryService, database: Database, backend: DummyDriver) -> None:
        self.one = one
        self.database = database
        self.backend = backend
        self.api = Api(database, one.client, HOST)

    def share(self, id_: str = "sh-1") -> Record:
        found = self.database.get("share", id_)
        assert found is not None
        return found


def play(database: Database, backend: DummyDriver, story: Any) -> None:
    """Run *story* with a service on memory://, in virtual time."""

    async def main() -> None:
        async with InMemoryService(manager.svc, host=HOST) as one:
            await story(Site(one, database, backend))

    run(main())


def test_a_share_is_made_extended_and_deleted(database: Database, backend: DummyDriver) -> None:
    """Each request writes its status itself, under its token, and the tokens rise."""

    async def story(site: Site) -> None:
        await site.api.create_share("sh-1", size=5)
        await site.one.settled()
        made = site.share()
        assert (made.status, made.size, len(made.export_locations)) == ("available", 5, 2)
        await site.api.create_snapshot("sn-1", "sh-1")
        await site.api.extend_share("sh-1", size=9)
        await site.one.settled()
        extended = site.share()
        assert (extended.status, extended.size) == ("available", 9)
        await site.api.delete_share("sh-1")
        await site.one.settled()
        assert site.share().status == "deleted"
        assert made.fence < extended.fence < site.share().fence
        snapshot = database.get("snapshot", "sn-1")
        assert snapshot is not None
        assert snapshot.status == "available"

    play(database, backend, story)

    assert not backend.has("share", "sh-1")
    assert log_of(backend, "sh-1") == ["create_share", "resize_share", "delete_share"]


@pytest.mark.parametrize(
    ("status", "method", "arguments", "failed"),
    [
        ("creating", manager.create_share, {"size": 5}, "error"),
        ("extending", manager.extend_share, {"size": 9}, "extending_error"),
        ("deleting", manager.delete_share, {}, "error_deleting"),
    ],
)
def test_a_request_that_fails_writes_the_status_of_its_failure(
    database: Database,
    backend: DummyDriver,
    status: str,
    method: Any,
    arguments: dict[str, int],
    failed: str,
) -> None:
    """The caller gets the error; the record is not left in its transient status."""

    async def story(site: Site) -> None:
        database.insert(record("sh-1", status, size=5))
        backend.plant("sh-1", "raise")
        with pytest.raises(RemoteError, match="BackendError"):
            await site.one.call(method, share="sh-1", **arguments)
        assert site.share().status == failed

    play(database, backend, story)


@pytest.mark.parametrize("method", [manager.create_share, manager.delete_share])
def test_a_record_that_has_moved_on_is_left_as_it_is(
    database: Database, backend: DummyDriver, method: Any
) -> None:
    """A late request for a share that somebody has put in error asks no backend."""

    async def story(site: Site) -> None:
        database.insert(record("sh-1", "error"))
        arguments = {"size": 5} if method is manager.create_share else {}
        assert await site.one.call(method, share="sh-1", **arguments) == "error"
        assert site.share().status == "error"

    play(database, backend, story)

    assert log_of(backend, "sh-1") == []


def test_a_request_with_a_stale_token_is_refused(database: Database, backend: DummyDriver) -> None:
    """It does not pretend that its work is done, and it asks no backend."""

    async def story(site: Site) -> None:
        database.insert(record("sh-1", fence=99))
        with pytest.raises(RemoteError, match="token 1 is stale"):
            await site.one.call(manager.create_share, share="sh-1", size=5)
        assert (site.share().status, site.share().fence) == ("creating", 99)

    play(database, backend, story)

    assert log_of(backend, "sh-1") == []


@pytest.mark.parametrize(
    ("there", "status", "state", "created"),
    [
        (None, "available", TaskState.SUCCEEDED, 2),
        (Thing(export_locations=["nas:/x"]), "available", TaskState.SUCCEEDED, 1),
        (Thing(state="broken"), "error", TaskState.FAILED, 1),
    ],
    ids=["absent", "ready", "broken"],
)
def test_a_create_that_was_killed_asks_the_backend_and_goes_on(
    database: Database,
    backend: DummyDriver,
    there: Thing | None,
    status: str,
    state: TaskState,
    created: int,
) -> None:
    """The task is on record, so what is not there is made; a rule would put it in error."""

    async def story(site: Site) -> None:
        database.insert(record("sh-1", size=5))
        backend.plant("sh-1", "hang")
        view = site.one.prepare(request_id="r1")
        await view.cast(manager.create_share, share="sh-1", size=5)
        await site.one.until(lambda: log_of(backend, "sh-1") == ["create_share"])
        await site.one.crash()
        backend.mend("sh-1")
        if there is not None:
            backend.put("share", "sh-1", there)
        await site.one.start()
        await site.one.settled()
        assert site.one.state_of("r1") is state
        assert site.share().status == status

    play(database, backend, story)

    assert log_of(backend, "sh-1").count("create_share") == created
    assert log_of(backend, "sh-1").count("get_share_status") >= 1


def test_a_request_is_refused_for_a_record_that_is_in_another_status(
    database: Database, backend: DummyDriver
) -> None:
    """One thing at a time: the record says so before any request is sent."""

    async def story(site: Site) -> None:
        database.insert(record("sh-1", "deleting"))
        with pytest.raises(RefusedError, match="share sh-1 is deleting, and cannot be extending"):
            await site.api.extend_share("sh-1", size=9)
        with pytest.raises(RefusedError, match="there is no share sh-2"):
            await site.api.delete_share("sh-2")

    play(database, backend, story)


# -- rules beside requests ----------------------------------------------------------------------


def test_what_needs_a_server_that_failed_long_ago_fails(
    database: Database, backend: DummyDriver
) -> None:
    """Also when it was put in error in an earlier pass, or by hand; the backend is not asked."""
    database.insert(record("srv-7", "error", kind="share_server"))
    for id_, server in (("sh-1", "srv-7"), ("sh-2", None)):
        database.insert(record(id_, updated_at=0.0, parent=server))
        backend.put("share", id_, Thing(export_locations=["nas:/x"]))

    async def story(site: Site) -> None:
        await site.one.until(lambda: site.share("sh-1").status != "creating")
        await site.one.until(lambda: site.share("sh-2").status != "creating")
        assert site.share("sh-1").status == "error"
        assert site.share("sh-2").status == "available"
        assert [failed["reason"] for failed in site.one.told("resource.failed")] == [
            "dependency share_server:srv-7"
        ]

    play(database, backend, story)

    assert log_of(backend, "sh-1") == []


# -- the other pass -------------------------------------------------------------------------


def test_available_shares_are_asked_for_at_each_start(
    database: Database, backend: DummyDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    """New export locations are taken over; a share that is not answered for stays ensuring."""
    backend.put("share", "moved", Thing(export_locations=["nas-3:/moved"], size=99))
    backend.put("share", "cut short", Thing(export_locations=["nas-1:/cut"]))
    for fault in ("raise", "hang", "not implemented"):
        backend.plant(fault, fault)
    ids = ("moved", "cut short", "absent", "raise", "hang", "not implemented")
    for id_ in ids:
        status = "ensuring" if id_ == "cut short" else "available"
        database.insert(record(id_, status, size=5, export_locations=("old",), fence=4))

    async def story(site: Site) -> None:
        after = {id_: site.share(id_) for id_ in ids}
        assert {id_: (one.status, *one.export_locations) for id_, one in after.items()} == {
            "moved": ("available", "nas-3:/moved"),
            "cut short": ("available", "nas-1:/cut"),
            "absent": ("ensuring", "old"),
            "raise": ("ensuring", "old"),
            "hang": ("ensuring", "old"),
            "not implemented": ("available", "old"),
        }
        assert {(one.size, one.fence) for one in after.values()} == {(5, 4)}

    play(database, backend, story)

    assert len(capsys.readouterr().out.splitlines()) == 3
