"""What the record has said of each task at each time, by triggers; held against what is told.

A question takes time, and an answer may be as old as the question: it must be true of some moment
between the two.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gracekit.errors import RpcError
from gracekit.journal.rows import caller_hash
from gracekit.request.outcomes import failure_from
from gracekit.rpc.callers.task_lookups import TaskInfo
from gracekit.rpc.failures import rebuild
from gracekit.tracker.task import Verb
from tests.simulation.truth import Act, Violation

if TYPE_CHECKING:
    from tests.simulation.callers import Sent
    from tests.simulation.story import Story

_NAMES: Final = (
    "state", "reason", "finished_at", "result", "failure", "ordered", "caller_hash", "parkings",
    "request_id", "recipient", "method", "owner",
)  # fmt: skip
_STABLE: Final = ("state", "reason", "finished_at", "result", "failure")


def _row(which: str) -> str:
    return "json_object(" + ", ".join(f"'{name}', {which}.{name}" for name in _NAMES) + ")"


_CHANGED: Final = " OR ".join(
    f"new.{name} IS NOT old.{name}" for name in (*_STABLE, "ordered", "owner")
)
SCHEMA: Final = f"""
CREATE TEMP TABLE told_step (n INTEGER PRIMARY KEY, request_id TEXT, data TEXT);
CREATE TEMP TRIGGER told_in AFTER INSERT ON main.task WHEN new.recipient = '' BEGIN
    INSERT INTO told_step (request_id, data) VALUES (new.request_id, {_row("new")}); END;
CREATE TEMP TRIGGER told_now AFTER UPDATE ON main.task WHEN new.recipient = '' AND ({_CHANGED})
BEGIN
    INSERT INTO told_step (request_id, data) VALUES (new.request_id, {_row("new")}); END;
CREATE TEMP TRIGGER told_out AFTER DELETE ON main.task WHEN old.recipient = '' BEGIN
    INSERT INTO told_step (request_id, data) VALUES (old.request_id, NULL); END;
"""
_SOFT: Final = {"CallTimeoutError", "Parked", "NoCapacity", "Draining", "LeaseHeld"}
"""What a call may hear before its task has ended."""
Row = Mapping[str, Any]
_CANNOT: Final = (
    "keeps changing its state",
    "its handler has not returned",
    "has an order already",
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question about one request.

    Attributes:
        by: The user that asks; None for a caller without a name.
        since: Loop time at which it was asked.
        cancels: Whether it asks for a cancel.
        may: Whether a caller with that name may do so.
    """

    request_id: str
    by: str | None
    since: float
    cancels: bool = False
    may: bool = True


