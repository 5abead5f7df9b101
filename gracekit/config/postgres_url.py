"""The URL of a store in PostgreSQL: what it names, and what it must say.

`postgresql://user@host1,host2/database?schema=gracekit&sslmode=verify-full` is a URL of libpq, but
for `schema`, which libpq does not know. It is read here as libpq reads it, because libpq would
print a piece that it cannot read, which may be a piece of the password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from gracekit.config.urls import POSTGRESQL, is_loopback, shown_url
from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError

SCHEMA: Final = "gracekit"
"""Default of the schema."""
SCHEMA_OPTION: Final = "schema"
_OPTIONS: Final = (
    *(SCHEMA_OPTION, "host", "port", "target_session_attrs", "load_balance_hosts"),
    *("passfile", "require_auth", "channel_binding", "gssencmode", "krbsrvname"),
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "ssl_min_protocol_version"),
    *("connect_timeout", "tcp_user_timeout", "application_name"),
    *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
)
"""The other options of libpq are a password, replace parts of the URL, or change the session."""
_NO_ESCAPE: Final = re.compile(r"%(?!(?!00)[0-9A-Fa-f]{2})")
_SPACE: Final = re.compile(r"[\s\x00-\x1f\x7f]")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:\d+)?")
_SCHEMA_NAME: Final = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")


class PostgresUrl(NamedTuple):
    """What the URL of a store in PostgreSQL names.

    Attributes:
        libpq: The URL for libpq; it may hold a password.
        schema: The schema that has the tables.
        name: `postgresql://host/database?schema=gracekit`, for messages.
    """

    libpq: str
    schema: str
    name: str

    def __repr__(self) -> str:
        """Without the password."""
        return f"PostgresUrl({self.name!r})"

    def with_schema(self, schema: str) -> str:
        """The URL of a store in another schema of the same database."""
        return f"{self.libpq}{'&' if '?' in self.libpq else '?'}{SCHEMA_OPTION}={schema}"


def read_postgres_url(url: str) -> PostgresUrl:
    """Read and check *url*, which begins with `postgresql://` or `postgres://`.

    Raises:
        ConfigError: it is not of the form that the module shows.
    """
    rest = _without_login(url)
    address, _, query = rest.partition("?")
    listed, _, database = address.partition("/")
    if not database:
        raise _wrong(url, f"names no database: write {POSTGRESQL}user@host/database")
    options = _options_of(url, query)
    hosts = _hosts_of(url, options, listed)
    schema = options.get(SCHEMA_OPTION, SCHEMA)
    if not _SCHEMA_NAME.fullmatch(schema):
        raise _wrong(
            url, f"needs a schema of 1 to 63 of a-z, 0-9 and _, such as gracekit, not {schema!r}"
        )
    passed = {name: value for name, value in options.items() if name != SCHEMA_OPTION}
    if len(hosts) > 1:  # a standby answers, too, and cannot write
        passed.setdefault("target_session_attrs", "read-write")
    said = "&".join(f"{name}={value}" for name, value in passed.items())
    return PostgresUrl(
        libpq=url.removesuffix(rest) + "?".join(filter(None, (address, said))),
        schema=schema,
        name=f"{POSTGRESQL}{','.join(hosts)}/{database}?{SCHEMA_OPTION}={schema}",
    )


def _without_login(url: str) -> str:
    """Hosts, database and options of *url*."""
    login, _, rest = url.partition("://")[2].rpartition("@")
    if "/" in login or "@" in login:
        raise _wrong(url, "needs %40 and %2F for each @ and / in user, password and options")
    if _NO_ESCAPE.search(url):
        raise _wrong(url, "has a % that begins no %xx: write %25 for the character itself")
    if _SPACE.search(url):
        raise _wrong(url, "has a space: write %20 for it")
    try:
        unquote(url, errors="strict")
    except UnicodeDecodeError as error:
        raise _wrong(url, "has a %xx that is no UTF-8: write one %xx for each byte") from error
    return rest


def _options_of(url: str, query: str) -> dict[str, str]:
    found = {}
    for piece in filter(None, query.split("&")):
        name, _, value = piece.partition("=")
        if name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS) or f"; known are {', '.join(_OPTIONS)}"
            raise _wrong(url, f"has the unknown option {name!r}{hint}")
        found[name] = value
    return found


def _hosts_of(url: str, options: Mapping[str, str], listed: str) -> list[str]:
    """The hosts, each with its port; `?host=` comes before those *listed* in front of the path."""
    hosts = options["host"].split(",") if "host" in options else listed.split(",")
    for host in hosts:
        found = _HOST.fullmatch(host)
        if found is None:
            raise _wrong(
                url,
                "must name each host as host or host:port; a socket by its directory,"
                " ?host=/run/postgresql",
            )
        if not _is_here(unquote(found[1])) and not options.get("sslmode"):
            raise _wrong(
                url,
                f"must say sslmode, because {host} is another machine: sslmode=verify-full encrypts"
                " the connection, and checks who answers",
            )
    return [quote(unquote(host), safe=":[]") for host in hosts]


def _is_here(host: str) -> bool:
    return host.startswith(("/", "@")) or is_loopback(host.strip("[]"))


def _wrong(url: str, what: str) -> ConfigError:
    return ConfigError(f"{shown_url(url)!r} {what}")
