"""Resolvers: programs outside of the service that make room, and decide about parked tasks.

Each listens to notifications, acknowledges them late, and loses all it knew when it is killed. It
comes back, and rebuilds its picture by `list_pending` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

from gracekit import NotificationListener, RpcClient
from gracekit.errors import GracekitError
from gracekit.journal.outbox import NO_CAPACITY
from gracekit.rpc.client import ClientView
from gracekit.testing.ports import EPOCH_S
from gracekit.tracker.task import Verb
from tests.played import NoCrash, PlayedProcess, PlayedTransport
from tests.simulation.parked import TOPIC, told
from tests.simulation.truth import Violation, violate

if TYPE_CHECKING:
    from tests.simulation.story import Story

LIVES_S: Final = 25.0
THINKS_S: Final = 1.5
LATE_S: Final = 40.0
"""It waits so long for the last moment of a task at most."""
LOOKS_S: Final = 20.0
"""One that knows of nothing looks around after so long."""
PAGE: Final = 3
UNITS: Final = 4
"""As much room as any request needs."""


class Resolver:
    """One of them, through its lives."""

    def __init__(self, story: Story, number: int) -> None:
        self._story = story
        self._name = f"resolver{number}"
        self._rng = random.Random(f"{story.seed} {self._name}")

    async def live(self) -> None:
        """Until the story is over; in the quiet phase nobody kills it."""
        rng, story = self._rng, self._story
        while not story.is_over:
            life = _Life(story, self._name, rng)
            work = asyncio.ensure_future(life.work())
            try:
                await self._wait_death(work)
            finally:
                work.cancel()
                await asyncio.wait({work})
                await life.end()
            if not work.cancelled():
                work.result()  # it ends by itself only if something is wrong with it
            story.ends["resolver killed"] += 1
            await asyncio.sleep(rng.random() * 8)

    async def _wait_death(self, work: asyncio.Future[None]) -> None:
        while not work.done():
            await asyncio.wait({work}, timeout=self._rng.expovariate(1 / LIVES_S))
            if not self._story.truth.is_quiet:
                return


class _Life:
    """A resolver until it is killed.

    Attributes:
        known: The versions of parked tasks by id, as far as it knows.
    """

    def __init__(self, story: Story, name: str, rng: random.Random) -> None:
        self._story = story
        self._name = name
        self._rng = rng
        self.known: dict[str, int] = {}
        self._seen: set[str] = set()
        self._news = asyncio.Event()
        machine = story.machine
        process = PlayedProcess(set(), 3)
        self._transport = PlayedTransport(machine.broker, process, NoCrash(machine.faults))
        self._client = RpcClient(self._transport, story.app.svc.topic, clock=machine.clock)
        self._listener = NotificationListener(
            self._transport, TOPIC, clock=machine.clock, prefetch=rng.choice([1, 10])
        )

    async def end(self) -> None:
        """Kill it: what it has in hand goes back, and nothing of it is settled."""
        self._transport.crash()
        with contextlib.suppress(GracekitError):
            await self._listener.stop()
        with contextlib.suppress(GracekitError):
            await self._client.stop()

    async def work(self) -> None:
        """Listen and decide, until killed."""
        await self._patiently(self._transport.start)
        await self._patiently(self._listener.start)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._decide())

    async def _patiently(self, step: Any) -> None:
        while True:
            try:
                await step()
            except GracekitError as error:
                self._story.tell(f"{self._name}: {told(error)}")
                await asyncio.sleep(1 + self._rng.random())
            else:
                return

    # -- what it hears --------------------------------------------------------------------

    async def _listen(self) -> None:
        async for said in self._listener:
            self._story.judged(self._story.parked.check_heard, said)
            payload = said.payload
            self._story.tell(f"{self._name} hears {said.event_type} {sorted(payload.items())}")
            self._story.ends["notification heard"] += 1
            await asyncio.sleep(self._rng.choice([0.0, 0.0, 0.5, 3.0]))
            if said.message_id in self._seen:
                self._story.ends["notification twice"] += 1
                continue
            self._seen.add(said.message_id)
            task_id, version = payload["task_id"], payload["version"]
            if said.event_type == NO_CAPACITY:
                self.known[task_id] = max(version, self.known.get(task_id, 0))
                self._news.set()
            elif payload["new_state"] != "pending" and self.known.get(task_id, 0) <= version:
                self.known.pop(task_id, None)

    async def _rebuild(self) -> None:
        """Learn by `list_pending` alone what waits."""
        parked = self._story.parked
        before, moves = self._pending(), parked.moves.copy()
        found: dict[str, int] = {}
        after = 0
        while after is not None:
            page = await self._view.call("list_pending", after=after, limit=PAGE)
            found |= {task["task_id"]: task["version"] for task in page["tasks"]}
            after = page["next"]
        stayed = {one for one in before if parked.moves[one] == moves[one]}
        for one in sorted(stayed):
            if found.get(one) != before[one]:
                text = f"Q8: {one} is PENDING at version {before[one]}, and listed are {found}"
                self._story.judged(violate, text)
        self.known = found

    def _pending(self) -> dict[str, int]:
        rows = self._story.machine.rows("SELECT * FROM task WHERE state = 'pending' ORDER BY id")
        return {row["request_id"]: row["parkings"] for row in rows}

    @property
    def _view(self) -> ClientView:
        return self._client.prepare(
            ops=True, namespace="gracekit.tasks", version="1.1", timeout=10.0
        )

    # -- what it does ---------------------------------------------------------------------

    async def _decide(self) -> None:
        rng = self._rng
        is_known = False
        while True:
            try:
                if not is_known or rng.random() < 0.1:
                    await self._rebuild()
                    is_known = True
            except GracekitError as error:
                self._story.tell(f"{self._name} cannot list: {told(error)}")
            self._news.clear()
            if is_known and not self.known:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOKS_S)
            await asyncio.sleep(rng.expovariate(1 / THINKS_S))
            if self.known:
                task_id = rng.choice(sorted(self.known))
                await self._act(task_id, self.known[task_id])

    async def _act(self, task_id: str, version: int) -> None:
        rng = self._rng
        if rng.random() < 0.7:
            self._story.capacity.make_room(rng.choice([1, UNITS]))
        kind = rng.choice(
            ["retry"] * 4
            + ["late"] * 4
            + ["args", "odd args", "stale", "twice", "give_up", "cancel"]
        )
        self._story.ends[f"resolver: {kind}"] += 1
        match kind:
            case "late":
                await self._wait_deadline(task_id)
                await self._order("retry", task_id, version)
            case "args":
                await self._order("retry", task_id, version, args={"n": rng.randrange(100, 200)})
            case "odd args":
                odd: dict[str, Any] = rng.choice([{"vm": "v9"}, {"no_such": 1}])
                await self._order("retry", task_id, version, args=odd)
            case "stale":
                verb = rng.choice(["retry", "give_up", "cancel"])
                await self._order(verb, task_id, version + rng.choice([-1, 1]))
            case "twice":
                both = [self._order("retry", task_id, version) for _ in range(2)]
                await asyncio.gather(*both)
            case _:
                await self._order(kind, task_id, version)

    async def _wait_deadline(self, task_id: str) -> None:
        """Until the last moment of a task, as far as its clock tells."""
        sql = "SELECT pending_deadline AS due FROM task WHERE request_id = ?"
        rows = self._story.machine.rows(sql, task_id)
        if rows and rows[0]["due"] is not None:
            wall = EPOCH_S + self._story.loop.time() + self._story.machine.clock.shift_s
            left = rows[0]["due"] - wall - self._rng.choice([0.5, 0.0, -0.05, -0.3])
            await asyncio.sleep(max(0.0, left) if left < LATE_S else 0.0)

    async def _order(self, verb: str, task_id: str, version: int, **options: Any) -> None:
        story = self._story
        story.capacity.asked[task_id].add(Verb(verb))
        moves, was = story.parked.moves[task_id], self._pending().get(task_id)
        reason = {"reason": self._name}
        try:
            answer = await self._view.call(
                verb, task_id=task_id, version=version, **options, **reason
            )
        except GracekitError as error:
            story.tell(f"{self._name}: {verb} {task_id} {version}: {told(error)}")
            name = type(error).__name__
            story.ends[f"resolver got {name}"] += 1
            if name in {"Gone", "StaleVersionError"}:
                self.known.pop(task_id, None)
                if was == version and story.parked.moves[task_id] == moves:
                    story.judged(violate, f"Q5: {task_id} waits, and {verb} got {told(error)}")
            return
        story.tell(f"{self._name}: {verb} {task_id} {version} {options}: {answer}")
        self.known.pop(task_id, None)
        story.judged(self._check_done, answer, version, options.get("args", {}))

    def _check_done(self, answer: dict[str, Any], version: int, args: dict[str, Any]) -> None:
        """Q5: what an answer says was done, at the version that the order named."""
        out = self._story.parked.out.get((answer["task_id"], version))
        if answer["version"] != version:
            raise Violation(f"Q5: an order about version {version} got {answer}")
        if answer["changed"] and (out is None or out[0] != answer["state"]):
            raise Violation(f"Q5: {answer} for version {version}, and on record is {out}")
        if answer["changed"] and args and out is not None and out[1] != args["n"]:
            raise Violation(f"Q5: a retry with {args} is on record with n={out[1]}")
