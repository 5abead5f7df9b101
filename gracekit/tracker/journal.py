"""The journal: one task's life on disk, from acceptance to the reply.

Methods named `add_…` append statements to a batch, so that the dispatcher can
join them with a lease's into one commit. Every change of a row names the owner
and the state it expects; a missed expectation rolls the commit back.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.errors import StoreError
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine
from gracekit.tracker.task import (
    RETRIED,
    Cut,
    Lane,
    OnInterrupt,
    Reason,
    TaskState,
    TrackedTask,
)

KEPT_REJECTED: Final = 10_000
"""Refused requests, with their incidents; as long as the other past, at most."""
CURSOR_DELAY_S: Final = 1.0
"""A cursor waits at most this long for another commit to travel with."""

_encoder: Final = msgspec.json.Encoder()
_in_order: Final = msgspec.json.Encoder(order="deterministic")
_decoder: Final = msgspec.json.Decoder()


def to_json(value: Any) -> str:
    """Plain data as JSON text."""
    return _encoder.encode(value).decode()


def from_json(text: Any) -> Any:
    """JSON text as plain data; None stays None."""
    return None if text is None else _decoder.decode(text)


def content_hash(namespace: str | None, method: str, version: str, args: Mapping[str, Any]) -> str:
    """128 bits over what a request asks for, independent of the order of its keys."""
    content = _in_order.encode([namespace, method, version, args])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def caller_hash(context: Mapping[str, Any], keys: Sequence[str]) -> str:
    """128 bits over who calls, by these *keys* of the context; empty if it has none of them."""
    who = {key: context[key] for key in keys if context.get(key) is not None}
    return hashlib.blake2b(_in_order.encode(who), digest_size=16).hexdigest() if who else ""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer is to go.

    Attributes:
        queue: The caller's reply queue.
        msg_id: Echoed to the caller.
        expires_at: Wall time until which the caller waits; None if unknown.
        monitor_s: Seconds without a heartbeat after which the caller gives up; None if it
            asked for none, and then must get none.
    """

    queue: str
    msg_id: str
    expires_at: float | None
    monitor_s: float | None = None


