"""Engines of a simulated remote store: it can become unreachable, and fence its run."""

from __future__ import annotations

from typing import Any

from gracekit.errors import StoreUnreachableError
from gracekit.store.batch import Batch, BatchOutcome, Row
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.store.state import StoreState
from tests.played import PlayedEngine


class RemoteEngine(MemoryEngine):
    """SQL in memory, behind a simulated connection that a test can cut and restore."""

    def disconnect(self) -> None:
        """Make the store unreachable until `reconnect`."""
        error = StoreUnreachableError("there is no connection to the store; it is tried again")
        self._become(StoreState.UNREACHABLE, error)

    def reconnect(self) -> None:
        """Make the store reachable again, unless the run is fenced or the store broken."""
        self._become(StoreState.REACHABLE)

    async def query(self, sql: str, *params: Any) -> list[Row]:
        """See `Engine.query`; a fenced run may read."""
        if isinstance(self.status.error, StoreUnreachableError):
            raise StoreUnreachableError(str(self.status.error))
        return await super().query(sql, *params)

    def _run(self, batch: Batch) -> BatchOutcome:
        return self.status.refusal() or super()._run(batch)


class PlayedRemoteEngine(RemoteEngine, PlayedEngine):
    """The same on a disk that outlives the process."""
