"""`gracekit tasks cancel`, `fail` and `retry`: an operator's word about one task.

The run that owns a task is asked, if it lives; it alone may touch its rows. A
row without a living owner is changed in the store by compare-and-set, so a
service that starts meanwhile either finds it changed or has taken it, and is
asked then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final

import click

from gracekit.cli.main import DETACHED, ERROR, UNREACHABLE, tell
from gracekit.cli.options import CommonOptions, common, need_duration, reason_option, who
from gracekit.cli.order_progress import (
    ASKED,
    OVERDUE,
    OrderProgress,
    done_words,
    ended_words,
    not_parked,
)
from gracekit.cli.reach import ControlClient, SilentError, find_task
from gracekit.cli.records import StoreRecords, doubt
from gracekit.cli.text import json_text, safe
from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.config.values import parse_duration
from gracekit.errors import DependencyError, GracekitError, RunEndedError
from gracekit.journal.order_rows import OrderTarget, refusal_of, target_of
from gracekit.leases.leases import RunLeases
from gracekit.listings.chosen_task import ChosenTask
from gracekit.listings.store_view import label
from gracekit.process import Process
from gracekit.request.row_orders import RowOrders
from gracekit.runs.run import Run
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.location import StoreLocation
from gracekit.tracker.task import DONE, ENDS, RETRIED, Order, TaskState, Verb

OPERATOR: Final = "operator"
"""Stands for the run in incidents of orders that no run has carried out."""
SHORTEST_ID: Final = 4
"""Characters of an abbreviated ID, where no terminal can be asked back."""
POLL_S: Final = 0.1
LOCKED_S: Final = 2.0
"""A command that waits so long for the lock of the store says so."""
MOVES: Final = 50
"""A task may change hands so often before we give up."""

_task_id = click.argument("task_id", metavar="ID")
_must_say_why = reason_option("Why: for the record and for the caller.")
may_say_why: Final = click.option(
    "--reason", metavar="TEXT", default="", help="Why, for the record."
)
yes_option: Final = click.option(
    "--yes", is_flag=True, help="Do not ask whether an abbreviated ID is meant."
)
_wait = click.option(
    "--wait/--no-wait", default=True, help="Wait until the task has ended.  [default: wait]"
)
_timeout = click.option(
    "--timeout",
    metavar="DURATION",
    default="30s",
    show_default=True,
    callback=need_duration,
    help="How long to wait.",
)


@click.command()
@_task_id
@_must_say_why
@yes_option
@_wait
@_timeout
@common
def cancel(
    options: CommonOptions, /, *, task_id: str, reason: str, yes: bool, wait: bool, timeout: str
) -> None:
    """Cancel a task: it ends CANCELLED, and its caller gets an error.

    A task that waits is never started. A running handler is cancelled, and the
    task ends when its coroutine or thread has returned; if it still returns a
    result, the task has SUCCEEDED. A plain `def` handler cannot be interrupted:
    it should look at `ctx.cancelled`. If the task is ERRORED already and its
    `errored` hook was not called yet, the hook is cancelled.

    ID is a request id or the beginning of one, if no other id begins so. At a
    terminal the command asks whether that task was meant; elsewhere a beginning
    needs 4 characters.

    Exit status: 0 done, 3 asked for and not ended yet, 1 refused or ended
    otherwise, 4 its run lives and does not answer, 2 usage, 78 configuration,
    130 detached by Ctrl-C.
    """
    order = Order(verb=Verb.CANCEL, by=who(), reason=reason)
    carry_out(options, order, task_id, yes=yes, wait_s=parse_duration(timeout) if wait else 0.0)


@click.command()
@_task_id
@_must_say_why
@yes_option
@_wait
@_timeout
@common
def fail(
    options: CommonOptions, /, *, task_id: str, reason: str, yes: bool, wait: bool, timeout: str
) -> None:
    """End a task as failed, with your reason.

    A task that does not run (accepted, handed over or parked) becomes ERRORED,
    and its `errored` hook is called. A running one is cancelled and becomes
    FAILED when its handler has returned; if that still returns a result, the
    task has SUCCEEDED.

    ID and exit status: as for `gracekit tasks cancel`.
    """
    order = Order(verb=Verb.FAIL, by=who(), reason=reason)
    carry_out(options, order, task_id, yes=yes, wait_s=parse_duration(timeout) if wait else 0.0)


@click.command()
@_task_id
@may_say_why
@yes_option
@common
def retry(options: CommonOptions, /, *, task_id: str, reason: str, yes: bool) -> None:
    """Run a parked, handed-over or failed task again, at once.

    Its `on_interrupt` policy is not asked. It goes on from its last safe point,
    as a new attempt under the same id, and its crashes are forgotten. A task
    that was running when its process died counts as handed over. A task that
    has failed can be retried while its record and its arguments are kept, once
    its caller has been answered and its `errored` hook was called. Its caller
    is not answered a second time. Any other task is refused with the reason.

    ID and exit status: as for `gracekit tasks cancel`.
    """
    carry_out(options, Order(verb=Verb.RETRY, by=who(), reason=reason), task_id, yes=yes)


@contextlib.asynccontextmanager
async def open_writing(settings: Settings) -> AsyncIterator[Engine]:
    """The store, opened for one order; if it is locked, that is said after `LOCKED_S`."""
    location = StoreLocation(settings)
    engine = location.engine(Process())
    words = f"waiting for {location.name}, which another program has locked for writing"
    hint = asyncio.get_running_loop().call_later(LOCKED_S, partial(tell, words, prefix=""))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()
        hint.cancel()


def clock_of(engine: Engine) -> Clock:
    """The clock of the store, by which its moments are meant."""
    clock = Clock()
    clock.follow(engine.wall)
    return clock


def carry_out(
    options: CommonOptions,
    order: Order,
    word: str,
    *,
    yes: bool,
    wait_s: float = 0.0,
    replaced: Mapping[str, Any] | None = None,
) -> None:
    """Carry an order out, print what became of it, and end the command.

    *replaced* are arguments to replace before a retry. It is None if the order is not for parked
    tasks alone.
    """
    progress = OrderProgress()
    with StoreRecords(options.settings) as records:
        subject = asyncio.run(find_task(records, word, options.instance))
        _confirm(subject, order.verb, word, yes=yes)
        try:
            execution = _OrderExecution(records, options.settings, order, wait_s, replaced)
            asyncio.run(execution.settle(subject, progress))
        except KeyboardInterrupt:
            if progress.asked is None:
                raise click.Abort from None
            progress.end("detached; the order stands", state=progress.state, code=DETACHED)
    result = subject.as_json() | {"verb": order.verb.value, "state": progress.state}
    if options.as_json:
        click.echo(json_text(result | {"done": progress.code == 0, "words": progress.words}))
    if progress.code in {ERROR, UNREACHABLE}:
        tell(safe(progress.words, longest=2048))
    elif not options.as_json:
        click.echo(f"{subject}: {safe(progress.words, longest=1024)}")
    click.get_current_context().exit(progress.code)


def _confirm(subject: ChosenTask, verb: Verb, word: str, *, yes: bool) -> None:
    """Ask back where the ID was abbreviated: what was meant may be another task.

    Where nobody can be asked, its unmistakable beginning is enough, if that is no mere slip.
    """
    if yes or subject.request_id == word:
        return
    if not sys.stdin.isatty():
        if len(word) < SHORTEST_ID:
            raise click.UsageError(
                f"{safe(word)} stands for {safe(subject.request_id)}: write at least "
                f"{SHORTEST_ID} characters of it, or add --yes"
            )
        return
    what = f"{verb.value.replace('_', ' ')} {subject}, {subject.state}{subject.where}?"
    click.confirm(what, abort=True, err=True)


class _OrderExecution:
    """One order on its way, to a run or to the store."""

    def __init__(
        self,
        records: StoreRecords,
        settings: Settings,
        order: Order,
        wait_s: float,
        replaced: Mapping[str, Any] | None,
    ) -> None:
        self._records = records
        self._settings = settings
        self._order = order
        self._replaced = replaced
        self._deadline = time.monotonic() + wait_s

    async def settle(self, subject: ChosenTask, progress: OrderProgress) -> OrderProgress:
        """Carry the order out, and wait for its effect as long as we may."""
        control = ControlClient(self._records)
        try:
            if subject.row_id is None:
                return await self._without_row(control, subject, progress)
            while True:
                target = await target_of(self._records.engine, subject.row_id)
                if target is None:
                    return progress.end("it was removed", state=None, code=ERROR)
                progress.state = target.state.value
                if await self._step(control, target, progress):
                    return progress
                await asyncio.sleep(POLL_S)
        except DependencyError as error:
            return progress.end(str(error), state=progress.state, code=UNREACHABLE)
        except GracekitError as error:
            return progress.end(str(error), state=progress.state, code=ERROR)

    async def _step(
        self, control: ControlClient, target: OrderTarget, progress: OrderProgress
    ) -> bool:
        """One look at the row, and one act; whether nothing is left to do."""
        if self._replaced is not None and target.state is not TaskState.PENDING:
            raise GracekitError(not_parked(target, self._order.verb))
        if progress.asked is not None and self._is_over(target, progress):
            return True
        owner = await self._owner(target)
        dead = target.owner is not None and (owner is None or self._records.judge(owner).is_dead)
        # What a dead process was at work on is handed over; only nobody has written that down.
        cut = dead and target.state is TaskState.RUNNING
        state = TaskState.HANDED_OVER if cut else target.state
        why = refusal_of(target, self._order.verb, state)
        if target.errored_due and self._order.verb is Verb.CANCEL:
            if target.calling and owner is not None and not dead:
                raise GracekitError(
                    f"{target} is {target.state.value} and its errored hook runs now, in "
                    f"{label(owner)}: only a hook that was not called yet can be cancelled. "
                    "gracekit cancels it when probe_timeout is over"
                )
            return await self._drop_hook(target, progress)
        if why is not None:
            raise GracekitError(why)
        if self._replaced:
            return await self._ask(control, target, await self._newest_run(target), progress)
        if owner is None or dead or state in RETRIED:
            return await self._change(target, progress, dead=dead)
        return await self._ask(control, target, owner, progress)

    def _is_over(self, target: OrderTarget, progress: OrderProgress) -> bool:
        """Whether a task that was asked to end has ended, one way or the other."""
        if target.state in _OPEN:
            return False
        as_ordered = target.reason == OPERATOR
        if as_ordered:
            words = ended_words(self._order.verb, target.state)
            progress.end(words, state=target.state.value)
        else:
            progress.end(
                f"{target} has ended otherwise before it could be {DONE[self._order.verb]}: "
                f"{target.state.value}",
                state=target.state.value,
                code=ERROR,
            )
        return True

    async def _owner(self, target: OrderTarget) -> Run | None:
        """The run that owns it; None for nobody, or for one that retention has removed."""
        owner = target.owner or ""
        return (await self._records.runs_of({owner})).get(owner)

    async def _newest_run(self, target: OrderTarget) -> Run:
        """The living run of the task's service that started last: it checks replaced arguments."""
        living = [run for run in await self._records.living() if run.service == target.service]
        if not living:
            raise GracekitError(
                f"no run of {safe(target.service)} lives, and only a run can check what --set "
                "gives: start one, or retry the task without --set"
            )
        return max(living, key=lambda run: run.started_at)

    # -- asked --------------------------------------------------------------------------

    async def _ask(
        self, control: ControlClient, target: OrderTarget, run: Run, progress: OrderProgress
    ) -> bool:
        now = (run.run_id, target.state)
        if progress.asked != now and not self._replaced and self._records.is_elsewhere(run):
            if not await self._leave(target, run):
                self._count_move(progress)
                return False
            progress.asked, progress.elsewhere = now, f"{label(run)} on host {run.host}"
        if progress.asked == now:
            return self._may_wait_no_longer(target.state.value, progress)
        answer = await self._put(control, run, target.request_id, target.recipient)
        if answer is None or answer.get("moved"):
            self._count_move(progress)
        elif answer.get("asked"):
            progress.asked = now
            return self._may_wait_no_longer(target.state.value, progress)
        else:
            words = done_words(self._order, runs_on=True)
            self._done(target, words, progress, state=answer.get("state"))
            return True
        return False

    async def _leave(self, target: OrderTarget, run: Run) -> bool:
        """Leave the order in the row, where a run of another host looks each second.

        Returns:
            False if the row has changed since it was read.
        """
        if target.state is TaskState.HANDED_OVER:
            raise GracekitError(
                f"{target} is being settled by {label(run)} on host {run.host}: give the command "
                "there, or again when it has been settled"
            )
        if target.ordered is not None:
            return True
        async with open_writing(self._settings) as engine:
            return await self._orders(engine).leave(target, self._order)

    async def _put(
        self, control: ControlClient, run: Run, request_id: str, recipient: str
    ) -> dict[str, Any] | None:
        """The run's answer; None if it has died meanwhile."""
        words: dict[str, Any] = {
            "task_id": request_id,
            "recipient": recipient,
            "by": self._order.by,
            "reason": self._order.reason,
        }
        if self._replaced:
            words["args"] = self._replaced
        try:
            return await control.ask(run, self._order.verb.value, words)
        except RunEndedError:
            return None
        except DependencyError as error:
            _, judgement = await self._records.judge_again(run)
            if judgement.is_dead:
                return None
            if not judgement.is_alive:
                raise DependencyError(f"{error}; {doubt(run, judgement)}") from error
            why = await control.why_silent(run) if isinstance(error, SilentError) else ""
            if not self._replaced:
                why += "; it alone may act on its tasks"
            raise DependencyError(f"{error}{why}") from error

    def _may_wait_no_longer(self, state: str, progress: OrderProgress) -> bool:
        if time.monotonic() < self._deadline:
            return False
        words = "asked; it ends when its handler has returned, or its process has ended"
        if progress.elsewhere:
            words = (
                f"left for {progress.elsewhere}, which looks each second; if that run is gone, "
                "`gracekit runs gone` lets others carry it out"
            )
        progress.end(words, state=state, code=ASKED)
        return True

    def _count_move(self, progress: OrderProgress) -> None:
        progress.moves += 1
        if progress.moves > MOVES:
            raise GracekitError("the task changes hands again and again: try once more")

    async def _without_row(
        self, control: ControlClient, subject: ChosenTask, progress: OrderProgress
    ) -> OrderProgress:
        """What a process runs without a row: it alone knows of it."""
        assert subject.run is not None
        if self._replaced is not None:
            raise GracekitError(f"{subject} does not wait for capacity: it is {subject.state}")
        answer = await self._put(control, subject.run, subject.request_id, subject.recipient)
        if answer is None or not answer.get("asked"):
            return progress.end("it has ended meanwhile", state=None, code=ERROR)
        progress.asked = (subject.run.run_id, TaskState(answer["state"]))
        while time.monotonic() < self._deadline:
            reports = await control.hear(
                subject.run, task_id=subject.request_id, recipient=subject.recipient
            )
            if reports.answer is None and self._records.judge(subject.run).is_alive:
                pass  # silent for now; it alone knows
            elif not any(map(subject.is_task, reports.tasks)):
                return progress.end(f"{DONE[self._order.verb]}", state=None)
            await asyncio.sleep(POLL_S)
        self._may_wait_no_longer(str(answer["state"]), progress)
        return progress

    # -- changed ------------------------------------------------------------------------

    def _orders(self, engine: Engine) -> RowOrders:
        return RowOrders(self._records.engine, Clock(), OPERATOR, engine.commit)

    async def _drop_hook(self, target: OrderTarget, progress: OrderProgress) -> bool:
        """The task has ended, but for its errored hook; false if that was called meanwhile."""
        keep = self._settings.keep_failed_arguments
        async with open_writing(self._settings) as engine:
            if not await self._orders(engine).drop_hook(target, self._order, keep=keep):
                return False
        words = f"it stays {target.state.value}; its errored hook is not called any more"
        progress.end(words, state=target.state.value)
        return True

    async def _change(self, target: OrderTarget, progress: OrderProgress, *, dead: bool) -> bool:
        """Compare and set; false if somebody else was quicker, or it was not done."""

        def take_lease_away(batch: Batch, engine: Engine) -> None:
            if dead and target.owner is not None and target.acted:
                RunLeases(engine, Clock(), run_id=OPERATOR).add_take_away_one(
                    batch, target.owner, target.request_id, settle_s=target.settle_s
                )

        async with open_writing(self._settings) as engine:
            end = await self._orders(engine).carry_out(
                target, self._order, dead=dead, also=partial(take_lease_away, engine=engine)
            )
        if end is None:
            self._count_move(progress)
            return False
        runs_on = await self._records.wake_living(target.service)
        was_parked = target.state is TaskState.PENDING
        words = done_words(self._order, runs_on=runs_on, end=end, parked=was_parked)
        self._done(target, words, progress, state=end.value)
        return True

    def _done(
        self, target: OrderTarget, words: str, progress: OrderProgress, *, state: str | None
    ) -> None:
        was_parked, deadline = target.state is TaskState.PENDING, target.pending_deadline or 0.0
        if self._order.verb is Verb.RETRY and was_parked and deadline <= Clock().wall():
            words += f"; {OVERDUE}"
        progress.end(words, state=state)


_OPEN: Final = frozenset(ENDS[Verb.CANCEL])
