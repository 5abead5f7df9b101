"""Options of a method: as users write them, and as its policy; and which version serves which."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict

import msgspec
from msgspec import structs

from gracekit.config.choices import AllowCancel, InDrain, OnInterrupt
from gracekit.config.values import parse_duration
from gracekit.errors import ConfigError
from gracekit.rpc.argument_paths import Source


def major(version: str) -> int:
    """The number before the first dot; -1 if the text is no version."""
    return _parts(version)[0]


def _parts(version: str) -> tuple[int, ...]:
    try:
        parts = tuple(int(part) for part in version.split("."))
    except ValueError:
        return (-1,)
    return parts if len(parts) > 1 else (*parts, 0)


def serves(served: str, asked: str) -> bool:
    """Whether version *served* can answer a request for *asked*: same major, minor not lower."""
    # Cache only short versions, as any client can send any text: this bounds the cache's memory.
    return _short_serves(served, asked) if len(asked) <= _SHORT else _serves(served, asked)


def _serves(served: str, asked: str) -> bool:
    have, want = _parts(served), _parts(asked)
    return have[0] == want[0] >= 0 and _steps(want) <= _steps(have)


_SHORT: Final = 16
_short_serves: Final = functools.lru_cache(256)(_serves)


def _steps(parts: tuple[int, ...]) -> tuple[int, int]:
    """Minor version and revision; a missing revision is 0, and a fourth part is ignored."""
    minor, revision, *_ = (*parts[1:], 0, 0)
    return minor, revision


class MarkOptions(TypedDict, total=False):
    """Options of `rpc_method`; `MethodOptions` explains them.

    Namespace and version are not among them: `Service.include` sets them for the whole object.
    """

    on_interrupt: OnInterrupt
    resource: str | tuple[str, Source]
    timeout: str | float
    anywhere: bool
    max_running: int
    max_attempts: int
    settle: str | float
    max_wait: str | float
    probe_timeout: str | float
    pending_timeout: str | float
    retry_on: type[Exception] | tuple[type[Exception], ...]
    retries: int
    backoff: str | float
    backoff_max: str | float
    allow_cancel: AllowCancel


class OpsMarkOptions(MarkOptions, total=False):
    """Options of `ops_method`."""

    in_drain: InDrain


class RpcOptions(MarkOptions, total=False):
    """Options of `rpc`."""

    version: str
    namespace: str | None


class OpsOptions(RpcOptions, total=False):
    """Options of `ops`."""

    in_drain: InDrain


class MethodOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a method.

    Attributes:
        ops: Whether it is served on the ops topic, until the end of a drain.
        on_interrupt: What recovery does with a started, unfinished task.
        resource: Kind of the resource that it acts on, and where its id is; None for none.
        timeout_s: Seconds that a handler may run; None for no limit.
        in_drain: Whether the ops server serves its requests during a drain (`answer`), or refuses
            them (`refuse`).
        anywhere: Whether any host may recover a directed request.
        max_running: How many of its handlers may run at a time in a process; None for no limit.
        max_attempts: Crashes since its last progress after which a task is ERRORED,
            if it was the only task of its process at the last crash; None for the
            service's setting.
        settle_s: Seconds that recovery waits after an unclean end before it probes or
            retries; None for the service's setting.
        max_wait_s: Seconds in total that a probe may go on answering Wait.
        probe_timeout_s: Timeout of one probe in seconds; None for the service's setting.
        pending_timeout_s: Seconds that a task may wait for capacity; None for the service's
            setting.
        retry_on: If its handler raises one of these, the task is tried again later.
        retries: How often it is, for these and for TryAgain, until it has FAILED. Crashes count
            apart, in `max_attempts`.
        backoff_s: Seconds before the second attempt; each further pause is twice the last one.
        backoff_max_s: The longest pause in seconds, at least `backoff`. Pauses vary by up to a
            fifth.
        allow_cancel: Which of its callers may cancel a request, if the service answers them: the
            `sender`, by the `user_id` of its context, `anyone` who knows the id, or `nobody`.
        version: Interface version of the method.
        namespace: Interface namespace; None for the default one.
    """

    ops: bool = False
    on_interrupt: OnInterrupt = "error"
    resource: tuple[str, Source] | None = None
    timeout_s: float | None = None
    in_drain: InDrain = "answer"
    anywhere: bool = False
    max_running: int | None = None
    max_attempts: int | None = None
    settle_s: float | None = None
    max_wait_s: float = 3600.0
    probe_timeout_s: float | None = None
    pending_timeout_s: float | None = None
    retry_on: tuple[type[Exception], ...] = ()
    retries: int = 3
    backoff_s: float = 5.0
    backoff_max_s: float = 300.0
    allow_cancel: AllowCancel = "nobody"
    version: str = "1.0"
    namespace: str | None = None


OPTIONS: Final = {field.removesuffix("_s"): field for field in MethodOptions.__struct_fields__}
"""The field of each option as users write it: durations become seconds."""


def options_from(**given: Any) -> MethodOptions:
    """Options as users write them (`resource="vm"`, `timeout="5m"`) as a MethodOptions.

    Raises:
        TypeError: there is no such option.
        ConfigError: one is no duration, no number from 1, no bool or no exception class; the
            message names it.
    """
    if unknown := given.keys() - OPTIONS.keys():
        raise TypeError(f"there is no option {min(unknown)!r}")
    options = MethodOptions(
        **{
            OPTIONS[name]: _READERS[name](name, value) if name in _READERS else value
            for name, value in given.items()
        }
    )
    return structs.replace(options, backoff_max_s=max(options.backoff_s, options.backoff_max_s))


def _exceptions(_: str, value: object) -> tuple[type[Exception], ...]:
    kinds = value if isinstance(value, tuple) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigError(
                f"retry_on={kind!r} is no subclass of Exception: write retry_on=(TimeoutError, ...)"
            )
    return kinds


def _truth(option: str, value: object) -> bool:
    if not isinstance(value, bool):  # a text such as "no" would count as true
        raise ConfigError(f"{option}={value!r} must be True or False")
    return value


def _seconds(option: str, value: str | float) -> float:
    try:
        return parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"{option}={error}") from None


def _limit(option: str, value: str | float | None) -> float | None:
    return None if value is None else _seconds(option, value)


def _bound(option: str, value: str | float | None) -> float | None:
    """As `_limit`, for a time in which something must be possible."""
    if (seconds := _limit(option, value)) == 0:
        raise ConfigError(f"{option}={value!r} leaves no time: leave it out, or write a longer one")
    return seconds


def _count(option: str, value: object, *, optional: bool = True) -> int | None:
    if value is None and optional:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{option}={value!r} must be a whole number from 1, or be left out")
    return value


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    **dict.fromkeys(("ops", "anywhere"), _truth),
    **dict.fromkeys(("timeout", "probe_timeout"), _bound),
    **dict.fromkeys(("settle", "pending_timeout"), _limit),
    **dict.fromkeys(("max_wait", "backoff", "backoff_max"), _seconds),
    **dict.fromkeys(("max_running", "max_attempts"), _count),
    "retries": functools.partial(_count, optional=False),
    "retry_on": _exceptions,
    "resource": lambda _, value: (value, value) if isinstance(value, str) else value,
}
"""What checks and converts an option; the others are fields as they are given."""
