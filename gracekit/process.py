"""What gracekit needs of its process: its identity, its signals and alarm, its threads, its exit.

`gracekit.life` judges which processes live; `Process.judge` calls it. A forked
child that returns into gracekit's code exits at once (`ForkGuard`,
`never_in_a_fork`): it would be a second service on its parent's connections.

The module also defines the *points*: the steps that change what a crash would
leave on disk or on the wire. Code that commits, acks, replies or changes a
lease must name its point, so that the crash matrix of the tests can stop there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import faulthandler
import gc
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Final, Literal, NoReturn, Protocol, TypeVar
from weakref import WeakSet

from gracekit import streams
from gracekit.end_timer import EndTimer, end_by
from gracekit.errors import ConfigError, DeclarationError, DependencyError
from gracekit.exits import ExitCode
from gracekit.life import Identity, Liveness, RecordedLife, judge, look, read_identity
from gracekit.notify import Notify
from gracekit.signals import SignalWatch, SignalWatcher, watched_signals

if TYPE_CHECKING:
    from anyio import CapacityLimiter

BEFORE_ALARM_S: Final = 0.1
"""The process exits at least so long before its alarm: otherwise it would die by SIGALRM instead of
with the exit code on record."""
ALARM_AFTER_EXIT_S: Final = 0.5
"""SIGALRM comes so long after the moment at which a thread should have ended the process."""
FAILPOINT_VARIABLE: Final = "GRACEKIT_FAILPOINT"
FAILPOINTS_ON: Final = {"GRACEKIT_TEST_FAILPOINTS": "1"}
"""GRACEKIT_FAILPOINT works only with it: a variable left behind by a test must kill no service."""
STANDARD_ERROR: Final = 2
LAST_WORDS_S: Final = 1.0
ASK_SYSTEMD_S: Final = 0.5

Side = Literal["before", "after"]
T = TypeVar("T")


class Point(enum.Enum):
    """A step after which the world is different: each commit, ack, reply and lease change."""

    # commits of a request's life
    ACCEPT = "accept"
    ACCEPT_AND_BEGIN = "accept_and_begin"  # raises a lease when the method has a resource
    BEGIN = "begin"  # raises a lease when the method has a resource
    SAFE_POINT = "safe_point"
    FINISH = "finish"  # ends the lease in the same commit
    REJECT = "reject"
    REPLY_SENT = "reply_sent"
    ADD_REPLY_ADDRESS = "add_reply_address"
    HOLD = "hold"
    END_HOLD = "end_hold"
    TAKE_LEASE = "take_lease"
    RELEASE_LEASE = "release_lease"
    TALLY = "tally"
    # commits of a run's life
    JOIN = "join"
    STOP_INTENT = "stop_intent"
    WITHDRAW_STOP = "withdraw_stop"
    TRY_LATER = "try_later"  # ends the lease in the same commit
    PARK = "park"  # ends the lease in the same commit, and writes the notifications
    HAND_OVER = "hand_over"  # a safe point returns its lease in the same commit
    NOT_STARTED = "not_started"
    STOP_RECORD = "stop_record"
    # commits of recovery
    ADOPT = "adopt"
    CLAIM = "claim"
    SETTLE = "settle"
    CALL_HOOK = "call_hook"  # an errored hook, or a hold's probe, is about to be called
    ERRORED_DONE = "errored_done"
    FINDING = "finding"  # a resource that waits to be settled, or a pass over all of them
    RULE = "rule"  # a rule is about to act on a resource; raises its lease
    RESOURCE_SETTLED = "resource_settled"  # ends that lease in the same commit
    PAROLE = "parole"  # a suspect is no longer alone
    RETIRE = "retire"
    # commits about parked tasks
    UNPARK = "unpark"  # by a resolver, an operator or the deadline; writes the notification
    OUTBOX_SENT = "outbox_sent"
    # the wire
    CONNECT = "connect"  # a connection, queue or subscription comes or goes
    PUBLISH = "publish"
    DELIVER = "deliver"
    ACK = "ack"
    GIVE_BACK = "give_back"
    DEAD_LETTER = "dead_letter"
    REPLY = "reply"
    NOTIFY = "notify"


class ForkGuard:
    """Keeps a forked child off the event loop of its parent.

    The child has copies of all tasks, and shares epoll, sockets and pipes with its
    parent. If it went on, it would be a second service on them. Multiprocessing's
    children and those that end by exec or `os._exit` never come back to the loop.
    """

    _all: ClassVar[WeakSet[ForkGuard]] = WeakSet()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opener = os.getpid()
        self._all.add(self)

    def end(self) -> None:
        """Stop guarding: the service no longer uses the loop."""
        self._all.discard(self)

    @classmethod
    def divert_child(cls) -> None:
        """In a forked child, let it exit at its next step on a guarded loop."""
        for guard in list(cls._all):
            guard._divert()  # noqa: SLF001 - its own class

    def _divert(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            handle = self._loop.call_soon(_leave_fork, self._opener)
            # Put it before the callbacks that were ready at the fork, or each of them would run
            # once in the child too. uvloop's queue is no attribute that Python sees.
            for ready in (getattr(self._loop, "_ready", None), *gc.get_referents(self._loop)):
                if isinstance(ready, deque) and ready and ready[-1] is handle:
                    ready.rotate(1)
                    break
            self._part_epoll()

    def _part_epoll(self) -> None:
        """On uvloop, put an epoll of its own in the place of the one that it shares.

        uvloop polls once more before it calls anything, and reads what it finds: the child would
        take a wake-up by a thread from its parent, which no thread could wake up any more.
        """
        backend = getattr(self._loop, "_get_backend_id", None)
        if backend is not None:
            with select.epoll() as empty:
                os.dup2(empty.fileno(), backend(), inheritable=False)


os.register_at_fork(after_in_child=ForkGuard.divert_child)


def never_in_a_fork(function: Callable[[], T]) -> Callable[[], T]:
    """Wrap *function*, so that a child that it forked exits instead of returning.

    For worker threads: the child has only that thread, which would wait for work for ever.
    """
    opener = os.getpid()

    def guarded() -> T:
        try:
            return function()
        finally:
            if os.getpid() != opener:
                _leave_fork(opener)

    return guarded


def _leave_fork(opener: int) -> NoReturn:
    """Exit without touching what the child shares with its parent: no flush, no atexit."""
    leave_at_once(
        f"gracekit: process {os.getpid()} is a fork of {opener}, which runs the service, and came "
        "back into its code: it leaves. End a forked child by os._exit or exec."
    )


def leave_at_once(why: str) -> NoReturn:
    """Write *why* to standard error and exit; touches nothing else that others may share."""
    with contextlib.suppress(OSError):
        os.write(STANDARD_ERROR, f"{why}\n".encode(errors="backslashreplace"))
    os._exit(ExitCode.INTERNAL)


def refuse_patched_threads() -> None:
    """Refuse to go on if eventlet has replaced the threads of this process.

    Raises:
        DeclarationError: it has.
    """
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise DeclarationError(
            "eventlet has patched the threads of this process, and gracekit needs real ones: "
            "remove eventlet.monkey_patch()"
        )


class NoThreadError(DependencyError):
    """No thread could be started, so the function that should run in it was not called."""

    @classmethod
    def of(cls, error: Exception) -> Exception:
        """*error* with what may limit threads, if it says that no thread can start."""
        if str(error) != "can't start new thread":
            return error
        return cls(
            "no thread can be started: look at pids.max of its cgroup, which systemd calls "
            "TasksMax, and at `ulimit -u` and `ulimit -v`"
        )


class Threads:
    """Worker threads of one lane, at most *number* at work at a time.

    A task that has a place in the scheduler's line for these threads finds one free.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._limiter: CapacityLimiter | None = None

    async def run(self, function: Callable[[], T], *, abandon: bool = False) -> T:
        """Run *function* in a thread; if cancelled while it waits for one, it never begins.

        A function that has begun cannot be stopped: a cancellation takes effect at its return, or
        at once with *abandon*, which leaves the thread behind. Raises NoThreadError.
        """
        import anyio.to_thread  # noqa: PLC0415 - a start is a fifteenth sooner without it

        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self.number)
        try:
            return await anyio.to_thread.run_sync(
                never_in_a_fork(function), limiter=self._limiter, abandon_on_cancel=abandon
            )
        except RuntimeError as error:
            if (lack := NoThreadError.of(error)) is error:
                raise
            raise lack from error

    @staticmethod
    @cache
    def load() -> None:
        """Load what `run` needs, from a coroutine: later an upgrade in place may have removed it.

        Only the first call does anything, for about 10 ms.
        """
        import anyio.to_thread  # noqa: PLC0415 - see `run`

        anyio.CapacityLimiter(1)  # loads what anyio needs for asyncio


