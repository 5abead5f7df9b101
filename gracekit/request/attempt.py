"""One attempt: calls the handler and turns whatever happens into one `End`.

Nothing escapes: not SystemExit, not a cancellation that nobody asked for. A
thread cannot be stopped, so an attempt in a thread is over when the thread
has returned, however often it was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from gracekit.errors import (
    MethodTimeoutError,
    TaskCancelledError,
    TaskInterruptedError,
    UnserialisableError,
)
from gracekit.process import Threads
from gracekit.request.context import Context, SafePointStop, enter, leave, running_in
from gracekit.rpc.failures import failure_of
from gracekit.rpc.message import Failure
from gracekit.rpc.methods import Method
from gracekit.rpc.plain import dumps, plain
from gracekit.tracing import apart
from gracekit.tracker.journal import ERRORED_SENTENCES, Outcome, TaskRow
from gracekit.tracker.orders import DONE, ENDS
from gracekit.tracker.task import CancelCause, Cut, Order, Reason, TaskState, TrackedTask

_BY_US: Final = frozenset({CancelCause.DRAIN_DEADLINE, CancelCause.FORCED})


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended: with an outcome, or cut.

    Attributes:
        outcome: None if it was cut.
        cut: None if it ended.
    """

    outcome: Outcome | None = None
    cut: Cut | None = None


def error_type_of(end: End) -> str | None:
    """Class name of what the handler raised, or was ended with; None for a result or a cut."""
    if end.outcome is None or end.outcome.failure is None:
        return None
    return failure_from(end.outcome.failure).exc_class


def failed(error: BaseException, state: TaskState = TaskState.FAILED) -> Outcome:
    """The outcome of a handler that raised *error*."""
    failure = failure_of(error)
    return Outcome(state=state, failure=failure_text(failure), detail=failure.message[:1000])


def failure_text(failure: Failure) -> str:
    """A failure as the journal keeps it."""
    return msgspec.json.encode(failure).decode()


def failure_from(text: str) -> Failure:
    """The other way round."""
    return msgspec.json.decode(text, type=Failure)


async def run_attempt(
    method: Method[Any, Any],
    ctx: Context,
    task: TrackedTask,
    args: Mapping[str, Any],
    threads: Threads,
) -> End:
    """Run the handler once, cancellable only meanwhile."""
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
        finally:
            leave(ctx)
        return End(outcome=succeeded(f"{method.name}()", result))
    except SafePointStop:
        return End(cut=Cut.SAFE_POINT)
    except BaseException as error:  # noqa: BLE001 - see the module's first line
        return _judge(task, method, error)
    finally:
        task.cancellable = False
        me = task.handler
        # Not when the coroutine is thrown away with its loop: then nobody runs it.
        if me is not None and me.cancelling() and me is asyncio.current_task():
            await _take_cancellations(me)


async def _take_cancellations(me: asyncio.Task[Any]) -> None:
    """Take what the handler left behind: a cancellation of its own must not meet a step of ours."""
    while me.cancelling():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        me.uncancel()


_NOTHING: Final = Outcome(state=TaskState.SUCCEEDED, result="null")


def succeeded(who: str, result: Any) -> Outcome:
    """The outcome of *who* returned *result*; FAILED if that cannot be sent."""
    if result is None:
        return _NOTHING
    try:
        return Outcome(state=TaskState.SUCCEEDED, result=dumps(plain(result, "result"), "result"))
    except UnserialisableError as error:
        return failed(UnserialisableError(f"{who} returned what is no JSON: {error}"))


def _judge(task: TrackedTask, method: Method[Any, Any], error: BaseException) -> End:
    cause = task.cancel_cause
    if cause in _BY_US:
        # Whatever it raised, we cut it: interrupted is not failed.
        return End(cut=Cut.CANCELLED)
    if not isinstance(error, asyncio.CancelledError):
        return End(outcome=failed(error))
    if cause is CancelCause.TIMEOUT:
        return End(outcome=failed(timeout_error(method)))
    if task.order is not None:
        return End(outcome=ordered(str(task), task.order, task.state))
    # A library may raise CancelledError at a task that nobody cancelled.
    return End(outcome=failed(RuntimeError(f"{task} raised CancelledError: {error}")))


def errored(task: str, reason: Reason, detail: str = "") -> Outcome:
    """The outcome of a task that recovery, or its deadline, ends."""
    sentence = f"{task} was marked ERRORED({reason.value}): {ERRORED_SENTENCES[reason]}"
    error = TaskInterruptedError(f"{sentence}; {detail}" if detail else sentence)
    ended = failed(error, TaskState.ERRORED)
    return Outcome(
        state=TaskState.ERRORED, failure=ended.failure, reason=reason.value, detail=ended.detail
    )


def ordered(task: str, order: Order, state: TaskState) -> Outcome:
    """The outcome of a task in *state* that an operator ends; `ENDS` says which it is."""
    end = ENDS[order.verb][state]
    sentence = f"{task} was {DONE[order.verb]} by an operator"
    sentence = f"{sentence}: {order.reason}" if order.reason else sentence
    error = TaskInterruptedError if end is TaskState.ERRORED else TaskCancelledError
    return Outcome(
        state=end,
        failure=failed(error(sentence), end).failure,
        reason=Reason.OPERATOR.value,
        detail=f"{order.by}: {order.reason or 'no reason given'}"[:1000],
    )


def outcome_of(row: TaskRow) -> Outcome:
    """What an ended row answers."""
    return Outcome(
        state=row.state,
        result=row.result,
        failure=row.failure,
        reason=row.reason,
        detail=row.detail,
    )


def timeout_error(method: Method[Any, Any]) -> MethodTimeoutError:
    """What the caller of a timed-out method gets."""
    return MethodTimeoutError(
        f"{method.name}() exceeded its timeout of {method.options.timeout_s:g} s and was cancelled"
    )


async def call_hook(
    hook: Callable[..., Any],
    ctx: Context,
    args: Mapping[str, Any],
    threads: Threads,
) -> Any:
    """Call a probe, errored hook or job, plain or async."""
    try:
        with running_in(ctx), apart():
            if asyncio.iscoroutinefunction(hook):
                return await hook(ctx, **args)
            return await _in_thread(partial(hook, ctx, **args), threads)
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # Out of a task of its own it would end the whole loop.
        raise RuntimeError(f"{getattr(hook, '__name__', hook)}() raised {error!r}") from error


async def _call_in_thread(
    method: Method[Any, Any],
    ctx: Context,
    task: TrackedTask,
    args: Mapping[str, Any],
    threads: Threads,
) -> Any:
    def in_known_thread() -> Any:
        task.thread_id = threading.get_ident()  # for the dump of stacks
        try:
            return method.handler(ctx, **args)
        finally:
            task.thread_id = None

    return await _in_thread(in_known_thread, threads)


async def _in_thread(function: Callable[[], Any], threads: Threads) -> Any:
    """Run *function* in a worker thread; returns or raises only when it has returned."""
    begun = False

    def caught() -> tuple[Any, BaseException | None]:
        nonlocal begun
        begun = True
        try:
            return function(), None
        except BaseException as error:  # noqa: BLE001 - carried over to the loop as a value
            return None, error

    inner = asyncio.ensure_future(threads.run(caught))
    while not inner.done():
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError:
            if not begun:
                inner.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await inner
                raise
    result, error = inner.result()
    if error is not None:
        raise error
    return result
