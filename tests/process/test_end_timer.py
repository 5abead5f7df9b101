"""The kernel ends a process at its time, and a child with the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit.end_timer import END_SIGNAL, boottime
from tests.process.helpers import ROOT

PATIENCE_S = 60.0
OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
HEAD = """
import ctypes, os, signal, subprocess, sys, threading, time
import gracekit
from gracekit.end_timer import EndTimer, boottime
from gracekit.process import Process

def say(what):
    print(what, flush=True)

def hold_interpreter():
    ctypes.PyDLL(None).usleep(100_000_000)

timer = EndTimer()
"""


@contextlib.contextmanager
def started(code: str, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs *code*, perhaps inside another command."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", HEAD + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def assert_ends(process: subprocess.Popen[str], by: int, *, at: float) -> None:
    """It ends by *by*, and not before *at*."""
    assert process.wait(PATIENCE_S) == by
    assert boottime() >= at


def end_of(code: str, *prefix: str) -> tuple[int, list[str]]:
    """The exit code of a process, and its lines when it and its children have ended."""
    with started(code, *prefix) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said.splitlines()


@pytest.fixture
def own_pids() -> tuple[str, ...]:
    """A command that runs another one as PID 1."""
    may = subprocess.run([*OWN_PIDS, "true"], capture_output=True, text=True, check=False)
    if may.returncode != 0:
        pytest.skip(f"no pid namespace: {may.stderr.strip()}")
    return OWN_PIDS


# -- at a set time ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "then",
    [
        "hold_interpreter()",
        "while True: pass",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(100)",
    ],
    ids=["in C", "in Python", "stopped", "deaf"],
)
def test_the_kernel_ends_a_process_at_its_time_whatever_it_does(then: str):
    """Neither the interpreter's lock, nor SIGSTOP, nor a mask of signals delays the end."""
    with started(f"at = boottime() + 1; timer.arm(at); say(at)\n{then}\nsay('on')") as process:
        at = float(read(process))

        assert_ends(process, -signal.SIGKILL, at=at)
        assert read(process) == ""


def test_a_time_in_the_past_ends_the_process_at_once():
    """Also time 0, which would disarm a timer of the kernel."""
    assert end_of("timer.arm(0.0); time.sleep(100)") == (-signal.SIGKILL, [])


@pytest.mark.parametrize("first", ["boottime() + 1", "boottime() + 1000"])
def test_arming_again_replaces_the_time(first: str):
    """Only the last time counts, whether it is later or earlier."""
    code = f"timer.arm({first}); at = boottime() + 2; timer.arm(at); say(at); hold_interpreter()"
    with started(code) as process:
        at = float(read(process))

        assert_ends(process, -signal.SIGKILL, at=at)


def test_a_disarmed_timer_ends_nothing_and_can_be_armed_again():
    """The process passes the first time, and ends at the second."""
    code = """
process, at = Process(), boottime() + 1
process.end_at(at)
process.end_at(None)
process.end_at(None)
while boottime() < at + 0.3:
    time.sleep(0.1)
say("lives")
process.end_at(boottime() + 0.1)
hold_interpreter()
"""
    assert end_of(code) == (-signal.SIGKILL, ["lives"])


def test_a_forked_child_has_no_timer_and_does_not_touch_its_parents():
    """The child lives on after its parent's end, which it can neither hasten nor prevent."""
    code = """
at = boottime() + 1
timer.arm(at)
say(at)
if os.fork() == 0:
    timer.arm(0.0)
    timer.disarm()
    parent = os.getppid()
    while boottime() < at + 0.3 or os.getppid() == parent:
        time.sleep(0.1)
    say("child lives")
    os._exit(0)
hold_interpreter()
"""
    with started(code) as process:
        at = float(read(process))

        assert_ends(process, -signal.SIGKILL, at=at)
        assert read(process) == "child lives"


def test_a_child_arms_a_timer_that_its_parent_has_not_armed():
    """It belongs to the process that arms it first, not to the one that made the object."""
    code = """
if (child := os.fork()) == 0:
    timer.arm(boottime())
    time.sleep(100)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert end_of(code) == (0, [str(-signal.SIGKILL)])


def test_threads_that_arm_at_once_make_one_timer():
    """The kernel has one timer while it is armed, and none after it was disarmed."""
    if not Path("/proc/self/timers").exists():
        pytest.skip("this kernel does not list timers")
    code = """
def count():
    return open("/proc/self/timers").read().count("ClockID:")

together = threading.Barrier(8)

def arm():
    together.wait()
    for _ in range(200):
        timer.arm(boottime() + 1000)

