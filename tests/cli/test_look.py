"""`gracekit status` and `tasks`: living, silent, killed and missing services."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner

from gracekit.cli.main import cli
from gracekit.cli.records import StoreRecords
from gracekit.cli.status import not_ready
from gracekit.listings.listed_task import ListedTask
from gracekit.process import Process
from gracekit.runs.run import Run
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from tests.cli.kit import (
    PATIENCE_S,
    Running,
    Started,
    cast_many,
    door_of,
    gracekit,
    write_service,
)

pytestmark = pytest.mark.process


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_a_living_run_is_shown_in_its_own_words(directory):
    """Phase, what is in flight, the longest task, and accounts that balance."""
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "a\x1b[2Jb")
        run.wait_line("at work")

        status, seen = gracekit(directory, "status"), gracekit(directory, "status", "--json").json
        tasks, listed = gracekit(directory, "tasks"), gracekit(directory, "tasks", "--json").json

    lines = [line.split() for line in status.out.splitlines()]
    columns = ["INSTANCE", "PHASE", "UP", "IN-FLIGHT", "OPS", "LONGEST", "DRAIN"]
    assert lines[0] == [*columns, "ADMIN", "SRC", "OPER"]
    assert lines[1][:2] + lines[1][3:7] == ["api-1", "serving", "1", "idle", "work", "vm:vm-1"]
    assert "accepted 1 = 0 terminal + 1 transient (1 running) + 0 removed: balanced" in status.out
    assert (seen["runs"][0]["answers"], seen["accounts"]["balanced"]) == (True, True)
    assert r"a\x1b[2Jb" in tasks.out
    assert "\x1b" not in tasks.out
    (task,) = listed["tasks"]
    assert task["live"]
    assert (task["owner"], task["orphaned"], task["resource"]) == ("api-1", False, "vm:vm-1")


MANY = 2_100


def test_a_saturated_run_says_how_much_it_holds_and_lists_it_page_by_page(directory):
    """With more than 2,000 tasks in flight it answers, its tasks are listed as its own, and its
    drain is watched.
    """
    with Running(directory, "--instance", "api-1", GRACEKIT_MAX_ACCEPTED=f"{MANY}") as run:
        cast_many(directory, MANY)
        wait_for(lambda: accepted(directory) == MANY)

        status = gracekit(directory, "status")
        listed = gracekit(directory, "tasks", "--limit", f"{MANY}", "--json").json
        with Started(directory, "drain", "--timeout", "60s") as drain:
            progress = drain.wait_line("in flight")
            gracekit(directory, "call", "compute", "release", "--ops")
            run.wait()

    line = status.out.splitlines()[1].split()
    assert line[:2] + line[3:6] == ["api-1", "serving", f"{MANY}", "idle", "work"]
    assert len({task["request_id"] for task in listed["tasks"] if task["live"]}) == MANY
    assert not listed["more"]
    assert "longest work" in progress


def accepted(directory: Path) -> int:
    """Requests of which the store has custody."""
    seen = gracekit(directory, "status", "--json")
    return int(seen.json["accounts"]["accepted"])


def wait_for(condition: Callable[[], bool]) -> None:
    """Ask again and again; each question is a command, so there is nothing to wait on."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline


def test_a_silent_run_is_said_to_be_silent(directory):
    """A stopped process lives: the store speaks for it, and nobody calls it gone."""
    with Running(directory, "--instance", "api-1") as run:
        run.process.send_signal(signal.SIGSTOP)

        answer = gracekit(directory, "status")

    assert answer.code == 0
    assert answer.out.splitlines()[1].split()[:2] == ["api-1", "serving?"]
    assert "does not answer" in answer.out


def test_commands_say_that_a_process_is_stopped_and_how_it_goes_on(directory):
    """They advise no signal that it cannot act on; doctor fails."""
    words = (
        ["status"],
        ["drain"],
        ["dump"],
        ["runs", "gone", "api-1", "--reason", "r"],
        ["doctor"],
    )
    with Running(directory, "--instance", "api-1") as run:
        pid = run.process.pid
        run.process.send_signal(signal.SIGSTOP)

        said = {one[0]: gracekit(directory, *one) for one in words}

    for name, answer in said.items():
        shown = " ".join((answer.out + answer.err).split())
        assert f"kill -CONT {pid}" in shown, answer
        assert name == "doctor" or "kill -USR1" not in shown
        assert "kill -TERM" not in shown
    assert said["doctor"].code in {69, 78}  # 78 if a shell above the tests passes no SIGTERM on
    assert "FAIL doors" in " ".join(said["doctor"].out.split())


