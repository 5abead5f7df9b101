"""Shell completion of instances and task ids, from the store of the settings.

A completion that fails, or takes too long, completes nothing: that is better than a shell that
hangs, or that prints an error into the line that is being typed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from gracekit.cli.records import StoreRecords

PATIENCE_S: Final = 1.0
MOST: Final = 200
# Other words would need quotes in the shell, and a newline would begin another completion.
_TYPEABLE: Final = re.compile(r"[\w.:@/+=-]+", re.ASCII)
_ABOVE_ALL: Final = chr(0x10FFFF)

_Found = list[tuple[str, str]]  # word, and what it is
_Look = Callable[["StoreRecords"], Coroutine[None, None, _Found]]
_Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def living_instances(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Instances that a verb can name: those with a living run."""
    return _complete(ctx, incomplete, lambda records: _instances(records, living=True))


def known_instances(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Instances on record."""
    return _complete(ctx, incomplete, lambda records: _instances(records, living=False))


def task_ids(*states: str) -> _Complete:
    """Request ids of the newest tasks in these states; in any, if none is named."""

    def complete(
        ctx: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _complete(ctx, incomplete, lambda records: _tasks(records, incomplete, states))

    return complete


def _complete(ctx: click.Context, incomplete: str, look: _Look) -> list[CompletionItem]:
    found: _Found = []
    # In a daemon thread, so that a query that hangs cannot hold up the shell.
    looking = threading.Thread(target=_look_into, args=(ctx, look, found), daemon=True)
    looking.start()
    looking.join(PATIENCE_S)
    return [
        CompletionItem(word, help=what)
        for word, what in tuple(found)
        if word.startswith(incomplete) and _TYPEABLE.fullmatch(word)
    ]


def _look_into(ctx: click.Context, look: _Look, found: _Found) -> None:
    try:
        import asyncio  # noqa: PLC0415 - only for a completion

        from gracekit.cli.records import StoreRecords  # noqa: PLC0415
        from gracekit.config.loading import load  # noqa: PLC0415

        flags = {"store_url": ctx.params.get("store_url")}
        with StoreRecords(load(flags, os.environ, ctx.params.get("config"))) as records:
            found += asyncio.run(look(records))
    except Exception:  # noqa: BLE001, S110 - see the module's first lines
        pass


async def _instances(records: StoreRecords, *, living: bool) -> _Found:
    from gracekit.runs.run import list_runs  # noqa: PLC0415

    runs = await (records.living() if living else list_runs(records.engine, limit=MOST))
    return sorted({run.instance: run.service for run in reversed(runs)}.items())


async def _tasks(records: StoreRecords, incomplete: str, states: tuple[str, ...]) -> _Found:
    from gracekit.cli.text import safe  # noqa: PLC0415
    from gracekit.listings import listings_sql as sql  # noqa: PLC0415

    where, params = "request_id >= ? AND request_id < ?", [incomplete, incomplete + _ABOVE_ALL]
    if states:
        where += f" AND state IN ({', '.join('?' * len(states))})"
    rows = await records.engine.query(sql.TASKS.format(where=where), *params, *states, MOST)
    tasks = [dict(zip(sql.TASK_NAMES, map(str, row), strict=True)) for row in rows]
    return [(task["request_id"], safe(" ".join((task["method"], task["state"])))) for task in tasks]
