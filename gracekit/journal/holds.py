"""Holds: rows that keep a run in its drain across the requests of one operation.

Between two calls of a migration its destination runs no handler, but it must not
end. A hold keeps it until any later request ends the hold, or until it lapses.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gracekit.errors import ConflictError, GracekitError
from gracekit.journal import holds_sql as sql
from gracekit.journal.rows import MET_ALONE, from_json, to_json
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import COUNT
from gracekit.process import Point
from gracekit.store.batch import Batch


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """One hold.

    Attributes:
        target: Host of the run that opened it.
        method: Method of the request that opened it; its probe settles a left-over hold.
        lapses_at: Wall time at which it ends by itself.
        next_check: Wall time at which the probe is called again; None for a hold that was opened
            by a request of its owner.
        errored_due: Whether it has ended and its errored hook is still to be called.
        crashes: How many processes ended while its probe, or its errored hook, was being called.
        alone: Whether nothing else was at work in the last of these processes.
    """

    id: int
    name: str
    key: str
    owner: str | None
    target: str
    namespace: str | None
    method: str
    version: str
    args: dict[str, Any]
    lapses_at: float
    next_check: float | None
    errored_due: bool
    crashes: int
    alone: bool

    @property
    def event_fields(self) -> dict[str, Any]:
        """What every event about it has."""
        return {"hold": self.name, "key": self.key, "method": self.method}

    @property
    def title(self) -> str:
        """`migration vm-1`."""
        return f"{self.name} {self.key}"


class Holds:
    """The holds of one run."""

    def __init__(self, journal: Journal, *, host: str) -> None:
        self._journal = journal
        self._host = host

    async def open(
        self,
        name: str,
        key: str,
        *,
        at_most_s: float,
        method: tuple[str | None, str, str],
        args: dict[str, Any],
    ) -> None:
        """Keep this run in its drain until the hold ends; opening it again prolongs it.

        If a dead run left the hold open, this run becomes its owner.

        Args:
            name: Kind of operation.
            key: Which operation of that kind.
            at_most_s: Seconds after which it lapses.
            method: (namespace, name, version) of the request that opens it.
            args: Its arguments, kept for the probe.

        Raises:
            GracekitError: another living run holds the same name and key.
        """
        now = self._journal.clock.wall()
        batch = Batch(Point.HOLD)
        batch.ask(
            sql.OPEN,
            self._journal.service,
            name,
            key,
            self._journal.run_id,
            self._host,
            *method,
            to_json(args),
            now,
            now + at_most_s,
            expect=1,
        )
        batch.add(COUNT, "holds", 1)
        try:
            await self._journal.commit(batch)
        except ConflictError:
            raise GracekitError(
                f"hold {name!r} of {key!r} is open in another run: end it there, or use a key "
                "that names this operation alone"
            ) from None

    async def end(self, name: str, key: str) -> bool:
        """End a hold that any run may have opened; false if none was open."""
        batch = Batch(Point.END_HOLD)
        batch.ask(
            sql.END_BY_NAME,
            self._journal.clock.wall(),
            self._journal.service,
            name,
            key,
        )
        return bool((await self._journal.commit(batch))[0])

    async def mine(self) -> list[Hold]:
        """Holds that keep this run in its drain, without those that have lapsed."""
        return await self._list(sql.MINE, self._journal.run_id, self._journal.clock.wall())

    async def due(self) -> list[Hold]:
        """Holds for which this run has something to do, in this order, each oldest first.

        Ended holds whose errored hook is still to be called; holds of this run
        that have lapsed; and left-over holds whose next check has come, which this
        run owns or which have no owner and are for this host, or for one that
        does not come back.
        """
        now = self._journal.clock.wall()
        return await self._list(sql.DUE, self._host, self._journal.run_id, now)

    async def begin(self, hold: Hold, *, alone: bool) -> bool:
        """Record that its probe, or its errored hook, is about to be called here.

        Returns false if a sibling calls it, or if it is not due any more.
        """
        batch = Batch(Point.CALL_HOOK)
        batch.ask(
            sql.BEGIN,
            *(self._journal.run_id, int(alone), hold.id),
        )
        return bool((await self._journal.commit(batch))[0])

    async def settle(self, hold: Hold, reason: str, *, errored: bool, given_up: str = "") -> bool:
        """End a hold as recovery decided; false if it was ended or opened again meanwhile."""
        batch = Batch(Point.END_HOLD)
        now = self._journal.clock.wall()
        batch.ask(
            sql.END,
            *(now, reason, int(errored), int(errored)),
            *(hold.id, hold.owner, hold.lapses_at, hold.next_check),
        )
        if given_up:
            self.add_given_up(batch, hold, given_up)
        return bool((await self._journal.commit(batch))[0])

    async def wait(self, hold: Hold, *, next_check: float) -> None:
        """Let a left-over hold keep this run in its drain; next check at wall time *next_check*."""
        batch = Batch(Point.HOLD)
        batch.add(sql.WAIT, self._journal.run_id, next_check, hold.id, hold.owner, hold.next_check)
        await self._journal.commit(batch)

    def add_follow_clock(self, batch: Batch, by_s: float) -> None:
        """After the wall clock was set by *by_s*, shift the times of this run's holds.

        Left-over holds without an owner are due at once.
        """
        now, service = self._journal.clock.wall(), self._journal.service
        batch.add(sql.FOLLOW_CLOCK, by_s, self._journal.run_id)
        batch.add(sql.ASK_NOW, now, service, self._host)

    async def errored_done(self, hold: Hold, *, given_up: str = "", failed: str = "") -> None:
        """Record that the hook was called, or is given up; purge the arguments.

        *given_up* and *failed* are as in `Claims.errored_done`.
        """
        batch = Batch(Point.ERRORED_DONE)
        batch.add(sql.ERRORED_DONE, hold.id)
        if given_up:
            self.add_given_up(batch, hold, given_up)
        elif failed:
            batch.add_up(COUNT, "hook_failed", 1)
            name = f"hold {hold.title}"
            self._journal.add_note(batch, "hook_failed", name, hold.method, failed)
        await self._journal.commit(batch)

    def add_given_up(self, batch: Batch, hold: Hold, detail: str) -> None:
        """Count a probe or errored hook that is not called any more, and list it as an incident."""
        batch.add_up(COUNT, "hook_given_up", 1)
        name = f"hold {hold.title}"
        self._journal.add_note(batch, "hook_given_up", name, hold.method, detail)

    async def _list(self, text: str, *params: str | float) -> list[Hold]:
        rows = await self._journal.engine.query(text, self._journal.service, *params)
        found: list[dict[str, Any]] = [dict(zip(sql.NAMES, row, strict=True)) for row in rows]
        return [
            Hold(
                **one
                | {
                    "args": from_json(one["args"]) or {},
                    "errored_due": bool(one["errored_due"]),
                    "alone": one["alone"] == MET_ALONE,
                }
            )
            for one in found
        ]
