"""The Context of the handler that runs here, and the lease that its calls carry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from gracekit.rpc.message import JsonObject, carried_lease
from gracekit.telemetry.logs import running

if TYPE_CHECKING:
    from gracekit.request.context import Context


def current() -> Context:
    """The context of the handler that is running here.

    Raises:
        LookupError: no handler of gracekit is running here.
    """
    found = running.get()
    if found is None:
        raise LookupError("no handler of gracekit is running here")
    return cast("Context", found)  # only this module sets it


@contextlib.contextmanager
def running_in(ctx: Context) -> Iterator[None]:
    """Make *ctx* the result of `current()`, and let calls carry its lease."""
    before = swap(ctx)
    try:
        yield
    finally:
        swap(before)


def enter(ctx: Context) -> None:
    """As `running_in`, until `leave`; only for an asyncio task that was in no context before.

    It needs no generator and no tokens, of which each request in flight would keep some.
    """
    swap(ctx)


def swap(ctx: Context | None) -> Context | None:
    """Make *ctx* the result of `current()` here; returns what was."""
    before = running.get()
    running.set(ctx)
    _carry(None if ctx is None else ctx.travelling_lease)
    return cast("Context | None", before)


def leave(ctx: Context) -> None:
    """End what `enter` began.

    An abandoned coroutine may be closed in another task; the context of that one is left alone.
    """
    if running.get() is ctx:
        swap(None)


def _carry(lease: JsonObject | None) -> None:
    if carried_lease.get() is not lease:
        carried_lease.set(lease)
