"""`gracekit status`: who serves, who is gone, and whether the accounts balance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from gracekit.cli.exits import HEADERS, run_row
from gracekit.cli.main import UNREACHABLE
from gracekit.cli.options import CommonOptions, common, limit_option
from gracekit.cli.reach import ControlClient
from gracekit.cli.records import StoreRecords, balance, doubt, since_end
from gracekit.cli.text import LONGEST_WHY, counts, json_text, paint, safe, table
from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.life import Alive
from gracekit.listings.parked_list import PendingStatus, UnsentNotifications, deadline_words, rough
from gracekit.listings.resources import ResourceStatus
from gracekit.listings.run_list import GONE_SHOWN, RunStatus, StatusReport, look
from gracekit.listings.store_view import RunAnswer, verdict_of
from gracekit.phase import ServiceState

NAMED_HOLDS: Final = 5
_ON_ITS_WAY: Final = (ServiceState.DRAINING.value, ServiceState.QUIET.value)
_HEADERS: Final = (
    "INSTANCE", "PHASE", "UP", "IN-FLIGHT", "OPS", "LONGEST", "DRAIN", "ADMIN", "SRC", "OPER",
)  # fmt: skip


@click.command()
@limit_option(GONE_SHOWN, "At most so many instances that ended within an hour and left no task.")
@common
def status(options: CommonOptions, /, *, limit: int) -> None:
    """Show the runs of a store, and the accounts of its tasks.

    Asks each living process, for 2 seconds at most. For all others it reads the
    store: which runs there were, how they ended, and what the next start has to
    settle. `<10s` means that a run left no record of its end: it was last seen
    at that time.

    Exit status: 0; with --instance, 4 if no run of that name is proven alive.
    """
    with StoreRecords(options.settings) as records:
        report = asyncio.run(_look(records, options.instance, limit))
    click.echo(json_text(report.as_json()) if options.as_json else _text(report, limit))
    if options.instance and not any(entry.judgement.is_alive for entry in report.entries):
        click.get_current_context().exit(UNREACHABLE)


async def _look(records: StoreRecords, name: str | None, limit: int) -> StatusReport:
    reports = await ControlClient(records).hear_all(records, name)
    await records.need(name)
    accounts = await records.accounts()
    store = str(records.location.name)
    return await look(records, reports, name, store=store, accounts=accounts, limit=limit)


def _text(report: StatusReport, limit: int) -> str:
    services = len({entry.run.service for entry in report.entries}) > 1
    rows = [_row(entry, services=services) for entry in report.entries]
    parts = [_coloured(table(_HEADERS, rows))] if rows else ["no run is on record"]
    if report.more:
        parts[0] += f"\nmore than {limit} ended within an hour: a larger --limit shows them"
    parts += [
        doubt(entry.run, entry.judgement)
        for entry in report.entries
        if entry.judgement.answer is Alive.NOT_PROVEN
    ]
    parts += [line for entry in report.entries for line in _ordered(entry)]
    parts += [paint(line, "yellow") for entry in report.entries for line in _wished(entry)]
    parts += [paint(line, "yellow") for entry in report.entries for line in _held(entry)]
    parts += [paint(line, "red") for entry in report.entries for line in _not_ready(entry)]
    parts += [paint(line, "red") for entry in report.entries for line in _not_heard(entry)]
    if report.ownerless:
        left = counts(report.ownerless.items())
        parts.append(f"without owner: {left}; {_who_settles(report.entries)}")
    if report.not_due is not None:
        number, next_at = report.not_due
        when = duration(max(0.0, next_at - time.time()))
        parts.append(f"not due yet: {number} accepted, the next in {when}")
    parts += _queues(report.entries)
    parts += [_pending(one, report.pending) for one in report.pending]
    parts += [_notifications(report.notifications)] if report.notifications.unsent else []
    parts += [_resources(one, report.resources) for one in report.resources]
    now = time.time()
    parts += [paint(_paused(one, now), "yellow") for one in report.pauses]
    parts += [
        paint(safe(f"{seen}; {remedy}", longest=LONGEST_WHY), "red")
        for one in report.resources
        for seen, remedy in one.troubles(now)
    ]
    if report.exits:
        parts.append("last exits\n" + table(HEADERS, list(map(run_row, report.exits))))
    if report.accounts is not None:
        accounts = balance(report.accounts)
        parts.append(accounts if report.accounts.off_by == 0 else paint(accounts, "red"))
    return "\n\n".join(parts)


def _resources(one: ResourceStatus, beside: Sequence[ResourceStatus]) -> str:
    """`resources: 3 waiting (oldest share:sh-12, 2h11m), last pass 4m ago: 17 settled`."""
    now = time.time()
    of = f" of {one.service} on {one.host}" if len(beside) > 1 else ""
    words = f"resources{of}: {one.waiting} waiting"
    if one.oldest is not None:
        named = f"{safe(one.oldest['kind'])}:{safe(one.oldest['id'])}"
        words += f" (oldest {named}, {duration(age_s(now, one.oldest['since']))})"
    if not one.settles:
        return (
            f"{words}, and none is settled unasked, as startup_reconciliation_enabled is false: "
            "`gracekit reconcile` settles them"
        )
    if one.last_pass is None:
        return f"{words}, no pass has finished yet"
    ago = duration(age_s(now, one.last_pass["finished_at"]))
    did = counts((name, int(one.last_pass[name])) for name in ("settled", "failed"))
    return f"{words}, last pass {ago} ago: {did or '0 settled'}"


def _paused(one: Mapping[str, Any], now: float) -> str:
    """`resources of compute: no pass is begun unasked for 58m, said uid 0: storage is moved`."""
    left, reason = duration(max(0.0, one["until"] - now)), one["reason"]
    words = f"resources of {one['service']}: no pass is begun unasked for {left}, said {one['by']}"
    return safe(words + (f": {reason}" if reason else ""), longest=LONGEST_WHY)


def _queues(entries: Sequence[RunStatus]) -> list[str]:
    """`queues: 5 waiting in thumbs (oldest 3s)`, of each topic as the run that sees most counts."""
    found: dict[str, tuple[int, float]] = {}
    for entry in entries:
        for one in ((entry.answer or {}).get("queues") or {}).values():
            seen = one["waiting"], one["oldest_s"] or 0.0
            found[one["topic"]] = max(seen, found.get(one["topic"], seen))
    words = [
        f"{number} waiting in {safe(topic)}" + (f" (oldest {duration(age)})" if age else "")
        for topic, (number, age) in sorted(found.items())
        if number
    ]
    return [f"queues: {', '.join(words)}"] if words else []


def _pending(one: PendingStatus, beside: Sequence[PendingStatus]) -> str:
    """`pending: 3 parked (next deadline in 12m, 1 overdue)`."""
    of = f" of {safe(one.service)}" if len(beside) > 1 else ""
    times = []
    if one.next_deadline is not None:
        times.append(f"next deadline {deadline_words(one.next_deadline - time.time())}")
    times += [f"{one.overdue} overdue"] if one.overdue else []
    return f"pending{of}: {one.parked} parked ({', '.join(times)})"


def _notifications(unsent: UnsentNotifications) -> str:
    """`notifications: 5 not sent yet (oldest 4m)`."""
    oldest = rough(age_s(time.time(), unsent.oldest_at or 0.0))
    return f"notifications: {unsent.unsent} not sent yet (oldest {oldest})"


def _who_settles(entries: Sequence[RunStatus]) -> str:
    """What becomes of tasks without an owner."""
    if any(entry.answer and entry.answer.get("settles") is False for entry in entries):
        return (
            "started ones are not settled unasked, as startup_reconciliation_enabled is false: "
            "`gracekit reconcile` settles them"
        )
    return (
        "a living run of the service takes them, or the next; in `gracekit tasks` REASON says "
        "which of them wait, and for how long"
    )


def _ordered(entry: RunStatus) -> list[str]:
    """`api-1 drains: asked for by uid 0 (root)@vm: new kernel`, of a run that drains."""
    run, stop = entry.run, entry.stop
    if entry.phase != ServiceState.DRAINING.value or not entry.judgement.is_alive or not stop:
        return []
    who = "because of a fault" if stop["source"] == "error" else f"asked for by {safe(stop['by'])}"
    reason = f": {safe(stop['reason'], longest=LONGEST_WHY)}" if stop["reason"] else ""
    return [f"{run.instance} drains: {who}{reason}"]


def _wished(entry: RunStatus) -> list[str]:
    """What it means that its instance is to stay down, or was stopped from inside."""
    run, wish = entry.run, entry.wish
    if wish is None and entry.oper != "S":
        return []
    if wish is None:
        by = f"{safe(run.stop_by)}: {safe(run.stop_reason, longest=LONGEST_WHY)}"
        return [f"{run.instance} should be up, but was stopped from inside by {by}"]
    but = ", but it runs" if entry.judgement.is_alive else ""
    told = safe(wish, longest=LONGEST_WHY)
    return [f"{run.instance} is {told}{but}; `{safe(wish.undo)}` undoes that"]


def _held(entry: RunStatus) -> list[str]:
    """`api-1 waits for hold migration vm-1`, of a run that drains."""
    is_held = entry.phase == ServiceState.DRAINING.value and entry.holds
    return [f"{entry.run.instance} {waits_for(entry.holds)}"] if is_held else []


def waits_for(holds: Sequence[str]) -> str:
    """`waits for hold migration vm-1`."""
    return f"waits for {'hold' if len(holds) == 1 else 'holds'} {some_holds(holds, len(holds))}"


def some_holds(holds: Sequence[object], number: int) -> str:
    """`migration vm-1, migration vm-2 and 3 more`, of so many in all."""
    named = [safe(hold) for hold in holds[:NAMED_HOLDS]]
    more = number - len(named)
    return ", ".join(named) + (f" and {more} more" if named and more > 0 else "")


def _not_ready(entry: RunStatus) -> list[str]:
    why = not_ready(entry.answer or {})
    return [f"{entry.run.instance} is not ready: {why}"] if why else []


def _not_heard(entry: RunStatus) -> list[str]:
    why = entry.reports.why if entry.reports else ""
    return [f"{entry.run.instance}: {safe(why, longest=LONGEST_WHY)}"] if why else []


def not_ready(answer: RunAnswer) -> str:
    """Why a run that serves is not ready; empty if it is, or if its phase says it."""
    why = answer.get("not_ready") if answer.get("phase") == ServiceState.SERVING.value else None
    return safe(why) if why else ""


def _coloured(text: str) -> str:
    """Lines of runs that need a look stand out."""
    header, *lines = text.splitlines()
    marked = []
    for line in lines:
        words = line.split()
        is_gone, is_on_its_way = "gone" in words[1:2], words[1] in _ON_ITS_WAY
        is_doubtful = words[1:3] == ["not", "proven"]
        colour = "red" if is_gone or is_doubtful else "yellow" if is_on_its_way else None
        marked.append(paint(line, colour) if colour else line)  # type: ignore[arg-type]
    return "\n".join((header, *marked))


def _row(entry: RunStatus, *, services: bool) -> tuple[str, ...]:
    wish = ("up", "-") if entry.wish is None else ("down", entry.wish.source)
    return (*_cells(entry, services=services), *wish, entry.oper)


def _cells(entry: RunStatus, *, services: bool) -> tuple[str, ...]:
    run = entry.run
    name = f"{run.service}@{run.instance}" if services else run.instance
    if entry.judgement.is_dead:
        return _gone_row(entry, name)
    up = duration(age_s(time.time(), run.started_at))
    if not entry.judgement.is_alive:
        left = str(sum(entry.unfinished.values()))
        seen = duration(age_s(time.time(), run.beat_at))
        return (name, "not proven", "-", left, "-", "-", f"left alone, seen {seen} ago")
    if entry.answer is None:
        left = str(sum(entry.unfinished.values()))
        brief = entry.reports.brief if entry.reports else "-"
        return (name, f"{run.phase}?", up, left, "-", "-", brief)
    answer = entry.answer
    ops = answer.get("running_ops")
    return (
        name,
        safe(answer.get("phase")),
        up,
        safe(answer.get("in_flight")),
        f"{ops} running" if ops else "idle",
        longest(answer),
        drain_left(answer),
    )


def _gone_row(entry: RunStatus, name: str) -> tuple[str, ...]:
    gone = f"gone {since_end(entry.run)}"
    orphaned = sum(entry.unfinished.values())
    left = f"{orphaned} orphaned" if orphaned else "-"
    pending = "reconcile pending" if orphaned else "-"
    return (name, gone, "-", left, "-", verdict_of(entry.run).value, pending)


def longest(answer: RunAnswer) -> str:
    """`resize_vm vm:81 41s`: the running task that has run longest."""
    task = answer.get("longest")
    if not task:
        return "-"
    what = " ".join(safe(task[key]) for key in ("method", "resource") if task.get(key))
    return f"{what} {duration(task.get('age_s') or 0.0)}"


def forecast(answer: RunAnswer) -> str:
    """`expected finish 12s`, as the histories of the running methods say; empty if idle.

    Without a history of each of them there is no such time, and that is said.
    """
    if unknown := answer.get("expected_unknown"):
        return f"expected finish unknown: {unknown} of {answer.get('running')} without history"
    seconds = answer.get("expected_s")
    return "" if seconds is None else f"expected finish {duration(seconds)}"


def drain_left(answer: RunAnswer) -> str:
    """`18s left, 1 at risk`, or `-` outside a drain."""
    left = answer.get("drain_left_s")
    if left is None:
        return "-"
    risk = answer.get("at_risk")
    return f"{duration(left)} left" + (f", {risk} at risk" if risk else "")