class SafePoints(Protocol):
    """Called at each safe point, after it was noted and before the handler goes on.

    The handler waits until the call returns. So a test can begin a drain at one
    safe point and not at the next.
    """

    async def reached(self, method: str, request_id: str) -> None:
        """A coroutine handler is at a safe point."""

    def reached_in_thread(self, method: str, request_id: str) -> None:
        """A plain handler is, in its worker thread."""


class Process:
    """This process, as gracekit's code may use it; a simulation passes its own.

    Attributes:
        safe_points: None in a real process; a simulated one may set it.
        notify: Reports the state of the service to the platform, such as systemd.
    """

    safe_points: SafePoints | None = None
    notify: Notify = Notify()

    def __init__(self) -> None:
        self._stop_at, self._remaining = _failpoint(os.environ)
        self._end_timer = EndTimer()
        self._crash_file: IO[bytes] | None = None

    def reach(self, point: Point, side: Side) -> None:
        """Pass a point; dies there by SIGKILL if GRACEKIT_FAILPOINT names it."""
        if self._stop_at is None or self._stop_at != (point, side):
            return
        self._remaining -= 1
        if self._remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def identify(self) -> Identity:
        """Who this process is; read whenever something opens, because a fork is another process.

        Raises:
            DependencyError: /proc cannot be read.
        """
        try:
            return read_identity()
        except OSError as error:
            raise DependencyError(
                f"{error.filename} cannot be read ({error.strerror}), and others know by it that "
                "this process lives: mount proc at /proc, with nothing over it"
            ) from error

    def judge(
        self, life: RecordedLife, directory: Path | None, *, is_shared: bool = False
    ) -> Liveness:
        """Whether that process lives; for the arguments see `life.look`."""
        return judge(look(life, directory, is_shared=is_shared))

    def guard_forks(self, loop: asyncio.AbstractEventLoop) -> ForkGuard:
        """Until the guard's end, let a forked child exit when it comes back to *loop*."""
        return ForkGuard(loop)

    def arm_alarm(self, seconds: float) -> None:
        """Let the kernel end this process after *seconds*, whatever Python is doing.

        SIGALRM gets its default action, or as PID 1 a handler in C, and is not blocked
        (`watch_signals`), so this works even while C code holds the interpreter's lock. From
        here on, a handler that the application has set for it is not called.
        """
        end_by(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm_alarm(self) -> None:
        """Cancel the alarm, and restore the handler for SIGALRM that the application has set."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        handler = signal.getsignal(signal.SIGALRM)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, handler)

    def end_at(self, at: float | None) -> None:
        """Let the kernel end this process at *at*, a time of `Clock.boot`; None: let it live.

        It replaces the time of the last call, and may be called from any thread; see `EndTimer`.

        Raises:
            DependencyError: the kernel provides no timer.
        """
        if at is None:
            self._end_timer.disarm()
        else:
            self._end_timer.arm(at)

    def catch_crash(self, file: Path | None) -> None:
        """Have a crash of the interpreter write into *file* what crashed; None: no more.

        Does nothing if the application has enabled faulthandler for its own purpose.
        """
        if file is None:
            if self._crash_file is not None:
                faulthandler.disable()
                self._crash_file.close()
                self._crash_file = None
        elif not faulthandler.is_enabled():
            self._crash_file = open(file, "wb", opener=private)  # noqa: SIM115 - kept open
            faulthandler.enable(self._crash_file, all_threads=False)
            # Its crash would be taken for ours. A hook cannot be removed, and need not be.
            os.register_at_fork(after_in_child=faulthandler.disable)

    async def host_is_stopping(self) -> bool:
        """Whether the machine is being shut down; asks systemd, if there is one."""
        return await asyncio.to_thread(_host_is_stopping)

    def watch_signals(self, on_signal: Callable[[int], None], *, has_terminal: bool) -> SignalWatch:
        """Have signals call *on_signal*, in a thread of its own; see `SignalWatcher`.

        Must be called in the main thread, before other threads are started.
        """
        _heed_alarm()
        return SignalWatcher(on_signal, watched_signals(has_terminal=has_terminal))

    def threads(self, number: int) -> Threads:
        """Worker threads of one lane."""
        return Threads(number)

    def has_ended(self) -> bool:
        """Whether this process is dead; only a simulated one can be while its code still runs.

        Asked where gracekit survives a cancellation: a simulation kills a process by cancelling.
        """
        return False

    def exit_within(self, seconds: float, code: int) -> None:
        """Exit by `os._exit` after *seconds* at most, and before the alarm: the end is on record.

        A thread of its own does it, because the loop, another thread or an `atexit` hook may block
        the exit. Nothing is flushed: a stream may be what blocks.

        C code may block it too, holding the interpreter's lock or after Python's end, and then no
        Python thread runs. So the alarm is moved to `ALARM_AFTER_EXIT_S` after that moment: the
        process dies by SIGALRM, some 4 s after its record by default.
        """
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        if left:
            seconds = max(0.0, min(seconds, left - BEFORE_ALARM_S))
        self.arm_alarm(min(left or math.inf, seconds + ALARM_AFTER_EXIT_S))
        timer = threading.Timer(seconds, os._exit, (code,))
        timer.name, timer.daemon = "gracekit-exit", True
        with contextlib.suppress(RuntimeError):  # no thread can start: the alarm is the only bound
            timer.start()

    def exit_now(self, code: int) -> NoReturn:
        """Flush logs and streams, for a moment at most, and exit without finally or atexit."""
        streams.flush(self._moment_s())
        os._exit(code)

    def _moment_s(self) -> float:
        """Seconds for a flush: one, or less if the alarm is near, so that the exit code counts."""
        left_s = signal.getitimer(signal.ITIMER_REAL)[0]
        return min(LAST_WORDS_S, left_s / 2) if left_s else LAST_WORDS_S


def _host_is_stopping() -> bool:
    if Path("/run/nologin").exists():
        return True
    if not Path("/run/systemd/system").is_dir():
        return False
    ask = ("/usr/bin/systemctl", "is-system-running")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(  # noqa: S603 - an absolute path
            ask, capture_output=True, timeout=ASK_SYSTEMD_S, check=False
        )
        return asked.stdout.strip() == b"stopping"
    return False


def private(path: str, flags: int) -> int:
    """An opener of files that only this user may read."""
    return os.open(path, flags, 0o600)


def _heed_alarm() -> None:
    """Make SIGALRM end this process even if its parent ignored or blocked the signal.

    Both survive an exec. Done here, in the main thread, because the thread that arms the alarm
    could not unblock it for this one.
    """
    if not callable(signal.getsignal(signal.SIGALRM)):
        end_by(signal.SIGALRM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


_FAILPOINT: Final = re.compile(r"(\w+)\.(before|after)(?::([1-9][0-9]{0,8}))?", re.ASCII)


def _failpoint(environment: Mapping[str, str]) -> tuple[tuple[Point, Side] | None, int]:
    """Where to die, and at which pass, for example `accept.after:3`; None for nowhere.

    Raises:
        ConfigError: the variable names no point.
    """
    text = environment.get(FAILPOINT_VARIABLE, "")
    if not text or not FAILPOINTS_ON.items() <= environment.items():
        return None, 0
    found = _FAILPOINT.fullmatch(text)
    names = [point.value for point in Point]
    if found is None or found[1] not in names:
        raise ConfigError(
            f"{FAILPOINT_VARIABLE}={text[:100]!r} names no crash point: write POINT.before or "
            f"POINT.after, and :3 behind it for the third passing; points are {', '.join(names)}"
        )
    return (Point(found[1]), "after" if found[2] == "after" else "before"), int(found[3] or 1)


def network_file_system(path: Path) -> str | None:
    """Name of the file system that holds *path* if hosts share it; None if it is a local one."""
    return _NETWORK_FILE_SYSTEMS.get(_file_system(path))


def _file_system(path: Path) -> int:
    """`f_type` of the file system that holds *path*, see statfs(2); 0 if it is not known."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[:4], sys.byteorder)


def is_mount_point(path: Path) -> bool:
    """Whether something is mounted exactly at *path*, a directory or a file; needs a real path.

    Reads the kernel's list of mounts. `stat` would not show a bind mount, which has the device and
    inode of its origin.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    return any(_unescaped(line.split()[4]) == os.fsencode(path) for line in lines)


def _unescaped(name: bytes) -> bytes:
    """Decode a path of the kernel's lists: blank, tab, newline and backslash are octal there."""
    for code in (b"040", b"011", b"012", b"134"):
        name = name.replace(b"\\" + code, bytes((int(code, 8),)))
    return name


_NETWORK_FILE_SYSTEMS: Final = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    # Of clusters and virtual machines: hosts share the files, but no memory.
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x786F4256: "vboxsf",
}
