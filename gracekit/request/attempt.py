"""One attempt: calls the handler and turns whatever happens into one `AttemptEnd`.

No exception of the handler escapes, not even SystemExit or a stray cancellation.
The end is judged first by what gracekit did to the task, and only then by what
the handler returned or raised, as a handler can swallow, wrap or replace any
exception. A thread cannot be stopped, so an attempt in a thread ends when the
thread has returned, even if the coroutine that waits for it is cancelled.

A caller without `pending=True` gets the same class of failure whether a task that raised NoCapacity
was parked or not. So the text of the failure says why it was not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from gracekit import background
from gracekit.clock import Clock
from gracekit.config.values import parse_duration
from gracekit.errors import ConfigError, NoCapacity, Parked, TryAgain, checked_request
from gracekit.journal.rows import Outcome
from gracekit.process import NoThreadError, Threads
from gracekit.request.answers import Answers
from gracekit.request.calls import WorkerCall, call, end_of, in_thread
from gracekit.request.context import Context, SafePointStop, Services
from gracekit.request.current import enter, leave
from gracekit.request.events import TaskEvents
from gracekit.request.heartbeats import Heartbeats
from gracekit.request.lanes import Job, Scheduler
from gracekit.request.outcomes import (
    failed,
    failure_from,
    has_left_out,
    not_parked,
    ordered,
    succeeded,
    timeout_error,
)
from gracekit.request.tracked import TrackedCall
from gracekit.rpc.failures import is_expected, is_foreign, words_of
from gracekit.rpc.method_options import MethodOptions
from gracekit.rpc.methods import Method
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import (
    OUT_OF_TIME,
    CancelCause,
    History,
    Interruption,
    Order,
    TaskState,
    TrackedTask,
)
from gracekit.tracker.tracker import Tracker

_EXITS: Final = (SystemExit, KeyboardInterrupt)
_DATA: Final = (dict, str, list, int, float, type(None))  # what most handlers return


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended: with an outcome, or cut.

    Attributes:
        outcome: None if it was cut.
        cut: None if it was not cut.
        interrupted_by: What the handler raised, if something other than gracekit cancelled it; or
            why it was not called, if no thread could be started for it.
        expected: Whether `expect()` was called for what the handler raised: it is logged as DEBUG.
        requested: The missing capacity, if the task may wait for it as PENDING; else None.
        again_s: Seconds until the task is tried again, if it may be; else None.
    """

    outcome: Outcome | None = None
    cut: Interruption | None = None
    interrupted_by: str = ""
    expected: bool = False
    requested: Mapping[str, Any] | None = None
    again_s: float | None = None

    @property
    def is_put_off(self) -> bool:
        """Whether the handler was not called, because no thread could be started for it."""
        return self.cut is Interruption.SAFE_POINT and bool(self.interrupted_by)


_NO_END: Final = AttemptEnd()


