"""Store and transport: place, room, inside, who lives, what is left, who else reads."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from gracekit import Context, Runtime, Service, Settings
from gracekit.config.urls import file_url
from gracekit.doctor import queue_file, store_file, store_runs
from gracekit.doctor.examine import Examination, examine
from gracekit.doctor.finding import Finding, Level
from gracekit.exits import ExitCode
from gracekit.rpc.sqlite.sqlite_transport import QUEUES_SCHEMA
from gracekit.store.location import StoreLocation
from gracekit.store.migrate import MIGRATIONS, load_migrations
from tests.doctor.kit import levels, one
from tests.store.test_places import STRANGER, as_other, needs_root

TEXTS = load_migrations(MIGRATIONS)
QUEUES = load_migrations(QUEUES_SCHEMA)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def settings(place: Path) -> Settings:
    return Settings(
        transport_url=f"sqlite:///{place}/queues.db",
        store_url=f"sqlite:///{place}/store.db",
        host="node-1",
    )


@pytest.fixture
def svc() -> Service:
    svc = Service("compute")

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> str:
        return vm

    return svc


@pytest.fixture
def used(place: Path, settings: Settings, svc: Service) -> Path:
    """A store and a transport that a service has used once."""

    async def live() -> None:
        async with Runtime(svc, settings), svc.client(settings.transport_url, settings) as client:
            assert await client.call("work", vm="vm-1") == "vm-1"

    asyncio.run(live())
    return place / "store.db"


@pytest.fixture
def look(used: Path) -> Iterator[store_file.ReadOnlyDatabase]:
    with store_file.ReadOnlyDatabase(used) as look:
        yield look


def location_of(path: Path) -> StoreLocation:
    return StoreLocation(Settings(store_url=file_url(path)))


def write(path: Path, *statements: str) -> None:
    """Do to a database what should not be done; who uses it may hold it for a moment."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(30_000)
    for sql in statements:
        connection.execute(sql)
    connection.close()


# -- the place ----------------------------------------------------------------------


def test_a_place_that_was_never_used_is_good(place):
    """The first start makes the file; a directory of one's own needs nothing."""
    path = place / "store.db"
    found = [
        *store_file.check_place(path),
        store_file.check_file(path),
        store_file.check_directory(path),
    ]

    assert levels(found) == {"place": Level.OK, "file": Level.OK, "directory": Level.OK}
    assert not path.exists()


def test_files_that_others_may_read_fail_with_the_command_that_mends_them(used):
    """The rule is the store's own; the remedy can be typed."""
    used.chmod(0o644)

    (found,) = store_file.check_place(used)

    assert (found.level, found.code) == (Level.FAIL, ExitCode.CONFIG)
    assert "mode 0644" in found.seen
    assert found.remedy == f"run: chmod 600 {used}"


def test_a_missing_directory_fails(place):
    """gracekit makes files, and no directories."""
    (found,) = store_file.check_place(place / "no" / "store.db")

    assert (found.level, "mkdir" in found.remedy) == (Level.FAIL, True)


def test_a_directory_that_others_can_list_is_a_warning(place):
    """What is in it stays secret, names do not."""
    place.chmod(0o755)

    assert store_file.check_directory(place / "store.db").level is Level.WARN


def test_a_directory_that_a_group_can_write_is_a_warning(place):
    """A group is often the service's own."""
    place.chmod(0o2770)

    found = store_file.check_directory(place / "store.db")

    assert (found.level, "members of group" in found.seen) == (Level.WARN, True)


@pytest.mark.process
@needs_root
def test_a_directory_of_the_services_user_is_not_to_be_given_to_another(place):
    """Doctor names the user to run it as. Taking the files over would stop the running service."""
    os.chown(place, STRANGER, STRANGER)
    place.chmod(0o755)

    said = as_other("print(check_directory(Path(sys.argv[2])))", place / "store.db")

    assert "chown" not in said
    assert f"run doctor as the user of the service: sudo -u '#{STRANGER}'" in said


def test_the_remedy_for_a_directory_of_everybody_names_a_path(place):
    """The command can be typed."""
    place.chmod(0o1777)

    (found,) = store_file.check_place(place / "store.db")

    assert found.level is Level.FAIL
    assert f"mkdir -m 700 {place / 'gracekit'}" in found.remedy


def test_room_is_measured(place):
    """The disk of this test has room, or the test could not run."""
    assert store_file.check_room(place / "store.db").level in {Level.OK, Level.WARN}
    assert store_file.shown_bytes(1.5 * store_file.MIB) == "1.5 MiB"


