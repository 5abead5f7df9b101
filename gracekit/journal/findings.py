"""Findings: rows of resources on which a rule acts, or that wait to be settled.

A settled resource has no row. A resource that was only found has none either until its rule
begins, if `find` says since when it has its status.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gracekit.errors import ConflictError
from gracekit.journal import findings_sql as sql
from gracekit.journal.rows import MET_ALONE
from gracekit.journal.tasks import Journal
from gracekit.process import Point
from gracekit.store.batch import Batch


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The row of one resource.

    Attributes:
        name: Id of the resource.
        first_seen: Wall time at which it was first found in that status.
        page: Its page of `find` begins after this id; None for the first page.
        owner: Run in which its rule acts now.
        tries: How often its rule was followed without settling it.
        waiting_since: Wall time of the first of these tries.
        next_check: Wall time at which its rule is followed again; None for the next pass.
        detail: Why it waits.
        crashes: How many processes ended while its rule acted.
        alone: Whether nothing else was at work in the last of these processes.
    """

    id: int
    kind: str
    name: str
    status: str
    first_seen: float
    page: str | None
    owner: str | None
    tries: int
    waiting_since: float | None
    next_check: float | None
    detail: str | None
    crashes: int
    alone: bool


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A resource that was found on a page of its kind.

    Attributes:
        page: The page begins after this id; None for the first page.
    """

    kind: str
    name: str
    status: str
    page: str | None


class PassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has done: wall times, and numbers of resources.

    Attributes:
        waiting: Resources whose rule is followed again; after a dry run, those to be settled.
        found_only: Whether it was a dry run, because recovery settles nothing by itself.
        by_hand: Whether an operator has asked for it.
        broken: Kinds whose resources could not be listed, and why.
    """

    run_id: str
    began_at: float
    finished_at: float
    settled: int
    failed: int
    waiting: int
    left_alone: int
    found_only: bool = False
    by_hand: bool = False
    broken: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def unasked(self) -> UnaskedPass | None:
        """What siblings need to know of it; None if an operator has asked for it, or it broke."""
        if self.by_hand or self.broken:
            return None
        return UnaskedPass(self.began_at, self.finished_at, self.found_only)


class UnaskedPass(NamedTuple):
    """A pass that no operator has asked for: wall times; `found_only` as in `PassRecord`."""

    began_at: float
    finished_at: float
    found_only: bool


class AtWork(msgspec.Struct, frozen=True, kw_only=True):
    """An open task that acts on a resource.

    Attributes:
        instance: Instance of the run that owns it; None if no run does.
    """

    request_id: str
    method: str
    state: str
    instance: str | None


