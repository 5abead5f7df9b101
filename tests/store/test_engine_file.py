"""The file under the SQLite engine: what is refused, what processes share, what a kill leaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest

import gracekit.process as process_module
from gracekit.errors import (
    ConfigError,
    StoreBrokenError,
    StoreError,
    StoreLockedError,
    UnknownCommitError,
)
from gracekit.exits import ExitCode, exit_code_of
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.commit_times import CommitTimes
from gracekit.store.files import (
    check_library,
    connect_reader,
    connect_writer,
    open_memory,
    prepare_file,
)
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from gracekit.store.sqlite.writer_lock import WriterLock
from gracekit.store.state import StoreState, StoreStatus
from gracekit.store.worker import Worker

SCHEMA = "CREATE TABLE log (owner TEXT, number INTEGER, body BLOB, PRIMARY KEY (owner, number))"

PREAMBLE = f"""
import asyncio, os, sys, threading, time
from pathlib import Path
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.sqlite.sqlite_engine import SqliteEngine

def insert(owner, number, body=b""):
    batch = Batch(Point.ACCEPT)
    batch.add("INSERT INTO log VALUES (?, ?, ?)", owner, number, body, expect=1)
    return batch

engine = SqliteEngine(Path(sys.argv[1]), [{SCHEMA!r}], process=Process())
"""


def insert(owner: str, number: int, body: bytes = b"") -> Batch:
    batch = Batch(Point.ACCEPT)
    batch.add("INSERT INTO log VALUES (?, ?, ?)", owner, number, body, expect=1)
    return batch


def start_script(script: str, *args: object) -> subprocess.Popen[str]:
    """A Python process that begins with `PREAMBLE`; its stdin and stdout are text pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(process_module.__file__).parents[1])},
    )


def run_script(script: str, *args: object) -> str:
    process = start_script(script, *args)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