# -- the inside ---------------------------------------------------------------------


def test_a_used_store_is_sound(look):
    """Schema, integrity and accounts of a store after a clean stop."""
    found = store_runs.read_runs(location_of(look.path))

    assert store_file.check_schema(look, TEXTS, ("run", "task")).level is Level.OK
    assert store_file.check_integrity(look).level is Level.OK
    assert store_runs.check_living(found).seen == "none lives; 1 on record"
    assert store_runs.check_unfinished(look, found, Settings()).seen == "nothing"
    assert store_runs.check_accounts(look).seen.endswith("1 on record + 0 removed: balanced")


def test_a_run_that_may_live_is_known_whatever_began_after_it(used):
    """One that crashes again and again does not hide a long life."""
    names = "service, host, generation, version, boot_id, pid_ns, pid, start_ticks, lock_path, "
    names += "phase, topic, ops_topic, transport, beat_at, methods, kinds, schema"
    write(
        used,
        "UPDATE run SET boot_id = 'another', ended_at = NULL, report = NULL",
        f"""
        WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1200)
        INSERT INTO run (run_id, instance, started_at, adopted_at, {names})
        SELECT 'crashed-' || i, 'other-' || i, started_at + i, 1, {names} FROM run, n""",
    )

    found = store_runs.read_runs(location_of(used))

    assert [run.instance for run, _ in found.doubtful] == ["node-1-0"]
    assert store_runs.check_living(found).seen == "none lives; 1201 on record"


@pytest.mark.parametrize(
    ("known", "level"),
    [(TEXTS, Level.OK), (TEXTS[:-1], Level.FAIL), ([*TEXTS, "SELECT 1"], Level.WARN)],
    ids=["same", "newer", "older"],
)
def test_a_newer_schema_fails_and_an_older_one_is_migrated(look, known, level):
    """A store that a newer gracekit wrote is refused at start, so it fails here."""
    assert store_file.check_schema(look, known, ("run",)).level is level


def test_of_a_store_with_another_schema_only_what_is_true_of_each_is_said(
    used, settings, monkeypatch
):
    """Its runs cannot be read: nothing is said of them that might be wrong."""
    known = {MIGRATIONS: [*TEXTS, "SELECT 1"], QUEUES_SCHEMA: QUEUES}
    monkeypatch.setattr("gracekit.doctor.examine.load_migrations", known.__getitem__)

    seen = examine(Examination(settings=settings))
    found = [finding for finding in seen if finding.area == "store"]

    told = {finding.check for finding in found}
    assert not {"runs", "unfinished", "accounts"} & told
    schema = one(found, "schema")
    assert schema.level is Level.WARN
    assert schema.seen.endswith(" are free")
    assert schema.remedy.startswith("nothing to do; the next start migrates it")


def test_an_emptied_store_fails_unless_nobody_has_used_it(used):
    """What a young store holds is in its -wal: who lost both must not read that all is well."""
    used.write_bytes(b"")
    for suffix in ("-wal", "-shm"):
        used.with_name(used.name + suffix).unlink(missing_ok=True)
    unused = used.with_name("unused.db")
    unused.touch()

    with store_file.ReadOnlyDatabase(used) as look:
        emptied = store_file.check_schema(look, TEXTS, ("run", "task"))
    with store_file.ReadOnlyDatabase(unused) as look:
        young = store_file.check_schema(look, TEXTS, ("run", "task"))

    assert (emptied.level, young.level) == (Level.FAIL, Level.WARN)
    assert "services have used it" in emptied.seen


def test_the_transport_for_the_store_is_found(used, settings):
    """Two URLs that were mixed up are told by the tables."""
    with store_file.ReadOnlyDatabase(used.with_name("queues.db")) as look:
        assert store_file.check_schema(look, QUEUES, ("run", "task")).level is Level.FAIL


def test_damage_is_found_within_its_time(used):
    """An index that lost its rows is damage; a check without time for itself is skipped."""
    write(
        used,
        "PRAGMA writable_schema=ON",
        "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master "
        "WHERE name = 'lease') WHERE name = 'hold'",
    )

    with store_file.ReadOnlyDatabase(used) as look:
        found = store_file.check_integrity(look)

    assert (found.level, found.code) == (Level.FAIL, ExitCode.DEPENDENCY)


