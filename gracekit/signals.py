"""Pass signals to a callback, even while the event loop is blocked.

When a signal arrives, Python's C-level handler writes a byte to our socket
(`signal.set_wakeup_fd`), and our thread reads it. So a signal is noticed even if
the loop is blocked, or C code runs that has released the interpreter's lock. If C
code holds the lock, the signal is not noticed; then the kernel's alarm ends the process.

`sigwait` would also name the sender, but signals must be blocked for it. A blocked
mask is inherited across fork and exec, so every child that a handler starts would
ignore `terminate()`: when tried, a `sleep` started by `subprocess` survived SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from gracekit.errors import DeclarationError
from gracekit.streams import call_in_children

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
HANGUP_SIGNAL: Final = signal.SIGHUP
DUMP_SIGNAL: Final = signal.SIGUSR1
INTAKE_SIGNALS: Final = (signal.SIGTSTP, signal.SIGCONT)

# The bytes in the socket, in order: the C handler writes a signal's number; the Python handler,
# which runs later, writes one of these plus the number. Together they show whether the C handler's
# byte came here, or went to a library that had replaced our wake-up descriptor.
_SEEN: Final = 64  # plus a number of at most 64: the handler ran, and the wake-up was ours
_TAKEN: Final = 128  # plus a number: the handler ran, and a library had taken the wake-up
_END: Final = 0


def signals_of(*, has_terminal: bool) -> tuple[signal.Signals, ...]:
    """The signals that a service handles; at a terminal, not those of Ctrl-Z and `fg`."""
    intake = () if has_terminal else INTAKE_SIGNALS
    return (*STOP_SIGNALS, HANGUP_SIGNAL, DUMP_SIGNAL, *intake)


def watched_signals(*, has_terminal: bool) -> tuple[signal.Signals, ...]:
    """The signals to watch: SIGHUP, SIGTSTP and SIGCONT only if they have no handler yet.

    `nohup` makes the process ignore SIGHUP, and a program may use it for its own reload.
    """
    ours = {*STOP_SIGNALS, DUMP_SIGNAL}
    return tuple(
        number
        for number in signals_of(has_terminal=has_terminal)
        if number in ours or signal.getsignal(number) is signal.SIG_DFL
    )


class SignalWatch(Protocol):
    """Handles signals until the block ends; in a real process a `SignalWatcher`."""

    def __enter__(self) -> object:
        """Install the handlers."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> object:
        """Restore the old handlers."""

    def take_back(self) -> Mapping[signal.Signals, str]:
        """See `SignalWatcher.take_back`."""
        ...


