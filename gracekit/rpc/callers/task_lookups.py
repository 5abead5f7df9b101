"""What callers ask about requests that they have sent: state, result, cancel.

None of these starts anything. One server is asked, which reads its store. If the hosts of the
service have a store each, all of them are asked, and the one that knows the request answers.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.config.values import parse_duration
from gracekit.errors import (
    BadMessageError,
    CallTimeoutError,
    InvalidArgumentsError,
    NoAnswerError,
    NoSuchMethodError,
    Undeliverable,
    UnknownTaskError,
    UnsupportedVersionError,
)
from gracekit.rpc.call_options import CallOptions
from gracekit.rpc.callers.questions import ASK_S, Questions
from gracekit.rpc.failures import rebuild
from gracekit.rpc.message import TASKS_NAMESPACE, CallerVerb, JsonObject, Reply
from gracekit.rpc.oslo_wire import MAX_NAME, decode_reply

MOST_IDS: Final = 500
"""Most ids in one question."""
LONGEST_REASON: Final = 500
MOST_WAIT_S: Final = 3.0
"""Longest wait of a server for one question. It is asked again then, as it may have died."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a task has come, as its handler has said by `ctx.progress`.

    Attributes:
        done: So much of the work is done.
        of: So much there is in all; None if that is not known.
        note: What it is at; empty for nothing said.
        at: Wall time at which it said so, in seconds since 1970.
    """

    done: int | float
    of: int | float | None
    note: str
    at: float


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may know of a task. Times are wall times in seconds since 1970.

    Attributes:
        task_id: The request id.
        method: Name of the method.
        state: A `TaskState` as a word: accepted, running, pending, handed_over, succeeded, failed,
            cancelled, errored or rejected.
        reason: Why, in a word, if it is errored, cancelled, pending or rejected.
        attempts: How often its handler was begun.
        failures: How many of its attempts have failed and were tried again.
        accepted_at: When it was accepted, or refused.
        started_at: When its last attempt began; None before the first.
        due_at: Before which it does not begin; None if nothing but a place is missing.
        finished_at: When it ended; None if it has not.
        progress: The last that its handler has said; None if it has said nothing.
    """

    task_id: str
    method: str
    state: str
    attempts: int
    accepted_at: float
    reason: str | None = None
    failures: int = 0
    started_at: float | None = None
    due_at: float | None = None
    finished_at: float | None = None
    progress: Progress | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended, so that its result can be had."""
        return self.finished_at is not None


class _Answer(msgspec.Struct, kw_only=True):
    """What one server has answered.

    Attributes:
        is_apart: Whether other hosts of the service have a store of their own.
        tasks: What it knows, by request id.
        outcomes: Of ended ones, as far as they fit: the reply that a call would have had, as text.
    """

    host: str
    is_apart: bool
    tasks: dict[str, TaskInfo]
    outcomes: dict[str, str] = {}


class Lookups:
    """The questions of one client about its requests.

    Args:
        asker: Asks the service.
        clock: Measures waits.
        exceptions: Classes to rebuild failures with.
        max_body_bytes: As of the client.
    """

    def __init__(
        self,
        asker: Questions,
        clock: Clock,
        exceptions: Mapping[str, type[Exception]],
        *,
        max_body_bytes: int,
    ) -> None:
        self._asker = asker
        self._clock = clock
        self._exceptions = exceptions
        self._max_body_bytes = max_body_bytes

    async def states(self, options: CallOptions, ids: Iterable[str]) -> dict[str, TaskInfo]:
        """What is known of requests, without those that are not known."""
        search = _Search(self, options, _checked(ids))
        await search.look(0.0, results=False)
        if search.no_answer is not None:
            raise search.no_answer
        return search.tasks

    async def results(
        self, options: CallOptions, ids: Iterable[str], wait: str | float
    ) -> dict[str, Any]:
        """The result of each request, or an exception to raise: also if it has not ended."""
        wait_s = parse_duration(wait)
        until = self._clock.loop() + wait_s
        search = _Search(self, options, _checked(ids))
        pauses = backoff.LOOKUP.pauses(self._clock)
        while True:
            begun = self._clock.loop()
            asked_s = 0.0 if search.is_paged else min(MOST_WAIT_S, max(0.0, until - begun))
            await search.look(asked_s, results=True)
            now = self._clock.loop()
            if search.is_paged:
                continue
            if not search.open or now >= until:
                return {one: self._value(search.answer(one, wait)) for one in search.ids}
            if now - begun < asked_s:  # the server did not wait, or not for so long
                await asyncio.sleep(min(next(pauses), until - now))

    def _value(self, answer: Reply | Exception) -> Any:
        if isinstance(answer, Exception):
            return answer
        return (
            answer.result if answer.failure is None else rebuild(answer.failure, self._exceptions)
        )

    async def cancel(self, options: CallOptions, task_id: str, reason: str) -> TaskInfo:
        """End a request, as its method allows."""
        if not isinstance(reason, str):
            raise InvalidArgumentsError(f"reason={reprlib.repr(reason)} must be a text")
        args = {"ids": list(_checked([task_id])), "reason": reason[:LONGEST_REASON]}
        answers = [await self.ask(options, options.host, CallerVerb.CANCEL, args)]
        if not answers[0].tasks and answers[0].is_apart and options.host is None:
            answers = await self.ask_all(options, CallerVerb.CANCEL, args)
        for answer in answers:
            if task_id in answer.tasks:
                return answer.tasks[task_id]
        raise unknown(task_id)

    async def outcome(self, options: CallOptions, host: str | None, task_id: str) -> Reply:
        """The whole answer of one request, which was too large beside others."""
        return await self._reply(options, host, CallerVerb.OUTCOME, {"ids": [task_id]})

    async def ask(
        self, options: CallOptions, host: str | None, verb: CallerVerb, args: JsonObject
    ) -> _Answer:
        """Ask one server, of *host* or any; it may take *args'* `wait_s` longer."""
        reply = await self._reply(options, host, verb, args)
        if reply.failure is not None:
            raise self._refused(reply)
        return _read(reply)

    async def _reply(
        self, options: CallOptions, host: str | None, verb: CallerVerb, args: JsonObject
    ) -> Reply:
        within_s = ASK_S + args.get("wait_s", 0.0)
        asking = self._asker.asking(
            verb.value, args, namespace=TASKS_NAMESPACE, context=options.context
        )
        try:
            async with asyncio.timeout(within_s), asking as asked:
                await asked.send(host)
                return await asked.answer()
        except TimeoutError as error:
            known = (
                "it may have been carried out" if verb is CallerVerb.CANCEL else "nothing is known"
            )
            raise NoAnswerError(
                f"no server of {self._asker.ops_topic!r}{f' on {host}' if host else ''} has "
                f"answered, so {known}: ask again when the service runs"
            ) from error
        except Undeliverable as error:
            raise NoAnswerError(f"no server could be asked: {error}") from error

    async def ask_all(
        self, options: CallOptions, verb: CallerVerb, args: JsonObject
    ) -> list[_Answer]:
        """Ask every server that runs now, until each request was known to one, or for `ASK_S`."""
        answers: list[_Answer] = []
        missing = set(args["ids"])
        asking = self._asker.asking(
            verb.value, args, namespace=TASKS_NAMESPACE, context=options.context
        )
        try:
            async with asyncio.timeout(ASK_S), asking as asked:
                await asked.send_to_all()
                while missing:
                    if (reply := await asked.answer()).failure is not None:
                        raise self._refused(reply)
                    answers.append(_read(reply))
                    missing -= answers[-1].tasks.keys()
        except (TimeoutError, Undeliverable):
            pass
        return answers

    def _refused(self, reply: Reply) -> Exception:
        assert reply.failure is not None
        error = rebuild(reply.failure, {})
        if isinstance(error, NoSuchMethodError | UnsupportedVersionError):
            return type(error)(
                "the service answers no questions of its callers about their requests: it is "
                'declared without Service(..., task_api="callers"), or older'
            )
        return error

    def value_of(self, text: str) -> Reply:
        """The reply in an outcome that was sent beside others."""
        return decode_reply(text.encode(), max_bytes=self._max_body_bytes)