def test_a_check_that_takes_too_long_is_skipped(place):
    """quick_check ends with its time, whatever the size of the file."""
    path = place / "large.db"
    write(
        path,
        "CREATE TABLE t (x)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 20000) "
        "INSERT INTO t SELECT randomblob(100) FROM n",
        "CREATE INDEX i ON t (x)",
    )
    path.chmod(0o600)

    with store_file.ReadOnlyDatabase(path) as look:
        assert store_file.check_integrity(look, within_s=-1.0).level is Level.SKIP
        assert store_file.check_integrity(look).level is Level.OK


def test_accounts_that_do_not_balance_fail(used):
    """A row that vanished is a fault that no configuration mends."""
    write(used, "DELETE FROM task")
    with store_file.ReadOnlyDatabase(used) as look:
        found = store_runs.check_accounts(look)

    assert (found.level, found.code) == (Level.FAIL, ExitCode.INTERNAL)
    assert "off by 1" in found.seen


@pytest.mark.parametrize("forged", ["state = 'running'", "finished_at = NULL"])
def test_a_row_that_is_both_open_and_ended_fails(used, forged):
    """Its state says the one and its end the other: the sums are right, and nobody would find
    it.
    """
    write(used, f"UPDATE task SET {forged}")
    with store_file.ReadOnlyDatabase(used) as look:
        found = store_runs.check_accounts(look)

    assert (found.level, found.code) == (Level.FAIL, ExitCode.INTERNAL)
    assert found.seen.startswith("1 rows contradict themselves: open and ended")


# -- who lives, and what is left ----------------------------------------------------


def test_what_a_dead_run_left_is_told(used):
    """Without a living run somebody has to start the service; a running row is unclean by then."""
    write(
        used,
        "UPDATE task SET state = 'running', finished_at = NULL, owner = 'nobody', errored_due = 1",
    )

    left = unfinished(used, Settings())

    assert left.level is Level.WARN
    assert left.seen == (
        "1 running without a living owner, 1 of them cut uncleanly, 1 errored hooks due"
    )


def unfinished(used: Path, settings: Settings) -> Finding:
    found = store_runs.read_runs(location_of(used))
    with store_file.ReadOnlyDatabase(used) as look:
        return store_runs.check_unfinished(look, found, settings)


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("running", "start the service and run `gracekit reconcile`"),
        ("accepted", "start the service: it settles them"),
    ],
)
def test_where_nothing_is_settled_unasked_a_start_alone_is_no_remedy_for_started_tasks(
    used, state, remedy
):
    """Also for those that no start has adopted yet."""
    write(used, f"UPDATE task SET state = '{state}', finished_at = NULL, owner = 'nobody'")

    left = unfinished(used, Settings(startup_reconciliation_enabled=False))

    assert left.seen.startswith(f"1 {state} without a living owner")
    assert left.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ("", Level.OK, "1 pending"),
        (", pending_deadline = 1", Level.WARN, "1 pending, 1 pending after their deadline"),
    ],
)
def test_a_parked_task_waits_until_its_deadline(used, more, level, said):
    """No start settles it, so it is not left behind. One that is overdue needs a run."""
    park(used, more)

    left = unfinished(used, Settings())

    assert (left.level, left.seen) == (level, said)


def park(used: Path, more: str) -> None:
    write(
        used,
        "UPDATE task SET state = 'pending', finished_at = NULL, owner = NULL, parkings = 1, "
        "pending_deadline = unixepoch() + 3600",
        f"UPDATE task SET parkings = 1{more}",
    )


@pytest.mark.parametrize(("more", "level"), [("", Level.OK), (", owner = 'nobody'", Level.FAIL)])
def test_a_parked_task_has_no_owner(used, more, level):
    """With one, no order about it and no deadline would end it."""
    park(used, more)

    with store_file.ReadOnlyDatabase(used) as look:
        assert store_runs.check_accounts(look).level is level


async def test_a_living_run_is_seen_with_its_process(used, settings, svc):
    """Proof of life is the run's own; its pid can be looked at."""
    named = Settings(
        transport_url=settings.transport_url, store_url=settings.store_url, instance="a"
    )
    async with Runtime(svc, named):
        found = await asyncio.to_thread(store_runs.read_runs, location_of(used))

        assert store_runs.pids_here(found) == [os.getpid()]
        assert f"compute@a (pid {os.getpid()}, serving)" in store_runs.check_living(found).seen
        directory = used.with_name("store.db-runs")
        doors = await asyncio.to_thread(lambda: list(store_runs.check_doors(found, directory)))
        assert levels(doors) == {"doors": Level.OK}
        next(directory.glob("*.sock")).unlink()
        (closed,) = store_runs.check_doors(found, directory)
        assert (closed.level, closed.seen.split(":")[0]) == (Level.WARN, "1 without")