class SignalWatcher:
    """Calls *on_signal* with the number of each signal, in a separate thread.

    It is a context manager for the main thread. At the end of the block it restores
    the old handlers and the old wake-up descriptor, except those that other code
    has replaced meanwhile. Until then *signals* are unblocked, as a parent may block them.

    A library may set its own wake-up descriptor (`loop.add_signal_handler`, uvloop).
    `take_back` and the next signal set ours again, and the numbers of signals that we
    do not watch are passed on to the library's, so that it misses none. uvloop sets its
    own each time that it begins to run, and at the end of the run the one that it found,
    which must then still be open.

    Args:
        on_signal: Called once for each signal, in order. It must be quick: record the
            intent, and wake the loop with `loop.call_soon_threadsafe`.
        signals: The signals to watch.
    """

    _receiver: socket.socket
    _sender: socket.socket
    _thread: threading.Thread

    def __init__(
        self,
        on_signal: Callable[[int], None],
        signals: tuple[signal.Signals, ...] = STOP_SIGNALS,
    ) -> None:
        self._on_signal = on_signal
        self._signals = signals
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._other: _Descriptor | None = None
        self._unmatched: Counter[int] = Counter()
        self._blocked: set[signal.Signals] = set()  # before the start
        self._untold: dict[signal.Signals, str] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            here = threading.current_thread().name
            raise DeclarationError(
                f"signals reach the main thread only, and this is {here}; run the service in "
                "the main thread, or leave signals=False"
            )
        self._refuse_taken()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # a full buffer must not stop a signal handler
        self._thread = threading.Thread(target=self._read, name="gracekit-signals", daemon=True)
        self._thread.start()
        self._take_wakeup()
        for number in self._signals:
            self._old_handlers[number] = signal.signal(number, self._handle)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        self._blocked = {number for number in self._signals if number in mask}
        self._untold = dict.fromkeys(self._blocked, "a mask from before the start")
        call_in_children(self._leave_child)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        self._restore()
        self._send(_END)
        self._thread.join(timeout=1.0)  # a stuck callback does not matter: the thread is a daemon
        self._close()

    def _refuse_taken(self) -> None:
        for number in self._signals:
            owner = getattr(signal.getsignal(number), "__self__", None)
            if isinstance(owner, SignalWatcher):
                raise DeclarationError(
                    f"{number.name} is watched for another Runtime of this process, and a signal "
                    "can drain only one; let one have signals=True, and call request_stop() of "
                    "the other from it"
                )

    # -- in the main thread ---------------------------------------------------------

    def take_back(self) -> dict[signal.Signals, str]:
        """Set our wake-up descriptor and our handlers of stop signals again if they were replaced.

        Other signals are left alone: a program may use SIGHUP for its own reload.

        Returns:
            By signal, the name of the handler that had replaced ours; the first call also has the
            signals that were blocked.
        """
        self._take_wakeup()
        stops = (number for number in self._old_handlers if number in STOP_SIGNALS)
        found = {number: _handler_of(number) for number in stops}
        lost = [number for number, handler in found.items() if handler != self._handle]
        taken, self._untold = self._untold, {}
        for number in lost:
            taken[number] = _name_of(signal.signal(number, self._handle))
        return taken

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """The Python-level handler, which the interpreter runs some time after the C handler."""
        self._send((_TAKEN if self._take_wakeup() else _SEEN) + number)

    def _take_wakeup(self) -> bool:
        """Set our wake-up descriptor; return whether another one was set."""
        ours = self._sender.fileno()
        before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if before == ours:
            return False
        self._other = _Descriptor.of(before)
        return True

    def _send(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            self._sender.send(bytes((byte,)))

    def _restore(self) -> None:
        for number, old in self._old_handlers.items():
            if signal.getsignal(number) == self._handle:
                # None: the old handler was not set by Python, which cannot restore it.
                signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old_handlers.clear()
        present = signal.set_wakeup_fd(-1)
        if present != self._sender.fileno():
            signal.set_wakeup_fd(present)
        elif self._other is not None and self._other.is_open():
            signal.set_wakeup_fd(self._other.number, warn_on_full_buffer=False)

    def _close(self) -> None:
        self._receiver.close()
        self._sender.close()

    def _leave_child(self) -> None:
        """In a forked child: restore, as its signals would otherwise reach the parent's thread."""
        if self._old_handlers:
            self._other = None
            self._restore()
            self._close()

    # -- in the reading thread ------------------------------------------------------

    def _read(self) -> None:
        while data := self._receiver.recv(512):
            for byte in data:
                if byte == _END:
                    return
                self._take(byte)

    def _take(self, byte: int) -> None:
        number = (byte - 1) % _SEEN + 1
        if byte <= _SEEN:
            self._arrive(number)
            return
        # If a library had taken the wake-up, the C handler's byte went there, so the Python
        # handler's byte reports the signal. But if the first byte came here before the library
        # took the wake-up, the signal must not count twice.
        if byte > _TAKEN and not self._unmatched[number]:
            self._deliver(number)
        self._unmatched[number] = 0

    def _arrive(self, number: int) -> None:
        if number in self._signals:
            self._unmatched[number] += 1
            self._deliver(number)
        elif self._other is not None:
            self._other.write(number)

    def _deliver(self, number: int) -> None:
        try:
            self._on_signal(number)
        except Exception:
            # The thread must continue: the next signal may be meant to end a stuck drain.
            logging.getLogger("gracekit").exception("the callback of signal %d failed", number)


# Asked each second. In Python 3.11 `getsignal` first tries to make an enum of each handler, which
# costs ten times what the question itself does.
_handler_of: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)


def _name_of(handler: Any) -> str:
    """A handler's name for display: `SIG_IGN`, or a function's module and name."""
    if isinstance(handler, signal.Handlers):
        return handler.name
    name = getattr(handler, "__qualname__", None)
    return f"{handler.__module__}.{name}" if name else repr(handler)


class _Descriptor(NamedTuple):
    """A library's wake-up descriptor; device and inode show whether its number was reused."""

    number: int
    device: int
    inode: int

    @classmethod
    def of(cls, number: int) -> _Descriptor | None:
        try:
            status = os.fstat(number)
        except OSError:
            return None
        return cls(number, status.st_dev, status.st_ino)

    def is_open(self) -> bool:
        return _Descriptor.of(self.number) == self

    def write(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            if self.is_open():
                os.write(self.number, bytes((byte,)))
