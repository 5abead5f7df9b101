"""One attempt: calls the handler and turns whatever happens into one `End`.

Nothing escapes: not SystemExit, not a cancellation that nobody asked for. The
end is judged by what gracekit did to the task, and only then by what the
handler returned or raised: a handler can swallow, wrap or replace any exception.
A thread cannot be stopped, so an attempt in a thread is over when the thread
has returned, whatever cancels the coroutine that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from gracekit.errors import (
    MessageTooLargeError,
    MethodTimeoutError,
    TaskCancelledError,
    TaskInterruptedError,
    UnserialisableError,
)
from gracekit.process import Threads
from gracekit.request.context import Context, enter, leave, running_in
from gracekit.rpc.failures import failure_of, is_expected, words_of
from gracekit.rpc.message import Failure
from gracekit.rpc.methods import Method
from gracekit.rpc.oslo_wire import write_result
from gracekit.tracing import apart
from gracekit.tracker.journal import ERRORED_SENTENCES, Outcome, TaskRow
from gracekit.tracker.orders import DONE, ENDS
from gracekit.tracker.task import CancelCause, Cut, Order, Reason, TaskState, TrackedTask

T = TypeVar("T")

_BY_DRAIN: Final = frozenset({CancelCause.DRAIN_DEADLINE, CancelCause.FORCED})
_EXITS: Final = (SystemExit, KeyboardInterrupt)


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended: with an outcome, or cut.

    Attributes:
        outcome: None if it was cut.
        cut: None if it ended.
        interrupted_by: What the handler raised, if something other than gracekit cancelled it.
        expected: The handler is known to raise what it has raised: it is no news.
    """

    outcome: Outcome | None = None
    cut: Cut | None = None
    interrupted_by: str = ""
    expected: bool = False


def error_type_of(end: End) -> str | None:
    """Class name of what the handler raised, or was ended with; None for a success or a cut."""
    if end.outcome is None or end.outcome.failure is None or has_left_out(end.outcome):
        return None
    return failure_from(end.outcome.failure).exc_class


def failed(error: BaseException, state: TaskState = TaskState.FAILED) -> Outcome:
    """The outcome of a handler that raised *error*."""
    failure = failure_of(error)
    return Outcome(state=state, failure=failure_text(failure), detail=failure.message[:1000])


def has_left_out(outcome: Outcome) -> bool:
    """Whether a task has succeeded with a result that cannot be sent."""
    return outcome.state is TaskState.SUCCEEDED and outcome.failure is not None


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
    me = task.handler
    if me is not None and me.cancelling():  # from a wait before: it says nothing of this attempt
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
        finally:
            leave(ctx)
        if task.stopped:
            return _STOPPED  # the rest of its items was not done, whatever it returned
        return End(outcome=succeeded(f"{method.name}()", result))
    except BaseException as error:  # noqa: BLE001 - see the module's first line
        return _judge(task, method, error)
    finally:
        task.cancellable = False
        if me is not None and me.cancelling() and _runs_here(me):
            await _take_cancellations(me)


def _runs_here(task: asyncio.Task[Any] | None) -> bool:
    """Whether *task* is running now; a coroutine that the interpreter throws away is not."""
    try:
        return task is asyncio.current_task()
    except RuntimeError:  # no loop is running
        return False


async def _take_cancellations(me: asyncio.Task[Any]) -> None:
    """Take what the handler left behind: a cancellation of its own must not meet a step of ours."""
    while me.cancelling():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        me.uncancel()


_NOTHING: Final = Outcome(state=TaskState.SUCCEEDED, result="null")


def succeeded(who: str, result: Any) -> Outcome:
    """The outcome of *who* returned *result*.

    The work is done, whatever it returned. A result that cannot be sent is left out, and whoever
    asks for it, now or later, is told so instead.
    """
    if result is None:
        return _NOTHING
    try:
        return Outcome(state=TaskState.SUCCEEDED, result=write_result(result))
    except (UnserialisableError, MessageTooLargeError) as error:
        return without_result(who, error)
    except BaseException as error:  # noqa: BLE001 - a Mapping may be the application's
        return without_result(who, UnserialisableError(f"its own code raised {words_of(error)}"))


def without_result(who: str, error: UnserialisableError | MessageTooLargeError) -> Outcome:
    """The outcome of *who* has done its work, and returned what cannot be sent."""
    left_out = type(error)(f"{who} has succeeded, but its result is left out: {error}")
    return failed(left_out, TaskState.SUCCEEDED)


_STOPPED: Final = End(cut=Cut.SAFE_POINT)


