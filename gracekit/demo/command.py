"""The command `gracekit demo`: a drain, a hand-over and a recovery, with real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click

from gracekit.config.loading import load
from gracekit.config.settings import Settings
from gracekit.config.urls import UrlKind, kind_of, shown_url
from gracekit.demo.app import PINGS, entries
from gracekit.demo.judge import Judgement, judge
from gracekit.demo.story import Story, View
from gracekit.demo.view import PlainView, TableView, can_draw
from gracekit.errors import GracekitError
from gracekit.store.place import StorePlace


@click.command()
@click.option("--keep", is_flag=True, help="Keep the directory with the files and logs.")
@click.option(
    "--crash", is_flag=True, help="Kill the second process with kill -9; a third settles."
)
@click.option(
    "--check",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Play nothing: judge the files of a directory that was kept.",
)
@click.option(
    "--transport",
    "transport_url",
    metavar="URL",
    help="Queues on this broker instead of in a file.  [env: GRACEKIT_TRANSPORT_URL]",
)
@click.option(
    "--store",
    "store_url",
    metavar="URL",
    help="The store in a schema of its own in this database of PostgreSQL, instead of in a file."
    "  [env: GRACEKIT_STORE_URL]",
)
@click.pass_context
def demo(
    ctx: click.Context,
    *,
    keep: bool,
    crash: bool,
    check: Path | None,
    transport_url: str | None,
    store_url: str | None,
) -> None:
    """Show a drain and a restart in about 20 seconds.

    A service gets requests, is asked to stop while it works, hands over what
    it cannot finish, and leaves; requests go on coming; the next process
    settles everything. Then what the senders had confirmed is compared with
    the store and with what the handlers did.

    Exit status: 0, or 1 if anything was lost or run twice.
    """
    if check is None:
        settings = load({"transport_url": transport_url, "store_url": store_url})
        judgement = _play_and_judge(settings, keep=keep, crash=crash)
    else:
        judgement = asyncio.run(judge(check))
        _tell(judgement, check)
    ctx.exit(0 if judgement.good else 1)


def _play_and_judge(settings: Settings, *, keep: bool, crash: bool) -> Judgement:
    """Play it on the user's broker and database, or on files of its own."""
    directory, view = Path(tempfile.mkdtemp(prefix="gracekit-demo-")), _view()
    view.say(f"files and logs are in {directory}")
    broker = settings.transport_url
    story = Story(
        directory,
        view,
        broker if kind_of(broker) is UrlKind.BROKER else None,
        StorePlace(settings).postgres,
    )
    if story.broker is not None:
        view.say(f"queues are on {shown_url(broker)}")
    if story.database is not None:
        view.say(f"the store is schema {story.schema} of {story.database.name.partition('?')[0]}")
    kept = keep
    try:
        judgement = asyncio.run(_perform(story, crash=crash))
        kept = keep or not judgement.good
        _tell(judgement, directory if kept else None, story)
    except GracekitError:
        kept = True  # its message refers to the logs
        raise
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise click.Abort from None
    finally:
        if not kept:
            story.remove_store()
            shutil.rmtree(directory, ignore_errors=True)
    return judgement


async def _perform(story: Story, *, crash: bool) -> Judgement:
    task = asyncio.current_task()
    assert task is not None
    # Clean up on SIGTERM and on a closed terminal, as on Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await story.play(crash=crash)
    return await judge(story.directory, story.store_url)


def _view() -> View:
    if can_draw(is_terminal=sys.stdout.isatty(), encoding=sys.stdout.encoding):
        return TableView(_write, colours=not os.environ.get("NO_COLOR"))
    return PlainView(click.echo)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(judgement: Judgement, kept: Path | None, story: Story | None = None) -> None:
    for request_id, why in judgement.lost.items():
        click.echo(f"lost: {request_id}: {why}")
    for request_id, what in judgement.run_twice.items():
        click.echo(f"run twice: {request_id}: {what}")
    if story is not None:
        codes = ", ".join(f"{name} {code}" for name, code in story.exit_codes.items())
        answers = [entry["answer"] for entry in entries(story.directory / PINGS)]
        pings = sum(1 for answer in answers if answer and answer["draining"])
        click.echo(f"exit codes: {codes}; {pings} ops pings answered during the drain")
    if kept is not None:
        click.echo(f"kept in {kept}")
    click.echo(judgement.sentence())
