"""Deliveries in, acknowledgements out: the only module that reads and settles deliveries.

An intake is one channel with its consumers. A delivery can be settled only on the
channel that it came on: when that channel is gone, the broker has requeued the
message. The acks of one iteration of the loop are sent as few frames: one with
`multiple` for all tags below the lowest unsettled one, and one for each other tag.
Those of replies to a client wait a little for more, see `REPLY_ACKS_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from gracekit.process import Point, Process
from gracekit.rpc.amqp.bounds import CLOSE_S, TROUBLE, bounded, close_channel, said
from gracekit.rpc.amqp.channels import MessageChannel
from gracekit.rpc.amqp.frames import Delivered, Properties
from gracekit.rpc.transport import Delivery, OnDelivery, Queue, QueueKind, Settlement

ANSWER_S: Final = 10.0
"""Timeout in seconds of one exchange on the channel."""
REPLY_ACKS_S: Final = 0.05
"""Seconds for which the ack of a reply waits for others: each frame that is sent costs client and
broker a wake-up. If the connection is lost meanwhile, the replies come again and are ignored."""
REPLY_ACKS: Final = 32
"""So many acks of replies wait for no more; it is below the prefetch of a client."""

# Messages in these queues are requests to a service, so their routing key must be its queue's
# name. A notification is for any reader: an operator may bind its queue under any key.
_FOR_SERVICES: Final = frozenset({QueueKind.SHARED, QueueKind.DIRECTED})


class Intake:
    """The consumers of one channel.

    Args:
        channel: A channel used by this intake alone.
        on_delivery: See `Transport.consume`.
        process: Its `reach` is called before and after each delivery, for crash tests.
        keep: Largest body in bytes to read; of larger ones only the size is kept.
    """

    def __init__(
        self,
        channel: MessageChannel,
        on_delivery: OnDelivery,
        process: Process,
        *,
        keep: int,
    ) -> None:
        self._channel = channel
        self._on_delivery = on_delivery
        self._process = process
        self._queues: dict[str, Queue] = {}  # by consumer tag
        self._keys: dict[str, bytes] = {}  # the routing key due, by consumer tag
        self._unsettled: dict[int, None] = {}  # delivery tags, in rising order
        self._acked: list[int] = []  # acks that are not sent yet
        self._of_replies = False
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
        """Start to read the existing *queues*.

        The prefetch of AMQP bounds each consumer, not the channel (quorum queues refuse a bound
        on the channel), so *prefetch* is divided among the queues, at least 1 each. The shared
        queue comes last: otherwise the broker's answers to the next requests would arrive behind
        its deliveries, and a backlog of large messages would prevent a worker from starting.
        """
        each = max(1, prefetch // len(queues))
        self._of_replies = all(queue.kind is QueueKind.REPLY for queue in queues)
        await bounded(self._channel.amqp.basic_qos(prefetch_count=each), ANSWER_S, "prefetch")
        for number, queue in enumerate(sorted(queues, key=_is_shared), 1):
            # Tags of a connection differ in more than one bit: a bit error in a tag never makes
            # a delivery look as if it came from another queue.
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
        """Stop reading until `resume`."""
        if not self._closing:
            self._channel.pause()

    def resume(self) -> None:
        """Read again."""
        self._channel.resume()

    async def wait_ended(self) -> str:
        """Wait until this intake ends without being cancelled; return why it ended."""
        return await asyncio.shield(self._ended)

    def end(self, reason: str) -> None:
        """Mark this intake as ended."""
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
            return  # the broker requeues it when the channel closes
        tag, key = delivered.delivery_tag, delivered.key
        is_copy = self._keys.get(delivered.consumer_tag, key) != key
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
                sent_to=key.decode(errors="replace") if is_copy else "",
                process=self._process,
                settle=partial(self._settle, tag),
                ack_at_once=partial(self._ack_reply, tag) if self._of_replies else None,
            )
        )
        self._process.reach(Point.DELIVER, "after")

    # -- settling ------------------------------------------------------------------------

    async def _settle(self, tag: int, how: Settlement, reason: str) -> None:  # noqa: ARG002 - the reason is on record
        if not self._has_settled(tag):
            return
        if how is Settlement.ACK:
            if not self._acked:
                asyncio.get_running_loop().call_soon(self._tell)
            self._acked.append(tag)
            return
        # nack, never reject: from RabbitMQ 4.3 on only reject uses up the delivery limit.
        self._channel.nack(tag, requeue=how is Settlement.GIVE_BACK)

    def _ack_reply(self, tag: int) -> None:
        if not self._has_settled(tag):
            return
        if not self._acked:
            asyncio.get_running_loop().call_later(REPLY_ACKS_S, self._tell)
        self._acked.append(tag)
        if len(self._acked) >= REPLY_ACKS:
            self._tell()

    def _has_settled(self, tag: int) -> bool:
        """Note that a delivery is settled; False if its channel is gone.

        The broker then delivers the message again, and the journal recognises the duplicate.
        """
        if self._closing or not self._channel.is_open:
            return False
        self._unsettled.pop(tag, None)
        if not self._unsettled:
            self._idle.set()
        return True

    def _tell(self) -> None:
        """Send the acks that wait."""
        if self._acked and not self._closing:
            acked, self._acked = sorted(self._acked), []
            self._channel.ack(grouped(acked, next(iter(self._unsettled), None)))

    # -- the end -------------------------------------------------------------------------

    async def cancel(self) -> None:
        """Stop the deliveries, and wait for the broker to confirm it.

        If it does not, the channel is closed: the broker then requeues unsettled deliveries.
        """
        self._tell()
        self.resume()  # the broker's answer comes after the deliveries on their way
        if self._ended.done():  # it ended with one queue, and may still read its others
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
        """Send the last acks and close the channel; the broker requeues unsettled deliveries.

        The broker reads frames in order, so when it confirms the close, it has read the acks.
        """
        self._tell()
        self.resume()
        self._closing = True  # for an ack after the close the broker would close the connection
        await close_channel(self._channel.amqp, CLOSE_S)
        self.end("closed")

    async def wait_idle(self) -> None:
        """Wait until all deliveries are settled, or the channel is gone."""
        await self._idle.wait()


def _is_shared(queue: Queue) -> bool:
    return queue.kind is QueueKind.SHARED


def grouped(acked: Sequence[int], lowest_unsettled: int | None) -> list[tuple[int, bool]]:
    """The ack frames to send, each as (delivery tag, multiple).

    Args:
        acked: Tags to acknowledge, in rising order.
        lowest_unsettled: The lowest tag that is not settled; None if all are.

    Returns:
        One `multiple` for the tags below *lowest_unsettled*, and one frame for each other tag.
        The `multiple` names the last of *acked* below it, a tag that the broker still holds; for
        an unknown tag it would close the channel.
    """
    whole = [tag for tag in acked if lowest_unsettled is None or tag < lowest_unsettled]
    frames = [(whole[-1], len(whole) > 1)] if whole else []
    return frames + [(tag, False) for tag in acked[len(whole) :]]
