"""The application's records and its backend: what rules settle, and what drifts meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gracekit import Absent, Context, Found, ResourceKind, Service, Settled, Wait
from gracekit.errors import GracekitError
from gracekit.rpc.oslo_wire import decode_request
from gracekit.testing.loop import owner
from tests.played import Life
from tests.simulation.truth import Act, Violation

if TYPE_CHECKING:
    from tests.simulation.app import App
    from tests.simulation.ports import SimLife
    from tests.simulation.story import Story

VMS: Final = ("v1", "v2", "v3", "v4")
DISKS: Final = ("k1", "k2", "k3", "k4")
DRIFT_EVERY_S: Final = 5.0
STUCK_S: Final = 15.0
MAX_WAIT_S: Final = 40.0
# A delayed request has not begun to work on its resource.
OPEN: Final = (
    "state IN ('accepted', 'running', 'handed_over', 'pending') "
    "AND (due_at IS NULL OR attempts > 0)"
)


@dataclass
class Record:
    """A row of the application; its id is unique among all kinds."""

    kind: str
    id: str
    host: str
    status: str = "active"
    since: float | None = None
    token: int = 0


class Records:
    """The records of one story.

    Attributes:
        acted: How often records drifted, rules were called, and what came of it.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rng = random.Random(f"{story.seed} records")
        self._rows: dict[str, Record] = {}
        self._stood: dict[Life, dict[int, tuple[str, str]]] = {}
        self._rule_fences: dict[str, int] = defaultdict(int)
        self._asked: dict[tuple[str, int], str] = {}
        self.acted: Counter[str] = Counter()

    def fill(self, hosts: list[str]) -> None:
        """Have a record of each resource, on some host."""
        pick = self._rng.choice
        for kind, ids in (("vm", VMS), ("disk", DISKS)):
            self._rows |= {one: Record(kind, one, pick(hosts)) for one in ids}

    def unsettled(self) -> list[str]:
        """What is in a status that a rule ends."""
        kinds = {kind.name: kind for kind in self._story.app.svc.kinds}
        found = [
            f"record {row.id} of {row.host} is {row.status}"
            for row in self._rows.values()
            if row.status in kinds[row.kind].rules and row.status != "migrating"
        ]
        findings = self._story.machine.rows("SELECT name, owner, next_check FROM finding")
        return found + [f"finding {row}" for row in findings]

    # -- the application, and what happens behind its back --------------------------------

    def note_sent(self, vm: str, request_id: str) -> None:
        """A caller writes the status first, and sends then."""
        rng = random.Random(f"{self._story.seed} {request_id} record")
        if rng.random() < 0.6:
            self._put(self._rows[vm], "building", self._wall())

    def note_built(self, vm: str, fence: int | None) -> None:
        """A handler has ended well."""
        row = self._rows[vm]
        if row.status == "building" and (fence or 0) >= row.token:
            row.token = fence or 0
            self._put(row, "active", self._wall())

    async def drift(self) -> None:
        """Somebody edits records by hand, or a backend loses and changes things."""
        rng = self._rng
        while not self._story.truth.is_quiet:
            await asyncio.sleep(rng.expovariate(1 / DRIFT_EVERY_S))
            if self._story.truth.is_quiet:
                return
            row = self._rows[rng.choice(list(self._rows))]
            kinds = ["building", "building", "deleting", "rebooting", "active", "migrating"]
            since = rng.choice([None, self._wall(), self._wall() - 3600])
            self.acted["drift"] += 1
            self._put(row, rng.choice(kinds), since)

    def _put(self, row: Record, status: str, since: float | None) -> None:
        self._story.tell(f"record {row.id}: {row.status} > {status}")
        row.status, row.since = status, since

    def _wall(self) -> float:
        return self._story.machine.clock.wall()

    # -- its hooks ------------------------------------------------------------------------

    async def find(self, kind: str, after: str | None, limit: int) -> list[Found]:
        life = _life()
        await asyncio.sleep(self._rng.random() * 0.1)
        if self._is_odd(0.05):
            raise OSError("the database is away")
        rules = {one.name: one for one in self._story.app.svc.kinds}[kind].rules
        host = life.runtime.settings.host
        rows = [
            row
            for row in self._rows.values()
            if (row.kind, row.host) == (kind, host) and row.id > (after or "")
        ]
        founds = [row for row in rows if row.status in rules or row.status == "error"][:limit]
        return [Found(row.id, row.status, since=row.since, needs=_needs(row)) for row in founds]

    async def ask(self, ctx: Context, found: Found) -> Settled | Absent | Wait:
        """The probe."""
        act = self._begin(ctx, found)
        act.only_asks = True
        try:
            await asyncio.sleep(self._rng.choice([0.0, 0.2, 3.0]))
            if self._is_odd(0.1):
                self.acted["probe raised"] += 1
                raise self._rng.choice([OSError("the backend is away"), NotImplementedError()])
            if self._is_odd(0.03):
                await asyncio.sleep(40)
            if self._is_odd(0.1):
                return Wait(self._rng.random() * 10)
            self.acted["probe answered"] += 1
            return Settled("active") if self._rng.random() < 0.7 else Absent()
        finally:
            self._story.truth.acts.remove(act)

    async def delete(self, ctx: Context, found: Found) -> None:
        """Delete again."""
        act = self._begin(ctx, found)
        try:
            await asyncio.sleep(self._rng.choice([0.0, 0.2, 3.0]))
            self.acted["delete"] += 1
            if self._is_odd(0.1):
                raise OSError("the backend is away")
        finally:
            self._story.truth.acts.remove(act)

    async def write(self, ctx: Context, found: Found, status: str) -> Any:
        """Compare and set, of status and token."""
        life = _life()
        if life.process.lives and not self._story.is_fenced(life):
            self._story.judged(self._story.truth.check_may_begin, life, f"a write of {found.id}")
            self._story.judged(self._check_write, ctx, found)
        await asyncio.sleep(self._rng.choice([0.0, 0.1]))
        if self._is_odd(0.05):
            raise OSError("the database is away")
        row = self._rows[found.id]
        if row.status != found.status or (ctx.fence or 0) < row.token:
            self.acted["write refused"] += 1
            return False
        row.token = ctx.fence or 0
        self.acted["write"] += 1
        self._put(row, status, self._wall())
        if self._is_odd(0.03):
            raise OSError("the answer of the database is lost")
        return True

    def _is_odd(self, rate: float) -> bool:
        """Whether something goes wrong, at that rate until the quiet phase."""
        return self._rng.random() < rate and not self._story.truth.is_quiet

    # -- what must never be seen ------------------------------------------------------------

    def _begin(self, ctx: Context, found: Found) -> Act:
        life, truth = _life(), self._story.truth
        self._story.tell(f"{life.name} asks about {found.id} {found.status} fence {ctx.fence}")
        act = Act(f"rule on {found.id}", f"rule on {found.id}/", life, found.id, ctx.fence)
        if life.process.lives and not self._story.is_fenced(life):
            self._story.judged(self._check_begin, ctx, found, life)
        truth.acts.append(act)
        return act

    def _check_begin(self, ctx: Context, found: Found, life: SimLife) -> None:
        self._story.truth.check_may_begin(life, f"a rule on {found.id}")
        self._check_token(ctx, found)
        self._asked[found.id, ctx.fence or 0] = found.status
        for other in self._story.truth.acting():
            if other.vm == found.id:
                raise Violation(f"I7: a rule and {other.request_id} act on {found.id} at once")
        ledger = self._story.ledger
        granted = ledger.granted.get(f"{self._rows[found.id].kind}:{found.id}", 0)
        sql = f"SELECT * FROM task WHERE {OPEN} AND resource_id = ?"
        for row in self._story.machine.rows(sql, found.id):
            if ledger.born.get(f"{row['request_id']}/{row['recipient']}", 0) < granted:
                what = f"{row['request_id']} is {row['state']}"
                raise Violation(f"R1: {found.id} is judged while {what}")
        self._check_stood(found, life)

    def _check_token(self, ctx: Context, found: Found) -> None:
        """Tokens only rise; the write of a rule has that of its hook."""
        fences, fence = self._story.truth.fences, ctx.fence or 0
        if fence < fences[found.id] or fence == fences[found.id] != self._rule_fences[found.id]:
            raise Violation(f"I7: a rule on {found.id} has token {fence} after {fences[found.id]}")
        fences[found.id] = self._rule_fences[found.id] = fence

    def _check_write(self, ctx: Context, found: Found) -> None:
        self._check_token(ctx, found)
        asked = self._asked.get((found.id, ctx.fence or 0))
        if asked is not None and asked != found.status:
            raise Violation(f"R3: {found.id} was judged as {asked} and written over {found.status}")

    def note_pass(self, life: SimLife) -> None:
        """A pass begins: what stands in the queues of its host now is taken before it judges."""
        host, broker = life.runtime.settings.host, self._story.machine.broker
        stood: dict[int, tuple[str, str]] = {}
        for name in ("compute", f"compute.{host}", "compute-ops", f"compute-ops.{host}"):
            for stored in broker._queues[name].waiting if name in broker._queues else ():
                request_id = _request_of(stored.message.body)
                one = self._story.sent.get(request_id)
                if one is not None and "vm" in one.args and not stored.redelivered:
                    stood[stored.number] = (one.args["vm"], request_id)
        self._stood[life] = stood

    def _check_stood(self, found: Found, life: SimLife) -> None:
        stood = self._stood.get(life, {})
        if not any(vm == found.id for vm, _ in stood.values()):
            return
        there = {
            stored.number
            for entry in self._story.machine.broker._queues.values()
            for stored in entry.waiting
            if not stored.redelivered and not stored.is_expired()
        }
        for number, (vm, request_id) in stood.items():
            if vm == found.id and number in there:
                raise Violation(f"R2: {vm} is judged while {request_id} waits in a queue")