class Histories:
    """The rows of one story, from the first change on, by request id.

    Attributes:
        may_cancel: Requests that somebody who may has asked to cancel.
        removed: The last that was known of rows that retention has removed.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rows: dict[str, list[tuple[float, Row | None]]] = defaultdict(list)
        self.may_cancel: set[str] = set()
        self.removed: dict[str, Row] = {}
        self._cancelled: set[str] = set()

    # -- the disk -------------------------------------------------------------------------

    def read(self, actor: Any) -> None:
        """Judge what the last commits have done."""
        disk = self._story.machine.disk
        steps = list(disk.execute("SELECT request_id, data FROM told_step ORDER BY n"))
        if not steps:
            return
        disk.execute("DELETE FROM told_step")
        for request_id, data in steps:
            row = None if data is None else json.loads(data)
            before = self.now(request_id)
            self._rows[request_id].append((self._story.loop.time(), row))
            if row is None:
                self.removed[request_id] = before or {}
            else:
                self._check_sent(row)
                self._check_stays(actor, before, row)
                self._check_order(actor, before, row)

    def now(self, request_id: str) -> Row | None:
        """The row as it is; None if there is none."""
        rows = self._rows.get(request_id)
        return rows[-1][1] if rows else None

    def _check_sent(self, row: Row) -> None:
        """L2: what is on record was sent by somebody, and is no question."""
        is_odd = row["method"] in {"look_up", "outcome", "cancel_request"}
        if is_odd or row["request_id"].startswith("never-sent"):
            raise Violation(f"L2: a question is on record: {row}")

    def _check_stays(self, actor: Any, before: Row | None, row: Row) -> None:
        """C2: what has ended stays as it is; only a retry lets it run again."""
        if before is None or before["finished_at"] is None or row["finished_at"] is None:
            return
        if changed := [name for name in _STABLE if row[name] != before[name]]:
            raise Violation(
                f"C2: {actor.name} changed {changed} of {row['request_id']} after its end: "
                f"{before} became {row}"
            )

    def _check_order(self, actor: Any, before: Row | None, row: Row) -> None:
        """C3: what a caller has cancelled was asked for, by one that may."""
        if row["ordered"] is None and row["state"] != "cancelled":
            return
        order = json.loads(row["ordered"] or "{}")
        by_caller = order.get("source") == "caller" or row["reason"] == "caller"
        if by_caller and row["request_id"] not in self.may_cancel:
            raise Violation(f"C3: nobody who may has cancelled {row}")
        had = before is not None and before["ordered"] is not None
        if order.get("source") == "caller" and not had:
            at_home = row["owner"] == actor.runtime.run_id
            self._story.ends["cancel taken" if at_home else "cancel left to a sibling"] += 1

    # -- answers --------------------------------------------------------------------------

    def _during(self, asked: Asked) -> list[Row | None]:
        """All that the record has said since the question."""
        rows = self._rows.get(asked.request_id, [])
        before = [row for at, row in rows if at < asked.since]
        return [before[-1] if before else None, *(row for at, row in rows if at >= asked.since)]

    def check_info(self, asked: Asked, info: TaskInfo) -> None:
        """L1, C3: what is told was so, and is told to whom it may be."""
        if not self._may_see(asked):
            raise Violation(f"{'C3' if asked.cancels else 'L1'}: {asked} is told {info}")
        if info.state == "rejected" and self._was_refused(asked):
            return
        rows = [row for row in self._during(asked) if row is not None]
        if not any(
            (row["state"], row["finished_at"]) == (info.state, info.finished_at) for row in rows
        ):
            raise Violation(f"L1: {asked} is told {info}, and on record were {rows}")
        if info.state == "cancelled":
            self._cancelled.add(f"{asked.request_id}/")
        is_open = all(row["finished_at"] is None and row["ordered"] is None for row in rows)
        has_copies = info.method.startswith("requeue")  # it may have ended one
        if asked.cancels and is_open and not has_copies:
            raise Violation(f"C1: {asked} is told {info}, and no cancel is on record")

    def check_unknown(self, asked: Asked) -> None:
        """L1: what is on record all the time is known to its caller."""
        rows = self._during(asked)
        if self._may_see(asked) and all(row is not None for row in rows):
            raise Violation(f"L1: {asked} is told that it is unknown, and on record were {rows}")

    def check_result(self, asked: Asked, result: Any) -> None:
        """L1: a result that is told is the one on record."""
        rows = [row for row in self._during(asked) if row is not None]
        told = _shown(result)
        if self._may_see(asked) and isinstance(result, RpcError) and self._was_refused(asked):
            return
        if not self._may_see(asked) or told not in map(self._end_of, rows):
            raise Violation(f"L1: {asked} is told {told}, and on record were {rows}")
        if any(row["state"] == "cancelled" for row in rows):
            self._cancelled.add(f"{asked.request_id}/")

    def check_open(self, asked: Asked) -> None:
        """L1: what is said not to have ended had not, at some moment."""
        rows = self._during(asked)
        if not self._may_see(asked) or all(row and row["finished_at"] is not None for row in rows):
            raise Violation(f"L1: {asked} is told that it runs, and on record were {rows}")

    def check_refused(self, asked: Asked, error: Exception) -> None:
        """C3: a cancel is refused to those who may not, or while the task cannot be cancelled."""
        cannot = any(why in str(error) for why in _CANNOT)
        if asked.may and not cannot:
            raise Violation(f"C3: {asked} is refused: {error}")

    def _was_refused(self, asked: Asked) -> bool:
        """Whether it was refused, and at some moment nothing else was on record of it."""
        refused = "SELECT 1 FROM task WHERE request_id = ? AND state = 'rejected'"
        rows = list(self._story.machine.disk.execute(refused, (asked.request_id,)))
        return bool(rows) and None in self._during(asked)

    def _may_see(self, asked: Asked) -> bool:
        """Whether that caller is told of a request, if it is on record."""
        one = self._story.sent.get(asked.request_id)
        if one is None or one.is_fanout:
            return False
        if asked.cancels and one.method.options.allow_cancel == "anyone":
            return True
        return hash_of(one.options.get("context", {}).get("user_id")) == hash_of(asked.by)

    def _end_of(self, row: Row) -> tuple[str, str] | None:
        if row["finished_at"] is None:
            return None
        if row["failure"] is None:
            return _shown(None if row["result"] is None else msgspec.json.decode(row["result"]))
        return _shown(rebuild(failure_from(row["failure"]), self._story.app.svc.exceptions))

    # -- handlers -------------------------------------------------------------------------

    def check_acts(self, act: Act) -> None:
        """C1: what is told to be cancelled does nothing more; a copy without a row may."""
        if act.key in self._cancelled and act.ctx is not None and act.ctx._task.journaled:
            raise Violation(f"C1: {act.request_id} acts after it was told to be cancelled")

    def check_answers(self, one: Sent, row: Row) -> None:
        """C1: who calls what a caller has cancelled hears of that.

        Or of an end before a retry; or of a copy without a row, as each of a `requeue` method is.
        """
        is_retried = self._story.truth.was_ordered(one.plan.request_id, Verb.RETRY)
        is_cancelled = (row["state"], row["reason"]) == ("cancelled", "caller")
        if not is_cancelled or is_retried or one.plan.policy == "requeue":
            return
        for answer in one.answers:
            if type(answer).__name__ not in {"TaskCancelledError", *_SOFT}:
                raise Violation(f"C1: {one.plan.request_id}, cancelled, was answered {answer!r}")


def hash_of(user: str | None) -> str:
    """As the record names a caller."""
    return caller_hash({"user_id": user}, ["user_id", "project_id"])


def _shown(result: Any) -> tuple[str, str]:
    return type(result).__name__, str(result)
