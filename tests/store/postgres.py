"""A private PostgreSQL of the tests: its own data and port, stopped by its pid."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import apsw
import psycopg

from tests.rabbit.machine import HOST, free_ports

WAIT_S: Final = 60.0
USER: Final = "test"
NOBODY: Final = "nobody"
"""PostgreSQL refuses to run as root: the tests' server then runs as this user."""
_TYPES: Final = {"INTEGER": "bigint", "REAL": "double precision", "TEXT": "text", "BLOB": "bytea"}
_ERROR: Final = re.compile(r"^psql:[^:]*:(\d+): ERROR:\s+(.*)", re.MULTILINE)


def program(name: str) -> str:
    """Where Debian has a program of PostgreSQL, or the PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = str(debian[-1]) if debian else shutil.which(name)
    assert found, f"the tests need PostgreSQL's {name}: apt-get install postgresql"
    return found


class Postgres:
    """A server of the tests' own, on a socket and on a port of this machine.

    Args:
        settings: Of the server, beside the tests' own.
    """

    def __init__(self, **settings: str) -> None:
        # Not below the tests' own, where only we may go; and the path of a socket is short.
        self._directory = Path(tempfile.mkdtemp(prefix="gracekit-pg-"))
        self._as = {"user": NOBODY, "group": "nogroup"} if os.geteuid() == 0 else {}
        (self.port,) = free_ports(1)
        self._settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": str(self._directory),
            "fsync": "off",
            "max_connections": "40",
            **settings,
        }
        self._server: subprocess.Popen[bytes] | None = None
        if self._as:
            shutil.chown(self._directory, NOBODY)

    @property
    def data(self) -> Path:
        """Where its files are."""
        return self._directory / "data"

    @contextmanager
    def running(self) -> Iterator[Postgres]:
        """Make its data, start it, and stop it in the end."""
        initdb = (program("initdb"), "-D", str(self.data), "--no-sync", "-A", "trust")
        self._run(*initdb, "-U", USER, "-E", "UTF8", "--locale=C")
        with self.started():
            yield self

    @contextmanager
    def copy_of(self, primary: Postgres) -> Iterator[Postgres]:
        """Start as a standby of *primary*, and stop in the end."""
        where = ("-h", HOST, "-p", str(primary.port), "-U", USER)
        self._run(
            *(program("pg_basebackup"), *where, "-D", str(self.data), "-R", "-X", "stream"),
            *("-c", "fast", "--no-sync"),
        )
        with self.started():
            yield self

    @contextmanager
    def started(self) -> Iterator[Postgres]:
        """Start it, stop it in the end, and remove its data."""
        try:
            self.start()
            yield self
        finally:
            self.stop()
            shutil.rmtree(self._directory)

    def start(self) -> None:
        """Start it, also after a `kill`; returns when it answers."""
        options = (word for name, value in self._settings.items() for word in _option(name, value))
        self._server = subprocess.Popen(
            [program("postgres"), "-D", str(self.data), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            **self._as,  # type: ignore[arg-type]  # user and group
        )
        deadline = time.monotonic() + WAIT_S
        while self._psql("SELECT 1;").returncode != 0:
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT closes all connections, SIGQUIT also leaves the rest to recovery."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(how)
            server.wait(WAIT_S)

    def kill(self) -> None:
        """Kill the server and all its processes, as a power cut does."""
        assert self._server is not None
        children = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children").read_text()
        for pid in (self._server.pid, *map(int, children.split())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.wait(WAIT_S)
        self._server = None

    def url(self, *, port: int | None = None, user: str = USER, database: str = "postgres") -> str:
        """The URL of a database."""
        return f"postgresql://{user}@{HOST}:{port or self.port}/{database}?sslmode=disable"

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """A connection of the test's own, each statement of which is a commit."""
        return psycopg.connect(self.url(), autocommit=True, **options)

    def execute(self, statements: Iterable[str]) -> dict[int, str]:
        """Send each statement by itself; returns the errors by number, from 0."""
        lines = [" ".join(one.split()) + ";" for one in statements]
        done = self._psql("\n".join(lines) + "\n")
        assert done.returncode in {0, 3}, done.stderr
        return {int(number) - 1: text for number, text in _ERROR.findall(done.stderr)}

    def _psql(self, text: str) -> subprocess.CompletedProcess[str]:
        where = ("-h", str(self._directory), "-p", str(self.port), "-U", USER, "-d", "postgres")
        return subprocess.run(
            [program("psql"), "-X", "-q", *where, "-f", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )

    def _run(self, *words: str) -> None:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
            cwd="/",
            **self._as,  # type: ignore[call-overload]  # user and group
        )
        assert done.returncode == 0, done.stderr


def _option(name: str, value: str) -> tuple[str, str]:
    return "-c", f"{name}={value}"


def tables_of(database: apsw.Connection) -> Iterator[str]:
    """The statements that make the same tables, keys and indexes on PostgreSQL."""
    names = database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    for (name,) in names.fetchall():
        columns = database.execute(f"PRAGMA table_info({name})").fetchall()
        lines = [_column(dict(zip(_COLUMN, column, strict=True))) for column in columns]
        yield f"CREATE TABLE {name} ({', '.join(lines)})"
        yield from _keys(database, str(name))
    for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE type = 'index'").fetchall():
        if sql is not None:  # the others belong to keys
            yield str(sql)


_COLUMN: Final = ("cid", "name", "type", "notnull", "default", "pk")


def _column(column: Mapping[str, Any]) -> str:
    kind = _TYPES[str(column["type"])]
    default = "" if column["default"] is None else f" DEFAULT {column['default']}"
    if column["notnull"]:
        default += " NOT NULL"
    if column["pk"] and column["name"] == "id" and kind == "bigint":
        default = " GENERATED BY DEFAULT AS IDENTITY"
    return f"{column['name']} {kind}{default}"


def _keys(database: apsw.Connection, table: str) -> Iterator[str]:
    rows = database.execute(f"PRAGMA table_info({table})").fetchall()
    primary = [row[1] for row in sorted(rows, key=lambda row: row[5]) if row[5]]
    if primary:
        yield f"ALTER TABLE {table} ADD PRIMARY KEY ({', '.join(primary)})"
    for _, name, unique, origin, _ in database.execute(f"PRAGMA index_list({table})").fetchall():
        if unique and origin == "u":
            of = [row[2] for row in database.execute(f"PRAGMA index_info({name})").fetchall()]
            yield f"ALTER TABLE {table} ADD UNIQUE ({', '.join(of)})"
