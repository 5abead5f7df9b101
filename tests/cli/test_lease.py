"""`gracekit lease` on a store in a file: declared, seen, held for a command, and forced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import apsw
import pytest

from tests.cli.kit import PATIENCE_S, Answer, Started, gracekit

pytestmark = pytest.mark.process

STARTS_ORPHANS: Final = 'setsid sh -c "sleep 1000 & sleep 1000" & '
"""They are in a session of their own, and one of them loses its parent."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """In which vm:vm-1 is declared."""
    tmp_path.chmod(0o700)
    assert lease(tmp_path, "create", "vm:vm-1", "--payload", "on node 7").code == 0
    return tmp_path


def lease(directory: Path, *words: str, **more: str) -> Answer:
    return gracekit(directory, "lease", *words, **more)


def status(directory: Path) -> dict[str, Any]:
    answer = lease(directory, "status", "vm:vm-1", "--json")
    assert answer.code == 0, answer
    found: dict[str, Any] = answer.json
    return found


def holding(directory: Path, script: str = "") -> Started:
    """Holds vm:vm-1 for a shell, which prints `at work` and its token, and sleeps in the end."""
    line = f"{script} echo at work $GRACEKIT_LEASE_TOKEN; exec sleep 1000"
    started = Started(directory, "lease", "run", "vm:vm-1", "--", "sh", "-c", line)
    started.wait_line("at work")
    return started


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sleepers(directory: Path) -> list[int]:
    """Processes that work in *directory* and sleep: what a command has started there."""
    return [pid for pid, words in working(directory, b"sleep") if words.startswith(b"sleep")]


def working(directory: Path, name: bytes) -> list[tuple[int, bytes]]:
    """Processes that work in *directory* and have *name* in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if name in words and (process / "cwd").readlink() == directory:
                found.append((int(process.name), words))
        except OSError:
            pass  # it has ended, or is a zombie
    return found


# -- declared and seen ------------------------------------------------------------------------


def test_a_lease_is_declared_seen_and_removed(directory: Path):
    """No service and no member is needed; each refusal says what there is."""
    again = lease(directory, "create", "vm:vm-1")
    shown = lease(directory, "status", "vm:vm-1")
    removed = lease(directory, "delete", "vm:vm-1", "--json")
    missing = lease(directory, "delete", "vm:vm-1")

    assert (again.code, again.err) == (1, "Error: lease vm:vm-1 is declared already\n")
    assert shown.out.splitlines()[1].split()[:3] == ["vm:vm-1", "FREE", "0"]
    assert shown.out.rstrip().endswith("on node 7")
    assert removed.json == {"kind": "vm", "id": "vm-1", "done": "removed"}
    assert missing.code == 1
    assert "`gracekit lease create vm:vm-1` does that" in missing.err


def test_a_lease_that_nobody_has_declared_is_shown_as_free(directory: Path):
    """As the lease of a task is that has never run."""
    found = lease(directory, "status", "vm:vm-2", "--json").json

    assert (found["state"], found["token"], found["declared"]) == ("FREE", 0, False)


@pytest.mark.parametrize("name", ["vm", "vm:", ":vm-1", "vm:" + "x" * 256])
def test_what_names_no_lease_is_refused_with_an_example(directory: Path, name: str):
    """As a wrong command line."""
    answer = lease(directory, "status", name)

    assert answer.code == 2
    assert "write KIND:ID, such as vm:vm-1" in answer.err


def test_a_payload_that_is_too_long_is_refused(directory: Path):
    """With the number that is allowed."""
    answer = lease(directory, "create", "vm:vm-2", "--payload", "é" * 2049)

    assert answer.code == 1
    assert "a payload of 4098 bytes is longer than 4096" in answer.err


def test_declared_leases_are_listed_by_pages(directory: Path):
    """A page says whether it is the last one, and where the next one begins."""
    for number in (2, 3):
        lease(directory, "create", f"vm:vm-{number}")
    first = lease(directory, "list", "--limit", "2")
    second = lease(directory, "list", "--limit", "2", "--after", "vm:vm-2", "--json").json
    nothing = lease(directory, "list", "--after", "vm:vm-3")

    assert [line.split()[0] for line in first.out.splitlines()[1:]] == ["vm:vm-1", "vm:vm-2"]
    assert first.err == "there are more: --after vm:vm-2\n"
    assert [one["id"] for one in second["leases"]] == ["vm-3"]
    assert second["complete"] is True
    assert nothing.out == "no lease is declared\n"


