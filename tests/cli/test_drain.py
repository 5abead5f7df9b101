"""`gracekit drain`, `extend`, `quiet` and `resume` on processes that serve."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from gracekit.cli.drain import why_it_blocks
from tests.cli.kit import Running, Started, door_of, gracekit, write_service

pytestmark = pytest.mark.process


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def start_work(directory: Path, run: Running, vm: str = "vm-1") -> None:
    """One task in flight that ends with `release`."""
    gracekit(directory, "cast", "compute", "work", f"vm={vm}")
    run.wait_line(f"at work '{vm}'")


def test_a_drain_is_watched_until_its_end(directory):
    """The deadline counts from the verb, the ops lane stays open, and 0 means drained."""
    with Running(directory) as run:
        start_work(directory, run)
        with Started(directory, "drain", "--timeout", "60s") as drain:
            drain.wait_line("in flight 1")
            gracekit(directory, "call", "compute", "release", "--ops")

            assert drain.wait() == 0
            said = drain.rest()
        assert run.wait() == 0

    assert "/ 01:00   longest work vm:vm-1" in said
    # The task, and the ops request that let it end.
    assert "verdict: drained: 2 finished, 0 handed over, 0 not started. exit 0" in said


def test_a_drain_can_be_watched_and_is_never_begun_by_that(directory):
    """An operator who only looks must not stop a service; a drain by a signal is shown to its
    end.
    """
    with Running(directory, "--instance", "api-1") as run:
        refused = gracekit(directory, "drain", "--watch", "api-1")
        wrong = gracekit(directory, "drain", "--watch", "--timeout", "5s")
        start_work(directory, run)
        run.process.send_signal(signal.SIGTERM)
        run.wait_line("drain.started")
        with Started(directory, "drain", "--watch") as watching:
            watching.wait_line("in flight 1")
            gracekit(directory, "call", "compute", "release", "--ops")
            code, said = watching.wait(), watching.rest()

    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "compute@api-1 does not drain, and --watch begins no drain\n"
    assert (wrong.code, "leave out --timeout" in wrong.err) == (2, True)
    assert code == 0
    assert "compute@api-1 was draining already; its deadline stands" in said
    assert "undo" not in said
    assert "verdict: drained: 2 finished" in said


def test_what_outlives_the_deadline_is_named_and_exits_3(directory):
    """The verdict is the stop record's, with method, resource and id of what was handed over."""
    with Running(directory, "--instance", "api-1") as run:
        start_work(directory, run)
        answer = gracekit(directory, "drain", "compute@api-1", "--timeout", "100ms")
        assert run.wait() == 75

    assert answer.code == 3
    (task,) = gracekit(directory, "tasks", "--json").json["tasks"]
    assert f"handed over: work vm:vm-1 ({task['request_id']})\n" in answer.out
    assert "verdict: handed_over: 0 finished, 1 handed over" in answer.out
    assert ". exit 3 (the run's exit code: 75) after " in answer.out


def test_a_drain_that_leaves_an_earlier_run_s_task_is_not_said_to_be_drained(directory):
    """The task of a killed run waits out its settle time: exit 75 and 3, and the verdict counts
    it.
    """
    with Running(directory, "--instance", "api-1") as killed:
        start_work(directory, killed)
        killed.kill()
    with Running(directory, "--instance", "api-1") as run:
        answer = gracekit(directory, "drain")
        code = run.wait()

    assert (answer.code, code) == (3, 75), answer
    assert "0 handed over, 0 not started, 1 unfinished from earlier runs. exit 3" in answer.out


def test_a_hold_that_keeps_a_drain_is_named_on_the_way_and_at_the_end(directory):
    """With nothing in flight an open hold is what the drain waits for; it is this run's own."""
    with Running(directory) as run:
        gracekit(directory, "call", "compute", "hold", "vm=vm-7")
        answer = gracekit(directory, "drain", "--timeout", "1s")
        assert run.wait() == 75

    assert answer.code == 3
    assert "in flight 0   00:00 / 00:01   waits for hold migration vm-7" in answer.out
    verdict = "0 finished, 0 handed over, 0 not started, 1 hold left open: migration vm-7. exit 3"
    assert verdict in answer.out