def test_a_run_that_is_stopped_in_a_commit_holds_nobody_up(directory):
    """A process that writes to the queue waits for the lock that the run holds; `status` ends in
    time.
    """
    with Running(directory, "--instance", "api-1") as run:
        writer_lock = os.open(directory / "gracekit.db-writer", os.O_RDWR)
        fcntl.lockf(writer_lock, fcntl.LOCK_EX)  # as the run would hold it
        run.process.send_signal(signal.SIGSTOP)
        try:
            answer = gracekit(directory, "status")
        finally:
            os.close(writer_lock)

    assert answer.code == 0
    assert "does not answer" in answer.out or "not reached" in answer.out


def after_the_listing(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Let something happen once, when a command has listed runs and not asked any."""
    listing, left = StoreRecords.living, [happens]

    async def living(records: StoreRecords, name: str | None = None) -> list[Run]:
        runs = await listing(records, name)
        if runs and left:
            left.pop()()
        return runs

    monkeypatch.setattr(StoreRecords, "living", living)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["status"], "serving"),
        (["tasks", "--limit", "5"], "work"),
        (["tasks", "cancel", "short-1", "--reason", "wrong host"], "short-1"),
        (["quiet", "--all"], "ended meanwhile, and it runs again"),
        (["drain", "--all", "--no-wait"], "ended meanwhile, and it runs again"),
        (["drain", "api-1"], "ended meanwhile, and it runs again"),
    ],
)
def test_a_run_that_restarts_between_listing_and_asking_is_a_sentence(
    directory, monkeypatch: pytest.MonkeyPatch, words: list[str], shown: str
):
    """The other runs are asked all the same, the new one is asked for what is only looked at, and a
    verb for the run that has ended does not hit its successor.
    """
    store, successor = f"sqlite:///{directory / 'gracekit-store.db'}", contextlib.ExitStack()
    restarted: list[Running] = []

    def restart() -> None:
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0
        restarted.append(successor.enter_context(Running(directory, "--instance", "api-1")))

    with (
        successor,
        Running(directory, "--instance", "api-2") as other,
        Running(directory, "--instance", "api-1") as run,
    ):
        gracekit(directory, "quiet", "api-1")
        gracekit(directory, "cast", "compute", "peek", "--id", "short-1")
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        other.wait_line("at work")
        after_the_listing(monkeypatch, restart)
        answer = CliRunner().invoke(cli, [*words, "--store", store])
        after = gracekit(directory, "status", "--json").json

    assert restarted
    assert answer.exception is None or isinstance(answer.exception, SystemExit)
    assert shown in answer.output, answer.output
    assert "does not answer" not in answer.output
    assert "verdict" not in answer.output
    assert words[0] not in {"quiet", "drain"} or answer.exit_code == 4
    phases = {run["instance"]: run["status"]["phase"] for run in after["runs"] if run["alive"]}
    assert phases["api-1"] == "serving"
    others = {"quiet": "quiet", "drain": "draining"} if "--all" in words else {}
    assert phases["api-2"] == others.get(words[0], "serving")


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["drain"], 0, "verdict: drained: 0 finished"),
        (["drain", "--no-wait"], 4, "ended meanwhile; `gracekit status` says how it ended"),
        (["quiet"], 4, "ended meanwhile"),
        (["resume"], 4, "ended meanwhile"),
        (["reconcile"], 4, "ended"),
        (["dump"], 4, "ended meanwhile"),
        (["tasks"], 0, "no tasks"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_a_run_that_ends_between_listing_and_asking_is_not_called_silent(
    directory, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, shown: str
):
    """Nobody is to send a signal to its pid, which may be another process by now."""
    ended: list[int] = []

    def end() -> None:
        run.process.send_signal(signal.SIGTERM)
        ended.append(run.wait())

    with Running(directory, "--instance", "api-1") as run:
        after_the_listing(monkeypatch, end)
        store = f"sqlite:///{directory / 'gracekit-store.db'}"
        answer = CliRunner().invoke(cli, [*words, "--store", store])

    assert ended == [0]
    assert (answer.exit_code, shown in answer.output) == (code, True), answer.output
    assert "did not answer" not in answer.output
    assert "kill -" not in answer.output


def test_a_killed_run_leaves_orphans_that_are_listed(directory):
    """With no process alive the store tells who was there, how it ended and what it left. Who asks
    for one run learns by the exit status that it does not live.
    """
    with Running(directory, "--instance", "worker-0") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        run.wait_line("at work")
        run.kill()

    status = gracekit(directory, "status")
    tasks = gracekit(directory, "tasks", "--resource", "vm:vm-1")
    kind = gracekit(directory, "tasks", "--resource", "vm:")
    other = gracekit(directory, "tasks", "--resource", "v:")
    bare = gracekit(directory, "tasks", "--resource", "vm")
    drain = gracekit(directory, "drain", "worker-0")
    asked = gracekit(directory, "status", "--instance", "worker-0")
    unknown = gracekit(directory, "status", "--instance", "worker-7")

    assert (status.code, asked.code, unknown.code) == (0, 4, 4)
    assert "worker-0" in asked.out
    assert "no run of instance 'worker-7' is on record" in unknown.err
    assert status.out.splitlines()[1].split()[:2] == ["worker-0", "gone"]
    assert "1 orphaned" in status.out
    assert "reconcile pending" in status.out
    assert "killed" in status.out
    assert "order-1" in tasks.out
    assert "worker-0 (gone)" in tasks.out
    assert "order-1" in kind.out
    assert other.out == "no tasks\n"
    assert bare.out == "no tasks\n"
    assert bare.err == "if vm is a kind of resources, write --resource vm:\n"
    assert drain.code == 4
    assert "killed; `gracekit tasks` shows what is left" in drain.err


def test_a_handed_over_task_belongs_to_nobody_and_says_why(directory):
    """After a drain that ran out of time the row waits, ownerless, with its cut."""
    with Running(directory, "--instance", "worker-0") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1")
        run.wait_line("at work")
        run.process.send_signal(signal.SIGQUIT)
        assert run.wait() == 75

    tasks = gracekit(directory, "tasks", "--json").json["tasks"]
    status = gracekit(directory, "status")
    both = gracekit(directory, "status", "--json").json
    with contextlib.closing(apsw.Connection(str(directory / "gracekit-store.db"))) as store:
        store.execute("UPDATE task SET next_check = ?1 + 3600, waiting_since = ?1", [time.time()])
    waits = gracekit(directory, "tasks").out
    shown = gracekit(directory, "tasks", "show", str(tasks[0]["request_id"])).out

    assert "cut: cancelled, its probe waits: recovery asks again in 59m" in waits
    assert "its probe waits (it answered Wait, raised or timed out) until 2" in shown
    assert "its probe gave no decision (it answered Wait, raised or timed out)" in shown
    assert [(t["state"], t["ownerless"], t["cut"]) for t in tasks] == [
        ("handed_over", True, "cancelled")
    ]
    assert "without owner: 1 handed_over" in status.out
    assert "handed_over" in status.out.split("last exits")[1]
    assert "cut short" in status.out.split("last exits")[1]
    assert [one["verdict"] for one in (*both["runs"], *both["last_exits"])] == ["handed_over"] * 2


def test_work_without_a_row_is_listed_too(directory):
    """A `requeue` task is known to its process alone, which says so."""
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "cast", "compute", "peek", "--id", "short-1")
        run.wait_line("peeking")

        (task,) = gracekit(directory, "tasks", "--json").json["tasks"]
        shown = gracekit(directory, "tasks")

    assert (task["request_id"], task["journaled"], task["owner"]) == ("short-1", False, "api-1")
    assert "not journaled" in shown.out


def test_no_list_shows_the_login_of_a_url(directory):
    """JSON is for other programs' logs, so it is redacted as the table is."""
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "work", "vm=amqp://u:canary@host/v")
        run.wait_line("at work")

        listed = [gracekit(directory, "tasks"), gracekit(directory, "tasks", "--json")]

    for shown in listed:
        assert "amqp://***@host/v" in shown.out
        assert "canary" not in shown.out


