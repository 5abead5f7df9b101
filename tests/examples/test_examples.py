"""The examples as their docstrings say: one command each, in real processes, until they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loops import without_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RUNGS = sorted(path.name for path in EXAMPLES.glob("ex*.py"))
WAIT_S = 60.0

Play = Callable[..., list[str]]

pytestmark = pytest.mark.process


def environment(scratch: Path) -> dict[str, str]:
    """As a reader's: the product can be imported, no setting is made, temporary files go to us."""
    env = without_settings()
    return env | {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run an example, a file or a module, to its end; its lines. It leaves with 0, no complaint, no
    process, no file.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    out, err = tmp_path / "out", tmp_path / "err"

    def run(name: str, *arguments: str) -> list[str]:
        program = (EXAMPLES / name,) if name.endswith(".py") else ("-m", name)
        with out.open("wb") as stdout, err.open("wb") as stderr:
            example = subprocess.Popen(
                (sys.executable, *program, *arguments),
                cwd=tmp_path,
                env=environment(scratch),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            code = example.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Its services are of its group; nothing is left of the group if it ended in order.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(example.pid, signal.SIGKILL)
                example.wait()
                code = "left a process behind" if code == 0 else code
        assert (code, err.read_text()) == (0, ""), out.read_text()
        assert list(scratch.iterdir()) == []
        return out.read_text().splitlines()

    return run


def said_by_services(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if line.startswith("    ")]


def said_by_the_example(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("    ")]


# -- the ladder as a whole --------------------------------------------------------


@pytest.mark.parametrize("name", RUNGS)
def test_rung_shows_its_number_and_its_command(name):
    """Each docstring begins with the rung's number, and has the command that runs it."""
    docstring = (EXAMPLES / name).read_text().split('"""')[1]

    assert docstring.startswith(f"{name[2:4]} - ")
    assert re.search(rf"^    python examples/{name}( \w+)?$", docstring, re.MULTILINE)


def test_table_has_each_rung_once():
    """The table in examples/README.md links each rung, in order, with its command."""
    table = (EXAMPLES / "README.md").read_text()
    rows = re.findall(
        r"^\| \[(\d\d)\]\((ex\S+\.py)\) \|.*\| `python examples/(\S+)` \|", table, re.MULTILINE
    )

    assert [name for _, name, _ in rows] == RUNGS
    assert all(name == command and name[2:4] == number for number, name, command in rows)


# -- rung by rung -----------------------------------------------------------------


def test_01_hello_answers(play):
    """A call is answered by name."""
    (answer,) = play("ex01_hello.py", "World")

    assert re.fullmatch(r"Hello, World! This is request \w{8}, attempt 1\.", answer)


def test_01_hello_is_served_in_a_terminal_and_called_from_another(tmp_path):
    """The two commands of the docstring work: SIGTERM then ends the service with 0."""
    log = tmp_path / "log"
    command = (sys.executable, "-m", "gracekit")
    app = ("--app-dir", EXAMPLES, "ex01_hello:svc")
    env = environment(tmp_path)
    with log.open("wb") as out:
        service = subprocess.Popen((*command, "run", *app), cwd=tmp_path, env=env, stdout=out)
    try:
        limit = time.monotonic() + WAIT_S
        while "service.serving" not in log.read_text():
            assert time.monotonic() < limit, log.read_text()
            assert service.poll() is None, log.read_text()
            time.sleep(0.02)
        call = (*command, "call", "hello", "greet", "name=World")
        answer = subprocess.run(
            call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        service.terminate()
        code = service.wait(WAIT_S)
    finally:
        service.kill()
        service.wait()

    assert answer.stdout.startswith('"Hello, World!'), answer.stderr
    assert code == 0, log.read_text()


def test_02_order_that_is_sent_five_times_ships_once(play):
    """One id, one shipment: also after a restart, and never with other content."""
    lines = play("ex02_casts_and_ids.py")

    assert lines == [
        "order-17 was sent 4 times; shipped: ['a lamp']; the answer: a lamp: parcel number 1",
        "order-17 with other content is refused, and ships nothing",
        "order-18 was cast while no service ran; shipped: ['a lamp']",
        "the next service found it in the queue: a table: parcel number 2",
        "and still knows order-17: a lamp: parcel number 1",
        "shipped in all: ['a lamp', 'a table']",
    ]


def test_03_copy_goes_on_after_a_drain_with_the_next_block(play):
    """A drained copy leaves with 75; the next start copies the rest, and no block twice."""
    lines = play("ex03_drain_and_resume.py")

    copied = [line.split()[-1] for line in said_by_services(lines)]
    attempts = [line.split()[1] for line in said_by_services(lines)]
    assert copied == [str(block) for block in range(10)]
    assert (sorted(attempts), set(attempts)) == (attempts, {"1", "2"})
    assert said_by_the_example(lines) == [
        "SIGTERM was sent",
        "the first process has left with exit code 75",
        "the caller's answer: disk-1 has all 10 blocks",
        "the second process has left with exit code 0",
    ]


def test_04_delete_that_was_killed_is_run_again(play):
    """After kill -9 the second attempt deletes what the first has left, and its caller is
    answered.
    """
    lines = play("ex04_retry_after_a_crash.py")

    assert lines == [
        "    attempt 1 has deleted monday.part0",
        "the process was killed; 2 parts are left",
        "    attempt 2 has deleted monday.part1",
        "    attempt 2 has deleted monday.part2",
        "the caller's answer: monday is gone, said attempt 2; 0 parts are left",
    ]


def test_05_probe_decides_by_the_truth(play):
    """Killed after the creation it is done, killed before it is run again; never is it done
    twice.
    """
    lines = play("ex05_probe_the_truth.py")

    assert lines == [
        "    attempt 1 orders vol-1",
        "    attempt 1 has created vol-1, and waits for the cloud",
        "the process was killed",
        "    probe: vol-1 is there",
        "the caller's answer: vol-1 is ready",
        "    attempt 1 orders vol-2",
        "the process was killed",
        "    probe: vol-2 is not there",
        "    attempt 2 orders vol-2",
        "    attempt 2 has created vol-2, and waits for the cloud",
        "the caller's answer: vol-2 is ready",
    ]


def test_06_charge_that_was_killed_is_never_run_again(play):
    """One attempt; the hook and the caller are told, and the same request again starts nothing."""
    told = (
        "task invoice-9 (charge) was marked ERRORED(interrupted): "
        "it was started and its end is not known"
    )
    lines = play("ex06_never_twice.py")

    assert lines == [
        "    attempt 1 charges card-1 with 80 EUR",
        "the process was killed",
        "    errored hook: card-1, 80 EUR, interrupted: look at request invoice-9",
        f"the caller is told: {told}",
        "the same request again is answered alike, and charges nothing",
    ]


def test_07_vm_has_one_task_at_a_time_and_refuses_a_stale_token(play):
    """The second request begins after the first has ended, under a higher token; the old one is
    stale.
    """
    lines = play("ex07_resources_and_fences.py")

    assert [line for line in lines if line.startswith("vm-1 ->")] == [
        "vm-1 -> small: begins, with token 1",
        "vm-1 -> small: ends",
        "vm-1 -> large: begins, with token 2",
        "vm-1 -> large: ends",
    ]
    assert "vm-2 -> large: ends" in lines
    assert lines[-2:] == [
        "vm-1 is large, and its token rose from 1 to 2",
        "a late write of the first request is refused: vm-1: token 1 is stale, 2 has been here",
    ]


def test_08_ops_topic_answers_in_a_drain(play):
    """The callback ends the last task of a drain; a new request waits for the next process."""
    lines = play("ex08_ops_in_a_drain.py")

    refusal = lines.pop(3)
    assert refusal.startswith("a new film by the ops topic: ")
    assert "is draining and does not take render" in refusal
    assert lines == [
        "    Alien is rendered, and waits for its delivery",
        "SIGTERM was sent; the service says: draining, rendering Alien",
        "a new film was cast; it waits in the queue",
        "the first caller's answer: Alien was delivered during the drain",
        "the first process has left with exit code 0",
        "    Brazil is rendered, and waits for its delivery",
    ]


def test_09_thread_that_is_timed_out_ends_when_it_looks(play):
    """A blocked thread does not hold up the loop; after the timeout it ends, and the drain with
    it.
    """
    lines = play("ex09_threads_and_timeouts.py")

    assert lines[:3] == [
        "tape-1: the thread waits for it",
        "tape-1: inserted meanwhile",
        "the caller's answer: tape-1 was read",
    ]
    assert lines[3:] == [
        "tape-2: the thread waits for it",
        "tape-2: the thread was asked to end, and does",
        "the caller was told: read() exceeded its timeout of 1 s and was cancelled",
        "drained: the thread has returned, so nothing was left behind",
    ]


def test_10_read_comes_again_and_only_one_sweeps(play):
    """The read of a killed process is answered by the next; each sweep has a token of its own."""
    lines = play("ex10_reads_and_jobs.py")

    first, third = (line.split()[-1] for line in lines if "Oslo is read" in line)
    sweeps = [
        re.fullmatch(r"swept by process (\d+), with token (\d+)", line)
        for line in said_by_services(lines)
    ]
    tokens = [int(found[2]) for found in sweeps if found]
    sweepers = {found[1] for found in sweeps if found}
    assert first != third
    assert len(tokens) == len(set(tokens))
    assert len(sweepers) >= 2
    second, killed, answer = said_by_the_example(lines)
    assert re.fullmatch(r"process \d+ has left with exit code 0", second)
    assert killed == f"process {first} was killed"
    assert answer == "the caller's answer: Oslo: 21 degrees"


def test_11_hold_keeps_the_process_until_the_vm_has_arrived(play):
    """Nothing runs in the drain, and the process leaves only after the hold is ended."""
    lines = play("ex11_class_with_holds.py")

    told = (
        "a newer caller is told: 'expect' in namespace 'migration' is served at 1.3, not at '1.4'"
    )
    assert lines[0].startswith(told)
    assert lines[1:] == [
        "host-b expects vm-7",
        "SIGTERM was sent; nothing runs, and the process stays",
        "50 % of vm-7 in the drain",
        "100 % of vm-7 in the drain",
        "the hold is ended: True",
        "the process has left with exit code 0",
    ]


def test_12_tests_of_a_service_pass_by_themselves_and_under_pytest(play, tmp_path):
    """One command runs them all; pytest finds the same three."""
    lines = play("ex12_test_your_service.py")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    found = subprocess.run(
        (*command, EXAMPLES / "ex12_test_your_service.py"),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )

    assert lines == [
        "passed: a drain stops the move at a safe point",
        "passed: after a crash the probe finds what is done",
        "passed: a lost answer of the database resizes once",
    ]
    assert re.search(r"^3 passed", found.stdout, re.MULTILINE), found.stdout


def test_13_embedding_program_answers_until_the_drain_has_ended(play):
    """The program's own server tells of the drain while the last task runs."""
    lines = play("ex13_embedded.py")

    assert lines == [
        "a task runs, and the server says 200 serving",
        "SIGTERM was sent, and the server says 503 draining",
        "the caller's answer: Alien is transcoded",
        "drained: 1 finished, 0 handed over",
    ]


def test_rung_14_a_fastapi_program_answers_probes_and_operators(play):
    """The mounted paths answer beside the program's own, and readiness fails after the signal."""
    lines = play("ex14_fastapi.py")

    assert lines == [
        "the operator sees a task: transcode, running",
        "the load balancer sees 200",
        "SIGTERM was sent, and it sees 503",
        'the customer\'s answer: "Alien is transcoded"',
    ]


# -- the larger ones --------------------------------------------------------------


def test_nova_vm_arrives_in_the_drain_of_its_host_and_after_a_crash_of_its_source(
    play, monkeypatch
):
    """A draining host waits for the vm that it expects and takes no other; a killed one goes on."""
    monkeypatch.setenv("NOVA_RESIZE_S", "2")
    lines = play("examples.nova.play")

    assert said_by_the_example(lines) == [
        "vm-1 runs on host-a",
        "vm-2 runs on host-a",
        "vm-3 runs on host-a",
        "SIGTERM was sent to host-b; nothing runs there, and it stays",
        "host-b is draining: take vm-2 to another host",
        "vm-2 runs on host-c",
        "vm-1 runs on host-b",
        "host-b has left with exit code 0",
        "host-a was killed",
        "vm-3 runs on host-c",
        "SIGTERM was sent to host-c; a drain waits for the resize",
        "vm-2 has 8 pages",
        "host-c has left with exit code 0",
        "vm-1 is of host-b: host-a gone, host-b running, host-c gone",
        "vm-2 is of host-c: host-a gone, host-b gone, host-c running",
        "vm-3 is of host-c: host-a gone, host-b gone, host-c running",
    ]
    assert "host-a: vm-3 resumed" in said_by_services(lines)


def test_share_records_that_nobody_works_on_are_settled_after_a_crash(play):
    """Each ends as its rule says; what the killed manager has settled is not asked for by a
    rule.
    """
    lines = play("examples.shares.play")

    assert said_by_services(lines) == []
    assert lines == [
        "made by requests:",
        "share:sh-1 available size=5 export_locations=2",
        "share:sh-2 available size=5 export_locations=2",
        "share:sh-3 available size=5 export_locations=2",
        "",
        "nobody works on these:",
        "share:sh-1 extending size=5 export_locations=2",
        "share:sh-2 deleting size=5 export_locations=2",
        "share:sh-3 creating size=5 export_locations=2",
        "share:sh-4 creating",
        "share:sh-5 creating",
        "share:sh-6 server_migrating",
        "share_server:srv-7 creating",
        "snapshot:sn-1 manage_starting",
        "",
        "the manager was killed while the backend did not answer for sh-3",
        "",
        "after the next start:",
        "share:sh-1 available size=9 export_locations=1",
        "share:sh-2 deleted size=5 export_locations=2",
        "share:sh-3 available size=5 export_locations=2",
        "share:sh-4 error",
        "share:sh-5 error",
        "share:sh-6 server_migrating",
        "share_server:srv-7 error",
        "snapshot:sn-1 manage_error",
        "",
        "what that one has asked the backend for: sh-1, sh-3",
    ]


# -- a scheduler with limited room --------------------------------------------------------

REAPER = [
    "p-1 is built",
    "p-2 is built",
    "n-1 is built",
    "p-3 is refused: 1024 MiB are not free, and p-3 is preemptible",
    "    listening",
    "n-2 waits for room, until <time> at the latest",
    "    freed 2048 MiB of p-1 for vm:n-2",
    "",
    "the resolver was killed; these wait: vm:n-2 at version 1",
    "the scheduler has ended, and is started again, with a deadline of 5 s for new requests",
    "these wait: vm:n-2 at version 1",
    "",
    "    listening",
    "    retried vm:n-2",
    "n-3 waits for room, until <time> at the latest",
    "    gave vm:n-3 up: the host has 8192 MiB in all",
    "n-4 waits for room, until <time> at the latest",
    "n-5 waits for room, until <time> at the latest",
    "the user has deleted n-5; these wait: vm:n-4 at version 1",
    "",
    "in the end:",
    "p-2 4096 MiB preemptible",
    "n-1 2048 MiB normal",
    "n-2 1024 MiB normal",
    "n-3 error: gave_up",
    "n-4 error: expired",
]


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"\d\d:\d\d:\d\d", "<time>", line) for line in lines]


def test_reaper_makes_room_also_after_a_crash_in_the_middle(play: Play):
    """The second resolver deletes nothing more; what never fits ends by a decision, or the
    deadline.
    """
    assert without_times(play("examples.reaper")) == REAPER


def test_reaper_does_the_same_by_rabbitmq(play: Play, rabbit_url: str):
    """With requests and notifications through a broker, whose URL the command is given."""
    assert without_times(play("examples.reaper", rabbit_url)) == REAPER