def test_holds_are_named_beside_tasks_and_in_the_status(directory):
    """While a task still runs, the watcher and `status` also say which hold the drain waits for."""
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "call", "compute", "hold", "vm=vm-7")
        start_work(directory, run)
        before = gracekit(directory, "status")
        with Started(directory, "drain", "--timeout", "60s", "--reason", "new disk") as drain:
            progress = drain.wait_line("in flight 1")
            status = gracekit(directory, "status")
            listed = gracekit(directory, "status", "--json").json
            gracekit(directory, "holds", "end", "migration", "vm-7", "--reason", "done")
            gracekit(directory, "call", "compute", "release", "--ops")
            assert drain.wait() == 0

    assert "longest work vm:vm-1" in progress
    assert progress.endswith("waits for hold migration vm-7")
    assert "api-1 waits for hold migration vm-7" in status.out
    assert re.search(r"^api-1 drains: asked for by uid \d+.*: new disk$", status.out, re.MULTILINE)
    assert "waits for hold" not in before.out
    assert listed["runs"][0]["holds"] == ["migration vm-7"]


def test_a_run_that_died_in_its_drain_is_not_said_to_drain(directory):
    """Its stop is on record, and it is gone."""
    with Running(directory, "--instance", "api-1") as run:
        start_work(directory, run)
        with Started(directory, "drain", "--timeout", "60s", "--reason", "new disk") as drain:
            drain.wait_line("in flight 1")
            run.kill()
            drain.wait()
    status = gracekit(directory, "status")

    assert re.search(r"^api-1 +gone ", status.out, re.MULTILINE)
    assert "drains: asked for by" not in status.out


def test_ctrl_c_detaches_and_the_drain_can_be_undone(directory):
    """A typed Ctrl-C ends the watching alone; `resume` brings the service back to work."""
    with Running(directory, "--instance", "api-1") as run:
        start_work(directory, run)
        with Started(directory, "drain", "--timeout", "60s", terminal=True) as drain:
            drain.wait_line("in flight 1")
            drain.type("\x03")
            assert drain.wait() == 130
            said = drain.rest()
        run.wait_line("intake.closed")

        resumed = gracekit(directory, "resume", "api-1", "--json")
        run.wait_line("drain.resumed")
        gracekit(directory, "call", "compute", "release", "--ops")
        echo = gracekit(directory, "call", "compute", "echo", "value=1")

    assert "the drain of api-1 goes on" in said
    assert "gracekit resume api-1" in said
    assert (resumed.code, resumed.json["runs"][0]["phase"]) == (0, "serving")
    assert echo.json == 1


def test_a_watcher_learns_that_the_drain_was_undone(directory):
    """The one who watches is told, and does not wait for ever: exit 1."""
    with Running(directory) as run:
        start_work(directory, run)
        with Started(directory, "drain", "--timeout", "60s") as drain:
            drain.wait_line("in flight 1")
            gracekit(directory, "resume")

            assert drain.wait() == 1
            assert "was resumed and serves on" in drain.rest()


def test_a_drain_by_command_is_given_more_time(directory):
    """The task succeeds after the first deadline; a service that serves has no deadline to move."""
    with Running(directory, "--progress-every", "1s") as run:
        start_work(directory, run)
        none = gracekit(directory, "extend", "--by", "5m")
        gracekit(directory, "drain", "--timeout", "8s", "--no-wait")
        extended = gracekit(directory, "extend", "--by", "5m", "--reason", "nearly done", "--json")
        more = gracekit(directory, "extend", "--by", "5m")
        wrong = gracekit(directory, "extend", "--by", "soon")
        run.wait_line("left_s=59")  # below 10 minutes: the first deadline has passed
        gracekit(directory, "call", "compute", "release", "--ops")
        assert run.wait() == 0

    assert (none.code, extended.code, more.code, wrong.code) == (1, 0, 0, 2)
    assert "refused: the service is serving, and no drain is under way" in none.err
    (result,) = extended.json["runs"]
    assert (result["phase"], 300 < result["drain_left_s"] <= 308) == ("draining", True)
    assert re.fullmatch(r"compute@\S+: draining, (10|9)m\d\ds left\n", more.out)
    assert "'soon' is not a duration" in wrong.err