def test_no_record_shows_the_login_of_a_url(directory):
    """Messages and tracebacks of the application hold what they like, in text and in JSON."""
    with Running(directory):
        called = gracekit(directory, "call", "compute", "leak", "--id", "t-1", "--json")

        shown = [gracekit(directory, "tasks", "show", "t-1", *more) for more in ([], ["--json"])]
        echoed = gracekit(directory, "call", "compute", "echo", "value=amqp://u:p@host/v", "--json")

    for answer in (called, *shown):
        assert "amqp://***@host/v" in answer.out
        assert "canary" not in answer.out
    assert echoed.json["result"] == "amqp://u:p@host/v"  # what was asked for stays as it is


def test_ids_that_would_read_alike_are_shown_whole(directory):
    """What is copied from the list names one task."""
    alike = ["6f9619ff8b86d011b42d00cf4fc964ff", "6f9619ff8b86d011b42d00cf4fc964fe"]
    long = ["order-" + "x" * 60 + letter for letter in "ab"]
    other = "0f9619ff8b86d011b42d00cf4fc964ff"
    with Running(directory):
        for request_id in (*alike, *long, other):
            gracekit(directory, "call", "compute", "echo", "--id", request_id)
    listed = gracekit(directory, "tasks", "--state", "succeeded").out

    for request_id in (*alike, *long):
        assert f"{request_id} " in listed
    assert other not in listed
    assert other[:12] in listed