def address_of(columns: Row) -> Address:
    """(queue, msg_id, expires_at, monitor_s) as a value."""
    queue, msg_id, expires_at, monitor_s = columns
    return Address(
        queue=str(queue),
        msg_id=str(msg_id),
        expires_at=None if expires_at is None else float(expires_at),
        monitor_s=None if monitor_s is None else float(monitor_s),
    )


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a request.

    Attributes:
        queue: Wire name of the queue that it came by.
        route: shared, directed or fanout.
        target: Host or instance that alone may run it; empty for any.
        caller_hash: Of who calls; empty if that is not known.
        settle_s: Seconds between an unclean end and the first look.
        reply: Where the answer goes; None for casts and fanouts.
        expires_at: Wall time until which its caller waits; None if unknown.
    """

    request_id: str
    recipient: str
    lane: Lane
    queue: str
    route: str
    target: str
    namespace: str | None
    method: str
    version: str
    args: Mapping[str, Any]
    context: Mapping[str, Any]
    on_interrupt: OnInterrupt
    settle_s: float
    resource: tuple[str, str] | None
    reply: Address | None
    expires_at: float | None
    caller_hash: str = ""

    @property
    def content_hash(self) -> str:
        """Of what is asked for; the same id with another hash is a conflict."""
        return content_hash(self.namespace, self.method, self.version, self.args)

    def repeats(self, row: TaskRow) -> bool:
        """Whether *row*, of the same id, is of this request: its content, and who calls."""
        if row.caller_hash is not None and row.caller_hash != self.caller_hash:
            return False
        return row.content_hash == self.content_hash


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended.

    Attributes:
        state: SUCCEEDED, FAILED or CANCELLED; ERRORED when recovery says so.
        result: JSON text; None beside a failure.
        failure: JSON text of a Failure; None beside a result. A success has one where its result
            cannot be sent.
        reason: Of ERRORED or CANCELLED.
        detail: The sentence beside it.
    """

    state: TaskState
    result: str | None = None
    failure: str | None = None
    reason: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A journal row, as recovery and the listings read it; columns as in the schema.

    Attributes:
        alone: Whether the last crash met it with nothing else at work in its process.
        caller_hash: Of who called; None where an older gracekit accepted it, which did not ask.
    """

    id: int
    request_id: str
    recipient: str
    lane: Lane
    queue: str
    route: str
    target: str
    namespace: str | None
    method: str
    version: str
    args: dict[str, Any] | None
    context: dict[str, Any] | None
    content_hash: str
    on_interrupt: OnInterrupt
    settle_s: float
    resource: tuple[str, str] | None
    state: TaskState
    reason: str | None
    detail: str | None
    owner: str | None
    cut: Cut | None
    not_before: float | None
    attempts: int
    crashes: int
    token: int | None
    cursor: Any
    accepted_at: float
    started_at: float | None
    finished_at: float | None
    expires_at: float | None
    next_check: float | None
    waiting_since: float | None
    result: str | None
    failure: str | None
    errored_due: bool
    alone: bool
    hook_crashes: int
    caller_hash: str | None
    service: str


ROW_COLUMNS: Final = (
    "id, request_id, recipient, lane, queue, route, target, namespace, method, version, args, "
    "context, content_hash, on_interrupt, settle_s, resource_kind, resource_id, state, reason, "
    "detail, owner, cut, not_before, attempts, crashes, token, cursor, accepted_at, started_at, "
    "finished_at, expires_at, next_check, waiting_since, result, failure, errored_due, alone, "
    "hook_crashes, caller_hash, service"
)


def task_row(columns: Row) -> TaskRow:
    """A `ROW_COLUMNS` row as a value.

    Raises:
        StoreError: the row is damaged; the message names its id.
    """
    values: dict[str, Any] = dict(zip(_COLUMN_NAMES, columns, strict=True))
    kind, resource_id = values.pop("resource_kind"), values.pop("resource_id")
    try:
        values["resource"] = None if kind is None else (kind, resource_id)
        values["lane"] = Lane(values["lane"])
        values["state"] = TaskState(values["state"])
        values["on_interrupt"] = OnInterrupt(values["on_interrupt"])
        values["cut"] = None if values["cut"] is None else Cut(values["cut"])
        values["errored_due"] = bool(values["errored_due"])
        values["alone"] = values["alone"] == MET_ALONE
        for name in ("args", "context", "cursor"):
            values[name] = from_json(values[name])
        return TaskRow(**values)
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise StoreError(f"task row {values['id']} is damaged: {error}") from error


MET_ALONE: Final = 2
"""In the column `alone`: that nothing else ran when the process died; 1 is that nothing does."""
_COLUMN_NAMES: Final = tuple(name.strip() for name in ROW_COLUMNS.split(","))

# An accepting commit that begins at once differs from one that waits in four columns only.
_ACCEPT: Final = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, namespace, method,
    version, args, context, content_hash, on_interrupt, settle_s, resource_kind, resource_id,
    owner, accepted_at, expires_at, caller_hash, state, attempts, started_at, crashes)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)
ON CONFLICT (request_id, recipient) DO NOTHING"""
_ACCEPT_REPLY: Final = """
INSERT INTO reply (task_id, queue, msg_id, expires_at, monitor_s)
SELECT id, ?, ?, ?, ? FROM task WHERE request_id = ? AND recipient = ?"""
# The first parameter: whether arguments and context stay for an operator's retry.
HOOK_DONE: Final = """
UPDATE task SET errored_due = 0, calling = 0, args = CASE WHEN ?1 THEN args END,
    context = CASE WHEN ?1 THEN context END WHERE id = ?2"""
