"""`gracekit incidents`: who ordered what, and what happened to requests beside their states."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import click

from gracekit.cli.options import CommonOptions, common, limit_option
from gracekit.cli.records import StoreRecords
from gracekit.cli.text import json_text, safe, table
from gracekit.clock import age_s
from gracekit.config.values import did_you_mean, duration
from gracekit.listings.listed_task import short_id
from gracekit.listings.store_view import list_incidents
from gracekit.recovery.resources.results import ResourceOutcome
from gracekit.store.older import LOST, OLDER
from gracekit.tracker.task import Verb

_HEADERS: Final = ("AGO", "WHAT", "RUN", "TASK", "DETAIL")
_LONGEST_DETAIL: Final = 120

KINDS: Final = (
    "adopted",
    "caller_cancel",
    "duplicate",
    "failed_attempt",
    "handed_over",
    "hook_failed",
    "hook_given_up",
    "not_parked",
    "order_carried_out",
    "parked",
    "pending_expired",
    "probe_answered",
    "rejected",
    "reply_given_up",
    "restored",
    LOST,
    OLDER,
    *(f"operator_{verb.value}" for verb in Verb),
    *(f"operator_{verb}" for verb in ("drain", "extend", "quiet", "resume", "reconcile")),
    "operator_end_hold",
    "operator_host_gone",
    "operator_force_lease",
    "operator_pause",
    "resource_kind_broken",
    *(f"resource_{outcome.value}" for outcome in ResourceOutcome),
)
"""What an incident may be; a newer gracekit may have put other kinds on record."""
_BEGINNINGS: Final = ("operator", "resource", "store")


@click.command()
@click.option(
    "--what",
    default="",
    metavar="KIND",
    help="Kinds that begin with this: `operator` for all orders.",
)
@limit_option()
@common
def incidents(options: CommonOptions, /, *, what: str, limit: int) -> None:
    """List the last incidents on record, newest first.

    Incidents are orders of operators (operator_drain, operator_cancel, ...) with
    who gave them, why, and for which run or task; and duplicates, rejected
    requests, hand-overs, replies that were given up, and a store that was lost
    or restored (store_lost, store_older).
    """
    with StoreRecords(options.settings) as records:
        found = asyncio.run(list_incidents(records, what, limit=limit))
    if not found and not any(kind.startswith(what) for kind in KINDS):
        hint = did_you_mean(what, _BEGINNINGS + KINDS)
        known = ", ".join(sorted(KINDS))
        raise click.UsageError(f"no kind of incident begins with {what!r}{hint}; they are {known}")
    if options.as_json:
        click.echo(json_text({"incidents": found}))
    else:
        click.echo(table(_HEADERS, [_row(one) for one in found]) if found else "no incidents")


def _row(incident: dict[str, Any]) -> tuple[str, ...]:
    """The run that did it; an order that the command line itself carried out has none."""
    return (
        duration(age_s(time.time(), incident["at"])),
        safe(incident["what"]),
        safe(incident["instance"] or "-"),
        safe(short_id(incident["request_id"] or "-")),
        safe(incident["detail"] or "", longest=_LONGEST_DETAIL),
    )