def test_filters_narrow_the_list(directory):
    """By state, resource and number; the cut list says that there is more."""
    with Running(directory):
        for n in range(3):
            gracekit(directory, "call", "compute", "echo", f"value={n}")

        nothing = gracekit(directory, "tasks")
        two = gracekit(directory, "tasks", "--state", "succeeded", "--limit", "2", "--json").json
        none = gracekit(directory, "tasks", "--state", "all", "--resource", "vm-1", "--json").json

    assert nothing.out == "no tasks\n"
    assert (len(two["tasks"]), two["more"]) == (2, True)
    assert none == {"api_version": "1.0", "tasks": [], "more": False, "not_heard": {}}


def test_the_age_of_a_task_is_what_the_help_says():
    """Since its end, its last start or its acceptance, which may be an earlier process's."""
    now, whole = time.time(), " ".join(CliRunner().invoke(cli, ["tasks", "--help"]).output.split())

    def age(state: str, *, live: float | None = None, **moments: float) -> float:
        columns = dict.fromkeys(("started_at", "finished_at")) | {"state": state, **moments}
        said = None if live is None else {"state": state, "age_s": live}
        return ListedTask(
            columns=columns, owner=None, orphaned=False, doubtful=False, live=said, now=now
        ).age_s

    assert age("accepted", accepted_at=now - 300) == pytest.approx(300, abs=60)
    assert age("accepted", live=5.0, accepted_at=now - 300) == pytest.approx(300, abs=60)
    assert age("running", live=5.0, accepted_at=now - 300, started_at=now - 5) == 5.0
    handed_over = age("handed_over", accepted_at=now - 900, started_at=now - 600)
    assert handed_over == pytest.approx(600, abs=60)
    ended = age("failed", accepted_at=now - 900, started_at=now - 600, finished_at=now - 300)
    assert ended == pytest.approx(300, abs=60)
    parked = age("pending", accepted_at=now - 900, started_at=now - 600, parked_at=now - 300)
    assert parked == pytest.approx(300, abs=60)
    assert (
        "AGE is the time since the task has ended; before that, since it last began to run, or was "
        "accepted."
    ) in whole
    assert "`gracekit tasks show` says when a task was handed over." in whole


def test_tasks_of_an_unknown_instance_are_refused(directory):
    """A mistyped name lists no other run's tasks; the nearest known name is said, as by
    `status`.
    """
    with Running(directory, "--instance", "api-1"):
        gracekit(directory, "call", "compute", "echo")

        listed = ("tasks", "--state", "all", "--json")
        known = gracekit(directory, *listed, "--instance", "api-1")
        wrong = gracekit(directory, *listed, "--instance", "ap-1")

    assert len(known.json["tasks"]) == 1
    assert (wrong.code, wrong.out) == (4, "")
    assert "no run of instance 'ap-1' is on record" in wrong.err
    assert "did you mean api-1?" in wrong.err


@pytest.mark.parametrize(
    "command",
    ["status", "tasks", "drain", "quiet", "resume", "holds", "holds end move vm-1 --reason done"],
)
def test_a_missing_store_is_named_and_not_made(tmp_path: Path, command: str):
    """Looking and changing create nothing, and the message names path and option."""
    answer = gracekit(tmp_path, *command.split())

    assert answer.code == 78
    assert f"there is no store at {tmp_path / 'gracekit-store.db'}" in answer.err
    assert "--store" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["status", "tasks", "drain", "store backup copy.db"])
def test_a_lost_store_is_said_to_be_lost(tmp_path: Path, command: str):
    """The directory of its runs knows that there was one: who restores it has not named a wrong
    file.
    """
    runs = tmp_path / "gracekit-store.db-runs"
    runs.mkdir()
    (runs / "mark").write_text("7\n")

    answer = gracekit(tmp_path, *command.split())

    assert answer.code == 78
    assert f"{tmp_path / 'gracekit-store.db'} is lost" in answer.err
    assert "put the store or its newest backup back" in answer.err
    assert "systemctl or ps" in answer.err


