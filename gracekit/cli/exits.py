"""`gracekit exits`: how runs have ended, and why, as far as anybody knows now."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from gracekit import keeper
from gracekit.cli.main import HintingGroup
from gracekit.cli.options import CommonOptions, common, config_option, limit_option, store_option
from gracekit.cli.records import StoreRecords, since_end
from gracekit.cli.text import LONGEST_WHY, json_text, safe, table
from gracekit.clock import age_s
from gracekit.config.loading import load
from gracekit.config.values import duration
from gracekit.errors import GracekitError
from gracekit.listings.run_list import exit_as_json, list_exits
from gracekit.listings.store_view import ended, label, verdict_of
from gracekit.runs.end_records import BY_SYSTEMD, FailedStart, read_starts
from gracekit.runs.run import Run
from gracekit.runs.why import explain, why
from gracekit.store.location import StoreLocation

HEADERS: Final = (
    "INSTANCE", "ENDED", "WHY", "LEFT", "EXIT", "FINISHED", "HANDED OVER", "NOT STARTED", "REASON",
)  # fmt: skip
_HOW: Final = {"exited", "killed", "dumped"}  # systemd's words, too


@click.group(cls=HintingGroup, invoke_without_command=True)
@limit_option(20)
@click.option("--explain", "run_id", metavar="RUN", help="Say which evidence decides, of one run.")
@common
def exits(options: CommonOptions, /, *, limit: int, run_id: str | None) -> None:
    """List how the last runs ended, newest first.

    WHY is derived from the evidence at each look: the kernel's word on a process
    may come after its tasks were taken over. LEFT says what became of them then.
    docs/stopping.md lists the words. Starts that failed before there was a run
    are shown, too, of this host.
    """
    with StoreRecords(options.settings) as records:
        asyncio.run(records.need(options.instance))
        found = asyncio.run(list_exits(records, options.instance, limit=limit))
        known = {run.run_id for run in found}
        starts = [
            one
            for one in read_starts(records.run_directory, options.instance)[-limit:][::-1]
            if one.run_id not in known
        ]
    if run_id is not None:
        _explain(options, _one(found, run_id))
    elif options.as_json:
        shown = [exit_as_json(run) for run in found]
        click.echo(json_text({"exits": shown, "failed_starts": [one.as_json() for one in starts]}))
    else:
        rows = sorted(
            [(run_row(run), run.ended_at or run.beat_at) for run in found]
            + [(_start_row(one), one.at) for one in starts],
            key=lambda row: -row[1],
        )
        click.echo(table(HEADERS, [row for row, _ in rows[:limit]]) if rows else "no run has ended")


def _one(found: Sequence[Run], run_id: str) -> Run:
    meant = [run for run in found if run.run_id.startswith(run_id) or run_id == label(run)]
    if not meant or not run_id:
        raise GracekitError(
            f"no run {safe(run_id)} is among the last {len(found)} that ended: give a run id or "
            "its beginning, and a larger --limit"
        )
    return meant[0]


def _explain(options: CommonOptions, run: Run) -> None:
    lines = list(explain(ended(run)))
    if options.as_json:
        click.echo(json_text(exit_as_json(run) | {"because": lines}))
        return
    left = verdict_of(run).left
    click.echo(f"{label(run)} (run {run.run_id}): {why(ended(run))}, left {left}")
    click.echo("\n".join(f"  {safe(line, longest=LONGEST_WHY)}" for line in lines))


def run_row(run: Run) -> tuple[object, ...]:
    """The cells below `HEADERS` of a run that has ended."""
    report = run.report or {}
    handed_over = len(report.get("handed_over", ())) + len(report.get("unclean", ()))
    return (
        label(run),
        f"{since_end(run)} ago",
        why(ended(run)),
        verdict_of(run).left,
        run.exit_code,
        report.get("finished"),
        handed_over if report else None,
        len(report.get("not_started", ())) if report else None,
        _reason(run),
    )


def _reason(run: Run) -> str | None:
    if run.gone_by is not None:
        return f"gone, said {run.gone_by}: {run.gone_reason}"
    report = run.report or {}
    reason = run.stop_reason or report.get("failure")
    if run.stop_source in {"operator", "rollout", "user"}:
        reason = f"{reason or 'asked'}, by {run.stop_by}"
    if run.kernel is not None and run.kernel.sender is not None:
        reason = f"{reason or 'signal'}, sent by {run.kernel.sender}"
    if reason is None:
        reason = run.crash or (None if run.kernel is None else str(run.kernel))
    if reason is None and run.report is None and run.exit_code is not None:
        reason = "the store could not record its end; its log says why"
    return f"{reason}; cut short" if report.get("forced") else reason


def _start_row(one: FailedStart) -> tuple[object, ...]:
    name = f"{one.service}@{one.instance or '-'}"
    ago = f"{duration(age_s(time.time(), one.at))} ago"
    return (name, ago, one.why, None, one.code, None, None, None, one.reason)


@exits.command()
@click.option("--systemd", is_flag=True, required=True, help="By the variables of ExecStopPost.")
@store_option
@config_option
def record(*, systemd: bool, store_url: str | None, config: Path | None) -> None:  # noqa: ARG001
    """Record how a unit ended, from ExecStopPost of systemd.

    The unit that `gracekit init systemd` prints does so. It needs no store: the
    word is put into the run directory, and whoever takes the run over reads it.
    """
    how, invocation = os.environ.get("EXIT_CODE", ""), os.environ.get("INVOCATION_ID", "")
    directory = StoreLocation(load({"store_url": store_url}, os.environ, config)).run_directory
    if how not in _HOW or not invocation or directory is None or not directory.is_dir():
        return  # as after a failed ExecCondition: nothing has run
    status = os.environ.get("EXIT_STATUS", "")
    found: dict[str, Any] = {
        "how": how,
        "status": int(status) if status.isdecimal() else _number_of(status),
        "oom_kills": int(os.environ.get("SERVICE_RESULT") == "oom-kill"),
        "by": "systemd",
        "invocation": invocation,
    }
    keeper.write(directory / BY_SYSTEMD.format(invocation=invocation), found)


def _number_of(name: str) -> int:
    """The number of a signal that systemd names `TERM`; 0 for one that is not known."""
    return int(getattr(signal, f"SIG{name}", 0))
