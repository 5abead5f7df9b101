"""Parse a broker's URL: `amqp://`, `amqps://`, and `rabbit://` as oslo.messaging writes it.

    amqp://user:password@host-1:5672,host-2:5672/vhost?profile=quorum
    rabbit://user:password@host-1:5672,user:password@host-2:5672/vhost?amqp_durable_queues=true

A host without a login uses that of the host before it. No error, repr or event shows
a user, a password or the value of an option.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from gracekit.config.oslo import DURABLE_OPTIONS, oslo_profile
from gracekit.config.urls import is_loopback, shown_url
from gracekit.config.values import NAME_CHARACTERS, did_you_mean, parse_duration
from gracekit.errors import ConfigError
from gracekit.rpc.amqp.profiles import PROFILES, Profile, profile_named

PORT: Final = 5672
TLS_PORT: Final = 5671

HEARTBEAT_S: Final = 10.0
"""Far below RabbitMQ's 60 s, as a dead peer is noticed only after three heartbeats."""
CONNECT_TIMEOUT_S: Final = 10.0
PUBLISH_TIMEOUT_S: Final = 30.0

_TRUTH: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_ESCAPES: Final = (
    "in users and passwords write : as %3A, / as %2F, ? as %3F, # as %23, @ as %40, , as %2C"
)
LONGEST_NAME: Final = 127
"""Longest name of an exchange or vhost in characters, a limit of the client library."""

_EXCHANGE: Final = re.compile(rf"[{NAME_CHARACTERS}]{{1,{LONGEST_NAME}}}")
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]{1,253}")

