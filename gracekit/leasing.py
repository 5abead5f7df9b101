"""Leases that people hold: `Leases`, as a member of its own or inside a service.

A hold is lost if its member cannot show for `fail_after` that it lives, if it is declared dead, or
if an operator forces it. Then its `lost` is set, and `on_lost` is called. While its block goes on
after that, the kernel ends the process at `hard_after`, before another member can get the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from gracekit import background, backoff
from gracekit.background import Background, Work
from gracekit.clock import Clock
from gracekit.config.loading import load
from gracekit.config.settings import Settings
from gracekit.config.values import parse_duration
from gracekit.errors import (
    ConflictError,
    LeaseHeld,
    StoreClosedError,
    StoreError,
    StoreFinalError,
)
from gracekit.leases import declarations
from gracekit.leases.declarations import DeclaredLeases, LeaseFacts
from gracekit.leases.leases import Guard, Resource, RunLeases
from gracekit.listings.host_list import HostState, list_hosts
from gracekit.listings.lease_list import LeaseInfo, infos_of, never_granted, why_held
from gracekit.listings.store_view import StoreView
from gracekit.membership import LOOK_S, Membership
from gracekit.phase import Phase
from gracekit.process import Point, Process
from gracekit.rpc.argument_paths import need_resource_id
from gracekit.rpc.failures import words_of
from gracekit.runs.members import LEASE_MEMBERS, Members
from gracekit.runs.own import OwnSeat
from gracekit.runs.why import why
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.location import StoreLocation
from gracekit.telemetry.telemetry import Telemetry
from gracekit.version import VERSION

OnLost = Callable[["HeldLease"], Any]

SETTLE_S: Final = 10.0
MOST_LISTED: Final = 1000


class HeldLease:
    """A lease that is held.

    Attributes:
        resource: (kind, id).
        token: The fencing token; send it with each change to a backend that can compare tokens.
        lost: Set when it is lost: change nothing more.
        why_lost: Why, in a sentence; empty while it is held.
    """

    def __init__(self, guard: Guard, hold: str, on_lost: OnLost | None, settle_s: float) -> None:
        self.resource: Final = guard.resource
        self.token: Final = guard.token
        self.lost: Final = asyncio.Event()
        self.why_lost = ""
        self.guard: Final = guard
        self.hold: Final = hold
        self.settle_s: Final = settle_s
        self.on_lost: Final = on_lost


class LeaseHolds:
    """The leases that one run holds for people.

    Args:
        arm: Called before a lease is taken.
    """

    def __init__(
        self,
        rows: DeclaredLeases,
        telemetry: Telemetry,
        clock: Clock,
        *,
        run_id: str,
        arm: Callable[[], None],
    ) -> None:
        self.rows: Final = rows
        self.run_id: Final = run_id
        self._arm = arm
        self._taking = 0
        self._telemetry = telemetry
        self._clock = clock
        self._held: dict[Resource, HeldLease] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    async def take(
        self, resource: Resource, on_lost: OnLost | None, settle_s: float
    ) -> HeldLease | None:
        """Take it; None if it is held. If cancelled, what was taken is given back."""
        taking = background.run_beside(self._calls, self._take(resource, on_lost, settle_s))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.shield(background.run_beside(self._calls, self._give_up(taking)))
            raise

    @property
    def may_act(self) -> bool:
        """Whether a lease is held, or may be soon."""
        return bool(self._held or self._taking)

    async def _take(
        self, resource: Resource, on_lost: OnLost | None, settle_s: float
    ) -> HeldLease | None:
        hold = self._clock.new_id()
        self._taking += 1
        try:
            self._arm()
            guard = await self.rows.take(resource, hold, self.run_id, settle_s=settle_s)
            if guard is None:
                return None
            held = self._held[resource] = HeldLease(guard, hold, on_lost, settle_s)
            return held
        finally:
            self._taking -= 1

    async def _give_up(self, taking: asyncio.Task[HeldLease | None]) -> None:
        """Give back what *taking* takes, for a caller that has left."""
        await asyncio.wait({taking})
        if not taking.cancelled() and not taking.exception() and (held := taking.result()):
            await self.release(held)

    async def release(self, held: HeldLease) -> None:
        """Give it back: at once, or after its settle time if it was lost."""
        self._held.pop(held.resource, None)
        await asyncio.shield(background.run_beside(self._calls, self._give_back(held)))

    async def _give_back(self, held: HeldLease) -> None:
        settle_s = held.settle_s if held.lost.is_set() else 0.0
        for pause_s in backoff.OUTCOME.pauses(self._clock):
            try:
                await self.rows.give_back(held.guard, held.hold, self.run_id, settle_s=settle_s)
            except (StoreFinalError, StoreClosedError):
                return  # others see that this run is dead
            except StoreError:
                await asyncio.sleep(pause_s)
            else:
                return

    def cancel(self) -> bool:
        """All holds are lost; returns whether a block still goes on."""
        for held in self._held.values():
            self._lose(held, "its member could not show that it lives")
        return bool(self._held)

    async def look_for_orders(self) -> None:
        """Lose what an operator forces."""
        if not self._held:
            return
        with contextlib.suppress(StoreError):
            for resource, why in (await self.rows.forced(self.run_id)).items():
                if (held := self._held.get(resource)) is not None:
                    self._lose(held, why)

    def _lose(self, held: HeldLease, why: str) -> None:
        if held.lost.is_set():
            return
        held.why_lost = why
        held.lost.set()
        self._telemetry.emit("lease.lost", resource=held.resource, reason=why)
        if held.on_lost is not None:
            background.run_beside(self._calls, self._tell(held, held.on_lost))

    async def _tell(self, held: HeldLease, on_lost: OnLost) -> None:
        try:
            result = on_lost(held)
            if inspect.isawaitable(result):
                await result
        except Exception as error:  # noqa: BLE001 - the application's
            self._telemetry.emit("lease.on_lost_failed", error=words_of(error))


class Leases:
    """Leases in a store: create, look at, hold them.

    `async with Leases(url, host="node-1") as leases` is a member of its own; in a service it is
    `runtime.leases`.

    Args:
        url: URL of the store; None for the settings.
        host: Name of this host; None for the settings.
        instance: Name of this process among those of its host that hold leases; None for the first
            free one.
        settings: Used as they are, but for *url*, *host* and *instance*; None to read the
            environment.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        host: str | None = None,
        instance: str | None = None,
        settings: Settings | None = None,
        process: Process | None = None,
        clock: Clock | None = None,
        engine: Engine | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        flags = {"store_url": url, "host": host, "instance": instance}
        self._settings = settings or load(flags, os.environ)
        self._process, self._clock = process or Process(), clock or Clock()
        self._telemetry = telemetry or Telemetry()
        self._location = StoreLocation(self._settings)
        self._engine = engine or self._location.engine(self._process)
        self._seat = OwnSeat(
            self._engine,
            self._location,
            self._process,
            self._clock,
            self._telemetry,
            self._settings,
            service=LEASE_MEMBERS,
        )
        self._works = list[Background]()
        self._members: Members
        self._holds: LeaseHolds
        self._view: StoreView

    @classmethod
    def within(
        cls,
        engine: Engine,
        seat: OwnSeat,
        members: Members,
        view: StoreView,
        telemetry: Telemetry,
        clock: Clock,
    ) -> Self:
        """The leases of a service's run; `keep` must be at work while it lives."""
        self = cls.__new__(cls)
        self._engine, self._seat, self._clock = engine, seat, clock
        self._telemetry = telemetry
        self._bind(members, view)
        return self

    def _bind(self, members: Members, view: StoreView) -> None:
        self._members, self._view = members, view
        rows = DeclaredLeases(self._engine, self._clock)
        heart, run_id = self._seat.heart, members.run_id
        arm = (lambda: None) if heart is None else heart.arm_again
        self._holds = LeaseHolds(rows, self._telemetry, self._clock, run_id=run_id, arm=arm)

    # -- life ---------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Join as a member.

        Raises:
            ConfigError, AlreadyRunningError, DependencyError: as a service at its start.
        """
        background.need_loop()
        await self._seat.start()
        try:
            await self._join()
        except BaseException:
            await self._seat.stop()
            raise
        return self

    async def _join(self) -> None:
        seat, location = self._seat, self._location
        members = Members(
            self._engine,
            self._clock,
            self._process,
            run_id=seat.run_id,
            service=LEASE_MEMBERS,
            lock_directory=location.run_directory,
            heart=seat.heart,
        )
        is_shared, directory = location.is_shared, location.run_directory
        view = StoreView(self._engine, self._process, directory, self._clock, is_shared=is_shared)
        self._bind(members, view)
        await members.join(
            host=self._settings.host,
            seat=seat.taken,
            version=VERSION,
            topic="",
            ops_topic="",
            transport="",
            schema=location.schema,
        )
        self._works = [self._work(self.keep)]
        if seat.heart is not None:
            seat.heart.may_act = lambda: self._holds.may_act
            membership = Membership(
                seat.heart,
                self._engine,
                members,
                cancel=self._holds.cancel,
                on_left=lambda: None,
                phase=Phase(),
                process=self._process,
                telemetry=self._telemetry,
                clock=self._clock,
                ends_process=False,
            )
            self._engine.on_status(membership.follow_store)
            self._works += [self._work(membership.keep), self._work(membership.watch)]
        for work in self._works:
            await work.start()

    def _work(self, work: Work) -> Background:
        name = f"gracekit-{work.__qualname__}"
        return Background(work, name, telemetry=self._telemetry, clock=self._clock)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for work in self._works:
            await work.stop()
        if self._seat.heart is not None:
            self._seat.heart.leave()
        batch = Batch(Point.RELEASE_LEASE)
        self._holds.rows.add_free_all(batch, self._holds.run_id)
        with contextlib.suppress(StoreError):  # others see that this run has stopped beating
            await self._engine.commit(batch)
            await self._members.stop_record(0, {"left": True})
            self._seat.is_recorded = True
        await self._seat.stop()

    async def keep(self) -> None:
        """Each second, look for orders about what is held, until cancelled."""
        while True:
            await self._holds.look_for_orders()
            await self._clock.wait_tick(LOOK_S)

    def cancel(self) -> bool:
        """See `LeaseHolds.cancel`."""
        return self._holds.cancel()

    # -- what people ask ------------------------------------------------------------------

    async def create(self, kind: str, resource_id: str, *, payload: str | None = None) -> None:
        """Declare a lease.

        Args:
            kind: Such as `vm`.
            resource_id: Such as `vm-1`.
            payload: Up to 4096 bytes to read beside it.

        Raises:
            LeaseExists: it is declared.
            InvalidArgumentsError: an argument cannot be that.
            StoreUnreachableError: nothing was changed; try again.
        """
        await self._holds.rows.create(_resource(kind, resource_id), payload)

    async def delete(self, kind: str, resource_id: str) -> None:
        """Remove a lease that nobody holds. Made again, it goes on with a higher token.

        Raises:
            NoSuchLease: it is not declared.
            LeaseHeld: it is held.
        """
        await self._holds.rows.delete(_resource(kind, resource_id))

    async def force(self, kind: str, resource_id: str, token: int, *, reason: str) -> None:
        """Order the hold with that token to end; its `lost` is then set, within seconds.

        Raises:
            LeaseHeld: a task has the lease, or it has another token now.
            NoSuchLease: it is not declared, or free.
        """
        by, resource = self._seat.instance, _resource(kind, resource_id)
        await self._holds.rows.order_end(resource, token, by=by, reason=reason)

    async def status(self, kind: str, resource_id: str) -> LeaseInfo:
        """What is known of a lease, declared or not, without taking it.

        Raises:
            StoreUnreachableError: the store does not answer.
        """
        resource = _resource(kind, resource_id)
        facts = await declarations.look(self._engine, resource)
        return (await self._infos([facts or never_granted(resource)]))[0]

    async def info(self, kind: str, resource_id: str) -> LeaseInfo:
        """As `status`, of a declared lease.

        Raises:
            NoSuchLease: it is not declared.
        """
        return (await self._infos([await self._holds.rows.need(_resource(kind, resource_id))]))[0]

    async def list(
        self, *, after: tuple[str, str] = ("", ""), limit: int = MOST_LISTED
    ) -> Sequence[LeaseInfo]:
        """A page of the declared leases behind *after*, in the order of kind and id."""
        return await self._infos(await declarations.page(self._engine, after=after, limit=limit))

    async def hosts(self) -> Sequence[HostState]:
        """The members of the store, as `gracekit hosts` shows them."""
        heart = self._seat.heart
        return await list_hosts(self._view, {} if heart is None else heart.seen)

    async def _infos(self, found: Sequence[LeaseFacts]) -> Sequence[LeaseInfo]:
        heart = self._seat.heart
        return await infos_of(self._view, found, {} if heart is None else heart.seen)

    @contextlib.asynccontextmanager
    async def hold(
        self,
        kind: str,
        resource_id: str,
        *,
        wait: str | float | None = None,
        on_lost: OnLost | None = None,
        settle: str | float = SETTLE_S,
    ) -> AsyncIterator[HeldLease]:
        """Hold a declared lease for a block.

        Args:
            kind: Such as `vm`.
            resource_id: Such as `vm-1`.
            wait: So long for a lease that is held; None not to wait.
            on_lost: Called with the lease when it is lost; plain, or a coroutine function.
            settle: After an unclean end of this hold, nobody gets the lease for so long, because
                its last request to a backend may be under way.

        Raises:
            NoSuchLease: it is not declared.
            LeaseHeld: another has it; the message says who, and what is known of it.
            StoreError: the store does not answer, and has not for all of *wait*.
        """
        resource, settle_s = _resource(kind, resource_id), parse_duration(settle)
        until = self._clock.loop() + (0.0 if wait is None else parse_duration(wait))
        held = None
        while held is None:
            held = await self._try(resource, on_lost, settle_s, until)
        try:
            yield held
        finally:
            await self._holds.release(held)

    async def _try(
        self, resource: Resource, on_lost: OnLost | None, settle_s: float, until: float
    ) -> HeldLease | None:
        """Take it; None after a pause if it is held, or the store is away, before *until*.

        Raises:
            LeaseHeld, StoreError: that loop time is over.
        """
        held = None
        try:
            held = await self._holds.take(resource, on_lost, settle_s)
            if held is None:
                await self._adopt_dead()
        except (StoreFinalError, StoreClosedError):
            raise
        except StoreError:
            if self._clock.loop() >= until:
                raise
        else:
            if held is None and self._clock.loop() >= until:
                raise LeaseHeld(why_held(await self.status(*resource)))
        if held is None:
            await asyncio.sleep(max(0.0, min(backoff.HOLD_S, until - self._clock.loop())))
        return held

    async def _adopt_dead(self) -> None:
        """Free the leases of dead members that are no services: no recovery looks for them."""
        dead, _ = await self._members.survey()
        for run in dead:
            if run.service != LEASE_MEMBERS:
                continue
            evidence, batch = await self._members.evidence_on(run), Batch(Point.ADOPT)
            leases = RunLeases(self._engine, self._clock, run_id=self._members.run_id)
            leases.add_take_away(batch, run.run_id, acted_until=self._clock.wall())
            known = self._members.known_end(run)
            verdict = self._members.add_adoption(batch, known, evidence)
            with contextlib.suppress(ConflictError):  # another one was quicker
                await self._engine.commit(batch)
                self._members.forget(run)
                self._telemetry.emit(
                    "run.classified",
                    run=run.run_id,
                    instance=run.instance,
                    verdict=verdict.value,
                    why=why(known),
                )


def _resource(kind: str, resource_id: str) -> Resource:
    return need_resource_id(kind, "kind of lease"), need_resource_id(resource_id, kind)
