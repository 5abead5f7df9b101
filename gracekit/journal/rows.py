"""The values that the journal writes and reads: requests, rows, outcomes, addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.config.choices import OnInterrupt, need_choice
from gracekit.errors import StoreError
from gracekit.journal.tasks_sql import COLUMNS, CONTENT_COLUMNS
from gracekit.store.batch import Row
from gracekit.tracker.task import (
    Interruption,
    Lane,
    Order,
    Reason,
    TaskState,
)

_encoder: Final = msgspec.json.Encoder()
_in_order: Final = msgspec.json.Encoder(order="deterministic")
_decoder: Final = msgspec.json.Decoder()


def to_json(value: Any) -> str:
    """Plain data as JSON text."""
    return _encoder.encode(value).decode()


def from_json(text: Any) -> Any:
    """JSON text as plain data; None stays None."""
    return None if text is None else _decoder.decode(text)


def order_from(text: str) -> Order:
    """An order that `to_json` has written; raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Order)


def content_hash(namespace: str | None, method: str, version: str, args: Mapping[str, Any]) -> str:
    """128-bit hash of what a request asks for; the order of keys does not matter."""
    content = _in_order.encode([namespace, method, version, args])
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def caller_hash(context: Mapping[str, Any], keys: Sequence[str]) -> str:
    """128-bit hash of the caller by these *keys* of its context; empty if it has none of them."""
    who = {key: context[key] for key in keys if context.get(key) is not None}
    return hashlib.blake2b(_in_order.encode(who), digest_size=16).hexdigest() if who else ""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer is to be sent.

    Attributes:
        queue: The caller's reply queue.
        msg_id: Sent back, so that the caller knows which call is answered.
        expires_at: Wall time until which the caller waits; None if unknown.
        monitor_s: Seconds without a heartbeat after which the caller gives up; None if it
            asked for none, and then must get none.
        knows_pending: Whether the caller has said that it knows the state PENDING.
    """

    queue: str
    msg_id: str
    expires_at: float | None
    monitor_s: float | None = None
    knows_pending: bool = False


def address_of(columns: Row) -> Address:
    """(queue, msg_id, expires_at, monitor_s, knows_pending) as a value."""
    queue, msg_id, expires_at, monitor_s, knows_pending = columns
    return Address(
        queue=str(queue),
        msg_id=str(msg_id),
        expires_at=None if expires_at is None else float(expires_at),
        monitor_s=None if monitor_s is None else float(monitor_s),
        knows_pending=bool(knows_pending),
    )


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """When an accepted task may begin.

    Attributes:
        at: Wall time.
        ahead_s: Wall time minus loop time now, for a pause, which ends as if the clock had not been
            set meanwhile; None for a moment, which stands.
    """

    at: float
    ahead_s: float | None = None

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Due:
        """The end of a pause that begins now."""
        wall = clock.wall()
        return cls(at=wall + seconds, ahead_s=wall - clock.loop())


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a request.

    Attributes:
        queue: Wire name of the queue that it came by.
        route: shared, directed or fanout.
        target: The only host or instance that may run it; empty for any.
        caller_hash: Hash of the caller; empty if it is not known.
        settle_s: Seconds between an unclean end and recovery's first look.
        ops_resource: As of a `TrackedTask`.
        shown_context: As of a `TrackedTask`.
        reply: Where the answer goes; None for casts and fanouts.
        expires_at: Wall time until which its caller waits; None if unknown.
        due: Before which it may not begin; None for at once.
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
    due: Due | None = None
    ops_resource: tuple[str, str] | None = None
    shown_context: Mapping[str, str] | None = None
    caller_hash: str = ""

    @property
    def content_hash(self) -> str:
        """Hash of what is asked for; the same id with another hash is a conflict."""
        return content_hash(self.namespace, self.method, self.version, self.args)

    def repeats(self, row: TaskRow) -> bool:
        """Whether *row*, which has the same id, has the same content and caller."""
        return (row.caller_hash, row.content_hash) == (self.caller_hash, self.content_hash)


class Parking(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to callers of a parked task.

    Attributes:
        task_id: Its request id.
        deadline: Wall time until which it may be PENDING.
        version: How often it was parked; each order about it names this number.
    """

    task_id: str
    deadline: float
    version: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended.

    Attributes:
        state: SUCCEEDED, FAILED or CANCELLED; ERRORED if recovery ends it; PENDING if the task was
            parked, ACCEPTED if it is tried again: both end its attempt and not the task.
        result: JSON text; None if there is a failure.
        failure: JSON text of a Failure; None if there is a result. A success has a failure if its
            result cannot be sent.
        reason: Why the state is ERRORED, CANCELLED or PENDING; else None.
        detail: A sentence about it.
        parking: For PENDING: the answer to callers that know the state.
        again_s: For ACCEPTED: seconds until the task is tried again.
    """

    state: TaskState
    result: str | None = None
    failure: str | None = None
    reason: str | None = None
    detail: str | None = None
    parking: Parking | None = None
    again_s: float = 0.0


class RowOfTask(msgspec.Struct, frozen=True, kw_only=True):
    """What all that reads rows of tasks wants to know.

    Attributes:
        attempts: Number of attempts begun so far.
        parkings: How often it was parked.
        pending_deadline: Wall time until which it may be PENDING; None if it never was.
        ops_resource: As of a `TrackedTask`.
        shown_context: As of a `TrackedTask`.
    """

    request_id: str
    service: str
    method: str
    lane: Lane
    resource: tuple[str, str] | None
    ops_resource: tuple[str, str] | None
    shown_context: dict[str, str] | None
    state: TaskState
    attempts: int
    parkings: int
    pending_deadline: float | None

    @property
    def shown_resource(self) -> tuple[str, str] | None:
        """As of a `TrackedTask`."""
        return self.resource or self.ops_resource

    @property
    def event_fields(self) -> dict[str, Any]:
        """As of a `TrackedTask`."""
        return {
            "task_id": self.request_id,
            "method": self.method,
            "lane": self.lane.word,
            "resource": self.shown_resource,
            "attempt": self.attempts,
            "context": self.shown_context,
        }

    def __str__(self) -> str:
        return f"task {self.request_id} ({self.method})"


class TaskRow(RowOfTask, frozen=True, kw_only=True):
    """A journal row, as recovery and the listings read it; columns as in the schema.

    Attributes:
        alone: Whether nothing else was at work in its process at its last crash.
        caller_hash: Hash of the caller; empty if it is not known.
        ordered: The order that its run has taken; None if none was.
    """

    id: int
    recipient: str
    queue: str
    route: str
    target: str
    namespace: str | None
    version: str
    args: dict[str, Any] | None
    context: dict[str, Any] | None
    content_hash: str
    on_interrupt: OnInterrupt
    settle_s: float
    reason: str | None
    detail: str | None
    owner: str | None
    cut: Interruption | None
    not_before: float | None
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
    caller_hash: str
    ordered: Order | None
    due_at: float | None
    failures: int
    progress: dict[str, Any] | None


def task_row(columns: Row) -> TaskRow:
    """A `ROW_COLUMNS` row as a value.

    Raises:
        StoreError: the row is damaged; the message names its id.
    """
    values: dict[str, Any] = dict(zip(_COLUMN_NAMES, columns, strict=True))
    values["resource"] = taken_pair(values, "resource")
    values["ops_resource"] = taken_pair(values, "ops")
    try:
        values["ordered"] = None if values["ordered"] is None else order_from(values["ordered"])
        values["lane"] = Lane(values["lane"])
        values["state"] = TaskState(values["state"])
        values["on_interrupt"] = need_choice(values["on_interrupt"], OnInterrupt)
        values["cut"] = None if values["cut"] is None else Interruption(values["cut"])
        values["errored_due"] = bool(values["errored_due"])
        values["alone"] = values["alone"] == MET_ALONE
        for name in ("args", "context", "cursor", "shown_context", "progress"):
            values[name] = from_json(values[name])
        return TaskRow(**values)
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise StoreError(f"task row {values['id']} is damaged: {error}") from error


def taken_pair(values: dict[str, Any], name: str) -> tuple[str, str] | None:
    """The columns `{name}_kind` and `{name}_id`, removed from *values*; None if they are NULL."""
    kind, key = values.pop(f"{name}_kind"), values.pop(f"{name}_id")
    return None if kind is None else (str(kind), str(key))


MET_ALONE: Final = 2
"""Value of the column `alone`: nothing else ran when the process died. 1 means that nothing else
runs now, and 0 neither."""
_COLUMN_NAMES: Final = (*COLUMNS, *CONTENT_COLUMNS)
ERRORED_SENTENCES: Final[Mapping[Reason, str]] = {
    Reason.INTERRUPTED: "it was started and its end is not known",
    Reason.ATTEMPTS: "each of its attempts ended with the process, or was cancelled by something "
    "other than gracekit",
    Reason.EXPIRED: "its caller stopped waiting before it could be started",
    Reason.GAVE_UP: "what became of it could not be found out in time",
    Reason.METHOD_GONE: "this version of the service has no such method",
    Reason.ARGUMENTS: "its arguments on record do not fit the types of its method any more",
    Reason.OPERATOR: "an operator has given it up",
}
RESTORED_SENTENCE: Final = (
    "it was accepted in an older copy of the store, and it is not known whether it has begun since"
)
"""For `INTERRUPTED`, of a task that has no attempt on record."""