# -- held for a command -----------------------------------------------------------------------


def test_a_command_runs_with_the_token_and_ends_the_hold(directory: Path):
    """Its output and exit status are its own, and the next token is higher."""
    tokens = []
    for _ in range(2):
        script = "echo $GRACEKIT_LEASE_TOKEN; exit 7"
        answer = lease(directory, "run", "vm:vm-1", "--", "sh", "-c", script)
        assert answer.code == 7, answer
        tokens.append(int(answer.out))
    killed = lease(directory, "run", "vm:vm-1", "--", "sh", "-c", "kill -9 $$")
    found = status(directory)

    assert tokens == [1, 2]
    assert killed.code == 128 + signal.SIGKILL
    assert (found["state"], found["last_end"], found["holder"]) == ("FREE", "clean", None)


def test_a_held_lease_is_refused_and_can_be_waited_for(directory: Path):
    """75, with one sentence: who has it."""
    with holding(directory) as first:
        held = status(directory)
        refused = lease(directory, "run", "vm:vm-1", "--", "touch", "never")
        kept = lease(directory, "delete", "vm:vm-1")
        words = ("lease", "run", "vm:vm-1", "--wait", "5m", "--", "echo", "second")
        with Started(directory, *words) as second:
            second.wait_line("which is LIVE: waiting for up to 5m")
            first.process.terminate()
            second.wait_line("second")
            ends = (first.wait(), second.wait())

    assert (held["state"], held["token"], held["holder_state"]) == ("EXCLUSIVE", 1, "LIVE")
    assert (refused.code, kept.code) == (75, 1)
    assert len(refused.err.splitlines()) == 1
    assert f"vm:vm-1 is held by {held['holder']} on host {held['host']}" in refused.err
    assert not (directory / "never").exists()
    assert ends == (128 + signal.SIGTERM, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on_to_the_command(directory: Path, number: signal.Signals):
    """Which ends as it likes; the lease is given back after that."""
    script = f"trap 'echo heard; exit 9' {number}; echo at work; while :; do sleep 0.1; done"
    with Started(directory, "lease", "run", "vm:vm-1", "--", "sh", "-c", script) as keeper:
        keeper.wait_line("at work")
        keeper.process.send_signal(number)
        keeper.wait_line("heard")
        code = keeper.wait()

    assert code == 9
    assert status(directory)["last_end"] == "clean"


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there is no such process")
def test_a_signal_that_comes_before_process_1_listens_is_not_lost(directory: Path):
    """The kernel drops what comes to a process 1 without a handler."""
    codes = []
    for n in range(4):
        assert lease(directory, "create", f"early:{n}").code == 0
        words = ("lease", "run", f"early:{n}", "--", "sleep", "5")
        with Started(directory, *words) as keeper:
            wait_for(lambda: bool(working(directory, b"lease_init")))
            keeper.process.send_signal(signal.SIGTERM)
            codes.append(keeper.wait())

    assert set(codes) <= {128 + signal.SIGTERM, -signal.SIGTERM}


@pytest.mark.skipif(os.geteuid() != 0, reason="without root only the command itself is promised")
def test_what_a_command_leaves_behind_ends_before_the_lease_is_given_back(directory: Path):
    """It could act without the lease."""
    script = f"{STARTS_ORPHANS} sleep 0.2; echo done"
    answer = lease(directory, "run", "vm:vm-1", "--", "sh", "-c", script)

    assert (answer.code, answer.out) == (0, "done\n")
    assert sleepers(directory) == []


def test_a_command_dies_with_its_keeper(directory: Path):
    """As root with all that it has started; the lease is free at once on this host, and granted
    when late effects have settled.
    """
    with holding(directory, STARTS_ORPHANS if os.geteuid() == 0 else "") as keeper:
        wait_for(lambda: bool(sleepers(directory)))  # it prints before it sleeps
        keeper.kill()
    wait_for(lambda: not sleepers(directory))
    found = status(directory)
    answer = lease(
        directory, "run", "vm:vm-1", "--wait", "5m", "--", "sh", "-c", "echo $GRACEKIT_LEASE_TOKEN"
    )

    assert (found["state"], found["holder_state"]) == ("FREE", "DEAD")
    assert (answer.code, answer.out) == (0, "2\n")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("no-such-program", 2, "no program 'no-such-program' is found: give its path"),
        ("./empty", 126, "Error: ./empty cannot be run: Exec format error"),
    ],
)
def test_a_command_that_cannot_run_is_refused(directory: Path, command: str, code: int, words: str):
    """And the lease is free."""
    (directory / "empty").touch(mode=0o755)
    answer = lease(directory, "run", "vm:vm-1", "--", command)

    assert answer.code == code
    assert words in answer.err
    assert status(directory)["state"] == "FREE"