def _judge(task: TrackedTask, method: Method[Any, Any], error: BaseException) -> End:
    """How an attempt that raised *error* ended: first by what gracekit did, then by the error."""
    if task.stopped:
        return _STOPPED
    cause = task.cancel_cause
    if cause in _BY_DRAIN:
        return End(cut=Cut.CANCELLED)  # interrupted is not failed
    if cause is CancelCause.TIMEOUT:
        return End(outcome=failed(timeout_error(method, during=error)))
    if task.order is not None:
        return End(outcome=ordered(str(task), task.order, task.state))
    if _is_interruption(task, method, error):
        return End(cut=Cut.UNCLEAN, interrupted_by=words_of(error) or type(error).__name__)
    return End(outcome=failed(error), expected=is_expected(error))


def _is_interruption(task: TrackedTask, method: Method[Any, Any], error: BaseException) -> bool:
    """Whether something else than gracekit has cut the handler: what it raised says nothing then.

    Somebody has cancelled its asyncio task; or what it awaited was cancelled, perhaps with another
    handler that awaits it too. A thread does not notice a cancellation of its task.

    The task's count of cancellations alone is no proof: before Python 3.13, a TaskGroup leaves
    its own in it when a child fails while the group is waited for.
    """
    if isinstance(error, asyncio.CancelledError):
        return True
    if task.handler is None or not task.handler.cancelling() or isinstance(error, _EXITS):
        return False
    return method.is_async and _comes_of_cancellation(error)


def _comes_of_cancellation(error: BaseException) -> bool:
    """Whether *error* was raised while a CancelledError was handled; of a group, all its errors.

    What `asyncio.timeout` makes of its own CancelledError is a timeout.
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


def timeout_error(
    method: Method[Any, Any], *, during: BaseException | None = None
) -> MethodTimeoutError:
    """What the caller of a timed-out method gets; what it raised then is in the traceback."""
    error = MethodTimeoutError(
        f"{method.name}() exceeded its timeout of {method.options.timeout_s:g} s and was cancelled"
    )
    error.__cause__ = during
    return error


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
        name = getattr(hook, "__name__", "a hook")
        raise RuntimeError(f"{name}() raised {words_of(error)}") from error


async def _call_in_thread(
    method: Method[Any, Any],
    ctx: Context,
    task: TrackedTask,
    args: Mapping[str, Any],
    threads: Threads,
) -> Any:
    handler = partial(_in_known_thread, task, partial(method.handler, ctx, **args))
    # Once the drain has recorded it as unclean, nothing waits for its thread any more.
    return await _in_thread(handler, threads, given_up=lambda: task.cut is not None)


def _in_known_thread(task: TrackedTask, handler: Callable[[], Any]) -> Any:
    task.thread_id = threading.get_ident()  # for the dump of stacks
    try:
        return handler()
    finally:
        task.thread_id = None


async def _in_thread(
    function: Callable[[], T], threads: Threads, *, given_up: Callable[[], bool] = lambda: False
) -> T:
    """Run *function* in a worker thread; returns or raises only when it has returned.

    A cancellation ends the wait only before the function has begun, or where *given_up* says so.
    """
    while True:
        thread = _Thread(function)
        running = asyncio.ensure_future(threads.run(thread.run))
        running.add_done_callback(thread.leave)
        while not thread.returned.done():
            try:
                await asyncio.shield(thread.returned)
            except asyncio.CancelledError:
                if not thread.begun:
                    running.cancel()
                    await _take_end(running)
                if not thread.begun or given_up():
                    raise
        if thread.begun or not running.cancelled():
            return thread.result()
        # Somebody cancelled the task around a thread that had not begun: nothing was done.


async def _take_end(running: asyncio.Future[None]) -> None:
    """Wait for the end of what was just cancelled, however often we are cancelled too."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({running})


class _Thread(Generic[T]):
    """A function in a worker thread, which is over when the function has returned.

    The asyncio task around it proves nothing: whoever cancels all tasks of the
    process ends that one too, and the thread goes on.

    Attributes:
        begun: Its code runs, or has run.
        returned: Done when the function has returned, or will never begin.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._over = self._left = False
        self.begun = False
        self.returned: asyncio.Future[None] = self._loop.create_future()

    def run(self) -> None:
        """In the thread."""
        self.begun = True
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - carried over to the loop as a value
            self._error = error
        self._over = True
        # Set before the look, as `leave` does it the other way round: one of the two sees both.
        if self._left:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._tell)

    def leave(self, running: asyncio.Future[None]) -> None:
        """On the loop: the task around the thread has ended, mostly because the thread has."""
        self._left = True
        if not self.begun:
            self._over = True
            self._error = asyncio.CancelledError() if running.cancelled() else running.exception()
        if self._over:
            self._tell()

    def _tell(self) -> None:
        if not self.returned.done():
            self.returned.set_result(None)

    def result(self) -> T:
        """What the function returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


CALLERS: Final = frozenset(
    function.__code__ for function in (run_attempt, call_hook, _in_known_thread, _Thread.run)
)
"""Code that calls code of the application: frames below it are the application's."""
