"""Watches parked tasks on the disk, by triggers, and what is sent about them.

Each step into and out of PENDING is held against the row, the lease, the callers and the
notifications of the same commit.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from gracekit.errors import GracekitError, NoCapacity, Parked
from gracekit.journal.outbox import NO_CAPACITY, UPDATE
from gracekit.rpc.notifications import Notification, decode_notification
from gracekit.rpc.transport import Message, Queue
from gracekit.testing.ports import EPOCH_S
from gracekit.tracker.task import Verb
from tests.played import Life
from tests.simulation.truth import Violation, key_of

if TYPE_CHECKING:
    from gracekit import Context
    from tests.simulation.callers import Sent
    from tests.simulation.story import Story

TOPIC: Final = "compute-notifications"
OVERDUE_S: Final = 45.0
"""A run that lives ends an overdue task within one pass, whatever the last one has met."""
_KEY: Final = "new.request_id || '/' || new.recipient"
_ARGS: Final = "(SELECT args FROM main.content WHERE row_id = new.id)"
SCHEMA: Final = f"""
CREATE TEMP TABLE parked_step (n INTEGER PRIMARY KEY, what TEXT, key TEXT, data TEXT);
CREATE TEMP TRIGGER parked_move AFTER UPDATE OF state ON main.task
    WHEN (old.state = 'pending') <> (new.state = 'pending') BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('move', {_KEY}, json_object(
        'before', old.state, 'after', new.state, 'was', old.parkings, 'version', new.parkings,
        'owner', new.owner, 'has_args', {_ARGS} IS NOT NULL, 'n', json_extract({_ARGS}, '$.n'),
        'deadline', new.pending_deadline, 'reason', new.reason)); END;
CREATE TEMP TRIGGER parked_end AFTER UPDATE OF state ON main.task
    WHEN new.parkings > 0 AND old.state <> 'pending' AND new.finished_at IS NOT old.finished_at
        AND new.state IN ('succeeded', 'failed', 'errored', 'cancelled') BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('end', {_KEY}, json_object(
        'before', old.state, 'after', new.state, 'version', new.parkings)); END;
CREATE TEMP TRIGGER parked_version AFTER UPDATE OF parkings ON main.task
    WHEN new.parkings <> old.parkings AND (old.state = 'pending' OR new.state <> 'pending') BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('version', {_KEY}, json_object(
        'was', old.parkings, 'version', new.parkings)); END;
CREATE TEMP TRIGGER parked_stays AFTER UPDATE OF owner ON main.task
    WHEN old.state = 'pending' AND new.state = 'pending' BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('stays', {_KEY}, json_object(
        'owner', new.owner, 'has_args', {_ARGS} IS NOT NULL)); END;
CREATE TEMP TRIGGER parked_args AFTER DELETE ON main.content BEGIN
    INSERT INTO parked_step (what, key, data) SELECT 'stays', request_id || '/' || recipient,
        json_object('owner', owner, 'has_args', false)
    FROM main.task WHERE id = old.row_id AND state = 'pending'; END;
CREATE TEMP TRIGGER parked_deadline AFTER UPDATE OF pending_deadline ON main.task
    WHEN new.pending_deadline IS NOT old.pending_deadline BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('deadline', {_KEY}, json_object(
        'before', old.state, 'after', new.state, 'was', old.pending_deadline,
        'deadline', new.pending_deadline)); END;
CREATE TEMP TRIGGER news_in AFTER INSERT ON main.outbox BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('news', new.message_id, json_object(
        'event', new.event_type, 'payload', json(new.payload))); END;
CREATE TEMP TRIGGER news_out AFTER DELETE ON main.outbox BEGIN
    INSERT INTO parked_step (what, key, data) VALUES ('forgotten', old.message_id, json_object(
        'expires_at', old.expires_at)); END;
