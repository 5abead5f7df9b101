"""Standard output and error, which may be pipes that nobody reads: nobody waits for them.

Log lines go to a queue, and a thread writes them. So a full pipe stops that thread and
neither the event loop nor a drain; what finds no room in the queue is counted, and said
as soon as there is room. Whatever else is written at the end of a process has a bound.
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
"""Lines that wait for a stream; later ones are dropped until it takes some."""
CLOSE_S: Final = 1.0
"""Bound of the wait at the interpreter's end."""
SAY_S: Final = 1.0


class LineHandler(logging.Handler):
    """Writes records to a stream by a thread of its own; to log never blocks.

    Args:
        stream: Has a file descriptor; what is in its own buffer stays there.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._fd = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._lines = queue.SimpleQueue[bytes | threading.Event]()
        self._dropped = 0
        self._writer: threading.Thread | None = None
        self._is_forked = False
        _tell_children(self._leave_parent)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it where there is no room; see `logging.Handler`."""
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
        """Wait a moment until all is written; see `logging.Handler`."""
        self.wait_written(CLOSE_S)

    def wait_written(self, within_s: float) -> bool:
        """Wait until the stream has taken all that was logged; false if it did not in time."""
        if self._writer is None:
            return True
        with self.lock or contextlib.nullcontext():
            self._say_dropped()
            written = threading.Event()
            self._put(written)
        return written.wait(within_s)

    def _say_dropped(self) -> None:
        if self._dropped:
            text = f"{self._dropped} log lines were dropped: nobody read the stream"
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
        """In a forked child: the thread stayed behind, and what waited is the parent's."""
        self._lines = queue.SimpleQueue()
        self._dropped = 0
        self._writer = None
        self._is_forked = True


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody who shares the stream made it so
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
        except OSError:
            return  # closed; there is nobody to tell


def flush(within_s: float) -> bool:
    """Write out what was logged and printed; false if a stream did not take all of it in time.

    Then the interpreter must not be left to end by itself: it would wait for the stream for ever,
    or fail to write, and end with a code of its own (120).
    """

    def write_out() -> bool:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, LineHandler):
                if not handler.wait_written(within_s):
                    return False
            else:
                with contextlib.suppress(OSError):  # as at the interpreter's end
                    handler.flush()
        return all([_is_empty(sys.stdout), _is_empty(sys.stderr)])  # both, whatever the first says

    return _bounded(write_out, within_s)


def _is_empty(stream: TextIO | None) -> bool:
    """Whether nothing is left of what was printed: now written, or the program has closed it."""
    if stream is None or stream.closed:
        return True
    try:
        stream.flush()
    except OSError:
        return False
    return True


def say(text: str, within_s: float = SAY_S) -> bool:
    """Write *text* to standard error; false as in `flush`."""

    def write() -> bool:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - it is what this is for
        return True

    return _bounded(write, within_s)


def _bounded(step: Callable[[], bool], within_s: float) -> bool:
    """Do *step* in a thread that keeps nobody; false if it failed to write, or did not end.

    A stream that the program has closed counts as done.
    """
    if sys.is_finalizing():
        return False  # no thread begins any more, and to start one would wait for ever
    done: list[bool] = []

    def run() -> None:
        try:
            done.append(step())
        except OSError:  # its reader has gone, or its disk is full
            done.append(False)
        except Exception:  # noqa: BLE001 - there is no stream to tell it
            done.append(True)

    thread = threading.Thread(target=run, name="gracekit-streams", daemon=True)
    thread.start()
    thread.join(within_s)
    return bool(done and done[0])


def _tell_children(leave: Callable[[], None]) -> None:
    method = weakref.WeakMethod(leave)  # registered hooks are for ever

    def after_fork() -> None:
        if (call := method()) is not None:
            call()

    os.register_at_fork(after_in_child=after_fork)
