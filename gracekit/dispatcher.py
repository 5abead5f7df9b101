"""One request's whole life, from the delivery to the reply.

`dispatch` reads top to bottom as ARCHITECTURE.md tells it: read, track, accept,
ack, turn, begin, run, finish, reply, untrack. Here rpc, tracker and leases
meet; nothing below knows of the other two. gracekit's own steps are never
cancelled: only a handler is, and a wait for a turn when the gate closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gracekit.answers import Answers
from gracekit.attempt import End, failed, run_attempt, timeout_error
from gracekit.clock import Clock
from gracekit.config import Settings
from gracekit.context import Context, Services
from gracekit.errors import (
    BadMessageError,
    ConflictError,
    ConflictingRequestError,
    Draining,
    MessageTooLargeError,
    RpcError,
    StoreError,
    TaskInterruptedError,
    UnknownCommitError,
)
from gracekit.lanes import Job, LaneGate, Turns
from gracekit.leases.leases import Guard
from gracekit.process import Point
from gracekit.refusals import Refusals, reason_of
from gracekit.rpc.message import Request
from gracekit.rpc.methods import Method, MethodTable
from gracekit.rpc.oslo_wire import decode_request
from gracekit.rpc.transport import Delivery, QueueKind
from gracekit.store.batch import Batch
from gracekit.telemetry import Telemetry
from gracekit.tracker.journal import (
    ERRORED_SENTENCES,
    Acceptance,
    Address,
    Outcome,
    TaskRow,
    address_of,
)
from gracekit.tracker.task import Cut, Lane, OnInterrupt, Reason, TaskState, TrackedTask

CONTROL_NAMESPACE: Final = "gracekit"


class Dispatcher:
    """Carries requests through their life; recovered ones join in the middle.

    Args:
        gates: The lanes that requests come by.
        on_hand_over: Told of each task that was handed over with its handler returned.
        on_give_back: Told of each `requeue` task given back.
    """

    def __init__(
        self,
        services: Services,
        methods: MethodTable,
        answers: Answers,
        settings: Settings,
        telemetry: Telemetry,
        *,
        gates: Mapping[Lane, LaneGate],
        turns: Turns,
        refusals: Refusals,
        instance: str,
        on_hand_over: Callable[[TrackedTask], None],
        on_give_back: Callable[[], None],
    ) -> None:
        self._services = services
        self._journal = services.journal
        self._leases = services.leases
        self._tracker = services.tracker
        self._clock: Clock = services.clock
        self._methods = methods
        self._answers = answers
        self._settings = settings
        self._telemetry = telemetry
        self._gates = gates
        self._turns = turns
        self._refusals = refusals
        self._instance = instance
        self._on_hand_over = on_hand_over
        self._on_give_back = on_give_back
        self._jobs: dict[TrackedTask, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Future[bool]] = set()
        self._kept_leases = 0

    # -- the ways in -------------------------------------------------------------------

    def take(self, delivery: Delivery, lane: Lane) -> None:
        """Start the life of a delivery; the caller took a place of the lane for it."""
        self._spawn(self.dispatch(delivery, self._gates[lane]), lane)

    def resume(self, row: TaskRow, *, inside: tuple[str, str] | None) -> None:
        """Start the rest of the life of an ACCEPTED row of ours; a place was taken for it.

        Args:
            inside: Resource in whose line a place is handed over with it.
        """
        self._spawn(self._dispatch_row(row, inside), row.lane)

    def _spawn(self, life: Any, lane: Lane) -> None:
        task = asyncio.create_task(life)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._gates[lane].places.give()
            if not done.cancelled() and (error := done.exception()) is not None:
                self._telemetry.emit("dispatch.failed", error=repr(error))

        task.add_done_callback(ended)

    # -- one request ---------------------------------------------------------------------

    async def dispatch(self, delivery: Delivery, gate: LaneGate) -> None:
        """Carry one delivery through its life."""
        job = await self._read(delivery, gate)
        if job is None or not await self._track(job):
            return
        try:
            if not job.task.journaled:
                await self._live_on_the_transport(job)
            elif await self._accept(job):
                await delivery.ack()
                await self._live(job)
        finally:
            self._untrack(job)

    async def _dispatch_row(self, row: TaskRow, inside: tuple[str, str] | None) -> None:
        """Carry an accepted row, of an earlier run or ours, through the rest of its life."""
        job = self._job_of_row(row)
        if inside is not None:
            job.inside.append(inside)
        if self._tracker.add(job.task) is not None:
            self._turns.leave(job)
            return
        self._jobs[job.task] = job
        job.gate.entering.add(job)
        try:
            await self._live(job)
        finally:
            self._untrack(job)

    async def _live(self, job: Job) -> None:
        """From acceptance to the reply: turn, begin, run, finish, reply."""
        try:
            if not job.task.running and not await self._begin_in_turn(job):
                return
            end = await self._run(job)
        finally:
            self._turns.leave(job)
        if job.stuck:
            return  # the drain has recorded it; what it did after that is for recovery to find
        if end.outcome is None:
            await self._hand_over(job, end.cut or Cut.CANCELLED)
            return
        addresses = await self._finish(job, end.outcome)
        for address in addresses:
            await self._reply(job, address, end.outcome)

    async def _live_on_the_transport(self, job: Job) -> None:
        """A `requeue` method: no row, acked at its end, given back when cut."""
        assert job.delivery is not None
        job.gate.entering.add(job)
        try:
            if not await self._turns.wait(job):
                await self._give_back(job)
                return
            self._mark_running(job)
            end = await self._run(job)
        finally:
            self._turns.leave(job)
            self._tell_changed()
        self._tracker.ended(job.task)
        if end.outcome is None or job.stuck:
            job.task.cut = end.cut
            await self._give_back(job)
            return
        job.task.advance(end.outcome.state)
        if job.reply is not None and not job.answered:
            await self._answers.send(job.reply, end.outcome)
        await job.delivery.ack()

    # -- read: size, decode, resolve, check ---------------------------------------------

    async def _read(self, delivery: Delivery, gate: LaneGate) -> Job | None:
        """What a delivery asks for; None when it was refused, recorded and settled."""
        try:
            request = decode_request(delivery.body, max_bytes=self._settings.max_body_bytes)
        except BadMessageError as error:
            reason = "oversize" if isinstance(error, MessageTooLargeError) else "unreadable"
            await self._refusals.reject(None, delivery, gate.lane, reason, error)
            return None
        if request.namespace == CONTROL_NAMESPACE and gate.lane is Lane.OPS:
            await self._refusals.answer_control(request, delivery)
            return None
        try:
            method = self._methods.resolve(request.namespace, request.method, request.version)
            method.bind(request.args)
            self._check_open(method, gate)
        except RpcError as error:
            await self._refusals.reject(request, delivery, gate.lane, reason_of(error), error)
            return None
        return self._job(request, method, delivery, gate)

    def _check_open(self, method: Method[Any, Any], gate: LaneGate) -> None:
        if gate.lane is not Lane.OPS or not self._services.phase.draining:
            return
        if not method.ops or method.options.in_drain == "refuse":
            raise Draining(
                f"{self._instance} is draining and does not take {method.name}: "
                "send it to another host, or again when this one is back"
            )

    def _job(
        self, request: Request, method: Method[Any, Any], delivery: Delivery, gate: LaneGate
    ) -> Job:
        waits_s = delivery.expires_in_s
        expires_at = None if waits_s is None else self._clock.wall() + waits_s
        reply = None
        if request.reply is not None:
            reply = Address(
                queue=request.reply.queue, msg_id=request.reply.msg_id, expires_at=expires_at
            )
        journaled = method.options.on_interrupt != "requeue" or delivery.redelivered
        task = TrackedTask(
            request_id=request.request_id or self._clock.new_id(),
            recipient=self._instance if delivery.queue.kind is QueueKind.FANOUT else "",
            method=method.name,
            lane=gate.lane,
            holds_drain=not (method.ops and gate.lane is Lane.OPS),
            journaled=journaled,
            on_interrupt=OnInterrupt(method.options.on_interrupt),
            # An ops method must reach a resource whose task is running: it takes no lease.
            resource=None if method.ops else method.resource_of(request.args),
            tracked_at=self._clock.loop(),
        )
        return Job(
            task=task,
            method=method,
            gate=gate,
            args=request.args,
            caller=request.context,
            delivery=delivery,
            request=self._acceptance(request, method, delivery, task, reply, expires_at),
            reply=reply,
            expires_at=None if waits_s is None else self._clock.loop() + waits_s,
        )

    def _acceptance(
        self,
        request: Request,
        method: Method[Any, Any],
        delivery: Delivery,
        task: TrackedTask,
        reply: Address | None,
        expires_at: float | None,
    ) -> Acceptance | None:
        if not task.journaled:
            return None
        settle_s = method.options.settle_s
        default = self._settings.startup_reconciliation_wait_seconds
        return Acceptance(
            request_id=task.request_id,
            recipient=task.recipient,
            lane=task.lane,
            queue=delivery.queue.name,
            route=delivery.queue.kind.value,
            target=self._target(delivery, method),
            namespace=request.namespace,
            method=method.name,
            version=request.version,
            args=request.args,
            context=request.context,
            on_interrupt=task.on_interrupt,
            settle_s=default if settle_s is None else settle_s,
            resource=task.resource,
            reply=reply,
            expires_at=expires_at,
        )

    def _target(self, delivery: Delivery, method: Method[Any, Any]) -> str:
        """Host or instance that alone may run it later; empty for any."""
        kind = delivery.queue.kind
        if kind is QueueKind.FANOUT:
            return self._instance
        if kind is QueueKind.DIRECTED and not method.options.anywhere:
            return delivery.queue.name.removeprefix(f"{delivery.queue.topic}.")
        return ""

    # -- track and accept: custody ----------------------------------------------------------

    async def _track(self, job: Job) -> bool:
        """Enter the tracker before anything is submitted; false for what is in flight here."""
        known = self._tracker.add(job.task)
        if known is None:
            self._jobs[job.task] = job
            return True
        if not known.journaled and (other := self._jobs.get(known)) is not None:
            other.delivery = job.delivery  # a redelivery: the old handle is void
        else:
            await self._answer_duplicate(job)
        return False

    async def _accept(self, job: Job) -> bool:
        """Dedupe and accept in a group commit, begun in the same one when its turn is at once."""
        job.gate.entering.add(job)
        at_once = self._turns.enter_nowait(job)
        while job.gate.is_open:
            try:
                accepted = await self._commit_acceptance(job, begin=at_once)
            except _LeaseElsewhereError:
                self._turns.leave(job)
                at_once = False
                continue
            if accepted and at_once:
                self._mark_running(job)
            return accepted
        self._turns.leave(job)
        await self._give_back(job)
        return False

    async def _commit_acceptance(self, job: Job, *, begin: bool) -> bool:
        assert job.request is not None
        batch = Batch(Point.ACCEPT_AND_BEGIN if begin else Point.ACCEPT)
        takes_lease = begin and job.task.resource is not None
        lease = self._add_lease(batch, job) if takes_lease else None
        index = self._journal.add_accept(batch, job.request, begin=begin)
        try:
            rows = await self._journal.commit(batch)
        except ConflictError as conflict:
            if conflict.statement == lease:
                raise _LeaseElsewhereError from None
            self._turns.leave(job)
            await self._answer_duplicate(job)
            return False
        except UnknownCommitError:
            return await self._read_acceptance_again(job)
        except StoreError as error:
            self._turns.leave(job)
            self._telemetry.emit("store.error", what="acceptance", error=str(error))
            await self._give_back(job)
            return False
        job.task.row_id = int(rows[index][0][0] or 0)
        if begin:
            job.task.attempt = 1
        if lease is not None:
            job.task.token = int(rows[lease][0][0] or 0)
        return True

    async def _read_acceptance_again(self, job: Job) -> bool:
        """An unknown commit: the row says whether it is ours to run, or not there."""
        row = await self._journal.known(job.task.request_id, job.task.recipient)
        self._turns.leave(job)
        if row is None or row.owner != self._journal.run_id:
            await self._give_back(job)
            return False
        # Ours, begun or not: the reconciler finds it missing from the tracker and settles it.
        await (job.delivery.ack() if job.delivery else _nothing())
        return False

    async def _answer_duplicate(self, job: Job) -> None:
        """A known id: counted, acked, and answered from the record once there is an answer."""
        delivery, request, task = job.delivery, job.request, job.task
        assert delivery is not None
        row = await self._journal.known(task.request_id, task.recipient)
        if row is None or request is None:
            await delivery.give_back()  # its first delivery is not yet accepted, or was not
            return
        if row.content_hash != request.content_hash:
            conflict = ConflictingRequestError(
                f"request id {task.request_id} is known with other content: "
                f"{row.method} was accepted under it; draw a new id for a new request"
            )
            again = decode_request(delivery.body, max_bytes=self._settings.max_body_bytes)
            await self._refusals.reject(again, delivery, job.gate.lane, "conflicting_id", conflict)
            return
        await self._journal.tally(
            "duplicate", request_id=task.request_id, method=task.method, detail=row.state.value
        )
        if job.reply is not None and (
            row.finished_at is not None or not await self._journal.add_reply_address(row, job.reply)
        ):
            row = await self._journal.known(task.request_id, task.recipient) or row
            await self._answers.send(job.reply, outcome_of(row))
        await delivery.ack()

    # -- turn and begin --------------------------------------------------------------------

    async def _begin_in_turn(self, job: Job) -> bool:
        """Wait for the turn, then record the attempt; false if it does not start here."""
        while await self._turns.wait(job):
            if self._expired(job):
                await self._expire(job)
                return False
            try:
                await self._commit_begin(job)
            except _LeaseElsewhereError:
                self._turns.leave(job)
                await self._turns.wait_lease(job)
                continue
            except StoreError as error:
                self._telemetry.emit("store.error", what="begin", error=str(error))
                return False
            self._mark_running(job)
            return True
        await self._give_up_start(job)
        return False

    async def _commit_begin(self, job: Job) -> None:
        batch = Batch(Point.BEGIN)
        lease = self._add_lease(batch, job) if job.task.resource is not None else None
        self._journal.add_begin(batch, job.task)
        try:
            rows = await self._journal.commit(batch)
        except ConflictError as conflict:
            if lease is not None and conflict.statement == lease:
                raise _LeaseElsewhereError from None
            raise
        job.task.attempt += 1
        if lease is not None:
            job.task.token = int(rows[lease][0][0] or 0)

    def _add_lease(self, batch: Batch, job: Job) -> int:
        assert job.task.resource is not None
        return self._leases.add_take(batch, job.task.resource, job.task.request_id)

    def _expired(self, job: Job) -> bool:
        return job.expires_at is not None and self._clock.loop() >= job.expires_at

    async def _expire(self, job: Job) -> None:
        """Its caller is gone and it was never started: ERRORED(expired)."""
        self._turns.leave(job)
        outcome = errored(job.task, Reason.EXPIRED)
        await self._commit_finish(job, outcome, expected=TaskState.ACCEPTED)

    async def _give_up_start(self, job: Job) -> None:
        """The gate closed before it began: the row is anyone's to claim."""
        self._turns.leave(job)
        if job.task.cancel_cause is not None:
            outcome = Outcome(state=TaskState.CANCELLED, reason="operator")
            await self._commit_finish(job, outcome, expected=TaskState.ACCEPTED)
            return
        batch = Batch(Point.NOT_STARTED)
        self._journal.add_not_started(batch, job.task)
        try:
            await self._journal.commit(batch)
        except StoreError as error:
            self._telemetry.emit("store.error", what="not started", error=str(error))
        job.gate.not_started.append(job.task.request_id)

    # -- run and finish -------------------------------------------------------------------------

    def _mark_running(self, job: Job) -> None:
        task = job.task
        task.advance(TaskState.RUNNING)
        task.started_at = self._clock.loop()
        task.handler = asyncio.current_task()
        timeout = job.method.options.timeout_s
        task.deadline = None if timeout is None else task.started_at + timeout
        self._tracker.started(task)
        job.gate.entering.discard(job)
        self._tell_changed()

    async def _run(self, job: Job) -> End:
        task = job.task
        timer = None
        if task.deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(task.deadline, self._answer_timeout, job)
        self._telemetry.emit(
            "task.started", task_id=task.request_id, method=task.method, attempt=task.attempt
        )
        try:
            ctx = self._context(job)
            return await run_attempt(job.method, ctx, task, job.args, job.gate.limiter)
        finally:
            if timer is not None:
                timer.cancel()

    def _context(self, job: Job) -> Context:
        method = job.method
        return Context(
            job.task,
            self._services,
            args=job.args,
            caller=job.caller,
            method=(method.namespace, method.name, method.version),
            expires_at=job.expires_at,
        )

    async def _finish(self, job: Job, outcome: Outcome) -> list[Address]:
        """Outcome, end of the lease and replies due, in one commit."""
        addresses = await self._commit_finish(job, outcome, expected=TaskState.RUNNING)
        self._journal.forget_cursor(job.task)
        self._tracker.ended(job.task)
        self._tell_changed()
        self._telemetry.emit(
            "task.finished",
            task_id=job.task.request_id,
            method=job.task.method,
            outcome=outcome.state.value,
            ran_s=round(self._clock.loop() - (job.task.started_at or 0.0), 3),
        )
        return addresses

    async def _commit_finish(
        self, job: Job, outcome: Outcome, *, expected: TaskState
    ) -> list[Address]:
        task = job.task
        hook = outcome.state is TaskState.ERRORED and job.method.errored_hook is not None
        batch = Batch(Point.FINISH)
        index = self._journal.add_finish(
            batch, task.row_id or 0, outcome, expected=expected, errored_hook=hook
        )
        if task.token is not None and task.resource is not None:
            guard = Guard(resource=task.resource, token=task.token)
            self._leases.add_release(batch, guard, reason="clean")
        try:
            rows = (await self._journal.commit(batch))[index]
        except UnknownCommitError:
            row = await self._journal.known(task.request_id, task.recipient)
            if row is None or row.state is not outcome.state:
                self._telemetry.emit("store.error", what="outcome", error="commit unknown")
            return []
        except StoreError as error:
            # The row stays as it is; if the store is broken the run ends, and the next one settles.
            self._telemetry.emit("store.error", what="outcome", error=str(error))
            return []
        task.advance(outcome.state)
        return [address_of(row) for row in rows]

    async def _reply(self, job: Job, address: Address, outcome: Outcome) -> None:
        row_id = job.task.row_id or 0
        if job.answered:
            await self._answers.forget(row_id, address, sent=True)
        else:
            await self._answers.send_due(row_id, address, outcome)

    def _answer_timeout(self, job: Job) -> None:
        """The caller hears at once; the task keeps place and lease until its handler returned."""
        if not job.task.cancellable or job.answered or job.reply is None:
            return
        job.answered = True
        answer = asyncio.ensure_future(
            self._answers.send(job.reply, failed(timeout_error(job.method)))
        )
        self._answering.add(answer)
        answer.add_done_callback(self._answering.discard)

    # -- cut short -------------------------------------------------------------------------------

    async def _hand_over(self, job: Job, cut: Cut) -> None:
        """Record a started, unfinished task for recovery; its handler has returned."""
        task = job.task
        batch = Batch(Point.HAND_OVER)
        self._journal.add_hand_over(batch, task, cut)
        if task.token is not None and task.resource is not None:
            if cut is Cut.SAFE_POINT:
                guard = Guard(resource=task.resource, token=task.token)
                self._leases.add_release(batch, guard, reason="handoff")
            else:
                self._kept_leases += 1
        try:
            await self._journal.commit(batch)
        except StoreError as error:
            self._telemetry.emit("store.error", what="hand-over", error=str(error))
        else:
            task.advance(TaskState.HANDED_OVER)
        task.cut = cut
        self._on_hand_over(task)
        self._tracker.ended(task)
        self._tell_changed()
        self._telemetry.emit(
            "task.handed_over", task_id=task.request_id, method=task.method, cut=cut.value
        )

    async def hand_over_stuck(self, tasks: Sequence[TrackedTask]) -> None:
        """Record tasks whose handler did not return; their leases stay with this process."""
        await asyncio.gather(
            *(self._hand_over_stuck(self._jobs[t]) for t in tasks if t in self._jobs)
        )

    async def _hand_over_stuck(self, job: Job) -> None:
        task = job.task
        job.stuck = True
        task.cut = Cut.UNCLEAN
        if not task.journaled:
            await self._give_back(job)
            return
        self._kept_leases += task.token is not None
        settle_s = job.request.settle_s if job.request else 0.0
        batch = Batch(Point.HAND_OVER)
        self._journal.add_hand_over(batch, task, Cut.UNCLEAN, settle_s=settle_s)
        try:
            await self._journal.commit(batch)
        except ConflictError:
            return  # it ended in the last moment and is on record
        except StoreError as error:
            self._telemetry.emit("store.error", what="hand-over", error=str(error))

    async def _give_back(self, job: Job) -> None:
        """Put a delivery back that was not accepted, or whose `requeue` task was cut."""
        if job.delivery is not None:
            self._on_give_back()
            await job.delivery.give_back()

    def _untrack(self, job: Job) -> None:
        job.gate.entering.discard(job)
        self._jobs.pop(job.task, None)
        self._tracker.remove(job.task)
        self._tell_changed()

    # -- the gate, for the drain ----------------------------------------------------------------------

    def open_gate(self, lane: Lane) -> None:
        """Accept and begin again."""
        self._gates[lane].is_open = True
        self._gates[lane].not_started = []

    def close_gate(self, lane: Lane) -> None:
        """From now on no accepting or RUNNING commit of the lane is submitted."""
        gate = self._gates[lane]
        gate.is_open = False
        for job in gate.entering:
            if job.waiting and job.task.handler is not None:
                job.task.handler.cancel("gate closed")

    async def wait_gate(self, lane: Lane, *, deadline: float) -> list[str]:
        """Wait until nothing is between acceptance and start; ids of those given up."""
        gate = self._gates[lane]
        await self._tracker.wait_until(lambda: not gate.entering, deadline=deadline)
        return list(gate.not_started)

    async def wait_flushed(self, *, deadline: float) -> None:
        """Wait until every job but the stuck ones has left."""
        await self._tracker.wait_until(
            lambda: all(job.stuck for job in self._jobs.values()), deadline=deadline
        )

    def kept_leases(self) -> int:
        """Leases that only the death of this process frees."""
        return self._kept_leases

    def _tell_changed(self) -> None:
        self._turns.tell_released()
        self._tracker.poke()

    # -- for recovery ----------------------------------------------------------------------------------

    def _job_of_row(self, row: TaskRow) -> Job:
        method = self._methods.resolve(row.namespace, row.method, row.version)
        expires_at = None
        if row.expires_at is not None:
            expires_at = self._clock.loop() + row.expires_at - self._clock.wall()
        return Job(
            task=self.task_of_row(row, method),
            method=method,
            gate=self._gates[row.lane],
            args=row.args or {},
            caller=row.context or {},
            expires_at=None if row.attempts else expires_at,
        )

    def task_of_row(self, row: TaskRow, method: Method[Any, Any]) -> TrackedTask:
        """The row as a task of this process."""
        return TrackedTask(
            request_id=row.request_id,
            recipient=row.recipient,
            method=row.method,
            lane=row.lane,
            holds_drain=not (method.ops and row.lane is Lane.OPS),
            on_interrupt=row.on_interrupt,
            resource=row.resource,
            row_id=row.id,
            tracked_at=self._clock.loop(),
            attempt=row.attempts,
            cursor=row.cursor,
            state=row.state,
        )


class _LeaseElsewhereError(Exception):
    """The lease is held by another task or run, or waits for its settle time."""


def errored(task: object, reason: Reason, detail: str = "") -> Outcome:
    """The outcome of a task that recovery, or its deadline, ends."""
    sentence = f"{task} was marked ERRORED({reason.value}): {ERRORED_SENTENCES[reason]}"
    error = TaskInterruptedError(f"{sentence}; {detail}" if detail else sentence)
    ended = failed(error, TaskState.ERRORED)
    return Outcome(
        state=TaskState.ERRORED, failure=ended.failure, reason=reason.value, detail=ended.detail
    )


def outcome_of(row: TaskRow) -> Outcome:
    """What an ended row answers."""
    return Outcome(
        state=row.state,
        result=row.result,
        failure=row.failure,
        reason=row.reason,
        detail=row.detail,
    )


async def _nothing() -> None:
    return None
