"""`gracekit quiet`, `resume` and `extend`: verbs that are done when they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from gracekit.cli.main import ERROR, UNREACHABLE, tell
from gracekit.cli.options import (
    CommonOptions,
    common,
    living_instance_argument,
    need_duration,
    why_option,
)
from gracekit.cli.reach import ControlClient
from gracekit.cli.records import StoreRecords, choose
from gracekit.cli.text import json_text, safe
from gracekit.config.values import duration
from gracekit.errors import DependencyError, GracekitError, RunEndedError
from gracekit.runs.run import Run

_SHOWN: Final = ("phase", "drain_left_s")
"""The fields of an answer that are shown, if it has them."""

_all = click.option("--all", "everyone", is_flag=True, help="Every living run of the store.")


@click.command()
@living_instance_argument
@_all
@why_option
@common
def quiet(options: CommonOptions, /, *, name: str | None, everyone: bool, reason: str) -> None:
    """Close the intake of a run; running tasks go on, and ops requests are answered.

    INSTANCE may be left out if only one run lives. `gracekit resume` undoes it.
    """
    _say("quiet", options, name, everyone=everyone, reason=reason)


@click.command()
@living_instance_argument
@_all
@why_option
@common
def resume(options: CommonOptions, /, *, name: str | None, everyone: bool, reason: str) -> None:
    """Open the intake of a quiet run, or undo a drain that a command asked for.

    A drain cannot be undone if a signal asked for it, if a task was handed over
    already, or if nothing runs any more.
    """
    _say("resume", options, name, everyone=everyone, reason=reason)


@click.command()
@living_instance_argument
@click.option(
    "--by",
    "more",
    metavar="DURATION",
    required=True,
    callback=need_duration,
    help="How much later the deadline will be.",
)
@_all
@why_option
@common
def extend(
    options: CommonOptions, /, *, name: str | None, more: str, everyone: bool, reason: str
) -> None:
    """Move the deadline of a drain later, if a command has asked for the drain.

    Running tasks then have more time before they are handed over. If `kill_after`
    is set, the whole drain must stay below it. A drain by a signal cannot be
    extended, because the sender of the signal does not wait longer.
    """
    _say("extend", options, name, everyone=everyone, reason=reason, more=more)


def _say(
    verb: str, options: CommonOptions, name: str | None, *, everyone: bool, **args: str
) -> None:
    asked = {name: text for name, text in args.items() if text}
    with StoreRecords(options.settings) as records:
        runs = asyncio.run(find(records, options, name, everyone=everyone))
        results = asyncio.run(_ask(records, verb, runs, asked))
    failed = [code for _, code in results if code]
    if options.as_json:
        click.echo(json_text({"runs": [result for result, _ in results]}))
    for result, code in results:
        words = safe(result.get("error") or result["phase"])
        if (left_s := result.get("drain_left_s")) is not None:
            words = f"{words}, {duration(left_s)} left"
        name = f"{result['service']}@{result['instance']}"
        # An error that says why a run gave no answer already begins with its name.
        words = words if words.startswith(f"{name} ") else f"{name}: {words}"
        if code:
            tell(words, prefix="")
        elif not options.as_json:
            click.echo(words)
    click.get_current_context().exit(min(failed, default=0))


async def find(
    records: StoreRecords, options: CommonOptions, name: str | None, *, everyone: bool | None
) -> list[Run]:
    """The living runs that a verb is for; never empty. See `choose`.

    Raises:
        click.UsageError: it is not clear which one is meant.
        DependencyError: none lives; the message says what the store knows.
    """
    if not everyone:
        name = name or options.settings.instance
    runs = choose(await records.living(name), name, everyone=everyone)
    if not runs:
        raise DependencyError(await records.what_is_known(name))
    return runs


async def _ask(
    records: StoreRecords, verb: str, runs: Sequence[Run], asked: Mapping[str, str]
) -> list[tuple[dict[str, Any], int]]:
    control = ControlClient(records)
    return await asyncio.gather(*(_ask_one(control, verb, run, asked) for run in runs))


async def _ask_one(
    control: ControlClient, verb: str, run: Run, asked: Mapping[str, str]
) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {
        "service": run.service, "instance": run.instance, "run_id": run.run_id,
    }  # fmt: skip
    try:
        answer = await control.ask(run, verb, asked)
    except (DependencyError, RunEndedError) as error:
        return result | {"error": str(error)}, UNREACHABLE
    except GracekitError as error:
        return result | {"error": f"refused: {error}"}, ERROR
    return result | {name: answer[name] for name in _SHOWN if name in answer}, 0
