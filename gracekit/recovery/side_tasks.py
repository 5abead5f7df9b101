"""Work of recovery beside its passes, which must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gracekit import backoff
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.rpc.failures import words_of
from gracekit.telemetry.telemetry import Telemetry


class SideTasks:
    """Runs work beside the passes, because the application or a full lane may delay it for long.

    Of each name one work runs at a time. If it is asked for meanwhile, a pass is made at its end.
    """

    def __init__(self, trigger: RecoveryTrigger, telemetry: Telemetry) -> None:
        self._trigger = trigger
        self._telemetry = telemetry
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked_again: set[str] = set()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The work under way."""
        return list(self._tasks.values())

    def do(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin *work*; if one of that name is under way, ask for a pass at its end."""
        if name in self._tasks:
            self._asked_again.add(name)
            return
        task = asyncio.create_task(work())
        self._tasks[name] = task

        def ended(done: asyncio.Task[None]) -> None:
            del self._tasks[name]
            if name in self._asked_again:
                self._asked_again.discard(name)
                self._trigger.go_on()
            if not done.cancelled() and (error := done.exception()) is not None:
                self._telemetry.emit("store.error", what=name, error=words_of(error))
                asyncio.get_running_loop().call_later(backoff.RECOVERY_S, self._trigger.poke)

        task.add_done_callback(ended)
