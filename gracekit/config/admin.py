"""The address of a run's HTTP endpoint (`GRACEKIT_ADMIN`), and the settings that it requires."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from gracekit.config.values import Problem, problem
from gracekit.errors import ConfigError

OFF: Final = "off"
_UNIX: Final = "unix:"
_SAID: Final = (
    "write off, unix:/run/api/admin.sock, 127.0.0.1:9701, [::1]:9701 or 0.0.0.0:9701 (all "
    "addresses of the host)"
)
_TCP: Final = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z.-]+)):(?P<port>\d{1,5})", re.ASCII
)
_LAST_PORT: Final = 65_535
_LOOPBACK_6: Final = b"\x00" * 15 + b"\x01"


class AdminAddress(NamedTuple):
    """One address to listen at.

    Attributes:
        path: The path of a unix socket; None for TCP.
        host: Name or IP address; empty for a unix socket.
        port: 0 for any free port.
    """

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can connect."""
        if self.path is not None or self.host == "localhost":
            return True
        match family_of(self.host):
            case socket.AF_INET:
                return self.host.startswith("127.")
            case socket.AF_INET6:
                return socket.inet_pton(socket.AF_INET6, self.host) == _LOOPBACK_6
        return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def admin_address(text: str) -> AdminAddress | None:
    """Parse an address; None for `off`.

    Raises:
        ConfigError: *text* is not an address.
    """
    if text == OFF:
        return None
    if text.startswith(_UNIX):
        path = Path(text.removeprefix(_UNIX))
        if not path.is_absolute():
            raise ConfigError(f"{text!r} has no absolute path; {_SAID}")
        return AdminAddress(path=path)
    found = _TCP.fullmatch(text)
    if found is None or int(found["port"]) > _LAST_PORT or not _is_host(found):
        raise ConfigError(f"{text[:100]!r} is not an address to listen at; {_SAID}")
    return AdminAddress(host=found["six"] or found["name"], port=int(found["port"]))


def family_of(host: str) -> socket.AddressFamily | None:
    """The family of the IP address *host*; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):  # not by `ipaddress`, which takes 5 ms to load
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return family
    return None


def _is_host(found: re.Match[str]) -> bool:
    """Whether it is an IPv6 address in brackets, an IPv4 address, or a name that is no number."""
    if found["six"] is not None:
        return family_of(found["six"]) is socket.AF_INET6
    name = found["name"]
    return family_of(name) is not None or not name.replace(".", "").isdigit()


def parse_admin(value: object) -> str:
    """Check an address, and return it in its canonical spelling."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{value!r} is not an address to listen at; {_SAID}")
    address = admin_address(value)
    return OFF if address is None else str(address)


def parse_certificate(value: object) -> str | None:
    """Check two file names, `cert.pem,key.pem`; an empty text becomes None, for no TLS."""
    if value == "":
        return None
    if not isinstance(value, str) or len(files_of(value)) != 2:  # noqa: PLR2004 - the two of them
        raise ConfigError(f"{value!r} must name a certificate and its key: cert.pem,key.pem")
    return value


def files_of(certificate: str) -> tuple[str, ...]:
    """The file names of certificate and key in the setting `admin_tls`."""
    return tuple(name for part in certificate.split(",") if (name := part.strip()))


def admin_problems(text: str, *, token_file: str | None, needs_token: bool) -> Iterator[Problem]:
    """Yield the problems of an address and of the settings that it requires.

    Args:
        text: The address, as in `GRACEKIT_ADMIN`.
        token_file: The token file; None for none.
        needs_token: Whether probes and metrics need a token too.
    """
    try:
        address = admin_address(text)
    except ConfigError as error:
        yield problem(f"admin: {error}", "admin")
        return
    if address is None or token_file is not None:
        return
    if not address.is_local:
        yield problem(
            f"admin = {text} can be reached from other hosts, so it needs tokens: set "
            "GRACEKIT_ADMIN_TOKEN_FILE to a file of `name:token:scope` lines with mode 0600, or "
            "GRACEKIT_ADMIN=127.0.0.1:9701",
            *("admin", "admin_token_file"),
        )
    if needs_token:
        yield problem(
            "admin_open = nothing demands a token of every client, and there is no token: set "
            "GRACEKIT_ADMIN_TOKEN_FILE, or GRACEKIT_ADMIN_OPEN=probes",
            *("admin", "admin_open", "admin_token_file"),
        )


def admin_doubts(text: str, *, tls: str | None) -> Iterator[str]:
    """Yield warnings about settings that work but are not safe."""
    address = admin_address(text)
    if address is not None and not address.is_local and tls is None:
        yield (
            f"admin = {text} can be reached from other hosts without TLS: tokens cross the "
            "network unencrypted; set GRACEKIT_ADMIN_TLS=cert.pem,key.pem"
        )
