"""The small parent of `gracekit keep`, with real children: how they end, and who stops them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.kit import GRACEKIT, environment, gracekit

pytestmark = pytest.mark.process

WAIT_S = 60.0
AT_WORK = "import time; print('at work', flush=True); time.sleep(600)"


def keep(directory: Path, *command: str, **more: Any) -> subprocess.Popen[str]:
    """Keep *command*, whose first line has come; the record is `record` in *directory*."""
    kept = subprocess.Popen(
        [*GRACEKIT, "keep", "--record", "record", "--", *command],
        cwd=directory,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        **more,
    )
    assert kept.stdout is not None
    assert kept.stdout.readline() == "at work\n"
    return kept


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def record(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "record").read_text())
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("script", "code", "how", "status"),
    [
        ("exit 0", 0, "exited", 0),
        ("exit 3", 3, "exited", 3),
        ("kill -KILL $$", -signal.SIGKILL, "killed", signal.SIGKILL),
        ("kill -TERM $$", -signal.SIGTERM, "killed", signal.SIGTERM),
        ("ulimit -c 0; kill -SEGV $$", -signal.SIGSEGV, "killed", signal.SIGSEGV),
    ],
)
def test_it_ends_as_its_child_and_the_record_says_how(
    tmp_path: Path, script: str, code: int, how: str, status: int
):
    """A signal of the child ends the parent, too, so that a shell and systemd see it."""
    answer = gracekit(tmp_path, "keep", "--record", "record", "--", "sh", "-c", script)

    assert answer.code == code
    found = record(tmp_path)
    assert (found["how"], found["status"], found["sender"]) == (how, status, None)
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_a_directory_gets_a_record_for_each_process(tmp_path: Path):
    for code in (1, 2):
        gracekit(tmp_path, "keep", "--record", ".", "--", "sh", "-c", f"exit {code}")

    found = [json.loads(path.read_text()) for path in tmp_path.glob("exit-*.json")]
    assert {one["status"] for one in found} == {1, 2}


@pytest.mark.parametrize("name", ["no-such-program", ""])
def test_a_command_that_cannot_run_is_said(tmp_path: Path, name: str):
    """And an earlier record is gone: it would be taken for that of this command."""
    (tmp_path / "record").write_text("{}")
    answer = gracekit(tmp_path, "keep", "--record", "record", "--", name)

    assert (answer.code, answer.out) == (126, "")
    assert f"{name} cannot be run: " in answer.err
    assert list(tmp_path.iterdir()) == []


def test_the_child_handles_signals_as_it_would_without_a_parent(tmp_path: Path):
    """Python ignores some, and its children would inherit that."""
    look = ("sh", "-c", "grep -E 'SigIgn|SigBlk' /proc/self/status")
    plain = subprocess.run(look, capture_output=True, text=True, check=True).stdout
    kept = gracekit(tmp_path, "keep", "--record", "record", "--", *look).out
    of_libc = 0b11 << 31  # which starting a program by glibc ignores, and each program resets

    def read(text: str) -> list[int]:
        return [int(line.split()[1], 16) & ~of_libc for line in text.splitlines()]

    assert read(kept) == read(plain)


def test_a_parent_that_ignores_the_end_of_children_changes_nothing(tmp_path: Path):
    """An exec keeps what is ignored, and the kernel would then reap the child itself."""
    deaf = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    deaf += "os.execv(sys.argv[1], sys.argv[1:])"
    words = [*GRACEKIT, "keep", "--record", "record", "--", "sh", "-c", "exit 4"]
    done = subprocess.run(
        [sys.executable, "-c", deaf, *words],
        cwd=tmp_path,
        env=environment(),
        timeout=WAIT_S,
        check=False,
    )

    assert done.returncode == 4
    assert record(tmp_path)["status"] == 4


def test_a_terminal_that_is_closed_reaches_the_child(tmp_path: Path):
    """The kernel tells only the leader of the session, which is the parent."""
    script = (
        "import signal, sys, time; signal.signal(signal.SIGHUP, lambda *_: sys.exit(8));"
        "open('at work', 'w'); time.sleep(600)"
    )
    master, slave = pty.openpty()
    words = [*GRACEKIT, "keep", "--record", "record", "--", sys.executable, "-c", script]
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words], cwd=tmp_path, env=environment(), stdin=slave
    ):
        os.close(slave)
        until((tmp_path / "at work").exists)
        os.close(master)

    assert (record(tmp_path)["how"], record(tmp_path)["status"]) == ("exited", 8)


def test_a_record_that_cannot_be_written_leaves_no_half(tmp_path: Path):
    """The command ends as it ended; what is wrong is said."""
    answer = gracekit(tmp_path, "keep", "--record", "gone/record", "--", "sh", "-c", "exit 5")

    assert answer.code == 5
    assert "gone/record cannot be written" in answer.err


def test_a_signal_is_passed_on_and_its_sender_is_on_record(tmp_path: Path):
    """The child handles it as if it had come directly."""
    script = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));" + AT_WORK
    with keep(tmp_path, sys.executable, "-c", script) as kept:
        kept.terminate()

    assert kept.returncode == 9
    assert record(tmp_path)["sender"].startswith(f"pid {os.getpid()} (")


def test_if_it_dies_alone_its_child_goes_on(tmp_path: Path):
    """Without evidence, but with its work."""
    with keep(tmp_path, sys.executable, "-c", AT_WORK) as kept:
        child = child_of(kept.pid)
        kept.kill()

    assert Path(f"/proc/{child}/stat").exists()
    assert not (tmp_path / "record").exists()
    os.kill(child, signal.SIGKILL)


def test_ctrl_c_reaches_the_child_once(tmp_path: Path):
    """A terminal sends it to both; passed on it would be a second one, which hands over at once."""
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('INT', flush=True))\n"
        "print('at work', flush=True)\n"
        "deadline = time.monotonic() + 2\n"
        "while time.monotonic() < deadline: time.sleep(0.1)\n"
    )
    master, slave = pty.openpty()
    words = [*GRACEKIT, "keep", "--record", "record", "--", sys.executable, "-c", script]
    with subprocess.Popen(
        ["setsid", "--ctty", "--wait", *words],
        cwd=tmp_path,
        env=environment(),
        stdin=slave,
        stdout=subprocess.PIPE,
        text=True,
    ) as kept:
        os.close(slave)
        assert kept.stdout is not None
        assert kept.stdout.readline() == "at work\n"
        os.write(master, b"\x03")
        rest = kept.stdout.read()
    os.close(master)

    assert rest == "INT\n"
    assert record(tmp_path)["sender"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_as_process_1_it_reaps_orphans_and_ends_with_128_and_the_signal(tmp_path: Path):
    """The kernel drops a signal that process 1 sends to itself."""
    script = (
        "for n in 1 2 3; do sh -c 'sleep 0.2 &' ; done; sleep 1; "
        "ls /proc | grep -c '^[0-9]' > processes; kill -KILL $$"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", *GRACEKIT, "keep", "--record"]
    done = subprocess.run(
        [*command, "record", "--", "sh", "-c", script],
        cwd=tmp_path,
        env=environment(),
        timeout=WAIT_S,
        check=False,
    )

    assert done.returncode == 128 + signal.SIGKILL
    assert record(tmp_path)["how"] == "killed"
    assert int((tmp_path / "processes").read_text()) <= 5  # keeper, shell, ls, grep, no zombie


def test_it_is_small(tmp_path: Path):
    """One stands beside each service that is kept."""
    with keep(tmp_path, sys.executable, "-c", AT_WORK) as kept:
        status = Path(f"/proc/{kept.pid}/status").read_text()
        kept.terminate()

    (resident_kb,) = (int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    assert resident_kb < 16_000


GROUP = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    not os.access(GROUP / "memory.limit_in_bytes", os.W_OK), reason="no memory cgroup of its own"
)
def test_a_kill_for_lack_of_memory_is_on_record(tmp_path: Path):
    """The kernel counts it in the cgroup, and the record says so."""
    own = Path("/proc/self/cgroup").read_text()
    (parent,) = (line.split(":")[2] for line in own.splitlines() if ":memory:" in line)
    group = GROUP / parent.lstrip("/") / f"keeper-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        eat = "[bytearray(1 << 20) for _ in range(500)]"
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        words = [*GRACEKIT, "keep", "--record", "record", "--", sys.executable, "-c", eat]
        done = subprocess.run(
            ["sh", "-c", script, "sh", *words], cwd=tmp_path, env=environment(), check=False
        )
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()

    assert done.returncode == -signal.SIGKILL
    assert record(tmp_path)["oom_kills"] >= 1
