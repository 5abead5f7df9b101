"""Sends notifications, and removes each from the outbox when the transport has confirmed it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from gracekit import backoff
from gracekit.errors import (
    MessageTooLargeError,
    StoreError,
    Undeliverable,
    UnserialisableError,
)
from gracekit.journal.outbox import OutboxRow, OutboxRows
from gracekit.journal.tasks import Journal
from gracekit.process import Point, Process
from gracekit.rpc.envelope import MAX_BODY_BYTES, check_size
from gracekit.rpc.failures import words_of
from gracekit.rpc.notifications import Notification, encode_notification, timestamp_of
from gracekit.rpc.transport import Message, Queue, Transport, notification_queue
from gracekit.telemetry.telemetry import Telemetry

AT_ONCE: Final = 50
LOOK_EVERY_S: Final = 30.0
"""Seconds after which notifications are found that came without a call of `poke`."""
CLOCK_SET_S: Final = 1.0
"""The wall clock counts as set if it moved by so many seconds more or less than the loop's time."""
LAST_SEND_S: Final = 0.5
"""A stop sends what is left for so many seconds at most; the next start sends the rest."""


class Outbox:
    """Sends the notifications of one run; see `journal.outbox`.

    Several are sent at a time, so readers may get them in another order.

    Args:
        topic: The queues are named `{topic}.{priority}`.
        publisher: `service.host`, the sender that readers see.
    """

    def __init__(
        self,
        transport: Transport,
        rows: OutboxRows,
        journal: Journal,
        process: Process,
        telemetry: Telemetry,
        *,
        topic: str,
        publisher: str,
    ) -> None:
        self._transport = transport
        self._rows = rows
        self._clock = journal.clock
        self._process = process
        self._telemetry = telemetry
        self._topic = topic
        self._publisher = publisher
        self._declared: set[Queue] = set()
        self._due = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._is_failing = False
        self._ahead_s: float | None = None  # wall time minus loop time

    def poke(self) -> None:
        """Look now: there may be a new notification."""
        self._due.set()

    async def work(self) -> None:
        """Send what is due until cancelled; after failures again, with growing pauses."""
        try:
            await self._send_for_ever()
        finally:
            self._rows.write_strokes()

    async def _send_for_ever(self) -> None:
        pauses = backoff.NOTIFICATIONS.pauses(self._clock)
        while True:
            self._due.clear()
            if self._is_clock_set():
                await asyncio.sleep(backoff.AFTER_CLOCK_S)
            if await self._send_all():
                pauses = backoff.NOTIFICATIONS.pauses(self._clock)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._due.wait()
            else:
                await asyncio.sleep(next(pauses))

    def _is_clock_set(self) -> bool:
        """Whether the wall clock was set since the last look; the next beat then adjusts rows."""
        ahead_s = self._clock.wall() - self._clock.loop()
        before_s, self._ahead_s = self._ahead_s, ahead_s
        return before_s is not None and abs(ahead_s - before_s) > CLOCK_SET_S

    async def finish(self) -> None:
        """Send what is left before the transport stops, within `LAST_SEND_S`.

        Waits for `work` to finish what it sends now: otherwise the next start would send it again.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SEND_S):
                await self._send_all()

    async def _send_all(self) -> bool:
        """Send all that is due, each once; returns whether nothing is left."""
        after, errors = 0, list[str]()
        try:
            async with self._one_at_a_time:
                while rows := await self._rows.due(after=after, limit=AT_ONCE):
                    after = rows[-1].id
                    errors += await self._send_some(rows)
        except StoreError as error:
            self._telemetry.emit("store.error", what="notifications", error=str(error))
            return False
        self._note(errors)
        return not errors

    async def _send_some(self, rows: Sequence[OutboxRow]) -> list[str]:
        """Send these and remove those that are done; returns the errors of the others."""
        now = self._clock.wall()
        fresh = [row for row in rows if row.expires_at > now]
        bodies = {row.id: self._body(row) for row in fresh}
        sending = [row for row in fresh if bodies[row.id] is not None]
        results = await asyncio.gather(*(self._send(row, bodies[row.id] or b"") for row in sending))
        sent = [row.id for row, error in zip(sending, results, strict=True) if error is None]
        expired = [row.id for row in rows if row.expires_at <= now]
        unsendable = [row.id for row in fresh if bodies[row.id] is None]
        if sent or expired or unsendable:
            self._rows.forget(sent, expired=expired, unsendable=unsendable)
        return [error for error in results if error is not None]

    def _note(self, errors: Sequence[str]) -> None:
        """Log the first of several failures in a row, and the first success after them."""
        if bool(errors) is not self._is_failing:
            self._is_failing = bool(errors)
            if errors:
                self._telemetry.emit("notifications.failed", topic=self._topic, error=errors[0])
            else:
                self._telemetry.emit("notifications.resumed", topic=self._topic)

    async def _send(self, row: OutboxRow, body: bytes) -> str | None:
        """Send one; returns why it could not be sent, or None."""
        queue = notification_queue(self._topic, row.priority.lower())
        left_s = max(0.001, row.expires_at - self._clock.wall())
        message = Message(body=body, expires_in_s=left_s)
        try:
            try:
                await self._publish(queue, message)
            except Undeliverable:  # the queue was deleted: declare it again
                self._declared.discard(queue)
                await self._publish(queue, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are sent
            return str(error) or words_of(error)
        return None

    async def _publish(self, queue: Queue, message: Message) -> None:
        self._process.reach(Point.NOTIFY, "before")
        if queue not in self._declared:
            await self._transport.declare([queue])
            self._declared.add(queue)
        await self._transport.publish(queue, message)
        self._process.reach(Point.NOTIFY, "after")

    def _body(self, row: OutboxRow) -> bytes | None:
        """The body of its message; None, and a line in the log, if it cannot be encoded."""
        notification = Notification(
            message_id=row.message_id,
            publisher_id=self._publisher,
            event_type=row.event_type,
            priority=row.priority,
            payload=row.payload,
            timestamp=timestamp_of(row.at),
            context=row.payload.get("context", {}),
        )
        try:
            body = encode_notification(notification, unique_id=self._clock.new_id())
            check_size(len(body), max_bytes=MAX_BODY_BYTES)
        except (UnserialisableError, MessageTooLargeError) as error:
            self._telemetry.emit(
                "notification.unsendable",
                task_id=str(row.payload.get("task_id")),
                method=str(row.payload.get("method")),
                error=str(error),
            )
            return None
        return body
