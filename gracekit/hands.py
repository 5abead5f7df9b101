"""What recovery lets this floor do: run rows again, call hooks, word outcomes, send replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gracekit.dispatcher import Dispatcher
from gracekit.errors import TaskInterruptedError
from gracekit.process import Threads
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.attempt import call_hook, errored, failed, outcome_of, succeeded
from gracekit.request.context import Context, Services
from gracekit.rpc.failures import words_of
from gracekit.rpc.methods import Method
from gracekit.tracker.journal import Address, Outcome, TaskRow
from gracekit.tracker.task import Reason


class RecoveryHands:
    """The reconciler's hands; see `recovery.reconciler.Hands`.

    Args:
        threads: For plain hooks: they must not take a thread that a handler was promised.
    """

    def __init__(
        self,
        services: Services,
        arrivals: Arrivals,
        dispatcher: Dispatcher,
        answers: Answers,
        threads: Threads,
    ) -> None:
        self._services = services
        self._arrivals = arrivals
        self._dispatcher = dispatcher
        self._answers = answers
        self._threads = threads

    def resume(self, row: TaskRow, *, inside: tuple[str, str] | None) -> None:
        """Run an ACCEPTED row of ours; a seat was taken for it."""
        self._dispatcher.resume(row, inside=inside)

    async def call_hook(
        self,
        hook: Callable[..., Any],
        method: Method[Any, Any],
        row: TaskRow,
        token: int | None,
        **extra: Any,
    ) -> Any:
        """Call a probe or errored hook of *row*'s method, with its arguments and *extra*."""
        task = self._arrivals.task_of(row, method)
        task.token = token
        ctx = Context(
            task,
            self._services,
            args=row.args or {},
            caller=row.context or {},
            method=(method.namespace, method.name, method.version),
            expires_at=None,
        )
        return await call_hook(hook, ctx, {**(row.args or {}), **extra}, self._threads)

    async def reply(self, row_id: int, address: Address) -> None:
        """Answer a caller of a row that has ended, from the record; what cannot go stays due."""
        row = await self._services.journal.row(row_id)
        if row is not None:
            await self._answers.send_due(row_id, address, outcome_of(row), patient=False)

    def succeeded(self, result: Any) -> Outcome:
        """What a probe's Done makes of a task."""
        return succeeded("the probe's Done", result)

    def failed(self, row: TaskRow, reason: str) -> Outcome:
        """What a probe's Fail makes of a task."""
        return failed(
            TaskInterruptedError(f"task {row.request_id} ({row.method}): {_text(reason)}")
        )

    def errored(self, row: TaskRow, reason: Reason, detail: str) -> Outcome:
        """What recovery's giving up makes of a task."""
        return errored(f"task {row.request_id} ({row.method})", reason, detail)


def _text(reason: object) -> str:
    """What a probe's Fail says, if it is text; whatever else it is must not raise here."""
    return reason if isinstance(reason, str) else words_of(reason)
