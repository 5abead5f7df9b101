"""The reply queue of a client, and the calls that wait for replies.

The queue's name and each call's id contain 128 random bits. A reply for which no
call waits (late, repeated, foreign) is acked and counted, but otherwise ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from gracekit import background
from gracekit.clock import Clock
from gracekit.errors import BadMessageError, DependencyError, HeartbeatTimeoutError, RpcError
from gracekit.rpc.call_options import NAMED
from gracekit.rpc.message import Reply, ReplyAddress
from gracekit.rpc.oslo_wire import check_size, decode_reply
from gracekit.rpc.transport import REPLY, Consumer, Delivery, Queue, Transport, reply_queue

_PREFETCH: Final = 100


class Replies:
    """The reply queue of one client, declared when the first call needs it.

    Attributes:
        ignored: How many replies matched no waiting call or were unreadable.
    """

    def __init__(self, transport: Transport, clock: Clock, *, max_body_bytes: int) -> None:
        self.ignored = 0
        self._transport = transport
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._opening: asyncio.Task[None] | None = None  # one for all calls that wait for it
        self._queue: Queue | None = None
        self._consumer: Consumer | None = None
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._hearing: dict[str, asyncio.Queue[Reply | None]] = {}
        self._monitors: dict[str, _Monitor] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._stops = 0  # stops that are under way

    async def expect(self, *, pending: bool = False) -> tuple[ReplyAddress, asyncio.Future[Reply]]:
        """An address for one call, and the future of its reply; see `forget`.

        Args:
            pending: See `ReplyAddress.knows_pending`.
        """
        queue = self._queue if self._consumer is not None else None
        if queue is None:
            queue = await self._open()
        address = ReplyAddress(queue=queue.name, msg_id=self._clock.new_id(), knows_pending=pending)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[address.msg_id] = future
        return address, future

    async def hear(self) -> tuple[ReplyAddress, asyncio.Queue[Reply | None]]:
        """An address for a question with several answers, and the queue of these; see `forget`.

        None in the queue means that the client was stopped.
        """
        queue = await self._open()
        address = ReplyAddress(queue=queue.name, msg_id=self._clock.new_id())
        heard = self._hearing[address.msg_id] = asyncio.Queue()
        return address, heard

    def monitor(
        self, address: ReplyAddress, timeout_s: float, silence: HeartbeatTimeoutError
    ) -> None:
        """Fail a waiting call with HeartbeatTimeoutError if no heartbeat comes in time.

        Args:
            address: The call's address, from `expect`.
            timeout_s: Seconds from now, and from each heartbeat.
            silence: What then ends the call.
        """
        future = self._waiting.get(address.msg_id)
        if future is not None:
            self._monitors[address.msg_id] = _Monitor(future, timeout_s, silence)

    def forget(self, address: ReplyAddress) -> None:
        """Stop waiting for replies to *address*; later ones are ignored."""
        self._waiting.pop(address.msg_id, None)
        self._hearing.pop(address.msg_id, None)
        if (monitor := self._monitors.pop(address.msg_id, None)) is not None:
            monitor.stop()

    async def stop(self, disconnect: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop reading replies, and *disconnect*; waiting calls fail with RpcError, at once."""
        self._stops += 1
        try:
            self._end_waits()
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait({self._opening})
            if disconnect is not None:
                await disconnect()
            consumer, self._consumer, self._queue = self._consumer, None, None
            if consumer is not None:
                await consumer.cancel()
            self._end_waits()  # of calls that had come in between
            if self._settling:
                await asyncio.wait(tuple(self._settling))
        finally:
            self._stops -= 1

    def _end_waits(self) -> None:
        for heard in self._hearing.values():
            heard.put_nowait(None)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    RpcError(
                        "the client was stopped before the reply came, so the request may run; "
                        "call again with the same request id"
                    )
                )
                future.exception()  # a call that is still sending never looks at it
        self._waiting.clear()

    async def _open(self) -> Queue:
        if not self._stops and self._consumer is None:
            await self._wait_open()
        if self._stops or self._queue is None:
            raise _stopped()
        return self._queue

    async def _wait_open(self) -> None:
        """Wait until the queue is read; that goes on if this is cancelled, as others may wait."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._consume(), name="gracekit-reply-queue")
            self._opening.add_done_callback(self._end_opening)
        opening, task = self._opening, asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            if not opening.cancelled() or (task is not None and task.cancelling() > cancels):
                raise
            raise _stopped() from None
        except NAMED as error:  # each call names its own request in it
            raise type(error)(str(error)) from error

    async def _consume(self) -> None:
        if self._queue is None:  # kept if the next line fails
            self._queue = reply_queue(f"{REPLY}{self._clock.new_id()}")
        self._consumer = await self._transport.consume(
            [self._queue], self._on_delivery, prefetch=_PREFETCH
        )

    def _end_opening(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # if all calls that waited were cancelled, nobody looks

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            check_size(delivery.dropped, max_bytes=self._max_body_bytes)
            reply = decode_reply(delivery.body, max_bytes=self._max_body_bytes)
        except BadMessageError as error:
            self.ignored += 1
            background.run_beside(self._settling, delivery.dead_letter(str(error)))
            return
        if not delivery.ack_now():
            background.run_beside(self._settling, delivery.ack())
        if not reply.ending:
            if (monitor := self._monitors.get(reply.msg_id)) is not None:
                monitor.renew()
            return
        future = self._waiting.pop(reply.msg_id, None)
        if future is not None and not future.done():
            future.set_result(reply)
        elif (heard := self._hearing.get(reply.msg_id)) is not None:
            heard.put_nowait(reply)
        else:
            self.ignored += 1


def _stopped() -> DependencyError:
    return DependencyError(
        "the client was stopped before it had a reply queue, and nothing was sent"
    )


class _Monitor:
    """Fails a call whose server sends no heartbeats. A heartbeat only stores a time, no timer."""

    def __init__(
        self, future: asyncio.Future[Reply], timeout_s: float, silence: HeartbeatTimeoutError
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._future = future
        self._timeout_s = timeout_s
        self._silence = silence
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_at(self._heard_at + timeout_s, self._look)

    def renew(self) -> None:
        """Record a heartbeat."""
        self._heard_at = self._loop.time()

    def stop(self) -> None:
        """Stop monitoring, as the call has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        due = self._heard_at + self._timeout_s
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._look)
        elif not self._future.done():
            self._future.set_exception(self._silence)
