"""Whatever the broker is asked has its bound here, and ends with an error that says what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from aiormq.channel import Channel
from aiormq.exceptions import AMQPError

from gracekit.errors import DependencyError

T = TypeVar("T")

CLOSE_S: Final = 2.0
"""For a broker to confirm the close of a channel."""

TROUBLE: Final = (AMQPError, DependencyError)
"""What `bounded` raises."""


async def bounded(exchange: Awaitable[T], timeout_s: float, what: str) -> T:
    """One exchange with the broker.

    Args:
        exchange: Of aio-pika or aiormq, without a timeout of theirs: they bound by `wait_for`,
            which before Python 3.12 now and then keeps the end of a connection from who waits.
        timeout_s: Its bound, in seconds.
        what: Names it in the error.

    Raises:
        DependencyError: the connection was lost, or the time is up; whether it was carried
            out is not known. AMQP errors that say more are raised as they are.
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
            # aiormq may raise an error of its own in the place of our cancellation.
            raise asyncio.CancelledError from error
        if isinstance(error, AMQPError):
            raise
        # aiormq cancels who waits when a connection dies under them, or throws a bare Exception; a
        # closed channel or connection is a RuntimeError.
        if isinstance(error, asyncio.CancelledError) or type(error) is Exception:
            raise DependencyError(f"{what}: the connection to the broker was lost") from error
        if isinstance(error, OSError | RuntimeError):
            raise DependencyError(f"{what}: {said(error)}") from error
        raise


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """Do *work*, which is short and bounded, to its end; only then hear of a cancellation."""
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
    """Close a channel, because of *error* if there is one.

    One that the broker does not confirm in time goes with its connection. In a task of its own:
    a close that is cancelled would be sent twice, for which the broker closes the connection.
    """
    closing = asyncio.ensure_future(channel.close(error or asyncio.CancelledError))
    closing.add_done_callback(_ignore_end)
    await asyncio.wait({closing}, timeout=timeout_s)


def _ignore_end(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # seen: what a close meets is of no interest


def said(error: BaseException) -> str:
    """What an error of the broker or the network says, in one line."""
    return (str(error) or type(error).__name__).replace("\n", " ")
