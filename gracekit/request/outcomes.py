"""Outcomes: how a task has ended, as the journal keeps it and its caller hears it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gracekit.errors import (
    MessageTooLargeError,
    MethodTimeoutError,
    TaskCancelledError,
    TaskInterruptedError,
    UnserialisableError,
)
from gracekit.journal.order_rows import DONE, ENDS
from gracekit.journal.rows import ERRORED_SENTENCES, Outcome, TaskRow
from gracekit.rpc.failures import failure_of, words_of
from gracekit.rpc.message import Failure
from gracekit.rpc.methods import Method
from gracekit.rpc.oslo_wire import write_result
from gracekit.tracker.task import Order, Reason, TaskState


def failed(error: BaseException, state: TaskState = TaskState.FAILED) -> Outcome:
    """The outcome of a handler that raised *error*."""
    failure = failure_of(error)
    detail = failure.message[:1000].replace("\0", "\\0")  # no text of every store has a NUL
    return Outcome(state=state, failure=failure_text(failure), detail=detail)


def has_left_out(outcome: Outcome) -> bool:
    """Whether a task has succeeded with a result that cannot be sent."""
    return outcome.state is TaskState.SUCCEEDED and outcome.failure is not None


def failure_text(failure: Failure) -> str:
    """A failure as the journal keeps it."""
    return msgspec.json.encode(failure).decode()


def failure_from(text: str) -> Failure:
    """The other way round."""
    return msgspec.json.decode(text, type=Failure)


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