def test_other_files_are_no_store_and_stay_as_they_are(tmp_path: Path):
    """Neither a database of somebody else nor an older or newer schema is migrated."""
    other = tmp_path / "gracekit-store.db"
    connection = apsw.Connection(str(other))
    connection.execute("CREATE TABLE mine (n)")
    foreign = gracekit(tmp_path, "status")
    connection.execute("CREATE TABLE run (n); CREATE TABLE task (n); CREATE TABLE tally (n)")
    older = gracekit(tmp_path, "status")
    connection.execute("PRAGMA user_version = 99")
    newer = gracekit(tmp_path, "status")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").get
    connection.close()

    assert [a.code for a in (foreign, older, newer)] == [78, 78, 78]
    assert "is not a store of gracekit" in foreign.err
    assert "use the gracekit that wrote it" in older.err
    assert "schema version 99" in newer.err
    assert tables == 4


def test_more_than_a_listing_can_hold_is_no_limit(tmp_path: Path):
    """A number that no database counts to is refused as others are."""
    answer = gracekit(tmp_path, "tasks", "--limit", "9" * 20)

    assert answer.code == 2
    assert "is not in the range" in answer.err


def test_a_device_without_an_end_is_no_settings_file(tmp_path: Path):
    """Reading stops where no file of settings is that long."""
    answer = gracekit(tmp_path, "status", "--config", "/dev/zero")

    assert answer.code == 78
    assert "cannot read the settings in /dev/zero: it has more than" in answer.err


@pytest.mark.parametrize("words", [("status",), ("store", "backup", "copy.db")])
def test_a_directory_is_no_store(tmp_path: Path, words: tuple[str, ...]):
    """Who names the directory of a store in its place is told so in a sentence."""
    place = tmp_path / "place"
    place.mkdir()

    answer = gracekit(tmp_path, *words, "--store", f"sqlite:///{place}")

    assert answer.code == 78
    assert answer.err == (
        f"Error: {place} is no regular file, and a store is one: name the service's with --store "
        "sqlite:////path/to/gracekit-store.db or GRACEKIT_STORE_URL\n"
    )


def test_a_store_whose_log_is_gone_is_said_to_be_empty(tmp_path: Path):
    """The main file of a young store holds nothing: who lost its -wal did not name a wrong file."""
    store = tmp_path / "gracekit-store.db"
    connection = apsw.Connection(str(store))
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    young = gracekit(tmp_path, "status")
    store.write_bytes(b"")
    empty = gracekit(tmp_path, "status")

    for answer in (young, empty):
        assert answer.code == 78
        assert f"{store} is empty" in answer.err
        assert "-wal" in answer.err
        assert "transport" not in answer.err


def test_no_color_is_honoured_and_a_pipe_gets_none(directory):
    """Colour is for terminals, and there only without NO_COLOR."""
    with Running(directory) as run:
        run.process.send_signal(signal.SIGTERM)
        run.wait()

    piped = gracekit(directory, "status")

    assert "\x1b[" not in piped.out
    for more, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with Started(directory, "status", terminal=True, **more) as shown:
            assert shown.wait() == 0
            assert ("\x1b[" in shown.rest()) is is_coloured


def store_with(path: Path, *, past: int) -> None:
    """A store without a run: three open tasks, each behind as many ended ones."""

    async def make() -> None:
        engine = SqliteEngine(path, load_migrations(MIGRATIONS), process=Process())
        await engine.start()
        await engine.stop()

    path.parent.mkdir(mode=0o700)
    asyncio.run(make())
    connection = apsw.Connection(str(path))
    for n in range(3):
        connection.execute(
            """
            WITH RECURSIVE i (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM i WHERE n < ?1)
            INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method,
                version, content_hash, on_interrupt, settle_s, state, accepted_at, finished_at)
            SELECT iif(n < ?1, 'old-', 'order-') || ?2 || n, '', 'compute', 'requests', 'compute',
                'shared', '', 'work', '1.0', '', 'error', 10.0,
                iif(n < ?1, 'succeeded', 'accepted'), 0, iif(n < ?1, 1, NULL) FROM i""",
            (past, f"{n}"),
        )
    connection.close()


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["tasks"], 0, "order-"),
        (["tasks", "--state", "errored"], 0, "no tasks"),
        (["status"], 0, "3 transient (3 accepted)"),
        (["tasks", "retry", "ordre-"], 1, "no task ordre- is on record"),
    ],
)
def test_a_look_at_open_tasks_does_not_walk_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, shown: str
):
    """Listing what is open, or looking for an id, costs the same beside a long record as beside
    none, in steps of SQLite's machine.
    """
    steps: dict[str, int] = {}

    def count(event: dict[str, Any]) -> None:
        if " task" in event["sql"]:
            steps[event["sql"]] = event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    costs = []
    for past in (0, 2_000):
        path = tmp_path / f"beside-{past}" / "store.db"
        store_with(path, past=past)
        with monkeypatch.context() as patch:
            hooks = [lambda opened: opened.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)]
            patch.setattr(apsw, "connection_hooks", hooks)
            answer = CliRunner().invoke(cli, [*words, "--store", f"sqlite:///{path}"])
        assert (answer.exit_code, shown in answer.output) == (code, True), answer.output
        costs.append(dict(steps))
        steps.clear()

    assert costs[0]
    assert costs[0] == costs[1]


