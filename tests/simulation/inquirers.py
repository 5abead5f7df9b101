"""Callers that ask what became of requests, their own and others', and cancel some of them.

In half of the seeds. They ask about requests that run, wait, have ended, were never sent, or were
removed by retention, beside everything else; and in the end, when nothing happens any more, about
all of them once more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gracekit import CallTimeoutError, NoAnswerError, RpcClient, RpcError, UnknownTaskError
from gracekit.errors import StoreError
from gracekit.process import Point
from gracekit.rpc.callers.task_lookups import TaskInfo
from gracekit.rpc.message import CallerVerb, Request
from tests.simulation.histories import Asked, Histories
from tests.simulation.truth import Violation, violate

if TYPE_CHECKING:
    from tests.simulation.ports import SimLife
    from tests.simulation.story import Story

SHARE: Final = 0.5
"""Of the seeds in which callers ask."""
RETAINS: Final = 0.2
"""Of those, the ones whose records are removed before the end."""
RETENTION_S: Final = 600.0
"""Longer than the faults last: a copy of a removed request would run again."""
USERS: Final = ("ada", "ada", "eve", None)
ASKERS: Final = 2
EVERY_S: Final = 4.0
CANCELS: Final = 0.3
WAITS_S: Final = (0.0, 0.0, 2.0, 15.0)
_LOOKS: Final = {CallerVerb.LOOK.value, CallerVerb.OUTCOME.value}
_STILL: Final = ("task", "content", "reply", "outbox", "hold")
"""Tables that no lookup changes, and in the end nothing else."""

looking: ContextVar[bool] = ContextVar("looking", default=False)
"""Whether what runs is the answer to a lookup."""


class Inquirers:
    """Those of one story."""

    def __init__(self, story: Story) -> None:
        self._story = story
        rng = random.Random(f"{story.seed} inquirers")  # of its own: the rest of the story stays
        self.is_on = rng.random() < SHARE
        self.retains = self.is_on and rng.random() < RETAINS and not story.swarm.jumps
        self.histories = Histories(story)
        self._watched: set[SimLife] = set()
        self._clients: list[RpcClient] = []
        self._asking: list[asyncio.Task[None]] = []
        self._is_over = False

    def settings(self) -> dict[str, Any]:
        """Of the service."""
        return {"retention_s": RETENTION_S, "retention_after_s": 60.0} if self.retains else {}

    def user_of(self, request_id: str) -> str | None:
        """Who sends a request."""
        return random.Random(f"{self._story.seed} {request_id} user").choice(USERS)

    # -- L2 -------------------------------------------------------------------------------

    def watch(self, life: SimLife) -> None:
        """From its first delivery on, let a process know which answer it is working on."""
        if not self.is_on or life in self._watched or life.runtime.wired is None:
            return
        self._watched.add(life)
        arrivals = life.runtime.wired.dispatcher._arrivals
        arrivals.answer_caller = partial(_answered, arrivals.answer_caller)

    def check_commit(self, life: Any, point: Point) -> None:
        """L2: a lookup writes nothing."""
        if looking.get():
            raise Violation(f"L2: {life.name} looks something up, and commits {point.value}")

    # -- questions ------------------------------------------------------------------------

    async def work(self, number: int) -> None:
        """Ask now and then, until the quiet phase is over."""
        rng = random.Random(f"{self._story.seed} inquirer {number}")
        client = await self._story.callers.connect()
        self._clients.append(client)
        while not self._is_over:
            await asyncio.sleep(rng.expovariate(1 / EVERY_S))
            if self._story.ledger.is_ready and self._story.sent and not self._is_over:
                self._asking.append(self._story.spawn(self._ask_some(client, rng)))

    async def _ask_some(self, client: RpcClient, rng: random.Random) -> None:
        if rng.random() < CANCELS and not self._story.truth.is_quiet:
            await self._cancel(client, self._drawn(rng, is_open=0.8), rng)
            return
        ids = [self._drawn(rng, is_open=0.4) for _ in range(rng.choice([1, 1, 1, 5]))]
        by = self._user(ids[0], rng)
        if rng.random() < 0.5:
            await self._look(client, ids, by)
        else:
            await self._wait(client, ids, by, rng.choice(WAITS_S))

    def _drawn(self, rng: random.Random, *, is_open: float) -> str:
        """The id of an open request of a caller, of any that was sent, or of none."""
        sql = "SELECT request_id FROM task WHERE finished_at IS NULL ORDER BY id"
        rows = self._story.machine.rows(sql) if rng.random() < is_open else []
        sent = self._story.sent  # without the requests of resolvers
        known = [row["request_id"] for row in rows if row["request_id"] in sent] or list(sent)
        return f"never-sent-{rng.random()}" if rng.random() < 0.1 else rng.choice(known)

    def _user(self, request_id: str, rng: random.Random) -> str | None:
        """Mostly the one that has sent it."""
        mine = rng.random() < 0.75
        return self.user_of(request_id) if mine else rng.choice(USERS)

    async def _look(self, client: RpcClient, ids: list[str], by: str | None) -> None:
        asked = {one: Asked(request_id=one, by=by, since=self._story.loop.time()) for one in ids}
        view = client.prepare(context={} if by is None else {"user_id": by})
        try:
            found = await view.states(ids)
        except (NoAnswerError, StoreError) as error:
            self._tell("lookup", asked, error)
            return
        for one, question in asked.items():
            self._tell("lookup", question, told := found.get(one))
            if told is not None:
                self._judge(self.histories.check_info, question, told)
            else:
                self._judge(self.histories.check_unknown, question)

    async def _wait(self, client: RpcClient, ids: list[str], by: str | None, wait: float) -> None:
        asked = {one: Asked(request_id=one, by=by, since=self._story.loop.time()) for one in ids}
        view = client.prepare(context={} if by is None else {"user_id": by})
        try:
            found = await view.results(ids, wait=wait)
        except StoreError as error:
            self._tell("result", asked, error)
            return
        for one, question in asked.items():
            self._tell("result", question, told := found[one])
            match told:
                case NoAnswerError():
                    pass
                case UnknownTaskError():
                    self._judge(self.histories.check_unknown, question)
                case CallTimeoutError():
                    self._judge(self.histories.check_open, question)
                case _:
                    self._judge(self.histories.check_result, question, told)

    async def _cancel(self, client: RpcClient, request_id: str, rng: random.Random) -> None:
        story, by = self._story, self._user(request_id, rng)
        one = story.sent.get(request_id)
        allows = "nobody" if one is None else one.method.options.allow_cancel
        may = allows == "anyone" or (
            allows == "sender" and by is not None and by == self.user_of(request_id)
        )
        asked = Asked(request_id=request_id, by=by, since=story.loop.time(), cancels=True, may=may)
        if may:
            self.histories.may_cancel.add(request_id)
        before = self.histories.now(request_id)
        if may and before is not None:
            story.ends[f"cancel of a task that is {before['state']}"] += 1
        view = client.prepare(context={} if by is None else {"user_id": by})
        try:
            told = await view.cancel(request_id, reason="simulated")
        except UnknownTaskError as error:
            self._tell("cancel", asked, error)
            self._judge(self.histories.check_unknown, asked)
        except (NoAnswerError, StoreError) as error:
            self._tell("cancel", asked, error)
        except RpcError as error:
            self._tell("cancel", asked, error)
            self._judge(self.histories.check_refused, asked, error)
        else:
            self._tell("cancel", asked, told)
            self._judge(self.histories.check_info, asked, told)

    def _tell(self, what: str, asked: Any, told: Any) -> None:
        self._story.tell(f"{what}: {asked}: {told!r}")
        name = told.state if isinstance(told, TaskInfo) else type(told).__name__
        self._story.ends[f"{what}: {'unknown' if told is None else name}"] += 1

    def _judge(self, check: Callable[..., None], *args: Any) -> None:
        self._story.judged(check, *args)

    # -- the end --------------------------------------------------------------------------

    async def rest(self) -> None:
        """Ask about all once more, when all has ended; then, maybe, until nothing is on record."""
        if not self.is_on:
            return
        self._is_over = True
        if self._asking:
            await asyncio.wait(self._asking)
        await self._ask_all()
        if self.retains:
            self._story.reckoning.reckon_requests()
            await self._outlive()

    async def _ask_all(self) -> None:
        """L2: nothing is changed by looking, and nothing begins."""
        before = self._still()
        ids = [*self._story.sent, "never-sent"]
        for by in dict.fromkeys(USERS):
            await self._look(self._clients[0], ids, by)
            await self._wait(self._clients[0], ids, by, 0.0)
        if (after := self._still()) != before:
            odd = [two for one, two in zip(before, after, strict=True) if one != two]
            self._story.judged(violate, f"L2: after nothing but lookups there is {odd}")

    def _still(self) -> list[Any]:
        rows = [self._story.machine.rows(f"SELECT * FROM {table}") for table in _STILL]
        tally = self._story.machine.rows("SELECT n FROM tally WHERE what = 'accepted'")
        return [*rows, tally, dict(self._story.truth.starts)]

    async def _outlive(self) -> None:
        """Ask while retention removes the records."""
        rng = random.Random(f"{self._story.seed} retention")
        until = self._story.loop.time() + 2 * RETENTION_S
        while self._story.machine.rows("SELECT 1 FROM task LIMIT 1"):
            if self._story.loop.time() > until:
                self._story.judged(violate, "I13: retention leaves records")
                return
            ids = [self._drawn(rng, is_open=0.0) for _ in range(5)]
            await self._wait(self._clients[0], ids, self._user(ids[0], rng), rng.choice(WAITS_S))
            await self._look(self._clients[0], ids, self._user(ids[0], rng))
            await asyncio.sleep(20 * rng.random())
        self._story.ends["outlived by callers"] += 1


async def _answered(answer: Callable[[Request], Awaitable[None]], request: Request) -> None:
    token = looking.set(request.method in _LOOKS)
    try:
        await answer(request)
    finally:
        looking.reset(token)
