"""Writing to standard output and error without blocking: they may be pipes that are not read.

Log lines go to a queue, and a thread writes them. So a full pipe blocks that thread, but
neither the event loop nor a drain. Lines that do not fit into the queue are dropped and
counted, and the number is logged later. All other writes at a process's end have a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Final, TextIO

MOST_LINES: Final = 10_000
"""Most lines that wait for a stream; further ones are dropped."""
CLOSE_S: Final = 1.0
"""Seconds to wait for the lines at the interpreter's end."""
SAY_S: Final = 1.0


class LineHandler(logging.Handler):
    """Writes records to a stream in a separate thread, so that logging never blocks.

    Args:
        stream: Must have a file descriptor; its own buffer is bypassed.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._lines = queue.SimpleQueue[bytes | threading.Event]()
        self._dropped = 0
        self._writer: threading.Thread | None = None
        self._is_forked = False
        call_in_children(self._leave_parent)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it if the queue is full; see `logging.Handler`."""
        try:
            line = self._encoded(record)
        except Exception:  # noqa: BLE001 - as every handler does: the caller only logs
            self.handleError(record)
            return
        if self._is_forked:
            _write_all(self._fd, line)
        elif self._lines.qsize() >= MOST_LINES:
            self._dropped += 1
        else:
            self._say_dropped()
            self._put(line)

    def flush(self) -> None:
        """Wait at most `CLOSE_S` until all lines are written; see `logging.Handler`."""
        self.wait_written(CLOSE_S)

    def wait_written(self, within_s: float) -> bool:
        """Wait until all lines are written; return False if they were not in time."""
        if self._writer is None:
            return True
        with self.lock or contextlib.nullcontext():
            self._say_dropped()
            written = threading.Event()
            self._put(written)
        return written.wait(within_s)

    def _say_dropped(self) -> None:
        if self._dropped:
            text = f"{self._dropped} log lines were dropped: the stream was not read"
            self._dropped = 0
            level = logging.WARNING
            self._put(self._encoded(logging.LogRecord("gracekit", level, "", 0, text, (), None)))

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")

    def _put(self, item: bytes | threading.Event) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="gracekit-log", daemon=True)
            self._writer.start()
        self._lines.put(item)

    def _write(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                _write_all(self._fd, item)

    def _leave_parent(self) -> None:
        """In a forked child: there is no writer thread, and the queued lines are the parent's."""
        self._lines = queue.SimpleQueue()
        self._dropped = 0
        self._writer = None
        self._is_forked = True


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process that shares the stream made it non-blocking
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
        except OSError:
            return  # closed; there is no place to report it


def flush(within_s: float) -> bool:
    """Write all logged and printed text; return False if a stream did not accept it in time.

    If False, do not let the interpreter end normally: it would wait for the stream for ever, or
    fail to write and exit with its own code (120).
    """

    def write_out() -> bool:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LineHandler):
                if not handler.wait_written(within_s):
                    return False
            else:
                with contextlib.suppress(OSError):  # as at the interpreter's end
                    handler.flush()
        return all([_is_empty(sys.stdout), _is_empty(sys.stderr)])  # a list: flush both in any case

    return _bounded(write_out, within_s)


def _is_empty(stream: TextIO | None) -> bool:
    """Flush *stream*; return whether its buffer is empty, or the program has closed it."""
    if stream is None or stream.closed:
        return True
    try:
        stream.flush()
    except OSError:
        return False
    return True


def say(text: str, within_s: float = SAY_S) -> bool:
    """Write *text* to standard error; returns as `flush`."""

    def write() -> bool:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - its purpose
        return True

    return _bounded(write, within_s)


def _bounded(step: Callable[[], bool], within_s: float) -> bool:
    """Run *step* in a daemon thread; return False if it could not write, or did not end in time.

    If the program has closed the stream, the result is True. If no thread can be started, *step*
    runs here, and only the alarm limits it.
    """
    if sys.is_finalizing():
        return False  # no thread can start now, and Thread.start would wait for ever
    done: list[bool] = []

    def run() -> None:
        try:
            done.append(step())
        except OSError:  # the reader closed the pipe, or the disk is full
            done.append(False)
        except Exception:  # noqa: BLE001 - there is no stream to report it on
            done.append(True)

    thread = threading.Thread(target=run, name="gracekit-streams", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run()
    else:
        thread.join(within_s)
    return bool(done and done[0])


def call_in_children(leave: Callable[[], None]) -> None:
    """Call *leave*, a method, in each forked child, for as long as its object lives."""
    method = weakref.WeakMethod(leave)  # fork hooks cannot be unregistered

    def after_fork() -> None:
        if (call := method()) is not None:
            call()

    os.register_at_fork(after_in_child=after_fork)
