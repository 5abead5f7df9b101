"""Timeouts: each exchange with the broker is bounded, and its errors name what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError

from gracekit.errors import DependencyError

T = TypeVar("T")

CLOSE_S: Final = 2.0
"""Seconds for the broker to confirm the close of a channel."""

TROUBLE: Final = (AMQPError, DependencyError)
"""The errors that `bounded` raises."""


async def bounded(exchange: Awaitable[T], timeout_s: float, what: str) -> T:
    """Await one exchange with the broker, with a timeout.

    Args:
        exchange: A call of aiormq, without its own timeout argument: aiormq uses
            `wait_for`, which before Python 3.12 sometimes hides the loss of the connection.
        timeout_s: Seconds to wait.
        what: Names the exchange in the error.

    Raises:
        DependencyError: the connection was lost, or the time is up; the broker may or may not
            have done it. AMQP errors, which say more, are raised unchanged.
    """
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        async with asyncio.timeout(timeout_s):
            return await exchange
    except TimeoutError:
        raise DependencyError(f"{what}: the broker did not answer in {timeout_s:g} s") from None
    except BaseException as error:
        if task is not None and task.cancelling() > cancels:
            # We were cancelled, but aiormq may raise another error instead.
            raise asyncio.CancelledError from error
        if isinstance(error, AMQPError):
            raise
        # When a connection dies, aiormq cancels the waiting code or raises a bare Exception; for
        # a closed channel or connection it raises RuntimeError.
        if isinstance(error, asyncio.CancelledError) or type(error) is Exception:
            raise DependencyError(f"{what}: the connection to the broker was lost") from error
        if isinstance(error, OSError | RuntimeError):
            raise DependencyError(f"{what}: {said(error)}") from error
        raise


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """Run *work*, which is short and bounded, to its end; delay a cancellation until then."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def close_channel(
    channel: Channel, timeout_s: float, error: BaseException | None = None
) -> None:
    """Close a channel, because of *error* if there is one; wait at most *timeout_s* seconds.

    If the broker does not confirm in time, the channel ends with its connection. The close runs
    in a separate task: if it were cancelled, aiormq would send it twice, and the broker would
    close the connection for that.
    """
    closing = asyncio.ensure_future(channel.close(error or asyncio.CancelledError))
    closing.add_done_callback(_ignore_end)
    await asyncio.wait({closing}, timeout=timeout_s)


def _ignore_end(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as retrieved: errors of a close are ignored


def said(error: BaseException) -> str:
    """The text of an error of the broker or the network, in one line."""
    return (str(error) or type(error).__name__).replace("\n", " ")
