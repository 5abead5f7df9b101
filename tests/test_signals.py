"""Signals in real processes: seen while the loop is blocked, never doubled, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gracekit.errors import DeclarationError
from gracekit.signals import STOP_SIGNALS, SignalWatcher, watched_signals
from tests.loops import LOOPS
from tests.scale import scale

pytestmark = pytest.mark.process

PRELUDE = """
import asyncio, hashlib, multiprocessing, os, signal, subprocess, sys, threading, time
from gracekit.signals import SignalWatcher
from tests.loops import LOOPS

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def say_when_free(word):
    # from a thread, as soon as the main thread has let go of the interpreter's lock
    gate = threading.Lock()
    gate.acquire()
    threading.Thread(target=lambda: gate.acquire() and say(word)).start()
    sys.setswitchinterval(60)
    gate.release()
"""


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs *code* after the prelude; killed at the end if it still lives."""
    running = subprocess.Popen(
        [sys.executable, "-u", "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def line(running: subprocess.Popen[str]) -> str:
    return running.stdout.readline().strip()


class Seen:
    """Signals as they arrive, to be waited for."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __call__(self, number: int) -> None:
        self._queue.put(number)

    def next(self) -> int:
        return self._queue.get(timeout=30)

    def nothing_more(self) -> bool:
        """To be asked after the watcher has ended, when all that came has been delivered."""
        return self._queue.empty()


# -- seeing -------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "block",
    [
        "say('blocked'); time.sleep(60)",  # C code that a signal interrupts
        # one that no signal interrupts, and that has let go of the interpreter's lock
        "say_when_free('blocked'); hashlib.pbkdf2_hmac('sha1', b'', b'', 2**31 - 1)",
        "say('blocked')\n        while True: pass",  # Python code
        "say('blocked'); subprocess.run(['sleep', '60'])",
        "say('blocked'); threading.Event().wait()",
    ],
    ids=["sleep", "computation in C", "Python", "child", "event"],
)
def test_a_blocked_loop_does_not_hide_a_signal(block, loop):
    """TERM is reported at once while the main thread is inside a blocking call, although uvloop has
    taken the wake-up when it began.
    """
    code = f"""
    async def main():
        watcher.take_back()
        {block}

    watcher = SignalWatcher(lambda number: say("seen", number) or os._exit(7))
    with watcher, asyncio.Runner(loop_factory=LOOPS["{loop}"]) as runner:
        runner.run(main())
    """
    with process(code) as running:
        assert line(running) == "blocked"

        running.send_signal(signal.SIGTERM)

        assert line(running) == f"seen {signal.SIGTERM:d}"
        assert running.wait(30) == 7


def test_each_signal_is_reported_once_and_in_order():
    """A second INT means something else than the first, so none is lost and none doubled."""
    seen = Seen()
    sent = [signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGQUIT] * scale(5, 500)

    with SignalWatcher(seen):
        got = [(os.kill(os.getpid(), number), seen.next())[1] for number in sent]

    assert got == sent
    assert seen.nothing_more()


async def test_the_callback_may_wake_the_loop():
    """The owner's way to act on a signal: call_soon_threadsafe from the callback."""
    woken = asyncio.Event()
    loop = asyncio.get_running_loop()

    with SignalWatcher(lambda _: loop.call_soon_threadsafe(woken.set)):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await woken.wait()


def test_a_callback_that_raises_does_not_end_the_watch(caplog):
    """The signal after a failed callback is still reported."""
    seen = Seen()

    def clumsy(number: int) -> None:
        seen(number)
        raise ValueError("clumsy")

    with SignalWatcher(clumsy):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert seen.next() == number

    assert "the callback of signal 15 failed" in caplog.text


# -- libraries that take the wake-up -------------------------------------------------


async def test_a_library_that_takes_the_wakeup_hides_nothing():
    """After loop.add_signal_handler took the wake-up, our signals and the library's both arrive,
    once.
    """
    seen = Seen()
    usr1 = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    with SignalWatcher(seen):
        loop.add_signal_handler(signal.SIGUSR1, usr1.release)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert seen.next() == number
            os.kill(os.getpid(), signal.SIGUSR1)
            async with asyncio.timeout(30):
                await usr1.acquire()
    loop.remove_signal_handler(signal.SIGUSR1)

    assert seen.nothing_more()
    assert usr1.locked()


def test_a_wakeup_taken_again_and_again_doubles_nothing():
    """However often a library takes the wake-up, each INT is reported exactly once."""
    seen = Seen()
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        with SignalWatcher(seen):
            for turn in range(scale(20, 2000)):
                if turn % 3 != 1:
                    signal.set_wakeup_fd(theirs)
                os.kill(os.getpid(), signal.SIGINT)
                if turn % 3 == 2:
                    signal.set_wakeup_fd(theirs)
                assert seen.next() == signal.SIGINT
    finally:
        signal.set_wakeup_fd(-1)
        os.close(ours)
        os.close(theirs)

    assert seen.nothing_more()


async def test_a_loop_that_had_the_wakeup_before_still_gets_its_signals():
    """A Runtime embedded in a program with signal handlers of its own does not silence them."""
    usr1 = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, usr1.release)

    async with asyncio.timeout(30):
        with SignalWatcher(Seen()):
            os.kill(os.getpid(), signal.SIGUSR1)
            await usr1.acquire()
        os.kill(os.getpid(), signal.SIGUSR1)
        await usr1.acquire()
    loop.remove_signal_handler(signal.SIGUSR1)


def test_a_closed_wakeup_of_another_is_not_written_to(tmp_path):
    """A number that now belongs to a file gets no stray byte."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    seen = Seen()
    try:
        with SignalWatcher(seen):
            os.close(theirs)
            with (tmp_path / "data").open("wb") as file:
                assert file.fileno() == theirs
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)  # read after the first one was passed on
                assert seen.next() == signal.SIGTERM
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, old)
        os.close(ours)

    assert (tmp_path / "data").read_bytes() == b""


# -- children -----------------------------------------------------------------------


def test_children_of_handlers_can_be_terminated():
    """A child started from a worker thread dies of terminate(), as it would without us."""
    code = """
    def work():
        child = subprocess.Popen(["sleep", "60"])
        child.terminate()
        say("child", child.wait(30))

    with SignalWatcher(lambda number: say("seen", number)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    with process(code) as running:
        assert line(running) == f"child {-signal.SIGTERM}"
        assert running.wait(30) == 0


def test_a_signal_to_a_forked_child_is_not_ours():
    """terminate() of a forked child ends the child and tells the parent nothing."""
    code = """
    def child(ready):
        ready.set()
        time.sleep(60)

    with SignalWatcher(lambda number: say("seen", number)):
        fork = multiprocessing.get_context("fork")
        ready = fork.Event()
        forked = fork.Process(target=child, args=(ready,))
        forked.start()
        ready.wait(30)
        forked.terminate()
        forked.join(30)
        say("child", forked.exitcode)
        os.kill(os.getpid(), signal.SIGINT)
    say("end")
    """
    with process(code) as running:
        told = [line(running) for _ in range(3)]

    assert told == [f"child {-signal.SIGTERM}", f"seen {signal.SIGINT:d}", "end"]


# -- leaving ------------------------------------------------------------------------


def test_old_handlers_and_wakeup_are_restored():
    """After the watch every handler, the wake-up and the threads are as before."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    threads = threading.active_count()

    with SignalWatcher(Seen()):
        assert signal.getsignal(signal.SIGTERM) not in before

    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_a_handler_that_replaced_ours_stays():
    """What somebody else installed during the watch is not undone."""
    old = signal.getsignal(signal.SIGQUIT)
    try:
        with SignalWatcher(Seen()):
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGQUIT, old)


def test_handlers_that_were_replaced_can_be_taken_back():
    """Each stop signal is named with what stood in its place; the old handlers are back after the
    watch. Of the others a program may make what it likes.
    """
    before = signal.getsignal(signal.SIGTERM)
    watched = (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
    with SignalWatcher(lambda number: None, watched) as watcher:
        assert watcher.take_back() == {}
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert watcher.take_back() == {signal.SIGTERM: "SIG_IGN"}
        assert signal.getsignal(signal.SIGTERM) == ours

        signal.signal(signal.SIGQUIT, test_handlers_that_were_replaced_can_be_taken_back)
        (told,) = watcher.take_back().values()
        assert told.endswith("test_handlers_that_were_replaced_can_be_taken_back")
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert watcher.take_back() == {}

    assert signal.getsignal(signal.SIGTERM) == before


def test_a_blocked_signal_is_unblocked_for_the_watch():
    """One that came before is delivered, the block is reported once, and it is back after the
    watch.
    """
    code = """
    def blocked():
        return sorted(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM, signal.SIGUSR2})
    os.kill(os.getpid(), signal.SIGTERM)
    came = threading.Event()
    with SignalWatcher(lambda number: came.set()) as watcher:
        say("came", came.wait(10), *blocked())
        say(*[number.name for number in watcher.take_back()], "then", *watcher.take_back())
    say(*blocked())
    """
    with process(code) as running:
        told = [line(running) for _ in range(3)]

    assert told == ["came True SIGUSR2", "SIGTERM then", "SIGTERM SIGUSR2"]


def test_default_action_is_back_after_the_watch():
    """A TERM after the watch kills, so nobody needs kill -9 for a process that is past its end."""
    code = """
    with SignalWatcher(lambda number: None):
        pass
    say("over")
    time.sleep(60)
    """
    with process(code) as running:
        assert line(running) == "over"
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == -signal.SIGTERM


def test_another_thread_is_refused_with_the_way_out():
    """Outside the main thread the error says where to run instead."""
    refused: list[str] = []

    def elsewhere() -> None:
        try:
            SignalWatcher(Seen()).__enter__()
        except DeclarationError as error:
            refused.append(str(error))

    thread = threading.Thread(target=elsewhere, name="elsewhere")
    thread.start()
    thread.join()

    (message,) = refused
    assert message == (
        "signals reach the main thread only, and this is elsewhere; "
        "run the service in the main thread, or leave signals=False"
    )


def test_signals_that_another_watch_has_are_refused_with_the_way_out():
    """A signal can drain one service only; the first goes on, and after it the next may take
    them.
    """
    seen = Seen()
    with SignalWatcher(seen):
        with pytest.raises(DeclarationError) as refused:
            SignalWatcher(Seen()).__enter__()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.next() == signal.SIGTERM
    with SignalWatcher(seen):
        os.kill(os.getpid(), signal.SIGINT)
        assert seen.next() == signal.SIGINT

    assert str(refused.value) == (
        "SIGTERM is watched for another Runtime of this process, and a signal can drain only one; "
        "let one have signals=True, and call request_stop() of the other from it"
    )


def test_a_withdrawn_alarm_leaves_the_programs_own_handler_in_force():
    """While it is armed, SIGALRM ends the process; afterwards it is what the program made of it."""
    code = """
    from gracekit.process import Process

    signal.signal(signal.SIGALRM, lambda *_: say("the program's"))
    Process().arm_alarm(60)
    Process().disarm_alarm()
    signal.raise_signal(signal.SIGALRM)
    Process().arm_alarm(60)
    signal.raise_signal(signal.SIGALRM)
    say("not reached")
    """
    with process(code) as running:
        assert line(running) == "the program's"
        assert running.wait(30) == -signal.SIGALRM
        assert line(running) == ""


def test_of_signals_that_a_program_may_want_only_free_ones_are_watched():
    """SIGHUP, SIGTSTP and SIGCONT stay with a handler that is already set; at a terminal the last
    two are never watched.
    """
    spared = (signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT)
    before = [signal.signal(number, signal.SIG_DFL) for number in spared]
    try:
        assert set(spared) <= set(watched_signals(has_terminal=False))
        assert set(spared) & set(watched_signals(has_terminal=True)) == {signal.SIGHUP}
        signal.signal(signal.SIGTSTP, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert set(spared) & set(watched_signals(has_terminal=False)) == {signal.SIGCONT}
    finally:
        for number, handler in zip(spared, before, strict=True):
            signal.signal(number, handler)
