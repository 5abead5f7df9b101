"""`gracekit reconcile`: has a run settle resources in a transient status, and shows what it did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import click

from gracekit.cli.main import DETACHED, ERROR, tell
from gracekit.cli.options import (
    CommonOptions,
    common,
    living_instance_argument,
    need_duration,
    who,
    why_option,
)
from gracekit.cli.quiet import find
from gracekit.cli.reach import ControlClient
from gracekit.cli.records import StoreRecords, ending
from gracekit.cli.task_orders import OPERATOR, open_writing
from gracekit.cli.text import LONGEST_WHY, json_text, plural, safe, table
from gracekit.clock import age_s
from gracekit.config.values import duration, parse_duration
from gracekit.errors import DependencyError, GracekitError, RunEndedError
from gracekit.journal.findings_sql import PAUSE
from gracekit.journal.tasks_sql import COUNT, NOTE
from gracekit.listings.store_view import RunAnswer, label
from gracekit.process import Point
from gracekit.runs.members import LEASE_MEMBERS
from gracekit.runs.pages import list_services
from gracekit.runs.run import Run
from gracekit.store.batch import Batch

WAITING: Final = 3
"""Exit status where something is to be asked again, or the pass was cut short."""
LOOK_S: Final = 1.0
"""A run that has not answered for so long is looked for in the store."""
END_S: Final = 2.0
"""So long after its door was closed a run may need to write its stop record, or to be dead."""
TOLD_EVERY_S: Final = 5.0

_HEADERS: Final = ("KIND", "ID", "STATUS", "SINCE", "WOULD")
_TOLD: Final = ("settled", "failed", "waiting", "stale")
_UNTOUCHED: Final = ("left", "moved_on")
MOST_UNTOUCHED: Final = 20
"""Resources that the pass has not changed, and that are listed behind those that it has."""


@click.command()
@living_instance_argument
@click.option("--dry-run", is_flag=True, help="Only find, and say what would be done.")
@click.option("--kind", metavar="KIND", help="Settle resources of this kind alone.")
@click.option("--resource", metavar="KIND:ID", help="Settle this one alone.")
@click.option(
    "--pause",
    metavar="DURATION",
    callback=need_duration,
    help="Make no pass; let all runs of the service begin none unasked for so long. 0s ends that.",
)
@why_option
@common
def reconcile(
    options: CommonOptions,
    /,
    *,
    name: str | None,
    dry_run: bool,
    kind: str | None,
    resource: str | None,
    pause: str | None,
    reason: str,
) -> None:
    """Settle resources in a transient status that nobody works on, by the rules of the service.

    The run makes one pass now, as soon as it has taken the requests that wait in
    its queues. If GRACEKIT_STARTUP_RECONCILIATION_ENABLED is false, it settles the
    unfinished tasks of dead runs first. What is on record of kinds that are not
    declared is dropped. INSTANCE may be left out if only one run lives.

    Ctrl-C detaches, and the pass goes on.

    Exit status: the first of these that fits.

    \b
    4    no run lives or answers.
    130  detached by Ctrl-C.
    1    a resource got its failed status, or the resources of a kind could not
         be read.
    3    not everything is settled, which is one of these:
         - A rule could not settle its resource yet, or lost its lease. The
           service asks the rule again later.
         - With --resource: that resource was left, or its record took no write.
         - A drain, a quiet or the end of the run has cut the pass short.
         With --dry-run only the last one counts.
    0    done, also if resources were left, or there was none.
    """  # noqa: D301 - click keeps the lines of a paragraph that begins with this character
    if pause is not None:
        if dry_run or kind or resource:
            raise click.UsageError("--pause makes no pass: leave out the other options")
        asyncio.run(_pause(options, name, parse_duration(pause), reason))
        return
    if kind and resource:
        raise click.UsageError("give --kind or --resource, not both")
    asked: dict[str, Any] = {"dry_run": dry_run, "kind": kind, "resource": resource}
    asked |= {"reason": reason} if reason else {}
    _make(options, name, asked)


def _make(options: CommonOptions, name: str | None, asked: Mapping[str, Any]) -> None:
    """Make the pass, show what it has done, and exit with its status."""
    dry_run, resource = asked["dry_run"], asked["resource"]
    with StoreRecords(options.settings) as records:
        (run,) = asyncio.run(find(records, options, name, everyone=None))
        watch = _Watch(records, run, asked, as_json=options.as_json)
        try:
            report = asyncio.run(watch.make())
        except KeyboardInterrupt:
            tell(_detached(watch, dry_run=dry_run), prefix="\n")
            click.get_current_context().exit(DETACHED)
    if watch.has_ended:
        words = "nothing was changed" if dry_run else "the next start settles what is left"
        tell(f"{ending(watch.run)}. Its pass has ended with it: {words}", prefix="")
    if options.as_json:
        one = {"service": run.service, "instance": run.instance, "run_id": run.run_id}
        click.echo(json_text({**one, **report}))
    elif not watch.has_ended:
        if not watch.has_kinds:
            click.echo(f"{safe(run.service)} declares no kinds of resources")
        if watch.has_kinds or report["tasks"] or report["interrupted"] or report["results"]:
            click.echo(_foreseen(report) if dry_run else _ended(report, resource))
    click.get_current_context().exit(
        status_of(report, dry_run=dry_run, of_one=resource is not None)
    )


async def _pause(options: CommonOptions, name: str | None, for_s: float, reason: str) -> None:
    """Put a pause on record: passes that somebody asks for, and `ctx.settle`, go on."""
    with StoreRecords(options.settings) as records:
        known = await list_services(records.engine, name or options.instance)
        services = [one for one in known if one != LEASE_MEMBERS]
        if len(services) != 1:
            raise click.UsageError(
                f"the store has {', '.join(services) or 'no service'}: name an instance of the one"
            )
        service, batch = services[0], Batch(Point.FINDING)
        async with open_writing(options.settings) as engine:
            now = engine.wall()
            batch.add(PAUSE, service, now + for_s, who(), reason)
            batch.add(COUNT, "operator_pause", 1)
            detail = f"{who()}: for {duration(for_s)}{': ' * bool(reason)}{reason}"[:1000]
            batch.add(NOTE, now, OPERATOR, "operator_pause", service, None, detail)
            await engine.commit(batch)
    facts = {"service": service, "paused_s": for_s}
    words = f"{service} begins no pass unasked for {duration(for_s)}"
    words = words if for_s else f"{service} makes passes as ever"
    click.echo(json_text(facts) if options.as_json else safe(words))


class _Watch:
    """One pass that is watched.

    Args:
        as_json: Print nothing on the way.

    Attributes:
        run: As last read from the store.
        has_begun: Whether the run has said that the pass has begun.
        has_kinds: Whether its service declares kinds of resources.
        has_ended: Whether the run has ended before the end of its pass was seen.
    """

    def __init__(
        self, records: StoreRecords, run: Run, asked: Mapping[str, Any], *, as_json: bool
    ) -> None:
        self._records = records
        self._asked = asked
        self._as_json = as_json
        self._told_at = time.monotonic()
        self._told_of_pass = False
        self.run = run
        self.has_kinds = True
        self.has_begun = self.has_ended = False

    async def make(self) -> dict[str, Any]:
        """Begin the pass, wait for its end, and return its report with all results.

        Raises:
            GracekitError: the run does not answer, or refuses.
        """
        results: list[Any] = []
        control = ControlClient(self._records)
        report = await control.ask(self.run, "reconcile", self._asked)
        self.has_begun, pass_id = True, report["pass_id"]
        self.has_kinds = report["kinds"] != 0
        while report["next"] is not None:
            step = {"pass_id": pass_id, "after": report["next"]}
            answer = await self._look(control, step)
            if answer is None:
                self.has_ended, report["interrupted"] = True, True
                break
            report = answer
            results += report["results"]
            if not self._asked["dry_run"]:
                self._say(report)
        if report["error"]:
            raise GracekitError(report["error"])
        names = ("counts", "tasks", "broken", "unruled", "interrupted")
        shown = {name: report[name] for name in names}
        return {"dry_run": self._asked["dry_run"], **shown, "results": results}

    async def _look(self, control: ControlClient, step: Mapping[str, Any]) -> RunAnswer | None:
        """What the pass has done since the last look; None if its run has ended."""
        asking = asyncio.create_task(control.ask(self.run, "reconciled", step))
        try:
            while not (await asyncio.wait({asking}, timeout=LOOK_S))[0]:
                if await self._is_gone():
                    return None
            return asking.result()
        except (DependencyError, RunEndedError):
            until = time.monotonic() + END_S
            while not await self._is_gone():
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(LOOK_S)
            return None
        finally:
            asking.cancel()

    async def _is_gone(self) -> bool:
        self.run, judgement = await self._records.judge_again(self.run)
        return self.run.ended_at is not None or judgement.is_dead

    def _say(self, report: Mapping[str, Any]) -> None:
        if self._as_json:
            return
        for result in report["results"]:
            if result["outcome"] in _TOLD:
                click.echo(_line(result))
        if time.monotonic() - self._told_at >= TOLD_EVERY_S and (words := self._waits(report)):
            self._told_at = time.monotonic()
            tell(words, prefix="")

    def _waits(self, report: Mapping[str, Any]) -> str:
        """What the pass waits for; empty if it does not, or that was said and cannot change."""
        if report["waits_for_pass"] and not self._told_of_pass:
            self._told_of_pass = True
            return "waits until the pass that is under way has ended"
        if report["waits_for"]:
            waits = plural(report["waits_for"], "request")
            return f"waits until {waits} in the queues have been taken"
        return ""


def _detached(watch: _Watch, *, dry_run: bool) -> str:
    """What becomes of a pass whose command was ended by Ctrl-C."""
    if dry_run:
        return "interrupted; nothing was changed"
    if not watch.has_begun:
        return "interrupted before the pass was confirmed; see `gracekit status`"
    return (
        f"detached; the pass goes on in {label(watch.run)}. See `gracekit status` for what waits, "
        "and `gracekit incidents --what resource` for what was changed"
    )


def _line(result: Mapping[str, Any]) -> str:
    """`share:sh-12  creating -> available   export_locations=2   by was_it_created, token 4`."""
    name = f"{safe(result['kind'])}:{safe(result['id'])}"
    if result["written"] is None:
        moved = "not written" if _is_refused(result) else "has moved on"
        words = {"waiting": "waits", "left": "left", "moved_on": moved}
        said = words.get(result["outcome"], result["outcome"])
        why = safe(result["reason"], longest=LONGEST_WHY) if result["reason"] else ""
        return f"{name}  {safe(result['status'])}   {said}{': ' * bool(why)}{why}"
    facts = " ".join(f"{safe(key)}={safe(value)}" for key, value in result["facts"].items())
    parts = (
        f"{name}  {safe(result['status'])} -> {safe(result['written'])}",
        facts,
        safe(result["reason"], longest=LONGEST_WHY) if result["reason"] else "",
        f"by {safe(result['rule'])}, token {result['token']}",
    )
    return "   ".join(part for part in parts if part)


def _foreseen(report: Mapping[str, Any]) -> str:
    now = time.time()
    rows = [
        (
            safe(one["kind"]),
            safe(one["id"]),
            safe(one["status"]),
            "-" if one["since"] is None else duration(age_s(now, one["since"])),
            safe(_would(one), longest=LONGEST_WHY),
        )
        for one in report["results"]
    ]
    counts = report["counts"]
    parts = [table(_HEADERS, rows)] if rows else []
    hidden = sum(counts.values()) - len(rows)
    parts += [f"and {hidden} more"] if hidden else []
    parts += _troubles(report)
    if report["tasks"]:
        tasks = plural(report["tasks"], "unfinished task")
        name = "it names" if report["tasks"] == 1 else "they name"
        parts.append(
            f"{tasks} would be settled first; resources that {name} may be settled after that"
        )
    parts.append(
        f"{counts['settled']} would be settled, {counts['left']} left; nothing was changed"
    )
    return "\n".join(parts)


def _would(one: Mapping[str, Any]) -> str:
    return f"leave: {one['reason']}" if one["outcome"] == "left" else str(one["reason"])


def _ended(report: Mapping[str, Any], resource: str | None) -> str:
    """What is printed behind the changes: what was not changed, and the numbers."""
    counts = report["counts"]
    is_whole = not report["broken"] and not report["interrupted"]
    if resource is not None and not report["results"] and is_whole:
        return f"{safe(resource)} was not found in a transient status: nothing to settle"
    words = [f"{counts[name]} {name}" for name in _TOLD if counts[name] or name == "settled"]
    words += [f"{counts['moved_on']} moved on"] if counts["moved_on"] else []
    words.append(f"{counts['left']} left")
    tasks = f"; {plural(report['tasks'], 'task')} settled" if report["tasks"] else ""
    return "\n".join((*_untouched(report), *_troubles(report), f"{', '.join(words)}{tasks}"))


def _untouched(report: Mapping[str, Any]) -> list[str]:
    """Which were left or have moved on, and why; the first of them."""
    some = [one for one in report["results"] if one["outcome"] in _UNTOUCHED]
    lines = [_line(one) for one in some[:MOST_UNTOUCHED]]
    number = sum(report["counts"][name] for name in _UNTOUCHED)
    return lines + [f"and {number - len(lines)} more"] * (number > len(lines))


def _troubles(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{safe(kind)}: {safe(why, longest=LONGEST_WHY)}" for kind, why in report["broken"].items()
    ]
    lines += [
        f"{plural(one['number'], safe(one['kind']))} in status {safe(one['status'])}: no rule"
        for one in report["unruled"]
    ]
    if report["interrupted"]:
        lines.append("the pass was cut short: the service stopped taking requests")
    return lines


def _is_refused(result: Mapping[str, Any]) -> bool:
    """Whether its record has the same status still, and did not take the token."""
    return result["outcome"] == "moved_on" and bool(result["reason"])


def status_of(report: Mapping[str, Any], *, dry_run: bool, of_one: bool) -> int:
    """The exit status, as the help says it."""
    counts = report["counts"]
    if report["broken"] or counts["failed"]:
        return ERROR
    kept = counts["left"] or any(map(_is_refused, report["results"]))
    waits = counts["waiting"] or counts["stale"] or (of_one and kept)
    return WAITING if report["interrupted"] or (waits and not dry_run) else 0
