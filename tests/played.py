"""The machine of `gracekit.testing`, and its processes as the tests of gracekit start them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from gracekit.config.choices import StopSource
from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.process import Point, Side
from gracekit.service import Service
from gracekit.testing import machine
from gracekit.testing.machine import EmittedEvent

T = TypeVar("T")

PATIENCE_S: Final = 7200.0
"""Timeout of waits, in virtual seconds."""


class Life(machine.Life):
    """One process of a service; `Machine.life` makes it.

    Attributes:
        events: The events that it emitted, in order, as name and fields.
    """

    machine: Machine

    def __init__(
        self, machine: Machine, service: Service, settings: Settings, *, signals: bool
    ) -> None:
        self.events: list[EmittedEvent] = []
        self._news = asyncio.Event()
        self._serving: asyncio.Task[DrainReport] | None = None
        super().__init__(machine, service, settings, signals=signals)

    # -- events -------------------------------------------------------------------------

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        self.events.append((name, dict(fields)))
        self._news.set()

    def told(self, name: str) -> list[Mapping[str, Any]]:
        """The fields of all events of that name so far."""
        return [fields for each, fields in self.events if each == name]

    async def hears(self, name: str, number: int = 1) -> Mapping[str, Any]:
        """Wait for the *number*-th event of that name."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.told(name)) < number:
                self._news.clear()
                await self._news.wait()
        return self.told(name)[number - 1]

    # -- its life -----------------------------------------------------------------------

    async def start(self) -> None:
        """Open, start, and serve in the background.

        Raises:
            GracekitError: as `Runtime`; the process has then ended.
        """
        try:
            await self.machine.run_as(self, self.runtime.__aenter__())
        except BaseException:
            self.end()
            raise
        self._serving = self.machine.spawn_as(self, self.runtime.serve())

    def ask_to_stop(self, *, source: StopSource = "signal", final: bool = True) -> None:
        """Request a stop, as a signal or an operator does."""
        self.runtime.request_stop(source=source, by="test", reason="test", final=final)

    async def wait_end(self) -> DrainReport:
        """Wait for the end of a drain under way, and end the process."""
        assert self._serving is not None, "start() it first"
        async with asyncio.timeout(PATIENCE_S):
            self.report = await self._serving
        self.end()
        await asyncio.sleep(0)
        return self.report

    async def drain(self) -> DrainReport:
        """Drain, from the request to the end of the process."""
        self.ask_to_stop()
        return await self.wait_end()

    async def crash(self) -> None:
        """Kill -9, now."""
        self.end()
        await asyncio.sleep(0)

    def crash_at(self, point: Point, side: Side) -> None:
        """Plan a kill -9 at a point; `over` is set when it happens."""
        self.process.dies_at = (point, side)


class Machine(machine.Machine):
    """The machine on which lives run."""

    def life(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        """Make a process, without starting it.

        Args:
            service: Its service.
            signals: Whether it handles signals, and so arms the kernel's alarm.
            settings: Settings by name, as in `Settings`.
        """
        given = {"transport_url": "memory://", "store_url": "memory://", "host": "node-1"}
        one = self.make_life(service, Settings(**(given | settings)), signals=signals)
        self.lives.append(one)
        return one

    def make_life(self, service: Service, settings: Settings, *, signals: bool) -> Life:
        """Make a life; a test may override this to use a subclass."""
        return Life(self, service, settings, signals=signals)

    async def start(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        """Make and start a process."""
        one = self.life(service, signals=signals, **settings)
        await one.start()
        return one

    def pause(self, life: machine.Life) -> None:
        """Freeze a process, as SIGSTOP does."""
        self._loop().freeze(life)

    def resume(self, life: machine.Life) -> None:
        """Let a process go on, as SIGCONT does."""
        self._loop().thaw(life)

    async def run_as(self, life: machine.Life, step: Coroutine[Any, Any, T]) -> T:
        """Run *step* in that process, and wait for it."""
        return await self.spawn_as(life, step)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Let virtual time pass until *condition* holds."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + within_s
        while not condition():
            assert loop.time() < limit, f"not within {within_s:g} s"
            await asyncio.sleep(max(0.05, within_s / 4000))
