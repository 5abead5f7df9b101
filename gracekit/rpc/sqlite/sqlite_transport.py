"""The transport in one SQLite file, for the processes of one machine.

Messages can be sent while no process reads. Each connection has a named pipe, by which publishers
wake it after their commit, so it need not poll for messages. A slow safety poll covers missed
wake-ups and gives back the messages of dead readers. It reads the file only if that was written
since the last poll.

`gracekit.life` proves that a connection is dead; a timeout never does. Without proof a
connection keeps its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Final

from gracekit import background
from gracekit.clock import Clock, age_s
from gracekit.errors import (
    ConflictError,
    DependencyError,
    StoreBrokenError,
    StoreError,
    Undeliverable,
)
from gracekit.life import LifeLock, Liveness
from gracekit.process import Process
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.rpc.sqlite import sqlite_rows as rows
from gracekit.rpc.sqlite.sqlite_consumer import SqliteConsumer, wake_all
from gracekit.rpc.transport import (
    DEPTH_TIMEOUT_S,
    Message,
    OnDelivery,
    Queue,
    QueueKind,
)
from gracekit.store.migrate import load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from gracekit.store.state import StoreStatus
from gracekit.store.wakeup import Wakeup, wakeups_directory
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracing.conventions import LOCAL_QUEUES

QUEUES_SCHEMA: Final = "gracekit.rpc.sqlite.schema"
CLOSE_S: Final = 10.0  # for a stop; then the threads of the file end by themselves
LONGEST_UNREAD_S: Final = 30.0
"""After so many seconds a poll reads the file although it seems unchanged."""


class _Connection:
    """One connection of a transport: its row, its wake-up pipe and its lock, the proof of life."""

    def __init__(self, directory: Path, connection_id: str) -> None:
        self.id: Final = connection_id
        self.wakeup: Final = Wakeup(directory / f"{connection_id}.wakeup")
        self.lock: Final = LifeLock(directory / f"{connection_id}.lock")
        self.consumers: list[SqliteConsumer] = []
        self.peers: list[rows.Peer] = []  # the other connections, as they were last read

    def as_peer(self, process: Process) -> rows.Peer:
        """What other processes read about it; its lock must be held."""
        return rows.Peer(
            connection_id=self.id,
            identity=process.identify(),
            lock_path=self.lock.path,
            lock_file=self.lock.file,
            wakeup_path=self.wakeup.path,
        )

    def close(self, *, is_gone: bool) -> None:
        """Remove the wake-up pipe and the lock.

        Args:
            is_gone: Whether its row was deleted. If not, the lock file stays, so that others can
                prove this connection dead.
        """
        self.wakeup.stop()
        self.lock.release(remove=is_gone)


class SqliteTransport:
    """One connection to a file of queues; see `Transport`.

    Args:
        path: The database; beside it are `-wal`, `-shm`, `-writer` and `-wakeups/`.
        process: This process; it also judges whether others are alive.
        clock: Wall time and ids.
        creates: Whether to create a missing file. A client does not: until a service has created
            it, sending raises Undeliverable.
        poll_s: Seconds between two safety polls, at most.
        telemetry: Receives events about faults in the background; None to only log them.
    """

    is_local: Final = True
    messaging: Final = LOCAL_QUEUES
    is_connected: Final = None  # no broker

    def __init__(
        self,
        path: Path,
        *,
        process: Process,
        clock: Clock,
        creates: bool = True,
        poll_s: float = 1.0,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.path: Final = path.absolute()
        self._wakeups = wakeups_directory(self.path)
        self._process = process
        self._clock = clock
        self._creates = creates
        self._poll_s = poll_s
        self._telemetry = telemetry or Telemetry()
        self._engine = SqliteEngine(self.path, load_migrations(QUEUES_SCHEMA), process=process)
        self._changing = asyncio.Lock()  # start and stop wait for each other
        self._connection: _Connection | None = None
        self._is_started = False
        self._leaving: asyncio.Task[None] | None = None  # the end of the file's threads
        self._poll: asyncio.Task[None] | None = None
        self._read_at: Hashable = None  # mark of the file that the last poll has read
        self._unread_until = 0.0  # loop time at which a poll reads it nevertheless
        self._removes_at = math.inf  # wall time at which a row of it must be removed

    def on_broken(self, callback: Callable[[StoreBrokenError], None]) -> None:
        """See `Transport.on_broken`: called for the same errors that break a store."""

        def look(status: StoreStatus) -> None:
            if isinstance(status.error, StoreBrokenError):
                callback(status.error)

        self._engine.on_status(look)

    # -- life -----------------------------------------------------------------

    async def start(self) -> None:
        """See `Transport.start`.

        Raises:
            ConfigError: the path, the file or its schema cannot be used.
            DependencyError: it cannot be opened, for example by an I/O error.
        """
        async with self._changing:
            if not self._is_started:
                await self._close()  # clean up after a cancelled start or stop
            if self._connection is None and not self._is_missing():
                await self._open()
            self._is_started = True

    def _is_missing(self) -> bool:
        """Whether to wait for a service to create the file; no service creates its directory."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return not self._creates and self.path.parent.is_dir()
        except OSError:  # the engine's start reports it
            return False
        return False

    async def _open(self) -> None:
        connection = _Connection(self._wakeups, self._clock.new_id())
        try:
            await self._connect(connection)
        except BaseException as error:
            connection.close(is_gone=False)
            self._leaving = asyncio.create_task(self._engine.stop())
            # If cancelled, end at once: the engine's threads may be waiting for a lock that a
            # frozen writer holds. They end when they get it; `stop` waits for them.
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.wait({self._leaving})
            raise
        self._connection = connection
        self._poll = background.start(
            lambda: self._poll_for_ever(connection),
            f"poll of {self.path.name}",
            telemetry=self._telemetry,
            clock=self._clock,
        )

    async def stop(self) -> None:
        """See `Transport.stop`."""
        async with self._changing:
            self._is_started = False
            await self._close()

    async def _close(self) -> None:
        """End the connection in `CLOSE_S`; if this is cancelled, the next call continues it."""
        until = self._clock.loop() + CLOSE_S
        if (connection := self._connection) is not None:
            if self._poll is not None:
                self._poll.cancel()
                await asyncio.wait({self._poll})
            is_gone = False
            with contextlib.suppress(StoreError, TimeoutError):  # others prove this one dead then
                async with asyncio.timeout_at(until):
                    # At once, as another program may have locked the file: each would wait for it.
                    halts = (consumer.halt() for consumer in connection.consumers)
                    await asyncio.gather(*halts, self._disconnect(connection.id))
                    is_gone = True
            connection.close(is_gone=is_gone)
            self._connection = None
        self._leaving = asyncio.create_task(self._engine.stop())
        await asyncio.wait({self._leaving}, timeout=max(0.0, until - self._clock.loop()))

    async def _connect(self, connection: _Connection) -> None:
        await self._engine.start()
        # Make pipe and lock before the row, so that a process that reads the row finds both.
        connection.wakeup.start(lambda: _wake(connection))
        if not connection.lock.acquire():
            raise DependencyError(f"{connection.lock.path} is locked by another process")
        await self._engine.commit(
            rows.connect(connection.as_peer(self._process), now=self._clock.wall())
        )
        await self._look_after(connection)

    # -- sending --------------------------------------------------------------

    async def declare(self, queues: Sequence[Queue]) -> None:
        """See `Transport.declare`."""
        connection = await self._reached()
        await self._engine.commit(rows.declare(queues, connection.id))

    async def compare(self, queues: Sequence[Queue], *, store: str | None) -> None:
        """See `Transport.compare`; does nothing, as these queues have no flags."""

    async def discard(self, queues: Sequence[Queue]) -> None:
        """See `Transport.discard`; other queues than directed ones end with their connection."""
        self._connected()
        directed = [queue for queue in queues if queue.kind is QueueKind.DIRECTED]
        if directed:
            await self._engine.commit(rows.discard(directed))

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`; when it returns, the message is synced to the disk."""
        connection = await self._reached()
        try:
            results = await self._engine.commit(
                rows.publish(queue.name, message, now=self._clock.wall())
            )
        except ConflictError:
            raise self._undeliverable(queue.name) from None
        if not wake_all(results[rows.WAKEUPS], self._wakeups):
            await self._release_dead(connection)
            if not await self._engine.query("SELECT 1 FROM queue WHERE name = ?", queue.name):
                raise self._undeliverable(queue.name)

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """See `Transport.publish_fanout`."""
        connection = await self._reached()
        results = await self._engine.commit(
            rows.publish_fanout(topic, message, now=self._clock.wall())
        )
        if not wake_all(results[rows.WAKEUPS], self._wakeups):
            await self._release_dead(connection)

    def _undeliverable(self, queue: str) -> Undeliverable:
        return Undeliverable(
            f"no service ever declared queue {queue!r} on {self.path}, or its owner is gone; "
            f"start the service once or check the topic"
        )

    # -- receiving ------------------------------------------------------------

    async def announce(
        self, queues: Sequence[Queue], *, store: str, label: str
    ) -> list[QueueReader]:
        """See `Transport.announce`."""
        connection = self._connected()
        batch = rows.announce(queues, connection.id, store=store, label=label)
        found = (await self._engine.commit(batch))[-1]
        return [
            reader for reader, peer in map(rows.reader_of, found) if not self._judge(peer).is_dead
        ]

    async def keep_mark(self, name: str, mark: int) -> int:
        """See `Transport.keep_mark`."""
        self._connected()
        found = (await self._engine.commit(rows.keep_mark(name, mark)))[-1]
        return int(str(found[0][0]))

    async def directed(self, topics: Sequence[str]) -> list[Queue]:
        """See `Transport.directed`."""
        self._connected()
        found = await self._engine.query(rows.directed(topics), *topics)
        return [Queue(str(name), QueueKind.DIRECTED, str(topic)) for name, topic in found]

    async def depth(self, queues: Sequence[Queue]) -> int:
        """See `Transport.depth`."""
        self._connected()
        names = [queue.name for queue in queues]
        try:
            async with asyncio.timeout(DEPTH_TIMEOUT_S):
                found = await self._engine.query(rows.depth(names), *names, self._clock.wall())
        except TimeoutError:
            raise DependencyError(
                f"the queues in {self.path} were not counted in {DEPTH_TIMEOUT_S:g} s: the file "
                "does not answer"
            ) from None
        except StoreError as error:
            raise DependencyError(f"the queues in {self.path} were not counted: {error}") from error
        return int(str(found[0][0]))

    async def waiting(self, queues: Sequence[Queue]) -> tuple[int, float | None]:
        """See `Transport.waiting`."""
        self._connected()
        names, now = {queue.name for queue in queues}, self._clock.wall()
        found = [row for row in await self._engine.query(rows.WAITING) if row[0] in names]
        ages = [age_s(now, float(str(sent_at))) for _, _, sent_at in found]
        return sum(int(str(number)) for _, number, _ in found), max(ages, default=None)

    async def prune(self, queues: Sequence[Queue], *, dry_run: bool = False) -> list[Queue]:
        """See `Transport.prune`."""
        self._connected()
        if dry_run:
            idle = f"SELECT name FROM queue WHERE {rows.IS_IDLE}"  # noqa: S608 - a constant
            found = [await self._engine.query(idle, queue.name) for queue in queues]
        else:
            found = list(await self._engine.commit(rows.prune(queues))) if queues else []
        return [queue for queue, row in zip(queues, found, strict=True) if row]

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> SqliteConsumer:
        """See `Transport.consume`."""
        connection = await self._reached()
        consumer = SqliteConsumer(
            self._engine,
            queues,
            on_delivery,
            consumer_id=self._clock.new_id(),
            prefetch=prefetch,
            wakeups=self._wakeups,
            process=self._process,
            clock=self._clock,
            telemetry=self._telemetry,
        )
        await self._engine.commit(rows.subscribe(queues, consumer.id, connection.id))
        connection.consumers.append(consumer)
        consumer.start()
        return consumer

    # -- looking after the file -----------------------------------------------

    async def _poll_for_ever(self, connection: _Connection) -> None:
        while not self._engine.status.is_final:
            await self._clock.wait_tick(self._poll_s)
            mark, now = self._engine.look_at_files(), self._clock.loop()
            if mark is None or mark != self._read_at or now >= self._unread_until:
                self._read_at = None
            elif not self._is_due(connection):
                continue
            with contextlib.suppress(StoreError):  # the next poll tries again
                # Messages first: an error while cleaning up must not prevent their delivery.
                await self._look_after_consumers(connection)
                await self._look_after(connection)
                self._read_at, self._unread_until = mark, now + LONGEST_UNREAD_S

    def _is_due(self, connection: _Connection) -> bool:
        """Whether there is anything to do although the file has not changed."""
        return (
            self._removes_at <= self._clock.wall()
            or any(consumer.is_behind or consumer.is_done for consumer in connection.consumers)
            or any(self._judge(peer).is_dead for peer in connection.peers)
        )

    async def _look_after(self, connection: _Connection) -> None:
        connection.peers = await self._release_dead(connection)
        await self._drop_expired()
        await self._remove_old_letters()
        ((moment,),) = await self._engine.query(rows.NEXT_REMOVAL, rows.KEPT_LETTERS_S)
        self._removes_at = math.inf if moment is None else float(moment)

    async def _look_after_consumers(self, connection: _Connection) -> None:
        for consumer in tuple(connection.consumers):
            if consumer.is_done:
                await self._engine.commit(rows.unsubscribe(consumer.id))
                connection.consumers.remove(consumer)
            else:
                await consumer.look_again()

    async def _drop_expired(self) -> None:
        now = self._clock.wall()
        if await self._engine.query(rows.HAS_EXPIRED, now):
            await self._engine.commit(rows.expire(now=now))

    async def _remove_old_letters(self) -> None:
        now = self._clock.wall()
        if await self._engine.query(rows.HAS_OLD_LETTERS, now - rows.KEPT_LETTERS_S):
            await self._engine.commit(rows.remove_old_letters(now=now))

    async def _release_dead(self, connection: _Connection) -> list[rows.Peer]:
        """Give back the messages of dead connections, and remove their rows and files.

        Returns:
            The other ones, without our own.
        """
        others = []
        for peer in map(rows.peer_of, await self._engine.query(rows.PEERS, connection.id)):
            if self._judge(peer).is_dead:
                await self._disconnect(peer.connection_id)
                for path in (peer.wakeup_path, peer.lock_path):
                    (self._wakeups / path.name).unlink(missing_ok=True)
            else:
                others.append(peer)
        return others

    def _judge(self, peer: rows.Peer) -> Liveness:
        return self._process.judge(peer.life, self._wakeups)

    async def _disconnect(self, connection_id: str) -> None:
        results = await self._engine.commit(rows.disconnect(connection_id))
        wake_all(results[-1], self._wakeups)

    async def _reached(self) -> _Connection:
        """Our connection; opened now if the file was missing at the start.

        Raises:
            Undeliverable: the file is still missing.
        """
        if self._connection is None:
            await self._open_late()
        return self._connected()

    async def _open_late(self) -> None:
        async with self._changing:
            if self._connection is not None or not self._is_started:
                return
            if self._is_missing():
                raise Undeliverable(
                    f"there are no queues at {self.path}: no service has ever started there; start "
                    "the service first, which makes the file, or mend the transport URL"
                )
            await self._open()

    def _connected(self) -> _Connection:
        if self._connection is None or not self._is_started:
            raise DependencyError(
                f"the transport on {self.path} is not started; await its start() first"
            )
        return self._connection


def _wake(connection: _Connection) -> None:
    for consumer in connection.consumers:
        consumer.wake()
