"""URLs of stores and transports: their schemes, the files that they name, and how to show them.

Only `_SCHEMES` lists the schemes; other code uses `kind_of`.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Final

from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError


class UrlKind(enum.Enum):
    """What a URL names."""

    FILE = "file"  # a file on this machine
    MEMORY = "memory"  # the memory of one process
    BROKER = "broker"
    DATABASE = "database"  # a server that hosts may share


_SCHEMES: Final[Mapping[str, UrlKind]] = MappingProxyType(
    {
        "sqlite": UrlKind.FILE,
        "amqp": UrlKind.BROKER,
        "amqps": UrlKind.BROKER,
        "rabbit": UrlKind.BROKER,
        "memory": UrlKind.MEMORY,
        "postgresql": UrlKind.DATABASE,
        "postgres": UrlKind.DATABASE,
    }
)
TRANSPORT: Final = "sqlite:///gracekit.db"
"""Default of the transport: a file of queues in the working directory."""
STORE: Final = "sqlite:///gracekit-store.db"
"""Default of the store: another file beside it."""
TRANSPORTS: Final = tuple(word for word, kind in _SCHEMES.items() if kind is not UrlKind.DATABASE)
STORES: Final = tuple(word for word, kind in _SCHEMES.items() if kind is not UrlKind.BROKER)
_FILE: Final = "sqlite:///"
POSTGRESQL: Final = "postgresql://"
_SAME: Final = "postgres"
"""The other name of that scheme, which messages do not mention."""
_PATH: Final = re.compile(r"[\w./-]+\.db|\.{0,2}/[\w./-]+")  # not a host or a login
LONGEST_FILE_NAME: Final = 240
"""Most bytes of a file name in a URL. Linux allows 255, and files beside it have longer names."""
# Must not match the first word of `bob:password@host`.
_SCHEME: Final = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://|(?:{'|'.join(_SCHEMES)}):/?")
_URL_SECRET: Final = re.compile(r"(?<=://)(?!/)\S*@")  # in a text; a URL is shown by `shown_url`
_PASSWORD: Final = re.compile(r"(password\s*=\s*)('[^']*'|\S+)")
_OPTION_VALUE: Final = re.compile(r"=[^&]+")
# Text after a colon that is no port: perhaps a login in the place of the host. An IPv6 address in
# brackets is matched to be kept.
_NO_PORT: Final = re.compile(r"\[[^\]]*\]|:(?!\d*(?:,|$))[^,]*")


def kind_of(url: str) -> UrlKind | None:
    """What *url* names; None if its scheme is unknown."""
    return _SCHEMES.get(url.partition(":")[0])


def file_of(url: str) -> Path:
    """The file of `sqlite:///relative.db` or `sqlite:////absolute.db`.

    Raises:
        ConfigError: *url* is not of that form.
    """
    path = url.removeprefix(_FILE)
    if path == url or path.strip("/.") == "" or "?" in path or "\0" in path:
        raise ConfigError(
            f"{shown_url(url)!r} names no file; "
            f"write {_FILE}relative.db or {_FILE}/absolute.db, without options"
        )
    if (long := max(len(os.fsencode(part)) for part in Path(path).parts)) > LONGEST_FILE_NAME:
        raise ConfigError(
            f"{shown_url(url)!r} has a name of {long} bytes: at most {LONGEST_FILE_NAME} fit, as "
            "gracekit makes files beside it with longer names; give a shorter one"
        )
    return Path(path)


def absolute(path: Path) -> Path:
    """*path* from the working directory; ConfigError if it needs one that was deleted."""
    try:
        return path.absolute()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted: cd to one that exists") from None


def file_url(path: str | PurePath) -> str:
    """The URL of a file: `sqlite:///relative.db`, `sqlite:////absolute.db`."""
    return f"{_FILE}{path}"


def checked_file(url: str, schemes: Sequence[str]) -> Path | None:
    """The file that *url* names; None if it names none.

    Raises:
        ConfigError: *url* has none of the *schemes*, or names no file.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in schemes:
        words = [one for one in schemes if one != _SAME]
        if _SCHEMES.get(scheme) is UrlKind.DATABASE:
            hint = "; PostgreSQL keeps the store alone: set GRACEKIT_STORE_URL to this URL"
        elif _PATH.fullmatch(url):
            hint = f"; for this file write {file_url(url)}"
        else:
            hint = did_you_mean(scheme, words)
        forms = [_FILE if _SCHEMES[one] is UrlKind.FILE else f"{one}://" for one in words]
        known = f"{', '.join(forms[:-1])} or {forms[-1]}"
        raise ConfigError(f"{shown_url(url)!r} must begin with {known}{hint}")
    return file_of(url) if _SCHEMES[scheme] is UrlKind.FILE else None


def is_loopback(host: str) -> bool:
    """Whether data sent to *host* stays on this machine."""
    import ipaddress  # noqa: PLC0415 - takes 5 ms to load

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def parse_url(value: object) -> str:
    """Check for a text that is not empty; the form of the URL is checked later."""
    if isinstance(value, str) and value:
        return value
    raise ConfigError("a URL is a text, and not empty; leave the setting out for its default")


def redact_url(text: str) -> str:
    """*text* without the users and passwords of URLs in it."""
    return _URL_SECRET.sub("***@", text)


def shown_url(url: str) -> str:
    """*url* without its login and the values of its options, even if it is malformed.

    `amqp://user:password@host/v?profile=quorum` becomes `amqp://***@host/v?profile=***`. The login
    is also removed from malformed ones like `amqp:/user:password@host` and `user:password@host`.
    """
    if not _SCHEME.match(url):  # libpq also takes `host=... password=...`
        url = _PASSWORD.sub(r"\1***", url)
    scheme, login, address = _parts_of(url)
    address, mark, options = address.partition("?")
    shown = f"{address}{mark}{_OPTION_VALUE.sub('=***', options)}"
    if login:
        return f"{scheme}***@{shown}"
    host = address.partition("/")[0]
    # If the host was forgotten, a login is in its place, and may extend past the first slash.
    masked = _NO_PORT.sub(lambda found: found[0] if found[0][0] == "[" else ":***", host)
    return scheme + (shown if masked == host or not scheme.endswith("://") else masked)


def _parts_of(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme (`amqp://`), login, and the text after the last `@`."""
    found = _SCHEME.match(url)
    scheme = found[0] if found is not None else ""
    rest = url[len(scheme) :]
    if url.startswith(_FILE):  # a path, which may hold an @
        return scheme, "", rest
    login, _, address = rest.rpartition("@")
    return scheme, login, address


def holds_password(url: str) -> bool:
    """Whether *url*, even a malformed one, contains a password."""
    return ":" in _parts_of(url)[1]
