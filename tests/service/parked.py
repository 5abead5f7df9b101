"""What the tests of PENDING begin with: builds that find room, or do not, and their resolver."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from gracekit import Context, NoCapacity, NotificationListener, Service
from gracekit.errors import Parked
from gracekit.rpc.client import RpcClient
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.notifications import Notification
from tests.played import PlayedProcess
from tests.service.kit import Life, World

TIMEOUT_S: Final = 3600.0
"""The default of `pending_timeout`."""


class Site:
    """A service in virtual time, and a resolver of its parked tasks."""

    def __init__(self, world: World, svc: Service) -> None:
        self.world = world
        self.svc = svc
        self._client: RpcClient | None = None

    # -- doing --------------------------------------------------------------------------

    async def start(self, **settings: Any) -> Life:
        """A run that parks."""
        return await self.world.start(self.svc, **({"use_pending_state": True} | settings))

    async def client(self) -> RpcClient:
        """A caller who outlives every run."""
        if self._client is None:
            self._client = await self.world.client(self.svc, ops_topic=f"{self.svc.topic}-ops")
        return self._client

    async def order(self, verb: str, task_id: str = "t", version: int = 1, **more: Any) -> Any:
        """One of the methods of `gracekit.tasks` that move a task."""
        if verb == "give_up":
            more.setdefault("reason", "too large")
        return await self.api(verb, task_id=task_id, version=version, **more)

    async def api(self, method: str, **args: Any) -> Any:
        """Any method of `gracekit.tasks`."""
        client = await self.client()
        view = client.prepare(ops=True, namespace="gracekit.tasks", version="1.1", timeout=60)
        return await view.call(method, **args)

    # -- looking ------------------------------------------------------------------------

    def row(self, task_id: str = "t") -> dict[str, Any]:
        return self.world.task(task_id)

    def state(self, task_id: str = "t") -> str:
        return self.world.state(task_id)

    async def ends(self, state: str, task_id: str = "t", *, within_s: float = 600.0) -> None:
        """Wait until a task is in *state*."""
        await self.world.until(lambda: self.state(task_id) == state, within_s=within_s)

    def unsent(self) -> list[dict[str, Any]]:
        """Notifications that nobody has sent."""
        return self.world.rows("SELECT * FROM outbox ORDER BY id")

    async def read(self, *priorities: str) -> list[Notification]:
        """Take the notifications that have come, and wait for none."""
        transport = MemoryTransport(self.world.broker, PlayedProcess(set(), 3))
        await transport.start()
        read: list[Notification] = []
        listener = NotificationListener(
            transport,
            f"{self.svc.topic}-notifications",
            priorities=priorities or ("info", "error"),
        )

        async def listen() -> None:
            async with listener:
                read.extend([one async for one in listener])

        reading = asyncio.create_task(listen())
        await asyncio.sleep(1)
        await listener.stop()
        await reading
        await transport.stop()
        return read

    async def steps(self) -> list[str]:
        """What `task.update` has reported since the last look: `running>pending no_capacity 1`."""
        return [step_of(one.payload) for one in await self.read("info")]


class Builds(Site):
    """A service whose `build` parks its task while `free` is too small.

    Attributes:
        free: Room that is left; a build takes none of it away.
        holds: A build that has room waits until it is set.
        fails: Whether a build that has room raises after that.
        begun: VM and attempt of each start, in order.
        hooks: VM and reason of each call of the errored hook.
    """

    def __init__(self, world: World, svc: Service, *, hook: bool = True, **options: Any) -> None:
        super().__init__(world, svc)
        self.free = 0
        self.holds = asyncio.Event()
        self.holds.set()
        self.fails = False
        self.begun: list[tuple[str, int]] = []
        self.hooks: list[tuple[str, str]] = []

        @svc.rpc(**({"resource": "vm", "on_interrupt": "retry"} | options))
        async def build(ctx: Context, vm: str, memory_mb: int = 1) -> str:
            self.begun.append((vm, ctx.attempt))
            if memory_mb > self.free:
                need = {"memory_mb": memory_mb}
                raise NoCapacity(f"no host has {memory_mb} MiB free", requested=need)
            await self.holds.wait()
            if self.fails:
                raise LookupError("no image")
            return f"{vm} with {memory_mb}"

        @svc.rpc(resource="vm")
        async def delete(ctx: Context, vm: str) -> int:
            return await ctx.cancel_pending("vm", vm, reason="deleted")

        self.build = build
        self.delete = delete
        if hook:

            @build.errored
            async def _(ctx: Context, vm: str, reason: str, memory_mb: int = 1) -> None:
                self.hooks.append((vm, reason))

    async def call(self, vm: str = "v", task_id: str = "t", **args: Any) -> Any:
        """Call `build` as a caller that knows the state."""
        view = (await self.client()).prepare(request_id=task_id, pending=True, timeout=100)
        return await view.call(self.build, vm=vm, **args)

    async def park(self, vm: str = "v", task_id: str = "t", **args: Any) -> Parked:
        """Call `build`, which is to be parked."""
        try:
            result = await self.call(vm, task_id, **args)
        except Parked as parked:
            return parked
        raise AssertionError(f"it was not parked: {result!r}")


def step_of(payload: Mapping[str, Any]) -> str:
    words = (f"{payload['old_state']}>{payload['new_state']}", payload["reason"])
    return " ".join((*words, str(payload["version"])))


async def full_placement(world: World) -> tuple[RpcClient, Any]:
    """Another service that handlers call, and its method, which finds no capacity itself."""
    other = Service("placement")

    @other.rpc
    async def claim(ctx: Context) -> None:
        raise NoCapacity("no inventory")

    await world.start(other)
    return await world.client(other), claim
