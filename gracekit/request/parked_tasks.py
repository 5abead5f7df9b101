"""Shows parked tasks, and carries out orders about them.

Each order names the task and its version, which counts how often it was parked.
So an order that was decided on an older version changes nothing, and a repeated
order is carried out once.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from gracekit.config.values import did_you_mean
from gracekit.errors import (
    Gone,
    InvalidArgumentsError,
    StaleVersionError,
    UnknownTaskError,
)
from gracekit.journal.order_rows import OrderTarget, target_named, targets_pending
from gracekit.journal.pending import PendingRows, as_shown, may_show
from gracekit.journal.tasks import Journal
from gracekit.request.outbox_sender import Outbox
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.row_orders import RowOrders, emit_ordered
from gracekit.rpc.argument_paths import need_resource_id
from gracekit.rpc.method_table import MethodTable
from gracekit.runs.members import Members
from gracekit.store.batch import Batch
from gracekit.store.wakeup import Wakeups
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import DONE, TERMINAL, Lane, Order, Reason, TaskState, Verb

MOVES: Final = 20
"""How often a task may change under an order, which is tried again, before the order is refused."""
MAX_PAGE: Final = 500
PAGE_BYTES: Final = 500_000
"""Largest size of one page, less than `envelope.MAX_BODY_BYTES`."""
PAGE_KEYS: Final = 9_000
"""Most keys in one page, less than `plain.MAX_KEYS`."""
_LONGEST_CLASS: Final = 100
OPERATOR: Final = Reason.OPERATOR.value


class ParkedTasks:
    """The parked tasks of a service, as one of its runs shows and moves them.

    Args:
        trigger: Asks recovery to look, because a task may be claimed or a hook is due.
        wakeups: Wake the siblings, which may claim the task too.
        shows_classes: Whether callers other than operators see the class of what a handler raised.

    Attributes:
        commit_retry: Commits a batch that makes the row of that id ACCEPTED; returns whether this
            run claimed the row in the same commit. `runtime.wiring` sets it, because recovery
            imports this module.
    """

    commit_retry: Callable[[Batch, int, Lane], Awaitable[bool]]

    def __init__(
        self,
        journal: Journal,
        rows: PendingRows,
        outbox: Outbox,
        methods: MethodTable,
        telemetry: Telemetry,
        *,
        trigger: RecoveryTrigger,
        members: Members,
        wakeups: Wakeups,
        shows_classes: bool,
    ) -> None:
        self._journal = journal
        self._orders = RowOrders.of_run(journal)
        self._rows = rows
        self._outbox = outbox
        self._methods = methods
        self._telemetry = telemetry
        self._trigger = trigger
        self._members = members
        self._wakeups = wakeups
        self._shows_classes = shows_classes

    # -- looks --------------------------------------------------------------------------

    async def get(self, task_id: str) -> dict[str, Any]:
        """One task of the service, in any state.

        Of what its handler raised, only the class is shown; the text is for the caller alone.

        Raises:
            UnknownTaskError: there is none of that id.
        """
        columns = await self._rows.one(task_id)
        if columns is None:
            raise self._unknown(task_id)
        failure = columns["failure"]
        if failure is None or not self._shows_classes:
            return as_shown(columns)
        return as_shown(columns) | {"detail": str(failure["exc_class"])[:_LONGEST_CLASS]}

    async def page(self, *, after: int, limit: int) -> dict[str, Any]:
        """Parked tasks in the order of their acceptance: `{"tasks": [...], "next": ...}`.

        Args:
            after: The `next` of the page before; 0 for the first one.
            limit: At most so many, and at most `MAX_PAGE`; fewer if the tasks are large.
        """
        limit = min(limit, MAX_PAGE)
        rows = await self._rows.page(after=after, limit=limit + 1)
        page = _fitting(list(map(as_shown, rows[:limit])))
        more = len(rows) > len(page)
        return {"tasks": page, "next": rows[len(page) - 1]["id"] if more else None}

    # -- orders -------------------------------------------------------------------------

    async def order(
        self,
        task_id: str,
        version: int,
        order: Order,
        *,
        args: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Carry out an order about one task.

        Args:
            task_id: The request id of the task.
            version: Version of the task on which the order was decided.
            order: Retry, cancel or give up.
            args: Arguments to replace before a retry.

        Returns:
            `{"task_id", "state", "version", "changed"}`; `changed` is false if the same order
            was carried out before.

        Raises:
            UnknownTaskError: there is no task of that id.
            Gone: the task has ended; the message says how.
            StaleVersionError: the task was parked again since, or runs again.
            InvalidArgumentsError: *args* do not fit its method.
            StoreError: the order could not be recorded, and was not carried out.
        """
        for _ in range(MOVES):
            target = await target_named(self._journal.engine, task_id, "")
            if target is None or target.service != self._journal.service:
                raise self._unknown(task_id)
            if target.state is not TaskState.PENDING or target.parkings != version:
                answer = self._late(target, version, order)
                if not args or await self._runs_with(target, args):
                    return answer
                continue  # it has ended meanwhile: look at it again
            end = await self.carry_out(target, order, args)
            if end is not None:
                return self._answer(target, changed=True, state=end)
        raise StaleVersionError(f"task {task_id} keeps changing its state: look at it again")

    async def cancel_of(self, kind: str, name: object, order: Order) -> int:
        """Cancel the parked tasks for one resource; returns how many.

        Raises:
            InvalidArgumentsError: no method of the service acts on that *kind*, or *name* is no id.
            StaleVersionError: some were parked again and again meanwhile, and are not cancelled.
            StoreError: not all could be recorded; some may be cancelled.
        """
        kinds = {m.options.resource[0] for m in self._methods if m.options.resource is not None}
        if kind not in kinds:
            known = ", ".join(sorted(kinds)) or "none"
            raise InvalidArgumentsError(
                f"no method of the service acts on a resource {kind[:50]!r}"
                f"{did_you_mean(kind, kinds)}; its kinds are {known}"
            )
        resource_id, number = need_resource_id(name, kind), 0
        for _ in range(MOVES):
            key, journal = (kind, resource_id), self._journal
            if not (targets := await targets_pending(journal.engine, key, journal.service)):
                return number
            for target in targets:
                number += await self.carry_out(target, order) is not None
        raise StaleVersionError(
            f"tasks of {kind}:{resource_id[:100]} keep changing their state: try again"
        )

    async def carry_out(
        self,
        target: OrderTarget,
        order: Order,
        args: Mapping[str, Any] | None = None,
    ) -> TaskState | None:
        """Compare and set the row of a parked task; see `order` for *args* and the errors.

        Returns:
            The new state; None if the row has changed since *target* was read.
        """
        replaced = await self._replaced(target, args) if args else None
        is_retry, is_started = order.verb is Verb.RETRY, False

        async def commit_retry(batch: Batch) -> None:
            nonlocal is_started
            is_started = await self.commit_retry(batch, target.id, target.lane)

        end = await self._orders.carry_out(
            target,
            order,
            note=f"; --set {', '.join(args)}" if args and order.source == OPERATOR else "",
            args=replaced,
            commit=commit_retry if is_retry else None,
        )
        if end is None:
            return None
        emit_ordered(self._telemetry, target, order, end)
        self._outbox.poke()
        if is_started:
            return end
        self._trigger.go_on()
        if is_retry:
            self._wakeups.wake(run.run_id for run in await self._members.others())
        return end

    async def _replaced(self, target: OrderTarget, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """All arguments of the task, with those in *args* replaced."""
        row = await self._journal.row(target.id)
        if row is None or row.args is None:
            raise Gone(f"{target} has ended, and its arguments are not kept")
        method = self._methods.resolve(row.namespace, row.method, row.version)
        replaced = {**row.args, **args}
        method.bind(replaced)
        method.converted(replaced)
        if method.reads_early is not None:
            raise InvalidArgumentsError(
                f"{target} acts on {_named(target.shown_resource)}, which a serializer has found "
                "in its arguments: they cannot be replaced; send a new request"
            )
        if (resource := method.resource_of(replaced)) != target.shown_resource:
            raise InvalidArgumentsError(
                f"{target} acts on {_named(target.shown_resource)}, and these arguments name "
                f"{_named(resource)}: a retry keeps its resource; send a new request for another"
            )
        return replaced

    # -- what came too late -------------------------------------------------------------

    def _late(self, target: OrderTarget, version: int, order: Order) -> dict[str, Any]:
        """Answer an order about a state that the task has left; see `order` for the errors."""
        if not target.parkings and target.state not in TERMINAL:
            raise StaleVersionError(
                f"{target} is {target.state.value} and was never parked: there is nothing to decide"
            )
        if version == target.parkings and _is_done(target, order):
            return self._answer(target, changed=False, state=target.state)
        if target.state in TERMINAL:
            reason = f" ({target.reason})" if target.reason else ""
            detail = f": {target.detail}" if may_show(target.state, target.detail) else ""
            raise Gone(
                f"{target} has ended and cannot be {DONE[order.verb]}: it is "
                f"{target.state.value}{reason}{detail}"
            )
        if version != target.parkings:
            raise StaleVersionError(
                f"{target} is {target.state.value} at version {target.parkings}, and the order "
                f"names version {version}: look at it again, and decide anew"
            )
        raise StaleVersionError(
            f"{target} was retried at version {version} and is {target.state.value} now, so it "
            f"cannot be {DONE[order.verb]} as a parked task; `gracekit tasks cancel` ends it"
        )

    async def _runs_with(self, target: OrderTarget, args: Mapping[str, Any]) -> bool:
        """Whether a task that runs again has *args*; false if its arguments were removed.

        Raises:
            StaleVersionError: it has other arguments.
        """
        row = await self._journal.row(target.id)
        if row is None or row.args is None:
            return False
        if {**row.args, **args} != row.args:
            raise StaleVersionError(
                f"{target} was retried with other arguments and is {row.state.value}: these change "
                "nothing any more; look at it again"
            )
        return True

    def _answer(self, target: OrderTarget, *, changed: bool, state: TaskState) -> dict[str, Any]:
        return {
            "task_id": target.request_id,
            "state": state.value,
            "version": target.parkings,
            "changed": changed,
        }

    def _unknown(self, task_id: str) -> UnknownTaskError:
        return UnknownTaskError(
            f"service {self._journal.service!r} has no task {task_id[:100]!r} on record; a task "
            "id is the request id that its client drew, and ended tasks are removed after "
            "GRACEKIT_RETENTION"
        )


def _fitting(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many of *tasks*, from the first on, as fit into one message; at least one."""
    size = keys = 0
    for number, task in enumerate(tasks):
        text = json.dumps(task)
        size += len(json.dumps(text))  # a message is JSON within JSON
        keys += text.count(":")  # a receiver counts colons too, also those in texts
        if number and (size > PAGE_BYTES or keys > PAGE_KEYS):
            return tasks[:number]
    return tasks


def _named(resource: tuple[str, str] | None) -> str:
    return "no resource" if resource is None else ":".join(resource)


def _is_done(target: OrderTarget, order: Order) -> bool:
    """Whether the state of the task shows that this order was carried out before."""
    match order.verb:
        case Verb.RETRY:
            return target.state not in TERMINAL
        case Verb.CANCEL:
            return target.state is TaskState.CANCELLED
        case _:
            return target.state is TaskState.ERRORED and target.reason == Reason.GAVE_UP.value
