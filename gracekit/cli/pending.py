"""`gracekit pending`: tasks that wait for capacity, and an operator's way out for each.

It is done in the store, whether a run lives or not: no run owns a parked task. Only a retry with
other arguments asks a run, which checks them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import click

from gracekit.cli.call import arguments
from gracekit.cli.main import HintingGroup
from gracekit.cli.options import CommonOptions, common, limit_option, reason_option, who
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import carry_out, may_say_why, yes_option
from gracekit.cli.text import json_text, requested_words, safe, table
from gracekit.config.values import duration
from gracekit.errors import UnserialisableError
from gracekit.listings.listed_task import short_id
from gracekit.listings.parked_list import ParkedEntry, ParkedList, deadline_words, list_parked
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.rpc.plain import plain
from gracekit.runs.pages import list_services
from gracekit.tracker.task import Order, Verb

_HEADERS: Final = (
    "TASK", "METHOD", "RESOURCE", "WAITS", "DEADLINE", "V", "REQUESTED", "REASON",
)  # fmt: skip
_LONGEST_REQUESTED: Final = 40
_LONGEST_REASON: Final = 60

_parked_id = click.argument("task_id", metavar="ID")
_must_say_why = reason_option("Why: for the record.")


@click.group(cls=HintingGroup, invoke_without_command=True)
@click.option("--service", metavar="NAME", help="Tasks of this service.  [default: of all]")
@limit_option()
@common
def pending(options: CommonOptions, /, *, service: str | None, limit: int) -> None:
    """List tasks that wait for capacity, the oldest deadline first.

    WAITS is the time since the request was accepted. After its DEADLINE any run
    of its service ends the task; while no run lives, it is overdue. V is its
    version: how often it was parked. REQUESTED is what its handler said is
    missing.

    `retry`, `give-up` and `cancel` end the waiting of one task. With --instance
    the tasks of that instance's service are listed.

    Exit status: 0; with --instance or --service 4 if no run of that name is on record.
    """
    if service is not None and options.instance is not None:
        raise click.UsageError("give --service or --instance, not both")
    with StoreRecords(options.settings) as records:
        found = asyncio.run(_look(records, service, options.instance, limit))
    click.echo(json_text(found.as_json()) if options.as_json else _text(found, limit))


@pending.command()
@_parked_id
@click.option(
    "--set",
    "words",
    metavar="NAME=VALUE",
    multiple=True,
    help="Replace an argument; may be repeated.",
)
@may_say_why
@yes_option
@common
def retry(
    options: CommonOptions, /, *, task_id: str, words: tuple[str, ...], reason: str, yes: bool
) -> None:
    """Let a parked task run again, at once and under the same id.

    If its handler still finds no capacity, it is parked again as the next
    version; its deadline stays.

    --set takes JSON if VALUE reads as JSON, else text. The newest living run of the
    service checks the arguments: their names must fit the method, and they must
    name the same resource. Types are not checked. If no run lives, --set is refused.

    ID is a request id or the beginning of one, if no other id begins so. At a
    terminal the command asks whether that task was meant; elsewhere a beginning
    needs 4 characters.

    Exit status: 0 done; 1 refused, because it is not parked or --set does not
    fit; 4 the run that is to check --set does not answer; 2 usage, 78 configuration.
    """
    order = Order(verb=Verb.RETRY, by=who(), reason=reason)
    carry_out(options, order, task_id, yes=yes, replaced=read_set(words))


@pending.command("give-up")
@_parked_id
@_must_say_why
@yes_option
@common
def give_up(options: CommonOptions, /, *, task_id: str, reason: str, yes: bool) -> None:
    """End a parked task as ERRORED, for `gave_up`.

    Its `errored` hook is called.

    ID is as for `gracekit pending retry`. Exit status: 0 done; 1 refused,
    because it is not parked; 2 usage, 78 configuration.
    """
    order = Order(verb=Verb.GIVE_UP, by=who(), reason=reason)
    carry_out(options, order, task_id, yes=yes, replaced={})


@pending.command()
@_parked_id
@_must_say_why
@yes_option
@common
def cancel(options: CommonOptions, /, *, task_id: str, reason: str, yes: bool) -> None:
    """End a parked task as CANCELLED.

    ID and exit status: as for `gracekit pending give-up`.
    """
    order = Order(verb=Verb.CANCEL, by=who(), reason=reason)
    carry_out(options, order, task_id, yes=yes, replaced={})


async def _look(
    records: StoreRecords, service: str | None, instance: str | None, limit: int
) -> ParkedList:
    if instance is not None:
        await records.need(instance)
        services = await list_services(records.engine, instance)
        if len(services) > 1:
            names = ", ".join(f"{safe(name)}@{safe(instance)}" for name in services)
            raise click.UsageError(f"several services have an instance of that name: {names}")
        service = services[0]
    found = await list_parked(records, service, limit=limit)
    if service is not None and not found.tasks:  # its runs may have been removed before its tasks
        await records.need_service(service)
    return found


def _text(found: ParkedList, limit: int) -> str:
    if not found.tasks:
        return "no task waits for capacity"
    whole = {str(entry.columns["request_id"]) for entry in found.tasks}
    known = Counter(map(short_id, whole))
    text = table(_HEADERS, [_row(entry, known) for entry in found.tasks])
    return (
        f"{text}\nthere are more than {limit}: a larger --limit shows them" if found.more else text
    )


def _row(entry: ParkedEntry, known: Mapping[str, int]) -> tuple[object, ...]:
    columns = entry.columns
    request_id = str(columns["request_id"])
    short = short_id(request_id)
    kind = columns["resource_kind"]
    return (
        short if known[short] == 1 else safe(request_id, longest=MAX_NAME),
        columns["method"],
        None if kind is None else f"{kind}:{columns['resource_id']}",
        duration(entry.waits_s),
        deadline_words(entry.left_s),
        columns["parkings"],
        safe(requested_words(columns["requested"] or {}), longest=_LONGEST_REQUESTED),
        safe(columns["detail"], longest=_LONGEST_REASON),
    )


def read_set(words: tuple[str, ...]) -> Mapping[str, Any]:
    """The values of `--set name=value`, each JSON or text as `gracekit call` reads it.

    Raises:
        click.UsageError: a word is no `name=value`, or no message could carry it.
    """
    try:
        given: dict[str, Any] = plain(arguments(words, None, option="--set"), "--set")
    except UnserialisableError as error:
        raise click.UsageError(safe(error)) from None
    if _has_nul(given):
        raise click.UsageError("--set has a NUL character, which no store takes")
    return given


def _has_nul(value: object) -> bool:
    match value:
        case str():
            return "\0" in value
        case Mapping():
            return any(_has_nul(part) for pair in value.items() for part in pair)
        case list():
            return any(map(_has_nul, value))
    return False
