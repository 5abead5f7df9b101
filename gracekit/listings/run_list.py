"""The status of a store: the reports of living runs, and the records of ended ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit.clock import age_s
from gracekit.life import Alive, Liveness
from gracekit.listings.parked_list import (
    PendingStatus,
    UnsentNotifications,
    count_parked,
    count_unsent,
)
from gracekit.listings.resources import ResourceStatus, list_pauses, list_resources
from gracekit.listings.store_view import (
    NO_REPORT,
    Accounts,
    Reports,
    RunAnswer,
    RunReport,
    StoreView,
    UnfinishedCounts,
    ended,
    gone_at,
    is_named,
    seen_to_end_at,
    verdict_of,
)
from gracekit.phase import ServiceState
from gracekit.runs import pages
from gracekit.runs.run import Run, run_as_json
from gracekit.runs.why import why
from gracekit.runs.wishes import Wish, list_wishes

LAST_EXITS: Final = 5
GONE_SHOWN: Final = 50
"""By default so many of the instances are shown that ended lately and left nothing."""
SHOW_GONE_S: Final = 3600.0
"""Seconds for which an instance without a process is shown; longer if it has unfinished tasks."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One listed run.

    Attributes:
        judgement: Whether it is alive, and the evidence.
        reports: Its report, or why there is none; None if it is not proven alive.
        unfinished: The unfinished tasks that it owns in the store, by state.
        holds: Its open holds, as `name key`; a drain waits for them.
        wish: That its instance stays down; None if it may be up.
    """

    run: Run
    judgement: Liveness
    reports: RunReport | None
    unfinished: UnfinishedCounts
    holds: Sequence[str] = ()
    wish: Wish | None = None

    @property
    def oper(self) -> str:
        """What is seen of it: R runs, D drains, S stopped by its user from inside and not taken
        over yet, F failed, - anything else.
        """
        if self.judgement.is_alive:
            return "D" if self.phase == ServiceState.DRAINING.value else "R"
        if not self.judgement.is_dead:
            return "-"
        left = verdict_of(self.run).left
        if self.run.adopted_at is None and why(ended(self.run)) == "user_stop":
            return "S"
        return "F" if left in {"cut_off", "failed"} else "-"

    @property
    def phase(self) -> str:
        """As it reports it; without an answer, as last recorded."""
        return self.run.phase if self.answer is None else str(self.answer.get("phase"))

    @property
    def answer(self) -> RunAnswer | None:
        """Its status; None without an answer."""
        return None if self.reports is None else self.reports.answer

    @property
    def stop(self) -> Mapping[str, Any] | None:
        """Source, sender and reason of its stop, as it reports them; without that, as recorded."""
        if self.answer is not None and "stop" in self.answer:
            reported: Mapping[str, Any] | None = self.answer["stop"]
            return reported
        run = self.run
        if run.stop_source is None:
            return None
        return {"source": run.stop_source, "by": run.stop_by, "reason": run.stop_reason}

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        ended = exit_as_json(self.run) if self.judgement.is_dead else run_as_json(self.run)
        return ended | {
            "alive": self.judgement.is_alive,
            "life": self.judgement.answer.value,
            "life_reason": self.judgement.reason,
            "answers": self.answer is not None,
            "why_not": (self.reports and (self.reports.why or self.reports.brief)) or None,
            "status": self.answer,
            "unfinished": dict(self.unfinished),
            "holds": list(self.holds),
            "admin": "up" if self.wish is None else "down",
            "wish": None if self.wish is None else self.wish.as_json(),
            "oper": self.oper,
            "reconcile_pending": bool(self.judgement.is_dead and self.unfinished),
        }


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The data of `gracekit status`.

    Attributes:
        entries: Living runs, then those neither proven alive nor dead, then recent dead ones and
            those with unfinished tasks.
        more: Whether more instances ended lately than the limit.
        exits: The last runs that ended, newest first.
        ownerless: Numbers of transient rows without an owner, by state; without parked tasks, and
            without those that may not begin yet.
        not_due: The number of those, and the wall time at which the next one may; None for none.
        accounts: From the last count; None if the first count has not ended yet.
        resources: The resources that wait to be settled, and the last passes.
        pauses: Services whose resources are not looked at unasked, and until when.
        pending: The parked tasks of each service that has some.
        notifications: The notifications that are not sent yet.
    """

    store: str
    entries: Sequence[RunStatus]
    more: bool
    exits: Sequence[Run]
    ownerless: UnfinishedCounts
    not_due: tuple[int, float] | None
    accounts: Accounts | None
    resources: Sequence[ResourceStatus]
    pauses: Sequence[Mapping[str, Any]]
    pending: Sequence[PendingStatus]
    notifications: UnsentNotifications

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "store": self.store,
            "runs": [entry.as_json() for entry in self.entries],
            "more": self.more,
            "last_exits": [exit_as_json(run) for run in self.exits],
            "ownerless": dict(self.ownerless),
            "not_due": self.not_due and dict(zip(("tasks", "next_at"), self.not_due, strict=True)),
            "accounts": self.accounts and self.accounts.as_json(),
            "resources": msgspec.to_builtins(self.resources),
            "pauses": list(self.pauses),
            "pending": msgspec.to_builtins(self.pending),
            "notifications": msgspec.to_builtins(self.notifications),
        }


