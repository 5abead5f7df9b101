"""The SQL of the SQLite transport, as batches.

Each function only builds a batch; its caller commits it. If the caller needs the rows
of a statement, a constant beside the function holds the statement's index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from gracekit.life import Identity, LockFile, RecordedLife
from gracekit.process import Point
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.rpc.transport import OWNED, Message, Queue
from gracekit.store.batch import Batch, Row, Value

INSERTED: Final = 0  # statement of `publish` that must find its queue
WAKEUPS: Final = (
    1  # statement of `publish`, `publish_fanout` and `give_back` with (wake-up path,) rows
)

_WAKEUPS_OF_QUEUE: Final = (
    "SELECT DISTINCT wakeup_path FROM subscription JOIN connection USING (connection_id) "
    "WHERE queue = ?"
)
_INSERT: Final = (
    "INSERT INTO message (queue, body, headers, published_at, expires_at) "
    "SELECT name, ?, ?, ?, ? FROM queue WHERE "
)


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A connection, as recorded for other processes.

    Attributes:
        lock_path: Path as the connection itself sees it; others use only the file name.
        lock_file: Identity of that file.
        wakeup_path: The wake-up pipe; a path like `lock_path`.
    """

    connection_id: str
    identity: Identity
    lock_path: Path
    lock_file: LockFile
    wakeup_path: Path

    @property
    def life(self) -> RecordedLife:
        """The part of the row by which `gracekit.life` judges whether it lives."""
        return RecordedLife(
            identity=self.identity, lock_name=self.lock_path.name, lock_file=self.lock_file
        )


# -- connections and queues ---------------------------------------------------


def connect(me: Peer, *, now: float) -> Batch:
    """Insert the row of a new connection."""
    batch = Batch(Point.CONNECT, durable=False)
    who = me.identity
    batch.add(
        "INSERT INTO connection (connection_id, boot_id, pid_ns, time_ns, pid, start_ticks, "
        "lock_path, lock_file, wakeup_path, connected_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        *(me.connection_id, who.boot_id, who.pid_ns, who.time_ns, who.pid, who.start_ticks),
        *(str(me.lock_path), str(me.lock_file), str(me.wakeup_path), now),
    )
    return batch


PEER: Final = (
    "connection_id, boot_id, pid_ns, time_ns, pid, start_ticks, lock_path, lock_file, wakeup_path"
)
PEERS: Final = f"SELECT {PEER} FROM connection WHERE connection_id <> ?"  # noqa: S608 - constant text


def peer_of(row: Row) -> Peer:
    """A Peer from a row with the columns `PEER`."""
    connection_id, boot_id, pid_ns, time_ns, pid, start_ticks, *files = row
    lock_path, lock_file, wakeup_path = map(str, files)
    return Peer(
        connection_id=str(connection_id),
        identity=Identity(
            boot_id=str(boot_id),
            pid_ns=_integer(pid_ns),
            pid=_integer(pid),
            start_ticks=_integer(start_ticks),
            time_ns=None if time_ns is None else _integer(time_ns),
        ),
        lock_path=Path(lock_path),
        lock_file=LockFile.from_text(lock_file),
        wakeup_path=Path(wakeup_path),
    )


def disconnect(connection_id: str) -> Batch:
    """End a connection, our own or a dead one: give back its claims, delete its own queues.

    The last statement returns the wake-up pipes of all other connections, which may now find
    messages.
    """
    batch = Batch(Point.GIVE_BACK)
    mine = "(SELECT consumer_id FROM consumer WHERE connection_id = ?)"
    for sql in (
        f"UPDATE message SET claimed_by = NULL, redelivered = 1 WHERE claimed_by IN {mine}",  # noqa: S608 - constant text
        "DELETE FROM message WHERE queue IN (SELECT name FROM queue WHERE owner = ?)",
        "DELETE FROM queue WHERE owner = ?",
        "DELETE FROM subscription WHERE connection_id = ?",
        "DELETE FROM consumer WHERE connection_id = ?",
        "DELETE FROM reader WHERE connection_id = ?",
        "DELETE FROM connection WHERE connection_id = ?",
    ):
        batch.add(sql, connection_id)
    batch.ask("SELECT wakeup_path FROM connection")
    return batch


def declare(queues: Sequence[Queue], connection_id: str) -> Batch:
    """Create queues; existing ones stay unchanged."""
    outlives_power = any(queue.kind not in OWNED for queue in queues)
    batch = Batch(Point.CONNECT, durable=outlives_power)
    for queue in queues:
        batch.add(
            "INSERT INTO queue (name, kind, topic, owner) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (name) DO NOTHING",
            *(queue.name, queue.kind.value, queue.topic),
            connection_id if queue.kind in OWNED else None,
        )
    return batch


