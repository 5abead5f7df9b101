"""Typed arguments and results: plain data is converted to what a method's annotations say.

Plain data is what travels, what the journal keeps, and what content hashes are made of. A handler
and its hooks get the converted values. An annotation that msgspec cannot check is left out, once
for each method: its values stay plain data.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec import inspect as shapes

from gracekit.callables import innermost
from gracekit.rpc.failures import words_of
from gracekit.telemetry.safe_text import masked

RESULT: Final = "return"  # among the names of parameters, as in `__annotations__`
_LONGEST: Final = 500
_PLACE: Final = re.compile(r"(?s)(.*) - at (?:`(key)` in )?`\$\.?(.*)`")
_VALUE: Final = re.compile(r"(?s)Invalid (?:enum )?value .*")  # which it quotes
_ANYTHING: Final = (Any, object, inspect.Parameter.empty)
_CUSTOM: Final = (shapes.CustomType, shapes.RawType, shapes.ExtType)
_KEPT: Final = (shapes.StrType, shapes.IntType, shapes.BoolType, shapes.NoneType)
_BINARY: Final = (shapes.BytesType, shapes.ByteArrayType, shapes.MemoryViewType)


class Types(msgspec.Struct, frozen=True, kw_only=True):
    """The annotations of a method that are checked, and those that are not.

    Attributes:
        arguments: Has a field for each parameter that is checked; None if none is.
        changing: Those of its fields whose values are converted, and not only checked.
        result: Has the field `result`; None if the result is not converted.
        unresolved: Parameters (and `return`) whose annotation has an unknown name, with the reason.
        unsupported: Those whose annotation msgspec cannot check, with the reason.
    """

    arguments: type[msgspec.Struct] | None = None
    changing: tuple[str, ...] = ()
    result: type[msgspec.Struct] | None = None
    unresolved: Mapping[str, str] = {}
    unsupported: Mapping[str, str] = {}

    @property
    def digest(self) -> str:
        """Differs between versions of a service whose types of arguments differ."""
        if self.arguments is None:
            return ""
        try:
            schema = msgspec.json.schema(
                self.arguments, schema_hook=methodcaller("model_json_schema")
            )
            text = msgspec.json.encode(schema, order="deterministic", enc_hook=str)
        except Exception:  # noqa: BLE001 - of a default that JSON cannot have, or of a model
            text = repr(self.arguments.__annotations__).encode()
        return hashlib.blake2b(text, digest_size=6).hexdigest()


UNCHECKED: Final = Types()


def types_of(handler: Callable[..., Any], signature: inspect.Signature) -> Types:
    """The types in the annotations of *handler*, whose arguments are those of *signature*."""
    arguments: list[tuple[str, Any, Any]] = []
    result, unresolved, unsupported = None, dict[str, str](), dict[str, str]()
    names = getattr(innermost(handler), "__globals__", {})
    annotations = {
        name: (parameter.annotation, parameter.default)
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    returned = inspect.signature(handler).return_annotation
    for name, (annotation, default) in {**annotations, RESULT: (returned, ...)}.items():
        try:
            holder = SimpleNamespace(__annotations__={name: annotation})
            hint = typing.get_type_hints(holder, names, include_extras=True)[name]
        except Exception as error:  # noqa: BLE001 - an annotation may run any code
            unresolved[name] = words_of(error)
            continue
        if any(hint is one for one in _ANYTHING):
            continue
        if default is None:  # `size: int = None` says that None is a value, too
            hint = hint | None
        if why := _unsupported(hint):
            unsupported[name] = why
        elif name == RESULT:
            result = msgspec.defstruct("Result", [("result", hint)])
        else:
            arguments.append((name, hint, UNSET))
    return Types(
        arguments=msgspec.defstruct("Arguments", arguments) if arguments else None,
        changing=tuple(name for name, hint, _ in arguments if _changes(hint)),
        result=result,
        unresolved=unresolved,
        unsupported=unsupported,
    )


def _changes(hint: Any) -> bool:
    """Whether a value of *hint* differs from the plain data for it."""
    shape = shapes.type_info(hint)
    return not all(isinstance(one, _KEPT) for one in getattr(shape, "types", (shape,)))


def _unsupported(hint: Any) -> str:
    """Why msgspec cannot check values of *hint*; empty if it can."""
    try:
        msgspec.json.Decoder(hint)  # refuses unions that JSON cannot tell apart
        return next(_doubts(shapes.type_info(hint), set(), in_struct=False), "")
    except Exception as error:  # noqa: BLE001 - NameError of a field's type, and others
        return words_of(error)


def _doubts(shape: Any, seen: set[int], *, in_struct: bool) -> Iterator[str]:
    """What in *shape* is no type of plain data; *seen* are ids of shapes, as types may recur."""
    if id(shape) in seen:
        return
    seen.add(id(shape))
    if isinstance(shape, _CUSTOM) and not _is_model(getattr(shape, "cls", None)):
        yield f"{getattr(shape, 'cls', shape)} is no type of plain data"
    elif isinstance(shape, shapes.EnumType) and issubclass(shape.cls, enum.Flag):
        yield f"{shape.cls} has members that combine"
    elif isinstance(shape, _BINARY) and not in_struct:
        # Bytes are sent as the text that they encode. msgspec would read it as base64.
        yield "bytes arrive as text"
    in_struct = in_struct or isinstance(shape, shapes.StructType | shapes.DataclassType)
    for part in shape.__struct_fields__ if isinstance(shape, msgspec.Struct) else ():
        value = getattr(shape, part)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, shapes.Type | shapes.Field):
                yield from _doubts(inner, seen, in_struct=in_struct)


# -- conversion -------------------------------------------------------------------------


class MisfitError(ValueError):
    """Plain data does not fit; the message names the field and what is expected there."""


def typed(
    values: Mapping[str, Any], into: type[msgspec.Struct], changing: tuple[str, ...]
) -> Mapping[str, Any]:
    """*values*, checked by the fields of *into*; those that are *changing* are converted.

    Raises:
        MisfitError: one does not fit.
    """
    try:
        read = msgspec.convert(values, into, strict=True, str_keys=True, dec_hook=_read_model)
    except BaseException as error:  # noqa: BLE001 - SystemExit of a `__post_init__` ends the loop
        raise MisfitError(_words(error, values)) from None
    changed = {k: getattr(read, k) for k in changing if k in values} if changing else {}
    return {**values, **changed} if changed else values


def _words(error: BaseException, sent: Mapping[str, Any]) -> str:
    """What does not fit, with the place of it first, and without the values that were *sent*."""
    is_misfit = isinstance(error, msgspec.ValidationError)
    text = str(error) if is_misfit else f"to read it raised {words_of(error)}"
    said, key, field = found.groups() if (found := _PLACE.fullmatch(text)) else (text, None, "")
    said = _VALUE.sub("expected one of its values", said) if is_misfit else said
    if len(said) > _LONGEST:  # cut, a value in it would not be found
        said = f"what is wrong takes {len(said)} characters to say"
    said = masked(said, sent).replace("`", "").replace("Expected", "expected", 1)
    return f"{'a key of ' if key else ''}{field}: {said}" if field else said


# -- models of pydantic, which is not imported here -----------------------------------------


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and callable(getattr(kind, "model_validate_json", None))


def _read_model(kind: Any, value: Any) -> Any:
    """*value* as a model. From JSON, where a strict model takes text for a datetime or a UUID."""
    try:
        return kind.model_validate_json(msgspec.json.encode(value), strict=True)
    except ValueError as error:
        wrong = error.errors(include_url=False) if hasattr(error, "errors") else []
        said = [": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in wrong]
        raise ValueError("; ".join(said) or words_of(error)) from None