HOLD = """
import apsw
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def database(tmp_path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def engine(database) -> SqliteEngine:
    return SqliteEngine(database, [SCHEMA], process=Process())


# -- opening ----------------------------------------------------------------------


async def test_new_files_are_private_and_in_wal_mode(engine, database):
    """Requests hold secrets: nothing beside the database can be read by others."""
    old = os.umask(0)
    try:
        await engine.start()
        await engine.commit(insert("a", 1))
        modes = {f.name: stat.S_IMODE(f.stat().st_mode) for f in database.parent.iterdir()}
        assert modes == dict.fromkeys(
            ["store.db", "store.db-wal", "store.db-shm", "store.db-writer"], 0o600
        )
        assert await engine.query("PRAGMA journal_mode") == [("wal",)]
    finally:
        await engine.stop()
        os.umask(old)


async def test_stop_empties_the_wal(engine, database):
    """After the last process left, the database is one file again."""
    await engine.start()
    await engine.commit(insert("a", 1))

    await engine.stop()

    assert not database.with_name("store.db-wal").exists()


async def test_stop_waits_a_bounded_time_for_who_still_reads(engine, database):
    """A reader in another program keeps the WAL from being emptied, and `stop` from nothing
    else.
    """
    await engine.start()
    await engine.commit(insert("a", 1))
    other = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    other.execute("BEGIN; SELECT * FROM log").fetchall()
    await engine.commit(insert("a", 2))

    await asyncio.wait_for(engine.stop(), 30)

    other.close()


@pytest.mark.parametrize(("synchronous", "level"), [("FULL", 2), ("NORMAL", 1)])
def test_writer_syncs_as_it_was_told(tmp_path, synchronous, level):
    """Both settings open a file, and each is asked back from it."""
    path = prepare_file(tmp_path / "store.db")
    connection = connect_writer(path, synchronous=synchronous, busy_timeout_s=1)
    assert connection.execute("PRAGMA synchronous").get == level
    connection.close()


async def test_stopped_engine_can_be_started_again(engine):
    """A second life of the same engine finds the rows of the first."""
    for number in (1, 2):
        await engine.start()
        await engine.commit(insert("a", number))
        await engine.stop()

    await engine.start()
    assert await engine.query("SELECT count(*) FROM log") == [(2,)]
    await engine.stop()


def world_readable(path: Path) -> None:
    path.touch(mode=0o644)
    path.chmod(0o644)


def symlink(path: Path) -> None:
    path.with_name("real.db").touch(mode=0o600)
    path.symlink_to("real.db")


def readable_wal(path: Path) -> None:
    path.touch(mode=0o600)
    world_readable(path.with_name(path.name + "-wal"))


def not_a_database(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(b"These bytes are no database. " * 200)


def directory(path: Path) -> None:
    path.mkdir(mode=0o700)


def open_directory(path: Path) -> None:
    path.parent.chmod(0o777)


def missing_directory(path: Path) -> None:
    path.parent.rmdir()


def second_name(path: Path) -> None:
    path.touch(mode=0o600)
    path.with_name("other.db").hardlink_to(path)


def file_for_directory(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


@pytest.mark.parametrize(
    ("prepare", "remedy"),
    [
        (world_readable, r"mode 0644 .* chmod 600 \S*store\.db$"),
        (symlink, r"symbolic link; .*real\.db"),
        (readable_wal, r"chmod 600 \S*store\.db-wal"),
        (not_a_database, "is not a SQLite database; move it away"),
        (directory, "no regular file"),
        (open_directory, "chmod o-w"),
        (missing_directory, r"mkdir -p -m 700 \S*place"),
        (file_for_directory, r"place is not a directory"),
        (second_name, r"has 2 names,.* find / -samefile \S*store\.db$"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_unsafe_place_is_refused_with_its_remedy(tmp_path, prepare, remedy):
    """Start refuses what others could read, change or replace, and says what to do."""
    path = tmp_path / "place" / "store.db"
    path.parent.mkdir()
    prepare(path)

    with pytest.raises(ConfigError, match=remedy):
        await SqliteEngine(path, [SCHEMA], process=Process()).start()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (0x6969, "nfs"),
        (0x01161970, "gfs2"),
        (0x7461636F, "ocfs2"),
        (0x0BD00BD0, "lustre"),
        (0x47504653, "gpfs"),
        (0x19830326, "beegfs"),
        (0x786F4256, "vboxsf"),
    ],
)
async def test_a_file_system_that_hosts_share_is_refused(engine, monkeypatch, kind, name):
    """By the number that the kernel gives it, which is all that is played here."""
    monkeypatch.setattr(process_module, "_file_system", lambda path: kind)

    with pytest.raises(ConfigError, match=f"is on {name}, .* choose a path on a local"):
        await engine.start()


@pytest.mark.process
@pytest.mark.parametrize("beside", ["", "-wal"])
def test_a_file_that_is_a_mount_point_is_refused(tmp_path, beside):
    """Mounted by itself it has another -wal than by its own directory: two logs of one database."""
    own, place = tmp_path / "own", tmp_path / "a place"
    for directory in (own, place):
        directory.mkdir(mode=0o700)
        (directory / f"store.db{beside}").touch(mode=0o600)
    mounted = f"mount --bind '{own}/store.db{beside}' '{place}/store.db{beside}'"
    command = ["unshare", "--mount", "sh", "-c", f'{mounted} || exit 9; exec "$@"', "sh"]
    found = subprocess.run(
        [
            *command,
            sys.executable,
            "-c",
            f"{PREAMBLE}asyncio.run(engine.start())",
            place / "store.db",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode == 9 or "unshare" in found.stderr:
        pytest.skip(f"this user may not mount: {found.stderr.strip()}")

    assert "ConfigError" in found.stderr, found.stderr
    assert f"store.db{beside} is a mount point" in found.stderr
    assert "mount its directory" in found.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
async def test_file_of_another_user_is_refused(engine, database):
    """A planted database is not adopted."""
    database.touch(mode=0o600)
    os.chown(database, 12345, 12345)

    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        await engine.start()


@pytest.mark.process
async def test_read_only_file_system_is_refused(engine, database):
    """A store that cannot be written is a configuration error at start, not a surprise later."""
    await engine.start()
    await engine.stop()
    place = str(database.parent)
    mount = subprocess.run(["mount", "--bind", place, place], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("this user may not mount, and permission bits do not stop root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        with pytest.raises(ConfigError, match=r"store\.db.*cannot be created or opened"):
            await engine.start()
    finally:
        subprocess.run(["umount", place], check=True)


def test_library_with_the_wal_race_is_refused():
    """SQLite before 3.51.3 can corrupt a shared WAL, so it is not used at all."""
    check_library("3.51.3")
    check_library(apsw.sqlite_lib_version())
    with pytest.raises(ConfigError, match=r"SQLite 3\.50\.4 .*apsw>=3\.51\.3"):
        check_library("3.50.4")


@pytest.mark.process
async def test_lock_of_another_program_is_waited_for_a_bounded_time(engine, database):
    """A foreign transaction refuses commits and starts, names the cause, and breaks nothing. A
    process that cannot start for it leaves with the code of what cannot be reached.
    """
    impatient = SqliteEngine(database, [SCHEMA], process=Process(), busy_timeout_s=0.1)
    await impatient.start()
    with start_script(HOLD, database) as holder:
        holder.stdout.readline()
        with pytest.raises(StoreError, match=r"nothing was committed: .*locked") as committing:
            await impatient.commit(insert("a", 1))
        await impatient.stop()
        with pytest.raises(StoreError, match="stayed locked") as starting:
            await impatient.start()
        holder.stdin.close()

    await impatient.start()
    await impatient.commit(insert("a", 1))
    for refused in (committing, starting):
        assert exit_code_of(refused.value) is ExitCode.DEPENDENCY
    assert impatient.status == StoreStatus()
    await impatient.stop()


class LockedHandler:
    """Finds the database locked in each try, which takes a quarter of a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.worker: Worker[str, str]
        self.waited: dict[str, float] = {}

    def submit(self, job: str) -> None:
        began, answer = self.now, concurrent.futures.Future[str]()
        answer.add_done_callback(lambda _: self.waited.setdefault(job, self.now - began))
        self.worker.put(job, answer)

    pause_s = None

    def mend(self) -> None: ...

    def await_turn(self) -> None: ...

    def run(self, jobs: Sequence[str], /) -> Sequence[StoreError]:
        self.now += 0.25
        if self.now == 0.25:
            self.submit("b")  # while another one is being tried
        return [StoreLockedError(job) for job in jobs]

    def close(self) -> None: ...


