"""What callers ask about their requests: state, result, cancel. The first two change nothing.

A question comes by the ops lane and is no task: it has no row and takes no slot. One that waits
for the end of tasks is answered when they have ended, when its time is over, or when a drain
begins. If this process ends meanwhile it is not answered, and its client asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.config.values import words_in
from gracekit.control.orders import Orders
from gracekit.errors import (
    ConflictingRequestError,
    Draining,
    GracekitError,
    InvalidArgumentsError,
    NoSuchMethodError,
    RpcError,
    StoreError,
    UnknownTaskError,
)
from gracekit.journal.lookups import LookedUp, looked_up
from gracekit.journal.rows import Address, Outcome, caller_hash
from gracekit.journal.tasks import Journal
from gracekit.phase import Phase
from gracekit.request.answers import Answers
from gracekit.request.outcomes import failed, succeeded
from gracekit.request.parked_tasks import PAGE_BYTES, PAGE_KEYS
from gracekit.rpc.callers.questions import ASK_S
from gracekit.rpc.callers.task_lookups import LONGEST_REASON, MOST_IDS, MOST_WAIT_S
from gracekit.rpc.message import CallerVerb, Request
from gracekit.rpc.method_table import MethodTable
from gracekit.tracker.task import Order, TaskState, Verb
from gracekit.tracker.tracker import Tracker

MOST_WAITS: Final = 100
"""Most questions that wait in one run; others are answered at once."""
LOOK_EVERY_S: Final = 1.0
"""Seconds between looks at what siblings have ended, while a question waits."""
BETWEEN_LOOKS_S: Final = 0.05
"""Seconds between looks at what this run has ended."""
LONGEST_NAME: Final = 100


class Question(msgspec.Struct, kw_only=True, eq=False):
    """A question as it came.

    Attributes:
        address: Where to answer.
        caller: Hash of the caller.
        until: Loop time until which it waits.
    """

    address: Address
    verb: CallerVerb
    context: Mapping[str, Any]
    caller: str
    ids: list[str]
    results: bool
    reason: str
    until: float


class _Args(msgspec.Struct):
    """The arguments of a question."""

    ids: list[str]
    results: bool = False
    wait_s: float = 0.0
    reason: str = ""


class CallerTasks:
    """Answers the callers of one service.

    Args:
        orders: Carries out a cancel.
        host: Name of this host.
        is_apart: Whether other hosts of the service have a store of their own.
        is_on: Whether the service answers its callers at all.
        who: Keys of a caller's context by which it is known.
    """

    def __init__(
        self,
        journal: Journal,
        answers: Answers,
        orders: Orders,
        methods: MethodTable,
        tracker: Tracker,
        phase: Phase,
        clock: Clock,
        *,
        host: str,
        who: str,
        is_apart: bool,
        is_on: bool,
    ) -> None:
        self._journal = journal
        self._answers = answers
        self._orders = orders
        self._methods = methods
        self._tracker = tracker
        self._phase = phase
        self._clock = clock
        self._host = host
        self._who = words_in(who)
        self._is_apart = is_apart
        self._is_on = is_on
        self._waits: dict[Question, None] = {}
        self._looking: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Answer the questions that still wait."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        await self._end_waits(list(self._waits))

    async def take(self, request: Request) -> None:
        """Answer a question, now or once what it waits for has ended."""
        if request.reply is None:
            return
        reply, until = request.reply, self._clock.wall() + MOST_WAIT_S + ASK_S
        address = Address(queue=reply.queue, msg_id=reply.msg_id, expires_at=until)
        try:
            await self._take(self._question(request, address))
        except StoreError:
            pass  # its client asks again
        except RpcError as error:
            await self._answers.refuse(address, error)

    def _question(self, request: Request, address: Address) -> Question:
        if not self._is_on:
            raise NoSuchMethodError("the service answers no questions of its callers")
        try:
            asked = msgspec.convert(request.args, _Args)
        except msgspec.ValidationError as error:
            raise InvalidArgumentsError(f"{request.method}: {error}") from None
        if len(asked.ids) > MOST_IDS:
            raise InvalidArgumentsError(f"{len(asked.ids)} ids in a question: {MOST_IDS} at most")
        return Question(
            address=address,
            verb=CallerVerb(request.method),
            context=request.context,
            caller=caller_hash(request.context, self._who),
            ids=asked.ids,
            results=asked.results,
            reason=asked.reason[:LONGEST_REASON].replace("\0", "\\0"),
            until=self._clock.loop() + min(max(asked.wait_s, 0.0), MOST_WAIT_S),
        )

    # -- answers ------------------------------------------------------------------------

    async def _take(self, question: Question) -> None:
        """Answer *question*, or let it wait.

        Raises:
            RpcError: it is refused.
            StoreError: the store is away.
        """
        if question.verb is CallerVerb.OUTCOME:
            await self._send_outcome(question)
            return
        if question.verb is CallerVerb.CANCEL:
            question.ids = await self._cancel(question)
        found = await self._found(question, most=PAGE_BYTES if question.results else -1)
        if self._may_wait(question, found):
            self._waits[question] = None
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look(), name="gracekit-look-ups")
        else:
            await self._send(question, found)

    async def _send(self, question: Question, found: list[LookedUp]) -> None:
        answer = {"host": self._host, "is_apart": self._is_apart} | self._page(found)
        await self._answers.send(question.address, succeeded(question.verb.value, answer))

    def _may_wait(self, question: Question, found: list[LookedUp]) -> bool:
        ended = sum(one.finished_at is not None for one in found)
        is_known = len(found) == len(question.ids) or not self._is_apart  # another host may know
        has_room = len(self._waits) < MOST_WAITS and not self._is_over(question)
        waits = ended < len(question.ids) and is_known and has_room
        return question.verb is CallerVerb.LOOK and waits

    def _is_over(self, question: Question) -> bool:
        return question.until <= self._clock.loop() or self._phase.draining

    async def _found(self, question: Question, *, most: int = -1) -> list[LookedUp]:
        """The tasks of the caller; to cancel, also others whose method lets anyone do that."""
        journal, is_cancel = self._journal, question.verb is CallerVerb.CANCEL
        caller = "*" if is_cancel else question.caller
        found: dict[str, LookedUp] = {}
        for row in await looked_up(
            journal.engine, journal.service, question.ids, caller, most=most
        ):
            if row.caller_hash == question.caller or self._allows(row) == "anyone":
                found.setdefault(row.request_id, row)
        return list(found.values())

    async def _send_outcome(self, question: Question) -> None:
        """Answer as the call itself would be."""
        for row in await self._found(question, most=2**31):
            if (outcome := _outcome(row)) is not None:
                await self._answers.send(question.address, outcome)
                return
        raise UnknownTaskError("it is not on record any more, or runs again")

    def _page(self, found: list[LookedUp]) -> dict[str, Any]:
        """The tasks in an answer, and their outcomes as far as they fit into one message."""
        tasks = {one.request_id: _shown(one) for one in found}
        outcomes: dict[str, str] = {}
        text = json.dumps(tasks)
        size, keys = len(json.dumps(text)), text.count(":")
        for one in found:
            if (outcome := _outcome(one)) is None:
                continue
            said = self._answers.written(outcome)
            size += len(json.dumps(json.dumps(said)))
            keys += said.count(":") + 1
            if size > PAGE_BYTES or keys > PAGE_KEYS:
                break  # its client asks again for those that are left out
            outcomes[one.request_id] = said
        return {"tasks": tasks, "outcomes": outcomes}

    # -- waits --------------------------------------------------------------------------

    async def _look(self) -> None:
        """Look for what has ended whenever a task has ended here, and each second."""
        while self._waits:
            now = self._clock.loop()
            first = min(question.until for question in self._waits)
            await self._tracker.wait_change(deadline=min(first, now + LOOK_EVERY_S))
            await asyncio.sleep(BETWEEN_LOOKS_S)
            ended = await self._ended([one for question in self._waits for one in question.ids])
            await self._end_waits(
                [
                    question
                    for question in self._waits
                    if self._is_over(question)
                    or all((one, question.caller) in ended for one in question.ids)
                ]
            )

    async def _ended(self, ids: Sequence[str]) -> set[tuple[str, str]]:
        """Those of *ids* that have ended, each with the hash of its caller, by one look for all."""
        journal = self._journal
        try:
            rows = await looked_up(journal.engine, journal.service, list(dict.fromkeys(ids)), "*")
        except StoreError:  # the questions wait on
            return set()
        first: dict[tuple[str, str], LookedUp] = {}  # what was accepted comes before refusals
        for row in rows:
            first.setdefault((row.request_id, row.caller_hash), row)
        return {key for key, row in first.items() if row.finished_at is not None}

    async def _end_waits(self, questions: Sequence[Question]) -> None:
        for question in questions:
            del self._waits[question]
        await asyncio.gather(*map(self._end_wait, questions))

    async def _end_wait(self, question: Question) -> None:
        with contextlib.suppress(StoreError):  # its client asks again
            found = await self._found(question, most=PAGE_BYTES if question.results else -1)
            await self._send(question, found)

    # -- cancels ------------------------------------------------------------------------

    def _allows(self, row: LookedUp) -> str:
        try:
            method = self._methods.resolve(row.namespace, row.method, row.version)
        except RpcError:
            return "nobody"
        return method.options.allow_cancel

    async def _cancel(self, question: Question) -> list[str]:
        """End the tasks that this caller may end; those that have ended stay as they are.

        Returns:
            The ids that were on record. One that is accepted meanwhile was not cancelled.

        Raises:
            RpcError: the method does not allow it, or not to this caller; or it is not recorded.
        """
        user = question.context.get("user_id")
        rows = await self._found(question)
        for row in rows:
            await self._check_may_cancel(row, user)
            if row.finished_at is not None:
                continue
            who = f"user {str(user)[:LONGEST_NAME]}" if user else "a caller"
            order = Order(verb=Verb.CANCEL, by=who, reason=question.reason, source="caller")
            try:
                await self._orders.carry_out_anywhere(row.request_id, order)
            except StoreError:
                raise
            except GracekitError as error:
                if any(one.finished_at is None for one in await self._found(question)):
                    raise RpcError(str(error)) from error
        return [row.request_id for row in rows]

    async def _check_may_cancel(self, row: LookedUp, user: object) -> None:
        allowed = self._allows(row)
        if allowed == "nobody":
            raise RpcError(
                f"{row.method}() is not cancelled by its callers: it is declared without "
                "allow_cancel"
            )
        if allowed == "anyone":
            return
        if not user:
            raise RpcError(
                f"{row.method}() is cancelled by its sender alone, and the request names none: "
                "say prepare(context={'user_id': ...}) with the user that has sent it"
            )
        # A caller may be known by other keys (GRACEKIT_DEDUPE_CONTEXT) than the user's id.
        known = await self._journal.known(row.request_id, "")
        sender = user if known is None or known.context is None else known.context.get("user_id")
        if sender != user:
            raise RpcError(
                f"{row.method}() is cancelled by its sender alone, which is another user"
            )


_REFUSED: Final[Mapping[str | None, type[RpcError]]] = {
    "arguments": InvalidArgumentsError,
    "unknown_method": NoSuchMethodError,
    "conflicting_id": ConflictingRequestError,
    "draining": Draining,
}
"""The error for the caller of a refused request, by the reason on record."""


def _outcome(row: LookedUp) -> Outcome | None:
    """How a task has ended, or that its request was refused; None if it has not."""
    if row.state is TaskState.REJECTED:
        error = _REFUSED.get(row.reason, RpcError)(row.detail or "it was refused")
        return failed(error, TaskState.REJECTED)
    return row.outcome


def _shown(row: LookedUp) -> dict[str, Any]:
    """A task as `rpc.callers.task_lookups.TaskInfo` reads it."""
    names = (
        "method", "reason", "attempts", "failures", "accepted_at", "started_at", "due_at",
        "finished_at", "progress",
    )  # fmt: skip
    shown = {name: value for name in names if (value := getattr(row, name)) is not None}
    if row.finished_at is not None:
        shown.pop("due_at", None)
    return shown | {"task_id": row.request_id, "state": row.state.value}
