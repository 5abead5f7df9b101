"""One consumer of the SQLite transport: when woken, it claims messages and delivers them.

A claim is one statement, which takes as many messages as the prefetch allows. Messages
that were claimed but not delivered, because of a cancel or a commit of unknown
outcome, are unclaimed, as if they had never been claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gracekit import background
from gracekit.clock import Clock
from gracekit.errors import StoreBrokenError, StoreError
from gracekit.process import Process
from gracekit.rpc.sqlite import sqlite_rows as rows
from gracekit.rpc.transport import Delivery, OnDelivery, Queue, ReadFailure, Settlement
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine, Rows
from gracekit.store.wakeup import wake
from gracekit.telemetry.telemetry import Telemetry

OTHERS_FIRST_S: Final = 0.25
"""Seconds for which a reader does not claim messages that it gave back itself, so that other
readers get them first: perhaps only one of them serves the version of the request."""


def wake_all(wakeups: Sequence[Row], directory: Path) -> bool:
    """Wake the owner of each (path,) row; return False if one could not be woken, and may be dead.

    Paths are as their owners see them, perhaps in another container, so only the file name is used,
    in *directory*.
    """
    names = [Path(str(path)).name for (path,) in wakeups]
    return all([wake(directory / name) for name in names])  # noqa: C419 - all must be woken


class SqliteConsumer:
    """See `Consumer`; its rows in `consumer` and `subscription` must exist before `start`."""

    def __init__(
        self,
        engine: Engine,
        queues: Sequence[Queue],
        on_delivery: OnDelivery,
        *,
        consumer_id: str,
        prefetch: int,
        wakeups: Path,
        process: Process,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self.id: Final = consumer_id
        self._wakeups = wakeups
        self._engine = engine
        self._queues = {queue.name: queue for queue in queues}
        self._on_delivery = on_delivery
        self._prefetch = prefetch
        self._process = process
        self._clock = clock
        self._telemetry = telemetry
        self._unsettled: dict[int, rows.Claimed] = {}
        self._given_back: set[int] = set()  # within the last OTHERS_FIRST_S
        self._woken = asyncio.Event()
        self._may_have_more = True  # False after a claim that got fewer than it asked for
        self._in_doubt = False  # there may be claimed messages that were not delivered
        self._asking_since: float | None = None  # loop time at which a claim began
        self._failure: ReadFailure | None = None
        self._owed: list[tuple[rows.Claimed, Settlement, str]] = []
        self._paused = False
        self._cancelled = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to deliver, including messages that wait already."""
        self._woken.set()
        self._task = background.start(
            self._claim_when_woken,
            f"reader of {next(iter(self._queues))}",
            telemetry=self._telemetry,
            clock=self._clock,
        )

    @property
    def failure(self) -> ReadFailure | None:
        """See `Consumer.failure`; also set while a claim is being made."""
        if self._failure is None and self._asking_since is not None:
            return ReadFailure(since=self._asking_since, why="the queue file does not answer")
        return self._failure

    def pause(self) -> None:
        """See `Consumer.pause`."""
        self._paused = True

    def resume(self) -> None:
        """See `Consumer.resume`."""
        self._paused = False
        self.wake()

    def wake(self) -> None:
        """Look for messages soon."""
        self._may_have_more = True
        self._woken.set()

    @property
    def is_done(self) -> bool:
        """Whether it is cancelled and all its deliveries are settled."""
        return self._cancelled.is_set() and not self._unsettled and not self._in_doubt

    @property
    def is_behind(self) -> bool:
        """Whether it owes a settlement, or must undo a claim of unknown outcome."""
        return bool(self._owed) or self._in_doubt

    async def look_again(self) -> None:
        """Find messages whose wake-up was missed: query first, and claim only if there are any.

        Failed settlements are retried first, and claims of unknown outcome are undone.
        """
        owed, self._owed = self._owed, []
        for message, how, reason in owed:
            with contextlib.suppress(StoreError):  # `_settle` adds it to `_owed` again
                await self._settle(message, how, reason)
        if self._cancelled.is_set():
            if self._in_doubt:
                await self._put_back_unseen()
                self._in_doubt = False
            return
        if self._in_doubt or await self._has_waiting():
            self.wake()

    async def _has_waiting(self) -> bool:
        try:
            found = await self._engine.query(rows.has_waiting(list(self._queues)), *self._queues)
        except StoreError as error:
            self._note_failure(error)
            raise
        return bool(found)

    async def cancel(self) -> None:
        """See `Consumer.cancel`."""
        await self._stop_claiming()
        if not self._closed:
            with contextlib.suppress(StoreError):  # at worst it is woken in vain
                await self._engine.commit(rows.unsubscribe(self.id))

    async def halt(self) -> None:
        """End with the connection: claim nothing more; later settlements do nothing."""
        self._closed = True
        await self._stop_claiming()

    async def _stop_claiming(self) -> None:
        self._cancelled.set()
        self._woken.set()
        if self._task is not None:
            # Wait, do not cancel: messages claimed by a commit under way must be put back.
            await asyncio.wait({self._task})

    # -- claiming -------------------------------------------------------------

    async def _claim_when_woken(self) -> None:
        while not self._cancelled.is_set():
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._ask()
            except StoreBrokenError:
                return
            except StoreError as error:
                # Unknown outcome, or a passing error: the safety poll wakes this consumer again.
                self._in_doubt = True
                self._note_failure(error)
            except Exception as error:
                # Messages that were claimed and not delivered are put back and claimed again.
                self._in_doubt = True
                self._note_failure(error)
                self.wake()
                raise

    async def _ask(self) -> None:
        self._asking_since = self._clock.loop()
        try:
            await self._fill()
        finally:
            self._asking_since = None
        self._failure = None

    def _note_failure(self, error: Exception) -> None:
        since = self._clock.loop() if self._failure is None else self._failure.since
        self._failure = ReadFailure(since=since, why=str(error) or repr(error))

    async def _fill(self) -> None:
        """Claim and deliver until the prefetch is used up or no message waits."""
        if self._in_doubt:
            await self._put_back_unseen()
            self._in_doubt = False
        while not self._cancelled.is_set() and self._may_have_more and self._room > 0:
            room = self._room
            self._may_have_more = False  # a wake-up during the claim sets it again
            batch = rows.claim(
                list(self._queues),
                self.id,
                limit=room,
                now=self._clock.wall(),
                without=self._given_back,
            )
            claimed = rows.claimed_of((await self._engine.commit(batch))[0])
            if self._cancelled.is_set():
                self._in_doubt = True
                await self._put_back_unseen()
                self._in_doubt = False
                return
            self._may_have_more |= len(claimed) == room
            for message in claimed:
                if message.fault:
                    await self._set_aside(message)
                else:
                    self._deliver(message)

    async def _set_aside(self, message: rows.Claimed) -> None:
        """Dead-letter an unusable message, which would otherwise be claimed again for ever."""
        self._unsettled[message.message_id] = message
        self._telemetry.emit("message.unreadable", queue=message.queue, error=message.fault)
        await self._settle(message, Settlement.DEAD_LETTER, message.fault)

    @property
    def _room(self) -> int:
        return 0 if self._paused else self._prefetch - len(self._unsettled)

    async def _put_back_unseen(self) -> None:
        await self._engine.commit(rows.unclaim(self.id, sorted(self._unsettled)))

    def _deliver(self, message: rows.Claimed) -> None:
        self._unsettled[message.message_id] = message

        async def settle(how: Settlement, reason: str) -> None:
            await self._settle(message, how, reason)

        expires_in_s = None
        if message.expires_at is not None:
            expires_in_s = max(0.0, message.expires_at - self._clock.wall())
        self._on_delivery(
            Delivery(
                body=message.body,
                queue=self._queues[message.queue],
                redelivered=message.redelivered,
                expires_in_s=expires_in_s,
                headers=message.headers,
                process=self._process,
                settle=settle,
            )
        )

    # -- settling -------------------------------------------------------------

    async def _settle(self, message: rows.Claimed, how: Settlement, reason: str) -> None:
        if self._closed:
            return
        if how is Settlement.GIVE_BACK:
            self._leave_to_others(message.message_id)
        try:
            results = await self._commit_settlement(self._settlement(message, how, reason))
        except StoreError:
            self._owed.append((message, how, reason))  # retried at each safety poll
            raise
        # After a give-back, a new claim may have replaced the entry already.
        if self._unsettled.get(message.message_id) is message:
            del self._unsettled[message.message_id]
        if self._may_have_more:
            self._woken.set()
        if how is Settlement.GIVE_BACK:
            wakeups = results[rows.WAKEUPS] if results else []
            if len(wakeups) <= 1:
                self._given_back.discard(message.message_id)  # there are no other readers
            wake_all(wakeups, self._wakeups)

    def _leave_to_others(self, message_id: int) -> None:
        """For `OTHERS_FIRST_S`, do not claim a message that we give back, so that others can."""
        self._given_back.add(message_id)
        asyncio.get_running_loop().call_later(OTHERS_FIRST_S, self._claim_too, message_id)

    def _claim_too(self, message_id: int) -> None:
        self._given_back.discard(message_id)
        self.wake()

    def _settlement(self, message: rows.Claimed, how: Settlement, reason: str) -> Batch:
        match how:
            case Settlement.ACK:
                return rows.ack(message.message_id, self.id)
            case Settlement.GIVE_BACK:
                return rows.give_back(message.message_id, self.id, message.queue)
            case Settlement.DEAD_LETTER:
                return rows.dead_letter(message.message_id, self.id, reason, now=self._clock.wall())

    async def _commit_settlement(self, batch: Batch) -> Rows:
        """Commit, and try once more if that fails; settling twice does no harm.

        If the file is broken, nothing is settled: the message is redelivered after a restart.
        """
        for _ in range(2):
            try:
                return await self._engine.commit(batch)
            except StoreBrokenError:
                return []
            except StoreError as error:
                failed = error
        raise failed
