"""Reads a kind page by page, and checks what its `find` returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from gracekit.errors import GracekitError
from gracekit.leases.leases import Resource
from gracekit.recovery.hook_calls import HookCalls
from gracekit.recovery.resources.found import Found
from gracekit.recovery.resources.kinds import ResourceKind
from gracekit.recovery.resources.results import LONGEST_REASON
from gracekit.recovery.shared import Shared
from gracekit.request.work_context import WorkContext
from gracekit.tracker.task import Lane, TaskState, TrackedTask

PAGE: Final = 500
"""Resources in one page."""


class FindError(GracekitError):
    """The `find` of a kind raised, hung, or returned what cannot be; its pass is over."""


class Page:
    """The resources of one kind behind one id, which may be looked at again.

    Attributes:
        after: Id behind which it begins; None for the first one.
    """

    def __init__(self, reader: Reader, kind: ResourceKind, after: str | None) -> None:
        self.after = after
        self._reader = reader
        self._kind = kind
        self._reading = asyncio.Lock()
        self._next: asyncio.Task[Mapping[str, Found]] | None = None

    async def read(self) -> Mapping[str, Found]:
        """The page as it is now, by id.

        Raises:
            FindError: it cannot be read.
        """
        return {found.id: found for found in await self._reader.read(self._kind, self.after)}

    async def look_again(self) -> Mapping[str, Found]:
        """As `read`, for a rule that has begun and holds the lease of its resource.

        Those who ask at one time share an answer, as long as its question was put after theirs.

        Raises:
            FindError: it cannot be read.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(self._read_again())
        return await asyncio.shield(self._next)

    async def _read_again(self) -> Mapping[str, Found]:
        async with self._reading:
            self._next = None  # who asks from now on needs an answer of its own
            founds = await self._reader.read_within(self._kind, self.after)
            return {found.id: found for found in founds}


class Reader:
    """Calls `find`."""

    def __init__(self, shared: Shared, calls: HookCalls) -> None:
        self._services = shared.services
        self._suspects = shared.suspects
        self._limit_s = shared.settings.probe_timeout_s
        self._clock = shared.clock
        self._calls = calls

    async def pages(self, kind: ResourceKind) -> AsyncIterator[tuple[Page, list[Found]]]:
        """All pages of *kind*, in their order.

        Raises:
            FindError: one cannot be read, or shows again what was before it.
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
        """One page.

        Raises:
            FindError: it cannot be read.
        """
        async with self._suspects.beginning(("find", 0), None):
            return await self.read_within(kind, after)

    async def read_within(self, kind: ResourceKind, after: str | None) -> list[Found]:
        """As `read`, for a rule that has begun: one that is kept apart would wait for itself."""
        hook = kind.hook("find")
        assert hook.target is not None
        context = self.context(f"find of kind {kind.name}")
        end = await self._calls.call(
            hook.target, context, {"after": after, "limit": PAGE}, limit_s=self._limit_s
        )
        if end.fault:
            raise FindError(f"{_name(kind)}(): {end.fault[:LONGEST_REASON]}")
        return _checked(kind, end.value, after)

    def context(
        self, what: str, resource: Resource | None = None, token: int | None = None
    ) -> WorkContext:
        """A context for a call that is not tracked by itself."""
        task = TrackedTask(
            request_id=what,
            method=what,
            lane=Lane.BACKGROUND,
            journaled=False,
            state=TaskState.RUNNING,
            tracked_at=self._clock.loop(),
            resource=resource,
            token=token,
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