async def test_a_lane_full_of_plain_handlers_that_wait_for_it_is_found(used, settings, svc):
    """As long as they wait: the run says so by its door."""
    calls: list[Future[str]] = []
    loop, directory = asyncio.get_running_loop(), used.with_name("store.db-runs")

    @svc.rpc
    def outer(ctx: Context) -> None:
        calls.append(asyncio.run_coroutine_threadsafe(client.call("inner"), loop))
        calls[-1].result()

    @svc.rpc
    def inner(ctx: Context) -> None: ...

    async def lanes() -> list[Finding]:
        found = await asyncio.to_thread(store_runs.read_runs, location_of(used))
        findings = await asyncio.to_thread(lambda: list(store_runs.check_doors(found, directory)))
        assert one(findings, "doors").level is Level.OK
        return [finding for finding in findings if finding.check == "lanes"]

    one_thread = replace(settings, threads=1)
    async with Runtime(svc, one_thread) as run, svc.client(settings.transport_url) as client:
        blocked = asyncio.Event()
        run.ground.telemetry.subscribe(
            lambda name, _: blocked.set() if name == "lane.self_blocked" else None
        )
        assert await lanes() == []
        await client.cast("outer")
        await blocked.wait()
        (finding,) = await lanes()
        calls[0].cancel()
        await client.call("inner")
        assert await lanes() == []

    assert finding.level is Level.WARN
    assert "requests" in finding.seen
    assert "compute@" in finding.seen


# -- the queues ---------------------------------------------------------------------


def test_dead_letters_and_waiting_messages_are_told(used):
    """Somebody sent what nobody could read."""
    path = used.with_name("queues.db")
    write(
        path,
        "INSERT INTO dead_letter (queue, reason, published_at, died_at, body) "
        "VALUES ('compute', 'unreadable', 0, 0, x'00')",
        "INSERT INTO message (queue, published_at, body) VALUES ('compute', 0, x'00')",
        "INSERT INTO message (queue, published_at, body) VALUES ('other', 0, x'00'), ('other', 1, "
        "x'00')",
    )

    with store_file.ReadOnlyDatabase(path) as look:
        assert queue_file.check_dead_letters(look).level is Level.WARN
        assert re.fullmatch(
            r"2 in other \(oldest \d+d\d\dh\), 1 in compute \(oldest \d+d\d\dh\)",
            queue_file.check_waiting(look).seen,
        )


def readers(settings: Settings, path: Path, service: Service | None) -> list[Finding]:
    store = Path(settings.store_url.removeprefix("sqlite:///"))
    found = store_runs.Runs(living=(), doubtful=(), all=())
    if store.exists():
        found = store_runs.read_runs(location_of(store))
    with store_file.ReadOnlyDatabase(path) as look:
        identity = StoreLocation(settings).identity()
        return [queue_file.check_readers(settings, look, identity, found, service)]


async def test_a_foreign_reader_fails_before_any_start(place, used, settings, svc):
    """A second store on a living service's queue is told, whether or not it exists yet."""
    path = used.with_name("queues.db")
    other = Settings(transport_url=settings.transport_url, store_url=f"sqlite:///{place}/other.db")
    accepted = Settings(
        transport_url=settings.transport_url,
        store_url=other.store_url,
        accept_unshared_store=True,
    )
    harmless = Service("compute")

    @harmless.rpc(on_interrupt="requeue")
    async def peek(ctx: Context) -> None: ...

    async with Runtime(svc, settings):
        mine = await asyncio.to_thread(readers, settings, path, svc)
        theirs = await asyncio.to_thread(readers, other, path, svc)
        known = await asyncio.to_thread(readers, accepted, path, svc)
        careless = await asyncio.to_thread(readers, other, path, harmless)
        elsewhere = await asyncio.to_thread(readers, other, path, Service("network"))
    after = await asyncio.to_thread(readers, other, path, svc)

    assert levels(mine) == {"foreign readers": Level.OK}
    assert levels(theirs) == {"foreign readers": Level.FAIL}
    assert levels(known) == {"foreign readers": Level.WARN}
    assert levels(careless) == levels(elsewhere) == levels(after) == {"foreign readers": Level.OK}
    assert "GRACEKIT_ACCEPT_UNSHARED_STORE" in theirs[0].remedy