"""
_WHOLE: Final = """
SELECT task.request_id, lease.kind, reply.msg_id FROM task
LEFT JOIN lease ON lease.owner IS NOT NULL AND lease.request_id = task.request_id
LEFT JOIN reply ON reply.row_id = task.id AND reply.due_at IS NULL
WHERE task.state = 'pending' ORDER BY task.id"""
Step = tuple[str, str, str, int]
"""Task id, old state, new state and version."""


class ParkedTasks:
    """The history of the parked tasks of one story.

    Attributes:
        out: How each task left PENDING, by id and version: the state, and its argument `n`.
        moves: How often each task has come or gone, by id.
        news: What was to be sent, by message id.
        sent: Message ids that the broker has confirmed.
        dropped: How many expired.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self.out: dict[tuple[str, int], tuple[str, Any]] = {}
        self.moves: Counter[str] = Counter()
        self.news: dict[str, dict[str, Any]] = {}
        self.sent: set[str] = set()
        self.dropped = 0
        self._hooks: dict[tuple[str, float], Life] = {}

    # -- the disk -------------------------------------------------------------------------

    def read(self, actor: Any) -> None:
        """Judge what the last commits have done."""
        disk = self._story.machine.disk
        rows = list(disk.execute("SELECT what, key, data FROM parked_step ORDER BY n"))
        if not rows:
            return
        disk.execute("DELETE FROM parked_step")
        steps: Counter[Step] = Counter()
        updates: Counter[Step] = Counter()
        calls: Counter[tuple[str, int]] = Counter()
        for what, key, text in rows:
            data = json.loads(text)
            if what == "move":
                step = self._note_move(actor, key, data)
                steps[step] += 1
                calls[step[0], step[3]] += step[2] == "pending"
            elif what == "end":
                task_id = key.rpartition("/")[0]
                steps[task_id, data["before"], data["after"], data["version"]] += 1
                self._story.ends[f"retried to {data['after']}"] += 1
            elif what == "news":
                self._note_news(key, data, updates, calls)
            elif what == "forgotten":
                self._check_forgotten(actor, key, data)
            else:
                self._check_kept(actor, what, key, data)
        if steps != updates:
            late, odd = list((steps - updates).elements()), list((updates - steps).elements())
            raise Violation(f"Q1: steps {late} have no notification, and {odd} were no steps")
        if calls := +calls + -calls:
            raise Violation(f"Q1: parking asks once for capacity, not so for {calls}")
        self._check_whole()

    def _note_move(self, actor: Any, key: str, data: dict[str, Any]) -> Step:
        task_id, before, after = key.rpartition("/")[0], data["before"], data["after"]
        self._story.tell(f"{actor.name} moves {key} {before}>{after} version {data['version']}")
        self.moves[task_id] += 1
        if after == "pending":
            self._check_row(key, data)
            if data["version"] != data["was"] + 1:
                raise Violation(f"I14: {key} was parked, and its version: {data}")
        else:
            if (task_id, data["version"]) in self.out:
                raise Violation(f"Q5: {key} leaves PENDING twice at version {data['version']}")
            self.out[task_id, data["version"]] = after, data["n"]
            why = f" {data['reason']}" if after == "errored" else ""
            self._story.ends[f"pending to {after}{why}"] += 1
            if data["reason"] == "expired" and not self._is_past(data["deadline"]):
                raise Violation(f"Q4: {key} expired before its deadline {data['deadline']}")
        return task_id, before, after, data["version"]

    def _check_row(self, key: str, data: dict[str, Any]) -> None:
        if data["owner"] is not None or not data["has_args"]:
            raise Violation(f"I14: {key} is PENDING with an owner, or without arguments: {data}")
        if data.get("deadline", 0) is None:
            raise Violation(f"I14: {key} is PENDING without a deadline")

    def _check_kept(self, actor: Any, what: str, key: str, data: dict[str, Any]) -> None:
        """What of a row only certain steps may change."""
        if what == "stays":
            self._check_row(key, data)
        elif what == "version":
            raise Violation(f"I14: the version of {key} changed by {actor.name}: {data}")
        elif what == "deadline":
            is_new = data["was"] is None and data["after"] == "pending"
            is_again = data["deadline"] is None and data["before"] in {"failed", "errored"}
            follows = self._story.swarm.jumps  # and so does what waits
            if not (is_new or is_again or follows):
                raise Violation(f"Q3: the deadline of {key} changed by {actor.name}: {data}")
            latest = self._wall + self._story.capacity.timeout_s + 0.001
            if is_new and not self._story.swarm.jumps and data["deadline"] > latest:
                raise Violation(f"Q3: {key} may wait until {data['deadline']}")

    def _check_whole(self) -> None:
        """What holds of all parked tasks after a commit."""
        rows = self._story.machine.rows(_WHOLE)
        if len({row["request_id"] for row in rows}) > self._story.capacity.most:
            raise Violation(f"Q7: {len(rows)} tasks are PENDING")
        for row in rows:
            if row["kind"] is not None:
                raise Violation(f"I14: {row['request_id']} is PENDING and has its lease")
            if row["msg_id"] is not None:
                raise Violation(f"Q6: a caller of {row['request_id']}, PENDING, is left waiting")

    @property
    def _wall(self) -> float:
        return EPOCH_S + self._story.loop.time() + self._story.machine.clock.shift_s

    def _is_past(self, moment: float) -> bool:
        return self._story.swarm.jumps or moment <= self._wall + 0.001

    # -- notifications --------------------------------------------------------------------

    def _note_news(
        self,
        message_id: str,
        data: dict[str, Any],
        updates: Counter[Step],
        calls: Counter[tuple[str, int]],
    ) -> None:
        if message_id in self.news:
            raise Violation(f"Q2: two notifications have the id {message_id}")
        self.news[message_id] = payload = data["payload"]
        task_id, version = payload["task_id"], payload["version"]
        if data["event"] == UPDATE:
            updates[task_id, payload["old_state"], payload["new_state"], version] += 1
        elif data["event"] == NO_CAPACITY:
            calls[task_id, version] -= 1

    def check_sending(self, queue: Queue, message: Message) -> str:
        """Q2: what is sent is on record, under its id; returns that."""
        said = decode_notification(message.body)
        if queue.name != f"{TOPIC}.{said.priority.lower()}":
            raise Violation(f"Q2: {said.event_type} goes to {queue.name}")
        self.check_heard(said)
        return said.message_id

    def check_heard(self, said: Notification) -> None:
        """Q2: what somebody hears has happened."""
        if self.news.get(said.message_id) != said.payload:
            raise Violation(f"Q2: nothing on record says {said.event_type} {said.payload}")

    def _check_forgotten(self, actor: Any, message_id: str, data: dict[str, Any]) -> None:
        if message_id in self.sent:
            return
        if not self._is_past(data["expires_at"]):
            raise Violation(f"Q2: {actor.name} has forgotten {message_id} before it was sent")
        self.dropped += 1

    # -- callers --------------------------------------------------------------------------

    def check_answer(self, one: Sent, error: Exception) -> None:
        """Q6: what a caller is told of parking has happened, and in words that it knows."""
        if not isinstance(error, NoCapacity | Parked):
            return
        request_id, knows = one.plan.request_id, one.options.get("pending", False)
        self._story.ends[f"answered {type(error).__name__}"] += 1
        if not one.plan.needs:
            raise Violation(f"Q6: {request_id} needs no room and was answered {error!r}")
        rows = self._story.machine.rows("SELECT * FROM task WHERE request_id = ?", request_id)
        versions = max([row["parkings"] for row in rows], default=0)
        if isinstance(error, Parked):
            if not knows or error.task_id != request_id or not 1 <= error.version <= versions:
                raise Violation(f"Q6: {request_id} at version {versions} was answered {error!r}")
        elif one.plan.policy != "requeue" and not versions:
            retried = self._story.truth.was_ordered(request_id, Verb.RETRY)  # it had failed before
            if not retried and not any(row["state"] == "failed" for row in rows):
                raise Violation(f"Q6: {request_id} was neither parked nor failed: {error!r}")
        elif knows and versions and "not parked" not in str(error):
            raise Violation(f"Q6: {request_id} is parked, and its caller got {error!r}")

    # -- handlers and hooks ---------------------------------------------------------------

    def check_start(self, ctx: Context) -> None:
        """Q5: a handler has the arguments on record, those of a retry too."""
        sql = (
            "SELECT json_extract(args, '$.n') AS n FROM task JOIN content ON row_id = id "
            "WHERE request_id = ?"
        )
        rows = self._story.machine.rows(f"{sql} AND recipient = ?", *key_of(ctx).split("/"))
        if rows and ctx._args["n"] != rows[0]["n"]:
            raise Violation(f"Q5: {ctx.request_id} runs with n={ctx._args['n']}, not {rows}")

    def check_hook(self, ctx: Context, life: Life) -> None:
        """Q9: one run calls the errored hook of one end, unless it has died or may not act."""
        if self._story.is_fenced(life):
            return
        sql = "SELECT finished_at FROM task WHERE request_id = ? AND recipient = ?"
        rows = self._story.machine.rows(sql, *key_of(ctx).split("/"))
        end = (key_of(ctx), rows[0]["finished_at"])
        other = self._hooks.setdefault(end, life)
        if other is life:
            return
        if other.process.lives and other.runtime.run_id not in self._story.ledger.out:
            raise Violation(f"Q9: the errored hook of {ctx.request_id} is called by two runs")
        self._hooks[end] = life

    # -- the end --------------------------------------------------------------------------

    def unsettled(self) -> list[str]:
        """What is still to be sent."""
        rows = self._story.machine.rows("SELECT message_id, owner FROM outbox")
        return [f"notification {row['message_id']} of {row['owner']}" for row in rows]

    def check_overdue(self) -> None:
        """Q4: nothing waits past its deadline while a run serves; asked in the quiet phase."""
        sql = "SELECT request_id FROM task WHERE state = 'pending' AND pending_deadline < ?"
        for row in self._story.machine.rows(sql, self._wall - OVERDUE_S):
            raise Violation(f"Q4: {row['request_id']} is PENDING {OVERDUE_S} s past its deadline")

    def reckon(self) -> None:
        """Q2: all that was to be said was sent, or has expired and is counted."""
        missing = self.news.keys() - self.sent
        sql = "SELECT n FROM tally WHERE what = 'notification_expired'"
        counted = sum(row["n"] for row in self._story.machine.rows(sql))
        if not self.dropped <= counted <= len(self.news) or len(missing) != self.dropped:
            raise Violation(
                f"Q2: {len(missing)} of {len(self.news)} notifications were never sent, "
                f"{self.dropped} have expired, and {counted} are counted"
            )


def told(error: BaseException) -> str:
    """An error in a trace."""
    return f"{type(error).__name__}: {error}" if isinstance(error, GracekitError) else repr(error)
