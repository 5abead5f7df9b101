"""Writes YAML with comments, as far as manifests need it.

With a YAML package every service would have one more dependency, for a single command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from gracekit.errors import ConfigError

_INDENT: Final = "  "
# Texts that need no quotes. YAML would read `yes`, `null`, `1e3`, `- x` and `a: b` as other types.
_BARE: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?<![.-])")
_OTHER_TYPES: Final = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


class Noted(msgspec.Struct, frozen=True):
    """A value with a comment above it.

    Attributes:
        value: A value of a manifest.
        note: Lines of the comment, without `#`.
    """

    value: object
    note: str


def yaml_text(value: Mapping[str, object]) -> str:
    """The text of one document.

    Raises:
        ConfigError: a text has characters that are not printable.
        TypeError: a value is no str, int, bool, list, tuple or mapping.
    """
    return "".join(f"{line}\n" for line in _mapping(value, ""))


def comment(text: str, indent: str = "") -> list[str]:
    """*text* as comment lines."""
    return [f"{indent}# {line}".rstrip() for line in text.splitlines()]


def _mapping(entries: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, value in entries.items():
        if isinstance(value, Noted):
            yield from comment(value.note, indent)
        yield from _entry(f"{indent}{_scalar(key)}:", _bare(value), indent + _INDENT)


def _list(items: Sequence[object], indent: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, Noted):
            yield from comment(item.note, indent)
        inner = _bare(item)
        if isinstance(inner, Mapping) and inner:
            first, *rest = _mapping(inner, indent + _INDENT)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield from _entry(f"{indent}-", inner, indent + _INDENT)


def _entry(start: str, value: object, indent: str) -> Iterator[str]:
    """*start* with the value after it, on the same line or below."""
    match value:
        case Mapping() if value:
            yield start
            yield from _mapping(value, indent)
        case list() | tuple() if value and not all(isinstance(item, str) for item in value):
            yield start
            yield from _list(value, indent)
        case list() | tuple():
            yield f"{start} [{', '.join(map(_scalar, value))}]"
        case Mapping():
            yield f"{start} {{}}"
        case _:
            yield f"{start} {_scalar(value)}"


def _bare(value: object) -> object:
    return value.value if isinstance(value, Noted) else value


def _scalar(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case str() if _BARE.fullmatch(value) and value.lower() not in _OTHER_TYPES:
            return value
        case str() if value.isprintable():
            return json.dumps(value, ensure_ascii=False)  # a JSON string is valid YAML
        case str():
            raise ConfigError(f"{value!r} has characters that cannot stand in a manifest")
    raise TypeError(f"{value!r} has a type that a manifest cannot hold")
