"""Deliveries in, acknowledgements out: the one place that reads from a channel and settles on it.

An intake is one channel with its consumers. A delivery is settled on the channel
that it came on, or not at all: once that channel is gone the broker has taken
the message back. Acks of one iteration of the loop leave as few frames: one
`multiple` for all below the lowest tag that is unsettled, the others singly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from gracekit.process import Point, Process
from gracekit.rpc.amqp.bounds import CLOSE_S, TROUBLE, bounded, close_channel, said
from gracekit.rpc.amqp.channels import MessageChannel
from gracekit.rpc.amqp.frames import Delivered, Properties
from gracekit.rpc.transport import Delivery, OnDelivery, Queue, QueueKind, Settlement

ANSWER_S: Final = 10.0
"""Bound of one exchange on the channel."""
MOST_DOUBTED: Final = 1000
"""Strays that are remembered until they come again; one more is believed at once."""

# A message there asks a service to do something, under the name that the service goes by. A
# notification asks nobody: whatever key an operator has bound its queue under, it may be read.
_FOR_SERVICES: Final = frozenset({QueueKind.SHARED, QueueKind.DIRECTED})

_Stray = tuple[bytes, int, int]
"""What a message is known by: its key, and hash and dropped size of its body."""


class Intake:
    """One channel's consumers.

    Args:
        channel: Opened for this alone.
        on_delivery: See `Transport.consume`.
        process: Reaches the crash points.
        on_stale: Called for each settlement that came too late for the channel.
        keep: Largest body in bytes that is kept.
    """

    def __init__(
        self,
        channel: MessageChannel,
        on_delivery: OnDelivery,
        process: Process,
        on_stale: Callable[[], None],
        *,
        keep: int,
    ) -> None:
        self._channel = channel
        self._on_delivery = on_delivery
        self._process = process
        self._on_stale = on_stale
        self._queues: dict[str, Queue] = {}  # by consumer tag
        self._keys: dict[str, bytes] = {}  # by consumer tag: what messages of a service name
        self._doubted: set[_Stray] = set()  # on their way back, to come again
        self._unsettled: dict[int, None] = {}  # by delivery tag, which only rises
        self._acked: list[int] = []  # not yet told to the broker
        self._closing = False
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        channel.deliver_to(self._on_message, keep=keep)
        closing = channel.amqp.closing
        closing.add_done_callback(self._channel_closed)
        channel.amqp.on_consumer_cancel_callbacks.add(self._broker_cancelled)

    # -- reading -------------------------------------------------------------------------

    async def open(self, queues: Sequence[Queue], *, prefetch: int) -> None:
        """Read *queues*, which exist.

        A broker bounds the unsettled deliveries of each consumer, not of a channel (quorum
        queues refuse that): *prefetch* is divided among the queues, at least one each. The
        shared queue comes last: the answer to the next question would wait behind all that it
        delivers, and a backlog of large messages would keep a worker from starting.
        """
        each = max(1, prefetch // len(queues))
        await bounded(self._channel.amqp.basic_qos(prefetch_count=each), ANSWER_S, "prefetch")
        for number, queue in enumerate(sorted(queues, key=_is_shared), 1):
            # Unlike any other of this connection, also with a wrong bit: nothing is taken for
            # a delivery of another queue.
            tag = f"{number}.{self._channel.amqp.number}.{queue.name[:60]}"
            self._queues[tag] = queue
            if queue.kind in _FOR_SERVICES:
                self._keys[tag] = queue.name.encode()
            consuming = self._channel.consume(queue.name, tag)
            await bounded(consuming, ANSWER_S, f"consuming from {queue.name}")

    @property
    def unfinished(self) -> object:
        """See `MessageChannel.unfinished`."""
        return self._channel.unfinished

    def pause(self) -> None:
        """Read nothing more for now."""
        if not self._closing:
            self._channel.pause()

    def resume(self) -> None:
        """Read again."""
        self._channel.resume()

    async def wait_ended(self) -> str:
        """Wait until this intake delivers no more although nobody cancelled it; returns why."""
        return await asyncio.shield(self._ended)

    def end(self, reason: str) -> None:
        """It is of no use any more."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def _channel_closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self.end(said(error) if error else "the channel was closed")
        self._idle.set()

    def _broker_cancelled(self, frame: Any) -> None:
        queue = self._queues.get(frame.consumer_tag)
        self.end(f"the broker ended the reading of {queue.name if queue else 'a queue'}")

    def _on_message(self, delivered: Delivered, properties: Properties, body: bytes) -> None:
        if self._closing:
            return  # the broker takes it back with the channel
        tag, key = delivered.delivery_tag, delivered.key
        is_stray = self._keys.get(delivered.consumer_tag, key) != key
        if is_stray and self._doubts((key, hash(body), properties.dropped)):
            self._channel.nack(tag, requeue=True)
            return
        self._unsettled[tag] = None
        self._idle.clear()
        self._process.reach(Point.DELIVER, "before")
        self._on_delivery(
            Delivery(
                body=body,
                queue=self._queues[delivered.consumer_tag],
                redelivered=delivered.redelivered,
                expires_in_s=properties.expires_in_s,
                headers=properties.headers,
                dropped=properties.dropped,
                sent_to=key.decode(errors="replace") if is_stray else "",
                process=self._process,
                settle=partial(self._settle, tag),
            )
        )
        self._process.reach(Point.DELIVER, "after")

    def _doubts(self, stray: _Stray) -> bool:
        """Whether a stray is to come again: the line may have changed a bit of its key."""
        if stray in self._doubted:
            self._doubted.discard(stray)
            return False
        if len(self._doubted) >= MOST_DOUBTED:
            return False
        self._doubted.add(stray)
        return True

    # -- settling ------------------------------------------------------------------------

    async def _settle(self, tag: int, how: Settlement, reason: str) -> None:  # noqa: ARG002 - the reason is on record
        if self._closing or not self._channel.is_open:
            self._on_stale()
            return
        self._unsettled.pop(tag, None)
        if not self._unsettled:
            self._idle.set()
        if how is Settlement.ACK:
            if not self._acked:
                asyncio.get_running_loop().call_soon(self._tell)
            self._acked.append(tag)
            return
        # nack, never reject: from RabbitMQ 4.3 on only reject uses up the delivery limit.
        self._channel.nack(tag, requeue=how is Settlement.GIVE_BACK)
        await self._channel.flush()

    def _tell(self) -> None:
        """Send the acks of one iteration of the loop."""
        if self._acked and not self._closing:
            acked, self._acked = sorted(self._acked), []
            self._channel.ack(grouped(acked, next(iter(self._unsettled), None)))

    # -- the end -------------------------------------------------------------------------

    async def cancel(self) -> None:
        """Stop delivery; returns when the broker has confirmed it.

        Where it does not, or the wait is cancelled, the channel is closed: the broker then
        takes back what is unsettled.
        """
        self.resume()  # its answer comes behind what is on its way
        if self._ended.done():  # one of several queues may still be read
            await self.close()
            return
        self._channel.amqp.on_consumer_cancel_callbacks.discard(self._broker_cancelled)
        try:
            for tag in self._queues:
                await bounded(self._channel.cancel(tag), ANSWER_S, "cancel")
        except TROUBLE as error:
            self.end(said(error))
            await self.close()

    async def close(self) -> None:
        """Send the last acks and close the channel: what was not settled goes back.

        The broker reads frames in order, so its confirmation proves that it read the acks.
        """
        self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._channel.flush()
        self.resume()
        self._closing = True  # an ack after the close would cost the whole connection
        await close_channel(self._channel.amqp, CLOSE_S)
        self.end("closed")

    async def wait_idle(self) -> None:
        """Wait until everything delivered is settled, or void."""
        await self._idle.wait()


def _is_shared(queue: Queue) -> bool:
    return queue.kind is QueueKind.SHARED


def grouped(acked: Sequence[int], lowest_unsettled: int | None) -> list[tuple[int, bool]]:
    """As which frames acks leave: (delivery tag, multiple).

    Args:
        acked: Tags to acknowledge, rising.
        lowest_unsettled: Every tag below it is settled; None if all are.

    Returns:
        One `multiple` up to the last tag below the lowest unsettled one; each of the others
        by itself. `multiple` ends at a tag that the broker still holds, else it closes the
        channel.
    """
    whole = [tag for tag in acked if lowest_unsettled is None or tag < lowest_unsettled]
    frames = [(whole[-1], len(whole) > 1)] if whole else []
    return frames + [(tag, False) for tag in acked[len(whole) :]]
