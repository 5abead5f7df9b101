"""The SQLite consumer when its store answers late, wrongly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gracekit.clock import Clock
from gracekit.errors import StoreBrokenError, StoreError, UnknownCommitError
from gracekit.process import Point, Process
from gracekit.rpc.sqlite import SqliteTransport
from gracekit.rpc.transport import shared_queue
from gracekit.store.batch import Batch
from gracekit.store.engine import Rows, SqliteEngine
from tests.rpc.kit import Inbox, message

QUEUE = shared_queue("q")


class FaultyTransport(SqliteTransport):
    """Its engine fails the next commits of some points, before or after their effect."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, process=Process(), clock=Clock(), poll_s=0.02)
        self.faults: list[tuple[Point, bool, StoreError]] = []
        self._engine: SqliteEngine = FaultyEngine(self._engine, self.faults)  # type: ignore[assignment]


class FaultyEngine:
    """The real engine, with faults drawn from a list that the test fills."""

    def __init__(self, engine: SqliteEngine, faults: list[tuple[Point, bool, StoreError]]) -> None:
        self._real = engine
        self._faults = faults

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def commit(self, batch: Batch) -> Rows:
        if self._faults and self._faults[0][0] is batch.point:
            _, has_effect, error = self._faults.pop(0)
            if has_effect:
                await self._real.commit(batch)
            raise error
        return await self._real.commit(batch)


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[FaultyTransport]:
    transport = FaultyTransport(tmp_path / "queues.db")
    await transport.start()
    yield transport
    await transport.stop()


@pytest.mark.parametrize("has_effect", [True, False])
async def test_a_claim_of_unknown_outcome_loses_nothing(transport, has_effect):
    """
    Whether the claim held or not, its messages are delivered, in order and as new.
    """
    inbox = Inbox()
    await transport.declare([QUEUE])
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    transport.faults.append((Point.DELIVER, has_effect, UnknownCommitError("lost the answer")))

    await transport.consume([QUEUE], inbox.put, prefetch=10)
    await inbox.take(2)

    assert inbox.bodies == ["a", "b"]
    assert not any(delivery.redelivered for delivery in inbox.all)


@pytest.mark.parametrize("has_effect", [True, False])
async def test_a_settlement_is_tried_twice(transport, has_effect):
    """
    One lost answer does not leave a message in limbo: the second try settles it, once.
    """
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    delivery = await inbox.next()
    transport.faults.append((Point.ACK, has_effect, UnknownCommitError("lost the answer")))

    await delivery.ack()

    assert (await inbox.next()).body == b"b"


async def test_a_cancel_during_a_claim_puts_back_what_it_took(transport):
    """
    Messages claimed for a consumer that was cancelled meanwhile go to others as new.
    """
    await transport.declare([QUEUE])
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    first, second = Inbox(), Inbox()

    consumer = await transport.consume([QUEUE], first.put, prefetch=10)
    await asyncio.sleep(0)  # its claim is on the way now
    await consumer.cancel()
    await transport.consume([QUEUE], second.put, prefetch=10)
    await second.take(2 - len(first.bodies))

    assert first.bodies + second.bodies == ["a", "b"]
    assert not any(delivery.redelivered for delivery in second.all)


async def test_a_broken_file_ends_claiming_and_settles_nothing(transport):
    """
    After a disk error acks do nothing and raise nothing: the messages come again after a restart.
    """
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)
    await transport.publish(QUEUE, message("a"))
    delivery = await inbox.next()
    transport.faults.append((Point.ACK, False, StoreBrokenError("disk")))

    await delivery.ack()