COUNT: Final = """
INSERT INTO tally (what, n) VALUES (?, ?) ON CONFLICT (what) DO UPDATE SET n = n + excluded.n"""
NOTE: Final = """
INSERT INTO incident (at, run_id, what, request_id, method, detail) VALUES (?, ?, ?, ?, ?, ?)"""
_BEGIN: Final = """
UPDATE task SET state = 'running', attempts = attempts + 1, started_at = ?, cut = NULL,
    not_before = NULL, waiting_since = NULL, alone = ?
WHERE id = ? AND owner = ? AND state = 'accepted'"""
# Of an accepted row it is the last moment at which it asked for a lease held elsewhere.
_WAITS: Final = (
    "UPDATE task SET waiting_since = ? WHERE id = ? AND owner = ? AND state = 'accepted'"
)
_TOKEN: Final = """
UPDATE task SET token = (SELECT lver FROM lease WHERE kind = ? AND id = ?)
WHERE request_id = ? AND recipient = ?"""
# Arguments stay where an errored hook, or an operator's retry, may need them.
_FINISH: Final = """
UPDATE task SET state = ?, result = ?, failure = ?, reason = ?, detail = ?, finished_at = ?,
    args = CASE WHEN ? THEN args END, context = CASE WHEN ? THEN context END, errored_due = ?
WHERE id = ? AND owner = ? AND state = ?"""
_FINISH_OWING_NOTHING: Final = (
    f"{_FINISH} AND NOT EXISTS (SELECT 1 FROM reply WHERE task_id = task.id)"  # noqa: S608 - a constant
)
# Two statements: RETURNING builds a table for what it returns.
_REPLIES: Final = "SELECT queue, msg_id, expires_at, monitor_s FROM reply WHERE task_id = ?"
_REPLIES_DUE: Final = "UPDATE reply SET due_at = ? WHERE task_id = ?"
_REPLY_DONE: Final = "DELETE FROM reply WHERE task_id = ? AND queue = ? AND msg_id = ?"
_HAND_OVER: Final = """
UPDATE task SET state = 'handed_over', cut = ?1, owner = ?2, cursor = coalesce(?3, cursor),
    crashes = ?8 + iif(coalesce(?3, cursor) IS DISTINCT FROM cursor, 0, crashes),
    alone = iif(?9 OR (?8 AND alone = 1), 2, iif(?8, 0, alone)),
    cursor_at = CASE WHEN ?3 IS NULL THEN cursor_at ELSE ?7 END,
    not_before = ?4 WHERE id = ?5 AND owner = ?6 AND state = 'running'"""
_NOT_STARTED: Final = (
    "UPDATE task SET owner = NULL WHERE id = ? AND owner = ? AND state = 'accepted'"
)
_CURSOR: Final = """
UPDATE task SET cursor = ?1, cursor_at = ?2,
    crashes = CASE WHEN cursor IS DISTINCT FROM ?1 THEN 0 ELSE crashes END
WHERE id = ?3 AND owner = ?4 AND state = 'running'"""
_REJECT: Final = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, namespace, method,
    version, content_hash, on_interrupt, settle_s, accepted_at, finished_at, state, reason, detail)
VALUES (?, ?, ?, ?, ?, ?, '', ?, ?, ?, '', 'error', 0, ?, ?, 'rejected', ?, ?)
ON CONFLICT (request_id, recipient) DO NOTHING"""
# Anybody who may send can have any number of requests refused: the oldest go, and are counted.
_LAST_REJECTED: Final = (
    "(SELECT id FROM task WHERE state = 'rejected' ORDER BY id DESC LIMIT 1 OFFSET ?1)"
)
_COUNT_REMOVED: Final = f"""
INSERT INTO tally (what, n) SELECT 'rejected_removed', count(*) FROM task
    WHERE state = 'rejected' AND id <= {_LAST_REJECTED} HAVING count(*) > 0
