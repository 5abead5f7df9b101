"""`gracekit drain`: asks for a drain, and watches until the process is gone.

Watching changes nothing: Ctrl-C detaches and the drain goes on. The verdict is
read from the run's stop record, not from what was seen on the way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from gracekit.cli.main import DETACHED, ERROR, UNREACHABLE, tell
from gracekit.cli.options import (
    CommonOptions,
    common,
    living_instance_argument,
    need_duration,
    why_option,
)
from gracekit.cli.quiet import find
from gracekit.cli.reach import ControlClient, StoppedError
from gracekit.cli.records import StoreRecords, doubt
from gracekit.cli.status import drain_left, forecast, longest, some_holds, waits_for
from gracekit.cli.text import LONGEST_WHY, clock, json_text, plural, safe
from gracekit.config.values import duration
from gracekit.errors import DependencyError, GracekitError, RunEndedError
from gracekit.exits import Verdict
from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import RunAnswer, RunReport, label, verdict_of
from gracekit.phase import ServiceState
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.runs.run import Run
from gracekit.tracker.task import Lane, TaskState

HANDED_OVER: Final = 3
POLL_S: Final = 0.2
RESUMED_AFTER_S: Final = 2.0
"""A run that serves so long after the verb was answered has been resumed."""

TOLD_TASKS: Final = 5
"""For so many of the oldest tasks the command says why they still run."""
TOLD_EVERY_S: Final = 30.0

_NAMED_TASKS: Final = 20
_LANES: Final = {
    Lane.OPS.value: "ops method",
    Lane.PERIODIC.value: "periodic job",
    Lane.BACKGROUND.value: "work of a handler",
}


class DrainWatch(msgspec.Struct, kw_only=True):
    """One drain that is watched.

    Attributes:
        run: As last read from the store.
        name: How a command can name it.
        prefix: Before each line, where several drains are watched.
        quiet: Print nothing on the way.
        began: Monotonic seconds at which the verb was answered; None before.
        shown: The last progress line.
        code: Exit status of this drain.
        result: What `--json` shows of it.
        told_at: Monotonic seconds of the last progress line.
    """

    run: Run
    name: str = ""
    prefix: str
    quiet: bool
    began: float | None = None
    stop_seen: bool = False
    shown: str = ""
    code: int = 0
    result: dict[str, Any] = msgspec.field(default_factory=dict)
    told_at: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Since the verb was answered."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def say(self, text: str, *, err: bool = False) -> None:
        """Print a line about this drain."""
        if err:
            tell(f"{self.prefix}{text}", prefix="")
        elif not self.quiet:
            click.echo(f"{self.prefix}{text}")


@click.command()
@living_instance_argument
@click.option(
    "--timeout",
    metavar="DURATION",
    callback=need_duration,
    help="How long it waits for running tasks.  [default: drain_timeout of the run]",
)
@click.option("--all", "everyone", is_flag=True, help="Every living run of the store.")
@click.option("--rollout", is_flag=True, help="Say that a rollout asks for it: it is planned.")
@click.option("--watch", is_flag=True, help="Watch a drain that is under way; never begin one.")
@click.option("--wait/--no-wait", default=True, help="Watch until it is gone.  [default: wait]")
@why_option
@common
@click.pass_context
def drain(
    ctx: click.Context,
    options: CommonOptions,
    /,
    *,
    name: str | None,
    timeout: str | None,
    everyone: bool,
    rollout: bool,
    watch: bool,
    wait: bool,
    reason: str,
) -> None:
    """Drain a run: close its intake, wait for what runs, hand the rest over.

    INSTANCE may be left out if only one run lives. Ctrl-C detaches, and the drain
    goes on; `gracekit resume` undoes it until a task has stopped for it.

    It prints a line for each change. For the five oldest tasks it says why they
    still run, and it names the open holds.

    Exit status: 0 drained, 3 unfinished tasks are in the journal,
    4 unreachable, 1 any other end, 2 usage, 78 configuration, 130 detached.
    """
    words = (("timeout", timeout), ("reason", reason), ("source", "rollout" if rollout else ""))
    asked = {name: text for name, text in words if text}
    if watch and (asked or not wait):
        raise click.UsageError(
            "--watch begins no drain: leave out --timeout, --reason, --rollout, --no-wait"
        )
    with StoreRecords(options.settings) as records:
        runs = asyncio.run(find(records, options, name, everyone=everyone))
        watches = [
            DrainWatch(
                run=run,
                prefix=f"{run.instance}: " if len(runs) > 1 else "",
                quiet=options.as_json,
            )
            for run in runs
        ]
        try:
            asyncio.run(_drain_all(records, watches, None if watch else asked, wait=wait))
        except KeyboardInterrupt:
            _detach(watches)
            ctx.exit(DETACHED)
    if options.as_json:
        click.echo(json_text({"runs": [watch.result for watch in watches]}))
    codes = {one.code for one in watches}
    ctx.exit(next((c for c in (ERROR, UNREACHABLE, HANDED_OVER) if c in codes), 0))


def _detach(watches: list[DrainWatch]) -> None:
    asked = [watch for watch in watches if watch.began is not None]
    if not asked:
        tell("interrupted before a drain was confirmed; see `gracekit status`", prefix="\n")
        return
    names = " ".join(watch.run.instance for watch in asked)
    tell(f"detached; the drain of {names} goes on", prefix="\n")


async def _drain_all(
    records: StoreRecords, watches: list[DrainWatch], asked: Mapping[str, str] | None, *, wait: bool
) -> None:
    control = ControlClient(records)
    await asyncio.gather(*(_drain(records, control, w, asked, wait=wait) for w in watches))


async def _drain(
    records: StoreRecords,
    control: ControlClient,
    watch: DrainWatch,
    asked: Mapping[str, str] | None,
    *,
    wait: bool,
) -> None:
    watch.result = {
        "service": watch.run.service,
        "instance": watch.run.instance,
        "run_id": watch.run.run_id,
    }
    watch.name = await records.name_of(watch.run)
    try:
        await _ask(control, watch, asked, wait=wait)
    except GracekitError as error:
        if wait and isinstance(error, RunEndedError) and await _is_gone(records, watch):
            watch.say(safe(str(error), longest=LONGEST_WHY))
            await _conclude(records, watch)
            return
        is_away = isinstance(error, RunEndedError | DependencyError)
        watch.code = UNREACHABLE if is_away else ERROR
        watch.result["error"] = str(error)
        watch.say(safe(str(error), longest=LONGEST_WHY), err=True)
        if watch.code == UNREACHABLE and not isinstance(error, RunEndedError | StoppedError):
            pid = watch.run.identity.pid
            watch.say(f"SIGTERM drains it too: kill -TERM {pid}", err=True)
        return
    if wait:
        await _watch(records, control, watch)
    else:
        watch.say(f"{label(watch.run)} is draining")
        watch.result["phase"] = ServiceState.DRAINING.value


async def _is_gone(records: StoreRecords, watch: DrainWatch) -> bool:
    """Whether the run has ended, and its instance has no other one, which nobody drains."""
    watch.run, judgement = await records.judge_again(watch.run)
    return judgement.is_dead and not await records.living(label(watch.run))


async def _ask(
    control: ControlClient, watch: DrainWatch, asked: Mapping[str, str] | None, *, wait: bool
) -> None:
    before = (await control.hear(watch.run, limit=TOLD_TASKS)).answer
    under_way = before is not None and before.get("phase") == ServiceState.DRAINING.value
    if asked is not None:
        await control.ask(watch.run, "drain", asked)
    elif not under_way and watch.run.stop_at is None:
        raise GracekitError(f"{label(watch.run)} does not drain, and --watch begins no drain")
    watch.began = time.monotonic()
    if under_way:
        left = drain_left(before or {})
        watch.say(f"{label(watch.run)} was draining already; its deadline stands: {left}")
    else:
        watch.say("it takes no new requests; ops methods are still served")
        watch.say(f"(undo, until a task has stopped for it: gracekit resume {watch.name})")
    if wait:
        watch.say("(Ctrl-C detaches; the drain goes on)")


# -- watching -------------------------------------------------------------------------


async def _watch(records: StoreRecords, control: ControlClient, watch: DrainWatch) -> None:
    """Until the process is gone, or serves again."""
    asking: asyncio.Task[RunReport] | None = None
    try:
        while True:
            watch.run, judgement = await records.judge_again(watch.run)
            if judgement.is_dead:
                break
            if not judgement.is_alive:
                watch.code = ERROR
                watch.result["phase"] = judgement.answer.value
                watch.say(doubt(watch.run, judgement))
                return
            if asking is None:
                asking = asyncio.create_task(control.hear(watch.run, limit=TOLD_TASKS))
            await asyncio.wait({asking}, timeout=POLL_S)
            reports = asking.result() if asking.done() else RunReport()
            answer = reports.answer
            asking = None if asking.done() else asking
            if _is_resumed(watch, answer):
                watch.code = ERROR
                watch.result["phase"] = ServiceState.SERVING.value
                watch.say(f"{label(watch.run)} was resumed and serves on")
                return
            if answer is not None:
                holds = (await records.open_holds()).get(watch.run.run_id, [])
                _tell_progress(watch, answer, holds)
            elif reports.why:
                await _tell_trouble(records, watch, reports.why)
            if answer is not None or reports.brief:
                await asyncio.sleep(POLL_S)
    finally:
        if asking is not None:
            asking.cancel()
    await _conclude(records, watch)


def _is_resumed(watch: DrainWatch, answer: RunAnswer | None) -> bool:
    watch.stop_seen = watch.stop_seen or watch.run.stop_at is not None
    if watch.stop_seen and watch.run.stop_at is None:
        return True
    serving = answer is not None and answer.get("phase") == ServiceState.SERVING.value
    return serving and watch.elapsed_s > RESUMED_AFTER_S


def _tell_progress(watch: DrainWatch, answer: RunAnswer, holds: list[str]) -> None:
    """Print a line whenever the number in flight or the holds have changed.

    Lines below it say why the oldest tasks still run. All is repeated every 30 s.
    """
    left, timeout = answer.get("drain_left_s"), answer.get("drain_timeout_s")
    if left is None or timeout is None:
        return
    in_flight, held = safe(answer.get("in_flight")), ", ".join(holds)
    times = f"{clock(timeout - left)} / {clock(timeout)}"
    line = "   ".join([f"in flight {in_flight}", times, _outlook(answer, holds)]).rstrip()
    now = time.monotonic()
    if watch.shown == in_flight + held and now - watch.told_at < TOLD_EVERY_S:
        return
    watch.shown, watch.told_at = in_flight + held, now
    watch.say(line)
    for reason in _reasons(answer):
        watch.say(f"  {reason}")


def _outlook(answer: RunAnswer, holds: list[str]) -> str:
    what, expected, risk = longest(answer), forecast(answer), answer.get("at_risk")
    more = [] if what == "-" else [f"longest {what}"]
    more += [expected] if expected else []
    more += [f"{risk} at risk"] if risk else []
    more += [waits_for(holds)] if holds else []
    return ", ".join(more)


def _reasons(answer: RunAnswer) -> list[str]:
    """Why the oldest tasks still keep the drain waiting."""
    tasks = answer.get("tasks", ())
    reasons = [why_it_blocks(task) for task in tasks]
    more = (answer.get("in_flight") or 0) - len(reasons)
    return reasons + ([f"and {plural(more, 'task')} more"] if reasons and more > 0 else [])


def why_it_blocks(task: RunAnswer) -> str:
    """`work vm:12 (order-1): no safe point since 12s`: a task of a run's status, in words.

    A hook has the id of the task that it is called for.
    """
    what = " ".join(safe(task[key]) for key in ("method", "resource") if task.get(key))
    about = task.get("about")
    name = f"{what} ({safe(about or task.get('task_id'), longest=MAX_NAME)})"
    lane = None if about else _LANES.get(str(task.get("lane")))
    return f"{name}: {f'{lane}, ' if lane else ''}{_why(task)}"


def _why(task: RunAnswer) -> str:
    if task.get("waits_for"):
        return f"waits for {safe(task['waits_for'])}"
    if task.get("state") != TaskState.RUNNING.value:
        return f"{safe(task.get('state'))} for {duration(task.get('age_s'))}"
    if task.get("cancelled_by"):
        return f"cancelled ({safe(task['cancelled_by'])}), and it has not returned"
    if task.get("about"):
        return f"running for {duration(task.get('age_s'))}"
    since = task.get("safe_point_age_s")
    if since is None:
        return f"running for {duration(task.get('age_s'))}, no safe point yet"
    return f"no safe point since {duration(since)}"


async def _tell_trouble(records: StoreRecords, watch: DrainWatch, why: str) -> None:
    """Print *why* a run shows no progress, unless that was the last line printed.

    Print nothing if the run is dead or has recorded its stop. A run closes its door before its
    process ends, so at its end it is normal that it does not answer.
    """
    watch.run, judgement = await records.judge_again(watch.run)
    is_over = watch.run.ended_at is not None or judgement.is_dead
    if not is_over and watch.shown != why:
        watch.shown = why
        watch.say(f"no progress to show: {safe(why, longest=LONGEST_WHY)}")


# -- the verdict ----------------------------------------------------------------------


async def _conclude(records: StoreRecords, watch: DrainWatch) -> None:
    run, verdict = watch.run, verdict_of(watch.run)
    report = run.report
    watch.code = {Verdict.DRAINED: 0, Verdict.HANDED_OVER: HANDED_OVER}.get(verdict, ERROR)
    watch.result |= {
        "phase": "gone",
        "verdict": verdict.value,
        "exit_code": run.exit_code,
        "report": report,
    }
    if report is None:
        rows = (await records.unfinished()).get(run.run_id, {})
        left = plural(sum(rows.values()), "unfinished task")
        known = "" if run.exit_code is None else f" (it noted exit code {run.exit_code})"
        watch.say(f"verdict: {verdict.value}: it left no stop record{known}, and {left}")
        return
    handed_over = [*report.get("handed_over", ()), *report.get("unclean", ())]
    not_started = list(report.get("not_started", ()))
    hooks = [str(name) for (name,) in await records.engine.query(sql.HOOKS_DUE, run.run_id)]
    listed = {
        "handed over": handed_over,
        "not started": not_started,
        "errored hook still to be called": hooks,
    }
    for word, ids in listed.items():
        for name in await _names(records, ids[:_NAMED_TASKS]):
            watch.say(f"{word}: {name}")
    holds = report.get("open_holds") or 0
    names = some_holds(report.get("holds", ()), holds)
    left = f", {plural(holds, 'hold')} left open{names and f': {names}'}" if holds else ""
    earlier = (report.get("unfinished") or 0) - len({*handed_over, *not_started, *hooks}) - holds
    left += f", {earlier} unfinished from earlier runs" if earlier > 0 else ""
    why = f", failure: {safe(report['failure'])}" if report.get("failure") else ""
    own = "" if run.exit_code in {None, watch.code} else f" (the run's exit code: {run.exit_code})"
    watch.say(
        f"verdict: {verdict.value}: {report.get('finished', 0)} finished, {len(handed_over)} "
        f"handed over, {len(not_started)} not started{left}{why}. exit {watch.code}{own} "
        f"after {duration(watch.elapsed_s)}"
    )


async def _names(records: StoreRecords, request_ids: list[str]) -> list[str]:
    """`resize_vm vm:81 (order-1)` for each."""
    names = []
    for request_id in request_ids:
        rows = await records.engine.query(sql.SUBJECT, request_id)
        for method, kind, key in rows[:1]:
            what = safe(method) + ("" if kind is None else f" {safe(f'{kind!s}:{key!s}')}")
            names.append(f"{what} ({safe(request_id, longest=MAX_NAME)})")
    return names