class Attempts:
    """Runs handlers, from the record of an attempt to its end.

    Args:
        history: Records how long each attempt took.
    """

    def __init__(
        self,
        services: Services,
        answers: Answers,
        heartbeats: Heartbeats,
        events: TaskEvents,
        scheduler: Scheduler,
        telemetry: Telemetry,
        *,
        history: History,
    ) -> None:
        self._services = services
        self._scheduler = scheduler
        self._tracker: Tracker = services.tracker
        self._clock = services.clock
        self._answers = answers
        self._heartbeats = heartbeats
        self._events = events
        self._telemetry = telemetry
        self._history = history
        self._early: set[asyncio.Task[Any]] = set()

    def mark_running(self, job: Job) -> None:
        """Note that the attempt is on record: the job waits no more, and a drain waits for it."""
        task = job.task
        if job.delivery is not None and task.journaled:
            job.delivery.body = b""  # not needed any more; a handler may run for hours
        task.advance(TaskState.RUNNING)
        task.started_at = self._clock.loop()
        task.handler = asyncio.current_task()
        timeout = job.method.options.timeout_s
        task.deadline = None if timeout is None else task.started_at + timeout
        task.history = self._history.of(job.method.namespace, task.method)
        job.gate.entering.pop(job, None)
        if job.claimed_ahead:  # saves a call: a delivery is never claimed ahead
            job.begin_claimed()
        self._tracker.started(task)

    async def run(self, job: Job) -> AttemptEnd:
        """Call the handler of *job*, within the timeout of its method."""
        task, method = job.task, job.method
        timer = None
        if task.deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(task.deadline, self._time_out, job)
        traced = self._telemetry.tracing.begin(
            job.caller,
            method=task.method,
            operation=_operation_of(job),
            message_id=task.request_id,
            attempt=task.attempt,
            queue=None if job.delivery is None else job.delivery.queue.name,
            shown=task.shown_context,
        )
        job.traced = traced
        self._events.started(job)
        ctx = Context(
            task,
            self._services,
            args=job.args,
            caller=job.caller,
            method=(method.namespace, method.name, method.version),
            expires_at=job.expires_at,
            monitor_s=None if job.reply is None else job.reply.monitor_s,
            version=job.version,
        )
        end = _NO_END
        task.children = {}
        try:
            end = await run_attempt(method, ctx, task, job.values, job.gate.threads, self._services)
            if task.children or task.child_error is not None:
                end = await self._end_of_children(job, end)
            if end.interrupted_by:
                self._events.interrupted(job, end.interrupted_by)
            elif end.outcome is not None and has_left_out(end.outcome):
                self._events.result_left_out(job, end.outcome.detail or "")
            return end
        finally:
            task.children = None
            if timer is not None:
                timer.cancel()
            if traced is not None:
                traced.end(error_type=error_type_of(end), cut=end.cut and end.cut.value)

    async def _end_of_children(self, job: Job, end: AttemptEnd) -> AttemptEnd:
        """Wait for the tracked work that the handler has left, and judge the attempt by all.

        The handler's slots are free meanwhile. The line and the lease of its resource are not.
        """
        task = job.task
        self._scheduler.leave_to_resource(job)
        while task.children and task.cut is None:
            await self._tracker.wait_children(task)
            if task.handler is not None and task.handler.cancelling():
                await _take_cancellations(task.handler)  # another child may begin meanwhile
        error, task.child_error = task.child_error, None
        has_succeeded = end.outcome is not None and end.outcome.state is TaskState.SUCCEEDED
        if not has_succeeded and end is not _STOPPED:
            return end
        if error is None or isinstance(error, SafePointStop):
            return _STOPPED if task.stopped else end
        task.stopped = False  # what the work did counts for more
        return _judge(task, job.method, error, self._services)

    def note_end(self, job: Job, end: AttemptEnd, outcome: Outcome) -> None:
        """Add an attempt that was not cut to the history of its method, and to the log."""
        task = job.task
        seconds = self._clock.loop() - (task.started_at or 0.0)
        if outcome.state is TaskState.SUCCEEDED and task.attempt == 1 and task.history is not None:
            task.history.add(seconds)
        self._events.ended(job, outcome, ran_s=round(seconds, 3), expected=end.expected)

    # -- ended from outside -------------------------------------------------------------

    def obey(self, job: Job, order: Order) -> None:
        """End a job as an operator orders: cancel its handler, or its wait for a turn."""
        task = job.task
        task.order = order
        task.cancel(CancelCause.OPERATOR)
        if job.waiting and task.handler is not None:
            task.handler.cancel(CancelCause.OPERATOR.value)
        elif task.running:
            self._answer_early(job, ordered(str(task), order, task.state))

    def _time_out(self, job: Job) -> None:
        job.task.cancel(CancelCause.TIMEOUT)
        self._answer_early(job, failed(timeout_error(job.method)))

    def _answer_early(self, job: Job, outcome: Outcome) -> None:
        """Answer the caller now; the task keeps slot and lease until its handler has returned.

        The reply is then off the record, so that recovery does not answer the caller again if
        this process dies.
        """
        is_open = job.task.cancellable or job.task.children
        if not is_open or job.answered or job.reply is None:
            return
        job.answered = True
        self._heartbeats.end(job.task, job.reply)
        if job.task.row_id is None:
            background.run_beside(self._early, self._answers.send(job.reply, outcome))
        else:
            due = self._answers.send_due(job.task.row_id, job.reply, outcome)
            background.run_beside(self._early, due)


def _operation_of(job: Job) -> str | None:
    """How the request was sent; None for a recovered row, which does not say."""
    if job.delivery is None:
        return None
    if job.reply is not None:
        return "call"
    return "fanout" if job.task.recipient else "cast"


