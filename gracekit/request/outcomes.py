"""Outcomes: how a task has ended, as the journal keeps it and as its caller gets it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gracekit.errors import (
    MessageTooLargeError,
    MethodTimeoutError,
    NoCapacity,
    Parked,
    TaskCancelledError,
    TaskInterruptedError,
    UnserialisableError,
)
from gracekit.journal.rows import ERRORED_SENTENCES, Outcome, Parking, TaskRow
from gracekit.rpc.failures import failure_of, words_of
from gracekit.rpc.message import Failure
from gracekit.rpc.methods import Method
from gracekit.rpc.oslo_wire import write_result
from gracekit.tracker.task import DONE, ENDS, NO_CAPACITY, TERMINAL, Order, Reason, TaskState, Verb

_LONGEST_DETAIL: Final = 1000


def failed(error: BaseException, state: TaskState = TaskState.FAILED) -> Outcome:
    """The outcome of a handler that raised *error*."""
    if isinstance(error, Parked):  # a callee's: the caller would think that this task is parked
        error = NoCapacity(f"it called a service, whose {error}")
    failure = failure_of(error)
    return Outcome(
        state=state, failure=failure_text(failure), detail=_kept(failure.message, _LONGEST_DETAIL)
    )


def _kept(text: str, longest: int) -> str:
    """*text* as a record keeps it: cut, and without NUL, which some stores do not take."""
    return text.replace("\0", "\\0")[:longest]


def has_left_out(outcome: Outcome) -> bool:
    """Whether a task has succeeded with a result that cannot be sent."""
    return outcome.state is TaskState.SUCCEEDED and outcome.failure is not None


def failure_text(failure: Failure) -> str:
    """A failure as the journal keeps it."""
    return msgspec.json.encode(failure).decode()


def failure_from(text: str) -> Failure:
    """A failure that `failure_text` has written."""
    return msgspec.json.decode(text, type=Failure)


_NOTHING: Final = Outcome(state=TaskState.SUCCEEDED, result="null")


def succeeded(who: str, result: Any) -> Outcome:
    """The outcome of *who*, which has returned *result*.

    The work is done, so the outcome is a success even if *result* cannot be sent. Then the result
    is left out, and every caller gets an error that says so.
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
    """The outcome of *who*, which has succeeded with a result that cannot be sent."""
    left_out = type(error)(f"{who} has succeeded, but its result is left out: {error}")
    return failed(left_out, TaskState.SUCCEEDED)


def errored(task: str, reason: Reason, detail: str = "", *, why: str = "") -> Outcome:
    """The outcome of a task that recovery or a deadline ends as ERRORED.

    Args:
        task: Names it in the sentence.
        reason: For the record.
        detail: A sentence more.
        why: What is said instead of the usual sentence of *reason*.
    """
    sentence = f"{task} was marked ERRORED({reason.value}): {why or ERRORED_SENTENCES[reason]}"
    error = TaskInterruptedError(f"{sentence}; {detail}" if detail else sentence)
    ended = failed(error, TaskState.ERRORED)
    return Outcome(
        state=TaskState.ERRORED, failure=ended.failure, reason=reason.value, detail=ended.detail
    )


def ordered(task: str, order: Order, state: TaskState) -> Outcome:
    """The outcome of a task in *state* that an order ends; `ENDS` says which state follows.

    Args:
        task: Names it in the sentence.
        order: What was ordered, by whom and why.
        state: State of the task before.
    """
    end = ENDS[order.verb][state]
    gives_up = order.verb is Verb.GIVE_UP
    by = "an operator" if order.source == Reason.OPERATOR.value else order.by
    sentence = f"{task} was {DONE[order.verb]} by {by}"
    sentence = f"{sentence}: {order.reason}" if order.reason else sentence
    error = TaskInterruptedError if end is TaskState.ERRORED else TaskCancelledError
    return Outcome(
        state=end,
        failure=failed(error(sentence), end).failure,
        reason=Reason.GAVE_UP.value if gives_up else order.source,
        detail=f"{order.by}: {order.reason or 'no reason given'}"[:1000],
    )


def expired(task: str, deadline: str, why: str) -> Outcome:
    """The outcome of a task that has waited for capacity until its *deadline*, and got none."""
    because = f" ({why})" if why else ""
    waited = f"it waited for capacity until {deadline} and none became free{because}"
    return errored(task, Reason.EXPIRED, why=waited)


def parked(outcome: Outcome, parking: Parking) -> Outcome:
    """The outcome of a task that is parked; *outcome* is that of its handler."""
    return Outcome(
        state=TaskState.PENDING,
        failure=outcome.failure,
        reason=NO_CAPACITY,
        detail=outcome.detail,
        parking=parking,
    )


def not_parked(outcome: Outcome, why: str) -> Outcome:
    """The outcome of a task whose handler found no capacity, and which may not be parked.

    Args:
        outcome: Outcome of the handler.
        why: What follows on "the task is not parked, because".
    """
    assert outcome.failure is not None
    failure = failure_from(outcome.failure)
    reason = f"the task is not parked, because {why}"
    sentence = _joined(failure.message, reason)
    text = failure_text(msgspec.structs.replace(failure, message=sentence, args=(sentence,)))
    message = _kept(failure.message, _LONGEST_DETAIL - len(reason) - len("; "))
    detail = _kept(_joined(message, reason), _LONGEST_DETAIL)
    return Outcome(state=TaskState.FAILED, failure=text, detail=detail)


def _joined(message: str, reason: str) -> str:
    return f"{message}; {reason}" if message else reason


def outcome_of(row: TaskRow) -> Outcome:
    """The answer from the record, for a task that has ended or was parked.

    A parked task that runs again is still answered as parked, because a caller gets one answer.
    """
    if row.state not in TERMINAL:
        parking = Parking(
            task_id=row.request_id,
            deadline=row.pending_deadline or 0.0,
            version=max(1, row.parkings),
        )
        return parked(Outcome(state=row.state, failure=row.failure, detail=row.detail), parking)
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
    """The error for the caller of a method that timed out; *during* is shown as its cause."""
    error = MethodTimeoutError(
        f"{method.name}() exceeded its timeout of {method.options.timeout_s:g} s and was cancelled"
    )
    error.__cause__ = during
    return error
