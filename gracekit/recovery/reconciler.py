"""The reconciler: takes over what dead runs left, and settles it in the background.

Everything here is compare-and-set, repeated at start, when poked and every
30 s; a second reconciler on the same store is harmless. In a drain it claims
nothing. It never judges a row whose owner may still live.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from gracekit.clock import Clock
from gracekit.config import Settings
from gracekit.errors import ConflictError, InvalidArgumentsError, RpcError, StoreError
from gracekit.exits import Verdict
from gracekit.leases.leases import Guard, Leases
from gracekit.leases.lines import Kind, Lines
from gracekit.leases.members import Members, Run
from gracekit.life import Judgement
from gracekit.process import Point
from gracekit.recovery.seats import Seats
from gracekit.recovery.suspects import Suspects, is_guilty, suspicion
from gracekit.recovery.verdicts import Done, Fail, Retry, Step, Wait, back_off_s, decide, policy_of
from gracekit.rpc.failures import words_of
from gracekit.rpc.methods import Method, MethodTable
from gracekit.rpc.offer import can_serve
from gracekit.store.batch import Batch
from gracekit.telemetry import Telemetry, masked
from gracekit.tracker.claims import Claims
from gracekit.tracker.holds import Hold, Holds
from gracekit.tracker.journal import Address, Journal, Outcome, TaskRow, address_of
from gracekit.tracker.task import Cut, Lane, OnInterrupt, Reason, TaskState
from gracekit.tracker.tracker import Tracker

CLAIM_AT_ONCE: Final = 32
LEASE_BEAT_S: Final = 1.0
"""A lease that is not to be had is asked for again after this time; and so long after a look
whether the run that holds one has died, there is no other for that run."""
LAST_GIVE_BACK_S: Final = 1.0
"""A slow store must not eat the time in which a stop is recorded."""
MOST_WAITS: Final = 10_000
"""Rows whose wait for their truth is counted here; of further ones by wall time."""
AGAIN_AFTER_S: Final = 5.0
"""A pass, or what is done beside it, is made again so long after it failed."""
CLOCK_SET_S: Final = 1.0
"""A wall clock that differs by more from the time that has passed was set."""
UNKNOWN_CALL_TIMEOUT_S: Final = 60.0
"""A reply of an earlier run is sent if younger than the call's timeout; this where unknown."""

Resource = tuple[str, str]


class Hands(Protocol):
    """What recovery lets the floor above do."""

    def resume(self, row: TaskRow, *, inside: Resource | None) -> None:
        """Run an ACCEPTED row of ours; a seat of its lane was taken for it."""

    async def call_hook(
        self,
        hook: Callable[..., Any],
        method: Method[Any, Any],
        row: TaskRow,
        token: int | None,
        **extra: Any,
    ) -> Any:
        """Call a probe or errored hook with the row's arguments and *extra*."""
        ...

    def succeeded(self, result: Any) -> Outcome:
        """What a probe's Done makes of a task."""
        ...

    def failed(self, row: TaskRow, reason: str) -> Outcome:
        """What a probe's Fail makes of a task."""
        ...

    def errored(self, row: TaskRow, reason: Reason, detail: str) -> Outcome:
        """What giving up makes of a task."""
        ...

    async def reply(self, row_id: int, address: Address) -> None:
        """Answer a caller of an ended row, from the record."""
        ...


