"""The driver: what the manager asks of a storage backend, and a dummy backend in a directory.

    backend.log        one JSON line for each call, in the order in which they were made
    share/sh-1.json    a share as the backend has it
    snapshot/sn-1.json a snapshot, and so on for each kind
    faults/sh-1        while this file exists, calls about sh-1 go wrong as its text says

Every `get_..._status` is optional. A driver that does not have one inherits the
one that raises NotImplementedError, and the record is then marked in error,
because it is not known what became of it.

A changing call brings the fencing token of the process that makes it. The backend keeps
the highest one that it has seen for each thing, also after the thing is gone, and
refuses a lower one.

A call takes microseconds. That of a real backend would be awaited, or made in a
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

Fault = Literal["raise", "not implemented", "hang", "slow"]

SLOW_S: Final = 0.2
"""How long a call about a slow thing takes."""


class BackendError(Exception):
    """The backend could not do it, or refuses to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """A share, a snapshot, or anything else that a backend keeps.

    Attributes:
        state: What the backend says of it: `ready`, `working` while it is being made or changed,
            `broken`; `gone` is only in its file, for the sake of the token.
        size: In GiB.
        export_locations: Where a share can be mounted.
        fence: The highest token that has changed it.
    """

    state: Literal["ready", "working", "broken", "gone"] = "ready"
    size: int = 0
    export_locations: Sequence[str] = ()
    fence: int = 0


class Driver:
    """What the manager may ask of a backend. None as an answer says that there is no such thing."""

    async def create_share(self, share: str, size: int, *, fence: int) -> Thing:
        """Make a share; one that exists already is returned as it is."""
        raise NotImplementedError

    async def resize_share(self, share: str, size: int, *, fence: int) -> Thing:
        """Make a share larger or smaller."""
        raise NotImplementedError

    async def create_snapshot(self, snapshot: str, *, fence: int) -> Thing:
        """Make a snapshot; one that exists already is returned as it is."""
        raise NotImplementedError

    async def delete(self, kind: str, id_: str, *, fence: int) -> None:
        """Delete a thing of any kind; one that is gone already is no error."""
        raise NotImplementedError

    async def get_share_status(self, share: str) -> Thing | None:
        """Ask for a share."""
        raise NotImplementedError

    async def get_replica_status(self, replica: str) -> Thing | None:
        """Ask for a replica of a share."""
        raise NotImplementedError

    async def get_snapshot_status(self, snapshot: str) -> Thing | None:
        """Ask for a snapshot."""
        raise NotImplementedError

    async def get_share_group_status(self, group: str) -> Thing | None:
        """Ask for a group of shares."""
        raise NotImplementedError

    async def get_share_group_snapshot_status(self, snapshot: str) -> Thing | None:
        """Ask for a snapshot of a group."""
        raise NotImplementedError


