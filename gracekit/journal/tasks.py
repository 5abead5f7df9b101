"""The journal: one task's life on disk, from acceptance to the reply.

Methods named `add_…` append statements to a batch, so that the dispatcher can join them with a
lease's into one commit. Every change of a row names the owner and the state it expects; a missed
expectation rolls the commit back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.journal.rows import (
    Acceptance,
    Address,
    Outcome,
    TaskRow,
    address_of,
    task_row,
    to_json,
)
from gracekit.journal.tasks_sql import (
    ACCEPT,
    ACCEPT_REPLY,
    ADD_REPLY,
    BEGIN,
    BY_ID,
    CONTEXT,
    COUNT,
    COUNT_REMOVED,
    CURSOR,
    FINISH,
    FINISH_OWING_NOTHING,
    HAND_OVER,
    IS_ANSWERED,
    KNOWN,
    LAST_ATTEMPTS,
    MONITORED,
    NOT_STARTED,
    NOTE,
    PAROLES,
    REJECT,
    REMOVE_NOTES,
    REMOVE_REJECTED,
    REPLIES,
    REPLIES_DUE,
    REPLY_DONE,
    STILL_DUE,
    TOKEN,
    WAITS,
)
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine
from gracekit.store.status import StoreState
from gracekit.tracker.task import (
    RETRIED,
    Interruption,
    TaskState,
    TrackedTask,
)

KEPT_REJECTED: Final = 10_000
"""Refused requests, with their incidents; as long as the other past, at most."""
ATTEMPTS_SEEN: Final = 2000
"""Ended rows that a start looks at, so that its cost does not grow with the store."""
RIDE_DELAY_S: Final = 1.0
"""What need not be on disk at once waits at most this long for another commit to travel with."""


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
        self._riders: list[tuple[Batch, Callable[[], None]]] = []
        self._ride_timer: asyncio.TimerHandle | None = None

    def commit(self, batch: Batch) -> asyncio.Future[list[list[Row]]]:
        """As `Engine.submit`; what waits for a commit travels in the same group."""
        if self._dirty or self._riders:
            self.submit_riders()
        return self.engine.submit(batch)

    # -- what waits for a commit --------------------------------------------------------

    def ride(self, batch: Batch, done: Callable[[], None]) -> None:
        """Commit *batch* with the next commit, at most `RIDE_DELAY_S` later.

        Args:
            batch: Nobody waits for it.
            done: Called when it is committed or refused.
        """
        self._riders.append((batch, done))
        self._await_ride()

    def submit_riders(self) -> None:
        """Submit now what waits for a commit."""
        if self._ride_timer is not None:
            self._ride_timer.cancel()
            self._ride_timer = None
        riders, self._riders = self._riders, []
        for batch, done in riders:
            self.engine.submit(batch).add_done_callback(partial(_ridden, done))
        if self._dirty and self.engine.status.state is StoreState.REACHABLE:
            self._submit_cursors()

    def _await_ride(self) -> None:
        if self._ride_timer is None:
            loop = asyncio.get_running_loop()
            self._ride_timer = loop.call_later(RIDE_DELAY_S, self.submit_riders)

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
            ACCEPT,
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
            request.on_interrupt,
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
            key = (request.request_id, request.recipient)
            batch.add(ACCEPT_REPLY, *address, int(reply.knows_pending), *key)
        if begin and request.resource is not None:
            key = (request.request_id, request.recipient)
            batch.add(TOKEN, *request.resource, *key, expect=1)
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
        batch.add(BEGIN, now, int(alone), task.row_id, self.run_id, expect=1)
        if task.resource is not None:
            batch.add(TOKEN, *task.resource, task.request_id, task.recipient, expect=1)

    def add_waits(self, batch: Batch, task: TrackedTask) -> None:
        """Say that an accepted row has asked for its lease, and waits for it."""
        batch.add(WAITS, self.clock.wall(), task.row_id, self.run_id)

    async def known(self, request_id: str, recipient: str) -> TaskRow | None:
        """The row of that request; None if there is none."""
        rows = await self.engine.query(KNOWN, request_id, recipient)
        return task_row(rows[0]) if rows else None

    async def row(self, row_id: int) -> TaskRow | None:
        """The row of that id; None if retention removed it."""
        rows = await self.engine.query(BY_ID, row_id)
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
            REJECT,
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
            for statement in (COUNT_REMOVED, REMOVE_REJECTED, REMOVE_NOTES):
                batch.add(statement, self.kept_rejected)
        await self.commit(batch)

    async def add_reply_address(self, row: TaskRow, reply: Address) -> bool:
        """Let a duplicate of an unfinished call be answered too.

        Returns:
            False if the task has ended, or waits for capacity: the caller answers from the record.
        """
        batch = Batch(Point.ADD_REPLY_ADDRESS)
        index = batch.ask(
            ADD_REPLY,
            reply.queue,
            reply.msg_id,
            reply.expires_at,
            reply.monitor_s,
            int(reply.knows_pending),
            row.id,
        )
        answered = batch.ask(IS_ANSWERED, row.id)
        rows = await self.commit(batch)
        return bool(rows[index]) or not rows[answered]

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
            replies = batch.ask(REPLIES, row_id)
            batch.add(REPLIES_DUE, now, row_id, after=replies)
        kept = errored_hook or (self.keep_failed and outcome.state in RETRIED)
        finished = batch.add(
            FINISH if owing else FINISH_OWING_NOTHING,
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
        rows = await self.engine.query(MONITORED, row_id)
        return [address_of(row) for row in rows]

    async def replies_due(self, row_id: int) -> list[Address]:
        """Where the answer of an ended task has still to go."""
        rows = await self.engine.query(STILL_DUE, row_id, self.run_id)
        return [address_of(row) for row in rows]

    async def reply_done(self, row_id: int, address: Address, *, sent: bool) -> None:
        """Forget a reply that was confirmed, or given up and counted.

        Not synced: a power cut at worst sends it twice.
        """
        batch = Batch(Point.REPLY_SENT, durable=False)
        batch.add(REPLY_DONE, row_id, address.queue, address.msg_id)
        if not sent:
            batch.add_up(COUNT, "reply_given_up", 1)
            self.add_note(batch, "reply_given_up", None, None, f"task {row_id} to {address.queue}")
        await self.commit(batch)

    def add_context(self, batch: Batch, task: TrackedTask, context: Mapping[str, Any]) -> None:
        """Replace the context of a running task's row, to add the trace of its last attempt."""
        batch.add(CONTEXT, to_json(context), task.row_id, self.run_id)

    def add_hand_over(
        self,
        batch: Batch,
        task: TrackedTask,
        cut: Interruption,
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
        unclean = cut is Interruption.UNCLEAN
        batch.add(
            HAND_OVER,
            cut.value,
            None if returned else self.run_id,
            _text_of(task.cursor),
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
        batch.add(NOT_STARTED, task.row_id, self.run_id, expect=1)

    async def parole(self, row: tuple[str, int]) -> None:
        """A suspect of table and id *row* is no longer alone: others will begin beside it."""
        table, row_id = row
        batch = Batch(Point.PAROLE, durable=False)
        batch.add(PAROLES[table], row_id)
        await self.commit(batch)

    async def last_attempts(self) -> list[tuple[str | None, str, float]]:
        """(namespace, method, seconds) of first attempts that have succeeded, the oldest first."""
        rows = await self.engine.query(LAST_ATTEMPTS, ATTEMPTS_SEEN, self.service)
        return [
            (None if namespace is None else str(namespace), str(method), float(seconds or 0.0))
            for namespace, method, seconds in rows
        ]

    # -- cursors ------------------------------------------------------------------------

    def mark_cursor(self, task: TrackedTask) -> None:
        """Commit the cursor of *task* with the next commit, at most `RIDE_DELAY_S` later."""
        if task.row_id is None:
            return
        self._dirty[task.row_id] = task
        self._await_ride()

    async def set_cursor_back(self, task: TrackedTask) -> None:
        """Commit that *task* has no cursor any more: its next attempt begins at the beginning.

        At once, as a late commit would leave items out that are about to be undone.
        """
        if task.row_id is None:
            return
        self._dirty.pop(task.row_id, None)
        batch = Batch(Point.SAFE_POINT)
        batch.add(CURSOR, None, self.clock.wall(), task.row_id, self.run_id)
        await self.commit(batch)

    def forget_cursor(self, task: TrackedTask) -> None:
        """The task ended; its cursor no longer matters."""
        self._dirty.pop(task.row_id or 0, None)

    def _submit_cursors(self) -> None:
        batch = Batch(Point.SAFE_POINT)
        now = self.clock.wall()
        for row_id, task in self._dirty.items():
            batch.add(CURSOR, _text_of(task.cursor), now, row_id, self.run_id)
        self._dirty.clear()
        # A cursor that is not written repeats items; the engine reports a broken disk itself.
        self.engine.submit(batch).add_done_callback(partial(_ridden, None))

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


def _text_of(cursor: Any) -> str | None:
    return None if cursor is None else to_json(cursor)


def _ridden(done: Callable[[], None] | None, committed: asyncio.Future[Any]) -> None:
    """A commit that nobody awaits has ended; its error is looked at, or the loop complains."""
    if not committed.cancelled():
        committed.exception()
    if done is not None:
        done()