def error_type_of(end: AttemptEnd) -> str | None:
    """Class name of the failure in the outcome; None for a success or a cut."""
    if end.outcome is None or end.outcome.failure is None or has_left_out(end.outcome):
        return None
    return failure_from(end.outcome.failure).exc_class


async def run_attempt(
    method: Method[Any, Any],
    ctx: Context,
    task: TrackedTask,
    args: Mapping[str, Any],
    threads: Threads,
    services: Services,
) -> AttemptEnd:
    """Run the handler once; it can be cancelled only during this call."""
    me = task.handler
    if me is not None and me.cancelling():  # left by an earlier wait: no news of this attempt
        await _take_cancellations(me)
    try:
        enter(ctx)
        try:
            task.cancellable = True
            if task.cancel_cause is not None:
                raise asyncio.CancelledError
            if method.is_async:
                result = await method.handler(ctx, **args)
            else:
                result = await _call_in_thread(method, ctx, task, args, threads)
            if not isinstance(result, _DATA):
                result = await end_of(result)
        finally:
            leave(ctx)
        if task.stopped:
            return _STOPPED  # it swallowed the stop: its remaining items are not done
        return AttemptEnd(outcome=succeeded(f"{method.name}()", result))
    except BaseException as error:  # noqa: BLE001 - see the module's first line
        return _judge(task, method, error, services)
    finally:
        task.cancellable = False
        if me is not None and me.cancelling() and _runs_here(me):
            await _take_cancellations(me)


def _runs_here(task: asyncio.Task[Any] | None) -> bool:
    """Whether *task* is running now; not so when the interpreter closes an abandoned coroutine."""
    try:
        return task is asyncio.current_task()
    except RuntimeError:  # no loop is running
        return False


async def _take_cancellations(me: asyncio.Task[Any]) -> None:
    """Consume cancellations that the handler left pending: they must not hit gracekit's steps."""
    while me.cancelling():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        me.uncancel()


_FENCED: Final = "its process could not show that it lives"
_STOPPED: Final = AttemptEnd(cut=Interruption.SAFE_POINT)


def _judge(
    task: TrackedTask, method: Method[Any, Any], error: BaseException, services: Services
) -> AttemptEnd:
    """How an attempt that raised *error* ended; what gracekit did to it counts before the error."""
    if task.stopped:
        return _STOPPED
    cause = task.cancel_cause
    if cause in OUT_OF_TIME and not _was_cancelled_again(task, error):
        return AttemptEnd(cut=Interruption.CANCELLED)  # interrupted is not failed
    if cause is CancelCause.TIMEOUT:
        return AttemptEnd(outcome=failed(timeout_error(method, during=error)))
    if task.order is not None:
        return AttemptEnd(outcome=ordered(str(task), task.order, task.state))
    if cause is CancelCause.FENCED or _is_interruption(task, method, error):
        put_off = _was_not_called(method, error)
        why = words_of(error) or type(error).__name__
        return AttemptEnd(
            cut=Interruption.SAFE_POINT if put_off else Interruption.UNCLEAN,
            interrupted_by=_FENCED if cause is CancelCause.FENCED else why,
        )
    return _failed(task, method, error, services)


def _failed(
    task: TrackedTask, method: Method[Any, Any], error: BaseException, services: Services
) -> AttemptEnd:
    """The end of an attempt whose handler raised *error* by itself."""
    outcome, expected = failed(error), is_expected(error)
    if not (services.parks and isinstance(error, NoCapacity | Parked)):
        try:
            again_s = pause_before_retry(task, method.options, error, services.clock)
        except ConfigError as wrong:
            return AttemptEnd(outcome=failed(ConfigError(f"TryAgain(after=): {wrong}")))
        return AttemptEnd(outcome=outcome, expected=expected, again_s=again_s)
    if why := why_not_parked(error, task):
        return AttemptEnd(outcome=not_parked(outcome, why), expected=expected)
    return AttemptEnd(outcome=outcome, expected=expected, requested=requested_by(error))


def pause_before_retry(
    task: TrackedTask, options: MethodOptions, error: BaseException, clock: Clock
) -> float | None:
    """Seconds until *task*, whose handler raised *error*, is tried again; None if it is not.

    Raises:
        ConfigError: the `after` of a TryAgain is no duration.
    """
    asks = isinstance(error, TryAgain) and not is_foreign(error)
    if not asks and not isinstance(error, options.retry_on):
        return None
    if not task.journaled or task.on_interrupt == "requeue" or task.failures >= options.retries:
        return None
    if isinstance(error, TryAgain) and asks and error.after is not None:
        is_past = isinstance(error.after, int | float) and error.after < 0
        return 0.0 if is_past else parse_duration(error.after)
    doubled = options.backoff_s * 2.0 ** min(task.failures, 1000)
    return min(options.backoff_max_s, clock.jitter(doubled))


