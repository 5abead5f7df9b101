"""What is still due for ended tasks: replies and notifications of dead runs, `errored` hooks."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from gracekit.errors import ConflictError
from gracekit.journal.rows import TaskRow
from gracekit.recovery.ends import Ends
from gracekit.recovery.method_hooks import MethodHooks
from gracekit.recovery.shared import Shared
from gracekit.request.suspects import is_guilty, suspicion
from gracekit.rpc.methods import Method

UNKNOWN_CALL_TIMEOUT_S: Final = 60.0
"""Timeout of a call that did not say its own: after it, a reply of a dead run is not sent."""


class Duties:
    """Sends due replies and notifications, and calls due `errored` hooks."""

    def __init__(self, shared: Shared, *, hooks: MethodHooks, ends: Ends) -> None:
        self._journal = shared.journal
        self._claims = shared.claims
        self._tracker = shared.tracker
        self._suspects = shared.suspects
        self._hooks = hooks
        self._ends = ends
        self._trigger = shared.trigger
        self._clock = shared.clock
        self._notifications = shared.notifications
        self._outbox = shared.outbox

    async def take_notifications(self, *, look_around: bool) -> None:
        """Take over notifications that no run sends; with *look_around* also such replies."""
        if await self._notifications.take_ownerless(look_around=look_around):
            self._outbox.poke()
        if look_around:
            await self._claims.take_left_replies()

    async def send_due_replies(self) -> None:
        """Try once to send each reply of a dead run whose caller may still be waiting."""
        for row_id, address, accepted_at in await self._claims.due_replies():
            if row_id in self._tracker.row_ids():
                continue  # its task is still here, and sends it
            until = address.expires_at or accepted_at + UNKNOWN_CALL_TIMEOUT_S
            if self._clock.wall() > until:
                self._journal.forget_reply(row_id, address, sent=False)
            else:
                await self._ends.reply(row_id, address)

    async def call_errored_hooks(self) -> None:
        """Call the due hooks of rows that recovery or an operator has ended as ERRORED."""
        tried = 0  # id of the last row, so that none is called twice in one go
        while rows := await self._claims.errored_due(after=tried):
            for row in rows:
                if self._trigger.is_paused:
                    return
                tried = row.id
                method = self._hooks.method_of(row)
                if method is None or method.errored_hook is None:
                    await self._claims.errored_done(row)
                else:
                    await self._call_due(row, method)

    async def _call_due(self, row: TaskRow, method: Method[Any, Any]) -> None:
        """Call one hook: recorded before, alone if it is a suspect, given up after crashes."""
        cap = self._hooks.cap_of(method)
        if is_guilty(row.hook_crashes, cap, alone=row.alone):
            why = self._hooks.give_up(f"{row.method}.errored", row.hook_crashes)
            await self._claims.errored_done(row, given_up=why)
            return
        about = suspicion(row.hook_crashes, cap)
        async with self._suspects.beginning(("task", row.id), about) as alone:
            if self._trigger.is_paused:
                return
            with contextlib.suppress(ConflictError):  # an operator has ended it
                await self._claims.begin_errored(row, alone=alone)
                subject = self._hooks.of_row(row, method)
                fault = await self._hooks.call_errored(subject, method, row.reason or "")
                await self._claims.errored_done(row, failed=fault)
