"""The server behind a store: what it must be, and whether it is the one that wrote last."""

from __future__ import annotations

from typing import Final

import msgspec
import psycopg

from gracekit.errors import ConfigError
from gracekit.store.batch import Row
from gracekit.store.older import EPOCH_BITS
from gracekit.store.postgres.postgres_link import PostgresLink

OLDEST: Final = 15
"""The oldest version that is tested."""

FACTS: Final = """
SELECT CAST(current_setting('server_version_num') AS BIGINT) / 10000,
    current_setting('server_version'), current_setting('server_encoding'),
    current_setting('synchronous_standby_names'),
    CAST(current_setting('max_connections') AS BIGINT)
        - CAST(current_setting('superuser_reserved_connections') AS BIGINT)
        - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')"""
# For the whole session, whatever the server or the role is set to later.
PIN: Final = """
SELECT set_config('synchronous_commit', coalesce(nullif(setting, 'off'), 'on'), false)
FROM pg_settings WHERE name = 'synchronous_commit'"""
_HERE: Final = "system_identifier || ' ' || left(pg_walfile_name(pg_current_wal_lsn()), 8)"
_ORIGIN: Final = f"SELECT origin, {_HERE} FROM meta, pg_control_system()"  # noqa: S608 - a constant
ORIGIN: Final = f"SELECT {_HERE} FROM pg_control_system()"  # noqa: S608 - a constant
_NOTE_ORIGIN: Final = "UPDATE meta SET origin = $1"
# It is not known what was granted since the copy was made: all new tokens are above that. The next
# start finds a copy, as it finds a restored backup.
_BEGIN_EPOCH: Final = f"""
UPDATE epoch SET epoch = epoch + 1, floor = (epoch + 1) * {1 << EPOCH_BITS},
    copied_at = CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"""  # noqa: S608 - a constant


class ServerFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a server says of itself.

    Attributes:
        major: 15 for PostgreSQL 15.4.
        version: For example `15.4 (Debian 15.4-1)`.
        encoding: Of the database.
        standbys: Its `synchronous_standby_names`; empty for none.
        free: So many more connections a role without special rights can open.
    """

    major: int
    version: str
    encoding: str
    standbys: str
    free: int

    @classmethod
    def of(cls, row: Row) -> ServerFacts:
        """From the row that `FACTS` returns."""
        return msgspec.convert(row, cls)

    @property
    def refusal(self) -> ConfigError | None:
        """Why no service may keep a store there; None if one may."""
        if self.major < OLDEST:
            return ConfigError(
                f"PostgreSQL {self.version} is older than {OLDEST}, the oldest version that is "
                "tested; upgrade the server, or use another one"
            )
        if self.encoding != "UTF8":
            return ConfigError(
                f"the encoding of the database is {self.encoding} and the store needs UTF8; make a "
                "database with CREATE DATABASE ... TEMPLATE template0 ENCODING 'UTF8'"
            )
        return None


def check_server(link: PostgresLink) -> None:
    """Refuse a server on which a store would not be safe.

    Raises:
        ConfigError: what is wrong, and the remedy.
        psycopg.Error: the connection is lost.
    """
    if (refusal := ServerFacts.of(link.ask(FACTS)[0]).refusal) is not None:
        raise refusal


class Origins:
    """The newest timeline that this process has seen of each server, from any thread.

    A server that was replaced may go on: what it says is not true any more.
    """

    def __init__(self) -> None:
        self._newest: dict[str, str] = {}

    def check(self, origin: str) -> None:
        """Refuse a server whose timeline is older than one that was seen.

        Raises:
            psycopg.OperationalError: it is.
        """
        server, _, timeline = origin.partition(" ")
        newest = self._newest.get(server, timeline)
        if timeline < newest:  # eight hexadecimal digits
            raise psycopg.OperationalError(
                f"the server has timeline {timeline}, and another one took over with {newest}"
            )
        self._newest[server] = timeline


def note_origin(link: PostgresLink, origins: Origins) -> None:
    """If another server wrote last, begin a new epoch, in the transaction that is under way.

    A standby that took over has a timeline of its own, and so has a server that was restored from a
    backup. Both may lack what was written last.

    Raises:
        psycopg.Error: the server was replaced by another one; nothing was written.
    """
    ((before, now),) = link.ask(_ORIGIN)
    origins.check(str(now))
    if before == now:
        return
    if before is not None:
        link.send(_BEGIN_EPOCH)
    link.send(_NOTE_ORIGIN, (now,))
    link.read()
