"""A connection beside the one that commits, on a thread of its own: see `Engine.keep_aside`.

A beat must not wait for the store's lock, for a full queue of commits, or for a name service that
does not answer: the addresses of the server are kept once they are resolved.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gracekit.errors import StoreUnreachableError
from gracekit.store.batch import Row, Value
from gracekit.store.engine import Aside
from gracekit.store.postgres.postgres_link import PostgresLink
from gracekit.store.postgres.postgres_server import ORIGIN, PIN, Origins
from gracekit.store.postgres.sqlstates import text_of

LEAST_CONNECT_S: Final = 2
"""libpq takes no shorter `connect_timeout`."""


class PostgresAside:
    """The connection, as `work` uses it; one thread at a time.

    Args:
        url: Of the database, as libpq takes it.
        schema: Of the store.
        within_s: Seconds within which a connection, or an answer, must come.
    """

    def __init__(self, url: str, schema: str, origins: Origins, *, within_s: float) -> None:
        self._url = url
        self._schema = schema
        self._origins = origins
        self._within_s = within_s
        self._addresses: dict[str, str] = {}
        self._link: PostgresLink | None = None
        self._origin = ""

    def origin(self) -> str:
        """See `Aside.origin`."""
        self._open()
        return self._origin

    def ask(self, sql: str, *params: Value) -> list[Row]:
        """See `Aside.ask`."""
        link = self._open()
        try:
            return link.ask(sql, *params, within_s=self._within_s)
        except psycopg.Error as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _open(self) -> PostgresLink:
        if self._link is not None and not self._link.is_lost:
            return self._link
        try:
            link = self._link = self._connect()
            link.ask(PIN, within_s=self._within_s)
            ((origin,),) = link.ask(ORIGIN, within_s=self._within_s)
            self._origins.check(str(origin))
        except psycopg.Error as error:
            raise self._lost(error) from error
        self._origin = str(origin)
        return link

    def _connect(self) -> PostgresLink:
        """Connect to an address that is known; to those that the names have now if that fails."""
        if self._addresses:
            try:
                return self._link_to(self._addresses)
            except psycopg.Error:
                pass
        self._addresses = addresses_of(self._url) or self._addresses
        return self._link_to(self._addresses)

    def _link_to(self, addresses: dict[str, str]) -> PostgresLink:
        timeout_s = max(LEAST_CONNECT_S, round(self._within_s))
        url = make_conninfo(self._url, connect_timeout=timeout_s, **addresses)
        return PostgresLink(url, self._schema)

    def _lost(self, error: psycopg.Error) -> StoreUnreachableError:
        self.close()
        return StoreUnreachableError(text_of(error))


def addresses_of(url: str) -> dict[str, str]:
    """Every address of every host of the URL, as options of libpq; empty if one has none."""
    given = conninfo_to_dict(url)
    if given.get("hostaddr"):
        return {}
    hosts = str(given.get("host") or "/").split(",")
    ports = str(given.get("port") or "").split(",")
    found = list[tuple[str, str, str]]()
    for host, port in zip(hosts, ports * (len(hosts) // len(ports)), strict=True):
        if host.startswith("/"):  # a directory of a Unix socket
            return {}
        try:
            names = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            return {}
        found += [(host, str(name[4][0]), port) for name in names]
    options = zip(("host", "hostaddr", "port"), zip(*found, strict=True), strict=True)
    return {name: ",".join(values) for name, values in options if any(values)}


def keep_aside(
    open_aside: Callable[[], PostgresAside], work: Callable[[Aside], float], *, name: str
) -> Callable[[], None]:
    """Start the thread; returns what ends it."""
    ended = threading.Event()

    def run() -> None:
        aside, pause_s = open_aside(), 0.0
        while not ended.wait(pause_s):
            pause_s = work(aside)
        aside.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended.set