def subscribe(queues: Sequence[Queue], consumer_id: str, connection_id: str) -> Batch:
    """Create *queues* if missing, and subscribe a consumer, so that publishers wake it."""
    batch = declare(queues, connection_id)
    batch.add("INSERT INTO consumer VALUES (?, ?)", consumer_id, connection_id)
    for queue in queues:
        batch.add(
            "INSERT OR IGNORE INTO subscription VALUES (?, ?, ?)",
            *(queue.name, consumer_id, connection_id),
        )
    return batch


def announce(queues: Sequence[Queue], connection_id: str, *, store: str, label: str) -> Batch:
    """Record which queues a connection reads with which store.

    The last statement returns readers of these queues with another store. It is the same
    transaction, so that of two simultaneous announcements the second sees the first.
    """
    batch = Batch(Point.CONNECT, durable=False)
    for queue in queues:
        batch.add(
            "INSERT OR REPLACE INTO reader VALUES (?, ?, ?, ?)",
            *(queue.name, connection_id, store, label),
        )
    places = ", ".join("?" * len(queues))
    batch.ask(
        f"{READERS} WHERE store <> ? AND queue IN ({places})",
        store,
        *(queue.name for queue in queues),
    )
    return batch


def keep_mark(name: str, mark: int) -> Batch:
    """Raise the mark of *name* to *mark*, never lower it; the last statement returns (mark,)."""
    batch = Batch(Point.CONNECT, durable=False)
    batch.ask(
        "INSERT INTO mark VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value) RETURNING value",
        name,
        mark,
    )
    return batch


def directed(topics: Sequence[str]) -> str:
    """A query for (name, topic) of directed queues, with *topics* as its parameters."""
    places = ", ".join("?" * len(topics))
    return f"SELECT name, topic FROM queue WHERE kind = 'directed' AND topic IN ({places})"  # noqa: S608 - placeholders


IS_IDLE: Final = (
    "name = ?1 AND NOT EXISTS (SELECT 1 FROM message WHERE queue = ?1) "
    "AND NOT EXISTS (SELECT 1 FROM subscription WHERE queue = ?1)"
)
"""True for a queue without readers and without messages, waiting or claimed."""


def prune(queues: Sequence[Queue]) -> Batch:
    """Delete those of *queues* that are idle; each statement returns (name,) if it was deleted."""
    batch = Batch(Point.CONNECT)
    for queue in queues:
        batch.ask(f"DELETE FROM queue WHERE {IS_IDLE} RETURNING name", queue.name)  # noqa: S608 - a constant
    return batch


def discard(queues: Sequence[Queue]) -> Batch:
    """Delete *queues* with their messages."""
    batch = Batch(Point.CONNECT)
    for queue in queues:
        batch.add("DELETE FROM message WHERE queue = ?", queue.name)
        batch.add("DELETE FROM queue WHERE name = ?", queue.name)
    return batch


READERS: Final = (
    f"SELECT queue, store, label, {PEER} FROM reader JOIN connection USING (connection_id)"  # noqa: S608 - constant text
)


def reader_of(row: Row) -> tuple[QueueReader, Peer]:
    """The values of a row of `READERS`."""
    queue, store, label, *rest = row
    peer = peer_of(tuple(rest))
    reader = QueueReader(
        queue=str(queue), store=str(store), label=str(label), pid=peer.identity.pid
    )
    return reader, peer


def unsubscribe(consumer_id: str) -> Batch:
    """Stop waking a consumer; delete its row if it holds no messages."""
    batch = Batch(Point.CONNECT, durable=False)
    batch.add("DELETE FROM subscription WHERE consumer_id = ?", consumer_id)
    batch.add(
        "DELETE FROM consumer WHERE consumer_id = ?1 "
        "AND NOT EXISTS (SELECT 1 FROM message WHERE claimed_by = ?1)",
        consumer_id,
    )
    return batch


# -- messages -----------------------------------------------------------------


def publish(queue: str, message: Message, *, now: float) -> Batch:
    """Insert a message into a queue; a conflict at `INSERTED` means that the queue is missing."""
    batch = Batch(Point.PUBLISH)
    batch.add(f"{_INSERT} name = ?", *_values(message, now), queue, expect=1)
    batch.ask(_WAKEUPS_OF_QUEUE, queue)
    return batch


def publish_fanout(topic: str, message: Message, *, now: float) -> Batch:
    """Insert a copy of the message into each fanout queue of *topic*.

    It is not synced, as a power cut ends the readers and so their fanout queues.
    """
    batch = Batch(Point.PUBLISH, durable=False)
    batch.add(f"{_INSERT} kind = 'fanout' AND topic = ?", *_values(message, now), topic)
    batch.ask(
        "SELECT DISTINCT wakeup_path FROM queue "
        "JOIN subscription ON queue.name = subscription.queue "
        "JOIN connection USING (connection_id) WHERE kind = 'fanout' AND topic = ?",
        topic,
    )
    return batch


