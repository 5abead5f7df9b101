"""What a handler gets: its request, its deadline, its safe points, its lease.

A `Context` belongs to one attempt of one task. Everything that must survive a crash goes to the
tracker and the journal; the Context keeps no such state.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from gracekit.callables import is_async, name_of
from gracekit.clock import Clock
from gracekit.config.values import parse_duration
from gracekit.errors import InvalidArgumentsError, LeaseHeld, StoreError
from gracekit.journal.holds import Holds
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import Guard, RunLeases
from gracekit.phase import Phase
from gracekit.process import SafePoints
from gracekit.request.parked_tasks import ParkedTasks
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.steps import Steps
from gracekit.request.tracked import TrackedBlock, TrackedCall
from gracekit.rpc.argument_paths import need_resource_id
from gracekit.rpc.client import RpcClient
from gracekit.rpc.message import lease_in
from gracekit.rpc.plain import small_plain
from gracekit.tracker.task import OUT_OF_TIME, CancelCause, Order, TrackedTask, Verb
from gracekit.tracker.tracker import Tracker

T = TypeVar("T")


class SafePointStop(asyncio.CancelledError):
    """Unwinds a handler that gracekit stops at a safe point; never an error.

    It is a cancellation, so that `except Exception` lets it pass and task
    groups inside a handler end as for any cancellation. A task group, `gather`
    or `shield` may swallow it. The task stops nevertheless, because gracekit
    decides by the note on it (`TrackedTask.stopped`), not by this exception.
    """


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of the run that contexts and attempts use; built once by the Runtime.

    Attributes:
        client: The run's own client of the service with that topic; None for this service.
        host: Name of the host, as settings have it.
        request_stop: Asks for a drain after which the instance stays down; by whom, and why.
        parks: Whether a task whose handler raises NoCapacity is parked.
    """

    journal: Journal
    holds: Holds
    leases: RunLeases
    tracker: Tracker
    phase: Phase
    clock: Clock
    loop: asyncio.AbstractEventLoop
    parked_tasks: ParkedTasks
    request_stop: Callable[[str, str], None]
    client: Callable[[str | None], RpcClient]
    trigger: RecoveryTrigger
    host: str
    parks: bool
    safe_points: SafePoints | None = None


