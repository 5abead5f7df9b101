"""The cloud: one host with limited room, as a SQLite file that scheduler and users see.

`CLAIM` is the statement that matters: it takes room only where there is as much,
in one statement, so two builds cannot take the same room. What is built or
deleted is logged in the same transaction; tests judge by this log.

A connection is opened for each call. The functions may therefore be called in
any thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS machine (
        number INTEGER PRIMARY KEY,   -- in the order in which they were built
        vm TEXT NOT NULL UNIQUE,
        memory_mb INTEGER NOT NULL,
        preemptible INTEGER NOT NULL
    );
    CREATE TABLE IF NOT EXISTS failure (vm TEXT PRIMARY KEY, reason TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, what TEXT, vm TEXT);
"""

CLAIM: Final = """
    INSERT INTO machine (vm, memory_mb, preemptible)
    SELECT :vm, :memory_mb, :preemptible
    WHERE :memory_mb <= :room_mb - (SELECT coalesce(sum(memory_mb), 0) FROM machine)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that was built."""

    vm: str
    memory_mb: int
    preemptible: bool


class Cloud:
    """The host and its machines.

    Args:
        path: Of its file.
        room_mb: How much memory the host has, in MiB.
    """

    def __init__(self, path: Path, room_mb: int) -> None:
        self.path = path
        self.room_mb = room_mb

    def create(self) -> None:
        """Make the file and its tables where they are missing."""
        with self._connected() as connection:
            connection.executescript(SCHEMA)

    # -- changes ------------------------------------------------------------------------

    def claim(self, machine: Machine) -> bool:
        """Build a machine if there is room; one that is there already stays as it is.

        Returns:
            Whether it is there now.
        """
        with self._connected() as connection:
            if connection.execute("SELECT 1 FROM machine WHERE vm = ?", (machine.vm,)).fetchone():
                return True
            given = {
                "vm": machine.vm,
                "memory_mb": machine.memory_mb,
                "preemptible": machine.preemptible,
                "room_mb": self.room_mb,
            }
            if connection.execute(CLAIM, given).rowcount == 0:
                return False
            connection.execute("DELETE FROM failure WHERE vm = ?", (machine.vm,))
            _log(connection, "built", machine.vm)
            return True

    def delete(self, vm: str, *, only_preemptible: bool = False) -> int:
        """Delete a machine, and what is on record of its failure.

        Returns:
            How much room that has freed, in MiB; 0 if it is gone already, or may not be deleted.
        """
        with self._connected() as connection:
            row = connection.execute(
                "DELETE FROM machine WHERE vm = ? AND preemptible >= ? RETURNING memory_mb",
                (vm, only_preemptible),
            ).fetchone()
            if row is not None:
                _log(connection, "deleted", vm)
            elif not only_preemptible:
                connection.execute("DELETE FROM failure WHERE vm = ?", (vm,))
            return 0 if row is None else int(row[0])

    def fail(self, vm: str, reason: str) -> None:
        """Put on record why a machine was not built."""
        with self._connected() as connection:
            connection.execute("INSERT OR REPLACE INTO failure VALUES (?, ?)", (vm, reason))

    # -- looks --------------------------------------------------------------------------

    def machines(self) -> list[Machine]:
        """All machines, the oldest first."""
        rows = self._read("SELECT vm, memory_mb, preemptible FROM machine ORDER BY number")
        return [Machine(vm=vm, memory_mb=mb, preemptible=bool(pre)) for vm, mb, pre in rows]

    def failures(self) -> dict[str, str]:
        """The machines that were not built, and why."""
        return dict(self._read("SELECT vm, reason FROM failure ORDER BY vm"))

    def log(self) -> list[tuple[str, str]]:
        """What was built and deleted, in this order."""
        return self._read("SELECT what, vm FROM log ORDER BY number")

    # -- connections --------------------------------------------------------------------

    def _read(self, sql: str) -> list[Any]:
        with self._connected() as connection:
            return connection.execute(sql).fetchall()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection whose block is one transaction."""
        connection = sqlite3.connect(self.path, timeout=10, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection
        finally:
            connection.close()


def _log(connection: sqlite3.Connection, what: str, vm: str) -> None:
    connection.execute("INSERT INTO log (what, vm) VALUES (?, ?)", (what, vm))
