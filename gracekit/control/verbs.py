"""Control verbs: what operators can ask of one run.

They come by its door (`control.door`). Unlike requests, they are neither journaled nor tracked.
A verb names the run that it is for, so that a command for a dead run does not affect its
successor. Each answer fits into one line, however much is in flight. Each verb that changes
something is recorded as an incident: who, what, when, which run, why.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

from gracekit import background
from gracekit.clock import Clock
from gracekit.config.values import did_you_mean, format_duration, parse_duration
from gracekit.control.caller_tasks import CallerTasks
from gracekit.control.door_wire import page_of
from gracekit.control.hand_passes import HandPasses
from gracekit.control.health import HealthCheck, Probe
from gracekit.control.orders import BETWEEN_LOOKS_S, Orders, VerbAnswer
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.drain.report import StopRequest
from gracekit.errors import (
    GracekitError,
    InvalidArgumentsError,
    NoSuchMethodError,
    RunEndedError,
    StoreError,
)
from gracekit.journal.tasks import Journal
from gracekit.phase import Phase, ServiceState
from gracekit.process import Threads
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.stacks import StackDump
from gracekit.tracker.task import Order, TrackedTask, Verb
from gracekit.tracker.tracker import Tracker, Waiting

LONGEST_WORD: Final = 100
LONGEST_REASON: Final = 500
LONGEST_RESOURCE: Final = 300
MAX_PAGE: Final = 100
"""Most tasks in one answer; a message may have only so many keys."""
INTAKE_ANSWER_S: Final = 3.0
"""A quiet or resume is answered after so many seconds, even if the transport is not done yet."""
NOTE_TIMEOUT_S: Final = 1.0
"""Seconds that an answer waits until the store has recorded who asked."""


class Control:
    """The verbs of one run, and the orders about its tasks.

    Attributes:
        orders: As given.
        callers: As given.
        quieted_by_signal: Whether SIGTSTP was the last to change the intake.
    """

    def __init__(
        self,
        *,
        run_id: str,
        service: str,
        instance: str,
        phase: Phase,
        tracker: Tracker,
        coordinator: ShutdownCoordinator,
        orders: Orders,
        callers: CallerTasks,
        health: HealthCheck,
        journal: Journal,
        stacks: StackDump,
        stacks_thread: Threads,
        passes: HandPasses,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._run_id = run_id
        self._service = service
        self._instance = instance
        self._phase = phase
        self._tracker = tracker
        self._coordinator = coordinator
        self.orders: Final = orders
        self.callers: Final = callers
        self._health = health
        self._journal = journal
        self._stacks = stacks
        self._stacks_thread = stacks_thread
        self._passes = passes
        self._telemetry = telemetry
        self._clock = clock
        self._unfinished: set[asyncio.Task[None]] = set()  # steps that go on after the answer
        self.quieted_by_signal = False
        self._verbs: dict[str, Callable[[Mapping[str, Any]], Awaitable[VerbAnswer]]] = {
            "status": self._status,
            "health": self._answer_probe,
            "dump": self._dump,
            "drain": self._drain,
            "extend": self._extend,
            "quiet": self._quiet,
            "resume": self._resume,
            "reconcile": self._reconcile,
            "reconciled": self._reconciled,
            **{verb.value: partial(self._order, verb) for verb in Verb},
        }

    async def carry_out(self, name: str, run_id: object, args: Mapping[str, Any]) -> VerbAnswer:
        """Carry out one verb.

        Raises:
            NoSuchMethodError: there is no such verb.
            InvalidArgumentsError: it names no run.
            RunEndedError: it is meant for another run.
            GracekitError: it cannot be carried out now; the message says why.
        """
        verb = self._verbs.get(name)
        if verb is None:
            hint = did_you_mean(name, self._verbs)
            raise NoSuchMethodError(f"no control verb {name[:50]!r}{hint}")
        if not isinstance(run_id, str):
            raise InvalidArgumentsError(
                f"control verb {name!r} names no run: see `gracekit status`"
            )
        if run_id != self._run_id:
            raise RunEndedError(
                f"run {run_id[:50]} of {self._instance} ended meanwhile, and this is run "
                f"{self._run_id} now: look at `gracekit status` again"
            )
        return await verb(args)

    async def _status(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Counts of all tasks in flight, and one page of them.

        Args:
            args: `limit`, at most `MAX_PAGE`, and `after`, the `next` of the previous page; or
                `task_id` and `recipient` for one task only.
        """
        deadline, timeout = self._phase.deadline, self._phase.drain_timeout
        now = self._clock.loop()
        return {
            "run_id": self._run_id,
            "instance": self._instance,
            "phase": self._phase.state.value,
            "not_ready": self._phase.not_ready,
            "stop": self._stop(),
            "in_flight": len(self._tracker),
            "running": self._tracker.running,
            "running_ops": self._tracker.running_ops,
            "queues": await self._health.facts.count_queues(),
            "settles": self._passes.settles,
            "drain_left_s": None if deadline is None else round(max(0.0, deadline - now), 1),
            "drain_timeout_s": None if timeout is None else round(timeout, 1),
            **self._expectation(now),
            **self._page(args, now),
        }

    def _stop(self) -> VerbAnswer | None:
        """Who asks for the drain under way, and why; the store cannot say that if it is broken."""
        request = self._coordinator.stop_request
        if request is None:
            return None
        return {"source": request.source, "by": request.by, "reason": request.reason}

    async def _answer_probe(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Answer the probe that `probe` names: "live", "ready" or "started"."""
        probes = {probe.value: probe for probe in Probe}
        asked = args.get("probe", Probe.READY.value)
        if asked not in probes:
            raise InvalidArgumentsError(
                f"probe {str(asked)[:50]!r} is none of {', '.join(probes)}"
                f"{did_you_mean(str(asked)[:50], probes)}"
            )
        health = await self._health.ask(probes[str(asked)])
        names = {"run_id": self._run_id, "service": self._service, "instance": self._instance}
        return {**names, **health.as_json(), "self_blocked": self._tracker.self_blocked}

    async def _dump(self, _: Mapping[str, Any]) -> VerbAnswer:
        """Tasks and stacks as text. A thread makes it, so that the event loop is not blocked."""
        make = partial(self._stacks.text, now=self._clock.loop(), loop_thread=threading.get_ident())
        return {"run_id": self._run_id, "text": await self._stacks_thread.run(make)}

    def _expectation(self, now: float) -> VerbAnswer:
        """The task that has run longest, and when all running tasks are expected to have ended.

        `expected_s` is None if one of them has no estimate.
        """
        running = [task for task in self._tracker if task.running]
        longest = min(running, key=_since, default=None)
        ends = [end for task in running if (end := task.expected_end(now)) is not None]
        deadline = self._phase.deadline
        return {
            "longest": longest and self._task(longest, now, Waiting(self._tracker)),
            "expected_unknown": len(running) - len(ends),
            "expected_s": round(max(ends) - now, 1) if 0 < len(ends) == len(running) else None,
            "at_risk": 0 if deadline is None else sum(end > deadline for end in ends),
        }

    def _page(self, args: Mapping[str, Any], now: float) -> VerbAnswer:
        if isinstance(task_id := args.get("task_id"), str):
            task = self._tracker.get(task_id, str(args.get("recipient", "")))
            found, more = ([] if task is None else [task]), False
        else:
            limit = max(0, min(MAX_PAGE, _number(args, "limit", MAX_PAGE)))
            found, more = self._tracker.page(after=_number(args, "after", 0), limit=limit)
        waiting = Waiting(self._tracker)
        tasks = page_of([self._task(task, now, waiting) for task in found])
        more = more or len(tasks) < len(found)
        return {"tasks": tasks, "next": found[len(tasks) - 1].serial if more and tasks else None}

    def _task(self, task: TrackedTask, now: float, waiting: Waiting) -> VerbAnswer:
        end = task.expected_end(now)
        return {
            "task_id": task.request_id,
            "recipient": task.recipient,
            "method": task.method,
            "lane": task.lane.value,
            "state": task.state.value,
            "resource": task.shown_resource and ":".join(task.shown_resource)[:LONGEST_RESOURCE],
            "shown_context": task.shown_context,
            "age_s": round(now - _since(task), 1),
            "attempt": task.attempt,
            "expected_s": None if end is None else round(end - now, 1),
            "p95_s": task.usual_s,
            "safe_point_age_s": _age(task.safe_point_at, now),
            "journaled": task.journaled,
            "holds_drain": task.holds_drain,
            "cancelled_by": task.cancel_cause and task.cancel_cause.value,
            "waits_for": waiting.of(task),
            "about": task.about or None,
        }

    async def _drain(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Begin a drain; the deadline of one that is under way stands."""
        timeout = args.get("timeout")
        request = StopRequest(
            source="rollout" if args.get("source") == "rollout" else "operator",
            by=_words(args, "by", LONGEST_WORD),
            reason=_words(args, "reason", LONGEST_REASON),
            final=False,
            at=self._clock.loop(),
            timeout_s=None if timeout is None else parse_duration(timeout),
        )
        if self._coordinator.request_stop(request):
            await self._note("drain", args)
        return {"run_id": self._run_id, "phase": ServiceState.DRAINING.value}

    async def _extend(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Move the deadline of the drain later.

        Args:
            args: `more`, a duration; `by` and `reason` as for each verb.
        """
        if (more := args.get("more")) is None:
            raise InvalidArgumentsError("verb 'extend' needs more, a duration such as '5m'")
        more_s = parse_duration(more)
        left_s = self._coordinator.extend(more_s)
        await self._note("extend", args, what=f" ({format_duration(more_s)} more)")
        return {
            "run_id": self._run_id,
            "phase": ServiceState.DRAINING.value,
            "drain_left_s": left_s,
        }

    async def _quiet(self, args: Mapping[str, Any]) -> VerbAnswer:
        is_quiet = self.quieted_by_signal and self._phase.state is ServiceState.QUIET
        before, self.quieted_by_signal = self.quieted_by_signal, False  # SIGCONT must not open it
        if is_quiet and not self._coordinator.stop_requested:
            await self._note("quiet", args)
            return {"run_id": self._run_id, "phase": self._phase.state.value}
        try:
            return await self.close_intake(args)
        except GracekitError:
            self.quieted_by_signal = before
            raise

    async def _resume(self, args: Mapping[str, Any]) -> VerbAnswer:
        self.quieted_by_signal = False
        return await self.open_intake(args)

    async def close_intake(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Take no new requests; *args* as of each verb. Raises GracekitError if it cannot be."""
        await self._wait_for(self._coordinator.quiet(), INTAKE_ANSWER_S)
        await self._note("quiet", args)
        if self._phase.state is not ServiceState.QUIET:
            raise GracekitError(
                f"the intake was closed, and now the service is {self._phase.state.value}; its log "
                "says why"
            )
        return {"run_id": self._run_id, "phase": self._phase.state.value}

    async def open_intake(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Take new requests again; as `close_intake`."""
        await self._wait_for(self._resume_drain_or_quiet(), INTAKE_ANSWER_S)
        await self._note("resume", args)
        return {"run_id": self._run_id, "phase": ServiceState.SERVING.value}

    async def _resume_drain_or_quiet(self) -> None:
        """Resume; if a drain is resumed, wait until it has ended, or was made final meanwhile."""
        request = self._coordinator.stop_request
        await self._coordinator.resume()
        for _ in range(int(INTAKE_ANSWER_S / BETWEEN_LOOKS_S)):
            is_undone = self._coordinator.stop_request in {None, request}
            if self._phase.state is not ServiceState.DRAINING or not is_undone:
                return
            await asyncio.sleep(BETWEEN_LOOKS_S)

    async def _reconcile(self, args: Mapping[str, Any]) -> VerbAnswer:
        """Begin a pass over resources; args as in `HandPasses.begin`."""
        answer = self._passes.begin(args)
        if not answer["dry_run"]:
            only = args.get("resource") or args.get("kind")
            await self._note("reconcile", args, what=f" ({only})" if only else "")
        return {"run_id": self._run_id, **answer}

    async def _reconciled(self, args: Mapping[str, Any]) -> VerbAnswer:
        """The progress of a pass; args as in `HandPasses.look`."""
        return {"run_id": self._run_id, **await self._passes.look(args)}

    async def _note(self, verb: str, args: Mapping[str, Any], *, what: str = "") -> None:
        """Record who asked for what, and why, after it was done, because the store may be slow.

        The answer waits `NOTE_TIMEOUT_S` at most; the record is still written as soon as the store
        takes it.
        """
        by, reason = _words(args, "by", LONGEST_WORD), _words(args, "reason", LONGEST_REASON)
        self._telemetry.emit("run.ordered", verb=verb, by=by, reason=reason)
        await self._wait_for(self._record(verb, f"{by}: {reason}{what}"), NOTE_TIMEOUT_S)

    async def _record(self, verb: str, detail: str) -> None:
        try:
            await self._journal.tally(f"operator_{verb}", detail=detail)
        except StoreError as error:
            what = f"the record of {verb} by {detail}"
            self._telemetry.emit("store.error", what=what, error=repr(error))

    async def _wait_for(self, step: Coroutine[Any, Any, None], within_s: float) -> None:
        """Run *step*, and wait for it *within_s* seconds at most; it then goes on by itself."""
        task = background.run_beside(self._unfinished, step)
        await asyncio.wait({task}, timeout=within_s)
        if task.done():
            task.result()

    async def _order(self, verb: Verb, args: Mapping[str, Any]) -> VerbAnswer:
        task_id = args.get("task_id")
        if not isinstance(task_id, str):
            raise InvalidArgumentsError(f"verb {verb.value!r} needs task_id, the task's request id")
        if _writable(task_id) != task_id:
            raise InvalidArgumentsError("task_id has half of a character: send the whole id")
        order = Order(
            verb=verb,
            by=_words(args, "by", LONGEST_WORD),
            reason=_writable(str(args.get("reason", "")))[:LONGEST_REASON],
        )
        replaced = args.get("args")
        if not (replaced is None or (isinstance(replaced, dict) and verb is Verb.RETRY)):
            raise InvalidArgumentsError(
                "args must be an object, and are for the verb 'retry' alone"
            )
        recipient = str(args.get("recipient", ""))
        answer = await self.orders.carry_out(task_id, recipient, order, replaced)
        return {"run_id": self._run_id, "task_id": task_id, **answer}


def _age(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(now - moment, 1)


def _since(task: TrackedTask) -> float:
    return task.tracked_at if task.started_at is None else task.started_at


def _words(args: Mapping[str, Any], name: str, longest: int) -> str:
    """The argument `by` or `reason`; a default text if the operator has not given it."""
    unsaid = {"by": "operator", "reason": "no reason given"}
    return _writable(str(args.get(name) or unsaid[name]))[:longest]


def _writable(text: str) -> str:
    """*text* as the store takes it: with escapes for surrogates, which stand for wrong UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _number(args: Mapping[str, Any], name: str, default: int) -> int:
    value = args.get(name)
    return default if value is None or not isinstance(value, int) else value
