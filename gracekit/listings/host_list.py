"""The hosts of a store: the newest run of each instance, and whether others may act in its place.

A run of another host is judged by its beats, of which the caller has seen some: a running service
sees them all the time, a command looks for a few seconds. No age of a beat says that a run is dead.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from gracekit.clock import age_s
from gracekit.life import Alive, Liveness
from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import StoreView, gone_at
from gracekit.runs import pages
from gracekit.runs.members import BACK_WITHIN_S
from gracekit.runs.run import Run
from gracekit.runs.runs_sql import BEATS
from gracekit.runs.watch import BeatWatch, SeenBeat

HostWord = Literal["LIVE", "FAIL", "DEAD", "LEFT", "UNKNOWN"]

DEAD_SHOWN_S: Final = 86400.0
MOST_GONE: Final = 1000
"""Of so many instances that are gone, at most, the last run is shown."""
LOOK_S: Final = 0.25
"""Seconds between two looks at the beats."""
BEATS_IN_FAIL: Final = 4.0
"""By the presets, so many beats or more come in `fail_after`."""
SLACK_S: Final = 1.0
"""Seconds that a beat may be late, beyond that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The newest run of one instance of a service.

    Attributes:
        host: Name of its host.
        instance: Name of its instance.
        service: Topic of the service.
        run_id: Id of the run.
        generation: Counts the runs of the instance.
        state: LIVE: it may act. FAIL: its beats stay away, and it has cancelled its handlers. DEAD:
            others may act. LEFT: it has ended by itself. UNKNOWN: nothing is known.
        why: The reason of that, in a sentence.
        trust_left_s: Seconds until others may act if it does not beat again; None if no beat of it
            is known.
        tasks: How many tasks it owns that have not ended.
        leases: How many leases it holds.
        draining: Whether it was asked to stop.
        version: Of its gracekit.
        since: Wall time at which it began; if it is gone, at which it ended or was last seen.
    """

    host: str
    instance: str
    service: str
    run_id: str
    generation: int
    state: HostWord
    why: str
    trust_left_s: float | None
    tasks: int
    leases: int
    draining: bool
    version: str
    since: float

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return dataclasses.asdict(self)


async def list_hosts(view: StoreView, seen: Mapping[str, SeenBeat]) -> list[HostState]:
    """The hosts, by name.

    Those that have left are shown for five minutes, dead ones for a day.

    Args:
        view: The store.
        seen: What was seen of the beats, by run.
    """
    now = view.clock.wall()
    gone = await pages.list_gone(view.engine, None, since=now - DEAD_SHOWN_S, limit=MOST_GONE)
    newest: dict[tuple[str, str], Run] = {}
    for run in sorted([*gone, *await view.not_adopted()], key=lambda run: run.generation):
        newest[run.service, run.instance] = run
    judged = await view.judge_all(newest.values())
    numbers, boot = await _count(view, [run.run_id for run, _ in judged]), view.clock.boot()
    found = [
        _state(run, life, seen.get(run.run_id), boot, numbers[run.run_id])
        for run, life in judged
        if run.run_id in numbers
    ]
    shown = [one for one in found if one.state != "LEFT" or age_s(now, one.since) < BACK_WITHIN_S]
    return sorted(shown, key=lambda one: (one.host, one.service, one.instance))


async def _count(view: StoreView, run_ids: list[str]) -> dict[str, dict[str, Any]]:
    """The version of each run, and what it owns."""
    marks = ", ".join("?" * len(run_ids)) or "''"
    rows = await view.engine.query(sql.OF_RUNS.format(marks=marks), *run_ids)
    names = ("version", "tasks", "leases")
    return {str(i): dict(zip(names, row, strict=True)) for i, *row in rows}


def _state(
    run: Run, life: Liveness, seen: SeenBeat | None, now: float, numbers: dict[str, Any]
) -> HostState:
    state, why = judge_host(run, life, seen, now)
    left_s = None
    if seen is not None and seen.dead_s is not None and state in {"LIVE", "FAIL"}:
        left_s = round(max(0.0, seen.dead_s - (now - seen.since)), 1)
    return HostState(
        host=run.host,
        instance=run.instance,
        service=run.service,
        run_id=run.run_id,
        generation=run.generation,
        state=state,
        why=why,
        trust_left_s=left_s,
        draining=run.stop_at is not None and run.ended_at is None,
        since=gone_at(run) if state in {"DEAD", "LEFT"} else run.started_at,
        **numbers,
    )


def judge_host(run: Run, life: Liveness, seen: SeenBeat | None, now: float) -> tuple[HostWord, str]:
    """The state of *run*, and why: a proof counts first, and then its beats.

    Args:
        run: Its row.
        life: What is proven of it.
        seen: What was seen of its beats.
        now: CLOCK_BOOTTIME.
    """
    if life.is_alive:
        return "LIVE", life.reason
    if life.is_dead:
        has_left = run.ended_at is not None and run.gone_by is None
        return ("LEFT" if has_left else "DEAD"), life.reason
    if seen is None or seen.fail_s is None:
        return "UNKNOWN", life.reason
    quiet_s = now - seen.since
    if quiet_s >= seen.fail_s:
        return "FAIL", f"no beat for {quiet_s:.0f} s"
    if seen.has_changed:
        return "LIVE", "it beats"
    return "UNKNOWN", f"no beat was seen in {quiet_s:.0f} s"


# -- the looks of a command ---------------------------------------------------------------


async def look_at_beats(view: StoreView, watch: BeatWatch) -> Mapping[str, int]:
    """One look of *watch*; returns what `BeatWatch.note` returns."""
    asked_at = view.clock.boot()
    rows = await view.engine.query(BEATS)
    return watch.note(rows, asked_at=asked_at, answered_at=view.clock.boot())


async def watch_beats(view: StoreView) -> Mapping[str, SeenBeat]:
    """Look until each run of which nothing is proven was seen to beat.

    For a little longer than the slowest of them needs for one beat, at most.
    """
    judged = await view.judge_all(await view.not_adopted())
    doubtful = {run.run_id for run, life in judged if life.answer is Alive.NOT_PROVEN}
    watch, began_at = BeatWatch(), view.clock.boot()
    while True:
        await look_at_beats(view, watch)
        unseen = (one for i, one in watch.seen.items() if i in doubtful and not one.has_changed)
        patience_s = [one.fail_s / BEATS_IN_FAIL + SLACK_S for one in unseen if one.fail_s]
        if view.clock.boot() - began_at >= max(patience_s, default=0.0):
            return watch.seen
        await asyncio.sleep(LOOK_S)