async def test_each_job_waits_for_a_lock_from_its_own_submission():
    """One that was submitted while others were tried is not begun only after their time."""
    handler = LockedHandler()
    times = CommitTimes(lambda: handler.now)
    handler.worker = Worker("locked", lambda: handler, times, patience_s=10)
    await handler.worker.start()

    handler.submit("a")
    await handler.worker.stop()

    assert handler.waited == {"a": 10, "b": 10}
    assert times.under_way_s() == 10.25  # nobody could write


# -- the disk fails ---------------------------------------------------------------


@pytest.mark.process
def test_failed_commit_is_unknown_and_breaks_the_store(database):
    """An error of COMMIT itself says nothing about the rows; only reading them again does."""
    output = run_script(
        """
import resource
async def main():
    await engine.start()
    await engine.commit(insert("a", 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    for number in (2, 3):
        try:
            await engine.commit(insert("a", number, b"x" * 100_000))
        except Exception as error:
            print(type(error).__name__)
    print(engine.status.is_final, await engine.query("SELECT number FROM log"))
    await engine.stop()
asyncio.run(main())
""",
        database,
    )

    assert output.splitlines() == ["UnknownCommitError", "StoreBrokenError", "True [(1,)]"]
    assert issubclass(UnknownCommitError, StoreError)


