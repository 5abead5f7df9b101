"""How single values are written, read and shown: durations, names, numbers."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, Final

from gracekit.errors import ConfigError

PREFIX: Final = "GRACEKIT_"
EXCHANGE: Final = "gracekit"
DECLARE_PROFILE: Final = "durable"
_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_CENTURY_S: Final = 100 * 366 * 86400.0  # beyond it timers of the kernel overflow
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.ASCII)
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_COUNT: Final = re.compile(r"-?[0-9]+")
_LONGEST_COUNT: Final = 18
_SHOWN_DIGITS: Final = 30
NAME_CHARACTERS: Final = "A-Za-z0-9_.:@#,/+ -"
"""Of a name on a broker, as a class of a regular expression."""
LEAST_BODY_BYTES: Final = 1024
"""A request with one short argument has some 400, and an oslo client's context more."""
LONGEST_TOPIC: Final = 120
"""Its fanout exchange `<topic>_fanout` may have 127 characters."""
TOPIC: Final = re.compile(rf"[{NAME_CHARACTERS}]{{1,{LONGEST_TOPIC}}}")
LONGEST_QUEUE: Final = 255
"""Characters that a broker takes."""
HOST: Final = re.compile(rf"[{NAME_CHARACTERS}]{{1,{LONGEST_QUEUE}}}")
PATTERN_SAID: Final = "has '#' as a word of its own, which fits any words on a broker"
_TRUTH: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def parse_duration(value: str | float) -> float:
    """Seconds from `25`, `"25s"`, `"500ms"`, `"5m"`, `"1h"`, `"7d"`.

    Raises:
        ConfigError: it is not a duration, or negative, or above a century.
    """
    seconds = _seconds_in(value)
    if not 0 <= seconds <= _CENTURY_S:
        shown = repr(value)[:100]  # a control verb brings one too
        raise ConfigError(f"{shown} is not a duration; write 25, 25s, 500ms, 5m, 1h or 7d")
    return float(seconds)


def _seconds_in(value: object) -> float:
    """As written; NaN for what is no number."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        return float(found[1]) * _UNITS[found[2] or ""] if found else math.nan
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def format_duration(seconds: float) -> str:
    """The shortest spelling that `parse_duration` reads back: 90 -> `90s`, 604800 -> `7d`."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.10g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.10g}ms"


def duration(seconds: float | None) -> str:
    """The two largest units: `41s`, `1m12s`, `1h10m`, `3d02h`; `-` for None."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < _MINUTE_S:
        return f"{whole}s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}m{whole % _MINUTE_S:02d}s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}h{whole % _HOUR_S // _MINUTE_S:02d}m"
    return f"{whole // _DAY_S}d{whole % _DAY_S // _HOUR_S:02d}h"


def check_topic(topic: str, remedy: str) -> str:
    """*topic*, if queues and exchanges can be named for it.

    Args:
        topic: The name, any text.
        remedy: What to do if not, for the error.

    Raises:
        ConfigError: they cannot.
    """
    if not isinstance(topic, str):
        raise ConfigError(f"topic {topic!r} is no text; {remedy}")
    if not TOPIC.fullmatch(topic):
        raise ConfigError(
            f"topic {topic[:50]!r} of {len(topic)} characters must be 1 to {LONGEST_TOPIC} of A-Z "
            "a-z 0-9 space and _ . : @ # , / + - because queues and exchanges are named for it; "
            f"{remedy}"
        )
    if is_pattern(topic):
        raise ConfigError(f"topic {topic!r} {PATTERN_SAID}; {remedy}")
    return topic


def is_pattern(name: str) -> bool:
    """Whether a topic exchange would take a binding of that name for one of many names."""
    return "#" in name.split(".")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, else nothing."""
    near = nearest(word, known)
    return "" if near is None else f"; did you mean {near}?"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that *word* may be a misspelling of."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def check_queues(topic: str, host: str, remedy: str) -> None:
    """Refuse a topic and a host that no queue can be named for together.

    Raises:
        ConfigError: they make a name that no broker takes.
    """
    name = f"{topic}.{host}"
    if len(name) > LONGEST_QUEUE:
        raise ConfigError(
            f"queue {name!r} would have {len(name)} characters, and a broker takes "
            f"{LONGEST_QUEUE}: {remedy}"
        )


def parse_text(value: object) -> str:
    """Text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise ConfigError(f"{value!r} is not a text; leave the setting out for its default")


def parse_words(value: object) -> str:
    """Words separated by commas, or a list of them in a file; none is allowed."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = ",".join(value)
    return "" if value == "" else parse_text(value)


def parse_word(value: object) -> str:
    """One word, in any case."""
    return parse_text(value).lower()


def words_in(text: str) -> tuple[str, ...]:
    """The words of a setting that holds several."""
    return tuple(word for part in text.split(",") if (word := part.strip()))


def parse_optional_name(value: object) -> str | None:
    """A name; empty for none."""
    return None if value == "" else parse_text(value)


def parse_optional_duration(value: Any) -> float | None:
    """Seconds; empty for none."""
    return None if value == "" else parse_duration(value)


def parse_count(value: object) -> int:
    """A whole number, also as text; whether it may be 0 or less is judged with the others."""
    if isinstance(value, str):
        digits = value.strip()
        if not _COUNT.fullmatch(digits):
            raise ConfigError(
                f"{value!r} is not a whole number; write digits alone, without a unit: "
                "64 MiB are 67108864"
            )
        if len(digits) > _LONGEST_COUNT:  # Python does not even read 5,000 of them
            raise ConfigError(f"{_shortened(digits)} must be below 2^53")
        value = int(digits)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a whole number")
    if abs(value) >= 1 << 53:
        raise ConfigError(f"{_shortened(str(value))} must be below 2^53")
    return value


def _shortened(digits: str) -> str:
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}..."


def parse_truth(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUTH:
        return _TRUTH[value.strip().lower()]
    raise ConfigError(f"{value!r} is neither true nor false")
