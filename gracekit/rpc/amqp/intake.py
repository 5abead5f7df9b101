"""Deliveries in, acknowledgements out: the one place that reads from a channel and settles on it.

An intake is one channel with its consumers. A delivery is settled on the channel
that it came on, or not at all: once that channel is gone the broker has taken
the message back. Acks of one turn of the loop leave as few frames: one
`multiple` over each run of tags that is settled without a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic

from gracekit.process import Point, Process
from gracekit.rpc.amqp.link import TROUBLE, bounded, close_channel, said
from gracekit.rpc.transport import Delivery, OnDelivery, Queue, Settlement

ANSWER_S: Final = 10.0
"""Bound of one exchange on the channel."""
CLOSE_S: Final = 2.0


class Intake:
    """One channel's consumers.

    Args:
        channel: Opened for this alone.
        on_delivery: See `Transport.consume`.
        process: Reaches the crash points.
        on_stale: Called for each settlement that came too late for the channel.
    """

    def __init__(
        self,
        channel: Channel,
        on_delivery: OnDelivery,
        process: Process,
        on_stale: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._on_delivery = on_delivery
        self._process = process
        self._on_stale = on_stale
        self._queues: dict[str, Queue] = {}  # by consumer tag
        self._unsettled: dict[int, None] = {}  # by delivery tag, which only rises
        self._acked: list[int] = []  # not yet told to the broker
        self._telling: asyncio.Task[None] | None = None
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        closing = channel.closing
        closing.add_done_callback(self._channel_closed)
        channel.on_consumer_cancel_callbacks.add(self._broker_cancelled)

    # -- reading -------------------------------------------------------------------------

    async def open(self, queues: Sequence[Queue], *, prefetch: int) -> None:
        """Read *queues*, which exist.

        A broker bounds the unsettled deliveries of each consumer, not of a channel (quorum
        queues refuse that): *prefetch* is divided among the queues, at least one each.
        """
        each = max(1, prefetch // len(queues))
        await bounded(self._channel.basic_qos(prefetch_count=each), ANSWER_S, "prefetch")
        for number, queue in enumerate(queues, 1):
            tag = str(number)
            self._queues[tag] = queue
            consuming = self._channel.basic_consume(queue.name, self._on_message, consumer_tag=tag)
            await bounded(consuming, ANSWER_S, f"consuming from {queue.name}")

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

    async def _on_message(self, message: DeliveredMessage) -> None:
        # aiormq cancels this task when the channel ends: nothing here waits.
        delivered = message.delivery
        assert isinstance(delivered, Basic.Deliver)
        tag, consumer_tag = delivered.delivery_tag, delivered.consumer_tag
        assert tag is not None
        assert consumer_tag is not None
        self._unsettled[tag] = None
        self._idle.clear()
        self._process.reach(Point.DELIVER, "before")
        properties = message.header.properties
        self._on_delivery(
            Delivery(
                body=message.body,
                queue=self._queues[consumer_tag],
                redelivered=bool(delivered.redelivered),
                expires_in_s=_seconds(properties.expiration),
                headers=_texts(properties.headers),
                process=self._process,
                settle=partial(self._settle, tag),
            )
        )
        self._process.reach(Point.DELIVER, "after")

    # -- settling ------------------------------------------------------------------------

    async def _settle(self, tag: int, how: Settlement, reason: str) -> None:  # noqa: ARG002 - the reason is on record
        if self._closing or self._channel.is_closed:
            self._on_stale()
            return
        if how is Settlement.ACK:
            self._settled(tag)
            self._acked.append(tag)
            self._tell_soon()
            return
        requeue = how is Settlement.GIVE_BACK
        # nack, never reject: from RabbitMQ 4.3 on only reject uses up the delivery limit.
        try:
            await bounded(
                self._channel.basic_nack(tag, requeue=requeue, wait=False), ANSWER_S, "nack"
            )
        except BaseException as error:
            # The frame may not have left: unsettled, the tag keeps a later ack from including it.
            self._give_up(error)
            if not isinstance(error, TROUBLE):
                raise
        else:
            self._settled(tag)

    def _settled(self, tag: int) -> None:
        self._unsettled.pop(tag, None)
        if not self._unsettled:
            self._idle.set()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Send the acks that have gathered, and those that gather meanwhile."""
        try:
            while self._acked:
                acked, self._acked = sorted(self._acked), []
                for tag, multiple in grouped(acked, next(iter(self._unsettled), None)):
                    await bounded(
                        self._channel.basic_ack(tag, multiple=multiple, wait=False),
                        ANSWER_S,
                        "ack",
                    )
        except TROUBLE as error:
            self._give_up(error)
        finally:
            self._telling = None

    def _give_up(self, error: BaseException) -> None:
        """A settlement did not leave: only the end of the channel makes the broker forget it."""
        self._on_stale()
        self.end(said(error))
        if self._ending is None:
            self._ending = asyncio.create_task(self.close())

    # -- the end -------------------------------------------------------------------------

    async def cancel(self) -> None:
        """Stop delivery; returns when the broker has confirmed it.

        Where it does not, or the wait is cancelled, the channel is closed: the broker then
        takes back what is unsettled.
        """
        if self._ended.done():  # one of several queues may still be read
            await self.close()
            return
        self._channel.on_consumer_cancel_callbacks.discard(self._broker_cancelled)
        try:
            for tag in self._queues:
                await bounded(self._channel.basic_cancel(tag), ANSWER_S, "cancel")
            await asyncio.sleep(0)  # deliveries that came before the confirmation are on their way
        except TROUBLE as error:
            self.end(said(error))
            await self.close()

    async def close(self) -> None:
        """Send the last acks and close the channel: what was not settled goes back.

        The broker reads frames in order, so its confirmation proves that it read the acks.
        """
        if self._telling is not None:
            await asyncio.wait({self._telling}, timeout=CLOSE_S)
        self._closing = True  # an ack after the close would cost the whole connection
        await close_channel(self._channel, CLOSE_S)
        self.end("closed")

    async def wait_idle(self) -> None:
        """Wait until everything delivered is settled, or void."""
        await self._idle.wait()


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


def _seconds(expiration: str | None) -> float | None:
    """The sender's patience; how long the message has waited already is not on the wire."""
    try:
        return None if expiration is None else max(0.0, int(expiration) / 1000)
    except ValueError:
        return None


def _texts(headers: Any) -> dict[str, str]:
    if not headers:
        return {}
    return {key: value for key, value in headers.items() if isinstance(value, str)}
