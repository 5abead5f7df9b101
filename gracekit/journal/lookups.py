"""Tasks as their callers look them up: by request ids, several at once, changing nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gracekit.journal import lookups_sql as sql
from gracekit.journal.rows import Outcome, from_json
from gracekit.store.engine import Queries
from gracekit.tracker.task import TaskState


class LookedUp(msgspec.Struct, frozen=True, kw_only=True):
    """One task; columns as in the schema, *result* and *failure* only as far as they were read."""

    request_id: str
    caller_hash: str
    namespace: str | None
    method: str
    version: str
    state: TaskState
    reason: str | None
    detail: str | None
    attempts: int
    failures: int
    accepted_at: float
    started_at: float | None
    due_at: float | None
    finished_at: float | None
    progress: dict[str, Any] | None
    owner: str | None
    result: str | None
    failure: str | None

    @property
    def outcome(self) -> Outcome | None:
        """How it has ended; None if it has not, or if that was not read."""
        if self.finished_at is None or self.result is self.failure is None:
            return None
        return Outcome(
            state=self.state,
            result=self.result,
            failure=self.failure,
            reason=self.reason,
            detail=self.detail,
        )


async def looked_up(
    engine: Queries, service: str, ids: Sequence[str], caller: str, *, most: int = -1
) -> list[LookedUp]:
    """The tasks of *service* with these request ids, as far as they are on record.

    Args:
        engine: The store.
        service: Name of the service.
        ids: Request ids.
        caller: Hash of the caller whose tasks they are; `*` for those of any caller.
        most: So many characters of results and failures are read, of whole ones; -1 for none.
    """
    found = list[LookedUp]()
    for at in range(0, len(ids), sql.AT_ONCE):
        some = ids[at : at + sql.AT_ONCE]
        filled = [*some, *("" for _ in range(sql.AT_ONCE - len(some)))]
        for row in await engine.query(sql.LOOK, most, service, caller, *filled):
            columns: dict[str, Any] = dict(zip(sql.NAMES, row, strict=True))
            columns["state"] = TaskState(str(columns["state"]))
            columns["progress"] = from_json(columns["progress"])
            one = LookedUp(**columns)
            most -= len(one.result or "") + len(one.failure or "") if most > 0 else 0
            found.append(one)
    return found
