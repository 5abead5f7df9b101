"""The users' side: writes what a user wants into the record, then sends the request.

    python -m examples.shares.api create sh-1 --size 5
    python -m examples.shares.api extend sh-1 --size 9
    python -m examples.shares.api snapshot sn-1 sh-1
    python -m examples.shares.api delete sh-1
    python -m examples.shares.api set share sh-1 extending     # as if by accident
    python -m examples.shares.api show

The record comes first. A process that dies between the two steps leaves a record
that says `creating`, and no request: the manager's rules find it. In the other
order there would be a request without a record, which nothing could find.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from examples.shares import manager
from examples.shares.database import Database, Record
from examples.shares.manager import config, database, svc
from gracekit import Method, RpcClient


class RefusedError(Exception):
    """The record has a status in which that cannot be done."""


class Api:
    """What users can ask for.

    Args:
        database: Of the records.
        client: To the managers.
        host: Whose manager makes new shares.
    """

    def __init__(self, database: Database, client: RpcClient, host: str) -> None:
        self.database = database
        self.client = client
        self.host = host

    async def create_share(self, share: str, *, size: int, server: str | None = None) -> None:
        """Have a share made; it is `creating` when this returns."""
        record = Record(
            kind="share", id=share, host=self.host, status="creating", size=size, parent=server
        )
        self.database.insert(record)
        await self._send(record, manager.create_share, share=share, size=size)

    async def extend_share(self, share: str, *, size: int) -> None:
        """Have a share made larger."""
        record = self._change("share", share, "extending", seen=("available",))
        await self._send(record, manager.extend_share, share=share, size=size)

    async def delete_share(self, share: str) -> None:
        """Have a share deleted, also one that is in error."""
        seen = ("available", "error", "extending_error", "shrinking_error", "error_deleting")
        record = self._change("share", share, "deleting", seen=seen)
        await self._send(record, manager.delete_share, share=share)

    async def create_snapshot(self, snapshot: str, share: str) -> None:
        """Have a snapshot of a share made."""
        record = Record(
            kind="snapshot", id=snapshot, host=self.host, status="creating", parent=share
        )
        self.database.insert(record)
        await self._send(record, manager.create_snapshot, snapshot=snapshot)

    def _change(self, kind: str, id_: str, status: str, *, seen: tuple[str, ...]) -> Record:
        """Change the status of a record, if it has one of *seen*."""
        record = self.database.get(kind, id_)
        if record is None:
            raise RefusedError(f"there is no {kind} {id_}")
        if record.status not in seen or not self.database.write(
            kind, id_, seen=record.status, status=status
        ):
            raise RefusedError(f"{kind} {id_} is {record.status}, and cannot be {status}")
        return record

    async def _send(self, record: Record, method: Method[..., Any], **arguments: object) -> None:
        """Send the request to the manager of the record, and wait until it is in the queue."""
        await self.client.prepare(host=record.host).cast(method, **arguments)


def show() -> None:
    """All records, as users see them."""
    for record in database.all():
        more = [f"size={record.size}"] if record.size else []
        more += [f"export_locations={len(record.export_locations)}"][: len(record.export_locations)]
        print(f"{record.kind}:{record.id} {' '.join((record.status, *more))}")


def set_status(kind: str, id_: str, status: str) -> None:
    """Write a status over another, without any request: what accidents do."""
    record = database.get(kind, id_)
    if record is not None:
        database.write(kind, id_, seen=record.status, status=status)


async def ask(given: argparse.Namespace) -> None:
    """Carry one command out."""
    url = os.environ.get("GRACEKIT_TRANSPORT_URL", "sqlite:///gracekit.db")
    async with svc.client(url) as client:
        api = Api(database, client, config.host)
        match given.command:
            case "create":
                await api.create_share(given.share, size=given.size, server=given.server)
            case "extend":
                await api.extend_share(given.share, size=given.size)
            case "snapshot":
                await api.create_snapshot(given.snapshot, given.share)
            case "delete":
                await api.delete_share(given.share)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="api")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    creating = commands.add_parser("create")
    creating.add_argument("share")
    creating.add_argument("--size", type=int, default=1)
    creating.add_argument("--server")
    extending = commands.add_parser("extend")
    extending.add_argument("share")
    extending.add_argument("--size", type=int, required=True)
    taking = commands.add_parser("snapshot")
    taking.add_argument("snapshot")
    taking.add_argument("share")
    commands.add_parser("delete").add_argument("share")
    setting = commands.add_parser("set")
    for name in ("kind", "id", "status"):
        setting.add_argument(name)
    commands.add_parser("show")
    given = parser.parse_args()
    database.create()
    match given.command:
        case "show":
            show()
        case "set":
            set_status(given.kind, given.id, given.status)
        case _:
            asyncio.run(ask(given))


if __name__ == "__main__":
    main()