class DummyDriver(Driver):
    """A backend made of files in the directory *root*, which is made when it is first used."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- what the manager calls ---------------------------------------------------------

    async def create_share(self, share: str, size: int, *, fence: int) -> Thing:
        """As Driver; the share has two export locations."""
        await self._called("create_share", share)
        exports = [f"nas-{n}:/{share}" for n in (1, 2)]
        return self._make("share", share, Thing(size=size, export_locations=exports, fence=fence))

    async def resize_share(self, share: str, size: int, *, fence: int) -> Thing:
        """As Driver."""
        await self._called("resize_share", share)
        with self._locked():
            there = self._fenced("share", share, fence)
            if there.state == "gone":
                raise BackendError(f"there is no share {share}")
            return self._put("share", share, replace(there, size=size))

    async def create_snapshot(self, snapshot: str, *, fence: int) -> Thing:
        """As Driver."""
        await self._called("create_snapshot", snapshot)
        return self._make("snapshot", snapshot, Thing(fence=fence))

    async def delete(self, kind: str, id_: str, *, fence: int) -> None:
        """As Driver; its file stays with the token, so that a late create is refused."""
        await self._called(f"delete_{kind}", id_)
        with self._locked():
            self._put(kind, id_, replace(self._fenced(kind, id_, fence), state="gone"))

    async def get_share_status(self, share: str) -> Thing | None:
        """As Driver."""
        return await self._asked("share", share)

    async def get_replica_status(self, replica: str) -> Thing | None:
        """As Driver."""
        return await self._asked("replica", replica)

    async def get_snapshot_status(self, snapshot: str) -> Thing | None:
        """As Driver."""
        return await self._asked("snapshot", snapshot)

    async def get_share_group_status(self, group: str) -> Thing | None:
        """As Driver."""
        return await self._asked("share_group", group)

    async def get_share_group_snapshot_status(self, snapshot: str) -> Thing | None:
        """As Driver."""
        return await self._asked("share_group_snapshot", snapshot)

    # -- what people and tests do behind the manager's back -------------------------------

    def put(self, kind: str, id_: str, thing: Thing) -> None:
        """Let the backend have *thing*, whatever it had before."""
        with self._locked():
            self._put(kind, id_, thing)

    def has(self, kind: str, id_: str) -> bool:
        """Whether the backend has it; no call, so not in the log."""
        return self._get(kind, id_).state != "gone"

    def plant(self, id_: str, fault: Fault) -> None:
        """Let all calls about *id_* go wrong, until `mend`."""
        path = self._fault(id_)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fault)

    def mend(self, id_: str) -> None:
        """Let calls about *id_* be answered again; those that hang are answered now."""
        self._fault(id_).unlink(missing_ok=True)

    # -- calls ----------------------------------------------------------------------------

    async def _asked(self, kind: str, id_: str) -> Thing | None:
        await self._called(f"get_{kind}_status", id_)
        there = self._get(kind, id_)
        return None if there.state == "gone" else there

    async def _called(self, call: str, id_: str) -> None:
        """Log the call, and do what is planted for it."""
        line = json.dumps({"call": call, "id": id_, "pid": os.getpid(), "at": time.time()})
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "backend.log").open("ab", buffering=0) as log:
            log.write(f"{line}\n".encode())  # one write: lines of two processes do not mix
        fault = self._fault(id_)
        try:
            text = fault.read_text().strip()
        except FileNotFoundError:
            return
        match text:
            case "raise":
                raise BackendError(f"{call} of {id_} has failed")
            case "not implemented":
                raise NotImplementedError(call)
            case "hang":
                while fault.exists():  # noqa: ASYNC110 - removed by hand, or by another process
                    await asyncio.sleep(0.02)
            case _:
                await asyncio.sleep(SLOW_S)

    def _make(self, kind: str, id_: str, thing: Thing) -> Thing:
        with self._locked():
            there = self._fenced(kind, id_, thing.fence)
            return self._put(kind, id_, thing if there.state == "gone" else there)

    def _fenced(self, kind: str, id_: str, fence: int) -> Thing:
        """The thing as it is, with *fence* as its highest token."""
        there = self._get(kind, id_)
        if fence < there.fence:
            raise BackendError(f"{id_}: token {fence} is stale, {there.fence} has been here")
        return replace(there, fence=fence)

    # -- files ------------------------------------------------------------------------------

    def _get(self, kind: str, id_: str) -> Thing:
        try:
            return Thing(**json.loads(self._file(kind, id_).read_text()))
        except FileNotFoundError:
            return Thing(state="gone")

    def _put(self, kind: str, id_: str, thing: Thing) -> Thing:
        path = self._file(kind, id_)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(thing)))
        new.replace(path)
        return thing

    def _file(self, kind: str, id_: str) -> Path:
        return self.root / kind / f"{quote(id_, safe='')}.json"

    def _fault(self, id_: str) -> Path:
        return self.root / "faults" / quote(id_, safe="")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time, of all processes; the kernel takes the lock from the dead."""
        self.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
