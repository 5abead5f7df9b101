"""`gracekit dump`: what the tasks and threads of a run are doing, asked by its door."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any, Final

import click

from gracekit.cli.options import CommonOptions, common
from gracekit.cli.quiet import find
from gracekit.cli.reach import ControlClient, SilentError, StoppedError
from gracekit.cli.records import StoreRecords
from gracekit.cli.text import json_text
from gracekit.doctor.proc import masks_of
from gracekit.runs.run import Run
from gracekit.telemetry.safe_text import escape

ANSWER_S: Final = 4.0
"""For each page; so if the run's loop is blocked, the command says so within 5 s."""
LONGEST_LINE: Final = 4096


@click.command()
@click.argument("name", metavar="[INSTANCE]", required=False)
@common
def dump(options: CommonOptions, /, *, name: str | None) -> None:
    """Print the tasks of a run with their stacks, and its other threads.

    INSTANCE may be left out if only one run lives. SIGUSR1 writes the same to
    the run's standard error, also while its event loop is blocked.
    """
    with StoreRecords(options.settings) as records:
        (run,) = asyncio.run(find(records, options, name, everyone=None))
        text = asyncio.run(_show(records, run, at_once=not options.as_json))
    if options.as_json:
        one = {"service": run.service, "instance": run.instance, "run_id": run.run_id}
        click.echo(json_text({**one, "text": text}))


async def _show(records: StoreRecords, run: Run, *, at_once: bool) -> str:
    """The whole text; *at_once* prints each page as it comes."""
    text = ""
    try:
        control = ControlClient(records)
        async for page in _pages(control, run):
            text += page
            for line in page.splitlines() if at_once else ():
                click.echo(escape(line, longest=LONGEST_LINE))
    except StoppedError:
        raise
    except SilentError as error:
        raise SilentError(f"{error}: its event loop is blocked, or slow; {_beside(run)}") from error
    return text


async def _pages(control: ControlClient, run: Run) -> AsyncIterator[str]:
    answer: dict[str, Any] = {"next": 0}
    while (number := answer["next"]) is not None:
        asked = {"dump_id": answer["dump_id"], "page": number} if number else {}
        answer = await control.ask(run, "dump", asked, timeout_s=ANSWER_S)
        yield str(answer["text"])


def _beside(run: Run) -> str:
    """How to see the stacks although the loop is blocked."""
    pid = run.identity.pid
    masks = masks_of(pid)
    if masks is not None and signal.SIGUSR1 not in masks.caught:
        return f"it has no handler for SIGUSR1, but `py-spy dump --pid {pid}` shows its stacks"
    return f"`kill -USR1 {pid}` writes its stacks to its standard error nevertheless"