# Options of oslo.messaging that have other names here.
_OSLO_NAMES: Final = {
    "ssl_ca_file": "cafile",
    "ssl_cert_file": "certfile",
    "ssl_key_file": "keyfile",
    "heartbeat_timeout_threshold": "heartbeat",
}
_OPTIONS: Final = (
    "profile",
    "exchange",
    "heartbeat",
    "connect_timeout",
    "publish_timeout",
    "cafile",
    "certfile",
    "keyfile",
    "verify",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node of the broker, and the login for it."""

    host: str
    port: int
    user: str = field(repr=False)
    password: str = field(repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """How a connection is protected.

    Attributes:
        cafile: PEM file of the certificates to trust; None for the system's.
        certfile: PEM file of our own certificate; None for none.
        keyfile: Its key; None if *certfile* holds it too.
        verify: Whether the broker's certificate is verified; False is for experiments only.
    """

    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """The context for `ssl`; it verifies certificate and host name unless `verify` is False.

        Raises:
            ConfigError: a file cannot be read, or holds no certificate.
        """
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.certfile is not None:
                context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.cafile, self.certfile, self.keyfile)))
            raise ConfigError(f"cannot use the certificates in {files}: {error}") from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a broker is, and how we use it.

    Attributes:
        hosts: Its nodes, tried in turn.
        vhost: Virtual host.
        tls: None for a connection without encryption.
        profile: How exchanges and queues are declared.
        exchange: Name of the control exchange.
        heartbeat_s: Seconds; a peer that is silent for about three times as long is dead.
        connect_timeout_s: Timeout of one attempt to connect, in seconds.
        publish_timeout_s: Timeout of one publish in seconds, including reconnections.
        shown: The URL without its users and passwords.
    """

    hosts: tuple[Host, ...]
    vhost: str
    tls: Tls | None
    profile: Profile
    exchange: str
    heartbeat_s: float = HEARTBEAT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    publish_timeout_s: float = PUBLISH_TIMEOUT_S
    shown: str = ""


def read_url(url: str, *, exchange: str, profile: str) -> Broker:
    """Parse a broker's URL.

    Args:
        url: See the module.
        exchange: Control exchange, if the URL names none.
        profile: Declare profile, if the URL names none.

    Raises:
        ConfigError: a part of the URL is wrong; the message shows no secret.
    """
    shown = shown_url(url)
    try:
        url.encode()  # raises for text that is no UTF-8, which the client would silently drop
        parts = urlsplit(url)
        if "@" in parts.path + parts.query + parts.fragment:
            raise ConfigError(f"an @ stands behind the host; {_ESCAPES}")  # noqa: TRY301 - one way out
        hosts = _hosts(parts.netloc, TLS_PORT if parts.scheme == "amqps" else PORT)
        options = _options(parts.query, parts.scheme)
        tls = _tls(parts.scheme, options)
        _check_guest(hosts)
        name = _exchange(options, exchange)
        return Broker(
            hosts=hosts,
            vhost=_vhost(parts.path),
            tls=tls,
            profile=_profile(options, profile),
            exchange=name,
            heartbeat_s=_whole_seconds(options, "heartbeat", HEARTBEAT_S),
            connect_timeout_s=_seconds(options, "connect_timeout", CONNECT_TIMEOUT_S),
            publish_timeout_s=_seconds(options, "publish_timeout", PUBLISH_TIMEOUT_S),
            shown=shown,
        )
    except ConfigError as error:
        raise ConfigError(f"transport {shown!r}: {error}") from None
    except ValueError:  # its text may quote a password
        raise ConfigError(f"transport {shown!r} is no URL: {_ESCAPES}") from None


def _hosts(netloc: str, port: int) -> tuple[Host, ...]:
    hosts: list[Host] = []
    user, password = "guest", "guest"
    for entry in netloc.split(","):
        login, at, address = entry.rpartition("@")
        if at:
            user, password = map(unquote, login.partition(":")[::2])
            if not (user and password):  # the client would use guest for an empty one
                raise ConfigError(
                    "before an @ stand a user and a password, neither empty, as in "
                    f"amqp://user:password@host; {_ESCAPES}; without a login leave out the @ too, "
                    "which means user guest, of the broker's own machine alone"
                )
        hosts.append(_host(address, port, user, password))
    return tuple(hosts)


def _host(address: str, port: int, user: str, password: str) -> Host:
    # A password with an unescaped comma, slash or @ may be parsed as a host: never show its text.
    parts = urlsplit(f"//{address}")
    try:
        host, named = parts.hostname or "localhost", parts.port
        if named == 0:
            raise ValueError  # noqa: TRY301 - as for the others that are no port
    except ValueError:
        raise ConfigError(f"a port is no number from 1 to 65535; {_ESCAPES}") from None
    if ":" not in host and not _is_host_name(host):
        raise ConfigError(
            "a host is neither an address nor a name of at most 253 letters, digits, - and _, with "
            f"1 to 63 between two dots; {_ESCAPES}"
        )
    return Host(host=host, port=port if named is None else named, user=user, password=password)


def _is_host_name(host: str) -> bool:
    try:
        return _HOST.fullmatch(host.encode("idna").decode()) is not None
    except UnicodeError:  # an empty or long label
        return False


def _exchange(options: dict[str, str], default: str) -> str:
    shown = "exchange=" if "exchange" in options else f"exchange {default[:50]!r}"
    name = options.pop("exchange", default)
    if not _EXCHANGE.fullmatch(name):
        raise ConfigError(
            f"{shown} must be 1 to {LONGEST_NAME} of A-Z a-z 0-9 space and "
            "_ . : @ # , / + -; set GRACEKIT_EXCHANGE or exchange= to what the peers use"
        )
    return name


def _vhost(path: str) -> str:
    """The vhost of the URL's path `/name`; an empty path, `/` and `//` mean the vhost `/`."""
    vhost = unquote(path.removeprefix("/")) or "/"
    # The client cannot send longer names, and changes those with such parts to other names.
    if len(vhost) > LONGEST_NAME or "%2F" in vhost or {".", ".."} & set(vhost.split("/")):
        raise ConfigError(
            f"vhost {vhost[:50]!r} must have 1 to {LONGEST_NAME} characters, without %2F and "
            "without . or .. alone or between slashes; use one of another name"
        )
    return vhost


def _check_guest(hosts: tuple[Host, ...]) -> None:
    for host in hosts:
        if host.user == "guest" and not is_loopback(host.host):
            raise ConfigError(
                f"user guest is for the broker's own machine, and {host.host} is not it: "
                "make a user with a password of its own (rabbitmqctl add_user) and write it "
                "into the URL"
            )


# -- options ----------------------------------------------------------------------

# No error shows a value: an unescaped ? or & in a password puts a part of it here.


def _options(query: str, scheme: str) -> dict[str, str]:
    known = _OPTIONS + ((*DURABLE_OPTIONS, *_OSLO_NAMES, "ssl") if scheme == "rabbit" else ())
    options: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in known:
            raise ConfigError(
                f"unknown option {key!r}{did_you_mean(key, known)}; known: {', '.join(known)}"
            )
        options[_OSLO_NAMES.get(key, key)] = value
    return options


def _tls(scheme: str, options: dict[str, str]) -> Tls | None:
    files = {name: options.pop(name, None) for name in ("cafile", "certfile", "keyfile")}
    verify = options.pop("verify", "peer")
    if verify not in {"peer", "none"}:
        raise ConfigError("verify= is neither 'peer' nor 'none'")
    if scheme == "amqps" or _truth(options, "ssl"):
        return Tls(**files, verify=verify == "peer")
    given = [name for name, value in files.items() if value is not None]
    if given or verify == "none":
        raise ConfigError(
            f"{', '.join(given) or 'verify'} is of no use without TLS: write amqps://"
        )
    return None


def _profile(options: dict[str, str], default: str) -> Profile:
    asked: dict[str, bool] = {
        name: _truth(options, name) for name in DURABLE_OPTIONS if name in options
    }
    if not asked:
        if "profile" in options and (name := options["profile"]) not in PROFILES:
            known = ", ".join(PROFILES)
            raise ConfigError(f"profile= is none of {known}{did_you_mean(name, PROFILES)}")
        return profile_named(options.pop("profile", default))
    if "profile" in options:
        raise ConfigError(f"profile and {', '.join(asked)} say the same thing: leave out one")
    return PROFILES[oslo_profile(asked)]


def _truth(options: dict[str, str], name: str) -> bool:
    value = options.pop(name, "false")
    if value.lower() not in _TRUTH:
        raise ConfigError(f"{name}= is neither true nor false")
    return _TRUTH[value.lower()]


def _seconds(options: dict[str, str], name: str, default: float) -> float:
    try:
        seconds = parse_duration(options.pop(name, default))
    except ConfigError:
        raise ConfigError(f"{name}= is not a duration; write 25, 25s, 500ms or 5m") from None
    if seconds <= 0:
        raise ConfigError(f"{name} must be above 0")
    return seconds


def _whole_seconds(options: dict[str, str], name: str, default: float) -> float:
    seconds = _seconds(options, name, default)
    if seconds != int(seconds):
        raise ConfigError(f"{name}= must be whole seconds, as AMQP counts it in them")
    return seconds
