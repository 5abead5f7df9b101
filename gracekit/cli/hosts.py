"""`gracekit hosts`: who may act on a store, and the word that a host does not come back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

import click

from gracekit.cli.call import check_transport
from gracekit.cli.main import HintingGroup, tell
from gracekit.cli.options import CommonOptions, common, reason_option, who
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
from gracekit.runs.run import declared, host_gone
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
    left = duration(one.trust_left_s)
    names = (one.host, one.instance, one.service, one.generation, one.state)
    numbers = (left, one.tasks, one.leases, "yes" if one.draining else "no")
    return (*names, *numbers, one.version, duration(age_s(time.time(), one.since)))


# -- gone ---------------------------------------------------------------------------------


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
    failure = None
    try:
        report |= asyncio.run(_look_into(queues, options.settings, empty=empty_queues))
    except GracekitError as error:  # what was recorded is printed first
        failure = error
    click.echo(json_text(report) if options.as_json else _text(report, failure))
    if failure is not None and empty_queues:
        raise failure


def _text(report: Mapping[str, Any], failure: GracekitError | None) -> str:
    messages = f"its queues were not looked at: {failure}"
    if failure is None:
        messages = f"{plural(report['messages'], 'message')} in its queues"
        if report["messages"]:
            messages += "; removed" if report["emptied"] else "; --empty-queues removes them"
    tasks, holds = plural(report["tasks"], "task"), plural(report["holds"], "hold")
    lines = (
        f"{safe(report['host'])} is on record as gone: {safe(report['reason'])}",
        f"{plural(len(report['runs']), 'run')} declared dead",
        f"{tasks} and {holds} wait for it alone: living runs of its services end them",
        f"{plural(report['findings'], 'waiting resource')} removed",
        safe(messages, longest=LONGEST_WHY),
    )
    return "\n".join(lines)


async def _declare(
    records: StoreRecords, settings: Settings, host: str, reason: str
) -> dict[str, Any]:
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
        for run_id, number in silent.items():
            batch = declared(run_id, number, by=who(), reason=reason, at=engine.wall())
            with contextlib.suppress(ConflictError):  # a run was quicker, or it has beaten
                await engine.commit(batch)
                dead.append(run_id)
        report = await _record(engine, host, reason)
    for service in {run.service for run in await records.living()}:
        await records.wake_living(service)
    return {"host": host, "reason": reason, "runs": dead, **report}


async def _watch(records: StoreRecords, host: str) -> Mapping[str, int]:
    """The last beat of each run of *host* that may be declared dead; waits for that.

    Raises:
        GracekitError: one lives.
    """
    watch, has_told = BeatWatch(), False
    while True:
        silent = await look_at_beats(records, watch)
        ours = [run for run in await records.not_adopted() if run.host == host]
        found, waits_s = dict[str, int](), list[float]()
        for run, life in await records.judge_all(ours):
            if (seen := watch.seen.get(run.run_id)) is None:
                continue  # it may act no more
            if life.is_alive or seen.has_changed:
                raise GracekitError(
                    f"{label(run)} (run {run.run_id}) on host {host} is "
                    f"{life if life.is_alive else 'alive: it beats'}; on that host, "
                    f"`gracekit drain {await records.name_of(run)}` ends it"
                )
            found[run.run_id] = seen.number
            if not life.is_dead and seen.dead_s is not None and run.run_id not in silent:
                waits_s.append(seen.dead_s)
        if not waits_s:
            return found
        if not has_told:
            has_told = True
            runs = plural(len(waits_s), "run")
            tell(f"watching {runs} of {host} for {duration(max(waits_s))}", prefix="")
        await asyncio.sleep(min(LOOK_S, watch.every_s(LOOK_S)))


async def _record(engine: Engine, host: str, reason: str) -> dict[str, Any]:
    """Commit the word; returns how much waits for the host."""
    now = engine.wall()
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
    counts = {"tasks": rows[tasks][0][0], "holds": rows[holds][0][0]}
    return {**counts, "findings": len(rows[findings]), "messages": None, "emptied": False}


async def _queues(records: StoreRecords, host: str) -> list[Queue]:
    """The directed queues of *host* and its instances, without those of other hosts."""
    places = await list_places(records.engine)
    names = {host} | {place.instance for place in places if place.host == host}
    names -= {name for one in places if one.host != host for name in (one.host, one.instance)}
    topics = {topic for one in places for topic in (one.topic, one.ops_topic)}
    return [directed_queue(topic, name) for topic in sorted(topics) for name in sorted(names)]


async def _look_into(queues: list[Queue], settings: Settings, *, empty: bool) -> dict[str, Any]:
    check_transport(settings.transport_url)
    async with opened_transport(settings) as transport:
        messages = await transport.depth(queues)
        if empty:
            await transport.discard(queues)
        return {"messages": messages, "emptied": empty and await transport.depth(queues) == 0}
