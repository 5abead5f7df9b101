"""Must-hold 2: 300 casts while the service is stopped or killed five times, and none is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.process.helpers import ServiceProcess, Site, until
from tests.process.judge import check_effects, check_fences, check_journal, rows
from tests.scale import scale

CASTS = 300
CASTERS = 2
PER_SECOND = 15.0  # of each caster: together about what the service can do
INTERRUPTIONS = scale(5, 20)
DRAIN_S = 0.3  # the long handlers outlive it
SETTINGS = {
    # Twice the kills: a row that is run again first each time may meet them all.
    "max_attempts": str(2 * INTERRUPTIONS),
    "drain_timeout": f"{DRAIN_S}s",
    "handover_grace": "0.3s",
    # A busy disk takes seconds for a commit at times; the kernel's alarm is for another test.
    "handover_flush": "3s",
    "exit_margin": "5s",
}

OF_RUN = """
SELECT coalesce(sum(state = 'running'), 0) AS running,
    coalesce(sum(state = 'accepted'), 0) AS accepted FROM task WHERE owner = ?"""


@dataclass
class Table:
    """What was in the journal at each interruption, for people."""

    title: str
    lines: list[str] = field(default_factory=list)
    repeated: int = 0

    def add(self, at: dict[str, int], after: dict[str, int], code: int) -> None:
        n = len(self.lines) + 1
        self.lines.append(
            f"{n:>2} {at['confirmed']:>9} {at['running']:>8} {at['accepted']:>9} {code:>5} "
            + " ".join(f"{after.get(s, 0):>11}" for s in AFTER)
        )

    def text(self, end: str) -> str:
        head = (
            f"{self.title}\n # confirmed  RUNNING  ACCEPTED  exit "
            + " ".join(f"{s:>11}" for s in AFTER)
            + "   (journal after the end)"
        )
        return "\n".join((head, *self.lines, f"repeated: {self.repeated}; {end}"))


AFTER = ("accepted", "running", "handed_over", "succeeded", "errored")


class Crowd:
    """One process, or siblings, on one store and one shared queue."""

    def __init__(self, site: Site, siblings: int) -> None:
        self.site = site
        self._slots = 3 // siblings  # together always three
        self.members = [self._start() for _ in range(siblings)]

    def _start(self) -> ServiceProcess:
        return self.site.start(max_running=self._slots, **SETTINGS)

    async def serving(self) -> None:
        for member in self.members:
            await member.serving()

    async def replace(self, member: ServiceProcess) -> None:
        self.members[self.members.index(member)] = fresh = self._start()
        await fresh.serving()

    def busy(self) -> tuple[ServiceProcess, dict[str, int]] | None:
        """A member that has both RUNNING and ACCEPTED rows now, and how many."""
        for member in random.sample(self.members, len(self.members)):
            counts = of_run(self.site, member.run["run_id"])
            if counts["running"] and counts["accepted"]:
                return member, counts
        return None


def of_run(site: Site, run_id: str) -> dict[str, int]:
    (row,) = site.rows(OF_RUN, run_id)
    return row


def by_state(site: Site) -> Counter[str]:
    rows = site.rows("SELECT state, count(*) AS n FROM task GROUP BY state")
    return Counter({row["state"]: row["n"] for row in rows})


async def interrupt(crowd: Crowd, how: signal.Signals, table: Table, casters: list[str]) -> None:
    """Stop or kill a member while it has RUNNING and ACCEPTED rows; else do it again."""
    while True:
        before = len(crowd.site.seen("done"))
        await crowd.site.effect("done", times=before + 8)
        member, at = await until(crowd.busy, "RUNNING and ACCEPTED rows of one run")
        run_id = member.run["run_id"]
        confirmed = sum(len(crowd.site.confirmed(prefix)) for prefix in casters)
        member.signal(how)
        code = await member.exit_code()
        if how is signal.SIGKILL:
            at = of_run(crowd.site, run_id)  # exact: nothing of it has written since
            if len(crowd.members) > 1:
                at = killed_with(crowd.site, run_id, at)
        after = by_state(crowd.site)
        await crowd.replace(member)
        if at["running"] and at["accepted"]:
            table.add(at | {"confirmed": confirmed}, after, code)
            assert code in ({-signal.SIGKILL} if how is signal.SIGKILL else {0, 75})
            return
        table.repeated += 1


def killed_with(site: Site, run_id: str, left: dict[str, int]) -> dict[str, int]:
    """What a killed run had, also when a sibling has adopted it before we looked."""
    adopted = site.rows(
        "SELECT coalesce(sum(detail LIKE 'running %'), 0) AS running, "
        "coalesce(sum(detail LIKE 'accepted %'), 0) AS accepted "
        "FROM incident WHERE what = 'adopted' AND detail LIKE ?",
        f"% (run {run_id})",
    )
    return left if left["running"] or left["accepted"] else adopted[0]


def in_each_way(on_uvloop: tuple[signal.Signals, int]) -> pytest.MarkDecorator:
    """Stopped and killed, by one process and by three; and one of these ways on uvloop too."""
    ways = [(how, n, "asyncio") for how in (signal.SIGTERM, signal.SIGKILL) for n in (1, 3)]
    return pytest.mark.parametrize(
        ("how", "siblings", "loop"),
        [*ways, (*on_uvloop, "uvloop")],
        ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value),
    )


@pytest.mark.timeout(scale(180, 1800))
@in_each_way(on_uvloop=(signal.SIGKILL, 1))
async def test_every_cast_takes_effect_or_is_errored(
    site: Site, how: signal.Signals, siblings: int, loop: str
) -> None:
    """Of 300 casts or more by two clients while the service is stopped or killed five times, each
    `retry` and `probe` one takes effect, no `error` one is started twice, and the journal counts
    them all.
    """
    site.settings["loop"] = loop
    await check_custody(site, how, siblings)


async def check_custody(site: Site, how: signal.Signals, siblings: int) -> None:
    """Cast, interrupt and judge, on whatever transport the site has."""
    how_many = scale(CASTS, CASTS * 4)
    table = Table(f"{how.name} x {INTERRUPTIONS}, {siblings} process(es), {how_many} casts")
    crowd = Crowd(site, siblings)
    await crowd.serving()
    names = [f"client{n}" for n in range(CASTERS)]
    # On a busy machine a process may take so long to start that its siblings do all 300 meanwhile.
    enough = site.root / "enough"
    each = how_many // CASTERS
    casters = [site.caster(one, each, per_second=PER_SECOND, enough=enough) for one in names]

    for _ in range(INTERRUPTIONS):
        await interrupt(crowd, how, table, names)
    enough.touch()
    await until(lambda: all(c.poll() is not None for c in casters), "the clients", 120)
    ids = [one for name in names for one in site.confirmed(name)]
    await until(lambda: not site.transient() and len(rows(site)) >= len(ids), "the end", 120)
    codes = await asyncio.gather(*(member.stop() for member in crowd.members))

    end = dict(by_state(site))
    report = table.text(f"at the end {end}, casts confirmed {len(ids)}")
    (site.root / "counts.txt").write_text(report + "\n")
    print(f"\n{report}")  # noqa: T201 - for `pytest -s`
    assert [caster.returncode for caster in casters] == [0] * CASTERS
    assert len(set(ids)) == len(ids) >= how_many
    assert codes == [0] * siblings
    check_journal(site, set(ids))
    check_effects(site, set(ids))
    check_fences(site)
