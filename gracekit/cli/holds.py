"""`gracekit holds`: what keeps hosts in their drains, and an operator's end of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import click

from gracekit.cli.main import HintingGroup
from gracekit.cli.options import CommonOptions, common, reason_option, who
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import OPERATOR, open_writing
from gracekit.cli.text import json_text, plural, safe, table
from gracekit.clock import age_s
from gracekit.config.values import did_you_mean, duration
from gracekit.errors import GracekitError
from gracekit.journal.holds_sql import END_BY_ORDER
from gracekit.journal.tasks_sql import COUNT, NOTE
from gracekit.listings import listings_sql as sql
from gracekit.process import Point
from gracekit.store.batch import Batch

_MOST_KNOWN: Final = 1000
_LISTS: Final = "`gracekit holds` lists those that can be ended"
_HEADERS: Final = ("HOLD", "KEY", "METHOD", "HOST", "RUN", "STATE", "LAPSES IN", "CRASHES")
_NAMES: Final = (*sql.HOLD_NAMES, "instance")
"""The columns of `HOLDS`; the last one is the instance of the run that a hold belongs to."""


@click.group(cls=HintingGroup, invoke_without_command=True)
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many."
)
@common
def holds(options: CommonOptions, /, *, limit: int) -> None:
    """List holds that are open, or whose errored hook has still to be called.

    An open hold keeps its host in a drain until it ends. RUN is the instance that
    it belongs to, which is none for a hold that a dead run has left. CRASHES counts the
    processes that ended while the probe of the hold, or its errored hook, was
    being called. `end` ends a hold.
    """
    with StoreRecords(options.settings) as records:
        rows = asyncio.run(records.engine.query(sql.HOLDS, limit))
    found = [dict(zip(_NAMES, row, strict=True)) for row in rows]
    if options.as_json:
        click.echo(json_text({"holds": found}))
    else:
        click.echo(table(_HEADERS, [_row(hold) for hold in found]) if found else "no holds")


def _row(hold: dict[str, Any]) -> tuple[str, ...]:
    if hold["ended_at"] is not None:
        state = "errored hook due"
    else:
        state = "left over" if hold["owner"] is None else "open"
    left_s = max(0.0, hold["lapses_at"] - time.time())
    run = hold["instance"] or hold["owner"] or "none"
    words = (hold["name"], hold["key"], hold["method"], hold["target"], run, state)
    return (*(safe(word) for word in words), duration(left_s), str(hold["crashes"]))


@holds.command()
@click.argument("name")
@click.argument("key")
@reason_option("Why: for the record.")
@common
def end(options: CommonOptions, /, *, name: str, key: str, reason: str) -> None:
    """End the hold NAME of KEY: no drain waits for it any more.

    Neither its probe nor its errored hook is called for it again.
    """
    with StoreRecords(options.settings) as records:
        ended = asyncio.run(_end(records, options, name, key, reason))
    if options.as_json:
        click.echo(json_text({"name": name, "key": key, "ended": ended}))
    else:
        click.echo(f"{safe(name)} {safe(key)}: {plural(ended, 'hold')} ended")


async def _end(
    records: StoreRecords, options: CommonOptions, name: str, key: str, reason: str
) -> int:
    """End it, and record that as an incident; both only if it can be ended.

    Raises:
        GracekitError: there is no such hold, or it has ended.
    """
    now = time.time()
    batch = Batch(Point.END_HOLD)
    ended = batch.ask(END_BY_ORDER, now, name, key)
    batch.add(COUNT, "operator_end_hold", 1, after=ended)
    detail = f"{who()}: {reason}"[:1000]
    note = (now, OPERATOR, "operator_end_hold", f"hold {name} {key}", None, detail)
    batch.add(NOTE, *note, after=ended)
    async with open_writing(options.settings) as engine:
        number = len((await engine.commit(batch))[ended])
    if not number:
        raise GracekitError(await _why_none(records, name, key))
    return number


async def _why_none(records: StoreRecords, name: str, key: str) -> str:
    hold = f"{safe(name)} {safe(key)}"
    if rows := await records.engine.query(sql.HOLD_ENDED, name, key):
        ago = duration(age_s(time.time(), float(rows[0][0] or 0.0)))
        return f"hold {hold} has ended already, {ago} ago; {_LISTS}"
    known = await records.engine.query(sql.HOLDS, _MOST_KNOWN)
    names = [dict(zip(_NAMES, row, strict=True)) for row in known]
    hint = did_you_mean(hold, [f"{safe(one['name'])} {safe(one['key'])}" for one in names])
    return f"there is no hold {hold}{f'{hint} ' if hint else '; '}{_LISTS}"