class Context(Mapping[str, Any]):
    """One attempt of one task, as its handler sees it.

    It is also a mapping, of the caller's request context: `ctx["user_id"]`.
    """

    __slots__ = (
        "_args", "_awaited", "_caller", "_expires_at", "_method", "_monitor_s", "_services",
        "_steps", "_task", "_version",
    )  # fmt: skip

    def __init__(
        self,
        task: TrackedTask,
        services: Services,
        *,
        args: Mapping[str, Any],
        caller: Mapping[str, Any],
        method: tuple[str | None, str, str],
        expires_at: float | None,
        monitor_s: float | None = None,
        version: str | None = None,
    ) -> None:
        self._task = task
        self._services = services
        self._args = args
        self._caller = caller
        self._method = method
        self._expires_at = expires_at
        self._monitor_s = monitor_s
        self._version = version or method[2]
        self._awaited = services.tracker.awaited
        self._steps: Steps | None = None  # the loop that moves the cursor

    # -- the request --------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        return self._caller[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._caller)

    def __len__(self) -> int:
        return len(self._caller)

    @property
    def monitor_timeout(self) -> float | None:
        """Seconds without a heartbeat after which the caller gives up.

        None if it asked for no heartbeats, and after a restart.
        """
        return self._monitor_s

    def __repr__(self) -> str:
        return f"<Context of {self._task}, attempt {self.attempt}>"

    @property
    def task_id(self) -> str:
        """Id of this work in the tracker and the log: the request id, or the id of a job's run."""
        return self._task.request_id

    @property
    def request_id(self) -> str:
        """The sender's id of this request."""
        return self._task.about or self._task.request_id  # `about`: of a block that is by itself

    @property
    def shown_context(self) -> Mapping[str, str] | None:
        """What the service's `context_keys` copy of the caller's context; None for nothing."""
        return self._task.shown_context

    @property
    def host(self) -> str:
        """Name of this host (`GRACEKIT_HOST`), as directed requests name it."""
        return self._services.host

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._task.method

    @property
    def version(self) -> str:
        """Interface version that the request asks for, such as `"1.0"`; at most the method's."""
        return self._version

    @property
    def attempt(self) -> int:
        """Number of this start of the handler, from 1.

        A `requeue` request has no row that counts its attempts, so after it was
        given back and delivered again this begins at 1 again.
        """
        return self._task.attempt

    @property
    def fence(self) -> int | None:
        """Fencing token of this attempt's lease; pass it to backends that refuse a stale owner.

        None without a resource. An ops method takes no lease; if a task with a lease called
        it, this is the token of that task.
        """
        if self._task.token is not None:
            return self._task.token
        lease = self.travelling_lease
        return None if lease is None else lease["token"]

    @property
    def travelling_lease(self) -> dict[str, Any] | None:
        """{kind, id, token} of this task's lease, else of the calling task's; None if neither."""
        if self._task.token is not None and self._task.resource is not None:
            kind, resource_id = self._task.resource
            return {"kind": kind, "id": resource_id, "token": self._task.token}
        return lease_in(self._caller)

    # -- time ---------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """Loop time at which this attempt should be over; None if nothing limits it.

        The earliest of the method's timeout, the caller's deadline if it is known,
        and during a drain the drain's deadline.
        """
        limits = [self._task.deadline, self._expires_at, self._services.phase.deadline]
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    @property
    def time_left(self) -> float | None:
        """Seconds until `deadline`, at least 0; None if nothing limits this attempt."""
        deadline = self.deadline
        return None if deadline is None else max(0.0, deadline - self._services.loop.time())

    @property
    def draining(self) -> bool:
        """Whether the service is draining: a good moment to reach a safe point."""
        return self._services.phase.draining

    @property
    def cancelled(self) -> bool:
        """Whether this attempt should end. Plain handlers must check it: threads get no cancel."""
        return self._task.cancel_cause is not None

    @property
    def lost(self) -> bool:
        """Whether another run may act in place of this one, soon or already: change nothing more.

        Only in a store that hosts share, if this process could not show for `fail_after` that it
        lives, or was declared dead. `cancelled` is true, too.
        """
        return self._task.cancel_cause is CancelCause.FENCED

    # -- safe points --------------------------------------------------------------------

    @property
    def cursor(self) -> Any:
        """The last cursor that this or an earlier attempt passed to a safe point."""
        return self._task.cursor

    async def safe_point(self, cursor: Any, *, last: bool = False) -> None:
        """Record that everything up to *cursor* is done, and stop here in a drain.

        The cursor is committed with the next commit, at most 1 s later; after a
        crash the items since that commit are repeated. In a drain this call does
        not return: this cursor is committed, and the task is run again from it.
        If the history of its method says that the attempt ends before the
        drain's deadline, the call returns and the handler goes on.

        None resets the cursor, for a handler that is about to undo its work. The reset is
        committed when this returns, and the next attempt begins at the beginning.

        Args:
            cursor: Plain JSON data of at most 256 KiB, small because it is written often. None:
                nothing is done.
            last: Do not stop here, because the handler is about to return.

        Raises:
            UnserialisableError: *cursor* is no plain data, or too large.
            StoreError: only for None: the reset could not be committed, so undo nothing.
        """
        self._reached(cursor)
        if cursor is None:
            await self._services.journal.set_cursor_back(self._task)
        else:
            self._services.journal.mark_cursor(self._task)
        if (asked := self._services.safe_points) is not None:
            await asked.reached(self.method, self.request_id)
        if not last:
            self._stop_if_asked()
        await asyncio.sleep(0)

    def safe_point_in_thread(self, cursor: Any, *, last: bool = False) -> None:
        """`safe_point` for plain `def` handlers, which run in worker threads."""
        self._reached(cursor)
        services = self._services
        if cursor is None:
            back = services.journal.set_cursor_back(self._task)
            asyncio.run_coroutine_threadsafe(back, services.loop).result()
        else:
            services.loop.call_soon_threadsafe(services.journal.mark_cursor, self._task)
        if (asked := self._services.safe_points) is not None:
            asked.reached_in_thread(self.method, self.request_id)
        if not last:
            self._stop_if_asked()

    def steps(self, source: Sequence[Any] | Callable[[Any], Any]) -> Steps:
        """Iterate with a safe point after each item, from where the last attempt stopped.

        Use `async for` in coroutines and `for` in plain handlers. A task has one cursor, so a
        handler has one such loop. After a `break` the loop may be begun again; it continues
        after its last safe point.

        Args:
            source: A sequence, resumed by index; or a callable that takes the
                last cursor (None at first) and yields (cursor, item) pairs, or
                items that are their own cursor.

        Raises:
            TypeError: *source* is neither; a generator cannot be resumed.
            DeclarationError: while iterating, if a second loop would move the same cursor.
        """
        return Steps(self, source)

    def progress(self, done: float, of: float | None = None, *, note: str = "") -> None:
        """Say how far this task has come, for those who look at it; from any thread.

        It is written with the next commit of the process, at most 5 s later. `steps` over a
        sequence says it by itself.

        Args:
            done: So much of the work is done, at least 0.
            of: So much there is in all; None if that is not known.
            note: What it is at; cut at 200 characters.

        Raises:
            InvalidArgumentsError: *done* or *of* is no such number, or *note* no text.
            UnserialisableError: *note* has half a character, or a number has too many digits.
        """
        given: list[tuple[str, object]] = [("done", done), ("of", 0 if of is None else of)]
        for name, number in given:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 <= float(str(number)) < math.inf:
                raise InvalidArgumentsError(f"{name}={number!r} must be a number of at least 0")
        if not isinstance(note, str):
            raise InvalidArgumentsError(f"note={note!r} must be a text")
        task, services = self._task, self._services
        while task.row_id is None and task.parent is not None:
            task = task.parent
        said, at = note[:200].replace("\0", "\\0"), services.clock.wall()
        progress = {"done": done, "of": of, "note": said, "at": at}
        # It raises here, in the handler, and not in a commit for many tasks.
        task.progress = small_plain(progress, "progress", "it is written often")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            services.loop.call_soon_threadsafe(services.journal.mark_progress, task)
        else:
            services.journal.mark_progress(task)

    def _reached(self, cursor: Any) -> None:
        # It raises here, in the handler, and not in a commit for many tasks.
        value = small_plain(cursor, "cursor", "it is written at each safe point")
        self._task.cursor = value
        self._task.safe_point_at = self._services.loop.time()

    def _stop_if_asked(self) -> None:
        task = self._task
        if task.stopped or (task.cancel_cause in OUT_OF_TIME and task.journaled):
            self._stop()  # in the grace period too, a safe point is an exact place to stop
        if task.cancel_cause is not None:
            raise asyncio.CancelledError(task.cancel_cause.value)
        if self._services.phase.draining and task.journaled and task.holds_drain:
            if self._ends_in_time():
                return
            self._stop()

    def _stop(self) -> NoReturn:
        """Note the stop on the task, then unwind the handler."""
        self._task.stopped = True
        raise SafePointStop

    def _ends_in_time(self) -> bool:
        """Whether the history of the method says that this attempt ends before the deadline."""
        deadline = self._services.phase.deadline
        end = self._task.expected_end(self._services.loop.time())
        return deadline is not None and end is not None and end < deadline

    # -- tasks that wait for capacity ---------------------------------------------------

    async def cancel_pending(self, kind: str, resource_id: str, *, reason: str = "") -> int:
        """Cancel the parked tasks of this service for a resource.

        For the handler that deletes the resource. The cancellation is committed when this returns,
        even if the handler fails later. A task that was retried just before is not cancelled: it
        waits in the resource's line, and runs after this handler has ended.

        Args:
            kind: Kind of the resource, as methods name it.
            resource_id: Id of the resource.
            reason: Why, for the record.

        Returns:
            How many were cancelled.

        Raises:
            InvalidArgumentsError: no method of the service acts on that *kind*, or *resource_id*
                is no id.
            StoreError: not all could be recorded; some may be cancelled.
        """
        by = f"task {self.task_id} ({self._task.method})"
        order = Order(verb=Verb.CANCEL, by=by, reason=reason, source="handler")
        return await self._services.parked_tasks.cancel_of(kind, resource_id, order)

    async def settle(self, kind: str, *, within: str | float = "20s") -> Sequence[Any]:
        """Clean up what occupies room that this task needs, by the rules with `before_use`.

        It does not wait for a pass, and works also while passes are paused or a drain waits for
        this task. Rules that are under way in this process are waited for. A failure of a rule is
        in its result and raises nothing.

        Args:
            kind: Name of a declared kind.
            within: Return after so long; rules that act then go on.

        Returns:
            What became of each resource: `resource`, `status`, `outcome`, `written`, `reason`.

        Raises:
            InvalidArgumentsError: the service has no such kind.
        """
        own = self._task.resource or ("", "")
        return await self._services.trigger.settle(kind, parse_duration(within), own)

    def request_stop(self, reason: str) -> None:
        """Stop this process, by a drain, as the user of the request wishes it.

        The drain hands this task over at its deadline like any other. An instance with a name of
        its own (`GRACEKIT_INSTANCE`) then stays down, unless `on_user_stop` is `restart`.

        Args:
            reason: Why, for the record.

        Raises:
            InvalidArgumentsError: *reason* is no text.
        """
        if not isinstance(reason, str):
            raise InvalidArgumentsError(f"a reason is text, and not {reason!r}")
        user = self._caller.get("user_id")
        who = f"user {user}" if user else f"method {self._task.method}"
        ask = self._services.request_stop
        self._services.loop.call_soon_threadsafe(ask, who[:200], reason[:500])

    # -- requests of its own ------------------------------------------------------------

    def client(self, topic: str | None = None) -> RpcClient:
        """A client on the connection of this service, which the service opens and ends.

        For coroutines: it is used in the event loop of the service.

        Args:
            topic: Topic of the service to send to; None for this one.

        Raises:
            ConfigError: *topic* cannot be one.
        """
        return self._services.client(topic)

    # -- holds and background work ------------------------------------------------------

    async def hold(self, name: str, key: str, *, at_most: str | float) -> None:
        """Keep this host in its drain until `end_hold`, in any later request, or until it lapses.

        If the hold is still open when the process ends, the next start calls the probe of the
        method that opened it; the answer `Wait` keeps the hold open. Without a probe the hold
        ends then, and the method's `errored` hook is called.

        Args:
            name: Kind of operation, for example `"migration"`.
            key: Which operation of that kind.
            at_most: Duration after which the hold lapses (`"15m"`, or seconds).

        Raises:
            InvalidArgumentsError: *name* or *key* is no id, such as text or a whole number.
        """
        await self._services.holds.open(
            need_resource_id(name, "hold"),
            need_resource_id(key, "hold"),
            at_most_s=parse_duration(at_most),
            method=self._method,
            args=dict(self._args),
        )

    async def end_hold(self, name: str, key: str) -> bool:
        """End a hold that any request may have opened; false if none was open."""
        ended = await self._services.holds.end(name, str(key))
        self._services.tracker.poke()
        return ended

    def track(
        self, name: str, *, resource: tuple[str, str] | None = None, keep_open: bool = True
    ) -> TrackedBlock:
        """Let the task and a drain wait for a block of work that this handler has begun.

        `async with` or `with`, in any asyncio task or thread; it yields the Context for the block.
        The task is open until the block has ended: its outcome is not recorded, its caller not
        answered, and its resource not free. If the block raises, the task is FAILED. What cancels
        the task cancels the block's asyncio task; in a thread `cancelled` says so.

        A block that is entered when the handler has returned and no other block keeps the task
        open, or in a periodic job, a hook or a rule, is by itself, as with `keep_open=False`.

        Args:
            name: Shown behind the name of the method, as `build:copying`.
            resource: (kind, id) to show; it takes no lease.
            keep_open: If false, the task ends with its handler. The block holds a drain by itself,
                and only the deadline of a drain cancels it.

        Raises:
            RuntimeError: on entry in a thread, if the service has ended, or its event loop does not
                answer for 10 s.
        """
        return TrackedBlock(self, name, resource=resource, keep_open=keep_open)

    def track_call(
        self,
        submit: Callable[..., T],
        function: Callable[..., Any],
        *args: Any,
        keep_open: bool = True,
        **kwargs: Any,
    ) -> T:
        """Call a function in a thread of the application, as a block of `track`.

        It is tracked before this returns: `ctx.track_call(executor.submit, build, vm)`. There
        `gracekit.current()` works, and calls carry the lease of the task.

        Args:
            submit: Gets a function, *args* and *kwargs*, and has a thread call it.
            function: The work; a plain function.
            args: Its arguments.
            keep_open: As for `track`.
            kwargs: Its arguments by name.

        Returns:
            What *submit* returns.

        Raises:
            TypeError: *function* is a coroutine function, which a thread would not run.
            Exception: what *submit* raises; nothing is tracked then.
        """
        name = name_of(function)
        if is_async(function):
            raise TypeError(
                f"track_call() calls a plain function in a thread, and {name}() is a coroutine "
                f"function: start it as an asyncio task with `async with ctx.track({name!r})`"
            )
        call = TrackedCall(self.track(name, keep_open=keep_open), function)
        return call.submit(submit, *args, **kwargs)

    @contextlib.asynccontextmanager
    async def lease(self, kind: str, resource_id: str) -> AsyncIterator[Guard]:
        """Take another lease for a block; never waits.

        Raises:
            LeaseHeld: another task has it; the message names that task.
            InvalidArgumentsError: *resource_id* cannot be an id, such as `1.0` or an empty text.
        """
        services = self._services
        resource = (kind, need_resource_id(resource_id, kind))
        guard = await self._take(resource)
        if guard is None:
            row = await services.leases.look(resource)
            if row is not None and row.request_id == self.task_id:
                raise LeaseHeld(
                    f"lease {kind}:{resource_id} is held by this task itself: its method has it "
                    "as resource=, or an outer ctx.lease() has taken it; its token is that one's"
                )
            raise LeaseHeld(
                f"lease {kind}:{resource_id} is held by task "
                f"{row.request_id if row else 'unknown'}; task {self.task_id} does not wait "
                "for it: try later, or name it as the method's resource=, which queues"
            )
        self._task.leases += 1
        try:
            yield guard
        finally:
            self._task.leases -= 1
            # A drain cut the block, so its last step may still take effect: the lease stays with
            # this process until that is proven dead. The hand-over of a fenced task ends it.
            if self._task.cancel_cause in OUT_OF_TIME:
                services.leases.kept += 1
            elif self._task.cancel_cause is not CancelCause.FENCED or not self._task.journaled:
                await self._release(guard)

    async def _take(self, resource: tuple[str, str]) -> Guard | None:
        """Take a lease; if cancelled meanwhile, wait for the commit and release what it took."""
        taking = asyncio.ensure_future(self._services.leases.take(resource, self.task_id))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait({taking})
            if not taking.exception() and (guard := taking.result()) is not None:
                await self._release(guard)
            raise

    async def _release(self, guard: Guard) -> None:
        try:
            await self._services.leases.release(guard, reason="clean")
        except StoreError:
            self._services.leases.owe(guard, self.task_id)


def parked_tasks_of(ctx: Context) -> ParkedTasks:
    """The parked tasks of the service, for the methods of gracekit that show and move them."""
    return ctx._services.parked_tasks  # noqa: SLF001 - for gracekit's own methods only