class Reconciler:
    """Recovery of one run."""

    def __init__(
        self,
        *,
        journal: Journal,
        claims: Claims,
        holds: Holds,
        leases: Leases,
        members: Members,
        lines: Lines,
        suspects: Suspects,
        tracker: Tracker,
        methods: MethodTable,
        seats: Mapping[Lane, Seats],
        hands: Hands,
        settings: Settings,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._claims = claims
        self._holds = holds
        self._leases = leases
        self._members = members
        self._lines = lines
        self._suspects = suspects
        self._tracker = tracker
        self._methods = methods
        self._seats = seats
        self._hands = hands
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._paused = False
        self._poked = asyncio.Event()
        self._gated: set[Resource] = set()
        self._look_around = True  # rows of others may have come or gone
        self._look_by = 0.0  # loop time; being rung again and again must not put it off for ever
        self._settling: dict[asyncio.Task[None], TaskRow] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._aside: dict[str, asyncio.Task[None]] = {}
        self._asked_again: set[str] = set()
        self._doubts: dict[str, str] = {}  # runs of whom nothing is proven, and why
        self._left: dict[int, float] = {}  # row id to the loop time until which a sibling has it
        self._looked_after: set[str] = set()  # runs, within the last beat
        self._ahead_s: float | None = None  # of the wall clock, before the time that passes
        self._following = asyncio.Lock()
        self._waits: dict[int, float] = {}  # row id to the loop time at which its probes began

    # -- life ---------------------------------------------------------------------------

    def pause(self) -> None:
        """Start nothing more. A probe under way is waited for; what only waits is let go."""
        self._paused = True
        for seats in self._seats.values():
            seats.wake()  # who waits for one waits in vain
        for task in self._settling.keys() - self._asking:
            task.cancel()

    def is_paused(self) -> bool:
        """Whether a drain has said that nothing more may be started."""
        return self._paused

    def resume(self) -> None:
        """Go on after a drain that was resumed."""
        self._paused = False
        self.poke()

    async def stop(self) -> None:
        """End what is still being settled; its rows and leases are anyone's again."""
        self.pause()
        self._suspects.stop()
        tasks = [*self._settling, *self._aside.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # Our death frees them too, only later; a commit on its way is carried out all the same.
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LAST_GIVE_BACK_S):
                await self._leases.give_back_owed()

    def poke(self) -> None:
        """Look now: something may have been left to nobody."""
        self._look_around = True
        self._poked.set()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            self._poked.clear()
            try:
                await self.reconcile()
            except Exception as error:  # noqa: BLE001 - recovery goes on, whatever one pass met
                # What this pass did not come to, or left half done.
                self._look_around, self._look_by = True, self._clock.loop() + AGAIN_AFTER_S
                self._telemetry.emit("store.error", what="reconciliation", error=words_of(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(await self._pause_s()):
                    await self._poked.wait()
                    continue
            self._look_around = True

    async def reconcile(self) -> None:
        """One pass over everything that nobody is working on; nothing in a drain."""
        if self._paused:
            return
        await self.follow_clock()
        await self._leases.give_back_owed()
        await self.adopt_dead_runs()
        # Listing all that is in flight, or every unfinished resource, at each settled row would
        # square their number.
        look = self._look_around or self._clock.loop() >= self._look_by
        if look:
            self._look_around = False
            self._look_by = self._clock.loop() + self._settings.reconcile_every_s
            await self._adopt_missing()
        await self._claims.take_duties()
        await self._send_due_replies()
        if self._settings.startup_reconciliation_enabled:
            if look:
                await self.gate()
            await self._settle_rows()
            self._beside("holds", self._settle_holds)
        self._beside("errored hooks", self._call_errored_hooks)
        for lane in self._seats:
            self._beside(f"accepted rows, {lane.value}", partial(self._claim_accepted, lane))
        if look:
            await self._refresh_gates()

    async def follow_clock(self) -> None:
        """If the wall clock was set since the last look, give what waits its own length again.

        The store has wall times, as they outlive runs; within a run waits are counted by the time
        that passes.
        """
        async with self._following:
            ahead_s = self._clock.wall() - self._clock.loop()
            by_s = 0.0 if self._ahead_s is None else ahead_s - self._ahead_s
            if abs(by_s) > CLOCK_SET_S:
                batch = Batch(Point.SETTLE)
                self._leases.add_follow_clock(batch)
                self._claims.add_follow_clock(batch, by_s)
                self._holds.add_follow_clock(batch, by_s)
                await self._journal.commit(batch)
                self._telemetry.emit("clock.set", by_s=round(by_s, 1))
                self.poke()
            self._ahead_s = ahead_s

    def _beside(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do work beside the pass which the application, or a full lane, may hold up for long.

        One of a name at a time; asked for again meanwhile, it is done once more.
        """
        if name in self._aside:
            self._asked_again.add(name)
            return
        task = asyncio.create_task(work())
        self._aside[name] = task

        def ended(done: asyncio.Task[None]) -> None:
            del self._aside[name]
            if name in self._asked_again:
                self._asked_again.discard(name)
                self._poked.set()
            if not done.cancelled() and (error := done.exception()) is not None:
                self._telemetry.emit("store.error", what=name, error=words_of(error))
                asyncio.get_running_loop().call_later(AGAIN_AFTER_S, self.poke)

        task.add_done_callback(ended)

    async def _pause_s(self) -> float:
        every = self._clock.jitter(self._settings.reconcile_every_s)
        longest = min(every, max(0.05, self._look_by - self._clock.loop()))
        if (
            self._paused
            or not self._settings.startup_reconciliation_enabled
            or len(self._settling) >= CLAIM_AT_ONCE
            or self._poked.is_set()
        ):
            return longest  # whatever is due, nothing would be claimed before the next poke
        with contextlib.suppress(StoreError):
            moment = await self._claims.next_look(self._left_to_siblings())
            if moment is not None:
                return max(0.05, min(longest, moment - self._clock.wall()))
        return longest

    # -- adoption -----------------------------------------------------------------------

    async def adopt_dead_runs(self) -> None:
        """Classify runs proven dead and take over what they left."""
        dead, doubtful = await self._members.survey()
        for run in dead:
            with contextlib.suppress(ConflictError):  # a sibling was quicker
                await self._adopt(run)
        self._report_doubts(doubtful)

    def _report_doubts(self, doubtful: Sequence[tuple[Run, Judgement]]) -> None:
        """Runs of whom nothing is proven are left alone, and reported once for each reason."""
        known, self._doubts = self._doubts, {}
        for run, judgement in doubtful:
            self._doubts[run.run_id] = judgement.reason
            if known.get(run.run_id) != judgement.reason:
                self._telemetry.emit(
                    "run.not_proven",
                    run=run.run_id,
                    instance=run.instance,
                    reason=judgement.reason,
                )

    def look_after(self, run_id: str) -> None:
        """A lease of that run is in somebody's way: if the run has died, take over now."""
        if run_id in self._looked_after:
            return
        self._looked_after.add(run_id)
        asyncio.get_running_loop().call_later(LEASE_BEAT_S, self._looked_after.discard, run_id)
        self._beside(f"run {run_id}", partial(self._look_after, run_id))

    async def _look_after(self, run_id: str) -> None:
        dead, _ = await self._members.survey()
        if any(run.run_id == run_id for run in dead):
            self.poke()

    async def _adopt(self, run: Run) -> None:
        batch = Batch(Point.ADOPT)
        verdict = self._members.add_adoption(batch, run)
        self._leases.add_take_away(batch, run.run_id)
        started = self._claims.add_adopt(
            batch,
            run.run_id,
            crashed=verdict is Verdict.KILLED,
            charged=verdict is Verdict.KILLED or run.exit_code is not None,
        )
        rows = await self._journal.commit(batch)
        self._members.forget(run)
        self._telemetry.emit(
            "run.classified",
            run=run.run_id,
            instance=run.instance,
            verdict=verdict.value,
            unfinished=len(rows[started]),
            not_started=len(rows[started + 1]),
        )
        self.poke()

    async def _adopt_missing(self) -> None:
        """Rows of ours that the tracker does not know: a commit whose end was never seen."""
        for row in await self._claims.missing(frozenset(self._known_rows())):
            if self._is_known(row) or row.id in {one.id for one in self._settling.values()}:
                continue  # it came into the tracker meanwhile, or is being settled
            await self._disown(row)

    async def _disown(self, row: TaskRow) -> None:
        batch = Batch(Point.ADOPT)
        self._claims.add_disown(batch, row)
        if row.resource is not None and row.state is not TaskState.ACCEPTED:
            # Held by this very run, it would be refused to the row's next attempt for ever.
            self._leases.add_drop(batch, row.resource, row.request_id)
        with contextlib.suppress(ConflictError):
            await self._journal.commit(batch)
            self._telemetry.emit(
                "task.adopted",
                task_id=row.request_id,
                method=row.method,
                channel=row.lane.word,
                resource=row.resource,
                attempt=row.attempts,
            )

    async def count_unfinished(self) -> int:
        """Rows of the store that this run, or its next start, could settle."""
        dead, _ = await self._members.survey()
        return await self._claims.unfinished([run.run_id for run in dead])

    async def free_forgotten(self, acted: Collection[str]) -> list[TaskRow]:
        """At the end of a drain: let go of rows that a commit of unknown end made ours.

        Args:
            acted: Request ids whose handler was cut: if their hand-over is not on record, they
                and their leases stay with this process until it is proven dead. One that is
                ACCEPTED again was handed over, and nothing acts on it.

        Returns:
            Those rows as they were.
        """
        # Behind all that was submitted before: a claim may still wait for a slow store, and what it
        # brings would be ours only after the look.
        await self._journal.commit(Batch(Point.ADOPT, durable=False))
        rows = [
            row
            for row in await self._claims.missing(frozenset(self._known_rows()))
            if (row.request_id not in acted or row.state is TaskState.ACCEPTED)
            and not self._is_known(row)
        ]
        for row in rows:
            await self._disown(row)
        return rows

    def _known_rows(self) -> set[int]:
        return self._tracker.row_ids()

    def _is_known(self, row: TaskRow) -> bool:
        return self._tracker.get(row.request_id, row.recipient) is not None

    # -- never started: a second intake -------------------------------------------------

    async def _claim_accepted(self, lane: Lane) -> None:
        """Start ownerless accepted rows, oldest first, until there are none.

        No more are claimed ahead of their turn than the lane has seats.
        """
        look = True
        while not self._paused:
            number = self._seats[lane].take_some(CLAIM_AT_ONCE)
            if number == 0:
                await self._seats[lane].wait_change()
            elif await self._claim_some(lane, number, look=look):
                look = False  # there may be more: what is submitted after the claim comes after it
            else:
                return

    async def _claim_some(self, lane: Lane, seats: int, *, look: bool) -> int:
        """Start up to so many, whose seats were taken; returns how many there were."""
        found = 0
        try:
            rows = await self._claims.claim(
                TaskState.ACCEPTED,
                limit=seats,
                lane=lane,
                look=look,
                without=self._left_to_siblings(),
            )
            found = len(rows)
            for row in rows:
                seats -= 1
                await self._start(row, inside=None)
        finally:
            for _ in range(seats):
                self._give_seat(lane)
        return found

    async def _start(self, row: TaskRow, *, inside: Resource | None) -> None:
        """Run an ACCEPTED row of ours, for which a seat was taken, or give it up."""
        resumed = False
        try:
            method = self._method_of(row)
            if (why := _unservable(row, method)) is not None:
                await self._leave_or_end(row, method, why)
            elif self._paused:
                await self._let_go(row)
            else:
                self._hands.resume(row, inside=inside)
                resumed = True
        finally:
            if not resumed:
                self._give_seat(row.lane)
                if inside is not None:
                    self._lines.leave(inside)

    def _give_seat(self, lane: Lane) -> None:
        """Nobody has used it."""
        self._seats[lane].rise()
        self._seats[lane].leave()

    async def _let_go(self, *rows: TaskRow) -> None:
        batch = Batch(Point.NOT_STARTED)
        for row in rows:
            self._claims.add_let_go(batch, row)
        await self._journal.commit(batch)

    async def _postpone(self, row: TaskRow, seconds: float) -> None:
        batch = Batch(Point.SETTLE)
        self._claims.add_postpone(batch, row, next_check=self._clock.wall() + seconds)
        await self._journal.commit(batch)

    async def _leave_or_end(self, row: TaskRow, method: Method[Any, Any] | None, why: str) -> None:
        """This version cannot run the row: it is left to a living sibling that can, or ended."""
        if await self._is_served_elsewhere(row):
            # We must not claim it again soon: we might be first each time, and the sibling never.
            left_for_s = 2 * self._settings.reconcile_every_s
            self._left[row.id] = self._clock.loop() + left_for_s
            await self._postpone(row, 0.0)
        else:
            await self._end(row, self._hands.errored(row, Reason.METHOD_GONE, why), method)

    def _left_to_siblings(self) -> Collection[int]:
        """Ids of rows that are left to siblings for the time being."""
        if self._left:
            now = self._clock.loop()
            self._left = {row_id: until for row_id, until in self._left.items() if now < until}
        return self._left.keys()

    async def _is_served_elsewhere(self, row: TaskRow) -> bool:
        """Whether a living sibling may claim the row, and serves it."""
        return any(
            row.target in {"", run.host, run.instance}
            and can_serve(methods, row.namespace, row.method, row.version, row.args or {})
            for run, methods in await self._members.siblings()
        )

    # -- started: settle ----------------------------------------------------------------

    async def gate(self) -> None:
        """Hold the line of every resource with an unfinished row: new requests come after it."""
        for _, resource in await self._claims.unfinished_resources():
            if resource not in self._gated and self._lines.enter_nowait(resource):
                self._gated.add(resource)

    async def _refresh_gates(self) -> None:
        """Let go of resources whose rows someone else has settled."""
        if not self._gated:
            return
        open_rows = {resource for _, resource in await self._claims.unfinished_resources()}
        settling = {row.resource for row in self._settling.values()}
        for resource in sorted(self._gated - open_rows - settling):
            self._leave(resource)

    async def _settle_rows(self) -> None:
        while not self._paused and len(self._settling) < CLAIM_AT_ONCE:
            limit = CLAIM_AT_ONCE - len(self._settling)
            rows = await self._claims.claim(
                TaskState.HANDED_OVER, limit=limit, without=self._left_to_siblings()
            )
            if self.is_paused():  # since the claim was submitted
                await self._let_go(*rows)
                return
            for row in rows:
                task = asyncio.create_task(self._settle_or_let_go(row))
                self._settling[task] = row
                task.add_done_callback(self._settled)
            if not rows:
                return

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._settling.pop(task, None)
        if task.cancelled():
            self.poke()
        elif (error := task.exception()) is not None:
            self._telemetry.emit("dispatch.failed", error=words_of(error))
            self.poke()  # its row, and its lease, may be left to nobody
        else:
            self._poked.set()

    async def _settle_or_let_go(self, row: TaskRow) -> None:
        try:
            await self._settle(row)
        except (asyncio.CancelledError, ConflictError):  # a drain; an operator's order
            await self._put_down(row, wait_s=0.0)
        except Exception as error:  # noqa: BLE001 - a commit, or a fault: looked at again later
            self._telemetry.emit("store.error", what="settling", error=words_of(error))
            await self._put_down(row, wait_s=back_off_s(row.waiting_since, self._clock.wall()))

    async def _put_down(self, row: TaskRow, *, wait_s: float) -> None:
        """Give a row up that was being settled; if it has moved on, the row decides."""
        self._leave(row.resource)
        batch = Batch(Point.NOT_STARTED)
        self._claims.add_postpone(batch, row, next_check=self._clock.wall() + wait_s)
        if row.resource is not None:
            self._leases.add_drop(batch, row.resource, row.request_id)
        await self._journal.commit(batch)

    async def _settle(self, row: TaskRow) -> None:
        """Carry out the decision on one claimed row."""
        method = self._method_of(row)
        why = _unservable(row, method)
        if method is None or why is not None:
            await self._leave_or_end(row, method, why or "")
            return
        decision = decide(
            row,
            policy=policy_of(row.on_interrupt, OnInterrupt(method.options.on_interrupt)),
            max_attempts=self._cap_of(method),
            has_probe=method.probe_hook is not None,
        )
        settles_s = (row.not_before or 0.0) - self._clock.wall()
        if decision.step is not Step.ERROR and settles_s > 0:
            await self._postpone(row, settles_s)  # it was accepted as `error`, which need not wait
            return
        match decision.step:
            case Step.ERROR:
                reason = decision.reason or Reason.INTERRUPTED
                await self._end(row, self._hands.errored(row, reason, ""), method)
            case Step.RUN_AGAIN:
                await self._enter(row)
                await self._run_again(row, None)
            case Step.PROBE:
                await self._enter(row)
                await self._probe(row, method)

    async def _enter(self, row: TaskRow) -> None:
        if row.resource is not None and row.resource not in self._gated:
            await self._lines.enter(row.resource, kind=Kind.SETTLING)
            self._gated.add(row.resource)

    def _leave(self, resource: Resource | None) -> None:
        if resource in self._gated and resource is not None:
            self._gated.discard(resource)
            self._lines.leave(resource)

    async def _run_again(self, row: TaskRow, guard: Guard | None) -> None:
        """ACCEPTED again: started at once if there is a seat, else claimed when its time comes."""
        seated = not self._paused and self._seats[row.lane].take()
        try:
            batch = Batch(Point.SETTLE)
            self._claims.add_run_again(batch, row)
            if not seated:
                self._claims.add_let_go(batch, row)
            self._add_release(batch, guard)
            await self._journal.commit(batch)
        except BaseException:
            if seated:
                self._give_seat(row.lane)
            raise
        self._told(row, "run_again")
        if not seated:
            self._leave(row.resource)
            return
        inside = row.resource if row.resource in self._gated else None
        if inside is not None:
            self._gated.discard(inside)  # the place in the line goes to the task
        await self._start(self._claims.accepted(row), inside=inside)

    async def _probe(self, row: TaskRow, method: Method[Any, Any]) -> None:
        """Ask the truth under the resource's lease, and act on the answer."""
        about = suspicion(row.crashes, self._cap_of(method), row.started_at)
        try:
            async with self._suspects.beginning(("task", row.id), about) as alone:
                guard = await self._begin_probe(row, alone=alone)
                answer = await self._ask(row, method, guard)
        except ConflictError:  # the resource is settling still, or held elsewhere
            self._leave(row.resource)  # an older row of it may stand behind us in the line
            await self._wait(row, None, LEASE_BEAT_S, counts=False)
            return
        match answer:
            case Done(result):
                await self._end(row, self._hands.succeeded(result), method, guard)
            case Retry():
                await self._run_again(row, guard)
            case Fail(reason):
                await self._end(row, self._hands.failed(row, reason), method, guard)
            case Wait(seconds):
                await self._wait_or_give_up(row, method, guard, seconds)
            case None:
                outcome = self._hands.errored(row, Reason.INTERRUPTED, "its probe is not written")
                await self._end(row, outcome, method, guard)

    async def _begin_probe(self, row: TaskRow, *, alone: bool) -> Guard | None:
        batch = Batch(Point.TAKE_LEASE)
        lease = None
        if row.resource is not None:
            lease = self._leases.add_take(batch, row.resource, row.request_id, row.id)
        self._claims.add_probing(batch, row, alone=alone)
        rows = await self._journal.commit(batch)
        if row.resource is None or lease is None:
            return None
        return Guard(resource=row.resource, token=int(rows[lease][0][0] or 0))

    async def _ask(
        self, row: TaskRow, method: Method[Any, Any], guard: Guard | None
    ) -> Done | Retry | Fail | Wait | None:
        """The probe's answer; one that raises or is slow counts as Wait with back-off."""
        assert method.probe_hook is not None
        limit = method.options.probe_timeout_s or self._settings.probe_timeout_s
        token = guard.token if guard else None
        with self._asking_now(), self._tracker.background(f"probe of {row.method}", self._clock):
            asking = asyncio.ensure_future(
                self._hands.call_hook(method.probe_hook, method, row, token)
            )
            try:
                done, _ = await asyncio.wait({asking}, timeout=limit)
            finally:
                asking.cancel()  # a thread goes on; its answer comes too late to count
            if not done:
                error = f"no answer within {limit:g} s"
            elif asking.cancelled():
                error = "cancelled"
            elif (raised := asking.exception()) is None:
                if isinstance(answer := asking.result(), Done | Retry | Fail | Wait):
                    return answer
                said = words_of(answer)
                error = f"answered {said}: a probe returns Done, Retry, Fail or Wait"
            elif isinstance(raised, NotImplementedError):
                return None
            else:
                error = words_of(raised)
        self._telemetry.emit(
            "hook.failed",
            hook=f"{row.method}.probe",
            task_id=row.request_id,
            method=row.method,
            error=_masked(row, error),
        )
        return Wait(back_off_s(row.waiting_since, self._clock.wall()))

    @contextlib.contextmanager
    def _asking_now(self) -> Iterator[None]:
        """While a probe runs, a drain waits for it instead of letting the row go."""
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            yield
        finally:
            self._asking.discard(task)

    async def _wait_or_give_up(
        self, row: TaskRow, method: Method[Any, Any], guard: Guard | None, seconds: float
    ) -> None:
        left_s = method.options.max_wait_s - self._waited_s(row)
        if left_s <= 0:
            self._waits.pop(row.id, None)
            await self._end(row, self._hands.errored(row, Reason.GAVE_UP, ""), method, guard)
        else:
            await self._wait(row, guard, min(seconds, left_s))

    def _waited_s(self, row: TaskRow) -> float:
        """Since its probe first asked to wait; by wall time only as long as another run knew it."""
        now = self._clock.loop()
        if row.waiting_since is None:
            self._waits.pop(row.id, None)  # of an attempt before this one
            before_s = 0.0
        else:
            before_s = max(0.0, self._clock.wall() - row.waiting_since)
        since = self._waits.setdefault(row.id, now - before_s)
        if len(self._waits) > MOST_WAITS:
            del self._waits[next(iter(self._waits))]
        return now - since

    async def _wait(
        self, row: TaskRow, guard: Guard | None, seconds: float, *, counts: bool = True
    ) -> None:
        batch = Batch(Point.SETTLE)
        next_check = self._clock.wall() + max(0.05, seconds)
        self._claims.add_wait(batch, row, next_check=next_check, counts=counts)
        self._add_release(batch, guard)
        await self._journal.commit(batch)

    async def _end(
        self,
        row: TaskRow,
        outcome: Outcome,
        method: Method[Any, Any] | None,
        guard: Guard | None = None,
    ) -> None:
        """Commit a terminal verdict with the end of its lease, then answer who waits."""
        hook = (
            outcome.state is TaskState.ERRORED
            and method is not None
            and method.errored_hook is not None
        )
        batch = Batch(Point.SETTLE)
        replies = self._journal.add_finish(
            batch, row.id, outcome, expected=row.state, errored_hook=hook
        )
        self._add_release(batch, guard)
        addresses = (await self._journal.commit(batch))[replies]
        self._told(row, outcome.state.value, outcome.reason)
        if outcome.state is TaskState.ERRORED:
            self._telemetry.emit(
                "task.errored",
                task_id=row.request_id,
                method=row.method,
                channel=row.lane.word,
                resource=row.resource,
                attempt=row.attempts,
                reason=outcome.reason or "",
            )
        elif outcome.state is TaskState.FAILED:
            self._telemetry.emit(
                "task.failed",
                task_id=row.request_id,
                method=row.method,
                channel=row.lane.word,
                resource=row.resource,
                attempt=row.attempts,
                error=f"the probe said: {_masked(row, outcome.detail or '')}",
            )
        self._leave(row.resource)
        for address in map(address_of, addresses):
            await self._hands.reply(row.id, address)
        if hook:
            self._poked.set()

    def _add_release(self, batch: Batch, guard: Guard | None) -> None:
        if guard is not None:
            self._leases.add_release(batch, guard, reason="clean")

    def _told(self, row: TaskRow, verdict: str, reason: str | None = None) -> None:
        self._telemetry.emit(
            "task.settled",
            task_id=row.request_id,
            method=row.method,
            channel=row.lane.word,
            resource=row.resource,
            attempt=row.attempts,
            verdict=verdict,
            reason=reason or "",
        )

    async def end_abandoned(self, row: TaskRow) -> None:
        """End an ownerless row whose host or instance does not come back.

        Never started and for one instance alone it is CANCELLED; else ERRORED(gave_up).
        """
        outcome = self._hands.errored(row, Reason.GAVE_UP, f"{row.target} has had no run for long")
        if row.route == "fanout" and row.state is TaskState.ACCEPTED:
            outcome = msgspec.structs.replace(
                outcome, state=TaskState.CANCELLED, reason="instance_gone"
            )
        batch = Batch(Point.CLAIM)
        self._claims.add_take_over(batch, row)
        with contextlib.suppress(ConflictError):
            await self._journal.commit(batch)
            await self._end(row, outcome, self._method_of(row))

    # -- duties of earlier runs ---------------------------------------------------------

    async def _send_due_replies(self) -> None:
        """Replies that a dead run owed; once, if their caller may still wait."""
        for row_id, address, accepted_at in await self._claims.due_replies():
            if row_id in self._known_rows():
                continue  # its own task is about to send it
            until = address.expires_at or accepted_at + UNKNOWN_CALL_TIMEOUT_S
            if self._clock.wall() > until:
                await self._journal.reply_done(row_id, address, sent=False)
            else:
                await self._hands.reply(row_id, address)

    async def _call_errored_hooks(self) -> None:
        for row in await self._claims.errored_due():
            if self._paused:
                return
            method = self._method_of(row)
            if method is None or method.errored_hook is None:
                await self._claims.errored_done(row)
            else:
                await self._call_due(row, method)

    async def _call_due(self, row: TaskRow, method: Method[Any, Any]) -> None:
        """Call an errored hook as handlers are: recorded before, apart if suspected, and capped."""
        cap = self._cap_of(method)
        if is_guilty(row.hook_crashes, cap, alone=row.alone):
            why = self._give_up(f"{row.method}.errored", row.hook_crashes)
            await self._claims.errored_done(row, given_up=why)
            return
        about = suspicion(row.hook_crashes, cap)
        async with self._suspects.beginning(("task", row.id), about) as alone:
            if self._paused:
                return
            with contextlib.suppress(ConflictError):  # an operator has ended it
                await self._claims.begin_errored(row, alone=alone)
                await self._call_errored(row, method, row.reason or "")
                await self._claims.errored_done(row)

    def _give_up(self, hook: str, crashes: int) -> str:
        why = f"not called any more: {crashes} processes ended while it ran"
        self._telemetry.emit("hook.failed", hook=hook, error=why)
        return why

    def _cap_of(self, method: Method[Any, Any]) -> int:
        return method.options.max_attempts or self._settings.max_attempts

    async def _call_errored(self, row: TaskRow, method: Method[Any, Any], reason: str) -> None:
        assert method.errored_hook is not None
        with self._tracker.background(f"errored hook of {row.method}", self._clock):
            calling = asyncio.ensure_future(
                self._hands.call_hook(method.errored_hook, method, row, None, reason=reason)
            )
            try:
                await asyncio.wait({calling}, timeout=self._settings.probe_timeout_s)
            finally:
                calling.cancel()
        fault = "took too long" if not calling.done() or calling.cancelled() else None
        if fault is None and (error := calling.exception()) is not None:
            fault = words_of(error)
        if fault is not None:  # it was called; what it made of that is the application's
            self._telemetry.emit(
                "hook.failed",
                hook=f"{row.method}.errored",
                task_id=row.request_id,
                method=row.method,
                error=_masked(row, fault),
            )

    # -- holds --------------------------------------------------------------------------

    async def _settle_holds(self) -> None:
        for hold in await self._holds.due():
            if not hold.errored_due and self._has_lapsed(hold):
                await self._end_hold(hold, "lapsed")
            elif self._paused:
                continue
            elif hold.errored_due:
                await self._tell_errored(hold)
            else:
                await self._settle_hold(hold)

    def _has_lapsed(self, hold: Hold) -> bool:
        """Whether one of this run is due for that, and not for its probe."""
        if hold.owner is None:
            return False
        return hold.next_check is None or self._clock.wall() >= hold.lapses_at

    async def _tell_errored(self, hold: Hold) -> None:
        method = self._method_of(hold)
        if method is None or method.errored_hook is None:
            await self._holds.errored_done(hold)
        elif is_guilty(hold.crashes, self._cap_of(method), alone=hold.alone):
            why = self._give_up(f"{hold.method}.errored", hold.crashes)
            await self._holds.errored_done(hold, given_up=why)
        else:
            async with self._calling(hold, method) as is_ours:
                if is_ours:
                    await self._call_errored(hold_as_row(hold), method, "hold")
                    await self._holds.errored_done(hold)

    @contextlib.asynccontextmanager
    async def _calling(self, hold: Hold, method: Method[Any, Any]) -> AsyncIterator[bool]:
        """Around a call of a hold's probe or errored hook; whether it is to be called here."""
        about = suspicion(hold.crashes, self._cap_of(method))
        async with self._suspects.beginning(("hold", hold.id), about) as alone:
            yield not self._paused and await self._holds.begin(hold, alone=alone)

    async def _settle_hold(self, hold: Hold) -> None:
        """Done ends it, Fail and Retry end it and tell, Wait keeps it, and us, until it lapses."""
        method = self._method_of(hold)
        if self._clock.wall() >= hold.lapses_at:
            await self._end_hold(hold, "lapsed")
        elif method is None or method.probe_hook is None:
            await self._end_hold(hold, "no_probe", errored=method is not None)
        elif is_guilty(hold.crashes, self._cap_of(method), alone=hold.alone):
            why = self._give_up(f"{hold.method}.probe", hold.crashes)
            await self._end_hold(hold, "given_up", errored=True, given_up=why)
        else:
            async with self._calling(hold, method) as is_ours:
                if is_ours:
                    await self._probe_hold(hold, method)

    async def _probe_hold(self, hold: Hold, method: Method[Any, Any]) -> None:
        match await self._ask(hold_as_row(hold), method, None):
            case Done():
                await self._end_hold(hold, "done")
            case Wait(seconds):
                check = min(self._clock.wall() + seconds, hold.lapses_at)
                await self._holds.wait(hold, next_check=check)
            case _:
                await self._end_hold(hold, "failed", errored=True)

    async def _end_hold(
        self, hold: Hold, reason: str, *, errored: bool = False, given_up: str = ""
    ) -> None:
        if not await self._holds.settle(hold, reason, errored=errored, given_up=given_up):
            return
        self._telemetry.emit(
            "hold.ended", hold=hold.name, key=hold.key, method=hold.method, reason=reason
        )
        if errored:
            self._poked.set()  # its errored hook is due now

    def _method_of(self, row: TaskRow | Hold) -> Method[Any, Any] | None:
        try:
            return self._methods.resolve(row.namespace, row.method, row.version)
        except RpcError:
            return None


def _unservable(row: TaskRow, method: Method[Any, Any] | None) -> str | None:
    """Why this version cannot run the row; None if it can."""
    if method is None:
        return row.method
    try:
        method.bind(row.args or {}, accepted=True)
    except InvalidArgumentsError as error:
        return str(error)
    return None


def hold_as_row(hold: Hold) -> TaskRow:
    """The request that opened a hold, as hooks are called with it."""
    nothing: dict[str, Any] = dict.fromkeys(TaskRow.__slots__)
    return TaskRow(
        **nothing
        | {
            "id": hold.id,
            "request_id": f"hold {hold.name} {hold.key}",
            "recipient": "",
            "lane": Lane.REQUESTS,
            "method": hold.method,
            "namespace": hold.namespace,
            "version": hold.version,
            "args": hold.args,
            "state": TaskState.HANDED_OVER,
            "on_interrupt": OnInterrupt.PROBE,
            "cut": Cut.UNCLEAN,
            "attempts": 1,
            "crashes": 0,
        }
    )


def _masked(row: TaskRow, text: str) -> str:
    """What the application says of a task, as a log may show it."""
    known = "" if row.resource is None else row.resource[1]
    return masked(text, row.context or {}, row.args or {}, known=known)
