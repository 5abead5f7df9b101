"""A machine whose killed processes stand still, and the lives of one instance on it."""

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
from gracekit.testing.machine import Life, Machine
from gracekit.testing.ports import Died, owned_by
from gracekit.testing.traps import Trap, WatchedSafePoints


class Instance(Protocol):
    """Whose lives they are."""

    faults: PlannedFaults

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """A life has told an event."""

    def ended(self, life: InstanceLife) -> None:
        """A life is over."""


class InstanceLife(Life):
    """One process of an instance.

    Attributes:
        error: What its drain raised; None if it did not.
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
        super()._hear(name, fields)
        if self.process.lives:
            self.instance.hear(name, fields)

    def watch_safe_points(self, traps: list[Trap]) -> None:
        """Lay *traps*; before it starts."""
        self.process.safe_points = WatchedSafePoints(
            self.process, self._loop, traps, self._begin_drain
        )

    async def start(self) -> None:
        """See `Life.start`; returns also when it was killed meanwhile."""
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
        self._serving = self.machine.spawn_as(self, self.runtime.serve())
        self._following = asyncio.create_task(self._follow(self._serving))

    async def _follow(self, serving: asyncio.Task[DrainReport]) -> None:
        """The process ends with its drain; a killed one has none, and this is never woken."""
        try:
            self.report = await serving
        except Exception as error:  # noqa: BLE001 - for whoever waits for the report
            self.error = error
        self.end()

    def interrupt(self, by: signal.Signals) -> None:
        """What the signal's arrival does on the loop."""
        signals = self.runtime.ground.signals
        assert signals is not None, "each life has them"
        owned_by(self).run(signals.came, by, self._loop.time())

    def _begin_drain(self) -> asyncio.Future[None]:
        self.interrupt(signal.SIGTERM)

        async def begun() -> None:
            # After an iteration or two of the loop; the phase has no subscribers.
            while self.process.lives and not self.runtime.ground.phase.draining:  # noqa: ASYNC110
                await asyncio.sleep(0)

        return asyncio.ensure_future(begun())

    def end(self) -> None:
        """See `Life.end`; what it was doing stands still instead of being unwound."""
        if not self.over.is_set():
            owned_by(None).run(self._end)  # what others wait for must go on

    def _end(self) -> None:
        self.process.ended()
        self.engine.pull_plug()
        self.transport.crash()
        self._loop.freeze(self)
        self.over.set()
        self.instance.ended(self)

    def bury(self) -> None:
        """Unwind what stands still, when nobody looks any more."""
        self.end()
        if self._following is not None:
            self._following.cancel()
        self.machine.cancel_tasks_of(self)
        self._loop.thaw(self)


class NotingBroker(MemoryBroker):
    """A broker that keeps a copy of each notification.

    Attributes:
        notifications: The topic of its queue, and its body, in the order in which they were sent.
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
        broker: Remembers what was sent to notification queues.
    """

    broker: NotingBroker

    @classmethod
    def open(cls, seed: int) -> Self:
        """On the loop that runs here, alone.

        Raises:
            GracekitError: there is one already.
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
        """End all lives of *instance*, and wait until nothing of them is left."""
        mine = [
            one for one in self.lives if isinstance(one, InstanceLife) and one.instance is instance
        ]
        for life in mine:
            life.bury()
        await self.settle()
        for life in mine:
            self._abandon_tasks_of(life)

    def _abandon_tasks_of(self, life: InstanceLife) -> None:
        """What swallows its cancellation would keep the loop from closing: stop and forget it."""
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
    """A played death is no news; everything else asyncio tells as always."""
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)