class _Search:
    """What one question about several requests has found so far.

    Attributes:
        tasks: What is known, by request id.
        open: Those whose answer is not known yet.
        no_answer: Why a question of the last look was not answered; None if each was.
        is_paged: Whether some that have ended did not fit into the answers of the last look.
    """

    def __init__(self, lookups: Lookups, options: CallOptions, ids: Sequence[str]) -> None:
        self.ids = ids
        self.tasks: dict[str, TaskInfo] = {}
        self.open = dict.fromkeys(ids)
        self.no_answer: NoAnswerError | None = None
        self.is_paged = False
        self._lookups = lookups
        self._options = options
        self._hosts: dict[str, str] = {}  # of those that another store has
        self._replies: dict[str, Reply] = {}

    async def look(self, wait_s: float, *, results: bool) -> None:
        """Ask for those that are open; a server answers after *wait_s* at the latest."""
        groups: dict[str | None, list[str]] = {}
        for one in self.open:
            groups.setdefault(self._hosts.get(one, self._options.host), []).append(one)
        pages = [
            (host, ids[at : at + MOST_IDS])
            for host, ids in groups.items()
            for at in range(0, len(ids), MOST_IDS)
        ]
        self.no_answer, self.is_paged = None, False
        asks = [self._ask(host, page, wait_s, results=results) for host, page in pages]
        await asyncio.gather(*asks)

    async def _ask(self, host: str | None, ids: list[str], wait_s: float, *, results: bool) -> None:
        args = {"ids": ids, "results": results, "wait_s": wait_s}
        try:
            answer = await self._lookups.ask(self._options, host, CallerVerb.LOOK, args)
            await self._note(answer, host, results=results)
            missing = [one for one in ids if one not in answer.tasks]
            if missing and answer.is_apart and self._options.host is None:
                args = {"ids": missing, "results": results, "wait_s": 0.0}
                for found in await self._lookups.ask_all(self._options, CallerVerb.LOOK, args):
                    await self._note(found, found.host, results=results)
        except NoAnswerError as error:
            self.no_answer = error
            for one in ids:
                self._hosts.pop(one, None)

    async def _note(self, answer: _Answer, host: str | None, *, results: bool) -> None:
        self.tasks |= answer.tasks
        if answer.is_apart:
            self._hosts |= dict.fromkeys(answer.tasks, answer.host)
        if not results:
            return
        for one, text in answer.outcomes.items():
            self._close(one, self._lookups.value_of(text))
        left_out = [one for one in answer.tasks if one in self.open and self.tasks[one].ended]
        if left_out and not answer.outcomes:  # not even one has fitted beside the others
            one = left_out.pop(0)
            of = self._hosts.get(one, host)
            self._close(one, await self._lookups.outcome(self._options, of, one))
        self.is_paged = self.is_paged or bool(left_out)

    def _close(self, task_id: str, reply: Reply) -> None:
        self._replies[task_id] = reply
        self.open.pop(task_id, None)

    def answer(self, task_id: str, wait: str | float) -> Reply | Exception:
        """What became of one request."""
        if (reply := self._replies.get(task_id)) is not None:
            return reply
        if (info := self.tasks.get(task_id)) is None or info.ended:
            return self.no_answer or unknown(task_id)
        due = "" if info.due_at is None else " and not due yet"
        error = CallTimeoutError(
            f"task {task_id} ({info.method}) has not ended within {parse_duration(wait):g} s: it "
            f"is {info.state}{due}; ask again, with a longer wait"
        )
        error.request_id = task_id
        return error


def _read(reply: Reply) -> _Answer:
    try:
        return msgspec.convert(reply.result, _Answer, strict=False)
    except msgspec.ValidationError as error:
        raise BadMessageError(f"the answer about tasks cannot be read: {error}") from None


def _checked(ids: Iterable[str]) -> Sequence[str]:
    given: list[object] = [ids] if isinstance(ids, str) else list(ids)
    texts = [one for one in given if isinstance(one, str) and 0 < len(one) <= MAX_NAME]
    if isinstance(ids, str) or len(texts) < len(given):
        raise InvalidArgumentsError(
            f"{reprlib.repr(ids)} are no request ids: pass a list of texts, as cast() returns them"
        )
    return list(dict.fromkeys(texts))


def unknown(task_id: str) -> UnknownTaskError:
    """The error about a request that no server knows."""
    error = UnknownTaskError(
        f"no task {task_id[:100]!r} of this caller is on record: it is still in the queue; or a "
        "host has it that has a store of its own and does not answer now; or its method is "
        "`requeue`, which keeps no record; or it was removed after GRACEKIT_RETENTION"
    )
    error.request_id = task_id
    return error