async def test_a_service_of_directed_queues_alone_may_have_a_store_for_each_host(
    place, used, settings
):
    """Only a second store on the queue of the host is one too many."""
    svc = Service("compute", queues="directed")

    @svc.rpc
    async def create(ctx: Context) -> None: ...

    path = used.with_name("queues.db")
    other = replace(settings, store_url=f"sqlite:///{place}/other.db")
    async with Runtime(svc, settings):
        same = await asyncio.to_thread(readers, other, path, svc)
        theirs = await asyncio.to_thread(readers, replace(other, host="node-9"), path, svc)

    assert levels(same) == {"foreign readers": Level.FAIL}
    assert levels(theirs) == {"foreign readers": Level.OK}


# -- all of it ----------------------------------------------------------------------


async def start_once(settings: Settings, svc: Service) -> None:
    async with Runtime(svc, settings):
        pass


def test_a_store_that_was_begun_anew_for_a_lost_one_is_told_also_after_the_start(
    used, settings, svc
):
    """The start goes on, as nobody may be there to decide; an incident and doctor keep what was
    lost.
    """
    for suffix in ("", "-wal", "-shm"):
        used.with_name(f"{used.name}{suffix}").unlink(missing_ok=True)
    asyncio.run(start_once(settings, svc))
    asyncio.run(start_once(settings, svc))

    with store_file.ReadOnlyDatabase(used) as look:
        (found,) = store_runs.check_epoch(look, location_of(look.path).run_directory)
        incidents = list(look.read("SELECT what, detail FROM incident WHERE what LIKE 'store%'"))

    assert found.level is Level.WARN
    assert "the store used before was lost, and this one was begun empty" in found.seen
    assert "the unfinished tasks of the lost one are not known" in found.seen
    assert "docs/backup.md" in found.remedy
    assert [what for what, _ in incidents] == ["store_lost"]
    assert "it is new and empty, and another one was here" in str(incidents[0][1])


def test_a_restored_backup_is_an_incident_and_no_warning_after_its_start(
    used, settings, svc, place
):
    """Somebody put it there; that it is older is on record."""
    StoreLocation(settings).back_up(place / "copy.db", now=1.0)
    for suffix in ("", "-wal", "-shm"):
        used.with_name(f"{used.name}{suffix}").unlink(missing_ok=True)
    (place / "copy.db").rename(used)
    asyncio.run(start_once(settings, svc))

    with store_file.ReadOnlyDatabase(used) as look:
        (found,) = store_runs.check_epoch(look, location_of(look.path).run_directory)
        incidents = list(look.read("SELECT what, detail FROM incident WHERE what LIKE 'store%'"))

    assert found.level is Level.OK
    assert incidents == [("store_older", "it is a backup: what was recorded since is not known")]


def test_everything_is_examined_and_nothing_is_changed(used, settings, svc):
    """A whole pass over a sound service finds nothing to mend and leaves all rows as they are."""
    before = {path.name: path.read_bytes() for path in used.parent.glob("*.db")}

    found = list(examine(Examination(settings=settings, service=svc)))

    assert [f for f in found if f.level is Level.FAIL] == []
    assert {f.area for f in found} - {"process"} == {  # its checks depend on the machine
        "settings", "application", "platform", "store", "transport", "host",
    }  # fmt: skip
    assert {path.name: path.read_bytes() for path in used.parent.glob("*.db")} == before


def test_a_store_that_is_no_database_fails(place, settings):
    """The other checks go on."""
    (place / "store.db").write_text("not a database" * 100)
    (place / "store.db").chmod(0o600)

    found = list(examine(Examination(settings=settings)))

    failed = {(f.area, f.code) for f in found if f.level is Level.FAIL}
    assert {area for area, _ in failed} == {"store"}
    assert one([f for f in found if f.area == "transport"], "place").level is Level.OK


def test_memory_is_not_looked_into():
    """A store in memory belongs to one process."""
    settings = Settings(transport_url="memory://", store_url="memory://")

    found = list(examine(Examination(settings=settings)))

    assert [f.level for f in found if f.area in {"store", "transport"}] == [Level.SKIP] * 2


def test_a_pipe_in_the_place_of_a_store_is_not_opened(place, settings):
    """Opening it would wait for a writer that never comes."""
    os.mkfifo(place / "store.db", 0o600)

    found = list(examine(Examination(settings=settings)))

    assert "no regular file" in one([f for f in found if f.area == "store"], "place").seen
