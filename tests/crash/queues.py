"""The queues of a cell: what carries its messages, and what lies in them between two lives.

A look takes nothing and changes nothing: neither a message's place nor its mark that it was
delivered before, by which a `requeue` request is journaled when it comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.profiles import dead_letter_queue
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Message, Queue
from gracekit.telemetry.telemetry import Telemetry
from tests.crash.service import TOPIC
from tests.rabbit.broker import Broker

PATIENCE_S: Final = 300.0  # for what must happen; never waited for in full
TICK_S: Final = 0.01


class Confirming:
    """Beside a transport, counts what it was confirmed."""

    confirmed = 0

    async def publish(self, queue: Queue, message: Message) -> None:
        await super().publish(queue, message)
        self.confirmed += 1


class ConfirmingSqlite(Confirming, SqliteTransport):
    pass


class ConfirmingAmqp(Confirming, AmqpTransport):
    pass


class Queues(Protocol):
    """See the module.

    Attributes:
        url: Where the service finds them.
        transport: The caller's way to them.
    """

    url: str
    transport: ConfirmingSqlite | ConfirmingAmqp

    def bodies(self) -> tuple[list[bytes], list[bytes]]:
        """What is for the service, waiting or claimed; and the dead letters."""
        ...

    def notifications(self) -> list[bytes]:
        """What was published about parked tasks."""
        ...

    async def wait_left(self) -> None:
        """Wait until a service that has ended holds nothing here any more."""
        ...

    def close(self) -> None: ...


class SqliteQueues:
    """A file beside the journal. What a dead service held, the next start frees."""

    def __init__(self, directory: Path) -> None:
        path = directory / "queues.db"
        self.url = f"sqlite:///{path.name}"  # of the service, which lives in there
        # It never polls: nothing is freed but by a start.
        self.transport = ConfirmingSqlite(path, process=Process(), clock=Clock(), poll_s=3600)
        self._file = Database(path)

    def bodies(self) -> tuple[list[bytes], list[bytes]]:
        waiting = self._file.rows(
            "SELECT body FROM message JOIN queue ON queue.name = message.queue "
            "WHERE kind NOT IN ('reply', 'notification')"
        )
        dead = self._file.rows("SELECT body FROM dead_letter")
        return [row[0] for row in waiting], [row[0] for row in dead]

    def notifications(self) -> list[bytes]:
        sql = (
            "SELECT body FROM message JOIN queue ON queue.name = message.queue "
            "WHERE kind = 'notification'"
        )
        return [row[0] for row in self._file.rows(sql)]

    async def wait_left(self) -> None:
        pass  # a claim names its process

    def close(self) -> None:
        self._file.close()


_NEWS: Final = f"{TOPIC}-notifications."
_DEAD: Final = {dead_letter_queue(topic) for topic in (TOPIC, f"{TOPIC}-ops")}


class BrokerQueues:
    """A virtual host of a RabbitMQ node. What a dead service held, the broker takes back."""

    def __init__(self, broker: Broker, vhost: str) -> None:
        self.url = broker.url_of(vhost)
        self.transport = ConfirmingAmqp(
            read_url(self.url, exchange="gracekit", profile="durable"),
            process=Process(),
            clock=Clock(),
            telemetry=Telemetry(),
        )
        self._broker = broker
        self._vhost = vhost

    def bodies(self) -> tuple[list[bytes], list[bytes]]:
        held = self._broker.bodies(self._vhost)
        waiting = [name for name in held if _is_the_services(name) and name not in _DEAD]
        return (
            [body for name in waiting for body in held[name]],
            [body for name in _DEAD for body in held.get(name, [])],
        )

    def notifications(self) -> list[bytes]:
        held = self._broker.bodies(self._vhost)
        return [body for name in held if name.startswith(_NEWS) for body in held[name]]

    async def wait_left(self) -> None:
        """The broker reads the last frames, sees the end of the connection, and puts back."""

        def left() -> bool:
            return not any(
                queue.consumers or queue.unacked
                for name, queue in self._broker.queues(self._vhost).items()
                if _is_the_services(name)
            )

        await until(left)

    def close(self) -> None:
        pass


def _is_the_services(name: str) -> bool:
    """Whether a queue is no caller's, and no resolver's."""
    return name.startswith(TOPIC) and not name.startswith(_NEWS)


class Database:
    """A SQLite file that other processes write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: apsw.Connection | None = None

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """What it answers; nothing if there is no such table yet."""
        # The library of the service, not sqlite3: two copies of SQLite in one process would
        # drop each other's locks on the queues' file.
        if self._connection is None:
            if not self._path.exists():
                return []
            self._connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
            self._connection.set_busy_timeout(5000)
        try:
            return self._connection.execute(sql, params).fetchall()
        except apsw.SQLError:
            if not self._connection.execute("SELECT 1 FROM sqlite_master").fetchall():
                return []
            # The tables may have come between the two questions.
            return self._connection.execute(sql, params).fetchall()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must happen in another process, which cannot ring here."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(TICK_S)
