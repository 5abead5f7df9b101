"""`gracekit dump`: what the tasks and threads of a run are doing, asked by its door."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

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
"""If the run's loop is blocked, the command says so within 5 s."""
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
        text = asyncio.run(_ask(records, run))
    if options.as_json:
        one = {"service": run.service, "instance": run.instance, "run_id": run.run_id}
        click.echo(json_text({**one, "text": text}))
    else:
        for line in text.splitlines():
            click.echo(escape(line, longest=LONGEST_LINE))


async def _ask(records: StoreRecords, run: Run) -> str:
    try:
        answer = await ControlClient(records).ask(run, "dump", timeout_s=ANSWER_S)
    except StoppedError:
        raise
    except SilentError as error:
        raise SilentError(f"{error}: its event loop is blocked, or slow; {_beside(run)}") from error
    return str(answer["text"])


def _beside(run: Run) -> str:
    """How to see the stacks although the loop is blocked."""
    pid = run.identity.pid
    masks = masks_of(pid)
    if masks is not None and signal.SIGUSR1 not in masks.caught:
        return f"it has no handler for SIGUSR1, but `py-spy dump --pid {pid}` shows its stacks"
    return f"`kill -USR1 {pid}` writes its stacks to its standard error nevertheless"
