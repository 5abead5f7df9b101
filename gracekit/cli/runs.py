"""`gracekit runs gone`: an operator declares a run gone of which nothing can be proven."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import click

from gracekit.cli.main import HintingGroup
from gracekit.cli.options import CommonOptions, common, reason_option, who
from gracekit.cli.reach import is_stopped
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import open_writing
from gracekit.cli.text import json_text, safe
from gracekit.clock import Clock
from gracekit.errors import ConflictError, GracekitError
from gracekit.life import Alive, Liveness
from gracekit.listings.store_view import is_named, label
from gracekit.runs.run import Run, gone

LISTED: Final = 5


@click.group(cls=HintingGroup)
def runs() -> None:
    """Act on the record of a run; `gracekit status` lists them."""


@runs.command("gone")
@click.argument("word", metavar="RUN")
@reason_option("How you know: for the record.")
@common
def declare_gone(options: CommonOptions, /, *, word: str, reason: str) -> None:
    """Declare a run gone whose death cannot be proven from here.

    Its tasks and leases are then taken over as those of a killed run. If it is
    alive after all, it ends at its next sign of life. RUN is a run id or its
    beginning, INSTANCE or SERVICE@INSTANCE.

    A run that is proven alive is refused: `gracekit drain` ends it. So is one
    that is proven dead: its tasks are taken over without this command.
    """
    with StoreRecords(options.settings) as records:
        run = asyncio.run(_declare(records, options, word, reason))
    if options.as_json:
        click.echo(json_text({"run_id": run.run_id, "instance": run.instance, "reason": reason}))
    else:
        click.echo(f"{label(run)} (run {run.run_id}) is on record as gone: {safe(reason)}")


async def _declare(records: StoreRecords, options: CommonOptions, word: str, reason: str) -> Run:
    run = await _find(records, word)
    async with open_writing(options.settings) as engine:
        try:
            await engine.commit(gone(run, by=who(), reason=reason, at=Clock().wall()))
        except ConflictError as error:
            raise GracekitError(
                f"{label(run)} was taken over, or said to be gone, meanwhile"
            ) from error
    await records.wake_living(run.service)
    return run


async def _find(records: StoreRecords, word: str) -> Run:
    """The one run of which nothing is proven that *word* means."""
    if not word:
        raise GracekitError("an empty RUN names no run; see `gracekit status`")
    meant = [run for run in await records.not_adopted() if _means(word, run)]
    judged = [(run, records.judge(run)) for run in meant]
    doubtful = [run for run, judgement in judged if judgement.answer is Alive.NOT_PROVEN]
    if len(doubtful) == 1:
        return doubtful[0]
    if doubtful:
        ids = ", ".join(run.run_id for run in doubtful[:LISTED])
        raise GracekitError(f"{safe(word)} stands for {len(doubtful)} runs: write one of {ids}")
    names = {run.run_id: await records.name_of(run) for run, _ in judged}
    raise GracekitError(_why_none(word, judged, names))


def _means(word: str, run: Run) -> bool:
    return run.run_id.startswith(word) or is_named(run, word)


def _after_stop(run: Run) -> str:
    return f", after kill -CONT {run.identity.pid}: it is stopped" if is_stopped(run) else ""


def _why_none(word: str, judged: list[tuple[Run, Liveness]], names: Mapping[str, str]) -> str:
    if not judged:
        return f"no run {safe(word)} is on record that may be alive; see `gracekit status`"
    alive = [(run, judgement) for run, judgement in judged if judgement.is_alive]
    run, judgement = (alive or judged)[0]
    remedy = (
        f"`gracekit drain {names[run.run_id]}` ends it{_after_stop(run)}"
        if judgement.is_alive
        else "any living run of the service takes its tasks over, or the next start"
    )
    return f"{label(run)} (run {run.run_id}) is {judgement}; {remedy}"