ON CONFLICT (what) DO UPDATE SET n = n + excluded.n"""  # noqa: S608 - a constant
_REMOVE_REJECTED: Final = f"DELETE FROM task WHERE state = 'rejected' AND id <= {_LAST_REJECTED}"  # noqa: S608 - a constant
_REMOVE_NOTES: Final = """
DELETE FROM incident WHERE what = 'rejected' AND id <= (
    SELECT id FROM incident WHERE what = 'rejected' ORDER BY id DESC LIMIT 1 OFFSET ?1)"""
_KNOWN: Final = f"SELECT {ROW_COLUMNS} FROM task WHERE request_id = ? AND recipient = ?"  # noqa: S608 - a constant

_BY_ID: Final = f"SELECT {ROW_COLUMNS} FROM task WHERE id = ?"  # noqa: S608 - a constant


class Journal:
    """The rows of one run.

    Args:
        engine: The store.
        clock: For stored moments.
        run_id: Owner of every row that this object changes.
        service: Name of the service.
        keep_failed: Whether FAILED and ERRORED rows keep arguments and context, so that an
            operator can have them run again; other ended rows never do.

    Attributes:
        kept_rejected: Refused requests that stay on record, about.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        run_id: str,
        service: str,
        keep_failed: bool = True,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.run_id = run_id
        self.service = service
        self.kept_rejected = KEPT_REJECTED
        self._rejected = 0
        self.keep_failed = keep_failed
        self._dirty: dict[int, TrackedTask] = {}
        self._flush_timer: asyncio.TimerHandle | None = None

    def commit(self, batch: Batch) -> asyncio.Future[list[list[Row]]]:
        """As `Engine.submit`; cursors that wait travel in the same group."""
        if self._dirty:
            self._submit_cursors()
        return self.engine.submit(batch)

    # -- a request's way in -------------------------------------------------------------

    def add_accept(self, batch: Batch, request: Acceptance, *, begin: bool) -> int:
        """Accept, and with *begin* record the first attempt in the same commit.

        Returns:
            Index of the statement that returns the row id; it raises a conflict
            when the id is known.
        """
        now = self.clock.wall()
        kind, resource_id = request.resource or (None, None)
        index = batch.insert(
            _ACCEPT,
            request.request_id,
            request.recipient,
            self.service,
            request.lane.word,
            request.queue,
            request.route,
            request.target,
            request.namespace,
            request.method,
            request.version,
            to_json(request.args),
            to_json(request.context),
            request.content_hash,
            request.on_interrupt.word,
            request.settle_s,
            kind,
            resource_id,
            self.run_id,
            now,
            request.expires_at,
            request.caller_hash,
            (TaskState.RUNNING if begin else TaskState.ACCEPTED).word,
            int(begin),
            now if begin else None,
        )
        if request.reply is not None:
            reply = request.reply
            address = (reply.queue, reply.msg_id, reply.expires_at, reply.monitor_s)
            batch.add(_ACCEPT_REPLY, *address, request.request_id, request.recipient)
        if begin and request.resource is not None:
            key = (request.request_id, request.recipient)
            batch.add(_TOKEN, *request.resource, *key, expect=1)
        batch.add_up(COUNT, "accepted", 1)
        return index

    def add_begin(self, batch: Batch, task: TrackedTask, *, alone: bool = False) -> None:
        """Record an attempt of an accepted row before its handler starts.

        Args:
            batch: To which it is added.
            task: Whose row it is.
            alone: Whether nothing else runs beside it; `parole` takes that back.
        """
        now = self.clock.wall()
        batch.add(_BEGIN, now, int(alone), task.row_id, self.run_id, expect=1)
        if task.resource is not None:
            batch.add(_TOKEN, *task.resource, task.request_id, task.recipient, expect=1)

    def add_waits(self, batch: Batch, task: TrackedTask) -> None:
        """Say that an accepted row has asked for its lease, and waits for it."""
        batch.add(_WAITS, self.clock.wall(), task.row_id, self.run_id)

    async def known(self, request_id: str, recipient: str) -> TaskRow | None:
        """The row of that request; None if there is none."""
        rows = await self.engine.query(_KNOWN, request_id, recipient)
        return task_row(rows[0]) if rows else None

    async def row(self, row_id: int) -> TaskRow | None:
        """The row of that id; None if retention removed it."""
        rows = await self.engine.query(_BY_ID, row_id)
        return task_row(rows[0]) if rows else None

    async def reject(self, delivery: Mapping[str, Any], *, reason: str, detail: str) -> None:
        """Record a delivery that never becomes a task; a known id is only counted.

        Args:
            delivery: request_id, recipient, lane, queue, route, namespace, method, version.
            reason: One word.
            detail: The sentence beside it.
        """
        now = self.clock.wall()
        batch = Batch(Point.REJECT)
        batch.add(
            _REJECT,
            delivery["request_id"],
            delivery["recipient"],
            self.service,
            delivery["lane"],
            delivery["queue"],
            delivery["route"],
            delivery["namespace"],
            delivery["method"],
            delivery["version"],
            now,
            now,
            reason,
            detail[:1000],
        )
        batch.add_up(COUNT, "rejected", 1)
        self.add_note(batch, "rejected", delivery["request_id"], delivery["method"], detail)
        self._rejected += 1
        if self._rejected % math.ceil(self.kept_rejected / 100) == 0:  # it walks all that stay
            for statement in (_COUNT_REMOVED, _REMOVE_REJECTED, _REMOVE_NOTES):
                batch.add(statement, self.kept_rejected)
        await self.commit(batch)

    async def add_reply_address(self, row: TaskRow, reply: Address) -> bool:
        """Let a duplicate of an unfinished call be answered too.

        Returns:
            False if the task has ended meanwhile: the caller answers from the record.
        """
        batch = Batch(Point.ADD_REPLY_ADDRESS)
        index = batch.ask(
            "INSERT INTO reply (task_id, queue, msg_id, expires_at, monitor_s) "
            "SELECT id, ?, ?, ?, ? FROM task "
            "WHERE id = ? AND finished_at IS NULL ON CONFLICT DO NOTHING RETURNING 1",
            reply.queue,
            reply.msg_id,
            reply.expires_at,
            reply.monitor_s,
            row.id,
        )
        ended = batch.ask("SELECT 1 FROM task WHERE id = ? AND finished_at IS NOT NULL", row.id)
        rows = await self.commit(batch)
        return bool(rows[index]) or not rows[ended]

    # -- its way out --------------------------------------------------------------------

    def add_finish(
        self,
        batch: Batch,
        row_id: int,
        outcome: Outcome,
        *,
        expected: TaskState,
        errored_hook: bool = False,
        owing: bool = True,
    ) -> int:
        """Record the outcome and make its replies due.

        Args:
            batch: To which it is added.
            row_id: The row.
            outcome: How it ended.
            expected: State that it must be in.
            errored_hook: Whether the errored hook has still to be called.
            owing: False says that nobody waits for a reply, which saves a statement; where that
                is untrue, the batch is a conflict.

        Returns:
            Index of the statement that returns each reply as `address_of` reads it; no rows
            where nothing is owed.
        """
        now = self.clock.wall()
        if owing:
            replies = batch.ask(_REPLIES, row_id)
            batch.add(_REPLIES_DUE, now, row_id, after=replies)
        kept = errored_hook or (self.keep_failed and outcome.state in RETRIED)
        finished = batch.add(
            _FINISH if owing else _FINISH_OWING_NOTHING,
            outcome.state.word,
            outcome.result,
            outcome.failure,
            outcome.reason,
            outcome.detail,
            now,
            int(kept),
            int(kept),
            int(errored_hook),
            row_id,
            self.run_id,
            expected.word,
            expect=1,
        )
        return replies if owing else finished

    async def monitored(self, row_id: int) -> list[Address]:
        """Callers of an unfinished task that asked for heartbeats."""
        rows = await self.engine.query(f"{_REPLIES} AND monitor_s IS NOT NULL", row_id)
        return [address_of(row) for row in rows]

    async def replies_due(self, row_id: int) -> list[Address]:
        """Where the answer of an ended task has still to go."""
        rows = await self.engine.query(f"{_REPLIES} AND due_at IS NOT NULL", row_id)
        return [address_of(row) for row in rows]

    async def reply_done(self, row_id: int, address: Address, *, sent: bool) -> None:
        """Forget a reply that was confirmed, or given up and counted.

        Not synced: a power cut at worst sends it twice.
        """
        batch = Batch(Point.REPLY_SENT, durable=False)
        batch.add(_REPLY_DONE, row_id, address.queue, address.msg_id)
        if not sent:
            batch.add_up(COUNT, "reply_given_up", 1)
            self.add_note(batch, "reply_given_up", None, None, f"task {row_id} to {address.queue}")
        await self.commit(batch)

    def add_hand_over(
        self,
        batch: Batch,
        task: TrackedTask,
        cut: Cut,
        *,
        settle_s: float = 0.0,
        returned: bool = True,
        charged: bool = False,
    ) -> None:
        """Record a started, unfinished task for recovery.

        Once its handler has *returned* the row is free: at once where the cut was ours; *settle_s*
        later, and counted as a crash, where it is unclean: somebody else cancelled the handler, and
        its last request may still be on its way. Until its handler has returned the row stays
        owned, until this run is proven dead. *charged* says that a fault of this task alone has cut
        it: counted as a crash that met it alone.
        """
        now = self.clock.wall()
        unclean = cut is Cut.UNCLEAN
        batch.add(
            _HAND_OVER,
            cut.value,
            None if returned else self.run_id,
            None if task.cursor is None else to_json(task.cursor),
            now + settle_s if unclean else None,
            task.row_id,
            self.run_id,
            now,
            int(charged or (unclean and returned)),
            int(charged),
            expect=1,
        )
        batch.add_up(COUNT, "handed_over", 1)
        self.add_note(batch, "handed_over", task.request_id, task.method, cut.value)
        self._dirty.pop(task.row_id or 0, None)

    def add_not_started(self, batch: Batch, task: TrackedTask) -> None:
        """Give an accepted row up for anyone to claim."""
        batch.add(_NOT_STARTED, task.row_id, self.run_id, expect=1)

    async def parole(self, row: tuple[str, int]) -> None:
        """A suspect of table and id *row* is no longer alone: others will begin beside it."""
        table, row_id = row
        batch = Batch(Point.PAROLE, durable=False)
        batch.add(f"UPDATE {table} SET alone = 0 WHERE id = ?", row_id)  # noqa: S608 - task or hold
        await self.commit(batch)

    # -- cursors ------------------------------------------------------------------------

    def mark_cursor(self, task: TrackedTask) -> None:
        """Commit the cursor of *task* with the next commit, at most `CURSOR_DELAY_S` later."""
        if task.row_id is None:
            return
        self._dirty[task.row_id] = task
        if self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(CURSOR_DELAY_S, self._submit_cursors)

    def forget_cursor(self, task: TrackedTask) -> None:
        """The task ended; its cursor no longer matters."""
        self._dirty.pop(task.row_id or 0, None)

    def _submit_cursors(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._dirty or self.engine.broken is not None:
            return
        batch = Batch(Point.SAFE_POINT)
        now = self.clock.wall()
        for row_id, task in self._dirty.items():
            batch.add(_CURSOR, to_json(task.cursor), now, row_id, self.run_id)
        self._dirty.clear()
        # A cursor that is not written repeats items; the engine reports a broken disk itself.
        self.engine.submit(batch).add_done_callback(_take_exception)

    # -- accounting ---------------------------------------------------------------------

    async def tally(
        self, what: str, *, request_id: str = "", method: str = "", detail: str = ""
    ) -> None:
        """Count and list something that is no row of its own: a duplicate, a return, an expiry."""
        batch = Batch(Point.TALLY, durable=False)
        batch.add_up(COUNT, what, 1)
        self.add_note(batch, what, request_id, method, detail)
        await self.commit(batch)

    def add_note(
        self, batch: Batch, what: str, request_id: str | None, method: str | None, detail: str
    ) -> None:
        """List an incident beside its count."""
        batch.add(NOTE, self.clock.wall(), self.run_id, what, request_id, method, detail[:1000])


def _take_exception(done: asyncio.Future[Any]) -> None:
    """Look at the error of a commit that nobody awaits, so that the loop does not complain."""
    if not done.cancelled():
        done.exception()


ERRORED_SENTENCES: Final[Mapping[Reason, str]] = {
    Reason.INTERRUPTED: "it was started and its end is not known",
    Reason.ATTEMPTS: "each of its attempts ended with the process, or was cancelled by something "
    "other than gracekit",
    Reason.EXPIRED: "its caller stopped waiting before it could be started",
    Reason.GAVE_UP: "its truth could not be found out in time",
    Reason.METHOD_GONE: "this version of the service has no such method",
    Reason.DEPENDENCY: "something it depends on ended in error",
    Reason.OPERATOR: "an operator has given it up",
}
