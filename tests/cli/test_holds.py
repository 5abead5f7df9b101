"""`gracekit holds end`: what it says of a hold that cannot be ended, and what it records."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from click.testing import CliRunner, Result

from gracekit import Settings
from gracekit.cli import task_orders
from gracekit.cli.main import cli
from gracekit.clock import Clock
from gracekit.journal.holds import Holds
from gracekit.journal.tasks import Journal
from gracekit.process import Process
from gracekit.store.location import StoreLocation

Say = Callable[..., Result]


async def open_two(url: str) -> None:
    """Two holds of one run: `migration vm-7` and `resize vm-1`."""
    engine = StoreLocation(Settings(store_url=url)).engine(Process())
    await engine.start()
    try:
        holds = Holds(Journal(engine, Clock(), run_id="run", service="compute"), host="node-1")
        for name, key in (("migration", "vm-7"), ("resize", "vm-1")):
            method = (None, "prepare", "1.0")
            await holds.open(name, key, at_most_s=900.0, method=method, args={})
    finally:
        await engine.stop()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "store.db"


@pytest.fixture
def say(store: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs one command of `holds` on a store with two holds."""
    url = f"sqlite:///{store}"
    asyncio.run(open_two(url))
    monkeypatch.setenv("GRACEKIT_STORE_URL", url)
    return lambda *words: CliRunner().invoke(cli, ["holds", *words])


def recorded(store: Path) -> tuple[int, int]:
    """How often an operator's end of a hold is listed as an incident, and how often counted."""
    connection = apsw.Connection(str(store))
    try:
        ((listed,),) = connection.execute(
            "SELECT count(*) FROM incident WHERE what = 'operator_end_hold'"
        )
        counted = connection.execute(
            "SELECT n FROM tally WHERE what = 'operator_end_hold'"
        ).fetchall()
    finally:
        connection.close()
    return int(listed), sum(int(value) for (value,) in counted)


def test_a_hold_is_listed_with_the_run_that_it_belongs_to(say: Say, store: Path):
    """Its instance; a run that is not on record any more has only its id."""
    connection = apsw.Connection(str(store))
    names = [str(row[1]) for row in connection.execute("PRAGMA table_info(run)")]
    known = {"run_id": "run", "service": "compute", "instance": "api-1"}
    values = [known.get(name, 0) for name in names]
    unknown = say()
    connection.execute(f"INSERT INTO run VALUES ({', '.join('?' * len(names))})", values)
    connection.close()
    shown, one = say(), json.loads(say("--json").output)["holds"][0]

    assert unknown.output.splitlines()[1].split()[3:6] == ["node-1", "run", "open"]
    assert shown.output.splitlines()[0].split()[3:6] == ["HOST", "RUN", "STATE"]
    assert shown.output.splitlines()[1].split()[3:6] == ["node-1", "api-1", "open"]
    assert (one["owner"], one["instance"]) == ("run", "api-1")


def test_a_command_that_waits_for_a_locked_store_says_so(say: Say, store: Path):
    """The order is carried out when the lock is free; until then the command does not look hung."""
    locker = apsw.Connection(str(store))
    locker.execute("BEGIN IMMEDIATE")
    free = threading.Timer(task_orders.LOCKED_S + 1.0, locker.execute, ["ROLLBACK"])
    free.start()
    answer = say("end", "migration", "vm-7", "--reason", "why")
    free.join()
    locker.close()

    assert answer.exit_code == 0
    assert f"waiting for {store}, which another program has locked for writing" in answer.output
    assert answer.output.endswith("migration vm-7: 1 hold ended\n")


def test_a_hold_that_does_not_exist_is_not_found_and_leaves_no_incident(say: Say, store: Path):
    """The nearest open hold is named, the status is that of `tasks show`, and nothing is
    recorded.
    """
    answer = say("end", "migration", "vm-8", "--reason", "done")

    assert answer.exit_code == 1
    assert "there is no hold migration vm-8; did you mean migration vm-7?" in answer.output
    assert "`gracekit holds` lists those that can be ended" in answer.output
    assert recorded(store) == (0, 0)


def test_a_hold_that_is_like_no_other_is_not_found_without_a_guess(say: Say, store: Path):
    """Where no name is near, only the command that lists holds is named."""
    answer = say("end", "backup", "nightly", "--reason", "done")

    assert answer.exit_code == 1
    assert "there is no hold backup nightly; `gracekit holds` lists those that" in answer.output
    assert recorded(store) == (0, 0)


def test_a_hold_that_has_ended_says_so_and_is_recorded_once(say: Say, store: Path):
    """The second end is no order that took effect: one incident, and the first answer says
    ended.
    """
    first = say("end", "migration", "vm-7", "--reason", "done", "--json")
    again = say("end", "migration", "vm-7", "--reason", "done")

    assert (first.exit_code, json.loads(first.output)["ended"]) == (0, 1)
    assert again.exit_code == 1
    assert "hold migration vm-7 has ended already" in again.output
    assert recorded(store) == (1, 1)
