"""A hypervisor of child processes: list, look at the evidence, destroy, start.

What a virtual machine leaves behind stays, and takes its memory, until it is destroyed: so nobody
needs to be there when it ends, and looking changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BOOT = "VMS_BOOT_ID"
"""The play sets it, as a reboot takes long."""


def boot_id() -> str:
    """Which boot of the machine this is."""
    return os.environ.get(BOOT) or Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Driver:
    """The virtual machines of one host, with a file each: memory, boot, and how it ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def names(self) -> list[str]:
        """All that were started and not destroyed, running or not."""
        return sorted(file.stem for file in self._directory.glob("*.vm"))

    def memory(self) -> int:
        """MiB that they take, dead ones too."""
        return sum(int(self._read(f"{name}.vm")["memory"]) for name in self.names())

    def seen(self, name: str) -> str:
        """running, stopped (from inside), crashed, rebooted (its host was), or absent."""
        started, end = self._read(f"{name}.vm"), self._read(f"{name}.end")
        if not started:
            return "absent"
        if self._pid(name) or self._is_kept(started):
            return "running"
        if end:
            return "stopped" if (end["how"], end["status"]) == ("exited", 0) else "crashed"
        return "crashed" if started["boot"] == boot_id() else "rebooted"

    def evidence(self, name: str) -> str:
        """How it ended, in words; empty if nobody knows."""
        end = self._read(f"{name}.end")
        return f"{end['how']} {end['status']}" if end else ""

    def start(self, name: str, memory: int) -> None:
        """Start it below a small parent, which keeps the evidence of its end."""
        if self.seen(name) == "running":
            return
        self.destroy(name)
        guest = (
            sys.executable,
            "-m",
            "examples.vms.guest",
            str(self._directory),
            name,
            str(memory),
        )
        record = ("--record", str(self._directory / f"{name}.end"))
        keeper = subprocess.Popen(  # noqa: S603 - what the caller has named
            (sys.executable, "-m", "gracekit", "keep", *record, "--", *guest),
            start_new_session=True,  # it outlives this service
        )
        self._write(f"{name}.vm", {"memory": memory, "boot": boot_id(), "keeper": keeper.pid})

    def destroy(self, name: str) -> None:
        """End it if it runs, and remove what it has left; right also if it is gone already."""
        while self.seen(name) == "running":  # the kernel ends it, sooner or later
            if pid := self._pid(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for suffix in ("end", "vm"):
            (self._directory / f"{name}.{suffix}").unlink(missing_ok=True)

    def signal(self, name: str, number: signal.Signals) -> None:
        """What its user, or a fault, does to it; it must run."""
        while not (pid := self._pid(name)):
            time.sleep(0.01)
        os.kill(pid, number)

    def _pid(self, name: str) -> int:
        """Its process; 0 if it does not run, as its lock is free then."""
        with contextlib.suppress(OSError), (self._directory / f"{name}.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                while not (text := lock.read()):  # it has just taken the lock
                    time.sleep(0.001)
                return int(text)
        return 0

    def _is_kept(self, started: dict[str, Any]) -> bool:
        """Whether its parent is there, which has not written the record yet."""
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{started['keeper']}/cmdline").read_bytes()
            stat = Path(f"/proc/{started['keeper']}/stat").read_text()
            return b"keep" in words and stat.rpartition(")")[2].split()[0] != "Z"
        return False

    def _read(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self._directory / name).read_text())
            return found
        return {}

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        half = self._directory / f".{name}"
        half.write_text(json.dumps(facts))
        half.replace(self._directory / name)