@pytest.mark.process
async def test_corrupt_page_breaks_the_store(engine, database):
    """A damaged database is final for the process, found by a commit or by a query."""
    await engine.start()
    for number in range(50):
        await engine.commit(insert("a", number, b"x" * 1000))
    await engine.stop()
    run_script(
        """
size = os.path.getsize(sys.argv[1])
with open(sys.argv[1], "r+b") as file:
    file.seek(4096)
    file.write(b"\\xff" * (size - 4096))
""",
        database,
    )
    await engine.start()

    with pytest.raises(StoreBrokenError, match="CorruptError"):
        await engine.commit(insert("a", 50))
    with pytest.raises(StoreBrokenError):
        await engine.query("SELECT * FROM log")

    assert engine.status.state is StoreState.BROKEN
    await engine.stop()


# -- several processes ------------------------------------------------------------

COMMIT_A_HUNDRED = """
async def main():
    owner, longest = sys.argv[2], 0.0
    await engine.start()
    for number in range(100):
        begin = time.monotonic()
        await engine.commit(insert(owner, number))
        longest = max(longest, time.monotonic() - begin)
    await engine.stop()
    print(longest)
asyncio.run(main())
"""


@pytest.mark.process
async def test_three_processes_write_at_once_and_none_starves(engine, database):
    """Processes that start together create, migrate and write one database; each gets its turn."""
    processes = [start_script(COMMIT_A_HUNDRED, database, owner) for owner in "abc"]
    longest = [float(process.communicate(timeout=90)[0]) for process in processes]

    await engine.start()
    rows = await engine.query("SELECT owner, count(*) FROM log GROUP BY owner ORDER BY owner")
    await engine.stop()

    assert rows == [("a", 100), ("b", 100), ("c", 100)]
    assert max(longest) < 5


COMMIT_FOR_EVER = """
async def one(owner):
    number = 0
    while True:
        await engine.commit(insert(owner, number, b"x" * 500))
        print(owner, number, flush=True)
        number += 1
async def main():
    await engine.start()
    await asyncio.gather(*(one(owner) for owner in "abcd"))
asyncio.run(main())
"""


@pytest.mark.process
async def test_every_reported_commit_survives_kill_9(engine, database):
    """What a killed process reported is there; of the rest, at most whole batches."""
    for after in (1, 30, 200):
        process = start_script(COMMIT_FOR_EVER, database)
        lines = [process.stdout.readline() for _ in range(after)]
        process.send_signal(signal.SIGKILL)
        lines += process.communicate(timeout=30)[0].splitlines(keepends=True)
        told = [tuple(line.split()) for line in lines if line.endswith("\n")]
        # `communicate` does not know what `readline` has read ahead: one line may lack its head.
        reported = {line for line in told if len(line) == len(("owner", "number"))}

        await engine.start()
        found = {
            (str(owner), str(number))
            for owner, number in await engine.query("SELECT owner, number FROM log")
        }
        wipe = Batch(Point.RETIRE)
        wipe.add("DELETE FROM log")
        await engine.commit(wipe)
        await engine.stop()

        assert len(reported) >= after
        assert reported <= found


@pytest.mark.process
def test_forked_child_is_refused(database):
    """A child of fork has no threads and no locks; it must not seem to have a store."""
    output = run_script(
        """
async def main():
    await engine.start()
    await engine.commit(insert("a", 1))
    pid = os.fork()
    if pid == 0:
        for attempt in (
            lambda: engine.submit(insert("a", 2)).result(),
            lambda: engine.commit_from_thread(insert("a", 2), timeout_s=1),
            lambda: engine.query("SELECT 1").send(None),
            lambda: engine.stop().send(None),
        ):
            try:
                attempt()
            except BaseException as error:
                print(type(error).__name__, "fork" in str(error), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    await engine.commit(insert("a", 2))
    print(await engine.query("SELECT number FROM log"))
    await engine.stop()
asyncio.run(main())
""",
        database,
    )

    assert output.splitlines() == ["StoreError True"] * 3 + ["StopIteration False", "[(1,), (2,)]"]


