"""Single values: durations, names, numbers are parsed and formatted; and the problems of settings.

If a setting could not be read, the rules that compare it with others are skipped. Otherwise they
would check its default, and complain about a value that the user never wrote.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

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
_OF_BYTES: Final = re.compile(r"[0-9]\s*(?:[kKMGT]i?B|[KMGT]i?)$")
_LONGEST_COUNT: Final = 18
_SHOWN_DIGITS: Final = 30
NAME_CHARACTERS: Final = "A-Za-z0-9_.:@#,/+ -"
"""Characters of names on a broker, for a character class of a regular expression."""
LEAST_BODY_BYTES: Final = 1024
"""Least limit for bodies: a request with one short argument takes about 400 bytes, and the context
of an oslo client more."""
LONGEST_TOPIC: Final = 120
"""Most characters of a topic, as its exchange `<topic>_fanout` may have 127."""
TOPIC: Final = re.compile(rf"[{NAME_CHARACTERS}]{{1,{LONGEST_TOPIC}}}")
LONGEST_QUEUE: Final = 255
"""Most characters of a queue's name on a broker."""
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
    shown = repr(value)[:100]  # it may come from a client of the ops topic, and be long
    if not 0 <= seconds <= _CENTURY_S:
        what = "longer than a century" if seconds > _CENTURY_S else "not a duration"
        raise ConfigError(f"{shown} is {what}; write 25, 25s, 500ms, 5m, 1h or 7d")
    return float(seconds)


def _seconds_in(value: object) -> float:
    """The number of seconds, unchecked; NaN if it is no duration."""
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
    """A duration for display, in its two largest units: `41s`, `1m12s`, `3d02h`; `-` for None."""
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
    """Check that queues and exchanges can be named for *topic*; return it.

    Args:
        topic: Any text.
        remedy: What the user should do, for the error.

    Raises:
        ConfigError: they cannot, or it is a pattern.
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
    """Whether a topic exchange would treat a binding of that name as a pattern."""
    return "#" in name.split(".")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word; empty if none is near."""
    near = nearest(word, known)
    return "" if near is None else f"; did you mean {near}?"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that *word* may be a misspelling of; None if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def check_queues(topic: str, host: str, remedy: str) -> None:
    """Check that the queue `<topic>.<host>` is not too long.

    Raises:
        ConfigError: the name is longer than a broker permits.
    """
    name = f"{topic}.{host}"
    if len(name) > LONGEST_QUEUE:
        raise ConfigError(
            f"queue {name!r} would have {len(name)} characters, and a broker takes "
            f"{LONGEST_QUEUE}: {remedy}"
        )


def parse_text(value: object) -> str:
    """Check for a text that is not empty."""
    if isinstance(value, str) and value:
        return value
    what = "empty" if value == "" else "not a text"
    raise ConfigError(f"{value!r} is {what}; leave the setting out for its default")


def parse_words(value: object) -> str:
    """Parse words separated by commas, or a list from a file; may be empty."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = ",".join(value)
    return "" if value == "" else parse_text(value)


def parse_word(value: object) -> str:
    """Parse one word; return it in lower case."""
    return parse_text(value).lower()


def words_in(text: str) -> tuple[str, ...]:
    """Split a text of words that are separated by commas."""
    return tuple(word for part in text.split(",") if (word := part.strip()))


def parse_optional_name(value: object) -> str | None:
    """Parse a name; an empty text becomes None."""
    return None if value == "" else parse_text(value)


def parse_optional_duration(value: Any) -> float | None:
    """Parse a duration into seconds; an empty text becomes None."""
    return None if value == "" else parse_duration(value)


def parse_optional_count(value: object) -> int | None:
    """Parse a whole number; an empty text becomes None."""
    return None if value == "" else parse_count(value)


def parse_count(value: object) -> int:
    """Parse a whole number or its text; whether it may be 0 or negative is checked elsewhere."""
    if isinstance(value, str):
        digits = value.strip()
        if not _COUNT.fullmatch(digits):
            unit = ", without a unit: 64 MiB are 67108864" if _OF_BYTES.search(digits) else ""
            raise ConfigError(f"{value!r} is not a whole number; write digits alone{unit}")
        if len(digits) > _LONGEST_COUNT:  # Python refuses to parse 5,000 digits
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
    """Parse true or false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUTH:
        return _TRUTH[value.strip().lower()]
    raise ConfigError(f"{value!r} is neither true nor false")


class Problem(NamedTuple):
    """One problem.

    Attributes:
        text: The values, the rule and the remedy, as one sentence.
        about: The fields of `Settings` whose values cause it.
    """

    text: str
    about: frozenset[str]


def problem(text: str, *about: str) -> Problem:
    """A Problem of the fields *about*."""
    return Problem(text, frozenset(about))
