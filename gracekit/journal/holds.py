"""Holds: rows that keep a host in its drain across the requests of one operation.

The destination of a migration runs nothing between two calls, yet must not
leave. A hold says so until it is ended from any later request, or lapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracekit.errors import ConflictError, GracekitError
from gracekit.journal import holds_sql as sql
from gracekit.journal.rows import MET_ALONE, from_json, to_json
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import COUNT
from gracekit.process import Point
from gracekit.store.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """One hold.

    Attributes:
        method: Of the request that opened it; its probe settles a left-over hold.
        lapses_at: Wall time at which it ends by itself.
        next_check: Wall time at which the probe is asked again; None for a hold that was opened
            by a request of its owner.
        errored_due: It has ended, and its errored hook has still to be called.
        crashes: Processes that ended while its probe, or its errored hook, was being called.
        alone: Whether the last of them met it with nothing else at work.
    """

    id: int
    name: str
    key: str
    owner: str | None
    namespace: str | None
    method: str
    version: str
    args: dict[str, Any]
    lapses_at: float
    next_check: float | None
    errored_due: bool
    crashes: int
    alone: bool


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

        One that a dead run left over is taken on: its operation goes on here.

        Args:
            name: Kind of operation.
            key: Which one.
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
        """End a hold, whoever opened it; false if none was open."""
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
        """Holds that keep this run, those past their time excepted."""
        return await self._list(sql.MINE, self._journal.run_id, self._journal.clock.wall())

    async def due(self) -> list[Hold]:
        """Holds that something is to be done about, in this order, and the oldest first.

        Ended ones whose errored hook has still to be called; those of this run
        that are past their time; and left-over ones whose next check has come: of
        this run, or without an owner and for this host.
        """
        now = self._journal.clock.wall()
        return await self._list(sql.DUE, self._host, self._journal.run_id, now)

    async def begin(self, hold: Hold, *, alone: bool) -> bool:
        """Record that its probe, or its errored hook, is about to be called here.

        False if a sibling calls it, or it is not due any more.
        """
        batch = Batch(Point.CALL_HOOK)
        batch.ask(
            sql.BEGIN,
            *(self._journal.run_id, int(alone), hold.id),
        )
        return bool((await self._journal.commit(batch))[0])

    async def settle(self, hold: Hold, reason: str, *, errored: bool, given_up: str = "") -> bool:
        """End a hold as recovery has decided; false if someone else did, or it was opened again."""
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
        """Be kept by a left-over hold, and look at it again at wall time *next_check*."""
        batch = Batch(Point.HOLD)
        batch.add(sql.WAIT, self._journal.run_id, next_check, hold.id, hold.owner, hold.next_check)
        await self._journal.commit(batch)

    def add_follow_clock(self, batch: Batch, by_s: float) -> None:
        """After the wall clock was set by so many seconds: the holds of this run last as long.

        Of those that nobody keeps, the probes are asked at once.
        """
        now, service = self._journal.clock.wall(), self._journal.service
        batch.add(sql.FOLLOW_CLOCK, by_s, self._journal.run_id)
        batch.add(sql.ASK_NOW, now, service, self._host)

    async def errored_done(self, hold: Hold, *, given_up: str = "") -> None:
        """The hook was called, or is given up: purge the arguments."""
        batch = Batch(Point.ERRORED_DONE)
        batch.add(sql.ERRORED_DONE, hold.id)
        if given_up:
            self.add_given_up(batch, hold, given_up)
        await self._journal.commit(batch)

    def add_given_up(self, batch: Batch, hold: Hold, detail: str) -> None:
        """Count and list a probe, or an errored hook, that is not called any more."""
        batch.add_up(COUNT, "hook_given_up", 1)
        name = f"hold {hold.name} {hold.key}"
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
