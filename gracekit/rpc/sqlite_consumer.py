"""One subscription on the SQLite transport: claims on being woken, and settles.

A claim is one statement that takes as many messages as there is room for. What
was claimed but not delivered, because of a cancel or a commit of unknown
outcome, goes back as if it had not been claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import StoreBrokenError, StoreError
from gracekit.process import Process
from gracekit.rpc import sqlite_rows as rows
from gracekit.rpc.transport import Delivery, OnDelivery, Queue, Settlement
from gracekit.store.batch import Batch, Row
from gracekit.store.bell import ring
from gracekit.store.engine import Engine, Rows


def ring_all(bells: Sequence[Row], directory: Path) -> bool:
    """Ring each (path,) row; false if one was not heard, whose owner may be dead.

    A path is as its owner sees it, so the bell is found by its name in *directory*.
    """
    names = [Path(str(path)).name for (path,) in bells]
    return all([ring(directory / name) for name in names])  # noqa: C419 - all must be rung


class SqliteConsumer:
    """See `Consumer`; its rows of consumer and subscription exist before `start`."""

    def __init__(
        self,
        engine: Engine,
        queues: Sequence[Queue],
        on_delivery: OnDelivery,
        *,
        consumer_id: str,
        prefetch: int,
        bells: Path,
        process: Process,
        clock: Clock,
    ) -> None:
        self.id: Final = consumer_id
        self._bells = bells
        self._engine = engine
        self._queues = {queue.name: queue for queue in queues}
        self._on_delivery = on_delivery
        self._prefetch = prefetch
        self._process = process
        self._clock = clock
        self._unsettled: dict[int, rows.Claimed] = {}
        self._woken = asyncio.Event()
        self._may_have_more = True  # false once a claim found less than there was room for
        self._in_doubt = False  # a claim's commit is of unknown outcome
        self._owed: list[tuple[rows.Claimed, Settlement, str]] = []
        self._cancelled = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to deliver what waits already."""
        self._woken.set()
        self._task = asyncio.create_task(self._claim_when_woken())

    def wake(self) -> None:
        """Look for messages soon: somebody rang."""
        self._may_have_more = True
        self._woken.set()

    @property
    def is_done(self) -> bool:
        """Whether it is cancelled and everything that it held is settled."""
        return self._cancelled.is_set() and not self._unsettled and not self._in_doubt

    async def look_again(self) -> None:
        """Find messages whose ring was missed; reads, and claims only if there are any.

        What could not be settled, or may have been claimed unseen, is put right first.
        """
        owed, self._owed = self._owed, []
        for message, how, reason in owed:
            with contextlib.suppress(StoreError):  # owed again
                await self._settle(message, how, reason)
        if self._cancelled.is_set():
            if self._in_doubt:
                await self._put_back_unseen()
                self._in_doubt = False
            return
        sql = rows.has_waiting(list(self._queues))
        if self._in_doubt or await self._engine.query(sql, *self._queues):
            self.wake()

    async def cancel(self) -> None:
        """See `Consumer.cancel`."""
        await self._stop_claiming()
        if not self._closed:
            with contextlib.suppress(StoreError):  # at worst it is rung for nothing
                await self._engine.commit(rows.unsubscribe(self.id))

    async def halt(self) -> None:
        """The connection ends: claim nothing more, and let later settlements do nothing."""
        await self._stop_claiming()
        self._closed = True

    async def _stop_claiming(self) -> None:
        self._cancelled.set()
        self._woken.set()
        if self._task is not None:
            # Not cancelled: a claim whose commit is under way must be seen, to be put back.
            await asyncio.wait({self._task})

    # -- claiming -------------------------------------------------------------

    async def _claim_when_woken(self) -> None:
        while not self._cancelled.is_set():
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._fill()
            except StoreBrokenError:
                return
            except StoreError:
                # Not known, or not now: the safety poll wakes this consumer again.
                self._in_doubt = True

    async def _fill(self) -> None:
        """Claim and deliver until there is no room or nothing more waits."""
        if self._in_doubt:
            await self._put_back_unseen()
            self._in_doubt = False
        while not self._cancelled.is_set() and self._may_have_more and self._room > 0:
            room = self._room
            self._may_have_more = False  # a ring during the claim makes it true again
            batch = rows.claim(list(self._queues), self.id, limit=room, now=self._clock.wall())
            claimed = rows.claimed_of((await self._engine.commit(batch))[0])
            if self._cancelled.is_set():
                self._in_doubt = True
                await self._put_back_unseen()
                self._in_doubt = False
                return
            self._may_have_more |= len(claimed) == room
            for message in claimed:
                self._deliver(message)

    @property
    def _room(self) -> int:
        return self._prefetch - len(self._unsettled)

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
        try:
            results = await self._commit_settlement(self._settlement(message, how, reason))
        except StoreError:
            self._owed.append((message, how, reason))  # tried again at each safety poll
            raise
        # Given back, it may have been claimed again before this line.
        if self._unsettled.get(message.message_id) is message:
            del self._unsettled[message.message_id]
        if self._may_have_more:
            self._woken.set()
        if how is Settlement.GIVE_BACK and results:
            ring_all(results[rows.BELLS], self._bells)

    def _settlement(self, message: rows.Claimed, how: Settlement, reason: str) -> Batch:
        match how:
            case Settlement.ACK:
                return rows.ack(message.message_id, self.id)
            case Settlement.GIVE_BACK:
                return rows.give_back(message.message_id, self.id, message.queue)
            case Settlement.DEAD_LETTER:
                return rows.dead_letter(message.message_id, self.id, reason, now=self._clock.wall())

    async def _commit_settlement(self, batch: Batch) -> Rows:
        """Commit, and once more if that failed: whether the first try held does not matter.

        With the file broken nothing is settled; the message is delivered again after a restart.
        """
        for _ in range(2):
            try:
                return await self._engine.commit(batch)
            except StoreBrokenError:
                return []
            except StoreError as error:
                failed = error
        raise failed
