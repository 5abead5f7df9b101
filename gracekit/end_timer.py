"""How the kernel ends this process: at a set time, or with the process that started it.

Neither needs Python: this process may be stopped, or stuck in C code that holds the
interpreter's lock. The time is one of CLOCK_BOOTTIME, which also counts while the
machine is suspended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import ClassVar, Final

from gracekit.errors import DeclarationError, DependencyError

END_SIGNAL: Final = signal.SIGRTMIN + 5
"""Ends a process that is PID 1, where `EndTimer` is armed; SIGALRM is the drain's."""

_TIMER_ABSTIME: Final = 1
_PR_SET_PDEATHSIG: Final = 1
_NS: Final = 1_000_000_000


class _Event(ctypes.Structure):
    """C's `struct sigevent`; notify 0 is SIGEV_SIGNAL."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """C's `struct itimerspec`."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


# PyDLL keeps the interpreter's lock during a call: another thread could delay it by 5 ms. All
# functions are found here, because a forked child of a process with threads must not load anything.
_LIBC: Final = ctypes.PyDLL(None, use_errno=True)
_LIBC.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_LIBC.signal.restype = ctypes.c_void_p
_LIBC.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
# Before glibc 2.34 timers are in a library of their own.
_TIMERS: Final = (
    _LIBC if hasattr(_LIBC, "timer_create") else ctypes.PyDLL("librt.so.1", use_errno=True)
)
_TIMERS.timer_settime.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_TIMERS.timer_delete.argtypes = (ctypes.c_void_p,)


def boottime() -> float:
    """Seconds since the machine was started, suspended or not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def end_by(number: int) -> None:
    """Let signal *number* end the process; works in any thread, unlike `signal.signal`.

    PID 1 ends by libc's `_exit`, with *number* as its code, because the kernel drops every signal
    to PID 1 that has no handler. A handler in C needs no interpreter, whose lock a stuck process
    may hold.
    """
    leave = ctypes.cast(_LIBC._exit, ctypes.c_void_p)  # noqa: SLF001 - so named in C
    _LIBC.signal(number, leave if os.getpid() == 1 else int(signal.SIG_DFL))


class EndTimer:
    """The time at which the kernel ends this process by SIGKILL, even if it is stopped.

    As PID 1 the process ends by `END_SIGNAL` instead, with its number as exit code, and if it is
    stopped, only when it goes on: the kernel drops SIGKILL to PID 1 from inside its namespace.

    A timer belongs to the process that arms it first. A forked child has no such timers, and in
    it the methods do nothing. Both may be called from any thread.
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._lock = threading.Lock()
        self._timers: list[ctypes.c_void_p] = []

    def arm(self, at: float) -> None:
        """End this process at *at* seconds of `boottime`; replaces the time of the last call.

        Takes some microseconds. A time in the past ends it now.

        Raises:
            DependencyError: the kernel provides no timer.
        """
        if self._owner is None:  # before the lock, which a fork could otherwise leave locked
            self._owner = os.getpid()
        if self._owner != os.getpid():
            return
        signals: tuple[int, ...] = (signal.SIGKILL,)
        if self._owner == 1:
            signals = (signal.SIGKILL, END_SIGNAL)
            end_by(END_SIGNAL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {END_SIGNAL})
        s, ns = divmod(max(1, round(at * _NS)), _NS)  # 0 would disarm it
        with self._lock:
            for number in signals[len(self._timers) :]:
                self._timers.append(_timer(number))
            for timer in self._timers:
                times = _Times(s=s, ns=ns)
                _check(_TIMERS.timer_settime(timer, _TIMER_ABSTIME, ctypes.byref(times), None))

    def disarm(self) -> None:
        """Let this process live; the timer may be armed again."""
        if self._owner != os.getpid():
            return
        with self._lock:
            while self._timers:
                _TIMERS.timer_delete(self._timers.pop())


def _timer(number: int) -> ctypes.c_void_p:
    """A timer of CLOCK_BOOTTIME that sends signal *number* to this process."""
    timer, event = ctypes.c_void_p(), _Event(signal=number)
    _check(_TIMERS.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)))
    return timer


def _check(result: int) -> None:
    if result != 0:
        raise DependencyError(
            f"the kernel provides no timer ({os.strerror(ctypes.get_errno())}), and it must end "
            "this process when others may take it for dead: raise RLIMIT_SIGPENDING (ulimit -i), "
            "and permit timer_create and timer_settime where seccomp filters system calls"
        )


class _Forker:
    """The process that forked this one, or that will fork the next: noted before each fork."""

    pid: ClassVar[int | None] = None

    @classmethod
    def note(cls) -> None:
        cls.pid = os.getpid()


os.register_at_fork(before=_Forker.note)


def die_with_me() -> None:
    """In a new child process: end it by SIGKILL when the process that started it ends.

    Pass the function itself to `subprocess` or asyncio, as `preexec_fn=gracekit.die_with_me`. It
    takes no lock and loads nothing, so it is safe in a program with threads. If the parent has
    ended before the call, the child exits at once: Python notes the pid of the parent before the
    fork, and the child compares it with the pid of its parent of now.

    The kernel sends the signal already when the *thread* that started the child ends. So start
    children in the thread of the event loop, or keep the thread until they have ended. Children of
    the child do not inherit the setting, and a program that changes its user, such as `sudo`,
    loses it.

    Raises:
        DeclarationError: this process was not just forked by Python.
        OSError: the kernel refuses it.
    """
    parent = _Forker.pid
    if parent in {None, os.getpid()}:
        raise DeclarationError(
            "die_with_me() is for a new child process: pass the function, without calling it, as "
            "preexec_fn=gracekit.die_with_me"
        )
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() not in {parent, 0}:  # 0: it is in another pid namespace
        os._exit(1)