async def look(
    view: StoreView,
    reports: Reports,
    name: str | None = None,
    *,
    store: str,
    accounts: Accounts | None,
    limit: int = GONE_SHOWN,
    exits: int = LAST_EXITS,
    unheard: RunReport = NO_REPORT,
) -> StatusReport:
    """Read the status of the store, and join it with the reports of its runs.

    Args:
        view: The store.
        reports: Reports of living runs. They must be collected before this call reads the store,
            so that a run that ends in between is shown as ended.
        name: INSTANCE or SERVICE@INSTANCE; None for all runs.
        store: The store's name.
        accounts: The accounts of the store, passed in because counting them may take long.
        limit: How many instances to show at most, the last to end, that ended lately and left
            nothing. All others are always shown.
        exits: How many of the last ends to show at most.
        unheard: Used as the report of living runs that are not in *reports*.
    """
    not_adopted = await view.not_adopted(name)
    unfinished, holds = await view.unfinished(), await view.open_holds()
    wishes = await list_wishes(view.engine)
    owners = unfinished.keys()
    known = await view.judge_all(await _with_adopted(view, name, not_adopted, owners, limit))
    runs, judged = [run for run, _ in known], {run.run_id: life for run, life in known}
    shown = _shown(runs, judged, owners, view.clock.wall())
    beyond = _beyond([run for run in shown if judged[run.run_id].is_dead], owners, limit)
    open_ids = {run.run_id for run in not_adopted}
    dead = [run for run, life in known if life.is_dead and run.run_id in open_ids]
    entries = [
        RunStatus(
            run=run,
            judgement=judged[run.run_id],
            reports=reports.get(run.run_id, unheard) if judged[run.run_id].is_alive else None,
            unfinished=unfinished.get(run.run_id, {}),
            holds=holds.get(run.run_id, ()),
            wish=wishes.get((run.service, run.instance)),
        )
        for run in shown
        if run.run_id not in beyond
    ]
    return StatusReport(
        store=store,
        entries=entries,
        more=bool(beyond),
        exits=await view.last_ended(dead, name, limit=exits),
        ownerless=unfinished.get(None, {}),
        not_due=await view.not_due(),
        accounts=accounts,
        resources=await list_resources(view.engine),
        pauses=await list_pauses(view.engine, view.clock.wall()),
        pending=await count_parked(view),
        notifications=await count_unsent(view),
    )


async def list_exits(
    view: StoreView, name: str | None = None, *, limit: int = LAST_EXITS
) -> list[Run]:
    """The last runs that ended, newest first; of one name, or of all."""
    judged = await view.judge_all(await view.not_adopted(name))
    dead = [run for run, life in judged if life.is_dead]
    return await view.last_ended(dead, name, limit=limit)


async def _with_adopted(
    view: StoreView,
    name: str | None,
    not_adopted: Sequence[Run],
    owners: Collection[str | None],
    limit: int,
) -> list[Run]:
    """Those runs, adopted ones that own tasks, and the last to end of the others; newest first."""
    found = {run.run_id: run for run in not_adopted}
    # Each of those fills one instance again at most, so that more than the limit are left to show.
    some, since = limit + 1 + len(found), view.clock.wall() - SHOW_GONE_S
    gone = await pages.list_gone(view.engine, name, since=since, limit=some)
    found |= {run.run_id: run for run in gone}
    missing = {owner for owner in owners if owner is not None and owner not in found}
    owning = await view.runs_of(missing)
    found |= {i: run for i, run in owning.items() if name is None or is_named(run, name)}
    return sorted(found.values(), key=lambda run: (run.started_at, run.generation), reverse=True)


def _beyond(dead: Sequence[Run], owners: Collection[str | None], limit: int) -> set[str]:
    """Ids of the *dead* runs that *limit* leaves out: those that ended first and own no task."""
    without = [run for run in dead if run.run_id not in owners]
    return {run.run_id for run in sorted(without, key=seen_to_end_at, reverse=True)[limit:]}


def exit_as_json(run: Run) -> dict[str, Any]:
    """Plain data of a run that has ended."""
    verdict = verdict_of(run)
    return run_as_json(run) | {
        "verdict": verdict.value,
        "left": verdict.left,
        "why": why(ended(run)),
    }


def _shown(
    runs: Sequence[Run], judged: Mapping[str, Liveness], owners: Collection[str | None], now: float
) -> list[Run]:
    """Living runs, then doubtful ones, by name; then dead ones that left rows or died recently."""
    by_name = sorted(runs, key=lambda run: (run.instance, run.service))
    living = [run for run in by_name if judged[run.run_id].is_alive]
    doubtful = [run for run in by_name if judged[run.run_id].answer is Alive.NOT_PROVEN]
    filled = {(run.service, run.instance) for run in living}
    gone = []
    for run in runs:
        if not judged[run.run_id].is_dead:
            continue
        instance = (run.service, run.instance)
        lately = age_s(now, gone_at(run)) < SHOW_GONE_S
        if run.run_id in owners or (instance not in filled and lately):
            gone.append(run)
        filled.add(instance)
    return [*living, *doubtful, *gone]