def claim(
    queues: Sequence[str],
    consumer_id: str,
    *,
    limit: int,
    now: float,
    without: Collection[int] = (),
) -> Batch:
    """Claim the oldest *limit* waiting messages; `claimed_of` sorts the rows.

    Messages with ids in *without* are left to other consumers.
    """
    # One short index scan for each queue: a single query over all queues would sort all waiting
    # messages.
    oldest = (
        "SELECT * FROM (SELECT message_id FROM message WHERE queue = ? AND claimed_by IS NULL "
        "AND (expires_at IS NULL OR expires_at > ?) "
        "AND message_id NOT IN (SELECT value FROM json_each(?)) ORDER BY message_id LIMIT ?)"
    )
    others = msgspec.json.encode(list(without)).decode()
    batch = Batch(Point.DELIVER, durable=False)
    batch.ask(
        "UPDATE message SET claimed_by = ? WHERE message_id IN ("  # noqa: S608 - constant text
        f"{' UNION ALL '.join([oldest] * len(queues))} ORDER BY message_id LIMIT ?) "
        "RETURNING message_id, queue, body, CAST(headers AS BLOB), expires_at, redelivered",
        consumer_id,
        *(value for queue in queues for value in (queue, now, others, limit)),
        limit,
    )
    return batch


def unclaim(consumer_id: str, keep: Sequence[int]) -> Batch:
    """Undo claims of a consumer, other than those of *keep*, as if they had not been made."""
    batch = Batch(Point.GIVE_BACK, durable=False)
    batch.add(
        "UPDATE message SET claimed_by = NULL WHERE claimed_by = ? "
        "AND message_id NOT IN (SELECT value FROM json_each(?))",
        consumer_id,
        msgspec.json.encode(list(keep)).decode(),
    )
    return batch


def ack(message_id: int, consumer_id: str) -> Batch:
    """Delete a message that is done with."""
    batch = Batch(Point.ACK, durable=False)
    batch.add(_DELETE, message_id, consumer_id)
    return batch


def give_back(message_id: int, consumer_id: str, queue: str) -> Batch:
    """Unclaim a message, at its old position; rows at `WAKEUPS` are the pipes of its readers."""
    batch = Batch(Point.GIVE_BACK, durable=False)
    batch.add(
        "UPDATE message SET claimed_by = NULL, redelivered = 1 "
        "WHERE message_id = ? AND claimed_by = ?",
        *(message_id, consumer_id),
    )
    batch.ask(_WAKEUPS_OF_QUEUE, queue)
    return batch


def dead_letter(message_id: int, consumer_id: str, reason: str, *, now: float) -> Batch:
    """Move a message to the dead letters."""
    batch = Batch(Point.DEAD_LETTER)
    batch.add(
        "INSERT INTO dead_letter (queue, reason, published_at, died_at, headers, body) "
        "SELECT queue, ?, published_at, ?, headers, body FROM message "
        "WHERE message_id = ? AND claimed_by = ?",
        *(reason, now, message_id, consumer_id),
    )
    batch.add(_DELETE, message_id, consumer_id)
    _add_removal(batch, _TOO_MANY, KEPT_LETTERS, now=now)
    return batch


KEPT_LETTERS: Final = 1_000
"""How many dead letters a file keeps; at the largest size of messages they take 1 GiB."""
KEPT_LETTERS_S: Final = 7 * 86400.0
# Counted by id: only the oldest are ever deleted, so the ids of the others have no gaps.
_TOO_MANY: Final = "dead_letter_id <= (SELECT max(dead_letter_id) FROM dead_letter) - ?"
_TOO_OLD: Final = "died_at < ?"
HAS_OLD_LETTERS: Final = (
    "SELECT 1 FROM (SELECT died_at FROM dead_letter ORDER BY dead_letter_id LIMIT 1) "  # noqa: S608 - constant text
    f"WHERE {_TOO_OLD}"
)


def remove_old_letters(*, now: float) -> Batch:
    """Count and delete dead letters older than `KEPT_LETTERS_S`."""
    batch = Batch(Point.TALLY, durable=False)
    _add_removal(batch, _TOO_OLD, now - KEPT_LETTERS_S, now=now)
    return batch


def _add_removal(batch: Batch, which: str, limit: float, *, now: float) -> None:
    batch.add(
        f"INSERT INTO removed_letter SELECT queue, count(*), ? FROM dead_letter WHERE {which} "  # noqa: S608 - constant text
        "GROUP BY queue ON CONFLICT (queue) DO UPDATE SET number = number + excluded.number, "
        "last_at = excluded.last_at",
        *(now, limit),
    )
    batch.add(f"DELETE FROM dead_letter WHERE {which}", limit)  # noqa: S608 - constant text


