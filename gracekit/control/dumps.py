"""The dump of tasks and stacks for operators: the text that SIGUSR1 writes, page by page.

A text is made once and kept for a minute, so that its pages fit together even if the tasks
change meanwhile. A thread makes it, so that the event loop is not blocked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.control.door_wire import PAGE_BYTES
from gracekit.errors import GracekitError, InvalidArgumentsError
from gracekit.process import Threads
from gracekit.tracker.stacks import StackDump

KEPT_S: Final = 60.0
MOST_KEPT: Final = 4


class Dumps:
    """Makes dumps of one run, and keeps them while they are read.

    Args:
        stacks: Makes the text.
        threads: One thread, which makes one text at a time.
    """

    def __init__(self, stacks: StackDump, threads: Threads, clock: Clock) -> None:
        self._stacks = stacks
        self._threads = threads
        self._clock = clock
        self._kept: dict[str, tuple[list[str], float]] = {}  # pages, kept until loop time

    async def page(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """One page of a text.

        Args:
            args: `dump_id` and `page`, which are `dump_id` and `next` of the previous page; neither
                for the first page of a new text.

        Raises:
            GracekitError: that text is no longer kept.
        """
        dump_id, number = args.get("dump_id"), args.get("page", 0)
        if dump_id is None:
            dump_id = await self._make()
        self._forget_old()
        pages, _ = self._kept.get(dump_id, ([], 0.0)) if isinstance(dump_id, str) else ([], 0.0)
        if not pages:
            raise GracekitError(
                f"dump {str(dump_id)[:50]} is kept no longer ({KEPT_S:g} s, and the last "
                f"{MOST_KEPT}): ask for a new one"
            )
        if not isinstance(number, int) or not 0 <= number < len(pages):
            raise InvalidArgumentsError(f"that dump has the pages 0 to {len(pages) - 1}")
        following = number + 1 if number + 1 < len(pages) else None
        if following is None:
            del self._kept[dump_id]
        return {"dump_id": dump_id, "text": pages[number], "next": following}

    async def _make(self) -> str:
        now, thread = self._clock.loop(), threading.get_ident()
        text = await self._threads.run(partial(self._stacks.text, now=now, loop_thread=thread))
        dump_id = self._clock.new_id()
        self._kept[dump_id] = _paged(text), self._clock.loop() + KEPT_S
        return dump_id

    def _forget_old(self) -> None:
        now = self._clock.loop()
        young = [(name, kept) for name, kept in self._kept.items() if kept[1] > now]
        self._kept = dict(young[-MOST_KEPT:])


def _paged(text: str) -> list[str]:
    """*text* in pages of whole lines, each at most `PAGE_BYTES` as JSON, but at least one line."""
    pages, page, size = [], "", 0
    for line in text.splitlines(keepends=True):
        length = len(json.dumps(line))
        if page and size + length > PAGE_BYTES:
            pages.append(page)
            page, size = "", 0
        page += line
        size += length
    return [*pages, page]
