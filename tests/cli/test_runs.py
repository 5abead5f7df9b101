"""`gracekit runs gone`, and what the other commands say of a run of which nothing is proven."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from tests.cli.kit import Running, gracekit, write_service

pytestmark = pytest.mark.process

REASON = "it has another boot id, so its process cannot be looked up here"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


@pytest.fixture
def left(directory: Path) -> str:
    """The run id of one that was killed at work, on a machine that nobody can look into."""
    with Running(directory, "--instance", "worker-0") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        run.wait_line("at work")
        run.kill()
    for lock in (directory / "gracekit-store.db-runs").glob("*.lock"):
        lock.unlink()
    store = apsw.Connection(str(directory / "gracekit-store.db"))
    store.execute("UPDATE run SET boot_id = 'another'")
    (run_id,) = store.execute("SELECT run_id FROM run").fetchone() or ("",)
    store.close()
    return str(run_id)


def test_a_run_of_which_nothing_is_proven_is_listed_with_the_reason(directory: Path, left: str):
    """Status, tasks and doctor name it, its reason and the remedy; nobody calls it gone."""
    status, tasks = gracekit(directory, "status"), gracekit(directory, "tasks")
    (run,) = gracekit(directory, "status", "--json").json["runs"]
    (task,) = gracekit(directory, "tasks", "--json").json["tasks"]
    doctor = gracekit(directory, "doctor")

    assert status.out.splitlines()[1].split()[:3] == ["worker-0", "not", "proven"]
    assert (run["alive"], run["life"]) == (False, "not proven")
    assert (task["orphaned"], task["owner_not_proven"]) == (False, True)
    assert "worker-0 (not proven)" in tasks.out
    for out in (status.out, run["life_reason"], doctor.out):
        assert f"its lock file is missing, and {REASON}" in " ".join(out.split())
    for out in (status.out, doctor.out):
        assert f"gracekit runs gone {left} --reason" in " ".join(out.split())


def test_no_order_changes_what_a_run_owns_that_may_live(directory: Path, left: str):
    """It would hit a living task: cancel, retry and drain are refused with the reason."""
    answers = [
        gracekit(directory, "tasks", "cancel", "order-1", "--reason", "r"),
        gracekit(directory, "drain", "worker-0"),
    ]

    for answer in answers:
        assert answer.code == 4, answer
        assert REASON in answer.err
    (task,) = gracekit(directory, "tasks", "--json").json["tasks"]
    assert task["state"] == "running"


def test_recovery_leaves_it_alone_until_an_operator_says_that_it_is_gone(
    directory: Path, left: str
):
    """Who and why are on record; then a living run takes its tasks over at once."""
    with Running(directory, "--instance", "worker-1") as run:
        (task,) = gracekit(directory, "tasks", "--json").json["tasks"]
        assert (task["state"], task["owner_run"]) == ("running", left)

        said = gracekit(directory, "runs", "gone", left[:12], "--reason", "host b7 was scrapped")

        assert said.code == 0, said
        run.wait_line("at work")
        exits = gracekit(directory, "status", "--json").json["last_exits"]
        shown = gracekit(directory, "status").out
    assert "host b7 was scrapped" in shown
    assert [(one["run_id"], one["verdict"]) for one in exits] == [(left, "killed")]
    assert exits[0]["gone_reason"] == "host b7 was scrapped"
    assert "@" in exits[0]["gone_by"]


def test_what_is_proven_needs_no_word(directory: Path):
    """A living run is drained instead, a dead one is taken over anyway, an unknown one is named."""
    with Running(directory, "--instance", "worker-0") as run:
        alive = gracekit(directory, "runs", "gone", "worker-0", "--reason", "r")
        run.kill()
    dead = gracekit(directory, "runs", "gone", "worker-0", "--reason", "r")
    unknown = gracekit(directory, "runs", "gone", "nobody", "--reason", "r")
    empty = gracekit(directory, "runs", "gone", "", "--reason", "r")

    assert (alive.code, dead.code, unknown.code, empty.code) == (1, 1, 1, 1)
    assert "alive: its lock is held; `gracekit drain worker-0` ends it" in alive.err
    assert "dead: its lock is free" in dead.err
    assert "no run nobody" in unknown.err
    assert empty.err == "Error: an empty RUN names no run; see `gracekit status`\n"


def test_a_run_that_lives_after_all_ends_when_it_was_said_to_be_gone(directory: Path):
    """Others take its tasks: it cuts them, takes no more, and ends with 70."""
    with Running(directory, "--instance", "worker-0") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1")
        run.wait_line("at work")
        store = apsw.Connection(str(directory / "gracekit-store.db"))
        store.set_busy_timeout(10_000)
        store.execute("UPDATE run SET gone_at = 1, gone_by = 'me@here', gone_reason = 'no light'")
        store.close()

        run.wait_line("run.lost")
        assert run.wait() == 70
    assert "me@here said that this run is gone: no light" in run.rest() + "\n".join(run.seen)


@pytest.mark.parametrize(
    "command", ["runs gone api-1", "holds end migration v1", "tasks fail x", "hosts gone x"]
)
def test_an_order_without_a_reason_is_refused(directory: Path, command: str):
    """It is what others read on record."""
    refused = gracekit(directory, *command.split(), "--reason", " ")

    assert refused.code == 2
    assert "write in a few words" in refused.err
