"""The process port: who this process is, who else lives, and how it ends.

Liveness is proved, never timed: a run holds a POSIX `lockf` on a private file
that nothing else opens (the kernel frees it at death, a forked child does not
keep it), with boot id, pid and start ticks beside it.

The module also owns the *points*: every place where a crash would leave a
different picture on disk or on the wire. Code that commits, acks, replies or
changes a lease must name its point, so the crash matrix can stop there.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn, Protocol, TypeVar

import anyio
import anyio.to_thread

from gracekit.signals import WATCHED_SIGNALS, SignalWatcher

BEFORE_ALARM_S: Final = 0.1
"""An exit code that is on record must not turn into a death by SIGALRM."""
FAILPOINT_VARIABLE: Final = "GRACEKIT_FAILPOINT"

Phase = Literal["before", "after"]
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
    HAND_OVER = "hand_over"  # a safe point returns its lease in the same commit
    NOT_STARTED = "not_started"
    STOP_RECORD = "stop_record"
    # commits of recovery
    ADOPT = "adopt"
    CLAIM = "claim"
    SETTLE = "settle"
    ERRORED_DONE = "errored_done"
    RETIRE = "retire"
    # the wire
    CONNECT = "connect"  # a connection, queue or subscription comes or goes
    PUBLISH = "publish"
    DELIVER = "deliver"
    ACK = "ack"
    GIVE_BACK = "give_back"
    DEAD_LETTER = "dead_letter"
    REPLY = "reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process, so that a reused pid is not mistaken for it.

    Attributes:
        boot_id: Kernel's random id of this boot.
        pid_ns: Inode of the pid namespace; pids of another one say nothing here.
        pid: Process id inside that namespace.
        start_ticks: Clock ticks from boot to the start of the process.
    """

    boot_id: str
    pid_ns: int
    pid: int
    start_ticks: int


def read_identity(pid: int | Literal["self"] = "self") -> Identity:
    """The identity of a process of this pid namespace.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    # The command name may hold spaces and brackets: fields count from its last bracket.
    fields = stat.rpartition(")")[2].split()
    return Identity(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_ns=Path("/proc/self/ns/pid").stat().st_ino,
        pid=int(stat.partition(" ")[0]),
        start_ticks=int(fields[19]),
    )


class LifeLock:
    """Proof of life: a lock on a file of its own, held until `release` or death.

    The file must never be opened elsewhere in this process, because closing any
    descriptor of it would drop the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting; false if another process holds it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Give the lock up; may be called twice.

        The file stays: removing it would let a process lock the old file while
        another locks a new one of the same name.
        """
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Threads:
    """Worker threads of one lane, at most *number* at work at a time."""

    def __init__(self, number: int) -> None:
        self._limiter = anyio.CapacityLimiter(number)

    async def run(self, function: Callable[[], T]) -> T:
        """Run *function* in a thread; cancelled while it waits for one, it never begins.

        A function that has begun cannot be stopped: the cancellation waits for it.
        """
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)


class SafePoints(Protocol):
    """Who is asked at each safe point, after it was noted and before the handler goes on.

    Whoever answers late holds the handler there; so a test can begin a drain at
    one safe point and not at the next.
    """

    async def reached(self, method: str, request_id: str) -> None:
        """A coroutine is at a safe point."""

    def reached_in_thread(self, method: str, request_id: str) -> None:
        """A plain function is, in its worker thread."""


class Process:
    """This process, as gracekit's code may use it; a simulation passes its own.

    Attributes:
        safe_points: Nobody in a real process; a played one may have itself asked.
    """

    safe_points: SafePoints | None = None

    def __init__(self) -> None:
        self.identity = read_identity()
        self._stop_at, self._remaining = _failpoint(os.environ.get(FAILPOINT_VARIABLE, ""))

    def reach(self, point: Point, phase: Phase) -> None:
        """Pass a point; dies there by SIGKILL when the crash matrix says so."""
        if self._stop_at is None or self._stop_at != (point, phase):
            return
        self._remaining -= 1
        if self._remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_alive(self, other: Identity, lock_path: Path) -> bool:
        """Whether the process *other*, which held the lock at *lock_path*, still lives."""
        mine = self.identity
        if other == mine:
            return True
        if other.boot_id != mine.boot_id:
            return False
        if other.pid_ns == mine.pid_ns:
            try:
                return read_identity(other.pid) == other and not _is_zombie(other.pid)
            except ProcessLookupError:
                return False
        return _is_locked(lock_path)

    def arm_alarm(self, seconds: float) -> None:
        """Let the kernel end this process after *seconds*, whatever Python is doing.

        SIGALRM has its default action and is not blocked (`watch_signals`), so
        this works even while C code holds the interpreter's lock.
        """
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm_alarm(self) -> None:
        """Withdraw the alarm."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def watch_signals(self, on_signal: Callable[[int], None]) -> AbstractContextManager[object]:
        """Have signals call *on_signal*, in a thread of its own; see `SignalWatcher`.

        Must be called in the main thread, before other threads are started.
        """
        _heed_alarm()
        return SignalWatcher(on_signal, WATCHED_SIGNALS)

    def threads(self, number: int) -> Threads:
        """Worker threads of one lane."""
        return Threads(number)

    def has_ended(self) -> bool:
        """Whether this process is over, which only a played one can be while its code runs.

        Asked where gracekit survives a cancellation: that may be how the player ends it.
        """
        return False

    def exit_within(self, seconds: float, code: int) -> None:
        """Leave by `os._exit` after *seconds* at most, and before the alarm: the end is on record.

        From a thread of its own, as what keeps the process may be its loop, another thread or an
        `atexit` hook. Nothing is flushed then: a stream may be what keeps it.
        """
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        if left:
            seconds = max(0.0, min(seconds, left - BEFORE_ALARM_S))
        timer = threading.Timer(seconds, os._exit, (code,))
        timer.name, timer.daemon = "gracekit-exit", True
        timer.start()

    def exit_now(self, code: int) -> NoReturn:
        """Leave without finally, atexit or joining threads; flushes only the two streams."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _heed_alarm() -> None:
    """Make SIGALRM end this process, though whoever started it ignored or blocked it.

    Both outlive an exec; the alarm is armed from a thread that could not undo them.
    """
    if signal.getsignal(signal.SIGALRM) is signal.SIG_IGN:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def _failpoint(text: str) -> tuple[tuple[Point, Phase] | None, int]:
    """Parse `point.phase[:n]`, for example `accept.after:3`; empty means none."""
    if not text:
        return None, 0
    where, _, count = text.partition(":")
    name, _, phase = where.partition(".")
    return (Point(name), "after" if phase == "after" else "before"), int(count or 1)


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # no proof of death
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def network_file_system(path: Path) -> str | None:
    """Name of the network file system that holds *path*; None if it is a local one."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    kind = int.from_bytes(buffer.raw[:4], sys.byteorder)
    return _NETWORK_FILE_SYSTEMS.get(kind)


# statfs(2), field f_type.
_NETWORK_FILE_SYSTEMS: Final = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x5346414F: "afs",
}