class FindingRows:
    """The findings of one host, or of one scope of it.

    Attributes:
        host: Name of the host, or `host/scope`.
    """

    def __init__(self, journal: Journal, *, host: str) -> None:
        self._journal = journal
        self.host = host
        self._where = (journal.service, host)

    # -- reads --------------------------------------------------------------------------

    async def by_name(self, kind: str, names: Sequence[str]) -> dict[str, FindingRow]:
        """The findings of resources in *names*, by id of the resource."""
        found: dict[str, FindingRow] = {}
        for start in range(0, len(names), sql.AT_ONCE):
            some = names[start : start + sql.AT_ONCE]
            filled = [*some, *[some[0]] * (sql.AT_ONCE - len(some))]
            for one in await self._list(sql.BY_NAME, kind, *filled):
                found[one.name] = one
        return found

    async def due(self, limit: int) -> list[FindingRow]:
        """Up to *limit* findings whose rule is to be followed again now, longest overdue first."""
        return await self._list(sql.DUE, self._journal.clock.wall(), limit)

    async def of_other_kinds(self, kinds: Container[str]) -> list[FindingRow]:
        """The findings of kinds that are not in *kinds*, unless a rule acts on them now."""
        rows = await self._journal.engine.query(sql.KINDS, *self._where)
        names = [str(kind) for (kind,) in rows if kind not in kinds]
        return [one for kind in names for one in await self._list(sql.OF_KIND, kind)]

    async def next_check(self) -> float | None:
        """Wall time at which the next finding is due; None if there is none."""
        rows = await self._journal.engine.query(sql.NEXT_CHECK, *self._where)
        return None if rows[0][0] is None else float(rows[0][0])

    async def last_unasked_pass(self) -> UnaskedPass | None:
        """The last finished pass over this host's resources that no operator has asked for."""
        for began_at, finished_at, found_only in await self._journal.engine.query(
            sql.LAST_UNASKED_PASS, *self._where
        ):
            return UnaskedPass(float(began_at or 0), float(finished_at or 0), bool(found_only))
        return None

    async def paused_s(self) -> float:
        """Seconds for which no pass begins that nobody asks for; 0 for none."""
        rows = await self._journal.engine.query(sql.PAUSED, self._journal.service)
        return max((float(until or 0) - self._journal.clock.wall() for (until,) in rows), default=0)

    async def at_work(self, kind: str, name: str) -> AtWork | None:
        """The oldest open task that acts on the resource; None if there is none."""
        for request_id, method, state, instance in await self._journal.engine.query(
            sql.AT_WORK, kind, name
        ):
            return AtWork(
                request_id=str(request_id),
                method=str(method),
                state=str(state),
                instance=None if instance is None else str(instance),
            )
        return None

    async def _list(self, text: str, *params: str | float) -> list[FindingRow]:
        rows = await self._journal.engine.query(text, *self._where, *params)
        found: list[dict[str, Any]] = [dict(zip(sql.NAMES, row, strict=True)) for row in rows]
        return [FindingRow(**one | {"alone": one["alone"] == MET_ALONE}) for one in found]

    # -- writes -------------------------------------------------------------------------

    def add_begin(
        self,
        batch: Batch,
        seen: Sighting,
        *,
        rule: str,
        settle_s: float,
        alone: bool,
        at_once: bool,
    ) -> int:
        """Record that a rule begins; a conflict if a task acts on the resource, or it is not due.

        Args:
            batch: Gets the statement.
            seen: The resource.
            rule: Name of the rule.
            settle_s: Seconds for which the resource is left alone if this process dies meanwhile.
            alone: Whether nothing else runs beside the rule.
            at_once: Begin even if the rule is not due yet.

        Returns:
            Index of the statement, which returns the id of the row and `waiting_since`.
        """
        return batch.ask(
            sql.BEGIN,
            *self._where,
            *(seen.kind, seen.name, seen.status),
            self._journal.clock.wall(),
            *(seen.page, rule, self._journal.run_id, settle_s, int(alone), int(at_once)),
            self._ahead_s(),
            expect=1,
        )

    def add_end(self, batch: Batch, row_id: int) -> None:
        """Remove a row whose rule has ended; a conflict if another run has taken it over."""
        batch.add(sql.END, row_id, self._journal.run_id, expect=1)

    def add_wait(self, batch: Batch, row_id: int, *, next_check: float, why: str) -> None:
        """Let the rule be followed again at wall time *next_check*; a conflict as in `add_end`."""
        now, me = self._journal.clock.wall(), self._journal.run_id
        batch.add(sql.WAIT, now, next_check, why[:1000], row_id, me, expect=1)

    def add_let_go(self, batch: Batch, resource: tuple[str, str], *, next_check: float) -> None:
        """Release a resource on which no rule acted after all; due at wall time *next_check*."""
        now, me = self._journal.clock.wall(), self._journal.run_id
        batch.add(sql.LET_GO, next_check, now, *self._where, *resource, me)

    async def note_seen(self, sightings: Iterable[Sighting]) -> None:
        """Record resources that a page shows, so that `sweep` keeps their rows."""
        batch = Batch(Point.FINDING, durable=False)
        now = self._journal.clock.wall()
        for seen in sightings:
            what = (seen.kind, seen.name, seen.status)
            batch.add(sql.SEEN, *self._where, *what, now, seen.page, self._ahead_s())
        if batch.statements:
            await self._journal.commit(batch)

    async def forget(self, finding: FindingRow, *, is_gone: bool, dropped: str = "") -> None:
        """Remove the row of a resource that *is_gone* from its page; else leave it to a pass.

        If it is *dropped*, which says why, its status may be as it was found.
        """
        batch = Batch(Point.FINDING)
        batch.add(sql.FORGET if is_gone else sql.NOT_AGAIN, finding.id, expect=1)
        if dropped:
            self.add_note(batch, "resource_left", (finding.kind, finding.name), dropped)
        elif is_gone:
            self._add_moved_on(batch, finding.kind, finding.name, finding.status)
        with contextlib.suppress(ConflictError):  # a sibling was quicker
            await self._journal.commit(batch)

    async def put_off(self, finding: FindingRow, *, next_check: float) -> None:
        """Follow the rule at wall time *next_check*, because it could not be followed now."""
        batch = Batch(Point.FINDING)
        batch.add(sql.PUT_OFF, next_check, finding.id)
        await self._journal.commit(batch)

    async def sweep(self, kind: str, *, before: float) -> None:
        """Remove rows that a whole pass, begun at wall time *before*, has not found any more."""
        batch = Batch(Point.FINDING)
        batch.ask(sql.SWEEP, *self._where, kind, before)
        rows = (await self._journal.commit(batch))[0]
        notes = Batch(Point.TALLY, durable=False)
        for name, status, rule in rows:
            if rule is not None:
                self._add_moved_on(notes, kind, str(name), str(status))
        if notes.statements:
            await self._journal.commit(notes)

    def _add_moved_on(self, batch: Batch, kind: str, name: str, status: str) -> None:
        self.add_note(batch, "resource_moved_on", (kind, name), f"it is not {status} any more")

    def add_note(self, batch: Batch, what: str, resource: tuple[str, str], detail: str) -> None:
        """List an incident about a resource, which *detail* does not name."""
        named = ":".join(resource)
        self._journal.add_note(batch, what, None, named, f"{named}: {detail}")

    def add_follow_clock(self, batch: Batch, by_s: float, *, ahead_s: float) -> None:
        """After the wall clock was set by *by_s*, shift all times.

        *ahead_s* is wall time minus loop time now; the rows keep it, so that each is shifted once.
        """
        batch.add(sql.FOLLOW_CLOCK, by_s, *self._where, ahead_s)

    def _ahead_s(self) -> float:
        return self._journal.clock.wall() - self._journal.clock.loop()

    async def note_pass(self, done: PassRecord) -> None:
        """Record that a pass has finished, and which kinds were broken in it since when."""
        batch, unasked = Batch(Point.FINDING), done.unasked
        rows = await self._journal.engine.query(sql.BROKEN, *self._where)
        since = {str(kind): at for kind, at in rows}
        batch.add(sql.FORGET_BROKEN, *self._where)
        for kind, why in done.broken.items():
            if done.by_hand and kind not in since:
                continue  # its operator reads it, and no pass would be made again for it soon
            at = since.get(kind, done.began_at)
            batch.add(sql.NOTE_BROKEN, *self._where, kind, why[:1000], at)
            if kind not in since:
                self._journal.add_note(batch, "resource_kind_broken", None, kind, f"{kind}: {why}")
        batch.add(
            sql.NOTE_PASS,
            *self._where,
            *(done.run_id, done.began_at, done.finished_at),
            *(done.settled, done.failed, done.waiting, done.left_alone),
            int(done.found_only),
            *((None,) * 3 if unasked is None else (*unasked[:2], int(unasked.found_only))),
        )
        await self._journal.commit(batch)
