"""`gracekit lease`: declare leases, look at them, order a holder to end; `lease_run` has `run`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import click

from gracekit.cli.lease_run import name_argument, read_name, run
from gracekit.cli.main import DETACHED, HintingGroup, tell
from gracekit.cli.options import (
    CommonOptions,
    common,
    limit_option,
    need_duration,
    reason_option,
    who,
)
from gracekit.cli.order_progress import ASKED
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import OPERATOR, clock_of, open_writing
from gracekit.cli.text import LONGEST_WHY, json_text, safe, table
from gracekit.clock import age_s
from gracekit.config.values import duration, parse_duration
from gracekit.journal.tasks_sql import COUNT, NOTE
from gracekit.leases import declarations
from gracekit.leases.check import LeaseDamage, check_leases, mend_leases
from gracekit.leases.declarations import DeclaredLeases, LeaseFacts, shown
from gracekit.leases.leases import Resource
from gracekit.listings.host_list import LOOK_S, look_at_beats, watch_beats
from gracekit.listings.lease_list import LeaseInfo, infos_of, never_granted, why_held
from gracekit.process import Point
from gracekit.runs.watch import BeatWatch
from gracekit.store.batch import Batch
from gracekit.store.engine import Queries

DAMAGED: Final = 3

_Change = Callable[[DeclaredLeases], Awaitable[None]]

_HEADERS: Final = (
    "LEASE", "STATE", "TOKEN", "HOLDER", "HOST", "IS", "SINCE", "GRANTED IN", "LAST END", "PAYLOAD",
)  # fmt: skip
_RISK: Final = (
    "until the holder before notices, within seconds if it reaches the store, two may have the "
    "lease: only a backend that compares tokens is safe"
)


@click.group(cls=HintingGroup)
def lease() -> None:
    """Declare leases, look at them, hold one for a command, or order a holder to end.

    A lease says who may act on what must not be acted on twice, such as a virtual
    machine. docs/leases.md says more.
    """


lease.add_command(run)


@lease.command()
@name_argument
@click.option("--payload", metavar="TEXT", help="Up to 4096 bytes to read beside it.")
@common
def create(options: CommonOptions, /, *, resource: Resource, payload: str | None) -> None:
    """Declare a lease, so that it can be held; it is kept until `delete`."""
    _change(options, resource, "declared", lambda leases: leases.create(resource, payload))


@lease.command()
@name_argument
@common
def delete(options: CommonOptions, /, *, resource: Resource) -> None:
    """Remove a lease that nobody holds.

    If it is declared again, its tokens go on above those of before.
    """
    _change(options, resource, "removed", lambda leases: leases.delete(resource))


def _change(options: CommonOptions, resource: Resource, done: str, act: _Change) -> None:
    async def change() -> None:
        async with open_writing(options.settings) as engine:
            await act(DeclaredLeases(engine, clock_of(engine)))

    asyncio.run(change())
    kind, name = resource
    facts = json_text({"kind": kind, "id": name, "done": done})
    click.echo(facts if options.as_json else safe(f"lease {shown(resource)} is {done}"))


@lease.command()
@name_argument
@common
def status(options: CommonOptions, /, *, resource: Resource) -> None:
    """Show who holds a lease, without taking it; also one that nobody has declared.

    FREE: it can be had, in the time below GRANTED IN if there is one; nobody can
    hold one that is "not declared". EXCLUSIVE:
    a run holds it that may act. CORRUPT: the run that holds it is not on record.
    IS is what is known of that run: one of another host is LIVE if it was seen to
    beat, and the command waits for that as long as one beat takes, 4 seconds by
    default.
    """
    (info,) = _look(options, lambda engine: _one(engine, resource))
    click.echo(json_text(info.as_json()) if options.as_json else table(_HEADERS, [_row(info)]))


@lease.command("list")
@limit_option()
@click.option("--after", metavar="KIND:ID", callback=read_name, help="Only those behind this one.")
@common
def list_leases(options: CommonOptions, /, *, limit: int, after: Resource | None) -> None:
    """List declared leases by kind and id, as `status` shows one."""
    behind = after or ("", "")
    found = _look(options, lambda engine: declarations.page(engine, after=behind, limit=limit + 1))
    page = found[:limit]
    if options.as_json:
        facts = [one.as_json() for one in page]
        click.echo(json_text({"leases": facts, "complete": page == found}))
        return
    click.echo(table(_HEADERS, list(map(_row, page))) if page else "no lease is declared")
    if page != found:
        tell(f"there are more: --after {page[-1].kind}:{page[-1].id}", prefix="")


@lease.command("check")
@click.option("--mend", is_flag=True, help="Free what nobody holds, and raise all new tokens.")
@common
def check(options: CommonOptions, /, *, mend: bool) -> None:
    """Compare all leases with the tasks and runs that hold them.

    No commit of gracekit leaves them so; a table that was edited or restored by
    itself can be. Exit status: 3 if something does not fit, and was not mended.
    """
    found = _look_at_damage(options)
    if found and mend:
        asyncio.run(_mend(options))
    facts = [{"resource": one.resource, "what": one.what} for one in found]
    if options.as_json:
        click.echo(json_text({"damaged": facts, "mended": bool(found and mend)}))
    else:
        lines = [f"lease {safe(one.resource)} {one.what}" for one in found]
        click.echo("\n".join(lines) or "all leases fit")
    if found and not mend:
        raise click.exceptions.Exit(DAMAGED)


def _look_at_damage(options: CommonOptions) -> list[LeaseDamage]:
    async def look() -> list[LeaseDamage]:
        async with open_writing(options.settings) as engine:
            return await check_leases(engine)

    return asyncio.run(look())


async def _mend(options: CommonOptions) -> None:
    async with open_writing(options.settings) as engine:
        await mend_leases(engine, clock_of(engine))


def _row(info: LeaseInfo) -> tuple[object, ...]:
    now = time.time()
    since = None if info.since is None else duration(age_s(now, info.since))
    left = None if info.grantable_at is None else duration(max(0.0, info.grantable_at - now))
    name, holder = f"{info.kind}:{info.id}", (info.holder, info.host, info.holder_state)
    state = info.state if info.declared or info.token else "not declared"
    return (name, state, info.token, *holder, since, left, info.last_end, info.payload)


def _look(
    options: CommonOptions, find: Callable[[Queries], Awaitable[Sequence[LeaseFacts]]]
) -> Sequence[LeaseInfo]:
    async def look() -> Sequence[LeaseInfo]:
        found = await find(records.engine)
        if all(one.owner is None for one in found):
            return await infos_of(records, found, {})
        seen = await watch_beats(records)
        return await infos_of(records, await find(records.engine), seen)

    with StoreRecords(options.settings) as records:
        return asyncio.run(look())


async def _one(engine: Queries, resource: Resource) -> list[LeaseFacts]:
    return [await declarations.look(engine, resource) or never_granted(resource)]


@lease.command()
@name_argument
@click.option("--token", type=int, required=True, metavar="N", help="As `status` shows it.")
@reason_option("Why: for the record and for the holder.")
@click.option("--unsafe-now", is_flag=True, help="Free it at once, whatever its holder does.")
@click.option(
    "--wait",
    metavar="DURATION",
    default="60s",
    show_default=True,
    callback=need_duration,
    help="How long to wait for the end.",
)
@common
def force(
    options: CommonOptions,
    /,
    *,
    resource: Resource,
    token: int,
    reason: str,
    unsafe_now: bool,
    wait: str,
) -> None:
    """Order the holder of a lease to end, and wait until the lease is free.

    A holder that lives reads the order within a second: `on_lost` is called, or
    the command of `gracekit lease run` is ended. A holder that is gone is declared
    dead by other members, 30 seconds after its last beat by default.

    With --unsafe-now the lease is free at once, and its holder may act until it
    notices: two have it then.

    Exit status: 0; 3 if the holder has not ended within --wait, 130 after
    Ctrl-C: the order stands.
    """
    with StoreRecords(options.settings) as records:
        asyncio.run(_order(options, resource, token, reason, unsafe_now=unsafe_now))
        try:
            info = asyncio.run(_wait_free(records, resource, token, parse_duration(wait)))
        except KeyboardInterrupt:
            tell("detached; the order stands", prefix="")
            click.get_current_context().exit(DETACHED)
    is_free = info.state == "FREE"
    is_done = is_free or info.token != token
    words = f"lease {shown(resource)} is free" if is_free else why_held(info)
    if is_free and info.holder is not None:
        words += f": {info.holder} on host {info.host} is {info.holder_state}"
    elif info.grantable_at is not None:
        words += f", and is granted in {duration(info.grantable_at - time.time())}"
    words += f"; token {token} has ended" if is_done else "; the order stands"
    words += f"; {_RISK}" if unsafe_now else ""
    facts = json_text(info.as_json() | {"done": is_done, "words": words})
    click.echo(facts if options.as_json else safe(words, longest=LONGEST_WHY))
    click.get_current_context().exit(0 if is_done else ASKED)


async def _order(
    options: CommonOptions, resource: Resource, token: int, reason: str, *, unsafe_now: bool
) -> None:
    """Give the order, or free it; the same commit records that."""
    batch, subject = Batch(Point.RELEASE_LEASE), f"lease {shown(resource)}, token {token}"
    detail = f"{who()}: {'freed at once: ' if unsafe_now else ''}{reason}"[:1000]
    batch.add(COUNT, "operator_force_lease", 1)
    batch.add(NOTE, time.time(), OPERATOR, "operator_force_lease", subject, None, detail)
    async with open_writing(options.settings) as engine:
        leases = DeclaredLeases(engine, clock_of(engine))
        act = leases.take_away_now if unsafe_now else leases.order_end
        await act(resource, token, by=who(), reason=reason, batch=batch)


async def _wait_free(
    records: StoreRecords, resource: Resource, token: int, wait_s: float
) -> LeaseInfo:
    """Look until the hold with *token* has ended or its run is DEAD, for *wait_s* at most."""
    watch, until = BeatWatch(), records.clock.boot() + wait_s
    while True:
        await look_at_beats(records, watch)
        (info,) = await infos_of(records, await _one(records.engine, resource), watch.seen)
        if info.token != token or info.state == "FREE" or records.clock.boot() >= until:
            return info
        await asyncio.sleep(LOOK_S)
