"""Keeps new requests from a resource with an unfinished task until recovery has settled it."""

from __future__ import annotations

from collections.abc import Callable

from gracekit.leases.leases import Resource
from gracekit.leases.lines import Kind
from gracekit.recovery.shared import Shared


class Gates:
    """The places that recovery holds in the lines of resources, one in each."""

    def __init__(self, shared: Shared) -> None:
        self._lines = shared.lines
        self._claims = shared.claims
        self._held: set[Resource] = set()

    async def hold_all(self) -> None:
        """Hold the line of every resource with an unfinished row."""
        for _, resource in await self._claims.unfinished_resources():
            if resource not in self._held and self._lines.enter_nowait(resource):
                self._held.add(resource)

    async def refresh(self, settling: Callable[[], set[Resource | None]]) -> None:
        """Leave the lines of resources that a sibling has settled and *settling* does not name."""
        if not self._held:
            return
        open_rows = {resource for _, resource in await self._claims.unfinished_resources()}
        for resource in sorted(self._held - open_rows - settling()):
            self.leave(resource)

    async def enter(self, resource: Resource | None) -> None:
        """Wait for a place in the line of *resource*, unless one is held; nothing for None."""
        if resource is not None and resource not in self._held:
            await self._lines.enter(resource, kind=Kind.SETTLING)
            self._held.add(resource)

    def leave(self, resource: Resource | None) -> None:
        """Leave the line of *resource*, so that the next one gets in; nothing if it is not held."""
        if resource is not None and resource in self._held:
            self._held.discard(resource)
            self._lines.leave(resource)

    def hand_on(self, resource: Resource | None) -> Resource | None:
        """Pass the place in the line to a task; returns the resource, None if no place is held."""
        if resource is None or resource not in self._held:
            return None
        self._held.discard(resource)
        return resource

    def leave_handed(self, resource: Resource) -> None:
        """Leave the line in place of a task that got the place by `hand_on` and does not begin."""
        self._lines.leave(resource)
