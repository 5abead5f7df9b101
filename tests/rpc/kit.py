"""What the transport tests share: an inbox to await, and machines to test on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Protocol

import aiormq
from aiormq.abc import DeliveredMessage

from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.sqlite.sqlite_rows import _headers_of
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import DeadLetter, Delivery, Message, Transport
from gracekit.telemetry.telemetry import Telemetry

PATIENCE_S = 300.0  # for what must happen; never waited for in full
FOR_EVER_S = 3600.0  # a safety poll that no test lives to see


def message(text: str, expires_in_s: float | None = None) -> Message:
    return Message(body=text.encode(), expires_in_s=expires_in_s)


class Inbox:
    """Deliveries as they come; its `put` is a consumer's callback."""

    def __init__(self) -> None:
        self.all: list[Delivery] = []
        self._taken = 0
        self._news = asyncio.Event()

    def put(self, delivery: Delivery) -> None:
        self.all.append(delivery)
        self._news.set()

    @property
    def bodies(self) -> list[str]:
        return [delivery.body.decode() for delivery in self.all]

    async def take(self, number: int = 1) -> list[Delivery]:
        """Wait for the next *number* deliveries."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.all) < self._taken + number:
                self._news.clear()
                await self._news.wait()
        self._taken += number
        return self.all[self._taken - number : self._taken]

    async def next(self) -> Delivery:
        return (await self.take())[0]


class ShiftedClock(Clock):
    """Wall time that a test moves on."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.shift_s


class Machine(Protocol):
    """What all transports of one test are connected to.

    Attributes:
        keeps_reasons: Whether a dead letter carries its consumer's reason, and who reads a
            queue is known by name; a broker's are in the journal alone.
        counts_in_hand: Whether `depth` counts what consumers hold.
    """

    keeps_reasons: bool
    counts_in_hand: bool

    async def connect(self) -> Transport: ...
    async def pass_time(self, seconds: float) -> None: ...
    async def expired(self) -> dict[str, int]: ...
    async def dead_letters(self) -> list[DeadLetter]: ...
    async def close(self) -> None: ...


class MemoryMachine:
    keeps_reasons = counts_in_hand = True

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self._transports: list[MemoryTransport] = []

    async def connect(self) -> MemoryTransport:
        transport = MemoryTransport(self.broker, Process())
        self._transports.append(transport)
        await transport.start()
        return transport

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def expired(self) -> dict[str, int]:
        return dict(self.broker.expired())

    async def dead_letters(self) -> list[DeadLetter]:
        return self.broker.dead_letters

    async def close(self) -> None:
        for transport in self._transports:
            await transport.stop()


async def dead_letters(transport: SqliteTransport) -> list[DeadLetter]:
    """The dead letters in a file, oldest first."""
    found = await transport._engine.query(
        "SELECT queue, body, CAST(headers AS BLOB), reason FROM dead_letter ORDER BY dead_letter_id"
    )
    return [
        DeadLetter(queue=queue, body=body, headers=_headers_of(headers)[0], reason=reason)
        for queue, body, headers, reason in found
    ]


async def counted(transport: SqliteTransport, table: str) -> dict[str, int]:
    """How many messages of each queue expired, or were removed from the dead letters."""
    return dict(await transport._engine.query(f"SELECT queue, number FROM {table}"))


class SqliteMachine:
    keeps_reasons = counts_in_hand = True

    def __init__(self, directory: Path) -> None:
        self.path = directory / "queues.db"
        self.clock = ShiftedClock()
        self._transports: list[SqliteTransport] = []

    async def connect(self) -> SqliteTransport:
        # No safety poll: whatever arrives was rung for.
        transport = SqliteTransport(
            self.path, process=Process(), clock=self.clock, poll_s=FOR_EVER_S
        )
        self._transports.append(transport)
        await transport.start()
        return transport

    async def pass_time(self, seconds: float) -> None:
        self.clock.shift_s += seconds

    async def expired(self) -> dict[str, int]:
        transport = await self.connect()
        await transport._drop_expired()
        return await counted(transport, "expired")

    async def dead_letters(self) -> list[DeadLetter]:
        return await dead_letters(await self.connect())

    async def close(self) -> None:
        for transport in self._transports:
            await transport.stop()


class AmqpMachine:
    keeps_reasons = counts_in_hand = False

    def __init__(self, url: str) -> None:
        self.url = url
        self._transports: list[AmqpTransport] = []

    async def connect(self) -> AmqpTransport:
        transport = AmqpTransport(
            read_url(self.url, exchange="gracekit", profile="durable"),
            process=Process(),
            clock=Clock(),
            telemetry=Telemetry(),
        )
        self._transports.append(transport)
        await transport.start()
        return transport

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def expired(self) -> dict[str, int]:
        deaths = [queue for queue, reason, _ in await self._dead() if reason == "expired"]
        return dict(Counter(deaths))

    async def dead_letters(self) -> list[DeadLetter]:
        return [
            DeadLetter(
                queue=queue,
                body=found.body,
                headers={
                    name: value
                    for name, value in (found.header.properties.headers or {}).items()
                    if not name.startswith("x-")
                },
                reason=reason,
            )
            for queue, reason, found in await self._dead()
            if reason != "expired"
        ]

    async def _dead(self) -> list[tuple[str, str, DeliveredMessage]]:
        """(queue, reason, message) of what is in the dead-letter queue of topic compute."""
        await asyncio.sleep(0.2)  # the broker moves them in its own time, and says nothing
        async with aiormq.connect(self.url) as connection:
            channel = await connection.channel()
            dead = []
            while (found := await channel.basic_get("compute_dead")).header.body_size:
                headers = found.header.properties.headers or {}
                dead.append(
                    (headers["x-first-death-queue"], headers["x-first-death-reason"], found)
                )
            await channel.close()  # which puts them back
        return dead

    async def close(self) -> None:
        for transport in self._transports:
            await transport.stop()
