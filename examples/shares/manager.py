"""The share manager: a service whose records cannot stay in a transient status for ever.

Two things look after a share that says `creating`. While its request is on
record, the task's own policy does: `on_interrupt="probe"` asks the backend, and
makes the share if it is not there. When no request is on record any more, the
rule of the status does: it asks the same backend, and if the share is not there
the record is in error, because nobody is left who would make it.

README.md has the rules as a table. One host:
`GRACEKIT_HOST=vm-0 gracekit run examples.shares.manager:svc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.shares.database import TRANSIENT, Database, Record
from examples.shares.driver import Driver, DummyDriver, Thing
from gracekit import (
    Absent,
    Context,
    Done,
    Fail,
    Found,
    ResourceKind,
    Retry,
    Service,
    Settled,
    Wait,
)

Truth = Settled | Absent | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the manager reads from its environment.

    Attributes:
        database: File of the records.
        backend: Directory of the dummy backend.
        host: Whose records this process looks after.
        stuck_after: How long a record has had its status before a later pass settles it.
        max_wait: How long a backend that does not answer is asked again.
    """

    database: Path
    backend: Path
    host: str
    stuck_after: str
    max_wait: str

    @classmethod
    def from_environment(cls) -> Config:
        """Read the variables, with defaults for a first look."""
        get = os.environ.get
        return cls(
            database=Path(get("SHARES_DATABASE", "shares.db")),
            backend=Path(get("SHARES_BACKEND", "backend")),
            host=get("GRACEKIT_HOST", socket.gethostname()),
            stuck_after=get("SHARES_STUCK_AFTER", "10m"),
            max_wait=get("SHARES_MAX_WAIT", "10m"),
        )


config = Config.from_environment()
database = Database(config.database)
driver: Driver = DummyDriver(config.backend)
svc = Service("share-manager")


class StaleError(Exception):
    """A later owner has written to the record."""


def token(ctx: Context) -> int:
    """The fencing token of the lease under which this code runs; it always has one."""
    assert ctx.fence is not None, "a rule, and a method with a resource, has a lease"
    return ctx.fence


# -- the kinds, in the order in which they are settled ------------------------------------


