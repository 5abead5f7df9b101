"""`gracekit hosts`: who may act on a store, and the word that a host does not come back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Final

import click
import msgspec

from gracekit.cli.call import check_transport
from gracekit.cli.main import tell
from gracekit.cli.options import (
    CommonOptions,
    HintingGroup,
    common,
    reason_option,
    refuse_options_before_the_verb,
    who,
)
from gracekit.cli.prune import opened_transport
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import OPERATOR, open_writing
from gracekit.cli.text import LONGEST_WHY, json_text, plural, safe, table
from gracekit.clock import age_s
from gracekit.config.settings import Settings
from gracekit.config.values import did_you_mean, duration
from gracekit.errors import ConflictError, GracekitError
from gracekit.journal.findings_sql import FORGET_BROKEN_OF_HOST, FORGET_HOST, FORGET_PASSES
from gracekit.journal.holds_sql import COUNT_FOR_HOST as COUNT_HOLDS
from gracekit.journal.retention_sql import COUNT_FOR_HOST as COUNT_TASKS
from gracekit.journal.tasks_sql import COUNT, NOTE
from gracekit.listings import listings_sql as sql
from gracekit.listings.host_list import HostState, list_hosts, look_at_beats, watch_beats
from gracekit.listings.store_view import label
from gracekit.rpc.transport import Queue, directed_queue
from gracekit.runs.pages import list_places
from gracekit.runs.run import Run, declared, host_gone
from gracekit.runs.watch import BeatWatch
from gracekit.store.engine import Engine

LOOK_S: Final = 1.0
"""Seconds between two looks at the beats of a host, at most."""
_HEADERS: Final = (
    "HOST", "INSTANCE", "SERVICE", "GEN", "STATE", "TRUST", "TASKS", "LEASES", "DRAINS",
    "VERSION", "SINCE",
)  # fmt: skip


@click.group(cls=HintingGroup, invoke_without_command=True)
@common
def hosts(options: CommonOptions, /) -> None:
    """List the hosts of a store: the newest run of each instance of a service.

    A run of another host on a store in PostgreSQL is LIVE if it was seen to
    beat; the command waits for that as long as one beat takes, 4 seconds by
    default. Until it was seen to beat, it is UNKNOWN. `gone` says that a host
    does not come back.
    """
    if click.get_current_context().invoked_subcommand is not None:
        refuse_options_before_the_verb()
        return
    with StoreRecords(options.settings) as records:
        found = asyncio.run(_list(records))
    if options.as_json:
        click.echo(json_text({"hosts": [one.as_json() for one in found]}))
        return
    click.echo(table(_HEADERS, list(map(_row, found))) if found else "no host is on record")
    for one in found:
        if one.state in {"FAIL", "UNKNOWN"}:
            words = f"{one.service}@{one.instance} is {one.state}: {one.why}"
            click.echo(safe(words, longest=LONGEST_WHY))


async def _list(records: StoreRecords) -> list[HostState]:
    return await list_hosts(records, await watch_beats(records))


def _row(one: HostState) -> tuple[object, ...]:
    left = "" if one.trust_left_s is None else duration(one.trust_left_s)
    numbers = (one.tasks, one.leases, "yes" if one.draining else "no")
    since = duration(age_s(time.time(), one.since))
    names = (one.host, one.instance, one.service, one.generation, one.state)
    return (*names, left, *numbers, one.version, since)


# -- gone ---------------------------------------------------------------------------------


class _Report(msgspec.Struct, kw_only=True):
    """What was done, in numbers.

    Attributes:
        runs: Ids of the runs that were declared dead.
        tasks: Those that wait for this host alone; living runs end them.
        holds: As tasks.
        findings: Resources that waited for this host; they were removed.
        messages: Those in its directed queues; None if these could not be looked at.
        emptied: Whether the queues were removed with them.
    """

    host: str
    reason: str
    runs: list[str]
    tasks: int
    holds: int
    findings: int
    messages: int | None = None
    emptied: bool = False


@hosts.command()
@click.argument("host")
@click.option(
    "--empty-queues", is_flag=True, help="Remove its queues, with the messages that wait there."
)
@reason_option("How you know: for the record.")
@common
def gone(options: CommonOptions, /, *, host: str, empty_queues: bool, reason: str) -> None:
    """Declare that HOST does not come back, and end what waits for it alone.

    Its runs are declared dead. On a store in PostgreSQL the command first
    watches their beats, for as long as other runs do: 30 seconds by default. If
    one beats, or is proven alive, HOST is refused: `gracekit drain` ends a run.

    Living runs of its services then end the tasks and holds that are for HOST,
    or for an instance there: tasks become ERRORED (gave_up). The next start on
    HOST makes it a host like any other.
    """
    if empty_queues:
        check_transport(options.settings.transport_url)
    with StoreRecords(options.settings) as records:
        report = asyncio.run(_declare(records, options.settings, host, reason))
        queues = asyncio.run(_queues(records, host))
    try:
        asyncio.run(_look_into(queues, report, options.settings, empty=empty_queues))
        why = ""
    except GracekitError as error:  # what was recorded is printed first
        why, failure = str(error), error
    if options.as_json:
        click.echo(json_text(msgspec.to_builtins(report)))
    else:
        click.echo(_text(report, why))
    if why and empty_queues:
        raise failure


def _text(report: _Report, why: str) -> str:
    waiting = f"{plural(report.tasks, 'task')} and {plural(report.holds, 'hold')}"
    messages = f"its queues were not looked at: {why}"
    if report.messages is not None:
        messages = f"{plural(report.messages, 'message')} in its queues"
        messages += " removed" if report.emptied else ""
        if report.messages and not report.emptied:
            messages += "; --empty-queues removes what waits there"
    lines = (
        f"{safe(report.host)} is on record as gone: {safe(report.reason)}",
        f"{plural(len(report.runs), 'run')} declared dead",
        f"{waiting} wait for it alone: living runs of its services end them",
        f"{plural(report.findings, 'waiting resource')} removed",
        safe(messages, longest=LONGEST_WHY),
    )
    return "\n".join(lines)


async def _declare(records: StoreRecords, settings: Settings, host: str, reason: str) -> _Report:
    """Put on record that *host* is gone.

    Raises:
        GracekitError: the host is not known, or a run of it may act.
    """
    known = {place.host for place in await list_places(records.engine)}
    known |= {str(target) for (target,) in await records.engine.query(sql.WANTED_TARGETS)}
    if host not in known:
        hint = did_you_mean(host, known) or "; `gracekit hosts` lists them"
        raise GracekitError(f"no host {safe(host)} is on record{hint}")
    silent = await _watch(records, host)
    async with open_writing(settings) as engine:
        dead = []
        for run, number in silent.values():
            batch = declared(run.run_id, number, by=who(), reason=reason, at=time.time())
            with contextlib.suppress(ConflictError):  # a run was quicker, or it has beaten
                await engine.commit(batch)
                dead.append(run.run_id)
        report = await _record(engine, host, reason, dead)
    for service in {run.service for run in await records.living()}:
        await records.wake_living(service)
    return report


async def _watch(records: StoreRecords, host: str) -> Mapping[str, tuple[Run, int]]:
    """The runs of *host* that may be declared dead, each with its last beat; waits for that.

    Raises:
        GracekitError: one lives.
    """
    watch, has_told = BeatWatch(), False
    while True:
        silent = await look_at_beats(records, watch)
        ours = [run for run in await records.not_adopted() if run.host == host]
        waits_s = list[float]()
        found: dict[str, tuple[Run, int]] = {}
        for run, life in await records.judge_all(ours):
            if (seen := watch.seen.get(run.run_id)) is None:
                continue  # it may act no more
            if life.is_alive or seen.has_changed:
                why = life if life.is_alive else "alive: it beats"
                name = await records.name_of(run)
                raise GracekitError(
                    f"{label(run)} (run {run.run_id}) on host {host} is {why}; on that host, "
                    f"`gracekit drain {name}` ends it"
                )
            found[run.run_id] = run, seen.number
            if not life.is_dead and seen.dead_s is not None and run.run_id not in silent:
                waits_s.append(seen.dead_s)
        if not waits_s:
            return found
        if not has_told:
            has_told = True
            runs = plural(len(waits_s), "run")
            tell(f"watching {runs} of {host} for {duration(max(waits_s))}", prefix="")
        await asyncio.sleep(min(LOOK_S, watch.every_s(LOOK_S)))


async def _record(engine: Engine, host: str, reason: str, dead: list[str]) -> _Report:
    now = time.time()
    batch = host_gone(host, by=who(), reason=reason, at=now)
    tasks, holds = batch.ask(COUNT_TASKS, host), batch.ask(COUNT_HOLDS, host)
    findings = batch.ask(FORGET_HOST, host)
    batch.add(FORGET_PASSES, host)
    batch.add(FORGET_BROKEN_OF_HOST, host)
    batch.add(COUNT, "operator_host_gone", 1)
    detail = f"{who()}: {reason}"[:1000]
    batch.add(NOTE, now, OPERATOR, "operator_host_gone", f"host {host}", None, detail)
    try:
        rows = await engine.commit(batch)
    except ConflictError as error:
        raise GracekitError(
            f"a run of {host} has beaten or begun meanwhile, so that it is not on record as gone; "
            "see `gracekit hosts`"
        ) from error
    return _Report(
        host=host,
        reason=reason,
        runs=dead,
        tasks=int(rows[tasks][0][0] or 0),
        holds=int(rows[holds][0][0] or 0),
        findings=len(rows[findings]),
    )


async def _queues(records: StoreRecords, host: str) -> list[Queue]:
    """The directed queues of *host* and its instances, without those of other hosts."""
    places = await list_places(records.engine)
    names = {host} | {place.instance for place in places if place.host == host}
    names -= {name for one in places if one.host != host for name in (one.host, one.instance)}
    topics = {topic for one in places for topic in (one.topic, one.ops_topic)}
    return [directed_queue(topic, name) for topic in sorted(topics) for name in sorted(names)]


async def _look_into(
    queues: list[Queue], report: _Report, settings: Settings, *, empty: bool
) -> None:
    check_transport(settings.transport_url)
    async with opened_transport(settings) as transport:
        report.messages = await transport.depth(queues)
        if empty:
            await transport.discard(queues)
            report.emptied = await transport.depth(queues) == 0