def test_quiet_closes_intake_and_resume_opens_it(directory):
    """A quiet service takes no request, and says so; resume of a serving one is refused."""
    with Running(directory) as run:
        quiet = gracekit(directory, "quiet")
        run.wait_line("intake.closed")
        refused = gracekit(directory, "call", "compute", "echo", "--timeout", "100ms")
        status = gracekit(directory, "status")
        resumed = gracekit(directory, "resume")
        again = gracekit(directory, "resume")
        echo = gracekit(directory, "call", "compute", "echo", "value=1")

    assert (quiet.code, resumed.code, again.code) == (0, 0, 1)
    assert refused.code == 4
    assert status.out.splitlines()[1].split()[1] == "quiet"
    assert "nothing to resume" in again.err
    assert echo.json == 1


@pytest.mark.parametrize("verb", ["quiet", "resume"])
def test_a_run_that_is_not_asked_is_named_once(directory, verb):
    """One that has no door: the sentence that says so begins with the run's name."""
    with Running(directory, "--instance", "api-1"):
        door = door_of(directory)
        door.unlink()
        door.symlink_to("nowhere")  # so that the run cannot make it again
        answer = gracekit(directory, verb)
        door.unlink()

    assert answer.code == 4
    assert answer.err.startswith("compute@api-1 has no door in ")
    assert answer.err.count("compute@api-1") == 1


def test_several_runs_need_a_name_or_all(directory):
    """Nobody is drained by accident; --all takes each, and --no-wait asks only."""
    with Running(directory, "--instance", "a") as one, Running(directory, "--instance", "b") as two:
        unclear = gracekit(directory, "drain")
        asked = gracekit(directory, "drain", "a", "--no-wait")
        assert one.wait() == 0
        every = gracekit(directory, "drain", "--all", "--json")
        assert two.wait() == 0

    nobody = gracekit(directory, "drain")
    wrong = gracekit(directory, "drain", "c")

    assert unclear.code == 2
    assert "2 runs live (compute@a, compute@b): name one" in unclear.err
    assert asked.code == 0
    assert every.code == 0
    assert [(r["instance"], r["verdict"]) for r in every.json["runs"]] == [("b", "drained")]
    assert (nobody.code, wrong.code) == (4, 4)
    assert "ended" in nobody.err
    assert "known are a, b" in wrong.err


def test_lines_tell_why_the_oldest_tasks_still_run(directory):
    """It prints a line for each change, and below it why the oldest tasks still run."""
    with Running(directory) as run:
        for number in range(7):
            start_work(directory, run, f"vm-{number}")
        with Started(directory, "drain", "--timeout", "60s") as drain:
            drain.wait_line("in flight 7")
            drain.wait_line("  work vm:vm-0 (")
            drain.wait_line("  and 2 tasks more")
            gracekit(directory, "call", "compute", "release", "--ops")
            assert drain.wait() == 0
            said = drain.rest()

    assert said.count(", no safe point yet") >= 5


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"safe_point_age_s": 12.0}, "no safe point since 12s"),
        ({"age_s": 65.0}, "running for 1m05s, no safe point yet"),
        ({"cancelled_by": "operator"}, "cancelled (operator), and it has not returned"),
        ({"lane": "ops"}, "ops method, running for 3s, no safe point yet"),
        ({"lane": "periodic"}, "periodic job, running for 3s, no safe point yet"),
        ({"lane": "background"}, "work of a handler, running for 3s, no safe point yet"),
        ({"lane": "background", "about": "a"}, "running for 3s"),
        (
            {"state": "accepted", "waits_for": "lease vm:12 held by task b"},
            "waits for lease vm:12 held by task b",
        ),
        (
            {"state": "succeeded", "waits_for": "its answer to reach the caller"},
            "waits for its answer to reach the caller",
        ),
        ({"waits_for": "the store\x1b[2J"}, r"waits for the store\x1b[2J"),
        ({"state": "accepted"}, "accepted for 3s"),
    ],
)
def test_why_a_task_blocks_is_said_in_words(said: dict[str, object], why: str):
    """The words are made of the run's report; control characters in it are escaped."""
    task = {"task_id": "a", "method": "work", "resource": "vm:12", "lane": "requests"}
    task |= {"state": "running", "age_s": 3.0} | said

    assert why_it_blocks(task) == f"work vm:12 (a): {why}"
