"""The journal: the row of one task, from acceptance to the reply.

Methods named `add_…` append statements to a batch, so that one commit can contain them together
with those of a lease. Each change of a row names the owner and the state that it expects; if the
row has others, the commit is rolled back.
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
    Due,
    Outcome,
    TaskRow,
    address_of,
    task_row,
    to_json,
)
from gracekit.journal.tasks_sql import (
    ACCEPT,
    ACCEPT_CONTENT,
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
    NOTE_OF_ROW,
    PAROLES,
    PROGRESS,
    REJECT,
    REMOVE_CONTENT,
    REMOVE_NOTES,
    REMOVE_REJECTED,
    REPLIES,
    REPLIES_DUE,
    REPLY_DONE,
    STILL_DUE,
    TOKEN,
    TRY_LATER,
    WAITS,
)
from gracekit.process import Point
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Engine
from gracekit.store.state import StoreState
from gracekit.tracker.task import (
    RETRIED,
    CancelCause,
    Interruption,
    TaskState,
    TrackedTask,
)

KEPT_REJECTED: Final = 10_000
"""About so many refused requests are kept, with their incidents, within the retention."""
ATTEMPTS_SEEN: Final = 2000
"""Most ended rows that a start reads, so that its cost does not grow with the store."""
RIDE_DELAY_S: Final = 1.0
"""Changes that need not be on disk at once are written with the next commit, after this at most."""
PROGRESS_DELAY_S: Final = 5.0
"""The same for what handlers say of their progress."""
REMOVAL_DELAY_S: Final = 0.05
"""The same for replies that were sent; shorter, because a task is not retried while it owes one."""


class Journal:
    """The rows of one run.

    Args:
        engine: The store.
        clock: For the wall times in rows.
        run_id: Owner of every row that this object changes.
        service: Name of the service.
        keep_failed: Whether FAILED and ERRORED rows keep arguments and context, so that an
            operator can retry them; other ended rows never keep them.

    Attributes:
        kept_rejected: About how many refused requests stay on record.
        answered: Replies that were sent or given up, and whose removal is not committed yet.
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
        self._advanced: dict[int, TrackedTask] = {}
        self.answered = set[_ReplyKey]()
        self._removal: tuple[Batch, list[_ReplyKey]] | None = None
        self._riders: list[tuple[Batch, Callable[[], None]]] = []
        self._ride_timer: asyncio.TimerHandle | None = None

    def commit(self, batch: Batch) -> asyncio.Future[list[list[Row]]]:
        """As `Engine.submit`; also submits what waits for the next commit."""
        if self._dirty or self._riders or self._advanced:
            self.submit_riders()
        return self.engine.submit(batch)

    # -- what waits for a commit --------------------------------------------------------

    def ride(
        self, batch: Batch, done: Callable[[], None], *, within_s: float = RIDE_DELAY_S
    ) -> None:
        """Commit *batch* with the next commit.

        Args:
            batch: Its result is not reported.
            done: Called when it was committed or refused.
            within_s: Commit it after so many seconds if no other commit comes before.
        """
        self._riders.append((batch, done))
        self._await_ride(within_s)

    def submit_riders(self) -> None:
        """Submit now what waits for the next commit."""
        riders, self._riders, self._removal = self._riders, [], None
        for batch, done in riders:
            self.engine.submit(batch).add_done_callback(partial(_ridden, done))
        if (self._dirty or self._advanced) and self.engine.status.state is StoreState.REACHABLE:
            self._submit_steps()

    def _await_ride(self, within_s: float) -> None:
        # Left running when another commit comes first: a new timer each time would cost more.
        loop, timer = asyncio.get_running_loop(), self._ride_timer
        if timer is not None and timer.when() > loop.time() + within_s:
            timer.cancel()
            timer = None
        if timer is None:
            self._ride_timer = loop.call_later(within_s, self._end_ride)

    def _end_ride(self) -> None:
        self._ride_timer = None
        self.submit_riders()

    # -- a request's way in -------------------------------------------------------------

    def add_accept(self, batch: Batch, request: Acceptance, *, begin: bool) -> int:
        """Accept, and with *begin* record the first attempt in the same commit.

        Returns:
            Index of the statement that returns the row id; a conflict if the
            request id is known.
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
            request.content_hash,
            request.on_interrupt,
            request.settle_s,
            kind,
            resource_id,
            None if request.due else self.run_id,
            now,
            request.expires_at,
            request.caller_hash,
            (TaskState.RUNNING if begin else TaskState.ACCEPTED).word,
            int(begin),
            now if begin else None,
            *(request.ops_resource or (None, None)),
            _text_of(request.shown_context),
            *((request.due.at, request.due.ahead_s) if request.due else (None, None)),
        )
        batch.add(ACCEPT_CONTENT, to_json(request.args), to_json(request.context), of=index)
        if request.reply is not None:
            reply = request.reply
            address = (reply.queue, reply.msg_id, reply.expires_at, reply.monitor_s)
            batch.add(ACCEPT_REPLY, *address, int(reply.knows_pending), of=index)
        if begin and request.resource is not None:
            key = (request.request_id, request.recipient)
            batch.add(TOKEN, *request.resource, *key, expect=1)
        batch.add_up(COUNT, "accepted", 1)
        return index

    def add_begin(self, batch: Batch, task: TrackedTask, *, alone: bool = False) -> None:
        """Record an attempt of an accepted row before its handler starts.

        Args:
            batch: Gets the statements.
            task: The task of the row.
            alone: Whether it runs alone as a suspect; `parole` ends that.
        """
        now = self.clock.wall()
        batch.add(BEGIN, now, int(alone), task.row_id, self.run_id, expect=1)
        if task.resource is not None:
            batch.add(TOKEN, *task.resource, task.request_id, task.recipient, expect=1)

    def add_waits(self, batch: Batch, task: TrackedTask) -> None:
        """Record that an accepted row has asked for its lease now, and waits for it."""
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
            delivery: Its columns in the row, from request_id to version, shown_context and
                caller_hash.
            reason: One word.
            detail: A sentence, cut at 1000 characters.
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
            _text_of(delivery["shown_context"]),
            delivery.get("caller_hash", ""),
        )
        batch.add_up(COUNT, "rejected", 1)
        self.add_note(batch, "rejected", delivery["request_id"], delivery["method"], detail)
        self._rejected += 1
        if self._rejected % math.ceil(self.kept_rejected / 100) == 0:  # seldom, as it reads all
            for statement in (COUNT_REMOVED, REMOVE_REJECTED, REMOVE_NOTES):
                batch.add(statement, self.kept_rejected)
        await self.commit(batch)

    async def add_reply_address(self, row: TaskRow, reply: Address) -> bool:
        """Let one more caller of an unfinished task be answered.

        Returns:
            False if the task has ended or is parked; then the answer is on record already.
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
            batch: Gets the statements.
            row_id: The row.
            outcome: How it ended.
            expected: State that the row must have now.
            errored_hook: Whether the errored hook is still to be called.
            owing: False if no reply is due, which saves a statement; a conflict if one is.

        Returns:
            Index of the statement that returns the due replies, each as `address_of` reads it; no
            rows if none is due.
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
            int(errored_hook),
            row_id,
            self.run_id,
            expected.word,
            expect=1,
        )
        if not kept:
            batch.add(REMOVE_CONTENT, row_id)
        return replies if owing else finished

    async def monitored(self, row_id: int) -> list[Address]:
        """Addresses of callers of an unfinished task that asked for heartbeats."""
        rows = await self.engine.query(MONITORED, row_id)
        return [address_of(row) for row in rows]

    async def replies_due(self, row_id: int) -> list[Address]:
        """Addresses to which the answer of an ended task is still to be sent."""
        rows = await self.engine.query(STILL_DUE, row_id, self.run_id)
        return [address_of(row) for row in rows]

    def forget_reply(self, row_id: int, address: Address, *, sent: bool) -> None:
        """Remove a reply that was confirmed, or was given up, which is counted.

        The removal is written with the next commit, and not synced: if the process dies before, or
        after a power cut, the reply may be sent twice.
        """
        if self._removal is None:
            self._removal = Batch(Point.REPLY_SENT, durable=False), list[_ReplyKey]()
            batch, keys = self._removal
            forget = partial(self.answered.difference_update, keys)
            self.ride(batch, forget, within_s=REMOVAL_DELAY_S)
        batch, keys = self._removal
        key = row_id, address.queue, address.msg_id
        self.answered.add(key)
        keys.append(key)
        batch.add(REPLY_DONE, *key)
        if not sent:
            batch.add_up(COUNT, "reply_given_up", 1)
            self._add_reply_note(batch, row_id, address)

    def _add_reply_note(self, batch: Batch, row_id: int, address: Address) -> None:
        detail = f"the reply to queue {address.queue} was not sent"
        batch.add(NOTE_OF_ROW, self.clock.wall(), self.run_id, "reply_given_up", detail, row_id)

    def add_context(self, batch: Batch, task: TrackedTask, context: Mapping[str, Any]) -> None:
        """Replace the context of a running task's row, to add the trace of its last attempt."""
        batch.add(CONTEXT, to_json(context), task.row_id)

    def add_hand_over(
        self,
        batch: Batch,
        task: TrackedTask,
        cut: Interruption,
        *,
        settle_s: float = 0.0,
        rest_s: float = 0.0,
        returned: bool = True,
        charged: bool = False,
    ) -> None:
        """Record a started, unfinished task for recovery.

        If its handler has *returned*, the row is released: after *rest_s* if gracekit cut it; after
        *settle_s*, and with a crash counted, if something else did (UNCLEAN), because its last
        request to a backend may still be under way. If the handler has not returned, this run
        keeps the row until it is proven dead. *charged* counts a crash at which the task was
        alone, for an error that this task alone has caused.
        """
        now = self.clock.wall()
        unclean = cut is Interruption.UNCLEAN
        is_fenced = task.cancel_cause is CancelCause.FENCED  # no fault of the task
        batch.add(
            HAND_OVER,
            cut.value,
            None if returned else self.run_id,
            _text_of(task.cursor),
            now + (settle_s if unclean else rest_s) if unclean or rest_s else None,
            task.row_id,
            self.run_id,
            now,
            int(charged or (unclean and returned and not is_fenced)),
            int(charged),
            expect=1,
        )
        batch.add_up(COUNT, "handed_over", 1)
        self.add_note(batch, "handed_over", task.request_id, task.method, cut.value)
        self._dirty.pop(task.row_id or 0, None)

    def add_try_later(self, batch: Batch, task: TrackedTask, failed: Outcome, due: Due) -> None:
        """Let a running task, whose attempt has failed, be tried again once it is due."""
        batch.add(
            TRY_LATER,
            *(due.at, due.ahead_s, failed.failure, failed.detail, _text_of(task.cursor)),
            *(task.row_id, self.run_id),
            expect=1,
        )
        batch.add_up(COUNT, "tried_again", 1)
        words = f"attempt {task.attempt}: {failed.detail}"
        self.add_note(batch, "failed_attempt", task.request_id, task.method, words)
        self._dirty.pop(task.row_id or 0, None)

    def add_not_started(self, batch: Batch, task: TrackedTask) -> None:
        """Release an accepted row: any run may claim it then."""
        batch.add(NOT_STARTED, task.row_id, self.run_id, expect=1)

    async def parole(self, row: tuple[str, int]) -> None:
        """Record that the suspect of *row* (table and id) is no longer alone."""
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
        self._await_ride(RIDE_DELAY_S)

    async def set_cursor_back(self, task: TrackedTask) -> None:
        """Commit that *task* has no cursor any more: its next attempt begins at the beginning.

        Committed at once: the handler is about to undo items, and after a crash the next attempt
        would otherwise skip them.
        """
        if task.row_id is None:
            return
        self._dirty.pop(task.row_id, None)
        batch = Batch(Point.SAFE_POINT)
        batch.add(CURSOR, None, self.clock.wall(), task.row_id, self.run_id)
        await self.commit(batch)

    def forget_cursor(self, task: TrackedTask) -> None:
        """Drop the cursor of *task*, which has ended, from the next commit."""
        self._dirty.pop(task.row_id or 0, None)

    def mark_progress(self, task: TrackedTask) -> None:
        """Commit the progress of *task* with the next commit, at most `PROGRESS_DELAY_S` later."""
        if task.row_id is not None:
            self._advanced[task.row_id] = task
            self._await_ride(PROGRESS_DELAY_S)

    def _submit_steps(self) -> None:
        batch = Batch(Point.SAFE_POINT)
        now = self.clock.wall()
        for row_id, task in self._dirty.items():
            batch.add(CURSOR, _text_of(task.cursor), now, row_id, self.run_id)
        for row_id, task in self._advanced.items():
            batch.add(PROGRESS, _text_of(task.progress), row_id, self.run_id)
        self._dirty.clear()
        self._advanced.clear()
        # If this fails, items are repeated after a crash; the engine itself reports a broken disk.
        self.engine.submit(batch).add_done_callback(partial(_ridden, None))

    # -- accounting ---------------------------------------------------------------------

    async def tally(
        self, what: str, *, request_id: str = "", method: str = "", detail: str = ""
    ) -> None:
        """Count something that has no row of its own, such as a duplicate, and list it."""
        batch = Batch(Point.TALLY, durable=False)
        batch.add_up(COUNT, what, 1)
        self.add_note(batch, what, request_id, method, detail)
        await self.commit(batch)

    def add_note(
        self, batch: Batch, what: str, request_id: str | None, method: str | None, detail: str
    ) -> None:
        """Add an incident to the list that operators read."""
        batch.add(NOTE, self.clock.wall(), self.run_id, what, request_id, method, detail[:1000])


_ReplyKey = tuple[int, str, str]
"""Row id, queue and message id of one reply."""


def _text_of(value: Any) -> str | None:
    return None if value is None else to_json(value)


def _ridden(done: Callable[[], None] | None, committed: asyncio.Future[Any]) -> None:
    """Retrieve the error of a commit that no code awaits, so that asyncio does not log it."""
    if not committed.cancelled():
        committed.exception()
    if done is not None:
        done()
