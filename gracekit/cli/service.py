"""`gracekit service`: whether an instance is to be up, which outlives its supervisor."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import click

from gracekit.cli.main import HintingGroup, tell
from gracekit.cli.options import (
    CommonOptions,
    common,
    config_option,
    reason_option,
    store_option,
    who,
)
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import open_writing
from gracekit.cli.text import LONGEST_WHY, json_text, safe
from gracekit.config.loading import load
from gracekit.errors import GracekitError
from gracekit.process import Point
from gracekit.runs.wishes import Wish, add_wish, list_wishes, unwish
from gracekit.store.batch import Batch

IS_DOWN: Final = 1


@click.group(cls=HintingGroup)
def service() -> None:
    """Say whether an instance is to be up, or ask for that.

    A handler that calls `ctx.request_stop`, or `stop`, writes the wish that it
    stays down. The unit of `gracekit init systemd` asks before each start.
    """


@service.command()
@click.argument("name", metavar="SERVICE")
@click.option(
    "--instance",
    metavar="NAME",
    envvar="GRACEKIT_INSTANCE",
    help="The instance.  [env: GRACEKIT_INSTANCE]",
)
@store_option
@config_option
def wanted(*, name: str, instance: str | None, store_url: str | None, config: Path | None) -> None:
    """Ask whether an instance is to be up, as ExecCondition of systemd.

    Exit status: 1 if it is to stay down; 0 else, also if the store cannot be
    read, because a wish that nobody can read must not keep a service down.
    """
    try:
        settings = load({"store_url": store_url}, os.environ, config)
        with StoreRecords(settings) as records:
            wish = asyncio.run(list_wishes(records.engine)).get((name, instance or ""))
    except GracekitError as error:
        tell(f"{name}@{instance} may start, as its wish cannot be read: {error}", prefix="")
        return
    if wish is not None:
        tell(
            f"{name}@{instance} is {safe(wish, longest=LONGEST_WHY)}; `{wish.undo}` undoes that",
            prefix="",
        )
        click.get_current_context().exit(IS_DOWN)


@service.command()
@click.argument("name", metavar="SERVICE")
@common
def start(options: CommonOptions, /, *, name: str) -> None:
    """Let an instance be up again, and print how its platform starts it."""
    instance = _instance(options)
    asyncio.run(_commit(options, name, unwish(name, instance)))
    _answer(options, name, instance, "may be up", "systemctl start")


@service.command()
@click.argument("name", metavar="SERVICE")
@reason_option("Why: whoever finds it down reads it.")
@common
def stop(options: CommonOptions, /, *, name: str, reason: str) -> None:
    """Let an instance stay down, and print how its platform stops it."""
    instance, batch = _instance(options), Batch(Point.STOP_INTENT)
    wish = Wish(
        service=name, instance=instance, source="admin", by=who(), reason=reason, at=time.time()
    )
    add_wish(batch, wish)
    asyncio.run(_commit(options, name, batch))
    _answer(options, name, instance, "is to stay down", "systemctl stop")


def _instance(options: CommonOptions) -> str:
    if (instance := options.instance or options.settings.instance) is None:
        raise click.UsageError("name the instance: --instance NAME, as GRACEKIT_INSTANCE has it")
    return instance


async def _commit(options: CommonOptions, name: str, batch: Batch) -> None:
    with StoreRecords(options.settings) as records:
        await records.need_service(name)
        async with open_writing(options.settings) as engine:
            await engine.commit(batch)


def _answer(options: CommonOptions, name: str, instance: str, words: str, command: str) -> None:
    facts = {"service": name, "instance": instance, "done": words}
    text = f"{name}@{instance} {words}; on its host, as root: {command} UNIT"
    click.echo(json_text(facts) if options.as_json else safe(text))
