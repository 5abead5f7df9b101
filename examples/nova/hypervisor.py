"""A toy hypervisor: virtual machines as files in one directory that all hosts see.

    vms/vm-1.json        its record: who may run it, and where it is going; a row of a database
    src/domains.jsonl    what was done on host src; the last line about a vm is its state there
    src/memory/vm-1/3    a page

One rule: at no moment do two hosts run one vm. Whoever acts holds the lock of
the directory, and a state changes by one write, so that the files tell what was
true at every moment, whoever was killed. A host that does not own a vm, or comes
with a stale fencing token, is refused.

A call takes microseconds. That of a real hypervisor would be awaited, or made
in a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

State = Literal["running", "paused", "incoming", "gone"]


class RefusedError(Exception):
    """The hypervisor does not do that: the vm is elsewhere, or somebody later has been here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known about a vm, whoever runs it.

    Attributes:
        pages: Size of its memory.
        host: Who may run it.
        dest: Where it is going, until it has arrived or the migration is given up.
        fence: Highest fencing token of `host` that has acted. Each host counts in a store of its
            own, so it begins anew when the vm changes hands.
    """

    pages: int
    host: str
    dest: str | None = None
    fence: int = 0


class Hypervisor:
    """The hypervisor of one host.

    Args:
        root: The directory; made if missing.
        host: Whose it is.
    """

    def __init__(self, root: Path, host: str) -> None:
        self.root = root
        self.host = host

    # -- looking ----------------------------------------------------------------------

    def record(self, vm: str) -> Record:
        """Of any vm."""
        return Record(**json.loads((self.root / "vms" / f"{vm}.json").read_text()))

    def state(self, vm: str, host: str | None = None) -> State:
        """Of a vm on a host, this one by default."""
        path = self.root / (host or self.host) / "domains.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        states: list[State] = [d["state"] for d in map(json.loads, lines) if d["vm"] == vm]
        return states[-1] if states else "gone"

    def owns(self, vm: str) -> bool:
        """Whether this host, and no other, may run it."""
        return self.record(vm).host == self.host

    def awaits(self, vm: str) -> bool:
        """Whether it is on its way to this host, or has just come."""
        return self.record(vm).dest == self.host

    def has_place(self, vm: str) -> bool:
        """Whether there is a place here for one that is to come."""
        return self.state(vm) == "incoming"

    # -- where a vm is ------------------------------------------------------------------

    def boot(self, vm: str, pages: int) -> None:
        """A new vm."""
        with self._locked():
            for page in range(pages):
                self._page(self.host, vm, page).write_text(f"page {page} of {vm}")
            self._write(vm, Record(pages=pages, host=self.host))
            self._change(vm, self.host, "running")

    def grow(self, vm: str, pages: int) -> None:
        """Give it so many pages; it keeps those that it has."""
        with self._locked():
            if not self.owns(vm):
                raise RefusedError(f"{vm} is not of {self.host}")
            record = self.record(vm)
            for page in range(record.pages, pages):
                self._page(self.host, vm, page).write_text(f"page {page} of {vm}")
            self._write(vm, replace(record, pages=max(record.pages, pages)))

    def begin(self, vm: str, dest: str, *, fence: int) -> None:
        """It is to go to *dest*."""
        with self._locked():
            record = self._mine(vm, fence)
            if dest == self.host:
                raise RefusedError(f"{vm} is on {dest} already")
            self._write(vm, replace(record, dest=dest, fence=fence))

    def copy_page(self, vm: str, page: int, *, fence: int) -> None:
        """From here into its place."""
        with self._locked():
            dest = self._mine(vm, fence).dest
            assert dest is not None, "it was begun"
            self._page(dest, vm, page).write_text(self._page(self.host, vm, page).read_text())

    def pause(self, vm: str, *, fence: int) -> None:
        """It stands still from here on."""
        with self._locked():
            self._mine(vm, fence)
            self._change(vm, self.host, "paused")

    def hand_over(self, vm: str, *, fence: int) -> None:
        """The point of no return: from here on it is its destination's."""
        with self._locked():
            record = self._mine(vm, fence)
            if record.dest is None or self.state(vm) != "paused":
                raise RefusedError(f"{vm} is not about to leave {self.host}")
            self._write(vm, replace(record, host=record.dest, fence=0))

    def start(self, vm: str) -> None:
        """Let one that was handed over run; once, whoever asks, and however often."""
        with self._locked():
            record = self.record(vm)
            if record.dest == record.host and self.state(vm, record.host) != "running":
                self._change(vm, record.host, "running")

    def abandon(self, vm: str) -> None:
        """It stays, and runs, after all; nothing if it has been handed over."""
        with self._locked():
            record = self.record(vm)
            if record.host == self.host:
                self._write(vm, replace(record, dest=None))
                self._run_on(vm)

    def resume(self, vm: str) -> None:
        """One that was paused here to be handed over runs on, until that is tried again."""
        with self._locked():
            if self.owns(vm):
                self._run_on(vm)

    # -- where it is going --------------------------------------------------------------

    def make_place(self, vm: str, *, fence: int | None) -> int:
        """Make room for one that is to come; how many of its pages are here already."""
        with self._locked():
            record = self.record(vm)
            if record.dest != self.host or record.host == self.host or fence != record.fence:
                raise RefusedError(f"{vm} is not to come to {self.host}, or not from who asks")
            if not self.has_place(vm):
                self._remove(vm)  # of an earlier stay
                self._change(vm, self.host, "incoming")
            return sum(1 for _ in self._memory(self.host, vm).iterdir())

    def arrive(self, vm: str) -> None:
        """The migration is over."""
        with self._locked():
            record = self.record(vm)
            if record.host == record.dest == self.host:
                self._write(vm, replace(record, dest=None))

    def clear(self, vm: str) -> None:
        """Leave nothing here of a vm that is elsewhere and does not come."""
        with self._locked():
            if not self.owns(vm) and not self.awaits(vm):
                self._remove(vm)

    # -- files --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time, of all hosts; the kernel takes the lock from the dead."""
        (self.root / "vms").mkdir(parents=True, exist_ok=True)
        fd = os.open(self.root / "vms", os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _mine(self, vm: str, fence: int) -> Record:
        record = self.record(vm)
        if record.host != self.host:
            raise RefusedError(f"{vm} is on {record.host}, not on {self.host}")
        if fence < record.fence:
            raise RefusedError(f"{vm}: token {fence} is stale, {record.fence} has been here")
        return record

    def _write(self, vm: str, record: Record) -> None:
        path = self.root / "vms" / f"{vm}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(record)))
        new.replace(path)

    def _change(self, vm: str, host: str, state: State) -> None:
        line = json.dumps({"at": time.monotonic_ns(), "vm": vm, "state": state})
        (self.root / host).mkdir(exist_ok=True)
        with (self.root / host / "domains.jsonl").open("ab", buffering=0) as domains:
            domains.write(f"{line}\n".encode())

    def _run_on(self, vm: str) -> None:
        if self.state(vm) == "paused":
            self._change(vm, self.host, "running")

    def _remove(self, vm: str) -> None:
        shutil.rmtree(self._memory(self.host, vm))
        if self.state(vm) != "gone":
            self._change(vm, self.host, "gone")

    def _memory(self, host: str, vm: str) -> Path:
        path = self.root / host / "memory" / vm
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _page(self, host: str, vm: str, page: int) -> Path:
        return self._memory(host, vm) / str(page)