@pytest.mark.process
def test_engine_that_a_forked_child_opens_is_its_own(database):
    """SQLite's note of the locks of the parent is not the child's: nobody removes its log."""
    output = run_script(
        """
with asyncio.Runner() as runner:
    runner.run(engine.start())
    runner.run(engine.commit(insert("parent", 1)))
    (told, tell), (go, say) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        async def child():
            own = SqliteEngine(engine.path, engine._migrations, process=Process())
            await own.start()
            await own.commit(insert("child", 1))
            os.write(tell, b"1")
            os.read(go, 1)
            await own.commit(insert("child", 2))
            await own.stop()
        asyncio.run(child())
        os._exit(0)
    os.close(tell)
    os.read(told, 1)
    runner.run(engine.commit(insert("parent", 2)))
    runner.run(engine.stop())
    print(Path(f"{engine.path}-wal").exists())  # the last one that has the file open removes it
    runner.run(engine.start())
    os.write(say, b"1")
    print(os.waitpid(pid, 0)[1], runner.run(engine.query("SELECT owner, number FROM log")))
    runner.run(engine.stop())
""",
        database,
    )

    rows = [("child", 1), ("child", 2), ("parent", 1), ("parent", 2)]
    assert output == f"True\n0 {rows}\n"


# -- the turn ---------------------------------------------------------------------


WAIT_FOR_THE_FIRST = """
from gracekit.store.sqlite.writer_lock import WriterLock

def waits(line):
    return "->" in line and f" {os.getpid()} " in line

first, second = WriterLock(Path(sys.argv[1]) / "first"), WriterLock(Path(sys.argv[1]) / "second")
second.take()
thread = threading.Thread(target=first.take)
thread.start()
while not any(waits(line) for line in open("/proc/locks")):
    time.sleep(0.001)
print("waiting", flush=True)
sys.stdin.readline()
second.give()
thread.join()
"""


@pytest.mark.process
async def test_turns_of_two_databases_are_no_deadlock(tmp_path):
    """Each process holds one turn and wants the other's from a second thread: the kernel calls
    that a deadlock, but it passes.
    """
    first, second = WriterLock(tmp_path / "first"), WriterLock(tmp_path / "second")
    first.take()
    with start_script(WAIT_FOR_THE_FIRST, tmp_path) as other:
        assert other.stdout.readline() == "waiting\n"
        with pytest.raises(OSError, match="deadlock"):
            fcntl.lockf(second._fd, fcntl.LOCK_EX)

        taken = asyncio.create_task(asyncio.to_thread(second.take))
        other.stdin.write("go on\n")
        other.stdin.flush()
        await asyncio.wait_for(taken, 30)

        first.give()
    assert other.returncode == 0
    second.close()
    first.close()


def test_a_statement_is_planned_once_whatever_is_bound_to_it(tmp_path: Path):
    """SQLite looks at the value of a LIMIT, and would prepare the statement anew for each."""
    path = tmp_path / "store.db"
    writer = connect_writer(prepare_file(path), synchronous="FULL", busy_timeout_s=1)
    writer.execute(SCHEMA)
    memory = open_memory()
    memory.execute(SCHEMA)
    for connection in (writer, connect_reader(path, busy_timeout_s=1), memory):
        prepared: list[int] = []

        def asked(*_: object, prepared: list[int] = prepared) -> int:
            prepared.append(1)
            return apsw.SQLITE_OK

        connection.authorizer = asked
        times = []
        for limit in range(3):
            connection.execute(
                "SELECT body FROM log WHERE owner = ? LIMIT ?", ("a", limit)
            ).fetchall()
            times.append(len(prepared))
        assert times[0] == times[2] > 0
        connection.close()
