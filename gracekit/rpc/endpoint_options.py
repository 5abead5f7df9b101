"""The options of oslo endpoints: their shape, and what a decorator hides of a method.

`oslo_adapter` uses it; this module does not need oslo.messaging.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any, Final

from gracekit.config.values import did_you_mean
from gracekit.errors import ConfigError, DeclarationError
from gracekit.rpc.method_options import MethodOptions, options_from

HOOKS: Final = ("probe", "errored")
_PLACE: Final = ("namespace", "version")
KNOWN: Final = (
    *(name for name in inspect.signature(options_from).parameters if name not in _PLACE),
    *HOOKS,
)
"""The options of a method of an endpoint. Its target says namespace and version."""

_AS: Final = "options={'create': {'on_interrupt': 'retry'}}"

Options = Mapping[str, Mapping[str, Any]]


def check_shape(options: object) -> None:
    """Check that *options* are mappings by the names of methods.

    Raises:
        DeclarationError: they are not; the message shows what they should be.
    """
    if not isinstance(options, Mapping):
        raise DeclarationError(
            f"options must be a mapping, as {_AS}, and not a {type(options).__name__}"
        )
    for name, given in options.items():
        if not isinstance(name, str):
            raise DeclarationError(f"options name {name!r}: write the name of a method, as {_AS}")
        if not isinstance(given, Mapping):
            raise DeclarationError(f"options[{name!r}]={given!r} must be a mapping, as {_AS}")


def check_names(options: Options, served: Collection[str]) -> None:
    """Check that each method in *options* is *served*.

    Raises:
        DeclarationError: one is not.
    """
    for name in options:
        if name not in served:
            raise DeclarationError(
                f"options[{name!r}]: no endpoint serves it{did_you_mean(name, served)}"
            )


def read_options(name: str, given: Mapping[Any, Any], place: Mapping[str, Any]) -> MethodOptions:
    """The options *given* for the method *name*, which is served at *place*.

    Raises:
        DeclarationError: one is unknown or wrong.
    """
    for option, value in given.items():
        if option not in KNOWN:
            hint = did_you_mean(option, KNOWN) if isinstance(option, str) else ""
            raise DeclarationError(f"{name}: unknown option {option!r}{hint}")
        if option in HOOKS and not callable(value):
            raise DeclarationError(f"{name}: {option}={value!r} is no function")
    policy = {option: value for option, value in given.items() if option not in HOOKS}
    try:
        return options_from(**policy, **place)
    except ConfigError as error:
        raise DeclarationError(f"{name}: {error}") from None


def check_hidden(name: str, function: Callable[..., Any], argument: str) -> None:
    """Check the resource's *argument* where a decorator hides the arguments of a method.

    If the method beneath cannot be found, nothing is known and nothing is refused.

    Raises:
        DeclarationError: the method beneath has no such argument.
    """
    beneath = next(_beneath(name, function), None)
    if beneath is None:
        return
    parameters = inspect.signature(beneath).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    if argument not in parameters:
        raise DeclarationError(
            f"{name}: resource argument {argument!r} is not in ({', '.join(parameters)}), which a "
            f"decorator hides{did_you_mean(argument, parameters)}"
        )


def _beneath(name: str, function: Callable[..., Any]) -> Iterator[FunctionType]:
    """The functions of that *name* that *function* closes over, as a decorator does."""
    outer = getattr(function, "__func__", function)
    for cell in getattr(outer, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # it is empty
            continue
        if isinstance(held, FunctionType) and held.__name__ == name:
            yield from _beneath(name, held)
            yield held
