"""What a run knows of its store for those who look after it, at most 5 seconds old."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gracekit.clock import Clock, age_s
from gracekit.control import facts_sql as sql
from gracekit.errors import StoreError
from gracekit.store.engine import Engine

FRESH_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 1.0
"""After it the store counts as silent: probes wait for no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one look has shown.

    Attributes:
        at: Loop time in seconds.
        answers: Whether the store answered at all.
        unfinished: Requests of the service that have not ended, by state.
        oldest_s: Age of the oldest of them, in seconds; None if there is none.
    """

    at: float
    answers: bool
    unfinished: Mapping[str, int] = field(default_factory=dict)
    oldest_s: float | None = None


class StoreFacts:
    """Looks when somebody asks, at most each `FRESH_S`; all who ask meanwhile share one look."""

    def __init__(self, engine: Engine, clock: Clock, *, service: str) -> None:
        self._engine = engine
        self._clock = clock
        self._service = service
        self._last: Facts | None = None
        self._looking = asyncio.Lock()

    @property
    def last(self) -> Facts | None:
        """What the last look has shown, however old; None before the first."""
        return self._last

    async def fresh(self) -> Facts:
        """What is known; never raises for the store, and waits `LOOK_TIMEOUT_S` at most."""
        async with self._looking:
            if self._last is None or self._clock.loop() - self._last.at >= FRESH_S:
                self._last = await self._look()
            return self._last

    async def _look(self) -> Facts:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                rows = await self._engine.query(sql.UNFINISHED, self._service)
        except (StoreError, TimeoutError):
            return Facts(at=self._clock.loop(), answers=False)
        oldest = min((float(at or 0.0) for _, _, at in rows), default=None)
        return Facts(
            at=self._clock.loop(),
            answers=True,
            unfinished={str(state): int(number or 0) for state, number, _ in rows},
            oldest_s=None if oldest is None else age_s(self._clock.wall(), oldest),
        )
