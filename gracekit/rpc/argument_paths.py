"""The id of a resource: what can be one, and the path to it in the arguments of a request.

The first part of a path, such as `instance.uuid`, is the name of an argument,
each further one a key of a mapping or else an attribute. Paths are read, and checked against types.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Integral
from types import FunctionType, UnionType
from typing import Any, Final
from uuid import UUID

from gracekit.config.values import did_you_mean
from gracekit.errors import DeclarationError, InvalidArgumentsError
from gracekit.rpc.failures import words_of

Source = str | Callable[[Mapping[str, Any]], object]
"""Where the id of a resource is: an argument, a path, or a function of all arguments."""

LONGEST_RESOURCE: Final = 255
"""Most characters of a resource's id, as ids are kept for as long as the store exists."""
RESOURCE_ID: Final = (
    f"text or a whole number of 1 to {LONGEST_RESOURCE} characters, none of them NUL,"
)


def resource_id_of(value: object) -> str | None:
    """The id of a resource as text; None if *value* cannot be one.

    Each id has one spelling: `1` and `1.0` would be two resources, each with a lease of its own.
    """
    match value:
        case bool():
            return None
        case str():
            text = str.__str__(value)
        case UUID():
            text = str(value)
        case Integral() if int(value).bit_length() < 4 * LONGEST_RESOURCE:  # else too long to write
            text = str(int(value))
        case Decimal() if value.as_tuple().exponent == 0:  # the whole number of a database
            return resource_id_of(int(value))
        case enum.Enum():  # it is sent as its value
            return resource_id_of(value.value)
        case _:
            return None
    is_id = 0 < len(text) <= LONGEST_RESOURCE and "\0" not in text
    # A lone surrogate is half a character, which no store takes.
    is_whole = text.isascii() or text == text.encode(errors="replace").decode()
    return text if is_id and is_whole else None


def need_resource_id(value: object, kind: str = "resource") -> str:
    """As `resource_id_of`.

    Raises:
        InvalidArgumentsError: *value* cannot be the id of a *kind*.
    """
    if (name := resource_id_of(value)) is None:
        raise InvalidArgumentsError(
            f"the id of a {kind} is {RESOURCE_ID} or a UUID, and not {words_of(value)[:100]}"
        )
    return name


def value_of(source: Source, args: Mapping[str, Any]) -> Any:
    """The value of *source* in *args*; None if a part of the path is missing.

    Raises:
        Exception: what the function, or a property on the path, raises.
    """
    value: Any = args
    for part in source.split(".") if isinstance(source, str) else ():
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value if isinstance(source, str) else source(args)


def check_path(name: str, path: Source, handler: Callable[..., Any]) -> None:
    """Check the *path* of the method *name* against the annotations of its *handler*.

    Raises:
        DeclarationError: a part is no public name, or the type before it has no such attribute.
    """
    argument, *parts = path.split(".") if isinstance(path, str) else [""]
    hint = (_hints(handler) or {}).get(argument)
    for part in parts:
        if not part.isidentifier() or part.startswith("_"):
            raise DeclarationError(
                f"{name}: resource path {path!r}: {part!r} is no public name; give a function"
            )
        is_union = typing.get_origin(hint) in {typing.Union, UnionType}
        types = [_members(one) for one in (typing.get_args(hint) if is_union else [hint])]
        known = {word: of for members in types for word, of in (members or {}).items()}
        if None not in types and part not in known:
            raise DeclarationError(
                f"{name}: resource path {path!r}: {getattr(hint, '__name__', hint)} has no {part!r}"
                f"{did_you_mean(part, [word for word in known if word[0] != '_'])}"
            )
        hint = known.get(part)


def _members(hint: object) -> dict[str, Any] | None:
    """What objects of a type have, by name, each with its type if known; None if nobody knows."""
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or kind in {object, Any} or hasattr(kind, "__getattr__"):
        return None
    hints = _hints(kind)
    if hints is None or (issubclass(kind, Mapping) and not typing.is_typeddict(kind)):
        return None
    # Attributes without an annotation or value in the class are set in its methods.
    functions = [f for k in kind.__mro__ for f in vars(k).values() if isinstance(f, FunctionType)]
    named = [name for function in functions for name in function.__code__.co_names]
    return {**dict.fromkeys([*dir(kind), *named]), **hints}


def _hints(annotated: Any) -> dict[str, Any] | None:
    try:
        return typing.get_type_hints(annotated)
    except Exception:  # noqa: BLE001 - of names that exist for a type checker only
        return None