def kind_of(
    name: str,
    *,
    needs: ResourceKind | None = None,
    after: ResourceKind | None = None,
    is_needed: bool = False,
) -> ResourceKind:
    """Declare a kind, and where its records are found and written.

    All kinds have one table, so they differ in the name alone. In a service with a table for each
    kind, the two functions stand there for each, marked with `@share.find` and `@share.write`.

    Args:
        name: Of the kind.
        needs: Kind of the thing that `parent` names; without that one it is of no use.
        after: Kind that is settled before it; None if that is the one that it needs.
        is_needed: Whether other kinds need it. Then those that have failed are found too, also
            long after they have: what needs them fails, and no backend is asked.
    """
    kind = svc.kind(
        name,
        after=after or needs or (),
        statuses=TRANSIENT[name],
        stuck_after=config.stuck_after,
        max_wait=config.max_wait,
    )

    def statuses() -> frozenset[str]:
        return TRANSIENT[name] | (kind.failed_statuses if is_needed else frozenset())

    @kind.find
    def find(_ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        return [
            Found(
                id=record.id,
                status=record.status,
                since=record.updated_at,
                busy=record.task_state is not None,
                needs=[needs.of(record.parent)] if needs else [],
            )
            for record in database.page(name, config.host, statuses(), after, limit)
        ]

    @kind.write
    def write(ctx: Context, found: Found, status: str, facts: Mapping[str, object]) -> bool:
        seen, fence = found.status, token(ctx)
        return database.write(name, found.id, seen=seen, status=status, fence=fence, facts=facts)

    return kind


server = kind_of("share_server", is_needed=True)
share = kind_of("share", needs=server, is_needed=True)
replica = kind_of("replica", needs=share)
snapshot = kind_of("snapshot", needs=share, after=replica)
group = kind_of("share_group", needs=server, after=snapshot, is_needed=True)
group_snapshot = kind_of("share_group_snapshot", needs=group)
backup = kind_of("backup", needs=share, after=group_snapshot)


# -- share servers ------------------------------------------------------------------------

server.mark(
    creating="error",
    server_network_change="error",
    managing="manage_error",
    unmanaging="unmanage_error",
)
server.leave(
    "server_migrating", "server_migrating_to", why="server_migration_complete goes on with it"
)


@server.delete("deleting", done="deleted", failed="error")
async def delete_server_again(ctx: Context, found: Found) -> None:
    """What is left of a share server."""
    await driver.delete("share_server", found.id, fence=token(ctx))


# -- shares -------------------------------------------------------------------------------


@share.probe("creating", "creating_from_snapshot", failed="error")
async def was_it_created(_ctx: Context, found: Found) -> Truth:
    """A share that is there is available, and can be mounted where the backend says."""
    return judged(await driver.get_share_status(found.id), "export_locations")


@share.probe("extending", failed="extending_error")
@share.probe("shrinking", failed="shrinking_error")
async def which_size_has_it(_ctx: Context, found: Found) -> Truth:
    """The size is the backend's, whether or not that is the size which was asked for."""
    return judged(await driver.get_share_status(found.id), "size")


@share.delete("deleting", "deferred_deleting", done="deleted", failed="error_deleting")
async def delete_share_again(ctx: Context, found: Found) -> None:
    """What is left of a share."""
    await driver.delete("share", found.id, fence=token(ctx))


share.mark(
    manage_starting="manage_error",
    unmanage_starting="unmanage_error",
    restoring="error",
    reverting="error",
    replication_change="error",
    backup_creating="error",
    backup_restoring="error",
)
share.leave("server_migrating", "server_migrating_to", why="it moves with its share server")


# -- replicas and snapshots ---------------------------------------------------------------


@replica.probe("creating", failed="error")
async def was_replica_created(_ctx: Context, found: Found) -> Truth:
    """A replica that is there is available."""
    return judged(await driver.get_replica_status(found.id))


@replica.delete("deleting", done="deleted", failed="error_deleting")
async def delete_replica_again(ctx: Context, found: Found) -> None:
    """What is left of a replica."""
    await driver.delete("replica", found.id, fence=token(ctx))


@snapshot.probe("creating", failed="error")
async def was_snapshot_created(_ctx: Context, found: Found) -> Truth:
    """A snapshot that is there is available."""
    return judged(await driver.get_snapshot_status(found.id))


@snapshot.delete("deleting", done="deleted", failed="error_deleting")
async def delete_snapshot_again(ctx: Context, found: Found) -> None:
    """What is left of a snapshot."""
    await driver.delete("snapshot", found.id, fence=token(ctx))


snapshot.mark(manage_starting="manage_error", unmanage_starting="unmanage_error", restoring="error")


# -- groups and their snapshots -----------------------------------------------------------


@group.probe("creating", failed="error")
async def was_group_created(_ctx: Context, found: Found) -> Truth:
    """A group that is there is available."""
    return judged(await driver.get_share_group_status(found.id))


@group.delete("deleting", done="deleted", failed="error_deleting")
async def delete_group_again(ctx: Context, found: Found) -> None:
    """What is left of a group."""
    await driver.delete("share_group", found.id, fence=token(ctx))


@group_snapshot.probe("creating", failed="error")
async def was_group_snapshot_created(_ctx: Context, found: Found) -> Truth:
    """A snapshot of a group that is there is available."""
    return judged(await driver.get_share_group_snapshot_status(found.id))


@group_snapshot.delete("deleting", done="deleted", failed="error_deleting")
async def delete_group_snapshot_again(ctx: Context, found: Found) -> None:
    """What is left of a snapshot of a group."""
    await driver.delete("share_group_snapshot", found.id, fence=token(ctx))


# -- backups ------------------------------------------------------------------------------

backup.leave("creating", "restoring", why="the backup driver's continue tasks go on with it")


@backup.delete("deleting", done="deleted", failed="error_deleting")
async def delete_backup_again(ctx: Context, found: Found) -> None:
    """What is left of a backup."""
    await driver.delete("backup", found.id, fence=token(ctx))


def judged(there: Thing | None, *facts: str) -> Truth:
    """What the answer of a backend says about a record.

    Args:
        there: The answer.
        facts: Attributes of it that the record takes over if the thing is ready.
    """
    if there is None:
        return Absent()
    if there.state == "working":
        return Wait("1s")
    if there.state != "ready":
        return Absent(f"the backend says that it is {there.state}")
    return Settled("available", **{name: getattr(there, name) for name in facts})


# -- requests -----------------------------------------------------------------------------


@svc.rpc(resource="share", on_interrupt="probe")
async def create_share(ctx: Context, share: str, size: int) -> str:
    """Make a share; returns its status then."""
    with working(ctx, "share", share, "creating", failed="error") as begun:
        if begun:
            made = await driver.create_share(share, size, fence=token(ctx))
            finish(ctx, "share", share, "creating", export_locations=made.export_locations)
    return status_of("share", share)


@create_share.probe
async def is_share_created(ctx: Context, share: str, size: int) -> Done | Fail | Retry | Wait:
    """Asked after a crash. Unlike a rule, a task goes on: what is not there is made."""
    there = await driver.get_share_status(share)
    if there is None:
        return Retry()
    match judged(there):
        case Wait() as wait:
            return wait
        case Absent(reason):
            finish(ctx, "share", share, "creating", status="error")
            return Fail(reason)
    finish(ctx, "share", share, "creating", export_locations=there.export_locations)
    return Done(status_of("share", share))


@svc.rpc(resource="share", on_interrupt="retry")
async def extend_share(ctx: Context, share: str, size: int) -> str:
    """Make a share larger; the same request twice does no harm."""
    with working(ctx, "share", share, "extending", failed="extending_error") as begun:
        if begun:
            made = await driver.resize_share(share, size, fence=token(ctx))
            finish(ctx, "share", share, "extending", size=made.size)
    return status_of("share", share)


@svc.rpc(resource="share", on_interrupt="retry")
async def delete_share(ctx: Context, share: str) -> str:
    """Delete a share; what is gone already is no error."""
    with working(ctx, "share", share, "deleting", failed="error_deleting") as begun:
        if begun:
            await driver.delete("share", share, fence=token(ctx))
            finish(ctx, "share", share, "deleting", status="deleted")
    return status_of("share", share)


@svc.rpc(resource="snapshot", on_interrupt="retry")
async def create_snapshot(ctx: Context, snapshot: str) -> str:
    """Make a snapshot; one that exists already is left as it is."""
    with working(ctx, "snapshot", snapshot, "creating", failed="error") as begun:
        if begun:
            await driver.create_snapshot(snapshot, fence=token(ctx))
            finish(ctx, "snapshot", snapshot, "creating")
    return status_of("snapshot", snapshot)


@contextlib.contextmanager
def working(ctx: Context, kind: str, id_: str, status: str, *, failed: str) -> Iterator[bool]:
    """Work on a record that says *status*; if that raises, it says *failed*.

    The token is written before anything else happens. From then on no earlier owner can change
    the record. The block is given False if the record says something else: it was finished by an
    earlier attempt, or somebody has decided otherwise, and there is nothing to do.

    A drain cancels the block, which is no failure: the next start goes on.

    Raises:
        StaleError: the record has a higher token.
    """
    begun = database.write(kind, id_, seen=status, status=status, fence=token(ctx))
    if not begun and status_of(kind, id_) == status:
        raise StaleError(f"{kind} {id_}: token {token(ctx)} is stale, a later owner has written")
    try:
        yield begun
    except Exception:
        finish(ctx, kind, id_, status, status=failed)
        raise


def finish(
    ctx: Context, kind: str, id_: str, seen: str, *, status: str = "available", **facts: object
) -> None:
    """Write how the work has ended, unless the record has moved on."""
    database.write(kind, id_, seen=seen, status=status, fence=token(ctx), facts=facts)


def status_of(kind: str, id_: str) -> str:
    """The status on record."""
    record = database.get(kind, id_)
    return "deleted" if record is None else record.status


# -- the other pass -----------------------------------------------------------------------

ENSURED: Final = frozenset({"available", "ensuring"})
PAGE: Final = 100
ANSWER_S: Final = 2.0


@svc.on_start
async def ensure_shares() -> None:
    """Ask the backend where the available shares are exported: it may have changed meanwhile.

    The statuses `available` and `ensuring` belong to this pass, so no kind has a rule for them. A
    share that the backend does not answer for stays `ensuring` until the next start.
    """
    database.create()
    after = None
    while page := database.page("share", config.host, ENSURED, after, PAGE):
        await asyncio.gather(*map(ensure, page))
        after = page[-1].id


async def ensure(record: Record) -> None:
    """Take the export locations over. It has no lease; the comparison of the status protects."""
    if not database.write("share", record.id, seen=record.status, status="ensuring"):
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            truth = judged(await driver.get_share_status(record.id), "export_locations")
    except NotImplementedError:
        truth = Settled("available")
    except Exception as error:  # noqa: BLE001 - one share that cannot be asked stops no start
        truth = Absent(repr(error))
    if isinstance(truth, Settled):
        database.write("share", record.id, seen="ensuring", status=truth.status, facts=truth.facts)
    else:
        print(f"{record.id} stays ensuring: {truth}", flush=True)