def test_status_says_that_more_instances_ended_lately_than_it_shows(tmp_path: Path):
    """The last to end are shown, and --limit shows more of them."""
    path = tmp_path / "beside" / "store.db"
    store_with(path, past=0)
    connection = apsw.Connection(str(path))
    for n in range(3):
        at = time.time() - 100 + n
        connection.execute(
            """
            INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns,
                pid, start_ticks, lock_path, phase, topic, ops_topic, transport, started_at,
                beat_at, methods, kinds, schema, ended_at, exit_code, adopted_at, verdict)
            VALUES (?1, 'compute', 'h', ?1, 1, '1', 'b', 1, 1, 1, '/run/lock', 'stopped', 'compute',
                'compute-ops', 'memory://', ?2, ?2, '[]', '[]', 1, ?2, 0, ?2, 'drained')""",
            (f"api-{n}", at),
        )
    connection.close()

    def status(*words: str) -> str:
        return CliRunner().invoke(cli, ["status", *words, "--store", f"sqlite:///{path}"]).output

    some = status("--limit", "2").splitlines()
    assert [line.split()[0] for line in some[1:3]] == ["api-2", "api-1"]
    assert some[3] == "more than 2 ended within an hour: a larger --limit shows them"
    assert json.loads(status("--limit", "2", "--json"))["more"]
    assert "--limit" not in status()
    assert not json.loads(status("--json"))["more"]


def test_status_shows_what_waits_in_the_queue_of_each_topic(directory):
    """How much and for how long, and once, although several runs read the queue."""
    with Running(directory, "--instance", "api-1"), Running(directory, "--instance", "api-2"):
        assert "queues:" not in gracekit(directory, "status").out
        gracekit(directory, "quiet", "--all")
        for vm in ("vm-1", "vm-2"):
            gracekit(directory, "cast", "compute", "work", f"vm={vm}")
        while "queues: 2" not in (text := gracekit(directory, "status").out):
            pass  # a count is shared by all who ask within half a second
        shown = gracekit(directory, "status", "--json").json["runs"]

    assert re.search(r"^queues: 2 waiting in compute \(oldest \d+s\)$", text, re.MULTILINE)
    assert [run["status"]["queues"]["requests"]["waiting"] for run in shown] == [2, 2]


def test_a_run_that_cannot_read_is_said_not_to_be_ready():
    """With the reason in its own words, escaped; one that drains says so by its phase."""
    why = "requests cannot be read: locked\x1b[2J"

    assert not_ready({"phase": "serving", "not_ready": why}) == why.replace("\x1b", r"\x1b")
    assert not_ready({"phase": "draining", "not_ready": "it is draining"}) == ""
    assert not_ready({"phase": "serving", "not_ready": None}) == ""


def test_a_dead_run_leaves_no_door_behind(directory):
    """Whoever adopts it removes its lock, its door and its wake-up pipe, and a command says
    "gone".
    """
    with Running(directory) as killed:
        killed.kill()
    stale = door_of(directory)
    gone = gracekit(directory, "quiet")
    with Running(directory) as run:
        assert any("run.classified" in line for line in run.seen)
        files = {path.name for path in stale.parent.iterdir()}
        asked = gracekit(directory, "status")

    assert gone.code == 4
    assert "no process of" in gone.err
    assert not {name for name in files if name.startswith(stale.stem)}
    assert asked.out.splitlines()[1].split()[1] == "serving"
