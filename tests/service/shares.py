"""An application's records with a kind that settles them, for the tests of resource rules."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gracekit import Absent, Context, Found, ResourceKind, Service, Settled
from gracekit.leases.leases import Resource
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.results import PassReport, Result
from tests.service.kit import Life, World, now

WAIT_S = 10.0
"""`startup_reconciliation_wait_seconds`, by default."""
LOOKS_S = 2.0
"""How long a pass looks at queues that are empty."""


@dataclass
class ShareRow:
    """One record of the application."""

    status: str
    since: float | None
    busy: bool = False
    needs: tuple[Resource | None, ...] = ()
    token: int = 0
    facts: dict[str, object] = field(default_factory=dict)


class Asked(NamedTuple):
    """One call of a probe or a delete: of which resource, at which loop time, with which token."""

    id: str
    at: float
    token: int | None


class Shares:
    """One kind with a rule of each sort.

    Attributes:
        rows: Records by id.
        asked: Calls of the probe.
        deleted: Calls of the delete.
        written: (id, status before, status after) of each write that changed a record.
        pages: (after, limit) of each call of `find`.
        answers: What the probe does about an id the n-th time: a value, or a coroutine.
        deletes: As `answers`, for the delete.
        writes: What `write` answers in the place of the truth; None for the truth.
        at_once: How many probes run now, and the most that did.
    """

    def __init__(
        self, world: World, svc: Service, name: str = "share", *, bare: bool = False, **options: Any
    ) -> None:
        self.world = world
        self.name = name
        self.kind: ResourceKind = svc.kind(name, **options)
        self.rows: dict[str, ShareRow] = {}
        self.asked: list[Asked] = []
        self.deleted: list[Asked] = []
        self.written: list[tuple[str, str, str]] = []
        self.pages: list[tuple[str | None, int]] = []
        self.answers: Callable[[str, int], Any] = lambda _id, _n: Settled("available")
        self.deletes: Callable[[str, int], Any] = lambda _id, _n: None
        self.finds: Callable[[int], Any] = lambda _n: None
        self.writes: Callable[[Found, str], Any] | None = None
        self.shows: set[str] = set()
        self.at_once = [0, 0]
        self.kind.find(self.find)
        self.kind.write(self.write)
        if not bare:
            self.kind.probe("creating", failed="error")(self.was_it_created)
            self.kind.delete("deleting", done="deleted", failed="error_deleting")(self.delete_again)
            self.kind.mark(restoring="error")
            self.kind.leave("migrating", why="its continue task goes on with it")

    def add(self, *ids: str, status: str = "creating", age_s: float | None = 3600.0, **more: Any):
        """Records that have had their status for so long; None for an unknown time."""
        since = None if age_s is None else self.world.clock.wall() - age_s
        self.rows |= {one: ShareRow(status, since, **more) for one in ids}

    def statuses(self) -> dict[str, str]:
        return {one: row.status for one, row in self.rows.items()}

    def asks(self) -> list[str]:
        return [asked.id for asked in self.asked]

    # -- its hooks ----------------------------------------------------------------------

    async def find(self, ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        self.pages.append((after, limit))
        if (answer := await _answer(self.finds(len(self.pages)))) is not None:
            return answer  # type: ignore[no-any-return]
        shown = {*self.kind.rules, *self.shows}
        ids = [one for one in sorted(self.rows) if after is None or one > after]
        found = [one for one in ids if self.rows[one].status in shown][:limit]
        rows = self.rows
        return [
            Found(
                one,
                rows[one].status,
                since=rows[one].since,
                busy=rows[one].busy,
                needs=rows[one].needs,
            )
            for one in found
        ]

    async def write(
        self, ctx: Context, found: Found, status: str, facts: Mapping[str, object]
    ) -> Any:
        if self.writes is not None:
            return await _answer(self.writes(found, status))
        row = self.rows[found.id]
        if row.status != found.status or (ctx.fence or 0) < row.token:
            return False
        row.status, row.token, row.facts = status, ctx.fence or 0, dict(facts)
        row.since = self.world.clock.wall()
        self.written.append((found.id, found.status, status))
        return True

    async def was_it_created(self, ctx: Context, found: Found) -> Any:
        self.asked.append(Asked(found.id, now(), ctx.fence))
        self.at_once[0] += 1
        self.at_once[1] = max(self.at_once)
        try:
            return await _answer(self.answers(found.id, self.asks().count(found.id)))
        finally:
            self.at_once[0] -= 1

    async def delete_again(self, ctx: Context, found: Found) -> Any:
        self.deleted.append(Asked(found.id, now(), ctx.fence))
        times = sum(asked.id == found.id for asked in self.deleted)
        return await _answer(self.deletes(found.id, times))

    # -- what the store knows -----------------------------------------------------------

    def finding(self, name: str) -> dict[str, Any] | None:
        rows = self.world.rows("SELECT * FROM finding WHERE name = ?", name)
        return rows[0] if rows else None


async def _answer(value: Any) -> Any:
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, BaseException):
        raise value
    return value


def absent(_id: str, _n: int) -> Absent:
    return Absent("the backend does not know it")


async def hang() -> None:
    await asyncio.Event().wait()


async def settle(life: Life, **options: Any) -> PassReport:
    """One pass by hand."""
    request = PassRequest(by_hand=True, **{"at_least_s": WAIT_S, **options})
    report = PassReport(keeps=True)
    making = life.runtime.wired.reconciler.by_hand.make(request, report)
    await life.machine.run_as(life, making)
    return report


def results(report: PassReport) -> dict[str, Result]:
    """By id."""
    return {result.resource[1]: result for result in report.results}


def why_left(report: PassReport) -> dict[str, str]:
    """The reason of each that was left, by id."""
    return {
        result.resource[1]: result.reason
        for result in report.results
        if result.outcome.value == "left"
    }


async def first_pass(life: Life) -> Mapping[str, Any]:
    """Wait until the first pass of a life has finished."""
    return await life.hears("reconciliation.finished")
