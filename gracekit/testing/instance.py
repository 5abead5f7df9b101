"""The lives of an instance, and the machine on which `InMemoryService`s run.

The machine freezes killed processes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from typing import Any, Protocol, Self

from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.errors import GracekitError
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.transport import Message, QueueKind
from gracekit.service import Service
from gracekit.testing.faults import Faults, PlannedFaults
from gracekit.testing.loop import owned_by
from gracekit.testing.machine import Life, Machine
from gracekit.testing.ports import Died
from gracekit.testing.traps import Trap, WatchedSafePoints


class Instance(Protocol):
    """The instance to which lives belong."""

    faults: PlannedFaults

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """Handle an event that a life has emitted."""

    def ended(self, life: InstanceLife) -> None:
        """Handle the end of a life."""


class InstanceLife(Life):
    """One process of an instance.

    Attributes:
        error: The exception of its drain; None if there was none.
    """

    machine: InstanceMachine

    def __init__(
        self, instance: Instance, machine: InstanceMachine, service: Service, settings: Settings
    ) -> None:
        self.instance = instance
        self.error: BaseException | None = None
        self._loop = machine._loop()  # noqa: SLF001 - of this package
        self._following: asyncio.Task[None] | None = None
        super().__init__(machine, service, settings, signals=True)
        machine.lives.append(self)

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        if self.process.lives:
            self.instance.hear(name, fields)

    def watch_safe_points(self, traps: list[Trap]) -> None:
        """Set *traps*; call this before the start."""
        self.process.safe_points = WatchedSafePoints(
            self.process, self._loop, traps, self._begin_drain
        )

    async def start(self) -> None:
        """Open, start, and serve in the background; also returns if it is killed meanwhile.

        Raises:
            GracekitError: as `Runtime`; the process has then ended.
        """
        starting = self.machine.spawn_as(self, self.runtime.__aenter__())
        over = asyncio.ensure_future(self.over.wait())
        try:
            await asyncio.wait({starting, over}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return
            starting.result()
        except BaseException:
            self.end()
            raise
        finally:
            over.cancel()
        serving = self.machine.spawn_as(self, self.runtime.serve())
        self._following = asyncio.create_task(self._follow(serving))

    async def _follow(self, serving: asyncio.Task[DrainReport]) -> None:
        """Wait for the drain, and end the process with it. In a killed process this never wakes."""
        try:
            self.report = await serving
        except Exception as error:  # noqa: BLE001 - raised where the report is awaited
            self.error = error
        self.end()

    def interrupt(self, by: signal.Signals) -> None:
        """Act as if the signal had arrived."""
        signals = self.runtime.ground.signals
        assert signals is not None, "each life has signals"
        owned_by(self).run(signals.came, by, self._loop.time())

    def _begin_drain(self) -> asyncio.Future[None]:
        self.interrupt(signal.SIGTERM)

        async def begun() -> None:
            # After an iteration or two of the loop; the phase has no subscribers.
            while self.process.lives and not self.runtime.ground.phase.draining:  # noqa: ASYNC110
                await asyncio.sleep(0)

        return asyncio.ensure_future(begun())

    def end(self) -> None:
        """See `Life.end`; its tasks are frozen instead of cancelled."""
        if not self.over.is_set():
            owned_by(None).run(self._end)  # not frozen: other tasks wait for its effects

    def _end(self) -> None:
        self.process.ended()
        self.engine.pull_plug()
        self.transport.crash()
        self._loop.freeze(self)
        self.over.set()
        self.instance.ended(self)

    def bury(self) -> None:
        """Cancel the frozen tasks, after the test."""
        self.end()
        if self._following is not None:
            self._following.cancel()
        self.machine.cancel_tasks_of(self)
        self._loop.thaw(self)


class NotingBroker(MemoryBroker):
    """A broker that keeps a copy of each notification.

    Attributes:
        notifications: The topic and body of each, in the order of sending.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notifications: list[tuple[str, bytes]] = []

    def put(self, queue: str, message: Message) -> bool:
        """See `MemoryBroker.put`."""
        if not super().put(queue, message):
            return False
        target = self._queues[queue].queue
        if target.kind is QueueKind.NOTIFICATION:
            self.notifications.append((target.topic, message.body))
        return True


class InstanceMachine(Machine):
    """The machine under `InMemoryService`s.

    Attributes:
        broker: Keeps a copy of each notification.
    """

    broker: NotingBroker

    @classmethod
    def open(cls, seed: int) -> Self:
        """Make the machine of the running loop, which can have only one.

        Raises:
            GracekitError: it has one already.
        """
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is not None:
            raise GracekitError(
                "another InMemoryService is open here: InMemoryService(svc, beside=other) plays "
                "a further process on its machine"
            )
        return cls(seed=seed)

    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.broker = NotingBroker()  # nothing is connected yet
        self._loop().set_exception_handler(_tell)

    def faults_of(self, life: Life) -> Faults:
        """See `Machine.faults_of`: each instance has its own."""
        assert isinstance(life, InstanceLife)
        return life.instance.faults

    async def bury(self, instance: Instance) -> None:
        """End all lives of *instance*, and wait for the end of their tasks."""
        mine = [
            one for one in self.lives if isinstance(one, InstanceLife) and one.instance is instance
        ]
        for life in mine:
            life.bury()
        await self.settle()
        for life in mine:
            self._abandon_tasks_of(life)

    def _abandon_tasks_of(self, life: InstanceLife) -> None:
        """Freeze and forget tasks that ignore cancellation, lest they keep the loop open."""
        self._loop().freeze(life)
        for task, who in list(self._owners.items()):
            if who is life and not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
                assert isinstance(task, asyncio.Task)
                asyncio.tasks._unregister_task(task)  # noqa: SLF001 - as asyncio documents it

    async def close(self) -> None:
        """See `Machine.close`."""
        await super().close()
        self._loop().set_task_factory(None)
        self._loop().set_exception_handler(None)


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore the exception of a simulated death; handle others as asyncio does by default."""
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)