_DELETE: Final = "DELETE FROM message WHERE message_id = ? AND claimed_by = ?"

HAS_EXPIRED: Final = (
    "SELECT 1 FROM message WHERE claimed_by IS NULL AND expires_at IS NOT NULL "
    "AND expires_at <= ? LIMIT 1"
)


def expire(*, now: float) -> Batch:
    """Count and delete expired messages."""
    batch = Batch(Point.TALLY, durable=False)
    due = "claimed_by IS NULL AND expires_at IS NOT NULL AND expires_at <= ?"
    batch.add(
        f"INSERT INTO expired SELECT queue, count(*), ? FROM message WHERE {due} GROUP BY queue "  # noqa: S608 - constant text
        "ON CONFLICT (queue) DO UPDATE SET number = number + excluded.number, "
        "last_at = excluded.last_at",
        *(now, now),
    )
    batch.add(f"DELETE FROM message WHERE {due}", now)  # noqa: S608 - constant text
    return batch


NEXT_REMOVAL: Final = (
    "SELECT min(moment) FROM ("
    "SELECT min(expires_at) AS moment FROM message "
    "WHERE claimed_by IS NULL AND expires_at IS NOT NULL UNION ALL "
    "SELECT * FROM (SELECT died_at + ? FROM dead_letter ORDER BY dead_letter_id LIMIT 1))"
)
"""The wall time at which a message expires, or a dead letter is too old; NULL for never.

Its parameter is `KEPT_LETTERS_S`.
"""


def has_waiting(queues: Sequence[str]) -> str:
    """A query that finds a row if a message waits in *queues*, which are its parameters."""
    places = ", ".join("?" * len(queues))
    return f"SELECT 1 FROM message WHERE claimed_by IS NULL AND queue IN ({places}) LIMIT 1"  # noqa: S608 - placeholders


def depth(queues: Sequence[str]) -> str:
    """A query for the (number,) of messages in *queues*; parameters: the names and the wall time.

    It adds the waiting and the claimed messages, and subtracts the expired ones that were not
    removed yet. Each count uses a separate index, so that no message is read.
    """
    places = ", ".join(f"?{number}" for number in range(1, len(queues) + 1))
    # The `+` keeps SQLite from using the index of waiting messages, by which it would read each.
    return (
        "SELECT (SELECT count(*) FROM message WHERE claimed_by IS NULL "  # noqa: S608 - placeholders
        f"AND queue IN ({places})) + (SELECT count(*) FROM message "
        f"WHERE claimed_by IS NOT NULL AND queue IN ({places})) - (SELECT count(*) FROM message "
        "WHERE claimed_by IS NULL AND expires_at IS NOT NULL "
        f"AND expires_at <= ?{len(queues) + 1} AND +queue IN ({places}))"
    )


WAITING: Final = (
    "SELECT first.queue, number, published_at FROM (SELECT queue, count(*) AS number, "
    "min(message_id) AS message_id FROM message WHERE claimed_by IS NULL GROUP BY queue) AS first "
    "JOIN message USING (message_id) ORDER BY number DESC"
)
"""(queue, number, time at which the oldest was published) of messages that no consumer has."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed message.

    Attributes:
        expires_at: Wall-clock seconds; None for never.
        fault: Why it cannot be delivered; empty if it can.
    """

    message_id: int
    queue: str
    body: bytes
    headers: Mapping[str, str]
    expires_at: float | None
    redelivered: bool
    fault: str


def claimed_of(rows: Sequence[Row]) -> list[Claimed]:
    """The rows of `claim`, oldest first."""
    return sorted((_claimed(row) for row in rows), key=lambda one: one.message_id)


def _claimed(row: Row) -> Claimed:
    message_id, queue, body, headers, expires_at, redelivered = row
    assert isinstance(body, bytes)
    texts, fault = _headers_of(headers)
    return Claimed(
        message_id=_integer(message_id),
        queue=str(queue),
        body=body,
        headers=texts,
        expires_at=expires_at if isinstance(expires_at, float) else None,
        redelivered=bool(redelivered),
        fault=fault,
    )


def _headers_of(value: Value) -> tuple[dict[str, str], str]:
    """The headers as a mapping, and what is wrong with them; empty if nothing is.

    The column is read as bytes, as another program may have written something that is no text.
    """
    if not isinstance(value, bytes):
        return {}, ""
    try:
        return msgspec.json.decode(value, type=dict[str, str]), ""
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return {}, f"its headers are no JSON object of texts: {error}"


def _values(message: Message, now: float) -> tuple[Value, ...]:
    headers = msgspec.json.encode(dict(message.headers)).decode() if message.headers else None
    expires_at = None if message.expires_in_s is None else now + message.expires_in_s
    return message.body, headers, now, expires_at


def _integer(value: Value) -> int:
    assert isinstance(value, int)
    return value