def _life() -> SimLife:
    life: Any = owner.get()
    assert isinstance(life, Life)
    return life  # type: ignore[return-value]


def _needs(row: Record) -> list[tuple[str, str]]:
    return [("vm", f"v{row.id[1:]}")] if row.kind == "disk" else []


def _request_of(body: bytes) -> str:
    try:
        return decode_request(body).request_id or ""
    except GracekitError:
        return ""


def declare_kinds(app: App, svc: Service) -> None:
    """Two kinds, one after the other, with a rule of each sort."""
    vm = svc.kind("vm", stuck_after=STUCK_S, max_wait=MAX_WAIT_S)
    disk = svc.kind("disk", after=vm, stuck_after=STUCK_S, max_wait=MAX_WAIT_S)
    for kind in (vm, disk):
        _declare(app, kind)


def _declare(app: App, kind: ResourceKind) -> None:
    @kind.find
    async def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        return await app.records.find(kind.name, after, limit)

    @kind.write
    async def write(ctx: Context, found: Found, status: str, facts: Mapping[str, object]) -> Any:
        return await app.records.write(ctx, found, status)

    @kind.probe("building", failed="error")
    async def probe(ctx: Context, found: Found) -> Settled | Absent | Wait:
        return await app.records.ask(ctx, found)

    @kind.delete("deleting", done="gone", failed="error")
    async def delete(ctx: Context, found: Found) -> None:
        await app.records.delete(ctx, found)

    kind.mark(rebooting="error")
    kind.leave("migrating", why="somebody else goes on with it")
