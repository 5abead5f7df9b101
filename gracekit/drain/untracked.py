"""What the application still has at work at the end of a process, and nothing tracks."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import thread as pools
from types import FrameType
from typing import Any, Final

from gracekit.drain.report import list_first
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.tracker import Tracker

_OURS: Final = frozenset(
    {"gracekit", "aio_pika", "aiormq", "anyio", "asyncio", "concurrent", "starlette", "uvicorn"}
)
_IDLE: Final = pools._worker.__code__  # noqa: SLF001 - is not public


class Untracked:
    """Names asyncio tasks and threads that handlers have begun, and that end with the process."""

    def __init__(self, tracker: Tracker, telemetry: Telemetry) -> None:
        self._tracker = tracker
        self._telemetry = telemetry
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    async def note_known(self) -> None:
        """Note what is at work before the first request: it belongs to the application."""
        self._known.update(threading.enumerate())
        self._known.update(asyncio.all_tasks())

    async def tell(self) -> None:
        """Log what has come since and is no library's, in one line; nothing without any."""
        names = sorted([*self._tasks(), *self._threads()])
        if names and self._known:  # else the start has ended before
            self._telemetry.emit(
                "work.untracked", number=len(names), work=list_first(names, len(names))
            )

    def _tasks(self) -> Iterator[str]:
        tracked = {task.handler for task in self._tracker}
        for task in asyncio.all_tasks() - tracked - set(self._known):
            frame = getattr(task.get_coro(), "cr_frame", None)
            if frame is not None and _package_of(frame) not in _OURS:
                yield f"asyncio task {frame.f_code.co_qualname}"

    def _threads(self) -> Iterator[str]:
        frames = sys._current_frames()  # noqa: SLF001 - there is no other way to look at threads
        tracked = {task.thread_id for task in self._tracker}
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if thread.daemon or thread in self._known or thread.ident in tracked or frame is None:
                continue
            # The threads of executors, and those of our lanes, which wait for their next call.
            if frame.f_code is not _IDLE and type(thread).__module__.partition(".")[0] not in _OURS:
                yield f"thread {thread.name}"


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
