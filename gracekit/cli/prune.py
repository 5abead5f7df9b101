"""`gracekit prune`: remove what hosts that do not come back have left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec

from gracekit.cli.call import check_transport
from gracekit.cli.options import CommonOptions, common, need_duration
from gracekit.cli.records import StoreRecords
from gracekit.cli.text import json_text, safe
from gracekit.clock import Clock, age_s
from gracekit.config.settings import Settings
from gracekit.config.values import parse_duration
from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import gone_at
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Queue, Transport, directed_queue
from gracekit.runs.pages import Place, list_places, list_seen_since
from gracekit.runs.run import Run


class _Left(msgspec.Struct, frozen=True, kw_only=True):
    """What a store says of hosts and instances, by name.

    Attributes:
        topics: Of all services on record.
        known: Hosts and instances on record.
        kept: Those that are needed, or may be: a run lives or ended lately, or work waits.
        wanted: Those of them that are kept for their work alone.
    """

    topics: Sequence[str]
    known: frozenset[str]
    kept: frozenset[str]
    wanted: frozenset[str]

    def queues(self, names: Iterable[str]) -> list[Queue]:
        """The directed queues of *names* that nobody needs.

        Names may have dots: `a.b` is that of a host `b` of topic `a`, and that of a topic.
        """
        idle = sorted(set(names) - self.kept)
        needed = {directed_queue(topic, name).name for topic in self.topics for name in self.kept}
        needed |= set(self.topics)
        left = [directed_queue(topic, name) for name in idle for topic in self.topics]
        return [queue for queue in left if queue.name not in needed]


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, by name.

    Attributes:
        queues: Removed ones, or with `--dry-run` those that would be.
        waiting: Queues that are kept because messages wait in them, and how many.
    """

    queues: Sequence[str]
    waiting: Mapping[str, int]


@click.command()
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A host or instance that is gone and no longer on record in the store.",
)
@click.option(
    "--gone-for",
    default="1d",
    show_default=True,
    metavar="DURATION",
    callback=need_duration,
    help="Keep the queues of a host whose last run ended less than this time ago.",
)
@common
def prune(
    options: CommonOptions, /, *, dry_run: bool, hosts: tuple[str, ...], gone_for: str
) -> None:
    """Remove the queues of hosts that do not come back.

    A queue of a host or instance is removed if none of its runs lives, no task
    and no hold waits for it, nobody reads the queue and no message is in it. A
    later request to that host is refused at once, because there is no such
    queue; a start of the host makes it again. Queues that are kept because a
    message, a task or a hold waits are listed, too.

    RabbitMQ does not list its queues. So the command looks for those of hosts
    that are on record in the store, and of each --host.
    """
    gone_for_s = parse_duration(gone_for)
    check_transport(options.settings.transport_url)
    with StoreRecords(options.settings) as records:
        left = asyncio.run(_look(records, gone_for_s))
        found = asyncio.run(_prune_queues(options, left, hosts, dry_run=dry_run))
    if options.as_json:
        click.echo(json_text(_as_json(found, left, dry_run=dry_run)))
    else:
        for line in _lines(found, left, dry_run=dry_run):
            click.echo(line)


def _as_json(found: _Found, left: _Left, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "queues": found.queues,
        "kept": [{"queue": name, "messages": n} for name, n in found.waiting.items()],
        "kept_hosts": sorted(left.wanted),
    }


def _lines(found: _Found, left: _Left, *, dry_run: bool) -> Iterator[str]:
    done = "would remove" if dry_run else "removed"
    for name in found.queues:
        yield f"{done} queue {safe(name)}"
    if not found.queues:
        yield "nothing to remove"
    for name, number in found.waiting.items():
        wait = "1 message waits" if number == 1 else f"{number} messages wait"
        yield f"kept queue {safe(name)}: {wait}"
    for name in sorted(left.wanted):
        yield f"kept the queues of {safe(name)}: a task or hold in the store waits for it"


async def _look(records: StoreRecords, gone_for_s: float) -> _Left:
    places = await list_places(records.engine)
    wanted = frozenset(str(target) for (target,) in await records.engine.query(sql.WANTED_TARGETS))
    not_adopted = await records.not_adopted()
    needed = _names(run for run in not_adopted if _is_needed(records, run, gone_for_s))
    needed |= await list_seen_since(records.engine, time.time() - gone_for_s)
    return _Left(
        topics=sorted({topic for place in places for topic in (place.topic, place.ops_topic)}),
        known=_names(places),
        kept=needed | wanted,
        wanted=wanted - needed,
    )


def _is_needed(records: StoreRecords, run: Run, gone_for_s: float) -> bool:
    return not records.judge(run).is_dead or age_s(time.time(), gone_at(run)) < gone_for_s


def _names(ones: Iterable[Run | Place]) -> frozenset[str]:
    return frozenset(name for one in ones for name in (one.host, one.instance))


async def _prune_queues(
    options: CommonOptions, left: _Left, hosts: Sequence[str], *, dry_run: bool
) -> _Found:
    """Remove the queues that nobody needs; what became of each."""
    async with opened_transport(options.settings) as transport:
        queues = left.queues([*left.known, *hosts, *await _listed(transport, left.topics)])
        depths = {queue.name: await transport.depth([queue]) for queue in queues}
        removed = await transport.prune(queues, dry_run=dry_run)
        return _Found(
            queues=sorted(queue.name for queue in removed),
            waiting={name: depths[name] for name in sorted(depths) if depths[name]},
        )


@contextlib.asynccontextmanager
async def opened_transport(settings: Settings) -> AsyncIterator[Transport]:
    """The transport, to look at its queues and remove some."""
    transport = open_transport(
        settings.transport_url,
        process=Process(),
        clock=Clock(),
        exchange=settings.exchange,
        profile=settings.declare_profile,
    )
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


async def _listed(transport: Transport, topics: Sequence[str]) -> list[str]:
    """Hosts and instances of which the transport has a queue."""
    found = await transport.directed(topics) if topics else []
    return [queue.name.removeprefix(f"{queue.topic}.") for queue in found]
