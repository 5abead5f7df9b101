"""Text that is safe to show: escaped, shortened, and without values from requests."""

from __future__ import annotations

import enum
import math
import re
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from gracekit.config.urls import redact_url

LONGEST_TEXT: Final = 256
LONGEST_SENTENCE: Final = 1000
LONGEST_SHOWN: Final = 255
"""Most characters of what is shown of a caller's context, of each key."""
LONGEST_LIST: Final = 100
INDENT: Final = "  "
SHORTEST_MASKED: Final = 4
"""Characters of the shortest text to mask. Shorter ones are not secret, and occur in many words."""
MOST_MASKED: Final = 32
MOST_COMPARED: Final = 1000
"""Texts of a request that are searched for in an error."""
LONGEST_NAME: Final = 40
LONGEST_WRITTEN: Final = 16_384
"""Characters of a value, see `is_long`, that is still written out to be shown."""
MOST_HOLDERS: Final = 30_000
_TEXTS: Final = (str, bytes, bytearray)
_MAPPINGS: Final = (dict, MappingProxyType, UserDict)
_ROWS: Final = (list, tuple)
_HOLDERS: Final[tuple[type[Collection[Any]], ...]] = (
    *(*_ROWS, dict, set, frozenset, deque, array),
    *map(type, ({}.keys(), {}.values(), {}.items())),
    *(MappingProxyType, UserDict, UserList),  # the last two take longer to ask about
)
_OTHER: Final = 8
"""Characters of any other object, such as a date or a UUID; it takes three at least."""
_SHORT: Final = frozenset({int, float, bool, type(None)})
_SEEN: Final = _SHORT | {str}
_WITHHELD: Final = "<withheld: it repeats too much of the request>"
_PLAIN: Final = re.compile(r"[^\s\"'=]+")


class Sentence(str):
    """A message of gracekit itself, cut later than wire text, because its end names the remedy."""

    __slots__ = ()


def is_long(value: object) -> bool:
    """Whether *value* surely takes more than `LONGEST_WRITTEN` characters to write."""
    left, holders = counted(value, LONGEST_WRITTEN)
    return left < 0 or holders > MOST_HOLDERS


def counted(value: object, most: int) -> tuple[int, int]:
    """How many of *most* characters are left at most when *value* is written, and its containers.

    To write out what an application hands over may take seconds, for which the loop would stand.
    It looks into the usual containers, dataclasses, Structs and exceptions. A member of a
    container takes two characters at least. It counts no further than *most*, nor than
    `MOST_HOLDERS` containers; one that holds itself has no end.
    """
    waiting, holders = [value], 0
    while waiting and most >= 0 and holders <= MOST_HOLDERS:
        part = waiting.pop()
        if isinstance(part, _TEXTS):
            most -= len(part)
        elif isinstance(part, _HOLDERS):
            most -= 2 + 2 * len(part)
            holders += 1
            if most >= 0 and not _SHORT.issuperset(map(type, part)):
                most -= sum([len(one) for one in part if type(one) is str])
                waiting += [one for one in part if type(one) not in _SEEN]
            if most >= 0 and not isinstance(part, _ROWS) and isinstance(part, _MAPPINGS):
                waiting.append(list(part.values()))
        elif isinstance(part, BaseException):
            # By the descriptor of the class: an exception may have code of its own for it.
            waiting.append(BaseException.args.__get__(part))  # type: ignore[attr-defined]
        elif is_dataclass(part):
            waiting.append(getattr(part, "__dict__", None))
        elif fields := getattr(type(part), "__struct_fields__", None):
            waiting.append([getattr(part, name) for name in fields])
        else:
            most -= _OTHER
    return most, holders


def clean(value: Any) -> Any:
    """*value* for a log: numbers and None unchanged, text escaped and cut, others as text."""
    match value:
        case enum.Enum():
            return clean(value.value)
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case list() | set() | frozenset():
            return [
                _shown(item) if isinstance(item, _HOLDERS) else clean(item)
                for item in islice(value, LONGEST_LIST)
            ]
        case tuple() if not is_long(value):  # such as (kind, id) of a resource
            return clean(":".join(map(str, value)))
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Sentence):
        return Sentence(escape(value, longest=LONGEST_SENTENCE))
    if not isinstance(value, str) and is_long(value):
        return f"<{type(value).__name__}, too long to be shown>"
    return escape(str(value))


