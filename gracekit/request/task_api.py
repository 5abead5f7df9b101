"""The namespace `gracekit.tasks` on the ops topic, for resolvers that reach only the broker.

A service serves it only with `Service(..., task_api=True)`, because every client
that may send to the ops topic may then move its parked tasks. The methods are
idempotent, so they are not journaled: after a crash the broker delivers them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from gracekit.errors import Gone, InvalidArgumentsError, StaleVersionError
from gracekit.request.context import Context, parked_tasks_of
from gracekit.request.parked_tasks import MAX_PAGE
from gracekit.rpc.failures import expect
from gracekit.rpc.message import TASKS_NAMESPACE
from gracekit.rpc.method_options import MethodOptions
from gracekit.rpc.methods import Method
from gracekit.tracker.task import Order, Verb

VERSION: Final = "1.1"
"""Requests that ask for 1.0, or for no version, are answered too."""
LONGEST_REASON: Final = 500
LONGEST_NAME: Final = 100
_LAST_ROW: Final = 2**63 - 1


def task_methods() -> Iterator[Method[Any, Any]]:
    """The methods of the namespace."""
    options = MethodOptions(
        ops=True, on_interrupt="requeue", namespace=TASKS_NAMESPACE, version=VERSION
    )
    handlers: tuple[Callable[..., Any], ...] = (get, list_pending, retry, give_up, cancel)
    for handler in handlers:
        yield Method(handler, options, skip=1)


async def get(ctx: Context, task_id: str) -> dict[str, Any]:
    """One task in any state."""
    return await parked_tasks_of(ctx).get(_text("task_id", task_id))


async def list_pending(ctx: Context, after: int = 0, limit: int = 100) -> dict[str, Any]:
    """Parked tasks, in the order of acceptance: `{"tasks": [...], "next": ...}`.

    Args:
        ctx: Of this request.
        after: The `next` of the page before.
        limit: From 1 to 500.
    """
    after = _number("after", after, least=0, most=_LAST_ROW)
    limit = _number("limit", limit, least=1, most=MAX_PAGE)
    return await parked_tasks_of(ctx).page(after=after, limit=limit)


async def retry(
    ctx: Context,
    task_id: str,
    version: int,
    args: Mapping[str, Any] | None = None,
    reason: str = "",
) -> dict[str, Any]:
    """Let a parked task run again.

    Args:
        ctx: Of this request.
        task_id: The request id of the task.
        version: Version of the task in the notification or in `list_pending`.
        args: Arguments to replace; None for no change.
        reason: For the record.
    """
    if args is not None and not isinstance(args, Mapping):
        raise InvalidArgumentsError(f"args = {_shown(args)} must be an object, or left out")
    return await _order(ctx, Verb.RETRY, task_id, version, reason, args)


async def give_up(ctx: Context, task_id: str, version: int, reason: str) -> dict[str, Any]:
    """End a parked task as ERRORED(gave_up); its `errored` hook is called."""
    if not _text("reason", reason).strip():
        raise InvalidArgumentsError("give_up needs a reason, which the task's record keeps")
    return await _order(ctx, Verb.GIVE_UP, task_id, version, reason)


async def cancel(ctx: Context, task_id: str, version: int, reason: str = "") -> dict[str, Any]:
    """End a parked task as CANCELLED."""
    return await _order(ctx, Verb.CANCEL, task_id, version, reason)


async def _order(
    ctx: Context,
    verb: Verb,
    task_id: str,
    version: int,
    reason: str,
    args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    order = Order(
        verb=verb,
        by=caller_of(ctx),
        reason=_text("reason", reason)[:LONGEST_REASON],
        source="resolver",
    )
    try:
        return await parked_tasks_of(ctx).order(
            _text("task_id", task_id), _number("version", version, least=1), order, args=args
        )
    except (Gone, StaleVersionError) as error:
        expect(error)  # usual if several resolvers work at a time, so it is logged as DEBUG
        raise


def caller_of(ctx: Context) -> str:
    """Who asks, for the record: the user in the request's context, if there is one."""
    user = ctx.get("user_id")
    return (
        f"{str(user)[:LONGEST_NAME]} by {TASKS_NAMESPACE}"
        if user
        else f"a caller of {TASKS_NAMESPACE}"
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentsError(f"{name} = {_shown(value)} must be a text")
    return value.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def _number(name: str, value: object, *, least: int, most: int | None = None) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or value < least or (most is not None and value > most):  # type: ignore[operator]
        upto = "" if most is None else f" and at most {most}"
        raise InvalidArgumentsError(
            f"{name} = {_shown(value)} must be a whole number of at least {least}{upto}"
        )
    assert isinstance(value, int)
    return value


def _shown(value: object) -> str:
    """As Python writes it, so that a reader can tell the text `"1"` from a number."""
    return repr(value)[:50]
