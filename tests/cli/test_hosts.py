"""`gracekit hosts` and `gracekit hosts gone`, on a store in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from gracekit.life import Alive, Identity, Liveness
from gracekit.listings.host_list import judge_host
from gracekit.runs.run import Run
from gracekit.runs.watch import SeenBeat
from tests.cli.kit import Answer, Running, gracekit, write_service

REASON = "the host was scrapped"
LIFE = {alive: Liveness(alive, alive.value) for alive in Alive}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def gone(directory: Path, host: str, *words: str) -> Answer:
    return gracekit(directory, "hosts", "gone", host, "--reason", REASON, *words)


def listed(directory: Path) -> dict[str, dict[str, Any]]:
    """The rows of the command, by instance."""
    answer = gracekit(directory, "hosts", "--json")
    assert answer.code == 0, answer
    return {row["instance"]: row for row in answer.json["hosts"]}


def changed(directory: Path, statement: str, *params: object) -> None:
    store = apsw.Connection(str(directory / "gracekit-store.db"))
    store.set_busy_timeout(10_000)
    store.execute(statement, params)  # type: ignore[arg-type]
    store.close()


@pytest.mark.process
def test_the_newest_run_of_each_instance_is_listed_as_proven(directory: Path):
    """What it owns and since when; no beat is known of it, and nothing is waited for."""
    empty = gracekit(directory, "hosts")
    with Running(directory, "--host", "a", "--instance", "w") as run:
        run.kill()
    with Running(directory, "--host", "b", "--instance", "left") as run:
        run.process.terminate()
        run.wait()
    with Running(directory, "--host", "a", "--instance", "w") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1")
        run.wait_line("at work")
        living, table = listed(directory), gracekit(directory, "hosts").out.splitlines()
        run.kill()
    dead = listed(directory)
    for lock in (directory / "gracekit-store.db-runs").glob("*.lock"):
        lock.unlink()
    changed(directory, "UPDATE run SET boot_id = 'another' WHERE instance = 'w'")
    unknown, sentence = listed(directory), gracekit(directory, "hosts").out.splitlines()[-1]
    changed(directory, "UPDATE run SET ended_at = ended_at - 301 WHERE instance = 'left'")

    assert empty.code == 78
    assert {name: one["state"] for name, one in living.items()} == {"w": "LIVE", "left": "LEFT"}
    row = living["w"]
    assert (row["host"], row["service"], row["generation"]) == ("a", "compute", 2)
    assert (row["tasks"], row["leases"], row["draining"]) == (1, 1, False)
    assert (row["trust_left_s"], row["why"]) == (None, "its lock is held")
    assert abs(row["since"] - time.time()) < 300
    assert table[1].split()[:9] == ["a", "w", "compute", "2", "LIVE", "-", "1", "1", "no"]
    assert (dead["w"]["state"], dead["w"]["tasks"]) == ("DEAD", 1)
    assert unknown["w"]["state"] == "UNKNOWN"
    assert sentence.startswith("compute@w is UNKNOWN: its lock file is missing")
    assert listed(directory).keys() == {"w"}


@pytest.mark.process
def test_what_waits_for_a_host_that_is_gone_ends(directory: Path):
    """Its task and its hold by a living run, its finding and its messages at once."""
    with Running(directory, "--host", "pod-a") as run:
        gracekit(directory, "call", "compute", "hold", "vm=vm-7", "--host", "pod-a")
        gracekit(
            directory, "cast", "compute", "work", "vm=vm-1", "--host", "pod-a", "--id", "order"
        )
        run.wait_line("at work")
        refused = gone(directory, "pod-a")
        run.kill()
    finding = (
        "INSERT INTO finding (service, host, kind, name, status, first_seen, seen_at, ahead_s)"
    )
    changed(directory, f"{finding} VALUES ('compute', 'pod-a', 'vm', '1', 's', 1, 1, 0)")
    gracekit(directory, "cast", "compute", "echo", "--host", "pod-a")
    unknown = gone(directory, "pod-b")
    with Running(directory, "--host", "pod-b", "--reconcile-every", "200ms") as run:
        waits = gracekit(directory, "tasks", "show", "order", "--json").json["task"]
        said = gone(directory, "pod-a")
        run.wait_line("task.errored")
        ended = gracekit(directory, "tasks", "show", "order", "--json").json["task"]
        again = gone(directory, "pod-a", "--empty-queues", "--json").json
        lost = gracekit(directory, "cast", "compute", "echo", "--host", "pod-a")
        orders = gracekit(directory, "incidents", "--what", "operator", "--json").json
    with Running(directory, "--host", "pod-a"):
        back = gracekit(directory, "call", "compute", "echo", "value=1", "--host", "pod-a")

    assert refused.code == unknown.code == 1
    assert "is alive: its lock is held; on that host, `gracekit drain pod-a-0`" in refused.err
    assert "no host pod-b is on record" in unknown.err
    assert waits["state"] == "handed_over"
    assert said.out.splitlines() == [
        f"pod-a is on record as gone: {REASON}",
        "0 runs declared dead",
        "1 task and 1 hold wait for it alone: living runs of its services end them",
        "1 waiting resource removed",
        "1 message in its queues; --empty-queues removes them",
    ]
    assert (ended["state"], ended["reason"]) == ("errored", "gave_up")
    assert (again["findings"], again["messages"], again["emptied"]) == (0, 1, True)
    assert "no service ever declared queue 'compute.pod-a'" in lost.err
    assert [one["what"] for one in orders["incidents"]] == ["operator_host_gone"] * 2
    assert REASON in orders["incidents"][0]["detail"]
    assert back.code == 0, back


# -- the words ----------------------------------------------------------------------------


def beat(quiet_s: float, *, has_changed: bool) -> SeenBeat:
    """What was seen of a run at 1,000 s."""
    return SeenBeat(7, 1000.0 - quiet_s, has_changed, 12.0, 30.0)


@pytest.mark.parametrize(
    ("life", "seen", "state", "why"),
    [
        (Alive.NOT_PROVEN, None, "UNKNOWN", "not proven"),
        (Alive.NOT_PROVEN, beat(4.0, has_changed=False), "UNKNOWN", "no beat was seen in 4 s"),
        (Alive.NOT_PROVEN, beat(11.9, has_changed=True), "LIVE", "it beats"),
        (Alive.NOT_PROVEN, beat(12.0, has_changed=True), "FAIL", "no beat for 12 s"),
        (Alive.NOT_PROVEN, beat(900.0, has_changed=False), "FAIL", "no beat for 900 s"),
        (Alive.ALIVE, beat(900.0, has_changed=False), "LIVE", "alive"),
        (Alive.DEAD, beat(1.0, has_changed=True), "DEAD", "dead"),
    ],
)
def test_a_proof_counts_first_and_no_age_makes_a_run_dead(
    life: Alive, seen: SeenBeat | None, state: str, why: str
):
    """Without a proof the beats count, and only those that were seen."""
    assert judge_host(a_run(), LIFE[life], seen, 1000.0) == (state, why)


def test_a_dead_run_has_left_if_it_ended_by_itself():
    """Unless it was declared gone: something of it was left."""
    left, declared = a_run(ended_at=1.0), a_run(ended_at=1.0, gone_by="me")

    assert judge_host(left, LIFE[Alive.DEAD], None, 1000.0)[0] == "LEFT"
    assert judge_host(declared, LIFE[Alive.DEAD], None, 1000.0)[0] == "DEAD"


def a_run(**changes: Any) -> Run:
    names = [field.name for field in msgspec.structs.fields(Run)]
    identity = Identity(boot_id="b", pid_ns=1, time_ns=None, pid=1, start_ticks=1)
    return Run(**(dict.fromkeys(names) | {"identity": identity} | changes))