def escape(text: str, *, longest: int = LONGEST_TEXT) -> str:
    """*text* on one line, cut at *longest*; control, bidi and invisible characters escaped."""
    cut = text[:longest]
    if "://" in cut and "@" in text:
        cut = redact_url(text[: 2 * longest])[:longest]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return cut if len(text) <= longest else cut + "…"


def shown_context(context: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str] | None:
    """What *context* has under *keys*, to be shown anywhere; None for nothing.

    Text, numbers and truths as printable text, each cut; anything else is left out.
    """
    return {key: text for key in keys if (text := _shown_scalar(context.get(key)))} or None


def _shown_scalar(value: object) -> str:
    is_scalar = isinstance(value, str | int | float)
    return escape(str(value)[:LONGEST_SHOWN])[:LONGEST_SHOWN] if is_scalar else ""


def context_words(shown: Mapping[str, str] | None) -> str:
    """`request_id=req-1 user_id=ann`; empty for nothing."""
    return " ".join(f"{key}={word(text)}" for key, text in shown.items()) if shown else ""


def masked(text: str, *sent: object, resource: tuple[str, str] | None = None, who: str = "") -> str:
    """*text*, in which `<name>` replaces each value that the request sent under that name.

    For error messages of an application, because arguments and contexts are secrets of the caller.
    Values below 4 characters are not replaced, nor those that the application has changed. If
    *text* contains very many values, all of it is withheld.

    Args:
        text: An error's message, for example.
        sent: Arguments and context of the request, as plain JSON data; if the row is damaged, any.
        resource: (kind, id); the id is shown anyway.
        who: What gracekit itself calls the task, as in `task ID (METHOD)`. Where *text* has it, it
            stays, because a log shows id and method in any case.
    """
    found: dict[str, str] = {}
    # A form is searched for only if its first characters occur in the text: a request can hold
    # tens of thousands of texts, and an error repeats few of them.
    begins = {text[at : at + SHORTEST_MASKED] for at in range(len(text) - SHORTEST_MASKED + 1)}
    compared = 0
    for name, form in _forms(sent, resource[1] if resource else ""):
        if form in found:
            found[form] = name
        elif form[:SHORTEST_MASKED] in begins:
            compared += 1
            if form in text:
                found[form] = name
            if len(found) > MOST_MASKED or compared > MOST_COMPARED:
                return _WITHHELD
    return _without(text, found, who) if found else text


def _forms(sent: Iterable[object], known: str) -> Iterator[tuple[str, str]]:
    """Name and form of each text that an error may contain: the text itself, and as in its repr."""
    for given in sent:
        for name, value in (given if isinstance(given, Mapping) else {"request": given}).items():
            for part in _texts(value):
                if part != known and len(part) >= SHORTEST_MASKED:
                    yield str(name), part
                    yield str(name), repr(part)[1:-1]


def _without(text: str, found: Mapping[str, str], who: str) -> str:
    """*text*, in which a name replaces each stretch that is covered by forms in *found*.

    A form inside of *who* is not replaced; one that reaches beyond it is.
    """
    kept = list(_spans(text, who, "")) if who else []
    spans = [
        span
        for form, name in found.items()
        for span in _spans(text, form, name)
        if not any(begin <= span[0] and span[1] <= end for begin, end, _ in kept)
    ]
    spans.sort(key=lambda span: (span[0], -span[1]))
    pieces, shown_to = [], 0
    for begin, end, name in spans:
        if begin >= shown_to:
            pieces += [text[shown_to:begin], f"<{name[:LONGEST_NAME]}>"]
        shown_to = max(shown_to, end)
    return "".join([*pieces, text[shown_to:]])


def _spans(text: str, form: str, name: str) -> Iterator[tuple[int, int, str]]:
    at = text.find(form)
    while at >= 0:
        yield at, at + len(form), name
        at = text.find(form, at + len(form))


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain JSON data, but not the keys."""
    match value:
        case str():
            yield value
        case Mapping():
            for item in value.values():
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)


def word(value: Any) -> str:
    """One value of a text line, quoted if it has spaces, quotes or an equals sign."""
    if isinstance(value, list):
        return ",".join(word(item) for item in value) or "-"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def escaped_lines(text: str) -> list[str]:
    """The lines of a traceback, each escaped."""
    return [escape(line, longest=2048) for line in text.splitlines()]