def _was_cancelled_again(task: TrackedTask, error: BaseException) -> bool:
    """Whether something else cancelled the handler while it cleaned up after gracekit's cancel.

    Then its last request may still be on its way.
    """
    if not isinstance(error, asyncio.CancelledError) or task.handler is None:
        return False
    is_ours = error.args[:1] in {(cause.value,) for cause in CancelCause}
    return not is_ours and task.handler.cancelling() > task.cancels


def _is_interruption(task: TrackedTask, method: Method[Any, Any], error: BaseException) -> bool:
    """Whether something other than gracekit cancelled the handler, or kept it from being called:
    *error* is then no failure.

    The application may have cancelled its asyncio task, or something that it awaits together with
    other handlers. A handler in a thread does not notice a cancellation of its task.

    `cancelling()` alone is no proof: before Python 3.13, a TaskGroup leaves its own cancellation
    there when a child fails while the group is awaited.
    """
    if isinstance(error, asyncio.CancelledError) or _was_not_called(method, error):
        return True
    if task.handler is None or not task.handler.cancelling() or isinstance(error, _EXITS):
        return False
    return method.is_async and _comes_of_cancellation(error)


def _was_not_called(method: Method[Any, Any], error: BaseException) -> bool:
    """Whether no thread could be started for a plain handler."""
    return isinstance(error, NoThreadError) and not method.is_async


def _comes_of_cancellation(error: BaseException) -> bool:
    """Whether *error*, or each error in a group, was raised while a CancelledError was handled.

    A TimeoutError that `asyncio.timeout` made of its own CancelledError does not count.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(_comes_of_cancellation, error.exceptions))
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, asyncio.CancelledError):
            return True
        before = link.__cause__ or link.__context__
        if isinstance(link, TimeoutError) and isinstance(before, asyncio.CancelledError):
            return False
        link = before
    return False


async def _call_in_thread(
    method: Method[Any, Any],
    ctx: Context,
    task: TrackedTask,
    args: Mapping[str, Any],
    threads: Threads,
) -> Any:
    handler = partial(_in_known_thread, task, partial(method.handler, ctx, **args))
    # `cut` is set once the drain has recorded it as unclean: nothing needs its thread any more.
    return await in_thread(handler, threads, given_up=lambda: task.cut is not None)


def _in_known_thread(task: TrackedTask, handler: Callable[[], Any]) -> Any:
    task.thread_id = threading.get_ident()  # for the dump of stacks
    try:
        return handler()
    finally:
        task.thread_id = None


CALLERS: Final = frozenset(
    function.__code__
    for function in (run_attempt, call, end_of, _in_known_thread, WorkerCall.run, TrackedCall.run)
)
"""The functions that call code of the application. In a dump of stacks, the frames that they call
are the application's."""


def requested_by(error: BaseException) -> Mapping[str, Any] | None:
    """The missing capacity that a handler named in NoCapacity; None if it raised no new one.

    A subclass may have its own `__init__`, and `requested` may have been changed since. The result
    is empty if it cannot be recorded.
    """
    if not isinstance(error, NoCapacity) or is_foreign(error):
        return None
    try:
        return checked_request(error.requested)
    except Exception:  # noqa: BLE001 - the attribute is the application's
        return {}


def why_not_parked(error: BaseException, task: TrackedTask) -> str:
    """Why *task*, whose handler raised *error*, may not be parked.

    Returns:
        What follows on "the task is not parked, because". Empty if it may be parked, or if *error*
        has nothing to do with capacity.
    """
    if not isinstance(error, NoCapacity | Parked):
        return ""
    if task.on_interrupt == "requeue":  # a redelivered one has a row, but the same answer
        return f"{task.method}() has on_interrupt='requeue', and so no record that could wait"
    if task.recipient:
        return "it is a copy of a fanout, which is meant for one instance"
    if is_foreign(error):
        return (
            "its handler has passed on an error of a service that it called, and only a NoCapacity "
            "of its own parks it"
        )
    return ""
