"""Traps: a drain or a crash that happens when a safe point is reached.

The handler waits at the safe point until it has happened. So a test knows exactly how
far the handler came, in any order of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Self

import msgspec

from gracekit.rpc.methods import Method
from gracekit.testing.faults import check_count
from gracekit.testing.loop import owned_by
from gracekit.testing.ports import Died, PlayedProcess

Blow = Literal["drain", "crash"]


class Trap(msgspec.Struct, kw_only=True):
    """One drain or crash that a test has planned.

    Attributes:
        asked: The call in the test, for messages.
        blow: What happens.
        left: How many safe points are left until it happens.
        method: Count only safe points of this method; None for all.
    """

    asked: str
    blow: Blow
    left: int
    method: str | None

    @classmethod
    def laid(cls, blow: Blow, verb: str, n: int, of: Method[..., Any] | None) -> Self:
        """Make a trap for the *n*-th safe point, of one method or of all.

        Raises:
            ValueError: *n* is no count, or *of* is no method.
        """
        check_count(f"{verb}: the number of a safe point", n)
        if not (of is None or isinstance(of, Method)):
            raise ValueError(f"{verb}: of={of!r} is no method; give one of the service, as of=work")
        asked = f"{verb}({n})" if of is None else f"{verb}({n}, of={of.name})"
        return cls(asked=asked, blow=blow, left=n, method=None if of is None else of.name)

    def is_sprung(self, method: str) -> bool:
        """Count one safe point of *method*; return whether the trap is due."""
        if self.method in {None, method}:
            self.left -= 1
        return self.left <= 0


class WatchedSafePoints:
    """The safe points of one simulated process; see `process.SafePoints`.

    Args:
        process: The process.
        loop: Its event loop.
        traps: The traps; due ones are removed.
        begin_drain: Starts a drain; its future is done when the drain has begun.
    """

    def __init__(
        self,
        process: PlayedProcess,
        loop: asyncio.AbstractEventLoop,
        traps: list[Trap],
        begin_drain: Callable[[], asyncio.Future[None]],
    ) -> None:
        self._process = process
        self._loop = loop
        self._traps = traps
        self._begin_drain = begin_drain

    async def reached(self, method: str, request_id: str) -> None:  # noqa: ARG002
        """See `SafePoints.reached`."""
        try:
            await self._meet(method)
        except Died:
            # Wait for ever: in a killed process not even a `finally` may run.
            await self._loop.create_future()

    def reached_in_thread(self, method: str, request_id: str) -> None:  # noqa: ARG002
        """See `SafePoints.reached_in_thread`.

        Raises:
            Died: the process was killed; a thread can only be ended by an exception.
        """
        nobody = owned_by(None)  # so that this goes on even if the process dies meanwhile
        nobody.run(asyncio.run_coroutine_threadsafe, self._meet(method), self._loop).result()

    async def _meet(self, method: str) -> None:
        if not self._process.lives:
            raise Died(f"{method}() at a safe point of a process that has ended")
        sprung = [trap for trap in self._traps if trap.is_sprung(method)]
        for trap in sprung:
            self._traps.remove(trap)
        if any(trap.blow == "crash" for trap in sprung):
            self._process.die(f"at a safe point of {method}()")
        if sprung:
            await self._begin_drain()
