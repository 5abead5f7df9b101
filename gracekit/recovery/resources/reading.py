"""Reads a kind page by page, and checks what its `find` returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from gracekit.errors import GracekitError
from gracekit.recovery.resources.found import Found
from gracekit.recovery.resources.kinds import ResourceKind
from gracekit.recovery.resources.results import LONGEST_REASON
from gracekit.recovery.resources.rule_calls import KindCalls
from gracekit.recovery.shared import Shared
from gracekit.request.work_context import WorkContext
from gracekit.tracker.task import Lane, TaskState, TrackedTask

PAGE: Final = 500
"""Most resources in one page."""


class FindError(GracekitError):
    """The `find` of a kind raised, hung, or returned something wrong: its pass is broken."""


class Page:
    """One page of the resources of a kind, which can be read again.

    Attributes:
        after: The page begins after this id; None for the first page.
    """

    def __init__(self, reader: Reader, kind: ResourceKind, after: str | None) -> None:
        self.after = after
        self._reader = reader
        self._kind = kind
        self._reading = asyncio.Lock()
        self._next: dict[int, asyncio.Task[Mapping[str, Found]]] = {}  # reads not begun, by limit
        self._limit = reader.short

    async def read(self) -> Mapping[str, Found]:
        """Read the page now; returns its resources by id.

        Raises:
            FindError: it cannot be read.
        """
        return {found.id: found for found in await self._reader.read(self._kind, self.after)}

    async def look_again(self, name: str) -> Found | None:
        """The resource *name* as it is now; None if the page does not have it any more.

        This is called for a rule that has begun and holds its lease. By then, most resources before
        this one are settled and no longer found, so a short page is enough to find it. If it is not
        there, a whole page is read, because many before it may not be settled, or `find` may have
        returned fewer than the limit. Only a whole page proves that the resource is gone.

        Raises:
            FindError: the page cannot be read.
        """
        limit = self._limit
        found = (await self._look(limit)).get(name)
        if found is None and limit < PAGE:
            found = (await self._look(PAGE)).get(name)
            if found is not None:
                self._limit = PAGE  # many before it are not settled: a short page will not do
        return found

    async def _look(self, limit: int) -> Mapping[str, Found]:
        """Read up to *limit*; callers share a read if it begins after all of them have asked."""
        if limit not in self._next:
            self._next[limit] = asyncio.ensure_future(self._read_again(limit))
        return await asyncio.shield(self._next[limit])

    async def _read_again(self, limit: int) -> Mapping[str, Found]:
        async with self._reading:
            del self._next[limit]  # later callers need a new read
            founds = await self._reader.read_within(self._kind, self.after, limit)
            return {found.id: found for found in founds}


class Reader:
    """Calls `find`.

    Attributes:
        short: Limit of a short page: twice as many resources as are settled at a time.
    """

    def __init__(self, shared: Shared, calls: KindCalls) -> None:
        self._services = shared.services
        self._suspects = shared.suspects
        self._limit_s = shared.settings.probe_timeout_s
        self._clock = shared.clock
        self._calls = calls
        self.short = min(PAGE, 2 * shared.settings.reconcile_at_once)

    async def pages(self, kind: ResourceKind) -> AsyncIterator[tuple[Page, list[Found]]]:
        """All pages of *kind*, in order.

        Raises:
            FindError: a page cannot be read, or ends like an earlier one.
        """
        after, ends = None, set[str]()
        while founds := await self.read(kind, after):
            yield Page(self, kind, after), founds
            after = founds[-1].id
            if after in ends:
                raise FindError(
                    f"{_name(kind)}() has returned {after!r} at the end of two pages: it must "
                    "return those behind `after` alone, in the order of their ids"
                )
            ends.add(after)

    async def read(self, kind: ResourceKind, after: str | None) -> list[Found]:
        """Read one page.

        Raises:
            FindError: it cannot be read.
        """
        async with self._suspects.beginning(("find", 0), None):
            return await self.read_within(kind, after)

    async def read_within(
        self, kind: ResourceKind, after: str | None, limit: int = PAGE
    ) -> list[Found]:
        """As `read`, without waiting for suspects: a rule that runs alone would wait for itself."""
        hook = kind.hook("find")
        context, args = self._context(f"find of kind {kind.name}"), {"after": after, "limit": limit}
        end = await self._calls.call(kind, hook, context, args, limit_s=self._limit_s)
        if end.fault:
            raise FindError(f"{_name(kind)}(): {end.fault[:LONGEST_REASON]}")
        try:
            return _checked(kind, end.value, after)
        except FindError as error:
            self.tell(kind, str(error), trouble="wrong answer")
            raise

    def tell(self, kind: ResourceKind, error: str, *, trouble: str) -> None:
        """Log what is wrong with the resources that `find` has returned; see `KindCalls.tell`."""
        self._calls.tell(kind, kind.hook("find"), error, trouble=trouble)

    def _context(self, what: str) -> WorkContext:
        """A context for a call that has no task in the tracker."""
        task = TrackedTask(
            request_id=what,
            method=what,
            lane=Lane.BACKGROUND,
            journaled=False,
            state=TaskState.RUNNING,
            tracked_at=self._clock.loop(),
        )
        return WorkContext(task, self._services, what=what)


def _name(kind: ResourceKind) -> str:
    return f"{kind.name}.find, {kind.hook('find').name}"


def _checked(kind: ResourceKind, value: object, after: str | None) -> list[Found]:
    if not isinstance(value, list | tuple):
        raise FindError(
            f"{_name(kind)}() returned a {type(value).__name__}: it returns a list of Found"
        )
    founds: list[Any] = list(value)
    if len(founds) > PAGE:
        raise FindError(
            f"{_name(kind)}(limit={PAGE}) returned {len(founds)}: it returns at most `limit`"
        )
    seen = set[str]()
    for one in founds:
        if not isinstance(one, Found):
            raise FindError(
                f"{_name(kind)}() returned a {type(one).__name__} in its list: all are Found"
            )
        if one.id == after:
            raise FindError(
                f"{_name(kind)}(after={after!r}) returned {after!r} itself: it returns those "
                "behind it (WHERE id > ?)"
            )
        if one.id in seen:
            raise FindError(f"{_name(kind)}() returned {one.id!r} twice in one page")
        seen.add(one.id)
    return founds