def test_a_lease_that_is_not_declared_is_not_held(directory: Path):
    """A name that was mistyped would exclude nobody."""
    answer = lease(directory, "run", "vm:vm-2", "--", "touch", "never")

    assert answer.code == 1
    assert "`gracekit lease create vm:vm-2` does that" in answer.err
    assert not (directory / "never").exists()


# -- forced -----------------------------------------------------------------------------------


def test_a_forced_holder_ends_its_command(directory: Path):
    """SIGTERM first, then SIGKILL; the order waits for that, and is on record."""
    with holding(directory, "trap '' TERM;") as keeper:
        wrong = lease(directory, "force", "vm:vm-1", "--token", "7", "--reason", "late")
        order = ("force", "vm:vm-1", "--token", "1", "--reason", "it moves")
        soon = lease(directory, *order, "--wait", "0s")
        done = lease(directory, *order, "--json")
        lost = keeper.wait_line("is lost")
        code = keeper.wait()
    again = lease(directory, *order)
    incidents = gracekit(directory, "incidents", "--what", "operator_force", "--json").json

    assert (wrong.code, soon.code, done.code, again.code) == (1, 3, 0, 1)
    assert "has token 1 now, and not 7" in wrong.err
    assert soon.out.endswith("; the order stands\n")
    assert (done.json["done"], done.json["state"], done.json["last_end"]) == (True, "FREE", "taken")
    assert lost.endswith("ordered it: it moves")
    assert code == 128 + signal.SIGKILL
    assert "vm:vm-1 is free: nobody is to end" in again.err
    assert [one["request_id"] for one in incidents["incidents"]] == ["lease vm:vm-1, token 1"] * 2


def test_a_lease_can_be_freed_at_once_with_a_warning(directory: Path):
    """The holder before notices, and its command is ended."""
    with holding(directory) as keeper:
        answer = lease(
            directory, "force", "vm:vm-1", "--token", "1", "--reason", "fire", "--unsafe-now"
        )
        after = lease(directory, "run", "vm:vm-1", "--", "true")
        lost = keeper.wait_line("is lost")
        code = keeper.wait()

    assert (answer.code, after.code) == (0, 0)
    assert "lease vm:vm-1 is free; token 1 has ended; until the holder before notices" in answer.out
    assert "only a backend that compares tokens is safe" in answer.out
    assert "is lost: " in lost
    assert code == 128 + signal.SIGTERM


def test_a_store_with_a_held_lease_is_not_retired(directory: Path):
    """And an idle one is, after which tokens begin above all earlier ones."""
    with holding(directory) as keeper:
        beside_it = gracekit(directory, "store", "retire")
        keeper.process.terminate()
        keeper.wait()
    alone = gracekit(directory, "store", "retire")
    lease(directory, "run", "vm:vm-1", "--", "true")

    assert beside_it.code == 1
    assert "or a lease is held (see `gracekit lease list`)" in beside_it.err
    assert alone.code == 0
    assert status(directory)["token"] > 2**40


def test_what_an_edited_table_has_wrong_is_found_and_mended(directory: Path):
    """A holder that is not on record: CORRUPT, and held until somebody mends it."""
    database = apsw.Connection(str(directory / "gracekit-store.db"))
    database.execute("UPDATE lease SET owner = 'nobody'")
    database.close()
    corrupt = lease(directory, "status", "vm:vm-1", "--json").json["state"]
    found = lease(directory, "check")
    mended = lease(directory, "check", "--mend", "--json")
    after = lease(directory, "check")
    ran = lease(directory, "run", "vm:vm-1", "--", "true")

    assert corrupt == "CORRUPT"
    assert (found.code, mended.code, after.code, ran.code) == (3, 0, 0, 0)
    assert found.out == "lease vm:vm-1 is held by a run that is not on record\n"
    assert mended.json["mended"] is True
    assert after.out == "all leases fit\n"
