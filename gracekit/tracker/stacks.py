"""What a process is doing, as text: its tasks with their stacks, and its other threads.

It works in another thread while the loop is blocked: it takes no lock, waits for
nothing and runs no code of the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, Final

from gracekit.process import STANDARD_ERROR
from gracekit.telemetry.safe_text import escape
from gracekit.tracker.task import TrackedTask
from gracekit.tracker.tracker import Tracker

MOST_TASKS: Final = 1000
DEEPEST: Final = 64
LONGEST: Final = 200
Frames = list[tuple[CodeType, int]]


class StackDump:
    """Tasks and stacks as text, or written to standard error by a thread of its own.

    Not by the loop, which may be blocked. Nor by the thread that handles signals: standard error
    may be a pipe that is not read, and the next signal must not wait for that.

    Args:
        title: Returns the first line.
        tracker: Has the tasks in flight.
        callers: Code of gracekit that calls handlers. It and its callers are left out of the
            stack of a task, as they are the same for all tasks.
    """

    def __init__(
        self,
        title: Callable[[], str],
        tracker: Tracker,
        *,
        callers: Collection[CodeType],
    ) -> None:
        self._title = title
        self._tracker = tracker
        self._callers = callers
        self._thread: threading.Thread | None = None

    def write(self) -> None:
        """Begin to write, from any thread; nothing while the last dump is being written."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, name="gracekit-stacks", daemon=True)
            self._thread.start()

    def text(self, *, now: float, loop_thread: int) -> str:
        """The tasks of the tracker, and every thread; may be called in any thread.

        Args:
            now: Loop time in seconds.
            loop_thread: Ident of the thread in which the event loop runs.
        """
        frames = sys._current_frames()  # noqa: SLF001 - there is no other way to look at threads
        tasks = _tasks(self._tracker)
        lines = [f"--- {self._title()}: tasks {len(tasks)}, threads {len(frames)} ---"]
        for task in tasks[:MOST_TASKS]:
            lines += _of_task(task, now, frames, loop_thread, self._callers)
        if len(tasks) > MOST_TASKS:
            lines.append(f"... and {len(tasks) - MOST_TASKS} more tasks")
        shown = {task.thread_id for task in tasks}
        for thread in threading.enumerate():
            if thread.ident in frames and thread.ident not in shown:
                what = " (event loop)" if thread.ident == loop_thread else ""
                lines.append(f"thread {escape(thread.name, longest=LONGEST)}{what}")
                lines += _shown(_stack(frames[thread.ident or 0]))
        return "\n".join([*lines, "--- end ---", ""])

    def _write(self) -> None:
        text = self.text(
            now=time.monotonic(),  # the same clock as loop.time(); a virtual loop gets no signals
            loop_thread=threading.main_thread().ident or 0,  # only a loop there gets signals
        )
        rest = text.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while rest:  # not by a logger: the blocked thread may hold its lock
                rest = rest[os.write(STANDARD_ERROR, rest) :]


def _tasks(tracker: Tracker) -> list[TrackedTask]:
    """The tasks, oldest first; tried again if the loop adds one meanwhile."""
    for _ in range(5):
        try:
            return list(tracker)
        except RuntimeError:
            continue
    return []


def _of_task(
    task: TrackedTask,
    now: float,
    frames: Mapping[int, FrameType],
    loop_thread: int,
    callers: Collection[CodeType],
) -> Iterator[str]:
    since = task.tracked_at if task.started_at is None else task.started_at
    words = {
        "method": task.method,
        "lane": task.lane.value,
        "state": task.state.value,
        "resource": ":".join(task.shown_resource or "-"),
        "age": f"{max(0.0, now - since):.1f}s",
        "attempt": task.attempt,
        "safe_point": _safe_point(task, now),
        "cancelled": "-" if task.cancel_cause is None else task.cancel_cause.value,
    }
    shown = " ".join(f"{name}={escape(str(word), longest=LONGEST)}" for name, word in words.items())
    yield f"task {escape(task.about or task.request_id, longest=LONGEST)} {shown}"
    if task.thread_id is not None and task.thread_id in frames:
        yield from _shown(_below(callers, _stack(frames[task.thread_id])))
    elif task.handler is not None:
        called = task.calling if isinstance(task.calling, asyncio.Task) else task.handler
        is_running, found = _of_coroutine(called, frames, loop_thread)
        if is_running:
            yield "  (on the event loop now)"
        yield from _shown(_below(callers, found))


def _safe_point(task: TrackedTask, now: float) -> str:
    if task.safe_point_at is None:
        return "-"
    return f"{task.cursor!r}, {max(0.0, now - task.safe_point_at):.1f}s ago"


def _of_coroutine(
    handler: asyncio.Task[Any], frames: Mapping[int, FrameType], loop_thread: int
) -> tuple[bool, Frames]:
    """Whether the handler runs on the loop now, and its frames."""
    coroutine = handler.get_coro()
    if getattr(coroutine, "cr_running", False) and loop_thread in frames:
        return True, _stack(frames[loop_thread])
    return False, list(_suspended(coroutine))


def _suspended(awaited: Any) -> Iterator[tuple[CodeType, int]]:
    """Frames of a suspended coroutine, outermost first."""
    for _ in range(DEEPEST):
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame.f_code, frame.f_lineno
                awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            return


def _stack(frame: FrameType | None) -> Frames:
    """Frames of a thread, outermost first; the outermost are left out above `DEEPEST`."""
    found: Frames = []
    while frame is not None and len(found) < DEEPEST:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _below(callers: Collection[CodeType], frames: Frames) -> Frames:
    """The frames from the handler on; all frames if no handler has been called yet."""
    for number, (code, _) in reversed(list(enumerate(frames))):
        if code in callers:
            return frames[number + 1 :] or frames
    return frames


def _shown(frames: Frames) -> list[str]:
    lines = []
    for code, number in frames:
        place = f'File "{code.co_filename}", line {number}, in {code.co_qualname}'
        lines.append(f"  {escape(place, longest=2048)}")
        if text := linecache.getline(code.co_filename, number).strip():
            lines.append(f"    {escape(text, longest=LONGEST)}")
    return lines