threads = [threading.Thread(target=arm) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
armed = count()
timer.disarm()
say([armed, count()])
"""
    assert end_of(code) == (0, ["[1, 0]"])


def test_a_kernel_that_provides_no_timer_is_an_error_with_a_remedy():
    """For example, no signals may be queued; once they may, the timer can be armed."""
    code = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_SIGPENDING)
resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, most))
try:
    timer.arm(boottime() + 1)
except gracekit.GracekitError as error:
    say(repr(error))
resource.setrlimit(resource.RLIMIT_SIGPENDING, (most, most))
timer.arm(boottime())
time.sleep(100)
"""
    found, (said,) = end_of(code)

    assert found == -signal.SIGKILL
    assert said.startswith("DependencyError('the kernel provides no timer (Resource temporarily ")
    assert "raise RLIMIT_SIGPENDING" in said


@pytest.mark.parametrize(
    ("alarm_s", "end_s", "by"), [(1, 1000, signal.SIGALRM), (1000, 1, signal.SIGKILL)]
)
def test_the_alarm_of_a_drain_and_the_timer_do_not_disturb_each_other(
    alarm_s: int, end_s: int, by: int
):
    """Whichever comes first ends the process."""
    code = f"""
process = Process()
process.arm_alarm({alarm_s})
process.end_at(boottime() + {end_s})
hold_interpreter()
"""
    assert end_of(code) == (-by, [])


# -- as PID 1 -----------------------------------------------------------------------------------


DEAFEN = f"""
import os, signal, sys
signal.signal({END_SIGNAL}, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {{{END_SIGNAL}}})
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("prefix", [(), (sys.executable, "-c", DEAFEN)], ids=["open", "deaf"])
@pytest.mark.parametrize(
    "then", ["hold_interpreter()", "while True: pass"], ids=["in C", "in Python"]
)
def test_pid_1_ends_at_its_time_whatever_python_does(
    own_pids: tuple[str, ...], then: str, prefix: tuple[str, ...]
):
    """The kernel drops SIGKILL there, so the process leaves by a signal with a handler in C, even
    if its parent ignored and blocked that signal.
    """
    code = f"at = boottime() + 1; timer.arm(at); say(at); say(os.getpid())\n{then}"
    with started(code, *prefix, *own_pids) as process:
        at = float(read(process))
        assert read(process) == "1"

        assert_ends(process, END_SIGNAL, at=at)


def test_a_stopped_pid_1_ends_when_it_goes_on(own_pids: tuple[str, ...]):
    """It cannot end while it is stopped, and does nothing more after SIGCONT."""
    code = "at = boottime() + 3; timer.arm(at); say(at); hold_interpreter(); say('on')"
    with started(code, *own_pids) as process:
        at = float(read(process))
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        os.kill(pid, signal.SIGSTOP)
        while boottime() < at + 0.5:
            time.sleep(0.1)
        assert Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "T"

        os.kill(pid, signal.SIGCONT)

        assert_ends(process, END_SIGNAL, at=at)
        assert read(process) == ""


def test_a_disarmed_pid_1_lives(own_pids: tuple[str, ...]):
    """Both of its timers are gone."""
    code = """
at = boottime() + 1
timer.arm(at)
timer.disarm()
while boottime() < at + 0.3:
    time.sleep(0.1)
say("lives")
"""
    assert end_of(code, *own_pids) == (0, ["lives"])


@pytest.mark.parametrize(
    ("alarm_s", "end_s", "by"), [(1, 1000, signal.SIGALRM), (1000, 1, END_SIGNAL)]
)
def test_pid_1_ends_by_its_alarm_or_its_timer(
    own_pids: tuple[str, ...], alarm_s: int, end_s: int, by: int
):
    """They have different signals, and their numbers are its exit codes."""
    code = f"""
process = Process()
process.arm_alarm({alarm_s})
process.end_at(boottime() + {end_s})
hold_interpreter()
"""
    assert end_of(code, *own_pids) == (by, [])


# -- with the process that started it -----------------------------------------------------------

BY_SUBPROCESS = """
subprocess.Popen(["sleep", "600"], preexec_fn=gracekit.die_with_me)
say("started")
time.sleep(600)
"""
BY_ASYNCIO = """
import asyncio

async def main():
    await asyncio.create_subprocess_exec("sleep", "600", preexec_fn=gracekit.die_with_me)
    say("started")
    await asyncio.sleep(600)
"""


@pytest.mark.parametrize(
    "start",
    [
        BY_SUBPROCESS,
        f"{BY_ASYNCIO}\nasyncio.run(main())",
        f"{BY_ASYNCIO}\nimport uvloop; uvloop.run(main())",
    ],
    ids=["subprocess", "asyncio", "uvloop"],
)
def test_a_child_ends_with_the_process_that_started_it(start: str):
    """After `kill -9` of the parent the child is gone too."""
    with started(start) as process:
        assert read(process) == "started"

        process.kill()

        # The child has the same standard output: it ends when both have ended.
        assert process.communicate(timeout=PATIENCE_S) == ("", None)


def test_a_child_whose_parent_ended_before_it_asked_ends_at_once():
    """The kernel sends no signal for an end that came before the child asked for it."""
    code = """
def late():
    parent = os.getppid()
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.01)
    gracekit.die_with_me()

subprocess.Popen(["sleep", "600"], preexec_fn=late)
"""
    assert end_of(code) == (-signal.SIGKILL, [])


def test_a_child_ends_with_the_thread_that_started_it():
    """The process lives on: so children are started in a thread that stays."""
    code = """
children = []

def start():
    children.append(subprocess.Popen(["sleep", "600"], preexec_fn=gracekit.die_with_me))

thread = threading.Thread(target=start)
thread.start()
thread.join()
say(children[0].wait(60))
"""
    assert end_of(code) == (0, [str(-signal.SIGKILL)])


def test_a_child_in_another_pid_namespace_runs(own_pids: tuple[str, ...]):
    """It does not see the pid of its parent, and is not taken for an orphan."""
    code = """
CLONE_NEWPID = 0x20000000
assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
say(subprocess.run(["true"], preexec_fn=gracekit.die_with_me).returncode)
"""
    assert end_of(code) == (0, ["0"])


@pytest.mark.parametrize("fork_first", [False, True])
def test_calling_it_in_the_parent_is_refused(fork_first: bool):
    """Instead of the function its result would be passed, and the parent would change."""
    code = f"""
if {fork_first}:
    subprocess.run(["true"], preexec_fn=gracekit.die_with_me)
try:
    subprocess.run(["true"], preexec_fn=gracekit.die_with_me())
except gracekit.DeclarationError as error:
    say(error)
"""
    found, (said,) = end_of(code)

    assert found == 0
    assert "without calling it" in said
