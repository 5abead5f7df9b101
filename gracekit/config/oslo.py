"""Maps the options of an OpenStack service in oslo.config to gracekit's settings.

It imports nothing of oslo; its input is a `cfg.ConfigOpts` that has parsed its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from gracekit.errors import ConfigError

RABBIT: Final = "oslo_messaging_rabbit"
DEFAULT: Final = "DEFAULT"

DURABLE_OPTIONS: Final = (
    "amqp_durable_queues",
    "rabbit_quorum_queue",
    "rabbit_transient_quorum_queue",
)
"""Options of oslo.messaging that choose one of its profiles."""

_TAKEN: Final = (("host", "host"), ("control_exchange", "exchange"))
"""Options of [DEFAULT], and the settings that correspond to them, also by their defaults."""
_TAKEN_IF_SET: Final = (
    ("rpc_ping_enabled", "rpc_ping_enabled"),
    ("graceful_shutdown_timeout", "drain_timeout_s"),
)
"""Those whose defaults in oslo do not count: a service may have its own default."""
_OPTION_DEFAULT: Final = "opt_default"
_DEFAULT_BY_CODE: Final = "set_default"
_IN_URL: Final = ("ssl_ca_file", "ssl_cert_file", "ssl_key_file")
_UNUSED: Final = (
    "rpc_response_timeout",
    "executor_thread_pool_size",
    "rpc_conn_pool_size",
    "conn_pool_min_size",
    "conn_pool_ttl",
)
"""Options of [DEFAULT] without effect."""


class OsloOptions(msgspec.Struct, kw_only=True):
    """The settings found in oslo.config.

    Attributes:
        values: Values by setting, in the form that `load` takes.
        origins: By setting, the option that it came from.
        doubts: A sentence for each option that is set but cannot be honoured.
        by_code: Settings whose value the service's code has set as the option's default. They
            count as defaults of the service.
    """

    values: dict[str, object] = msgspec.field(default_factory=dict)
    origins: dict[str, str] = msgspec.field(default_factory=dict)
    doubts: list[str] = msgspec.field(default_factory=list)
    by_code: set[str] = msgspec.field(default_factory=set)

    def take(self, setting: str, value: object, *options: str, group: str = DEFAULT) -> None:
        """Add one setting and its origin."""
        self.values[setting] = value
        self.origins[setting] = f"oslo.config [{group}] {', '.join(options)}"


def read_oslo(conf: Any) -> OsloOptions:
    """Read the settings from *conf*, without options that *conf* does not define.

    Raises:
        ConfigError: no declare profile corresponds to its combination of options.
    """
    found = OsloOptions()
    for option, setting in _TAKEN:
        if (value := _value(conf, option)) is not None:
            found.take(setting, value, option)
    for option, setting in _TAKEN_IF_SET:
        _take_if_set(conf, found, option, setting)
    _take_url(conf, found)
    _take_rabbit(conf, found)
    found.doubts += _left_out(conf)
    return found


def oslo_profile(asked: Mapping[str, bool]) -> str:
    """The declare profile for these values of `DURABLE_OPTIONS`.

    Raises:
        ConfigError: there is none.
    """
    durable, quorum, transient_quorum = (asked.get(name, False) for name in DURABLE_OPTIONS)
    if quorum:
        return "oslo-quorum-all" if transient_quorum else "oslo-quorum"
    if transient_quorum and not durable:
        raise ConfigError(
            "rabbit_transient_quorum_queue alone has no profile here; set amqp_durable_queues or "
            "rabbit_quorum_queue too, as RabbitMQ 4.3 wants"
        )
    if transient_quorum:
        return "oslo-durable-all"
    return "oslo-durable" if durable else "oslo-transient"


def _take_if_set(conf: Any, found: OsloOptions, option: str, setting: str) -> None:
    where, value = _location(conf, option), _value(conf, option)
    if where == _OPTION_DEFAULT or value is None:
        return
    if option == "graceful_shutdown_timeout" and value == 0:
        found.doubts.append(
            "graceful_shutdown_timeout = 0 means a drain without end, but here every drain has a "
            "limit: set it, or GRACEKIT_DRAIN_TIMEOUT, to seconds"
        )
        return
    found.take(setting, value, option)
    if where == _DEFAULT_BY_CODE:
        found.by_code.add(setting)


def _take_url(conf: Any, found: OsloOptions) -> None:
    url = _value(conf, "transport_url")
    if not url:
        return
    more: dict[str, object] = {}
    if _value(conf, "ssl", RABBIT):
        more["ssl"] = "true"
        more |= {name: value for name in _IN_URL if (value := _value(conf, name, RABBIT))}
    if _is_given(conf, "heartbeat_timeout_threshold", RABBIT):
        if seconds := _value(conf, "heartbeat_timeout_threshold", RABBIT):
            more["heartbeat_timeout_threshold"] = seconds
        else:
            found.doubts.append(
                "heartbeat_timeout_threshold = 0 switches heartbeats off, but a dead broker is "
                "only noticed by them: gracekit keeps its default"
            )
    missing = {name: value for name, value in more.items() if f"{name}=" not in url}
    mark = "&" if "?" in url else "?"
    text = f"{url}{mark}{urlencode(missing, safe='/')}" if missing else url
    found.take("transport_url", text, "transport_url")


def _take_rabbit(conf: Any, found: OsloOptions) -> None:
    asked = {name: bool(_value(conf, name, RABBIT)) for name in DURABLE_OPTIONS}
    if any(_value(conf, name, RABBIT) is not None for name in DURABLE_OPTIONS):
        found.take("declare_profile", oslo_profile(asked), *DURABLE_OPTIONS, group=RABBIT)


def _left_out(conf: Any) -> Iterator[str]:
    """Yield a sentence for each option that is set but not used."""
    known = {*DURABLE_OPTIONS, *_IN_URL, "ssl", "heartbeat_timeout_threshold"}
    options = [(name, DEFAULT) for name in _UNUSED]
    options += [(name, RABBIT) for name in _names(conf, RABBIT) if name not in known]
    for name, group in options:
        if _is_given(conf, name, group):
            yield f"[{group}] {name} is set and not used: see the table of options in docs/oslo.md"


def _names(conf: Any, group: str) -> list[str]:
    try:
        return sorted(conf[group])
    except (AttributeError, KeyError):  # oslo.config's error is a subclass of both
        return []


def _value(conf: Any, name: str, group: str = DEFAULT) -> Any:
    """The option's value; None if *conf* does not define it."""
    try:
        return conf[name] if group == DEFAULT else conf[group][name]
    except (AttributeError, KeyError):
        return None


def _is_given(conf: Any, name: str, group: str = DEFAULT) -> bool:
    """Whether a file, a command line, the environment or an override sets the option."""
    return _location(conf, name, group) not in {_OPTION_DEFAULT, _DEFAULT_BY_CODE}


def _location(conf: Any, name: str, group: str = DEFAULT) -> str:
    """Where the value comes from, a name of `cfg.Locations`; an unknown option has its default."""
    try:
        place = conf.get_location(name, None if group == DEFAULT else group)
    except (AttributeError, KeyError):
        return _OPTION_DEFAULT
    return _OPTION_DEFAULT if place is None else str(place.location.name)
